"""The table of kernels: which one serves which step of which map, on which device, in which precision.

A back end is a folder beside this file, and rows in this table. ``find`` is the only place that asks whether there is a
kernel; where it returns None the caller computes in torch operations.

===============  ======================================  =========================================================
step             call                                    result
===============  ======================================  =========================================================
``argmax``       ``kernel(z, *a)``                       argmax_Ω of the rows of z
``product``      ``kernel(v, z, p, *a)``                 J v, the Jacobian in the scores, given p = argmax_Ω(z)
``pull``         ``kernel(v, z, p, *a)``                 J v, and v times the derivatives in each parameter
``class_loss``   ``kernel(z, index, residual, *a)``      the loss of class indices, and p − y if ``residual``
``room``         ``kernel(z, upper)``                    how many bounds are negative or NaN, and their sum, per row
``cap``          ``kernel(p, *a)``                       p scaled up and cut off at its bounds, and in which rows that
                                                         failed (capped softmax)
``chain``        ``kernel.advance(…)``, ``.expect(…)``,  max_Ω over all paths of a dynamic program, the expected path,
``alignment``    ``.curve(…)``                           and its change along a direction: see ``markov``,
``lattice``                                              ``alignments`` and ``lattices``
===============  ======================================  =========================================================

z, v and p are rows (…, n), a the parameters of the map: numbers, or tensors with one value per row.

Steps on one block of a larger problem; ``fenchel.streaming`` makes the blocks:

``attend``: ``kernel(query, key, value, a, mask=, seen=, dropout=, most=, room=)`` computes argmax_Ω(query keyᵀ) value,
(heads, rows, depth), and the supports. It returns (output, starts, indices, weights, factors): row r has the entries
``starts[r]`` to ``starts[r + 1]``, int64; ``indices`` are their keys, int32, increasing; ``factors`` is what dropout
multiplies the weights by, empty without dropout. It returns None if there are more than ``most`` entries, or if a score
is NaN or +inf. query is (heads, rows, width), key and value are (heads, keys, width), contiguous; a is a number or
(heads, rows). Row r of a head sees the first ``seen[r]`` keys, all of them if ``seen`` is None. mask is boolean (True =
takes part), to be added, or None; it is (heads, rows, keys that any row sees). ``room`` is memory to work in, 2 × heads
× rows × keys entries.

``attend_backward``: ``kernel(grad, query, key, value, a, supports=, to_weights=, to_key=, to_value=, learns=)`` returns
the gradient of the queries, and that of a, (heads, rows), if ``learns``, else None. It adds those of keys and values to
``to_key`` and ``to_value``, unless these are None. ``supports`` is what ``attend`` returned after the output;
``to_weights`` is the gradient of its weights, or None.

``linear_class_loss``: ``kernel(hidden, weight, bias, index, a, rates=, most=, room=, turned=)`` returns the loss of a
class for logits hidden weightᵀ + bias, (tokens,), 0 where the index is negative. With ``rates``, one per token, it also
returns the supports of rate·(p − y) as (starts, classes, values), else None. If these have more than ``most`` entries
it returns None in their place, and leaves rate·(p − y) itself in the first rows of ``room``. That is memory to work in,
(tokens or more, classes), and so is ``turned``, (some classes, tokens or more).

``linear_class_loss_backward``: ``kernel(hidden, weight, supports, to_hidden=, to_weight=, to_bias=)`` adds the
gradients for tokens with these supports to those tensors that are not None.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import concrete

Parameter = float | Tensor
Interval = tuple[float, float]

_FLOATS = (torch.float32, torch.float64)
_ANY: tuple[Interval, ...] = ((-math.inf, math.inf),)


@dataclass
class _Row:
    """One kernel: where it is, and what it serves."""

    kernel: Any
    device: str
    dtypes: tuple[torch.dtype, ...]
    ranges: tuple[Interval, ...]

    def covers(self, parameter: Parameter) -> bool:
        """Whether the first parameter is in range."""
        if not isinstance(parameter, Tensor):
            for low, high in self.ranges:  # noqa: SIM110 (small inputs feel a generator)
                if low <= parameter <= high:
                    return True
            return False
        if parameter.device.type != "cpu":
            return True  # its values cannot be read without waiting for the device: such a kernel serves all of them
        inside = [(parameter >= low) & (parameter <= high) for low, high in self.ranges]
        return bool(reduce(torch.logical_or, inside).all())


_table: dict[tuple[str, str], list[_Row]] = {}


def register(
    step: str,
    name: str,
    kernel: Any,
    *,
    device: str = "cpu",
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
    ranges: tuple[Interval, ...] = _ANY,
) -> Callable[[], None]:
    """Add a kernel to the table, before those that are there; return a function that takes it out again.

    Args:
        step: which step it computes: see the head of this file.
        name: of the map: that of its ``RowMap``, such as ``"tsallis"``.
        kernel: called as the table says; or ``"module:name"`` inside ``fenchel.kernels``, or a whole ``"module"``,
            imported when it is needed.
        device: the type of device whose tensors it takes.
        dtypes: the dtypes of tensors that it takes.
        ranges: closed intervals of the first parameter that it serves; those of a tensor must all lie in one of them,
            unless it is on a device that one would have to wait for.
    """
    row = _Row(kernel, device, dtypes, ranges)
    rows = _table.setdefault((step, name), [])
    rows.insert(0, row)
    return lambda: rows.remove(row)


def find(step: str, name: str, parameters: tuple[Any, ...], *tensors: Tensor) -> Any:
    """The kernel that serves a step of a map for these parameters and tensors, or None.

    Args:
        step: see the head of this file.
        name: of the map.
        parameters: of the map: numbers, tensors, or None where one is left out.
        tensors: those that the kernel would read.
    """
    rows = _table.get((step, name)) if kernels.ENABLED else None
    if not rows:
        return None
    for a in parameters:
        if isinstance(a, Tensor):
            tensors = (*tensors, a)
    if not concrete(*tensors):
        return None
    for row in rows:
        for t in tensors:
            if t.dtype not in row.dtypes or t.device.type != row.device:
                break
        else:
            if row.ranges is _ANY or row.covers(parameters[0]):
                if isinstance(row.kernel, str):  # the compiler is imported by the first that is asked for
                    module, _, function = row.kernel.partition(":")
                    found: Any = importlib.import_module(f"fenchel.kernels.{module}")
                    row.kernel = getattr(found, function) if function else found
                return row.kernel
    return None


_ENTMAX = ((1e-2, math.inf),)
_OUTPUT = ((1e-2, 1 - 1e-3), (1 + 1e-3, 1e3))
_PROGRAMS = ((1.0, 1.0), (1.5, 1.5), (2.0, 2.0), (math.inf, math.inf))  # ``columns.KINDS``
_NORMMAX = _ANY

register("argmax", "tsallis", "cpu.maps.simplex:entmax", ranges=_ENTMAX)
register("product", "tsallis", "cpu.maps.simplex:entmax_product", ranges=_ENTMAX)
register("pull", "tsallis", "cpu.maps.simplex:entmax_pull", ranges=_ENTMAX)
register("class_loss", "tsallis", "cpu.maps.simplex:entmax_loss", ranges=_ENTMAX)
register("attend", "tsallis", "cpu.streaming.attention:attend", ranges=((1 + 1e-3, 2.0),))
register("attend_backward", "tsallis", "cpu.streaming.attention:attend_backward", ranges=((1 + 1e-3, 2.0),))
register("linear_class_loss", "tsallis", "cpu.streaming.output:linear_class_loss", ranges=_OUTPUT)
register("linear_class_loss_backward", "tsallis", "cpu.streaming.output:linear_class_loss_backward", ranges=_OUTPUT)
register("chain", "tsallis", "cpu.dp.markov", ranges=_PROGRAMS)
register("alignment", "tsallis", "cpu.dp.alignments", ranges=_PROGRAMS)
register("lattice", "tsallis", "cpu.dp.lattices", ranges=_PROGRAMS)
register("argmax", "norm", "cpu.maps.simplex:normmax", ranges=_NORMMAX)
register("product", "norm", "cpu.maps.simplex:normmax_product", ranges=_NORMMAX)
register("class_loss", "norm", "cpu.maps.simplex:normmax_loss", ranges=_NORMMAX)
register("argmax", "bounded_gini", "cpu.maps.bounded:project")
register("cap", "bounded_shannon", "cpu.maps.bounded:cap")
register("room", "bounded", "cpu.maps.bounded:room")
register("product", "bounded_gini", "cpu.maps.bounded:product")
register("pull", "bounded_gini", "cpu.maps.bounded:pull")
register("product", "bounded_shannon", "cpu.maps.bounded:entropic_product")
register("pull", "bounded_shannon", "cpu.maps.bounded:entropic_pull")
for _name in ("fused", "oscar", "grid"):
    register("argmax", _name, f"cpu.maps.{_name}:{_name}")
    register("product", _name, f"cpu.maps.{_name}:{_name}_product")
