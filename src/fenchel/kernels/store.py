"""Locks among processes that compile kernels, and the line that says that kernels are being compiled."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: processes do not wait for each other
    fcntl = None  # type: ignore[assignment]

_HERE = Path(__file__).parent
_QUIET = bool(os.environ.get("CI")) or os.environ.get("FENCHEL_QUIET", "0") not in ("", "0")

_announced = False


def announce() -> None:
    """Write one line to stderr, at most once per process: kernels are being compiled."""
    global _announced
    if not _announced and not _QUIET:
        line = "fenchel: compiling kernels once, this takes some seconds (FENCHEL_QUIET=1 hides this line)"
        print(line, file=sys.stderr)
    _announced = True


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of this name among all processes that use the same cache folder; without one, do nothing.

    The lock is that of POSIX: it ends with its process, and a forked process does not inherit it.
    """
    file = _lock_file()
    if file is None:
        yield
        return
    offset = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.lockf(file, fcntl.LOCK_EX, 1, offset)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)


@cache
def _lock_file() -> int | None:
    """A descriptor of the file of locks, as a rule beside the compiled kernels; None if no folder can be written.

    It stays open: a process that closes any descriptor of a file gives up all its locks there.
    """
    if fcntl is None:
        return None
    asked, home = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    choices = [Path(asked)] if asked else []
    with contextlib.suppress(RuntimeError):  # there is no home folder
        choices += [_HERE / "cpu" / "__pycache__", (Path(home) if home else Path.home() / ".cache") / "fenchel"]
    for folder in choices:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / "fenchel.lock", os.O_RDWR | os.O_CREAT)
    return None
