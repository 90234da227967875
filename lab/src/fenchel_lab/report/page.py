"""The report: one page that holds every chapter, its figures and its tables, and needs nothing else."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from fenchel.seq2seq.saving import write_whole
from fenchel_lab.drawing import style
from fenchel_lab.outputs import Output, is_signed
from fenchel_lab.report.origin import commit, version
from fenchel_lab.report.result import Figure, show
from fenchel_lab.report.runs import Run

LARGEST_SVG = 300_000
"""Characters. A drawing with more marks than this is smaller, and faster to show, as an image."""


FIRST = 6
"""How many chapters stand before the themes: those with the lowest order."""

TITLE = "Fenchel: the tour"
OUTPUT = Output(
    "fenchel tour",
    ["index.html"],
    lambda folder: ["index.html"] if is_signed(folder / "index.html", f"<title>{TITLE}</title>") else [],
)
"""What the tour writes: its page is known by the title."""


@dataclass(frozen=True)
class Theme:
    """A part of the contents: its title, and its chapters with their numbers."""

    title: str
    chapters: list[tuple[int, Run]]


def contents(runs: Sequence[Run]) -> list[Theme]:
    """The first chapters, then the others by theme, in the order in which the themes appear.

    A tour of few chapters has no need of themes: they are all first.
    """
    parts: dict[str, list[Run]] = {"See these first": list(runs[:FIRST])}
    for run in runs[FIRST:]:
        parts.setdefault(run.study.theme or "More", []).append(run)
    themes, number = [], 1
    for title, members in parts.items():
        themes.append(Theme(title, list(enumerate(members, number))))
        number += len(members)
    return themes


def write(runs: Sequence[Run], folder: Path, planned: int | None = None) -> Path:
    """Write ``index.html`` into a folder, made if need be: one chapter per run, the failed ones too.

    Args:
        runs: the chapters.
        folder: where to.
        planned: how many chapters there should be, the page says so if there are fewer.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": code, "show": show}
    environment.globals |= {"embed": embed, "thumbnail": thumbnail}
    template = environment.from_string(resources.files(__package__).joinpath("page.html.jinja").read_text("utf-8"))
    page = template.render(
        title=TITLE,
        runs=runs,
        themes=contents(runs),
        planned=planned,
        failed=[run for run in runs if run.error],
        theme=style.THEME,
        version=version(),
        commit=commit(),
        seconds=sum(run.seconds for run in runs),
    )
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "index.html"
    write_whole(index, lambda path: path.write_text(page, encoding="utf-8"))
    return index


def embed(figure: Figure, name: str) -> Markup:
    """A figure as a part of the page. ``name`` tells its parts from those of other figures."""
    if is_image(figure):
        data = base64.b64encode(figure.png).decode()
        return Markup('<img class="drawing" alt="{}" src="data:image/png;base64,{}">').format(figure.alt, data)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", figure.svg)
    for colour, (light, _) in style.THEME.items():
        svg = svg.replace(light, f"var(--{colour})")
    return Markup('<div class="drawing" role="img" aria-label="{}">{}</div>').format(figure.alt, Markup(svg))


def is_image(figure: Figure) -> bool:
    """Whether a figure has so many marks that it is shown as an image, which has one look on light and dark pages."""
    return len(figure.svg) > LARGEST_SVG


def thumbnail(figure: Figure, name: str) -> Markup:
    """A small view of a figure that ``embed`` put on the page under the same name; empty for an image."""
    size, drawn = re.search(r'viewBox="([^"]*)"', figure.svg), re.search(r'<g id="([^"]*)"', figure.svg)
    if is_image(figure) or size is None or drawn is None:
        return Markup("")
    return Markup('<svg viewBox="{}" aria-hidden="true"><use href="#{}-{}"></use></svg>').format(
        size[1], name, drawn[1]
    )


def code(text: str) -> Markup:
    """Text with what stands in backticks set as code.

    Example:
        >>> print(code("where `x < 1`"))
        where <code>x &lt; 1</code>
    """
    marked = re.sub("`(.*?)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\b(arg)?(max|min)_Ω", r"\1\2<sub>Ω</sub>", marked))
