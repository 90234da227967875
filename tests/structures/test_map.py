"""The best structure, against all structures."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from catalogue import MEMBERS, Member, trees

from fenchel.structures import Chain, DependencyTree, Matching, SequentialSubsets, Subsets

every_member = pytest.mark.parametrize("case", MEMBERS, ids=lambda m: m.name)
every_masked = pytest.mark.parametrize("case", [m for m in MEMBERS if m.masks], ids=lambda m: m.name)


def scores_like(case: Member, rows: int, kind: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(rows, *case.shape, generator=generator, dtype=torch.float64)
    return scores.round() if kind == "integer" else scores


def totals(case: Member, scores: torch.Tensor, transition: torch.Tensor | None) -> np.ndarray:
    """The scores of all members, (rows, members)."""
    flat = np.stack([y.reshape(-1) for y in case.members])
    return scores.reshape(len(scores), -1).numpy() @ flat.T + case.scores_of(transition)


def place(case: Member, y: torch.Tensor) -> int:
    """Which member it is: exactly one."""
    (found,) = [i for i, member in enumerate(case.members) if np.array_equal(member, y.numpy())]
    return found


@every_member
@pytest.mark.parametrize("kind", ["real", "integer"])
def test_no_member_is_better(case: Member, kind: str) -> None:
    transition = case.draw(torch.Generator().manual_seed(1), kind)
    scores = scores_like(case, 40, kind)
    best = case.structure(transition).map(scores).detach()
    for row, y in zip(totals(case, scores, transition), best, strict=True):
        assert row[place(case, y)] == pytest.approx(row.max(), abs=1e-12)


@every_masked
def test_no_member_within_the_mask_is_better(case: Member) -> None:
    transition = case.draw(torch.Generator().manual_seed(1))
    scores = scores_like(case, 60, "real")
    mask = torch.rand(scores.shape, generator=torch.Generator().manual_seed(2)) < 0.8
    structure, all_totals = case.structure(transition), totals(case, scores, transition)
    flat = np.stack([y.reshape(-1) for y in case.members])
    checked = 0
    for row, allowed, total in zip(scores, mask, all_totals, strict=True):
        inside = (flat @ (~allowed).reshape(-1).numpy().astype(float)) == 0
        if not inside.any() or (allowed.dim() == 2 and not (allowed.any(-1).all() and allowed.any(-2).all())):
            continue
        dirty = torch.where(allowed, row, torch.nan)
        if case.name.startswith("a user's"):  # gets no scores under the mask, but is called by SparseMAP alone
            best = structure.map(row[None], mask=allowed[None])[0].detach()
        else:
            best = structure.map(dirty, mask=allowed)
            assert torch.equal(best, structure.map(torch.where(allowed, row, -torch.inf)))
        assert total[place(case, best)] == pytest.approx(total[inside].max(), abs=1e-12)
        checked += 1
    assert checked > 5


@pytest.mark.parametrize("projective", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_trees_of_four_words(projective: bool, single: bool) -> None:
    flat = np.stack([y.reshape(-1) for y in trees(4, projective, single)])
    structure = DependencyTree(projective, single)
    for kind in (torch.round, lambda s: s):
        scores = kind(2 * torch.randn(300, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
        best = structure.map(scores).reshape(300, -1).numpy()
        reached = (scores.reshape(300, -1).numpy() * best).sum(-1)
        assert reached == pytest.approx((scores.reshape(300, -1).numpy() @ flat.T).max(-1), abs=1e-12)
        assert all((flat == y).all(-1).any() for y in best)


def edmonds(weights: dict[tuple[int, int], float], nodes: list[int]) -> dict[int, int] | None:
    """The best heads of nodes, 0 the root, from the weights of arcs (head, modifier): by recursion on one cycle."""
    heads = {}
    for v in nodes:
        into = {h: w for (h, m), w in weights.items() if m == v}
        if not into:
            return None
        heads[v] = max(into, key=lambda h: into[h])
    for v in nodes:
        path = [v]
        while path[-1] in heads and heads[path[-1]] not in path:
            path.append(heads[path[-1]])
        if path[-1] in heads:
            cycle = set(path[path.index(heads[path[-1]]) :])
            break
    else:
        return heads
    new = max(nodes) + 1
    best: dict[tuple[int, int], tuple[float, int, int]] = {}
    for (h, m), w in weights.items():
        if h in cycle and m in cycle:
            continue
        arc = (new if h in cycle else h, new if m in cycle else m)
        gain = w - weights[heads[m], m] if m in cycle else w
        if arc not in best or gain > best[arc][0]:
            best[arc] = (gain, h, m)
    outer = edmonds({arc: gain for arc, (gain, _, _) in best.items()}, [v for v in nodes if v not in cycle] + [new])
    if outer is None:
        return None
    result = {v: heads[v] for v in cycle}
    for m, h in outer.items():
        _, head, modifier = best[h, m]
        result[modifier] = head
    return result


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_trees_of_many_words_agree_with_a_recursion(single: bool, masked: bool) -> None:
    for seed, n in enumerate((7, 8, 15, 16, 17, 30)):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(n, n + 1, generator=generator, dtype=torch.float64)
        mask = torch.rand(n, n + 1, generator=generator) < (0.5 if masked else 2.0)
        mask[:, 0] = mask[:, 0] | masked  # there always is a tree
        mask[torch.arange(n), torch.arange(1, n + 1)] = False
        if masked:
            mask[n // 2] = False
        free = mask & torch.cat([torch.tensor([True]), mask.any(-1)])  # nothing hangs on an absent word
        words = [m + 1 for m in range(n) if free[m].any()]
        arcs = {(h, m): float(scores[m - 1, h]) for m in words for h in range(n + 1) if free[m - 1, h]}
        if single:  # a root that costs much is used once
            arcs = {(h, m): w - 1e3 * (h == 0) for (h, m), w in arcs.items()}
        wanted = edmonds(arcs, words)
        assert wanted is not None
        if single and sum(h == 0 for h in wanted.values()) > 1:
            with pytest.raises(ValueError, match="infeasible"):
                DependencyTree(single_root=True).map(scores, mask=mask)
            continue
        y = DependencyTree(single_root=single).map(scores, mask=mask)
        assert {m + 1: int(y[m].argmax()) for m in range(n) if y[m].any()} == wanted


def test_wide_trees_agree_with_a_greedy_choice_made_acyclic() -> None:
    # Heads that lead to the left, and ahead of all others by far, are the best tree whatever the rest.
    n = 60
    generator = torch.Generator().manual_seed(0)
    heads = torch.stack([torch.randint(0, m + 1, (1,), generator=generator)[0] for m in range(n)])
    scores = torch.randn(n, n + 1, generator=generator) + 100 * torch.nn.functional.one_hot(heads, n + 1)
    assert torch.equal(DependencyTree().map(scores).argmax(-1), heads)


@pytest.mark.parametrize("case", [m for m in MEMBERS if "user" not in m.name], ids=lambda m: m.name)
def test_interpreted_loops_find_the_same(case: Member, set_kernels: Callable[[bool], None]) -> None:
    transition = case.draw(torch.Generator().manual_seed(1))
    scores = scores_like(case, 6, "real")
    best = case.structure(transition).map(scores)
    set_kernels(False)
    assert torch.equal(case.structure(transition).map(scores), best)


@pytest.mark.parametrize("transition", [0.7, -0.7, torch.tensor([0.3, -2.0, 1.0, 0.5, -torch.inf, 0.1, 1.0])])
def test_sequential_subsets_of_every_size(transition: float | torch.Tensor) -> None:
    scores = torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    everything = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 8)
    for k in range(1, 5):
        members = everything[everything.sum(-1) == k]
        pairs = members[:, 1:] * members[:, :-1]
        bonus = torch.where(pairs > 0, torch.as_tensor(transition).double().expand(7), 0.0).sum(-1)
        best = SequentialSubsets(k, transition).map(scores)
        assert torch.equal(best, members[(scores @ members.T + bonus).argmax(-1)])


def test_sequences_of_different_lengths() -> None:
    transition = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = torch.randn(3, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([5, 2, 1])
    mask = (torch.arange(5) < lengths[:, None])[..., None]
    best = Chain(transition).map(torch.where(mask, scores, torch.nan), mask=mask)
    for row, y, length in zip(scores, best, lengths.tolist(), strict=True):
        assert torch.equal(y[:length], Chain(transition).map(row[:length]))
        assert not y[length:].any()


def test_sentences_of_different_lengths() -> None:
    scores = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for structure in (DependencyTree(), DependencyTree(projective=True), DependencyTree(single_root=True)):
        mask = (torch.arange(5) < torch.tensor([5, 3, 1])[:, None])[..., None]
        best = structure.map(scores, mask=mask)
        for row, y, n in zip(scores, best, [5, 3, 1], strict=True):
            assert torch.equal(y[:n, : n + 1], structure.map(row[:n, : n + 1]))
            assert y.sum() == n


def test_masked_rows_and_columns_are_left_out_of_a_matching() -> None:
    scores = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([1, 0, 1, 1]).bool()[:, None] & torch.tensor([0, 1, 1, 0, 1]).bool()
    best = Matching().map(scores, mask=mask)
    assert torch.equal(best[[0, 2, 3]][:, [1, 2, 4]], Matching().map(scores[[0, 2, 3]][:, [1, 2, 4]]))
    assert best.sum() == 3


@pytest.mark.parametrize(
    ("structure", "scores"),
    [
        (
            Matching(),
            torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, -torch.inf, -torch.inf], [0.0, 1.0, 2.0]]),
        ),
        (DependencyTree(), torch.tensor([[-torch.inf, 0.0, 1.0], [-torch.inf, 1.0, 0.0]])),
        (
            DependencyTree(single_root=True),
            torch.tensor([[1.0, 0.0, -torch.inf], [1.0, -torch.inf, 0.0]]),
        ),
        (DependencyTree(projective=True), torch.tensor([[-torch.inf, 0.0, 1.0], [-torch.inf, 1.0, 0.0]])),
        (Chain(torch.full((2, 2), -torch.inf)), torch.zeros(3, 2)),
        (Chain(torch.zeros(2, 2)), torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf], [0.0, 0.0]])),
        (SequentialSubsets(2, -torch.inf), torch.zeros(2)),
    ],
    ids=["matching", "no root", "two roots", "no root, projective", "no step", "a hole", "no neighbours"],
)
def test_what_cannot_be_is_reported(structure, scores) -> None:
    with pytest.raises(ValueError, match="infeasible"):
        structure.map(scores)


def test_fewer_parts_than_k_are_all_chosen_but_k_is_at_most_their_number() -> None:
    scores = torch.tensor([0.5, -torch.inf, 1.0, -torch.inf])
    for structure in (Subsets(3), SequentialSubsets(3, 0.5)):
        assert structure.map(scores).tolist() == [1, 0, 1, 0]
        with pytest.raises(ValueError, match="k must be at most"):
            structure.map(scores[:2])


def test_a_transition_for_each_row() -> None:
    transition = torch.randn(4, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    best = SequentialSubsets(3, transition).map(scores)
    for i in range(4):
        assert torch.equal(best[i], SequentialSubsets(3, transition[i, 0]).map(scores[i]))
    steps = torch.randn(2, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unary = torch.randn(2, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    best = Chain(steps).map(unary)
    for i in range(2):
        assert torch.equal(best[i], Chain(steps[i]).map(unary[i]))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Subsets(0), ValueError, "k must be at least 1"),
        (lambda: Subsets(1.5), TypeError, "k must be an int"),
        (lambda: SequentialSubsets(2, "a"), TypeError, "transition must be a number"),
        (lambda: SequentialSubsets(2, torch.zeros(3)).map(torch.zeros(3)), ValueError, "transition must be a number"),
        (lambda: SequentialSubsets(1, torch.zeros(3, 2)).map(torch.zeros(2, 3)), ValueError, "broadcast to the batch"),
        (lambda: Chain(torch.zeros(2, 3)), ValueError, "transition must have shape"),
        (lambda: Chain(0.5), TypeError, "transition must be a floating-point tensor, got float"),
        (lambda: Chain(torch.zeros(2, 2)).map(torch.zeros(4, 3)), ValueError, "over the 3 states"),
        (lambda: Chain(torch.zeros(2, 2, 2)).map(torch.zeros(4, 2)), ValueError, "T − 1 = 3 or 1"),
        (lambda: Chain(torch.zeros(2, 2)).map(torch.zeros(4)), ValueError, "at least 2 dimensions"),
        (lambda: DependencyTree().map(torch.zeros(3, 3)), ValueError, "N, N \\+ 1"),
        (lambda: Matching().map(torch.zeros(3, 3, dtype=torch.int64)), TypeError, "floating-point"),
        (lambda: Matching().map([[1.0]]), TypeError, "scores must be a floating-point tensor, got list"),
        (lambda: Matching().map(torch.zeros(0, 3)), ValueError, "must not be empty"),
        (lambda: Matching().map(torch.zeros(2, 2), mask=torch.zeros(3).bool()), ValueError, "mask must broadcast"),
    ],
)
def test_bad_input_is_named(make, error, words) -> None:
    with pytest.raises(error, match=words):
        make()
