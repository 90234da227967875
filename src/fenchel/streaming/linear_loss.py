"""Output layers fused with their loss: the matrix of logits, tokens × classes, is never held."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fenchel import kernels
from fenchel._checks import check_device, check_floats, check_integers, check_parameter, check_shape, kind
from fenchel._operators import define_operator
from fenchel._torch import (
    apply_function,
    as_autocast,
    autocast_dtype,
    below_autograd,
    concrete,
    differentiable_once,
    distributed_rule,
    is_distributed,
    known,
    tracks,
    tracks_forward,
)
from fenchel.losses import Reduction, check_reduction, check_smoothing, entmax_loss, is_kept
from fenchel.regularizers.rows import check_range
from fenchel.regularizers.tsallis import TSALLIS
from fenchel.streaming.plan import plan_output

Lists = tuple[Tensor, Tensor, Tensor]
"""The supports of tokens: where each begins, classes, and values."""

Gradients = list[Tensor | None]
"""Those of hidden, weight, bias and alpha; None where one is not needed."""

_ALLOWED = "1 <= alpha <= 2"


def linear_entmax_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float | Tensor = 1.5,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    class_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""The entmax loss of a linear output layer, without its logits.

    .. math:: L(h, y) = \max_{p \in \Delta} \; \langle p, s \rangle - \Omega(p) - s_y, \quad s = W h + b,

    with Tsallis' :math:`\Omega`: the same as ``entmax_loss(hidden @ weight.T + bias, target, alpha)``. Only the
    logits of a few tokens at a time are held, in float32 or better. Gradients are computed from the support of
    :math:`p - y` where that is small: in the forward pass for ``"mean"`` and ``"sum"``, in the backward pass, which
    computes the logits again, for ``"none"``.

    Differentiable once. Under ``torch.func`` and in forward mode it is the plain formula, which holds all logits and
    has derivatives of every order.

    Args:
        hidden: (…, D), floating point.
        weight: the layer's matrix, (C, D), one row per class, as in ``torch.nn.Linear``.
        target: class indices, of the shape of ``hidden`` without its last dimension.
        bias: (C,).
        alpha: a number in [1, 2], or a tensor with one element, differentiable. Cross-entropy at 1, sparsemax at 2.
        ignore_index: a target that is left out of the loss and of the mean.
        reduction: ``"none"``, ``"mean"`` (weighted, as in ``cross_entropy``) or ``"sum"``.
        class_weight: (C,), a factor for each class: ``weight`` of :func:`entmax_loss`. Not differentiable.
        label_smoothing: the share, in [0, 1], of each target that is spread over all classes.

    Returns:
        A scalar, or the loss of every token for ``reduction="none"``.

    Example:
        >>> import torch, fenchel
        >>> hidden, weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> fenchel.linear_entmax_loss(hidden, weight.requires_grad_(), torch.tensor([0, 1])).backward()
        >>> weight.grad  # the second token leads by 2: its loss and its gradient are zero
        tensor([[-0.1299,  0.0000],
                [ 0.0649,  0.0000],
                [ 0.0649,  0.0000]])

    References: Peters, Niculae & Martins (2019), section 3.2.
    """
    alpha = check_alpha(alpha)
    check_reduction(reduction)
    check_smoothing(label_smoothing)
    if is_distributed(hidden, weight, target, bias):
        found: Tensor = distributed_rule("linear_loss")(
            hidden, weight, target, bias, alpha, ignore_index, reduction, class_weight, label_smoothing
        )
        return found
    index = _check(hidden, weight, target, bias, class_weight, label_smoothing, ignore_index)
    kept = index >= 0
    if not known(index) or not bool(kept.all()):
        # The values of an ignored token do not matter: NaN times a gradient of 0 would be NaN for all classes.
        hidden = torch.where(kept.unsqueeze(-1), hidden, 0.0)
    graph = torch.compiler.is_compiling()
    plainly = tracks_forward() or not index.numel()
    for tensor in (hidden, weight, bias, alpha, index, class_weight):
        plainly = plainly or (isinstance(tensor, Tensor) and not graph and not concrete(tensor))
    half = autocast_dtype(hidden.device)
    if half is not None:
        hidden, weight, bias = as_autocast(half, hidden, weight, bias)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    dtype = hidden.dtype if half is None else exact
    with contextlib.nullcontext() if half is None else torch.autocast(hidden.device.type, enabled=False):
        if plainly:
            logits = F.linear(hidden.to(exact), weight.to(exact), None if bias is None else bias.to(exact))
            loss = entmax_loss(
                logits,
                target,
                alpha.reshape(()) if isinstance(alpha, Tensor) else alpha,
                weight=class_weight,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                reduction=reduction,
            )
            return loss.to(dtype)
        layer = hidden.reshape(index.numel(), hidden.shape[-1]), weight, bias, alpha
        targets = _targets(index.reshape(-1), weight, bias, class_weight, label_smoothing, reduction)
        problem = *layer, targets.index, targets.rates, reduction != "none"
        if graph:
            loss = _call_operator(*problem, _NOTHING)[0]
        elif tracks(*layer):
            loss = apply_function(_LinearLoss, _run, *problem)
        else:
            loss, _ = _run(*problem, _NOTHING)
        if targets.even is not None:
            more = _smoothing_terms(*layer, targets, targets.even)
            more = more if reduction == "none" else more.sum()
            loss = loss + (more if targets.total is None else more / targets.total)
        loss = loss.reshape(target.shape) if reduction == "none" else loss
    return loss.to(dtype)


# -- what comes in ---------------------------------------------------------------------------------------------------


def check_alpha(alpha: float | Tensor) -> float | Tensor:
    """Check that alpha is one number in [1, 2]; a float, or the tensor if it is to be differentiated."""
    alpha = check_parameter(alpha, "alpha", 0.0, _ALLOWED)
    if isinstance(alpha, Tensor):
        if alpha.numel() != 1:
            raise ValueError(f"alpha must be a number or a tensor with one element, got shape {tuple(alpha.shape)}")
        if not known(alpha):
            return alpha
    value = float(alpha.detach() if isinstance(alpha, Tensor) else alpha)
    if not 1 <= value <= 2:
        raise ValueError(
            f"alpha must satisfy {_ALLOWED}, got {value:g}; for others use fenchel.entmax_loss, to learn one "
            "inside these bounds nn.LinearEntmaxLoss(…, learnable=True)"
        )
    return alpha if isinstance(alpha, Tensor) and alpha.requires_grad else value


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    label_smoothing: float,
    ignore_index: int,
) -> Tensor:
    """Check the tensors of the layer and the targets; return class indices as int64, −1 where one is ignored."""
    check_layer(hidden, weight, bias, least=1)
    check_device(hidden, "hidden", target=target, class_weight=class_weight)
    classes = len(weight)
    if class_weight is not None:
        if not isinstance(class_weight, Tensor):
            raise TypeError(f"class_weight must be a tensor with one value per class, got {kind(class_weight)}")
        check_shape(class_weight, "class_weight", classes)
        if class_weight.requires_grad:
            raise ValueError("class_weight must not require gradients: pass class_weight.detach()")
        if label_smoothing and known(class_weight) and bool((class_weight < 0).any()):
            raise ValueError(
                "class_weight must not be negative with label_smoothing: the smoothed target would not be a measure"
            )
    index = check_integers(target, "target", "integer class indices")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must have shape {tuple(hidden.shape[:-1])}, that of hidden without its last dimension, "
            f"got {tuple(target.shape)}"
        )
    kept = is_kept(target, ignore_index)
    if known(target):
        check_range(index[kept], classes, ignored=ignore_index)
    return torch.where(kept, index, -1)


def check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None, least: int) -> None:
    """Check hidden states, and the matrix and bias of a layer with at least so many classes."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            check_floats(tensor, name)
        elif tensor.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise TypeError(f"{name} must have the dtype of hidden, {hidden.dtype}, got {tensor.dtype}")
    check_device(hidden, "hidden", weight=weight, bias=bias)
    if hidden.dim() == 0:
        raise ValueError("hidden must have shape (…, D), got a scalar")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) < least:
        raise ValueError(
            f"weight must have shape (C, {hidden.shape[-1]}), one row per class, for hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None and (len(weight) or bias.shape != (0,)):
        check_shape(bias, "bias", len(weight))


@dataclass(frozen=True)
class _Targets:
    """The targets of all tokens, as measures over the classes.

    Args:
        index: the class of every token, −1 where it is ignored.
        own: how much each target has at its class, besides what is spread evenly.
        even: how much of every target is spread over each class, (C,); None without label smoothing.
        factors: what each target sums to; the loss of the class is multiplied by it.
        total: what the sum of all losses is divided by; None if it is not.
        rates: what the loss of each token's class contributes to the result: factors, divided by the total.
    """

    index: Tensor
    own: Tensor
    even: Tensor | None
    factors: Tensor
    total: Tensor | None
    rates: Tensor


def _targets(
    index: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    share: float,
    reduction: Reduction,
) -> _Targets:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    kept = index >= 0
    if class_weight is None:
        own = kept.to(dtype)
    else:
        class_weight = class_weight.to(weight.device, dtype)
        own = torch.where(kept, class_weight[index], 0.0)
    total = own.sum() if reduction == "mean" else None
    even, factors = None, own
    if share:
        free = torch.ones_like(weight[:, 0], dtype=dtype) if bias is None else (bias.detach() != -torch.inf).to(dtype)
        even = share / free.sum().clamp_min(1) * (free if class_weight is None else free * class_weight)
        own = (1 - share) * own
        # A forbidden class that no target has: any other serves as the one whose score the loss is measured from.
        index = torch.where(kept & (own == 0) & (free[index] == 0), free.argmax(), index)
        factors = torch.where(kept, own + even.sum(), 0.0)
    return _Targets(index, own, even, factors, total, factors if total is None else factors / total)


def _smoothing_terms(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, alpha: float | Tensor, targets: _Targets, even: Tensor
) -> Tensor:
    r"""What label smoothing adds to factor · loss of the class, (tokens,); 0 where a token is ignored.

    The target is the measure t = own·e_y + even with mass m, and the loss m·L(s, t/m): that is m·L(s, e_y), plus
    m·Ω(t/m), plus ⟨s, m·e_y − t⟩ = |even|·s_y − ⟨even, s⟩, for which no logits but s_y are needed. Ω is a sum over
    classes of ω(u) = (uᵅ − u)/(α(α−1)), and Σ ω(evenᵢ/m) = m^−α Σ ω(evenᵢ) + |even| ω(1/m), one sum for all tokens.
    """
    dtype, kept = even.dtype, targets.index >= 0
    index = targets.index.clamp_min(0)
    hidden = hidden.to(dtype)
    score = (weight[index].to(dtype) * hidden).sum(-1)
    mean = hidden @ (even @ weight.to(dtype))
    if bias is not None:
        free = bias.detach() != -torch.inf
        offset = torch.where(free, bias.to(dtype), 0.0)
        score, mean = torch.where(free[index], score + offset[index], 0.0), mean + even @ offset
    a = alpha.reshape(()).to(dtype) if isinstance(alpha, Tensor) else alpha
    mass = torch.where(targets.factors > 0, targets.factors, 1.0)

    def omega(u: Tensor) -> Tensor:
        return TSALLIS.value(u.unsqueeze(-1), a)

    spread = even.sum()
    value = mass**-a * TSALLIS.value(even, a) + spread * omega(1 / mass)
    value = value - omega(even[index] / mass) + omega((even[index] + targets.own) / mass)
    return torch.where(kept, spread * score - mean + targets.factors * value, 0.0)


# -- derivatives -----------------------------------------------------------------------------------------------------

_NOTHING = (False,) * 4


class _LinearLoss(torch.autograd.Function):
    """The loss by ``run``, which is ``_run`` or the operator that calls it.

    The gradients of a sum are computed in the forward pass, up to the factor that the backward pass gets.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., tuple[Tensor, Gradients]],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        alpha: float | Tensor,
        index: Tensor,
        rates: Tensor,
        summed: bool,
    ) -> Tensor:
        ctx.run, ctx.number, ctx.index, ctx.rates = run, alpha, index, rates
        ctx.save_for_backward(hidden, weight, bias, alpha if isinstance(alpha, Tensor) else None)
        needed = ctx.needs_input_grad[1:5] if summed else _NOTHING
        loss, gradients = run(hidden, weight, bias, alpha, index, rates, summed, needed)
        ctx.gradients = gradients if summed else None
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *layer, alpha = ctx.saved_tensors
        layer.append(ctx.number if alpha is None else alpha)
        gradients = ctx.gradients
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            if gradients is None:
                rates = grad.to(ctx.rates.dtype) * ctx.rates
                _, gradients = ctx.run(*layer, ctx.index, rates, True, ctx.needs_input_grad[1:5])
            elif ctx.run is not _run:
                gradients = [each if each is None else each * grad for each in gradients]
            else:
                ctx.gradients = None  # the tensors are returned, and become the gradients of the parameters
                if grad.device.type != "cpu" or float(grad) != 1.0:
                    for each in gradients:
                        _ = each if each is None else each.mul_(grad)
            results: list[Any] = [None, *gradients, None, None, None]
            for i, tensor in enumerate(layer, 1):
                if results[i] is not None:
                    results[i] = results[i].to(tensor.dtype)
            del gradients
        return differentiable_once("linear_entmax_loss", _INSTEAD, results, grad, *layer)


_INSTEAD = (
    "for second derivatives use fenchel.entmax_loss(torch.nn.functional.linear(hidden, weight, bias), target, alpha)"
)


# -- block by block --------------------------------------------------------------------------------------------------


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    alpha: float | Tensor,
    index: Tensor,
    rates: Tensor,
    summed: bool,
    needed: Sequence[bool],
) -> tuple[Tensor, Gradients]:
    """rate · loss of every token, or the sum, and the gradients of the sum in hidden, weight, bias and alpha.

    Gradients are in float32 or better; those that are not needed are None. Logits are those of a block of tokens at a
    time. Supports are collected until they have a quarter as many entries as a block has logits.
    """
    gradients: Gradients = []
    for tensor, is_needed in zip((hidden, weight, bias, alpha), needed, strict=True):
        gradients.append(gradient_zeros(tensor) if is_needed and isinstance(tensor, Tensor) else None)
    wanted = any(needed)
    dtype = rates.dtype  # in half precision logits would overflow, and lose the order of the classes
    hidden, weight = hidden.detach().to(dtype).contiguous(), weight.detach().to(dtype).contiguous()
    bias = bias if bias is None else bias.detach().to(dtype).contiguous()
    index, rates = index.contiguous(), rates.contiguous()
    tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
    number = float(alpha.detach() if isinstance(alpha, Tensor) else alpha) if hidden.device.type == "cpu" else alpha
    kernel = kernels.find("linear_class_loss", TSALLIS.name, (number,), *tensors)
    finish = kernels.find("linear_class_loss_backward", TSALLIS.name, (number,), *tensors)
    tokens, classes = len(hidden), len(weight)
    chosen = plan_output(tokens, classes)
    size, losses = min(chosen.rows, tokens), hidden.new_empty(tokens)
    workspace = hidden.new_empty(size, classes)
    collected: list[tuple[int, Lists]] = []
    entries = 0
    for first in range(0, tokens, size):
        part = slice(first, min(first + size, tokens))
        residual, supports = workspace[: part.stop - first], None
        own_rates = rates[part] if wanted else None
        if kernel is not None and finish is not None:
            losses[part], supports, slopes = kernel(
                hidden[part],
                weight,
                bias,
                index[part],
                number,
                rates=own_rates,
                learns=gradients[3] is not None,
                most=chosen.share * residual.numel(),
                workspace=workspace,
                columns=chosen.columns,
            )
            slope = None if slopes is None else torch.where(index[part] >= 0, rates[part] * slopes, 0.0).sum()
        else:
            if bias is None:
                torch.mm(hidden[part], weight.t(), out=residual)
            else:
                torch.addmm(bias, hidden[part], weight.t(), out=residual)
            losses[part], residual, slope = _class_losses(residual, index[part], alpha, own_rates, needed[3])
        if gradients[3] is not None and slope is not None:
            gradients[3] += slope
        if supports is not None:
            collected.append((first, supports))
            entries += supports[1].numel()
            if entries > (1 / 4 - chosen.share) * workspace.numel():
                _add_supports(gradients, finish, collected, hidden, weight)
                collected, entries = [], 0
        elif wanted:
            add_residual(gradients, residual, hidden, weight, part)
    if collected:
        _add_supports(gradients, finish, collected, hidden, weight)
    losses = rates * losses
    return losses.sum() if summed else losses, gradients


def _class_losses(
    logits: Tensor, index: Tensor, alpha: float | Tensor, rates: Tensor | None, learns: bool
) -> tuple[Tensor, Tensor, Any]:
    """The losses of rows of logits; with rates also rate·(p − y), and Σ rate·∂loss/∂alpha if alpha learns."""
    a = TSALLIS.align(logits, alpha.detach().reshape(1, 1) if isinstance(alpha, Tensor) else alpha)
    losses, residual = TSALLIS.class_loss_any(logits, index, rates is not None, *a)
    if rates is None:
        return losses, residual, None
    kept = (index >= 0).unsqueeze(-1)
    rates = torch.where(kept, rates.unsqueeze(-1), 0.0)  # even if it is NaN, as for the mean of nothing
    slope = None
    if learns:
        logits = torch.where(kept, logits, 0.0)
        slope = (rates * TSALLIS.envelope(logits, TSALLIS.argmax(logits, *a), *a)[0]).sum()
    return losses, rates * residual, slope


def add_residual(gradients: Gradients, residual: Tensor, hidden: Tensor, weight: Tensor, part: slice) -> None:
    """Add the gradients of some tokens by dense products, from rate·(p − y), (tokens, C)."""
    to_hidden, to_weight, to_bias, _ = gradients
    if to_hidden is not None:
        torch.mm(residual, weight, out=to_hidden[part])
    if to_weight is not None:
        to_weight.addmm_(residual.t(), hidden[part])
    if to_bias is not None:
        to_bias.add_(residual.sum(0))


def _add_supports(
    gradients: Gradients,
    finish: Callable[..., None],
    collected: list[tuple[int, Lists]],
    hidden: Tensor,
    weight: Tensor,
) -> None:
    """Add the gradients of the tokens whose supports were collected, block by block, each with its first token."""
    first, last = collected[0][0], collected[-1][0] + len(collected[-1][1][0]) - 1
    counts = torch.zeros(last - first, dtype=torch.long, device=hidden.device)  # none where a block was dense
    classes, values = [], []
    for start, (starts, some_classes, some_values) in collected:
        counts[start - first : start - first + len(starts) - 1] = starts.diff()
        classes.append(some_classes)
        values.append(some_values)
    to_hidden, to_weight, to_bias, _ = gradients
    finish(
        hidden[first:last],
        weight,
        (F.pad(counts.cumsum(0), (1, 0)), torch.cat(classes), torch.cat(values)),
        to_hidden=None if to_hidden is None else to_hidden[first:last],
        to_weight=to_weight,
        to_bias=to_bias,
    )


def gradient_zeros(like: Tensor) -> Tensor:
    """Zeros of the shape of a tensor, in float32 or better."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if like.device.type == "cpu" and dtype in (torch.float32, torch.float64):
        # Pages that are never written to take no memory, and NumPy asks the system for large pages.
        return torch.from_numpy(np.zeros(like.shape, str(dtype).removeprefix("torch.")))
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


# -- the operator, which stays whole in graphs -----------------------------------------------------------------------


def _call_operator(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, alpha: float | Tensor, *rest: Any
) -> tuple[Tensor, Gradients]:
    """``_run`` by the operator."""
    own = (alpha, 0.0) if isinstance(alpha, Tensor) else (None, alpha)
    loss, *gradients = linear_class_loss_operator(hidden, weight, bias, *own, *rest)
    return loss, [g if is_needed else None for g, is_needed in zip(gradients, rest[-1], strict=True)]


def _below_autograd(*args: Any) -> tuple[Tensor, Gradients]:
    with below_autograd():
        return _call_operator(*args)


def _problem(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor | None, number: float, *rest: Any
) -> Any:
    """The arguments of ``_run``, from those of the operator."""
    return hidden, weight, bias, number if alpha is None else alpha, *rest


def _compute(*args: Any) -> tuple[Tensor, ...]:
    hidden, weight, bias, alpha, index, rates, summed, needed = _problem(*args)
    number = check_alpha(alpha.detach() if isinstance(alpha, Tensor) else alpha)  # unknown in a graph
    check_range(index, len(weight), least=-1)
    loss, gradients = _run(hidden, weight, bias, alpha if needed[3] else number, index, rates, summed, needed)
    return loss, *(loss.new_empty(0) if each is None else each for each in gradients)


def _compute_plainly(*args: Any) -> tuple[Tensor, ...]:
    """The results in torch operations that a graph can hold."""
    hidden, weight, bias, alpha, index, rates, summed, needed = _problem(*args)
    hidden, weight = hidden.to(rates.dtype), weight.to(rates.dtype)
    logits = F.linear(hidden, weight, None if bias is None else bias.to(rates.dtype))
    losses, residual, slope = _class_losses(logits, index, alpha, rates if any(needed) else None, needed[3])
    losses, nothing = rates * losses, rates.new_empty(0)
    return (
        losses.sum() if summed else losses,
        residual @ weight if needed[0] else nothing,
        residual.t() @ hidden if needed[1] else nothing,
        residual.sum(0) if needed[2] else nothing,
        slope.reshape(alpha.shape) if needed[3] else nothing,
    )


def _empty(*args: Any) -> tuple[Tensor, ...]:
    *layer, _, rates, summed, needed = _problem(*args)
    loss = rates.new_empty(() if summed else rates.shape)
    pairs = zip(layer, needed, strict=True)
    return loss, *(rates.new_empty(each.shape if is_needed else 0) for each, is_needed in pairs)


def _with_derivatives(*args: Any) -> tuple[Tensor, ...]:
    loss = apply_function(_LinearLoss, _below_autograd, *_problem(*args)[:-1])
    return loss, *(loss.detach().new_empty(0) for _ in range(4))


linear_class_loss_operator = define_operator(
    "linear_class_loss",
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? alpha, float number, Tensor index, Tensor rates, bool summed,"
    " bool[] needed) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compute,
    _empty,
    _with_derivatives,
    _compute_plainly,
)
