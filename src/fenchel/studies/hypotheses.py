"""Drawings of a search: the tree of a beam, the alternatives at each step, the attention to what was read."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import figure as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import FancyBboxPatch, Rectangle
from torch import Tensor

from fenchel.seq2seq import Beam, Choice, Vocabulary
from fenchel.studies import style

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
    """The strings of a beam as a tree, each with its probability; the right one, if told, in another colour."""
    strings = {each.tokens: each.probability for each in beam.hypotheses[:MOST] if each.finished}
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
            axes.plot([x + 0.28, longest + 0.8], [y, y], color=colour, linewidth=1.1, linestyle=":")
            axes.text(longest + 0.9, y, f"{strings[prefix]:.1%}", ha="left", va="center", fontsize=8, color=colour)
    axes.set_xlim(-0.2, longest + 2.6)
    axes.set_ylim(-0.6, len(ends) - 0.4)
    axes.axis("off")
    return drawing


def attention(panels: Sequence[tuple[str, Tensor]], source: Sequence[str], target: Sequence[str]) -> mpl.Figure:
    """Attention of written symbols (rows) to those that were read (columns), a panel a model; outlined if not zero."""
    drawing, axes = style.panels(len(panels), 1, height=0.75 + 0.2 * (len(target) + 1))
    for each, (title, weights) in zip(axes, panels, strict=True):
        _map(each, weights, source, target)
        each.set_title(title)
    return drawing


def _map(axes: Axes, weights: Tensor, source: Sequence[str], target: Sequence[str]) -> None:
    shades = LinearSegmentedColormap.from_list("weights", [style.PAPER, style.PALETTE[0]])
    axes.imshow(weights.detach().numpy(), cmap=shades, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for row, column in (weights > 0).nonzero().tolist():
        corner = column - 0.46, row - 0.44
        axes.add_patch(Rectangle(corner, 0.92, 0.88, fill=False, edgecolor=style.INK, linewidth=0.6))
    axes.set_xticks(range(len(source)), [name(symbol) for symbol in source])
    for label in axes.get_xticklabels():
        label.set_rotation(90 if len(label.get_text()) > 1 else 0)
    axes.set_yticks(range(len(target) + 1), [*map(name, target), name("</s>")])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def alternatives(choices: Sequence[Choice], vocabulary: Vocabulary) -> mpl.Figure:
    """A string, and under each of its symbols all others that were possible; boxes join what could only come so."""
    tallest = min(MOST, max(len(each.alternatives) for each in choices))
    drawing, (axes,) = style.panels(1, 1, height=0.5 + 0.24 * tallest)
    for column, choice in enumerate(choices):
        others = [pair for pair in choice.alternatives if pair[0] != choice.token]
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
