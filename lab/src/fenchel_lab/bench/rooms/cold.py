"""The first call: seconds until a process with an empty cache has its first answer, imports not counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

import fenchel
from fenchel import dp, factors
from fenchel.continuous import GaussianBasis, expectation
from fenchel.hopfield import HopfieldPooling, Memory
from fenchel.structures import DependencyTree
from fenchel_lab.bench.inputs import class_numbers, normal
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload

FORWARD, BACKWARD = "forward", "forward and backward"
WALL = ", wall time"
_CHILD = "from fenchel_lab.bench.rooms import cold; cold.main()"

Function = Callable[[Tensor], Tensor]
"""A function of scores, (64, 512)."""


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [
        _cold("cold", "maps, losses, attention and pooling", row_calls(), {FORWARD: 1.0, BACKWARD: 2.0}),
        _cold("cold programs", "dynamic programs and structures", program_calls(), {BACKWARD: 3.0}),
    ]


def _cold(name: str, title: str, calls: dict[str, Function], bounds: dict[str, float]) -> Workload:
    """Bounds are seconds of the calling thread; the wall time may be twice as long."""
    contestants = [FORWARD, BACKWARD, FORWARD + WALL, BACKWARD + WALL]
    goals = {**bounds, **{each + WALL: 2.0 * bound for each, bound in bounds.items()}}
    return Workload(
        name,
        f"first call with an empty cache, {title}: processor time of the calling thread, and wall time",
        [Contestant(each, lambda label, each=each: torch.tensor(_seconds(label)[each])) for each in contestants],
        [Case(label, tuple, {"label": label}, backward=False) for label in calls],
        [Goal(each, bound, statistic="seconds") for each, bound in goals.items()],
        stopwatch=True,
    )


def row_calls() -> dict[str, Function]:
    """Maps, losses, attention and pooling."""

    def attend(s: Tensor) -> Tensor:
        query, key, value = (s.reshape(64, 8, 64).transpose(0, 1) + shift for shift in range(3))
        return fenchel.attention(query, key, value)

    def pool(s: Tensor) -> Tensor:
        pooled: Tensor = HopfieldPooling(64, num_heads=4)(s.reshape(8, -1, 64))
        return pooled

    return {
        "sparsemax": fenchel.sparsemax,
        "entmax 1.5": fenchel.entmax,
        "entmax 1.3": lambda s: fenchel.entmax(s, 1.3),
        "entmax 2.5": lambda s: fenchel.entmax(s, 2.5),
        "entmax, one alpha per row": lambda s: fenchel.entmax(s, torch.linspace(1.1, 2.5, len(s)).unsqueeze(1)),
        "segment_entmax": lambda s: fenchel.segment_entmax(s.flatten(), class_numbers(s.numel(), 500).sort().values),
        "normmax 2": fenchel.normmax,
        "normmax 5": lambda s: fenchel.normmax(s, 5.0),
        "constrained_sparsemax": lambda s: fenchel.constrained_sparsemax(s, 0.01),
        "constrained_softmax": lambda s: fenchel.constrained_softmax(s, 0.01),
        "k_subsets": lambda s: fenchel.k_subsets(s, 5),
        "fusedmax": fenchel.fusedmax,
        "oscarmax": fenchel.oscarmax,
        "tvmax2d": lambda s: fenchel.tvmax2d(s.reshape(64, 16, 32)),
        "sparsemax_loss": lambda s: fenchel.sparsemax_loss(s, class_numbers(*s.shape)),
        "entmax_loss 1.5": lambda s: fenchel.entmax_loss(s, class_numbers(*s.shape)),
        "linear_entmax_loss": lambda s: fenchel.linear_entmax_loss(s, normal(2000, 512), class_numbers(64, 2000)),
        "attention": attend,
        "HopfieldPooling": pool,
        "expectation": lambda s: expectation(s[:, :1], 0.1 * torch.eye(1), GaussianBasis.line(16, widths=(0.1,))),
        "Memory in chunks": lambda s: Memory(s, chunk_size=32).step(s[:8]),
    }


def program_calls() -> dict[str, Function]:
    """A chain, an alignment, a tree, a factor graph."""

    def graph(s: Tensor) -> Tensor:
        graph = fenchel.FactorGraph()
        u = graph.variables(s[:8, :72].reshape(8, 8, 9), batch_dims=1)
        graph.add(factors.DependencyTree(u))
        graph.add(factors.Budget(u[:, 1], 3))
        graph.solve()
        return u.value

    return {
        "LinearChain": lambda s: dp.LinearChain(s.reshape(64, 32, 16), normal(16, 16)).marginals,
        "Monotonic": lambda s: dp.Monotonic(s.reshape(16, 32, 64)).marginals,
        "Lattice": lambda s: dp.Lattice(torch.arange(511) // 2, torch.arange(511) // 2 + 1, s[:, :511], 257).marginals,
        "Constituency": lambda s: dp.Constituency(s.reshape(8, 64, 64)[:, :20, :20]).marginals,
        "dtw": lambda s: dp.dtw(s.reshape(8, 64, 64), normal(8, 64, 64, seed=1)),
        "SparseMAP of trees": lambda s: fenchel.SparseMAP(DependencyTree()).argmax(s[:, :72].reshape(64, 8, 9)),
        "FactorGraph": graph,
    }


@cache
def _seconds(label: str) -> dict[str, float]:
    """The seconds of one call in a new process whose cache is empty."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "FENCHEL_QUIET": "1"}
        if environment.get("FENCHEL_KERNELS") != "off":
            environment["FENCHEL_KERNELS"] = "on"  # as a user calls it, not waiting for kernels
        command = [sys.executable, "-c", _CHILD, label]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the first call of {label} failed: {done.stderr.strip().splitlines()[-1:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    """In the new process: print the seconds of the call that the argument names."""
    function = {**row_calls(), **program_calls()}[sys.argv[1]]
    scores = normal(64, 512).requires_grad_()
    torch.autograd.grad(torch.softmax(scores, -1).sum(), scores)  # torch's own first call
    print(json.dumps(measure(function, scores)))


def measure(function: Function, scores: Tensor) -> dict[str, float]:
    """Seconds of the calling thread and of the clock on the wall: until the output, and until its gradient."""
    started, wall = time.thread_time(), time.perf_counter()
    output = function(scores)
    forward = time.thread_time() - started, time.perf_counter() - wall
    torch.autograd.grad(output, scores, torch.ones_like(output))
    return {
        FORWARD: forward[0],
        FORWARD + WALL: forward[1],
        BACKWARD: time.thread_time() - started,
        BACKWARD + WALL: time.perf_counter() - wall,
    }
