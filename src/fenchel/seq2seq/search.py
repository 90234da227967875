"""Search for probable strings of a model: beam search, enumeration of the support, and forced decoding.

A model is any object with the methods of ``Stepper``: a ``Seq2Seq``, an ``Ensemble``, or another class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor

from fenchel._checks import check_count, check_kind, check_number
from fenchel.seq2seq.vocabulary import STOP


class Stepper(Protocol):
    """A distribution over strings, computed symbol by symbol. States have one row per hypothesis.

    A stepper may also have a method ``coverage(state, row)``: the attention that each part of the source of a row has
    received so far, (J,), which a search returns with its hypotheses.

    Example:
        A distribution that does not depend on the source: "1" with probability ¾, "2" with ¼.

        >>> class Coin:
        ...     begin = 3
        ...     def start(self, sources):
        ...         return torch.zeros(len(sources), dtype=torch.long)
        ...     def step(self, tokens, state):
        ...         return torch.tensor([[0, 0.75, 0.25], [1, 0, 0]])[state], state + 1
        ...     def reorder(self, state, index):
        ...         return state[index]
        >>> (found,) = beam_search(Coin(), [None])
        >>> [(each.tokens, round(each.probability, 2)) for each in found.hypotheses]
        [((1,), 0.75), ((2,), 0.25)]
    """

    @property
    def begin(self) -> int:
        """The first input, before the first symbol."""

    def start(self, sequences: Any, /) -> Any:
        """The states of sources before the first step, one row per source."""

    def step(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Any]:
        """Probabilities (N, V) of the next symbol after tokens (N,), and the new states. ``STOP`` is symbol 0."""

    def reorder(self, state: Any, index: Tensor, /) -> Any:
        """Select rows of the states by index."""


@dataclass(frozen=True)
class Hypothesis:
    """A string: the numbers of its symbols, without the end, and its probability.

    Args:
        tokens: the symbols.
        log_probability: of the string and its end, in nats.
        score: what it is ranked by: ``log_probability``, unless there is a length penalty.
        finished: False if it was cut at ``max_length``; then the probability is that of all strings with this prefix.
        coverage: (J,), the attention that each symbol of the source has received in all steps, that of the end
            included; None for models without a method ``coverage``.

    Example:
        >>> Hypothesis((2, 3), math.log(0.5), math.log(0.5)).probability
        0.5
    """

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    finished: bool = True
    coverage: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def probability(self) -> float:
        """The probability of the string and its end."""
        return math.exp(self.log_probability)


@dataclass(frozen=True)
class Beam:
    """The result of a search.

    Args:
        hypotheses: by decreasing score; those of equal score in the order in which they were found. If the search was
            not exact, strings whose end was not among the ``beam_size`` best continuations are left out, unless no
            other string ended; so the first may score less than a string that was found (then ``optimal`` is False).
        exact: whether all strings of non-zero probability were found: none was pruned or cut.
        optimal: whether no string that was pruned, cut or left out can have a higher score than the first hypothesis.
            True if ``exact`` is; it may be true of dense models too. With a length penalty it holds for strings up to
            ``max_length``: a longer one may have a higher score.
        seen: the number of finished strings that were found, returned or not.
        mass: the probability of all of these strings.
        tree: with ``keep_tree=True``, the probabilities of all prefixes that were continued.

    Example:
        >>> found = Beam((Hypothesis((2,), 0.0, 0.0),), exact=True, optimal=True, seen=1, mass=1.0)
        >>> found.best.tokens
        (2,)
    """

    hypotheses: tuple[Hypothesis, ...]
    exact: bool
    optimal: bool
    seen: int
    mass: float
    tree: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False)

    @property
    def best(self) -> Hypothesis:
        """The first hypothesis."""
        return self.hypotheses[0]


@torch.no_grad()
def beam_search(
    stepper: Stepper,
    sources: Sequence[Any],
    *,
    beam_size: int = 5,
    n_best: int | None = None,
    max_length: int = 100,
    length_penalty: float = 0.0,
    keep_tree: bool = False,
) -> list[Beam]:
    """The most probable strings of every source, found by beam search.

    In every step the ``beam_size`` most probable prefixes are continued. If the number of prefixes with non-zero
    probability never exceeds the beam size, all strings of the model were found: the search is ``exact``. If it is not,
    a string ends only if its end is among the ``beam_size`` most probable continuations, so that a beam size of 1 is
    greedy search. (Otherwise models such as softmax, which give every end some probability, would return their shortest
    strings.)

    A search stops when no prefix is left, or, once a prefix was pruned, when no remaining prefix can be among the best.

    Args:
        stepper: the model.
        sources: the sources, in the form that ``stepper.start`` takes.
        beam_size: the number of prefixes that are continued.
        n_best: the number of hypotheses that are returned; the beam size by default.
        max_length: the largest number of symbols of a string, without its end. Longer prefixes are cut.
        length_penalty: λ in the score log p / ((5 + length) / 6)^λ of Wu et al. (2016); the length counts the end.
        keep_tree: whether to return all prefixes, for a drawing.

    Returns:
        One ``Beam`` per source, with at least one hypothesis: if no string ended, the best prefix that was cut.

    Example:
        >>> import torch
        >>> class Coin:  # symbol 1 twice, then the end or symbol 2
        ...     begin = 3
        ...     def start(self, sources): return torch.zeros(len(sources), dtype=torch.long)
        ...     def step(self, tokens, state):
        ...         rows = torch.tensor([[0, 1, 0], [0, 1.0, 0], [0.75, 0, 0.25], [1, 0, 0]])
        ...         return rows[state], state + 1
        ...     def reorder(self, state, index): return state[index]
        >>> (found,) = beam_search(Coin(), [None])
        >>> [(each.tokens, round(each.probability, 2)) for each in found.hypotheses], found.exact
        ([((1, 1), 0.75), ((1, 1, 2), 0.25)], True)
    """
    _check_stepper(stepper)
    check_kind(sources, "sources", Sequence, what="a list of sources")
    beam_size = check_count(beam_size, "beam_size")
    n_best = beam_size if n_best is None else check_count(n_best, "n_best")
    max_length = check_count(max_length, "max_length", 0)
    length_penalty = check_number(length_penalty, "length_penalty", 0, ends="[)")
    if not len(sources):
        return []
    rows = [_Row(n_best, max_length, length_penalty, keep_tree) for _ in sources]
    return _search(stepper, sources, beam_size, max_length, rows)


def _search(
    stepper: Stepper, sources: Sequence[Any], beam_size: int, max_length: int, rows: Sequence[_Row]
) -> list[Beam]:
    live = _Live(
        torch.arange(len(rows), device="cpu"),
        torch.zeros(len(rows), dtype=torch.float64, device="cpu"),
        [()] * len(rows),
    )
    tokens = torch.full((len(rows),), stepper.begin, device="cpu")
    state = stepper.start(sources)
    for length in range(max_length + 1):
        probabilities, state = _step(stepper, tokens, state)
        parents, tokens, scores = _continued(probabilities, live, beam_size, rows, _Coverage(stepper, state))
        if length == max_length:
            live.cut(parents, tokens, scores, rows, _Coverage(stepper, state))
            break
        live, kept = _next(parents, tokens, scores, live, rows)
        if not len(kept):
            break
        parents, tokens = parents[kept], tokens[kept]
        if len(parents) != len(probabilities) or bool((parents != torch.arange(len(parents), device="cpu")).any()):
            state = stepper.reorder(state, parents)
    return [row.result() for row in rows]


@torch.no_grad()
def enumerate_support(
    stepper: Stepper, sources: Sequence[Any], *, beam_size: int = 100, max_length: int = 100, keep_tree: bool = False
) -> list[Beam]:
    """All strings of non-zero probability of every source, the most probable first, for models that have few.

    This is a beam search that returns all strings that ended. If ``exact`` is False, there are more or longer strings.

    Args:
        stepper: the model.
        sources: the sources, in the form that ``stepper.start`` takes.
        beam_size: the number of prefixes that are continued.
        max_length: the largest number of symbols of a string, without its end.
        keep_tree: whether to return all prefixes.

    Example:
        >>> from fenchel.seq2seq import Recurrent, Vocabulary
        >>> letters = Vocabulary("ab")
        >>> model = Recurrent(letters, letters, embedding=4, hidden=4, layers=1).eval()
        >>> (found,) = enumerate_support(model, ["ab"], max_length=3)
        >>> found.seen == len([each for each in found.hypotheses if each.finished])
        True
    """
    _check_stepper(stepper)
    check_kind(sources, "sources", Sequence, what="a list of sources")
    beam_size, max_length = check_count(beam_size, "beam_size"), check_count(max_length, "max_length", 0)
    rows = [_Row(beam_size * (max_length + 1), max_length, 0.0, keep_tree, all_ends=True) for _ in sources]
    return _search(stepper, sources, beam_size, max_length, rows) if rows else []


class _Coverage:
    """The coverage of a row of the states, on the CPU; None if the model has no method ``coverage``."""

    def __init__(self, stepper: Stepper, state: Any) -> None:
        self.known, self.state = getattr(stepper, "coverage", None), state

    def __call__(self, row: int) -> Tensor | None:
        return None if self.known is None else self.known(self.state, row).cpu()


def _step(stepper: Stepper, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    probabilities, state = stepper.step(tokens, state)
    if bool(probabilities.isnan().any()):
        raise ValueError("the probabilities of the model must not be NaN")
    return probabilities, state


def _logs(probabilities: Tensor) -> Tensor:
    """Logarithms in float64 on the CPU, so that sums over long strings keep their precision."""
    return probabilities.to("cpu", torch.float64).log()


@dataclass(frozen=True)
class _Live:
    """The prefixes that are continued: indices of their sources, log-probabilities and symbols."""

    rows: Tensor
    scores: Tensor
    prefixes: list[tuple[int, ...]]

    def cut(self, parents: Tensor, tokens: Tensor, scores: Tensor, rows: Sequence[_Row], coverage: _Coverage) -> None:
        """Record the prefixes of each source that would exceed ``max_length``."""
        for parent, _, score in zip(parents.tolist(), tokens.tolist(), scores.tolist(), strict=True):
            rows[int(self.rows[parent])].lose(score)
        for number, (prefix, score) in enumerate(zip(self.prefixes, self.scores.tolist(), strict=True)):
            rows[int(self.rows[number])].cut.append((score, prefix, coverage(number)))


def _continued(
    probabilities: Tensor, live: _Live, beam_size: int, rows: Sequence[_Row], coverage: _Coverage
) -> tuple[Tensor, Tensor, Tensor]:
    """The best ``beam_size`` continuations of every source: parents, tokens and log-probabilities, in order.

    Records the strings that ended, and whether their end is among the ``beam_size`` best continuations.
    """
    # One more than are kept and the end, so that the best pruned continuation is known.
    values, tokens = probabilities.topk(min(beam_size + 2, probabilities.shape[1]), sorted=True)
    parents = torch.arange(len(values), device="cpu").repeat_interleave(values.shape[1])
    scores, tokens = (_logs(values) + live.scores.unsqueeze(1)).flatten(), tokens.cpu().flatten()
    possible = scores.isfinite().nonzero().flatten()
    scores, tokens, parents = scores[possible], tokens[possible], parents[possible]
    # By source, then by score; stable, so that equal scores stay in the order of their parents.
    order = scores.argsort(descending=True, stable=True)
    order = order[live.rows[parents[order]].argsort(stable=True)]
    scores, tokens, parents = scores[order], tokens[order], parents[order]
    ends = (tokens == STOP) & (_ranks(live.rows[parents]) < beam_size)
    inside = torch.zeros(len(probabilities), dtype=torch.bool, device="cpu")
    inside[parents[ends]] = True
    ended = _logs(probabilities[:, STOP]) + live.scores
    for number in ended.isfinite().nonzero().flatten().tolist():
        row = rows[int(live.rows[number])]
        row.finish(live.prefixes[number], float(ended[number]), coverage(number), inside=bool(inside[number]))
    going_on = (tokens != STOP).nonzero().flatten()
    scores, tokens, parents = scores[going_on], tokens[going_on], parents[going_on]
    source = live.rows[parents]
    rank = _ranks(source)
    for number in (rank == beam_size).nonzero().flatten().tolist():
        rows[int(source[number])].lose(float(scores[number]))
    kept = rank < beam_size
    return parents[kept], tokens[kept], scores[kept]


def _ranks(source: Tensor) -> Tensor:
    """The rank of each entry among those of its source; entries are sorted by source."""
    if not len(source):
        return source
    counts = torch.bincount(source)
    return torch.arange(len(source), device="cpu") - (counts.cumsum(0) - counts)[source]


def _next(parents: Tensor, tokens: Tensor, scores: Tensor, live: _Live, rows: Sequence[_Row]) -> tuple[_Live, Tensor]:
    """The prefixes that are continued, without those of sources whose search is finished, and their indices."""
    sources = live.rows[parents]
    best = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device="cpu")
    best.scatter_reduce_(0, sources, scores, "amax")
    over = torch.tensor([row.is_over(float(top)) for row, top in zip(rows, best, strict=True)], device="cpu")
    for number in over.nonzero().flatten().tolist():
        rows[number].lose(float(best[number]))
    kept = (~over[sources]).nonzero().flatten()
    prefixes = [
        (*live.prefixes[parent], token)
        for parent, token in zip(parents[kept].tolist(), tokens[kept].tolist(), strict=True)
    ]
    for source, prefix, score in zip(sources[kept].tolist(), prefixes, scores[kept].tolist(), strict=True):
        rows[source].see(prefix, score)
    return _Live(sources[kept], scores[kept], prefixes), kept


class _Row:
    """The search of one source."""

    def __init__(self, n_best: int, max_length: int, penalty: float, keep_tree: bool, all_ends: bool = False) -> None:
        self.n_best, self.max_length, self.penalty, self.all_ends = n_best, max_length, penalty, all_ends
        self.finished: list[Hypothesis] = []
        self.aside: list[Hypothesis] = []
        """Strings whose end was not among the best continuations."""
        self.cut: list[tuple[float, tuple[int, ...], Tensor | None]] = []
        self.lost = -math.inf
        """The largest log-probability of a prefix that was pruned or cut."""
        self.tree: dict[tuple[int, ...], float] | None = {} if keep_tree else None

    def finish(self, prefix: tuple[int, ...], score: float, coverage: Tensor | None, *, inside: bool) -> None:
        """Record a string that ended; ``inside``: whether its end is among the best continuations."""
        where = self.finished if inside or self.all_ends else self.aside
        where.append(Hypothesis(prefix, score, self._ranked(score, len(prefix)), coverage=coverage))

    def lose(self, score: float) -> None:
        """Record that prefixes with at most this log-probability are not continued."""
        self.lost = max(self.lost, score)

    def see(self, prefix: tuple[int, ...], score: float) -> None:
        """Record a prefix that is continued."""
        if self.tree is not None:
            self.tree[prefix] = math.exp(score)

    def is_over(self, best: float) -> bool:
        """Whether the search of this source is finished, given the log-probability of its best prefix."""
        if self.lost == -math.inf or len(self.finished) < self.n_best:
            return False
        scores = sorted((each.score for each in self.finished), reverse=True)
        return scores[self.n_best - 1] >= self._bound(best)

    def _ranked(self, score: float, length: int) -> float:
        return score * math.pow(
            (6 + length) / 6, -self.penalty
        )  # a negative power underflows to 0 instead of overflowing

    def _bound(self, score: float) -> float:
        """The highest possible score of a string whose prefix has this log-probability."""
        return self._ranked(score, self.max_length)

    def result(self) -> Beam:
        """The result of the search."""
        exact, ended = self.lost == -math.inf, [*self.finished, *self.aside]
        ranked = sorted(ended if exact or not self.finished else self.finished, key=lambda each: -each.score)
        others = max((each.score for each in self.aside), default=-math.inf)
        optimal = exact or (bool(ranked) and ranked[0].score >= max(self._bound(self.lost), others))
        seen, mass = len(ended), math.fsum(each.probability for each in ended)
        if not ranked:
            score, prefix, coverage = max(self.cut, key=lambda each: each[0], default=(-math.inf, (), None))
            ranked = [Hypothesis(prefix, score, self._ranked(score, len(prefix)), finished=False, coverage=coverage)]
        return Beam(tuple(ranked[: self.n_best]), exact, optimal, seen, min(mass, 1.0), self.tree or {})


# -- several models --------------------------------------------------------------------------------------------------


class Ensemble:
    """An ensemble of models: the probability of a symbol is the mean over the members.

    Args:
        members: steppers with the same symbols.

    Example:
        >>> from fenchel.seq2seq import Recurrent, Vocabulary
        >>> letters = Vocabulary("ab")
        >>> models = [Recurrent(letters, letters, embedding=4, hidden=4, layers=1).eval() for _ in range(2)]
        >>> beam_search(Ensemble(models), ["ab"], max_length=3)[0].mass <= 1
        True
    """

    def __init__(self, members: Sequence[Stepper]) -> None:
        if not members:
            raise ValueError("members must not be empty")
        targets = [getattr(each, "target", None) for each in members]
        if any(target != targets[0] for target in targets) or len({each.begin for each in members}) > 1:
            raise ValueError("members must have equal target vocabularies")
        self.members = list(members)

    @property
    def begin(self) -> int:
        """The first input of the members."""
        return self.members[0].begin

    def start(self, sequences: Any) -> list[Any]:
        """The states of all members before the first step."""
        return [each.start(sequences) for each in self.members]

    def step(self, tokens: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
        """The mean of the members' probabilities, (N, V), and the new states."""
        steps = [each.step(tokens, part) for each, part in zip(self.members, state, strict=True)]
        return torch.stack([probabilities for probabilities, _ in steps]).mean(0), [after for _, after in steps]

    def reorder(self, state: list[Any], index: Tensor) -> list[Any]:
        """Select rows of the states of all members."""
        return [each.reorder(part, index) for each, part in zip(self.members, state, strict=True)]


# -- one string ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One step of a string: its symbol, and the symbols of non-zero probability, the most probable first.

    Example:
        >>> Choice(2, 0.75, ((2, 0.75), (3, 0.25))).alternatives[0]
        (2, 0.75)
    """

    token: int
    probability: float
    alternatives: tuple[tuple[int, float], ...]


@torch.no_grad()
def force(stepper: Stepper, source: Any, tokens: Sequence[int], *, k: int | None = None) -> list[Choice]:
    """The probability of each symbol of a given string and of its end, with the alternatives at each step.

    Args:
        stepper: the model.
        source: the source of the string.
        tokens: the string, without its end, as numbers: ``vocabulary.encode(symbols)``.
        k: the largest number of alternatives per step; all of non-zero probability by default.

    Example:
        >>> from fenchel.seq2seq import Recurrent, Vocabulary
        >>> letters = Vocabulary("ab")
        >>> model = Recurrent(letters, letters, embedding=4, hidden=4, layers=1).eval()
        >>> [choice.token for choice in force(model, "ab", letters.encode("ba"))]
        [3, 2, 0]
    """
    _check_stepper(stepper)
    _check_string(tokens, "tokens", k)
    state = stepper.start([source])
    before, choices = stepper.begin, []
    for token in (*tokens, STOP):
        row, state = _step(stepper, torch.tensor([before], device="cpu"), state)
        _check_symbol(token, row, "tokens")
        choices.append(Choice(token, float(row[0, token]), _alternatives(row[0], k)))
        before = token
    return choices


@dataclass(frozen=True)
class Completion:
    """The only possible continuation of a prefix: its symbols, whether the string ends, and else the alternatives.

    Example:
        >>> Completion((2, 3), finished=True).tokens
        (2, 3)
    """

    tokens: tuple[int, ...]
    finished: bool
    alternatives: tuple[tuple[int, float], ...] = ()


@torch.no_grad()
def complete(
    stepper: Stepper, source: Any, prefix: Sequence[int] = (), *, max_length: int = 100, k: int | None = None
) -> Completion:
    """Continue a prefix as long as a single symbol has non-zero probability.

    Args:
        stepper: the model.
        source: the source of the string.
        prefix: the first symbols of the string, as numbers.
        max_length: the largest number of symbols to add.
        k: the largest number of alternatives to return; all by default.

    Example:
        >>> from fenchel.seq2seq import Recurrent, Vocabulary
        >>> letters = Vocabulary("ab")
        >>> model = Recurrent(letters, letters, embedding=4, hidden=4, layers=1).eval()
        >>> len(complete(model, "ab", letters.encode("b"), max_length=3).tokens) <= 3
        True
    """
    _check_stepper(stepper)
    _check_string(prefix, "prefix", k)
    check_count(max_length, "max_length", 0)
    row, state = _step(stepper, torch.tensor([stepper.begin], device="cpu"), stepper.start([source]))
    for token in prefix:
        _check_symbol(token, row, "prefix")
        row, state = _step(stepper, torch.tensor([token], device="cpu"), state)
    added: list[int] = []
    while True:
        possible = _alternatives(row[0], 2)
        if len(possible) != 1 or (possible[0][0] != STOP and len(added) == max_length):
            return Completion(tuple(added), False, _alternatives(row[0], k))
        if possible[0][0] == STOP:
            return Completion(tuple(added), True)
        added.append(possible[0][0])
        row, state = _step(stepper, torch.tensor([added[-1]], device="cpu"), state)


def _check_stepper(stepper: Stepper) -> None:
    if missing := [name for name in ("begin", "start", "step", "reorder") if not hasattr(stepper, name)]:
        raise TypeError(
            f"stepper must be a model with begin, start, step and reorder, got {type(stepper).__name__} without "
            + ", ".join(missing)
        )


def _check_string(numbers: Sequence[int], name: str, k: int | None) -> None:
    check_kind(numbers, name, Sequence, what="a sequence of numbers of symbols")
    if k is not None:
        check_count(k, "k", 0)


def _check_symbol(token: int, row: Tensor, name: str) -> None:
    if not isinstance(token, SupportsIndex):
        raise TypeError(f"{name} must hold numbers of symbols, as Vocabulary.encode gives them, got {token!r}")
    if not 0 <= token < row.shape[-1]:
        raise ValueError(f"{name} must hold numbers in [0, {row.shape[-1] - 1}], got {token}")


def _alternatives(probabilities: Tensor, k: int | None) -> tuple[tuple[int, float], ...]:
    """The symbols of non-zero probability and their probabilities, the most probable first, at most ``k``."""
    values, tokens = probabilities.sort(descending=True, stable=True)
    count = int((values > 0).sum())
    count = count if k is None else min(count, k)
    return tuple(zip(tokens[:count].tolist(), values[:count].tolist(), strict=True))
