"""Exact beams: how often the search of a sparse model is exact, as the model learns from more and more words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fenchel import Gini, Shannon
from fenchel.progress import Progress
from fenchel.seq2seq import Training, Validation, train
from fenchel_lab.chapters import inflection
from fenchel_lab.chapters.inflection import BEAM, Corpus, Size, untrained
from fenchel_lab.drawing import style
from fenchel_lab.models.inflection import Inflected, inflect
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

TOY = Size(32, 64, 1, Training(epochs=9, batch=32, rate=5e-3, patience=9, every=3), dropout=0.1)
SCALED = Size(
    64, 128, 1, Training(epochs=12, parts=2, batch=64, rate=3e-3, patience=12, cooling=4), dropout=0.1, held=100
)
FULL = Size(300, 300, 2, Training(epochs=60, rate=1e-3, patience=60, every=5), drawn=1000)

SUMMARY = """
The paper's best configuration in its Table 1, a sparsemax output and a softmax attention, is trained, and stopped now
and then to search with a beam of 5. What is counted: for how many validation words the model gives all probability to
a single form; for how many the beam is exact, that is, has seen every form of any probability; and for how many its
first form is right. The loss of a sparse output is zero once the right letter leads by the margin, and from there on
the other letters have probability zero: the better a model knows a word, the fewer strings there are to search.
"""

SCALED_TEXT = """
What was scaled down: {languages} languages (the paper: 86), {train:,} words to learn from, the high setting,
{size.layers} layer of width {size.hidden} instead of 2 of 300, {passes:g} passes over the words, one seed; the
counts are of {drawn:,} validation words.
"""

FULL_TEXT = """
{languages} languages (the paper: 86), {train:,} words to learn from, {size.layers} layers of width {size.hidden},
{size.epochs} epochs; the counts are of {drawn:,} validation words.
"""

TOY_TEXT = """
This page was made with German noun plurals from the package `german-nouns`: {train:,} nouns to learn from, {drawn}
others to be asked, {size.epochs} epochs. For the high setting of SIGMORPHON 2018 run the command below with
`FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Moment:
    """Where the training stands, and shares of validation words."""

    words: int
    right: float
    single: float
    exact: float


CODE = """
import torch, fenchel

logits = 4 * torch.randn(1000, 30)  # one row per step of a decoder
for alpha in (1.0, 1.5, 2.0):
    sizes = fenchel.support_size(fenchel.entmax(logits, alpha)).float()
    print(f"alpha {alpha}: {sizes.mean():.1f} of 30 continuations have probability")
"""


@study(
    "Exact search, as a model learns",
    source="Peters, Niculae & Martins (2019), Sparse Sequence-to-Sequence Models, section 4.1 on sparsity",
    order=71,
    theme="Sequence to sequence",
    code=CODE,
    data=["sigmorphon2018"],
    full="With `--full` the model has the paper's size. What differs: 7 languages in one model, the paper has 86.",
)
def exact_beams(context: Context) -> Result:
    """Train, stop, search, count; and go on."""
    corpus, size, text = _setting(context)
    moments = [*followed(corpus, size, context.seed, context.progress)]
    return Result(SUMMARY + text, figures=[_figure(moments)], tables=[_table(moments)])


def followed(corpus: Corpus, size: Size, seed: int, tell: Progress) -> list[Moment]:
    """Counts after every validation of one training."""
    model = untrained(corpus, size, seed, Shannon(), Gini())
    held = [pair for group in corpus.validation for pair in group[: size.held]]
    asked = [pair for group in corpus.validation for pair in group[: size.drawn]]
    moments: list[Moment] = []

    def count(validation: Validation) -> None:
        found = inflect(model.eval(), [pair.source for pair in asked], BEAM)
        rights = [each.form == "".join(pair.target) for each, pair in zip(found, asked, strict=True)]
        moments.append(_moment(validation.epoch * len(corpus.train) // size.how.parts, rights, found))

    train(
        model,
        corpus.train,
        held,
        training=size.how,
        progress=lambda part, note="": tell(0.97 * part, note),
        watch=count,
    )
    return moments


def _moment(words: int, rights: Sequence[bool], found: Sequence[Inflected]) -> Moment:
    count = len(found)
    return Moment(
        words,
        sum(rights) / count,
        sum(each.single for each in found) / count,
        sum(each.beam.exact for each in found) / count,
    )


def _setting(context: Context) -> tuple[Corpus, Size, str]:
    if context.data is None:
        corpus, size, text = inflection.plurals(2400, 200, 0), TOY, TOY_TEXT
    else:
        corpus = inflection.multilingual("high", context.data)
        size, text = (FULL, FULL_TEXT) if context.full else (SCALED, SCALED_TEXT)
    drawn = sum(len(group[: size.drawn]) for group in corpus.validation)
    numbers = {"languages": len(corpus.validation), "train": len(corpus.train), "drawn": drawn}
    return corpus, size, text.format(**numbers, size=size, passes=size.epochs / size.how.parts)


def _figure(moments: Sequence[Moment]) -> Figure:
    drawing, (axes,) = style.panels(1, 1, height=2.6)
    for name in ("right", "exact", "single"):
        label = {"right": "first form right", "exact": "beam exact", "single": "single form"}[name]
        axes.plot([m.words / 1000 for m in moments], [100 * getattr(m, name) for m in moments], marker="o", label=label)
    axes.set(xlabel="words learned from (thousands)", ylabel="validation words (%)", ylim=(0, 100))
    axes.legend()
    last = moments[-1]
    return Figure(
        drawing,
        caption="Validation words, by how many words the model has learned from: those whose first form is right, "
        "those whose "
        f"beam of {BEAM} is exact, those with a single form. At the end {100 * last.right:.0f} %, "
        f"{100 * last.exact:.0f} % and "
        f"{100 * last.single:.0f} %.",
        alt="Three lines, in percent of the validation words, against the number of words learned from.",
        paper="The paper reports, in the high setting, a single form for 81 % of the validation words and an exact "
        "beam for 87 %.",
    )


def _table(moments: Sequence[Moment]) -> Table:
    rows: list[list[Cell]] = [
        [f"{m.words:,}", *(f"{100 * share:.1f} %" for share in (m.right, m.exact, m.single))] for m in moments
    ]
    return Table(
        ["words learned from", "first form right", "exact beam", "single form"],
        rows,
        caption=f"Shares of validation words, with a beam of {BEAM}; words learned from are counted once an epoch.",
        paper="81 % single and 87 % exact in the high setting, 66 % and 79 % in medium.",
    )
