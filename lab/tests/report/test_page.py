"""The report: one page with everything in it, nothing outside it."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fenchel_lab.report import Context, Result, Run, Study, Table, run
from fenchel_lab.report import page as report
from fenchel_lab.report.page import contents

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed, in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def values(self, *names: str) -> list[str]:
        return [str(attrs[name]) for _, attrs in self.tags for name in names if name in attrs]


def written(runs: list[Run], folder: Path) -> tuple[str, Page]:
    html = report.write(runs, folder / "report").read_text(encoding="utf-8")
    return html, Page(html)


@pytest.fixture
def page(small: Study, broken: Study, tmp_path: Path) -> tuple[str, Page]:
    return written([run(each, Context(data=None)) for each in (small, broken)], tmp_path)


def test_nothing_is_loaded_from_elsewhere(page: tuple[str, Page]) -> None:
    html, parsed = page
    for address in parsed.values("src", "href", "xlink:href", "srcset", "data", "poster"):
        assert address.startswith(("#", "data:")), address
    assert not {"link", "iframe", "object", "base"} & {tag for tag, _ in parsed.tags}
    assert "@import" not in html
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))


def test_scripts_are_on_the_page_itself(page: tuple[str, Page]) -> None:
    _, parsed = page
    scripts = [attrs for tag, attrs in parsed.tags if tag == "script"]
    assert scripts == [{}]


def test_the_first_chapters_stand_before_the_themes(small: Study) -> None:
    done = run(small, Context(data=None))
    themes = ["A", "B", "A", "C", "A", "B", "B", "C", "B", ""]
    runs = [replace(done, study=replace(small, name=f"s{i}", theme=theme)) for i, theme in enumerate(themes)]
    listed = [(part.title, [(number, each.study.name) for number, each in part.chapters]) for part in contents(runs)]
    assert listed == [
        ("See these first", [(i + 1, f"s{i}") for i in range(6)]),
        ("B", [(7, "s6"), (8, "s8")]),
        ("C", [(9, "s7")]),
        ("More", [(10, "s9")]),
    ]


def test_chapters_follow_the_contents_and_have_a_thumbnail(small: Study, tmp_path: Path) -> None:
    done = run(small, Context(data=None))
    themes = ["", "", "", "", "", "", "A", "B", "A"]
    runs = [replace(done, study=replace(small, name=f"s{i}", theme=theme)) for i, theme in enumerate(themes)]
    _, parsed = written(runs, tmp_path)
    sections = [attrs["id"] for tag, attrs in parsed.tags if tag == "section"]
    assert sections == ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s8", "s7"]
    shown = [str(attrs["href"]) for tag, attrs in parsed.tags if tag == "use" and "href" in attrs]
    assert shown == [f"#{name}-1-figure_1" for name in sections]
    assert {each[1:] for each in shown} <= set(parsed.values("id"))


def test_the_code_of_a_chapter_can_be_copied(small: Study, tmp_path: Path) -> None:
    lines = "import fenchel\n\nprint(1 < 2)"
    html, _ = written([run(replace(small, code=lines), Context(data=None))], tmp_path)
    assert '<pre class="copied"><code>import fenchel\n\nprint(1 &lt; 2)</code></pre>' in html


def test_columns_without_a_word_are_left_out(small: Study, tmp_path: Path) -> None:
    table = Table(["way", "paper", "ours"], [["a", "–", 0.5], ["b", "", 1.5]], caption="Numbers")
    assert table.filled() == (["way", "ours"], [["a", 0.5], ["b", 1.5]])
    empty = replace(small, function=lambda context: Result("Text.", tables=[table]))
    _, parsed = written([run(empty, Context(data=None))], tmp_path)
    assert "way ours a 0.5 b 1.5" in parsed.text


def test_every_run_has_its_chapter_and_a_link_to_it(page: tuple[str, Page]) -> None:
    _, parsed = page
    assert [attrs["id"] for tag, attrs in parsed.tags if tag == "section"] == ["small", "broken"]
    assert {"#small", "#broken"} <= set(parsed.values("href"))


def test_a_chapter_shows_text_figure_table_and_paper(page: tuple[str, Page]) -> None:
    _, parsed = page
    for words in (
        "A small <study>",
        "After Somebody (2020).",
        "First, 1 < 2 & a < b .",
        "A <line>",
        "The paper's rises too",
        "Numbers",
        "a, b",
        "0.5",
        "<c>",
        "∞",
        "fenchel study run small --seed 0",
    ):
        assert words in parsed.text
    assert 'It "rises"' in parsed.values("aria-label")
    assert "svg" in {tag for tag, _ in parsed.tags}


def test_a_broken_study_is_named_and_the_others_survive(page: tuple[str, Page]) -> None:
    _, parsed = page
    assert "1 of 2 chapters failed: A broken study ." in parsed.text
    assert "This chapter failed: RuntimeError: the <disk> is full" in parsed.text
    assert "Second." in parsed.text


def test_the_page_fits_a_phone_and_a_dark_room(page: tuple[str, Page]) -> None:
    html, parsed = page
    metas = {attrs.get("name"): attrs.get("content") for tag, attrs in parsed.tags if tag == "meta"}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert "prefers-color-scheme: dark" in html
    assert "overflow-x: auto" in html


def test_every_colour_that_is_used_is_defined_for_both_pages(page: tuple[str, Page]) -> None:
    html, _ = page
    used = set(re.findall(r"var\(--(\w+)\)", html))
    defined = Counter(re.findall(r"--(\w+): ", html))
    assert {"ink", "blue", "faint"} <= used
    assert all(defined[name] == 2 for name in used)


def test_parts_of_two_figures_do_not_meet(small: Study, tmp_path: Path) -> None:
    twin = Study("twin", "A twin", "", 2, small.function)
    _, parsed = written([run(each, Context(data=None)) for each in (small, twin)], tmp_path)
    ids = parsed.values("id")
    assert len(set(ids)) == len(ids)
    links = [address[1:] for address in parsed.values("href", "xlink:href")]
    clips = [clip[5:-1] for clip in parsed.values("clip-path")]
    assert clips
    assert set(links + clips) <= set(ids)


def test_a_drawing_with_very_many_marks_becomes_an_image(
    small: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LARGEST_SVG", 100)
    _, parsed = written([run(small, Context(data=None))], tmp_path)
    [image] = [attrs for tag, attrs in parsed.tags if tag == "img"]
    assert str(image["src"]).startswith("data:image/png;base64,")
    assert image["alt"] == 'It "rises"'
