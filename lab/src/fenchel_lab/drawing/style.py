"""How figures look: one palette, one set of sizes, and panels that stay legible at the width of a phone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib.style
from cycler import cycler
from matplotlib import figure as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba

THEME = {
    "ink": ("#1f2933", "#e4e7eb"),
    "muted": ("#616e7c", "#9aa5b1"),
    "faint": ("#d5dae1", "#3b4452"),
    "paper": ("#ffffff", "#14181f"),
    "blue": ("#0072b2", "#4aa8e0"),
    "vermilion": ("#d55e00", "#f5813c"),
    "green": ("#009e73", "#2fc79b"),
    "pink": ("#c06a9a", "#e39cc4"),
    "amber": ("#d99200", "#f0b740"),
    "sky": ("#56b4e9", "#a5dcff"),
}
"""Colours on a light and on a dark page. Figures use the light one; the report swaps it by name.

The hues are Okabe and Ito's, told apart with any colour vision.
"""

INK, MUTED, FAINT, PAPER = (THEME[name][0] for name in ("ink", "muted", "faint", "paper"))
ON_COLOUR = "#fefefe"
"""Text on strong colours, on light and on dark pages."""
PALETTE = [THEME[name][0] for name in ("blue", "vermilion", "green", "pink", "amber", "sky")]


def _shades(least: float) -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list("blue", [to_rgba(PALETTE[0], least), to_rgba(PALETTE[0])])


DENSITY = _shades(0.0)
"""From nothing at all to blue. The ground shows through, so that an image suits a light and a dark page."""
MASS = _shades(0.15)
"""The same for weights: the smallest is still seen. Give NaN for zero, which stays blank."""

WIDTH = 4.0
"""Inches. Shown at its own size a figure just fills a phone, so its 9-point text is read as such there."""

_SETTINGS: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "fenchel",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8,
}

_SETTINGS_IN_USE = threading.RLock()


@contextmanager
def applied() -> Iterator[None]:
    """Within it, matplotlib draws in this style. Matplotlib's settings are global, so one thread at a time."""
    with _SETTINGS_IN_USE, matplotlib.style.context(_SETTINGS, after_reset=True):
        yield


def panels(rows: int, columns: int, *, height: float = 2.4, **subplots: Any) -> tuple[mpl.Figure, list[Axes]]:
    """A drawing of rows × columns panels, ``height`` inches each row, and its axes in reading order.

    More than two columns are too small for a phone. ``subplots`` goes to ``Figure.subplots``: sharex, sharey.
    """
    drawing = mpl.Figure(figsize=(WIDTH, height * rows), layout="constrained")
    grid = drawing.subplots(rows, columns, squeeze=False, **subplots)
    return drawing, list(grid.flat)
