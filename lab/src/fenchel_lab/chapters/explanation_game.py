"""The explanation game: how much of a classifier's decision a few words carry, and who should choose them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from fenchel_lab.chapters.document_classification import Corpus, made_up_vectors, sampled
from fenchel_lab.chapters.text_highlights import LABELS, TOY_REVIEWS, made_up
from fenchel_lab.data import glove, sst
from fenchel_lab.drawing import style
from fenchel_lab.models import game, rationale
from fenchel_lab.models.documents import Vocabulary
from fenchel_lab.models.game import Explainer, Outcome
from fenchel_lab.models.rationale import Kind, Rationalizer, Selection, Size
from fenchel_lab.models.training import Course
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

TOP = "softmax attention, top words"
CLASSIFIERS: dict[str, Kind] = {TOP: "softmax", "entmax attention": "entmax", "sparsemax attention": "sparsemax"}
JOINT: dict[str, Kind] = {
    "jointly trained, k-subsets": "k-subsets",
    "jointly trained, sequential": "sequential k-subsets",
}


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        size: of classifiers and explainers.
        course: of their training, …
        lay: … and of a layperson's.
        selection: what a jointly trained explainer selects; its budget is that of the top words too.
        sentences: of SST, to train, to choose the epoch and to test with; None for all.
        runs: how many seeds.
    """

    size: Size
    course: Course
    lay: Course
    selection: Selection
    sentences: tuple[int | None, int | None, int | None] = (None, None, None)
    runs: int = 5


SELECTION = Selection(budget=0.2, transition=0.3, temperature=0.1)
LAY = Course(20, 3e-2, 1e-5)
FULL = Protocol(Size(128, 0.2), Course(10), LAY, SELECTION)
SCALED = Protocol(Size(32, 0.2), Course(5, 3e-3), LAY, SELECTION, runs=3)
TOY = Protocol(
    Size(12, head_dropout=0.0), Course(4, 1e-2), replace(LAY, epochs=8), replace(SELECTION, budget=0.15), runs=1
)

SUMMARY = """
An explanation is good if somebody who sees nothing else can tell what was decided. A classifier with attention to the
states of an LSTM classes a text; an explainer sends some of its words; a layperson, a linear classifier of bags of
words that is trained on such messages, guesses what the classifier said. The communication success rate is the share of
right guesses. Three explainers are a part of the classifier: the {share:.0%} of the words with the most softmax
attention, and the words with any weight under 1.5-entmax and sparsemax, which decide for themselves how many these are.
Two explain the first classifier from outside: they read the text, select {share:.0%} of it by k-subsets or sequential
k-subsets, and are trained together with their layperson.

A joint explainer may agree on words with its layperson that mean nothing to us: a high rate alone does not make an
explanation faithful or plausible.
"""

REAL = """
Sentences of SST, {first} to train with; GloVe vectors of 50 numbers that are not trained; {size.hidden} hidden units a
direction; {course.epochs} epochs; {runs} seeds; a transition score of {selection.transition:g} for sequential
k-subsets. Sizes, rates and epochs are ours, for the talk tells none.
"""

EMBEDDED = """
This page was made with made-up reviews, {train} to train with, in which one adjective says it all; one seed. It shows
the idea and settles no order. On the Stanford sentences run the command below with `FENCHEL_DATA` set.
"""

CODE = """
import torch, fenchel

scores = torch.randn(1, 40)
for name, weights in {"softmax": fenchel.softmax(scores), "1.5-entmax": fenchel.entmax(scores, 1.5)}.items():
    print(f"{name}: {int(fenchel.support_size(weights))} of 40 words are shown to the listener")
"""


@study(
    "The explanation game",
    source="Martins, From Sparse Modeling to Sparse Communication, explainability, after Treviso and Martins (2020)",
    order=62,
    theme="Explanations",
    code=CODE,
    tour=False,
    data=["sst", "glove"],
    full="With `--full` models are larger, train for longer, and have five seeds. The talk tells no sizes, "
    "rates or epochs, so that these are ours.",
)
def explanation_game(context: Context) -> Result:
    """Train classifiers and explainers, and laypeople on their messages."""
    corpus, protocol, text = _setting(context)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in (*CLASSIFIERS, *JOINT)}
    right: dict[str, list[float]] = {name: [] for name in outcomes}
    for number in range(protocol.runs):
        tell = partial(_tell, context, number, protocol.runs)
        for name, (outcome, f1) in played(corpus, protocol, context.seed + number, tell).items():
            outcomes[name].append(outcome)
            right[name].append(f1)
    share = cast(float, protocol.selection.budget)
    rows: list[list[Cell]] = [[name, _told(right[name]), *_cells(each)] for name, each in outcomes.items()]
    return Result(
        f"{SUMMARY.format(share=share)}\n{text}",
        figures=[_figure(outcomes, corpus)],
        tables=[
            Table(
                ["explainer", "classifier's F₁", "success", "guess right", "words sent"],
                rows,
                caption=f"{corpus.name}: F₁ of the classifier, how often the layperson guesses its output, how often "
                f"the guess is the review's own class, in percent, and words per message, on {len(corpus.test):,} test "
                f"texts; mean{' and range' if protocol.runs > 1 else ''} over {protocol.runs} "
                f"seed{'s' * (protocol.runs > 1)}.",
            )
        ],
    )


def played(
    corpus: Corpus, protocol: Protocol, seed: int, progress: Callable[[float, str], None]
) -> dict[str, tuple[Outcome, float]]:
    """The outcome for every explainer, and the F₁ of the classifier that it explains."""
    parts = corpus.train, corpus.valid, corpus.test
    share, all_ = cast(float, protocol.selection.budget), len(CLASSIFIERS) + len(JOINT)
    found: dict[str, tuple[Outcome, float]] = {}
    explained: tuple[Rationalizer, float] | None = None
    for done, (name, kind) in enumerate(CLASSIFIERS.items()):
        torch.manual_seed(seed)
        model = Rationalizer(corpus.vocabulary, LABELS, Selection(kind, temperature=1.0), protocol.size, "states")
        tell = partial(_within, progress, done, all_, name)
        model, _ = rationale.trained(model, corpus.train, corpus.valid, protocol.course, progress=tell)
        f1 = rationale.found(model, corpus.test).f1
        explained = explained or (model, f1)
        messages = game.top(model, share) if name == TOP else game.attended(model)
        found[name] = game.play(model, messages, *parts, protocol.lay), f1
    assert explained is not None
    for done, (name, kind) in enumerate(JOINT.items(), len(CLASSIFIERS)):
        torch.manual_seed(seed)
        explainer = Explainer(corpus.vocabulary, len(LABELS), replace(protocol.selection, kind=kind), protocol.size)
        tell = partial(_within, progress, done, all_, name)
        found[name] = game.together(explained[0], explainer, *parts, protocol.course, progress=tell), explained[1]
    return found


def _within(progress: Callable[[float, str], None], done: int, all_: int, name: str, part: float) -> None:
    progress((done + part) / all_, name)


def _tell(context: Context, done: int, all_: int, part: float, note: str) -> None:
    context.progress(0.98 * (done + part) / all_, note)


def _setting(context: Context) -> tuple[Corpus, Protocol, str]:
    if context.data is None:
        reviews, (first, second) = made_up(sum(TOY_REVIEWS)), (TOY_REVIEWS[0], sum(TOY_REVIEWS[:2]))
        parts = reviews[:first], reviews[first:second], reviews[second:]
        return Corpus("made up", made_up_vectors(), *parts), TOY, EMBEDDED.format(train=TOY_REVIEWS[0])
    protocol = FULL if context.full else SCALED
    known = glove.load(context.data)
    vocabulary = Vocabulary(known.rows, torch.from_numpy(known.vectors), 10_000)
    splits: tuple[sst.Split, ...] = ("train", "dev", "test")
    sentences = [sst.load(split, folder=context.data) for split in splits]
    corpus = Corpus("SST", vocabulary, *map(sampled, sentences, protocol.sentences))
    return corpus, protocol, REAL.format(**vars(protocol), first=f"{len(corpus.train):,}")


def _cells(outcomes: Sequence[Outcome]) -> list[Cell]:
    success, right = ([getattr(each, name) for each in outcomes] for name in ("success", "right"))
    length = sum(each.length for each in outcomes) / len(outcomes)
    return [_told(success), _told(right), f"{length:.1f}"]


def _told(values: Sequence[float]) -> str:
    mean = f"{100 * sum(values) / len(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({100 * min(values):.1f}/{100 * max(values):.1f})"


def _figure(outcomes: dict[str, list[Outcome]], corpus: Corpus) -> Figure:
    drawing, (axes,) = style.panels(1, 1, height=2.6)
    for number, (name, each) in enumerate(outcomes.items()):
        colour = style.PALETTE[number]
        axes.plot([one.length for one in each], [100 * one.success for one in each], "o", color=colour, label=name)
    axes.set(xlabel="words sent", ylabel="success, %")
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    return Figure(
        drawing,
        caption=f"{corpus.name}: how long messages are, and how often the layperson guesses right; a point a seed.",
        alt="A scatter plot of message length and success rate, a colour for each explainer.",
        paper="The talk draws the three players and no figures.",
    )
