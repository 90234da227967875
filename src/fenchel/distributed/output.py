"""Output layers whose classes are spread over ranks, fused with their loss: no rank holds tokens × its classes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel import kernels
from fenchel._torch import apply_function, as_autocast, autocast_dtype, differentiable_once, outside_graphs
from fenchel.distributed.collectives import Group, all_sum, check_group, check_same, layout
from fenchel.distributed.maps import check_classes, check_targets, class_losses, subtract_at
from fenchel.distributed.thresholds import (
    Alpha,
    Bounds,
    Entries,
    Solution,
    candidates,
    local_bounds,
    local_index,
    score_at,
    shifted,
    slope_in_alpha,
    solve,
)
from fenchel.losses import Reduction, check_reduction
from fenchel.regularizers.tsallis import TSALLIS
from fenchel.streaming import linear_loss as plain


@outside_graphs("fenchel.distributed.linear_entmax_loss", "talks to other ranks")
def linear_entmax_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float | Tensor = 1.5,
    group: Group = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""The entmax loss of a linear output layer whose classes are spread over the ranks of a group, without its logits.

    .. math:: L(h, y) = \max_{p \in \Delta} \; \langle p, s \rangle - \Omega(p) - s_y, \quad s = W h + b,

    The same as :func:`fenchel.linear_entmax_loss` of the whole layer. Each rank holds the logits of a few tokens and of
    its own classes at a time. What is exchanged are a few numbers per token; the backward pass exchanges the gradient
    of ``hidden`` and nothing else.

    Args:
        hidden: (…, D), floating point, equal on all ranks. Its gradient is that of the whole layer, on all ranks.
        weight: (n, D), this rank's classes, in the order of the ranks. n may differ and be 0.
        target: (…), class indices among the classes of all ranks, equal on all ranks.
        bias: (n,), on all ranks or on none.
        alpha: a number in [1, 2], or a tensor with one element, equal on all ranks. Its gradient is complete, and equal
            on all ranks.
        group: the process group; None for the default group.
        ignore_index: a target that is left out of the loss and of the mean.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        A scalar, or the loss of every token for ``reduction="none"``; equal on all ranks. Differentiable once.

    Example:
        >>> import torch, fenchel.distributed
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> hidden, weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> fenchel.distributed.linear_entmax_loss(hidden, weight, torch.tensor([0, 1]))
        tensor(0.0498)
        >>> distributed.destroy_process_group()
    """
    ranks = check_group(group)
    check_reduction(reduction)
    alpha = plain.check_alpha(alpha)
    if ranks == 1 and len(weight):
        options: Any = {"alpha": alpha, "ignore_index": ignore_index, "reduction": reduction}
        return plain.linear_entmax_loss(hidden, weight, target, bias, **options)
    plain.check_layer(hidden, weight, bias, least=0)
    same: dict[str, Any] = {"target": target, "alpha": alpha, "ignore_index": ignore_index, "reduction": reduction}
    same["bias"] = "None" if bias is None else f"shape (…,), {bias.dtype}"
    same["autocast"] = autocast_dtype(hidden.device)
    check_same(hidden.device, group, {"hidden": hidden, "weight": layout(weight, 0), **same})
    index = check_targets(target, hidden.shape[:-1], ignore_index)
    kept = index >= 0
    # What stands in an ignored token does not matter: NaN times a gradient of 0 would be NaN for all classes.
    hidden = torch.where(kept.unsqueeze(-1), hidden, 0.0)
    half = autocast_dtype(hidden.device)
    if half is not None:
        hidden, weight, bias = as_autocast(half, hidden, weight, bias)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    rates = kept.to(exact).reshape(-1)
    rates = rates / rates.sum() if reduction == "mean" else rates
    with contextlib.nullcontext() if half is None else torch.autocast(hidden.device.type, enabled=False):
        rows = hidden.reshape(index.numel(), hidden.shape[-1])
        problem = rows, weight, bias, alpha, index.reshape(-1), rates, reduction != "none", ranks, group
        losses: Tensor = apply_function(_LinearLoss, *problem)
        losses = losses.reshape(target.shape) if reduction == "none" else losses
    return losses.to(hidden.dtype if half is None else exact)


# -- derivatives -----------------------------------------------------------------------------------------------------


class _LinearLoss(torch.autograd.Function):
    """The loss of every token, or rate · loss summed; the gradients of a sum are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        alpha: float | Tensor,
        index: Tensor,
        rates: Tensor,
        summed: bool,
        ranks: int,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, alpha if isinstance(alpha, Tensor) else None)
        needed = ctx.needs_input_grad[:4]
        layer = _Layer(hidden, weight, bias, alpha, index, rates.dtype, needed, ranks, group)
        losses = layer.solve(rates if summed and any(needed) else None)
        ctx.layer, ctx.summed = layer, summed
        return (rates * losses).sum() if summed else losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        layer: _Layer = ctx.layer
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            if ctx.summed:
                found = [each if each is None else each * grad for each in layer.gradients]
            else:
                found = layer.gradients_of(grad)
            if found[0] is not None:
                found[0] = all_sum(found[0].contiguous(), layer.group)
            inputs = ctx.saved_tensors
            found = [None if g is None else g.to(t.dtype) for g, t in zip(found, inputs, strict=True)]
        instead = "for second derivatives gather the layer and use the functions of one process"
        given = differentiable_once("fenchel.distributed.linear_entmax_loss", instead, found, grad, *inputs)
        return *given, None, None, None, None, None


@dataclass(frozen=True)
class _Part:
    """The solution of some tokens: what gradients are computed from.

    Args:
        tokens: which.
        solution: of these tokens; without entries where these are all logits, which are computed again.
        top: (R, 1), the largest logit of each, of all ranks.
        slope: (R, 1), the derivative of the loss in alpha; None if it is not needed.
    """

    tokens: slice
    solution: Solution
    top: Tensor
    slope: Tensor | None


class _Layer:
    """The tokens and this rank's classes of a layer: losses and gradients, a block of tokens at a time.

    The entries with mass are kept, of all tokens together, where they take no more memory than a block of logits: the
    number of collectives does not depend on the number of blocks then. Otherwise each block is finished before the
    next.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        alpha: float | Tensor,
        index: Tensor,
        dtype: torch.dtype,
        needed: tuple[bool, ...],
        ranks: int,
        group: Group,
    ) -> None:
        # Tensors whose gradients are needed, for their shapes and dtypes.
        tensors = zip((hidden, weight, bias, alpha), needed, strict=True)
        self.shapes = [t if is_needed and isinstance(t, Tensor) else None for t, is_needed in tensors]
        self.hidden, self.weight = hidden.detach().to(dtype).contiguous(), weight.detach().to(dtype).contiguous()
        self.bias = None if bias is None else bias.detach().to(dtype).contiguous()
        self.alpha: Alpha = alpha.detach().reshape(1, 1).double() if isinstance(alpha, Tensor) else alpha
        self.index, self.ranks, self.group = index, ranks, group
        self.place = torch.full_like(index, -1)
        tokens = len(hidden)
        self.size = max(1, min(tokens, 512, max(16, -(-tokens // 10))))  # equal on all ranks
        self.parts: list[_Part] = []
        self.gradients: plain.Gradients = [None] * 4

    # -- losses --------------------------------------------------------------------------------------------------

    def solve(self, rates: Tensor | None) -> Tensor:
        """The losses of all tokens, (T,); with rates also the gradients of Σ rate · loss."""
        if not len(self.hidden):
            self.gradients = self._zeros()
            return self.hidden.new_zeros(0)
        first, *others = (slice(i, min(i + self.size, len(self.hidden))) for i in range(0, len(self.hidden), self.size))
        logits = self._logits(first)
        own, some = self._listed(logits)
        bounds = own.shared(len(self.weight), self.ranks, self.group)
        check_classes(self.index, bounds.total)
        self.place = local_index(self.index, bounds, len(self.weight))
        lists, reached = [some], [self._class_scores(logits, first)]
        if not bounds.too_many and others:
            rest = []
            for tokens in others:
                logits = self._logits(tokens)
                own, some = self._listed(logits)
                rest.append(own)
                lists.append(some)
                reached.append(self._class_scores(logits, tokens))
            more = _below(rest).shared(len(self.weight), self.ranks, self.group)
            if more.too_many:
                bounds, logits = replace(bounds, too_many=True), self._logits(first)
            else:
                bounds = _below([bounds, more])
        if not bounds.too_many:
            entries = _joined(lists, bounds.top)
            losses = self._finish(slice(0, len(self.hidden)), entries, bounds, torch.cat(reached))
            if rates is not None:
                self.gradients = self.gradients_of(rates)
            return losses
        lists.clear()
        self.gradients = self._zeros()
        parts = []
        for tokens in (first, *others):
            if tokens is not first:
                logits = self._logits(tokens)
                bounds = local_bounds(logits, self._alphas(len(logits)))
                bounds = bounds.shared(len(self.weight), self.ranks, self.group)
            entries = candidates(logits, bounds, self._alphas(len(logits)), bounds.top)
            parts.append(self._finish(tokens, entries, bounds, self._class_scores(logits, tokens)))
            part = self.parts.pop()
            if rates is not None:
                self._add(self.gradients, part, rates[tokens])
            else:  # without entries that are all logits
                self.parts.append(part if entries.place is not None else self._without_entries(part))
        return torch.cat(parts)

    def _finish(self, tokens: slice, entries: Entries, bounds: Bounds, reached: Tensor) -> Tensor:
        """Solve some tokens, remember the solution, and return their losses, (R,)."""
        here = self.place[tokens].unsqueeze(-1) >= 0
        reached = torch.where(here, reached - torch.where(bounds.top > -torch.inf, bounds.top, 0.0), 0.0)
        alpha = self._alphas(len(reached))
        solution = solve(entries, bounds, alpha, reached, self.hidden.dtype, self.group)
        slope = slope_in_alpha(solution, self.group) if self.shapes[3] is not None else None
        self.parts.append(_Part(tokens, solution, bounds.top, slope))
        return class_losses(solution, self.index[tokens]).to(self.hidden.dtype)

    def _listed(self, logits: Tensor) -> tuple[Bounds, Entries]:
        """The bounds of this rank's logits, and the entries above its own level, or none if they are too many."""
        alpha = self._alphas(len(logits))
        own = local_bounds(logits, alpha)
        dense = Entries(logits[:, :0].double(), None)
        if not isinstance(alpha, Tensor) and alpha == 1:  # every class has mass
            return replace(own, too_many=True), dense
        entries = candidates(logits, own, alpha, torch.zeros_like(own.top))
        if entries.place is None and len(self.weight) > 64:
            return replace(own, too_many=True), dense
        if entries.place is None:
            place = torch.arange(len(self.weight), device=logits.device).expand(len(logits), -1)
            entries = Entries(entries.scores, place)
        # 16 bytes per entry in place of 4 per logit; lists of all tokens have the width of the longest.
        held = 4 * len(self.hidden) * entries.scores.shape[-1]
        most = max(self.size * len(self.weight), len(self.hidden) * 256)
        return replace(own, too_many=held > most), entries

    def _class_scores(self, logits: Tensor, tokens: slice) -> Tensor:
        """The logit of each token's class, (R, 1), 0 where it is not on this rank."""
        return score_at(logits, self.place[tokens], logits.new_zeros(len(logits), 1, dtype=torch.float64))

    def _logits(self, tokens: slice) -> Tensor:
        return F.linear(self.hidden[tokens], self.weight, self.bias)

    def _alphas(self, count: int) -> Alpha:
        return self.alpha.expand(count, 1) if isinstance(self.alpha, Tensor) else self.alpha

    # -- gradients -----------------------------------------------------------------------------------------------

    def _zeros(self) -> plain.Gradients:
        return [None if like is None else plain.gradient_zeros(like) for like in self.shapes]

    def gradients_of(self, rates: Tensor) -> plain.Gradients:
        """The gradients of Σ rate · loss in hidden, weight, bias and alpha, of this rank's part. No collectives."""
        gradients = self._zeros()
        for part in self.parts:
            self._add(gradients, part, rates[part.tokens])
        return gradients

    def _add(self, gradients: plain.Gradients, part: _Part, rates: Tensor) -> None:
        """Add the gradients of some tokens, given the rate of each."""
        index, place = self.index[part.tokens], self.place[part.tokens]
        kept = index >= 0
        solution = part.solution
        possible = torch.where(solution.reached.squeeze(-1) == -torch.inf, -1, place)
        rates = torch.where(kept, rates, 0.0)
        if gradients[3] is not None and part.slope is not None:
            slope = torch.where(kept.unsqueeze(-1), rates.unsqueeze(-1) * part.slope, 0.0)
            gradients[3] += slope.sum().to(gradients[3])
        to_hidden, to_weight, to_bias, _ = gradients
        if to_hidden is None and to_weight is None and to_bias is None:
            return
        number = float(self.alpha) if self.hidden.device.type == "cpu" else self.alpha
        tensors = [t for t in (self.hidden, self.weight, self.bias) if t is not None]
        kernel = kernels.find("linear_class_loss_backward", TSALLIS.name, (number,), *tensors)
        entries = solution.entries
        if kernel is not None and entries.place is not None and len(self.weight) and not bool(solution.broken.any()):
            values = rates.unsqueeze(-1) * solution.probabilities().to(rates.dtype)
            values = torch.cat([values, torch.where(possible >= 0, -rates, 0.0).unsqueeze(-1)], -1)
            places = torch.cat([entries.place, possible.clamp_min(0).unsqueeze(-1)], -1)
            some = values != 0
            lists = F.pad(some.sum(-1).cumsum(0), (1, 0)), places[some], values[some]
            own = None if to_hidden is None else to_hidden[part.tokens]
            kernel(self.hidden[part.tokens], self.weight, lists, to_hidden=own, to_weight=to_weight, to_bias=to_bias)
            return
        for start in range(0, len(rates), self.size):
            rows = slice(start, min(start + self.size, len(rates)))
            residual = self._residual(part, rows, rates[rows], possible[rows]).masked_fill_(~kept[rows, None], 0.0)
            tokens = slice(part.tokens.start + rows.start, part.tokens.start + rows.stop)
            plain.add_residual(gradients, residual, self.hidden, self.weight, tokens)

    def _residual(self, part: _Part, rows: slice, rates: Tensor, place: Tensor) -> Tensor:
        """rate · (p − y) of some rows of a part, dense."""
        solution, entries = part.solution, part.solution.entries
        if entries.place is None and entries.scores.shape[-1] != len(self.weight):
            tokens = slice(part.tokens.start + rows.start, part.tokens.start + rows.stop)
            some = shifted(self._logits(tokens), part.top[rows], solution.alpha)
        else:
            some = Entries(entries.scores[rows], None if entries.place is None else entries.place[rows])
        alpha = solution.alpha[rows] if isinstance(solution.alpha, Tensor) else solution.alpha
        own = replace(solution, entries=some, offset=solution.offset[rows], alpha=alpha, broken=solution.broken[rows])
        values = rates.unsqueeze(-1) * own.probabilities()
        return subtract_at(own.spread(values, len(self.weight), rates.dtype), place, rates)

    def _without_entries(self, part: _Part) -> _Part:
        empty = Entries(part.solution.entries.scores[:, :0], None)
        return replace(part, solution=replace(part.solution, entries=empty))


def _below(bounds: list[Bounds]) -> Bounds:
    """The bounds of several blocks of tokens below each other."""
    top, offset, bad = (torch.cat([getattr(each, name) for each in bounds]) for name in ("top", "offset", "bad"))
    return Bounds(top, offset, bad, any(each.too_many for each in bounds), bounds[0].first, bounds[0].total)


def _joined(lists: list[Entries], top: Tensor) -> Entries:
    """The entries of blocks of tokens below each other, less the largest logits of the tokens."""
    width = max(each.scores.shape[-1] for each in lists)
    scores, places = [], []
    for each in lists:
        missing = width - each.scores.shape[-1]
        assert each.place is not None
        scores.append(F.pad(each.scores, (0, missing), value=-torch.inf))
        places.append(F.pad(each.place, (0, missing)))
    return Entries(torch.cat(scores) - torch.where(top > -torch.inf, top, 0.0), torch.cat(places))
