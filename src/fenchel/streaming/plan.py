"""The plan of an engine: its method, the size of its blocks, and up to which share of entries supports are sparse.

Every engine of this room asks ``plan``, and no other file has such numbers. How many rows there are decides how many
blocks there are; it never decides which algorithm computes a row.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fenchel import kernels
from fenchel.regularizers.base import Regularizer

Method = Literal["dense", "parts", "supports", "fused"]
Step = Literal["attend", "recall", "energy"]

LEAST_FUSED, MOST_FUSED = math.nextafter(1.0, 2.0), 2.0
"""The alpha that kernels for all of attention serve."""


class Problem(NamedTuple):
    """Checked arguments of attention.

    Args:
        query: (…, L, E).
        key: (…, S, E), of fewer heads where each serves a group of query heads.
        value: (…, S, D).
        omega: the regularizer.
        shape: of the scores, (…, L, S).
        mask: broadcasts to the shape; boolean (True = takes part) or added to the scores.
        is_causal: whether query i attends to keys 0 … i.
        scale: of the scores.
        dropout: the share of weights to drop.
        rows: how many queries were added in front, 0 or 1: see ``sink``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    omega: Regularizer
    shape: tuple[int, ...]
    mask: Tensor | None
    is_causal: bool
    scale: float
    dropout: float
    rows: int = 0


@dataclass(frozen=True)
class Plan:
    """How scores are computed, block by block.

    Args:
        method: ``"dense"``: all scores are held. ``"parts"``: those of some rows at a time, or of some patterns at a
            time where partial results can be merged; they are computed again for derivatives. ``"supports"``: those of
            some rows at a time, of which the entries with weight are kept. ``"fused"``: by one kernel, see ``fused``.
        rows: rows of a block of scores, those of all heads counted.
        columns: patterns or classes of a block of scores, where these are not all read at once.
        share: the share of a block's scores up to which its supports are sparse, and are worked on as lists. Measured
            with one thread, lists and dense products take the same time at 0.14 to 0.19 for attention (width 128 and
            64) and at 0.16 for output layers.
        tile: the number of rows of every product of matrices is a multiple of this. BLAS uses other code for fewer
            rows, and for rows that are left over, so that the last digits of a row would depend on the other rows.
        entries: the length of lists of candidates is a multiple of this, so that sums over lists have the same order
            however long the longest list is.
        exact: the largest number of multiplications with which certificates compare all pairs of patterns in double
            precision; with more they use the dtype of the patterns.

    Example:
        >>> from fenchel.streaming import Plan
        >>> plan = Plan("parts", rows=100)
        >>> list(plan.groups(150))  # blocks are whole tiles: 104 rows, not 100
        [slice(0, 104, None), slice(104, 150, None)]
    """

    method: Method = "dense"
    rows: int = 128
    columns: int = 1 << 12
    share: float = 0.15
    tile: int = 8
    entries: int = 64
    exact: int = 1 << 36

    @property
    def held(self) -> int:
        """Entries of a block."""
        return self.rows * self.columns

    def groups(self, count: int) -> Iterator[slice]:
        """Blocks of ``rows`` rows, rounded up to whole tiles; one block if there are no rows."""
        size = max(-(-self.rows // self.tile), 1) * self.tile
        for first in range(0, max(count, 1), size):
            yield slice(first, min(first + size, count))


@dataclass(frozen=True)
class Shapes:
    """The sizes of a problem.

    Args:
        rows: queries of a head, or tokens.
        columns: keys, patterns or classes.
        width: of queries and values together.
        heads: how many such matrices of scores there are.
    """

    rows: int
    columns: int
    width: int
    heads: int = 1


@dataclass(frozen=True)
class Needs:
    """What an engine has to compute.

    Args:
        step: the computation: attention, a step of a memory, or its energy.
        dtype: of the scores.
        formula: whether the plain formula is needed, which holds all scores: weights are returned, the mask is learned,
            or the call is transformed (forward mode, ``torch.func``, graphs).
        causal: whether query i attends to keys 0 … i only.
        lists: whether supports can be kept as lists: not if weights are NaN.
        fused: whether one kernel may compute all.
        inputs: the dtype of queries, keys and values.
        random: whether weights are dropped at random.
        graph: whether the call becomes part of a graph, where an operator computes by blocks: see ``supports``.
        by_chunks: whether patterns must be read some at a time.
        columns: how many of them, if that is fixed.
    """

    step: Step
    dtype: torch.dtype = torch.float32
    formula: bool = False
    causal: bool = False
    lists: bool = True
    fused: bool = False
    inputs: torch.dtype = torch.float32
    random: bool = False
    graph: bool = False
    by_chunks: bool = False
    columns: int | None = None


_given: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("plan", default=None)


@contextlib.contextmanager
def using(plan: Plan | None) -> Iterator[None]:
    """Use a given plan inside a context, as tests do; None chooses plans as usual.

    Where the method of the plan cannot compute a result, the plain formula does.

    Graphs of ``torch.compile`` and ``torch.export`` do not see it.

    Example:
        >>> import torch, fenchel
        >>> from fenchel.streaming import Plan, using
        >>> x = torch.eye(3)
        >>> with using(Plan("supports", rows=2)):
        ...     fenchel.attention(x, x, x, scale=4.0)
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    token = _given.set(plan)
    try:
        yield
    finally:
        _given.reset(token)


def plan(omega: Regularizer, shapes: Shapes, device: torch.device, needs: Needs) -> Plan:
    """The plan for a problem.

    Args:
        omega: the regularizer. The plan depends on its level below which nothing has mass (``line``), on whether
            partial results can be merged (``associative``), and on what varies from row to row (``parameter_shape``).
        shapes: the sizes.
        device: of the tensors.
        needs: what has to be computed.
    """
    if needs.formula and needs.step == "attend":
        return Plan("dense")
    given = None if needs.graph else _given.get()  # which the compiler cannot read
    if needs.step in ("recall", "energy"):
        return _of_patterns(omega, shapes, needs, given)
    if given is not None:
        return given if _serves(given.method, omega, device, needs) else replace(given, method="dense")
    return _of_queries(omega, shapes, device, needs)


def plan_output(tokens: int, classes: int) -> Plan:
    """The plan of an output layer, which has no other method than supports.

    A block has a tenth of the tokens, but 16 to 512, and at least 2¹⁶ logits, below which nothing is saved.
    Products of some thousand classes at a time are faster than one of all.
    """
    given = _given.get()
    if given is not None:
        return given
    rows = max(16, min(-(-tokens // 10), 512), (1 << 16) // classes)
    return Plan("supports", rows=max(1, min(rows, tokens)), columns=1 << 11)


def plan_pairs() -> Plan:
    """The plan of certificates, which compare blocks of ``columns`` patterns, ``held`` entries at a time."""
    return _given.get() or Plan("parts", rows=1 << 11, columns=1 << 11)


def _of_queries(omega: Regularizer, shapes: Shapes, device: torch.device, needs: Needs) -> Plan:
    """Attention: supports from 256 keys on, below which a matrix is faster; else the formula."""
    if _serves("fused", omega, device, needs):
        return Plan("fused")
    keys = max(shapes.columns, 1)
    wide = (1 << 24) // keys  # a block of few rows takes as long, to read all keys: rather hold more scores
    if keys >= 256 and _serves("supports", omega, device, needs):
        rows = max((1 << 21) // keys, min(128, wide), 16)
        own = omega.canonical()[0].parameter
        if isinstance(own, Tensor) and own.numel() > 1:  # by heads: one with a wide support leaves the others sparse
            rows = min(rows, max(shapes.rows, (1 << 16) // keys))
        return Plan("supports", rows=-(-rows // 8) * 8)
    rows = max((1 << 19) // keys, min(128 * shapes.heads, wide))
    # A matrix that is hardly larger than queries and outputs may as well be held. Graphs serve any number of rows.
    large = keys > shapes.width and (needs.graph or shapes.heads * shapes.rows > rows)
    if large and _serves("parts", omega, device, needs):
        return Plan("parts", rows=rows)
    return Plan("dense")


def _serves(method: Method, omega: Regularizer, device: torch.device, needs: Needs) -> bool:
    """Whether attention can be computed by a method."""
    if method == "fused":
        if not needs.fused:
            return False
        base, gamma = omega.canonical()
        if base.name is None or isinstance(gamma, Tensor) or gamma < 1e-4 or base.parameter_range is None:
            return False
        (low, high), own = base.parameter_range, base.parameter_shape
        if not (low >= 1 and high <= MOST_FUSED) or own is None or math.prod(own[-2:]) != 1:
            return False
        like = torch.empty(0, dtype=needs.inputs, device=device)
        if low == high == 1:  # torch's own attention, of every device but the CPU
            return kernels.ENABLED and (kernels.TRITON or not like.is_cpu)
        # Both, or a backward pass that does not compile would be met again and again.
        steps = "fused_attend", "fused_attend_backward"
        if needs.graph:
            return all(kernels.offers(step, base.name, like) for step in steps)
        number = min(max(high, LEAST_FUSED), MOST_FUSED)
        found = [kernels.find(steps[0], base.name, (number,), like), kernels.find(steps[1], base.name, (number,), like)]
        return None not in found
    if method == "supports" or (method == "parts" and needs.graph):
        base, gamma = omega.canonical()
        if base.name is None or not needs.lists or isinstance(gamma, Tensor) or gamma < 1e-4:
            return False  # scores over so low a temperature could overflow
        if method == "supports" and not isinstance(base.parameter, Tensor) and base.margin == math.inf:
            return False  # every weight is positive
        if needs.graph:  # kernels are looked up when the operator runs
            return base.parameter is not None
        like = torch.empty(0, dtype=needs.dtype, device=device)
        return kernels.find("attend", base.name, (base.parameter,), like) is not None
    if method == "parts":
        shape = omega.parameter_shape
        if shape is None or (needs.random and device.type != "cpu"):
            return False
        # Parameters of single queries, or of keys that not all queries see, would have to be parted too.
        return not (len(shape) > 1 and shape[-2] > 1) and not (needs.causal and len(shape) > 0 and shape[-1] > 1)
    return True


def _of_patterns(omega: Regularizer, shapes: Shapes, needs: Needs, given: Plan | None) -> Plan:
    """Memories: all scores of some queries; from 2¹³ patterns on, or where they are read by chunks, one pass.

    Where one pass is not enough, chunks are read for all scores of some queries.
    """
    base, _ = omega.canonical()
    one_pass: Method | None = None
    if base.associative:
        one_pass = "parts"
    elif base.line(torch.zeros(1, device="cpu")) is not None:
        one_pass = "supports"
    count, columns = shapes.columns, needs.columns
    if given is not None:
        method = one_pass if one_pass is not None and (needs.by_chunks or given.method == one_pass) else "dense"
        columns = count if method == "dense" and not needs.by_chunks else columns
        return replace(given, method=method, columns=given.columns if columns is None else columns)
    large = needs.step == "recall" and one_pass == "supports" and count >= 1 << 13
    if needs.by_chunks or large:
        columns = (1 << 12) if columns is None else columns
        return Plan(one_pass or "dense", rows=max((1 << 22) // columns // 8, 1) * 8, columns=columns)
    if needs.step == "energy":
        return Plan("dense", rows=max((1 << 22) // count // 8, 1) * 8, columns=count)
    tile = 8 * min(max((1 << 12) // count, 1), 16)  # as large as costs little
    return Plan("dense", rows=max((1 << 18) // count // tile, 1) * tile, columns=count, tile=tile)
