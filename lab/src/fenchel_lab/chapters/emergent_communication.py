"""Emergent communication: a code that two agents make up, drawn from relaxed, discrete and mixed distributions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fenchel_lab.data import images
from fenchel_lab.data.images import Images
from fenchel_lab.drawing import style
from fenchel_lab.models import agents
from fenchel_lab.models.agents import CHANNELS, Agents, Outcome, Setting
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import is_higher, is_rarer, judged, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

PAPER: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "Gumbel-Softmax": ((78.84, 8.07), (256, 0)),
    "Gumbel-Softmax ST": ((49.96, 9.51), (1, 0)),
    "K-D Hard Concrete": ((76.07, 7.76), (21.43, 17.56)),
    "Gaussian-Sparsemax": ((80.88, 0.50), (1.57, 0.02)),
}
"""The talk's table: success in percent, and non-zeros; each with its standard error over 10 runs."""

RUNS = 10
"""Of the talk, for each method."""

GAMES = 20260
"""Seeds the games that agents are tested with, the same for all."""

CHECKED = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 50_000)
"""Numbers of updates after which agents play 2,000 games on validation images."""

COLLAPSED = 2.0
"""Agents with fewer than so many times the successes of guessing do not communicate."""


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        setting: of the agents.
        halved: whether images are averaged to half their width and height, one entry for each size to be tried.
        runs: how many seeds.
    """

    setting: Setting
    halved: Sequence[bool] = (False,)
    runs: int = RUNS


REAL = Protocol(Setting())
FULL = Protocol(Setting(), (False, True))
TOY = Protocol(Setting(width=64, hidden=64, rate=1e-2, cooling=3e-4, batch=100, updates=1_000), runs=2)

SUMMARY = """
One agent sees an image and describes it with a code of {symbols} numbers, the other sees the code and {candidates}
images and picks the one that it describes. Nobody tells them what the numbers should mean. A code is a random vector in
the simplex, drawn from a distribution with the sender's scores: of the open simplex (Gumbel-Softmax), where no entry is
zero; of its vertices alone, with a gradient that is not its own (straight-through, ST); or mixed, on faces of any size
(`HardConcrete`, `GaussianSparsemax`), sparse and with the right gradient. Guessing succeeds in
{guess:.2f} % of the games.
"""

OURS = """
The agents are built and trained as in the authors' code. The sender is a linear layer to {width} numbers, one scalar
function (a sum of {hidden} sigmoids) applied to each of them, a sigmoid and a linear layer to the {symbols} scores,
which are divided by {division:g}; the receiver's score of a candidate is the product of a linear image of it and a
linear image of the code. There are no biases. σ is {scale:g} for the Gaussian-Sparsemax, the stretch of the Hard
Concrete {stretch:g}; the temperature is exp(−{cooling:g} · t) after t updates. Ours: handwritten digits, scaled to unit
norm, in place of features of ImageNet pictures, which makes it another game, with figures that need not agree; the
other candidates of a game are drawn from its batch; the scalar function is evaluated at 257 points and linear between
them. No setting was searched: all are the authors'.
"""

WHOLE = """
MNIST, {count} images to learn with, 10,000 to validate and 10,000 to test with, {updates:,} updates of {batch} games at
a rate of {rate:g}. The seeds were not used before; every table says how many are finished.
"""

EMBEDDED = """
This page was made with scikit-learn's digits, 1,000 of 8 × 8 pixels to learn with, {runs} seeds and {updates:,} updates
of smaller agents, which shows the game and settles no order. On MNIST run the command below with `FENCHEL_DATA` set.
"""

EXPLAINED = """
The talk's own order comes from runs that never began to communicate. Suppose that k of its n = {runs} runs stayed at
{guess:.2f} % and the others were all equal. If the mean is m, the others reached a = (n·m − k·{guess:.2f}) / (n − k),
and the standard error is (a − {guess:.2f}) · √(k (n − k) / (n − 1)) / n. {arithmetic} So among runs that communicate
the talk's order is Gumbel-Softmax, Hard Concrete, Gaussian-Sparsemax, straight-through. Gaussian-Sparsemax leads in
the talk because none of its runs failed.
"""

CODE = """
import torch
from fenchel.mixed import MixedDirichlet

message = MixedDirichlet(torch.zeros(8), torch.ones(1))
print(message.sample())  # a sparse mixture of symbols
print(f"entropy {message.entropy().item():.2f} nats")
"""


@study(
    "Emergent communication",
    source="Farinhas, Aziz, Niculae & Martins (2022), Sparse communication via mixed distributions; the table as in "
    "Martins's talk",
    order=82,
    theme="Between discrete and continuous",
    code=CODE,
    tour=False,
    data=["mnist"],
    records=True,
    full="With `--full` the game is also played with images that are averaged to 14 × 14. What differs from the "
    "paper: handwritten digits in place of features of ImageNet pictures.",
)
def emergent_communication(context: Context) -> Result:
    """Train pairs of agents with every distribution of codes and let them play."""
    protocol = TOY if context.data is None else FULL if context.full else REAL
    parts = [images.load(context.data, halved) for halved in protocol.halved]
    seeds = range(context.seed, context.seed + protocol.runs)
    # All methods of a seed before the next seed, so that what is finished can be compared; first the larger images.
    jobs = [job(method, shown, protocol.setting, seed) for shown in parts for seed in seeds for method in CHANNELS]
    records = context.records.collect(jobs, context.progress)
    setting = protocol.setting
    values = asdict(setting) | {"guess": 100 / setting.candidates, "runs": protocol.runs}
    values |= {"count": f"{len(parts[0].train):,}", "arithmetic": arithmetic(1 / setting.candidates)}
    text = f"{SUMMARY}\n{OURS}\n{EMBEDDED if context.data is None else WHOLE}"
    if context.data is not None:
        text += f"\n{EXPLAINED.replace('{runs}', str(RUNS))}"
    tables, figures, found = [], [], []
    claims: list[Claim] = []
    for shown in parts:
        there = [each for each in records if each.cell["image"] == _size(shown)]
        if not there:
            continue
        group = {method: [each for each in there if each.cell["method"] == method] for method in CHANNELS}
        found.append(_found(group, setting, _size(shown)))
        claims += _claims(group, setting, _size(shown)) if context.data is not None else []
        tables.append(_table(group, setting, _size(shown)))
        figures += [_scores(group, _size(shown)), _curves(group, setting, _size(shown)), _faces(group)]
        if drawn := _symbols(group["Gaussian-Sparsemax"], shown.test):
            figures.append(drawn)
    left = len(jobs) - len(records)
    found += [f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others."] if left else []
    return Result(text.format(**values) + "\n\n" + "\n\n".join(found), figures=figures, tables=tables, claims=claims)


def job(method: str, shown: Images, setting: Setting, seed: int) -> Job:
    """One pair of agents."""
    settings = asdict(setting) | {"images": len(shown.train), "inputs": "unit norm", "games": GAMES}
    return Job({"method": method, "image": _size(shown)}, seed, settings, partial(pair, method, shown, setting))


def pair(method: str, shown: Images, setting: Setting, progress: Callable[[float], None]) -> dict[str, Any]:
    """The figures of a pair of agents: of its training, and of its games at temperature 1 and at the last one."""
    train, valid, test = (F.normalize(part.flatten(1), dim=1) for part in (shown.train, shown.valid, shown.test))
    curve: dict[str, float] = {}

    def after(updates: int, pair: Agents) -> None:
        if updates in CHECKED or updates == setting.updates:
            curve[str(updates)] = agents.played(pair, valid[:2_000], GAMES).success
        if updates % 100 == 0:
            progress(updates / setting.updates)

    done = agents.trained(train, setting, CHANNELS[method], after)
    figures: dict[str, Any] = {"curve": curve, "temperature": done.temperature}
    for name, temperature in (("last", done.temperature), ("one", 1.0)):
        done.temperature = temperature
        chosen, tested = agents.played(done, valid, GAMES), agents.played(done, test, GAMES)
        figures[name] = {
            "validation": chosen.success,
            "test": tested.success,
            "nonzeros": tested.nonzeros,
            "symbols": tested.used,
            "faces": faces(tested),
            "pictures": pictures(tested),
        }
    return figures


LARGEST = 8
"""Faces with more vertices are counted together."""


def faces(outcome: Outcome) -> list[int]:
    """How many codes have 1, 2, …, 8 or more non-zero entries."""
    sizes = (outcome.codes > 0).sum(1).clamp_max(LARGEST)
    counts: list[int] = torch.bincount(sizes, minlength=LARGEST + 1)[1:].tolist()
    return counts


def pictures(outcome: Outcome, symbols: int = 6, most: int = 10) -> dict[str, list[int]]:
    """Numbers of images that one symbol alone describes, for the most frequent symbols."""
    codes = outcome.codes
    leading = codes.argmax(1)
    common = torch.bincount(leading, minlength=codes.shape[1]).topk(min(symbols, codes.shape[1])).indices.tolist()
    alone = codes.amax(1) == 1
    return {str(symbol): ((leading == symbol) & alone).nonzero().flatten()[:most].tolist() for symbol in common}


def communicates(record: Record, setting: Setting) -> bool:
    """Whether agents do better than guessing, on validation images."""
    return float(record.figures["last"]["validation"]) >= COLLAPSED / setting.candidates


def collapses(mean: float, error: float, guess: float, runs: int = RUNS) -> tuple[int, float, float]:
    """How many of a number of runs at chance explain a standard error, if all other runs were equal.

    Args:
        mean: of all runs, in percent.
        error: the standard error of the mean.
        guess: the success of guessing, as a share.
        runs: how many.

    Returns:
        Their number, the success of each of the others, and the standard error that follows.

    Example:
        >>> k, others, error = collapses(78.84, 8.07, 1 / 16)
        >>> k, round(others, 1), round(error, 2)
        (1, 86.9, 8.07)
    """
    chance = 100 * guess

    def following(k: int) -> tuple[float, float]:
        others = (runs * mean - k * chance) / (runs - k)
        return others, (others - chance) * math.sqrt(k * (runs - k) / (runs - 1)) / runs

    best = min(range(runs), key=lambda k: abs(following(k)[1] - error))
    return best, *following(best)


def arithmetic(guess: float) -> str:
    """What follows from the talk's figures, method by method."""
    told = []
    for method, ((mean, error), _) in PAPER.items():
        k, others, following = collapses(mean, error, guess)
        if k:
            told.append(
                f"{method}: k = {k}, others {others:.1f} %, standard error {following:.2f} (printed {error:.2f})"
            )
    return "; ".join(told) + "."


def _size(shown: Images) -> str:
    return f"{shown.side} × {shown.side}"


def _values(group: Sequence[Record], name: str, temperature: str = "last") -> list[float]:
    return [float(record.figures[temperature][name]) for record in group]


def _table(found: Mapping[str, Sequence[Record]], setting: Setting, size: str) -> Table:
    rows: list[list[Cell]] = []
    for method, group in found.items():
        success, nonzeros = PAPER[method]
        speaking = [record for record in group if communicates(record, setting)]
        rows.append(
            [
                method,
                len(group),
                with_interval(_values(group, "test"), 100),
                _told(*success),
                len(group) - len(speaking),
                with_interval(_values(speaking, "test"), 100),
                with_interval(_values(speaking, "test", "one"), 100),
                with_interval(_values(speaking, "nonzeros"), digits=2),
                _told(*nonzeros),
                with_interval(_values(speaking, "symbols"), digits=0),
            ]
        )
    return Table(
        [
            "",
            "runs",
            "success, %",
            "talk",
            "collapsed",
            "others, %",
            "at temperature 1",
            "non-zeros",
            "talk",
            "symbols",
        ],
        rows,
        caption=f"{size} pixels. Success in the test games at the last temperature, mean ± half the 95 % confidence "
        "interval over all runs; runs that do not communicate (less than twice the success of guessing, on validation "
        "images); of the others, success at the last temperature and at 1, non-zeros of a code, and how many symbols "
        "are the largest entry of some test code. A Gumbel-Softmax vector has no zeros: where fewer than all "
        "entries are counted, the others were too small for a 32-bit number.",
        paper="The talk has means and standard errors over 10 runs, on other images.",
    )


def _told(mean: float, error: float) -> str:
    return f"{mean:.2f} ± {error:.2f}" if error else f"{mean:g}"


def _found(found: Mapping[str, Sequence[Record]], setting: Setting, size: str) -> str:
    """What these runs show, in words."""
    speaking = {name: [each for each in group if communicates(each, setting)] for name, group in found.items()}
    counts = ", ".join(f"{name} {len(group) - len(speaking[name])} of {len(group)}" for name, group in found.items())
    means = {name: 100 * statistics.fmean(_values(group, "test")) for name, group in speaking.items() if group}
    listed = ", ".join(f"{name} {means[name]:.1f} %" for name in sorted(means, key=means.__getitem__, reverse=True))
    text = f"At {size} runs that did not communicate: {counts}."
    if listed:
        text += f" The others, from the most successful: {listed}."
    if sparse := speaking["Gaussian-Sparsemax"]:
        text += f" Codes of Gaussian-Sparsemax have {statistics.fmean(_values(sparse, 'nonzeros')):.2f} non-zeros"
        if hard := speaking["K-D Hard Concrete"]:
            text += f", those of the Hard Concrete {statistics.fmean(_values(hard, 'nonzeros')):.2f}"
        text += "."
    return text


def _claims(found: Mapping[str, Sequence[Record]], setting: Setting, size: str) -> list[Claim]:
    """What the talk's table says, beside these runs; only seeds with a run of every method count."""
    seeds = set.intersection(*({record.seed for record in group} for group in found.values()))
    groups = {name: [record for record in group if record.seed in seeds] for name, group in found.items()}
    if not seeds:
        return []
    sparse = "Gaussian-Sparsemax"
    values = {name: [100 * each for each in _values(group, "test")] for name, group in groups.items()}
    printed = {name: mean for name, ((mean, _), _) in PAPER.items()}
    other = max((name for name in groups if name != sparse), key=lambda name: statistics.fmean(values[name]))
    fallen = {name: sum(not communicates(each, setting) for each in group) for name, group in groups.items()}
    implied = {name: collapses(*success, 1 / setting.candidates)[0] for name, (success, _) in PAPER.items()}
    others = [name for name in groups if name != sparse]
    nonzeros = with_interval(_values(groups[sparse], "nonzeros"), digits=2)
    hard = with_interval(_values(groups["K-D Hard Concrete"], "nonzeros"), digits=2)
    rare = is_rarer(fallen[sparse], len(seeds), sum(fallen[name] for name in others), len(others) * len(seeds))
    return [
        Claim(
            f"Gaussian-Sparsemax communicates best, over all runs ({size})",
            f"{printed[sparse]} %, next Gumbel-Softmax {printed['Gumbel-Softmax']} %",
            f"{with_interval(values[sparse])} %, {other} {with_interval(values[other])} % ({len(seeds)} runs each)",
            is_higher([a - b for a, b in zip(values[sparse], values[other], strict=True)]),
        ),
        Claim(
            f"None of its runs fails to communicate, other methods' do ({size})",
            f"of 10 runs, as the standard errors say: {sparse} {implied[sparse]}, "
            + ", ".join(f"{name} {implied[name]}" for name in others),
            f"of {len(seeds)}: {sparse} {fallen[sparse]}, " + ", ".join(f"{name} {fallen[name]}" for name in others),
            judged("no" if fallen[sparse] else "yes" if rare else "not shown", len(seeds)),
        ),
        Claim(
            f"Its codes are sparse ({size})",
            "1.57 ± 0.02 of 256 entries, Hard Concrete 21.43 ± 17.56",
            f"{nonzeros}, Hard Concrete {hard} ({len(seeds)} runs each)",
            judged("yes" if statistics.fmean(_values(groups[sparse], "nonzeros")) < 3 else "no", len(seeds)),
        ),
    ]


def _scores(found: Mapping[str, Sequence[Record]], size: str) -> Figure:
    drawing, (success, nonzeros) = style.panels(2, 1, height=1.9)
    for axes, column, name in ((success, 0, "success, %"), (nonzeros, 1, "non-zeros of a code")):
        for place, (method, group) in enumerate(found.items()):
            values = _values(group, "nonzeros") if column else [100 * each for each in _values(group, "test")]
            mean, error = PAPER[method][column]
            axes.plot(values, [place - 0.16] * len(values), "o", ms=4, mew=0, alpha=0.45, color=style.PALETTE[0])
            if values:
                axes.plot(statistics.fmean(values), place - 0.16, "|", ms=12, mew=1.8, color=style.PALETTE[0])
            low = max(mean - error, 1.0)
            axes.plot([low, mean + error], [place + 0.2] * 2, lw=1, color=style.MUTED)
            axes.plot(mean, place + 0.2, "o", ms=4, mfc="none", color=style.MUTED)
        axes.set(xlabel=name, yticks=range(len(found)), yticklabels=list(found))
        axes.grid(axis="y", visible=False)
        axes.set_ylim(len(found) - 0.4, -0.6)
    nonzeros.set_xscale("log", base=2)
    nonzeros.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    success.plot([], [], "o", ms=4, mew=0, color=style.PALETTE[0], label="a run, and the mean of all")
    success.plot([], [], "o", ms=4, mfc="none", color=style.MUTED, label="the talk, ± standard error")
    drawing.legend(*success.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return Figure(
        drawing,
        caption=f"{size}: success in the test games, and how many entries of a code are not zero, for each run.",
        alt="Two panels with a row for each distribution of codes: points for the runs and their mean, and a hollow "
        "point with an error bar for the talk.",
        paper="The talk's table (mean and standard error, on other images) is drawn beside it.",
    )


def _curves(found: Mapping[str, Sequence[Record]], setting: Setting, size: str) -> Figure:
    """Success on validation images as agents learn: which runs begin to communicate, and when."""
    drawing, panels = style.panels(2, 2, height=1.7, sharey=True, sharex=True)
    for axes, (method, group) in zip(panels, found.items(), strict=True):
        for record in group:
            curve = record.figures["curve"]
            updates = [int(each) for each in curve]
            axes.plot(updates, [100 * each for each in curve.values()], lw=1, alpha=0.7, color=style.PALETTE[0])
        axes.axhline(100 / setting.candidates, lw=0.8, ls=":", color=style.MUTED)
        axes.set(title=method, xscale="log", ylim=(0, 100))
    drawing.supxlabel("updates", fontsize="medium")
    drawing.supylabel("success, %", fontsize="medium")
    return Figure(
        drawing,
        caption=f"{size}: success in 2,000 games on validation images after so many updates, one line for each run; "
        "dotted: guessing.",
        alt="Four panels, one for each distribution of codes, with a rising curve for each run.",
        paper="The talk shows no training.",
    )


def _faces(found: Mapping[str, Sequence[Record]]) -> Figure:
    """The sizes of the faces that mixed codes lie on."""
    mixed = ("K-D Hard Concrete", "Gaussian-Sparsemax")
    drawing, panels = style.panels(1, len(mixed), height=2.0, sharey=True)
    for axes, method in zip(panels, mixed, strict=True):
        counts = torch.tensor([record.figures["last"]["faces"] for record in found[method]]).sum(0)
        shares = 100 * counts / counts.sum().clamp_min(1)
        axes.bar(range(1, LARGEST + 1), shares.tolist() or [0] * LARGEST, color=style.PALETTE[0])
        names = [*(str(size) for size in range(1, LARGEST)), f"{LARGEST}+"]
        axes.set(title=method, xticks=range(1, LARGEST + 1), xticklabels=names, xlabel="non-zeros")
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("% of codes")
    return Figure(
        drawing,
        caption="Which faces the codes of test images lie on, over all runs: 1 is a vertex, a single symbol; 2 an "
        "edge between two.",
        alt="Two bar charts of the share of codes by their number of non-zero entries.",
        paper="The talk tells the means alone.",
    )


def _symbols(group: Sequence[Record], test: Tensor) -> Figure | None:
    """Images that one symbol stands for."""
    if not group:
        return None
    found: dict[str, list[int]] = group[0].figures["last"]["pictures"]
    drawing, panels = style.panels(len(found), 1, height=0.46)
    for axes, (symbol, members) in zip(panels, found.items(), strict=True):
        blank = torch.zeros(10, *test.shape[1:])
        blank[: len(members)] = test[members]
        axes.imshow(torch.cat(list(blank), 1).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(symbol, rotation=0, ha="right", va="center")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    return Figure(
        drawing,
        caption=f"Test images that a single symbol describes (a vertex of the simplex), for the {len(found)} most "
        "frequent symbols of the first Gaussian-Sparsemax agents.",
        alt="Rows of handwritten digits, each row with digits that look alike, and the number of the symbol beside it.",
    )
