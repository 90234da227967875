"""What the documentation shows is what happens: blocks of pages run, names and links exist, all is listed."""

import os
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fenchel
from fenchel._warmup import room_names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATED = (DOCS / "gallery" / "pages", DOCS / "reference" / "rooms")
PAGES = sorted(page for page in DOCS.rglob("*.md") if not any(folder in page.parents for folder in GENERATED))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def run(code: str, page: Path, names: dict[str, Any]) -> None:
    exec(compile(code, name_of(page), "exec"), names)


def fetch(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def test_the_readme_is_short() -> None:
    assert 600 <= len(read(ROOT / "README.md").split()) <= 900


def test_the_first_example_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = read(ROOT / "README.md")
    code, printed = re.search(r"```python\n(import torch.*?)```\s+```text\n(.*?)```", text, re.DOTALL).groups()
    run(code, ROOT / "README.md", {})
    assert capsys.readouterr().out == printed


def test_the_page_on_kernels_names_all_that_can_be_warmed_up() -> None:
    names = read(DOCS / "guide" / "kernels.md").partition("| | |\n")[2].partition("\n\n")[0]
    first = [line.split("|")[1] for line in names.splitlines()[1:]]
    assert sorted(set(re.findall(r"`(\w+)`", " ".join(first)))) == sorted(room_names())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of the libraries that pages use
@pytest.mark.parametrize("page", [ROOT / "README.md", *filter(blocks_of, PAGES)], ids=name_of)
def test_every_example_of_a_page_runs_after_those_before_it(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    try:
        for block in blocks_of(page):
            run(block, page, names)
    finally:
        if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
            pyplot.close("all")


NEEDS = {"sparse_timm": "timm"}
"""Examples that need what is not installed for the tests."""

LONG = {"export_onnx", "lightning_entmax", "sparse_huggingface", "tag_words_trainer"}
"""Examples that import large libraries."""


SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
ON_RANKS = [script for script in SCRIPTS if "torchrun" in script.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("script", ON_RANKS, ids=lambda p: p.stem)
def test_every_example_for_several_ranks_runs(script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.isinstance.treespec:FutureWarning")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=script.stem, marks=[pytest.mark.slow] if script.stem in LONG else [])
        for script in SCRIPTS
        if script not in ON_RANKS
    ],
)
def test_every_example_runs(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name_of)
def test_every_name_in_the_documentation_exists(page: Path) -> None:
    for name in set(re.findall(r"\bfenchel\.((?:(?:nn|dp|hopfield|structures|factors|continuous)\.)?\w+)", read(page))):
        value: Any = fenchel
        for part in name.split("."):  # a module is an attribute once it has been imported
            value = getattr(value, part) if hasattr(value, part) else import_module(f"{value.__name__}.{part}")


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name_of)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    for link in re.findall(
        r"\]\((?!https?:|#|mailto:)([^)#\s]+)", re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    ):
        target = (page.parent / link).resolve()
        assert target.exists() or any(folder in target.parents for folder in GENERATED), link


def test_the_reference_lists_every_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    listed = {name for names in import_module("reference").pages().values() for name in names}
    shown = {name.rpartition(".")[2] for name in listed}
    rooms = [getattr(fenchel, name) for name in fenchel.__all__]
    for module in (fenchel, *(each for each in rooms if isinstance(each, ModuleType))):
        for name in module.__all__:
            assert name in shown or f"{module.__name__}.{name}" in sys.modules, f"{module.__name__}.{name}"
    objects = [id(fetch(name)) for name in listed if callable(fetch(name))]
    assert len(objects) == len(set(objects)), "something stands on two pages"


def test_links_of_the_long_description_are_absolute_or_gone() -> None:
    describe = runpy.run_path(str(ROOT / "setup.py"))["describe"]
    text = read(ROOT / "README.md")
    relative = r"\]\((?!https?:|#)|(?:src|srcset)=\"(?!https?:)"
    assert re.search(relative, text)
    for address in ("", "https://host.example/me/fenchel/"):
        described = describe(text, address)
        assert not re.search(relative, described)
        assert ("host.example/me/fenchel/blob/HEAD/docs/start.md" in described) == bool(address)
        assert ("host.example/me/fenchel/raw/HEAD/docs/_static/maps-light.svg" in described) == bool(address)
