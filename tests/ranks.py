"""A few processes on this machine that form a process group, for tests: functions run on all ranks, by their names.

Processes are started once per module of tests. Everything is bounded in time; a rank that raises ends all of them.
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MOST = 4
_HERE = Path(__file__).parent


_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of this shape, on a rank: (2, 2), or the first few ranks."""
    return _meshes[shape]


class RankError(RuntimeError):
    """A rank raised an exception, died, or did not answer in time."""


class Ranks:
    """``MOST`` processes of one group, with smaller groups of the first 2 and 3.

    Args:
        module: where the functions are: ``function(group, rank, ranks, *args)``.
        timeout: seconds that a collective may take.
    """

    def __init__(self, module: str, timeout: float = 30.0) -> None:
        self.module = module
        context = multiprocessing.get_context("forkserver")  # imports once, for all processes of all modules
        context.set_forkserver_preload(["fenchel", "torch.distributed.tensor.parallel", "ranks"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.pipes = [], []
        for rank in range(MOST):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.store.port, other, timeout), daemon=True)
            process.start()
            other.close()
            self.processes.append(process)
            self.pipes.append(own)

    def run(
        self, name: str, *args: Any, ranks: int = MOST, seconds: float = 60.0, dies: int | None = None
    ) -> list[Any]:
        """The results of a function on the first ranks; RankError if one raises or does not answer in time.

        The rank ``dies`` must end without an answer.
        """
        job = pickle.dumps((self.module, name, ranks, args))
        for pipe in self.pipes[:ranks]:
            pipe.send_bytes(job)
        waiting, results, end = dict(enumerate(self.pipes[:ranks])), [None] * ranks, time.monotonic() + seconds
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise RankError(f"{name}: ranks {sorted(waiting)} did not answer within {seconds:g} s")
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    try:
                        failed, results[rank] = pickle.loads(pipe.recv_bytes())
                    except (EOFError, ConnectionError):
                        failed, results[rank] = rank != dies, "the process has ended"
                    else:
                        failed = failed or rank == dies
                    del waiting[rank]
                    if failed:
                        self.close()
                        raise RankError(f"{name} on rank {rank} of {ranks}: {results[rank]}")
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def started(module: str, **options: Any) -> Iterator[Ranks]:
    """Ranks that are ended at the end."""
    ranks = Ranks(module.rpartition(".")[2], **options)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(rank: int, port: int, pipe: Any, timeout: float) -> None:
    """Run functions by their names until the pipe is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path[:0] = [str(_HERE), str(_HERE / "distributed")]
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MOST, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in range(1, MOST)} | {MOST: None}
    _meshes[2, 2] = init_device_mesh("cpu", (2, 2))  # by all ranks together, as groups are
    _meshes[MOST,] = init_device_mesh("cpu", (MOST,))
    for n in range(1, MOST):
        if rank < n:
            _meshes[n,] = DeviceMesh.from_group(groups[n], "cpu")
    while True:
        try:
            module, name, ranks, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = False, getattr(importlib.import_module(module), name)(groups[ranks], rank, ranks, *args)
        except Exception:  # reported to the test
            answer = True, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


class Counted:
    """Counts collectives and the numbers that each of them carries, inside a ``with`` block."""

    NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter", "all_to_all")

    def __enter__(self) -> "Counted":
        self.calls: list[tuple[str, int]] = []
        self.real = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self.real.items():
            setattr(dist, name, self._counting(name, function))
        return self

    def _counting(self, name: str, function: Any) -> Any:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = first if isinstance(first, list) else [first]
            self.calls.append((name, sum(t.numel() for t in tensors)))
            return function(first, *args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)


def part(total: int, sizes: tuple[int, ...], rank: int) -> slice:
    """The places of a rank's part, given the sizes of all parts."""
    assert sum(sizes) == total
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def split(total: int, ranks: int, how: str) -> tuple[int, ...]:
    """Sizes of parts: ``even``, ``uneven``, or with an ``empty`` one."""
    if how == "even":
        return tuple(total // ranks + (r < total % ranks) for r in range(ranks))
    if how == "uneven":
        first = [1 + 2 * r for r in range(ranks - 1)]
        return (*first, total - sum(first))
    rest = split(total, ranks - 1, "even")
    return (*rest[:1], 0, *rest[1:])
