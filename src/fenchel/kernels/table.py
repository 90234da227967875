"""The table of kernels: which one serves which step of which map, on which device, in which precision.

A back end is a folder beside this file, and rows in this table. ``find`` is the only place that asks whether there is a
kernel; where it returns None the caller computes in torch operations.

===============  ======================================  =========================================================
step             call                                    result
===============  ======================================  =========================================================
``argmax``       ``kernel(z, *a)``                       argmax_Ω of the rows of z
``product``      ``kernel(v, z, p, *a)``                 J v, the Jacobian in the scores, given p = argmax_Ω(z)
``pull``         ``kernel(v, z, p, *a)``                 J v, and v times the derivatives in each parameter
``class_loss``   ``kernel(z, index, residual, *a)``      the loss of class indices, and residual·(p − y)
``loss_given``   ``kernel(z, p, y, *a)``                 the loss of classes, or of probabilities, given p = argmax_Ω(z)
``value``        ``kernel(p, *a)``                       Ω of the rows of p, one value per row
``max``          ``kernel(z, p, *a)``                    max_Ω of the rows of z, given p = argmax_Ω(z)
``envelope``     ``kernel(p, a)``                        the derivative of max_Ω in its one parameter, given p; (…, 1)
``bound_sums``   ``kernel(z, upper)``                    how many bounds are negative or NaN, and their sum, per row
``chain``        ``kernel.forward(…)``,                  max_Ω over all paths of a dynamic program, the expected path,
``alignment``    ``.gradient(…)``,                       and its change along a direction: see ``markov``,
``monotonic``    ``.hessian_product(…)``                 ``alignments``, ``monotonic``, ``lattices`` and ``spans``
``lattice``
``constituency``
===============  ======================================  =========================================================

``residual`` is a number or a truth value; for 0 the second result does not matter. ``loss_given`` of probabilities y
writes p − y over p.

z, v and p are rows (…, n), a the parameters of the map: numbers, or tensors with one value per row. No gradient is
recorded. Masked scores are −inf: ``argmax`` gives zeros for a row in which all are masked, and NaN for a row with a
score that is NaN or +inf. ``product`` and ``pull`` get None for z if the map derives all they need from p. On devices
rows may be in half precision: then so are the results, but for those with one number per row, which are in float32.

Steps on one block of a larger problem; ``fenchel.streaming`` makes the blocks:

``attend``: ``kernel(query, key, value, a, mask=, key_counts=, dropout=, most=, workspace=)`` computes
argmax_Ω(query keyᵀ) value, (heads, rows, depth), and the supports. It returns (output, supports). The supports are
None if they have more than ``most`` entries, or if a score is NaN or +inf; else they are (starts, indices, weights,
factors): row r has the entries ``starts[r]`` to ``starts[r + 1]``, int64; ``indices`` are their keys, int32,
increasing; ``factors`` is what dropout multiplies the weights by, empty without dropout. query is (heads, rows, width),
key and value are (heads, keys, width), contiguous; a is a number or (heads, rows). Row r of each head attends to the
first ``key_counts[r]`` keys, to all of them if ``key_counts`` is None. mask is boolean (True = takes part), to be
added, or None; it is (heads, rows, largest key count). ``workspace`` is memory for temporary results, heads × rows ×
keys entries.

``attend_backward``: ``kernel(grad, query, key, value, a, supports=, to_weights=, to_key=, to_value=, learns=)`` returns
the gradient of the queries, and that of a, (heads, rows), if ``learns``, else None. It adds those of keys and values to
``to_key`` and ``to_value``, unless these are None. ``supports`` are those that ``attend`` returned; ``to_weights`` is
the gradient of their weights, or None.

``fused_attend``: ``kernel(query, key, value, a, mask=, causal=, scale=, dropout=, seed=, keep=)`` computes attention
without a matrix of weights. query is (batch, heads, groups, length, width), the queries of so many groups share keys;
key and value are (batch, heads, keys, width); a is a number or (batch, heads, groups); mask is (batch, heads, groups,
length, keys), boolean or to be added, or None. All of them may be strided or broadcast. It returns the output, (batch,
heads, groups, length, depth), and if ``keep`` a tuple of tensors, else an empty one.

``fused_attend_backward``: ``kernel(grad, state, query, key, value, a, mask=, causal=, scale=, dropout=, seed=,
needed=)``, with the tensors that ``fused_attend`` returned as its state, returns a list of the gradients of query, key
and value, and of a for every query, (batch, heads, groups, length); None for those that are not needed.

``collect``: ``kernel(scores, floor, first, count, place, score)`` appends scores that are not below the floor of their
row to lists of indices and scores, for every Ω alike; its name is ``"supports"``. See ``cpu.streaming.memories``.

``runs``: ``kernel(index)`` finds the groups of equal entries of an index, int64; its name is ``"index"``. See
``cpu.segments``.

``distances``: ``kernel(x, y)`` returns the squared distances between all points of two series, and
``distances_backward``: ``kernel(grad, x, y)`` their gradients; the name is ``"squared_euclidean"``.

``linear_class_loss``: ``kernel(hidden, weight, bias, index, a, rates=, learns=, most=, workspace=, columns=)`` returns
three results. First, the loss of a class for logits hidden weightᵀ + bias, (tokens,), 0 where the index is negative.
Second, with ``rates``, one per token, the supports of rate·(p − y) as (starts, classes, values). If these have more
than ``most`` entries, None takes their place, and rate·(p − y) itself is in the first rows of ``workspace``, (tokens or
more, classes). Third, the derivative of each loss in a if ``learns``, else None. ``columns`` is the number of classes
whose logits are computed together.

``linear_class_loss_backward``: ``kernel(hidden, weight, supports, to_hidden=, to_weight=, to_bias=)`` adds the
gradients for tokens with these supports to those tensors that are not None.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._torch import concrete, is_simple

Parameter = float | Tensor
Interval = tuple[float, float]

_FLOATS = (torch.float32, torch.float64)
HALF = (torch.bfloat16, torch.float16)
"""Dtypes that only kernels for devices take, and compute in float32 inside; all else converts them to float32."""

_ANY: tuple[Interval, ...] = ((-math.inf, math.inf),)


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: float32 for half precision, else that of the tensor."""
    return torch.float32 if tensor.dtype in HALF else tensor.dtype


@dataclass
class _Row:
    """One kernel: where it is, and what it serves."""

    kernel: Any
    device: str
    dtypes: tuple[torch.dtype, ...]
    ranges: tuple[Interval, ...]
    room: str | None
    serves: Callable[..., bool] | None = None
    ready: set[torch.dtype] = field(default_factory=set)

    def covers(self, parameter: Parameter) -> bool:
        """Whether the first parameter is in range."""
        if not isinstance(parameter, Tensor):
            for low, high in self.ranges:  # noqa: SIM110 (a generator is slower than small kernels)
                if low <= parameter <= high:
                    return True
            return False
        if parameter.device.type != "cpu":
            return True  # its values cannot be read without waiting for the device: such a kernel serves all of them
        inside = [(parameter >= low) & (parameter <= high) for low, high in self.ranges]
        return bool(reduce(torch.logical_or, inside).all())


class NotCompiledError(RuntimeError):
    """A kernel for a device did not compile there: the caller computes in torch operations instead."""


class NotServedError(NotCompiledError):
    """A kernel for a device does not serve tensors of this shape: the caller computes in torch operations instead."""


class _Guarded:
    """A kernel for a device. If it does not compile, there is one warning, and it is removed from the table."""

    def __init__(self, kernel: Callable[..., Any], remove: Callable[[], None]) -> None:
        self.kernel, self.remove = kernel, remove

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.kernel(*args, **kwargs)
        except NotServedError:
            raise
        except NotCompiledError as error:
            with contextlib.suppress(ValueError):  # another thread was first
                self.remove()
                warnings.warn(f"torch operations take the place of a kernel that failed: {error}", stacklevel=2)
            raise

    def __getattr__(self, name: str) -> _Guarded:
        """A function of a kernel that is a module."""
        return _Guarded(getattr(self.kernel, name), self.remove)


_table: dict[tuple[str, str], list[_Row]] = {}
_found: dict[Any, Any] = {}  # results of ``find`` for numbers on the CPU: the search takes as long as a small kernel
_MANY = 1 << 10


def register(
    step: str,
    name: str,
    kernel: Any,
    *,
    device: str = "cpu",
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
    ranges: tuple[Interval, ...] = _ANY,
    room: str | None = None,
    serves: Callable[..., bool] | None = None,
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
        room: the kernels that ``fenchel.warmup`` compiles together with it; None for one that need not be compiled.
        serves: says of tensors whether it takes such shapes; None if it takes all.
    """
    row = _Row(kernel, device, dtypes, ranges, room, serves)
    rows = _table.setdefault((step, name), [])
    rows.insert(0, row)
    _found.clear()

    def remove() -> None:
        rows.remove(row)
        _found.clear()

    return remove


def find_again(name: str, a: tuple[Any, ...], scores: Tensor) -> Any:
    """``find("argmax", …)`` for plain scores and numbers that it was called with before; else None."""
    kernel = _found.get(("argmax", name, a, scores.dtype))
    if kernel is None or not kernels.ENABLED or not is_simple(scores) or not scores.dim():
        return None
    return kernel


def find(step: str, name: str, parameters: tuple[Any, ...], *tensors: Tensor) -> Any:
    """The kernel that serves a step of a map for these parameters and tensors, or None.

    Args:
        step: see the head of this file.
        name: of the map.
        parameters: of the map: numbers, tensors, or None where one is left out.
        tensors: those that the kernel would read.
    """
    if not kernels.ENABLED:
        return None
    key = (step, name, parameters, tensors[0].dtype) if tensors else None
    kernel = _found.get(key)
    if kernel is not None:
        for t in tensors:
            if t.dtype is not tensors[0].dtype or not t.is_cpu:
                break
        else:
            return kernel if concrete(*tensors) else None
    rows = _table.get((step, name))
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
            if (row.ranges is _ANY or row.covers(parameters[0])) and (row.serves is None or row.serves(*tensors)):
                if row.room is not None and tensors and (dtype := tensors[0].dtype) not in row.ready:
                    # Kernels of integers serve every precision.
                    if not kernels.ready(row.room, dtype if dtype.is_floating_point else None):
                        return None
                    row.ready.add(dtype)  # so that later calls need not ask
                if isinstance(row.kernel, str):  # imported when it is first needed, and the compiler with it
                    module, _, function = row.kernel.partition(":")
                    try:
                        found: Any = importlib.import_module(f"fenchel.kernels.{module}")
                    except Exception as error:
                        if row.room is not None:
                            raise
                        _remove_all(module.partition(".")[0], error)
                        return None
                    found = getattr(found, function) if function else found
                    row.kernel = found if row.room is not None else _guarded(row, rows, found)
                if row.device == "cpu" and all(type(a) is float for a in parameters) and not _depends_on_shapes(rows):
                    if len(_found) >= _MANY:
                        _found.clear()
                    _found[key] = row.kernel
                return row.kernel
    return None


def _depends_on_shapes(rows: list[_Row]) -> bool:
    return any(row.serves is not None and row.device == "cpu" for row in rows)


def offers(step: str, name: str, like: Tensor) -> bool:
    """Whether a tensor of a graph, which holds no data yet, may meet a kernel for devices when the graph runs."""
    rows = _table.get((step, name), ()) if kernels.ENABLED else ()
    return any(row.device == like.device.type and like.dtype in row.dtypes for row in rows)


def _guarded(row: _Row, rows: list[_Row], kernel: Callable[..., Any]) -> _Guarded:
    def remove() -> None:
        rows.remove(row)
        _found.clear()

    return _Guarded(kernel, remove)


def _remove_all(folder: str, error: Exception) -> None:
    """Take all kernels of a folder out of the table, because what they are written in cannot be imported."""
    for rows in _table.values():
        rows[:] = [row for row in rows if not (isinstance(row.kernel, str) and row.kernel.startswith(f"{folder}."))]
    _found.clear()
    warnings.warn(
        f"torch operations take the place of all kernels in kernels/{folder}, which cannot be imported: "
        f"{type(error).__name__}: {error}",
        stacklevel=3,
    )


_ENTMAX = ((1e-2, math.inf),)
_OUTPUT = ((math.nextafter(1.0, 2.0), 2.0),)  # at 1 the loss is cross-entropy, and torch's own is faster
_PROGRAMS = ((1.0, 1.0), (1.5, 1.5), (2.0, 2.0), (math.inf, math.inf))  # ``choices.KINDS``


def _compiled(room: str, step: str, name: str, kernel: str, ranges: tuple[Interval, ...] = _ANY) -> None:
    """Add a kernel of ``kernels/cpu``, which ``fenchel.warmup`` compiles with the others of its room."""
    register(step, name, f"cpu.{kernel}", ranges=ranges, room=room)


_compiled("entmax", "argmax", "tsallis", "maps.simplex:entmax", _ENTMAX)
_compiled("entmax", "product", "tsallis", "maps.simplex:entmax_product", _ENTMAX)
_compiled("entmax", "pull", "tsallis", "maps.simplex:entmax_pull", _ENTMAX)
_compiled("entmax", "value", "tsallis", "maps.simplex:entmax_value", _ENTMAX)
_compiled("entmax", "max", "tsallis", "maps.simplex:entmax_max", _ENTMAX)
_compiled("entmax", "envelope", "tsallis", "maps.simplex:entmax_envelope", _ENTMAX)
_compiled("entmax", "class_loss", "tsallis", "maps.simplex:entmax_loss", _ENTMAX)
_compiled("entmax", "loss_given", "tsallis", "maps.simplex:entmax_given", _ENTMAX)
_compiled("attention", "attend", "tsallis", "streaming.attention:attend", _ENTMAX)
_compiled("attention", "attend_backward", "tsallis", "streaming.attention:attend_backward", _ENTMAX)
_compiled("output", "linear_class_loss", "tsallis", "streaming.output:linear_class_loss", _OUTPUT)
_compiled("output", "linear_class_loss_backward", "tsallis", "streaming.output:linear_class_loss_backward", _OUTPUT)
register("runs", "index", "cpu.segments:runs", dtypes=(torch.int64,), room="segments")
_compiled("memories", "collect", "supports", "streaming.memories:collect")
_compiled("chains", "chain", "tsallis", "dp.markov", _PROGRAMS)
_compiled("alignments", "alignment", "tsallis", "dp.alignments", _PROGRAMS)
_compiled("alignments", "distances", "squared_euclidean", "dp.alignments:distances")
_compiled("alignments", "distances_backward", "squared_euclidean", "dp.alignments:distances_backward")
_compiled("monotonic", "monotonic", "tsallis", "dp.monotonic", _PROGRAMS)
_compiled("lattices", "lattice", "tsallis", "dp.lattices", _PROGRAMS)
_compiled("spans", "constituency", "tsallis", "dp.spans", _PROGRAMS)
_compiled("normmax", "argmax", "norm", "maps.simplex:normmax")
_compiled("normmax", "product", "norm", "maps.simplex:normmax_product")
_compiled("normmax", "class_loss", "norm", "maps.simplex:normmax_loss")
_compiled("bounded", "argmax", "bounded_gini", "maps.bounded:project")
_compiled("bounded", "argmax", "bounded_shannon", "maps.capped:capped_softmax")
_compiled("bounded", "bound_sums", "bounded", "maps.bounded:bound_sums")
_compiled("bounded", "product", "bounded_gini", "maps.bounded:product")
_compiled("bounded", "pull", "bounded_gini", "maps.bounded:pull")
_compiled("bounded", "product", "bounded_shannon", "maps.bounded:entropic_product")
_compiled("bounded", "pull", "bounded_shannon", "maps.bounded:entropic_pull")
for _name in ("fused", "oscar", "grid"):
    _compiled("grouping", "argmax", _name, f"maps.{_name}:{_name}")
    _compiled("grouping", "product", _name, f"maps.{_name}:{_name}_product")
    _compiled("grouping", "class_loss", _name, f"maps.{_name}:{_name}_loss")


_SMOOTH = ((1.0, 1.0), (2.0, 2.0))  # Shannon's entropy and Gini's
_POSITIVE = ((math.nextafter(0.0, 1.0), math.inf),)


def _on_gpu(
    step: str, name: str, kernel: str, ranges: tuple[Interval, ...] = _ANY, serves: Callable[..., bool] | None = None
) -> None:
    """Add a kernel of ``kernels/gpu`` if Triton is installed, which compiles it when it is called."""
    for device in ("cuda", "cpu") if kernels.TRITON else ("cuda",):  # also AMD's devices, which torch calls so
        register(step, name, f"gpu.{kernel}", device=device, dtypes=_FLOATS + HALF, ranges=ranges, serves=serves)


if importlib.util.find_spec("triton") is not None:
    _on_gpu("argmax", "tsallis", "rows:entmax", _POSITIVE)
    _on_gpu("product", "tsallis", "products:entmax_product", _POSITIVE)
    _on_gpu("pull", "tsallis", "products:entmax_pull", _POSITIVE)
    _on_gpu("class_loss", "tsallis", "rows:entmax_loss", _POSITIVE)
    _on_gpu("argmax", "norm", "rows:normmax")
    _on_gpu("product", "norm", "products:normmax_product")
    _on_gpu("pull", "norm", "products:normmax_pull")
    _on_gpu("class_loss", "norm", "rows:normmax_loss")
    _on_gpu("argmax", "bounded_gini", "boxes:project")
    _on_gpu("product", "bounded_gini", "products:projection_product")
    _on_gpu("argmax", "bounded_shannon", "boxes:capped_softmax")
    _on_gpu("product", "bounded_shannon", "products:capped_softmax_product")
    _on_gpu("fused_attend", "tsallis", "attention:attend", _OUTPUT)
    _on_gpu("fused_attend_backward", "tsallis", "attention_backward:attend_backward", _OUTPUT)
    _on_gpu("chain", "tsallis", "chains", _SMOOTH, lambda unary, *_: unary.shape[-1:] <= (128,))
    _on_gpu("alignment", "tsallis", "alignments", _SMOOTH, lambda costs: min(costs.shape[1:], default=0) <= 2048)
