"""The gallery: one page per chapter of the laboratory, written to ``gallery/pages`` before the build reads its sources.

A chapter whose results are kept in ``results`` shows their first figure. The others take a second or two and are run.
The code of a page is ``gallery/code/NAME.py``; like all blocks of pages it is run when the page is read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from fenchel_lab.drawing.style import THEME
from fenchel_lab.report import Context, Study, run, studies

THEMES = {
    "Maps": ("paths", "saturation", "two_classes", "budgets", "grouping", "springs"),
    "Structures": ("sparse_trees", "sentence_alignment", "tree_budgets"),
    "Dynamic programs": ("named_entities", "alignments_of_series"),
    "Memories": ("basins", "metastable_states", "retrieval_of_images", "multiple_instances"),
    "Continuous attention": ("densities", "document_classification", "visual_questions", "long_memory"),
    "Explanations": ("text_highlights", "explanation_game"),
    "Sequence to sequence": ("inflection", "exact_beams", "translation"),
    "Between discrete and continuous": ("faces", "emergent_communication", "bit_vector_vae"),
}
LARGEST = 200_000


@dataclass(frozen=True)
class Picture:
    """A chapter's first figure, in files for a light and a dark page, and what is said of it."""

    light: str
    dark: str
    alt: str
    caption: str
    summary: str


def write_pages(app: Sphinx) -> None:
    """Write the pages and the cards of the gallery."""
    source, here = Path(app.srcdir), Path(app.srcdir) / "gallery"
    pages = here / "pages"
    pages.mkdir(exist_ok=True)
    known = {each.name: each for each in studies()}
    listed = [name for names in THEMES.values() for name in names]
    if sorted(listed) != sorted(known):
        raise ExtensionError(f"gallery.THEMES and the chapters differ: {sorted(set(listed) ^ set(known))}")
    cards = []
    for theme, names in THEMES.items():
        cards += [f"## {theme}", "", "::::{grid} 1 2 3 3", ":gutter: 3", ""]
        for name in names:
            picture = _picture(known[name], source, pages)
            _write(pages / f"{name}.md", _page(known[name], picture, here))
            cards += [_card(known[name], picture), ""]
        cards += ["::::", ""]
    _write(pages / "cards.txt", "\n".join(cards))


def _picture(study: Study, source: Path, pages: Path) -> Picture:
    record = source / "results" / study.name / "result.json"
    if record.exists():
        kept = json.loads(record.read_text(encoding="utf-8"))
        first = kept["figures"][0]
        file = f"../../results/{study.name}/{first['file']}"
        return Picture(file, file, first["alt"], first["caption"], kept["summary"][0])
    light, dark = pages / f"{study.name}.svg", pages / f"{study.name}.dark.svg"
    done = run(study, Context(data=None))
    if done.result is None:
        raise ExtensionError(f"the chapter {study.name} failed: {done.error}", done.error)
    figure = done.result.figures[0]
    if len(figure.svg) > LARGEST:
        light = dark = pages / f"{study.name}.png"
        light.write_bytes(figure.png)
    else:
        heading = '<?xml version="1.0" encoding="utf-8"?>\n'
        _write(light, heading + figure.svg)
        _write(dark, heading + _darkened(figure.svg))
    return Picture(light.name, dark.name, figure.alt, figure.caption, done.result.paragraphs[0])


def _darkened(svg: str) -> str:
    for light, dark in THEME.values():
        svg = svg.replace(light, dark)
    return svg


def _images(picture: Picture, alt: str) -> str:
    if picture.light == picture.dark:
        return f"```{{image}} {picture.light}\n:alt: {alt}\n:class: printed\n```"
    return "\n\n".join(
        f"```{{image}} {file}\n:alt: {alt}\n:class: only-{mode}\n```"
        for mode, file in (("light", picture.light), ("dark", picture.dark))
    )


def _card(study: Study, picture: Picture) -> str:
    where = picture.light if picture.light.startswith("../..") else f"pages/{picture.light}"
    light = where.replace("../../", "../")
    dark = light if picture.light == picture.dark else f"pages/{picture.dark}"
    images = _images(Picture(light, dark, "", "", ""), study.title)
    return f":::{{grid-item-card}} {study.title}\n:link: pages/{study.name}\n:link-type: doc\n:class-card: thumb\n\n{images}\n:::"


def _page(study: Study, picture: Picture, here: Path) -> str:
    code = (here / "code" / f"{study.name}.py").read_text(encoding="utf-8").strip()
    record = here.parent / "results" / study.name / "result.json"
    kept = f" Its [kept results](../../results/README.md) say what was run and how it differs from the paper." if record.exists() else ""
    return "\n\n".join(
        [
            f"# {study.title}",
            f"*After {study.source}.*",
            picture.summary,
            _images(picture, picture.alt.replace("\n", " ")),
            f"{picture.caption}",
            "## In code",
            f"```python\n{code}\n```",
            "## The whole chapter",
            f"```console\n$ fenchel study run {study.name}\n```",
            f"It runs on embedded data and writes all figures, tables and text of this chapter.{kept}",
        ]
    ) + "\n"


def _write(path: Path, text: str) -> None:
    """Write a file if its text is new, so that unchanged pages are not read again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8", newline="\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages once the application is there, before sources are listed."""
    os.environ.pop("FENCHEL_DATA", None)
    write_pages(app)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
