"""The folder of compiled kernels: locks among processes, marks of what is complete, and a message while compiling."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: processes do not wait for each other
    fcntl = None  # type: ignore[assignment]

_HERE = Path(__file__).parent
_QUIET = bool(os.environ.get("CI")) or os.environ.get("FENCHEL_QUIET", "0") not in ("", "0")

_announced = False


def announce(meanwhile: str = "this takes some seconds") -> None:
    """Write one line to stderr, at most once per process: kernels are being compiled, and what happens meanwhile."""
    global _announced
    if not _announced and not _QUIET:
        print(f"fenchel: compiling kernels once, {meanwhile} (FENCHEL_QUIET=1 hides this line)", file=sys.stderr)
    _announced = True


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of this name among all processes that use the same cache folder; without one, do nothing.

    The lock is that of POSIX: it ends with its process, and a forked process does not inherit it.
    """
    file, byte = _lock_file(), _byte(name)
    if file is None:
        yield
        return
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


@contextlib.contextmanager
def claimed(name: str) -> Iterator[bool]:
    """Hold the lock of this name if no other process does: whether this one has it. True where there are no locks."""
    file, byte = _lock_file(), _byte(name)
    if file is None:
        yield True
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except BlockingIOError:
        yield False
        return
    except OSError:  # the file system has no locks
        yield True
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


def mark(name: str) -> Path | None:
    """The file that says that all kernels of this name are in the cache; None if there is no folder for it.

    Its name holds what compiled code depends on: the sources, the versions and the processor.
    """
    place = folder()
    return None if place is None else place / f"{name}-{_stamp()}.complete"


def complete(name: str) -> None:
    """Write the mark of this name, and remove those of other sources, versions and processors."""
    place = mark(name)
    if place is None:
        return
    with contextlib.suppress(OSError):  # the disk is full: the next process asks for the kernels again
        place.touch()
        for old in place.parent.glob(f"{name}-{'[0-9a-f]' * 16}.complete"):
            if old != place:
                old.unlink(missing_ok=True)


@cache
def folder() -> Path | None:
    """The first folder that can be written: ``NUMBA_CACHE_DIR``, the one beside the kernels, the user's cache."""
    asked, home = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    choices = [Path(asked)] if asked else []
    with contextlib.suppress(RuntimeError):  # there is no home folder
        choices += [_HERE / "cpu" / "__pycache__", (Path(home) if home else Path.home() / ".cache") / "fenchel"]
    for choice in choices:
        with contextlib.suppress(OSError):
            choice.mkdir(parents=True, exist_ok=True)
            if os.access(choice, os.W_OK):
                return choice
    return None


def _byte(name: str) -> int:
    """The byte of the file of locks that stands for a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


@cache
def _stamp() -> str:
    from llvmlite import binding

    digest = hashlib.sha256()
    for path in sorted((_HERE / "cpu").rglob("*.py")):
        digest.update(path.read_bytes())
    name = os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES", binding.get_host_cpu_features().flatten())
    digest.update(repr((name, features, sys.version_info[:2], version("numba"), version("llvmlite"))).encode())
    return digest.hexdigest()[:16]


@cache
def _lock_file() -> int | None:
    """A descriptor of the file of locks; None if there is no folder to write to.

    It stays open: a process that closes any descriptor of a file gives up all its locks there.
    """
    place = folder()
    if fcntl is None or place is None:
        return None
    try:
        return os.open(place / "fenchel.lock", os.O_RDWR | os.O_CREAT)
    except OSError:
        return None
