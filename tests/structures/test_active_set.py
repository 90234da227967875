"""The active-set algorithm where it is hard: small transitions, tight tolerances, ties, oracles that are not exact."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from certificates import best_subset, check_certified, check_chain, normal
from torch import Tensor, nn

from fenchel import SparseMAP
from fenchel.structures import Chain, DependencyTree, Matching, SequentialSubsets, Structure
from fenchel.structures.active_set import search
from fenchel.structures.solver import Options


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("states", "steps", "size", "spread"),
    [
        (4, 10, 1e-4, 1e-2), (4, 20, 1e-6, 1.0), (3, 50, 1e-3, 1.0), (2, 30, 1e-8, 1e-3), (6, 15, 1e-2, 100.0),
        (4, 50, 1e-4, 1.0), (4, 50, 1e-6, 1.0), (8, 30, 1e-8, 0.01), (3, 120, 1e-2, 0.1), (10, 20, 1e-5, 10.0),
    ],
)  # fmt: skip
def test_chains_with_small_transitions(states: int, steps: int, size: float, spread: float, dtype: torch.dtype) -> None:
    transition = (size * normal(states, states)).to(dtype)
    scores = (spread * normal(3, steps, states, seed=1)).to(dtype)
    check_chain(scores, transition, SparseMAP(Chain(transition)))


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_sequential_subsets_with_small_transitions(kind: str, size: float) -> None:
    scores = torch.cat([normal(2, 50, seed=8), 0.1 * normal(2, 50, seed=9)])
    transition = size * normal(49, seed=3) if kind == "tensor" else size
    t = np.broadcast_to(np.asarray(transition), (49,))
    omega = SparseMAP(SequentialSubsets(15, transition))
    check_certified(omega, scores, lambda left: best_subset(left, t, 15), lambda y: float((y[:-1] * y[1:] * t).sum()))


def test_the_gap_of_rows_that_stop_early_is_true() -> None:
    transition = 1e-3 * normal(4, 4)
    omega = SparseMAP(Chain(transition), max_iter=40)
    scores = 0.1 * normal(3, 30, 4)
    with pytest.warns(UserWarning, match=r"3 of 3 rows are not solved to tol .* largest gap"):
        assert (omega.solve(scores).gap > 1e-6).all()
    check_chain(scores, transition, omega, solved=False)


@pytest.mark.parametrize("tol", [1e-7, 1e-10])
def test_tight_tolerances_keep_trees_trees(tol: float) -> None:
    structure = DependencyTree()
    for seed in (1, 2, 3):
        scores = 0.3 * normal(16, 20, 21, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is left is rounding error
            mixture = SparseMAP(structure, tol=tol).solve(scores)
        assert mixture.marginals.sum(-1).numpy() == pytest.approx(1.0, abs=1e-13)
        assert mixture.weights.sum(-1).numpy() == pytest.approx(1.0, abs=1e-13)
        left = scores - mixture.marginals
        gap = (left * (structure.map(left) - mixture.marginals)).flatten(1).sum(-1)
        assert gap.max() < 1e-12
        assert mixture.gap.numpy() == pytest.approx(gap.clamp_min(0).numpy(), abs=1e-13)


class Forgetful(Structure):
    """One part of n, by an oracle that takes the lowest score from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def map(self, scores: Tensor) -> Tensor:
        self.calls += 1
        at = scores.argmax(-1) if self.calls < 3 else scores.argmin(-1)
        return nn.functional.one_hot(at, scores.shape[-1]).to(scores)


def test_an_oracle_that_is_not_exact_is_reported() -> None:
    scores = torch.tensor([[0.3, 0.2, 0.1, -0.4], [5.0, 0.0, 0.0, 0.0]])
    with pytest.warns(UserWarning, match=r"Forgetful.map is not exact: in 1 of 2 rows"):
        SparseMAP(Forgetful()).argmax(scores)


def slopes(omega: SparseMAP, scores: Tensor, direction: Tensor) -> Tensor:
    """The gradient of ⟨direction, marginals⟩, without a warning."""
    scores = scores.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (gradient,) = torch.autograd.grad((omega.argmax(scores) * direction).sum(), scores)
    return gradient


def projected(direction: Tensor, free: Tensor, constraints: list[Tensor]) -> Tensor:
    """The direction projected on what is zero outside ``free`` and orthogonal to the constraints."""
    rows = torch.stack([c.double()[free] for c in constraints])
    result = torch.zeros_like(direction)
    result[free] = direction[free] - torch.linalg.pinv(rows) @ (rows @ direction[free])
    return result


def indicators(n: int, m: int, columns: bool) -> list[Tensor]:
    """Each row of an (n, m) matrix, and each column, as zeros and ones."""
    ones = torch.zeros(n + m, n, m)
    for i in range(n):
        ones[i, i] = 1
    for j in range(m):
        ones[n + j, :, j] = 1
    return list(ones if columns else ones[:n])


@pytest.mark.parametrize("spread", [0.0, 1e-4])
@pytest.mark.parametrize("n", [4, 12, 33, 64])
def test_a_flat_matching_moves_in_all_directions(n: int, spread: float) -> None:
    g = normal(n, n)
    wanted = g - g.mean(0) - g.mean(1, keepdim=True) + g.mean()
    omega = SparseMAP(Matching(), tol=1e-6 if n < 64 else 1e-4)
    assert torch.allclose(slopes(omega, spread * normal(n, n, seed=1), g), wanted, atol=1e-10)


@pytest.mark.parametrize(("n", "m"), [(5, 9), (24, 15)])
def test_a_matching_of_few_with_many_moves_where_it_has_room(n: int, m: int) -> None:
    g = normal(n, m)
    # Those on the shorter side are all in a pair, those on the longer side need not be.
    wanted = g - g.mean(1 if n < m else 0, keepdim=True)
    assert torch.allclose(slopes(SparseMAP(Matching()), torch.zeros(n, m).double(), g), wanted, atol=1e-10)


def test_a_masked_matching_of_zeros_moves_within_its_mask() -> None:
    n = 12
    mask = (torch.arange(n)[:, None] % 3 == torch.arange(n) % 3) | torch.eye(n, dtype=torch.bool)
    mask[:, 2], mask[5] = False, False  # one column and one row are left out
    g = normal(n, n)
    scores = torch.where(mask, 0.0, -torch.inf).double()
    omega = SparseMAP(Matching())
    wanted = projected(g, omega.argmax(scores) > 1e-9, indicators(n, n, True))
    assert torch.allclose(slopes(omega, scores, g), wanted, atol=1e-9)


def test_matchings_of_duplicate_rows_move_within_their_support() -> None:
    n = 12
    scores = (0.4 * normal(n, n, seed=2)).repeat_interleave(3, 0)[:n]
    omega, g = SparseMAP(Matching()), normal(n, n)
    # Matchings are the nonnegative matrices with sums of one: a face is known by its zeros.
    wanted = projected(g, omega.argmax(scores) > 1e-9, indicators(n, n, True))
    assert torch.allclose(slopes(omega, scores, g), wanted, atol=1e-9)


@pytest.mark.parametrize("n", [5, 16, 40])
@pytest.mark.parametrize("raised", [False, True], ids=["single root", "raised root"])
def test_trees_of_zeros_move_in_all_directions(n: int, raised: bool) -> None:
    scores, g = torch.zeros(n, n + 1, dtype=torch.float64), normal(n, n + 1)
    free = torch.arange(n)[:, None] + 1 != torch.arange(n + 1)
    # With equal scores every arc has a share: words have one head, and with a single root there is one on the root.
    constraints = indicators(n, n + 1, True)[: n if raised else n + 1]
    scores[:, 0] = 0.1 if raised else 0.0  # without a raised root there is a kink
    omega = SparseMAP(DependencyTree(single_root=not raised))
    assert torch.allclose(slopes(omega, scores, g), projected(g, free, constraints), atol=1e-10)


@pytest.mark.parametrize("trained", [False, True])
def test_chains_and_sequences_of_zeros_move_in_all_directions(trained: bool) -> None:
    g = normal(30, 4)
    transition = torch.zeros(4, 4, dtype=torch.float64, requires_grad=trained)
    wanted = g - g.mean(-1, keepdim=True)
    assert torch.allclose(slopes(SparseMAP(Chain(transition)), torch.zeros(30, 4).double(), g), wanted, atol=1e-10)
    flat = torch.zeros(40, dtype=torch.float64)
    omega = SparseMAP(SequentialSubsets(12, torch.zeros(39, dtype=torch.float64, requires_grad=trained)))
    assert torch.allclose(slopes(omega, flat, g.reshape(-1)[:40]), g.reshape(-1)[:40] - g.reshape(-1)[:40].mean())


def test_chains_with_more_ties_than_calls() -> None:
    g = normal(110, 10)
    scores = torch.zeros(110, 10, dtype=torch.float64, requires_grad=True)
    wanted = g - g.mean(-1, keepdim=True)
    assert torch.allclose(slopes(SparseMAP(Chain(torch.zeros(10, 10))), scores, g), wanted, atol=1e-10)
    transition = torch.zeros(10, 10, requires_grad=True)
    with pytest.warns(UserWarning, match="derivatives of higher-order scores are incomplete in 1 of 1 rows"):
        marginals = SparseMAP(Chain(transition), max_iter=30).argmax(scores)
    (gradient,) = torch.autograd.grad((marginals * g).sum(), scores)
    assert torch.allclose(gradient, wanted, atol=1e-10)
    omega, flat = SparseMAP(SequentialSubsets(20, torch.zeros(59)), max_iter=40), torch.zeros(60, dtype=torch.float64)
    assert torch.allclose(slopes(omega, flat, g.reshape(-1)[:60]), g.reshape(-1)[:60] - g.reshape(-1)[:60].mean())


class Pairs(Structure):
    """One part of each pair of neighbours, which only the oracle knows."""

    fixed_dims = 1

    def map(self, scores: Tensor) -> Tensor:
        pairs = scores.reshape(len(scores), -1, 2)
        return nn.functional.one_hot(pairs.argmax(-1), 2).to(scores).reshape(scores.shape)


class Rows(Pairs):
    """One part of each row of eight."""

    event_dim = 2

    def map(self, scores: Tensor) -> Tensor:
        return nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)


@pytest.mark.parametrize("flat", [True, False])
def test_equations_that_do_not_tell_all_of_a_face_are_not_trusted(flat: bool) -> None:
    g = normal(2, 160)
    scores = torch.zeros(2, 160, dtype=torch.float64) if flat else 0.02 * normal(2, 160, seed=1)
    pairs = g.reshape(2, 80, 2)
    wanted = (pairs - pairs.mean(-1, keepdim=True)).reshape(2, 160)
    assert torch.allclose(slopes(SparseMAP(Pairs()), scores, g), wanted, atol=1e-10)
    g, scores = normal(2, 20, 8), scores.reshape(2, 20, 8)
    assert torch.allclose(slopes(SparseMAP(Rows()), scores, g), g - g.mean(-1, keepdim=True), atol=1e-10)


def test_derivatives_of_every_kind_where_many_tie() -> None:
    n, omega = 10, SparseMAP(Matching())
    scores, g = torch.zeros(2, n, n, dtype=torch.float64), normal(2, n, n)
    scores[1] = normal(n, n, seed=3)  # a row without ties beside one with many
    wanted = g - g.mean(-2, keepdim=True) - g.mean(-1, keepdim=True) + g.mean((-2, -1), keepdim=True)
    with torch.no_grad():
        _, tangent = torch.func.jvp(omega.argmax, (scores,), (g,))
    (pulled,) = torch.func.vjp(omega.argmax, scores)[1](g)
    for slope in (tangent, pulled, slopes(omega, scores, g)):
        assert torch.allclose(slope[0], wanted[0], atol=1e-10)
    assert torch.allclose(tangent[1], pulled[1], atol=1e-10)
    assert torch.autograd.gradgradcheck(lambda s: omega.max(s).square(), scores[:1, :3, :3].clone().requires_grad_())


@pytest.mark.parametrize(
    "structure", [Matching(), DependencyTree(), Chain(0.1 * normal(5, 5)), SequentialSubsets(4, 0.2)]
)
@pytest.mark.parametrize("seed", range(3))
def test_slopes_at_blocks_of_ties_are_finite_differences(structure: Structure, seed: int) -> None:
    shape = {"Matching": (11, 11), "DependencyTree": (10, 11), "Chain": (12, 5), "SequentialSubsets": (14,)}
    scores = (2 * normal(*shape[type(structure).__name__], seed=seed)).round() / 2
    omega, g = SparseMAP(structure), normal(*scores.shape, seed=7)
    tangent = normal(*scores.shape, seed=9)
    step = 1e-5
    after, now, before = (omega.argmax(scores + t * step * tangent) for t in (1, 0, -1))
    slope = float((slopes(omega, scores, g) * tangent).sum())
    one_sided = [float((g * d).sum()) / step for d in (after - now, now - before)]
    # Marginals are piecewise linear: at a kink, an element of the generalized Jacobian lies between the two along a
    # line through the scores only if the face is the same on both sides.
    if one_sided[0] == pytest.approx(one_sided[1], abs=1e-7):
        assert slope == pytest.approx(one_sided[0], abs=1e-6)


def vertex_projectors(vertices: np.ndarray, theta: np.ndarray, mu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Projectors on the directions of the smallest face that holds μ, and of the face of all that tie."""
    tied = vertices[(vertices - mu) @ (theta - mu) > -1e-9]
    inside = tied[[in_smallest_face(tied, mu, y) for y in tied]]
    return projector(inside - mu), projector(tied - mu)


def in_smallest_face(tied: np.ndarray, mu: np.ndarray, y: np.ndarray) -> bool:
    """Whether μ can go a little away from y and stay in the convex hull."""
    from scipy.optimize import linprog

    target = mu + 1e-4 * (mu - y)
    equations = np.vstack([tied.T, np.ones(len(tied))])
    result = linprog(np.zeros(len(tied)), A_eq=equations, b_eq=[*target, 1.0])
    return bool(result.status == 0)


def projector(directions: np.ndarray) -> np.ndarray:
    _, values, right = np.linalg.svd(directions)
    basis = right[: int((values > 1e-6).sum())]
    return basis.T @ basis


def test_at_a_kink_the_derivative_is_that_of_a_face() -> None:
    # Trees of zeros: the sum of the root's arcs is 1, and may grow but not shrink.
    rows = [np.eye(4)[list(h)].reshape(-1) for h in itertools.product(range(4), repeat=3) if hangs_together(h)]
    omega = SparseMAP(DependencyTree())
    theta = torch.zeros(3, 4, dtype=torch.float64)
    mu = omega.argmax(theta).reshape(-1).numpy()
    jacobian = torch.autograd.functional.jacobian(omega.argmax, theta).reshape(12, 12).numpy()
    faces = vertex_projectors(np.stack(rows), theta.reshape(-1).numpy(), mu)
    assert not np.allclose(*faces)
    assert any(np.allclose(jacobian, face, atol=1e-9) for face in faces)


def hangs_together(heads: tuple[int, ...]) -> bool:
    at = list(range(1, len(heads) + 1))
    for _ in heads:
        at = [heads[w - 1] if w else 0 for w in at]
    return not any(at)


def test_a_tied_row_takes_no_room_from_the_others() -> None:
    scores = normal(40, 12, 13)
    scores[7] = 0.0
    found = search(DependencyTree(), scores, None, None, Options(1000, 1e-6, True))
    largest = max(group.parts.shape[1] for group in found.groups)
    assert largest > 100  # members of the tied row
    assert sum(group.jacobian.numel() for group in found.groups) < largest**2 + 40 * 64**2
    assert sorted(torch.cat([group.rows for group in found.groups]).tolist()) == list(range(40))
    omega, g = SparseMAP(DependencyTree(), max_iter=1000), normal(40, 12, 13, seed=5)
    kept = torch.arange(40) != 7
    assert torch.allclose(slopes(omega, scores, g)[kept], slopes(omega, scores[kept], g[kept]), atol=1e-12)


@pytest.mark.parametrize("name", ["Chain", "SequentialSubsets"])
def test_rows_with_transitions_of_their_own_may_differ_in_size(name: str) -> None:
    shape, own = {"Chain": ((20, 4), (19, 4, 4)), "SequentialSubsets": ((70,), (69,))}[name]
    scores, transition = normal(2, 2, *shape), 0.3 * normal(2, 2, *own, seed=1)
    scores[0, 1], transition[0, 1] = 0.0, 0.0  # a face of many dimensions beside faces of few
    g = normal(2, 2, *shape, seed=2)

    def both(s: Tensor, t: Tensor, d: Tensor) -> list[Tensor]:
        s, t = s.clone().requires_grad_(), t.clone().requires_grad_()
        omega = SparseMAP(Chain(t) if name == "Chain" else SequentialSubsets(20, t))
        mixture = omega.solve(s)
        assert torch.allclose(mixture.weights.sum(-1), torch.ones((), dtype=torch.float64))
        return list(torch.autograd.grad((mixture.marginals * d).sum(), (s, t)))

    whole = both(scores, transition, g)
    for i, j in itertools.product(range(2), range(2)):
        alone = both(scores[i, j], transition[i, j], g[i, j])
        for a, b in zip(whole, alone, strict=True):
            assert torch.allclose(a[i, j], b, atol=1e-10)


def test_faces_of_too_many_dimensions_are_warned_of() -> None:
    scores = torch.zeros(7, 8, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="derivatives are incomplete in 1 of 1 rows"):
        SparseMAP(DependencyTree(), max_iter=20).argmax(scores)


@pytest.mark.parametrize("through", ["argmax", "loss", "max"])
def test_a_row_of_nan_that_is_left_out_leaves_a_shared_transition_alone(through: str) -> None:
    scores = normal(3, 6, 3)
    scores[1, 2, 0] = torch.nan
    target = Chain(torch.eye(3)).map(scores.nan_to_num())

    def slope(rows: Tensor, y: Tensor, kept: list[int]) -> Tensor:
        transition = (0.3 * normal(3, 3, seed=4)).requires_grad_()
        omega = SparseMAP(Chain(transition))
        value = {"argmax": omega.argmax, "max": omega.max}.get(through, lambda s: omega.loss(s, y))(rows)
        (gradient,) = torch.autograd.grad(value[kept].square().sum(), transition)
        return gradient

    wanted = slope(scores[[0, 2]], target[[0, 2]], [0, 1])
    assert wanted.abs().max() > 0
    assert torch.allclose(slope(scores, target, [0, 2]), wanted, atol=1e-12)
