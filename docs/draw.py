"""Draw the picture of the front page: four maps of the same scores, for light and for dark pages.

    python docs/draw.py     # writes docs/_static/maps-light.svg, maps-dark.svg, and both in two rows for phones
"""

from __future__ import annotations

import io
from pathlib import Path

import torch
from matplotlib.figure import Figure

import fenchel
from fenchel_lab.drawing import style

SCORES = torch.tensor([0.2, 0.7, 2.0, 1.7, 1.9, 0.4, -0.3, 1.2, 0.1], dtype=torch.float64)
MAPS = {
    "softmax": ("every option gets some", fenchel.softmax(SCORES)),
    "entmax, α = 1.5": ("sparse and smooth", fenchel.entmax(SCORES, 1.5)),
    "sparsemax": ("sparser", fenchel.sparsemax(SCORES)),
    "fusedmax": ("sparse, in segments", fenchel.fusedmax(SCORES, 0.3)),
}
INK, MUTED, FAINT, BLUE, VERMILION = (style.THEME[name] for name in ("ink", "muted", "faint", "blue", "vermilion"))


def draw(dark: bool, rows: int = 1) -> str:
    """The picture as SVG on a transparent ground; text is drawn as outlines."""
    mode = int(dark)
    with style.applied():
        figure = Figure(figsize=(9.6 / rows, 2.5 * rows), layout="constrained")
        panels = figure.subplots(rows, len(MAPS) // rows, sharey=True).flat
        for axes, (name, (what, p)) in zip(panels, MAPS.items(), strict=True):
            colour = MUTED[mode] if name == "softmax" else BLUE[mode]
            places = range(len(p))
            axes.bar(places, p, color=colour, width=0.72)
            zeros = [i for i in places if p[i] == 0]
            axes.plot(zeros, [0.011] * len(zeros), "o", color=VERMILION[mode], markersize=3.4)
            axes.set_title(name, color=INK[mode], fontsize=13, loc="left", pad=22)
            axes.text(0, 1.045, what, transform=axes.transAxes, color=MUTED[mode], fontsize=10.5)
            axes.set(xticks=[], yticks=[0, 0.2, 0.4], ylim=(0, 0.5))
            axes.tick_params(colors=MUTED[mode], labelcolor=MUTED[mode], length=0, labelsize=10)
            axes.grid(axis="y", color=FAINT[mode])
            axes.grid(visible=False, axis="x")
            for side in axes.spines.values():
                side.set_visible(False)
            axes.axhline(0, color=MUTED[mode], linewidth=1)
        axes.plot([], [], "o", color=VERMILION[mode], markersize=3.4, label="exactly zero")
        axes.legend(loc="upper right", fontsize=10, labelcolor=MUTED[mode], handletextpad=0.1, borderaxespad=0)
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    return buffer.getvalue()


if __name__ == "__main__":
    for mode in ("light", "dark"):
        for rows, name in ((1, f"maps-{mode}.svg"), (2, f"maps-narrow-{mode}.svg")):
            file = Path(__file__).parent / "_static" / name
            file.write_text(draw(mode == "dark", rows), encoding="utf-8", newline="\n")
            print(file)
