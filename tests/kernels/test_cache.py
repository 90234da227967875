"""Compiled kernels on disk: what they depend on, damaged files, and many processes at once."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from fenchel.kernels import store
from fenchel.kernels.cpu import compiler
from fenchel.kernels.cpu.maps import rows

SMALL = """
import numpy as np
from fenchel.kernels.cpu.compiler import kernel

@kernel
def add(x):
    total = 0.0
    for i in range(x.size):
        total += np.sqrt(x[i])
    return total

def counts():
    return sum(add.stats.cache_hits.values()), sum(add.stats.cache_misses.values())
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_announced", True)


def call(folder: Path, comment: str = "") -> tuple[int, int]:
    """Load a file with a small kernel and call that: how many files were read, and how many kernels compiled."""
    script = load(folder, comment)
    assert script["add"](script["np"].ones(4)) == 4
    counts: tuple[int, int] = script["counts"]()
    return counts


def load(folder: Path, comment: str = "") -> dict[str, Any]:
    (folder / "script.py").write_text(SMALL + comment)
    compiler.source_stamp.cache_clear()
    compiler._imported.cache_clear()
    return runpy.run_path(str(folder / "script.py"))


def run(code: str, folder: Path) -> None:
    """Run a script that begins with the small kernel in a process of its own."""
    (folder / "script.py").write_text(SMALL + code)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "FENCHEL_QUIET": "1"}
    subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / "script.py")], env=environment, check=True, timeout=300
    )


def test_a_change_makes_those_kernels_stale_that_import_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    shutil.copytree(Path(compiler.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))

    def stamps() -> dict[str, str]:
        stamp = runpy.run_path(str(folder / "compiler.py"))["source_stamp"]
        return {name: stamp(folder / name) for name in ("maps/rows.py", "streaming/attention.py", "dp/markov.py")}

    before = stamps()
    for name, stamp in before.items():
        assert stamp == compiler.source_stamp(Path(compiler.__file__).parent / name)
    with (folder / "maps" / "newton.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    after = stamps()
    assert after["maps/rows.py"] != before["maps/rows.py"]
    assert after["streaming/attention.py"] != before["streaming/attention.py"]  # through another file
    assert after["dp/markov.py"] == before["dp/markov.py"]
    with (folder / "compiler.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert not set(stamps().values()) & set(after.values())


def test_imports_among_kernel_files_are_spelled_so_that_the_stamp_sees_them() -> None:
    for path in Path(compiler.__file__).parent.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] == ["import"]:
                assert not any(word.startswith("fenchel") for word in words), (path, line)
            if words[:1] == ["from"]:
                assert not words[1].startswith("."), (path, line)


def test_the_files_of_a_kernel_are_named_after_what_it_was_compiled_from() -> None:
    assert compiler.source_stamp(Path(rows.__file__)).startswith(rows.argmax_of_wide._cache._stamp)


def test_a_kernel_is_compiled_once_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "_QUIET", False)
    monkeypatch.setattr(store, "_announced", False)
    assert call(tmp_path) == (0, 1)
    assert call(tmp_path, "# changed") == (0, 1)
    assert call(tmp_path, "# changed") == (1, 0)
    written = capsys.readouterr().err
    assert written.startswith("fenchel: compiling")
    assert written.count("\n") == 1


def test_the_line_on_stderr_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "_QUIET", True)
    monkeypatch.setattr(store, "_announced", False)
    store.announce()
    assert capsys.readouterr().err == ""
    for variable, value, quiet in (("CI", "true", True), ("FENCHEL_QUIET", "1", True), ("FENCHEL_QUIET", "0", False)):
        with monkeypatch.context() as patch:
            patch.delenv("CI", raising=False)
            patch.setenv(variable, value)
            assert runpy.run_path(store.__file__)["_QUIET"] is quiet


def test_a_truncated_file_is_compiled_anew(tmp_path: Path) -> None:
    assert call(tmp_path) == (0, 1)
    (file,) = (tmp_path / "cache").rglob("*.nbc")
    for size in (0, 100):
        os.truncate(file, size)
        assert call(tmp_path) == (0, 1)
        assert call(tmp_path) == (1, 0)


def test_files_of_older_sources_are_deleted(tmp_path: Path) -> None:
    call(tmp_path)
    (before,) = (tmp_path / "cache").rglob("*.nbc")
    call(tmp_path, "# changed")
    (after,) = (tmp_path / "cache").rglob("*.nbc")
    assert before != after


def test_without_a_folder_kernels_are_compiled_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()  # nobody, not even root, can create a folder below a file
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(store, "_HERE", tmp_path / "file")
    monkeypatch.setattr(store, "_lock_file", store._lock_file.__wrapped__)
    monkeypatch.setattr(store, "folder", store.folder.__wrapped__)
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert store._lock_file() is None
    script = load(tmp_path)
    assert script["add"](script["np"].ones(4)) == 4
    assert len(script["add"].signatures) == 1


def test_a_folder_that_disappears_does_no_harm(tmp_path: Path) -> None:
    script = load(tmp_path)
    folder = Path(script["add"]._cache.cache_path)
    shutil.rmtree(folder)
    folder.touch()  # a file where the folder was
    assert script["add"](script["np"].ones(4)) == 4


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@needs_fork
def test_processes_that_need_the_same_kernel_compile_it_once(tmp_path: Path) -> None:
    code = """
import os
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        add(np.ones(4))
        os._exit(counts()[1])
    children.append(pid)
compiled = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert sorted(compiled) == [0, 0, 0, 1], compiled
"""
    run(code, tmp_path)


@needs_fork
def test_processes_that_end_while_they_compile_leave_no_lock_and_no_damage(tmp_path: Path) -> None:
    code = """
import os, signal, time
for wait in (0.0, 0.1, 0.2, 0.4, 0.8):
    pid = os.fork()
    if pid == 0:
        add(np.ones(4))
        os._exit(0)
    time.sleep(wait)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
assert add(np.ones(4)) == 4 and sum(counts()) == 1
"""
    run(code, tmp_path)


@needs_fork
def test_a_fork_while_another_thread_compiles_does_not_hang(tmp_path: Path) -> None:
    code = """
import os, threading
compiling = threading.Thread(target=lambda: [add(np.ones(4, t)) for t in (np.float64, np.float32, np.int64, np.int32)])
compiling.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        ok = add(np.ones(4, np.int8)) == 4  # compiles or loads
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
compiling.join()
"""
    run(code, tmp_path)
