"""Document classification: attention to words, to an interval of the text, and to both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import torch
from torch import Tensor

from fenchel import Gini, Regularizer, Shannon
from fenchel_lab.chapters import densities
from fenchel_lab.data import glove, imdb, sst
from fenchel_lab.data.sst import Review
from fenchel_lab.drawing import style
from fenchel_lab.models import documents, training
from fenchel_lab.models.documents import Attention, Batch, Reader, Size, Vocabulary
from fenchel_lab.models.training import Course
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.measure import ScoresInPercent, spread
from fenchel_lab.report.result import Cell

METHODS = (
    "Discrete softmax",
    "Discrete sparsemax",
    "Continuous softmax",
    "Continuous sparsemax",
    "Disc. + Cont. softmax",
    "Disc. + Cont. sparsemax",
)
COUNTS = (32, 64, 128)
PAPER: dict[tuple[str, int], float] = {
    ("Discrete softmax", 0): 90.78,
    ("Discrete sparsemax", 0): 90.58,
    ("Continuous softmax", 32): 90.20,
    ("Continuous softmax", 64): 90.68,
    ("Continuous softmax", 128): 90.52,
    ("Continuous sparsemax", 32): 90.52,
    ("Continuous sparsemax", 64): 89.63,
    ("Continuous sparsemax", 128): 90.90,
    ("Disc. + Cont. softmax", 32): 90.98,
    ("Disc. + Cont. softmax", 64): 90.69,
    ("Disc. + Cont. softmax", 128): 89.62,
    ("Disc. + Cont. sparsemax", 32): 91.10,
    ("Disc. + Cont. sparsemax", 64): 91.18,
    ("Disc. + Cont. sparsemax", 128): 90.98,
}
"""Table 1: accuracy on IMDB, for a method and a number of basis functions."""

DRAWN_LENGTHS = range(9, 17)
INTERVALS = 40


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        size: of the reader.
        course: of its training.
        longest: of longer documents the last so many words are read.
        reviews: of IMDB, to train, to choose the epoch and to test with; None for all.
        counts: numbers of basis functions to try on IMDB, …
        sentences: … and on the Stanford sentences.
        runs: how many seeds.
    """

    size: Size
    course: Course
    longest: int = 200
    reviews: tuple[int | None, int | None, int | None] = (None, None, None)
    counts: tuple[int, ...] = COUNTS
    sentences: tuple[int, ...] = COUNTS
    runs: int = 3


FULL = Protocol(Size(128, 128, dropout=0.0, batch=16), Course(10), longest=10_000, runs=5)
SCALED = Protocol(
    Size(32, 32, dropout=0.2),
    Course(5, 5e-3),
    longest=120,
    reviews=(8_000, 1_000, 4_000),
    counts=(64,),
    sentences=(32,),
    runs=2,
)
TOY = Protocol(Size(12, 12, dropout=0.0, batch=32), Course(8, 3e-2), runs=1)
TOY_REVIEWS = (256, 64, 160)
TOY_FUNCTIONS = 16

SUMMARY = """
Is a review good or bad? A bidirectional LSTM reads it, attention sums up what was read, a linear layer decides.
Discrete attention weighs the words with softmax or sparsemax. Continuous attention is a density over time, from 0 at
the first word to 1 at the last: a Gaussian (softmax, α = 1), or a parabola that ends (sparsemax, α = 2) and so
selects an interval; the words have become a function of time by ridge regression on N Gaussian functions, whatever
their number. Its middle and its width come from a convolution and max-pooling:
`ContinuousAttention(GaussianBasis.line(64), alpha=2.0, encoder=PooledEncoder(width))`. The combined attention gives
the density the mean and the variance of the discrete weights, `MatchedEncoder(omega)`, which takes no parameter, and
adds both contexts.
"""

SCALED_DOWN = """
Scaled down from the paper's protocol: {reviews[0]:,} of its 22,500 training reviews of IMDB, {reviews[1]} to choose
the epoch and {reviews[2]:,} to test with, from a split of our own, for the file has IMDB's training reviews alone;
the last {longest} words of each, where reviews have 270 on average; N = {counts[0]}. The short sentences of the
Stanford treebank are all there, 6,920 to train, 872 to choose the epoch and 1,821 to test with, with N =
{sentences[0]}. GloVe vectors of 50 numbers instead of 300, not trained; {size.hidden} hidden units a direction and
{size.filters} filters instead of 128; {course.epochs} epochs in batches of {size.batch} at a rate of {course.rate:g}
that falls to zero, instead of 10 in batches of 16 at 0.001, and dropout {size.dropout:g}; {runs} seeds, where the
paper reports one figure. So the accuracies are far below the paper's; only the order could be compared.
"""

WHOLE = """
The sizes and the training of the paper (appendix H.1: 128 hidden units and filters, batches of 16, a rate of 1e-3, an
ℓ₂ penalty of 1e-4, 10 epochs with a patience of 5), {runs} seeds. Seven tenths of the reviews are for training, one for
choosing the epoch, two for testing.
"""

EMBEDDED = """
This page was made with made-up reviews: {train} to train with, of ten to thirty words, in which one word says it all;
N = {functions}, one seed. It shows the idea and settles no order. On IMDB and on the Stanford sentences run the
command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Corpus:
    """Reviews to train, to choose the epoch and to test with, and the numbers of basis functions to try."""

    name: str
    vocabulary: Vocabulary
    train: Sequence[Review]
    valid: Sequence[Review]
    test: Sequence[Review]
    counts: Sequence[int] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Outcome(ScoresInPercent):
    """A method on a corpus: its accuracies, one per seed, its share of words, and the reader of the first seed."""

    corpus: Corpus
    method: str
    functions: int
    scores: Sequence[float]
    attended: float
    reader: Reader

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.reader.parameters())


CODE = """
import torch
from fenchel.continuous import ContinuousAttention, GaussianBasis, PooledEncoder

words = torch.randn(8, 280, 64)
basis = GaussianBasis.line(64, widths=(0.1, 0.5))
attention = ContinuousAttention(basis, alpha=2.0, encoder=PooledEncoder(64))  # an interval of the text
print(attention(words, words.amax(1)).shape)
"""


@study(
    "Attention to words and to intervals",
    source="Martins et al. (2020), Sparse and Continuous Attention Mechanisms, table 1",
    order=52,
    theme="Continuous attention",
    code=CODE,
    tour=False,
    data=["imdb_rt", "sst", "glove"],
    full="With `--full` sizes, epochs and all numbers of basis functions are the paper's. What differs: "
    "reviews come from IMDB's training file alone, split anew, so that the test reviews are not the "
    "paper's; word vectors have 50 numbers, not 300; several seeds, where the paper reports one figure.",
)
def document_classification(context: Context) -> Result:
    """Train a reader with every attention, on every corpus, with every number of basis functions."""
    corpora, protocol, text = _setting(context)
    jobs = [(corpus, name, n) for corpus in corpora for name in METHODS for n in _counts(name, corpus.counts)]
    outcomes = []
    for done, (corpus, name, functions) in enumerate(jobs):
        tell = partial(_tell, context, done, len(jobs), f"{corpus.name}, {name}")
        seeds = range(context.seed, context.seed + protocol.runs)
        outcomes.append(compared(corpus, name, functions, protocol, seeds, tell))
    groups = [[outcome for outcome in outcomes if outcome.corpus is corpus] for corpus in corpora]
    return Result(
        f"{SUMMARY}\n{text}\n\n{_leaders(groups)}",
        figures=[_accuracies(groups), _words(groups[-1]), _intervals(groups[0])],
        tables=[_table(group) for group in groups],
    )


def attention(name: str, functions: int) -> Attention:
    """The attention of a row of the table."""
    omega: Regularizer = Gini() if name.endswith("sparsemax") else Shannon()
    alpha = 2.0 if name.endswith("sparsemax") else 1.0
    if name.startswith("Discrete"):
        return Attention("discrete", omega, alpha)
    return Attention("continuous" if name.startswith("Continuous") else "combined", omega, alpha, functions)


def compared(
    corpus: Corpus,
    name: str,
    functions: int,
    protocol: Protocol,
    seeds: Sequence[int],
    progress: Callable[[float], None],
) -> Outcome:
    """A method's accuracies on the test reviews."""
    batches = list(corpus.vocabulary.batches(corpus.train, protocol.size.batch))
    valid, test = (list(corpus.vocabulary.batches(part, documents.AT_ONCE)) for part in (corpus.valid, corpus.test))
    scores, readers = [], []
    for done, seed in enumerate(seeds):
        torch.manual_seed(seed)  # the same order of reviews for every method
        reader = Reader(corpus.vocabulary.vectors, attention(name, functions), protocol.size)
        score = partial(_valid, valid)
        part = partial(_part, progress, done, len(seeds))
        reader, _ = training.trained(reader, batches, documents.loss, score, protocol.course, part)
        scores.append(documents.accuracy(reader, test))
        readers.append(reader)
    return Outcome(corpus, name, functions, scores, documents.attended(readers[0], test), readers[0])


def _valid(batches: Sequence[Batch], reader: Reader) -> float:
    return documents.accuracy(reader, batches)


def _part(progress: Callable[[float], None], done: int, all_: int, part: float) -> None:
    progress((done + part) / all_)


def _tell(context: Context, done: int, all_: int, note: str, part: float) -> None:
    context.progress(0.98 * (done + part) / all_, note)


def _counts(name: str, counts: Sequence[int]) -> Sequence[int]:
    return (0,) if name.startswith("Discrete") else counts


def _setting(context: Context) -> tuple[list[Corpus], Protocol, str]:
    if context.data is None:
        reviews, vocabulary = made_up(sum(TOY_REVIEWS)), made_up_vectors()
        first, second = TOY_REVIEWS[0], sum(TOY_REVIEWS[:2])
        parts = reviews[:first], reviews[first:second], reviews[second:]
        corpus = Corpus("made up", vocabulary, *parts, counts=(TOY_FUNCTIONS,))
        return [corpus], TOY, EMBEDDED.format(train=TOY_REVIEWS[0], functions=TOY_FUNCTIONS)
    protocol, text = (FULL, WHOLE) if context.full else (SCALED, SCALED_DOWN)
    known = glove.load(context.data)
    vocabulary = Vocabulary(known.rows, torch.from_numpy(known.vectors), protocol.longest)
    context.progress(0.0, "reading reviews")
    whole = [imdb.load(split, folder=context.data) for split in ("train", "dev", "test")]
    films = [sampled(reviews, count) for reviews, count in zip(whole, protocol.reviews, strict=True)]
    sentences = [sst.load(split, folder=context.data) for split in ("train", "dev", "test")]
    corpora = [
        Corpus("IMDB", vocabulary, *films, counts=protocol.counts),
        Corpus("SST", vocabulary, *sentences, counts=protocol.sentences),
    ]
    return corpora, protocol, text.format(**vars(protocol))


def sampled(reviews: Sequence[Review], count: int | None) -> Sequence[Review]:
    """So many reviews, the same every time: the file has them in the order of their class."""
    return reviews if count is None else Random(0).sample(reviews, min(count, len(reviews)))


def _leaders(groups: Sequence[Sequence[Outcome]]) -> str:
    told = []
    for group in groups:
        best, worst = (choose(group, key=lambda outcome: outcome.mean) for choose in (max, min))
        named = f"{best.method}{f' with N = {best.functions}' if best.functions else ''}"
        told.append(
            f"On {group[0].corpus.name} the highest mean accuracy is that of {named}, {best.mean:.1f}, the lowest "
            f"{worst.mean:.1f}, and deviations over seeds reach {max(outcome.deviation for outcome in group):.1f}."
        )
    return " ".join(told)


def _table(group: Sequence[Outcome]) -> Table:
    name = group[0].corpus.name
    rows: list[list[Cell]] = []
    for outcome in group:
        paper = f"{PAPER[outcome.method, outcome.functions]:.2f}" if name == "IMDB" else "–"
        scores = spread(outcome.mean, outcome.deviation)
        share, functions = f"{100 * outcome.attended:.0f} %", outcome.functions or "–"
        rows.append([outcome.method, functions, paper, scores, f"{outcome.parameters:,}", share])
    runs = len(group[0].scores)
    return Table(
        ["attention", "N", "paper", "accuracy", "parameters", "attended"],
        rows,
        caption=f"{name}: accuracy on {len(group[0].corpus.test):,} test reviews in percent, mean ± standard deviation "
        f"over {runs} seed{'s' * (runs > 1)}; how many numbers are trained; and the share of a review that has any "
        "weight, of its words or, where there is a density, of its time.",
        paper="The paper's accuracies are within 1.6 points of each other; discrete and continuous sparsemax together "
        "are ahead for every N, with as many parameters as discrete attention alone."
        if name == "IMDB"
        else "The paper has no such column.",
    )


def _accuracies(groups: Sequence[Sequence[Outcome]]) -> Figure:
    drawing, panels = style.panels(1, len(groups), height=3.4, sharey=True)
    for axes, group in zip(panels, groups, strict=True):
        for outcome in group:
            counts = list(_counts(outcome.method, outcome.corpus.counts))
            middle = (len(counts) - 1) / 2
            place = METHODS.index(outcome.method) + 0.22 * (counts.index(outcome.functions) - middle)
            colour = _colour(outcome.functions)
            axes.errorbar(outcome.mean, place, xerr=outcome.deviation, fmt="o", ms=4, lw=1, color=colour)
            paper = PAPER.get((outcome.method, outcome.functions))
            if paper is not None and outcome.corpus.name == "IMDB":
                axes.plot(paper, place, "o", ms=4, mfc="none", color=colour)
        axes.set(title=group[0].corpus.name, xlabel="accuracy, %", yticks=range(len(METHODS)))
        axes.set_yticklabels([name.replace("Cont. ", "Cont.\n") for name in METHODS])
        axes.grid(axis="y", visible=False)
    panels[0].invert_yaxis()
    functions = sorted({outcome.functions for outcome in itertools.chain.from_iterable(groups)})
    for n in functions:
        panels[0].plot([], [], "o", ms=4, color=_colour(n), label=f"N = {n}" if n else "discrete")
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Figure(
        drawing,
        caption="Test accuracy: mean and standard deviation over seeds (filled), and the paper's (hollow).",
        alt="A row for each kind of attention, with a point for each number N of basis functions and its error bar.",
        paper="Table 1, drawn beside it.",
    )


def _colour(functions: int) -> str:
    return style.INK if not functions else style.PALETTE[(*COUNTS, TOY_FUNCTIONS).index(functions)]


@torch.no_grad()
def _words(group: Sequence[Outcome]) -> Figure:
    """One short review under four kinds of attention."""
    shown = [outcome for outcome in group if outcome.method in METHODS[:2] + METHODS[3:4] + METHODS[5:]]
    review = legible(group[0].corpus, [outcome.reader for outcome in shown])
    words = [word.replace("$", r"\$") for word in group[0].corpus.vocabulary.read(review)]
    drawing, panels = style.panels(len(shown), 1, height=1.05, sharex=True)
    for axes, outcome in zip(panels, shown, strict=True):
        look = outcome.reader.look(outcome.corpus.vocabulary.batch([review]))
        if look.weights is not None:
            places = [(place + 0.5) / len(words) for place in range(len(words))]
            axes.bar(places, look.weights[0].tolist(), 0.7 / len(words), color=style.PALETTE[0])
            axes.set(ylim=(0, 1), yticks=(0, 1))
        if look.attended is not None:
            over = axes if look.weights is None else axes.twinx()
            density = documents.density_of(look)
            densities.over_words(over, type(density)(density.loc[0, 0], sigma=density.sigma[0, 0], alpha=2.0), words)
            over.set_yticks([])
            over.spines[:].set_visible(False)
            over.grid(visible=False)
        axes.set_title(outcome.method)
        axes.grid(axis="x", visible=False)
    panels[-1].set_xticks([(place + 0.5) / len(words) for place in range(len(words))], words, rotation=90)
    panels[-1].set_xlim(0, 1)
    opinion = ("bad", "good")[int(review.label)]
    return Figure(
        drawing,
        caption=f"A {opinion} review among those to test with: weights of words (bars) and densities of time (curves, "
        "each to its own scale), of readers that all class it right.",
        alt="Four panels over the words of a sentence. Softmax has a bar for every word, sparsemax for a few. The "
        "density of continuous sparsemax is an arc over some words or all; the combined attention has bars and an arc "
        "over them.",
        paper="The paper draws such densities over words for translation (figure 2).",
    )


@torch.no_grad()
def legible(corpus: Corpus, readers: Sequence[Reader]) -> Review:
    """A short test review that all readers class right, and of which the last selects about a third."""
    short = [review for review in corpus.test if len(corpus.vocabulary.read(review)) in DRAWN_LENGTHS][:300]
    batch = corpus.vocabulary.batch(short)
    good = torch.stack([reader(batch).argmax(-1) == batch.labels for reader in readers]).all(0)
    low, high = documents.interval(readers[-1].look(batch))
    return short[int(torch.where(good, (high - low - 1 / 3).abs().float(), torch.inf).argmin())]


@torch.no_grad()
def _intervals(group: Sequence[Outcome]) -> Figure:
    """Where the intervals of some reviews lie, and how long they are."""
    shown = [next(outcome for outcome in group if outcome.method == name) for name in (METHODS[3], METHODS[5])]
    batch = group[0].corpus.vocabulary.batch(group[0].corpus.test[:INTERVALS])
    order = torch.argsort(batch.lengths, stable=True)
    drawing, panels = style.panels(1, 2, height=2.8, sharey=True)
    for axes, outcome in zip(panels, shown, strict=True):
        ends: tuple[Tensor, Tensor] = documents.interval(outcome.reader.look(batch))
        low, high = (end[order].clamp(0, 1).tolist() for end in ends)
        colours = [style.PALETTE[0] if label else style.PALETTE[1] for label in batch.labels[order].tolist()]
        axes.hlines(range(len(low)), low, high, color=colours, lw=1.6)
        axes.set(title=outcome.method, xlim=(0, 1), xlabel="time, from first word to last", yticks=[])
        axes.title.set_fontsize(8)
        axes.grid(axis="y", visible=False)
    panels[0].set_ylabel("reviews, the longest on top")
    return Figure(
        drawing,
        caption=f"The intervals outside of which densities are zero, for {len(batch.lengths)} test reviews of "
        f"{group[0].corpus.name}, good (blue) and bad (vermilion), N = {shown[0].functions}.",
        alt="Two panels of horizontal lines, one per review: the part of the text that attention selects.",
    )


GOOD = ["brilliant", "charming", "funny", "moving", "splendid", "witty"]
BAD = ["awful", "boring", "clumsy", "dull", "lame", "tedious"]
FILLERS = [
    "the",
    "a",
    "film",
    "plot",
    "story",
    "actor",
    "scene",
    "camera",
    "music",
    "with",
    "of",
    "and",
    "in",
    "on",
    "by",
    "we",
    "saw",
    "it",
    "had",
    "was",
    "its",
    "hero",
    "villain",
    "city",
    "night",
    "summer",
    "train",
    "director",
    "script",
    "sequel",
    "part",
    "end",
    "begins",
    "after",
    "before",
    "two",
    "three",
    "years",
    "old",
    "new",
]


def made_up(count: int, seed: int = 0) -> list[Review]:
    """Reviews of which one word tells the class."""
    random = Random(seed)
    reviews = []
    for number in range(count):
        words = [random.choice(FILLERS) for _ in range(random.randint(9, 29))]
        words.insert(random.randint(0, len(words)), random.choice((BAD, GOOD)[number % 2]))
        reviews.append(Review(tuple(words), number % 2))
    return reviews


def made_up_vectors(width: int = 24) -> Vocabulary:
    """Random vectors for the words of made-up reviews; those of one opinion lie together, as GloVe's do."""
    words = [*GOOD, *BAD, *FILLERS]
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(words), width, generator=generator)
    good, bad = torch.randn(2, width, generator=generator)
    vectors[: len(GOOD)] = 0.5 * vectors[: len(GOOD)] + good
    vectors[len(GOOD) : len(GOOD) + len(BAD)] = 0.5 * vectors[len(GOOD) : len(GOOD) + len(BAD)] + bad
    return Vocabulary({word: row for row, word in enumerate(words)}, vectors, longest=40)
