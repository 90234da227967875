"""Compile every kernel ahead, so that no first call is slow: a list of small calls of the public interface.

Whoever adds a kernel adds a call here that reaches it; the tests hold that nothing is left to compile.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fenchel
from fenchel import kernels
from fenchel.continuous import GaussianBasis, expectation
from fenchel.kernels import compilation, store
from fenchel.progress import Progress, bar, silent
from fenchel.regularizers import Gini
from fenchel.regularizers.packed import Segments
from fenchel.structures import Chain, DependencyTree, SequentialSubsets, Structure

Call = Callable[[Tensor], Tensor]
"""A differentiable function of scores, (rows, width)."""

DTYPES = (torch.float32, torch.float64)
"""What kernels are compiled for; narrower ones are computed in float32."""

ROOMS = {
    "maps": ("entmax", "segments", "normmax", "bounded", "grouping"),
    "losses": ("entmax", "normmax"),
    "dp": ("chains", "alignments", "monotonic", "lattices", "spans"),
    "factors": ("structures",),
    "hopfield": ("entmax", "memories"),
}
"""Rooms of the library, and the parts of ``calls`` that compile their kernels."""

NARROW, WIDE = 8, 8192
"""Widths on both sides of what kernels treat differently."""


@dataclass(frozen=True)
class Warmth:
    """What a warm-up did.

    Args:
        compiled: how many kernels were compiled …
        loaded: … and how many came from the cache, each counted once for every dtype.
        seconds: how long it took.
        cache: the folder that keeps them for the next process; None if none can be written.
    """

    compiled: int
    loaded: int
    seconds: float
    cache: Path | None

    def __str__(self) -> str:
        if not kernels.ENABLED:
            return "FENCHEL_KERNELS=off: there is nothing to compile."
        kept = f"The cache lies in {self.cache}." if self.cache else "There is no folder to cache them in."
        return f"Compiled {self.compiled} kernels and loaded {self.loaded} in {self.seconds:.1f} s. {kept}"


def warmup(*rooms: str, progress: Progress | None = None, dtypes: Sequence[torch.dtype] = DTYPES) -> Warmth:
    """Compile the kernels of some rooms, or of all, for float32 and float64; load those that are in the cache on disk.

    Without it, a child process compiles kernels when they could first be used, and torch operations compute until they
    are compiled. Does nothing under ``FENCHEL_KERNELS=off``.

    Args:
        rooms: what to compile: ``"maps"`` (with losses), ``"attention"``, ``"output"`` (``linear_entmax_loss``),
            ``"dp"``, ``"structures"`` (with factor graphs), ``"continuous"``, ``"memories"``, or one of the parts that
            an error lists; everything if none is named.
        progress: called with the fraction done and the name of the call that comes next. By default a progress bar on
            standard error, if that is a terminal.
        dtypes: the precisions to compile for. Two processes with one each take about half the time.

    Returns:
        How many kernels were compiled and loaded, how long it took, and where the cache lies.

    Example:
        >>> import fenchel
        >>> warmth = fenchel.warmup("maps")
        >>> fenchel.warmup("maps").compiled  # a second time there is nothing to do
        0
    """
    start = time.perf_counter()
    parts = _parts(rooms)
    if not kernels.ENABLED:
        return Warmth(0, 0, 0.0, None)
    before = _counts()
    every = calls()
    steps = [(part, dtype) for part in parts for dtype in dtypes]
    if list(dtypes) == [torch.float64]:
        steps.reverse()  # beside a process for float32, each finds in the cache what the other has compiled
    total, done = sum(len(every[part]) for part, _ in steps), 0
    with kernels.waiting(), _shown(progress) as show:
        for part, dtype in steps:
            for name, call in every[part].items():
                show(done / total, f"{name}, {str(dtype).removeprefix('torch.')}")
                _exercise(call, dtype)
                done += 1
            _mark(part, dtype)
        show(1.0)
    after = _counts()
    return Warmth(
        compiled=after[0] - before[0],
        loaded=after[1] - before[1],
        seconds=time.perf_counter() - start,
        cache=_folder(),
    )


def _shown(progress: Progress | None) -> AbstractContextManager[Progress]:
    """The function that shows progress: the one that was given, or else a bar, where there is a terminal."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function of the fraction done and a name, or None, got {progress!r}")
    if progress is None and sys.stderr.isatty():
        return bar("kernels")
    return contextlib.nullcontext(silent if progress is None else progress)


def _parts(rooms: Sequence[str]) -> list[str]:
    """The parts that rooms consist of, in the order of ``calls``."""
    known = room_names()
    for room in rooms:
        if room not in known:
            raise ValueError(f"a room must be one of {', '.join(known)}, got {room!r}")
    wanted = {part for room in rooms for part in ROOMS.get(room, (room,))}
    return [part for part in calls() if part in wanted or not rooms]


def room_names() -> tuple[str, ...]:
    """All names that ``warmup`` takes: rooms of the library, then the parts that they consist of."""
    return *ROOMS, *calls()


def _folder() -> Path | None:
    """The folder where Numba keeps compiled kernels, if it found one."""
    folders = [each.stats.cache_path for each in compiled_functions() if each.stats.cache_path]
    return Path(folders[0]) if folders else None


def _mark(part: str, dtype: torch.dtype) -> None:
    """Say on disk that a part is compiled for a dtype, and for all of them once it is."""
    store.complete(compilation.name_of(part, dtype))
    marks = [store.mark(compilation.name_of(part, each)) for each in DTYPES]
    if all(mark is not None and mark.exists() for mark in marks):
        store.complete(part)


def calls() -> dict[str, dict[str, Call]]:
    """For every part, one call for each of its kernels and for each kind of argument that it is compiled for."""
    return {
        "entmax": {
            "softmax": fenchel.softmax,
            "sparsemax": fenchel.sparsemax,
            "entmax 1.5": lambda s: fenchel.entmax(s, 1.5),
            "entmax": lambda s: fenchel.entmax(s, 1.33),
            "entmax 2.5": lambda s: fenchel.entmax(s, 2.5),
            "entmax, one alpha per row": lambda s: fenchel.entmax(s, torch.full_like(s[:, :1], 1.33)),
            "entmax, a learned alpha": lambda s: fenchel.entmax(
                s, torch.tensor(1.33, dtype=s.dtype, requires_grad=True)
            ),
            "sparsemax_loss": lambda s: fenchel.sparsemax_loss(s, _classes(s)),
            "entmax_loss 1.5": lambda s: fenchel.entmax_loss(s, _classes(s)),
            "entmax_loss": lambda s: fenchel.entmax_loss(s, _classes(s), 1.33),
            "entmax_loss 2.5": lambda s: fenchel.entmax_loss(s, _classes(s), 2.5),
            "entmax_loss, one alpha per row": lambda s: fenchel.entmax_loss(
                s, _classes(s), torch.linspace(1.5, 2.5, len(s), dtype=s.dtype).unsqueeze(1)
            ),
            "entmax_loss, a learned alpha": lambda s: fenchel.entmax_loss(
                s, _classes(s), torch.tensor(1.5, dtype=s.dtype, requires_grad=True)
            ),
            "max of entmax": lambda s: fenchel.Tsallis(1.33).max(s),
            "entmax_loss of probabilities": lambda s: fenchel.entmax_loss(s, torch.softmax(s.detach(), -1)),
        },
        "segments": {
            "groups of an index": _segments,
        },
        "normmax": {
            "normmax 2": fenchel.normmax,
            "normmax": lambda s: fenchel.normmax(s, 3.0),
            "normmax inf": lambda s: fenchel.normmax(s, float("inf")),
            "normmax, one alpha per row": lambda s: fenchel.normmax(s, torch.full_like(s[:, :1], 3.0)),
            "normmax_loss 2": lambda s: fenchel.normmax_loss(s, _classes(s)),
            "normmax_loss": lambda s: fenchel.normmax_loss(s, _classes(s), 3.0),
        },
        "bounded": {
            "constrained_softmax": lambda s: fenchel.constrained_softmax(s, _bounds(s)),
            "constrained_sparsemax": lambda s: fenchel.constrained_sparsemax(s, _bounds(s)),
            "k_subsets": lambda s: fenchel.k_subsets(s, 2),
            "k_subsets, one k per row": lambda s: fenchel.k_subsets(s, torch.full_like(s[:, :1], 2.0)),
        },
        "grouping": {
            "fusedmax": fenchel.fusedmax,
            "fusedmax, one strength per row": lambda s: fenchel.fusedmax(s, torch.full_like(s[:, :1], 0.1)),
            "oscarmax": fenchel.oscarmax,
            "tvmax2d": lambda s: fenchel.tvmax2d(s[:, :64].reshape(3, 2, -1)),
        },
        "attention": {
            "attention": lambda s: fenchel.attention(*_heads(s)),
            "attention, sparse": lambda s: fenchel.attention(*_heads(s), scale=1e3),
            "attention, any alpha, sparse": lambda s: fenchel.attention(*_heads(s), fenchel.Tsallis(1.33), scale=1e3),
            "causal attention": lambda s: fenchel.attention(*_heads(s), is_causal=True),
            "attention, any alpha": lambda s: fenchel.attention(*_heads(s), fenchel.Tsallis(1.33)),
            "causal attention, any alpha": lambda s: fenchel.attention(
                *_heads(s), fenchel.Tsallis(1.33), is_causal=True
            ),
            "attention, sparsemax": lambda s: fenchel.attention(*_heads(s), fenchel.Gini(), scale=1e3),
            "attention, one alpha per query": lambda s: _attention_per_query(s, 1.0),
            "attention, one alpha per query, sparse": lambda s: _attention_per_query(s, 1e3),
            "decoding": lambda s: fenchel.attention(_heads(s)[0][..., :1, :], *_heads(s)[1:]),
            "decoding, any alpha": lambda s: fenchel.attention(
                _heads(s)[0][..., :1, :], *_heads(s)[1:], fenchel.Tsallis(1.33)
            ),
        },
        "output": {f"linear_entmax_loss {alpha:g}": partial(_linear, alpha) for alpha in (1.33, 1.5, 2.0)},
        "chains": {
            "chains, one set of steps": lambda s: _chains(s, True),
            "chains": lambda s: _chains(s, False),
        },
        "alignments": {
            "alignments": _alignments,
        },
        "monotonic": {
            "monotonic alignments": _monotonic,
        },
        "lattices": {
            "lattices": _lattices,
        },
        "spans": {
            "spans": _spans,
        },
        "structures": {
            "SequentialSubsets": lambda s: _mixture(SequentialSubsets(2, 0.5), s[:, :8]),
            "SequentialSubsets, hard": lambda s: _mixture(_HardSubsets(2, 0.5), s[:, :8]),
            "Chain, hard": lambda s: _mixture(_HardChain(torch.eye(2)), s[:, :8].reshape(-1, 4, 2)),
            "Chain": lambda s: _mixture(Chain(torch.eye(2)), s[:, :8].reshape(-1, 4, 2)),
            "DependencyTree": lambda s: _mixture(DependencyTree(), s[:, :6].reshape(-1, 2, 3)),
            "DependencyTree, projective": lambda s: _mixture(
                DependencyTree(projective=True), s[:, :6].reshape(-1, 2, 3)
            ),
            "FactorGraph": _graph,
        },
        "continuous": {
            "densities of the line": lambda s: _densities(s, 1),
            "densities of the plane": lambda s: _densities(s, 2),
        },
        "memories": {
            "memories in chunks": _memories,
        },
    }


def compiled_functions() -> Iterator[Any]:
    """Every function of this library that Numba compiles for callers, with its ``signatures`` and ``stats``."""
    compiler = sys.modules.get("fenchel.kernels.cpu.compiler")  # not there before the first kernel is needed
    for each in compiler.COMPILED if compiler is not None else ():
        if each.py_func.__module__.partition(".")[0] == "fenchel":
            yield each


def _counts() -> tuple[int, int]:
    """How many kernels were compiled in this process, and how many loaded."""
    misses = hits = 0
    for each in compiled_functions():
        stats = each.stats
        # Where nothing can be cached, Numba counts nothing.
        misses += sum(stats.cache_misses.values()) if stats.cache_path else len(each.signatures)
        hits += sum(stats.cache_hits.values())
    return misses, hits


def _exercise(call: Call, dtype: torch.dtype) -> None:
    """Forward and backward, forward alone; narrow and wide rows."""
    for width in (NARROW, WIDE):
        scores = torch.linspace(-2, 2, 3 * width, dtype=dtype).reshape(3, width)
        with torch.no_grad():
            call(scores)
        with torch.enable_grad():
            result = call(scores.requires_grad_())
            result.backward(torch.ones_like(result))  # type: ignore[no-untyped-call]


def _bounds(scores: Tensor) -> Tensor:
    """Upper bounds of 0.7, so that no choice is one-hot."""
    return torch.full_like(scores, 0.7, requires_grad=scores.requires_grad)


def _attention_per_query(scores: Tensor, scale: float) -> Tensor:
    """Attention with an alpha of every query that is learned."""
    query, key, value = _heads(scores)
    alpha = torch.linspace(1.2, 2.5, query.shape[-2], dtype=scores.dtype).unsqueeze(-1).requires_grad_()
    return fenchel.attention(query, key, value, fenchel.Tsallis(alpha), scale=scale)


def _classes(scores: Tensor) -> Tensor:
    return torch.zeros(len(scores), dtype=torch.long)


def _segments(scores: Tensor) -> Tensor:
    """Find the groups of an index; the choice within groups is compiled with the maps."""
    Segments.of_index(torch.arange(scores.numel()))
    return scores


def _linear(alpha: float, scores: Tensor) -> Tensor:
    """The fused loss with few classes where the scores are narrow, many where they are wide; flat and peaked."""
    hidden = torch.cat([scores[:, :8], 100 * scores[:, :8]])
    bias = scores.reshape(-1, 8)[:, 0]
    target = torch.zeros(len(hidden), dtype=torch.long)
    losses = [
        fenchel.linear_entmax_loss(part, scores.reshape(-1, 8), index, bias, alpha=alpha)
        for part, index in zip(hidden.chunk(2), target.chunk(2), strict=True)
    ]
    return torch.stack(losses)


def _mixture(structure: Structure, scores: Tensor) -> Tensor:
    return fenchel.SparseMAP(structure).argmax(scores)


class _HardChain(Chain):
    """Chains whose rows all count as hard, so that the kernels for hard rows are compiled."""

    patience = 1


class _HardSubsets(SequentialSubsets):
    """The same for sequential subsets."""

    patience = 1


def _graph(scores: Tensor) -> Tensor:
    """The solution of a graph of trees over two words, in which no word is the head of two."""
    graph = fenchel.FactorGraph()
    u = graph.variables(scores[:, :6].reshape(-1, 2, 3), batch_dims=1)
    graph.add(fenchel.factors.DependencyTree(u))
    for head in range(3):
        graph.add(fenchel.factors.Budget(u[:, head], 1))
    graph.solve()
    return u.value


_SMOOTH = Gini()  # one kernel serves every Ω


def _chains(scores: Tensor, shared: bool) -> Tensor:
    """Values and expected paths of chains, and their best paths."""
    unary = scores[:, :8].reshape(3, 4, 2)
    transition = unary[0, :2] if shared else unary[:, :3, :, None] + unary[:, 1:, None]
    d = fenchel.dp.LinearChain(unary, transition, omega=_SMOOTH)
    d.map()
    return d.value + d.marginals.square().sum((1, 2))


def _alignments(scores: Tensor) -> Tensor:
    d = fenchel.dp.Alignment(scores[:, :8].reshape(3, 4, 2), omega=_SMOOTH)
    series = fenchel.dp.dtw(scores[:, :4, None], scores[:, 4:8, None], omega=_SMOOTH)
    return d.value + d.marginals.square().sum((1, 2)) + series


def _monotonic(scores: Tensor) -> Tensor:
    d = fenchel.dp.Monotonic(scores[:, :8].reshape(3, 2, 4), omega=_SMOOTH)
    d.map()
    return d.value + d.marginals.square().sum((1, 2))


def _lattices(scores: Tensor) -> Tensor:
    edges = torch.arange(8)
    d = fenchel.dp.Lattice(edges // 2, edges // 2 + 1, scores[:, :8], 5, _SMOOTH)
    return d.value + d.marginals.square().sum(1)


def _spans(scores: Tensor) -> Tensor:
    d = fenchel.dp.Constituency(scores[:, :8].reshape(3, 2, 2, 2), omega=_SMOOTH)
    return d.value + d.marginals.square().sum((1, 2, 3))


def _memories(scores: Tensor) -> Tensor:
    patterns = scores.reshape(-1, 8)
    return fenchel.hopfield.Memory(patterns, chunk_size=2 * len(patterns)).step(patterns[:3])


def _densities(scores: Tensor, dim: int) -> Tensor:
    basis = GaussianBasis(torch.zeros(1, dim), torch.eye(dim).unsqueeze(0))
    return expectation(scores[:, :dim], torch.eye(dim, dtype=scores.dtype), basis)


def _heads(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of shape (1, heads, length, 8), long where the scores are wide."""
    heads = scores.reshape(1, 3, -1, 8)
    return heads, heads, heads
