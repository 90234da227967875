"""Drawings of a search: the tree of a beam, the alternatives at each step, the attention to what was read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib import figure as mpl
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

from fenchel.seq2seq import Beam, Choice, Vocabulary
from fenchel_lab.drawing import style

MOST = 8
"""Strings of a tree, and alternatives of a step, that a reader can still tell apart."""

Prefix = tuple[int, ...]


def name(symbol: str) -> str:
    """A symbol as it is shown.

    Example:
        >>> name(" "), name("</s>"), name("<PST>"), name("ä")
        ('␣', '▪', 'PST', 'ä')
    """
    return {" ": "␣", "</s>": "▪", "<unk>": "?"}.get(symbol, symbol.strip("<>") if len(symbol) > 1 else symbol)


def tree(beam: Beam, vocabulary: Vocabulary, right: Sequence[str] | None = None) -> mpl.Figure:
    """The strings of a beam as a tree, each with its probability; the right one, if given, in another colour.

    A string that was cut before its end, which a beam has if no other ended, is marked with an ellipsis.
    """
    strings = {each.tokens: each.probability for each in beam.hypotheses[:MOST]}
    cut = {each.tokens for each in beam.hypotheses if not each.finished}
    ends = sorted(strings, reverse=True)
    heights: dict[Prefix, list[int]] = {}
    for height, tokens in enumerate(ends):
        for length in range(len(tokens) + 1):
            heights.setdefault(tokens[:length], []).append(height)
    place = {prefix: (len(prefix), sum(under) / len(under)) for prefix, under in heights.items()}
    wanted = None if right is None else tuple(vocabulary.encode(right))
    longest = max(map(len, ends), default=0)
    drawing, (axes,) = style.panels(1, 1, height=0.6 + 0.42 * max(len(ends), 1))
    for prefix, (x, y) in place.items():
        on_the_way = wanted is not None and wanted[: len(prefix)] == prefix and wanted in strings
        colour = style.PALETTE[0] if on_the_way else style.MUTED
        if len(prefix) > 1 or (prefix and len(heights[prefix]) < len(ends)):  # no line to what all begin with
            before = place[prefix[:-1]]
            axes.plot([before[0] + 0.28, x - 0.28], [before[1], y], color=colour, linewidth=1.1)
        if prefix:
            axes.text(x, y, name(vocabulary.name(prefix[-1])), ha="center", va="center", color=style.INK)
        if prefix in strings:
            row = ends.index(prefix)  # of its own, where others go on from here
            colour = style.PALETTE[0] if prefix == wanted else style.MUTED
            axes.plot([x + 0.28, x + 0.72, longest + 0.8], [y, row, row], color=colour, linewidth=1.1, linestyle=":")
            note = f"{'… cut, ' if prefix in cut else ''}{strings[prefix]:.1%}"
            axes.text(longest + 0.9, row, note, ha="left", va="center", fontsize=8, color=colour)
    axes.set_xlim(-0.2, longest + 2.6)
    axes.set_ylim(-0.6, len(ends) - 0.4)
    axes.axis("off")
    return drawing


def attention(
    panels: Sequence[tuple[str, Tensor]], source: Sequence[str], target: Sequence[str], across: bool = False
) -> mpl.Figure:
    """Attention of written symbols (rows) to those that were read (columns), one panel per model; zero is blank.

    Panels stand one above the other, or ``across`` the page, which few symbols fit.
    """
    grid = (1, len(panels)) if across else (len(panels), 1)
    drawing, axes = style.panels(*grid, height=0.75 + 0.2 * (len(target) + 1), sharey=across)
    for each, (title, weights) in zip(axes, panels, strict=True):
        _map(each, weights, source, target)
        each.set_title(title)
    return drawing


def _map(axes: Axes, weights: Tensor, source: Sequence[str], target: Sequence[str]) -> None:
    shown = torch.where(weights > 0, weights, torch.nan).detach()  # what has no weight stays blank
    axes.imshow(shown.numpy(), cmap=style.MASS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(source)), [name(symbol) for symbol in source])
    for label in axes.get_xticklabels():
        label.set_rotation(90 if len(label.get_text()) > 1 else 0)
    axes.set_yticks(range(len(target) + 1), [*map(name, target), name("</s>")])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def alternatives(choices: Sequence[Choice], vocabulary: Vocabulary) -> mpl.Figure:
    """A string, and under each of its symbols all others that were possible; boxes join what could only come so."""
    under = [[pair for pair in each.alternatives if pair[0] != each.token] for each in choices]
    tallest = min(MOST, 1 + max(map(len, under)))
    drawing, (axes,) = style.panels(1, 1, height=0.5 + 0.24 * tallest)
    for column, (choice, others) in enumerate(zip(choices, under, strict=True)):
        symbol = name(vocabulary.name(choice.token))
        colour = style.INK if choice.probability > 0 else style.PALETTE[1]
        axes.text(column, 0, symbol, ha="center", va="center", weight="bold", color=colour)
        for row, (token, probability) in enumerate(others[: tallest - 1], 1):
            shade = style.INK if probability >= 0.05 else style.MUTED
            axes.text(column, row, name(vocabulary.name(token)), ha="center", va="center", color=shade, fontsize=8)
    for first, last in certain(choices):
        box = FancyBboxPatch(
            (first - 0.4, -0.4), last - first + 0.8, 0.8, boxstyle="round,pad=0,rounding_size=0.2", fill=False
        )
        box.set(edgecolor=style.PALETTE[0], linewidth=1.0)
        axes.add_patch(box)
    axes.set_xlim(-0.7, len(choices) - 0.3)
    axes.set_ylim(tallest - 0.4, -0.7)
    axes.axis("off")
    return drawing


def steps(choices: Sequence[Choice], vocabulary: Vocabulary) -> mpl.Figure:
    """A string of words, a row each: its probability as a bar, and all others that were possible, with theirs."""
    drawing, (axes,) = style.panels(1, 1, height=0.2 + 0.21 * len(choices))
    for row, choice in enumerate(choices):
        colour = style.INK if choice.probability > 0 else style.PALETTE[1]
        axes.text(-0.08, row, name(vocabulary.name(choice.token)), ha="right", va="center", weight="bold", color=colour)
        axes.barh(row, 1, 0.6, color=style.FAINT)
        axes.barh(row, choice.probability, 0.6, color=style.PALETTE[0])
        others = [pair for pair in choice.alternatives if pair[0] != choice.token]
        note = _line([f"{name(vocabulary.name(token))} {_percent(p)}" for token, p in others])
        axes.text(1.08, row, note, ha="left", va="center", fontsize=7.5, color=style.INK)
    axes.set_xlim(-1.1, 4.6)
    axes.set_ylim(len(choices) - 0.4, -0.6)
    axes.axis("off")
    return drawing


def _percent(probability: float) -> str:
    percent = 100 * probability
    return f"{percent:.0f}" if percent >= 0.5 else "<1"


def _line(parts: Sequence[str], width: int = 46) -> str:
    """As many parts as a line has room for, and how many more there are.

    Example:
        >>> _line(["on 7", "at 3", "by 1"], 12)
        'on 7, … 2 more'
    """
    line = ", ".join(parts)
    shown = len(parts)
    while len(line) > width and shown > 1:
        shown -= 1
        line = ", ".join([*parts[:shown], f"… {len(parts) - shown} more"])
    return line


def certain(choices: Sequence[Choice]) -> list[tuple[int, int]]:
    """From where to where there was a single continuation, and it was taken.

    Example:
        >>> one, two = Choice(4, 1.0, ((4, 1.0),)), Choice(4, 0.5, ((4, 0.5), (5, 0.5)))
        >>> certain([one, one, two, one])
        [(0, 1), (3, 3)]
    """
    spans: list[tuple[int, int]] = []
    for number, choice in enumerate(choices):
        if len(choice.alternatives) == 1 and choice.alternatives[0][0] == choice.token:
            goes_on = spans and spans[-1][1] == number - 1
            first = spans.pop()[0] if goes_on else number
            spans.append((first, number))
    return spans
