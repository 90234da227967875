"""What the documentation shows is what happens: the README's example, the example scripts, the table of names."""

import os
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fenchel

ROOT = Path(__file__).parent.parent


def test_the_first_example_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code, printed = re.search(r"```python\n(import torch.*?)```\s+```text\n(.*?)```", text, re.DOTALL).groups()
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_every_example_of_the_readme_runs_after_those_before_it() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("page", ["hopfield-layers.md", "soft-dtw.md"])
def test_every_example_of_a_page_runs_after_those_before_it(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names)


SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
ON_RANKS = [script for script in SCRIPTS if "torchrun" in script.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", ON_RANKS, ids=lambda p: p.stem)
def test_every_example_for_several_ranks_runs(script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s not in ON_RANKS], ids=lambda p: p.stem)
def test_every_example_runs(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/coming-from-entmax.md", "docs/distributed.md", "docs/hopfield-layers.md", "docs/soft-dtw.md"],
)
def test_every_name_in_the_documentation_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = set(re.findall(r"fenchel\.((?:(?:nn|dp)\.)?\w+)", text))
    assert len(names) > 5
    for name in names:
        value: Any = fenchel
        for part in name.split("."):  # a module is an attribute once it has been imported
            value = getattr(value, part) if hasattr(value, part) else import_module(f"{value.__name__}.{part}")
