"""Text rationalization: classifiers that select words, by attention, by k-subsets and by sequential k-subsets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import cast

import torch

from fenchel_lab.chapters.document_classification import BAD, FILLERS, GOOD, Corpus, made_up_vectors, sampled
from fenchel_lab.data import eraser, glove, imdb, sst
from fenchel_lab.data.eraser import Annotated
from fenchel_lab.drawing import highlights
from fenchel_lab.models import rationale
from fenchel_lab.models.documents import Vocabulary
from fenchel_lab.models.rationale import Found, Kind, Rationalizer, Selection, Size
from fenchel_lab.models.training import Course
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

LABELS = ("bad", "good")
METHODS: tuple[Kind, ...] = rationale.KINDS
SUBSETS = METHODS[4:]
PAPER: dict[tuple[str, str], str] = {
    ("sparsemax", "ERASER"): ".48 (.41/.55)",
    ("fusedmax", "ERASER"): ".39 (.29/.53)",
    ("k-subsets", "ERASER"): ".42 (.29/.62)",
    ("sequential k-subsets", "ERASER"): ".63 (.49/.70)",
    ("sparsemax", "SST"): ".82 (.81/.83)",
    ("fusedmax", "SST"): ".81 (.81/.82)",
    ("k-subsets", "SST"): ".81 (.81/.82)",
    ("sequential k-subsets", "SST"): ".81 (.80/.83)",
    ("sparsemax", "IMDB"): ".89 (.89/.90)",
    ("fusedmax", "IMDB"): ".88 (.87/.89)",
    ("k-subsets", "IMDB"): ".90 (.90/.90)",
    ("sequential k-subsets", "IMDB"): ".90 (.90/.90)",
}
"""Tables 3 and 7, mean and range over five seeds: F₁; beside ERASER the overlap with human rationales of BeerAdvocate.
The attentions are Guerreiro and Martins's."""


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        size: of the rationalizers.
        course: of their training.
        selection: budget, transition and temperature of k-subsets.
        longest: of longer texts the last so many words are read.
        reviews: of IMDB, to train, to choose the epoch and to test with; None for all.
        sentences: of SST.
        runs: how many seeds, on the reviews that people marked, …
        others: … and on SST and IMDB.
        batch: texts per step.
    """

    size: Size
    course: Course
    selection: Selection
    longest: int
    reviews: tuple[int | None, int | None, int | None] = (None, None, None)
    sentences: tuple[int | None, int | None, int | None] = (None, None, None)
    runs: int = 5
    others: int = 5
    batch: int = 16


SELECTION = Selection(budget=0.2, transition=0.3, temperature=0.1)
FULL = Protocol(Size(), Course(20), replace(SELECTION, transition=0.001), longest=10_000, batch=32)
SCALED = Protocol(
    Size(32, 0.2),
    Course(5, 3e-3),
    SELECTION,
    longest=250,
    reviews=(1_600, 200, 1_000),
    sentences=(4_000, None, None),
    runs=3,
    others=2,
)
TOY = Protocol(Size(12, head_dropout=0.0), Course(4, 1e-2), replace(SELECTION, budget=0.15), longest=60, runs=1)
TOY_REVIEWS = (240, 60, 100)

SUMMARY = """
Which words made it a bad review? A rationalizer reads a text with a bidirectional LSTM; a Hopfield pooling layer with
one static query, `HopfieldPooling(width, omega=SparseMAP(SequentialSubsets(Share(0.2), transition)))`, selects a share
of the words by what the LSTM knows of them; a predictor sees the sum of the selected words' own vectors, and nothing
of the others. k-subsets select the words with the highest scores, sequential k-subsets also count a bonus for every
pair of selected neighbours, so that they tend to select phrases. Both share out as much weight as there are words in
the budget of {share:.0%}; a temperature decides how evenly, so that somewhat more words may have some. Sparsemax,
1.5-entmax and fusedmax on the same encoder decide by themselves how many words they select; softmax gives all of them
weight, so its {share:.0%} with the most weight are measured beside it. Every other word has a weight of exactly zero.
"""

DATA = """
The paper's BeerAdvocate and AgNews are not at hand. In BeerAdvocate's place are ERASER's film reviews, with the words
that people marked for the opinion as a whole, not for one aspect of a beer. Those to test with were annotated anew and
more densely, {test:.0%} of their words beside {train:.0%} of those to train with; overlaps here are with the former,
so they are not to be compared with overlaps on other data, but with what as many words have that are taken by chance.
IMDB is split anew, for the file has its training reviews alone. GloVe vectors of 50 numbers are not trained.
"""

SCALED_DOWN = """
Scaled down from the paper's protocol: the last {longest} words of a text, of which alone the marked ones count;
{sentences[0]:,} sentences of SST and {reviews[0]:,} reviews of IMDB to train with, {reviews[2]:,} of the latter to test
with, and all of ERASER; states of width {width} instead of 200; {course.epochs} epochs at a rate of {course.rate:g}
that falls to zero; {runs} seeds on ERASER and {others} on the others. The temperature of {selection.temperature:g} is
the paper's. A transition score of {selection.transition:g} was taken, of 0.05, 0.3 and 1, by F₁ and overlap on ERASER's
development reviews; the paper's 0.001 would make no difference here.
"""

WHOLE = """
From the paper (appendix F.3): states of width 200, a dropout of 0.5 of the pooled vector, one head, a transition score
of 0.001, a temperature of 0.1, five seeds; whole texts. Ours, for the paper refers to Guerreiro and Martins (2021) or
does not tell: a budget of {selection.budget:.0%}, at most {course.epochs} epochs of batches of {batch} at a rate of
{course.rate:g} that falls to zero.
"""

EMBEDDED = """
This page was made with made-up reviews: {train} to train with, of ten to thirty words, in which a phrase of three
words such as “a tedious film” says it all and counts as marked; a transition score of {transition:g}; one seed. It
shows the idea and settles no order. On ERASER's film reviews, SST and IMDB run the command below with `FENCHEL_DATA`
set.
"""


@dataclass(frozen=True)
class Outcome:
    """A method on a corpus: what it did to the test reviews, one per seed, and the model of the first seed."""

    corpus: Corpus
    method: str
    found: Sequence[Found]
    model: Rationalizer

    def mean(self, name: str) -> float | None:
        """Over seeds."""
        values = [getattr(found, name) for found in self.found]
        return None if None in values else statistics.fmean(values)

    def told(self, name: str, digits: int = 2) -> str:
        """Mean and range over seeds."""
        values = [getattr(found, name) for found in self.found]
        if None in values:
            return "–"
        text = f"{statistics.fmean(values):.{digits}f}"
        return text if len(values) == 1 else f"{text} ({min(values):.{digits}f}/{max(values):.{digits}f})"


CODE = """
import torch, fenchel
from fenchel.hopfield import HopfieldPooling
from fenchel.structures import SequentialSubsets, Share

pool = HopfieldPooling(64, omega=fenchel.SparseMAP(SequentialSubsets(Share(0.2), transition=0.5)))
words = torch.randn(2, 30, 64)
padding = torch.arange(30) >= torch.tensor([[30], [12]])
weights = pool.get_association_matrix(words, padding).flatten(0, 2)
print(weights.sum(-1))  # a fifth of 30 and of 12 words
"""


@study(
    "Words that decide",
    source="Santos et al. (2024), Sparse and Structured Hopfield Networks, tables 3 and 7, figures 4 and 7",
    order=61,
    theme="Explanations",
    code=CODE,
    data=["eraser_movies", "sst", "imdb_rt", "glove"],
    full="With `--full` widths, dropout, transition, temperature and seeds are the paper's. What differs: "
    "ERASER's film reviews in place of BeerAdvocate, no AgNews, IMDB's training file alone, split anew, "
    "and word vectors of 50 numbers; budget, epochs and rate are ours, for the paper does not tell them.",
)
def text_highlights(context: Context) -> Result:
    """Train a rationalizer with every selection, on every corpus."""
    corpora, protocol, text = _setting(context)
    jobs = [(corpus, method) for corpus in corpora for method in METHODS]
    outcomes: list[Outcome] = []
    for done, (corpus, method) in enumerate(jobs):
        tell = partial(_tell, context, done, len(jobs), f"{corpus.name}, {method}")
        runs = protocol.runs if corpus is corpora[0] else protocol.others
        seeds = range(context.seed, context.seed + runs)
        outcomes.extend(compared(corpus, method, protocol, seeds, tell))
    groups = [[outcome for outcome in outcomes if outcome.corpus is corpus] for corpus in corpora]
    share = cast(float, protocol.selection.budget)
    return Result(
        f"{SUMMARY.format(share=share)}\n{text}\n\n{_verdict(groups[0])}",
        figures=[_picture(groups[0])],
        tables=[_table(group) for group in groups],
    )


def selection(kind: Kind, protocol: Protocol) -> Selection:
    """The selection of a row of the table: attentions are at temperature 1."""
    return replace(protocol.selection, kind=kind, temperature=protocol.selection.temperature if kind in SUBSETS else 1)


def compared(
    corpus: Corpus, kind: Kind, protocol: Protocol, seeds: Sequence[int], progress: Callable[[float], None]
) -> list[Outcome]:
    """What a selection does to the test reviews; for softmax also that of its largest weights alone."""
    found, top, models = [], [], []
    for done, seed in enumerate(seeds):
        torch.manual_seed(seed)
        model = Rationalizer(corpus.vocabulary, LABELS, selection(kind, protocol), protocol.size)
        part = partial(_part, progress, done, len(seeds))
        model, _ = rationale.trained(model, corpus.train, corpus.valid, protocol.course, protocol.batch, part)
        found.append(rationale.found(model, corpus.test))
        if kind == "softmax":
            top.append(rationale.found(model, corpus.test, cast(float, protocol.selection.budget)))
        models.append(model)
    best = [Outcome(corpus, "softmax, top words", top, models[0])] if top else []
    return [Outcome(corpus, kind, found, models[0]), *best]


def _part(progress: Callable[[float], None], done: int, all_: int, part: float) -> None:
    progress((done + part) / all_)


def _tell(context: Context, done: int, all_: int, note: str, part: float) -> None:
    context.progress(0.98 * (done + part) / all_, note)


def _setting(context: Context) -> tuple[list[Corpus], Protocol, str]:
    if context.data is None:
        reviews, (first, second) = made_up(sum(TOY_REVIEWS)), (TOY_REVIEWS[0], sum(TOY_REVIEWS[:2]))
        parts = reviews[:first], reviews[first:second], reviews[second:]
        text = EMBEDDED.format(train=TOY_REVIEWS[0], transition=TOY.selection.transition)
        return [Corpus("made up", made_up_vectors(), *parts)], TOY, text
    protocol, text = (FULL, WHOLE) if context.full else (SCALED, SCALED_DOWN)
    known = glove.load(context.data)
    vocabulary = Vocabulary(known.rows, torch.from_numpy(known.vectors), protocol.longest)
    context.progress(0.0, "reading reviews")
    splits: tuple[sst.Split, ...] = ("train", "dev", "test")
    marked = [eraser.load(split, context.data) for split in splits]
    sentences = [sst.load(split, folder=context.data) for split in splits]
    films = [imdb.load(split, folder=context.data) for split in splits]
    corpora = [
        Corpus("ERASER", vocabulary, *marked),
        Corpus("SST", vocabulary, *map(sampled, sentences, protocol.sentences)),
        Corpus("IMDB", vocabulary, *map(sampled, films, protocol.reviews)),
    ]
    data = DATA.format(train=density(marked[0]), test=density(marked[2]))
    return corpora, protocol, f"{data}\n{text.format(**vars(protocol), width=2 * protocol.size.hidden)}"


def density(reviews: Sequence[Annotated]) -> float:
    """The share of a review's words that is marked, on average.

    Example:
        >>> density([Annotated(("so", "dull"), 0, (1,)), Annotated(("a", "fine", "plot", "."), 1, (0, 1, 2, 3))])
        0.75
    """
    return statistics.fmean(len(review.rationale) / len(review.words) for review in reviews)


def _verdict(group: Sequence[Outcome]) -> str:
    """Whether sequential k-subsets give fewer runs and a higher overlap than plain ones."""
    plain, sequential = (next(each for each in group if each.method == name) for name in SUBSETS)
    fewer = cast(float, sequential.mean("runs")) < cast(float, plain.mean("runs"))
    ours, theirs = sequential.mean("overlap"), plain.mean("overlap")
    assert ours is not None
    assert theirs is not None
    agreed = [f"{'fewer' if fewer else 'no fewer'} runs", f"{'a higher' if ours > theirs else 'no higher'} overlap"]
    return (
        f"On {_named(group)} sequential k-subsets have {' and '.join(agreed)} than plain ones: "
        f"{sequential.told('runs', 1)} runs of {sequential.told('run_length', 1)} words instead of "
        f"{plain.told('runs', 1)} of {plain.told('run_length', 1)}, and an overlap of {sequential.told('overlap')} "
        f"instead of {plain.told('overlap')}."
    )


def _named(group: Sequence[Outcome]) -> str:
    """What the reviews are called in a sentence."""
    return {"made up": "made-up reviews"}.get(group[0].corpus.name, group[0].corpus.name)


def _table(group: Sequence[Outcome]) -> Table:
    name, runs = group[0].corpus.name, len(group[0].found)
    marked = group[0].mean("overlap") is not None
    rows: list[list[Cell]] = [
        [
            outcome.method,
            PAPER.get((outcome.method, name), "–"),
            outcome.told("f1"),
            *([outcome.told("overlap"), f"{outcome.mean('chance'):.2f}"] if marked else []),
            f"{outcome.mean('share'):.0%}",
            f"{outcome.mean('runs'):.1f}",
            f"{outcome.mean('run_length'):.1f}",
        ]
        for outcome in group
    ]
    over = f"mean and range over {runs} seeds" if runs > 1 else "one seed"
    told = "F₁ overlap with the words that people marked (where they marked any), and that of as many words taken by "
    return Table(
        [
            "selection",
            "paper's overlap" if marked else "paper's F₁",
            "F₁",
            *(["overlap", "by chance"] if marked else []),
            "selected",
            "runs",
            "words a run",
        ],
        rows,
        caption=f"{name}: F₁ of the classes on {len(group[0].corpus.test):,} test reviews, {over}; "
        f"{told + 'chance; ' if marked else ''}the share of words with weight; runs of neighbours among these, and "
        "their length.",
        paper="Overlaps of tables 3 and 7 are those with the rationales of BeerAdvocate, which are other data."
        if marked
        else "F₁ of tables 3 and 7.",
    )


@torch.no_grad()
def _picture(group: Sequence[Outcome]) -> Figure:
    """One review under k-subsets and under sequential k-subsets."""
    models = [next(each for each in group if each.method == name).model for name in SUBSETS]
    review = legible(group[0].corpus, models)
    words = list(group[0].corpus.vocabulary.read(review))
    skipped = len(review.words) - len(words)
    shown, marked = [], {at - skipped for at in review.rationale}
    for name, model in zip(SUBSETS, models, strict=True):
        explanation = model.explain(words)
        shown.append((f"{name}: {explanation.label}", words, explanation.weights))
    opinion = LABELS[review.label]
    return Figure(
        highlights.picture(shown, marked),
        caption=f"A {opinion} review to test with, the words that are selected (the darker, the more weight) and those "
        "that a person marked (underlined). Of the shortest reviews it is that with the highest overlap of the last "
        "selection.",
        alt="The text of a review twice: selected words on a yellow ground, marked words underlined.",
        paper="Figures 4 and 7 show that sequential k-subsets select longer phrases, as people do.",
    )


LEGIBLE = 110


@torch.no_grad()
def legible(corpus: Corpus, models: Sequence[Rationalizer]) -> Annotated:
    """The test review that both class right with the highest overlap of the last, among those that are not long."""
    annotated = [cast(Annotated, review) for review in corpus.test]
    length = {id(review): len(corpus.vocabulary.read(review)) for review in annotated}
    shortest = sorted(annotated, key=lambda review: length[id(review)])
    short = [review for review in shortest if length[id(review)] <= LEGIBLE] or shortest[:5]

    def worth(review: Annotated) -> tuple[bool, float]:
        results = [rationale.found(model, [review]) for model in models]
        return all(each.predicted == each.labels for each in results), results[-1].overlap or 0.0

    return max(short[-40:], key=worth)


BEFORE, AFTER = ["a", "its", "the"], ["film", "plot", "story"]


def made_up(count: int, seed: int = 0) -> list[Annotated]:
    """Reviews of which one phrase tells the class: an adjective between two words that occur elsewhere too."""
    random, reviews = Random(seed), []
    for number in range(count):
        words, kind = [random.choice(FILLERS) for _ in range(random.randint(8, 28))], number % 2
        phrase = [random.choice(BEFORE), random.choice(GOOD if kind else BAD), random.choice(AFTER)]
        place = random.randint(0, len(words))
        reviews.append(Annotated((*words[:place], *phrase, *words[place:]), kind, (place, place + 1, place + 2)))
    return reviews
