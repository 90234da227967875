"""Emergent communication: a code that two agents make up, drawn from relaxed, discrete and mixed distributions."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fenchel_lab.data import images
from fenchel_lab.data.images import Images
from fenchel_lab.drawing import style
from fenchel_lab.models import agents
from fenchel_lab.models.agents import CHANNELS, Outcome, Setting
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

PAPER: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "Gumbel-Softmax": ((78.84, 8.07), (256, 0)),
    "Gumbel-Softmax ST": ((49.96, 9.51), (1, 0)),
    "K-D Hard Concrete": ((76.07, 7.76), (21.43, 17.56)),
    "Gaussian-Sparsemax": ((80.88, 0.50), (1.57, 0.02)),
}
"""The talk's table: success in percent, and non-zeros; each with its standard error over 10 runs."""

GAMES = 20260
"""Seeds the games that agents are tested with, the same for all."""


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        setting: of the agents, …
        grid: … and values to try in place of its own, with the first seed and on the validation images.
        halved: whether images are averaged to half their width and height.
        runs: how many seeds.
    """

    setting: Setting
    grid: Mapping[str, Sequence[float]]
    halved: bool = False
    runs: int = 10


FULL = Protocol(
    Setting(width=256, hidden=512, batch=64, epochs=500),
    {"rate": (1e-2, 3e-3, 1e-3), "anneal": (0.2, 1.0)},
)
SCALED = Protocol(Setting(width=64, hidden=128, rate=3e-3, batch=128, epochs=3), {}, halved=True)
TOY = Protocol(Setting(width=64, hidden=64, rate=1e-2, batch=125, epochs=25), {}, runs=2)

SUMMARY = """
One agent sees an image and describes it with a code of {symbols} numbers, the other sees the code and {candidates}
images and picks the one that it describes. Nobody tells them what the numbers should mean. A code is a random vector in
the simplex, drawn from a distribution with the sender's scores: of the open simplex (Gumbel-Softmax), where no entry is
zero; of its vertices alone, with a gradient that is not its own (straight-through, ST); or mixed, on faces of any size
(`HardConcrete`, `GaussianSparsemax`), sparse and with the right gradient. Guessing succeeds in
{guess:.2f} % of the games.
"""

OURS = """
The paper's images, features of ImageNet pictures, are not at hand: these are handwritten digits, which makes it another
game, with figures that need not agree. Ten kinds of digit among {candidates} candidates force a code to tell more than
the digit. What the talk does not tell follows the authors' code: the sender sees nothing but the image, σ = 1 for the
Gaussian-Sparsemax, a stretch of {stretch:g} for the Hard Concrete, and a temperature that falls from 1 to 0.5 in the
first {share:.0f} % of the training. The agents are dense networks with one hidden layer ({hidden} wide), the receiver's
score of a candidate is the product of its embedding and the code's ({width} wide), and the other candidates of a game
are drawn from its batch.
"""

SCALED_DOWN = """
MNIST, averaged to 14 × 14, 50,000 images to learn with and 10,000 to test with, and {runs} seeds, as in the paper.
Scaled down from its protocol: {epochs} epochs with batches of {batch} instead of 500 with batches of 64, a quarter of
its widths, and one rate for all methods, {rate:g}. That was settled by what it costs and by a few trial runs with one
other seed on the validation images: rates of 1e-3 (with twice the widths and five epochs), 3e-3, and 1e-2 (the first
two methods alone).
"""

WHOLE = """
MNIST, 28 × 28, 50,000 images to learn with and 10,000 to test with, for 500 epochs with batches of 64. For every method
the grid below is searched with the first seed on the validation images (which values the paper tried the talk does
not tell), and the best setting is trained with {runs} seeds.
"""

EMBEDDED = """
This page was made with scikit-learn's digits, 1,000 of 8 × 8 pixels to learn with, and {runs} seeds, which shows the
game and settles no order. On MNIST run the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Compared:
    """A method: what its agents did, one outcome a seed, and the setting that was chosen."""

    method: str
    outcomes: Sequence[Outcome]
    setting: Setting

    @property
    def success(self) -> list[float]:
        """In percent."""
        return [100 * outcome.success for outcome in self.outcomes]

    @property
    def nonzeros(self) -> list[float]:
        """Of a code, on average over codes."""
        return [outcome.nonzeros for outcome in self.outcomes]


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
    full="With `--full` epochs, batches and widths are the paper's. What differs: handwritten digits in place "
    "of features of ImageNet pictures, and a grid of rates and annealing of our own.",
)
def emergent_communication(context: Context) -> Result:
    """Train pairs of agents with every distribution of codes and let them play."""
    protocol, text = _protocol(context)
    shown = images.load(context.data, protocol.halved)
    seeds = range(context.seed, context.seed + protocol.runs)
    found: list[Compared] = []
    for number, method in enumerate(CHANNELS):
        first = number / len(CHANNELS)

        def progress(part: float, first: float = first, method: str = method) -> None:
            context.progress(0.98 * (first + part / len(CHANNELS)), method)

        found.append(compared(method, shown, protocol, seeds, progress))
    setting = protocol.setting
    values = vars(setting) | vars(protocol) | {"guess": 100 / setting.candidates, "share": 100 * setting.anneal}
    tables = [_table(found)]
    if protocol.grid:
        tables.append(_chosen(found, protocol))
    return Result(
        f"{SUMMARY}\n{OURS}\n{text}".format(**values) + f"\n\n{_found(found)}",
        figures=[_scores(found), _faces(found), _symbols(found[-1], shown.test)],
        tables=tables,
    )


def compared(
    method: str, shown: Images, protocol: Protocol, seeds: Sequence[int], progress: Callable[[float], None]
) -> Compared:
    """A method's outcomes: with the setting that is best on the validation images with the first seed."""
    combinations = itertools.product(*protocol.grid.values())
    chosen: Iterator[dict[str, Any]] = (dict(zip(protocol.grid, each, strict=True)) for each in combinations)
    settings = [replace(protocol.setting, **each) for each in chosen]
    trials = len(settings) if len(settings) > 1 else 0
    work, steps = trials + len(seeds), itertools.count()
    train, valid, test = (_standardized(part, shown.train) for part in (shown.train, shown.valid, shown.test))

    def pair(setting: Setting, seed: int) -> agents.Agents:
        step = next(steps)
        torch.manual_seed(seed)  # the same start and order of images for every method
        return agents.trained(train, setting, CHANNELS[method], lambda part: progress((step + part) / work))

    setting = settings[0]
    if trials:
        scores = [agents.played(pair(each, seeds[0]), valid, GAMES).success for each in settings]
        setting = settings[scores.index(max(scores))]
    return Compared(method, [agents.played(pair(setting, seed), test, GAMES) for seed in seeds], setting)


def _protocol(context: Context) -> tuple[Protocol, str]:
    if context.data is None:
        return TOY, EMBEDDED
    return (FULL, WHOLE) if context.full else (SCALED, SCALED_DOWN)


def _standardized(part: Tensor, like: Tensor) -> Tensor:
    return ((part - like.mean()) / like.std()).flatten(1)


def _error(values: Sequence[float]) -> float:
    """The standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _spread(mean: float, error: float, digits: int = 2) -> str:
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if error else f"{mean:g}"


def _table(found: Sequence[Compared]) -> Table:
    rows: list[list[Cell]] = []
    for each in found:
        success, nonzeros = PAPER[each.method]
        row = [_spread(statistics.fmean(each.success), _error(each.success)), _spread(*success)]
        row += [f"{statistics.stdev(each.success):.2f}"]
        row += [_spread(statistics.fmean(each.nonzeros), _error(each.nonzeros)), _spread(*nonzeros)]
        rows.append([each.method, *row, f"{statistics.fmean(o.used for o in each.outcomes):.1f}"])
    runs = len(found[0].outcomes)
    return Table(
        ["", "success, %", "paper", "deviation", "non-zeros", "paper", "symbols"],
        rows,
        caption=f"Success in the test games and non-zeros of a code: means ± standard errors over {runs} seeds, and "
        "the talk's over 10, on other images; the standard deviation of success over seeds; and how many symbols are "
        "the largest entry of some test code. A Gumbel-Softmax vector has no zeros: where fewer than all entries are "
        "counted, the others were too small for a 32-bit number.",
        paper="In the talk Gaussian-Sparsemax is best, with codes of 1.57 non-zeros and a sixteenth of the others' "
        "standard error; straight-through is last.",
    )


def _found(found: Sequence[Compared]) -> str:
    """What this run shows, in words."""
    order = sorted(found, key=lambda each: -statistics.fmean(each.success))
    listed = ", ".join(f"{each.method} ({statistics.fmean(each.success):.1f} %)" for each in order)
    steady = min(found, key=lambda each: statistics.stdev(each.success))
    sparse = min((each for each in found if each.method != "Gumbel-Softmax ST"), key=lambda each: sum(each.nonzeros))
    return (
        f"In this run, from the most successful to the least: {listed}. The least spread over seeds has "
        f"{steady.method} ({statistics.stdev(steady.success):.2f} points); of those with a gradient of their own the "
        f"sparsest codes has {sparse.method}, {statistics.fmean(sparse.nonzeros):.2f} non-zeros on average."
    )


def _chosen(found: Sequence[Compared], protocol: Protocol) -> Table:
    rows: list[list[Cell]] = [[each.method, *(getattr(each.setting, name) for name in protocol.grid)] for each in found]
    return Table(["", *protocol.grid], rows, caption="The settings that the validation games of the first seed chose.")


def _scores(found: Sequence[Compared]) -> Figure:
    drawing, (success, nonzeros) = style.panels(2, 1, height=1.9)
    for axes, column, name in ((success, 0, "success, %"), (nonzeros, 1, "non-zeros of a code")):
        for place, each in enumerate(found):
            values = (each.success, each.nonzeros)[column]
            mean, error = PAPER[each.method][column]
            axes.plot(values, [place - 0.16] * len(values), "o", ms=4, mew=0, alpha=0.45, color=style.PALETTE[0])
            axes.plot(statistics.fmean(values), place - 0.16, "|", ms=12, mew=1.8, color=style.PALETTE[0])
            low = max(mean - error, 1.0)
            axes.plot([low, mean + error], [place + 0.2] * 2, lw=1, color=style.MUTED)
            axes.plot(mean, place + 0.2, "o", ms=4, mfc="none", color=style.MUTED)
        axes.set(xlabel=name, yticks=range(len(found)), yticklabels=[each.method for each in found])
        axes.grid(axis="y", visible=False)
        axes.set_ylim(len(found) - 0.4, -0.6)
    nonzeros.set_xscale("log", base=2)
    nonzeros.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    success.plot([], [], "o", ms=4, mew=0, color=style.PALETTE[0], label="a seed, and their mean")
    success.plot([], [], "o", ms=4, mfc="none", color=style.MUTED, label="the talk")
    drawing.legend(*success.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return Figure(
        drawing,
        caption="Success in the test games, and how many entries of a code are not zero, for each seed.",
        alt="Two panels with a row for each distribution of codes: points for the seeds of this run and their mean, "
        "and a hollow point with an error bar for the talk.",
        paper="The talk's table (mean and standard error, on other images) is drawn beside it.",
    )


def _faces(found: Sequence[Compared]) -> Figure:
    """The sizes of the faces that mixed codes lie on."""
    mixed = [each for each in found if each.method in ("K-D Hard Concrete", "Gaussian-Sparsemax")]
    drawing, panels = style.panels(1, len(mixed), height=2.0, sharey=True)
    largest = 8
    for axes, each in zip(panels, mixed, strict=True):
        sizes = torch.cat([(outcome.codes > 0).sum(1) for outcome in each.outcomes]).clamp_max(largest)
        shares = 100 * torch.bincount(sizes, minlength=largest + 1)[1:] / len(sizes)
        axes.bar(range(1, largest + 1), shares.tolist(), color=style.PALETTE[0])
        names = [*(str(size) for size in range(1, largest)), f"{largest}+"]
        axes.set(title=each.method, xticks=range(1, largest + 1), xticklabels=names, xlabel="non-zeros")
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("% of codes")
    return Figure(
        drawing,
        caption="Which faces the codes of test images lie on, over all seeds: 1 is a vertex, a single symbol; 2 an "
        "edge between two.",
        alt="Two bar charts of the share of codes by their number of non-zero entries.",
        paper="The talk tells the means alone.",
    )


def _symbols(each: Compared, test: Tensor) -> Figure:
    """Images that one symbol stands for."""
    rows, columns = 6, 10
    codes = each.outcomes[0].codes
    leading = codes.argmax(1)
    common = torch.bincount(leading, minlength=codes.shape[1]).topk(min(rows, codes.shape[1])).indices
    drawing, panels = style.panels(rows, 1, height=0.46)
    for axes, symbol in zip(panels, common.tolist(), strict=True):
        members = ((leading == symbol) & (codes[:, symbol] == 1)).nonzero().squeeze(1)[:columns]
        blank = torch.zeros(columns, *test.shape[1:])
        blank[: len(members)] = test[members]
        axes.imshow(torch.cat(list(blank), 1).numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(str(symbol), rotation=0, ha="right", va="center")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    return Figure(
        drawing,
        caption=f"Test images that a single symbol describes (a vertex of the simplex), for the {rows} most frequent "
        f"symbols of the first seed's {each.method} agents.",
        alt="Rows of handwritten digits, each row with digits that look alike, and the number of the symbol beside it.",
    )
