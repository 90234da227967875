"""SparseMAP against a quadratic program over all structures; its derivatives, loss, margin and certificates.

One file, because every test compares with the same quadratic program, or takes its structures from one list.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import cvxpy
import numpy as np
import pytest
import torch
from catalogue import MEMBERS, Member, Mountain
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp

import fenchel
from fenchel import SparseMAP
from fenchel.structures import AtMost, Chain, DependencyTree, Matching, SequentialSubsets, Structure, Subsets

every_member = pytest.mark.parametrize("case", MEMBERS, ids=lambda m: m.name)
every_transition = pytest.mark.parametrize(
    "case", [m for m in MEMBERS if m.transition is not None], ids=lambda m: m.name
)


def draw(case: Member, rows: int, kind: str = "real", seed: int = 0) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, *case.shape, generator=generator, dtype=torch.float64)
    transition = case.draw(generator, kind)
    if kind == "half":
        return (2 * scores).round() / 2, None if transition is None else (2 * transition).round() / 2
    return scores.round() if kind == "integer" else scores, transition


def flat(case: Member) -> np.ndarray:
    return np.stack([y.reshape(-1) for y in case.members])


def best_mixture(case: Member, scores: Tensor, transition: Tensor | None) -> tuple[np.ndarray, float]:
    """Marginals and value of the quadratic program over all members."""
    y, h = flat(case), case.scores_of(transition)
    p = cvxpy.Variable(len(y), nonneg=True)
    theta = scores.numpy().reshape(-1)
    gain = (y @ theta + h) @ p - cvxpy.sum_squares(y.T @ p) / 2
    problem = cvxpy.Problem(cvxpy.Maximize(gain), [cvxpy.sum(p) == 1])
    value = problem.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    return y.T @ p.value, float(value)


@every_member
def test_marginals_and_maximum_agree_with_a_quadratic_program(case: Member) -> None:
    scores, transition = draw(case, 3)
    omega = SparseMAP(case.structure(transition))
    marginals, maximum = omega.argmax(scores).detach(), omega.max(scores).detach()
    constant = 0.0
    if not omega.structure.has_higher and omega.structure.fixed_dims:
        constant = flat(case)[0].sum() / 2
    for row, mu, value in zip(scores, marginals, maximum, strict=True):
        wanted, reached = best_mixture(case, row, transition)
        assert mu.reshape(-1).numpy() == pytest.approx(wanted, abs=2e-6)
        assert value.item() - constant == pytest.approx(reached, abs=1e-9)


@every_member
@pytest.mark.parametrize("kind", ["real", "integer", "half"])
def test_no_member_improves_on_the_mixture(case: Member, kind: str) -> None:
    scores, transition = draw(case, 25, kind)
    mixture = SparseMAP(case.structure(transition)).solve(scores)
    y, h = flat(case), case.scores_of(transition)
    weights = mixture.weights.detach().numpy()
    structures = mixture.structures.reshape(*weights.shape, -1).numpy()
    assert weights.min() >= 0
    assert weights.sum(-1) == pytest.approx(np.ones(len(scores)), abs=1e-13)
    assert mixture.gap.max() <= 1e-12
    for i, theta in enumerate(scores.reshape(len(scores), -1).numpy()):
        mu, reached = np.zeros(y.shape[1]), 0.0
        for weight, member in zip(weights[i], structures[i], strict=True):
            if weight > 0:
                (place,) = np.flatnonzero((y == member).all(-1))
                mu, reached = mu + weight * member, reached + weight * h[place]
        assert mixture.marginals[i].detach().reshape(-1).numpy() == pytest.approx(mu, abs=1e-14)
        assert (y @ (theta - mu) + h).max() <= (theta - mu) @ mu + reached + 1e-12


@every_member
def test_members_of_a_mixture_are_few_and_affinely_independent(case: Member) -> None:
    scores, transition = draw(case, 25, "integer")
    mixture = SparseMAP(case.structure(transition)).solve(scores)
    for structures, weights in zip(mixture.structures, mixture.weights.detach(), strict=True):
        chosen = structures[weights > 0].flatten(1)
        differences = (chosen[1:] - chosen[0]).numpy()
        assert np.linalg.matrix_rank(differences) == len(differences) if len(differences) else True


@every_member
def test_gradients_of_the_marginals(case: Member) -> None:
    scores, transition = draw(case, 1, seed=3)
    omega = SparseMAP(case.structure(transition))
    scores.requires_grad_()
    assert gradcheck(omega.argmax, (scores,), check_forward_ad=True)
    assert gradcheck(omega.max, (scores,), check_forward_ad=True)
    # Second derivatives of the maximum are the first ones of the marginals; those of the marginals are zero.
    assert gradgradcheck(omega.max, (scores,))
    (slope,) = torch.autograd.grad(omega.argmax(scores).square().sum(), scores, create_graph=True)
    assert slope.requires_grad


@every_member
def test_gradients_of_the_weights(case: Member) -> None:
    scores, transition = draw(case, 3, seed=5)
    scores.requires_grad_()
    if transition is not None:
        transition.requires_grad_()
    structure = case.structure(transition)
    mixture = SparseMAP(structure).solve(scores)
    tangent = torch.randn_like(scores)
    turn = None if transition is None else torch.randn_like(transition)
    inputs = (scores,) if transition is None else (scores, next(structure.parameters(), transition))
    y = flat(case)
    h, moved = case.scores_of(transition), 0.0
    if turn is not None:
        # Higher-order scores are linear in the transition: one difference is the derivative.
        moved = case.scores_of(transition.detach() + turn) - h
    for i, weights in enumerate(mixture.weights):
        kept = torch.nonzero(weights.detach() > 0).reshape(-1)
        members = mixture.structures[i][kept].flatten(1).numpy()
        places = [int(np.flatnonzero((y == member).all(-1))[0]) for member in members]
        # Weights of fixed members solve [0 1ᵀ; 1 G] (λ, p) = (1, q): so do their derivatives, with (0, dq).
        bordered = np.block(
            [[np.zeros((1, 1)), np.ones((1, len(members)))], [np.ones((len(members), 1)), members @ members.T]]
        )
        change = members @ tangent[i].reshape(-1).numpy() + (0.0 if turn is None else moved[places])
        wanted = np.linalg.solve(bordered, np.concatenate([[0.0], change]))[1:]
        for weight, value in zip(weights[kept], wanted, strict=True):
            slopes = torch.autograd.grad(weight, inputs, retain_graph=True, allow_unused=True)
            reached = (slopes[0] * tangent).sum()
            if turn is not None and slopes[1] is not None:
                reached = reached + (slopes[1] * turn).sum()
            assert reached.item() == pytest.approx(value, abs=1e-10)


def rebuilt(case: Member, transition: Tensor) -> SparseMAP:
    """SparseMAP with a transition that is a tensor of a graph."""
    return SparseMAP(case.structure(transition))


@pytest.mark.parametrize(
    "case", [m for m in MEMBERS if m.transition is not None and "user" not in m.name], ids=lambda m: m.name
)
def test_gradients_reach_the_transition(case: Member) -> None:
    scores, transition = draw(case, 1, seed=4)
    inputs = (scores.requires_grad_(), transition.requires_grad_())
    assert gradcheck(lambda s, t: rebuilt(case, t).argmax(s), inputs, check_forward_ad=True)
    assert gradcheck(lambda s, t: rebuilt(case, t).max(s), inputs, check_forward_ad=True)
    assert gradgradcheck(lambda s, t: rebuilt(case, t).max(s), inputs)
    target = torch.from_numpy(case.members[0][None])
    assert gradcheck(lambda s, t: rebuilt(case, t).loss(s, target), inputs)


@every_transition
def test_parameters_are_found_and_trained(case: Member) -> None:
    scores, transition = draw(case, 2, seed=4)
    parameter = nn.Parameter(transition)
    omega = SparseMAP(case.structure(parameter))
    assert [p is parameter for p in omega.parameters()] == [True]
    omega.argmax(scores).square().sum().backward()
    step = 1e-6
    wanted = torch.empty_like(transition).reshape(-1)
    for i in range(transition.numel()):
        values = []
        for sign in (1, -1):
            moved = transition.clone().reshape(-1)
            moved[i] += sign * step
            values.append(
                SparseMAP(case.structure(moved.reshape(transition.shape))).argmax(scores).square().sum().item()
            )
        wanted[i] = (values[0] - values[1]) / (2 * step)
    assert torch.allclose(parameter.grad.reshape(-1), wanted, atol=1e-7)


@pytest.mark.parametrize(
    "case", [m for m in MEMBERS if "Tree" not in m.name and "user" not in m.name], ids=lambda m: m.name
)
def test_at_scores_of_zero_marginals_move_in_every_direction_of_the_face(case: Member) -> None:
    # Two structures would do for the optimum, but not for its derivative. (Trees have a kink there.)
    scores, transition = draw(case, 1)
    scores = torch.zeros_like(scores)
    transition = None if transition is None else torch.zeros_like(transition)
    omega = SparseMAP(case.structure(transition))
    if case.name == "AtMost":  # the empty set is a vertex
        scores = scores + 0.3
    assert gradcheck(omega.argmax, (scores.requires_grad_(),))


def test_transformations_of_functions() -> None:
    scores = torch.randn(2, 6, dtype=torch.float64)
    transition = torch.randn(5, dtype=torch.float64)
    omega = SparseMAP(SequentialSubsets(2, nn.Parameter(transition)))
    backward = jacrev(omega.argmax)(scores)
    assert torch.allclose(backward, jacfwd(omega.argmax)(scores), atol=1e-12)
    v = torch.randn_like(scores)
    _, pushed = jvp(omega.argmax, (scores,), (v,))
    assert torch.allclose(pushed, torch.tensordot(backward, v, 2), atol=1e-12)
    _, pull = vjp(omega.argmax, scores)
    assert torch.allclose(pull(v)[0], pushed, atol=1e-12)  # the Jacobian is symmetric
    loss = grad(lambda p: functional_call(omega, p, (torch.ones(6).double().where(scores[0] > 0.1, 0.0),)).sum())
    by_name = {name: p.detach() for name, p in omega.named_parameters()}
    assert loss(by_name)["structure.transition"].shape == (5,)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(omega.argmax)(scores)


def test_compiled_graphs_break_or_raise() -> None:
    omega = SparseMAP(Matching())
    scores = torch.randn(2, 3, 3)
    with pytest.raises(Exception, match=r"disable|SparseMAP|Unsupported"):
        torch.compile(omega.argmax, fullgraph=True, backend="eager")(scores)
    assert torch.equal(torch.compile(omega.argmax, backend="eager")(scores), omega.argmax(scores))


@pytest.mark.parametrize("structure", [Subsets(2), AtMost(2), SequentialSubsets(2)], ids=str)
def test_closed_forms_go_into_graphs(structure: Structure) -> None:
    omega = SparseMAP(structure)
    scores = torch.randn(4, 6)
    assert torch.allclose(torch.compile(omega.argmax, fullgraph=True, backend="eager")(scores), omega.argmax(scores))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_closed_forms_agree_with_the_active_set(k: int) -> None:
    scores = torch.randn(30, 9, dtype=torch.float64)
    scores[:10] = scores[:10].round()
    mask = torch.rand(30, 9) < 0.8
    for structure in (Subsets(k), AtMost(k)):
        omega = SparseMAP(structure)
        assert torch.allclose(omega.argmax(scores), omega.solve(scores).marginals, atol=1e-12)
        assert torch.allclose(omega.argmax(scores, mask=mask), omega.solve(scores, mask=mask).marginals, atol=1e-12)
    wanted = fenchel.k_subsets(scores, k)
    assert torch.equal(SparseMAP(Subsets(k)).argmax(scores), wanted)
    plain = SparseMAP(SequentialSubsets(k, torch.zeros(8, dtype=torch.float64)))
    assert torch.allclose(plain.argmax(scores), wanted, atol=1e-12)
    assert torch.allclose(SparseMAP(Subsets(k)).max(scores), fenchel.KSubsets(k).max(scores), atol=1e-12)
    target = torch.zeros_like(scores).scatter(-1, torch.rand_like(scores).topk(k, -1).indices, 1.0)
    assert torch.allclose(SparseMAP(Subsets(k)).loss(scores, target), fenchel.KSubsets(k).loss(scores, target))


@every_member
def test_a_vertex_comes_out_exactly_if_it_has_its_margin(case: Member) -> None:
    scores, transition = draw(case, 60)
    scores = scores * torch.linspace(0.5, 6.0, 60, dtype=torch.float64).reshape(-1, *[1] * len(case.shape))
    omega = SparseMAP(case.structure(transition))
    marginals = omega.argmax(scores).detach().reshape(60, -1).numpy()
    y, h = flat(case), case.scores_of(transition)
    hits = 0
    for theta, mu in zip(scores.reshape(60, -1).numpy(), marginals, strict=True):
        # (θ − y)ᵀ(y − y′) + h(y) − h(y′) ≥ 0 for all y′, for each y in turn.
        held = [((theta - y[i]) @ (y[i] - y).T + h[i] - h >= 0).all() for i in range(len(y))]
        vertex = [np.array_equal(mu, member) for member in y]
        assert vertex == held
        hits += any(held)
    assert 5 < hits < 60


@every_member
def test_the_violation_and_the_loss_are_zero_exactly_at_the_choice(case: Member) -> None:
    scores, transition = draw(case, 30)
    scores = scores * torch.linspace(0.5, 6.0, 30, dtype=torch.float64).reshape(-1, *[1] * len(case.shape))
    omega = SparseMAP(case.structure(transition))
    target = torch.from_numpy(np.stack([case.members[i % len(case.members)] for i in range(30)]))
    if case.name.startswith("a user's") is False:
        target[::2] = omega.structure.map(scores[::2]).detach()
    violation, loss = omega.violation(scores, target), omega.loss(scores, target).detach()
    chosen = (omega.argmax(scores).detach() == target).flatten(1).all(-1)
    assert torch.equal(violation == 0, chosen)
    assert (loss >= 0).all()
    assert (loss[chosen] < 1e-12).all()
    assert (loss[~chosen] > 1e-9).all()


@every_member
def test_the_loss_is_fenchel_youngs(case: Member) -> None:
    scores, transition = draw(case, 4)
    omega = SparseMAP(case.structure(transition))
    target = torch.from_numpy(np.stack(case.members[:4] if len(case.members) > 3 else case.members[:1] * 4))
    scores.requires_grad_()
    loss = omega.loss(scores, target)
    inner = (scores * target).flatten(1).sum(-1)
    assert torch.allclose(loss, omega.max(scores) + omega(target) - inner, atol=1e-12)
    (slope,) = torch.autograd.grad(loss.sum(), scores)
    assert torch.allclose(slope, omega.argmax(scores) - target, atol=1e-12)
    assert torch.allclose(fenchel.fy_loss(scores, target, omega), loss.mean())


def test_omega_is_zero_at_structures_of_one_size_without_higher_order_scores() -> None:
    for case in MEMBERS:
        transition = case.draw(torch.Generator().manual_seed(0))
        structure = case.structure(transition)
        y = torch.from_numpy(np.stack(case.members))
        if structure.fixed_dims and not structure.has_higher:
            wanted = np.zeros(len(y))
        else:
            wanted = y.flatten(1).sum(-1).numpy() / 2 - case.scores_of(transition)
        assert SparseMAP(structure)(y).detach().numpy() == pytest.approx(wanted, abs=1e-12)


def test_a_warm_start_changes_nothing_but_the_number_of_calls() -> None:
    scores = torch.randn(20, 8, 9, dtype=torch.float64)
    omega = SparseMAP(DependencyTree())
    cold = omega.solve(scores)
    again = omega.solve(scores, start=cold)
    assert torch.allclose(again.marginals, cold.marginals, atol=1e-12)
    assert (again.iterations < cold.iterations / 2 + 1).all()
    moved = scores + 0.01 * torch.randn_like(scores)
    warm, fresh = omega.solve(moved, start=cold.structures), omega.solve(moved)
    assert torch.allclose(warm.marginals, fresh.marginals, atol=1e-12)
    assert warm.iterations.sum() < fresh.iterations.sum() / 2
    other = omega.solve(-scores, start=cold)  # of no use, and no harm
    assert torch.allclose(other.marginals, omega.argmax(-scores), atol=1e-12)
    with pytest.raises(ValueError, match="start must hold structures"):
        omega.solve(scores, start=cold.structures[0])


def test_too_few_iterations_are_warned_of_with_a_gap_that_holds() -> None:
    scores = torch.randn(5, 8, 9, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"of 5 rows are not solved to tol .* max_iter = 3 .* gap is"):
        mixture = SparseMAP(DependencyTree(), max_iter=3).solve(scores)
    exact = SparseMAP(DependencyTree()).argmax(scores)
    assert (mixture.iterations <= 3).all()
    distance = (mixture.marginals - exact).flatten(1).square().sum(-1)
    assert (distance <= 2 * mixture.gap + 1e-12).all()
    assert (mixture.gap > 1e-6).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SparseMAP(DependencyTree()).solve(scores)


@pytest.mark.parametrize("case", [m for m in MEMBERS if "user" not in m.name], ids=lambda m: m.name)
def test_interpreted_loops_find_the_same(case: Member, set_kernels: Callable[[bool], None]) -> None:
    scores, transition = draw(case, 2)
    compiled = SparseMAP(case.structure(transition)).solve(scores).marginals
    set_kernels(False)
    assert torch.allclose(SparseMAP(case.structure(transition)).solve(scores).marginals, compiled, atol=1e-12)


def test_later_searches_leave_what_was_found_unchanged() -> None:
    omega = SparseMAP(DependencyTree())
    scores = [torch.randn(7, n, n + 1, dtype=torch.float64, requires_grad=True) for n in (9, 6, 10, 6)]
    before = [omega.solve(s) for s in scores]
    kept = [(m.marginals.detach().clone(), m.structures.clone(), m.weights.detach().clone()) for m in before]
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(omega.solve, 3 * scores))
    for mixture, (marginals, structures, weights) in zip(before + again, 4 * kept, strict=True):
        assert torch.equal(mixture.marginals, marginals)
        assert torch.equal(mixture.structures, structures)
        assert torch.equal(mixture.weights, weights)
    for s, mixture in zip(scores, before, strict=True):
        mixture.marginals.square().sum().backward()
        found, s.grad = s.grad, None
        omega.argmax(s).square().sum().backward()
        assert torch.equal(found, s.grad)


@pytest.mark.parametrize("gamma", [0.5, 3.0, torch.tensor(0.7, dtype=torch.float64)])
@every_member
def test_another_temperature(case: Member, gamma: float | Tensor) -> None:
    scores, transition = draw(case, 3)
    omega = SparseMAP(case.structure(transition))
    cooled = gamma * omega
    target = torch.from_numpy(np.stack(case.members[:1] * 3))
    assert torch.allclose(cooled.argmax(scores), omega.argmax(scores / gamma), atol=1e-12)
    assert torch.allclose(cooled.max(scores), gamma * omega.max(scores / gamma), atol=1e-12)
    assert torch.allclose(cooled.loss(scores, target), gamma * omega.loss(scores / gamma, target), atol=1e-12)
    assert torch.allclose(cooled(target), gamma * omega(target), atol=1e-12)


@every_member
def test_gradients_in_the_temperature(case: Member) -> None:
    """By the envelope theorem, with V of a quadratic program: ∂/∂γ γV(s/γ) = V(s/γ) − ⟨s/γ, μ⟩; else by differences."""
    scores, transition = draw(case, 3)
    omega = SparseMAP(case.structure(transition))
    gamma = torch.tensor([0.6, 1.0, 2.5], dtype=torch.float64).reshape(3, *(1,) * len(case.shape)).requires_grad_()
    target = torch.from_numpy(np.stack(case.members[:1] * 3))
    (slope,) = torch.autograd.grad((gamma * omega).max(scores).sum(), gamma)
    constant = 0.0
    if not omega.structure.has_higher and omega.structure.fixed_dims:
        constant = flat(case)[0].sum() / 2
    for found, row, each in zip(slope.reshape(-1).tolist(), scores, gamma.reshape(-1).tolist(), strict=True):
        mu, value = best_mixture(case, row / each, transition)
        assert found == pytest.approx(value + constant - float(row.numpy().reshape(-1) @ mu) / each, abs=1e-5)
    direction = torch.randn(scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    functions = (
        lambda g: (direction * (g * omega).argmax(scores)).sum(),
        lambda g: (g * omega).loss(scores, target).sum(),
    )
    for function in functions:
        (slope,) = torch.autograd.grad(function(gamma), gamma)
        for place in range(3):
            step = torch.zeros_like(gamma).index_fill(0, torch.tensor(place), 1e-6)
            difference = (function(gamma.detach() + step) - function(gamma.detach() - step)) / 2e-6
            assert slope.reshape(-1)[place].item() == pytest.approx(difference.item(), abs=1e-5)


def test_attention_over_subsets() -> None:
    query, key, value = torch.randn(3, 2, 5, 8, dtype=torch.float64).unbind()
    for structure in (Subsets(2), SequentialSubsets(2, 0.5)):
        omega = SparseMAP(structure)
        _, weights = fenchel.attention(query, key, value, omega, return_weights=True)
        assert torch.allclose(weights, omega.argmax(query @ key.mT / 8**0.5), atol=1e-12)
        assert torch.allclose(weights.sum(-1), torch.full((2, 5), 2.0, dtype=torch.float64))
        _, causal = fenchel.attention(query, key, value, omega, is_causal=True, return_weights=True)
        assert torch.allclose(causal.sum(-1), torch.tensor([1.0, 2, 2, 2, 2], dtype=torch.float64))


def test_a_map_that_is_none_is_refused() -> None:
    class Wrong(Mountain):
        def map(self, scores: Tensor) -> Tensor:
            return super().map(scores) * 0.5

    class Shorter(Mountain):
        def map(self, scores: Tensor) -> Tensor:
            return super().map(scores)[..., 1:]

    scores = torch.zeros(5)
    with pytest.raises(ValueError, match="zeros and ones"):
        SparseMAP(Wrong(5)).argmax(scores)
    with pytest.raises(ValueError, match="shape of its scores"):
        SparseMAP(Shorter(5)).argmax(scores)
    with pytest.raises(TypeError):
        SparseMAP(Mountain(5)).argmax(scores, mask=torch.tensor([False, True, True, True, True]))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: SparseMAP(fenchel.Gini()), TypeError, "structure must be a fenchel.structures.Structure"),
        (lambda: SparseMAP(Matching(), tol=0.0), ValueError, "tol must satisfy 0 < tol < inf"),
        (lambda: SparseMAP(Matching(), max_iter=0), ValueError, "max_iter must be at least 1"),
        (lambda: SparseMAP(Subsets(3)).argmax(torch.zeros(2)), ValueError, "k must be at most"),
        (lambda: SparseMAP(Matching()).argmax(torch.zeros(3, 3).long()), TypeError, "floating-point"),
        (lambda: SparseMAP(Matching()).argmax(torch.zeros(3)), ValueError, "at least 2 dimensions"),
        (lambda: SparseMAP(Matching()).loss(torch.zeros(2, 2), torch.zeros(2)), ValueError, "shape of scores"),
        (lambda: SparseMAP(Matching()).loss(torch.zeros(2, 2), torch.ones(2, 2)), ValueError, "must be a structure"),
        (lambda: SparseMAP(Matching()).loss(torch.zeros(2, 2), -torch.ones(2, 2)), ValueError, r"in \[0, 1\]"),
        (
            lambda: SparseMAP(Chain(torch.eye(2))).loss(torch.zeros(2, 2), torch.full((2, 2), 0.5)),
            ValueError,
            "zeros and ones",
        ),
        (lambda: SparseMAP(Chain(torch.eye(2)))(torch.full((2, 2), 0.5)), ValueError, "known at structures only"),
        (
            lambda: fenchel.fy_loss(torch.zeros(2, 2), torch.zeros(2).long(), SparseMAP(Matching())),
            ValueError,
            "class indices do not",
        ),
        (
            lambda: fenchel.fy_loss(torch.zeros(2, 2), torch.eye(2), SparseMAP(Matching()), label_smoothing=0.1),
            ValueError,
            "label_smoothing",
        ),
        (
            lambda: (torch.ones(2, 2) * SparseMAP(Matching())).argmax(torch.zeros(2, 2)),
            ValueError,
            "gamma must have size 1 along dim 0",
        ),
    ],
)
def test_bad_input_is_named(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_start_from_another_mask_changes_nothing() -> None:
    omega = fenchel.SparseMAP(Chain(torch.eye(3, dtype=torch.float64)))
    scores = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = omega.solve(scores, mask=torch.tensor([True, True, False, False])[:, None])
    again, cold = omega.solve(scores, start=before), omega.solve(scores)
    torch.testing.assert_close(again.marginals, cold.marginals)


def test_a_budget_that_is_met_exactly_does_not_move() -> None:
    jacobian = torch.autograd.functional.jacobian(fenchel.SparseMAP(AtMost(1)).argmax, torch.tensor([0.0, 2.0]))
    torch.testing.assert_close(jacobian, torch.zeros(2, 2))


class Recorded(Structure):
    """Pairs of neighbours, by enumeration, with a bonus for one of them; remembers what its oracle was given."""

    def __init__(self, n: int, bonus: object = 0.0) -> None:
        super().__init__()
        self.members = torch.eye(n, dtype=torch.float64)[:-1] + torch.eye(n, dtype=torch.float64)[1:]
        self.bonus = bonus
        self.seen: list[tuple[torch.Size, torch.dtype, bool]] = []

    def map(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        shapes = [scores.shape] if mask is None else [scores.shape, mask.shape]
        assert len(set(shapes)) == 1
        self.seen.append((scores.shape, scores.dtype, bool(scores.isfinite().all())))
        total = scores @ self.members.T + self.higher(self.members)
        if mask is not None:
            total = total.masked_fill((~mask).to(scores) @ self.members.T > 0, -torch.inf)
        return self.members[total.argmax(-1)]

    def higher(self, structures: Tensor) -> Tensor:
        bonus = self.bonus[0] if isinstance(self.bonus, list) else self.bonus
        return structures[..., 0] * structures[..., 1] * bonus


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_a_users_oracle_sees_one_flat_batch_dimension_everywhere(batch: tuple[int, ...], masked: bool) -> None:
    structure = Recorded(4, 0.3)
    omega = SparseMAP(structure)
    scores = torch.randn(*batch, 4, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1.0, 1, 0, 0]).expand(scores.shape)
    mask = torch.tensor([True, True, True, False]) if masked else None
    rows = scores.reshape(-1, 4)
    calls = {
        "argmax": lambda s, y: omega.argmax(s, mask=mask),
        "max": lambda s, y: omega.max(s, mask=mask),
        "loss": lambda s, y: omega.loss(s, y, mask=mask),
        "violation": lambda s, y: omega.violation(s, y, mask),
        "solve": lambda s, y: omega.solve(s, mask).marginals,
    }
    for name, call in calls.items():
        structure.seen.clear()
        value = call(scores, target)
        assert structure.seen, name
        for shape, dtype, finite in structure.seen:
            assert (len(shape), shape[1:], dtype, finite) == (2, (4,), torch.float64, True), name
        one_by_one = torch.stack([call(s, y) for s, y in zip(rows, target.reshape(-1, 4), strict=True)])
        assert value.reshape(one_by_one.shape).numpy() == pytest.approx(one_by_one.numpy(), abs=1e-6), name


@pytest.mark.parametrize("where", ["plain", "listed", "closure"])
def test_tensors_that_are_no_parameters_get_their_gradient(where: str) -> None:
    bonus = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    scores = torch.tensor([0.1, 0.2, 0.4, -0.1], dtype=torch.float64)

    class Closed(Recorded):
        def higher(self, structures: Tensor) -> Tensor:
            return structures[..., 0] * structures[..., 1] * self.source()

    def made(b: Tensor) -> Structure:
        if where != "closure":
            return Recorded(4, b if where == "plain" else [b])
        structure = Closed(4)
        structure.source = lambda: b
        return structure

    def marginals(b: Tensor) -> Tensor:
        return SparseMAP(made(b)).argmax(scores)

    assert marginals(bonus).detach().count_nonzero() > 2
    (slope,) = torch.autograd.grad(marginals(bonus)[0], bonus)
    step = 1e-6
    with torch.no_grad():
        wanted = (marginals(bonus + step)[0] - marginals(bonus - step)[0]) / (2 * step)
    assert abs(wanted) > 0.1
    assert slope.item() == pytest.approx(wanted.item(), abs=1e-8)
    if where != "closure":
        assert jacrev(marginals)(bonus.detach())[0].item() == pytest.approx(wanted.item(), abs=1e-8)
        assert jacfwd(marginals)(bonus.detach())[0].item() == pytest.approx(wanted.item(), abs=1e-8)


def test_a_number_is_a_transition_in_double_precision() -> None:
    number = 0.1234567890123456
    numbered, tensor = SequentialSubsets(2, number), SequentialSubsets(2, torch.tensor(number, dtype=torch.float64))
    assert numbered.higher(torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)).item() == number
    scores = torch.tensor([1.2, 0.8, -0.5, 1.0], dtype=torch.float64)
    assert SparseMAP(numbered).argmax(scores).tolist() == SparseMAP(tensor).argmax(scores).tolist()
    assert SparseMAP(numbered).max(scores).item() == SparseMAP(tensor).max(scores).item()
    for relative, chosen in ((-1e-11, [1.0, 1, 0]), (1e-11, [1.0, 0, 1])):  # far below what float32 tells apart
        close = torch.tensor([10.0, 0, number * (1 + relative)], dtype=torch.float64)
        assert numbered.map(close).tolist() == chosen
    assert not SequentialSubsets(2, 1e300).broken()


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e13, 1e20, 1e200])
def test_targets_are_recognized_whatever_the_size_of_higher_order_scores(size: float) -> None:
    omega = SparseMAP(SequentialSubsets(2, torch.tensor([1.0, 0, 0], dtype=torch.float64) * size))
    scores = torch.zeros(4, dtype=torch.float64)
    assert omega.loss(scores, torch.tensor([0.0, 1, 0, 1], dtype=torch.float64)).item() >= size
    with pytest.raises(ValueError, match=r"1 of \d are not, first number \d"):
        omega.loss(scores, torch.tensor([1.0, 1, 1, 0], dtype=torch.float64))
    user = SparseMAP(Recorded(4, size))
    assert user.loss(scores, torch.tensor([0.0, 0, 1, 1], dtype=torch.float64)).item() >= 0.5 * size
    with pytest.raises(ValueError, match=r"1 of \d are not, first number \d"):
        user.loss(scores, torch.tensor([1.0, 0, 0, 1], dtype=torch.float64))


@pytest.mark.parametrize("dim", [0, 1, -2, -3])
def test_dimensions_are_the_structures(dim: int) -> None:
    scores, target = torch.zeros(3, 3, 3), torch.eye(3).expand(3, 3, 3)
    calls = (
        lambda omega, d: omega.argmax(scores, dim=d),
        lambda omega, d: omega.max(scores, dim=d),
        lambda omega, d: omega.loss(scores, target, dim=d),
        lambda omega, d: omega(target, dim=d),
        lambda omega, d: fenchel.fy_loss(scores, target, omega, dim=d),
    )
    for omega in (SparseMAP(Matching()), 0.5 * SparseMAP(Matching())):
        for call in calls:
            call(omega, -1)
            with pytest.raises(ValueError, match=r"dim must be left out.* the last 2 of the scores"):
                call(omega, dim)


@every_member
def test_the_margin_is_the_lead_a_part_that_makes_a_structure_the_choice(case: Member) -> None:
    _, transition = draw(case, 1)
    omega = SparseMAP(case.structure(transition))
    y, h = flat(case), case.scores_of(transition)
    if len({member.sum() for member in y}) > 1:
        assert omega.margin is None
        return
    if case.name == "a user's":
        return
    assert omega.margin == 1.0
    assert (0.5 * omega).margin == 0.5
    half = ((y[0] - y[1:]) ** 2).sum(-1) / 2
    direction = np.random.default_rng(0).normal(size=y.shape[1]) + 4 * y[0]
    # Scores t·direction: the smallest t at which the first structure leads all others by ½‖y − y′‖².
    slope = (y[0] - y[1:]) @ direction
    assert (slope > 0).all()
    needed = ((half - h[0] + h[1:]) / slope).max()
    for t, alone in ((1 + 1e-6, True), (1 - 1e-3, False)):
        scores = torch.from_numpy(needed * t * direction).reshape(case.shape)
        choice = omega.argmax(scores).detach().reshape(-1).numpy()
        assert np.array_equal(choice, y[0]) == alone


@pytest.mark.parametrize(
    "case", [m for m in MEMBERS if m.name.startswith(("Chain", "Seq")) and m.transition], ids=lambda m: m.name
)
@pytest.mark.parametrize("size", [1e-2, 1e-5, 1e-8])
def test_small_transitions_agree_with_a_quadratic_program(case: Member, size: float) -> None:
    scores, transition = draw(case, 2)
    scores, transition = 0.03 * scores, size * transition
    omega = SparseMAP(case.structure(transition))
    marginals, maximum = omega.argmax(scores).detach(), omega.max(scores).detach()
    for row, mu, value in zip(scores, marginals, maximum, strict=True):
        wanted, reached = best_mixture(case, row, transition)
        assert mu.reshape(-1).numpy() == pytest.approx(wanted, abs=2e-6)
        assert value.item() == pytest.approx(reached, abs=1e-9)


@pytest.mark.parametrize("size", [1e3, 1e17, 1e30])
@pytest.mark.parametrize(
    "structure",
    [AtMost(2), Subsets(2), SequentialSubsets(2, 1e17), Chain(1e17 * torch.eye(4)), DependencyTree()],
    ids=str,
)
def test_the_loss_of_the_choice_is_zero_whatever_the_scores(structure: Structure, size: float) -> None:
    omega = SparseMAP(structure)
    shape = (4,) if structure.event_dim == 1 else (3, 4)
    scores = (size * torch.randn(6, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).abs()
    choice = omega.argmax(scores)
    kept = ((choice == 0) | (choice == 1)).flatten(1).all(-1)
    assert kept.sum() >= 5
    scores = scores[kept].requires_grad_()
    loss = omega.loss(scores, choice[kept])
    assert loss.tolist() == [0.0] * len(scores)
    (slope,) = torch.autograd.grad(loss.sum(), scores)
    assert not slope.any()


def test_heads_are_targets_of_trees() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 3, 4, 1, dtype=torch.bool)
    mask[0, 1, 2:] = False
    mask[1, 2] = False
    for omega in (SparseMAP(DependencyTree()), 0.5 * SparseMAP(DependencyTree(projective=True))):
        tree = (omega if isinstance(omega, SparseMAP) else omega.omega).structure.map(scores.flip(-2), mask)
        heads = torch.where(tree.any(-1), tree.argmax(-1), -1)
        assert (heads == -1).sum() == 6
        for kind in (torch.int64, torch.int32, torch.int8):
            assert torch.equal(omega.loss(scores, heads.to(kind), mask=mask), omega.loss(scores, tree, mask=mask))
            for target in (heads.to(kind), tree.to(kind), tree.bool()):
                mean = fenchel.fy_loss(scores, target, omega, mask=mask)
                assert torch.equal(mean, omega.loss(scores, tree, mask=mask).mean())
        with pytest.raises(ValueError, match="weight goes with class indices only"):
            fenchel.fy_loss(scores, heads, omega, mask=mask, weight=torch.ones(5))
    assert torch.equal(omega.omega.violation(scores, heads, mask), omega.omega.violation(scores, tree, mask))


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([4, 0, 0], r"heads from 0, the root, to 3, the last word, or −1 .* got 4"),
        ([-2, 0, 0], r"got -2"),
        ([0, 2, 0], r"no word is its own head, got 2"),
        ([2, 1, 0], r"must be a structure of DependencyTree.*1 of \d are not"),
        ([0, -1, 0], r"must be a structure of DependencyTree.*1 of \d are not"),
        ([0, 0], r"shape of scores"),
    ],
)
def test_heads_that_are_no_tree_are_refused(heads: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SparseMAP(DependencyTree()).loss(torch.zeros(3, 4), torch.tensor(heads))
