"""Attention heads that learn how sparse they are: one α per head of a Transformer that translates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fenchel.seq2seq import Training
from fenchel_lab.chapters.translation import job
from fenchel_lab.drawing import style
from fenchel_lab.models.translating import BEAM, HEADS, Size, captions, made_up
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import judged, with_interval
from fenchel_lab.report.records import Record
from fenchel_lab.report.result import Cell

LEARNED = "learned heads"
PARTS = {"encoder": "encoder", "cross": "cross", "decoder": "decoder"}

SUMMARY = """
Every head of a Transformer has an attention of its own, and it need not be told how sparse that should be:
`Tsallis(1.5, learnable=True, shape=(heads, 1, 1))` gives each head one α between 1 (softmax) and 2 (sparsemax), which
is trained with all other parameters, for entmax has a derivative in α. All start at 1.5. Beside it stand the same
models with one fixed α for all heads. The output is softmax in all of them.
"""

REAL = """
All sentences of Multi30k, German to English, as at most {pieces:,} sub-words (the paper: 206,112 talks of IWSLT 2017
and other sets); {layers} layers of width {width} with {heads} heads (the paper: 6 of 512 with 8), batches of
{how.batch} at a rate of {how.rate:g}. Training stops when the token accuracy of the validation sentences has not risen
for {how.patience} epochs, or after {how.epochs}. One seed each, which settles no order.
"""

EMBEDDED = """
This page was made with {train} made-up sentences, {layers} layers of width {width}, {how.epochs} epochs, one seed. On
Multi30k run the command below with `FENCHEL_DATA` set.
"""

_HOW = Training(epochs=15, batch=64, rate=1e-3, criterion="token_accuracy", patience=3)
SCALED = Size(_HOW, width=128, layers=3, dropout=0.1, runs=1)
FULL = Size(Training(epochs=40, batch=64, rate=5e-4, criterion="token_accuracy"), 512, 6, 0.3, 8, 10_000, runs=1)
TOY = Size(Training(epochs=5, batch=16, rate=5e-3, criterion="token_accuracy"), 32, 2, 0.0, 2, runs=1)
TOY_SENTENCES = (300, 40, 40)

CODE = """
import torch, fenchel

omega = fenchel.Tsallis(1.5, learnable=True, shape=(4, 1, 1))  # one α for each of 4 heads
attention = fenchel.nn.MultiheadAttention(32, 4, omega=omega, batch_first=True)
words = torch.randn(2, 10, 32)
attention(words, words, words)[0].square().sum().backward()
print([f"{slope:.2g}" for slope in next(omega.parameters()).grad.flatten()])
"""


@study(
    "Heads that learn how sparse they are",
    source="Correia, Niculae & Martins (2019), Adaptively Sparse Transformers, figure 4 and table 1",
    order=73.5,
    theme="Sequence to sequence",
    code=CODE,
    data=["multi30k"],
    records=True,
    resumes=True,
    full="With `--full` the Transformer has the paper's size; that was not run.",
    tour=False,
)
def adaptive_heads(context: Context) -> Result:
    """Train Transformers with fixed and with learned α."""
    if context.data is None:
        size, corpus, text = TOY, made_up(*TOY_SENTENCES), EMBEDDED
    else:
        size, text = FULL if context.full else SCALED, REAL
        corpus = captions(context.data, size.pieces)
    kinds = [LEARNED, *(kind for kind in HEADS if kind != LEARNED)]
    seeds = range(context.seed, context.seed + size.runs)
    jobs = [job(kind, corpus, size, seed, context.checkpoints) for seed in seeds for kind in kinds]
    records = context.records.collect(jobs, lambda part, note="": context.progress(0.98 * part, note))
    parts = [SUMMARY, text.format(train=len(corpus.train), **vars(size))]
    if len(records) < len(jobs):
        parts.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    learned = [record for record in records if record.cell["model"] == LEARNED]
    figures = [_through_training(learned[0])] if learned else []
    claims = _claims(learned) if context.data is not None else []
    return Result("\n\n".join(parts), figures=figures, tables=[_table(records)] if records else [], claims=claims)


def _table(records: Sequence[Record]) -> Table:
    rows: list[list[Cell]] = []
    for kind in HEADS:
        group = [record for record in records if record.cell["model"] == kind]
        if group:
            best = [max(each["token accuracy"] for each in record.figures["entries"]) for record in group]
            scores = [record.figures["ways"][f"beam {BEAM}"]["bleu"] for record in group]
            row: list[Cell] = [kind, len(group), with_interval(best, 100), with_interval(scores)]
            row += [with_interval([record.figures["attended"] for record in group], digits=2)]
            rows.append([*row, with_interval([record.figures["entries"][-1]["seconds"] / 60 for record in group])])
    return Table(
        ["attention", "runs", "token accuracy, %", f"BLEU, beam {BEAM}", "attended", "minutes"],
        rows,
        caption="Token accuracy of validation sentences, BLEU of test sentences, sub-words of the source with weight "
        "in any head of the last layer, and minutes of processor time in training.",
        paper="Table 1, German to English: softmax 29.79 BLEU, 1.5-entmax 29.83, learned α 29.90.",
    )


def _through_training(record: Record) -> Figure:
    """The α of every head after every epoch."""
    entries = record.figures["entries"]
    layers = len(entries[0]["alphas"]["encoder"])
    drawing, panels = style.panels(layers, len(PARTS), height=1.5, sharex=True, sharey=True)
    for place, axes in enumerate(panels):
        layer, part = divmod(place, len(PARTS))
        name = list(PARTS)[part]
        heads = len(entries[0]["alphas"][name][layer])
        for head in range(heads):
            line = [each["alphas"][name][layer][head] for each in entries]
            axes.plot([each["epoch"] for each in entries], line, lw=1, color=style.PALETTE[head % len(style.PALETTE)])
        axes.set_ylim(0.95, 2.05)
        if layer == 0:
            axes.set_title(list(PARTS.values())[part])
        if part == 0:
            axes.set_ylabel(f"layer {layer + 1}: α")
        if layer == layers - 1:
            axes.set_xlabel("epochs")
    low, high = _range(record)
    return Figure(
        drawing,
        caption="α of every head after every epoch, a colour for each head (cross: from the decoder to the source); at "
        f"the end they are between {low:.2f} and {high:.2f}. 1 is softmax, 2 is sparsemax.",
        alt="A grid of panels, one row for each layer and one column for each kind of attention, with a line for each "
        "head that begins at 1.5.",
        paper="Figure 4: the α of encoder heads fall first and then spread between 1 and 2; layers differ.",
    )


def _range(record: Record) -> tuple[float, float]:
    """The smallest and the largest α of the model that was kept."""
    found = [alpha for layers in record.figures["alphas"].values() for layer in layers for alpha in layer]
    return min(found), max(found)


def _claims(learned: Sequence[Record]) -> list[Claim]:
    if not learned:
        return []
    ends = [_range(record) for record in learned]
    low, high = (statistics.fmean(each[side] for each in ends) for side in (0, 1))
    return [
        Claim(
            "Heads learn different α, some near softmax and some near sparsemax",
            "between 1 and 2, most above 1 (figures 3 and 4)",
            f"between {low:.2f} and {high:.2f} ({len(learned)} run{'s' * (len(learned) > 1)})",
            judged("yes" if high - low > 0.5 else "in part: α stay closer to each other", len(learned)),
        )
    ]
