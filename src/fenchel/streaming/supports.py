"""Attention by supports: blocks of scores in, lists of the entries with weight out.

The weights of a query are few under a sparse Ω. Scores are computed for a block of queries at a time, and their
supports are kept as lists of keys and weights. The products with the values and the whole backward pass work on these
lists. Where supports are not sparse, or no kernel lists them, the products of a block are dense, and its weights are
computed again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import apply_function, tracks
from fenchel.kernels.cpu.streaming.products import scores
from fenchel.regularizers.rowmap import RowMap

Block = tuple[slice, slice]
"""Some heads, and some rows of each: ``tensor[block]`` is their part of a tensor (heads, rows, …)."""


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


@dataclass
class Task:
    """The arguments of ``attend`` that are not tensors, and the lists that it finds.

    Args:
        rule: the mathematics of Ω.
        rows: rows of a block, those of all its heads counted.
        entries: the average number of entries per row up to which the supports of a block are kept as lists; None if
            none are.
        batch: the dimensions that the heads are flattened from.
        length: the number of queries; a head has a multiple of it as rows if several query heads share its keys.
        causal: whether query i attends to keys 0 … i only.
        dropout: the share of weights that is dropped.
        wants_weights: whether the weights are returned too, as one list; ``found`` has their places.
    """

    rule: RowMap
    rows: int
    entries: int | None
    batch: tuple[int, ...]
    length: int
    causal: bool = False
    dropout: float = 0.0
    wants_weights: bool = False
    found: list[Supports] = field(default_factory=list)


class NotListedError(Exception):
    """A score is NaN or +inf: the weights of its row are NaN, which no list of a support can hold."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, parameter: float | Tensor, task: Task
) -> tuple[Tensor, Tensor]:
    """argmax_Ω(query keyᵀ) value, (heads, rows, depth), and the weights that are not zero if ``task.wants_weights``.

    Raises NotListedError where lists are needed, and a score is NaN or +inf.

    Args:
        query: (heads, rows, width).
        key: (heads, keys, width).
        value: (heads, keys, depth).
        mask: broadcasts to (*batch, groups, length, keys); boolean (True = takes part) or added to the scores.
        parameter: of Ω: a number, or one per row, (heads, rows).
        task: everything else.
    """
    if tracks(query, key, value, parameter):
        output, weights = apply_function(_Attend, query, key, value, mask, parameter, task)
        return output, weights
    output, _ = Blocks(query, key, value, mask, parameter, task).forward(keep=False)
    return output, _listed(query, task) if task.wants_weights else query


def _listed(query: Tensor, task: Task) -> Tensor:
    """The weights of all supports, row by row."""
    return torch.cat([each.weights for each in task.found]) if task.found else query.new_empty(0)


def masked_scores(query: Tensor, key: Tensor, mask: Tensor | None, task: Task) -> Tensor:
    """query keyᵀ of ``attend``, (heads, rows, keys), with the mask added, and −inf where it is False."""
    (heads, rows, _), keys = query.shape, key.shape[1]
    x = query @ key.transpose(1, 2)
    if mask is not None:
        full = mask.expand(*task.batch, rows // task.length, task.length, keys).reshape(heads, rows, keys)
        x = torch.where(full, x, -torch.inf) if full.dtype == torch.bool else x + full
    if task.causal:
        visible = torch.ones(task.length, keys, dtype=torch.bool, device=x.device).tril()
        x = torch.where(visible.repeat(rows // task.length, 1), x, -torch.inf)
    return x


class Blocks:
    """One problem of attention, block by block: forward and backward pass, without a graph. See ``attend``."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, parameter: float | Tensor, task: Task
    ) -> None:
        self.query, self.key, self.value = (
            query.detach().contiguous(),
            key.detach().contiguous(),
            value.detach().contiguous(),
        )
        self.parameter = parameter.detach() if isinstance(parameter, Tensor) else parameter
        self.task = task
        (heads, rows, _), keys, size = query.shape, key.shape[1], task.rows
        self.mask = None if mask is None else mask.expand(*task.batch, rows // task.length, task.length, keys)
        together = max(size // max(rows, 1), 1)  # heads with few rows each share a block
        self.blocks: list[Block] = []
        for head in range(0, heads, together):
            for row in range(0, rows, size):
                self.blocks.append((slice(head, min(head + together, heads)), slice(row, min(row + size, rows))))
        # Scores of one block after the other.
        self.workspace = query.new_empty(min(together, heads) * min(size, rows) * keys)

    def part(self, block: Block) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
        """Queries, keys, values and the parameter of a block."""
        own = self.parameter[block] if isinstance(self.parameter, Tensor) else self.parameter
        return self.query[block], self.key[block[0]], self.value[block[0]], own

    def visible(self, block: Block) -> tuple[Tensor | None, Tensor | None, int]:
        """What the rows of a block may attend to.

        Returns:
            The mask, (heads, rows, keys), or None without one; the number of keys of each row, (rows,), or None if
            every row may attend to all keys; and the largest of these numbers.
        """
        heads, rows = block
        counts, keys, length = None, self.key.shape[1], self.task.length
        if self.task.causal:
            number = torch.arange(rows.start, rows.stop, device=self.query.device)
            counts = (number % length + 1).clamp_max(keys)
            last = rows.stop - 1
            keys = min(keys, last % length + 1 if last // length == rows.start // length else length)
        if self.mask is None:
            return None, counts, keys
        number = torch.arange(rows.start, rows.stop, device=self.mask.device)
        parts = []
        for head in range(heads.start, heads.stop):
            own = self.mask[tuple(map(int, np.unravel_index(head, self.task.batch)))]
            parts.append(own[number // length, number % length, :keys])
        return torch.stack(parts), counts, keys

    def weights(self, block: Block) -> tuple[Tensor, Tensor]:
        """All weights of a block, (heads, rows, keys), without keys that no row attends to, and their scores."""
        mask, counts, keys = self.visible(block)
        query, key, _, a = self.part(block)
        x = scores(query, key[:, :keys], mask, self.workspace)
        if counts is not None:
            x.masked_fill_(torch.arange(keys, device=x.device) >= counts.unsqueeze(-1), -torch.inf)
        return self.task.rule.solve_any(x, a.unsqueeze(-1) if isinstance(a, Tensor) else a), x

    def forward(self, keep: bool) -> tuple[Tensor, list[Supports | None]]:
        """The output, and for each block its supports, or None if they are not sparse or not to be kept."""
        task = self.task
        found: list[Supports | None] = []
        output = self.value.new_empty(*self.query.shape[:2], self.value.shape[-1])
        listed = task.wants_weights or task.dropout > 0
        kernel = None
        if task.entries is not None:
            kernel = kernels.find("attend", task.rule.name, (self.parameter,), self.query, self.key, self.value)
        for block in self.blocks:
            query, key, value, a = self.part(block)
            supports = None
            if kernel is None:
                if listed:
                    raise NotListedError
                weights, _ = self.weights(block)
                output[block] = torch.bmm(weights, value[:, : weights.shape[2]])
            else:
                mask, counts, _ = self.visible(block)
                most = math.inf if listed else (task.entries or 0) * query.shape[0] * query.shape[1]
                rest = {"mask": mask, "key_counts": counts, "dropout": task.dropout, "most": most}
                output[block], lists = kernel(query, key, value, a, **rest, workspace=self.workspace)
                if lists is None and listed:
                    raise NotListedError
                supports = None if lists is None else Supports(*lists)
            if supports is not None and task.wants_weights:
                task.found.append(supports)
            found.append(supports if keep else None)
        return output, found

    def backward(
        self, found: list[Supports | None], grad: Tensor, weight_grad: Tensor | None, needed: Sequence[bool]
    ) -> list[Any]:
        """Gradients of query, key, value and parameter from those of the output and of weights that were returned.

        Those of keys, of values, which may be a large memory, and of the parameter only if they are ``needed``.
        """
        to_query = torch.empty_like(self.query)
        to_key = torch.zeros_like(self.key) if needed[1] else None
        to_value = torch.zeros_like(self.value) if needed[2] else None
        to_parameter = self.query.new_empty(self.query.shape[:2]) if needed[3] else None
        tensors = self.query, self.key, self.value
        kernel = kernels.find("attend_backward", self.task.rule.name, (self.parameter,), *tensors)
        for block, supports in zip(self.blocks, found, strict=True):
            heads = block[0]
            to: dict[str, Any] = {
                "to_key": None if to_key is None else to_key[heads],
                "to_value": None if to_value is None else to_value[heads],
                "learns": needed[3],
            }
            own_grad = None
            if weight_grad is not None and supports is not None:
                own_grad, weight_grad = weight_grad.tensor_split([supports.weights.numel()])
            if supports is None or kernel is None:
                queries, own = self._densely(block, grad[block], supports, own_grad, **to)
            else:
                lists = supports.starts, supports.indices, supports.weights, supports.factors
                queries, own = kernel(grad[block], *self.part(block), supports=lists, to_weights=own_grad, **to)
            to_query[block] = queries
            if to_parameter is not None and own is not None:
                to_parameter[block] = own
        return [to_query, to_key, to_value, to_parameter]

    def _densely(
        self,
        block: Block,
        grad: Tensor,
        supports: Supports | None,
        weight_grad: Tensor | None,
        *,
        to_key: Tensor | None,
        to_value: Tensor | None,
        learns: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """``backward`` of a block by dense products: its supports are not sparse, or no kernel works on them."""
        p, x = self.weights(block)
        keys, factors = p.shape[2], None
        query, key, value, a = self.part(block)
        if supports is not None:
            at = places(supports, query.shape[1])
            factors = torch.zeros_like(p).index_put(at, supports.factors) if supports.factors.numel() else None
            weight_grad = None if weight_grad is None else torch.zeros_like(p).index_put(at, weight_grad)
        inputs = query, key[:, :keys], value[:, :keys], a
        needed = True, to_key is not None, to_value is not None, learns
        found = dense_gradients(self.task.rule, inputs, x, p, grad, needed, factors, weight_grad)
        if to_key is not None:
            to_key[:, :keys] += found[1]
        if to_value is not None:
            to_value[:, :keys] += found[2]
        return found[0], found[3]


def plain_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    parameter: float | Tensor,
    task: Task,
    grad: Tensor,
    needed: Sequence[bool],
    weight_grad: Tensor | None = None,
    found: Sequence[Supports] = (),
) -> list[Any]:
    """``Blocks.backward`` in plain operations, which can be differentiated again; all scores are held."""
    x = masked_scores(query, key, mask, task)
    p = task.rule.argmax(x, parameter.unsqueeze(-1) if isinstance(parameter, Tensor) else parameter)
    factors = None
    if task.dropout or weight_grad is not None:
        at = places(joined(found), x.shape[1])
        if task.dropout:
            factors = torch.zeros_like(x).index_put(at, torch.cat([each.factors for each in found]))
        if weight_grad is not None:
            weight_grad = torch.zeros_like(x).index_put(at, weight_grad)
    return dense_gradients(task.rule, (query, key, value, parameter), x, p, grad, needed, factors, weight_grad)


def dense_gradients(
    rule: RowMap,
    inputs: tuple[Tensor, Tensor, Tensor, float | Tensor],
    x: Tensor,
    p: Tensor,
    grad: Tensor,
    needed: Sequence[bool],
    factors: Tensor | None,
    weight_grad: Tensor | None,
) -> list[Any]:
    """The gradients of query, key, value and parameter by dense products; None for those that are not needed.

    Args:
        rule: the mathematics of Ω.
        inputs: query, key, value and parameter, as in ``attend``.
        x: the scores, (heads, rows, keys).
        p: their weights; if they are differentiable, the gradients are.
        grad: the gradient of the output.
        needed: which gradients are needed.
        factors: what dropout multiplies the weights by, of the shape of p; None without dropout.
        weight_grad: the gradient of weights that were returned, of the shape of p; None if there is none.
    """
    query, key, value, a = inputs
    to_weights = grad @ value.transpose(1, 2)
    to_weights = to_weights if factors is None else to_weights * factors
    to_weights = to_weights if weight_grad is None else to_weights + weight_grad
    a = a.unsqueeze(-1) if isinstance(a, Tensor) else a
    z = x if rule.keeps_scores(a) else None
    to_scores: Any
    to_parameter: Any = None
    if needed[3]:
        to_scores, to_parameter, *_ = rule.pull_any(to_weights, z, p, a)
        to_parameter = to_parameter.squeeze(-1)
    else:
        to_scores = rule.jacobian(to_weights, z, p, a)
    return [
        to_scores @ key if needed[0] else None,
        to_scores.transpose(1, 2) @ query if needed[1] else None,
        (p if factors is None else p * factors).transpose(1, 2) @ grad if needed[2] else None,
        to_parameter,
    ]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        parameter: float | Tensor,
        task: Task,
    ) -> tuple[Tensor, Tensor]:
        ctx.number, ctx.task = parameter, task
        ctx.save_for_backward(query, key, value, mask, parameter if isinstance(parameter, Tensor) else None)
        ctx.set_materialize_grads(False)
        run = Blocks(query, key, value, mask, parameter, task)
        output, ctx.found = run.forward(keep=True)
        weights = _listed(query, task) if task.wants_weights else query.new_empty(0)
        if not task.wants_weights:
            ctx.mark_non_differentiable(weights)
        return output, weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, weight_grad: Tensor | None) -> tuple[Any, ...]:
        query, key, value, mask, parameter = ctx.saved_tensors
        problem = query, key, value, mask, ctx.number if parameter is None else parameter, ctx.task
        needed = (*ctx.needs_input_grad[:3], ctx.needs_input_grad[4])
        grad = query.new_zeros(*query.shape[:2], value.shape[-1]) if grad is None else grad
        # In the precision of the forward pass, whatever autocast is set to when it is called.
        with torch.autocast(query.device.type, enabled=False):
            if torch.is_grad_enabled():
                to = plain_gradients(*problem, grad, needed, weight_grad, ctx.found)
            else:
                to = Blocks(*problem).backward(ctx.found, grad, weight_grad, needed)
        return *to[:3], None, to[3], None


def places(supports: Supports, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Head, row and key of every entry, for heads with ``rows`` rows each."""
    counts = supports.starts.diff()
    row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return row // rows, row % rows, supports.indices.long()


def joined(found: Sequence[Supports]) -> Supports:
    """The supports of several blocks, which are in the order of heads and rows, as those of one."""
    counts = torch.cat([each.starts.diff() for each in found])
    return Supports(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        torch.cat([each.indices for each in found]),
        torch.cat([each.weights for each in found]),
        torch.cat([each.factors for each in found]),
    )
