"""Output layers and DTensors over processes of torch.distributed, on this machine, by gloo."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

import fenchel
from fenchel import distributed as fd
from fenchel_lab.bench.inputs import class_numbers, normal
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload

TOKENS, WIDTH, CLASSES = 512, 512, 32_000
TIMEOUT = 300
"""Seconds after which processes that have not answered are ended."""

CROSS, LINEAR, LOSS, ALPHA_1 = (
    "loss_parallel cross-entropy",
    "linear_entmax_loss",
    "entmax_loss",
    "entmax_loss, alpha 1",
)
PLAIN, SPREAD, PLAIN_LOGITS, SPREAD_LOGITS = "plain, linear", "one rank, linear", "plain, logits", "one rank, logits"
LOCAL, ROWS = "plain tensor", "DTensor"
_CHILD = "from fenchel_lab.bench.rooms import distributed; distributed.main()"

Step = Callable[[], object]


def workloads() -> list[Workload]:
    """In the order of the report."""
    layer = f"{TOKENS} tokens × {WIDTH} × {CLASSES}"
    spreads = {"σ = 1": 1.0, "σ = 4": 4.0}
    sizes = {f"{TOKENS} × {CLASSES}": (TOKENS, CLASSES), "512 × 1000": (512, 1000), "64 × 1000": (64, 1000)}
    largest = f"{TOKENS} × {CLASSES}"
    return [
        _workload(
            "ranks",
            f"a step of an output layer over two processes, {layer}",
            [CROSS, LINEAR, LOSS, ALPHA_1],
            list(spreads),
            [Goal(name, 1.2, CROSS, "largest") for name in (LINEAR, LOSS, ALPHA_1)],
        ),
        _workload(
            "one rank",
            f"the functions of fenchel.distributed in a group of one, {layer}",
            [PLAIN, SPREAD, PLAIN_LOGITS, SPREAD_LOGITS],
            list(spreads),
            [Goal(SPREAD, 1.1, PLAIN, "largest"), Goal(SPREAD_LOGITS, 1.1, PLAIN_LOGITS, "largest")],
        ),
        _workload(
            "DTensor rows",
            "entmax, forward and backward, of rows that are sharded over two processes; sizes are those of a rank",
            [LOCAL, ROWS],
            list(sizes),
            [Goal(ROWS, 1.3, LOCAL, "largest", (largest,))],
        ),
    ]


def _workload(name: str, title: str, contestants: list[str], labels: list[str], goals: list[Goal]) -> Workload:
    def seconds(contestant: str, label: str) -> Tensor:
        return torch.tensor(measured(name, label)[contestant], dtype=torch.float64)

    return Workload(
        name,
        title,
        [Contestant(each, partial(seconds, each)) for each in contestants],
        [Case(label, tuple, {"label": label}, backward=False) for label in labels],
        goals,
        stopwatch=True,
    )


# -- in the processes --------------------------------------------------------------------------------------------------


def steps(name: str, label: str) -> Mapping[str, Step]:
    """The steps of a workload's contestants on this rank, for a case."""
    if name == "DTensor rows":
        return _row_steps(*(int(each) for each in label.split(" × ")))
    return _layer_steps(name == "one rank", float(label.removeprefix("σ = ")), TOKENS, WIDTH, CLASSES)


def _layer_steps(alone: bool, spread: float, tokens: int, width: int, classes: int) -> Mapping[str, Step]:
    hidden, target = normal(tokens, width), class_numbers(tokens, classes)
    weight = normal(classes, width, seed=1) * (spread / width**0.5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = weight.tensor_split(dist.get_world_size())[dist.get_rank()].clone()

    def step(loss: Callable[[Tensor, Tensor], Tensor], parameter: Tensor) -> Step:
        def run() -> None:
            h, w = hidden.detach().requires_grad_(), parameter.detach().requires_grad_()
            torch.autograd.grad(loss(h, w), (h, w))

        return run

    if alone:
        return {
            PLAIN: step(lambda h, w: fenchel.linear_entmax_loss(h, w, target), mine),
            SPREAD: step(lambda h, w: fd.linear_entmax_loss(h, w, target), mine),
            PLAIN_LOGITS: step(lambda h, w: fenchel.entmax_loss(F.linear(h, w), target), mine),
            SPREAD_LOGITS: step(lambda h, w: fd.entmax_loss(F.linear(h, w), target), mine),
        }
    sharded = distribute_tensor(weight, mesh, [Shard(0)])

    def logits(h: Tensor, w: Tensor) -> Tensor:
        return F.linear(DTensor.from_local(h, mesh, [Replicate()], run_check=False), w)

    def cross_entropy() -> None:
        h, w = hidden.detach().requires_grad_(), sharded.detach().requires_grad_()
        with loss_parallel():
            torch.autograd.grad(F.cross_entropy(logits(h, w), target), (h, w))

    return {
        CROSS: cross_entropy,
        LINEAR: step(lambda h, w: fenchel.linear_entmax_loss(h, w, target), sharded),
        LOSS: step(lambda h, w: fenchel.entmax_loss(logits(h, w), target), sharded),
        ALPHA_1: step(lambda h, w: fenchel.entmax_loss(logits(h, w), target, 1.0), sharded),
    }


def _row_steps(rows: int, columns: int) -> Mapping[str, Step]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    whole, along = 3 * normal(ranks * rows, columns), normal(ranks * rows, columns, seed=1)
    own, direction = (each.tensor_split(ranks)[dist.get_rank()].clone() for each in (whole, along))
    scores, there = (distribute_tensor(each, mesh, [Shard(0)]) for each in (whole, along))

    def step(given: Tensor, grad: Tensor) -> Step:
        leaf = given.detach().requires_grad_()
        return lambda: torch.autograd.grad(fenchel.entmax(leaf), leaf, grad)

    return {LOCAL: step(own, direction), ROWS: step(scores, there)}


def main() -> None:
    """In one of the processes: time what the arguments name, and print the seconds of every contestant."""
    name, label, rank, ranks, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks))
    print(json.dumps(timed(steps(name, label))), flush=True)
    dist.destroy_process_group()


def timed(contestants: Mapping[str, Step], turns: int = 7, shortest: float = 0.05) -> dict[str, float]:
    """Median seconds of a step, contestants by turns, all ranks together: each waits for the slowest before it begins.

    Args:
        contestants: one step of each.
        turns: how many readings.
        shortest: seconds of a reading, about; a shorter step is repeated.
    """
    readings: dict[str, list[float]] = {name: [] for name in contestants}
    repeats = {}
    for name, step in contestants.items():
        for _ in range(2):  # the first may compile kernels
            start = time.perf_counter()
            step()
            used = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(used)  # all ranks must repeat as often
        repeats[name] = max(1, round(shortest * dist.get_world_size() / float(used)))
    for _ in range(turns):
        for name, step in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                step()
            readings[name].append((time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(values) for name, values in readings.items()}


# -- starting them -----------------------------------------------------------------------------------------------------


@cache
def measured(name: str, label: str) -> dict[str, float]:
    """The seconds of every contestant of a case, on the slower rank."""
    ranks = 1 if name == "one rank" else 2
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        children = []
        try:
            for rank in range(ranks):
                command = [sys.executable, "-c", _CHILD, name, label, str(rank), str(ranks), folder]
                complaints = (Path(folder) / f"complaints-{rank}").open("w", encoding="utf-8")
                with complaints:
                    children.append(
                        subprocess.Popen(
                            command,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "FENCHEL_QUIET": "1"},
                            stdout=subprocess.PIPE,
                            stderr=complaints,
                            text=True,
                        )
                    )
            end = time.monotonic() + TIMEOUT
            answers = [child.communicate(timeout=max(0.0, end - time.monotonic()))[0] for child in children]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name}, {label}: the processes did not answer within {TIMEOUT} s") from None
        finally:
            for child in children:
                child.kill()
                child.wait()
        for rank, child in enumerate(children):
            if child.returncode:
                said = (Path(folder) / f"complaints-{rank}").read_text(encoding="utf-8").strip().splitlines()
                raise RuntimeError(f"{name}, {label}: rank {rank} failed: {' '.join(said[-1:])}")
    found = [json.loads(answer.splitlines()[-1]) for answer in answers]
    return {each: max(seconds[each] for seconds in found) for each in found[0]}
