"""Rows over threads: a small pool that follows torch's thread count and survives threads and forks.

Numba's own threading layers are unsafe after a fork or between threads. A kernel here handles a range of rows without
the GIL; rows are independent, so results do not depend on how they were dealt out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

SERIAL = 1 << 14
"""Below this many elements a thread costs more than the work."""

_pool: ThreadPoolExecutor | None = None


def _forget() -> None:
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget)


def over_rows(kernel: Callable[..., None], rows: int, elements: int, *args: object) -> None:
    """Run ``kernel(first, last, *args)`` on all rows, split among threads."""
    global _pool
    threads = min(torch.get_num_threads(), rows)
    if threads < 2 or elements < SERIAL:
        kernel(0, rows, *args)
        return
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="fenchel")
    cuts = [rows * i // threads for i in range(threads + 1)]
    waiting = [_pool.submit(kernel, cuts[i], cuts[i + 1], *args) for i in range(1, threads)]
    kernel(cuts[0], cuts[1], *args)
    for task in waiting:
        task.result()
