"""Translation: dense and sparse attention and output on captions, scored, counted and timed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from sacrebleu import BLEU

from fenchel.seq2seq import STOP, Choice, Training, Vocabulary
from fenchel_lab.drawing import hypotheses, style
from fenchel_lab.models import translating
from fenchel_lab.models.translating import (
    ALPHAS,
    ATTENTIONS,
    BEAM,
    COMBINED,
    DROPPED,
    TIMED,
    WIDE,
    Corpus,
    Size,
    captions,
    examples,
    joined,
    made_up,
    repeated,
)
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import is_higher, judged, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

SPECIAL = {"</s>", "<unk>"}

PAPER_BLEU = {"softmax": "25.70 ± 0.15", "1.5-entmax": "26.17 ± 0.13", "sparsemax": "24.69 ± 0.22"}
"""Table 2, German to English."""
PAPER_NONZEROS = {"softmax": ("24.25", "17,993"), "1.5-entmax": ("5.55", "16.13"), "sparsemax": ("3.75", "7.55")}
"""Table 3: what is attended to, and what may be written, at a step."""
PAPER_SPEED = {"softmax": "14,500", "1.5-entmax": "13,000"}
"""Target words per second in training, on a GPU; of sparsemax the text says nothing."""
PAPER_COMBINED = {
    "softmax": "23.92",
    "discrete + continuous softmax": "24.00",
    "discrete + continuous sparsemax": "24.25",
}
"""Martins et al. (2020), table 2."""

SUMMARY = """
An encoder-decoder reads a German sentence and writes an English one: a bidirectional LSTM, an LSTM with input feeding
and global attention (`fenchel.seq2seq.Recurrent`). At every step it chooses which sub-words to look at (`attention=`)
and which one to write (`output=`): by softmax for both, by 1.5-entmax for both, or by sparsemax for both. The sparse
ones are trained by `linear_entmax_loss`, softmax by torch's own cross entropy, so that no speed is compared with less
than that.

With a sparse output nearly all sub-words have probability exactly zero at every step. What is left is a list that a
translator can read, and a beam search that can tell, for some sentences, that nothing better exists. Beside them stand
models with other attention: fusedmax and oscarmax, which give neighbours and equals the same weight; a density over
the sentence added to the discrete attention; and sparsemax under the bound that no sub-word receives more than its
predicted fertility in all steps together.
"""

REAL = """
All sentences of Multi30k, captions of images, in lower case ({train:,} to train with; the paper's talks, IWSLT 2017,
are 206,112), as at most {pieces:,} sub-words of both languages (BPE). {layers} layer of width {width} (the paper: 2 of
500), dropout {dropout:g}, batches of {how.batch} at a rate of {how.rate:g}, which is halved when the validation loss
rises; training stops when the token accuracy of the validation sentences has not risen for {how.patience} epochs, or
after {how.epochs}, and the best epoch is taken. Softmax and 1.5-entmax have {runs} seeds, all others one.
Gigaword, on which fusedmax and oscarmax were tried for summaries, is not at hand.
"""

EMBEDDED = """
This page was made with a made-up set: {train} sentences from a template, in which some German words have two
translations, and {test} others; {layers} layer of width {width}, {how.epochs} epochs. On Multi30k run the command below
with `FENCHEL_DATA` set.
"""

_HOW = Training(epochs=20, batch=64, rate=1e-3, criterion="token_accuracy", patience=3)
SCALED = Size(_HOW)
FULL = Size(Training(epochs=40, batch=64, rate=1e-3, criterion="token_accuracy"), width=500, layers=2)
TOY = Size(Training(epochs=6, batch=16, rate=1e-2, criterion="token_accuracy"), width=32, dropout=0.0, runs=1)
TOY_SENTENCES = (300, 40, 40)

CODE = """
import torch, fenchel

hidden, weight = torch.randn(64, 128), torch.randn(10_000, 128, requires_grad=True)
target = torch.randint(10_000, (64,))
loss = fenchel.linear_entmax_loss(hidden, weight, target)  # no matrix of 64 × 10,000
loss.backward()
print(f"{(weight.grad.abs().sum(-1) > 0).float().mean():.1%} of the words received a gradient")
"""


@study(
    "Few candidates per word: translating captions",
    source="Peters, Niculae & Martins (2019), Sparse Sequence-to-Sequence Models, tables 2 and 3, figures 2 and 5",
    order=72,
    theme="Sequence to sequence",
    code=CODE,
    data=["multi30k"],
    records=True,
    resumes=True,
    full="With `--full` models have the paper's width and layers. What differs from the paper: captions of images "
    "(Multi30k, 29,000 sentences) in place of talks (IWSLT 2017) and of its other language pairs.",
    tour=False,
)
def translation(context: Context) -> Result:
    """Train models with every attention and output, score and time them, and look at a sentence."""
    if context.data is None:
        size, corpus, text, rest = TOY, made_up(*TOY_SENTENCES), EMBEDDED, ["sparsemax with fertility"]
    else:
        size, text, rest = FULL if context.full else SCALED, REAL, [*ATTENTIONS, *COMBINED]
        corpus = captions(context.data, size.pieces)
    first, folder = context.seed, context.checkpoints
    planned = [(kind, first) for kind in ("1.5-entmax", "softmax", "sparsemax", *rest)]
    planned += [(kind, first + turn) for turn in range(1, size.runs) for kind in ("1.5-entmax", "softmax")]
    jobs = [job(kind, corpus, size, seed, folder) for kind, seed in planned]
    jobs.append(speed_job(corpus, size, first, folder))
    records = context.records.collect(jobs, lambda part, note="": context.progress(0.98 * part, note))
    parts = [SUMMARY, text.format(train=len(corpus.train), test=len(corpus.test), **vars(size))]
    if len(records) < len(jobs):
        parts.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.cell["model"], []).append(record)
    speeds = [each.figures for each in found.pop("speeds", [])]
    if not found:
        return Result("\n\n".join(parts))
    main = {kind: found[kind] for kind in ALPHAS if kind in found}
    others = {kind: found[kind] for kind in rest if kind in found}
    tables, figures = [], []
    if main:
        tables += [_scores(main), _counts(main, speeds[0] if speeds else {}, corpus), _searches(main)]
        figures += [_curves(main), _attention(main)]
        if "1.5-entmax" in main:
            figures.append(_alternatives(main["1.5-entmax"][0]))
    if others:
        tables.append(_variants({**main, **others}, corpus))
        figures.append(_attention(others))
    tables.append(_examples(found, corpus))
    claims = _claims(main) if context.data is not None else []
    return Result("\n\n".join(parts), figures=figures, tables=tables, claims=claims)


def job(kind: str, corpus: Corpus, size: Size, seed: int, folder: Path | None = None) -> Job:
    """One model."""
    settings = asdict(size) | {"pairs": [len(corpus.train), len(corpus.validation), len(corpus.test)], "beam": BEAM}
    del settings["how"]["seed"], settings["runs"]
    return Job({"model": kind}, seed, settings, partial(translating.run, kind, corpus, size, seed, folder))


def speed_job(corpus: Corpus, size: Size, seed: int, folder: Path | None) -> Job:
    """Steps of training of the main models, in turns."""
    settings = job("softmax", corpus, size, seed).settings
    return Job(
        {"model": "speeds"},
        seed,
        {**settings, "batches": TIMED},
        partial(translating.paces, corpus, size, seed, folder),
    )


Found = Mapping[str, Sequence[Record]]
"""Records of every kind of model."""


def _values(records: Sequence[Record], *path: str) -> list[float]:
    values = []
    for record in records:
        value = record.figures
        for name in path:
            value = value[name]
        values.append(float(value))  # type: ignore[arg-type]
    return values


def _scores(found: Found) -> Table:
    rows: list[list[Cell]] = []
    for kind, group in found.items():
        told: list[Cell] = [kind, len(group), PAPER_BLEU[kind], with_interval(_values(group, "validation"))]
        told += [with_interval(_values(group, "ways", way, "bleu")) for way in ("greedy", f"beam {BEAM}")]
        told += [with_interval(_values(group, figure), 100) for figure in ("exact", "optimal")]
        told += [with_interval(_values(group, "epoch"), digits=0)]
        rows.append([*told, with_interval([record.figures["entries"][-1]["seconds"] / 60 for record in group])])
    scorer = BLEU(lowercase=True)
    scorer.corpus_score(["a"], [["a"]])  # its signature is told once it has counted
    return Table(
        [
            "attention and output",
            "runs",
            "paper: BLEU",
            "validation, greedy",
            "test, greedy",
            f"test, beam {BEAM}",
            "exact beam, %",
            "proved best, %",
            "epoch",
            "minutes",
        ],
        rows,
        caption=f"BLEU (sacreBLEU, {scorer.get_signature()}), no length penalty, mean ± half the 95 % interval over "
        "seeds: the highest of all epochs on validation sentences, and that of the chosen epoch on test sentences. "
        "Then the share of test sentences for which the beam has seen every translation of non-zero probability, and "
        "of those whose translation is proved to be the most probable one; the epoch that was chosen, and minutes of "
        "processor time for all epochs, validation losses included.",
        paper="Table 2, German to English: other sentences (IWSLT 2017 talks) and tokenized BLEU, so only the order "
        "can be compared. There 1.5-entmax is ahead in all six directions.",
    )


def _counts(found: Found, speeds: Mapping[str, float], corpus: Corpus) -> Table:
    rows: list[list[Cell]] = []
    for kind, group in found.items():
        attended, possible = PAPER_NONZEROS[kind]
        row: list[Cell] = [kind, attended, with_interval(_values(group, "attended"), digits=2)]
        row += [possible, with_interval(_values(group, "possible"), digits=2), PAPER_SPEED.get(kind, "–")]
        row += [f"{speeds[kind]:,.0f}" if kind in speeds else "–"]
        rows.append([*row, with_interval(_values(group, "decoding"), digits=0)])
    bisected = "1.5-entmax by bisection"
    if bisected in speeds:
        rows.append([bisected, "–", "–", "–", "–", "10,500", f"{speeds[bisected]:,.0f}", "–"])
    symbols = len(Vocabulary.of(pair.target for pair in corpus.train))
    return Table(
        [
            "attention and output",
            "paper: attended",
            "attended",
            "paper: possible",
            "possible",
            "paper: words/s",
            "sub-words/s, training",
            "sub-words/s, beam search",
        ],
        rows,
        caption=f"Sub-words of the source with any attention, and those of the {symbols:,} that may be written, at a "
        "step: averages over the validation sentences with known targets. Target sub-words per second of processor "
        f"time: in {TIMED} whole steps of training of trained models, which take turns (bisection is the loss of the "
        "package entmax), and in the beam search of the test sentences.",
        paper="Table 3 and the text under it: 17,993 sub-words, longer sentences, and speeds in training on one "
        "GeForce GTX 1080; sparsemax's is not told.",
    )


def _searches(found: Found) -> Table:
    rows: list[list[Cell]] = []
    for kind, group in found.items():
        row: list[Cell] = [kind]
        for way in ("greedy", f"beam {BEAM}", f"beam {WIDE}"):
            row += [with_interval(_values(group, "ways", way, "bleu"))]
            row += [with_interval(_values(group, "ways", way, "length"), digits=3)]
        row += [with_interval(_values(group, "ways", f"beam {WIDE}", "empty"))]
        rows.append([*row, with_interval(_values(group, "empty is best"), 100)])
    ways = [f"{way}: {what}" for way in ("greedy", f"beam {BEAM}", f"beam {WIDE}") for what in ("BLEU", "length")]
    return Table(
        ["attention and output", *ways, "empty", "empty more probable, %"],
        rows,
        caption="Test sentences by greedy search and by beams without a length penalty: BLEU, words written for a "
        f"word of the reference, empty translations by the beam of {WIDE}, and the share of sentences for which the "
        f"model gives an empty translation more probability than the one that the beam of {BEAM} found.",
        paper="Peters & Martins (2021) find that softmax models often prefer the empty string and short translations, "
        "and that entmax rules most of them out.",
    )


def _variants(found: Found, corpus: Corpus) -> Table:
    rows: list[list[Cell]] = []
    for kind, group in found.items():
        row: list[Cell] = [kind, "softmax" if kind in COMBINED else "1.5-entmax" if kind in ATTENTIONS else kind]
        row += [
            len(group),
            PAPER_COMBINED.get(kind, "–"),
            with_interval(_values(group, "ways", f"beam {BEAM}", "bleu")),
        ]
        row += [with_interval(_values(group, "attended"), digits=2), with_interval(_values(group, "repeated"), 100)]
        there = [record for record in group if record.figures["dropped"] is not None]
        rows.append([*row, with_interval(_values(there, "dropped"), 100)])
    again = f"{100 * repeated(corpus.references):.1f}"
    rows.append(["references", *["–"] * 5, again, "–"])
    return Table(
        ["attention", "output", "runs", "paper: BLEU", f"BLEU, beam {BEAM}", "attended", "repeated, %", "dropped, %"],
        rows,
        caption=f"Test sentences by a beam of {BEAM}: BLEU; sub-words with any weight at a step; pairs of neighbouring "
        "words that occur in the same translation before; and sub-words of the source that receive less attention "
        f"than {DROPPED:g} in all steps together.",
        paper="Martins et al. (2020), table 2, on IWSLT 2017, softmax output. Malaviya et al. (2018) count fewer "
        "repetitions and drops with bounds on fertility.",
    )


def _examples(found: Found, corpus: Corpus) -> Table:
    rows: list[list[Cell]] = []
    german = examples([joined(pair.source) for pair in corpus.test])
    for row, (source, reference) in enumerate(zip(german, examples(corpus.references), strict=True)):
        rows += [["German", source], ["reference", reference]]
        rows += [[kind, group[0].figures["examples"][row]] for kind, group in found.items() if kind in ALPHAS]
    return Table(
        ["by", "sentence"], rows, caption="Four test sentences, evenly spaced, and translations by the first seed."
    )


def _curves(found: Found) -> Figure:
    drawing, panels = style.panels(1, 2, height=2.4, sharey=True)
    for colour, (kind, group) in zip(style.PALETTE, found.items(), strict=False):
        for number, record in enumerate(group):
            entries = record.figures["entries"]
            scores = [each["bleu"] for each in entries]
            label = kind if number == 0 else None
            panels[0].plot([each["epoch"] for each in entries], scores, color=colour, lw=1, label=label)
            panels[1].plot([each["seconds"] / 60 for each in entries], scores, color=colour, lw=1)
    panels[0].set(xlabel="epochs", ylabel="validation BLEU, greedy")
    panels[1].set_xlabel("minutes of processor time")
    panels[0].legend()
    return Figure(
        drawing,
        caption="BLEU of greedy translations of the validation sentences after every epoch, by epochs and by time; a "
        "line for each run.",
        alt="Two panels of rising curves, one colour for each kind of attention and output.",
        paper="The paper has no such curves.",
    )


def _attention(found: Found) -> Figure:
    shown = {kind: group[0].figures["sentence"] for kind, group in found.items()}
    first = next(iter(shown.values()))
    source, target = ([_shown(symbol) for symbol in first[side]] for side in ("source", "target"))
    weights = {kind: torch.tensor(each["weights"]) for kind, each in shown.items()}
    panels = [(kind.replace(" + ", " +\n"), each) for kind, each in weights.items()]
    seen = [f"{float((each > 0).sum(1).float().mean()):.1f} by {kind}" for kind, each in weights.items()]
    few = len(panels) <= 3
    return Figure(
        hypotheses.attention(panels, source, target, across=few),
        caption=f"Attention of the sub-words of “{joined(first['target'])}” (rows, ▪ is the end) to those of "
        f"“{joined(first['source'])}” (columns), as each model writes the reference; what has no weight, or a negative "
        f"one, is blank. Sub-words looked at for one, on average: {', '.join(seen)}.",
        alt="Tables of shades, one row for each English sub-word, one column for each German one.",
        paper="Figure 5 draws the attention of 1.5-entmax for a sentence of the talks, with few words per row.",
    )


def _shown(symbol: str) -> str:
    """A sub-word as it is drawn: those that go on with a word begin with an ellipsis.

    Example:
        >>> _shown("▁dog"), _shown("s"), _shown("</s>")
        ('dog', '…s', '</s>')
    """
    return symbol if symbol in SPECIAL else symbol.removeprefix("▁") or "␣" if symbol.startswith("▁") else f"…{symbol}"


def _alternatives(record: Record) -> Figure:
    told = record.figures["sentence"]
    steps = [(_shown(t), p, [(_shown(o), q) for o, q in others]) for t, p, others in told["steps"]]
    words = Vocabulary(sorted({o for t, _, others in steps for o in (t, *(o for o, _ in others))} - SPECIAL))

    def number(token: str) -> int:
        return STOP if token == "</s>" else words.encode([token])[0]

    choices = [Choice(number(t), p, tuple((number(o), q) for o, q in others)) for t, p, others in steps]
    sure = sum(last - first + 1 for first, last in hypotheses.certain(choices))
    return Figure(
        hypotheses.steps(choices, words),
        caption=f"Forced decoding of “{joined(told['target'])}” from “{joined(told['source'])}” with 1.5-entmax: every "
        f"sub-word, its probability as a bar, and beside it the {hypotheses.MOST - 1} most probable others, with their "
        f"per cents; … goes on with a word. {sure} of {len(choices)}, the end (▪) counted, were the only ones "
        "possible.",
        alt=f"A list of {len(choices)} sub-words, each with its alternatives.",
        paper="Figure 2 draws this for “the tree of life” and a list of synonyms for “view”: certain inside a phrase, "
        "a handful of candidates elsewhere.",
    )


def _claims(found: Found) -> list[Claim]:
    """The papers' claims beside these runs."""
    if not {"softmax", "1.5-entmax"} <= set(found):
        return []
    scores = {
        kind: {record.seed: record.figures["ways"][f"beam {BEAM}"]["bleu"] for record in found[kind]}
        for kind in ("softmax", "1.5-entmax")
    }
    seeds = sorted(set(scores["softmax"]) & set(scores["1.5-entmax"]))
    told = {kind: with_interval([scores[kind][seed] for seed in seeds]) for kind in scores}
    possible = _values(found["1.5-entmax"], "possible")
    empty = {kind: 100 * statistics.fmean(_values(found[kind], "empty is best")) for kind in scores}
    return [
        Claim(
            "1.5-entmax translates better than softmax (BLEU)",
            f"{PAPER_BLEU['1.5-entmax']} instead of {PAPER_BLEU['softmax']}",
            f"{told['1.5-entmax']} instead of {told['softmax']} ({len(seeds)} runs each)",
            is_higher([scores["1.5-entmax"][seed] - scores["softmax"][seed] for seed in seeds]),
        ),
        Claim(
            "Few sub-words are possible at a step (1.5-entmax)",
            "16.13 of 17,993",
            f"{with_interval(possible, digits=2)} ({len(possible)} runs)",
            judged("yes" if statistics.fmean(possible) < 17 else "more than in the paper", len(possible)),
        ),
        Claim(
            "Softmax often holds the empty translation for the most probable, entmax hardly ever",
            "Peters & Martins (2021)",
            f"softmax {empty['softmax']:.1f} % of the sentences, 1.5-entmax {empty['1.5-entmax']:.1f} % "
            f"({len(seeds)} runs each)",
            judged("yes" if empty["softmax"] > 2 * empty["1.5-entmax"] else "no", len(seeds)),
        ),
    ]
