"""The fused output layer: entmax_loss of a linear layer, to the last digits, without its logits.

One file, because every test compares with the same plain loss of a linear layer.
"""

import gc
import math
from collections.abc import Callable, Iterator

import mpmath
import pytest
import torch
from mpmath import mpf
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.testing import assert_close

import fenchel
import oracles
from fenchel import kernels, linear_entmax_loss
from fenchel.kernels.cpu.streaming import output as compiled
from fenchel.streaming import Plan, linear_loss, using
from watch import Largest

EXACT = {"atol": 1e-12, "rtol": 1e-11}
ALPHAS = [1.0, 1.1, 1.25, 1.5, 2.0]
every_alpha = pytest.mark.parametrize("alpha", ALPHAS)
every_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])

# How peaked the logits of every token are, and so how large its support: small, large, and one next to the other.
REGIMES = {
    "sparse": [6.0],
    "dense": [0.01],
    "mixed": [6.0, 0.01, 0.3],
    "one flat token": [6.0] * 30 + [0.001],
    "flat and peaked blocks": [6.0] * 16 + [0.01] * 16,
}
every_regime = pytest.mark.parametrize("regime", REGIMES)


@pytest.fixture(params=["kernels", "torch"])
def path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> str:
    set_kernels(request.param == "kernels")
    return request.param


@pytest.fixture
def _small_chunks() -> Iterator[None]:
    """Blocks of three tokens, of which a hundred classes are made at a time; few supports wait."""
    with using(Plan(rows=3, columns=100, share=0.15)):
        yield


def layer(
    tokens: int, classes: int, scales: list[float], dtype: torch.dtype = torch.float64, width: int = 5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias with gradients, and targets, one of which is ignored."""
    scale = torch.tensor(scales, dtype=torch.float64).repeat(tokens)[:tokens, None]
    hidden = (scale * torch.randn(tokens, width, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, dtype=torch.float64).to(dtype).requires_grad_()
    bias = (0.01 * torch.randn(classes, dtype=torch.float64)).to(dtype).requires_grad_()
    target = torch.randint(classes, (tokens,))
    target[tokens // 2] = -100
    return hidden, weight, bias, target


def plainly(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: object) -> Tensor:
    alpha, each = options.pop("alpha", 1.5), options.pop("class_weight", None)
    return fenchel.entmax_loss(F.linear(hidden, weight, bias), target, alpha, weight=each, **options)


def direction(loss: Tensor) -> Tensor:
    """A reproducible cotangent that a wrong factor or a wrong sum over tokens would not survive."""
    return torch.arange(1, loss.numel() + 1, dtype=loss.dtype).reshape(loss.shape).cos()


def with_gradients(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    **options: object,
) -> tuple[Tensor, ...]:
    loss = function(hidden, weight, target, bias, **options)
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    return loss, *torch.autograd.grad(loss, leaves, direction(loss))


# -- values and gradients -------------------------------------------------------------------------------


@every_reduction
@every_alpha
@every_regime
@pytest.mark.parametrize("classes", [1, 900])
@pytest.mark.usefixtures("path")
def test_it_is_the_loss_of_a_linear_layer(classes: int, regime: str, alpha: float, reduction: str) -> None:
    hidden, weight, bias, target = layer(35, classes, REGIMES[regime])
    options = {"alpha": alpha, "reduction": reduction}
    for b in (bias, None):
        ours = with_gradients(linear_entmax_loss, hidden, weight, target, b, **options)
        assert_close(ours, with_gradients(plainly, hidden, weight, target, b, **options), **EXACT)


@every_reduction
@every_regime
@pytest.mark.usefixtures("path", "_small_chunks")
def test_chunks_do_not_show(regime: str, reduction: str) -> None:
    for tokens in (1, 2, 3, 4, 32):
        hidden, weight, bias, target = layer(tokens, 1001, REGIMES[regime])
        ours = with_gradients(linear_entmax_loss, hidden, weight, target, bias, reduction=reduction)
        theirs = with_gradients(plainly, hidden, weight, target, bias, reduction=reduction)
        assert_close(ours, theirs, **EXACT, equal_nan=True)


def test_the_regimes_are_what_they_are_called(
    set_kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_kernels(True)
    calls: list[str] = []
    finish, add = compiled.linear_class_loss_backward, linear_loss.add_residual
    monkeypatch.setattr(linear_loss, "add_residual", lambda *args: (calls.append("dense"), add(*args)))
    remove = kernels.register(
        "linear_class_loss_backward", "tsallis", lambda *args, **to: (calls.append("sparse"), finish(*args, **to))
    )
    expected = {"sparse": {"sparse"}, "dense": {"dense"}, "mixed": {"dense"}, "one flat token": {"sparse"}}
    expected["flat and peaked blocks"] = {"dense", "sparse"}
    with using(Plan(rows=16, share=0.15)):
        for regime, scales in REGIMES.items():
            calls.clear()
            hidden, weight, bias, target = layer(40, 2000, scales)
            linear_entmax_loss(hidden, weight, target, bias)
            assert set(calls) == expected[regime]
    remove()


@pytest.mark.parametrize("alpha", [1.01, 1.1, 1.3, 1.5, 2.0])
@pytest.mark.usefixtures("path")
def test_it_is_its_definition_in_fifty_digits(alpha: float) -> None:
    hidden, weight, bias, target = layer(4, 600, [0.1, 3.0])
    kept = [i for i, y in enumerate(target.tolist()) if y >= 0]
    loss, *gradients = with_gradients(linear_entmax_loss, hidden, weight, target, bias, alpha=alpha, reduction="none")
    h, w, b = (exactly(t) for t in (hidden, weight, bias.unsqueeze(0)))
    to_bias = [mpf(0)] * 600
    for t in kept:
        logits = [mpmath.fdot(h[t], w[j]) + b[0][j] for j in range(600)]
        p = oracles.entmax(logits, alpha)
        y = target[t].item()
        attained = mpmath.fdot(p, logits) - tsallis(p, alpha)
        assert math.isclose(loss[t].item(), attained - logits[y], rel_tol=1e-12, abs_tol=1e-13)
        rate = mpf(math.cos(t + 1))
        residual = [rate * (q - (j == y)) for j, q in enumerate(p)]
        to_bias = [a + r for a, r in zip(to_bias, residual, strict=True)]
        for d in range(hidden.shape[1]):
            expected = mpmath.fdot(residual, [row[d] for row in w])
            assert math.isclose(gradients[0][t, d].item(), expected, rel_tol=1e-11, abs_tol=1e-12)
    assert all(
        math.isclose(g, e, rel_tol=1e-11, abs_tol=1e-13) for g, e in zip(gradients[2].tolist(), to_bias, strict=True)
    )


def exactly(tensor: Tensor) -> list[list[mpf]]:
    return [oracles.exact(row) for row in tensor.tolist()]


def tsallis(p: list[mpf], alpha: float) -> mpf:
    a = mpf(alpha)
    return (mpmath.fsum(v**a for v in p if v > 0) - 1) / (a * (a - 1))


@every_reduction
@pytest.mark.usefixtures("path")
def test_alpha_1_is_cross_entropy(reduction: str) -> None:
    hidden, weight, bias, target = layer(35, 700, [2.0])
    ours = with_gradients(linear_entmax_loss, hidden, weight, target, bias, alpha=1, reduction=reduction)
    theirs = with_gradients(
        lambda h, w, y, b: F.cross_entropy(F.linear(h, w, b), y, reduction=reduction), hidden, weight, target, bias
    )
    assert_close(ours, theirs, **EXACT)


@every_reduction
@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0])
@pytest.mark.usefixtures("path", "_small_chunks")
def test_gradients_are_those_of_finite_differences(alpha: float, reduction: str) -> None:
    hidden, weight, bias, target = layer(5, 6, [1.0], width=3)
    assert gradcheck(
        lambda h, w, b: linear_entmax_loss(h, w, target, b, alpha=alpha, reduction=reduction), (hidden, weight, bias)
    )


@pytest.mark.slow
@every_reduction
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.usefixtures("path", "_small_chunks")
def test_alpha_is_learned(shape: tuple[int, ...], reduction: str) -> None:
    hidden, weight, bias, target = layer(5, 6, [0.5], width=3)
    alpha = torch.full(shape, 1.4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda h, w, b, a: linear_entmax_loss(h, w, target, b, alpha=a, reduction=reduction),
        (hidden, weight, bias, alpha),
    )
    ours = linear_entmax_loss(hidden, weight, target, bias, alpha=alpha)
    assert_close(ours, plainly(hidden, weight, target, bias, alpha=1.4), **EXACT)


def test_a_fixed_tensor_alpha_is_its_number() -> None:
    hidden, weight, bias, target = layer(9, 800, [1.0])
    number = with_gradients(linear_entmax_loss, hidden, weight, target, bias, alpha=1.5)
    tensor = with_gradients(linear_entmax_loss, hidden, weight, target, bias, alpha=torch.tensor(1.5))
    assert all(torch.equal(a, b) for a, b in zip(number, tensor, strict=True))


@pytest.mark.usefixtures("path")
def test_only_what_is_needed_is_differentiated() -> None:
    hidden, weight, bias, target = layer(20, 800, [6.0, 0.1])
    expected = with_gradients(plainly, hidden, weight, target, bias)[1:]
    leaves = [hidden, weight, bias]
    for i, leaf in enumerate(leaves):
        h, w, b = (t if t is leaf else t.detach() for t in leaves)
        loss = linear_entmax_loss(h, w, target, b)
        (ours,) = torch.autograd.grad(loss, leaf, direction(loss))
        assert_close(ours, expected[i], **EXACT)
    assert not linear_entmax_loss(hidden.detach(), weight.detach(), target).requires_grad
    with torch.no_grad():
        assert not linear_entmax_loss(hidden, weight, target).requires_grad


@pytest.mark.usefixtures("path")
def test_any_shape_and_any_layout() -> None:
    hidden, weight, _, _ = layer(24, 900, [2.0])
    for shape in ((), (24,), (2, 3, 4)):
        h = (hidden[0] if shape == () else hidden).detach().reshape(*shape, 5).requires_grad_()
        target = torch.randint(900, shape)
        for reduction in ("none", "mean"):
            ours = with_gradients(linear_entmax_loss, h, weight, target, None, reduction=reduction)
            assert_close(ours, with_gradients(plainly, h, weight, target, None, reduction=reduction), **EXACT)
    strewn = [hidden.detach().t().contiguous().t(), weight.detach().t().contiguous().t()]
    target = torch.randint(900, (24, 2))[:, 0]
    ours = with_gradients(linear_entmax_loss, *(t.requires_grad_() for t in strewn), target, None)
    assert_close(ours, with_gradients(plainly, hidden, weight, target, None), **EXACT)


@pytest.mark.usefixtures("path")
def test_without_features_the_bias_is_all() -> None:
    bias, target = torch.randn(700, dtype=torch.float64), torch.tensor([3, 699])
    ours = linear_entmax_loss(bias.new_zeros(2, 0), bias.new_zeros(700, 0), target, bias)
    assert_close(ours, fenchel.entmax_loss(bias.expand(2, 700), target), **EXACT)


@pytest.mark.usefixtures("path")
def test_few_targets_of_any_integer_dtype() -> None:
    hidden, weight, bias, _ = layer(6, 100, [1.0])
    target = torch.tensor([0, 99, 3, 2, 99, 0])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        ours = linear_entmax_loss(hidden, weight, target.to(dtype), bias)
        assert_close(ours, plainly(hidden, weight, target, bias), **EXACT)


# -- dtypes and autocast --------------------------------------------------------------------------------


@every_reduction
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
@pytest.mark.usefixtures("path", "_small_chunks")
def test_float32_is_close_to_float64(alpha: float, reduction: str) -> None:
    hidden, weight, bias, target = layer(32, 1001, [6.0, 0.01], torch.float32)
    ours = with_gradients(linear_entmax_loss, hidden, weight, target, bias, alpha=alpha, reduction=reduction)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    exact = with_gradients(plainly, *wide[:2], target, wide[2], alpha=alpha, reduction=reduction)
    assert all(t.dtype == torch.float32 for t in ours)
    assert_close(ours, tuple(t.float() for t in exact), atol=2e-5, rtol=1e-5)


def of_rounded_inputs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, dtype: torch.dtype, reduction: str
) -> tuple[Tensor, ...]:
    """Loss and gradients in float64, on the inputs and along the cotangent as ``dtype`` has them."""
    wide = [t.detach().to(dtype).double().requires_grad_() for t in (hidden, weight, bias)]
    loss = plainly(*wide[:2], target, wide[2], reduction=reduction)
    return loss, *torch.autograd.grad(loss, wide, direction(loss.to(dtype)).double())


@every_reduction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("path", "_small_chunks")
def test_narrow_dtypes_err_by_their_last_digit(dtype: torch.dtype, reduction: str) -> None:
    hidden, weight, bias, target = layer(20, 600, [3.0, 0.1], dtype)
    ours = with_gradients(linear_entmax_loss, hidden, weight, target, bias, reduction=reduction)
    assert [t.dtype for t in ours] == [dtype] * 4
    exact = of_rounded_inputs(hidden, weight, target, bias, dtype, reduction)
    eps = torch.finfo(dtype).eps
    assert_close(tuple(t.double() for t in ours), exact, atol=1e-5, rtol=eps)
    plain = with_gradients(plainly, hidden, weight, target, bias, reduction=reduction)
    for found, other, truth in zip(ours, plain, exact, strict=True):
        assert (found - truth).norm() <= (other - truth).norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.usefixtures("path")
def test_logits_beyond_half_precision_are_finite(autocast: bool) -> None:
    hidden, weight, _, target = layer(20, 600, [3.0, 0.1], torch.float16)
    with torch.no_grad():
        hidden[:, 0], weight[:, 0] = 300.0, 300.0  # logits of 90,000 and more; half precision ends at 65504
    exact = plainly(hidden.double(), weight.double(), target)
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        loss = linear_entmax_loss(hidden, weight, target, reduction="none")[target >= 0].double().mean()
    assert_close(loss, exact, rtol=1e-2, atol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_small_gradients_in_half_precision_survive_a_loss_scale() -> None:
    hidden, weight, bias, target = layer(600, 40, [0.01], torch.float16)
    loss = linear_entmax_loss(hidden, weight, target, bias) * 1024.0
    (ours,) = torch.autograd.grad(loss, bias)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    (exact,) = torch.autograd.grad(1024.0 * plainly(*wide[:2], target, wide[2]), wide[2])
    assert_close(ours.double(), exact, atol=1e-1, rtol=4e-3)


@every_reduction
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_autocast_rounds_the_inputs_and_not_the_logits(dtype: torch.dtype, reduction: str) -> None:
    hidden, weight, bias, target = layer(20, 600, [3.0, 0.1], dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = (f(hidden, weight, target, bias, reduction=reduction) for f in (linear_entmax_loss, plainly))
    assert ours.dtype == theirs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    half = torch.float64 if dtype == torch.float64 else torch.bfloat16  # autocast leaves float64 alone
    gradients = torch.autograd.grad(ours, (hidden, weight, bias), direction(ours).to(half).to(ours.dtype))
    assert [g.dtype for g in gradients] == [dtype] * 3
    loss, *slopes = of_rounded_inputs(hidden, weight, target, bias, half, reduction)
    assert_close(ours.double(), loss, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(half).eps
    assert_close([g.double() for g in gradients], slopes, rtol=eps, atol=1e-5)


def test_autocast_takes_parameters_of_another_dtype() -> None:
    hidden, weight, bias, target = layer(8, 600, [1.0], torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_entmax_loss(hidden.bfloat16(), weight, target, bias)
    loss.backward()
    assert weight.grad.dtype == torch.float32


# -- what is left out, and what is not a number ---------------------------------------------------------


@every_reduction
@pytest.mark.usefixtures("path", "_small_chunks")
def test_ignored_tokens_leave_no_trace(reduction: str) -> None:
    hidden, weight, bias, target = layer(12, 800, [4.0, 0.1])
    target[::3] = 7777
    with torch.no_grad():
        hidden[::3] *= 1e9
    target[6] = 1
    hidden.data[6] = 0.5
    options = {"ignore_index": 7777, "reduction": reduction}
    target[target == -100] = 7777
    ours = with_gradients(linear_entmax_loss, hidden, weight, target, bias, **options)
    theirs = with_gradients(plainly, hidden, weight, target, bias, **options)
    assert ours[0].isfinite().all()
    assert_close(ours[0], theirs[0], **EXACT)
    kept = target != 7777
    assert (ours[1][~kept] == 0).all()
    short = hidden.detach()[kept].requires_grad_()
    loss = linear_entmax_loss(short, weight, target[kept], bias, reduction=reduction)
    cotangent = direction(ours[0])[kept] if reduction == "none" else direction(loss)
    assert_close(ours[2:], torch.autograd.grad(loss, (weight, bias), cotangent), **EXACT)


@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [5, 800])
@pytest.mark.usefixtures("path")
def test_ignored_tokens_that_are_not_finite_leave_no_trace(classes: int, smoothing: float, reduction: str) -> None:
    hidden, weight, bias, target = layer(12, classes, [4.0, 0.1])
    target[:4] = 1
    target[::3] = -100
    kept = target != -100
    with torch.no_grad():
        hidden[~kept] = torch.tensor([math.nan, math.inf]).double()[torch.arange(int((~kept).sum())) % 2, None]
    options = {"reduction": reduction, "label_smoothing": smoothing}
    loss, to_hidden, to_weight, to_bias = with_gradients(linear_entmax_loss, hidden, weight, target, bias, **options)
    short = hidden.detach()[kept].requires_grad_()
    expected = fenchel.entmax_loss(F.linear(short, weight, bias), target[kept], 1.5, **options)
    cotangent = direction(loss)[kept] if reduction == "none" else direction(expected)
    slopes = torch.autograd.grad(expected, (short, weight, bias), cotangent)
    assert_close(loss[kept] if reduction == "none" else loss, expected, **EXACT)
    assert (to_hidden[~kept] == 0).all()
    assert_close((to_hidden[kept], to_weight, to_bias), slopes, **EXACT)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_learn_from(tokens: int) -> None:
    hidden, weight, bias, _ = layer(max(tokens, 1), 600, [1.0])
    hidden = hidden.detach()[:tokens].requires_grad_()
    target = torch.full((tokens,), -100)
    for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
        loss = linear_entmax_loss(hidden, weight, target, bias, reduction=reduction)
        assert_close(loss, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
        for gradient in torch.autograd.grad(loss, (hidden, weight, bias)):
            assert (gradient == 0).all()
    assert linear_entmax_loss(hidden, weight, target, reduction="none").tolist() == [0.0] * tokens


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("classes", [5, 900])
@pytest.mark.usefixtures("path", "_small_chunks")
def test_what_is_not_a_number_spoils_its_own_token(classes: int, bad: float) -> None:
    hidden, weight, bias, target = layer(9, classes, [3.0])
    target[4] = 0
    with torch.no_grad():
        hidden[1, 0] = bad
    loss = linear_entmax_loss(hidden, weight, target, bias, reduction="none")
    assert loss.isnan().tolist() == [t == 1 for t in range(9)]
    (ours,) = torch.autograd.grad(loss, hidden, direction(loss))
    assert ours.isnan().any(-1).tolist() == [t == 1 for t in range(9)]


@pytest.mark.parametrize("classes", [6, 900])
@pytest.mark.usefixtures("path", "_small_chunks")
def test_a_class_may_be_forbidden_by_its_bias(classes: int) -> None:
    hidden, weight, bias, target = layer(9, classes, [1.0])
    with torch.no_grad():
        bias[::2] = -math.inf
    ours = with_gradients(linear_entmax_loss, hidden, weight, target, bias, reduction="none")
    theirs = with_gradients(plainly, hidden, weight, target, bias, reduction="none")
    assert ours[0].isinf().any()
    assert_close(ours, theirs, **EXACT)


# -- class weights and label smoothing ------------------------------------------------------------------


def weighted(classes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Class weights, some of them 0."""
    return torch.rand(classes, dtype=dtype).mul(2).masked_fill(torch.arange(classes) % 7 == 3, 0.0)


@every_reduction
@pytest.mark.parametrize(("has_weight", "share"), [(True, 0.0), (True, 0.2), (False, 0.2), (True, 1.0), (False, 1.0)])
@pytest.mark.usefixtures("path", "_small_chunks")
def test_class_weights_and_label_smoothing_are_those_of_the_entmax_loss(
    has_weight: bool, share: float, reduction: str
) -> None:
    hidden, weight, bias, target = layer(12, 40, [3.0, 0.1])
    each = weighted(40) if has_weight else None
    for alpha, b in ((1.0, bias), (1.0 + 1e-9, bias), (1.5, bias), (1.5, None), (2.0, bias)):
        options = {"alpha": alpha, "label_smoothing": share, "reduction": reduction}
        ours = with_gradients(linear_entmax_loss, hidden, weight, target, b, class_weight=each, **options)
        theirs = with_gradients(plainly, hidden, weight, target, b, class_weight=each, **options)
        assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.usefixtures("_small_chunks")
def test_weighted_and_smoothed_gradients_are_those_of_finite_differences(reduction: str) -> None:
    hidden, weight, bias, target = layer(5, 6, [0.5], width=2)
    alpha = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    options = {"class_weight": weighted(6), "label_smoothing": 0.2, "reduction": reduction}
    assert gradcheck(
        lambda h, w, b, a: linear_entmax_loss(h, w, target, b, alpha=a, **options), (hidden, weight, bias, alpha)
    )


@pytest.mark.usefixtures("path")
def test_smoothing_spreads_over_the_classes_that_are_not_forbidden() -> None:
    hidden, weight, bias, target = layer(9, 20, [1.0])
    with torch.no_grad():
        bias[::2] = -math.inf
    each = weighted(20)
    target[:2] = torch.tensor([4, 5])  # forbidden, and of no weight; allowed
    for share in (0.3, 1.0):
        options = {"reduction": "none", "label_smoothing": share, "class_weight": each.index_fill(0, target[:1], 0.0)}
        ours = with_gradients(linear_entmax_loss, hidden, weight, target, bias, **options)
        assert_close(ours, with_gradients(plainly, hidden, weight, target, bias, **options), **EXACT)
        assert ours[0][:2].isfinite().all()


def test_smoothing_of_alpha_1_has_the_gradient_of_cross_entropy() -> None:
    hidden, weight, bias, target = layer(9, 20, [1.0])
    each = weighted(20)
    options = {"label_smoothing": 0.1, "reduction": "mean"}
    ours = with_gradients(linear_entmax_loss, hidden, weight, target, bias, alpha=1.0, class_weight=each, **options)
    theirs = with_gradients(
        lambda h, w, y, b: F.cross_entropy(F.linear(h, w, b), y, each, **options), hidden, weight, target, bias
    )
    assert_close(ours[1:], theirs[1:], **EXACT)


def test_class_weights_and_smoothing_in_graphs_and_in_the_module() -> None:
    hidden, weight, bias, target = layer(7, 20, [1.0])
    each = weighted(20)
    module = fenchel.nn.LinearEntmaxLoss(5, 20, dtype=torch.float64, class_weight=each, label_smoothing=0.2)
    assert "weight of 20 classes, label_smoothing=0.2" in repr(module)
    assert torch.equal(module.state_dict()["class_weight"], each)
    module.load_state_dict({"weight": weight, "bias": bias, "class_weight": each})
    expected = plainly(hidden, weight, target, bias, class_weight=each, label_smoothing=0.2)
    assert_close(module(hidden, target), expected, **EXACT)
    batched = vmap(lambda h: linear_entmax_loss(h, weight, target, bias, class_weight=each, label_smoothing=0.2))
    assert_close(batched(hidden[None]), expected[None], **EXACT)


# -- what is promised of speed: memory and threads ------------------------------------------------------


@every_reduction
@pytest.mark.parametrize("scale", [6.0, 0.01])
@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_no_matrix_of_tokens_times_classes_is_made(path: str, alpha: float, scale: float, reduction: str) -> None:
    tokens, classes = 640, 2000
    hidden, weight, bias, target = layer(
        tokens, classes, [scale], torch.bfloat16 if reduction == "mean" else torch.float32
    )
    options = {"class_weight": torch.rand(classes), "label_smoothing": 0.1} if reduction != "sum" else {}
    with Largest(kernels=True) as seen:
        loss = linear_entmax_loss(hidden, weight, target, bias, alpha=alpha, reduction=reduction, **options)
        torch.autograd.grad(loss, (hidden, weight, bias), torch.ones_like(loss))
    assert classes <= seen.elements <= tokens * classes / 10
    with Largest(kernels=True) as seen:
        plainly(hidden, weight, target, bias, alpha=alpha)
    assert seen.elements == tokens * classes


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("scale", [1.0, 2.0**-6])
@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_the_number_of_threads(
    scale: float, set_kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small whole numbers: their products are exact, whatever BLAS does with its threads.
    hidden = (scale * torch.randint(-2, 3, (300, 200))).requires_grad_()
    weight, bias = (torch.randint(-2, 3, shape).float().requires_grad_() for shape in ((4000, 200), (4000,)))
    target = torch.randint(4000, (300,))
    set_kernels(True)
    monkeypatch.setattr(linear_loss, "add_residual", None)  # BLAS again, and not exact
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append(with_gradients(linear_entmax_loss, hidden, weight, target, bias))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# -- autograd -------------------------------------------------------------------------------------------


@every_reduction
@pytest.mark.usefixtures("path")
def test_a_graph_that_is_kept_gives_the_same_again(reduction: str) -> None:
    hidden, weight, bias, target = layer(35, 900, [6.0, 0.1])
    loss = linear_entmax_loss(hidden, weight, target, bias, reduction=reduction)
    first, second, third = (
        torch.autograd.grad(loss, (hidden, weight, bias), factor * direction(loss), retain_graph=True)
        for factor in (1.0, 1.0, -3.0)
    )
    storages = {g.untyped_storage().data_ptr() for result in (first, second, third) for g in result}
    assert len(storages) == 9
    assert_close(first, second, **EXACT)
    assert_close(tuple(-3 * g for g in first), third, **EXACT)


def test_a_graph_that_is_not_kept_is_gone() -> None:
    hidden, weight, _, target = layer(5, 30, [1.0])
    loss = linear_entmax_loss(hidden, weight, target)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_parameters_take_the_gradients_over() -> None:
    hidden, weight, _, target = layer(40, 900, [6.0])
    loss = linear_entmax_loss(hidden, weight, target)
    made = loss.grad_fn.gradients[1].data_ptr()
    loss.backward()
    assert weight.grad.data_ptr() == made
    assert loss.grad_fn.gradients is None


def test_gradients_add_up_over_batches() -> None:
    hidden, weight, bias, target = layer(40, 900, [6.0, 0.1])
    for part in (slice(0, 15), slice(15, 40)):
        linear_entmax_loss(hidden[part], weight, target[part], bias, reduction="sum").backward()
    expected = torch.autograd.grad(plainly(hidden, weight, target, bias, reduction="sum"), (hidden, weight, bias))
    assert_close((hidden.grad, weight.grad, bias.grad), expected, **EXACT)


@every_reduction
@pytest.mark.usefixtures("path")
def test_second_derivatives_are_refused(reduction: str) -> None:
    hidden, weight, bias, target = layer(5, 30, [1.0])
    loss = linear_entmax_loss(hidden, weight, target, bias, reduction=reduction)
    cotangent = direction(loss).requires_grad_()
    gradients = torch.autograd.grad(loss, (hidden, weight, bias), cotangent, create_graph=True)
    expected = with_gradients(plainly, hidden, weight, target, bias, reduction=reduction)[1:]
    assert_close(tuple(g.detach() for g in gradients), expected, **EXACT)
    for gradient in gradients:
        for leaf in (hidden, weight, bias, cotangent):
            with pytest.raises(NotImplementedError, match=r"differentiable once.*entmax_loss"):
                torch.autograd.grad(gradient.sum(), leaf, retain_graph=True)


def test_weights_that_were_changed_in_between_are_noticed() -> None:
    hidden, weight, _, target = layer(5, 30, [1.0])
    loss = linear_entmax_loss(hidden, weight, target)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_transformations_see_the_plain_formula() -> None:
    hidden, weight, bias, target = layer(6, 30, [1.0])
    h, w = hidden.detach(), weight.detach()
    slopes = torch.autograd.grad(plainly(hidden, weight, target), (hidden, weight))
    assert_close(grad(linear_entmax_loss)(h, w, target), slopes[0], **EXACT)
    _, change = jvp(lambda a: linear_entmax_loss(a, w, target), (h,), (torch.ones_like(h),))
    assert_close(change, slopes[0].sum(), **EXACT)
    each = vmap(lambda a, y: linear_entmax_loss(a, w, y, reduction="sum"))(h.unsqueeze(1), target.unsqueeze(1))
    assert_close(each, plainly(h, w, target, reduction="none"), **EXACT)
    compiled_loss = torch.compile(linear_entmax_loss, fullgraph=True, backend="aot_eager")
    ours = with_gradients(compiled_loss, hidden, weight, target, bias)
    assert_close(ours, with_gradients(plainly, hidden, weight, target, bias), **EXACT)
    meta = linear_entmax_loss(h.to("meta"), w.to("meta"), target.to("meta"), reduction="none")
    assert meta.shape == (6,)


def test_nothing_lives_on() -> None:
    hidden, weight, _, target = layer(40, 900, [6.0])
    gc.collect()
    before = len([each for each in gc.get_objects() if type(each) is Tensor])
    linear_entmax_loss(hidden, weight, target).backward()
    hidden.grad = weight.grad = None
    gc.collect()
    assert len([each for each in gc.get_objects() if type(each) is Tensor]) <= before


# -- bad input ------------------------------------------------------------------------------------------

HIDDEN, WEIGHT, TARGET, BIAS = torch.zeros(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, 2]), torch.zeros(4)


@pytest.mark.parametrize(
    ("changed", "error", "names"),
    [
        ({"hidden": [[0.0, 0.0]]}, TypeError, "hidden"),
        ({"hidden": HIDDEN.long()}, TypeError, "hidden.*int64"),
        ({"hidden": torch.tensor(0.0)}, ValueError, "hidden"),
        ({"weight": None}, TypeError, "weight.*NoneType"),
        ({"weight": WEIGHT.double()}, TypeError, "weight.*float32.*float64"),
        ({"weight": WEIGHT.T}, ValueError, r"weight.*\(C, 2\).*\(2, 4\)"),
        ({"weight": WEIGHT[0]}, ValueError, "weight"),
        ({"weight": WEIGHT[:0]}, ValueError, "weight"),
        ({"bias": BIAS[:3]}, ValueError, r"bias.*\(4,\).*\(3,\)"),
        ({"bias": BIAS.double()}, TypeError, "bias.*float64"),
        ({"bias": 0.0}, TypeError, "bias.*float"),
        ({"target": [0, 1, 2]}, TypeError, "target.*list"),
        ({"target": TARGET.float()}, TypeError, "target.*float32"),
        ({"target": TARGET.bool()}, TypeError, "target.*bool"),
        ({"target": TARGET[:2]}, ValueError, r"target.*\(3,\).*\(2,\)"),
        ({"target": TARGET + 2}, ValueError, r"target.*\[0, 3\].*got 4"),
        ({"target": TARGET - 1}, ValueError, "target.*got -1"),
        ({"target": TARGET - 100, "ignore_index": 0}, ValueError, "target.*got -100"),
        ({"reduction": "average"}, ValueError, "reduction.*average"),
        ({"class_weight": 2.0}, TypeError, "class_weight.*float"),
        ({"class_weight": torch.ones(3)}, ValueError, r"class_weight.*\(4,\).*\(3,\)"),
        ({"class_weight": torch.ones(4, requires_grad=True)}, ValueError, "class_weight must not require gradients"),
        ({"class_weight": -torch.ones(4), "label_smoothing": 0.1}, ValueError, "class_weight must not be negative"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing.*1.5"),
        ({"label_smoothing": "0.1"}, TypeError, "label_smoothing.*str"),
        ({"alpha": 0.9}, ValueError, "alpha.*0.9"),
        ({"alpha": 2.5}, ValueError, "alpha.*2.5"),
        ({"alpha": math.nan}, ValueError, "alpha"),
        ({"alpha": math.inf}, ValueError, "alpha"),
        ({"alpha": torch.tensor(2.5)}, ValueError, "alpha.*2.5"),
        ({"alpha": torch.tensor([1.5, 1.5])}, ValueError, r"alpha.*one element.*\(2,\)"),
        ({"alpha": torch.tensor(True)}, TypeError, "alpha"),
        ({"alpha": "1.5"}, TypeError, "alpha"),
        ({"alpha": True}, TypeError, "alpha"),
    ],
)
def test_bad_input_is_named(changed: dict[str, object], error: type[Exception], names: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGET, "bias": BIAS} | changed
    with pytest.raises(error, match=names):
        linear_entmax_loss(**arguments)


# -- the module -----------------------------------------------------------------------------------------


def test_the_module_is_a_linear_layer_with_its_loss() -> None:
    module = fenchel.nn.LinearEntmaxLoss(5, 30, alpha=1.3, ignore_index=0, reduction="sum")
    linear = nn.Linear(5, 30)
    module.load_state_dict(linear.state_dict())
    hidden, target = torch.randn(4, 5), torch.tensor([3, 0, 29, 7])
    expected = fenchel.entmax_loss(linear(hidden), target, 1.3, ignore_index=0, reduction="sum")
    assert_close(module(hidden, target), expected)
    assert_close(module.probabilities(hidden), fenchel.entmax(linear(hidden), 1.3))
    assert "in_features=5, out_features=30, bias=True, alpha=1.3" in repr(module)
    assert functional_call(module, dict(module.named_parameters()), (hidden, target)).shape == ()


def test_an_alpha_that_is_learned_stays_inside_its_bounds() -> None:
    hidden, scores, target = torch.randn(6, 4), 5 * torch.randn(6, 9), torch.randint(9, (6,))
    layer = fenchel.nn.LinearEntmaxLoss(4, 9, alpha=1.9, learnable=True)
    criterion = fenchel.nn.EntmaxLoss(1.9, learnable=True)
    for module, first in ((layer, hidden), (criterion, scores)):
        optimizer = torch.optim.SGD(module.parameters(), lr=100.0)
        for _ in range(20):
            optimizer.zero_grad()
            module(first, target).backward()
            optimizer.step()
        alpha = module.omega.alpha.item()
        assert 1 <= alpha <= 2
        assert abs(alpha - 1.9) > 0.05
        assert "omega.raw_alpha" in module.state_dict()


def test_a_layer_wants_a_number_for_alpha() -> None:
    with pytest.raises(TypeError, match="alpha must be a number or a tensor, got Tsallis"):
        fenchel.nn.LinearEntmaxLoss(4, 5, alpha=fenchel.Tsallis(1.5))
    with pytest.raises(ValueError, match="learnable=True"):
        fenchel.nn.LinearEntmaxLoss(4, 5, alpha=2.5)
