"""Losses, and the output layer that is fused with one."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

import fenchel
from fenchel_lab.bench.inputs import CLASSES, SPREADS, class_numbers, entmax_peer, normal, row_scores
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_loss(), _linear()]


def _loss() -> Workload:
    cases = {
        bound: [
            Case(f"{rows} × {classes}, σ = {sigma:g}", partial(row_scores, rows, classes, sigma, numbers))
            for sigma in SPREADS
        ]
        for bound, rows, classes in ((0.5, 128, CLASSES), (1.2, 8192, 21))
        for numbers in [class_numbers(rows, classes)]
    }
    return Workload(
        "loss",
        "losses of rows × classes, forward and backward",
        [
            Contestant("cross_entropy", F.cross_entropy),
            Contestant("entmax_loss 1.5", fenchel.entmax_loss),
            Contestant("sparsemax_loss", fenchel.sparsemax_loss),
            entmax_peer("entmax15_loss", lambda f, s, y: f(s, y).mean()),
            entmax_peer("sparsemax_loss", lambda f, s, y: f(s, y).mean()),
        ],
        [case for group in cases.values() for case in group],
        [
            Goal(name, bound, "cross_entropy", "largest", tuple(each.label for each in group))
            for bound, group in cases.items()
            for name in ("entmax_loss 1.5", "sparsemax_loss")
        ],
    )


def _linear() -> Workload:
    tokens, width = 512, 512
    ours, torchs = "linear_entmax_loss 1.5", "linear + cross_entropy"
    peaked, flat = "peaked, σ = 3.4", "flat, σ = 0.1"

    def inputs(tokens: int, classes: int, sigma: float) -> tuple[Tensor, ...]:
        # A product of `width` independent terms: this weight gives logits of standard deviation sigma.
        weight = normal(classes, width, seed=1, sigma=sigma / width**0.5)
        return normal(tokens, width), weight, class_numbers(tokens, classes)

    def case(label: str, sigma: float) -> Case:
        return Case(label, lambda: inputs(tokens, CLASSES, sigma), small=lambda: inputs(64, 2000, sigma))

    return Workload(
        "linear",
        f"an output layer and its loss: {tokens} tokens × {width} × {CLASSES} classes, forward and backward",
        [
            Contestant(torchs, lambda h, w, y: F.cross_entropy(F.linear(h, w), y)),
            Contestant(ours, fenchel.linear_entmax_loss),
        ],
        [case(peaked, 3.4), case(flat, 0.1)],
        [
            Goal(ours, 0.5, torchs, "largest", (peaked,)),
            Goal(ours, 1.0, torchs, "largest", (flat,)),
            Goal(ours, tokens * CLASSES * 4 / 8, statistic="memory"),  # an eighth of the logits
        ],
    )
