"""Multiple-instance learning: bags that are positive for K of their instances, pooled with every Ω."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor
from torch.nn import functional as F

from fenchel import Gini, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.progress import Progress
from fenchel_lab.data import mil, mnist
from fenchel_lab.drawing import style
from fenchel_lab.models import bags
from fenchel_lab.models.bags import Bags, Classifier, Setting
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import is_higher, spread, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

TARGET = 9
"""Easily taken for a 7 or a 4."""

SIZES = {1: (10.0, 1.0), 2: (11.0, 2.0), 3: (12.0, 3.0), 5: (14.0, 5.0)}
"""Mean and deviation of the size of a bag, for each K."""

METHODS: list[tuple[str, Regularizer]] = [
    ("1-entmax (softmax)", Shannon()),
    ("1.5-entmax", Tsallis(1.5)),
    ("2-entmax (sparsemax)", Gini()),
    ("2-normmax", Norm(2.0)),
    ("5-normmax", Norm(5.0)),
    ("2-subsets", KSubsets(2)),
    ("3-subsets", KSubsets(3)),
    ("5-subsets", KSubsets(5)),
]

_PRINTED = """
98.4 0.2  94.6 0.5  91.1 0.5  89.0 0.3  66.4 2.0  87.1 1.6  92.6 0.6
97.6 0.8  96.0 0.9  90.4 1.1  92.4 1.4  66.3 2.0  87.3 1.5  92.4 1.0
97.9 0.2  96.7 0.5  92.9 0.9  91.6 1.0  66.1 0.6  87.7 1.4  91.8 0.6
97.9 0.3  96.6 0.6  93.9 0.7  92.4 0.7  66.1 2.5  86.4 0.8  92.4 0.7
98.2 0.5  97.2 0.3  95.8 0.4  93.2 0.5  66.4 2.3  85.5 0.6  93.0 0.7
97.9 0.3  97.7 0.3  95.1 0.5  92.6 1.1  66.8 2.7  85.3 0.5  93.2 0.7
98.0 0.6  96.1 1.0  96.5 0.5  92.2 1.2  67.4 2.0  86.1 0.8  92.6 1.7
98.2 0.4  96.2 1.4  95.1 1.1  95.1 1.5  67.0 2.0  86.3 0.8  91.2 1.0
"""
_COLUMNS = [*(f"K = {k}" for k in SIZES), "fox", "tiger", "elephant"]
PAPER: dict[tuple[str, str], tuple[float, float]] = {
    (column, name): (float(mean), float(deviation))
    for (name, _), line in zip(METHODS, _PRINTED.strip().splitlines(), strict=True)
    for column, mean, deviation in zip(_COLUMNS, line.split()[::2], line.split()[1::2], strict=True)
}
"""Table 2: mean and deviation, for a column and a method."""


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        digits: the setting for bags of digits, …
        digits_grid: … and the values to try in place of its own, on the first seed.
        corel: the setting for the bags of image segments, …
        corel_grid: … and the values to try.
        bags: for training, for validation, for the test.
        halved: whether images are averaged to half their width and height.
        runs: how many seeds.
        folds: of the cross-validation on image segments.
    """

    digits: Setting
    corel: Setting
    digits_grid: Mapping[str, Sequence[float]]
    corel_grid: Mapping[str, Sequence[float]]
    bags: tuple[int, int, int] = (2000, 500, 500)
    halved: bool = False
    runs: int = 5
    folds: int = 10


FULL = Protocol(
    digits=Setting("convolutional", width=500, batch=1, epochs=50),
    corel=Setting(heads=12, batch=1, epochs=50),
    digits_grid={
        "rate": (1e-5, 1e-6),
        "decay": (0.98, 0.96),
        "hidden": (16, 64),
        "heads": (8, 16),
        "beta": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
        "dropout": (0.0, 0.75),
    },
    corel_grid={
        "rate": (1e-3, 1e-5),
        "decay": (0.98, 0.96),
        "width": (32, 128),
        "hidden": (32, 64),
        "beta": (0.1, 1.0, 10.0),
        "dropout": (0.0, 0.75),
    },
)
SCALED = Protocol(
    digits=Setting(),
    corel=Setting(width=32, hidden=32, heads=12, decay=0.98, batch=16, epochs=50),
    digits_grid={"beta": (0.05, 0.25, 1.0)},
    corel_grid={"beta": (0.1, 1.0), "dropout": (0.0, 0.75)},
    halved=True,
)
TOY = Protocol(
    digits=Setting(width=32, hidden=8, heads=4, beta=0.05, rate=1e-2, epochs=10),
    corel=Setting(),
    digits_grid={},
    corel_grid={},
    bags=(400, 100, 200),
    runs=1,
)
TOY_SIZES = {3: SIZES[3]}
DRAWN = 3
"""Targets of the bag that is drawn."""

SUMMARY = """
A bag of instances is positive if K of them or more are of a kind, and nobody says which. Each instance is embedded, a
`HopfieldPooling` layer pools the embeddings with a learned query in every head, and a linear layer scores what comes
out. Only `omega` differs from row to row: `Shannon()` averages all instances, sparse Ω average a few, and
`KSubsets(k)` adds up k of them at once, so that with k = K a pooled vector can be the sum of exactly the instances that
make a bag positive.
"""

CHOSEN = """
For every method and every column the grid is searched on the first seed, by the area under the ROC curve of the
validation bags, and the best setting is trained with {runs} seeds; test bags decide nothing.
"""

SCALED_DOWN = """
Scaled down from the paper's protocol to two cores: MNIST images averaged to 14 × 14, and an embedding of two dense
layers (128 and 64 wide) instead of two convolutions and a layer of 500; batches of {digits.batch} bags of digits and
{corel.batch} of segments, at a rate of {digits.rate:g}, instead of single bags at 1e-3 to 1e-6; at most {digits.epochs}
epochs on digits and {corel.epochs} on segments, with the paper's patience of {digits.patience}. The grid has β of
{digits_grid[beta]} for digits ({digits.heads} heads {digits.hidden} wide, no dropout) and, for segments, β of
{corel_grid[beta]} and a dropout of {corel_grid[dropout]} (embedding {corel.width} wide, {corel.heads} heads
{corel.hidden} wide). The bags are the paper's: {bags[0]:,} for training, {bags[1]} for validation and {bags[2]} for the
test, of the sizes of its table 4; {folds}-fold cross-validation with an inner validation fold on the three sets of
segments. As in the authors' code the area under the ROC curve of the validation bags chooses the epoch.
"""

WHOLE = """
Network, bags, epochs and grid are those of appendix F.
"""

EMBEDDED = """
This page was made with scikit-learn's digits, 8 × 8 pixels, {bags[0]} training bags and one seed, which shows the idea
and settles no order. On MNIST and on Fox, Tiger and Elephant run the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Split:
    """Bags to train, to choose the epoch and the setting, and to test with."""

    train: Bags
    valid: Bags
    test: Bags


@dataclass(frozen=True)
class Task:
    """A column of the table.

    Args:
        name: its heading.
        splits: the splits of a seed, over which a score is averaged.
        parts: how many these are.
        measure: the score on test bags.
        settings: the settings to choose from, by what tells them from each other.
    """

    name: str
    splits: Callable[[int], Iterable[Split]]
    parts: int
    measure: Callable[[Classifier, Bags], float]
    settings: Mapping[str, Setting]


@dataclass(frozen=True)
class Entry:
    """A cell of the table: a method on a task, and its records with the chosen setting, one per seed."""

    task: Task
    method: str
    records: Sequence[Record]

    @property
    def scores(self) -> dict[int, float]:
        """The test score of every seed, in percent."""
        return {record.seed: 100 * float(record.figures["test"]) for record in self.records}

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.scores.values())


CODE = """
import torch, fenchel
from fenchel.hopfield import HopfieldPooling

pool = HopfieldPooling(32, omega=fenchel.KSubsets(2))  # adds up two instances of each bag
bags = torch.randn(4, 12, 32)
absent = torch.arange(12) >= torch.tensor([[12], [3], [7], [1]])
print(pool(bags, stored_pattern_padding_mask=absent).shape)
print(pool.get_association_matrix(bags, absent)[1, 0, 0, :4])  # a bag of three instances
"""


@study(
    "Multiple instances",
    source="Santos, Niculae, McNamee & Martins (2024), Sparse and Structured Hopfield Networks, table 2",
    order=42,
    theme="Memories",
    code=CODE,
    tour=False,
    data=["mnist", "mil"],
    records=True,
    full="With `--full` network, bags, epochs and grid search are the paper's (appendix F). What differs: the "
    "epoch is chosen by the area under the ROC curve of the validation bags, as in the authors' code; for "
    "the sets of segments the paper searched by hand, here the whole grid of its table 6 is tried.",
)
def multiple_instances(context: Context) -> Result:
    """Train a pooling classifier with every Ω on every column of the table."""
    protocol, text = _setting(context)
    tasks, shown = _tasks(context, protocol)
    entries, missing = _entries(context, tasks, protocol)
    beside = context.data is not None  # the paper's figures are of MNIST, not of the embedded digits
    values = asdict(protocol) | {"digits": protocol.digits, "corel": protocol.corel}
    values |= {name: _listed(values[name]) for name in ("digits_grid", "corel_grid")}
    told = [SUMMARY, CHOSEN if beside else "", text]
    told = [part.format(**values) for part in told]
    told += [_leaders(entries, beside)] if entries else []
    told += [f"{missing} runs are not finished; the same command runs them."] if missing else []
    groups = _by_task(entries)
    digits = {name: group for name, group in groups.items() if name.startswith("K")}
    corel = {name: group for name, group in groups.items() if name not in digits}
    figures = [_scores(groups, beside)] if groups else []
    if drawn := _choices(entries, shown):
        figures.append(drawn)
    tables = [_table(digits, "Accuracy on the test bags of digits", beside)] if digits else []
    if corel:
        tables.append(_table(corel, "Area under the ROC curve on the test bags of image segments", beside))
    if beside and entries:
        tables.append(_settings(entries))
    claims = [_claim(name, group) for name, group in groups.items()] if beside else []
    return Result("\n\n".join(told), figures=figures, tables=tables, claims=claims)


def _entries(context: Context, tasks: Sequence[Task], protocol: Protocol) -> tuple[list[Entry], int]:
    """The cells of the table that have a chosen setting, and how many runs are missing.

    Column by column every setting is run with the first seed, then what the validation bags chose, with the others.
    Columns in which the paper's k-subsets lead come first.
    """
    first, *others = range(context.seed, context.seed + protocol.runs)
    entries: list[Entry] = []
    missing = 0
    for done, task in enumerate(
        sorted(tasks, key=lambda task: not _leader_of_the_paper(task.name).endswith("subsets"))
    ):
        searched = [job(task, method, name, first) for method in METHODS for name in task.settings]
        found = context.records.collect(searched, _portion(context, 2 * done, 2 * len(tasks)))
        best: dict[str, Record] = {}
        for name, _ in METHODS:
            tried = [record for record in found if record.cell["method"] == name]
            if len(tried) == len(task.settings):
                best[name] = max(tried, key=lambda record: float(record.figures["validation"]))
        chosen = [(method, best[method[0]].cell["setting"]) for method in METHODS if method[0] in best]
        wanted = [job(task, method, setting, seed) for seed in others for method, setting in chosen]
        more = context.records.collect(wanted, _portion(context, 2 * done + 1, 2 * len(tasks)))
        for name, record in best.items():
            entries.append(Entry(task, name, [record, *(each for each in more if each.cell == record.cell)]))
        missing += len(searched) + len(METHODS) * len(others) - len(found) - len(more)
    names = [task.name for task in tasks]
    return sorted(entries, key=lambda entry: names.index(entry.task.name)), missing


def _portion(context: Context, done: int, parts: int) -> Progress:
    """Progress of one of so many parts."""
    return lambda part, note="": context.progress(0.98 * (done + part) / parts, note)


def job(task: Task, method: tuple[str, Regularizer], setting: str, seed: int) -> Job:
    """One run of a method on a task."""
    name, omega = method
    cell = {"column": task.name, "method": name, "setting": setting}
    settings = asdict(task.settings[setting]) | {"folds": task.parts}
    return Job(cell, seed, settings, partial(compared, task, omega, task.settings[setting], seed))


def compared(
    task: Task, omega: Regularizer, setting: Setting, seed: int, progress: Callable[[float], None]
) -> dict[str, Any]:
    """Scores on validation and test bags, and what was taken of one positive test bag."""
    valid, test = [], []
    example: dict[str, Any] | None = None
    for number, split in enumerate(task.splits(seed)):
        torch.manual_seed(1000 * seed + number)  # the same start and order of bags for every method
        tell = partial(_tell, progress, number, task.parts)
        classifier, area = bags.trained(split.train, split.valid, omega, setting, tell)
        valid.append(area)
        test.append(task.measure(classifier, split.test))
        if task.name == f"K = {DRAWN}":
            example = _example(classifier, split.test)
    return {"validation": statistics.fmean(valid), "test": statistics.fmean(test), "example": example}


def _tell(progress: Callable[[float], None], done: int, parts: int, part: float) -> None:
    progress((done + part) / parts)


def _example(classifier: Classifier, test: Bags) -> dict[str, Any] | None:
    """A positive bag with exactly so many targets, which come first, and what its instances weigh, if there is one."""
    assert test.targets is not None
    sizes = (test.members != bags.NONE).sum(1)
    fits = test.labels & (test.targets == DRAWN) & (sizes >= 8) & (sizes <= 14)
    if not fits.any():
        return None
    bag = test[fits.nonzero()[:1, 0]]
    with torch.no_grad():
        weights = classifier.weights(bag)[0].mean(0)
    return {"members": bag.members[0].tolist(), "weights": [round(weight, 4) for weight in weights.tolist()]}


def _setting(context: Context) -> tuple[Protocol, str]:
    if context.data is None:
        return TOY, EMBEDDED
    return (FULL, WHOLE) if context.full else (SCALED, SCALED_DOWN)


def _tasks(context: Context, protocol: Protocol) -> tuple[list[Task], Tensor]:
    """The columns of the table, and the images to test with."""
    settings = _grid(protocol.digits, protocol.digits_grid)
    if context.data is None:
        images = _toy_images()
        sizes = TOY_SIZES
    else:
        images = _images(context.data, protocol.halved)
        sizes = SIZES
    tasks = [
        Task(f"K = {least}", partial(_digits, images, least, size, protocol.bags), 1, bags.accuracy, settings)
        for least, size in sizes.items()
    ]
    if context.data is not None:
        settings = _grid(protocol.corel, protocol.corel_grid)
        for name in ("fox", "tiger", "elephant"):
            loaded = mil.load(name, context.data)
            whole = bags.of_lists(loaded.instances, torch.from_numpy(loaded.labels))
            splits = partial(_folds, whole, protocol.folds)
            tasks.append(Task(name, splits, protocol.folds, bags.area_under_curve, settings))
    return tasks, images[2][0]


def _grid(setting: Setting, values: Mapping[str, Sequence[float]]) -> dict[str, Setting]:
    """The setting with every combination of other values, by these values."""
    combinations = itertools.product(*values.values())
    chosen: Iterator[dict[str, Any]] = (dict(zip(values, each, strict=True)) for each in combinations)
    return {
        ", ".join(f"{name} {value:g}" for name, value in each.items()) or "given": replace(setting, **each)
        for each in chosen
    }


def _listed(grid: Mapping[str, Sequence[float]]) -> dict[str, str]:
    return {name: " or ".join(f"{value:g}" for value in values) for name, values in grid.items()}


Labelled = tuple[Tensor, Tensor]


def _images(folder: Path, halved: bool) -> tuple[Labelled, Labelled, Labelled]:
    """Images and digits to train, to validate and to test with; the validation's are the last 10,000 of MNIST's."""
    parts = []
    for part in ("train", "test"):
        loaded = mnist.load(part, folder)
        images = torch.from_numpy(loaded.images.copy()).float() / 255
        images = F.avg_pool2d(images, 2) if halved else images
        parts.append(((images - 0.1307) / 0.3081, torch.from_numpy(loaded.labels.astype(np.int64))))
    (images, digits), test = parts
    kept = len(images) - len(images) // 6
    return (images[:kept], digits[:kept]), (images[kept:], digits[kept:]), test


def _toy_images() -> tuple[Labelled, Labelled, Labelled]:
    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    images = torch.from_numpy(loaded.images[order]).float() / 8 - 1
    digits = torch.from_numpy(loaded.target[order].astype(np.int64))
    parts = [(images[rows], digits[rows]) for rows in (slice(1000), slice(1000, 1300), slice(1300, None))]
    return parts[0], parts[1], parts[2]


def _digits(
    images: Sequence[Labelled], least: int, size: tuple[float, float], counts: Sequence[int], seed: int
) -> list[Split]:
    random = np.random.default_rng(seed)
    made = (
        bags.of_digits(*part, TARGET, least, size, count, random) for part, count in zip(images, counts, strict=True)
    )
    return [Split(*made)]


def _folds(whole: Bags, folds: int, seed: int) -> Iterator[Split]:
    """Each fold in turn for the test; of the others, one to choose the epoch with."""
    labels = whole.labels.numpy()
    for rest, test in StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels, labels):
        inner = StratifiedKFold(folds - 1, shuffle=True, random_state=seed).split(rest, labels[rest])
        train, valid = next(iter(inner))
        parts = [whole[torch.from_numpy(rows)] for rows in (rest[train], rest[valid], test)]
        yield Split(*(bags.standardized(part, parts[0]) for part in parts))


def _leaders(entries: Sequence[Entry], beside: bool) -> str:
    """Who has the highest mean, in words; ``beside`` the paper's leaders or alone."""
    best = [max(group, key=lambda entry: entry.mean) for group in _by_task(entries).values()]
    listed = "; ".join(f"{entry.task.name}: {entry.method} ({entry.mean:.1f})" for entry in best)
    papers = {entry.task.name: _leader_of_the_paper(entry.task.name) for entry in best}
    absent = [f"{name}: {papers[name]}" for name, each in zip(papers, best, strict=True) if papers[name] != each.method]
    missing = f" Leads of the paper that are not here: {'; '.join(absent)}." if absent and beside else ""
    return f"The highest means: {listed}.{missing}"


def _leader_of_the_paper(task: str) -> str:
    return max((name for name, _ in METHODS), key=lambda name: PAPER[task, name][0])


def _by_task(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.task.name, []).append(entry)
    return found


def _claim(task: str, group: Sequence[Entry]) -> Claim:
    """The lead of a column, on the bags of the same seeds: over the best of the other methods."""
    leader = _leader_of_the_paper(task)
    printed = sorted(((PAPER[task, name], name) for name, _ in METHODS), reverse=True)
    ours = next((entry for entry in group if entry.method == leader), None)
    others = [entry for entry in group if entry.method != leader]
    deviations = f"{spread(*printed[0][0])}, next {printed[1][1]} {spread(*printed[1][0])} (deviations)"
    if ours is None or not others:
        return Claim(f"{leader} leads for {task}", deviations, "not run", "too few runs")
    other = max(others, key=lambda entry: entry.mean)
    seeds = sorted(ours.scores.keys() & other.scores.keys())
    told = f"{with_interval(list(ours.scores.values()))}, best other {other.method} "
    told += f"{with_interval(list(other.scores.values()))} ({len(seeds)} runs)"
    holds = is_higher([ours.scores[seed] - other.scores[seed] for seed in seeds])
    return Claim(f"{leader} leads for {task}", deviations, told, holds)


def _table(groups: Mapping[str, Sequence[Entry]], what: str, beside: bool) -> Table:
    rows: list[list[Cell]] = []
    for name, _ in METHODS:
        row: list[Cell] = [name]
        for task, group in groups.items():
            scores = [score for entry in group if entry.method == name for score in entry.scores.values()]
            row += [with_interval(scores), len(scores), *([spread(*PAPER[task, name])] if beside else [])]
        rows.append(row)
    headings = ("", "runs", "paper") if beside else ("", "runs")
    return Table(
        ["", *(f"{task} {each}".strip() for task in groups for each in headings)],
        rows,
        caption=f"{what}, in percent: mean ± half the 95 % interval over seeds"
        + (", and the paper's mean ± deviation over 5." if beside else "."),
        paper="The paper's k-subsets lead for K > 1 where k = K; on the three sets of segments all methods are within "
        "a deviation or two of each other."
        if beside
        else "",
    )


def _settings(entries: Sequence[Entry]) -> Table:
    groups = _by_task(entries)
    chosen = {(entry.task.name, entry.method): entry.records[0].cell["setting"] for entry in entries}
    rows = [[name, *(chosen.get((task, name), "–") for task in groups)] for name, _ in METHODS]
    return Table(["", *groups], rows, caption="The settings that the first seed's validation bags chose.")


def _scores(groups: Mapping[str, Sequence[Entry]], beside: bool) -> Figure:
    drawing, panels = style.panels(-(-len(groups) // 2), min(len(groups), 2), height=2.0, sharey=True)
    names = [name for name, _ in METHODS]
    for axes, (task, group) in zip(panels, groups.items(), strict=False):
        if beside:
            axes.errorbar(
                [PAPER[task, name][0] for name in names],
                [place + 0.18 for place in range(len(names))],
                xerr=[PAPER[task, name][1] for name in names],
                fmt="o",
                ms=4,
                mfc="none",
                lw=1,
                color=style.MUTED,
                label="the paper, ± deviation",
            )
        for number, entry in enumerate(group):
            place, values = names.index(entry.method) - 0.18, list(entry.scores.values())
            label = "a run, and the mean" if number == 0 else None
            axes.plot(values, [place] * len(values), "o", ms=3.5, mew=0, alpha=0.5, color=style.PALETTE[0], label=label)
            axes.plot(entry.mean, place, "|", ms=9, mew=1.6, color=style.PALETTE[0])
        axes.set(title=task, yticks=range(len(names)), yticklabels=names)
        axes.grid(axis="y", visible=False)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    panels[0].invert_yaxis()
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return Figure(
        drawing,
        caption="Accuracy (bags of digits) or area under the ROC curve (segments) of every run, in percent.",
        alt="For each column of the table a panel with a row for each method: filled points for the runs with a bar at "
        "their mean" + (", and a hollow one for the paper with an error bar." if beside else "."),
        paper="The paper's table 2, drawn beside it." if beside else "",
    )


def _choices(entries: Sequence[Entry], images: Tensor) -> Figure | None:
    """What was taken of one positive bag by softmax, by sparsemax and by the right number of subsets."""
    names = ("1-entmax (softmax)", "2-entmax (sparsemax)", f"{DRAWN}-subsets")
    group = {
        entry.method: entry.records[0].figures["example"] for entry in entries if entry.task.name == f"K = {DRAWN}"
    }
    if not all(group.get(name) for name in names):
        return None
    drawing, panels = style.panels(len(names) + 1, 1, height=0.95)
    members = group[names[0]]["members"]
    size = len(members)
    panels[0].imshow(
        torch.cat(list(images[members]), 1).numpy(), cmap="gray", extent=(-0.5, size - 0.5, 0, 1), aspect="auto"
    )
    panels[0].set_axis_off()
    colours = [style.PALETTE[1] if number < DRAWN else style.MUTED for number in range(size)]
    for axes, name in zip(panels[1:], names, strict=True):
        taken = group[name]["weights"]
        axes.bar(range(size), taken, color=colours)
        axes.set(title=name, xlim=(-0.5, size - 0.5), xticks=[], ylim=(0, max(1.0, *taken)))
        axes.grid(axis="x", visible=False)
    return Figure(
        drawing,
        caption=f"A positive test bag for K = {DRAWN}, and what its instances weigh in the pooled vector, on average "
        f"over heads. The first {DRAWN} show the {TARGET}.",
        alt=f"Handwritten digits in a row, the first {DRAWN} of them nines, and under them three rows of bars.",
    )
