"""Derivatives of losses, in every dtype, on other devices and in graphs."""

import math
from collections.abc import Callable

import pytest
import torch
from mpmath import mpf
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jvp, vmap
from torch.nn import functional as F
from torch.testing import assert_close

import oracles
from fenchel import (
    Gini,
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
from test_losses import (
    EXACT,
    OMEGAS,
    distributions,
    every_omega,
    every_reduction,
    gradient,
    leaf,
    loss_exactly,
    tsallis_exactly,
    without,
)

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
