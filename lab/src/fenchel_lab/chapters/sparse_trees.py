"""Sparse trees: a parser trained with the SparseMAP loss answers with a few whole trees and their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel import SparseMAP
from fenchel.structures import DependencyTree
from fenchel_lab.data import ud_ewt
from fenchel_lab.data.ud_ewt import Sentence
from fenchel_lab.drawing import arcs, style
from fenchel_lab.drawing.arcs import Arc
from fenchel_lab.models import parsing
from fenchel_lab.models.parsing import Parser, Size, Vocabulary
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

TREES = DependencyTree(single_root=True)
"""Universal Dependencies has one root per sentence."""

SPARSE = SparseMAP(TREES)

LONGEST = 15
SCALED = Size()
FULL = Size(word=100, tag=32, hidden=200, arc=200, epochs=30, rate=1e-3)
TOY = Size(word=16, tag=8, hidden=24, arc=24, dropout=0.1, epochs=6, batch=16, rate=1e-2)
TOY_SENTENCES = (300, 200)

DRAWN_LENGTHS = range(5, 9)
DRAWN_CHARACTERS = 42
"""What a phone is wide enough for."""
DRAWN_TREES = 3

SUMMARY = """
A parser scores every arc from a head to a modifier. A softmax for every word makes a distribution over its heads,
which need not agree with each other on a tree. `SparseMAP(DependencyTree()).solve(scores)` answers with trees instead:
a mixture of a few whole ones, `.structures` and their `.weights`, whose average is as close to the scores as a mixture
of trees can be. Its loss, `SparseMAP(DependencyTree()).loss(scores, tree)`, is zero when the annotated tree alone is
chosen, with a margin that grows with the number of wrong arcs.

Both parsers have the same features, size, start and order of sentences; only the loss differs. Both are scored on
the best tree, and the softmax heads on each word's best head as well.
"""

REAL = """
What was scaled down: sentences of at most {longest} words ({train} of {all_train} for training, {test} of
{all_test} test sentences), {size.epochs} epochs, word embeddings learned from these sentences alone; parts of speech
are given, as annotated. One run with one seed.
"""

WHOLE = """
All sentences, {size.epochs} epochs, word embeddings learned from the training sentences alone; parts of speech are
given, as annotated.
"""

EMBEDDED = """
This page was made with a made-up treebank: {train} sentences such as “she saw the man with the telescope”, in which the
last phrase belongs to the verb or to the noun before it, as chance and the preposition will. No parser can know, and
the sparse one says so: two trees. On UD English EWT run the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Corpus:
    """Sentences to train and to test with."""

    train: Sequence[Sentence]
    test: Sequence[Sentence]


@dataclass(frozen=True)
class Outcome:
    """A trained parser."""

    loss: str
    parser: Parser
    vocabulary: Vocabulary


def _sparse(scores: Tensor, heads: Tensor) -> Tensor:
    return SPARSE.loss(scores, parsing.arcs(heads).to(scores.dtype))


def _softmax(scores: Tensor, heads: Tensor) -> Tensor:
    rows = parsing.without_loops(scores)
    return F.cross_entropy(rows.flatten(0, 1), heads.flatten(), reduction="none").view_as(heads).sum(-1)


LOSSES: tuple[tuple[str, parsing.Loss], ...] = (("softmax heads", _softmax), ("SparseMAP trees", _sparse))

CODE = """
import torch, fenchel
from fenchel.structures import DependencyTree

torch.manual_seed(2)
arcs = torch.randn(5, 6)  # [word, head]; head 0 is the root
mixture = fenchel.SparseMAP(DependencyTree()).solve(arcs)
for tree, weight in zip(mixture.structures, mixture.weights, strict=True):
    if weight > 0.005:
        print(f"{weight:.2f}  heads {tree.argmax(-1).tolist()}")
"""


@study(
    "Sparse trees",
    source="Niculae, Martins, Blondel & Cardie (2018), SparseMAP; Martins (2024), From Sparse Modeling to "
    "Sparse Communication",
    order=21,
    theme="Structures",
    code=CODE,
    data=["ud_ewt"],
    full="With `--full` all sentences are used, for more epochs. Treebank, features and sizes "
    "are ours, not those of a paper.",
)
def sparse_trees(context: Context) -> Result:
    """Train both parsers, score attachments, and draw the trees of a sentence."""
    corpus, size, scale = _setting(context)
    outcomes = []
    for turn, (name, loss) in enumerate(LOSSES):
        torch.manual_seed(context.seed)
        parser, vocabulary = parsing.train(corpus.train, loss, size, partial(_tell, context, turn, name))
        outcomes.append(Outcome(name, parser, vocabulary))
    sentence = doubtful(outcomes[-1], corpus.test)
    return Result(
        SUMMARY + scale,
        figures=[_figure(outcomes[-1], sentence)],
        tables=[_scores(outcomes, corpus), _mixtures(outcomes[-1], corpus.test)],
    )


def best_trees(scores: Tensor) -> Tensor:
    """The heads of the highest-scoring tree."""
    return TREES.map(scores).argmax(-1)


def best_heads(scores: Tensor) -> Tensor:
    """Every word's highest-scoring head, whether these make a tree or not."""
    return parsing.without_loops(scores).argmax(-1)


@torch.no_grad()
def mixture(outcome: Outcome, sentence: Sentence) -> list[tuple[float, tuple[int, ...]]]:
    """The trees of a sentence, heaviest first: weights and heads."""
    solved = SPARSE.solve(outcome.parser(outcome.vocabulary.batch([sentence])))
    chosen = zip(solved.weights[0].tolist(), solved.structures[0].argmax(-1).tolist(), strict=True)
    return sorted(((weight, tuple(heads)) for weight, heads in chosen if weight > 0), reverse=True)


def doubtful(outcome: Outcome, sentences: Sequence[Sentence]) -> Sentence:
    """The short sentence whose heaviest tree is lightest, among those with few enough trees to draw."""

    def certainty(sentence: Sentence) -> float:
        trees = mixture(outcome, sentence)
        return trees[0][0] if len(trees) <= DRAWN_TREES else 2.0

    fits = [s for s in sentences if len(s.words) in DRAWN_LENGTHS and len(" ".join(s.words)) <= DRAWN_CHARACTERS]
    return min(fits[:300], key=certainty)


def _setting(context: Context) -> tuple[Corpus, Size, str]:
    if context.data is None:
        train, test = made_up(*TOY_SENTENCES)
        return Corpus(train, test), TOY, EMBEDDED.format(train=len(train))
    train, test = ud_ewt.load("train", context.data), ud_ewt.load("test", context.data)
    if context.full:
        return Corpus(train, test), FULL, WHOLE.format(size=FULL)
    short = Corpus(*([s for s in part if len(s.words) <= LONGEST] for part in (train, test)))
    counts = {"train": len(short.train), "test": len(short.test), "all_train": len(train), "all_test": len(test)}
    return short, SCALED, REAL.format(size=SCALED, longest=LONGEST, **counts)


def _tell(context: Context, turn: int, note: str, part: float) -> None:
    context.progress(0.95 * (turn + part) / len(LOSSES), note)


def _scores(outcomes: Sequence[Outcome], corpus: Corpus) -> Table:
    rows: list[list[Cell]] = []
    ways: list[tuple[str, Callable[[Tensor], Tensor]]] = [("best tree", best_trees), ("best heads", best_heads)]
    for outcome in outcomes:
        for way, decode in ways:
            found = parsing.heads(outcome.parser, outcome.vocabulary, corpus.test, decode)
            whole = sum(s.heads == row for s, row in zip(corpus.test, found, strict=True)) / len(found)
            uas = parsing.attachment(corpus.test, found)
            rows.append([outcome.loss, way, f"{100 * uas:.2f}", f"{100 * whole:.2f}"])
    return Table(
        ["trained with", "answer", "UAS", "whole trees"],
        rows,
        caption="Attachment score on the test sentences: the share of words with the right head, and of sentences with "
        "nothing but right heads, in percent; punctuation counts.",
    )


@torch.no_grad()
def _mixtures(outcome: Outcome, sentences: Sequence[Sentence]) -> Table:
    counts: dict[str, list[bool]] = {"1": [], "2": [], "3 to 5": [], "6 and more": []}
    for sentence in sentences:
        trees = mixture(outcome, sentence)
        key = {1: "1", 2: "2", 3: "3 to 5", 4: "3 to 5", 5: "3 to 5"}.get(len(trees), "6 and more")
        counts[key].append(trees[0][1] == sentence.heads)
    rows: list[list[Cell]] = [
        [key, len(right), f"{100 * sum(right) / len(right):.1f} %" if right else "–"] for key, right in counts.items()
    ]
    return Table(
        ["trees in the mixture", "sentences", "heaviest is right"],
        rows,
        caption="How many trees SparseMAP answers with, and how often the heaviest of them is the annotated one: where "
        "the parser names a single tree, it is more often right.",
    )


def _figure(outcome: Outcome, sentence: Sentence) -> Figure:
    trees = mixture(outcome, sentence)
    drawing, panels = style.panels(len(trees), 1, height=1.35)
    for axes, (weight, heads) in zip(panels, trees, strict=True):
        right = ", as annotated" if heads == sentence.heads else ""
        colours = [style.MUTED if same else style.PALETTE[1] for same in map(int.__eq__, heads, trees[0][1])]
        drawn = [Arc(i, head, colour=colour) for i, (head, colour) in enumerate(zip(heads, colours, strict=True), 1)]
        arcs.draw(axes, sentence.words, drawn)
        axes.set_title(f"{weight:.2f}{right}")
    words = " ".join(sentence.words)
    return Figure(
        drawing,
        caption=f"The trees of “{words}”, a test sentence, and their weights. An arrow goes from a head to its "
        "modifier; the vertical one marks the root. What differs from the heaviest tree is in colour.",
        alt=f"{len(trees)} dependency trees of one sentence, that differ in a few arcs.",
        paper="The paper draws such mixtures of a few trees for ambiguous sentences.",
    )


SUBJECTS = ["she", "he", "Ann", "Bob", "we", "they"]
PEOPLE = ["man", "woman", "boy", "girl", "spy"]
THINGS = ["telescope", "hat", "dog", "book", "map", "coat"]
VERBS = ["saw", "followed", "met", "heard", "painted"]


def made_up(train: int, test: int, seed: int = 0) -> tuple[list[Sentence], list[Sentence]]:
    """Sentences whose last phrase may modify the verb or the object."""
    random = Random(seed)

    def sentence() -> Sentence:
        words, tags, heads = [random.choice(SUBJECTS), random.choice(VERBS)], ["PRON", "VERB"], [2, 0]
        person = _phrase(random, PEOPLE, words, tags, heads, head=2)
        if random.random() < 0.7:
            preposition = random.choice(["with", "with", "of", "by"])
            words.append(preposition)
            tags.append("ADP")
            heads.append(0)  # its noun, known below
            place = len(words)
            to_noun = random.random() < {"with": 0.5, "of": 1.0, "by": 0.0}[preposition]
            heads[place - 1] = _phrase(random, THINGS, words, tags, heads, head=person if to_noun else 2)
        words.append(".")
        tags.append("PUNCT")
        heads.append(2)
        return Sentence(tuple(words), tuple(tags), tuple(heads), ("dep",) * len(words))

    return [sentence() for _ in range(train)], [sentence() for _ in range(test)]


def _phrase(
    random: Random, nouns: Sequence[str], words: list[str], tags: list[str], heads: list[int], head: int
) -> int:
    """Add an article, perhaps an adjective, and a noun; the place of the noun."""
    before = [("the", "DET"), *([(random.choice(["old", "tall", "red"]), "ADJ")] if random.random() < 0.3 else [])]
    noun = len(words) + len(before) + 1
    for word, tag in before:
        words.append(word)
        tags.append(tag)
        heads.append(noun)
    words.append(random.choice(nouns))
    tags.append("NOUN")
    heads.append(head)
    return noun
