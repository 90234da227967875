"""What the documentation says of the laboratory: names and commands exist, the example of a chapter runs."""

import importlib
import re
from pathlib import Path

import pytest

from fenchel_lab import bench, cli
from fenchel_lab.bench.report import subject
from fenchel_lab.report import Context, Study, studies

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "lab/README.md",
    *(f"docs/{name}.md" for name in ("speed", "guide/real-data", "guide/rationales", "guide/seq2seq")),
]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_name_exists(page: str) -> None:
    for name in re.findall(r"\bfenchel_lab((?:\.\w+)*)", read(page)):
        value = importlib.import_module("fenchel_lab")
        for part in name.split(".")[1:]:
            if not hasattr(value, part):
                importlib.import_module(f"{value.__name__}.{part}")
            value = getattr(value, part)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page: str) -> None:
    groups = {each.name: each.typer_instance for each in cli.app.registered_groups}
    known = {(each.name or each.callback.__name__,) for each in cli.app.registered_commands}
    for name, group in groups.items():
        known |= {(name, each.name or each.callback.__name__) for each in group.registered_commands}
    shown = re.findall(r"(?:^|`|\$ |/bin/|= ?)fenchel ([a-z]+)(?: ([a-z]+))?", read(page), re.MULTILINE)
    assert shown or page == "CHANGELOG.md"
    for first, second in shown:
        assert (first,) in known or (first, second) in known or (first in groups and not second), (first, second)


def test_the_example_of_a_chapter_runs(registered: dict[str, Study]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", read("CONTRIBUTING.md"), re.DOTALL)
    exec(compile(block, "CONTRIBUTING.md", "exec"), {})
    assert registered["my_chapter"].function(Context(data=None)).figures


def test_readme_and_site_have_a_place_for_the_figures_of_the_benchmark() -> None:
    text = read("README.md")
    assert "| new |" in bench.insert(text, "| new |", bench.SHORT)
    assert text.index("## Speed") < text.index(bench.SHORT)
    assert bench.BEGIN not in text
    assert "| new |" in bench.insert(read("docs/speed.md"), "| new |")


def test_the_rows_of_the_front_page_are_goals_of_workloads() -> None:
    known = {each.name: each for each in bench.workloads()}
    for workload, of, against, words in bench.FRONT:
        goals = [each for each in known[workload].goals if (each.of, each.against) == (of, against)]
        assert [each for each in goals if words in subject(each)], (workload, of, against, words)


def test_every_chapter_is_in_the_gallery() -> None:
    code = {path.stem for path in (ROOT / "docs" / "gallery" / "code").glob("*.py")}
    assert code == {each.name for each in studies()}
