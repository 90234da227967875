"""What a study hands back: text, figures and tables, each beside what the paper reports."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from matplotlib import figure as mpl

from fenchel_lab.drawing import style

Cell = str | int | float
EMPTY = ("", "–")
"""Cells that say nothing."""


@dataclass(frozen=True)
class Figure:
    """A drawing and what a reader needs to understand it.

    Args:
        drawing: made by ``style.panels``, or any ``matplotlib.figure.Figure``.
        caption: what is drawn.
        alt: what one would say of it to somebody who cannot see it.
        paper: what the paper's figure shows, and whether ours agrees.
    """

    drawing: mpl.Figure
    caption: str
    alt: str
    paper: str = ""

    @cached_property
    def svg(self) -> str:
        """The drawing as one ``<svg>`` element on a transparent ground."""
        # Without its metadata the drawing is the same text in every run.
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        buffer = io.StringIO()
        with style.applied():
            self.drawing.savefig(buffer, format="svg", transparent=True, metadata=metadata)
        text = buffer.getvalue()
        return text[text.index("<svg") :]

    @cached_property
    def png(self) -> bytes:
        """The drawing as a PNG image, sharp on a screen of high density."""
        buffer = io.BytesIO()
        with style.applied():
            self.drawing.savefig(buffer, format="png", dpi=200)
        return buffer.getvalue()


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under a header.

    Args:
        header: one name a column.
        rows: text, integers, or floats (shown with four digits; format them yourself for anything else).
        caption: what is counted or measured.
        paper: what the paper reports, where that is not a column of its own.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str
    paper: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"row {list(row)} has {len(row)} cells, the header {len(self.header)}")
            for cell in row:
                if not isinstance(cell, Cell):
                    raise TypeError(f"a cell must be text or a number, got {type(cell).__name__}; convert it")

    def filled(self) -> tuple[list[str], list[list[Cell]]]:
        """Header and rows without the columns that have nothing in any row, as the paper's on embedded data."""
        kept = [i for i in range(len(self.header)) if any(row[i] not in EMPTY for row in self.rows)]
        return [self.header[i] for i in kept], [[row[i] for i in kept] for row in self.rows]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and whether a study's runs bear it out: a row of the page of results.

    Args:
        claim: in one sentence.
        paper: the paper's figures.
        ours: the same figures of the study, with intervals.
        holds: "yes", "no", "in part", "not shown", …
    """

    claim: str
    paper: str
    ours: str
    holds: str

    @property
    def row(self) -> str:
        """The first cells of a row in Markdown.

        Example:
            >>> Claim("Sparse codes", "1.57", "1.6 ± 0.1", "yes").row
            '| Sparse codes | 1.57 | 1.6 ± 0.1 | yes |'
        """
        return f"| {self.claim} | {self.paper} | {self.ours} | {self.holds} |"


@dataclass(frozen=True)
class Result:
    """What a study found.

    Args:
        summary: what is shown and what it means; paragraphs separated by blank lines, `code` in backticks.
        figures: in reading order.
        tables: in reading order, after the figures.
        claims: of the paper, beside what was found.
    """

    summary: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    claims: Sequence[Claim] = ()

    @property
    def paragraphs(self) -> list[str]:
        """The summary, one line per paragraph."""
        return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", self.summary.strip())]


def show(cell: Cell) -> str:
    """A cell as a reader sees it.

    Example:
        >>> show(0.123456), show(7), show("none"), show(float("inf"))
        ('0.1235', '7', 'none', '∞')
    """
    if isinstance(cell, float):
        return f"{cell:.4g}".replace("inf", "∞").replace("-", "−")
    return str(cell)
