"""Attention, beside torch's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fenchel
from fenchel.nn import MultiheadAttention
from fenchel_lab.bench.inputs import MEGABYTE, normal
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_attention(), _multihead()]


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
        Case("4 × 2048 × 64, queries × 0.1", lambda: heads(4, 2048, scale=0.1)),
        Case(decoding, lambda: heads(8, 32768, 1), backward=False, grad=False),
    ]
    bounds = dict(zip((each.label for each in cases), (0.4, 0.3, 0.45, 0.35, 0.4, 1.5, 0.55), strict=True))
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


def _multihead() -> Workload:
    """The module beside its parts written out: no matrix of length × length in either."""
    length, width, heads = 3072, 256, 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = MultiheadAttention(width, heads, omega=fenchel.Tsallis(1.5), batch_first=True).requires_grad_(False)
    parts, module = "projections and attention", "MultiheadAttention"

    def projected(x: Tensor) -> Tensor:
        if x.is_meta:  # asked for its shape alone
            return x
        joint = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
        query, key, value = joint.reshape(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = fenchel.attention(query, key, value)
        return F.linear(mixed.transpose(1, 2).flatten(-2), layer.out_proj.weight, layer.out_proj.bias)

    def inputs(length: int) -> tuple[Tensor]:
        return (normal(1, length, width, sigma=3.0),)

    return Workload(
        "multihead",
        f"nn.MultiheadAttention(need_weights=False), {length} × {width}, {heads} heads, forward and backward",
        [Contestant(parts, projected), Contestant(module, lambda x: layer(x, x, x, need_weights=False)[0])],
        [Case(f"L = {length}", lambda: inputs(length), small=lambda: inputs(256))],
        [
            Goal(module, 1.1, parts, "largest"),
            Goal(module, 4.0 * length**2, statistic="memory"),  # the weights of one head
        ],
    )
