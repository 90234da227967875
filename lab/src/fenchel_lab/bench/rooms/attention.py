"""Attention, beside torch's own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import fenchel
from fenchel_lab.bench.inputs import MEGABYTE, normal
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_attention()]


def _attention() -> Workload:
    ours, torchs = "attention 1.5", "torch SDPA"
    long = "1 × 16384 × 64"
    decoding = "decoding: 8 × 1 query, 32768 keys × 64"

    def heads(heads: int, keys: int, queries: int | None = None, scale: float = 1.0) -> tuple[Tensor, ...]:
        query = normal(1, heads, queries or keys, 64, sigma=scale)
        return query, normal(1, heads, keys, 64, seed=1), normal(1, heads, keys, 64, seed=2)

    def case(label: str, scale: float, causal: bool) -> Case:
        return Case(label, lambda: heads(4, 4096, scale=scale), {"is_causal": causal})

    cases = [
        case("4 × 4096 × 64", 1.0, False),
        case("queries × 3", 3.0, False),
        case("causal", 1.0, True),
        case("causal, queries × 3", 3.0, True),
        Case(long, lambda: heads(1, 16384), small=lambda: heads(1, 512)),
        Case(decoding, lambda: heads(8, 32768, 1), backward=False, grad=False),
    ]
    bounds = dict(zip((each.label for each in cases), (0.45, 0.35, 0.45, 0.35, 0.45, 0.65), strict=True))
    return Workload(
        "attention",
        "attention, heads × length × width, forward and backward; decoding forward only",
        [Contestant(torchs, F.scaled_dot_product_attention), Contestant(ours, fenchel.attention)],
        cases,
        [
            *(Goal(ours, bound, torchs, "largest", (label,)) for label, bound in bounds.items()),
            Goal(ours, 300 * MEGABYTE, statistic="memory", cases=(long,)),
        ],
    )
