"""SparseMAP in a hidden layer: alignments that a network learns because they help it to judge pairs of sentences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import Any

import torch

from fenchel_lab.data import multi30k
from fenchel_lab.drawing import style
from fenchel_lab.models import pairs, training
from fenchel_lab.models.pairs import Batch, Judge, Kind, Pair, Size, Vocabulary
from fenchel_lab.models.training import Course
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import is_higher, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

KINDS: tuple[Kind, ...] = ("softmax", "sparsemax", "sequence", "matching")
STRUCTURED: tuple[Kind, ...] = ("sequence", "matching")
DRAWN = 7
"""Words of the sentences of the pair that is drawn."""


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        size: of the model.
        course: of its training.
        captions: to train with; None for all.
        tried: captions of which the one most like the right one is taken for a false pair.
        longest: words of a sentence.
        runs: how many seeds.
    """

    size: Size
    course: Course
    captions: int | None
    tried: int = 20
    longest: int = 14
    runs: int = 3


FULL = Protocol(Size(), Course(10, 2e-2), None)
SCALED = Protocol(Size(), Course(4, 2e-2), 8_000)
TOY = Protocol(Size(24, dropout=0.0, batch=16), Course(8, 2e-2), 400, tried=4, runs=1)
TOY_TESTS = 100

SUMMARY = """
Does the second sentence say what the first says, in another language? Nobody tells the network which words belong
together: it only learns whether a pair is true or false. In its hidden layer every word of the second sentence looks
for words of the first, and a pair is true if what was found is like what was looked for. Four kinds of attention do the
looking: softmax and sparsemax treat every word by itself; a sequence, `SparseMAP(Chain(steps))`, moves from left to
right, with a price for steps back that is learned; a matching, `SparseMAP(Matching())`, is one to one. The gradient of
the loss passes through the sparse mixture of alignments as it passes through softmax, and a dictionary is learned by
the way.
"""

REAL = """
Multi30k: German captions of images with their English translations, of at most {longest} words each, without
punctuation. A false pair has another image's caption, that of {tried} drawn ones which shares the most words with the
true one; half of all pairs are false. {train:,} pairs to train with, {valid:,} to choose the epoch, {test:,} to test
with. Words are {size.width} numbers wide and start at random, {course.epochs} epochs, a rate of {course.rate:g} that
falls to zero, {runs} seeds. Epochs and rate were chosen with softmax, by validation pairs.
"""

EMBEDDED = """
This page was made with {train} pairs in English and in a made-up language, which has a word for each English one and
says adjectives after their nouns; one seed. Here it is known which words belong together. On Multi30k run the command
below with `FENCHEL_DATA` set.
"""

CODE = """
import torch, fenchel
from fenchel.structures import Matching

words, others = torch.randn(5, 8, requires_grad=True), torch.randn(6, 8)
aligned = fenchel.SparseMAP(Matching()).argmax(words @ others.T)  # one to one
context = aligned @ others  # a hidden layer: the gradient passes through the alignment
context.square().sum().backward()
print(aligned, words.grad.norm())
"""


@dataclass(frozen=True)
class Corpus:
    """Pairs to train, to choose the epoch and to test with; ``gold`` tells whether words mean the same, if known."""

    train: Sequence[Pair]
    valid: Sequence[Pair]
    test: Sequence[Pair]
    gold: Callable[[str, str], bool] | None = None


@study(
    "Alignments that a network learns",
    source="Martins (2024), From Sparse Modeling to Sparse Communication, latent structured alignments; Niculae et al. "
    "(2018), SparseMAP",
    order=3.5,
    theme="Structures",
    code=CODE,
    data=["multi30k"],
    records=True,
    full="With `--full` all captions are used, for ten epochs. What differs from the paper: pairs of captions in two "
    "languages, true or false, in place of SNLI's entailment, and a small model without word vectors or an LSTM.",
)
def hidden_alignments(context: Context) -> Result:
    """Train a judge of pairs with every attention, and print what it aligns."""
    corpus, protocol, text = _setting(context)
    seeds = range(context.seed, context.seed + protocol.runs)
    jobs = [job(corpus, kind, protocol, seed) for seed in seeds for kind in KINDS]
    records = context.records.collect(jobs, context.progress)
    found = {kind: [each for each in records if each.cell["attention"] == kind] for kind in KINDS}
    groups = {kind: group for kind, group in found.items() if group}
    told = [SUMMARY, text]
    if len(records) < len(jobs):
        told.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    if not groups:
        return Result("\n\n".join(told))
    told.append(_found(groups))
    claims = [_claim(groups)] if context.data is not None and len(groups) == len(KINDS) else []
    return Result("\n\n".join(told), figures=[_figure(corpus, groups)], tables=[_table(groups)], claims=claims)


def job(corpus: Corpus, kind: Kind, protocol: Protocol, seed: int) -> Job:
    """One judge."""
    settings = {
        "size": asdict(protocol.size),
        "course": asdict(protocol.course),
        "pairs": [len(corpus.train), len(corpus.valid), len(corpus.test)],
        "tried": protocol.tried,
        "longest": protocol.longest,
    }
    return Job({"attention": kind}, seed, settings, partial(judged, corpus, kind, protocol))


def judged(corpus: Corpus, kind: Kind, protocol: Protocol, progress: Callable[[float], None]) -> dict[str, Any]:
    """The figures of a judge: accuracies, what its attention is like, and its alignment of one pair."""
    vocabulary = Vocabulary(corpus.train)
    train = list(vocabulary.batches(corpus.train, protocol.size.batch))
    valid, test = (list(vocabulary.batches(part, pairs.AT_ONCE)) for part in (corpus.valid, corpus.test))
    judge = Judge(vocabulary, kind, protocol.size)
    score = partial(_score, valid)
    judge, best = training.trained(judge, train, pairs.loss, score, protocol.course, progress)
    shown = drawn(corpus)
    with torch.no_grad():
        weights = judge.weights(vocabulary.batch([shown]))[0]
    figures: dict[str, Any] = {
        "validation": best,
        "test": pairs.accuracy(judge, test),
        "back": judge.back.item(),
        "example": [[round(weight, 4) for weight in row] for row in weights.tolist()],
        **pairs.shape_of(judge, test),
    }
    if corpus.gold is not None:
        figures["right"] = right(judge, vocabulary, corpus.test, corpus.gold)
    return figures


def _score(batches: Sequence[Batch], judge: Judge) -> float:
    return pairs.accuracy(judge, batches)


def drawn(corpus: Corpus) -> Pair:
    """The first true test pair with so many words on both sides, all different."""
    fits = (
        pair
        for pair in corpus.test
        if pair.true and all(len(side) == len(set(side)) == DRAWN for side in (pair.first, pair.second))
    )
    return next(fits)


@torch.no_grad()
def right(judge: Judge, vocabulary: Vocabulary, test: Sequence[Pair], gold: Callable[[str, str], bool]) -> float:
    """The share of attention that goes to a word with the same meaning, on average over words of true pairs."""
    shares = []
    for pair in test:
        if pair.true:
            weights = judge.weights(vocabulary.batch([pair]))[0]
            same = torch.tensor([[gold(first, second) for first in pair.first] for second in pair.second])
            shares += (weights * same).sum(-1).tolist()
    return statistics.fmean(shares)


def _setting(context: Context) -> tuple[Corpus, Protocol, str]:
    if context.data is None:
        made = made_up(TOY.captions or 0), made_up(TOY_TESTS, 1), made_up(TOY_TESTS, 2)
        parts = [pairs.pairs_of(part, seed, TOY.tried, TOY.longest) for seed, part in enumerate(made)]
        return Corpus(parts[0], parts[1], parts[2], same_word), TOY, EMBEDDED.format(train=len(parts[0]))
    protocol = FULL if context.full else SCALED
    captions = [
        [(pairs.words_of(german), pairs.words_of(english)) for german, english in multi30k.load(split, context.data)]
        for split in ("train", "val", "test")
    ]
    captions[0] = captions[0][: protocol.captions]
    parts = [pairs.pairs_of(part, seed, protocol.tried, protocol.longest) for seed, part in enumerate(captions)]
    train, valid, test = (len(part) for part in parts)
    return (
        Corpus(parts[0], parts[1], parts[2]),
        protocol,
        REAL.format(**vars(protocol), train=train, valid=valid, test=test),
    )


def _values(group: Sequence[Record], name: str) -> list[float]:
    return [float(record.figures[name]) for record in group]


def _found(groups: Mapping[Kind, Sequence[Record]]) -> str:
    means = {kind: 100 * statistics.fmean(_values(group, "test")) for kind, group in groups.items()}
    listed = ", ".join(f"{kind} {means[kind]:.1f} %" for kind in sorted(means, key=means.__getitem__, reverse=True))
    text = f"Pairs judged right, from the highest mean: {listed}."
    if all("right" in group[0].figures for group in groups.values()):
        shares = {kind: 100 * statistics.fmean(_values(group, "right")) for kind, group in groups.items()}
        listed = ", ".join(f"{kind} {share:.0f} %" for kind, share in shares.items())
        text += f" Of their attention to true pairs, so much goes to the word that means the same: {listed}."
    return text


def _claim(groups: Mapping[Kind, Sequence[Record]]) -> Claim:
    """Structured attention beside the better of softmax and sparsemax, on the same seeds."""
    shared = set.intersection(*({record.seed for record in group} for group in groups.values()))
    scores = {
        kind: [100 * float(record.figures["test"]) for record in group if record.seed in shared]
        for kind, group in groups.items()
    }
    means = {kind: statistics.fmean(values) for kind, values in scores.items()}
    best = max(STRUCTURED, key=means.__getitem__)
    other = max((kind for kind in KINDS if kind not in STRUCTURED), key=means.__getitem__)
    told = ", ".join(f"{kind} {with_interval(values)}" for kind, values in scores.items())
    return Claim(
        "Structured alignments in a hidden layer judge pairs better than softmax and sparsemax (Multi30k)",
        "000 shows alignments, no figures",
        f"{told} % ({len(shared)} runs each)",
        is_higher([ours - theirs for ours, theirs in zip(scores[best], scores[other], strict=True)]),
    )


def _table(groups: Mapping[Kind, Sequence[Record]]) -> Table:
    rows: list[list[Cell]] = []
    for kind, group in groups.items():
        shares = with_interval(_values(group, "right"), 100) if "right" in group[0].figures else "–"
        rows.append(
            [
                kind,
                len(group),
                with_interval(_values(group, "validation"), 100),
                with_interval(_values(group, "test"), 100),
                with_interval(_values(group, "words")),
                with_interval(_values(group, "most"), digits=2),
                shares,
            ]
        )
    return Table(
        ["attention", "runs", "validation", "test", "words per word", "most on a word", "on the right word"],
        rows,
        caption="Pairs judged right in percent, mean ± half the 95 % interval over seeds; of true test pairs, how many "
        "words of the first sentence a word of the second takes from, and the largest sum of weights on one word, "
        "which a matching keeps at 1"
        + (
            "; and the percentage of attention that is on the word with the same meaning."
            if rows[0][-1] != "–"
            else "."
        ),
        paper="The talk reports no accuracies.",
    )


def _figure(corpus: Corpus, groups: Mapping[Kind, Sequence[Record]]) -> Figure:
    pair = drawn(corpus)
    drawing, panels = style.panels(2, 2, height=2.1, sharex=True, sharey=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        empty = [[0.0] * len(pair.first)] * len(pair.second)  # no run is finished
        weights = torch.tensor(groups[kind][0].figures["example"] if kind in groups else empty)
        shown = torch.where(weights > 0, weights, torch.nan)  # what has no mass stays blank
        axes.imshow(shown.numpy(), cmap=style.MASS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=kind if kind in groups else f"{kind}: no run is finished")
        axes.set_xticks(range(len(pair.first)), pair.first, rotation=90)
        axes.set_yticks(range(len(pair.second)), pair.second)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    return Figure(
        drawing,
        caption="The words of a true test pair: how much each of the second sentence (rows) takes of each of the first "
        "(columns), first seed; the stronger the colour the more, blank is exactly zero.",
        alt="Four matrices. Softmax: every cell has some shade. Sparsemax: a few cells per row. Sequence and matching: "
        "few cells, near the diagonal or one per row and column.",
        paper="The talk draws such matrices for a pair of SNLI.",
    )


NOUNS = ["dog", "cat", "child", "woman", "man", "horse", "bird", "farmer", "singer", "baker"]
ADJECTIVES = ["small", "brown", "tired", "happy", "old", "clever", "quiet", "hungry"]
ARTICLES = ["the", "a", "this", "that", "every", "our"]
VERBS = ["sees", "follows", "likes", "hears", "finds", "paints"]


def made_up(count: int, seed: int = 0) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Sentences in a made-up language, which spells English backwards and says adjectives last, and in English."""
    random = Random(seed)
    captions = []
    for _ in range(count):
        (first, second), (old, new) = random.sample(NOUNS, 2), random.sample(ADJECTIVES, 2)
        (that, this), verb = random.sample(ARTICLES, 2), random.choice(VERBS)
        english = [that, old, first, verb, this, new, second]
        foreign = [that, first, old, verb, this, second, new]
        if random.random() < 0.3:  # the second noun stands alone
            del english[5], foreign[6]
        captions.append((tuple(word[::-1] for word in foreign), tuple(english)))
    return captions


def same_word(first: str, second: str) -> bool:
    """Whether a word of the made-up language means an English one."""
    return first == second[::-1]
