"""Highlights: which words of a text were chosen, as spans, as a page, as a picture, and beside what people marked."""

from __future__ import annotations

import html
import itertools
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import Template

from matplotlib import figure as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fenchel_lab.drawing import style

# As word vectors know them: "didn't" is two words, and so is "film's"; what is left of a word comes first.
WORD = re.compile(
    r"[^\W_]+?(?=n['’]t\b)|n['’]t\b|['’](?:s|m|d|re|ve|ll)\b|[^\W_]+(?:-[^\W_]+)*|\.{2,}|[^\w\s]", re.IGNORECASE
)

Place = tuple[int, int]
"""First character, and the one behind the last."""


def places(text: str) -> list[Place]:
    """Where the words of a text stand.

    Example:
        >>> text = "I didn’t like it: a 90-minute bore..."
        >>> [text[start:end] for start, end in places(text)]
        ['I', 'did', 'n’t', 'like', 'it', ':', 'a', '90-minute', 'bore', '...']
    """
    found: list[Place] = []
    for start, end in (match.span() for match in WORD.finditer(text)):
        if found and found[-1][1] == start and _goes_on(text, found[-1][0], start):
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


def _goes_on(text: str, first: int, place: int) -> bool:
    """Whether a word does not end before a place: marks, of which ``re`` makes no letters, belong to what they mark."""
    letters = text[first].isalnum() and text[place].isalnum()
    return _is_mark(text[place]) or (letters and _is_mark(text[place - 1]))


def _is_mark(char: str) -> bool:
    return unicodedata.category(char).startswith("M")


def normal(word: str) -> str:
    """A word as a vocabulary has it: lower case, plain apostrophes."""
    return word.lower().replace("’", "'")


@dataclass(frozen=True)
class Span:
    """Neighbouring words that were chosen.

    Args:
        start: its first character in the text.
        end: the character behind its last.
        text: what stands there.
        weight: the sum of its words' weights.
    """

    start: int
    end: int
    text: str
    weight: float


@dataclass(frozen=True)
class Explanation:
    """What a text was classed as, and the words that decided.

    Args:
        text: as it was given; words that were given one by one stand in it with blanks between.
        places: of its words.
        weights: one per word: exactly 0 for each that was not chosen, or not read.
        label: the class with the highest score, or the rating.
        probabilities: of all classes; none for a rating.
        unknown: words without a vector, each once, in the order of the text. They are read as one and the same.
    """

    text: str
    places: Sequence[Place]
    weights: Sequence[float]
    label: str
    probabilities: Mapping[str, float]
    unknown: Sequence[str] = ()

    @property
    def words(self) -> list[str]:
        """The words of the text."""
        return [self.text[start:end] for start, end in self.places]

    @cached_property
    def spans(self) -> list[Span]:
        """The chosen words in the order of the text, neighbours together; none for a text without words."""
        spans = []
        for run in runs(self.weights):
            start, end = self.places[run[0]][0], self.places[run[-1]][1]
            spans.append(Span(start, end, self.text[start:end], float(sum(self.weights[place] for place in run))))
        return spans

    @cached_property
    def html(self) -> str:
        """The text as one ``<p>`` with a ``<mark>`` for every span, the stronger the higher its words' mean weight."""
        most = max(self.weights, default=0.0) or 1.0
        parts, at = [], 0
        for run, span in zip(runs(self.weights), self.spans, strict=True):
            share = span.weight / len(run) / most
            parts.append(html.escape(self.text[at : span.start]))
            title = f"{span.weight:.3g}"
            marked = html.escape(self.text[span.start : span.end])
            parts.append(f'<mark style="--weight:{share:.3f}" title="{title}">{marked}</mark>')
            at = span.end
        parts.append(html.escape(self.text[at:]))
        return f"<p>{''.join(parts)}</p>"


def runs(weights: Sequence[float]) -> list[list[int]]:
    """The places of chosen words, a list for each run of neighbours.

    Example:
        >>> runs([0.0, 0.5, 0.2, 0.0, 1.0])
        [[1, 2], [4]]
    """
    groups = itertools.groupby(range(len(weights)), key=lambda place: weights[place] != 0)
    return [list(group) for chosen, group in groups if chosen]


def overlap(chosen: Collection[int], marked: Collection[int]) -> float:
    """F₁ of chosen places beside marked ones; 0 if there are none of either.

    Example:
        >>> overlap([1, 2, 3], [2, 3, 4, 5, 6])
        0.5
    """
    chosen, marked = set(chosen), set(marked)
    both = len(chosen & marked)
    return 2 * both / (len(chosen) + len(marked)) if both else 0.0


def f1(predicted: Sequence[float], labels: Sequence[float]) -> float:
    """The mean over the classes that occur of each one's F₁.

    Example:
        >>> f1([0, 0, 1, 1], [0, 1, 1, 1])
        0.7333333333333334
    """
    scores = []
    for label in sorted({*predicted, *labels}):
        found, there = ([place for place, each in enumerate(side) if each == label] for side in (predicted, labels))
        scores.append(overlap(found, there))
    return sum(scores) / len(scores) if scores else 0.0


# -- pages and pictures ------------------------------------------------------------------------------------------------

PAGE = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="generator" content="fenchel rationale explain">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: $ink; --paper: $paper; --muted: $muted; --hue: $amber; }
@media (prefers-color-scheme: dark) { :root { --ink: $dark_ink; --paper: $dark_paper; --muted: $dark_muted; } }
body { font: 1rem/1.6 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 42rem;
  margin: 2rem auto; padding: 0 1rem; }
article { border-top: 1px solid var(--muted); padding: .5rem 0; }
article p { white-space: pre-line; overflow-wrap: anywhere; }
.label { font-weight: bold; }
.note { color: var(--muted); font-size: .85rem; }
mark { color: inherit; border-radius: .2em; padding: 0 .1em;
  background: color-mix(in srgb, var(--hue) calc(20% + 60% * var(--weight)), transparent); }
</style></head><body>
<h1>$title</h1>
<p class="note">Highlighted words have weight, the others none; point at a highlight to see how much.</p>
$articles
</body></html>
"""
)


def page(explanations: Sequence[Explanation], title: str = "Highlights") -> str:
    """One HTML page that needs nothing else: every text with its class and its highlights."""
    theme = {name: light for name, (light, _) in style.THEME.items()}
    theme |= {f"dark_{name}": dark for name, (_, dark) in style.THEME.items()}
    articles = "\n".join(map(_article, explanations))
    return PAGE.substitute(theme, title=html.escape(title), articles=articles or "<p>There is no text.</p>")


def _article(explanation: Explanation) -> str:
    chosen = sum(weight != 0 for weight in explanation.weights)
    notes = [f"{chosen} of {len(explanation.weights)} words in {len(explanation.spans)} spans"]
    if explanation.unknown:
        notes.append(f"unknown: {', '.join(explanation.unknown)}")
    head = f'<span class="label">{html.escape(explanation.label)}</span>'
    if explanation.probabilities:
        head += f" {explanation.probabilities[explanation.label]:.0%}"
    note = html.escape("; ".join(notes))
    return f'<article>{head} <span class="note">{note}</span>{explanation.html}</article>'


COLUMNS, LINE, SIZE = 56, 0.19, 8.3
"""Characters a line of a picture, a line's height in inches, and points of the letters, each a column wide."""


def picture(shown: Sequence[tuple[str, Sequence[str], Sequence[float]]], marked: Collection[int] = ()) -> mpl.Figure:
    """Texts, each with title, words and weights: chosen words on a coloured ground, those at ``marked`` underlined."""
    lines = [_lines(words) for _, words, _ in shown]
    heights = [max((line for line, _ in each), default=0) + 2.2 for each in lines]
    drawing = mpl.Figure(figsize=(style.WIDTH, LINE * sum(heights)))
    grid = drawing.subplots(len(shown), 1, squeeze=False, height_ratios=heights)
    drawing.subplots_adjust(left=0.01, right=0.99, bottom=0.0, top=0.98, hspace=0.0)
    for axes, (title, words, weights), at, height in zip(grid.flat, shown, lines, heights, strict=True):
        axes.set(xlim=(0, COLUMNS), ylim=(height - 1.4, -1.4))
        axes.axis("off")
        axes.text(0, -0.9, title, weight="bold", va="center")
        _words(axes, words, weights, at, marked)
    return drawing


def _lines(words: Sequence[str]) -> list[Place]:
    """The line and the column of every word."""
    found, line, column = [], 0, 0
    for word in words:
        if column and column + len(word) > COLUMNS:
            line, column = line + 1, 0
        found.append((line, column))
        column += len(word) + 1
    return found


def _words(
    axes: Axes, words: Sequence[str], weights: Sequence[float], at: Sequence[Place], marked: Collection[int]
) -> None:
    most = max(weights, default=0.0) or 1.0
    for place, (word, weight, (line, column)) in enumerate(zip(words, weights, at, strict=True)):
        joined = place + 1 < len(words) and weights[place + 1] != 0 and at[place + 1][0] == line
        if weight:
            ground = Rectangle((column - 0.1, line - 0.45), len(word) + (1.0 if joined else 0.2), 0.9, lw=0)
            ground.set(facecolor=style.THEME["amber"][0], alpha=0.2 + 0.6 * weight / most, zorder=1)
            axes.add_patch(ground)
        if place in marked:
            axes.plot([column, column + len(word)], [line + 0.42] * 2, color=style.PALETTE[0], lw=1.2, zorder=2)
        safe = word.replace("$", r"\$")
        axes.text(column, line, safe, family="monospace", size=SIZE, va="center", zorder=3)
