"""Maps of rows, beside torch's softmax and the entmax package."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import fenchel
from fenchel_lab.bench.inputs import MIDDLE, bounds, entmax_peer, row_cases, row_scores
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload

_SOFTMAX = Contestant("torch.softmax", lambda s: torch.softmax(s, -1))
_SPARSEMAX = Contestant("sparsemax", fenchel.sparsemax)
_ENTMAX15 = Contestant("entmax 1.5", fenchel.entmax)


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_maps(), _entmax(), _normmax(), _bounded(), _grouped(), _custom(), _small()]


def _maps() -> Workload:
    return Workload(
        "maps",
        "sparsemax and entmax 1.5, forward and backward",
        [_SOFTMAX, _SPARSEMAX, _ENTMAX15, entmax_peer("sparsemax"), entmax_peer("entmax15")],
        row_cases(),
        [
            *bounds(["sparsemax", "entmax 1.5"], 1.0, "torch.softmax"),
            *bounds(["sparsemax", "entmax 1.5"], 2.0, "torch.softmax", "largest"),
            Goal("sparsemax", 1 / 30, "entmax.sparsemax"),
            Goal("entmax 1.5", 1 / 30, "entmax.entmax15"),
        ],
    )


def _entmax() -> Workload:
    alphas = (1.33, 1.75)
    ours = [Contestant(f"entmax {a:g}", lambda s, a=a: fenchel.entmax(s, a)) for a in alphas]
    peers = [entmax_peer("entmax_bisect", lambda f, s, a=a: f(s, a), f" {a:g}") for a in alphas]
    return Workload(
        "entmax",
        "entmax with any alpha, forward and backward",
        [_SOFTMAX, *ours, *peers],
        row_cases(),
        [
            *bounds([f"entmax {a:g}" for a in alphas], 2.5, "torch.softmax"),
            *(Goal(f"entmax {a:g}", 1 / 80, f"entmax.entmax_bisect {a:g}") for a in alphas),
        ],
    )


def _normmax() -> Workload:
    ours = [Contestant(f"normmax {a:g}", lambda s, a=a: fenchel.normmax(s, a)) for a in (2.0, 5.0)]
    return Workload(
        "normmax",
        "normmax, forward and backward",
        [_SOFTMAX, *ours],
        row_cases(),
        bounds([each.name for each in ours], 4.0, "torch.softmax"),
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
        bounds(["sparsemax", "entmax 1.5"], 6.0, "torch.softmax", "largest"),
    )
