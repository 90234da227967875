"""Fenchel-Young losses: cross-entropy's arguments, values and gradients, and what is promised beyond them."""

import itertools
import math
from collections.abc import Callable, Sequence

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import oracles
from fenchel import (
    Gini,
    Hard,
    Norm,
    Regularizer,
    Shannon,
    Tsallis,
    entmax_loss,
    fy_loss,
    normmax_loss,
    sparsemax_loss,
)

EXACT = {"atol": 1e-13, "rtol": 1e-12}
OMEGAS = [Shannon(), Gini(), Tsallis(1.5), Tsallis(1.1), Tsallis(0.5), Tsallis(4), Norm(2), Norm(5), 0.5 * Gini()]
every_omega = pytest.mark.parametrize("omega", OMEGAS, ids=lambda o: str(o).replace("\n", ""))
every_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])

# The shapes that cross_entropy takes, with its class dimension.
SHAPES = [((7,), 0), ((6, 7), 1), ((4, 7, 3), 1), ((2, 7, 3, 2), 1)]


def without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def leaf(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_()


def distributions(shape: Sequence[int], dim: int = -1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.softmax(torch.randn(tuple(shape), dtype=torch.float64), dim).to(dtype)


def gradient(loss: Tensor, scores: Tensor) -> Tensor:
    """Of a reproducible mixture of the losses, which a wrong sum over rows would not survive."""
    direction = torch.arange(1, loss.numel() + 1, dtype=loss.dtype).reshape(loss.shape).cos()
    (result,) = torch.autograd.grad(loss, scores, direction, retain_graph=True)
    return result


# -- independent answers --------------------------------------------------------------------------------


def normmax_exactly(scores: Sequence[float], alpha: float) -> list[mpf]:
    """p ∝ [z − μ]₊^(1/(α−1)) with ‖[z − μ]₊‖ = 1 in the dual norm, by bisection in 50 digits."""
    z, a = oracles.exact(scores), mpf(alpha)
    q, low, high = a / (a - 1), max(z) - 1, max(z)
    for _ in range(150):
        middle = (low + high) / 2
        if sum(max(v - middle, mpf(0)) ** q for v in z) > 1:
            low = middle
        else:
            high = middle
    weights = [max(v - low, mpf(0)) ** (1 / (a - 1)) for v in z]
    return [w / sum(weights) for w in weights]


def tsallis_exactly(p: Sequence[mpf], alpha: float) -> mpf:
    a = mpf(alpha)
    if a == 1:
        return sum((v * mpmath.log(v) for v in p if v > 0), mpf(0))
    return sum((v**a - v for v in p if v > 0), mpf(0)) / (a * (a - 1))


def norm_exactly(p: Sequence[mpf], alpha: float) -> mpf:
    return sum(v ** mpf(alpha) for v in p if v > 0) ** (1 / mpf(alpha)) - 1


def loss_exactly(scores: Sequence[float], y: Sequence[float], p: Sequence[mpf], omega: Callable[..., mpf]) -> mpf:
    """Ω*(s) + Ω(y) − ⟨s, y⟩ from its definition, given p = argmax."""
    s, target = oracles.exact(scores), oracles.exact(y)
    attained = sum(a * b for a, b in zip(s, p, strict=True)) - omega(p)
    return attained + omega(target) - sum(a * b for a, b in zip(s, target, strict=True))


DEFINITIONS = [
    *((f"tsallis-{a}", Tsallis(a), oracles.entmax, tsallis_exactly, a) for a in (0.5, 1.0, 1.000001, 1.5, 1.9, 2.0)),
    *((f"norm-{a}", Norm(a), normmax_exactly, norm_exactly, a) for a in (1.25, 2.0, 5.0)),
]


@pytest.mark.parametrize(
    ("omega", "choose", "value", "alpha"), [d[1:] for d in DEFINITIONS], ids=[d[0] for d in DEFINITIONS]
)
def test_the_loss_is_its_definition_to_the_last_digits(
    omega: Regularizer, choose: Callable[..., list[mpf]], value: Callable[..., mpf], alpha: float
) -> None:
    scores, soft = leaf(4, 5), distributions((4, 5)).masked_fill(torch.eye(4, 5, dtype=torch.bool), 0.0)
    soft = soft / soft.sum(-1, keepdim=True)
    index = torch.tensor([0, 3, 2, 4])
    by_index, by_soft = omega.loss(scores, index), omega.loss(scores, soft)
    gradients = gradient(by_index, scores), gradient(by_soft, scores)
    for i, row in enumerate(scores.tolist()):
        p = choose(row, alpha)
        one_hot = F.one_hot(index[i], 5).tolist()
        for loss, slope, y in ((by_index, gradients[0], one_hot), (by_soft, gradients[1], soft[i].tolist())):
            expected = loss_exactly(row, y, p, lambda q: value(q, alpha))
            assert math.isclose(loss[i].item(), expected, rel_tol=1e-13, abs_tol=1e-14)
            for g, a, b in zip(slope[i].tolist(), p, y, strict=True):
                assert math.isclose(g, math.cos(i + 1) * (a - mpf(b)), abs_tol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_sparsemax_loss_is_the_closed_form(dtype: torch.dtype) -> None:
    scores, target = leaf(30, 6, dtype=dtype, scale=1.0), torch.randint(6, (30,))
    loss = sparsemax_loss(scores, target, reduction="none")
    expected, slopes = [], []
    for z, y in zip(scores.tolist(), target.tolist(), strict=True):
        p, one_hot = oracles.sparsemax(z), [float(j == y) for j in range(6)]
        to_y, to_p = (sum((a - b) ** 2 for a, b in zip(q, z, strict=True)) for q in (one_hot, p))
        expected.append((to_y - to_p) / 2)
        slopes.append([a - b for a, b in zip(p, one_hot, strict=True)])
    tolerance = {"atol": 8 * torch.finfo(dtype).eps, "rtol": 8 * torch.finfo(dtype).eps}
    assert_close(loss, torch.tensor(expected, dtype=dtype), **tolerance)
    (actual,) = torch.autograd.grad(loss.sum(), scores)
    assert_close(actual, torch.tensor(slopes, dtype=dtype), **tolerance)


def test_named_losses_are_fy_loss_with_their_omega() -> None:
    scores, target = leaf(5, 3, 4), torch.randint(4, (5, 3))
    pairs = [
        (sparsemax_loss(scores, target), Gini()),
        (entmax_loss(scores, target), Tsallis(1.5)),
        (entmax_loss(scores, target, 1.2), Tsallis(1.2)),
        (entmax_loss(scores, target, alpha=math.inf), Hard()),
        (normmax_loss(scores, target), Norm(2.0)),
        (normmax_loss(scores, target, 3.0), Norm(3.0)),
    ]
    for loss, omega in pairs:
        assert loss.shape == ()
        assert_close(loss, omega.loss(scores, target).mean(), **EXACT)


def test_named_losses_pass_every_option_on() -> None:
    scores, target, mask = leaf(5, 4, 3), torch.randint(4, (5, 3)), torch.rand(5, 4, 3) < 0.8
    options = {
        "dim": 1,
        "mask": mask.scatter(1, target[:, None], True),
        "weight": torch.rand(4).double(),
        "ignore_index": 2,
        "label_smoothing": 0.2,
        "reduction": "none",
    }
    named = [
        (sparsemax_loss(scores, target, **options), Gini()),
        (entmax_loss(scores, target, 1.3, **options), Tsallis(1.3)),
        (normmax_loss(scores, target, 3.0, **options), Norm(3.0)),
    ]
    for loss, omega in named:
        assert torch.equal(loss, fy_loss(scores, target, omega, **options))
        assert loss.shape == (5, 3)


# -- cross-entropy --------------------------------------------------------------------------------------


@every_reduction
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("ignore_index", [-100, 2, -1], ids=lambda i: f"ignore{i}")
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_shannon_is_cross_entropy_for_class_indices(
    weighted: bool, ignore_index: int, shape: tuple[int, ...], dim: int, reduction: str
) -> None:
    scores, target = leaf(*shape), torch.randint(7, without(shape, dim))
    if ignore_index < 0 and target.dim():
        target.view(-1)[::3] = ignore_index
    options = {
        "weight": torch.rand(7).double() if weighted else None,
        "ignore_index": ignore_index,
        "reduction": reduction,
    }
    ours, theirs = fy_loss(scores, target, Shannon(), dim=dim, **options), F.cross_entropy(scores, target, **options)
    assert_close(ours, theirs, **EXACT)
    assert_close(gradient(ours, scores), gradient(theirs, scores), **EXACT)


@every_reduction
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_shannon_has_cross_entropys_gradient_for_soft_targets(
    smoothing: float, shape: tuple[int, ...], dim: int, reduction: str
) -> None:
    scores, target = leaf(*shape), distributions(shape, dim)
    options = {"label_smoothing": smoothing, "reduction": reduction}
    ours, theirs = fy_loss(scores, target, Shannon(), dim=dim, **options), F.cross_entropy(scores, target, **options)
    y = (1 - smoothing) * target + smoothing / 7
    constant = (y * y.log()).sum(dim)
    constant = {"none": constant, "mean": constant.mean(), "sum": constant.sum()}[reduction]
    assert_close(ours, theirs + constant, **EXACT)
    assert_close(gradient(ours, scores), gradient(theirs, scores), **EXACT)


@every_reduction
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_shannon_has_cross_entropys_gradient_with_label_smoothing(
    weighted: bool, smoothing: float, shape: tuple[int, ...], dim: int, reduction: str
) -> None:
    scores, target = leaf(*shape), torch.randint(7, without(shape, dim))
    weight = torch.rand(7).double() if weighted else torch.ones(7).double()
    options = {
        "weight": weight if weighted else None,
        "ignore_index": 2,
        "label_smoothing": smoothing,
        "reduction": reduction,
    }
    ours, theirs = fy_loss(scores, target, Shannon(), dim=dim, **options), F.cross_entropy(scores, target, **options)
    assert_close(gradient(ours, scores), gradient(theirs, scores), **EXACT)

    t = (1 - smoothing) * F.one_hot(target, 7).double() + smoothing / 7
    t = t * weight
    mass = t.sum(-1)
    constant = torch.where(
        target == 2, 0.0, mass * torch.special.xlogy(t / mass[..., None], t / mass[..., None]).sum(-1)
    )
    if reduction == "sum":
        constant = constant.sum()
    elif reduction == "mean":
        constant = constant.sum() / (weight[target] * (target != 2)).sum()
    assert_close(ours, theirs + constant, **EXACT)


@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
def test_classes_of_weight_zero_are_as_in_cross_entropy(smoothing: float, reduction: str) -> None:
    scores, target = leaf(5, 4), torch.tensor([0, 1, 2, 3, 0])
    options = {"label_smoothing": smoothing, "reduction": reduction}
    for weight in ([0.0, 1.0, 0.0, 2.0], [0.0] * 4):
        options["weight"] = torch.tensor(weight, dtype=torch.float64)
        ours, theirs = fy_loss(scores, target, Shannon(), **options), F.cross_entropy(scores, target, **options)
        assert_close(gradient(ours, scores), gradient(theirs, scores), **EXACT, equal_nan=True)
        assert torch.equal(ours.isnan(), theirs.isnan())


@every_omega
@every_reduction
def test_options_are_an_explicit_loop_over_rows(omega: Regularizer, reduction: str) -> None:
    scores, target = leaf(3, 5, 4), torch.randint(5, (3, 4))
    mask = (torch.rand(3, 5, 4) < 0.7).scatter(1, target[:, None], True)
    weight, smoothing = torch.rand(5).double() + 0.1, 0.3
    options = {"mask": mask, "weight": weight, "ignore_index": 3, "label_smoothing": smoothing}
    ours = fy_loss(scores, target, omega, dim=1, reduction=reduction, **options)
    each, weights = torch.zeros(3, 4, dtype=torch.float64), 0.0
    for i, j in itertools.product(range(3), range(4)):
        y, keep = int(target[i, j]), mask[i, :, j]
        if y == 3:
            continue
        t = weight * (smoothing * keep.double() / keep.sum() + (1 - smoothing) * F.one_hot(target[i, j], 5).double())
        # masked classes are removed, not masked
        each[i, j] = t.sum() * omega.loss(scores[i, :, j][keep], (t / t.sum())[keep])
        weights += weight[y]
    expected = {"none": each, "sum": each.sum(), "mean": each.sum() / weights}[reduction]
    assert_close(ours, expected, **EXACT)
    assert_close(gradient(ours, scores), gradient(expected, scores), **EXACT)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Float64 scores of any shape and scale, class indices, and the class dimension."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = 10.0 ** draw(st.integers(-3, 3)) * torch.randn(shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        scores = scores.round()
    target = torch.randint(shape[dim], without(shape, dim % len(shape)), generator=generator)
    return scores, target, dim


@given(problem=problems(), reduction=st.sampled_from(["none", "mean", "sum"]), drop=st.booleans())
def test_shannon_is_cross_entropy_for_every_shape_and_dim(
    problem: tuple[Tensor, Tensor, int], reduction: str, drop: bool
) -> None:
    scores, target, dim = problem
    ignored = int(target.flatten()[0]) if drop and target.numel() else -100
    ours = fy_loss(scores, target, Shannon(), dim=dim, reduction=reduction, ignore_index=ignored)
    flat = scores.movedim(dim, -1).reshape(-1, scores.shape[dim])
    theirs = F.cross_entropy(flat, target.flatten(), reduction=reduction, ignore_index=ignored)
    assert_close(ours.flatten() if reduction == "none" else ours, theirs, atol=1e-11, rtol=1e-12, equal_nan=True)
    assert ours.shape == (target.shape if reduction == "none" else ())


@given(
    omega=st.sampled_from(OMEGAS),
    problem=problems(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=100)
def test_no_loss_is_negative_in_any_dtype(
    omega: Regularizer, problem: tuple[Tensor, Tensor, int], dtype: torch.dtype
) -> None:
    scores, target, dim = problem
    scores = scores.to(dtype)
    soft = distributions(scores.shape, dim)
    sparse = torch.where(soft == soft.amax(dim, keepdim=True), 1.0, 0.0)
    sparse = sparse / sparse.sum(dim, keepdim=True)
    own = omega.argmax(scores.double(), dim)
    for y in (target, soft, sparse, own):
        loss = fy_loss(scores, y, omega, dim=dim, reduction="none")
        assert loss.dtype == dtype
        assert (loss >= 0).all()
    assert (fy_loss(scores, target, omega, dim=dim, label_smoothing=0.1, reduction="none") >= 0).all()


# -- zero, infinity, nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("omega", "margin"),
    [
        *((Tsallis(a), 1 / (a - 1)) for a in (1.0625, 1.25, 1.5, 3, 5)),
        *((Norm(a), 1.0) for a in (1.5, 2, 8)),
        (Gini(), 1.0),
        (0.5 * Tsallis(1.5), 1.0),
        (Hard(), 0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_loss_is_zero_exactly_from_the_margin_on(omega: Regularizer, margin: float, dtype: torch.dtype) -> None:
    assert omega.margin == margin
    rest = torch.tensor([0.0, 0.0, -1.0, -7.0]).to(dtype)
    rows = [torch.cat([torch.tensor([lead]).to(dtype), rest]) for lead in (margin, 2 * margin + 1, 1e4, margin / 2)]
    scores = torch.stack(rows).requires_grad_()
    loss = fy_loss(scores, torch.zeros(4, dtype=torch.long), omega, reduction="none")
    assert (loss[:3] == 0).all()
    loss.sum().backward()
    assert scores.grad is not None
    if margin:
        assert (scores.grad[:3] == 0).all()
        assert loss[3] > 0
        assert scores.grad[3, 0] < 0


@every_omega
def test_the_loss_of_any_other_class_is_at_least_its_distance_from_the_best(omega: Regularizer) -> None:
    scores = leaf(40, 6)
    target = scores.argmin(-1)
    loss = fy_loss(scores, target, omega, reduction="none")
    assert (loss >= (scores.amax(-1) - scores.amin(-1)) * (1 - 1e-12)).all()


@every_omega
def test_a_masked_class_is_a_class_that_is_not_there(omega: Regularizer) -> None:
    scores, keep = leaf(5, 6), torch.tensor([True, False, True, True, False, True])
    target = torch.tensor([0, 2, 3, 5, 0])
    few, few_target = scores[:, keep], (keep.cumsum(0) - 1)[target]
    soft = distributions((5, 4))
    wide = torch.zeros(5, 6, dtype=torch.float64)
    wide[:, keep] = soft
    hidden = torch.where(keep, scores, -torch.inf)
    junk = torch.where(keep, scores, torch.nan)
    for smoothing in (0.0, 0.2):
        options = {"label_smoothing": smoothing, "reduction": "none"}
        for y, y_few in ((target, few_target), (wide, soft)):
            expected = fy_loss(few, y_few, omega, **options)
            slope = gradient(expected, scores)
            for masked, mask in ((scores, keep), (hidden, None), (junk, keep), (hidden, keep.expand(5, 6))):
                loss = fy_loss(masked, y, omega, mask=mask, **options)
                assert_close(loss, expected, **EXACT)
                assert_close(gradient(loss, scores), slope, **EXACT)


@every_omega
@pytest.mark.parametrize("how", ["mask", "-inf"])
def test_a_masked_target_costs_infinity_and_the_other_classes_keep_gradient_p(omega: Regularizer, how: str) -> None:
    scores, target, keep = leaf(2, 4), torch.tensor([1, 0]), torch.tensor([[True, False, True, True], [True] * 4])
    hidden = scores if how == "mask" else torch.where(keep, scores, -torch.inf)
    mask = keep if how == "mask" else None
    soft = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    p = omega.argmax(scores[0, keep[0]]).detach()
    for y, missing in ((target, p), (soft, p - torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64))):
        loss = fy_loss(hidden, y, omega, mask=mask, reduction="none")
        assert loss[0] == torch.inf
        assert loss[1].isfinite()
        (slope,) = torch.autograd.grad(loss, scores, torch.ones(2).double(), retain_graph=True)
        assert slope.isfinite().all()
        assert_close(slope[0, keep[0]], missing, **EXACT)
        assert fy_loss(hidden, y, omega, mask=mask) == torch.inf
        assert fy_loss(hidden, y, omega, mask=mask, reduction="sum") == torch.inf


def test_a_target_of_minus_inf_is_as_in_cross_entropy() -> None:
    scores = torch.tensor([[0.5, -torch.inf, 1.0], [0.5, 2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 1])
    weight = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    for reduction in ("none", "mean", "sum"):
        options = {"reduction": reduction, "weight": weight}
        ours, theirs = fy_loss(scores, target, Shannon(), **options), F.cross_entropy(scores, target, **options)
        assert_close(ours, theirs, **EXACT)
        possible = scores.isfinite()
        assert_close(gradient(ours, scores)[possible], gradient(theirs, scores)[possible], **EXACT)


@every_omega
def test_a_row_with_every_class_masked_costs_infinity_and_has_zero_gradient(omega: Regularizer) -> None:
    scores, mask = leaf(3, 4), torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    for y, smoothing in itertools.product((torch.tensor([1, 2, 0]), distributions((3, 4))), (0.0, 0.1, 1.0)):
        loss = fy_loss(scores, y, omega, mask=mask, label_smoothing=smoothing, reduction="none")
        assert loss[1] == torch.inf
        assert loss[[0, 2]].isfinite().all()
        slope = gradient(loss, scores)
        assert (slope[1] == 0).all()
        assert slope.isfinite().all()


@every_omega
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_a_batch_of_ignored_targets_is_as_in_cross_entropy(
    omega: Regularizer, smoothing: float, weighted: bool
) -> None:
    scores, target = leaf(3, 4), torch.full((3,), -100)
    weight = torch.rand(4).double() if weighted else None
    for reduction, expected in (("mean", math.nan), ("sum", 0.0), ("none", [0.0] * 3)):
        options = {"reduction": reduction, "weight": weight, "label_smoothing": smoothing}
        ours, theirs = fy_loss(scores, target, omega, **options), F.cross_entropy(scores, target, **options)
        for loss in (ours, theirs):
            assert_close(loss, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
        assert_close(gradient(ours, scores), gradient(theirs, scores), equal_nan=True)


@every_omega
def test_an_ignored_row_of_nan_or_infinities_changes_nothing(omega: Regularizer) -> None:
    scores, target = leaf(5, 4), torch.tensor([0, -100, 3, -100, -100])
    junk = torch.tensor([[0.0], [math.nan], [0.0], [math.inf], [-math.inf]]).double()
    for smoothing, weight in itertools.product((0.0, 0.1), (None, torch.rand(4).double())):
        options = {"label_smoothing": smoothing, "weight": weight}
        clean = fy_loss(scores[[0, 2]], target[[0, 2]], omega, **options)
        loss = fy_loss(scores + junk, target, omega, **options)
        assert_close(loss, clean, **EXACT)
        (slope,) = torch.autograd.grad(loss, scores)
        assert (slope[[1, 3, 4]] == 0).all()
        assert_close(slope, gradient(clean, scores) / math.cos(1), **EXACT)
        each = fy_loss(scores + junk, target, omega, reduction="none", **options)
        assert (each[[1, 3, 4]] == 0).all()


@every_omega
def test_nan_spoils_its_own_row_alone(omega: Regularizer) -> None:
    scores, target = leaf(3, 4), torch.tensor([0, 1, 2])
    spoilt = scores.detach().clone()
    spoilt[1, 3] = math.nan
    spoilt.requires_grad_()
    for y in (target, distributions((3, 4))):
        clean, loss = (fy_loss(s, y, omega, reduction="none") for s in (scores, spoilt))
        assert loss[1].isnan()
        assert torch.equal(loss[[0, 2]], clean[[0, 2]])
        (slope,) = torch.autograd.grad(loss.sum(), spoilt)
        assert slope[[0, 2]].isfinite().all()
        assert slope[1].isnan().any()


@every_omega
def test_one_class_costs_nothing(omega: Regularizer) -> None:
    scores = leaf(5, 1, scale=1e6)
    for y in (torch.zeros(5, dtype=torch.long), torch.ones(5, 1, dtype=torch.float64)):
        for smoothing in (0.0, 0.1):
            loss = fy_loss(scores, y, omega, label_smoothing=smoothing, reduction="none")
            assert (loss == 0).all()
            assert (gradient(loss, scores) == 0).all()


@every_omega
@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
def test_a_batch_of_zero_rows_is_as_in_cross_entropy(omega: Regularizer, shape: tuple[int, ...]) -> None:
    scores = leaf(*shape)
    target, soft = torch.zeros(shape[:-1], dtype=torch.long), torch.zeros(shape, dtype=torch.float64)
    for y in (target, soft):
        assert fy_loss(scores, y, omega, reduction="none").shape == shape[:-1]
        assert fy_loss(scores, y, omega, reduction="sum") == 0
        mean = fy_loss(scores, y, omega)
        assert mean.isnan()
        mean.backward()


@every_omega
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_huge_scores_have_huge_losses_and_right_gradients(omega: Regularizer, dtype: torch.dtype) -> None:
    scores = torch.tensor([[1e30, -1e30, 0.0], [1e30, -1e30, 0.0]], dtype=dtype, requires_grad=True)
    loss = fy_loss(scores, torch.tensor([0, 1]), omega, reduction="none")
    assert_close(loss, torch.tensor([0.0, 2e30], dtype=dtype), atol=1e-4, rtol=1e-6)
    loss.sum().backward()
    assert_close(scores.grad, torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0]], dtype=dtype), atol=1e-6, rtol=0)


@every_omega
def test_a_huge_offset_changes_nothing(omega: Regularizer) -> None:
    scores, target = torch.randint(-3000, 3000, (4, 7)).double() / 1024, torch.randint(7, (4,))
    for y in (target, distributions((4, 7))):
        near, far = (fy_loss(s, y, omega, reduction="none") for s in (scores, scores + 2.0**40))
        assert_close(near, far, **EXACT)
