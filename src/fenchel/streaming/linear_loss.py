"""Output layers fused with their loss: no matrix of tokens × classes is ever held."""

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
from fenchel._checks import check_integers, check_parameter
from fenchel._torch import apply_function, concrete, known, tracks_forward
from fenchel.losses import Reduction, check_distributed, check_reduction, check_smoothing, entmax_loss, is_kept
from fenchel.regularizers.rows import as_autocast, autocast_dtype
from fenchel.regularizers.tsallis import TSALLIS, Tsallis
from fenchel.streaming.plan import Needs, Plan, Shapes, plan

Lists = tuple[Tensor, Tensor, Tensor]
"""The supports of tokens: where each begins, classes, and values."""

_ALLOWED = "1 <= alpha <= 2"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


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

    with Tsallis' :math:`\Omega`: the same as ``entmax_loss(hidden @ weight.T + bias, target, alpha)``. The logits of a
    few tokens at a time are all that is held, and what is left of them is the support of :math:`p - y`: where that is
    small, the gradients cost next to nothing. For ``"mean"`` and ``"sum"`` they are made in the forward pass; for
    ``"none"`` the backward pass makes the logits again. Logits are made in float32 or better.

    Differentiable once. Under ``torch.compile``, ``torch.func`` and forward mode it is the plain formula, logits and
    all, with derivatives of every order.

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
        >>> weight.grad  # the second token leads by 2: its loss is zero, and it teaches nothing
        tensor([[-0.1299,  0.0000],
                [ 0.0649,  0.0000],
                [ 0.0649,  0.0000]])

    References: Peters, Niculae & Martins (2019), section 3.2.
    """
    alpha = check_alpha(alpha)
    check_reduction(reduction)
    check_smoothing(label_smoothing)
    _check_layer(hidden, weight, bias)
    _check_class_weight(class_weight, weight, label_smoothing)
    check_distributed(hidden=hidden, weight=weight, target=target, bias=bias, class_weight=class_weight)
    index = _check_target(target, hidden, weight, ignore_index)
    kept = index >= 0
    if not known(index) or not bool(kept.all()):
        # What stands in an ignored token does not matter: NaN times a gradient of 0 would be NaN for all classes.
        hidden = torch.where(kept.unsqueeze(-1), hidden, 0.0)
    tensors = [t for t in (hidden, weight, bias, alpha, index, class_weight) if isinstance(t, Tensor)]
    half = autocast_dtype(hidden.device)
    if half is not None:
        hidden, weight = as_autocast(hidden, half), as_autocast(weight, half)
        bias = bias if bias is None else as_autocast(bias, half)
    dtype = hidden.dtype if half is None else _wide(hidden.dtype)
    with contextlib.nullcontext() if half is None else torch.autocast(hidden.device.type, enabled=False):
        if not _plain(*tensors):
            exact = _wide(hidden.dtype)
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
        else:
            rows = hidden.reshape(index.numel(), hidden.shape[-1]), weight, bias
            task = _task(index.reshape(-1), weight, bias, class_weight, label_smoothing, reduction)
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                loss = apply_function(_LinearLoss, *rows, alpha, task)
            else:
                loss = task.reduce(task.factors * _run(*rows, alpha, task.index))
            if task.even is not None:
                loss = loss + task.reduce(_even_part(*rows, alpha, task, task.even))
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


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {tensor.dtype}")
        if tensor.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            raise TypeError(f"{name} must have the dtype of hidden, {hidden.dtype}, got {tensor.dtype}")
    if hidden.dim() == 0:
        raise ValueError("hidden must have shape (…, D), got a scalar")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or not len(weight):
        raise ValueError(
            f"weight must have shape (C, {hidden.shape[-1]}), one row per class, for hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({len(weight)},), one value per class, got {tuple(bias.shape)}")


def _check_class_weight(class_weight: Tensor | None, weight: Tensor, label_smoothing: float) -> None:
    if class_weight is None:
        return
    if not isinstance(class_weight, Tensor):
        raise TypeError(f"class_weight must be a tensor with one value per class, got {type(class_weight).__name__}")
    if class_weight.shape != weight.shape[:1]:
        raise ValueError(
            f"class_weight must have shape ({len(weight)},), one value per class, got {tuple(class_weight.shape)}"
        )
    if class_weight.requires_grad:
        raise ValueError("class_weight must not require gradients: pass class_weight.detach()")
    if label_smoothing and known(class_weight) and bool((class_weight < 0).any()):
        raise ValueError(
            "class_weight must not be negative with label_smoothing: the smoothed target would not be a measure"
        )


def _check_target(target: Tensor, hidden: Tensor, weight: Tensor, ignore_index: int) -> Tensor:
    """Class indices as int64, −1 where one is ignored."""
    check_integers(target, "target", "integer class indices")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must have shape {tuple(hidden.shape[:-1])}, that of hidden without its last dimension, "
            f"got {tuple(target.shape)}"
        )
    kept = is_kept(target, ignore_index)
    index = target.long()
    if known(target):
        wrong = index[kept & ((index < 0) | (index >= len(weight)))]
        if wrong.numel():
            raise ValueError(
                f"target must hold class indices in [0, {len(weight) - 1}] or ignore_index, {ignore_index}, "
                f"got {wrong[0].item()}"
            )
    return torch.where(kept, index, -1)


def _plain(*tensors: Tensor) -> bool:
    """Whether all that is asked for is values and first derivatives of data: no transformation looks on."""
    return not tracks_forward() and concrete(*tensors)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the loss itself, and of sums over chunks."""
    return torch.promote_types(dtype, torch.float32)


# -- what goes out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """What is asked for besides the layer.

    Args:
        index: the class of every token, −1 where it is ignored.
        own: how much the target of every token has at its class, but for what is spread evenly.
        even: how much of every target is spread over each class, (C,); None without label smoothing.
        factors: how much every target sums to; what the loss of a class is multiplied by.
        total: what the sum is divided by; None if it is not.
        summed: whether the losses are summed up.
    """

    index: Tensor
    own: Tensor
    even: Tensor | None
    factors: Tensor
    total: Tensor | None
    summed: bool

    def reduce(self, losses: Tensor) -> Tensor:
        """What is returned, from the losses of all tokens."""
        if not self.summed:
            return losses
        return losses.sum() if self.total is None else losses.sum() / self.total

    def rates(self) -> Tensor:
        """The share in what is returned of the loss of every token's class."""
        return self.factors if self.total is None else self.factors / self.total


def _task(
    index: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    share: float,
    reduction: Reduction,
) -> _Task:
    dtype = _wide(weight.dtype)
    kept = index >= 0
    if class_weight is None:
        each = kept.to(dtype)
    else:
        class_weight = class_weight.to(weight.device, dtype)
        each = torch.where(kept, class_weight[index], 0.0)
    total = each.sum() if reduction == "mean" else None
    if not share:
        return _Task(index, each, None, each, total, reduction != "none")
    free = torch.ones_like(weight[:, 0], dtype=dtype) if bias is None else (bias.detach() != -torch.inf).to(dtype)
    even = share / free.sum().clamp_min(1) * (free if class_weight is None else free * class_weight)
    own = (1 - share) * each
    # A forbidden class that no target has: any other serves as the one whose score the loss is measured from.
    index = torch.where(kept & (own == 0) & (free[index] == 0), free.argmax(), index)
    factors = torch.where(kept, own + even.sum(), 0.0)
    return _Task(index, own, even, factors, total, reduction != "none")


def _even_part(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, alpha: float | Tensor, task: _Task, even: Tensor
) -> Tensor:
    r"""What label smoothing adds to the losses of tokens beyond factor · loss of the class; 0 where one is ignored.

    The target is the measure t = own·e_y + even with mass m, and the loss m·L(s, t/m): that is m·L(s, e_y), plus
    m·Ω(t/m), plus ⟨s, m·e_y − t⟩ = |even|·s_y − ⟨even, s⟩, for which no logits but s_y are needed. Ω is a sum over
    classes of ω(u) = (uᵅ − u)/(α(α−1)), and Σ ω(evenᵢ/m) = m^−α Σ ω(evenᵢ) + |even| ω(1/m), one sum for all tokens.
    """
    dtype, kept = even.dtype, task.index >= 0
    index = task.index.clamp_min(0)
    hidden = hidden.to(dtype)
    score = (weight[index].to(dtype) * hidden).sum(-1)
    mean = hidden @ (even @ weight.to(dtype))
    if bias is not None:
        free = bias.detach() != -torch.inf
        offset = torch.where(free, bias.to(dtype), 0.0)
        score, mean = torch.where(free[index], score + offset[index], 0.0), mean + even @ offset
    a = alpha.reshape(()).to(dtype) if isinstance(alpha, Tensor) else alpha
    mass = torch.where(task.factors > 0, task.factors, 1.0)

    def omega(u: Tensor) -> Tensor:
        return TSALLIS.value(u.unsqueeze(-1), a)

    spread = even.sum()
    value = mass**-a * TSALLIS.value(even, a) + spread * omega(1 / mass)
    value = value - omega(even[index] / mass) + omega((even[index] + task.own) / mass)
    return torch.where(kept, spread * score - mean + task.factors * value, 0.0)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, alpha: float | Tensor, task: _Task
    ) -> Tensor:
        ctx.task = task
        ctx.number = alpha if isinstance(alpha, float) else None
        tensors = [t for t in (bias, alpha) if isinstance(t, Tensor)]
        ctx.has_bias = bias is not None
        ctx.save_for_backward(hidden, weight, *tensors)
        ctx.gradients = None
        rates = None
        if task.summed:
            ctx.gradients = _Gradients.like(hidden, weight, bias, alpha, ctx.needs_input_grad)
            rates = task.rates()
        return task.reduce(task.factors * _run(hidden, weight, bias, alpha, task.index, rates, ctx.gradients))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weight, *rest = ctx.saved_tensors
        bias = rest.pop(0) if ctx.has_bias else None
        alpha = rest.pop(0) if rest else ctx.number
        inputs = hidden, weight, bias, alpha
        gradients, ctx.gradients = ctx.gradients, None  # given away: they become the parameters' own
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            if gradients is None:
                gradients = _Gradients.like(*inputs, ctx.needs_input_grad)
                rates = ctx.task.rates()
                _run(*inputs, ctx.task.index, grad.to(rates.dtype) * rates, gradients)
            else:
                gradients.scale(grad)
            results = gradients.results(*inputs)
            del gradients
        if torch.is_grad_enabled():
            leaves = [t for t in (grad, *inputs) if isinstance(t, Tensor) and t.requires_grad]
            results = [g if g is None else apply_function(_Last, g, *leaves) for g in results]
        return *results, None


class _Last(torch.autograd.Function):
    """The identity on a gradient of the loss, which cannot be differentiated again: its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *leaves: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        raise NotImplementedError(
            "linear_entmax_loss is differentiable once; for second derivatives use "
            "fenchel.entmax_loss(torch.nn.functional.linear(hidden, weight, bias), target, alpha)"
        )


@dataclass
class _Gradients:
    """Sums over tokens, in float32 or better; None for those that nobody needs."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    alpha: Tensor | None

    @classmethod
    def like(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, alpha: float | Tensor, needed: Sequence[bool]
    ) -> _Gradients:
        """Zeros for what is needed."""
        pairs = zip((hidden, weight, bias, alpha), needed[:4], strict=True)
        return cls(*(_zeros(t) if need and isinstance(t, Tensor) else None for t, need in pairs))

    def add(self, residual: Tensor, hidden: Tensor, weight: Tensor, part: slice) -> None:
        """Add what tokens give, from rate·(p − y), (tokens, classes), by dense products."""
        if self.hidden is not None:
            torch.mm(residual, weight, out=self.hidden[part])
        if self.weight is not None:
            self.weight.addmm_(residual.t(), hidden)
        if self.bias is not None:
            self.bias.add_(residual.sum(0))

    def scale(self, grad: Tensor) -> None:
        """Multiply all by a scalar, in place."""
        if grad.device.type == "cpu" and float(grad) == 1.0:
            return
        for each in (self.hidden, self.weight, self.bias, self.alpha):
            if each is not None:
                each.mul_(grad)

    def results(self, *inputs: Any) -> list[Tensor | None]:
        """As autograd wants them: in the dtypes of the inputs."""
        pairs = zip((self.hidden, self.weight, self.bias, self.alpha), inputs, strict=True)
        return [g if g is None else g.to(t.dtype) for g, t in pairs]


def _zeros(like: Tensor) -> Tensor:
    dtype = _wide(like.dtype)
    if like.device.type == "cpu" and dtype in (torch.float32, torch.float64):
        # Pages that nobody writes to cost nothing, and NumPy asks for large ones.
        return torch.from_numpy(np.zeros(like.shape, str(dtype).removeprefix("torch.")))
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


# -- block by block --------------------------------------------------------------------------------------------------


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    alpha: float | Tensor,
    index: Tensor,
    rates: Tensor | None = None,
    gradients: _Gradients | None = None,
) -> Tensor:
    """The loss of every token; with rates, the gradients of Σ rate·loss are added up too."""
    dtype = _wide(hidden.dtype)  # in half precision logits would overflow, and lose the order of the classes
    hidden, weight, index = hidden.detach().to(dtype).contiguous(), weight.detach().to(dtype), index.contiguous()
    bias = bias if bias is None else bias.detach().to(dtype)
    (tokens, width), classes = hidden.shape, len(weight)
    chosen = plan(Tsallis(alpha), Shapes(tokens, classes, width), hidden.device, Needs("linear_class_loss", dtype))
    held = (hidden, weight) if bias is None else (hidden, weight, bias)
    if isinstance(alpha, float):
        kernel = kernels.find("linear_class_loss", TSALLIS.name, (alpha,), *held)
        finish = kernels.find("linear_class_loss_backward", TSALLIS.name, (alpha,), *held)
        if kernel is not None and finish is not None:
            layer = hidden, weight.contiguous(), bias if bias is None else bias.contiguous()
            rates = rates if rates is None else rates.contiguous()
            return _run_by_supports(kernel, finish, *layer, alpha, index, rates, gradients, chosen)
    losses = hidden.new_empty(tokens)
    room = hidden.new_empty(chosen.rows, classes)
    for first in range(0, tokens, chosen.rows):
        part = slice(first, min(first + chosen.rows, tokens))
        logits = room[: part.stop - first]
        if bias is None:
            torch.mm(hidden[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[part], weight.t(), out=logits)
        if gradients is None or rates is None:
            losses[part] = TSALLIS.class_loss(logits, index[part], _as_row(alpha))
        else:
            losses[part] = _run_block(logits, hidden[part], weight, alpha, index[part], rates[part], gradients, part)
    return losses


def _run_by_supports(
    kernel: Callable[..., tuple[Tensor, Lists | None]],
    finish: Callable[..., None],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    alpha: float,
    index: Tensor,
    rates: Tensor | None,
    gradients: _Gradients | None,
    chosen: Plan,
) -> Tensor:
    """``_run`` by kernels. Supports wait until there are a quarter as many entries as a block has logits."""
    tokens, classes = len(hidden), len(weight)
    losses = hidden.new_empty(tokens)
    size = min(chosen.rows, max(tokens, 1))
    room, turned = hidden.new_empty(size, classes), hidden.new_empty(min(chosen.columns, classes), size)
    waiting: list[tuple[int, Lists]] = []
    for first in range(0, tokens, size):
        part = slice(first, min(first + size, tokens))
        count = part.stop - first
        losses[part], supports = kernel(
            hidden[part],
            weight,
            bias,
            index[part],
            alpha,
            rates=None if rates is None else rates[part],
            most=chosen.share * count * classes,
            room=room,
            turned=turned,
        )
        if gradients is None or rates is None:
            continue
        if supports is None:
            gradients.add(room[:count], hidden[part], weight, part)
            continue
        waiting.append((first, supports))
        if sum(lists[1].numel() for _, lists in waiting) > (1 / 4 - chosen.share) * size * classes:
            _finish(finish, waiting, hidden, weight, gradients)
            waiting.clear()
    if waiting and gradients is not None:
        _finish(finish, waiting, hidden, weight, gradients)
    return losses


def _finish(
    finish: Callable[..., None],
    waiting: list[tuple[int, Lists]],
    hidden: Tensor,
    weight: Tensor,
    gradients: _Gradients,
) -> None:
    """Add up the gradients of the tokens whose supports wait."""
    first, last = waiting[0][0], waiting[-1][0] + len(waiting[-1][1][0]) - 1
    counts = torch.zeros(last - first, dtype=torch.long, device=hidden.device)  # none where a block was dense
    for start, (starts, _, _) in waiting:
        counts[start - first : start - first + len(starts) - 1] = starts.diff()
    starts = F.pad(counts.cumsum(0), (1, 0))
    classes, values = (torch.cat([lists[i] for _, lists in waiting]) for i in (1, 2))
    to_hidden = None if gradients.hidden is None else gradients.hidden[first:last]
    to = {"to_hidden": to_hidden, "to_weight": gradients.weight, "to_bias": gradients.bias}
    finish(hidden[first:last], weight, (starts, classes, values), **to)


def _as_row(alpha: float | Tensor) -> float | Tensor:
    return alpha.detach().reshape(1, 1) if isinstance(alpha, Tensor) else alpha


def _run_block(
    logits: Tensor,
    hidden: Tensor,
    weight: Tensor,
    alpha: float | Tensor,
    index: Tensor,
    rates: Tensor,
    gradients: _Gradients,
    part: slice,
) -> Tensor:
    """The losses of a block from its logits; its gradients are added up by dense products."""
    with torch.enable_grad():
        z, a = logits.detach().requires_grad_(), _as_row(alpha)
        leaves = [z]
        if gradients.alpha is not None and isinstance(a, Tensor):
            leaves.append(a.requires_grad_())
        losses = TSALLIS.class_loss(z, index, a)
        residual, *slope = torch.autograd.grad(losses, leaves, rates)
    gradients.add(residual, hidden, weight, part)
    if gradients.alpha is not None:
        gradients.alpha.add_(slope[0].reshape(gradients.alpha.shape))
    return losses.detach()
