"""Document classification: attention to words, to an interval of the text, and to both."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch

from fenchel import Gini, Regularizer, Shannon
from fenchel.continuous import BetaGaussian
from fenchel_lab.chapters import densities
from fenchel_lab.data import glove, imdb, sst
from fenchel_lab.data.sst import Review
from fenchel_lab.drawing import style
from fenchel_lab.models import documents, training
from fenchel_lab.models.documents import Attention, Batch, Reader, Size, Vocabulary
from fenchel_lab.models.training import Course
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import is_higher, over_seeds, with_interval
from fenchel_lab.report.records import Job, Record
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
        counts: numbers of basis functions on IMDB, the first with all seeds, the others with one; …
        sentences: … and on the Stanford sentences.
        runs: how many seeds.
        trainable: whether the words' vectors are trained.
    """

    size: Size
    course: Course
    longest: int = 400
    reviews: tuple[int | None, int | None, int | None] = (None, None, None)
    counts: tuple[int, ...] = (64, 32, 128)
    sentences: tuple[int, ...] = (32,)
    runs: int = 3
    trainable: bool = True


FULL = Protocol(Size(128, 128, dropout=0.0, batch=16), Course(10), longest=10_000, runs=5)
SCALED = Protocol(Size(32, 32, dropout=0.2), Course(4, 2e-3))
TOY = Protocol(Size(12, 12, dropout=0.0, batch=32), Course(8, 3e-2), runs=1, trainable=False)
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
adds both contexts. Ours: the densities of the pooled encoder start about as wide as the text, where those of the
authors' code start several times as wide; the discrete part of the combined sparsemax is sparsemax, where that of
their code is softmax; the ridge penalty is 0.1, theirs 0.01.
"""

SCALED_DOWN = """
Scaled down from the paper's protocol: about 17,400 reviews of IMDB to train with, 2,500 to choose the epoch and 5,000
to test with, from a split of our own, for the file has IMDB's training reviews alone; the last {longest} words of each.
All of the Stanford treebank: 6,920 sentences to train, 872 to choose the epoch and 1,821 to test with. GloVe vectors of
50 numbers instead of 300, trained further; {size.hidden} hidden units a direction and {size.filters} filters instead of
128; {course.epochs} epochs in batches of {size.batch} at a rate of {course.rate:g} that falls to zero, instead of 10 in
batches of 16 at 0.001, and dropout {size.dropout:g}; {runs} seeds, one where N is not {counts[0]}. These settings were
chosen on development reviews by trial runs with one seed, some of which printed test scores too.
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
class Cells:
    """A row of a table: a method with a number of basis functions on a corpus, and its records, one per seed."""

    corpus: Corpus
    method: str
    functions: int
    records: Sequence[Record]

    def values(self, name: str) -> list[float]:
        """Of every seed."""
        return [float(record.figures[name]) for record in self.records]

    @property
    def mean(self) -> float:
        """Of the accuracies on test reviews, in percent."""
        return over_seeds(self.values("test"), 100)[0]


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
    records=True,
    full="With `--full` sizes, epochs and all numbers of basis functions are the paper's. What differs: "
    "reviews come from IMDB's training file alone, split anew, so that the test reviews are not the "
    "paper's; word vectors have 50 numbers, not 300; several seeds, where the paper reports one figure.",
)
def document_classification(context: Context) -> Result:
    """Train a reader with every attention, on every corpus, with every number of basis functions."""
    corpora, protocol, text = _setting(context)
    jobs = [each for corpus in corpora for each in _jobs(corpus, protocol, context.seed)]
    records = context.records.collect(jobs, lambda part, note="": context.progress(0.98 * part, note))
    tables, told, groups = [], [], []
    claims: list[Claim] = []
    for corpus in corpora:
        group = _group(corpus, records)
        if group:
            tables.append(_table(group))
            told.append(_leaders(group))
            groups.append(group)
            claims += _claims(group)
    if len(records) < len(jobs):
        told.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    figures = [_accuracies(groups), *_pictures(groups)] if groups else []
    return Result(f"{SUMMARY}\n{text}\n\n" + "\n\n".join(told), figures=figures, tables=tables, claims=claims)


def _jobs(corpus: Corpus, protocol: Protocol, first: int) -> list[Job]:
    """The runs of a corpus: all methods of a seed before the next seed, then other numbers of basis functions."""
    seeds = range(first, first + protocol.runs)
    main, *others = corpus.counts
    jobs = [job(corpus, name, _functions(name, main), protocol, seed) for seed in seeds for name in METHODS]
    return jobs + [job(corpus, name, count, protocol, first) for count in others for name in METHODS[2:]]


def _functions(name: str, count: int) -> int:
    return 0 if name.startswith("Discrete") else count


def job(corpus: Corpus, name: str, functions: int, protocol: Protocol, seed: int) -> Job:
    """One reader."""
    settings = {
        "size": asdict(protocol.size),
        "course": asdict(protocol.course),
        "longest": protocol.longest,
        "texts": [len(corpus.train), len(corpus.valid), len(corpus.test)],
        "trainable": protocol.trainable,
        "initial width": 0.4,
        "ridge": 0.1,
    }
    cell = {"attention": name, "functions": str(functions), "corpus": corpus.name}
    return Job(cell, seed, settings, partial(read, corpus, name, functions, protocol))


def _group(corpus: Corpus, records: Sequence[Record]) -> list[Cells]:
    """The rows of a corpus that have a record."""
    rows = []
    for name in METHODS:
        for count in sorted({_functions(name, count) for count in corpus.counts}):
            cell = {"attention": name, "functions": str(count), "corpus": corpus.name}
            if found := [record for record in records if record.cell == cell]:
                rows.append(Cells(corpus, name, count, found))
    return rows


def attention(name: str, functions: int) -> Attention:
    """The attention of a row of the table."""
    omega: Regularizer = Gini() if name.endswith("sparsemax") else Shannon()
    alpha = 2.0 if name.endswith("sparsemax") else 1.0
    if name.startswith("Discrete"):
        return Attention("discrete", omega, alpha)
    return Attention("continuous" if name.startswith("Continuous") else "combined", omega, alpha, functions)


def read(
    corpus: Corpus, name: str, functions: int, protocol: Protocol, progress: Callable[[float], None]
) -> dict[str, Any]:
    """The figures of a reader: its accuracies, and what its densities do."""
    batches = list(corpus.vocabulary.batches(corpus.train, protocol.size.batch))
    valid, test = (list(corpus.vocabulary.batches(part, documents.AT_ONCE)) for part in (corpus.valid, corpus.test))
    reader = Reader(corpus.vocabulary.vectors, attention(name, functions), protocol.size, protocol.trainable)
    widths = [_widths(reader.eval(), valid)] if functions else []

    def score(now: Reader) -> float:
        if functions:
            widths.append(_widths(now, valid))
        return documents.accuracy(now, valid)

    reader, best = training.trained(reader, batches, documents.loss, score, protocol.course, progress)
    figures: dict[str, Any] = {
        "validation": best,
        "test": documents.accuracy(reader, test),
        "attended": documents.attended(reader, test),
        "parameters": sum(each.numel() for key, each in reader.named_parameters() if key != "vectors"),
        "widths": widths,
        "example": example(corpus, reader),
    }
    if functions:
        figures["intervals"] = intervals(corpus, reader)
    return figures


def _widths(reader: Reader, batches: Sequence[Batch]) -> dict[str, float]:
    """The mean standard deviation of the densities, and how much their widths and places vary among texts."""
    places, widths = documents.spreads(reader, batches)
    return {"mean": widths.mean().item(), "varies": widths.std().item(), "places vary": places.std().item()}


@torch.no_grad()
def example(corpus: Corpus, reader: Reader) -> dict[str, Any]:
    """What attention sees of the first short test review: weights of its words, place and σ² of the density."""
    row = next(row for row, each in enumerate(corpus.test) if len(corpus.vocabulary.read(each)) in DRAWN_LENGTHS)
    look = reader.look(corpus.vocabulary.batch([corpus.test[row]]))
    shown: dict[str, Any] = {"review": row}
    if look.weights is not None:
        shown["weights"] = [round(weight, 4) for weight in look.weights[0].tolist()]
    if look.attended is not None:
        density = documents.density_of(look)
        shown["density"] = [density.loc[0, 0].item(), density.sigma[0, 0].item(), density.alpha]
    return shown


@torch.no_grad()
def intervals(corpus: Corpus, reader: Reader) -> list[list[float]]:
    """The ends of the densities' supports for some test reviews."""
    look = reader.look(corpus.vocabulary.batch(corpus.test[:INTERVALS]))
    ends = torch.stack(documents.interval(look), -1).clamp(0, 1)
    return [[round(end, 4) for end in row] for row in ends.tolist()]


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


def _leaders(group: Sequence[Cells]) -> str:
    best, worst = (choose(group, key=lambda row: row.mean) for choose in (max, min))
    named = f"{best.method}{f' with N = {best.functions}' if best.functions else ''}"
    return (
        f"On {group[0].corpus.name} the highest mean accuracy is that of {named}, "
        f"{with_interval(best.values('test'), 100)} ({_runs(best)}), the lowest {worst.mean:.1f}."
    )


def _claims(group: Sequence[Cells]) -> list[Claim]:
    """The lead of the combined sparsemax on IMDB, over the best other attention on the same seeds."""
    if group[0].corpus.name != "IMDB":
        return []
    count = group[0].corpus.counts[0]
    rows = {row.method: row for row in group if row.functions in (0, count)}
    leader = METHODS[-1]
    scores = {name: {each.seed: 100 * each.figures["test"] for each in row.records} for name, row in rows.items()}
    ours = scores.pop(leader, {})
    shared = {name: sorted(ours.keys() & found.keys()) for name, found in scores.items()}
    if not any(shared.values()):
        return []
    means = {name: statistics.fmean(scores[name][seed] for seed in seeds) for name, seeds in shared.items() if seeds}
    other = max(means, key=means.__getitem__)
    seeds = shared[other]
    printed = max((PAPER[name, _functions(name, count)], name) for name in METHODS[:-1])
    return [
        Claim(
            f"Discrete and continuous sparsemax together are the best attention (IMDB, N = {count}, accuracy)",
            f"{PAPER[leader, count]:.2f} %, next {printed[1]} {printed[0]:.2f}",
            f"{with_interval([ours[seed] for seed in seeds])} %, best other {other} "
            f"{with_interval([scores[other][seed] for seed in seeds])} ({len(seeds)} runs each)",
            is_higher([ours[seed] - scores[other][seed] for seed in seeds]),
        )
    ]


def _runs(row: Cells) -> str:
    return f"{len(row.records)} run{'s' * (len(row.records) > 1)}"


def _table(group: Sequence[Cells]) -> Table:
    name = group[0].corpus.name
    rows: list[list[Cell]] = []
    for row in group:
        paper = f"{PAPER[row.method, row.functions]:.2f}" if name == "IMDB" else "–"
        share = f"{over_seeds(row.values('attended'), 100)[0]:.0f} %"
        told = [_told(row, 0), _told(row, -1)] if row.functions else ["–", "–"]
        scores = [with_interval(row.values("validation"), 100), with_interval(row.values("test"), 100)]
        parameters = f"{row.records[0].figures['parameters']:,}"
        rows.append([row.method, row.functions or "–", len(row.records), paper, *scores, parameters, share, *told])
    return Table(
        ["attention", "N", "runs", "paper", "development", "test", "parameters", "attended", "σ at first", "σ at last"],
        rows,
        caption=f"{name}: accuracy on development and on {len(group[0].corpus.test):,} test reviews in percent, mean ± "
        "half the 95 % interval over seeds; how many numbers are trained besides the words' vectors; the share of a "
        "review that has any weight, of its words or, where there is a density, of its time; and the standard "
        "deviation of the density on development reviews, before training and after it, with how much it "
        "varies from text to text (standard deviations).",
        paper="The paper's accuracies are within 1.6 points of each other; discrete and continuous sparsemax together "
        "are ahead for every N, with as many parameters as discrete attention alone."
        if name == "IMDB"
        else "The paper has no such column.",
    )


def _told(row: Cells, epoch: int) -> str:
    """The width of the densities after an epoch, and how much it varies among texts."""
    mean, varies = (
        over_seeds([record.figures["widths"][epoch][name] for record in row.records])[0] for name in ("mean", "varies")
    )
    return f"{mean:.2f} ± {varies:.2f}"


def _accuracies(groups: Sequence[Sequence[Cells]]) -> Figure:
    drawing, panels = style.panels(1, len(groups), height=3.4, sharey=True)
    for axes, group in zip(panels, groups, strict=True):
        for row in group:
            counts = sorted({_functions(row.method, count) for count in row.corpus.counts})
            place = METHODS.index(row.method) + 0.22 * (counts.index(row.functions) - (len(counts) - 1) / 2)
            colour, values = _colour(row.functions), [100 * value for value in row.values("test")]
            axes.plot(values, [place] * len(values), "o", ms=4, mew=0, alpha=0.5, color=colour)
            axes.plot(row.mean, place, "|", ms=10, mew=1.6, color=colour)
            paper = PAPER.get((row.method, row.functions))
            if paper is not None and row.corpus.name == "IMDB":
                axes.plot(paper, place, "o", ms=4, mfc="none", color=colour)
        axes.set(title=group[0].corpus.name, xlabel="accuracy, %", yticks=range(len(METHODS)))
        axes.set_yticklabels([name.replace("Cont. ", "Cont.\n") for name in METHODS])
        axes.grid(axis="y", visible=False)
    panels[0].set_ylim(len(METHODS) - 0.5, -0.5)
    functions = sorted({row.functions for row in itertools.chain.from_iterable(groups)})
    for n in functions:
        panels[0].plot([], [], "o", ms=4, color=_colour(n), label=f"N = {n}" if n else "discrete")
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Figure(
        drawing,
        caption="Test accuracy of every run, their means (bars), and the paper's (hollow).",
        alt="A row for each kind of attention, with points for each number N of basis functions.",
        paper="Table 1, drawn beside it.",
    )


def _colour(functions: int) -> str:
    return style.INK if not functions else style.PALETTE[(*COUNTS, TOY_FUNCTIONS).index(functions)]


def _pictures(groups: Sequence[Sequence[Cells]]) -> list[Figure]:
    """One short review under four kinds of attention, and the intervals of many; of methods that have a run."""
    figures = []
    if len(shown := _shown(groups[-1], METHODS[:2] + METHODS[3:4] + METHODS[5:])) == 4:
        figures.append(_words(shown))
    if len(shown := _shown(groups[0], (METHODS[3], METHODS[5]))) == 2:
        figures.append(_intervals(shown))
    return figures


def _shown(group: Sequence[Cells], names: Sequence[str]) -> list[Cells]:
    """The rows of some methods, with the main number of basis functions."""
    return [
        row
        for row in group
        if row.method in names and row.functions == _functions(row.method, group[0].corpus.counts[0])
    ]


def _words(shown: Sequence[Cells]) -> Figure:
    """One short review under four kinds of attention."""
    corpus = shown[0].corpus
    seen: list[Mapping[str, Any]] = [row.records[0].figures["example"] for row in shown]
    review = corpus.test[seen[0]["review"]]
    words = [word.replace("$", r"\$") for word in corpus.vocabulary.read(review)]
    drawing, panels = style.panels(len(shown), 1, height=1.05, sharex=True)
    for axes, row, look in zip(panels, shown, seen, strict=True):
        if "weights" in look:
            places = [(place + 0.5) / len(words) for place in range(len(words))]
            axes.bar(places, look["weights"], 0.7 / len(words), color=style.PALETTE[0])
            axes.set(ylim=(0, 1), yticks=(0, 1))
        if "density" in look:
            over = axes.twinx() if "weights" in look else axes
            loc, sigma, alpha = look["density"]
            density = BetaGaussian(torch.tensor([loc]), sigma=torch.tensor([[sigma]]), alpha=alpha)
            densities.over_words(over, density, words)
            over.set_yticks([])
            over.spines[:].set_visible(False)
            over.grid(visible=False)
        axes.set_title(row.method)
        axes.grid(axis="x", visible=False)
    panels[-1].set_xticks([(place + 0.5) / len(words) for place in range(len(words))], words, rotation=90)
    panels[-1].set_xlim(0, 1)
    opinion = ("bad", "good")[int(review.label)]
    return Figure(
        drawing,
        caption=f"The first test review of {min(DRAWN_LENGTHS)} to {max(DRAWN_LENGTHS)} words, a {opinion} one, under "
        "the attention of the first seed: weights of words (bars), densities of time (curves, each to its own scale).",
        alt="Four panels over the words of a sentence. Softmax has a bar for every word, sparsemax for a few. The "
        "density of continuous sparsemax is an arc over some words or all; the combined attention has bars and an arc "
        "over them.",
        paper="The paper draws such densities over words for translation (figure 2).",
    )


def _intervals(shown: Sequence[Cells]) -> Figure:
    """Where the intervals of some reviews lie, and how long they are."""
    corpus = shown[0].corpus
    reviews = corpus.test[:INTERVALS]
    order = sorted(range(len(reviews)), key=lambda row: len(corpus.vocabulary.read(reviews[row])))
    drawing, panels = style.panels(1, 2, height=2.8, sharey=True)
    for axes, row in zip(panels, shown, strict=True):
        ends = [row.records[0].figures["intervals"][each] for each in order]
        colours = [style.PALETTE[0] if reviews[each].label else style.PALETTE[1] for each in order]
        axes.hlines(range(len(ends)), [low for low, _ in ends], [high for _, high in ends], color=colours, lw=1.6)
        axes.set(title=row.method, xlim=(0, 1), xlabel="time, from first word to last", yticks=[])
        axes.title.set_fontsize(8)
        axes.grid(axis="y", visible=False)
    panels[0].set_ylabel("reviews, the longest on top")
    return Figure(
        drawing,
        caption=f"The intervals outside of which densities are zero, for {len(reviews)} test reviews of "
        f"{corpus.name}, good (blue) and bad (vermilion), N = {shown[0].functions}, first seed.",
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
