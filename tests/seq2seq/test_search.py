"""Search: certificates against exhaustive search in small tables, ensembles, forced decoding, completion."""

import itertools
import math
from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fenchel.seq2seq import STOP, Ensemble, beam_search, complete, enumerate_support, force

Prefix = tuple[int, ...]


class Table:
    """Next symbols by a rule of the prefix: few have any probability, some share it, sources differ."""

    def __init__(self, seed: int, symbols: int = 4, dense: bool = False) -> None:
        self.seed, self.symbols, self.dense = seed, symbols, dense
        self.begin = symbols

    def row(self, source: str, prefix: Prefix) -> list[float]:
        random = Random(f"{self.seed} {source} {prefix}")
        least = 1 if self.dense else 0
        weights = [random.choice([least, 1, 1, 4]) * (self.dense or random.random() < 0.5) for _ in range(self.symbols)]
        # The longer, the more likely it ends: supports are finite for most seeds, and infinite for some.
        weights[STOP] += 8 if random.random() < len(prefix) / 5 else 0
        if self.seed % 3 and len(prefix) > 2 and not self.dense:
            weights = [1.0, *[0.0] * (self.symbols - 1)]
        weights = weights if any(weights) else [1.0] * self.symbols
        return [weight / sum(weights) for weight in weights]

    def start(self, sources: Sequence[str]) -> list[tuple[str, Prefix]]:
        return [(source, ()) for source in sources]

    def step(self, tokens: Tensor, state: list[tuple[str, Prefix]]) -> tuple[Tensor, list[tuple[str, Prefix]]]:
        after = [
            (source, prefix if token == self.begin else (*prefix, token))
            for token, (source, prefix) in zip(tokens.tolist(), state, strict=True)
        ]
        return torch.tensor([self.row(*each) for each in after], dtype=torch.float64), after

    def reorder(self, state: list[tuple[str, Prefix]], index: Tensor) -> list[tuple[str, Prefix]]:
        return [state[number] for number in index.tolist()]


def exhaust(table: Table, source: str, longest: int) -> tuple[dict[Prefix, float], list[int], float]:
    """All strings up to a length; how many prefixes go on at each length; the probability of what is longer."""
    strings: dict[Prefix, float] = {}
    level: dict[Prefix, float] = {(): 1.0}
    sizes = []
    for _ in range(longest + 1):
        after: dict[Prefix, float] = {}
        for prefix, mass in level.items():
            row = table.row(source, prefix)
            if row[STOP]:
                strings[prefix] = mass * row[STOP]
            after |= {(*prefix, token): mass * p for token, p in enumerate(row) if p and token != STOP}
        sizes.append(len(after))
        level = after
    return strings, sizes, math.fsum(level.values())


tables = st.builds(Table, st.integers(0, 10_000), st.integers(2, 5))


@given(tables, st.integers(1, 6), st.integers(0, 5))
@settings(max_examples=150)
def test_a_beam_is_exact_if_and_only_if_nothing_possible_was_pruned_or_cut(
    table: Table, beam: int, longest: int
) -> None:
    strings, sizes, longer = exhaust(table, "a", longest)
    (found,) = beam_search(table, ["a"], beam_size=beam, n_best=10_000, max_length=longest)
    assert found.exact == (all(size <= beam for size in sizes[:-1]) and not longer)
    if found.exact:
        assert {each.tokens: pytest.approx(each.probability) for each in found.hypotheses} == strings
        assert found.mass == pytest.approx(1)
        assert found.seen == len(strings)
        assert found.optimal


@given(tables, st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=150)
def test_a_beam_that_calls_itself_optimal_has_found_the_best_string(table: Table, beam: int, longest: int) -> None:
    (found,) = beam_search(table, ["a"], beam_size=beam, max_length=longest)
    strings, _, _ = exhaust(table, "a", longest + 3)  # what was cut counts too
    if found.optimal:
        assert found.best.probability == pytest.approx(max(strings.values()))


def test_optimality_is_claimed_often_enough_to_be_of_use_and_never_without_reason() -> None:
    claims, rights = 0, 0
    for seed in range(100):
        table = Table(seed, 4, dense=True)
        (found,) = beam_search(table, ["a"], beam_size=3, max_length=6)
        assert not found.exact  # every string has some probability
        claims += found.optimal
        rights += found.best.probability >= max(exhaust(table, "a", 6)[0].values()) - 1e-12
    assert 0 < claims <= rights


@given(tables, st.integers(1, 5))
def test_hypotheses_are_different_strings_with_their_own_probabilities_best_first(table: Table, beam: int) -> None:
    (found,) = beam_search(table, ["a"], beam_size=beam, max_length=4)
    strings, _, _ = exhaust(table, "a", 4)
    assert len(found.hypotheses) <= beam
    assert len({each.tokens for each in found.hypotheses}) == len(found.hypotheses)
    probabilities = [each.probability for each in found.hypotheses]
    assert probabilities == sorted(probabilities, reverse=True)
    for each in found.hypotheses:
        if each.finished:
            assert each.probability == pytest.approx(strings[each.tokens])
            assert each.score == each.log_probability


@given(tables, st.integers(1, 4))
def test_a_batch_finds_what_each_source_finds_alone(table: Table, beam: int) -> None:
    sources = ["a", "b", "c", "a"]
    together = beam_search(table, sources, beam_size=beam, max_length=4)
    assert together == [beam_search(table, [source], beam_size=beam, max_length=4)[0] for source in sources]


@given(tables, st.sampled_from([0.6, 1.0]))
def test_with_a_length_penalty_the_best_score_wins(table: Table, penalty: float) -> None:
    strings, sizes, longer = exhaust(table, "a", 4)
    (found,) = beam_search(table, ["a"], beam_size=max(sizes) + 1, max_length=4, length_penalty=penalty)
    if strings and not longer:
        best = max(math.log(p) / ((6 + len(string)) / 6) ** penalty for string, p in strings.items())
        assert found.best.score == pytest.approx(best)


@given(tables, st.integers(1, 4), st.sampled_from([0.5, 2.0]))
def test_with_a_length_penalty_optimal_is_said_of_strings_that_are_not_too_long(
    table: Table, beam: int, penalty: float
) -> None:
    strings, _, _ = exhaust(table, "a", 4)
    (found,) = beam_search(table, ["a"], beam_size=beam, max_length=4, length_penalty=penalty)
    if found.optimal:
        best = max(math.log(p) / ((6 + len(string)) / 6) ** penalty for string, p in strings.items())
        assert found.best.score == pytest.approx(best)


def test_a_huge_length_penalty_ranks_the_longest_first() -> None:
    (found,) = beam_search(Fixed([0.5, 0.5], [1, 0]), ["a"], length_penalty=100.0)
    assert [each.tokens for each in found.hypotheses] == [(1,), ()]
    assert beam_search(Fixed([0.5, 0.5], [1, 0]), ["a"], length_penalty=1e6)[0].exact


@given(tables)
def test_the_whole_support_is_listed_where_it_is_finite(table: Table) -> None:
    strings, sizes, longer = exhaust(table, "a", 5)
    (found,) = enumerate_support(table, ["a"], beam_size=max(sizes) + 1, max_length=5)
    assert found.exact == (not longer)
    assert {each.tokens: pytest.approx(each.probability) for each in found.hypotheses if each.finished} == strings


class Fixed:
    """The same rows for every source, by the length of the prefix."""

    def __init__(self, *rows: Sequence[float]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.float64)
        self.begin = self.rows.shape[1]

    def start(self, sources: Sequence[object]) -> Tensor:
        return torch.zeros(len(sources), dtype=torch.long)

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows[state.clamp_max(len(self.rows) - 1)], state + 1

    def reorder(self, state: Tensor, index: Tensor) -> Tensor:
        return state[index]


def test_the_empty_string_is_a_string() -> None:
    (found,) = beam_search(Fixed([1, 0, 0]), ["a"], max_length=0)
    assert (found.best.tokens, found.best.probability, found.exact) == ((), 1.0, True)
    (found,) = beam_search(Fixed([0.5, 0.5, 0], [1, 0, 0]), ["a"], max_length=0)
    assert (found.best.tokens, found.best.probability, found.exact, found.optimal) == ((), 0.5, False, True)


def test_ties_keep_the_order_in_which_they_were_found() -> None:
    (found,) = beam_search(Fixed([0, 0.5, 0.5], [1, 0, 0]), ["a"], beam_size=2)
    assert [each.tokens for each in found.hypotheses] == [(1,), (2,)]
    assert found.exact
    (first,) = beam_search(Fixed([0, 0.5, 0.5], [1, 0, 0]), ["a"], beam_size=2, n_best=1)
    assert (first.hypotheses, first.seen, first.exact) == (found.hypotheses[:1], 2, True)
    (found,) = beam_search(Fixed([0, 0.5, 0.5], [1, 0, 0]), ["a"], beam_size=1)
    assert found.hypotheses[0].probability == 0.5
    assert not found.exact
    assert found.optimal  # what was pruned is as probable, not more


def test_where_no_string_ends_the_best_prefix_is_told_as_unfinished() -> None:
    (found,) = beam_search(Fixed([0, 0.75, 0.25]), ["a"], beam_size=3, max_length=2)
    assert found.best.tokens == (1, 1)
    assert not found.best.finished
    assert found.best.probability == pytest.approx(0.75**2)
    assert (found.exact, found.optimal, found.mass) == (False, False, 0.0)


def test_very_improbable_strings_are_not_mistaken_for_impossible_ones() -> None:
    (found,) = beam_search(Fixed(*[[0, 1e-30, 1 - 1e-30]] * 20, [1, 0, 0]), ["a"], beam_size=1, max_length=20)
    assert not found.exact
    (found,) = beam_search(
        Fixed(*[[0, 1.0, 0]] * 5, [1e-300, 1 - 1e-300, 0], [1, 0, 0]), ["a"], beam_size=2, max_length=9
    )
    assert found.exact
    assert len(found.hypotheses) == 2


def test_no_sources_give_no_beams_and_bad_numbers_are_reported() -> None:
    assert beam_search(Fixed([1, 0]), []) == []
    for name, least in (("beam_size", 1), ("max_length", 0), ("n_best", 1)):
        with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {least - 1}"):
            beam_search(Fixed([1, 0]), ["a"], **{name: least - 1})
        with pytest.raises(TypeError, match=f"{name} must be an int, got float"):
            beam_search(Fixed([1, 0]), ["a"], **{name: 2.0})
    for penalty in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"length_penalty must satisfy 0 <= length_penalty < inf, got {penalty}"):
            beam_search(Fixed([1, 0]), ["a"], length_penalty=penalty)


def test_the_tree_has_every_prefix_that_went_on() -> None:
    (found,) = beam_search(Fixed([0, 0.75, 0.25], [1, 0, 0]), ["a"], beam_size=5, keep_tree=True)
    assert found.tree == {(1,): pytest.approx(0.75), (2,): pytest.approx(0.25)}


@given(st.integers(0, 1000))
def test_an_ensemble_averages_probabilities_step_by_step(seed: int) -> None:
    first, second = Table(seed), Table(seed + 1)
    (found,) = enumerate_support(Ensemble([first, second]), ["a"], beam_size=500, max_length=3)
    for each in found.hypotheses:
        if each.finished:
            steps = itertools.accumulate(each.tokens, lambda prefix, token: (*prefix, token), initial=())
            expected = math.prod(
                (first.row("a", prefix)[token] + second.row("a", prefix)[token]) / 2
                for prefix, token in zip(steps, (*each.tokens, STOP), strict=True)
            )
            assert each.probability == pytest.approx(expected)


def test_members_of_an_ensemble_must_write_the_same_symbols() -> None:
    with pytest.raises(ValueError, match="equal target vocabularies"):
        Ensemble([Table(0, 3), Table(0, 4)])
    with pytest.raises(ValueError, match="members must not be empty"):
        Ensemble([])


@given(tables, st.lists(st.integers(1, 1), max_size=3))
def test_forced_decoding_tells_all_alternatives_at_each_step(table: Table, tokens: list[int]) -> None:
    choices = force(table, "a", tokens)
    assert [each.token for each in choices] == [*tokens, STOP]
    for length, choice in enumerate(choices):
        row = table.row("a", tuple(tokens[:length]))
        assert choice.probability == row[choice.token]  # zero where the model would never have gone
        assert dict(choice.alternatives) == {token: p for token, p in enumerate(row) if p}
        assert [p for _, p in choice.alternatives] == sorted((p for p in row if p), reverse=True)
    assert all(len(each.alternatives) <= 1 for each in force(table, "a", tokens, k=1))


def test_strings_are_told_by_numbers() -> None:
    for function, name in ((force, "tokens"), (complete, "prefix")):
        with pytest.raises(TypeError, match=f"{name} must hold numbers of symbols, as .*encode gives them, got 'b'"):
            function(Fixed([0, 1.0]), "a", "b")
        for token in (-1, 2):
            with pytest.raises(ValueError, match=rf"{name} must hold numbers in \[0, 1\], got {token}"):
                function(Fixed([0, 1.0]), "a", [token])


def test_probabilities_that_are_not_numbers_are_never_answered_with() -> None:
    broken = Fixed([math.nan, 1])
    for ask in (beam_search, enumerate_support):
        with pytest.raises(ValueError, match="must not be NaN"):
            ask(broken, ["a"])
    for follow in (force, complete):
        with pytest.raises(ValueError, match="must not be NaN"):
            follow(broken, "a", [1])


def test_completion_goes_on_while_there_is_one_continuation() -> None:
    certain = [0, 1.0, 0], [0, 0, 1.0]
    assert complete(Fixed(*certain, [1, 0, 0]), "a").tokens == (1, 2)
    assert complete(Fixed(*certain, [1, 0, 0]), "a").finished
    stopped = complete(Fixed(*certain, [0.25, 0.75, 0]), "a", [1])
    assert (stopped.tokens, stopped.finished, stopped.alternatives) == ((2,), False, ((1, 0.75), (0, 0.25)))
    assert complete(Fixed([0, 1.0, 0]), "a", max_length=4).tokens == (1,) * 4  # for ever


class Dense:
    """Ends with probability 0.2 after every symbol, and else goes on with symbol 1; certainly ends after four."""

    begin = 3

    def start(self, sources: list[str]) -> torch.Tensor:
        return torch.zeros(len(sources), dtype=torch.long)

    def step(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [1.0, 0.0, 0.0]])
        return rows[state], state + 1

    def reorder(self, state: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return state[index]


def test_an_end_competes_with_what_could_come_instead() -> None:
    (greedy,) = beam_search(Dense(), ["a"], beam_size=1)
    assert greedy.best.tokens == (1, 1, 1, 1)
    assert not greedy.exact
    assert not greedy.optimal  # to stop at once is more probable
    (wide,) = beam_search(Dense(), ["a"], beam_size=16)
    assert wide.exact
    assert wide.best.tokens == ()


class Untied(Table):
    """The same, where no two symbols have the same probability."""

    def row(self, source: str, prefix: Prefix) -> list[float]:
        random = Random(f"untied {self.seed} {source} {prefix}")
        weights = [p * random.uniform(1, 2) for p in super().row(source, prefix)]
        return [weight / sum(weights) for weight in weights]


def test_a_beam_of_one_is_greedy_unless_it_was_exact_or_nothing_ended_in_the_lead() -> None:
    differing = 0
    for seed in range(60):
        table = Untied(seed, symbols=2 + seed % 3, dense=seed % 2 == 0)
        prefix: Prefix = ()
        while len(prefix) < 12:
            row = table.row("a", prefix)
            if max(row) == row[STOP]:
                break
            prefix = (*prefix, row.index(max(row)))
        (found,) = beam_search(table, ["a"], beam_size=1, max_length=12)
        differing += found.best.tokens != prefix
        assert found.best.tokens == prefix or found.exact or len(prefix) == 12, seed
    assert differing


def test_an_inexact_beam_may_have_seen_a_better_string_and_then_does_not_call_its_own_optimal() -> None:
    below = 0
    for seed in range(60):
        (found,) = beam_search(Table(seed, symbols=4), ["a"], beam_size=1, max_length=6, keep_tree=True)
        table = Table(seed, symbols=4)
        seen = [
            math.prod([*(table.row("a", p[:i])[p[i]] for i in range(len(p))), table.row("a", p)[STOP]])
            for p in ((), *found.tree)
        ]
        if max(seen) > found.best.probability * (1 + 1e-9):
            below += 1
            assert not found.exact
            assert not found.optimal
    assert below
