"""Morphological inflection: a model with dense and with sparse attention and output, and what a search can prove."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch

from fenchel import Regularizer, Tsallis
from fenchel.progress import Progress
from fenchel.seq2seq import Batches, Ensemble, Pair, Recurrent, Training, Vocabulary, force, train, validate
from fenchel_lab.data import german_nouns, sigmorphon2018
from fenchel_lab.data.sigmorphon2018 import LANGUAGES, Inflection, Split
from fenchel_lab.drawing import hypotheses, style
from fenchel_lab.models.inflection import Inflected, inflect, paired
from fenchel_lab.models.shared import shared_out
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.measure import spread_over_seeds
from fenchel_lab.report.result import Cell

ALPHAS = (1.0, 1.5, 2.0)
BETWEEN = (1.25, 1.75)
"""More of them, for the figure."""
BEAM = 5
NAMES = {1.0: "softmax", 1.5: "1.5-entmax", 2.0: "sparsemax"}

_PRINTED = """
93.15 94.20 82.55 85.68
92.32 93.50 83.20 85.63
90.98 92.60 83.13 85.65
94.36 94.96 84.88 86.38
94.44 95.00 84.93 86.55
94.05 94.74 84.93 86.59
94.59 95.10 84.95 86.41
94.47 95.01 85.03 86.61
94.32 94.89 84.96 86.47
"""
PAPER: dict[tuple[str, float, float], tuple[float, float]] = {
    (setting, output, attention): (float(numbers[2 * column]), float(numbers[2 * column + 1]))
    for (output, attention), numbers in zip(
        [(output, attention) for output in ALPHAS for attention in ALPHAS],
        [line.split() for line in _PRINTED.strip().splitlines()],
        strict=True,
    )
    for column, setting in enumerate(("high", "medium"))
}
"""Table 1: accuracy averaged over three runs, and of their ensemble, for a setting, an output α and an attention α."""

SUMMARY = """
An encoder-decoder reads tags and a lemma, letter by letter, and writes the inflected form: a bidirectional LSTM, an
LSTM with input feeding and global attention. Two choices are made in it at every step: which letters to look at
(`attention=`) and which letter to write (`output=`). Both are usually softmax; here either may be α-entmax, trained
with its own loss by `linear_entmax_loss`.

A sparse output gives most strings probability exactly zero. So beam search can do what it never can with softmax: if
there were never more prefixes of any probability than the beam has places, it has seen every string that the model can
write, and its answer is certainly the most probable one. `Beam.exact` says so.
"""

SCALED_TEXT = """
What was scaled down: {languages} languages in one model (the paper: 86 and 102), with {words} words of theirs to learn
from; {size.layers} layer of width {size.hidden} instead of 2 of 300; every model, sparse or not, learns from {seen:,}
words, counted as often as they come, and no longer; {size.seeds} seeds, and greedy decoding for the accuracies, of all
{test:,} test words; beams are those of {drawn:,} validation words. So the accuracies are those of a short training,
not the paper's; what can be compared is their order.
"""

FULL_TEXT = """
{languages} languages in one model (the paper: 86 and 102) with {words} words to learn from; 2 layers of width 300,
three seeds, beam search with a beam of 5 for all accuracies.
"""

TOY_TEXT = """
This page was made with German noun plurals from the package `german-nouns`: {train:,} nouns to learn from, {test}
others to be asked, the gender given as a tag; {size.layers} layer of width {size.hidden}, {size.epochs} epochs,
trained while the page was made. For the paper's Table 1 run the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Size:
    """How large the models are, and how they are trained."""

    embedding: int
    hidden: int
    layers: int
    how: Training
    dropout: float = 0.3
    seeds: int = 1
    held: int = 1000
    """Validation words of each language by which the best epoch is chosen."""
    drawn: int = 100
    """Those of them whose beams are looked at."""
    seen: int | None = None
    """Words in an epoch, where that is not all of them."""
    beams: bool = False
    """Whether accuracies are those of beams, or greedy."""

    @property
    def epochs(self) -> int:
        return self.how.epochs


TOY = Size(
    32, 64, 1, Training(epochs=8, batch=32, rate=5e-3, patience=8, cooling=3), dropout=0.1, drawn=200, beams=True
)
SCALED = Size(
    32,
    64,
    1,
    Training(epochs=14, batch=32, rate=5e-3, patience=14, cooling=5),
    dropout=0.1,
    seeds=2,
    held=100,
    seen=7000,
)
FULL = Size(300, 300, 2, Training(epochs=100, rate=1e-3, patience=10), seeds=3, drawn=1000, beams=True)

TOY_NOUNS = (2400, 200, 300)
TOY_LENGTHS = range(4, 9)


@dataclass(frozen=True)
class Corpus:
    """Words to train with, to choose the best epoch by, and to test with; a group a language."""

    name: str
    train: Sequence[Pair]
    validation: Sequence[Sequence[Pair]]
    test: Sequence[Sequence[Pair]]


@dataclass(frozen=True)
class Outcome:
    """Models of one configuration, one per seed, and how they do."""

    corpus: str
    output: float
    attention: float
    models: Sequence[Recurrent]
    accuracies: Sequence[float]
    together: float | None
    drawn: Sequence[Pair]
    found: Sequence[Inflected]

    @property
    def accuracy(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.accuracies)

    @property
    def single(self) -> float:
        """The share of validation words for which one form has all the probability."""
        return statistics.fmean(each.single for each in self.found)

    @property
    def exact(self) -> float:
        """The share of validation words whose beam is exact."""
        return statistics.fmean(each.beam.exact for each in self.found)

    @property
    def optimal(self) -> float:
        """The share of validation words whose first hypothesis is proved to be the best."""
        return statistics.fmean(each.beam.optimal for each in self.found)


CODE = """
import fenchel
from fenchel.seq2seq import Pair, Recurrent, Training, Vocabulary, beam_search, train

letters = Vocabulary("abcdef")
words = [Pair(tuple(word), tuple(word[::-1])) for word in ("abc", "fed", "bad", "cafe", "face", "bead")]
sizes = dict(embedding=16, hidden=32, layers=1, dropout=0.0)
model = Recurrent(letters, letters, **sizes, attention=fenchel.Gini(), output=fenchel.Tsallis(1.5))
train(model, words, words, training=Training(epochs=30, batch=2, rate=1e-2, patience=30))
(found,) = beam_search(model, ["cafe"])
print(found.exact, ["".join(letters.decode(each.tokens)) for each in found.hypotheses])
"""


@study(
    "Few candidates, exact search: inflecting words",
    source="Peters, Niculae & Martins (2019), Sparse Sequence-to-Sequence Models, table 1, figures 1, 2, 4 and 5",
    order=5,
    theme="Sequence to sequence",
    code=CODE,
    data=["sigmorphon2018"],
    full="With `--full` models have the paper's 2 layers of width 300, three seeds and their ensemble, and "
    "beams for all words. What differs: 7 languages in one model, the paper has 86 (high) and 102 "
    "(medium).",
)
def inflection(context: Context) -> Result:
    """Train the grid of attentions and outputs, score it, and look into the sparse model's answers."""
    corpora, size, grid, text = _setting(context)
    tasks = [(corpus, *alphas, size, context.seed) for corpus in corpora for alphas in grid[corpus.name]]
    processes = 1 if context.data is None else None
    outcomes = shared_out(_outcome, tasks, lambda part, note="": context.progress(0.97 * part, note), processes)
    sparse = next(each for each in reversed(outcomes) if (each.output, each.attention) == (1.5, 1.5))
    rivals = [each for each in outcomes if each.corpus == sparse.corpus and each.output in ALPHAS]
    sure = max(rivals, key=lambda each: each.exact)
    dense = next(each for each in reversed(outcomes) if (each.output, each.attention) == (1.0, 1.0))
    pair, found = doubtful(sure)
    figures = [_tree(pair, found, sure), _alternatives(pair, sure), _attention(pair, sparse, dense)]
    if context.data is not None:
        figures.append(_effect(outcomes))
    table = [each for each in outcomes if each.output in ALPHAS and each.attention in ALPHAS]
    return Result(SUMMARY + text, figures=figures, tables=[_accuracies(table, size), _forms(sure)])


def untrained(corpus: Corpus, size: Size, seed: int, attention: Regularizer, output: Regularizer) -> Recurrent:
    """A model for the symbols of a corpus, before it learns."""
    torch.manual_seed(seed)
    return Recurrent(
        Vocabulary.of(pair.source for pair in corpus.train),
        Vocabulary.of(pair.target for pair in corpus.train),
        embedding=size.embedding,
        hidden=size.hidden,
        layers=size.layers,
        dropout=size.dropout,
        attention=attention,
        output=output,
    )


def trained(corpus: Corpus, output: float, attention: float, size: Size, seed: int, tell: Progress) -> Recurrent:
    """A model of the corpus."""
    model = untrained(corpus, size, seed, Tsallis(attention), Tsallis(output))
    held = [pair for group in corpus.validation for pair in group[: size.held]]
    parts = 1 if size.seen is None else max(round(len(corpus.train) / size.seen), 1)
    train(model, corpus.train, held, training=replace(size.how, parts=parts, seed=seed), progress=tell)
    return model


def accuracy(models: Sequence[Recurrent], groups: Sequence[Sequence[Pair]], beams: bool) -> float:
    """The share of words that models, together, inflect rightly: a mean over languages; greedily, or by beams."""
    shares = []
    for group in groups:
        if not beams and len(models) == 1:
            (model,) = models
            shares.append(validate(model, Batches(group, model.source, model.target)).accuracy)
        else:
            width = BEAM if beams else 1
            found = inflect(models[0], [pair.source for pair in group], width, stepper=Ensemble(models))
            shares.append(statistics.fmean(f.form == "".join(p.target) for f, p in zip(found, group, strict=True)))
    return statistics.fmean(shares)


def doubtful(outcome: Outcome) -> tuple[Pair, Inflected]:
    """The word with the most evenly shared forms: all of them seen, the right one too, and few enough to draw."""

    def doubt(entry: tuple[Pair, Inflected]) -> float:
        pair, found = entry
        right = "".join(pair.target) in [form for form, _ in found.forms]
        drawable = found.beam.exact and 2 < len(found.beam.hypotheses) <= hypotheses.MOST
        entropy = -sum(p * math.log(p) for _, p in found.forms if p > 0)
        return entropy + 100 * (right and drawable) + 10 * drawable

    return max(zip(outcome.drawn, outcome.found, strict=True), key=doubt)


def _outcome(task: tuple[Corpus, float, float, Size, int], tell: Progress) -> Outcome:
    corpus, output, attention, size, seed = task
    models = []
    for turn in range(size.seeds):
        model = trained(corpus, output, attention, size, seed + turn, partial(_nth, tell, turn, size.seeds))
        models.append(model)
    accuracies = [accuracy([model], corpus.test, size.beams) for model in models]
    together = accuracy(models, corpus.test, size.beams) if len(models) > 1 else None
    drawn = [pair for group in corpus.validation for pair in group[: size.drawn]]
    found = inflect(models[0], [pair.source for pair in drawn], BEAM, n_best=100, keep_tree=True)
    return Outcome(corpus.name, output, attention, models, accuracies, together, drawn, found)


def _nth(tell: Progress, turn: int, turns: int, part: float, note: str = "") -> None:
    tell((turn + 0.9 * part) / turns, note)


# -- what it is done with ----------------------------------------------------------------------------------------------


def _setting(context: Context) -> tuple[list[Corpus], Size, dict[str, list[tuple[float, float]]], str]:
    """Corpora, size of the models, for each corpus the α of output and attention, and what to say of it."""
    if context.data is None:
        corpus = plurals(*TOY_NOUNS)
        text = TOY_TEXT.format(train=len(corpus.train), test=len(corpus.test[0]), size=TOY)
        return [corpus], TOY, {corpus.name: [(1.0, 1.0), (1.5, 1.5)]}, text
    square = [(output, attention) for output in ALPHAS for attention in ALPHAS]
    cross = [pair for alpha in BETWEEN for pair in ((alpha, 1.5), (1.5, alpha))]
    size, text = (FULL, FULL_TEXT) if context.full else (SCALED, SCALED_TEXT)
    corpora = [multilingual(setting, context.data) for setting in ("medium", "high")]
    first = corpora[0]
    text = text.format(
        languages=len(LANGUAGES),
        words=" and ".join(f"{len(corpus.train):,} ({corpus.name})" for corpus in corpora),
        seen=(size.seen or 0) * size.epochs,
        test=sum(map(len, first.test)),
        drawn=len(LANGUAGES) * size.drawn,
        size=size,
    )
    return corpora, size, {"medium": square + cross, "high": square}, text


def multilingual(setting: str, folder: Path) -> Corpus:
    """All languages in one: a symbol before the tags tells which."""

    def read(split: Split) -> list[list[Pair]]:
        words = [(language, sigmorphon2018.load(language, split, folder)) for language in LANGUAGES]
        return [[paired(word, language) for word in group] for language, group in words]

    split: Split = "train-high" if setting == "high" else "train-medium"
    return Corpus(setting, [pair for group in read(split) for pair in group], read("dev"), read("test"))


def plurals(train: int, validation: int, test: int, seed: int = 0) -> Corpus:
    """German nouns of a few letters and their plurals, in an order that does not change."""
    nouns: list[Inflection] = [noun for noun in german_nouns.load() if len(noun.lemma) in TOY_LENGTHS]
    Random(seed).shuffle(nouns)
    pairs = [paired(noun) for noun in nouns[: train + validation + test]]
    return Corpus("plurals", pairs[:train], [pairs[train : train + validation]], [pairs[train + validation :]])


# -- tables and pictures -----------------------------------------------------------------------------------------------


def _accuracies(outcomes: Sequence[Outcome], size: Size) -> Table:
    rows: list[list[Cell]] = []
    for each in outcomes:
        paper = PAPER.get((each.corpus, each.output, each.attention))
        row: list[Cell] = [each.corpus, NAMES[each.output], NAMES[each.attention]]
        row += ["–" if paper is None else f"{paper[0]:.2f}", spread_over_seeds(each.accuracies, 100)]
        row += ["–" if each.together is None else f"{100 * each.together:.2f}"]
        rows.append([*row, *(f"{100 * share:.0f} %" for share in (each.single, each.exact, each.optimal))])
    decoding = f"a beam of {BEAM}" if size.beams else "greedy decoding"
    return Table(
        [
            "words",
            "output",
            "attention",
            "paper: accuracy",
            "accuracy",
            "ensemble",
            "single form",
            "exact beam",
            "proved best",
        ],
        rows,
        caption=f"Share of test words inflected rightly, averaged over languages, by {decoding}; and of validation "
        f"words for "
        f"which one form has all the probability, for which a beam of {BEAM} has seen every form of any probability, "
        f"and for "
        "which what it pruned cannot be more probable than its first.",
        paper="With its best model the paper finds a single hypothesis for 81 % of the validation words and an exact "
        "beam for 87 % "
        "in the high setting, 66 % and 79 % in medium; and every sparse output ahead of every softmax output.",
    )


def _forms(outcome: Outcome) -> Table:
    """Words with more than one form, as a sparse model sees them."""
    rows: list[list[Cell]] = []
    for pair, found in zip(outcome.drawn, outcome.found, strict=True):
        if found.beam.exact and 1 < len(found.forms) <= 4 and len(rows) < 8:
            lemma, tags, right = _told(pair)
            listed = ", ".join(f"{form} {100 * p:.1f} %" for form, p in found.forms)
            rows.append([lemma, tags, right, listed])
    return Table(
        ["lemma", "tags", "right", "all forms of any probability"],
        rows,
        caption=f"The first validation words with two to four forms in the model with most exact beams (output "
        f"{NAMES[outcome.output]}, attention {NAMES[outcome.attention]}), complete: their probabilities sum to 1.",
        paper="The paper's example, the participle of “draw”, has three forms with 66.4 %, 32.2 % and 1.4 %: a list "
        "that ends.",
    )


def _tree(pair: Pair, found: Inflected, outcome: Outcome) -> Figure:
    lemma, tags, right = _told(pair)
    listed = ", ".join(f"{form} {100 * p:.1f} %" for form, p in found.forms[: hypotheses.MOST])
    hit = f"Right is {right}, " + ("in blue" if right in dict(found.forms) else "which has probability zero")
    claim = "every form that the model can write" if found.beam.exact else "the most probable forms"
    return Figure(
        hypotheses.tree(found.beam, outcome.models[0].target, pair.target),
        caption=f"The whole beam search for {lemma} ({tags}), output {NAMES[outcome.output]}, attention "
        f"{NAMES[outcome.attention]}: {claim}. {hit}.",
        alt=f"A tree that branches from the first letter into {len(found.forms)} forms: {listed}.",
        paper="Figure 1 draws the same for the participle of “draw”: three hypotheses, among them the right “drawn” "
        "and the regular “drawed”.",
    )


def _alternatives(pair: Pair, outcome: Outcome) -> Figure:
    lemma, tags, right = _told(pair)
    model = outcome.models[0]
    choices = force(model, pair.source, model.target.encode(pair.target))
    counts = [len(each.alternatives) for each in choices]
    return Figure(
        hypotheses.alternatives(choices, model.target),
        caption=f"Forced decoding of {right} from {lemma} ({tags}): under each letter the others that had any "
        f"probability (grey: less than 5 %), {max(counts)} choices at most; orange: a letter of probability zero; ▪ is "
        "the end. Boxes join letters that could only come so: those a keyboard would complete on its own.",
        alt=f"The letters of {right} in a row, with {', '.join(map(str, counts))} possibilities each.",
        paper="Figure 2 draws this for the translation of a sentence; there too most steps have a single continuation.",
    )


def _attention(pair: Pair, sparse: Outcome, dense: Outcome) -> Figure:
    lemma, _, right = _told(pair)
    panels = [
        (f"attention: {NAMES[each.attention]}", each.models[0].attend(pair.source, pair.target))
        for each in (sparse, dense)
    ]
    seen = [float((weights > 0).sum(1).float().mean()) for _, weights in panels]
    return Figure(
        hypotheses.attention(panels, pair.source, pair.target),
        caption=f"Attention of the letters of {right} (rows) to the tags and letters of {lemma} (columns); zero is "
        f"blank. A letter looks at {seen[0]:.1f} symbols on average with 1.5-entmax, at {seen[1]:.1f} with softmax.",
        alt="Two tables of shades. With 1.5-entmax few cells of a row have a shade, near the diagonal; with softmax "
        "all are.",
        paper="Figure 5 draws the attention of the translation model, as sparse.",
    )


def _effect(outcomes: Sequence[Outcome]) -> Figure:
    """Accuracy by one α while the other is 1.5: a dot a seed, a line through their means."""
    drawing, (left, right) = style.panels(1, 2, height=2.2, sharey=True)
    for corpus in dict.fromkeys(each.corpus for each in outcomes):
        here = [each for each in outcomes if each.corpus == corpus]
        by_attention = sorted(((e.attention, e) for e in here if e.output == 1.5), key=lambda point: point[0])
        by_output = sorted(((e.output, e) for e in here if e.attention == 1.5), key=lambda point: point[0])
        for axes, points in ((left, by_attention), (right, by_output)):
            (line,) = axes.plot([alpha for alpha, _ in points], [100 * e.accuracy for _, e in points], label=corpus)
            dots = [(alpha, 100 * share) for alpha, e in points for share in e.accuracies]
            axes.plot(*zip(*dots, strict=True), "o", markersize=3, color=line.get_color())
    left.set(xlabel="attention α", ylabel="accuracy (%)")
    right.set(xlabel="output α")
    right.legend()
    return Figure(
        drawing,
        caption="Accuracy on the test words by the α of the attention, with a 1.5-entmax output (left), and by the α "
        "of the output, with a 1.5-entmax attention (right); a dot is a seed.",
        alt="Lines over α from 1 to 2, one for medium and one for high, on the left by attention, on the right by "
        "output.",
        paper="Figure 4 finds, on translation, little effect of the attention's α and a clear one of the output's, "
        "best at 1.33.",
    )


def _told(pair: Pair) -> tuple[str, str, str]:
    """Lemma, tags and form in words."""
    lemma = "".join(symbol for symbol in pair.source if len(symbol) == 1)
    return lemma, " ".join(hypotheses.name(symbol) for symbol in pair.source if len(symbol) > 1), "".join(pair.target)
