"""Whether the kernels of a room are compiled: until they are, a child process compiles them and torch operations serve.

A room is a group of kernels that ``fenchel.warmup`` compiles together. The child fills the cache on disk, and marks the
room as complete; a process that finds the mark uses the kernels from then on. It changes from torch operations to
kernels at most once per room and precision, and never where kernels are waited for: under ``FENCHEL_KERNELS=wait``,
inside ``waiting()`` and under ``torch.use_deterministic_algorithms(True)``. The loops of structures, active sets and
trees, have no counterpart in torch operations: Python interprets them meanwhile (``run``).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from fenchel import kernels
from fenchel.kernels import store

if TYPE_CHECKING:
    import numpy as np

INTERPRETED = "structures"
"""The room whose kernels Python interprets until they are compiled."""

_LARGE = 1 << 17  # elements per row from which Python takes longer than the compiler
_PAUSE = 0.25  # seconds between two looks at the disk
_TRIES = 2  # child processes that may fail before kernels are compiled in this one
_CHILD = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
if hasattr(os, "nice"):
    os.nice(10)
from fenchel.__main__ import main
from fenchel.kernels import store
if not os.path.isdir(sys.argv[2]):
    sys.exit()  # a temporary folder, which is gone already
with store.claimed(sys.argv[3]) as is_free:
    if is_free:  # else another process has begun meanwhile
        main(["warmup", *sys.argv[4:]])
"""

Key = tuple[str, torch.dtype | None]

_known: set[Key] = set()  # whose kernels are used from now on
_compilations: dict[Key, _Compilation] = {}
_starting = threading.Lock()
_waiting = 0


def ready(room: str, dtype: torch.dtype | None = None) -> bool:
    """Whether kernels of a room are to be used now, for tensors of a dtype; None stands for every dtype.

    The first time that they are neither in the cache nor waited for, a child process begins to compile them.
    """
    key = (room, dtype)
    if key in _known:
        return True
    if kernels.WAIT or _waiting or torch.are_deterministic_algorithms_enabled() or _is_complete(key):
        _known.add(key)
        return True
    return False


def run(kernel: Any, rows: int, elements: int, *args: np.ndarray[Any, Any] | int) -> None:
    """``kernel(first, last, *args)`` on all rows: compiled and shared among threads, or else interpreted.

    While a child process compiles, rows are interpreted one by one; the rest is left to the kernel once there is one.
    """
    first = 0
    while first < rows and not (kernels.ENABLED and (elements > rows * _LARGE or kernels.ready(INTERPRETED))):
        interpreted(kernel)(first, first + 1, *args)
        first += 1
    if 0 < first < rows:
        kernel(first, rows, *args)
    elif first < rows:
        from fenchel.kernels.cpu.threads import over_rows

        over_rows(kernel, rows, elements, *args)


@cache
def interpreted(kernel: Any) -> Any:
    """The Python function behind a compiled one, with the compiled ones that it calls replaced likewise.

    Loops on the processor's vectors have another one, in numpy, as their ``plain``.
    """
    if hasattr(kernel, "plain"):
        return kernel.plain
    function = kernel.py_func
    known = dict(function.__globals__)
    for name in function.__code__.co_names:
        if hasattr(known.get(name), "py_func"):
            known[name] = interpreted(known[name])
    return types.FunctionType(function.__code__, known, function.__name__, function.__defaults__)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Wait for kernels instead of computing in torch operations meanwhile, so that all results come from the same code.

    Example:
        >>> import torch, fenchel
        >>> with fenchel.kernels.waiting():
        ...     fenchel.sparsemax(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])
    """
    global _waiting
    _waiting += 1
    try:
        yield
    finally:
        _waiting -= 1


def name_of(room: str, dtype: torch.dtype | None) -> str:
    """What locks and marks call the kernels of a room."""
    return room if dtype is None else f"{room}-{str(dtype).removeprefix('torch.')}"


@dataclass
class _Compilation:
    """What is known of the compilation of a room."""

    looked: float = -_PAUSE
    tries: int = 0
    child: subprocess.Popen[bytes] | None = None


def _is_complete(key: Key) -> bool:
    """Whether the mark of a room is on disk, or there is no way to have it compiled by a child."""
    now = time.monotonic()
    state = _compilations.setdefault(key, _Compilation())
    if now - state.looked < _PAUSE:
        return False
    if not _starting.acquire(blocking=False):  # another thread is just looking
        return False
    try:
        state.looked = now
        mark = store.mark(name_of(*key))
        if mark is None or mark.exists():
            return True
        if state.child is not None and state.child.poll() is None:
            return False
        with store.claimed(name_of(*key)) as is_free:
            if not is_free:  # another process compiles
                return False
        if state.tries == _TRIES or not sys.executable or getattr(sys, "frozen", False):
            return True
        state.tries += 1
        state.child = _start(*key)
        return state.child is None
    finally:
        _starting.release()


def _start(room: str, dtype: torch.dtype | None) -> subprocess.Popen[bytes] | None:
    """A process that compiles the kernels of a room, with the same modules as this one; None if it cannot start."""
    store.announce("in another process; until they are ready, torch operations compute")
    path = [each for each in sys.path if isinstance(each, str)]  # Python passes other entries by
    command = [sys.executable, "-c", _CHILD, json.dumps(path), str(store.folder()), name_of(room, dtype), room]
    if dtype is not None:
        command += ["--dtype", str(dtype).removeprefix("torch.")]
    quiet = {"FENCHEL_KERNELS": "wait", "FENCHEL_QUIET": "1", "OMP_NUM_THREADS": "1"}
    nowhere = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            command,
            env={**os.environ, **quiet},
            stdin=nowhere,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,  # an interrupt from the keyboard is not meant for it
        )
    except OSError:
        return None


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # another thread may have held it
    _forget_children()  # the parent's


def _forget_children() -> None:
    """Leave children to themselves, as at the end of the process: the next one finds what they compiled."""
    for state in _compilations.values():
        if state.child is not None and state.child.poll() is None:
            state.child.returncode = 0  # or Python would warn that it still runs
        state.child = None


atexit.register(_forget_children)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
