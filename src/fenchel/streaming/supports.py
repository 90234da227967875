"""Attention by supports: blocks of scores in, lists of the entries with weight out.

The weights of a query are few under a sparse Ω. Scores are made for a block of queries at a time, their supports kept
as lists of places and weights, and everything after, the products with the values and all of the backward pass, works
on these lists. Where supports are not sparse, the products of a block are dense, and its weights are forgotten and made
again when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import apply_function, tracks
from fenchel.kernels.cpu.streaming.products import scores
from fenchel.regularizers.rowmap import RowMap
from fenchel.streaming.plan import Plan


@dataclass(frozen=True)
class Supports:
    """The supports of a block's rows: row r owns the entries from ``starts[r]`` to ``starts[r + 1]``.

    Args:
        starts: (rows + 1,), int64.
        indices: the key of each entry, int32.
        weights: the weight of each entry.
        factors: what dropout multiplies the weights by; empty without dropout.
    """

    starts: Tensor
    indices: Tensor
    weights: Tensor
    factors: Tensor


@dataclass(frozen=True)
class Block:
    """Queries ``rows`` of the heads ``heads``."""

    heads: range
    rows: range

    def of(self, tensor: Tensor) -> Tensor:
        """What belongs to its queries, of (heads, rows, …)."""
        return tensor[self.heads.start : self.heads.stop, self.rows.start : self.rows.stop]

    def keys_of(self, tensor: Tensor) -> Tensor:
        """What belongs to its heads' keys, of (heads, keys, …)."""
        return tensor[self.heads.start : self.heads.stop]


@dataclass
class Task:
    """What one call asks for.

    Args:
        rule: the mathematics of Ω.
        plan: the size of blocks, and what counts as sparse.
        length: of the queries; a head's rows are a multiple of it if several query heads share its keys.
        causal: query i sees keys 0 … i.
        mask: the rows of a head's mask, (rows, keys), boolean or to be added; None if there is none.
        dropout: the share of weights that is dropped.
        dense: output and weights in plain differentiable operations, given what dropout multiplies the weights by.
        wants_weights: hand out the weights too, as one list; ``found`` has their places.
    """

    rule: RowMap
    plan: Plan
    length: int
    causal: bool
    mask: Callable[[int, range], Tensor] | None
    dropout: float
    dense: Callable[..., tuple[Tensor, Tensor]]
    wants_weights: bool = False
    found: list[Supports] = field(default_factory=list)


def attend(query: Tensor, key: Tensor, value: Tensor, parameter: float | Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """argmax_Ω(query keyᵀ) value for (heads, rows, width), with one parameter of Ω or one per row, (heads, rows).

    Returns the output, and the weights that are not zero, row by row, if the task wants them. Raises NotListedError
    where lists are needed, and a score is NaN or +inf.
    """
    if not tracks(query, key, value, parameter):
        output, _ = _Pass(query, key, value, parameter, task).forward(keep=False)
        return output, _listed(query, task)
    output, weights = apply_function(_Attend, query, key, value, parameter, task)
    return output, weights


def _listed(query: Tensor, task: Task) -> Tensor:
    """The weights of all supports, if they are wanted."""
    return torch.cat([each.weights for each in task.found]) if task.wants_weights else query.new_empty(0)


class NotListedError(Exception):
    """A score is NaN or +inf: the weights of its row are NaN, which no list of a support can hold."""


def blocks(heads: int, rows: int, size: int) -> Iterator[Block]:
    """Blocks of ``size`` rows of one head, or of several heads with few rows each."""
    if rows >= size:
        for head in range(heads):
            for first in range(0, rows, size):
                yield Block(range(head, head + 1), range(first, min(first + size, rows)))
    else:
        step = max(size // max(rows, 1), 1)
        for first in range(0, heads, step):
            yield Block(range(first, min(first + step, heads)), range(rows))


class _Pass:
    """Forward and backward over the blocks, without a graph."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, parameter: float | Tensor, task: Task) -> None:
        self.task, self.rule = task, task.rule
        self.query, self.key, self.value = (t.detach().contiguous() for t in (query, key, value))
        self.parameter = parameter.detach() if isinstance(parameter, Tensor) else parameter
        self.heads, self.rows, _ = query.shape
        self.keys = key.shape[1]
        self.blocks = list(blocks(self.heads, self.rows, task.plan.rows))
        self._room = query.new_empty(0)

    def room(self, block: Block) -> Tensor:
        """Memory for the scores of a block and as many places, used again by the next block."""
        needed = 2 * len(block.heads) * len(block.rows) * self.keys
        if self._room.numel() < needed:
            self._room = self.query.new_empty(needed)
        return self._room

    def parameter_of(self, block: Block) -> float | Tensor:
        """The parameter of Ω, (heads, rows) if it is not one for all."""
        return block.of(self.parameter) if isinstance(self.parameter, Tensor) else self.parameter

    def mask(self, block: Block, keys: int) -> Tensor | None:
        """The mask of a block, (heads, rows, keys)."""
        if self.task.mask is None:
            return None
        return torch.stack([self.task.mask(head, block.rows) for head in block.heads])[..., :keys]

    def seen(self, block: Block) -> Tensor | None:
        """How many keys each row of a head sees, if not all."""
        if not self.task.causal:
            return None
        rows = torch.arange(block.rows.start, block.rows.stop, device=self.query.device)
        return (rows % self.task.length + 1).clamp_max(self.keys)

    def forward(self, keep: bool) -> tuple[Tensor, list[Supports | None]]:
        """The output, and the supports of the blocks that are sparse."""
        output = self.value.new_empty(self.heads, self.rows, self.value.shape[-1])
        found: list[Supports | None] = []
        listed = self.task.wants_weights or self.task.dropout > 0
        tensors = self.query, self.key, self.value
        kernel = kernels.find("attend", self.rule.name, (self.parameter,), *tensors)
        for block in self.blocks:
            most = self.task.plan.share * len(block.heads) * len(block.rows) * self.keys
            result = None if kernel is None else self._by_lists(kernel, block, math.inf if listed else most)
            if result is None:
                if listed:
                    raise NotListedError
                weights = self.weights(block)
                block.of(output).copy_(torch.bmm(weights, block.keys_of(self.value)[:, : weights.shape[2]]))
                if int(torch.count_nonzero(weights)) > most:  # so will be the next, in all likelihood
                    kernel = None
                found.append(None)
                continue
            supports = Supports(*result[1:])
            block.of(output).copy_(result[0])
            if self.task.wants_weights:
                self.task.found.append(supports)
            found.append(supports if keep else None)
        return output, found

    def _by_lists(
        self, kernel: Callable[..., Any], block: Block, most: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        seen = self.seen(block)
        keys = self.keys if seen is None else int(seen.max())
        result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = kernel(
            block.of(self.query),
            block.keys_of(self.key),
            block.keys_of(self.value),
            self.parameter_of(block),
            mask=self.mask(block, keys),
            seen=seen,
            dropout=self.task.dropout,
            most=most,
            room=self.room(block),
        )
        return result

    def weights(self, block: Block) -> Tensor:
        """All weights of a block, (heads, rows, keys that any of them sees)."""
        seen = self.seen(block)
        keys = self.keys if seen is None else int(seen.max())
        x = scores(block.of(self.query), block.keys_of(self.key)[:, :keys], self.mask(block, keys), self.room(block))
        if seen is not None:
            x.masked_fill_(torch.arange(keys, device=x.device) >= seen.unsqueeze(-1), -torch.inf)
        return self.rule.solve_any(x, self._beside(block))

    def _beside(self, block: Block) -> float | Tensor:
        """The parameter of Ω as its rule takes it, (heads, rows, 1)."""
        own = self.parameter_of(block)
        return own.unsqueeze(-1) if isinstance(own, Tensor) else own

    def backward(
        self,
        found: list[Supports | None],
        grad: Tensor,
        weight_grad: Tensor | None,
        learns: bool,
        needed: tuple[bool, ...] = (True, True),
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Gradients of query, key, value and parameter from those of the output and of weights that were handed out.

        Those of keys and of values, which may be a large memory, only if they are ``needed``.
        """
        to_query = torch.empty_like(self.query)
        to_key = torch.zeros_like(self.key) if needed[0] else None
        to_value = torch.zeros_like(self.value) if needed[1] else None
        to_parameter = self.query.new_empty((self.heads, self.rows) if learns else 0)
        tensors = self.query, self.key, self.value
        kernel = kernels.find("attend_backward", self.rule.name, (self.parameter,), *tensors)
        for block, supports in zip(self.blocks, found, strict=True):
            to = tuple(None if t is None else block.keys_of(t) for t in (to_key, to_value))
            direct = None
            if weight_grad is not None and supports is not None:
                direct, weight_grad = weight_grad.tensor_split([supports.weights.numel()])
            if supports is None or kernel is None:
                queries, own = self._densely(block, grad, supports, direct, to, learns)
            else:
                queries, own = kernel(
                    block.of(grad),
                    block.of(self.query),
                    block.keys_of(self.key),
                    block.keys_of(self.value),
                    self.parameter_of(block),
                    supports=(supports.starts, supports.indices, supports.weights, supports.factors),
                    to_weights=direct,
                    to_key=to[0],
                    to_value=to[1],
                    learns=learns,
                )
            block.of(to_query).copy_(queries)
            if own is not None:
                block.of(to_parameter).copy_(own)
        return to_query, to_key, to_value, to_parameter

    def _densely(
        self,
        block: Block,
        grad: Tensor,
        supports: Supports | None,
        direct: Tensor | None,
        to: tuple[Tensor | None, ...],
        learns: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """``backward`` of a block by dense products: its supports are not sparse, or no kernel works on them."""
        p = self.weights(block)
        keys = p.shape[2]
        g, q = block.of(grad), block.of(self.query)
        pulls = torch.bmm(g, block.keys_of(self.value)[:, :keys].transpose(1, 2))
        used = p
        if supports is not None:
            at = places(supports, len(block.rows))
            if supports.factors.numel():
                factors = torch.zeros_like(p).index_put(at, supports.factors)
                used, pulls = p * factors, pulls * factors
            if direct is not None:
                pulls = pulls.index_put(at, direct, accumulate=True)
        if to[1] is not None:
            to[1][:, :keys].add_(torch.bmm(used.transpose(1, 2), g))
        a = self._beside(block)
        own: Tensor | None = None
        if learns:
            kernel = kernels.find("pull", self.rule.name, (a,), pulls, p)
            both: Any = (self.rule.pull if kernel is None else kernel)(pulls, None, p, a)
            slopes, own = both[0], both[1].squeeze(-1)
        else:
            slopes = self.rule.jacobian(pulls, None, p, a)
        if to[0] is not None:
            to[0][:, :keys].add_(torch.bmm(slopes.transpose(1, 2), q))
        return torch.bmm(slopes, block.keys_of(self.key)[:, :keys]), own


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parameter: float | Tensor, task: Task
    ) -> tuple[Tensor, Tensor]:
        ctx.task, ctx.number = task, None if isinstance(parameter, Tensor) else parameter
        ctx.save_for_backward(query, key, value, *((parameter,) if isinstance(parameter, Tensor) else ()))
        ctx.set_materialize_grads(False)
        output, ctx.found = _Pass(query, key, value, parameter, task).forward(keep=any(ctx.needs_input_grad))
        weights = _listed(query, task)
        if not task.wants_weights:
            ctx.mark_non_differentiable(weights)
        return output, weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, weight_grad: Tensor | None) -> tuple[Any, ...]:
        query, key, value, *rest = ctx.saved_tensors
        parameter = rest[0] if rest else ctx.number
        grad = query.new_zeros(*query.shape[:2], value.shape[-1]) if grad is None else grad
        _, *needed, learns = ctx.needs_input_grad[:4]
        # In the precision of the forward pass, whatever autocast is set to when it is called.
        with torch.autocast(query.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*_dense_gradients(ctx, (query, key, value, parameter), grad, weight_grad), None)
            passed = _Pass(query, key, value, parameter, ctx.task)
            *to, to_parameter = passed.backward(ctx.found, grad, weight_grad, learns, tuple(needed))
        return *to, to_parameter if learns else None, None


def _dense_gradients(
    ctx: Any, inputs: tuple[Any, ...], grad: Tensor, weight_grad: Tensor | None
) -> list[Tensor | None]:
    """The gradients by plain operations, which can be differentiated again."""
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[:4]) if needed]
    at = _all_places(ctx, inputs[0]) if ctx.task.dropout or weight_grad is not None else None
    factors = None
    if ctx.task.dropout and at is not None:
        factors = inputs[0].new_zeros(*inputs[0].shape[:2], inputs[1].shape[1])
        factors[at] = torch.cat([each.factors for each in ctx.found])
    output, weights = ctx.task.dense(*inputs, factors)
    outputs, grads = [output], [grad]
    if weight_grad is not None:
        outputs.append(weights[at])
        grads.append(weight_grad)
    found = torch.autograd.grad(outputs, [inputs[i] for i in wanted], grads, create_graph=True)
    gradients: list[Tensor | None] = [None] * 4
    for i, gradient in zip(wanted, found, strict=True):
        gradients[i] = gradient
    return gradients


def places(supports: Supports, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Head, row and key of every entry, for heads with so many rows each."""
    counts = supports.starts.diff()
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return row // rows, row % rows, supports.indices.long()


def _all_places(ctx: Any, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Head, row and key of every entry of all blocks, which are in the order of heads and rows."""
    return places(joined(ctx.found), query.shape[1])


def joined(found: list[Supports]) -> Supports:
    """The supports of several blocks as those of one."""
    counts = torch.cat([each.starts.diff() for each in found])
    return Supports(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        torch.cat([each.indices for each in found]),
        torch.cat([each.weights for each in found]),
        torch.cat([each.factors for each in found]),
    )
