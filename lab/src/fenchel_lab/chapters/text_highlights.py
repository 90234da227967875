"""Text rationalization: classifiers that select words, by attention, by k-subsets and by sequential k-subsets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from typing import Any, cast

import torch

from fenchel_lab.chapters.document_classification import BAD, FILLERS, GOOD, Corpus, made_up_vectors, sampled
from fenchel_lab.data import eraser, glove, imdb, sst
from fenchel_lab.data.eraser import Annotated
from fenchel_lab.drawing import highlights
from fenchel_lab.models import rationale
from fenchel_lab.models.documents import Vocabulary
from fenchel_lab.models.rationale import Found, Kind, Rationalizer, Selection, Size
from fenchel_lab.models.training import Course
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import is_higher, judged, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

LABELS = ("bad", "good")
ATTENTIONS: tuple[Kind, ...] = ("softmax", "sparsemax", "entmax", "fusedmax")
TRAINED: tuple[Kind, ...] = ("k-subsets", "sparsemax", "fusedmax", "entmax", "softmax")
"""What selects in training, in the order in which they are run."""
SOFT, HARD, SEQUENTIAL = "k-subsets, as trained", "k-subsets", "sequential k-subsets"
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
        course: of their training, on the reviews that people marked, …
        others: … and on SST and IMDB.
        selection: budget and temperature of k-subsets in training, and their temperature in tests.
        transitions: to choose from, for sequential k-subsets in tests.
        longest: of longer texts the last so many words are read.
        reviews: of IMDB, to train, to choose the epoch and to test with; None for all.
        runs: how many seeds.
        batch: texts per step.
    """

    size: Size
    course: Course
    others: Course
    selection: Selection
    transitions: Sequence[float]
    longest: int
    reviews: tuple[int | None, int | None, int | None] = (None, None, None)
    runs: int = 5
    batch: int = 32


SELECTION = Selection("k-subsets", budget=0.2, temperature=0.1, test_temperature=1e-3)
TRANSITIONS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
FULL = Protocol(Size(), Course(12), Course(10), SELECTION, TRANSITIONS, longest=10_000)
SCALED = Protocol(
    Size(32, 0.2), Course(12, 2e-3), Course(4, 2e-3), SELECTION, TRANSITIONS, 250, reviews=(8_000, 1_000, 2_000)
)
TOY = Protocol(
    Size(12, head_dropout=0.0),
    Course(4, 1e-2),
    Course(4, 1e-2),
    replace(SELECTION, budget=0.15),
    (0.1, 0.5),
    60,
    runs=1,
    batch=16,
)
TOY_REVIEWS = (240, 60, 100)

SUMMARY = """
Which words made it a bad review? A rationalizer reads a text with a bidirectional LSTM; a Hopfield pooling layer with
one static query, `HopfieldPooling(width, omega=SparseMAP(SequentialSubsets(Share(0.2), transition)))`, selects a share
of the words, and a predictor classes the sum of their states. k-subsets select the words with the highest scores,
sequential k-subsets also count a bonus for every pair of selected neighbours, so that they tend to select phrases. Both
share out as much weight as there are words in the budget of {share:.0%}; a temperature decides how evenly.

Rationalizers are trained with k-subsets at a temperature of {train:g}. To test them the temperature is {test:g}, which
selects nearly whole words, exactly the budget; sequential k-subsets get a transition then, and only then. It is chosen
among {transitions}, on the development reviews alone. Sparsemax, 1.5-entmax and fusedmax on the same encoder decide by
themselves how many words they select; softmax gives all of them weight, so its {share:.0%} with the most weight are
measured beside it. Every other word has a weight of exactly zero.
"""

EXPLAINED = """
That is also what the paper's own figures come from. It prints a transition of 0.001 at a temperature of 0.1, which is
0.01 beside scores that are divided by 0.1, and cannot join words into phrases. In the authors' code scores are
divided by 1e-3 once at test time and transitions twice: 0.001 / 1e-3 = 1.0 in units of the scores, at a
temperature of 1e-3, so that the selection is nearly hard and the transition as large as the scores themselves.
"""

DATA = """
The paper's BeerAdvocate and AgNews, and its baselines that sample rationales, are not at hand. In BeerAdvocate's place
are ERASER's film reviews, with the words
that people marked for the opinion as a whole, not for one aspect of a beer. Those to test with were annotated anew and
more densely, {test:.0%} of their words beside {train:.0%} of those to train with; overlaps here are with the former,
so they are not to be compared with overlaps on other data, but with what as many words have that are taken by chance.
IMDB is split anew, for the file has its training reviews alone. GloVe vectors of 50 numbers are trained further.
"""

SCALED_DOWN = """
Scaled down from the paper's protocol: the last {longest} words of a text, of which alone the marked ones count;
{reviews[0]:,} reviews of IMDB to train with, {reviews[2]:,} of them to test with, and all of ERASER and SST; states of
width {width} instead of 200; at a rate of {course.rate:g} that falls to zero {course.epochs} epochs on ERASER's 1,600
reviews, and {others.epochs} on the others. That was set by F₁ of trial runs on ERASER's development reviews (one seed
each): 0.78 after 4 epochs, 0.84 after 12. The other settings come from earlier trial runs, some of which printed
figures of test reviews too.
"""

WHOLE = """
From the paper (appendix F.3): states of width 200, a dropout of 0.5 of the pooled vector, one head, five seeds; whole
texts. Ours, for the paper refers to Guerreiro and Martins (2021) or does not tell: a budget of {selection.budget:.0%},
at most {course.epochs} epochs on ERASER and {others.epochs} on the others, of batches of {batch} at a rate of
{course.rate:g} that falls to zero.
"""

EMBEDDED = """
This page was made with made-up reviews: {train} to train with, of ten to thirty words, in which a phrase of three
words such as “a tedious film” says it all and counts as marked; one seed. It shows the idea and settles no order. On
ERASER's film reviews, SST and IMDB run the command below with `FENCHEL_DATA` set.
"""

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
    records=True,
    full="With `--full` widths, dropout and seeds are the paper's. What differs: ERASER's film reviews in place of "
    "BeerAdvocate, no AgNews, IMDB's training file alone, split anew, and word vectors of 50 numbers; budget, epochs "
    "and rate are ours, for the paper does not tell them.",
)
def text_highlights(context: Context) -> Result:
    """Train a rationalizer with every selection, on every corpus."""
    corpora, protocol, text = _setting(context)
    seeds = range(context.seed, context.seed + protocol.runs)
    jobs = [job(corpus, kind, protocol, seed) for kind in TRAINED for corpus in corpora for seed in seeds]
    records = context.records.collect(jobs, lambda part, note="": context.progress(0.98 * part, note))
    tables, told, figures = [], [], []
    claims: list[Claim] = []
    for corpus in corpora:
        rows = _rows([each for each in records if each.cell["corpus"] == corpus.name])
        if not rows:
            continue
        tables.append(_table(corpus, rows))
        if HARD in rows:
            told.append(_verdict(corpus, rows))
            claims += _claims(corpus, rows)
        examples = [each.figures["example"] for each in records if each.cell["corpus"] == corpus.name]
        if drawn := [each for each in examples if each]:
            figures.append(_picture(corpus, drawn[0], _chosen(rows[SEQUENTIAL])))
    if len(records) < len(jobs):
        told.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    selection = protocol.selection
    *first, last = (f"{each:g}" for each in protocol.transitions)
    summary = SUMMARY.format(
        share=selection.budget,
        train=selection.temperature,
        test=selection.test_temperature,
        transitions=f"{', '.join(first)} and {last}",
    )
    return Result(f"{summary}\n{text}\n\n" + "\n\n".join(told), figures=figures, tables=tables, claims=claims)


def job(corpus: Corpus, kind: Kind, protocol: Protocol, seed: int) -> Job:
    """One rationalizer."""
    settings = {
        "size": asdict(protocol.size),
        "course": asdict(_course(corpus, protocol)),
        "selection": asdict(selection(kind, protocol)),
        "transitions": list(protocol.transitions),
        "longest": protocol.longest,
        "texts": [len(corpus.train), len(corpus.valid), len(corpus.test)],
        "batch": protocol.batch,
        "reads": "states",
        "vectors": "trained",
    }
    work = partial(read, corpus, kind, protocol)
    return Job({"selection": kind, "corpus": corpus.name}, seed, settings, work)


def _course(corpus: Corpus, protocol: Protocol) -> Course:
    return protocol.course if isinstance(corpus.test[0], Annotated) else protocol.others


def selection(kind: Kind, protocol: Protocol) -> Selection:
    """What selects in training: attentions are at temperature 1."""
    return protocol.selection if kind == "k-subsets" else Selection(kind, protocol.selection.budget, temperature=1)


def read(corpus: Corpus, kind: Kind, protocol: Protocol, progress: Callable[[float], None]) -> dict[str, Any]:
    """The figures of a rationalizer, for every way to select in tests, on validation and test reviews."""
    trained = selection(kind, protocol)
    model = Rationalizer(corpus.vocabulary, LABELS, trained, protocol.size, "states", trainable=True)
    model, best = rationale.trained(
        model, corpus.train, corpus.valid, _course(corpus, protocol), protocol.batch, lambda part: progress(0.8 * part)
    )
    example: dict[str, Any] | None = None
    tried: dict[str, Any] = {}
    review = None
    if isinstance(corpus.test[0], Annotated):
        review = min(range(len(corpus.test)), key=lambda row: _short(corpus, row, cast(float, trained.budget)))
        example = {"review": review, "weights": {}, "label": {}} if kind == "k-subsets" else None
    ways = _ways(kind, protocol)
    for done, (name, (selected, top)) in enumerate(ways.items()):
        model.selection = selected
        parts = {"validation": corpus.valid, "test": corpus.test}
        tried[name] = {part: figures(rationale.found(model, reviews, top)) for part, reviews in parts.items()}
        if example is not None and review is not None:
            found = model.explain(list(corpus.vocabulary.read(corpus.test[review])))
            example["weights"][name] = [round(weight, 3) for weight in found.weights]
            example["label"][name] = found.label
        progress(0.8 + 0.2 * (done + 1) / len(ways))
    return {"f1": best, "tried": tried, "example": example}


def _short(corpus: Corpus, row: int, budget: float) -> tuple[bool, int]:
    """The sort key by which the shortest review with marked words and room for a phrase of three is the first."""
    review = cast(Annotated, corpus.test[row])
    fits = bool(review.rationale) and 3 / budget <= len(review.words) <= corpus.vocabulary.longest
    return not fits, len(review.words)


def _ways(kind: Kind, protocol: Protocol) -> dict[str, tuple[Selection, float | None]]:
    """How words are selected in tests: the name of the row, the selection, and the share of the largest weights."""
    trained = selection(kind, protocol)
    if kind == "softmax":
        return {kind: (trained, None), "softmax, top words": (trained, cast(float, trained.budget))}
    if kind != "k-subsets":
        return {kind: (trained, None)}
    hard = replace(trained, kind="sequential k-subsets", transition=0.0)
    ways: dict[str, tuple[Selection, float | None]] = {SOFT: (replace(trained, test_temperature=None), None)}
    ways[HARD] = (trained, None)
    for transition in protocol.transitions:
        ways[f"{SEQUENTIAL}, {transition:g}"] = (replace(hard, test_transition=transition), None)
    return ways


def figures(found: Found) -> dict[str, float | None]:
    """What a rationalizer did to reviews."""
    names = ("f1", "overlap", "overlap_of_means", "chance", "chance_of_means", "share", "runs", "run_length")
    return {name: getattr(found, name) for name in names}


@dataclass(frozen=True)
class Row:
    """A row of a table: the way to select, and what it did with every seed."""

    way: str
    runs: Mapping[int, Mapping[str, Mapping[str, float | None]]]

    def values(self, name: str, part: str = "test") -> list[float]:
        """Over seeds; none if there is no such figure."""
        return [value for run in self.runs.values() if (value := run[part][name]) is not None]

    def mean(self, name: str, part: str = "test") -> float:
        """Over seeds."""
        return statistics.fmean(self.values(name, part))

    def told(self, name: str, digits: int = 3) -> str:
        """Mean and half the 95 % interval over seeds."""
        return with_interval(self.values(name), digits=digits)


def _rows(records: Sequence[Record]) -> dict[str, Row]:
    """The rows of a corpus. The transition is that with the best mean over seeds on validation reviews."""
    runs: dict[str, dict[int, Any]] = {}
    for record in records:
        for way, parts in record.figures["tried"].items():
            runs.setdefault(way, {})[record.seed] = parts
    rows = {way: Row(way, each) for way, each in runs.items()}
    if sequential := [row for way, row in rows.items() if way.startswith(SEQUENTIAL)]:
        judged = "overlap" if sequential[0].values("overlap", "validation") else "f1"
        best = max(sequential, key=lambda row: row.mean(judged, "validation"))
        rows = {way: row for way, row in rows.items() if row not in sequential}
        rows[SEQUENTIAL] = best
    order = ("softmax", "softmax, top words", *ATTENTIONS[1:], SOFT, HARD, SEQUENTIAL)
    return {way: rows[way] for way in order if way in rows}


def _chosen(row: Row) -> str:
    """The transition that was chosen."""
    return row.way.removeprefix(f"{SEQUENTIAL}, ")


def _setting(context: Context) -> tuple[list[Corpus], Protocol, str]:
    if context.data is None:
        reviews, (first, second) = made_up(sum(TOY_REVIEWS)), (TOY_REVIEWS[0], sum(TOY_REVIEWS[:2]))
        parts = reviews[:first], reviews[first:second], reviews[second:]
        return [Corpus("made up", made_up_vectors(), *parts)], TOY, EMBEDDED.format(train=TOY_REVIEWS[0])
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
        Corpus("SST", vocabulary, *sentences),
        Corpus("IMDB", vocabulary, *map(sampled, films, protocol.reviews)),
    ]
    data = DATA.format(train=density(marked[0]), test=density(marked[2]))
    text = text.format(**vars(protocol), width=2 * protocol.size.hidden)
    return corpora, protocol, f"{EXPLAINED}\n{data}\n{text}"


def density(reviews: Sequence[Annotated]) -> float:
    """The share of a review's words that is marked, on average.

    Example:
        >>> density([Annotated(("so", "dull"), 0, (1,)), Annotated(("a", "fine", "plot", "."), 1, (0, 1, 2, 3))])
        0.75
    """
    return statistics.fmean(len(review.rationale) / len(review.words) for review in reviews)


def _verdict(corpus: Corpus, rows: Mapping[str, Row]) -> str:
    """What a transition does to the selections of the same rationalizers."""
    plain, sequential = rows[HARD], rows[SEQUENTIAL]
    named = {"made up": "made-up reviews"}.get(corpus.name, corpus.name)
    text = (
        f"On {named} a transition of {_chosen(sequential)} turns {plain.told('runs', 1)} runs per text into "
        f"{sequential.told('runs', 1)}, of {sequential.told('run_length', 1)} words instead of "
        f"{plain.told('run_length', 1)}, and F₁ of the classes from {plain.told('f1')} into {sequential.told('f1')}"
    )
    if plain.values("overlap"):
        text += (
            f"; the overlap with people from {plain.told('overlap')} into {sequential.told('overlap')} (by chance "
            f"{sequential.mean('chance'):.3f}), a gain of {with_interval(_gains(rows, 'overlap'), digits=3)} with the "
            "same rationalizer"
        )
    return text + "."


def _gains(rows: Mapping[str, Row], name: str, over: str = HARD) -> list[float]:
    """What sequential k-subsets gain in a figure over another selection, for each seed that both have."""
    tests = [{seed: run["test"][name] for seed, run in rows[way].runs.items()} for way in (over, SEQUENTIAL)]
    pairs = [(tests[0][seed], tests[1][seed]) for seed in sorted(tests[0].keys() & tests[1].keys())]
    return [ours - other for other, ours in pairs if other is not None and ours is not None]


def _claims(corpus: Corpus, rows: Mapping[str, Row]) -> list[Claim]:
    """The paper's claims beside what was found; none for made-up reviews."""
    printed = {name: PAPER.get((name, corpus.name), "") for name in (HARD, SEQUENTIAL)}
    if not printed[HARD]:
        return []
    baselines = [way for way in ("sparsemax", "fusedmax") if way in rows]
    if not rows[HARD].values("overlap"):
        others = "".join(f", {way} {rows[way].told('f1')}" for way in baselines)
        value, reached = float(printed[HARD].split()[0]), rows[HARD].values("f1")
        return [
            Claim(
                f"k-subsets class texts by a fifth of their words as well as the paper's ({corpus.name}, F₁)",
                f"{printed[HARD]}, sequential {printed[SEQUENTIAL]}, sparsemax {PAPER['sparsemax', corpus.name]}",
                f"{rows[HARD].told('f1')}, sequential {rows[SEQUENTIAL].told('f1')} ({len(reached)} runs){others}",
                judged("yes" if statistics.fmean(reached) >= value - 0.01 else "no", len(reached)),
            )
        ]
    runs = len(rows[HARD].runs)
    many, few = ((row.told("runs", 1), row.told("run_length", 1)) for row in (rows[HARD], rows[SEQUENTIAL]))
    claims = [
        Claim(
            "Sequential k-subsets overlap more with people's rationales than k-subsets",
            f"{printed[SEQUENTIAL]} instead of {printed[HARD]}, BeerAdvocate",
            f"{rows[SEQUENTIAL].told('overlap')} instead of {rows[HARD].told('overlap')}, a gain of "
            f"{with_interval(_gains(rows, 'overlap'), digits=3)} ({runs} runs; by chance "
            f"{rows[SEQUENTIAL].mean('chance'):.3f}; {corpus.name})",
            is_higher(_gains(rows, "overlap")),
        ),
        Claim(
            "Sequential k-subsets select longer phrases",
            "shown by examples",
            f"{few[0]} runs per text of {few[1]} words instead of {many[0]} of {many[1]}; F₁ of the classes "
            f"{rows[SEQUENTIAL].told('f1')} instead of {rows[HARD].told('f1')} ({runs} runs)",
            is_higher(_gains(rows, "run_length")),
        ),
    ]
    for way in baselines:
        gains = _gains(rows, "overlap", way)
        claims.append(
            Claim(
                f"Sequential k-subsets overlap more with people's rationales than {way}",
                f"{printed[SEQUENTIAL]} instead of {PAPER[way, corpus.name]}, BeerAdvocate",
                f"{_beside_chance(rows[SEQUENTIAL])} instead of {_beside_chance(rows[way])}, a difference of "
                f"{with_interval(gains, digits=3)} ({len(gains)} runs each; {corpus.name})",
                is_higher(gains),
            )
        )
    return claims


def _beside_chance(row: Row) -> str:
    """The overlap with people, how many words were selected, and the overlap of as many that are taken by chance."""
    return f"{row.told('overlap')} ({row.mean('share'):.0%} of the words, by chance {row.mean('chance'):.3f})"


def _table(corpus: Corpus, rows: Mapping[str, Row]) -> Table:
    marked = any(row.values("overlap") for row in rows.values())
    body: list[list[Cell]] = []
    for name, row in rows.items():
        overlaps = []
        if marked:
            for kind, chance in (("overlap", "chance"), ("overlap_of_means", "chance_of_means")):
                overlaps += [row.told(kind), f"{row.mean(chance):.3f}"]
        body.append(
            [
                f"{name}, {_chosen(row)}" if name == SEQUENTIAL else name,
                len(row.runs),
                PAPER.get((name, corpus.name), "–"),
                row.told("f1"),
                *overlaps,
                f"{row.mean('share'):.0%}",
                row.told("runs", 1),
                row.told("run_length", 1),
            ]
        )
    overlaps = ["overlap", "by chance", "overlap of means", "by chance"] if marked else []
    paper = "paper's overlap" if marked else "paper's F₁"
    told = (
        "F₁ overlap of the selected words with those that people marked, the mean over texts and from mean precision "
        "and recall, as in the paper, each beside that of as many words taken by chance; "
    )
    return Table(
        ["selection", "runs", paper, "F₁", *overlaps, "selected", "runs per text", "words per run"],
        body,
        caption=f"{corpus.name}: F₁ of the classes on {len(corpus.test):,} test reviews, mean over seeds ± half the "
        f"95 % interval; {told if marked else ''}the share of words with weight; runs of neighbours among these, and "
        "their length. Behind sequential k-subsets stands the transition, chosen by "
        f"{'overlap' if marked else 'F₁'} on development reviews.",
        paper="Overlaps of tables 3 and 7 are those with the rationales of BeerAdvocate, which are other data."
        if marked
        else "F₁ of tables 3 and 7.",
    )


def _picture(corpus: Corpus, example: Mapping[str, Any], transition: str) -> Figure:
    """One review under k-subsets and under sequential k-subsets."""
    review = cast(Annotated, corpus.test[example["review"]])
    words = list(corpus.vocabulary.read(review))
    skipped = len(review.words) - len(words)
    ways = {HARD: HARD, f"{SEQUENTIAL}, {transition}": SEQUENTIAL}
    shown = [(f"{name}: {example['label'][way]}", words, example["weights"][way]) for way, name in ways.items()]
    return Figure(
        highlights.picture(shown, {at - skipped for at in review.rationale}),
        caption=f"A short review to test with, a {LABELS[int(review.label)]} one, and the class that it is given "
        "by the first rationalizer; the words that are selected (the stronger the colour, the more weight) and those "
        "that a person marked (underlined).",
        alt="The text of a review twice: selected words on a yellow ground, marked words underlined.",
        paper="Figures 4 and 7 show that sequential k-subsets select longer phrases, as people do.",
    )


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
