"""Neighbours: an input beside one like it that must not be much faster. One thread, forward and backward."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fenchel
from fenchel_lab.bench.inputs import class_numbers, normal
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload

Call = Callable[[], object]
"""One run: forward, and backward where there is one."""

NEIGHBOUR, INPUT = "neighbour", "input"
NEAR, FAR = 3.0, 5.0


@dataclass(frozen=True)
class Pair:
    """An input and its neighbour.

    Args:
        label: both, as tables show them.
        make: makes the neighbour's run and the input's.
        at_most: the bound of their ratio.
    """

    label: str
    make: Callable[[], tuple[Call, Call]]
    at_most: float = FAR


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [
        _beside("cliffs", "inputs beside their neighbours, one thread", pairs()),
        _beside("compiled", "torch.compile beside the same eager, one thread", compiled_pairs()),
    ]


def pairs() -> list[Pair]:
    """Inputs beside neighbours that differ in one parameter, in order of the rooms."""
    heads = partial(_heads, 8, 512, 32)
    rows, classes, few = (128, 1000), (8192, 21), (64, 1000)
    return [
        *(
            Pair(f"attention 8 × 512 × 32, one head's alpha {odd:g} beside 1.5", partial(_one_head, heads, odd), NEAR)
            for odd in (1.0003, 1.0, torch.inf)
        ),
        *(
            Pair(f"entmax 64 × 1000, one row's alpha {odd:g} beside 1.5", partial(_one_row, odd), NEAR)
            for odd in (1.0, 1.0005, torch.inf)
        ),
        Pair("entmax 2.5, 1 × 100,000, equal scores beside random ones", _equal, NEAR),
        *(
            Pair(
                f"entmax 128 × 1000, alpha {odd:g} beside {beside:g}",
                partial(_two, rows, lambda s, a: fenchel.entmax(s, a), beside, odd),
                NEAR,
            )
            for odd, beside in ((1.0005, 1.0015), (0.9995, 0.9985), (1001.0, 999.0))
        ),
        *(
            Pair(
                f"normmax 128 × 1000, alpha {odd:g} beside 2",
                partial(_two, rows, lambda s, a: fenchel.normmax(s, a), 2.0, odd),
            )
            for odd in (1.24, 10.1, torch.inf)
        ),
        Pair("entmax_loss 128 × 1000, a trained alpha beside a fixed one", _trained_loss),
        Pair("entmax_loss 128 × 1000, alpha 1.2 with soft targets beside 1.5 with classes", _soft_targets),
        *(
            Pair(f"entmax_loss 8192 × 21, alpha {alpha:g} beside cross_entropy", partial(_loss, classes, alpha))
            for alpha in (1.5, 1.0, 2.5)
        ),
        Pair("linear_entmax_loss 256 × 64 → 8000, a trained alpha beside 1.5", partial(_linear, None)),
        *(
            Pair(f"linear_entmax_loss 256 × 64 → 8000, alpha {alpha:g} beside 1.5", partial(_linear, alpha))
            for alpha in (1.0005, 1.0)
        ),
        Pair("Fused loss 64 × 1000 beside cross_entropy", partial(_fused_loss, few)),
        Pair("constrained_softmax 128 × 1000, scores × 10 beside × 3", partial(_capped, rows)),
        Pair(
            "fusedmax 128 × 1000, strength 1 beside 0.1",
            lambda: _two(rows, lambda s, strength: fenchel.fusedmax(s, strength), 0.1, 1.0),
        ),
        Pair(
            "tvmax2d 32 × 14 × 14, strength 1 beside 0.1",
            lambda: _two((32, 14, 14), lambda s, strength: fenchel.tvmax2d(s, strength), 0.1, 1.0),
        ),
        Pair("attention 8 × 1024 × 64, bfloat16 autocast beside float32", _autocast),
        Pair("attention 4 × 512 × 64, queries × 0.1, forward, beside SDPA", partial(_flat, "SDPA")),
        Pair("attention 4 × 512 × 64, queries × 0.1, forward, beside plain entmax", partial(_flat, "entmax")),
        Pair("Memory.step, 128 queries × 100,000 patterns, wide supports, beside plain torch", _wide_supports),
        Pair("MultiheadAttention, need_weights=False, L = 3072, beside attention", _multihead),
        Pair("entmax 128 × 1000, DTensor of sharded rows beside a plain tensor", partial(_sharded, rows)),
    ]


def compiled_pairs() -> list[Pair]:
    """Calls of a compiled function beside the same function; none where there is no C++ compiler."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        return []
    target, classes = class_numbers(256, 8000), class_numbers(128, 1000)
    calls: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
        "attention 8 × 512 × 32": (fenchel.attention, partial(_heads, 8, 512, 32)),
        "entmax_loss 128 × 1000": (lambda s: fenchel.entmax_loss(s, classes), lambda: [normal(128, 1000)]),
        "linear_entmax_loss 256 × 64 → 8000": (
            lambda h, w: fenchel.linear_entmax_loss(h, w, target),
            lambda: [normal(256, 64), normal(8000, 64, seed=1)],
        ),
    }

    def make(function: Callable[..., Tensor], inputs: Callable[[], list[Tensor]]) -> tuple[Call, Call]:
        return _both_ways(function, inputs()), _both_ways(torch.compile(function, fullgraph=True), inputs())

    return [
        Pair(f"{name}, compiled", partial(make, function, inputs), NEAR) for name, (function, inputs) in calls.items()
    ]


def _beside(name: str, title: str, pairs: list[Pair]) -> Workload:
    return Workload(
        name,
        title,
        [
            Contestant(NEIGHBOUR, lambda pair: pair()[0]()),
            Contestant(INPUT, lambda pair: pair()[1]()),
        ],
        [Case(each.label, tuple, {"pair": cache(each.make)}, backward=False) for each in pairs],
        [Goal(INPUT, each.at_most, NEIGHBOUR, "largest", (each.label,)) for each in pairs],
        environment={"OMP_NUM_THREADS": "1"},
    )


def _both_ways(function: Callable[..., Tensor], inputs: list[Tensor], *parameters: Tensor) -> Call:
    """A run of a function: forward, and the gradient of inputs and parameters along a fixed direction."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    output = function(*leaves)
    direction = torch.ones_like(output) if not output.ndim else normal(*output.shape, seed=4)
    wanted = [*leaves, *parameters]
    return lambda: torch.autograd.grad(function(*leaves), wanted, direction)


def _two(
    shape: tuple[int, ...], map: Callable[[Tensor, float], Tensor], beside: float, odd: float
) -> tuple[Call, Call]:
    """A map of scores with two parameters."""
    return (
        _both_ways(lambda s: map(s, beside), [normal(*shape)]),
        _both_ways(lambda s: map(s, odd), [normal(*shape)]),
    )


def _heads(heads: int, length: int, width: int, scale: float = 1.0) -> list[Tensor]:
    query, key, value = (normal(1, heads, length, width, seed=seed) for seed in range(3))
    return [scale * query, key, value]


def _one_head(heads: Callable[[], list[Tensor]], odd: float) -> tuple[Call, Call]:
    def run(alpha: float) -> Call:
        alphas = torch.full((8, 1, 1), 1.5)
        alphas[3] = alpha
        omega = fenchel.Tsallis(alphas)
        return _both_ways(lambda q, k, v: fenchel.attention(q, k, v, omega), heads())

    return run(1.5), run(odd)


def _one_row(odd: float) -> tuple[Call, Call]:
    def run(alpha: float) -> Call:
        alphas = torch.full((64, 1), 1.5)
        alphas[7] = alpha
        return _both_ways(lambda s: fenchel.entmax(s, alphas), [normal(64, 1000)])

    return run(1.5), run(odd)


def _equal() -> tuple[Call, Call]:
    run = partial(_both_ways, lambda s: fenchel.entmax(s, 2.5))
    return run([normal(1, 100_000)]), run([torch.zeros(1, 100_000)])


def _trained_loss() -> tuple[Call, Call]:
    target, alpha = class_numbers(128, 1000), torch.tensor(1.5, requires_grad=True)
    return (
        _both_ways(lambda s: fenchel.entmax_loss(s, target), [normal(128, 1000)]),
        _both_ways(lambda s: fenchel.entmax_loss(s, target, alpha), [normal(128, 1000)], alpha),
    )


def _soft_targets() -> tuple[Call, Call]:
    target, soft = class_numbers(128, 1000), torch.softmax(normal(128, 1000, seed=5), -1)
    return (
        _both_ways(lambda s: fenchel.entmax_loss(s, target), [normal(128, 1000)]),
        _both_ways(lambda s: fenchel.entmax_loss(s, soft, 1.2), [normal(128, 1000)]),
    )


def _loss(shape: tuple[int, int], alpha: float) -> tuple[Call, Call]:
    target = class_numbers(*shape)
    return (
        _both_ways(lambda s: F.cross_entropy(s, target), [normal(*shape)]),
        _both_ways(lambda s: fenchel.entmax_loss(s, target, alpha), [normal(*shape)]),
    )


def _linear(odd: float | None) -> tuple[Call, Call]:
    target = class_numbers(256, 8000)
    inputs = [normal(256, 64), normal(8000, 64, seed=1, sigma=0.125)]
    alpha = torch.tensor(1.5, requires_grad=True)
    parameters = (alpha,) if odd is None else ()
    other = alpha if odd is None else odd
    return (
        _both_ways(lambda h, w: fenchel.linear_entmax_loss(h, w, target), inputs),
        _both_ways(lambda h, w: fenchel.linear_entmax_loss(h, w, target, alpha=other), inputs, *parameters),
    )


def _fused_loss(shape: tuple[int, int]) -> tuple[Call, Call]:
    target, omega = class_numbers(*shape), fenchel.Fused(0.1)
    return (
        _both_ways(lambda s: F.cross_entropy(s, target), [normal(*shape)]),
        _both_ways(lambda s: fenchel.fy_loss(s, target, omega), [normal(*shape)]),
    )


def _capped(shape: tuple[int, int]) -> tuple[Call, Call]:
    run = partial(_both_ways, lambda s: fenchel.constrained_softmax(s, 4.0 / shape[1]))
    return run([normal(*shape, sigma=3.0)]), run([normal(*shape, sigma=10.0)])


def _autocast() -> tuple[Call, Call]:
    plain = _both_ways(fenchel.attention, _heads(8, 1024, 64))

    def narrow(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fenchel.attention(query, key, value).float()

    return plain, _both_ways(narrow, _heads(8, 1024, 64))


def _flat(beside: str) -> tuple[Call, Call]:
    query, key, value = _heads(4, 512, 64, 0.1)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fenchel.entmax(query @ key.mT / 8.0) @ value

    neighbour = {"SDPA": F.scaled_dot_product_attention, "entmax": plain}[beside]
    return lambda: neighbour(query, key, value), lambda: fenchel.attention(query, key, value)


def _wide_supports() -> tuple[Call, Call]:
    """Scores of a standard deviation that gives 1.5-entmax supports of some 20,000 of 100,000 patterns."""
    patterns, query = normal(100_000, 64, seed=1), 0.05 * normal(128, 64)
    memory = fenchel.hopfield.Memory(patterns)
    return lambda: torch.softmax(query @ patterns.T, -1) @ patterns, lambda: memory.step(query)


def _multihead() -> tuple[Call, Call]:
    length, width, heads = 3072, 256, 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = fenchel.nn.MultiheadAttention(width, heads, omega=fenchel.Tsallis(1.5), batch_first=True)
    return (
        _both_ways(fenchel.attention, _heads(heads, length, width // heads)),
        _both_ways(lambda x: layer(x, x, x, need_weights=False)[0], [normal(1, length, width)]),
    )


def _sharded(shape: tuple[int, int]) -> tuple[Call, Call]:
    """A group of this process alone: what the bookkeeping costs, without communication."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (1,))
    scores, direction = (distribute_tensor(normal(*shape, seed=seed), mesh, [Shard(0)]) for seed in (0, 4))
    scores.requires_grad_()
    return (
        _both_ways(fenchel.entmax, [normal(*shape)]),
        lambda: torch.autograd.grad(fenchel.entmax(scores), scores, direction),
    )
