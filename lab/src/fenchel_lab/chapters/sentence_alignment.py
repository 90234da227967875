"""Alignments of a sentence pair: each word by itself, one after the other, and one to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fenchel import SparseMAP, softmax, sparsemax
from fenchel.structures import Chain, Matching
from fenchel_lab.data import glove
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

PREMISE = ["a", "brown", "dog", "runs", "after", "a", "ball", "on", "the", "grass"]
HYPOTHESIS = ["an", "animal", "is", "chasing", "a", "toy", "outside"]

SHARPNESS = 6.0
"""What a cosine of 1 counts."""
BACKWARD = 1.0
"""What a step back costs, for each word of it."""

FEATURES = ("article", "verb form", "animal", "quality", "motion", "pursuit", "plaything", "relation", "place")
LEXICON: dict[str, dict[str, float]] = {
    "a": {"article": 1},
    "an": {"article": 1},
    "the": {"article": 1, "place": 0.2},
    "is": {"verb form": 1, "motion": 0.3},
    "brown": {"quality": 1, "animal": 0.3},
    "dog": {"animal": 1, "pursuit": 0.2},
    "animal": {"animal": 1, "quality": 0.1},
    "runs": {"motion": 1, "verb form": 0.5, "pursuit": 0.3},
    "after": {"relation": 0.6, "pursuit": 1},
    "chasing": {"motion": 0.7, "pursuit": 1},
    "ball": {"plaything": 1, "place": 0.1},
    "toy": {"plaything": 1, "animal": 0.1},
    "on": {"relation": 1, "place": 0.3},
    "grass": {"place": 1, "quality": 0.2},
    "outside": {"place": 1, "relation": 0.5},
}

SUMMARY = """
Which words of a premise does each word of a hypothesis mean? “A brown dog runs after a ball on the grass”, “an animal
is chasing a toy outside”. Scores say how alike two words are; three kinds of attention make an alignment of them.

Softmax treats every word of the hypothesis by itself: everything gets some weight, and “an” and “a” look at all
articles alike. A sequence, `SparseMAP(Chain(transition))` with a price for steps back, moves through the premise from
left to right, so that the first article goes with the first words and the second with the later ones. A matching,
`SparseMAP(Matching())`, is one to one: a word of the premise that is taken is not taken again. Both are sparse
mixtures of a few whole alignments, and differentiable like softmax, so that a network can be trained through them.
"""

EMBEDDED = "The scores are cosines of small hand-made vectors, told in the code; with `FENCHEL_DATA` set, of GloVe's."
REAL = """
The scores are cosines of GloVe vectors of 50 numbers, less the mean of all words. These know a word, not its sentence:
“toy” is nearest to “dog”, and function words to each other, so that the alignments mix more than those of the
hand-made scores in the tour.
"""


@dataclass(frozen=True)
class Alignment:
    """Weights of hypothesis words (rows) on premise words, and the whole alignments that they average, if any."""

    name: str
    weights: Tensor
    mixture: Tensor | None = None


CODE = """
import torch, fenchel
from fenchel.structures import Matching

words, others = torch.randn(4, 16), torch.randn(4, 16)
scores = words @ others.T / 4
print(fenchel.softmax(scores))  # every word with every other
print(fenchel.SparseMAP(Matching()).argmax(scores))  # a few whole matchings
"""


@study(
    "Alignments of a sentence pair",
    source="Martins (2024), From Sparse Modeling to Sparse Communication, latent structured alignments in SNLI; "
    "Niculae et al. (2018), SparseMAP",
    order=22,
    theme="Structures",
    code=CODE,
    data=["glove"],
)
def sentence_alignment(context: Context) -> Result:
    """Draw the alignments, and count what they are made of."""
    scores = SHARPNESS * likeness(context.data)
    chosen = alignments(scores)
    context.progress(1.0, "aligned")
    return Result(
        f"{SUMMARY}\n\n{EMBEDDED if context.data is None else REAL}",
        figures=[_figure(chosen)],
        tables=[_counts(chosen)],
    )


def likeness(folder: Path | None) -> Tensor:
    """Cosines of the words of the hypothesis (rows) and of the premise."""
    if folder is None:
        vectors = {word: [of.get(feature, 0.0) for feature in FEATURES] for word, of in LEXICON.items()}
    else:
        table = glove.load(folder)
        center = table.vectors.mean(0)  # what all words have in common would make all of them alike
        vectors = {word: (table[word] - center).tolist() for word in {*PREMISE, *HYPOTHESIS}}
    rows, columns = (
        torch.nn.functional.normalize(torch.tensor([vectors[word] for word in words], dtype=torch.float64), dim=-1)
        for words in (HYPOTHESIS, PREMISE)
    )
    return rows @ columns.mT


def alignments(scores: Tensor) -> list[Alignment]:
    """The scores under softmax, sparsemax, a sequence and a matching."""
    sequence = SparseMAP(Chain(steps(scores.shape[-1]))).solve(scores)
    matching = SparseMAP(Matching()).solve(scores)
    return [
        Alignment("softmax", softmax(scores)),
        Alignment("sparsemax", sparsemax(scores)),
        Alignment("sequence", sequence.marginals, sequence.weights),
        Alignment("matching", matching.marginals, matching.weights),
    ]


def steps(words: int) -> Tensor:
    """Scores of going from a word of the premise to another: steps back cost, others are free."""
    place = torch.arange(words, dtype=torch.float64)
    return -BACKWARD * (place.unsqueeze(1) - place).relu()


def _figure(chosen: Sequence[Alignment]) -> Figure:
    drawing, panels = style.panels(2, 2, height=2.3, sharex=True, sharey=True)
    for axes, alignment in zip(panels, chosen, strict=True):
        shown = torch.where(alignment.weights > 0, alignment.weights, torch.nan)  # what has no mass stays blank
        axes.imshow(shown.numpy(), cmap=style.MASS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_title(alignment.name)
        axes.set_xticks(range(len(PREMISE)), PREMISE, rotation=90)
        axes.set_yticks(range(len(HYPOTHESIS)), HYPOTHESIS)
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
    return Figure(
        drawing,
        caption="Weights of the words of the hypothesis (rows) on those of the premise (columns); the stronger the "
        "colour the more, blank is exactly zero.",
        alt="Four matrices. Softmax: every cell has some weight. Sparsemax: a few cells per row, both articles twice. "
        "Sequence: cells along the diagonal, from the upper left to the lower right. Matching: nearly one cell per row "
        "and column.",
        paper="The talk shows such matrices for a pair of SNLI under softmax, sequence and matching, of scores that a "
        "network has learned. Our sentences and scores are other ones.",
    )


def _counts(chosen: Sequence[Alignment]) -> Table:
    rows: list[list[Cell]] = []
    for alignment in chosen:
        cells = f"{int((alignment.weights > 0).sum())} of {alignment.weights.numel()}"
        whole = "–" if alignment.mixture is None else str(int((alignment.mixture > 0).sum()))
        rows.append([alignment.name, cells, f"{alignment.weights.sum(0).max().item():.2f}", whole])
    return Table(
        ["attention", "cells with weight", "most on a word", "alignments mixed"],
        rows,
        caption="How many cells have weight; the largest sum of weights on one word of the premise, which a matching "
        "keeps at 1; and of how many whole alignments the weights are the average.",
    )
