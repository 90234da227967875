"""Morphological inflection: models with dense and with sparse attention and output, and what a search can prove."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from fenchel.seq2seq import Beam, Choice, Hypothesis, Pair, Training, Vocabulary
from fenchel_lab.data import german_nouns, sigmorphon2018
from fenchel_lab.data.sigmorphon2018 import LANGUAGES, Inflection, Language, Split
from fenchel_lab.drawing import hypotheses, style
from fenchel_lab.models import inflecting
from fenchel_lab.models.inflecting import BEAM, Corpus, Protocol, name, told
from fenchel_lab.models.inflection import paired
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import is_higher, judged, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

ALPHAS = (1.0, 1.5, 2.0)
BETWEEN = (4 / 3, 1.75)
"""More of them, for the curve."""
FEW: tuple[Language, ...] = ("spanish", "german", "finnish")
"""Languages that are also learned from 1,000 words."""

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

REAL = """
Every language has models of its own (the paper: one for 86 languages, and one for 102): {hidden} wide, {layers} layer
(the paper: 300, 2), with dropout {dropout:g}. High: 10,000 words to learn from, at most {high.epochs} epochs of batches
of {high.batch} at a rate of {high.rate:g}, which is halved whenever the validation loss rises. Medium: 1,000 words,
{medium.epochs} epochs of batches of {medium.batch}. Validation words choose the epoch, after which training stops
that {high.patience} more did not improve; these settings are the defaults of `fenchel inflect train`, and none was
searched. Accuracies are those of a beam of {beam}, over all test words. ± is half the 95 % interval of the mean over
seeds (Student's t).
"""

EMBEDDED = """
This page was made with German noun plurals from the package `german-nouns`: {train:,} nouns to learn from, {test}
others to be asked, the gender given as a tag; {layers} layer of width {hidden}, {high.epochs} epochs, one seed. For the
paper's Table 1 run the command below with `FENCHEL_DATA` set.
"""


_HIGH = Training(epochs=30, batch=64, rate=2e-3)
SCALED = Protocol(_HIGH, replace(_HIGH, epochs=60, batch=16, patience=10))
_HIGH = Training(epochs=100, rate=1e-3, patience=10)
FULL = Protocol(_HIGH, replace(_HIGH, epochs=200, batch=16), 300, 300, 2)
_HIGH = Training(epochs=8, batch=32, rate=5e-3, patience=8, cooling=3)
TOY = Protocol(_HIGH, _HIGH, 32, 64, dropout=0.1, drawn=200, asked=50, runs=1)
TOY_NOUNS = (2400, 200, 300)
TOY_LENGTHS = range(4, 9)


@dataclass(frozen=True)
class Plan:
    """What is run: models, in this order, and then ensembles of all seeds."""

    protocol: Protocol
    models: Sequence[tuple[Corpus, float, float, int]]
    together: Sequence[tuple[Corpus, float, float]]
    text: str


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
    records=True,
    resumes=True,
    full="With `--full` models have the paper's 2 layers of width 300. What differs: a model for each of 7 languages, "
    "the paper has one for 86 (high) and one for 102 (medium).",
)
def inflection(context: Context) -> Result:
    """Train the grid of attentions and outputs for every language, score it, and look into the answers."""
    plan = _plan(context)
    jobs = [job(*each, plan.protocol, context.checkpoints) for each in plan.models]
    seeds = range(context.seed, context.seed + plan.protocol.runs)
    jobs += [ensemble_job(*each, seeds, plan.protocol, context.checkpoints) for each in plan.together]
    records = context.records.collect(jobs, lambda part, note="": context.progress(0.98 * part, note))
    texts = [plan.text]
    if len(records) < len(jobs):
        texts.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    found = [each for each in records if each.cell["models"] == "one"]
    if not found:
        return Result(SUMMARY + "\n\n".join(texts))
    settings = list(dict.fromkeys(each.cell["words"] for each in found))
    tables = [_accuracies([each for each in records if each.cell["words"] == setting]) for setting in settings]
    tables.append(_counts(found))
    claims: list[Claim] = []
    if context.data is not None:
        tables.append(_paired(found))
        claims = _claims(found)
        texts.append(_verdict(found))
    sparse = [each for each in found if _alpha(each, "output") > 1]
    figures = []
    if sparse:
        sure = max(sparse, key=lambda each: each.figures["exact"])
        figures += [_tree(sure), _alternatives(sure)]
        tables.append(_forms(sure))
    figures += _attention(found) + _learning(sparse)
    if context.data is not None:
        figures += _effect(found)
    return Result(SUMMARY + "\n\n".join(texts), figures=figures, tables=tables, claims=claims)


# -- what is run -------------------------------------------------------------------------------------------------------


def _cell(corpus: Corpus, output: float, attention: float, models: str) -> dict[str, str]:
    sides = {"output": name(output), "attention": name(attention)}
    return {"language": corpus.language, "words": corpus.setting, **sides, "models": models}


def _settings(corpus: Corpus, protocol: Protocol, seeds: Sequence[int]) -> dict[str, Any]:
    how = asdict(protocol.high if corpus.setting == "high" else protocol.medium)
    sizes = {key: getattr(protocol, key) for key in ("embedding", "hidden", "layers", "dropout", "drawn", "asked")}
    words = [len(corpus.train), len(corpus.validation), len(corpus.test)]
    del how["seed"]
    return {"training": how, **sizes, "beam": BEAM, "pairs": words, "seeds": list(seeds)}


def job(
    corpus: Corpus, output: float, attention: float, seed: int, protocol: Protocol, folder: Path | None = None
) -> Job:
    """One model."""
    cell = _cell(corpus, output, attention, "one")
    work = partial(inflecting.run, corpus, output, attention, seed, protocol, folder)
    return Job(cell, seed, _settings(corpus, protocol, [seed]), work)


def ensemble_job(
    corpus: Corpus, output: float, attention: float, seeds: Sequence[int], protocol: Protocol, folder: Path | None
) -> Job:
    """Models of all seeds together."""
    cell = _cell(corpus, output, attention, "all together")
    work = partial(inflecting.run_together, corpus, output, attention, seeds, protocol, folder)
    return Job(cell, seeds[0], _settings(corpus, protocol, seeds), work)


def _plan(context: Context) -> Plan:
    first = context.seed
    if context.data is None:
        corpus = plurals(*TOY_NOUNS)
        values = {"train": len(corpus.train), "test": len(corpus.test)}
        toys = [(corpus, 1.0, 1.0, first), (corpus, 1.5, 1.5, first)]
        return Plan(TOY, toys, [], EMBEDDED.format(**values, **vars(TOY)))
    protocol = FULL if context.full else SCALED
    high = {language: corpus_of(language, "high", context.data) for language in ("spanish", *LANGUAGES)}
    medium = [corpus_of(language, "medium", context.data) for language in FEW]
    main = [(1.0, 1.0), (1.5, 1.5), (1.5, 1.0), (1.0, 1.5)]
    grid = [*main, (2.0, 1.0), (2.0, 1.5)]
    curve = [(each, 1.5) for each in BETWEEN] + [(1.5, each) for each in (*BETWEEN, 2.0)]

    def each(
        words: Iterable[Corpus], cells: Sequence[tuple[float, float]], seeds: Sequence[int]
    ) -> list[tuple[Corpus, float, float, int]]:
        return [(corpus, *cell, seed) for seed in seeds for corpus in words for cell in cells]

    seeds, spanish = range(first, first + protocol.runs), [high["spanish"]]
    # One language with all its seeds first, so that what is finished can be compared.
    planned = each(spanish, grid, seeds) + each(high.values(), main, seeds[:1]) + each(spanish, curve, seeds[:1])
    planned += each(high.values(), main, seeds) + each(medium, grid, seeds) + each(high.values(), grid, seeds)
    planned += each(spanish, curve, seeds)
    models = {(run[0].language, run[0].setting, *run[1:]): run for run in planned}  # each once, in this order
    together = [(corpus, *cell) for corpus in (*high.values(), *medium) for cell in grid]
    text = REAL.format(beam=BEAM, **vars(protocol))
    return Plan(protocol, list(models.values()), together, text)


def corpus_of(language: Language, setting: str, folder: Path) -> Corpus:
    """The words of a language."""

    def read(split: Split) -> list[Pair]:
        return [paired(word) for word in sigmorphon2018.load(language, split, folder)]

    train: Split = "train-high" if setting == "high" else "train-medium"
    return Corpus(language, setting, read(train), read("dev"), read("test"))


def plurals(train: int, validation: int, test: int, seed: int = 0) -> Corpus:
    """German nouns of a few letters and their plurals, in an order that does not change."""
    nouns: list[Inflection] = [noun for noun in german_nouns.load() if len(noun.lemma) in TOY_LENGTHS]
    Random(seed).shuffle(nouns)
    pairs = [paired(noun) for noun in nouns[: train + validation + test]]
    last = train + validation
    return Corpus("german plurals", "high", pairs[:train], pairs[train:last], pairs[last:])


# -- tables and pictures -----------------------------------------------------------------------------------------------


def _alpha(record: Record, side: str) -> float:
    """The α of the output or of the attention."""
    return next(alpha for alpha in (*ALPHAS, *BETWEEN) if name(alpha) == record.cell[side])


Cells = dict[tuple[float, float], list[Record]]


def _cells(records: Sequence[Record], alphas: Sequence[float] = ALPHAS) -> Cells:
    """Records by output and attention, of some α, in their order."""
    found: Cells = {}
    for record in sorted(records, key=lambda each: (_alpha(each, "output"), _alpha(each, "attention"))):
        key = _alpha(record, "output"), _alpha(record, "attention")
        if all(alpha in alphas for alpha in key):
            found.setdefault(key, []).append(record)
    return found


def _values(records: Sequence[Record], figure: str, **cell: str) -> list[float]:
    """A figure of the records of a cell, in percent."""
    chosen = [each for each in records if all(each.cell[key] == value for key, value in cell.items())]
    return [100 * each.figures[figure] for each in chosen]


def _mean_over(languages: Sequence[str], records: Sequence[Record], models: str) -> str:
    """The mean over languages, if there are runs of all; its interval is over seeds that all have."""
    seeds = [
        {each.seed for each in records if each.cell["language"] == language and each.cell["models"] == models}
        for language in languages
    ]
    shared = sorted(set.intersection(*seeds)) if seeds else []
    means = [
        statistics.fmean(_values([each for each in records if each.seed == seed], "test", models=models))
        for seed in shared
    ]
    return with_interval(means)


def _accuracies(records: Sequence[Record]) -> Table:
    """A row for each output and attention, a column for each language."""
    setting = records[0].cell["words"]
    languages = list(dict.fromkeys(each.cell["language"] for each in records))
    rows: list[list[Cell]] = []
    for (output, attention), group in _cells(records).items():
        paper = PAPER.get((setting, output, attention))
        row: list[Cell] = [name(output), name(attention)]
        for language in languages:
            values = _values(group, "test", language=language, models="one")
            row.append(with_interval(values) + (f" ({len(values)})" if values else ""))
        row += [_mean_over(languages, group, "one"), _mean_over(languages, group, "all together")]
        shown = ["–", "–"] if paper is None or "plurals" in languages[0] else [f"{each:.2f}" for each in paper]
        rows.append([*row, *shown])
    means = ["mean", "ensembles", "paper: mean", "paper: ensembles"]
    return Table(
        ["output", "attention", *(each.capitalize() for each in languages), *means],
        rows,
        caption=f"{setting.capitalize()}: share of test words inflected rightly by a beam of {BEAM}, in percent, with "
        "the number of seeds; the mean over languages, where all were run; and that of ensembles of all seeds.",
        paper="Table 1: means over 86 (high) and 102 (medium) languages, three runs each, and ensembles of three. "
        "Every sparse output is ahead of every softmax output there.",
    )


def _counts(records: Sequence[Record]) -> Table:
    rows: list[list[Cell]] = []
    for setting in dict.fromkeys(each.cell["words"] for each in records):
        for (output, attention), group in _cells([e for e in records if e.cell["words"] == setting]).items():
            figures = ("validation", "token accuracy", "single", "exact", "optimal")
            told = [f"{statistics.fmean(_values(group, figure)):.1f}" for figure in figures]
            epochs = f"{statistics.fmean(each.figures['epoch'] for each in group):.0f}"
            seconds = f"{statistics.fmean(each.seconds for each in group) / 60:.1f}"
            rows.append([setting, name(output), name(attention), len(group), *told, epochs, seconds])
    return Table(
        [
            "words",
            "output",
            "attention",
            "runs",
            "whole words",
            "letters",
            "single form",
            "exact beam",
            "proved best",
            "epoch",
            "minutes",
        ],
        rows,
        caption="Validation words, in percent, over all runs of whatever language: words and letters that are right "
        f"given what is before them; words with a single form of any probability; words for which a beam of {BEAM} has "
        "seen every form of any probability; and for which what it pruned cannot be more probable than its first. "
        "Then the epoch that was chosen, and minutes of processor time for a run.",
        paper="With its best model (sparsemax output, softmax attention) the paper finds a single form for 81 % and "
        "an exact beam for 87 % of the validation words, high, and 66 % and 79 %, medium.",
    )


def gains(records: Sequence[Record], side: str, sparse: float, dense: float, setting: str) -> list[float]:
    """What a sparse output or attention gains over a dense one, all else equal, in points of test accuracy.

    One number for each language, seed and α of the other side.
    """
    other = "attention" if side == "output" else "output"
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for each in records:
        if each.cell["words"] == setting:
            key = each.cell["language"], each.cell[other], each.seed
            found.setdefault(key, {})[each.cell[side]] = 100 * each.figures["test"]
    pairs = [(row.get(name(sparse)), row.get(name(dense))) for row in found.values()]
    return [a - b for a, b in pairs if a is not None and b is not None]


COMPARED = (("output", 1.5, 1.0), ("output", 2.0, 1.0), ("output", 1.5, 2.0), ("attention", 1.5, 1.0))


def _paired(records: Sequence[Record]) -> Table:
    rows: list[list[Cell]] = []
    for setting in dict.fromkeys(each.cell["words"] for each in records):
        for side, sparse, dense in COMPARED:
            found = gains(records, side, sparse, dense, setting)
            if found:
                better = sum(each > 0 for each in found)
                told = [with_interval(found, digits=2), f"{better} of {len(found)}", is_higher(found)]
                rows.append([setting, side, f"{name(sparse)} – {name(dense)}", *told])
    return Table(
        ["words", "of", "difference", "points", "ahead", "shown to be ahead"],
        rows,
        caption="Differences of test accuracy between models of the same language and seed that differ in the output "
        "alone, or in the attention alone: mean ± half the 95 % interval (paired, Student's t), in how many pairs "
        "the first is ahead, and whether the interval is above zero.",
        paper="Differences of the means in table 1, high, 1.5-entmax instead of softmax: output +1.2 and +2.1 points, "
        "attention −0.8 and +0.1.",
    )


SAID = {"yes": "ahead", "no": "behind", "not shown": "not shown to differ", "too few runs": "too few runs to tell"}
"""What the interval of a difference says, in words."""


def _verdict(records: Sequence[Record]) -> str:
    """What the differences between models say, in words."""
    told = []
    for setting in dict.fromkeys(each.cell["words"] for each in records):
        for side, sparse, dense in COMPARED:
            if found := gains(records, side, sparse, dense, setting):
                what = f"{name(sparse)} instead of {name(dense)} as {side} {with_interval(found, digits=2)} points"
                told.append(f"{what} ({setting}; {len(found)} pairs: {SAID[is_higher(found)]})")
    return f"Differences of test accuracy, all else equal: {'; '.join(told)}." if told else ""


def _claims(records: Sequence[Record]) -> list[Claim]:
    """The paper's claims beside these runs."""
    claims = []
    high = [each for each in records if each.cell["words"] == "high"]
    languages = ", ".join(dict.fromkeys(each.cell["language"].capitalize() for each in high))
    for side, paper in (
        ("output", "94.36 and 94.44 % instead of 93.15 and 92.32 %"),
        ("attention", "with a 1.5-entmax output 94.44 instead of 94.36 %"),
    ):
        if found := gains(records, side, 1.5, 1.0, "high"):
            ours = f"{with_interval(found, digits=2)} points, {len(found)} pairs of models ({languages})"
            told = f"1.5-entmax {side} inflects more words rightly than softmax {side}, all else equal (high)"
            claims.append(Claim(told, paper, ours, is_higher(found)))
    cells = _cells(high)
    output = max((output for output, attention in cells if output > 1 and attention == 1), default=None)
    if output is not None:  # sparsemax as in the paper if it was run
        best = cells[output, 1.0]
        exact, single = (_values(best, figure) for figure in ("exact", "single"))
        near = min(statistics.fmean(exact) - 82, statistics.fmean(single) - 76) >= 0
        claims.append(
            Claim(
                f"Most words have exact beams, and most a single form ({name(output)} output, softmax attention)",
                "exact 87 %, single 81 %" + (" (sparsemax output)" if output < 2 else ""),
                f"exact {with_interval(exact)} %, single {with_interval(single)} % ({len(best)} runs, {languages})",
                judged("yes" if near else "in part", len(best)),
            )
        )
    return claims


def _forms(record: Record) -> Table:
    """Words with more than one form, as a sparse model sees them."""
    rows: list[list[Cell]] = []
    for lemma, tags, right, forms in record.figures["lists"]:
        rows.append([lemma, tags, right, ", ".join(f"{form} {100 * p:.1f} %" for form, p in forms)])
    return Table(
        ["lemma", "tags", "right", "all forms of any probability"],
        rows,
        caption="The first validation words with two to four forms in the model with most exact beams "
        f"({_which(record)}), complete: their probabilities sum to 1.",
        paper="The paper's example, the participle of “draw”, has three forms with 66.4 %, 32.2 % and 1.4 %: a list "
        "that ends.",
    )


def _which(record: Record) -> str:
    cell = record.cell
    return f"{cell['language'].capitalize()}, output {cell['output']}, attention {cell['attention']}"


def _rebuilt(record: Record) -> tuple[Pair, Vocabulary, Beam, list[Choice]]:
    """The word of a record that is followed, and what the model does with it."""
    told = record.figures["followed"]
    found = tuple(Hypothesis(tuple(tokens), score, score) for tokens, score in told["forms"])
    beam = Beam(found, told["exact"], told["exact"], len(found), sum(each.probability for each in found))
    choices = [Choice(token, p, tuple((t, q) for t, q in others)) for token, p, others in told["steps"]]
    return Pair(tuple(told["source"]), tuple(told["target"])), Vocabulary(told["symbols"]), beam, choices


def _tree(record: Record) -> Figure:
    pair, letters, beam, _ = _rebuilt(record)
    lemma, tags, right = told(pair)
    forms = {"".join(letters.decode(each.tokens)): each.probability for each in beam.hypotheses}
    listed = ", ".join(f"{form} {100 * p:.1f} %" for form, p in forms.items())
    hit = f"Right is {right}, " + ("in blue" if right in forms else "which has probability zero")
    claim = "every form that the model can write" if beam.exact else "the most probable forms"
    return Figure(
        hypotheses.tree(beam, letters, pair.target),
        caption=f"The whole beam search for {lemma} ({tags}), {_which(record)}: {claim}. {hit}.",
        alt=f"A tree that branches from the first letter into {len(forms)} forms: {listed}.",
        paper="Figure 1 draws the same for the participle of “draw”: three hypotheses, among them the right “drawn” "
        "and the regular “drawed”.",
    )


def _alternatives(record: Record) -> Figure:
    pair, letters, _, choices = _rebuilt(record)
    lemma, tags, right = told(pair)
    counts = [len(each.alternatives) for each in choices]
    return Figure(
        hypotheses.alternatives(choices, letters),
        caption=f"Forced decoding of {right} from {lemma} ({tags}): under each letter the others that had any "
        f"probability (grey: less than 5 %), {max(counts)} choices at most; orange: a letter of probability zero; ▪ is "
        "the end. Boxes join letters that could only come so: those a keyboard would complete on its own.",
        alt=f"The letters of {right} in a row, with {', '.join(map(str, counts))} possibilities each.",
        paper="Figure 2 draws this for the translation of a sentence; there too most steps have a single continuation.",
    )


def _attention(records: Sequence[Record]) -> list[Figure]:
    """Two models of the same language and seed, softmax and 1.5-entmax, at the same word."""
    groups: dict[tuple[str, str, int], dict[float, Record]] = {}
    for record in records:
        if record.cell["output"] == record.cell["attention"]:
            key = record.cell["language"], record.cell["words"], record.seed
            groups.setdefault(key, {})[_alpha(record, "output")] = record
    both = [group for group in groups.values() if {1.0, 1.5} <= set(group)]
    if not both:
        return []
    shown = {alpha: both[0][alpha].figures["attended"] for alpha in (1.5, 1.0)}
    source, target = shown[1.0]["source"], shown[1.0]["target"]
    weights = {alpha: torch.tensor(each["weights"]) for alpha, each in shown.items()}
    seen = {alpha: float((each > 0).sum(1).float().mean()) for alpha, each in weights.items()}
    lemma, _, right = told(Pair(tuple(source), tuple(target)))
    return [
        Figure(
            hypotheses.attention([(f"attention: {name(a)}", each) for a, each in weights.items()], source, target),
            caption=f"Attention of the letters of {right} (rows) to the tags and letters of {lemma} (columns); zero is "
            f"blank. A letter looks at {seen[1.5]:.1f} symbols on average with 1.5-entmax, at {seen[1.0]:.1f} with "
            "softmax; outputs are of the same kind.",
            alt="Two tables of shades. With 1.5-entmax few cells of a row have a shade, near the diagonal; with "
            "softmax all are.",
            paper="Figure 5 draws the attention of the translation model, as sparse.",
        )
    ]


def _learning(records: Sequence[Record]) -> list[Figure]:
    """How often beams are exact as a model learns, by the output of the paper's best model if it was run."""
    if not records:
        return []
    record = max(records, key=lambda each: (_alpha(each, "output"), -_alpha(each, "attention"), -each.seed))
    entries = [each for each in record.figures["entries"] if "exact" in each]
    if not entries:
        return []
    drawing, (axes,) = style.panels(1, 1, height=2.6)
    last = entries[-1]
    for figure, label in (("right", "first form right"), ("exact", "beam exact"), ("single", "single form")):
        axes.plot([e["epoch"] for e in entries], [100 * e[figure] for e in entries], marker="o", label=label)
    axes.set(xlabel="epochs", ylabel="validation words (%)", ylim=(0, 100))
    axes.legend()
    return [
        Figure(
            drawing,
            caption=f"As a model learns ({_which(record)}): validation words whose first form is right, those whose "
            f"beam of {BEAM} is exact, those with a single form; at the end {100 * last['right']:.0f}, "
            f"{100 * last['exact']:.0f} and {100 * last['single']:.0f} %. The better a model knows a word, the fewer "
            "forms there are to search.",
            alt="Three lines, in percent of the validation words, against the number of epochs.",
            paper="The paper tells the end: a single form for 81 % of the validation words, an exact beam for 87 %.",
        )
    ]


def _effect(records: Sequence[Record]) -> list[Figure]:
    """Accuracy by one α while the other is 1.5, in the language that has the most α."""
    spanish = [each for each in records if each.cell["language"] == "spanish" and each.cell["words"] == "high"]
    cells = _cells(spanish, (*ALPHAS, *BETWEEN))
    sides = {
        "attention": {attention: group for (output, attention), group in cells.items() if output == 1.5},
        "output": {output: group for (output, attention), group in cells.items() if attention == 1.5},
    }
    if min(map(len, sides.values())) < 2:
        return []
    drawing, panels = style.panels(2, 2, height=1.8, sharex=True, sharey="row")
    for row, (figure, label) in enumerate((("test", "words (%)"), ("token accuracy", "letters (%)"))):
        for axes, (side, groups) in zip(panels[2 * row : 2 * row + 2], sides.items(), strict=True):
            points = {alpha: [100 * each.figures[figure] for each in groups[alpha]] for alpha in sorted(groups)}
            axes.plot(list(points), [statistics.fmean(values) for values in points.values()])
            for alpha, values in points.items():
                axes.plot([alpha] * len(values), values, "o", ms=3, color=style.PALETTE[0])
            if row:
                axes.set_xlabel(f"{side} α")
        panels[2 * row].set_ylabel(label)
    return [
        Figure(
            drawing,
            caption="Spanish, high: test words inflected rightly (above), and letters of validation words that are "
            "right given those before them (below), by the α of the attention, with a 1.5-entmax output (left), and "
            "by the α of the output, with a 1.5-entmax attention (right); a dot is a seed.",
            alt="Four panels with a line over α from 1 to 2.",
            paper="Figure 4 finds, for the token accuracy of translation, little effect of the attention's α and a "
            "clear one of the output's, best between 1 and 2.",
        )
    ]
