"""Search among the strings of a model: beam search, enumeration of the support, and forced decoding.

A model is anything with the methods of ``Stepper``: a ``Seq2Seq``, an ``Ensemble``, or a class of your own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor

from fenchel._checks import check_count, check_number
from fenchel.seq2seq.vocabulary import STOP


class Stepper(Protocol):
    """A distribution over strings, given symbol by symbol. States have one row per hypothesis."""

    @property
    def begin(self) -> int:
        """The token that is read before the first symbol."""

    def start(self, sequences: Any, /) -> Any:
        """The states of some sources before the first step, one row per source."""

    def step(self, tokens: Tensor, state: Any, /) -> tuple[Tensor, Any]:
        """Probabilities (N, V) of the next symbol once tokens (N,) are read, and the states then. ``STOP`` is 0."""

    def reorder(self, state: Any, index: Tensor, /) -> Any:
        """Select rows of the states by index."""


@dataclass(frozen=True)
class Hypothesis:
    """A string: the numbers of its symbols, without the end, and its probability.

    Args:
        tokens: the symbols.
        log_probability: of the string and its end, in nats.
        score: what it is ranked by: ``log_probability``, unless there is a length penalty.
        finished: False if it was cut at the longest length; then the probability is that of all strings that begin so.
    """

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    finished: bool = True

    @property
    def probability(self) -> float:
        """Of the string and its end."""
        return math.exp(self.log_probability)


@dataclass(frozen=True)
class Beam:
    """The result of a search.

    Args:
        hypotheses: by falling score; those of equal score in the order in which they were found. Where the search was
            not exact, strings whose end was not among the ``beam`` best continuations are left out, unless no other
            ended; so the first may score less than a string that was seen (then ``optimal`` is False).
        exact: whether all strings of non-zero probability were seen: none was pruned or cut.
        optimal: nothing that was pruned, cut or left out can have a higher score than the first hypothesis. True
            wherever ``exact`` is; it may be true of dense models too. With a length penalty that is said of strings up
            to ``max_length``: one that is longer may rank higher.
        seen: how many strings were seen to the end, returned or not.
        mass: the probability of all of these.
        tree: with ``keep_tree=True``, every prefix that was kept, and its probability.
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
    beam: int = 5,
    n_best: int | None = None,
    max_length: int = 100,
    length_penalty: float = 0.0,
    keep_tree: bool = False,
) -> list[Beam]:
    """The most probable strings of every source, found by beam search.

    In every step the ``beam`` most probable prefixes are continued. If the number of prefixes with non-zero probability
    never exceeds the beam size, every string that the model can write was seen: the search is ``exact``. Where it is
    not, a string ends only if its end is among the ``beam`` most probable continuations, so that a beam of 1 is greedy
    search. (Otherwise models such as softmax, which give every end some probability, would return their shortest
    strings.)

    A search stops when no prefix is left; or, once something was pruned, when no prefix that is left can be among the
    best.

    Args:
        stepper: the model.
        sources: the sources, in the form that ``stepper.start`` takes.
        beam: the number of prefixes that are continued.
        n_best: the number of hypotheses that are returned; the beam size by default.
        max_length: the largest number of symbols of a string, without its end. Longer prefixes are cut.
        length_penalty: λ in the score log p / ((5 + length) / 6)^λ of Wu et al. (2016); the length counts the end.
        keep_tree: whether to keep all prefixes, for a drawing.

    Returns:
        A ``Beam`` for every source, with at least one hypothesis: if no string ended, the best prefix that was cut.

    Example:
        >>> import torch
        >>> class Coin:  # writes symbol 1 twice, then stops or writes symbol 2
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
    beam = check_count(beam, "beam")
    n_best = beam if n_best is None else check_count(n_best, "n_best")
    max_length = check_count(max_length, "max_length", 0)
    length_penalty = check_number(length_penalty, "length_penalty", 0, ends="[)")
    if not len(sources):
        return []
    rows = [_Row(n_best, max_length, length_penalty, keep_tree) for _ in sources]
    return _search(stepper, sources, beam, max_length, rows)


def _search(stepper: Stepper, sources: Sequence[Any], beam: int, max_length: int, rows: Sequence[_Row]) -> list[Beam]:
    live = _Live(
        torch.arange(len(rows), device="cpu"),
        torch.zeros(len(rows), dtype=torch.float64, device="cpu"),
        [()] * len(rows),
    )
    tokens = torch.full((len(rows),), stepper.begin, device="cpu")
    state = stepper.start(sources)
    for length in range(max_length + 1):
        probabilities, state = _step(stepper, tokens, state)
        parents, tokens, scores = _continued(probabilities, live, beam, rows)
        if length == max_length:
            live.cut(parents, tokens, scores, rows)
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
    stepper: Stepper, sources: Sequence[Any], *, most: int = 100, max_length: int = 100, keep_tree: bool = False
) -> list[Beam]:
    """All strings of non-zero probability, the most probable first, for models that have few.

    A search with a beam as wide as ``most``, that returns all that ended. Where ``exact`` is False there are more
    strings, or longer ones.
    """
    most, max_length = check_count(most, "most"), check_count(max_length, "max_length", 0)
    rows = [_Row(most * (max_length + 1), max_length, 0.0, keep_tree, all_ends=True) for _ in sources]
    return _search(stepper, sources, most, max_length, rows) if rows else []


def _step(stepper: Stepper, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
    probabilities, state = stepper.step(tokens, state)
    if bool(probabilities.isnan().any()):
        raise ValueError("the model gives probabilities that are not numbers: no search can rank them")
    return probabilities, state


def _logs(probabilities: Tensor) -> Tensor:
    """Logarithms in float64 on the CPU, so that products of many probabilities keep their precision."""
    return probabilities.to("cpu", torch.float64).log()


@dataclass(frozen=True)
class _Live:
    """The prefixes that are continued: the number of their source, log-probabilities and symbols."""

    rows: Tensor
    scores: Tensor
    prefixes: list[tuple[int, ...]]

    def cut(self, parents: Tensor, tokens: Tensor, scores: Tensor, rows: Sequence[_Row]) -> None:
        """Record the prefixes of each source that would become longer than allowed."""
        for parent, _, score in zip(parents.tolist(), tokens.tolist(), scores.tolist(), strict=True):
            rows[int(self.rows[parent])].lose(score)
        for row, prefix, score in zip(self.rows.tolist(), self.prefixes, self.scores.tolist(), strict=True):
            rows[row].cut.append((score, prefix))


def _continued(probabilities: Tensor, live: _Live, beam: int, rows: Sequence[_Row]) -> tuple[Tensor, Tensor, Tensor]:
    """The best continuations of every source, at most ``beam``: parents, tokens and log-probabilities, in order.

    Records which strings ended, and whether their end is among the ``beam`` best continuations.
    """
    # The end, and one more than can be kept, so that the best of what is pruned is known.
    values, tokens = probabilities.topk(min(beam + 2, probabilities.shape[1]), sorted=True)
    parents = torch.arange(len(values), device="cpu").repeat_interleave(values.shape[1])
    scores, tokens = (_logs(values) + live.scores.unsqueeze(1)).flatten(), tokens.cpu().flatten()
    possible = scores.isfinite().nonzero().flatten()
    scores, tokens, parents = scores[possible], tokens[possible], parents[possible]
    # By source, then by score; stable, so that equals stay in the order of their parents.
    order = scores.argsort(descending=True, stable=True)
    order = order[live.rows[parents[order]].argsort(stable=True)]
    scores, tokens, parents = scores[order], tokens[order], parents[order]
    ends = (tokens == STOP) & (_ranks(live.rows[parents]) < beam)
    inside = torch.zeros(len(probabilities), dtype=torch.bool, device="cpu")
    inside[parents[ends]] = True
    ended = _logs(probabilities[:, STOP]) + live.scores
    for number in ended.isfinite().nonzero().flatten().tolist():
        row = rows[int(live.rows[number])]
        row.finish(live.prefixes[number], float(ended[number]), inside=bool(inside[number]))
    going_on = (tokens != STOP).nonzero().flatten()
    scores, tokens, parents = scores[going_on], tokens[going_on], parents[going_on]
    source = live.rows[parents]
    rank = _ranks(source)
    for number in (rank == beam).nonzero().flatten().tolist():
        rows[int(source[number])].lose(float(scores[number]))
    kept = rank < beam
    return parents[kept], tokens[kept], scores[kept]


def _ranks(source: Tensor) -> Tensor:
    """The rank of each entry among those of its source; entries are sorted by source."""
    if not len(source):
        return source
    counts = torch.bincount(source)
    return torch.arange(len(source), device="cpu") - (counts.cumsum(0) - counts)[source]


def _next(parents: Tensor, tokens: Tensor, scores: Tensor, live: _Live, rows: Sequence[_Row]) -> tuple[_Live, Tensor]:
    """The prefixes that are continued, without those of sources whose search is over, and their indices."""
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
        self.cut: list[tuple[float, tuple[int, ...]]] = []
        self.lost = -math.inf
        """The largest log-probability of a prefix that was pruned or cut."""
        self.tree: dict[tuple[int, ...], float] | None = {} if keep_tree else None

    def finish(self, prefix: tuple[int, ...], score: float, *, inside: bool) -> None:
        """Record a string that ended; ``inside``: its end is among the best continuations."""
        where = self.finished if inside or self.all_ends else self.aside
        where.append(Hypothesis(prefix, score, self._ranked(score, len(prefix))))

    def lose(self, score: float) -> None:
        """Record that prefixes with at most this log-probability are not continued."""
        self.lost = max(self.lost, score)

    def see(self, prefix: tuple[int, ...], score: float) -> None:
        """Record a prefix that is continued."""
        if self.tree is not None:
            self.tree[prefix] = math.exp(score)

    def is_over(self, best: float) -> bool:
        """Whether the search of this source is over, given the log-probability of its best prefix."""
        if self.lost == -math.inf or len(self.finished) < self.n_best:
            return False
        scores = sorted((each.score for each in self.finished), reverse=True)
        return scores[self.n_best - 1] >= self._bound(best)

    def _ranked(self, score: float, length: int) -> float:
        return score * math.pow((6 + length) / 6, -self.penalty)  # the power may vanish, not overflow

    def _bound(self, score: float) -> float:
        """The highest score of a string that begins with a prefix of this log-probability."""
        return self._ranked(score, self.max_length)

    def result(self) -> Beam:
        """The result."""
        exact, ended = self.lost == -math.inf, [*self.finished, *self.aside]
        ranked = sorted(ended if exact or not self.finished else self.finished, key=lambda each: -each.score)
        others = max((each.score for each in self.aside), default=-math.inf)
        optimal = exact or (bool(ranked) and ranked[0].score >= max(self._bound(self.lost), others))
        seen, mass = len(ended), math.fsum(each.probability for each in ended)
        if not ranked:
            score, prefix = max(self.cut, key=lambda each: each[0], default=(-math.inf, ()))
            ranked = [Hypothesis(prefix, score, self._ranked(score, len(prefix)), finished=False)]
        return Beam(tuple(ranked[: self.n_best]), exact, optimal, seen, min(mass, 1.0), self.tree or {})


# -- several models --------------------------------------------------------------------------------------------------


class Ensemble:
    """An ensemble of models: the probability of a symbol is the mean of theirs.

    Args:
        members: steppers with the same symbols.
    """

    def __init__(self, members: Sequence[Stepper]) -> None:
        if not members:
            raise ValueError("an ensemble must have a member")
        targets = [getattr(each, "target", None) for each in members]
        if any(target != targets[0] for target in targets) or len({each.begin for each in members}) > 1:
            raise ValueError("the members of an ensemble must write the same symbols: their target vocabularies differ")
        self.members = list(members)

    @property
    def begin(self) -> int:
        """The token that is read first."""
        return self.members[0].begin

    def start(self, sequences: Any) -> list[Any]:
        """The states of all members."""
        return [each.start(sequences) for each in self.members]

    def step(self, tokens: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
        """The mean of the members' probabilities."""
        steps = [each.step(tokens, part) for each, part in zip(self.members, state, strict=True)]
        return torch.stack([probabilities for probabilities, _ in steps]).mean(0), [after for _, after in steps]

    def reorder(self, state: list[Any], index: Tensor) -> list[Any]:
        """Select rows of the states of all members."""
        return [each.reorder(part, index) for each, part in zip(self.members, state, strict=True)]


# -- one string ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One step of a string: its symbol, and all symbols of non-zero probability, the most probable first."""

    token: int
    probability: float
    alternatives: tuple[tuple[int, float], ...]


@torch.no_grad()
def force(stepper: Stepper, source: Any, tokens: Sequence[int], *, most: int | None = None) -> list[Choice]:
    """The probability of each symbol of a given string and of its end, with all alternatives at each step.

    Args:
        stepper: the model.
        source: one.
        tokens: the string, without its end, as numbers: ``vocabulary.encode(symbols)``.
        most: alternatives to keep at a step; all of non-zero probability by default.
    """
    state = stepper.start([source])
    before, choices = stepper.begin, []
    for token in (*tokens, STOP):
        row, state = _step(stepper, torch.tensor([before], device="cpu"), state)
        _check_symbol(token, row, "tokens")
        choices.append(Choice(token, float(row[0, token]), _alternatives(row[0], most)))
        before = token
    return choices


@dataclass(frozen=True)
class Completion:
    """The certain continuation of a prefix: symbols, whether the string ends then, and else the alternatives."""

    tokens: tuple[int, ...]
    finished: bool
    alternatives: tuple[tuple[int, float], ...] = ()


@torch.no_grad()
def complete(
    stepper: Stepper, source: Any, prefix: Sequence[int] = (), *, max_length: int = 100, most: int | None = None
) -> Completion:
    """Continue a prefix as long as a single symbol has non-zero probability.

    Args:
        stepper: the model.
        source: one.
        prefix: what has been written, as numbers.
        max_length: symbols to add at most.
        most: alternatives to keep where there are several.
    """
    row, state = _step(stepper, torch.tensor([stepper.begin], device="cpu"), stepper.start([source]))
    for token in prefix:
        _check_symbol(token, row, "prefix")
        row, state = _step(stepper, torch.tensor([token], device="cpu"), state)
    added: list[int] = []
    while True:
        possible = _alternatives(row[0], 2)
        if len(possible) != 1 or (possible[0][0] != STOP and len(added) == max_length):
            return Completion(tuple(added), False, _alternatives(row[0], most))
        if possible[0][0] == STOP:
            return Completion(tuple(added), True)
        added.append(possible[0][0])
        row, state = _step(stepper, torch.tensor([added[-1]], device="cpu"), state)


def _check_symbol(token: int, row: Tensor, name: str) -> None:
    if not isinstance(token, SupportsIndex):
        raise TypeError(f"{name} must hold numbers of symbols, as Vocabulary.encode gives them, got {token!r}")
    if not 0 <= token < row.shape[-1]:
        raise ValueError(f"{name} must hold numbers in [0, {row.shape[-1] - 1}], got {token}")


def _alternatives(probabilities: Tensor, most: int | None) -> tuple[tuple[int, float], ...]:
    values, tokens = probabilities.sort(descending=True, stable=True)
    count = int((values > 0).sum())
    count = count if most is None else min(count, most)
    return tuple(zip(tokens[:count].tolist(), values[:count].tolist(), strict=True))
