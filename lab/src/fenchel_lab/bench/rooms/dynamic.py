"""Dynamic programs, beside the packages that have them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import fenchel
from fenchel_lab.bench.inputs import bounds, normal, peer
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload

CHAINS, STEPS, STATES = 64, 50, 20


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [
        _chain(),
        _tagging(),
        _growth(),
        _decode(),
        _alignment(),
        _soft_dtw(),
        _monotonic(),
        _trees(),
        _inside(),
    ]


def _chain() -> Workload:
    def torchcrf(package: Any, unary: Tensor, transition: Tensor, target: Tensor) -> Tensor:
        total: Tensor = _field(package, transition)(unary, target, reduction="sum")
        return -total

    def torch_struct(package: Any, unary: Tensor, transition: Tensor, target: Tensor) -> Tensor:
        # The first state's scores go with the first step; potentials are [current, previous]. The partition alone.
        edges = unary[:, 1:, :, None] + transition.t()
        edges = torch.cat([edges[:, :1] + unary[:, :1, None], edges[:, 1:]], 1)
        total: Tensor = package.LinearChainCRF(edges).partition.sum()
        return total

    ours, sparse = "LinearChain, Shannon", "LinearChain, Gini"
    return Workload(
        "chain",
        "losses of chains × steps × states, forward and backward",
        [
            Contestant(ours, partial(_field_loss, omega=fenchel.Shannon())),
            Contestant(sparse, partial(_field_loss, omega=fenchel.Gini())),
            peer("torchcrf", "pytorch-crf", torchcrf),
            peer("torch_struct", "torch-struct", torch_struct),
        ],
        [Case(f"{CHAINS} × {STEPS} × {STATES}", partial(_tags, CHAINS, STEPS))],
        [
            Goal(ours, 1 / 5, "pytorch-crf", "largest"),
            Goal(ours, 1 / 50, "torch-struct", "largest"),
            Goal(sparse, 2.5, ours, "largest"),
        ],
    )


def _tagging() -> Workload:
    """The layers that users train, made once, for sentences of different lengths."""
    tags = 21

    def batch() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(3)
        target = torch.randint(tags, (32, 50), generator=generator)
        return normal(32, 50, tags), target, torch.arange(50) < torch.randint(25, 51, (32, 1), generator=generator)

    @cache
    def layer(package: Any, device: torch.device) -> Any:
        return package.CRF(tags, batch_first=True).to(device)

    def ours(emissions: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        total: Tensor = layer(fenchel.nn, emissions.device)(emissions, mask).loss(target).sum()
        return total

    def torchcrf(package: Any, emissions: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        total: Tensor = layer(package, emissions.device)(emissions, target, mask, reduction="sum")
        return -total

    return Workload(
        "tagging",
        "the tagging layer's loss of sentences × steps × tags, forward and backward",
        [Contestant("nn.CRF", ours), peer("torchcrf", "pytorch-crf", torchcrf)],
        [Case(f"32 × 50 × {tags}", batch)],
        [Goal("nn.CRF", 1 / 5, "pytorch-crf", "largest")],
    )


def _growth() -> Workload:
    """Four times the work at once, as more chains or as longer ones, beside four calls: cost is linear in both."""

    def apart(unary: Tensor, transition: Tensor, target: Tensor, omega: fenchel.Regularizer) -> Tensor:
        parts = zip(unary.chunk(4), target.chunk(4), strict=True)
        return torch.stack([_field_loss(u, transition, t, omega) for u, t in parts]).sum()

    def longer(unary: Tensor, transition: Tensor, target: Tensor, omega: fenchel.Regularizer) -> Tensor:
        unary, target = unary.reshape(CHAINS, 4 * STEPS, STATES), target.reshape(CHAINS, -1)
        return _field_loss(unary, transition, target, omega)

    four, many, long = "four calls", "four times the chains", "four times the steps"
    return Workload(
        "growth",
        f"losses of 4 × {CHAINS} chains × {STEPS} steps × {STATES} states, forward and backward",
        [Contestant(name, call) for name, call in ((four, apart), (many, _field_loss), (long, longer))],
        [
            Case(str(omega), lambda: _tags(4 * CHAINS, STEPS), {"omega": omega})
            for omega in (fenchel.Shannon(), fenchel.Gini())
        ],
        bounds([many, long], 1.25, four, "largest"),
    )


def _decode() -> Workload:
    def torchcrf(package: Any, unary: Tensor, transition: Tensor) -> Tensor:
        _field(package, transition).decode(unary)  # a list of lists
        return unary

    return Workload(
        "decode",
        f"the best path of {CHAINS} chains × {STEPS} steps × {STATES} states",
        [
            Contestant("LinearChain.map", lambda u, w: fenchel.dp.LinearChain(u, w).map()),
            peer("torchcrf", "pytorch-crf", torchcrf),
        ],
        [Case("under no_grad", lambda: _tags(CHAINS, STEPS)[:2], backward=False, grad=False)],
        [Goal("LinearChain.map", 1 / 5, "pytorch-crf", "largest")],
    )


def _alignment() -> Workload:
    def series() -> tuple[Tensor, ...]:
        return normal(16, 128, 3), normal(16, 128, 3, seed=1)

    def tslearn(package: Any, x: Tensor, y: Tensor) -> Tensor:
        total: Tensor = package.SoftDTWLossPyTorch(gamma=1.0)(x, y).sum()
        return total

    def pysdtw(package: Any, x: Tensor, y: Tensor) -> Tensor:
        total: Tensor = package.SoftDTW(gamma=1.0, use_cuda=False)(x, y).sum()
        return total

    ours, sparse = "dtw, Shannon", "dtw, Gini"
    return Workload(
        "alignment",
        "soft-DTW of pairs of series, forward and backward",
        [
            Contestant(ours, lambda x, y: fenchel.dp.dtw(x, y).sum()),
            Contestant(sparse, lambda x, y: fenchel.dp.dtw(x, y, omega=fenchel.Gini()).sum()),
            peer("tslearn.metrics", "tslearn", tslearn),
            peer("pysdtw", "pysdtw", pysdtw),
        ],
        [Case("16 × 128 × 128, 3-d", series)],
        [
            Goal(ours, 1 / 4, "tslearn", "largest"),
            Goal(ours, 1 / 4, "pysdtw", "largest"),
            Goal(sparse, 2.5, ours, "largest"),
        ],
    )


def _trees() -> Workload:
    def torch_struct(package: Any, scores: Tensor) -> Tensor:
        expected: Tensor = package.TreeCRF(scores.unsqueeze(-1)).marginals
        return expected

    ours, sparse = "Constituency, Shannon", "Constituency, Gini"
    return Workload(
        "trees",
        "expected binary trees over words (inside-outside)",
        [
            Contestant(ours, lambda s: fenchel.dp.Constituency(s).marginals),
            Contestant(sparse, lambda s: fenchel.dp.Constituency(s, omega=fenchel.Gini()).marginals),
            peer("torch_struct", "torch-struct", torch_struct),
        ],
        [Case("32 × 20 words", lambda: (normal(32, 20, 20),), backward=False, grad=False)],
        [Goal(ours, 1 / 30, "torch-struct", "largest"), Goal(sparse, 2.5, ours, "largest")],
    )


def _inside() -> Workload:
    def torch_struct(package: Any, scores: Tensor) -> Tensor:
        total: Tensor = package.TreeCRF(scores.unsqueeze(-1)).partition.sum()
        return total

    ours = "Constituency, Shannon"
    return Workload(
        "inside",
        "log-partition functions of binary trees over words, forward and backward",
        [
            Contestant(ours, lambda s: fenchel.dp.Constituency(s).value.sum()),
            peer("torch_struct", "torch-struct", torch_struct),
        ],
        [Case("32 × 20 words", lambda: (normal(32, 20, 20),))],
        [Goal(ours, 1 / 30, "torch-struct", "largest")],
    )


def _soft_dtw() -> Workload:
    def series() -> tuple[Tensor, ...]:
        return normal(32, 100, 3), normal(32, 100, 3, seed=1)

    def pysdtw(package: Any, x: Tensor, y: Tensor) -> Tensor:
        total: Tensor = package.SoftDTW(gamma=1.0, use_cuda=False)(x, y).sum()
        return total

    ours = "nn.SoftDTW"
    return Workload(
        "soft-dtw",
        "the module, forward and backward",
        [
            Contestant(ours, lambda x, y: fenchel.nn.SoftDTW()(x, y).sum()),
            Contestant("normalize=True", lambda x, y: fenchel.nn.SoftDTW(normalize=True)(x, y).sum()),
            peer("pysdtw", "pysdtw", pysdtw),
        ],
        [Case("32 × 100 × 100, 3-d", series)],
        [Goal(ours, 1 / 4, "pysdtw", "largest")],
    )


def _monotonic() -> Workload:
    """A batch of speech synthesis: the search beside one that is written in torch."""

    def loop(scores: Tensor) -> Tensor:
        """The search in torch, frame by frame: what is written where there is no compiled one."""
        batch, tokens, frames = scores.shape
        value = scores.new_full((batch, tokens + 1), -torch.inf)
        value[:, 1] = scores[:, 0, 0]
        moves = []
        for t in range(1, frames):
            moves.append(value[:, :-1] > value[:, 1:])
            best = torch.maximum(value[:, :-1], value[:, 1:]) + scores[:, :, t]
            value = torch.cat([value[:, :1], best], 1)
        token = torch.full((batch, 1), tokens - 1)
        path = [token]
        for move in reversed(moves):
            token = token - move.gather(1, token).long()
            path.append(token)
        return torch.cat(path[::-1], 1)

    ours = "Monotonic.map"
    return Workload(
        "monotonic",
        "the best alignment of tokens to frames",
        [Contestant(ours, lambda s: fenchel.dp.Monotonic(s).map()), Contestant("a loop over frames", loop)],
        [Case("8 × 150 × 600", lambda: (normal(8, 150, 600),), backward=False, grad=False)],
        [Goal(ours, 1 / 4, "a loop over frames", "largest")],
    )


def _field_loss(unary: Tensor, transition: Tensor, target: Tensor, omega: fenchel.Regularizer) -> Tensor:
    return fenchel.dp.LinearChain(unary, transition, omega=omega).loss(target).sum()


def _field(package: Any, transition: Tensor) -> Any:
    """A conditional random field of pytorch-crf with these scores of steps, and none of ends."""
    field = package.CRF(transition.shape[0], batch_first=True)
    del field.transitions
    field.transitions = transition
    for name in ("start_transitions", "end_transitions"):
        torch.nn.init.zeros_(getattr(field, name)).requires_grad_(False)
    return field


def _tags(chains: int, steps: int) -> tuple[Tensor, ...]:
    target = torch.randint(STATES, (chains, steps), generator=torch.Generator().manual_seed(3))
    return normal(chains, steps, STATES), normal(STATES, STATES, seed=1), target
