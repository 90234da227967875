"""LPSparseMAP: factor graphs as an Ω, against quadratic programs and closed forms, and in engines that take one."""

import itertools

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fenchel
from fenchel import FactorGraph, LPSparseMAP, SparseMAP
from fenchel.factors import AtMostOne, Budget, Exactly, Pair, Sequence, Structured, Variables, Xor
from fenchel.hopfield import Hopfield, HopfieldLayer, HopfieldPooling, Memory
from fenchel.structures import DependencyTree, Matching, SequentialSubsets


def apart(graph: FactorGraph, u: Variables) -> None:
    """At most two, and never two neighbours."""
    graph.add(Budget(u, 2))
    for i in range(len(u) - 1):
        graph.add(AtMostOne(u[i : i + 2]))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projected(scores: Tensor) -> Tensor:
    """The same by a quadratic program of cvxpy, row by row."""
    found = []
    for row in scores.reshape(-1, scores.shape[-1]).numpy():
        p = cvxpy.Variable(len(row))
        limits = [p >= 0, p <= 1, cvxpy.sum(p) <= 2, p[1:] + p[:-1] <= 1]
        free = np.isfinite(row)
        limits += [p[i] == 0 for i in np.flatnonzero(~free)]
        objective = cvxpy.Minimize(cvxpy.sum_squares(p - np.where(free, row, 0.0)))
        cvxpy.Problem(objective, limits).solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
        found.append(torch.from_numpy(p.value))
    return torch.stack(found).reshape(scores.shape)


def test_the_choice_is_that_of_a_quadratic_program() -> None:
    scores = normal(2, 3, 6)
    mask = torch.ones(6, dtype=torch.bool)
    mask[1] = False
    omega = LPSparseMAP(apart)
    torch.testing.assert_close(omega.argmax(scores), projected(scores), rtol=0, atol=1e-6)
    hidden = torch.where(mask, scores, -torch.inf)
    torch.testing.assert_close(omega.argmax(scores, mask=mask), projected(hidden), rtol=0, atol=1e-6)
    assert torch.equal(omega.argmax(scores, mask=mask), omega.argmax(hidden))
    torch.testing.assert_close((0.5 * omega).argmax(scores), projected(2 * scores), rtol=0, atol=1e-6)


def test_one_factor_is_its_closed_form() -> None:
    scores = normal(4, 6)
    one, some = LPSparseMAP(lambda graph, u: graph.add(Xor(u))), LPSparseMAP(lambda graph, u: graph.add(Exactly(u, 3)))
    torch.testing.assert_close(one.argmax(scores), fenchel.sparsemax(scores), rtol=0, atol=1e-9)
    torch.testing.assert_close(some.argmax(scores), fenchel.k_subsets(scores, 3), rtol=0, atol=1e-9)
    table = LPSparseMAP(lambda graph, u: graph.add(Structured(u, Matching())), dims=2)
    torch.testing.assert_close(
        table.argmax(normal(2, 3, 3)), SparseMAP(Matching()).argmax(normal(2, 3, 3)), rtol=0, atol=1e-6
    )


def test_maximum_and_loss_are_those_of_the_definition() -> None:
    omega, scores = LPSparseMAP(apart), normal(5, 6)
    p = omega.argmax(scores)
    torch.testing.assert_close(omega(p), p.square().sum(-1) / 2)
    torch.testing.assert_close(omega.max(scores), (p * scores).sum(-1) - omega(p))
    vertices = torch.tensor([v for v in itertools.product((0.0, 1.0), repeat=6) if sum(v) <= 2], dtype=torch.float64)
    vertices = vertices[((vertices[:, 1:] + vertices[:, :-1]) <= 1).all(-1)]
    for y in vertices[::3]:
        target = y.expand(5, 6)
        wanted = omega.max(scores) + omega(target) - (scores * target).sum(-1)
        loss = omega.loss(scores, target)
        torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-8)
        assert (loss >= 0).all()
    assert (omega.loss(10 * vertices - 5, vertices) == 0).all()
    leaf = scores.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(omega.loss(leaf, vertices[:5]).sum(), leaf)
    torch.testing.assert_close(gradient, p - vertices[:5], rtol=0, atol=1e-8)


def test_derivatives() -> None:
    scores = normal(2, 6, seed=3).requires_grad_()
    omega = LPSparseMAP(apart)
    assert gradcheck(omega.argmax, scores, eps=1e-5, atol=1e-5)
    assert gradcheck(omega.max, scores, eps=1e-5, atol=1e-5)
    assert gradgradcheck(omega.max, scores, eps=1e-5, atol=1e-5)
    pull = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)

    def paired(t: Tensor, s: Tensor) -> Tensor:
        def build(graph: FactorGraph, u: Variables) -> None:
            graph.add(Exactly(u, 2))
            graph.add(Pair(u[0], u[1], t))

        return LPSparseMAP(build).argmax(s)

    assert gradcheck(paired, (pull, normal(5, seed=4).requires_grad_()), eps=1e-5, atol=1e-5)


def test_masked_spoilt_and_empty_rows() -> None:
    scores = normal(4, 6)
    scores[0], scores[1, 2] = -torch.inf, torch.nan
    omega = LPSparseMAP(lambda graph, u: graph.add(Xor(u)))
    p = omega.argmax(scores)
    assert (p[0] == 0).all()
    assert p[1].isnan().all()
    torch.testing.assert_close(p[2:], fenchel.sparsemax(scores[2:]), rtol=0, atol=1e-9)
    assert omega.max(scores)[0] == -torch.inf
    assert omega.argmax(scores[:0]).shape == (0, 6)
    assert omega.argmax(scores[2:].float()).dtype == torch.float32


def test_what_an_engine_may_ask() -> None:
    omega = LPSparseMAP(apart)
    assert omega.margin is None
    assert omega.mass(5) is None
    assert not omega.zero_at_vertices
    assert omega.line(normal(5)) is None
    assert omega.config() is None
    assert repr(omega) == "LPSparseMAP(apart, dims=1)"


def test_memories_attention_and_layers_choose_by_it() -> None:
    omega = LPSparseMAP(lambda graph, u: graph.add(Exactly(u, 2)))
    known = fenchel.KSubsets(2)
    patterns, queries = normal(6, 4), normal(3, 4, seed=1)
    mine, theirs = Memory(patterns, omega, 2.0), Memory(patterns, known, 2.0)
    torch.testing.assert_close(mine.step(queries), theirs.step(queries), rtol=0, atol=1e-8)
    torch.testing.assert_close(mine.weights(queries), theirs.weights(queries), rtol=0, atol=1e-8)
    torch.testing.assert_close(mine.retrieve(queries).state, theirs.retrieve(queries).state, rtol=0, atol=1e-5)
    values = normal(6, 5, seed=2)
    found, wanted = (fenchel.attention(queries, patterns, values, o) for o in (omega, known))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)
    x = normal(2, 6, 8)
    for layer in (Hopfield, HopfieldPooling, lambda **k: HopfieldLayer(quantity=6, **k)):
        results = []
        for each in (omega, known):
            torch.manual_seed(0)
            results.append(layer(input_size=8, num_heads=2, omega=each).double()(x))
        torch.testing.assert_close(*results, rtol=0, atol=1e-7)


def test_patterns_are_parts_of_a_table() -> None:
    table = torch.arange(6).reshape(3, 2)
    patterns, queries = normal(6, 4), normal(3, 4, seed=1)
    omega = LPSparseMAP(lambda graph, u: graph.add(Structured(u[table], Matching())))
    weights = Memory(patterns, omega, 1.5).weights(queries)
    scores = 1.5 * (queries @ patterns.T).reshape(3, 3, 2)
    torch.testing.assert_close(weights.reshape(3, 3, 2), SparseMAP(Matching()).argmax(scores), rtol=0, atol=1e-6)
    steps = torch.arange(6).reshape(3, 2)  # three steps of a chain with two states each
    chain = LPSparseMAP(lambda graph, u: graph.add(Sequence(u[steps], torch.eye(2).double())))
    labelled = SparseMAP(fenchel.structures.Chain(torch.eye(2).double())).argmax(scores)
    torch.testing.assert_close(
        Memory(patterns, chain, 1.5).weights(queries).reshape(3, 3, 2), labelled, rtol=0, atol=1e-6
    )
    for structure in (Matching(), DependencyTree()):
        with pytest.raises(ValueError, match=r"along one dimension, the 6 patterns.*LPSparseMAP"):
            Memory(patterns, SparseMAP(structure))


@pytest.mark.parametrize("transition", [0.0, 0.7, -0.4])
def test_both_states_regularized_are_another_temperature(transition: float) -> None:
    """The factor graph of Santos et al.: two states per position, both regularized, by enumeration of subsets."""
    scores, k = normal(5, seed=6).numpy(), 2
    subsets = np.array([y for y in itertools.product((0.0, 1.0), repeat=5) if sum(y) == k])
    higher = transition * (subsets[:, 1:] * subsets[:, :-1]).sum(-1)
    weights = cvxpy.Variable(len(subsets))
    on = subsets.T @ weights
    value = scores @ on + higher @ weights - cvxpy.sum_squares(on) / 2 - cvxpy.sum_squares(1 - on) / 2
    cvxpy.Problem(cvxpy.Maximize(value), [weights >= 0, cvxpy.sum(weights) == 1]).solve(
        solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12
    )
    omega = 2 * SparseMAP(SequentialSubsets(k, transition / 2))
    found = omega.argmax(torch.from_numpy(scores))
    torch.testing.assert_close(found, torch.from_numpy(on.value), rtol=0, atol=1e-5)
    if transition == 0:
        torch.testing.assert_close(found, fenchel.k_subsets(torch.from_numpy(scores) / 2, k), rtol=0, atol=1e-8)


SCORED = LPSparseMAP(lambda graph, u: graph.add(Pair(u[0], u[1], torch.tensor(1.0))))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LPSparseMAP(3), TypeError, "build must be callable"),
        (lambda: LPSparseMAP(apart, 0), ValueError, "dims must be at least 1"),
        (lambda: LPSparseMAP(apart, 2).argmax(normal(5)), ValueError, "at least 2 dimensions"),
        (lambda: LPSparseMAP(apart).argmax(normal(3, 5), 0), ValueError, "dim must be left out"),
        (lambda: SCORED(normal(3)), ValueError, r"omega\(p\) is not known where factors carry scores"),
        (lambda: SCORED.loss(normal(3), normal(3)), ValueError, "the loss is not known where factors carry scores"),
        (lambda: SCORED.max(normal(3)), ValueError, "max is not known where factors carry scores"),
        (lambda: LPSparseMAP(apart).loss(normal(3), torch.tensor(1)), TypeError, "target must be a floating-point"),
        (lambda: LPSparseMAP(apart).loss(normal(3), torch.ones(3).double()), ValueError, "that the factors allow"),
    ],
)
def test_bad_input_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()
