"""Fenchel-Young losses: cross-entropy's arguments, values and gradients, and what is promised beyond them."""

import datetime
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf
from torch import Tensor, distributed
from torch.autograd import gradcheck, gradgradcheck
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.testing import assert_close

import fenchel
import oracles
from fenchel import (
    Capped,
    Fused,
    Gini,
    Hard,
    KSubsets,
    Norm,
    Regularizer,
    Shannon,
    Tsallis,
    entmax_loss,
    fy_loss,
    linear_entmax_loss,
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


# -- derivatives ----------------------------------------------------------------------------------------


def hessian(loss: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """By double backward."""
    scores = scores.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(scores), scores, create_graph=True)
    rows = [torch.autograd.grad(g, scores, retain_graph=True)[0].flatten() for g in slope.flatten()]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("omega", "alpha"), [(Shannon(), 1.0), (Tsallis(1.5), 1.5), (Gini(), 2.0), (Tsallis(3), 3.0)], ids=str
)
def test_the_hessian_is_that_of_the_closed_form(omega: Regularizer, alpha: float) -> None:
    """diag(s) − ssᵀ/Σs with s = p^(2−α) on the support; 002, Proposition 1."""
    scores = torch.tensor([0.3, -0.2, 0.25, -3.0, 0.1], dtype=torch.float64)
    if alpha <= 2:
        p = torch.tensor([float(v) for v in oracles.entmax(scores.tolist(), alpha)], dtype=torch.float64)
    else:
        p = omega.argmax(scores)
    s = torch.where(p > 0, p.clamp_min(1e-30).pow(2 - alpha), 0.0)
    expected = torch.diag(s) - torch.outer(s, s) / s.sum()
    assert (p == 0).any() == (alpha > 1)
    soft = torch.tensor([0.25, 0.25, 0.0, 0.5, 0.0], dtype=torch.float64)
    for y in (torch.tensor(1), soft):
        assert_close(hessian(lambda z, y=y: fy_loss(z, y, omega), scores), expected, **EXACT)
    smoothed = hessian(lambda z: fy_loss(z, torch.tensor(1), omega, label_smoothing=0.3), scores)
    assert_close(smoothed, expected, **EXACT)


@every_reduction
def test_shannons_hessian_is_cross_entropys(reduction: str) -> None:
    scores, target = torch.randn(3, 4, dtype=torch.float64), torch.tensor([1, 0, 3])
    for smoothing in (0.0, 0.2):
        options = {
            "weight": torch.rand(4).double(),
            "ignore_index": 0,
            "reduction": reduction,
            "label_smoothing": smoothing,
        }
        ours = hessian(lambda s, o=options: fy_loss(s, target, Shannon(), **o).square().sum(), scores)
        if smoothing:  # the square would see the constant Ω(y)
            ours = hessian(lambda s, o=options: fy_loss(s, target, Shannon(), **o).sum(), scores)
            theirs = hessian(lambda s, o=options: F.cross_entropy(s, target, **o).sum(), scores)
        else:
            theirs = hessian(lambda s, o=options: F.cross_entropy(s, target, **o).square().sum(), scores)
        assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("omega", [Shannon(), Gini(), Tsallis(1.5), Norm(2)], ids=str)
def test_derivatives_with_every_option_against_finite_differences(omega: Regularizer) -> None:
    scores = torch.tensor([[0.3, 0.0, 0.21], [-0.03, 0.1, 0.33]], dtype=torch.float64, requires_grad=True)
    target, mask = torch.tensor([0, 2]), torch.tensor([[True, False, True], [True] * 3])

    def loss(s: Tensor) -> Tensor:
        weight = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
        return fy_loss(s, target, omega, mask=mask, weight=weight, label_smoothing=0.2)

    assert gradcheck(loss, (scores,), check_forward_ad=True)
    assert gradgradcheck(loss, (scores,), check_fwd_over_rev=True)


ALPHAS = [0.6, 0.99, 1.0, 1.0 + 1e-7, 1.01, 1.5, 2.0, 2.5]


@pytest.mark.parametrize(
    ("alpha", "shape"),
    [(1.0, ()), (1 + 1e-7, ()), (1.5, ()), (2.0, ()), (1.0, (2, 1))],
    ids=str,
)
def test_the_entmax_loss_is_differentiable_in_alpha(alpha: float, shape: tuple[int, ...]) -> None:
    rows = 2 if len(shape) == 2 else 1
    scores = torch.tensor([[0.3, 0.0, 0.21], [-0.1, 0.1, 0.17]][:rows], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 2][:rows])
    soft = torch.tensor([[0.1, 0.2, 0.7], [0.4, 0.3, 0.3]][:rows], dtype=torch.float64)
    values = torch.full(shape, alpha, dtype=torch.float64, requires_grad=True)
    for y, options in ((target, {}), (soft, {"reduction": "none"}), (target, {"label_smoothing": 0.2})):
        assert gradcheck(lambda s, a, y=y, o=options: entmax_loss(s, y, a, **o), (scores, values), atol=1e-7)
    assert gradgradcheck(lambda s, a: entmax_loss(s, target, a), (scores, values), atol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS[:-1])
def test_the_slope_in_alpha_is_that_of_the_exact_loss(alpha: float) -> None:
    row, y = [0.3, 0.0, 0.21, -0.1], [0.1, 0.2, 0.3, 0.4]

    def exactly(a: mpf) -> mpf:
        return loss_exactly(row, y, oracles.entmax(row, a), lambda q: tsallis_exactly(q, a))

    step = mpf(10) ** -12
    slope = (exactly(mpf(alpha) + step) - exactly(mpf(alpha) - step)) / (2 * step)
    if alpha == 2.0:  # the oracle stops at 2
        slope = (exactly(mpf(2)) - exactly(mpf(2) - step)) / step
    a = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    loss = entmax_loss(torch.tensor(row, dtype=torch.float64), torch.tensor(y, dtype=torch.float64), a)
    (actual,) = torch.autograd.grad(loss, a)
    assert math.isclose(actual.item(), slope, rel_tol=1e-11)


def test_a_tensor_alpha_equals_the_number_at_every_row() -> None:
    scores, target = leaf(4, 3, 5), torch.randint(5, (4, 3))
    alphas = torch.tensor([1.0, 1.2, 1.5, 2.0], dtype=torch.float64).reshape(4, 1, 1)
    loss = entmax_loss(scores, target, alphas, reduction="none")
    for i, alpha in enumerate(alphas.flatten().tolist()):
        assert_close(loss[i], entmax_loss(scores[i], target[i], alpha, reduction="none"), **EXACT)
    norms = normmax_loss(scores, target, 1 + alphas, reduction="none")
    for i, alpha in enumerate(alphas.flatten().tolist()):
        assert_close(norms[i], normmax_loss(scores[i], target[i], 1 + alpha, reduction="none"), **EXACT)


def test_alpha_follows_the_class_dimension() -> None:
    scores, target, alpha = leaf(4, 5, 3), torch.randint(5, (4, 3)), torch.tensor([1.1, 1.5, 1.9]).double()
    loss = entmax_loss(scores, target, alpha, dim=1, reduction="none")
    moved = entmax_loss(scores.movedim(1, -1), target, alpha[:, None], reduction="none")
    assert_close(loss, moved, **EXACT)


def test_ignored_rows_give_alpha_no_gradient() -> None:
    scores = torch.tensor([[0.3, math.nan], [0.5, 0.0]]).double().requires_grad_()
    alpha = torch.full((2, 1), 1.5, dtype=torch.float64, requires_grad=True)
    entmax_loss(scores, torch.tensor([-100, 1]), alpha).backward()
    assert alpha.grad is not None
    assert alpha.grad[0] == 0
    assert alpha.grad[1].isfinite()
    assert alpha.grad[1] != 0


@every_omega
def test_the_slope_along_soft_targets_is_that_of_omega_minus_the_score(omega: Regularizer) -> None:
    """L is a function of y too (distillation, mixup): ∇Ω(y) − s along the simplex, at zeros of y as well."""
    scores = torch.tensor([1.0, 0.7, 0.2], dtype=torch.float64)
    y = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    direction = torch.tensor([0.4, -0.1, -0.3], dtype=torch.float64)

    def along(t: Tensor) -> Tensor:
        return fy_loss(scores, y + t * direction, omega)

    assert gradcheck(along, (torch.tensor(0.1, dtype=torch.float64, requires_grad=True),))


@pytest.mark.parametrize("omega", [Gini(), Tsallis(3), Norm(2)], ids=str)
def test_the_slope_along_soft_targets_is_right_where_a_target_is_zero(omega: Regularizer) -> None:
    scores = torch.tensor([1.0, 0.7, 0.2], dtype=torch.float64)
    away = torch.tensor([-1.0, 1.0, 0.0], dtype=torch.float64)

    def along(t: Tensor) -> Tensor:
        return fy_loss(scores, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) + t * away, omega)

    start = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(along(start), start)
    step = 1e-6
    assert math.isclose(
        slope.item(), (along(torch.tensor(step)) - along(torch.tensor(0.0))).item() / step, rel_tol=1e-4
    )


def test_per_sample_gradients_by_vmap_are_a_loop() -> None:
    scores, target = torch.randn(5, 3, 4, dtype=torch.float64), torch.randint(4, (5, 3))
    target[1, 0] = target[4] = 2
    weight = torch.rand(4).double()
    options = {"weight": weight, "ignore_index": 2}
    ours = vmap(grad(lambda s, y: fy_loss(s, y, Shannon(), **options)))(scores, target)
    for i in range(5):
        leafs = scores[i].clone().requires_grad_()
        F.cross_entropy(leafs, target[i], **options).backward()
        assert_close(ours[i], leafs.grad, **EXACT)
    for omega in OMEGAS:
        mapped = vmap(lambda s, y, o=omega: fy_loss(s, y, o, label_smoothing=0.1, reduction="none"))(scores, target)
        assert_close(mapped, fy_loss(scores, target, omega, label_smoothing=0.1, reduction="none"), **EXACT)
        shared = vmap(lambda s, o=omega: fy_loss(s, target[0], o))(scores)
        assert_close(shared, torch.stack([fy_loss(s, target[0], omega) for s in scores]), **EXACT)


def test_vmap_over_alpha_and_soft_targets_is_a_loop() -> None:
    scores, soft, target = torch.randn(3, 4).double(), distributions((3, 4)), torch.tensor([0, 3, 1])
    alphas = torch.tensor([1.0, 1.3, 2.0], dtype=torch.float64)
    shared = vmap(lambda a: entmax_loss(scores, target, a))(alphas)
    assert_close(shared, torch.stack([entmax_loss(scores, target, a) for a in alphas.tolist()]), **EXACT)
    rows = zip(scores, soft, alphas.tolist(), strict=True)
    each = vmap(lambda s, y, a: entmax_loss(s, y, a, label_smoothing=0.1))(scores, soft, alphas)
    assert_close(each, torch.stack([entmax_loss(s, y, a, label_smoothing=0.1) for s, y, a in rows]), **EXACT)


def test_forward_mode_is_p_minus_y_times_the_direction() -> None:
    scores, direction, target = torch.randn(4, 5).double(), torch.randn(4, 5).double(), torch.randint(5, (4,))
    _, ours = jvp(lambda s: sparsemax_loss(s, target, reduction="none"), (scores,), (direction,))
    p = torch.tensor([oracles.sparsemax(z) for z in scores.tolist()], dtype=torch.float64)
    assert_close(ours, ((p - F.one_hot(target, 5)) * direction).sum(-1), **EXACT)


# -- dtypes, devices, graphs ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_omega
def test_half_precision_computes_in_single(omega: Regularizer, dtype: torch.dtype) -> None:
    scores, target, soft = leaf(6, 50, dtype=dtype), torch.randint(50, (6,)), distributions((6, 50))
    for y, options in ((target, {}), (soft, {}), (target, {"label_smoothing": 0.1, "weight": torch.rand(50)})):
        loss = fy_loss(scores, y, omega, **options)
        wide = fy_loss(scores.float(), y, omega, **options)
        assert loss.dtype == dtype
        assert torch.equal(loss, wide.to(dtype))
        (slope,) = torch.autograd.grad(loss, scores)
        assert slope.dtype == dtype
        assert slope.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_mean_of_a_huge_batch_is_exact_to_its_dtype(dtype: torch.dtype) -> None:
    scores, target = (2 * torch.randn(200_000, 3)).to(dtype), torch.randint(3, (200_000,))
    weight = torch.tensor([0.5, 1.0, 2.0])
    for options in ({}, {"weight": weight}, {"weight": weight.to(dtype)}):
        expected = F.cross_entropy(scores.double(), target, **{k: w.double() for k, w in options.items()})
        loss = fy_loss(scores, target, Shannon(), **options)
        assert abs(loss.item() - expected.item()) <= 2 * torch.finfo(dtype).eps * expected.item()
    soft = F.one_hot(target, 3).to(dtype)
    loss = fy_loss(scores, soft, Shannon())
    assert abs(loss.item() - F.cross_entropy(scores.double(), target).item()) <= 4 * torch.finfo(dtype).eps


@every_reduction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_means_a_float32_loss(dtype: torch.dtype, reduction: str) -> None:
    scores, target = leaf(6, 5, dtype=dtype), torch.randint(5, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = [fy_loss(scores, y, Shannon(), reduction=reduction) for y in (target, F.one_hot(target, 5).to(dtype))]
        theirs = F.cross_entropy(scores, target, reduction=reduction)
    for loss in ours:
        assert loss.dtype == theirs.dtype == torch.float32
        assert_close(loss, theirs)
        assert_close(gradient(loss, scores), gradient(theirs, scores))
    assert fy_loss(scores, target, Shannon()).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_any_integer_dtype_holds_targets(dtype: torch.dtype) -> None:
    scores, target = leaf(6, 100), torch.tensor([0, 99, 3, 50, 3, 7])
    expected = F.cross_entropy(scores, target, ignore_index=3, reduction="none")
    assert_close(fy_loss(scores, target.to(dtype), Shannon(), ignore_index=3, reduction="none"), expected, **EXACT)


@pytest.mark.parametrize(("dtype", "classes"), [(torch.uint8, 200), (torch.uint8, 256), (torch.uint8, 300)])
def test_targets_of_eight_bits_are_not_wrapped(dtype: torch.dtype, classes: int) -> None:
    # −100 is 156 modulo 256
    scores, target = leaf(3, classes), torch.tensor([156, 0, 155])
    expected = F.cross_entropy(scores, target, reduction="none")
    assert_close(fy_loss(scores, target.to(dtype), Shannon(), reduction="none"), expected, **EXACT)


def test_signed_targets_of_eight_bits_are_not_wrapped() -> None:
    scores, target = leaf(3, 200), torch.tensor([100, 0, -1])
    expected = F.cross_entropy(scores, target, reduction="none", ignore_index=-1)
    loss = fy_loss(scores, target.to(torch.int8), Shannon(), reduction="none", ignore_index=-1)
    assert_close(loss, expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.05])
def test_half_precision_probabilities_are_a_distribution(dtype: torch.dtype, smoothing: float) -> None:
    for width in (3, 10, 1000):
        target = distributions((50, width)).to(dtype)
        loss = fy_loss(torch.randn(50, width), target, Gini(), label_smoothing=smoothing)
        assert loss.isfinite()
        assert loss > 0


@pytest.mark.parametrize(
    ("omega", "options", "soft"),
    [
        (Tsallis(1.5), {"weight": torch.rand(4), "label_smoothing": 0.1, "ignore_index": 1}, False),
        (Norm(2), {"label_smoothing": 0.1}, True),
    ],
    ids=["indices", "soft"],
)
def test_compiles_to_one_graph_with_the_same_results(omega: Regularizer, options: dict, soft: bool) -> None:
    torch._dynamo.reset()
    mask = torch.rand(5, 4, 3) < 0.8
    y = distributions((5, 4, 3), 1, torch.float32) if soft else torch.randint(4, (5, 3))
    mask = mask | (torch.ones_like(mask) if soft else F.one_hot(y, 4).movedim(-1, 1).bool())
    eager = leaf(5, 4, 3, dtype=torch.float32)
    graph = eager.detach().clone().requires_grad_()

    def loss(s: Tensor) -> Tensor:
        return fy_loss(s, y, omega, dim=1, mask=mask, **options)

    expected, actual = loss(eager), torch.compile(loss, fullgraph=True, backend="aot_eager")(graph)
    assert_close(actual, expected)
    expected.backward()
    actual.backward()
    assert_close(graph.grad, eager.grad)


def test_a_learnable_alpha_compiles() -> None:
    torch._dynamo.reset()
    scores, target = leaf(5, 4, dtype=torch.float32), torch.randint(4, (5,))
    alpha = torch.tensor(1.3, requires_grad=True)
    compiled = torch.compile(lambda s, a: entmax_loss(s, target, a), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(scores, alpha), (scores, alpha))
    theirs = torch.autograd.grad(entmax_loss(scores, target, alpha), (scores, alpha))
    assert_close(ours, theirs)


@pytest.mark.parametrize("wrong", [4, 5, -2])
@pytest.mark.parametrize("kind", ["entmax", "norm", "linear"])
def test_a_graph_refuses_classes_that_do_not_exist_when_it_runs(kind: str, wrong: int) -> None:
    torch._dynamo.reset()
    scores, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4, 4)
    loss = {
        "entmax": lambda s, y: entmax_loss(s, y),
        "norm": lambda s, y: normmax_loss(s, y),
        "linear": lambda s, y: linear_entmax_loss(s, weight, y),
    }[kind]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    target = torch.tensor([0, 3, -100, 1, 2])
    assert_close(compiled(scores, target), loss(scores, target))
    target[3] = wrong
    with pytest.raises(ValueError, match=rf"target must hold class indices in \[0, 3\], got {wrong}"):
        compiled(scores, target)


def test_runs_in_inference_mode_and_on_the_meta_device() -> None:
    target = torch.randint(4, (5,))
    with torch.inference_mode():
        loss = sparsemax_loss(torch.randn(5, 4), target)
    assert loss.isfinite()
    meta = sparsemax_loss(torch.randn(5, 4, device="meta"), target.to("meta"), reduction="none")
    assert meta.shape == (5,)


def test_inputs_are_left_as_they_were() -> None:
    scores, target, soft = torch.randn(5, 4), torch.randint(4, (5,)), distributions((5, 4), dtype=torch.float32)
    mask, weight = torch.rand(5, 4) < 0.9, torch.rand(4)
    kept = [t.clone() for t in (scores, target, soft, mask, weight)]
    leafs = scores.requires_grad_()
    fy_loss(leafs, target, Gini(), mask=mask, weight=weight, label_smoothing=0.1).backward()
    fy_loss(leafs, soft, Gini(), mask=mask, label_smoothing=0.1).backward()
    for before, after in zip(kept, (scores, target, soft, mask, weight), strict=True):
        assert torch.equal(before, after.detach())


def test_strided_and_expanded_inputs_are_their_copies() -> None:
    base, target = torch.randn(6, 10, 8, dtype=torch.float64), torch.randint(4, (8, 10, 6))
    views = [
        (base[:, :4].transpose(0, 2), 1),
        (base[:1, ::2, :4].expand(3, 5, 4), -1),
        (base[..., :1].expand(6, 10, 4), 2),
    ]
    for view, dim in views:
        y = target[:, :1, :6].squeeze(1)[: view.shape[0], : view.shape[2]] if dim == 1 else None
        y = torch.zeros(without(view.shape, dim % 3), dtype=torch.long) if y is None else y
        for omega in (Shannon(), Gini(), Norm(2)):
            ours = fy_loss(view, y, omega, dim=dim, reduction="none")
            assert_close(ours, fy_loss(view.contiguous(), y.contiguous(), omega, dim=dim, reduction="none"), **EXACT)
    single = leaf(1, 4)
    fy_loss(single.expand(3, 4), torch.tensor([0, 1, 2]), Shannon(), reduction="sum").backward()
    p = torch.softmax(single.detach(), -1)
    assert_close(single.grad, 3 * p - torch.tensor([[1.0, 1.0, 1.0, 0.0]]).double(), **EXACT)


# -- bad input ------------------------------------------------------------------------------------------

SCORES, TARGET, SOFT = torch.zeros(3, 4), torch.tensor([0, 1, 2]), torch.full((3, 4), 0.25)


@pytest.mark.parametrize(
    ("scores", "target", "options", "error", "names"),
    [
        (SCORES.long(), TARGET, {}, TypeError, "scores"),
        ([[1.0, 2.0]], TARGET, {}, TypeError, "scores"),
        (torch.tensor(1.0), torch.tensor(0), {}, ValueError, "scores"),
        (torch.zeros(3, 0), TARGET, {}, ValueError, "scores"),
        (SCORES, [0, 1, 2], {}, TypeError, "target"),
        (SCORES, TARGET.bool(), {}, TypeError, "target"),
        (SCORES, TARGET.to(torch.complex64), {}, TypeError, "target"),
        (SCORES, TARGET[:2], {}, ValueError, "target"),
        (SCORES, TARGET[:1], {}, ValueError, "target"),
        (SCORES, TARGET[:, None], {}, ValueError, "target"),
        (SCORES, TARGET, {"dim": 0}, ValueError, "target"),
        (SCORES, torch.tensor(1), {}, ValueError, "target"),
        (SCORES, torch.tensor([0, -1, 2]), {}, ValueError, "target"),
        (SCORES, torch.tensor([0, 4, 2]), {}, ValueError, "target"),
        (SCORES, torch.tensor([0, -100, 2]), {"ignore_index": 1}, ValueError, "target.*-100"),
        (SCORES, TARGET.float(), {}, ValueError, "target"),
        (SCORES, SOFT[:2], {}, ValueError, "target"),
        (SCORES, SOFT[:1], {}, ValueError, "target"),
        (SCORES, SOFT * 1.1, {}, ValueError, "target"),
        (SCORES, SOFT * 0, {}, ValueError, "target"),
        (SCORES, torch.tensor([[1.5, -0.5, 0.0, 0.0]] * 3), {}, ValueError, "target"),
        (SCORES, torch.tensor([[1.5, -0.5, 0.0, 0.0]] * 3), {"label_smoothing": 0.9}, ValueError, "target"),
        (SCORES, SOFT * 2, {"label_smoothing": 1.0}, ValueError, "target"),
        (SCORES, TARGET, {"reduction": "average"}, ValueError, "reduction"),
        (SCORES, TARGET, {"reduction": None}, ValueError, "reduction"),
        (SCORES, TARGET, {"label_smoothing": -0.1}, ValueError, "label_smoothing"),
        (SCORES, TARGET, {"label_smoothing": 1.1}, ValueError, "label_smoothing"),
        (SCORES, TARGET, {"label_smoothing": math.nan}, ValueError, "label_smoothing"),
        (SCORES, TARGET, {"label_smoothing": None}, TypeError, "label_smoothing"),
        (SCORES, TARGET, {"weight": torch.ones(3)}, ValueError, "weight"),
        (SCORES, TARGET, {"weight": torch.ones(3, 4)}, ValueError, "weight"),
        (SCORES, TARGET, {"weight": torch.tensor(1.0)}, ValueError, "weight"),
        (SCORES, TARGET, {"weight": [1.0, 1.0, 1.0, 1.0]}, TypeError, "weight"),
        (SCORES, SOFT, {"weight": torch.ones(4)}, ValueError, "weight"),
        (SCORES, TARGET, {"weight": torch.tensor([1.0, -1, 1, 1]), "label_smoothing": 0.1}, ValueError, "weight"),
        (SCORES, TARGET, {"mask": torch.ones(3, 4)}, TypeError, "mask"),
        (SCORES, TARGET, {"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "mask"),
        (SCORES, TARGET, {"dim": 2}, ValueError, "dim"),
        (SCORES, TARGET, {"dim": None}, TypeError, "dim"),
    ],
)
def test_bad_input_is_named(scores: Tensor, target: Tensor, options: dict, error: type, names: str) -> None:
    for loss in (sparsemax_loss, entmax_loss, normmax_loss):
        with pytest.raises(error, match=names):
            loss(scores, target, **options)


@pytest.mark.parametrize(
    "omega", ["softmax", None, 1.5, fenchel.sparsemax, torch.ones(3)], ids=lambda o: type(o).__name__
)
def test_an_omega_that_is_not_a_regularizer_is_named(omega: object) -> None:
    with pytest.raises(TypeError, match="omega"):
        fy_loss(SCORES, TARGET, omega)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, torch.tensor(0.0), torch.tensor([[1.5], [-1.0], [2.0]])])
def test_an_alpha_out_of_range_is_named(alpha: float | Tensor) -> None:
    for loss in (entmax_loss, normmax_loss):
        with pytest.raises(ValueError, match="alpha"):
            loss(SCORES, TARGET, alpha)
    with pytest.raises(ValueError, match="alpha"):
        normmax_loss(SCORES, TARGET, 1.0)


@pytest.mark.parametrize("alpha", [torch.full((4,), 1.5), torch.full((2, 1), 1.5), torch.full((1, 3, 1), 1.5)], ids=str)
def test_an_alpha_of_the_wrong_shape_is_named(alpha: Tensor) -> None:
    with pytest.raises(ValueError, match="alpha"):
        entmax_loss(SCORES, TARGET, alpha)


@pytest.mark.parametrize("alpha", ["1.5", None, True, torch.tensor(True)], ids=str)
def test_an_alpha_of_the_wrong_type_is_named(alpha: object) -> None:
    with pytest.raises(TypeError, match="alpha"):
        entmax_loss(SCORES, TARGET, alpha)


def test_ignored_targets_may_lie_outside_the_classes_but_others_may_not() -> None:
    target = torch.tensor([0, 999, 2])
    assert sparsemax_loss(SCORES, target, ignore_index=999).isfinite()
    with pytest.raises(ValueError, match="999"):
        sparsemax_loss(SCORES, target)


# -- distributed tensors --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A group of this process alone."""
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=30)
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


DISTRIBUTED: dict[str, Callable[..., Tensor]] = {
    "entmax": lambda s, y, w: entmax_loss(s, y),
    "none": lambda s, y, w: entmax_loss(s, y, reduction="none").sum(),
    "weighted": lambda s, y, w: entmax_loss(s, y, weight=w[0], label_smoothing=0.1),
    "probabilities": lambda s, y, w: sparsemax_loss(s, w),
    "shannon": lambda s, y, w: fy_loss(s, y, Shannon()),
    "norm": lambda s, y, w: normmax_loss(s, y),
    "max": lambda s, y, w: (Gini().max(s) ** 2).sum(),
    "linear": lambda s, y, w: linear_entmax_loss(s, w, y),
}


@pytest.mark.parametrize("kind", DISTRIBUTED)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_losses_of_distributed_tensors_have_the_gradients_of_plain_ones(mesh: Any, kind: str, placement: Any) -> None:
    torch.manual_seed(0)
    plain = torch.randn(4, 4, dtype=torch.float64), torch.tensor([1, 3, -100, 0]), torch.full((4, 4), 0.25).double()
    scores, target, other = (distribute_tensor(t, mesh, [placement]) for t in plain)
    loss = DISTRIBUTED[kind](scores.requires_grad_(), target, other)
    loss.backward()
    leaf = plain[0].clone().requires_grad_()
    expected = DISTRIBUTED[kind](leaf, *plain[1:])
    expected.backward()
    assert_close(loss.full_tensor(), expected, **EXACT)
    assert_close(scores.grad.full_tensor(), leaf.grad, **EXACT)


def test_plain_scores_with_a_distributed_target_are_named(mesh: Any) -> None:
    target = distribute_tensor(torch.tensor([0, 1]), mesh, [Replicate()])
    with pytest.raises(TypeError, match="scores must be a DTensor as other arguments are"):
        entmax_loss(torch.zeros(2, 3), target)


@pytest.mark.parametrize("omega", [Fused(0.1), KSubsets(2), 0.5 * Capped(0.7)], ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_losses_of_any_omega_take_distributed_tensors(omega: Regularizer, placement: Any, mesh: Any) -> None:
    scores = torch.randn(2, 3, dtype=torch.float64)
    target = omega.argmax(torch.randn(2, 3, dtype=torch.float64))
    there, wanted = (distribute_tensor(t, mesh, [placement]) for t in (scores, target))
    assert_close(fy_loss(there, wanted, omega).full_tensor(), fy_loss(scores, target, omega), **EXACT)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_of_a_reduced_loss_may_be_asked_for_and_changed_twice(reduction: Any) -> None:
    scores, target = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.arange(6) % 5
    each = fenchel.entmax_loss(scores, target, reduction="none")
    expected = torch.autograd.grad(each.mean() if reduction == "mean" else each.sum(), scores)[0]
    loss = fenchel.entmax_loss(scores, target, reduction=reduction)
    first = torch.autograd.grad(3 * loss, scores, retain_graph=True)[0]
    assert_close(first, 3 * expected)
    first.fill_(torch.nan)  # the caller's own
    assert_close(torch.autograd.grad(loss, scores, retain_graph=True)[0], expected)
    assert_close(torch.autograd.grad(loss, scores, create_graph=True)[0], expected)
    assert gradgradcheck(lambda s: fenchel.entmax_loss(s, target, reduction=reduction), scores)
