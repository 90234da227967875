"""Maps of rows, beside torch's softmax and the entmax package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

import fenchel
from fenchel_lab.bench.inputs import CLASSES, MIDDLE, SHAPES, bounds, entmax_peer, normal, row_cases, row_scores
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload

_SOFTMAX = Contestant("torch.softmax", lambda s: torch.softmax(s, -1))
_SPARSEMAX = Contestant("sparsemax", fenchel.sparsemax)
_ENTMAX15 = Contestant("entmax 1.5", fenchel.entmax)


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [
        _maps(),
        _narrow(),
        _entmax(),
        _steep(),
        _normmax(),
        _torch_path(),
        _bounded(),
        _grouped(),
        _custom(),
        _segments(),
        _small(),
    ]


def _maps() -> Workload:
    return Workload(
        "maps",
        "sparsemax and entmax 1.5, forward and backward",
        [_SOFTMAX, _SPARSEMAX, _ENTMAX15, entmax_peer("sparsemax"), entmax_peer("entmax15")],
        row_cases(),
        [
            *bounds(["sparsemax", "entmax 1.5"], 0.7, "torch.softmax"),
            *bounds(["sparsemax", "entmax 1.5"], 1.3, "torch.softmax", "largest"),
            Goal("sparsemax", 1 / 50, "entmax.sparsemax"),
            Goal("entmax 1.5", 1 / 50, "entmax.entmax15"),
        ],
    )


def _narrow() -> Workload:
    return Workload(
        "narrow",
        "sparsemax and entmax 1.5 of narrow rows, forward and backward",
        [_SOFTMAX, _SPARSEMAX, _ENTMAX15],
        row_cases([(8192, 32), (4096, 64), (2048, 128)], [0.1, 1.0, 4.0]),
        bounds(["sparsemax", "entmax 1.5"], 1.3, "torch.softmax", "largest"),
    )


def _entmax() -> Workload:
    ours = _members("entmax", fenchel.entmax, (1.33, 1.75))
    peers = [_bisection(1.33), _bisection(1.75)]
    return Workload(
        "entmax",
        "entmax with any alpha, forward and backward",
        [_SOFTMAX, *ours, *peers],
        row_cases(),
        [
            *bounds([each.name for each in ours], 1.5, "torch.softmax"),
            *(Goal(mine.name, 1 / 100, theirs.name) for mine, theirs in zip(ours, peers, strict=True)),
        ],
    )


def _steep() -> Workload:
    ours = _members("entmax", fenchel.entmax, (2.5, 3.0))
    return Workload(
        "steep",
        "entmax with alpha above 2, forward and backward",
        [_SOFTMAX, *ours],
        row_cases(),
        bounds([each.name for each in ours], 4.0, "torch.softmax"),
    )


def _normmax() -> Workload:
    ours = _members("normmax", fenchel.normmax, (1.1, 2.0, 5.0, 20.0, torch.inf))
    return Workload(
        "normmax",
        "normmax, forward and backward",
        [_SOFTMAX, *ours],
        row_cases(),
        bounds([each.name for each in ours], 4.0, "torch.softmax"),
    )


def _torch_path() -> Workload:
    """What devices without kernels run, here on the CPU: at least twice as fast as the peer on wide rows."""
    pairs = {
        "sparsemax": entmax_peer("sparsemax"),
        "entmax 1.5": entmax_peer("entmax15"),
        "entmax 1.33": _bisection(1.33),
    }
    wide = tuple(each.label for each in row_cases([shape for shape in SHAPES if shape[1] >= CLASSES]))
    return Workload(
        "torch path",
        "maps without kernels (FENCHEL_KERNELS=off), forward and backward",
        [_SOFTMAX, _SPARSEMAX, _ENTMAX15, *_members("entmax", fenchel.entmax, (1.33,)), *pairs.values()],
        row_cases(),
        [
            *(Goal(ours, 1.0, peer.name, "largest") for ours, peer in pairs.items()),
            *(Goal(ours, 0.5, peer.name, "largest", wide) for ours, peer in pairs.items()),
        ],
        environment={"FENCHEL_KERNELS": "off"},
    )


def _bounded() -> Workload:
    def capped(s: Tensor) -> Tensor:
        return fenchel.constrained_sparsemax(s, 4.0 / s.shape[-1])

    names = ["constrained_sparsemax", "k_subsets 5"]
    return Workload(
        "bounded",
        "bounds and budgets, forward and backward",
        [
            _SOFTMAX,
            Contestant(names[0], capped),
            Contestant(names[1], lambda s: fenchel.k_subsets(s, 5)),
            entmax_peer("budget_bisect", lambda f, s: f(s, budget=5)),
        ],
        row_cases(MIDDLE, [1.0]),
        [*bounds(names, 3.0, "torch.softmax", "largest"), Goal(names[1], 1 / 10, "entmax.budget_bisect")],
    )


def _grouped() -> Workload:
    return Workload(
        "grouped",
        "groups, forward and backward",
        [
            _SOFTMAX,
            Contestant("fusedmax 0.1", fenchel.fusedmax),
            Contestant("oscarmax 0.1", fenchel.oscarmax),
            Contestant("oscarmax 0.001", lambda s: fenchel.oscarmax(s, 0.001)),
        ],
        row_cases(MIDDLE, [1.0]),
        [
            *bounds(["fusedmax 0.1"], 6.0, "torch.softmax", "largest"),
            *bounds(["oscarmax 0.1", "oscarmax 0.001"], 12.0, "torch.softmax", "largest"),
        ],
    )


def _custom() -> Workload:
    omega = fenchel.Custom(lambda p: 0.5 * (p * p).sum(-1))
    return Workload(
        "custom",
        "an Ω of one's own, ½‖p‖², forward and backward",
        [_SPARSEMAX, Contestant("Custom", omega.argmax)],
        row_cases([(256, 64)], [1.0]),
        bounds(["Custom"], 100.0, "sparsemax"),
    )


def _small() -> Workload:
    row = partial(row_scores, 1, 64, 1.0)
    return Workload(
        "small",
        "one row of 64 scores, forward only",
        [_SOFTMAX, _SPARSEMAX, _ENTMAX15],
        [Case("under no_grad", row, backward=False, grad=False), Case("plain tensors", row, backward=False)],
        bounds(["sparsemax", "entmax 1.5"], 4.0, "torch.softmax", "largest"),
    )


def _members(name: str, function: Callable[[Tensor, float], Tensor], alphas: Iterable[float]) -> list[Contestant]:
    """A map with several parameters."""
    return [Contestant(f"{name} {alpha:g}", lambda s, alpha=alpha: function(s, alpha)) for alpha in alphas]


def _bisection(alpha: float) -> Contestant:
    return entmax_peer("entmax_bisect", lambda f, s: f(s, alpha), f" {alpha:g}")


def _segments() -> Workload:
    """Rows of one length, once as a matrix and once as groups of one long row, in the order of the groups."""

    def padded(scores: Tensor, index: Tensor) -> Tensor:
        return fenchel.entmax(scores)

    def grouped(scores: Tensor, index: Tensor) -> Tensor:
        return fenchel.segment_entmax(scores.flatten(), index).view_as(scores)

    def case(rows: int, width: int) -> Case:
        return Case(f"{rows} × {width}", lambda: (normal(rows, width), _sorted_index(rows, width)))

    return Workload(
        "segments",
        "segment_entmax of groups of one size, forward and backward",
        [Contestant("entmax of rows", padded), Contestant("segment_entmax", grouped)],
        [case(256, 64), case(2048, 64), case(1000, 1000), case(10000, 100)],
        [Goal("segment_entmax", 2.0, "entmax of rows", "largest")],
    )


def _sorted_index(rows: int, width: int) -> Tensor:
    return torch.arange(rows).repeat_interleave(width)
