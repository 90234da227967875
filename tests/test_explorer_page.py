"""The explorer in docs: its script is built from its modules, and its numbers are the library's."""

import json
import math
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

EXPLORER = Path(__file__).parent.parent / "docs" / "explorer"
BUILD = runpy.run_path(str(EXPLORER / "tools" / "build.py"))
LIBRARY = runpy.run_path(str(EXPLORER / "tools" / "library_numbers.py"))


def differing(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two trees of lists, objects and numbers differ by more than rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [each for key in ours for each in differing(ours[key], theirs[key], f"{where}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [each for i, pair in pairs for each in differing(*pair, f"{where}[{i}]")]
    if isinstance(ours, float) and isinstance(theirs, float):
        return [] if math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-9) else [f"{where}: {ours} ≠ {theirs}"]
    return [] if ours == theirs else [f"{where}: {ours} ≠ {theirs}"]


def frames() -> dict[str, Any]:
    """The content of frames.js."""
    text = (EXPLORER / "src" / "frames.js").read_text(encoding="utf-8")
    lines = [line.strip().rstrip(",") for line in text.splitlines() if line.startswith('    {"score"')]
    return {"frames": [json.loads(line) for line in lines]}


def test_the_script_is_built_from_the_modules() -> None:
    assert (EXPLORER / "explorer.js").read_text(encoding="utf-8") == BUILD["built"]()


def test_the_numbers_that_the_mathematics_is_tested_with_are_the_librarys() -> None:
    committed = json.loads((EXPLORER / "tests" / "numbers.json").read_text(encoding="utf-8"))
    assert differing(json.loads(json.dumps(LIBRARY["numbers"]())), committed) == []


def test_the_marginals_of_the_frames_are_the_librarys() -> None:
    committed, now = frames()["frames"], LIBRARY["frames"]()["frames"]
    assert len(committed) == len(now) == 41
    for ours, theirs in zip(committed, now, strict=True):
        assert ours["score"] == theirs["score"]
        before, after = ({(i, j): p for i, j, p in frame["arcs"] if p > 2e-4} for frame in (ours, theirs))
        assert before == pytest.approx(after, abs=2e-4)


def test_the_trees_of_a_frame_mix_to_its_marginals() -> None:
    for frame in frames()["frames"]:
        assert sum(tree["weight"] for tree in frame["trees"]) == pytest.approx(1, abs=5e-4)
        mixed = torch.zeros(8, 9, dtype=torch.float64)
        for tree in frame["trees"]:
            for modifier, head in enumerate(tree["heads"], 1):
                mixed[modifier, head] += tree["weight"]
        for modifier, head, marginal in frame["arcs"]:
            assert mixed[modifier, head].item() == pytest.approx(marginal, abs=5e-4)
            mixed[modifier, head] = 0
        assert mixed.max() < 5e-4


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = (EXPLORER / "index.html").read_text(encoding="utf-8")
    style = (EXPLORER / "explorer.css").read_text(encoding="utf-8")
    assert "//" not in page.replace("<!--", "")
    assert "url(" not in style
    assert "@import" not in style


if NODE := shutil.which("node"):

    def test_the_mathematics_passes_its_own_tests() -> None:
        done = subprocess.run([NODE, "--test", str(EXPLORER / "tests")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:]
