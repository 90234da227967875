"""Dependency arcs over the words of a sentence, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Arc as Curve

from fenchel_lab.drawing import style


@dataclass(frozen=True)
class Arc:
    """An arc to a modifier, counted from 1, from its head, where 0 is the root."""

    modifier: int
    head: int
    weight: float = 1.0
    colour: str = style.MUTED


def draw(axes: Axes, words: Sequence[str], arcs: Sequence[Arc]) -> None:
    """Draw arcs above the words; lighter ones are fainter, and the root's come from above."""
    # A word takes room by its letters, and half of it lies to each side of its middle.
    widths = [len(word) + 1.6 for word in words]
    middles = [sum(widths[:i]) + widths[i] / 2 for i in range(len(words))]
    top = max([abs(arc.head - arc.modifier) for arc in arcs if arc.head] or [1]) + 0.6
    for arc in sorted(arcs, key=lambda arc: arc.weight):
        middle = middles[arc.modifier - 1]
        alpha = min(0.25 + 0.75 * arc.weight, 1.0)
        look: dict[str, Any] = {"color": arc.colour, "alpha": alpha, "linewidth": 0.8 + 0.8 * arc.weight}
        if arc.head == 0:
            axes.plot([middle] * 2, [0, top], **look)
        else:
            # It leaves its head beside the middle, where the head's own arc arrives.
            side = 1 if arc.modifier > arc.head else -1
            leaves = middles[arc.head - 1] + 0.15 * side * len(words[arc.head - 1])
            center, width, height = (middle + leaves) / 2, abs(middle - leaves), 2 * abs(arc.head - arc.modifier)
            axes.add_patch(Curve((center, 0), width, height, theta1=0, theta2=180, **look))
        axes.plot(
            [middle], [0.02 * top], "v", color=arc.colour, alpha=alpha, markersize=5, markeredgewidth=0, clip_on=False
        )
    for word, middle in zip(words, middles, strict=True):
        axes.text(middle, -0.16 * top, word, ha="center", va="top", fontsize=8)
    axes.set(xlim=(0, sum(widths)), ylim=(-0.5 * top, top))
    axes.axis("off")
