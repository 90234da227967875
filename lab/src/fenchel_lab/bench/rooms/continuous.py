"""Continuous attention, beside attention to words; and a long memory over a million tokens."""

from __future__ import annotations

import copy
import functools
import time

import torch
from torch import Tensor

from fenchel.continuous import (
    ContinuousAttention,
    Encoder,
    GaussianBasis,
    LongMemory,
    MatchedEncoder,
    PooledEncoder,
    expectation,
)
from fenchel.nn import LongMemoryAttention
from fenchel_lab.bench.inputs import bounds, normal
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload

DOCUMENTS, WORDS, FUNCTIONS = 256, 512, 128
CHUNK, CHUNKS, WINDOW = 512, 1954, 100  # 1,954 chunks of 512 are a million tokens


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_continuous(), _plane(), _long()]


def _continuous() -> Workload:
    """A query of the length of the document: scores of its words, or a vector that tells where to look."""
    basis = GaussianBasis.line(FUNCTIONS, widths=(0.1, 0.5))
    discrete, ours = "softmax attention", "ContinuousAttention"

    def softmax(query: Tensor, values: Tensor) -> Tensor:
        return (torch.softmax(query, -1).unsqueeze(-2) @ values).squeeze(-2)

    def contestant(name: str, alpha: float, encoder: Encoder) -> Contestant:
        attention = ContinuousAttention(basis, alpha, encoder)
        return Contestant(name, lambda query, values: attention(values, query))

    pooled = [contestant(f"{ours} {alpha:g}", alpha, _still(PooledEncoder(WORDS))) for alpha in (1.0, 1.5, 2.0)]
    return Workload(
        "continuous",
        f"attention over {DOCUMENTS} documents of {WORDS} words × 64 by {FUNCTIONS} functions, forward and backward",
        [Contestant(discrete, softmax), *pooled, contestant("by moments of softmax, 2", 2.0, MatchedEncoder())],
        [
            Case(
                f"{DOCUMENTS} × {WORDS} × 64",
                lambda: (normal(DOCUMENTS, WORDS), normal(DOCUMENTS, WORDS, 64, seed=1)),
            )
        ],
        bounds([each.name for each in pooled], 2.0, discrete, "largest"),
    )


def _still(encoder: Encoder) -> Encoder:
    """The same numbers at every call, and no gradients but those of the inputs."""
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(4))
    return encoder.requires_grad_(False)


def _plane() -> Workload:
    """Expected basis functions alone, on images as the paper has them: ellipses of all sizes over a grid of 10 × 10."""
    basis = GaussianBasis.grid(10, widths=(0.001**0.5,))

    def contestant(alpha: float) -> Contestant:
        def call(loc: Tensor, root: Tensor) -> Tensor:
            sigma = root @ root.mT + 0.002 * torch.eye(2, device=root.device)
            # Shapes are asked for on the meta device, where the basis must be too.
            here = basis if loc.is_cpu else copy.deepcopy(basis).to(loc.device)
            return expectation(loc, sigma, here, alpha)

        return Contestant(f"expectation {alpha:g}", call)

    return Workload(
        "plane",
        f"expected basis functions of {DOCUMENTS} densities of the plane, {len(basis)} functions, forward and backward",
        [contestant(1.0), contestant(1.5), contestant(2.0)],
        [
            Case(
                f"{DOCUMENTS} × {len(basis)}",
                lambda: (0.5 + 0.25 * normal(DOCUMENTS, 2), normal(DOCUMENTS, 2, 2, sigma=0.1, seed=1)),
            )
        ],
        [Goal("expectation 2", 10.0, "expectation 1", "largest")],
    )


def _long() -> Workload:
    """A layer with a long memory reads a million tokens: the last chunks must cost what the first ones do.

    One step from the state after a hundred chunks and one from the state after a million tokens take turns, on one
    thread, so that whatever else the machine does slows both. Threads of OpenMP are busy while they wait, and the
    processor time of several would count that.

    The memory that is measured is the peak of a stream of a million tokens beyond what is held after one of two hundred
    chunks: what a single chunk needs, and the allocator's slack. Its attention weights alone are 8 MB, and there are
    two more matrices of this size where they are computed. The tokens themselves would be 256 MB.
    """
    early, late = f"chunks {WINDOW + 1} to {2 * WINDOW}", f"last {WINDOW} chunks"

    @functools.cache
    def stream(count: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        basis = GaussianBasis.line(FUNCTIONS, widths=(0.02, 0.05))
        memory = LongMemory(basis, 64, 4, alpha=1.0, contraction=0.75, sticky=True)
        layer = LongMemoryAttention(memory, recent=CHUNK).eval()
        chunk, threads = normal(1, CHUNK, 64), torch.get_num_threads()
        first, state = None, None
        seconds = torch.zeros(2, dtype=torch.float64)
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for k in range(count - WINDOW):
                    state = layer(chunk, state).state
                    first = state if k < WINDOW else first
                states = [first, state]
                for _ in range(WINDOW):
                    for k, each in enumerate(states):
                        start = time.thread_time()
                        states[k] = layer(chunk, each).state
                        seconds[k] += time.thread_time() - start
        finally:
            torch.set_num_threads(threads)
        return seconds[0], seconds[1]

    return Workload(
        "long memory",
        f"causal attention to chunks of {CHUNK} × 64 and a sticky long memory of {FUNCTIONS} functions: "
        f"processor time of {WINDOW} chunks, one thread",
        [Contestant(early, lambda count: stream(int(count))[0]), Contestant(late, lambda count: stream(int(count))[1])],
        [
            Case(
                f"{CHUNK * CHUNKS:,} tokens",
                lambda: (torch.tensor(CHUNKS),),
                backward=False,
                small=lambda: (torch.tensor(2 * WINDOW),),
            )
        ],
        [Goal(late, 1.25, early, "largest"), Goal(late, 32 * 2**20, statistic="memory")],
        stopwatch=True,
    )
