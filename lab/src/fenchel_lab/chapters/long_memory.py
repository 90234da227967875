"""Long memory: tokens of long sequences sorted by frequency, with memories of the same size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fenchel.continuous import BetaGaussian
from fenchel_lab.drawing import style
from fenchel_lab.models import sorting
from fenchel_lab.models.sorting import KINDS, Outcome, Setting, Sorter
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

TEST = 77_000
"""Seeds the sequences of the test, the same for all models."""


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        setting: of the models, for the first length.
        lengths: of sequences; a model of a length begins with the parameters of that of the length before.
        steps: of training, one number per length.
        test: sequences per length.
    """

    setting: Setting
    lengths: Sequence[int] = (4000, 16000)
    steps: Sequence[int] = (2000, 200)
    test: int = 64


SCALED = Protocol(Setting())
FULL = Protocol(
    Setting(chunk=1024, memory=1024, width=300, heads=6, layers=3, batch=8, rate=2.5e-4, contraction=0.75),
    lengths=(4000, 8000, 16000),
    steps=(50_000, 20_000, 20_000),
    test=1000,
)

SUMMARY = """
A sequence of {first:,} or {last:,} tokens is drawn from a vocabulary of {tokens}, by a distribution that changes from
the first token to the last. The model reads it in chunks of {chunk} and must then write the {tokens} tokens by falling
frequency. What came last tells little about the whole, so a model must remember all of it. Every model has {memory2}
vectors to remember with, and about as many parameters. The short-term Transformer keeps the last {memory2} tokens. The
compressive one keeps the last {memory} and, for those before, {memory} averages of {rate} tokens each. The long memory
(`LongMemory`, `nn.LongMemoryAttention`) keeps the last {memory} and, for all before, a function of time in {memory}
Gaussian basis functions, which Gaussian densities attend to. It comes in two forms: the paper's, where every update
leaves the share τ = {contraction:g} of [0, 1] to the past, so that old tokens are smoothed more than new ones; and one
of our own, where every token has an equal share.
"""

SCALED_DOWN = """
Scaled down from the paper: chunks of {chunk} in place of 1,024, memories of {memory2} vectors in place of 2,048, width
{width}, one layer with a memory and one without in place of three with one, {steps} steps of {batch} sequences for the
first length, then {more} more for the second, one seed. There are {updates} updates of the memory for the longest
sequences where the paper has about 16, hence a τ near 1. The compressive memory averages, without a loss of its
own. Gradients do not reach the tokens through the memories. No length between {first:,} and {last:,} was run.
"""

WHOLE = """
The paper's sizes: chunks of 1,024, memories of 2,048 vectors, three layers, three lengths; width {width} and
τ = {contraction:g}. Only the first layer has a memory. Rate, batches and steps are our own.
"""


@dataclass(frozen=True)
class Sorted:
    """A kind of model at all lengths."""

    kind: str
    outcomes: Sequence[Outcome]
    models: Sequence[Sorter]


CODE = """
import torch
from fenchel.continuous import GaussianBasis, LongMemory
from fenchel.nn import LongMemoryAttention

memory = LongMemory(GaussianBasis.line(32, widths=(0.03,)), 16, num_heads=4, contraction=0.75)
layer, state = LongMemoryAttention(memory, recent=64), None
for chunk in torch.randn(2, 1000, 16).split(128, dim=1):  # a stream, chunk by chunk
    found = layer(chunk, state)
    state = found.state.detach()
print(found.output.shape, state.memory.lengths + state.recent.shape[1])
"""


@study(
    "Long memory",
    source="Martins, Marinho & Martins (2022), ∞-former: infinite memory transformer, section 4.1 and figure 3",
    order=54,
    theme="Continuous attention",
    code=CODE,
    full="With `--full` the sizes and lengths are the paper's; that was not run. What differs from the paper: the "
    "memory is in the first of three layers alone, and width, steps and rate are our own.",
    tour=False,
    resumes=True,
)
def long_memory(context: Context) -> Result:
    """Train every kind of memory at every length, and sort."""
    protocol = FULL if context.full else SCALED
    found = [_sorted(kind, number, protocol, context) for number, kind in enumerate(KINDS)]
    setting = protocol.setting
    updates = -(-(protocol.lengths[-1] - setting.memory) // setting.chunk)
    values = vars(setting) | {
        "first": protocol.lengths[0],
        "last": protocol.lengths[-1],
        "memory2": 2 * setting.memory,
        "rate": setting.rate_of_compression,
        "steps": f"{protocol.steps[0]:,}",
        "more": f"{protocol.steps[-1]:,}",
        "updates": updates,
    }
    text = WHOLE if context.full else SCALED_DOWN
    return Result(
        f"{SUMMARY}\n{text}".format(**values) + f"\n\n{_found(found, protocol)}",
        figures=[_curves(found, protocol), _heads(found, protocol)],
        tables=[_table(found, protocol)],
    )


def _sorted(kind: str, number: int, protocol: Protocol, context: Context) -> Sorted:
    outcomes, models = list[Outcome](), list[Sorter]()
    work, done = sum(n * s for n, s in zip(protocol.lengths, protocol.steps, strict=True)), 0
    for length, steps in zip(protocol.lengths, protocol.steps, strict=True):
        setting = replace(protocol.setting, length=length, steps=steps)
        folder = None if context.checkpoints is None else _folder(context.checkpoints, kind, length)

        def progress(part: float, before: int = done, now: int = length * steps, length: int = length) -> None:
            share = (number + (before + part * now) / work) / len(KINDS)
            context.progress(0.99 * share, f"{kind}, {length:,} tokens")

        start = models[-1] if models else None
        model, losses = sorting.trained(kind, setting, context.seed, progress, folder, start)
        outcomes.append(sorting.tested(model, protocol.test, TEST + length, losses))
        models.append(model)
        done += length * steps
    return Sorted(kind, outcomes, models)


def _folder(checkpoints: Path, kind: str, length: int) -> Path:
    return checkpoints / f"{kind.replace(',', '').replace(' ', '-')}-{length}"


def _table(found: Sequence[Sorted], protocol: Protocol) -> Table:
    rows: list[list[Cell]] = []
    for each in found:
        row: list[Cell] = [each.kind, sum(p.numel() for p in each.models[0].parameters())]
        for outcome in each.outcomes:
            row += [f"{100 * outcome.accuracy:.1f}", f"{100 * outcome.pairs:.1f}"]
        rows.append(row)
    header = [word for n in protocol.lengths for word in (f"right at {n:,}, %", f"pairs at {n:,}, %")]
    return Table(
        ["", "parameters", *header],
        rows,
        caption="The share of places with the right token, and of pairs of tokens in the right order, on "
        f"{protocol.test} new sequences per length, the same for all models. Guessing has 5 % of the places and, "
        "without repetition, 50 % of the pairs.",
        paper="The paper has the model of the last tokens ahead at 4,000, half of which its memory holds, and the "
        "∞-former losing the least as sequences grow to 16,000.",
    )


def _found(found: Sequence[Sorted], protocol: Protocol) -> str:
    """What this run shows, in words."""
    texts = []
    for place, length in enumerate(protocol.lengths):
        order = sorted(found, key=lambda each: -each.outcomes[place].pairs)
        listed = ", ".join(f"{each.kind} ({_shares(each.outcomes[place])})" for each in order)
        texts.append(f"At {length:,} tokens, from the best order to the worst: {listed}.")
    return " ".join(texts) + " One seed, and models that were still learning when training ended."


def _shares(outcome: Outcome) -> str:
    return f"{100 * outcome.pairs:.1f} % of pairs, {100 * outcome.accuracy:.1f} % of places"


def _curves(found: Sequence[Sorted], protocol: Protocol) -> Figure:
    drawing, (scores, losses) = style.panels(2, 1, height=2.3)
    for number, each in enumerate(found):
        colour = style.PALETTE[number]
        shares = [100 * outcome.pairs for outcome in each.outcomes]
        scores.plot(range(len(shares)), shares, "o-", ms=4, color=colour, label=each.kind)
        smooth = _means(each.outcomes[0].losses)
        losses.plot(*zip(*smooth, strict=True), lw=1.2, color=colour)
    scores.set(
        xticks=range(len(protocol.lengths)),
        xticklabels=[f"{n:,}" for n in protocol.lengths],
        xlabel="tokens of a sequence",
        ylabel="pairs in order, %",
    )
    scores.margins(x=0.15)
    losses.set(xlabel=f"step of training, {protocol.lengths[0]:,} tokens", ylabel="loss, nats")
    drawing.legend(*scores.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return Figure(
        drawing,
        caption="Pairs of tokens in the right order by the length of sequences, and the loss in training (means of 25 "
        f"steps). {_scale(protocol)}",
        alt="Above, four lines over the lengths, one per memory; below, four falling losses.",
        paper="The paper's figure 3 has the share of right places by length; its ∞-former falls the least.",
    )


def _means(losses: Sequence[float], size: int = 25) -> list[tuple[float, float]]:
    """The middle step and the mean of every ``size`` losses."""
    starts = range(0, len(losses), size)
    return [(start + size / 2, statistics.fmean(losses[start : start + size])) for start in starts]


def _scale(protocol: Protocol) -> str:
    setting, steps = protocol.setting, " and ".join(f"{n:,}" for n in protocol.steps)
    return (
        f"One seed; {2 * setting.memory:,} vectors of memory, {setting.layers} layers of width {setting.width}, "
        f"{steps} steps of {setting.batch} sequences (the paper: 2,048 vectors, three layers)."
    )


@torch.no_grad()
def _heads(found: Sequence[Sorted], protocol: Protocol) -> Figure:
    """Where the heads of the two long memories look, for the first and the last token that is written."""
    long = [each for each in found if "long" in each.kind]
    drawing, axes = style.panels(len(long), 1, height=1.9, sharex=True)
    t = torch.linspace(0, 1, 400)
    for axis, each in zip(axes, long, strict=True):
        model = each.models[-1]
        tokens, target = sorting.sequences(model.setting, 1, torch.Generator().manual_seed(TEST))
        state = model.read(tokens)
        start = torch.full_like(target[:, :1], model.setting.tokens)
        first: Any = model.layers[0]
        x = first.norms[0](model.embedding(torch.cat([start, target[:, :-1]], 1)))
        focus = first.attention.attention.memory.attend(x, state.memory).focus
        for head in range(model.setting.heads):
            for place, line in ((0, "-"), (-1, ":")):
                density = BetaGaussian(focus.loc[0, place, head, 0], sigma=focus.sigma[0, place, head, 0], alpha=1.0)
                axis.plot(t, density.log_prob(t.unsqueeze(-1)).exp(), line, color=style.PALETTE[head % 6], lw=1.3)
        axis.set(title=each.kind, ylabel="density")
    axes[-1].set_xlabel("place in the memory: 0 is the oldest, 1 the newest")
    return Figure(
        drawing,
        caption=f"The densities of the heads over the memory of one sequence of {protocol.lengths[-1]:,} tokens, one "
        f"colour per head: for the first token that is written (solid) and the last (dotted). {_scale(protocol)}",
        alt="Two panels of bell curves over [0, 1], one per form of the long memory.",
    )
