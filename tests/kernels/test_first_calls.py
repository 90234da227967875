"""The first calls: torch operations serve while a child process compiles, and then kernels do, for good."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fenchel
from fenchel import kernels
from fenchel.kernels import compilation, store

KEY = ("some room", torch.float32)


class Child:
    """A child process that ends when it is told to."""

    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Child]:
    """The children that were started; a cache folder of its own, and no memory of earlier calls."""
    started: list[Child] = []

    def start(*key: Any) -> Child:
        started.append(Child())
        return started[-1]

    monkeypatch.setattr(kernels, "WAIT", False)
    monkeypatch.setattr(compilation, "_start", start)
    monkeypatch.setattr(compilation, "_PAUSE", 0.0)
    monkeypatch.setattr(compilation, "_known", set())
    monkeypatch.setattr(compilation, "_compilations", {})
    monkeypatch.setattr(store, "mark", lambda name: tmp_path / name)
    return started


def finish() -> None:
    mark = store.mark(compilation.name_of(*KEY))
    assert mark is not None
    mark.touch()


def test_one_child_compiles_and_kernels_are_used_from_then_on(children: list[Child]) -> None:
    assert not any(kernels.ready(*KEY) for _ in range(5))
    assert len(children) == 1
    finish()
    assert kernels.ready(*KEY)
    mark = store.mark(compilation.name_of(*KEY))
    assert mark is not None
    mark.unlink()
    assert kernels.ready(*KEY)  # no way back
    assert not kernels.ready("some room", torch.float64)


def test_what_is_on_disk_needs_no_child(children: list[Child]) -> None:
    finish()
    assert kernels.ready(*KEY)
    assert not children


def test_the_disk_is_looked_at_a_few_times_per_second(children: list[Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_PAUSE", 3600.0)
    assert not kernels.ready(*KEY)
    finish()
    assert not kernels.ready(*KEY)
    compilation._compilations[KEY].looked -= 3600.0
    assert kernels.ready(*KEY)


def test_after_two_children_that_fail_kernels_are_compiled_here(children: list[Child]) -> None:
    for count in (1, 2):
        assert not kernels.ready(*KEY)
        assert len(children) == count
        children[-1].returncode = 1
    assert kernels.ready(*KEY)
    assert len(children) == 2


def test_without_a_child_or_a_folder_kernels_are_compiled_here(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "_start", lambda *key: None)
    assert kernels.ready(*KEY)
    monkeypatch.setattr(store, "mark", lambda name: None)
    assert kernels.ready("another room", torch.float32)


def test_while_another_process_compiles_none_is_started(children: list[Child], tmp_path: Path) -> None:
    code = "import sys; from fenchel.kernels import store\nwith store.claimed(sys.argv[1]): print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, compilation.name_of(*KEY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        assert not kernels.ready(*KEY)
        assert not children
    finally:
        holder.communicate(b"\n", timeout=60)
    assert not kernels.ready(*KEY)
    assert len(children) == 1


def test_waiting_and_determinism_use_kernels_at_once_and_for_good(children: list[Child]) -> None:
    with kernels.waiting():
        assert kernels.ready(*KEY)
    assert kernels.ready(*KEY)
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.ready("another room", torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not children


def test_a_map_changes_from_torch_operations_to_the_kernel_once(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[int] = []

    def kernel(z: torch.Tensor, *a: Any) -> torch.Tensor:
        served.append(len(z))
        return torch.softmax(z, -1)

    remove = kernels.register("argmax", "norm", kernel, room=KEY[0])
    try:
        scores = torch.randn(3, 5)
        plain = fenchel.normmax(scores, 2.0)
        assert not served
        assert plain.sum(-1).allclose(torch.ones(3))
        finish()
        fenchel.normmax(scores, 2.0)
        assert served == [3]
    finally:
        remove()


def test_structures_are_interpreted_until_they_are_compiled(
    children: list[Child], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fenchel.structures import DependencyTree

    omega = fenchel.SparseMAP(DependencyTree())
    scores = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    with kernels.waiting():
        compiled = omega.argmax(scores)
        gradient = torch.autograd.grad(compiled.square().sum(), scores)[0]
    compilation._known.clear()
    calls = iter(range(10**6))

    def ready(room: str, dtype: torch.dtype | None = None) -> bool:
        return next(calls) % 3 == 2  # in the middle of the rows

    monkeypatch.setattr(kernels, "ready", ready)
    assert compilation.INTERPRETED == "structures"
    mixed = omega.argmax(scores)
    assert next(calls) > 3
    torch.testing.assert_close(mixed, compiled, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(mixed.square().sum(), scores)[0], gradient, rtol=0, atol=1e-10)


def test_trees_of_a_sentence_do_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from fenchel.structures import DependencyTree

    def compiled(kernel: Any, *args: Any) -> None:
        raise AssertionError(f"{kernel.__name__} would be compiled within the call")

    monkeypatch.setattr(kernels, "ready", lambda room, dtype=None: False)
    monkeypatch.setattr("fenchel.kernels.cpu.threads.over_rows", compiled)
    p = fenchel.SparseMAP(DependencyTree()).argmax(torch.randn(2, 12, 13))
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 12))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forks_while_threads_ask_do_not_hang(children: list[Child]) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            kernels.ready(*KEY)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                compilation._PAUSE = 0.0
                os._exit(0 if not kernels.ready(*KEY) and not kernels.ready("a third room") else 1)
            deadline = time.monotonic() + 60
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert ended == (child, 0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_does_not_warn_of_the_child_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(compilation, "_compilations", {KEY: compilation._Compilation(child=sleeper)})
    try:
        forked = os.fork()
        if forked == 0:
            # What is left of it ends without a warning that it still runs.
            os._exit(0 if compilation._compilations[KEY].child is None and sleeper.returncode == 0 else 1)
        assert os.waitpid(forked, 0) == (forked, 0)
        assert compilation._compilations[KEY].child is sleeper
        assert sleeper.poll() is None
    finally:
        sleeper.communicate(b"\n", timeout=60)


def test_entries_of_the_path_that_are_not_strings_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Python itself, which passes them by."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, None])
    monkeypatch.setattr(
        compilation, "_CHILD", "import json, sys; assert all(map(str.isprintable, json.loads(sys.argv[1])))"
    )
    child = compilation._start(*KEY)
    assert child is not None
    assert child.wait(60) == 0


@pytest.fixture
def cold(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose cache is empty."""
    return {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "FENCHEL_KERNELS": "on", "FENCHEL_QUIET": "0", "CI": ""}


USER = """
import sys, time, torch, fenchel
from fenchel._warmup import compiled_functions
scores = torch.tensor([[1.0, 0.9, -1.0]], requires_grad=True)
first = fenchel.normmax(scores)
first.square().sum().backward()
assert "numba" not in sys.modules
while not fenchel.kernels.ready("normmax", torch.float32):
    time.sleep(0.1)
second = fenchel.normmax(scores)
second.square().sum().backward()
known = [each for each in compiled_functions() if each.signatures]
assert known and not any(each.stats.cache_misses for each in known)
torch.testing.assert_close(first, second)
"""


@pytest.mark.slow
def test_a_process_with_an_empty_cache_answers_at_once_and_compiles_nothing_itself(cold: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", USER], env=cold, check=True, timeout=600, stderr=subprocess.PIPE)
    assert done.stderr.decode().count("fenchel: compiling kernels") == 1
    again = USER.replace('assert "numba" not in', 'assert "numba" in')  # the next process finds the kernels on disk
    done = subprocess.run([sys.executable, "-c", again], env=cold, check=True, timeout=600, stderr=subprocess.PIPE)
    assert not done.stderr


@pytest.mark.slow
def test_children_that_are_killed_leave_nothing_that_hangs(cold: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fenchel", "warmup", "lattices", "--dtype", "float32"]
    lock = tmp_path / "fenchel.lock"  # made as the first compilation begins
    for seconds in (0.0, 0.2, 0.4, 0.8, 1.2):
        lock.unlink(missing_ok=True)
        child = subprocess.Popen(command, env=cold, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not lock.exists() and child.poll() is None:
            time.sleep(0.02)
        time.sleep(seconds)
        assert child.poll() is None  # it is in the middle
        child.kill()
        child.wait(60)
    done = subprocess.run(command, env=cold, capture_output=True, text=True, check=True, timeout=600)
    assert "Compiled" in done.stdout
    assert list(tmp_path.glob("lattices-float32-*.complete"))


def test_a_new_mark_removes_those_of_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "folder", lambda: tmp_path)
    others = [tmp_path / f"{name}-{'0' * 16}.complete" for name in ("room", "room-float32", "roomy")]
    for each in others:
        each.touch()
    store.complete("room")
    assert store.mark("room") in list(tmp_path.iterdir())
    assert [each.exists() for each in others] == [False, True, True]


def test_a_child_that_cannot_start_is_none_and_one_that_starts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(Path("/nowhere/python")))
    assert compilation._start("lattices", torch.float32) is None
    monkeypatch.undo()
    monkeypatch.setattr(compilation, "_CHILD", "import sys; sys.exit(sys.argv[3:] != ['lattices-float32', 'lattices', "
                        "'--dtype', 'float32'])")  # fmt: skip
    child = compilation._start("lattices", torch.float32)
    assert child is not None
    assert child.wait(60) == 0


def test_a_child_whose_folder_is_gone_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "gone")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "gone"))
    child = compilation._start("lattices", torch.float32)
    assert child is not None
    assert child.wait(300) == 0
    assert not (tmp_path / "gone").exists()
