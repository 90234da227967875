"""Compiled kernels on disk: what they were compiled from is all of the folder, not the file of the kernel alone."""

import runpy
import shutil
from pathlib import Path

from fenchel.kernels.cpu import compiler
from fenchel.kernels.cpu.maps import rows


def test_a_change_to_any_kernel_file_makes_all_kernels_stale(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    shutil.copytree(Path(compiler.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = runpy.run_path(str(folder / "compiler.py"))["source_stamp"]()
    assert before == compiler.source_stamp()
    with (folder / "maps" / "selection.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert runpy.run_path(str(folder / "compiler.py"))["source_stamp"]() != before


def test_kernels_on_disk_know_what_they_were_compiled_from() -> None:
    assert rows.entmax._cache._cache_file._source_stamp[1] == compiler.source_stamp()
