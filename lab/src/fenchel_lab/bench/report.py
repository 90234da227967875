"""What a benchmark returns: one table per workload, the goals judged, as text for a terminal, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fenchel_lab.bench.machine import Machine
from fenchel_lab.bench.measure import Measured, Timing
from fenchel_lab.bench.run import Outcome, Verdict
from fenchel_lab.bench.targets import NO_WIDE, WIDE
from fenchel_lab.bench.workload import Goal, Workload
from fenchel_lab.outputs import Output

BEGIN, SHORT, END = "<!-- bench -->", "<!-- bench: five rows -->", "<!-- /bench -->"
"""Around the part of a page that ``Report.fill`` writes: every figure, or those that a front page shows."""

FRONT = {
    ("maps", "entmax 1.5", "torch.softmax", "geometric mean"): "`entmax`, α = 1.5, rows of 64 to 128,000 scores, mean",
    ("loss", "entmax_loss 1.5", "cross_entropy", "128 × 32000, σ = 4"): "`entmax_loss`, 128 × 32,000 classes",
    (
        "linear",
        "linear_entmax_loss 1.5",
        "linear + cross_entropy",
        "peaked",
    ): "`linear_entmax_loss`, 512 × 32,000 words",
    ("attention", "attention 1.5", "torch SDPA", "4 × 4096 × 64"): "`attention`, 4 heads × 4096 × 64",
    ("tagging", "nn.CRF", "pytorch-crf", "largest"): "`nn.CRF`, 32 sentences × 50 words × 21 tags",
}
"""Rows of a front page: a workload, one of its goals (of, against, and what its subject says), and words for it."""

FILES = ("bench.json", "bench.md")
MARKS = {True: "✓", False: "✗", None: "–"}


@dataclass(frozen=True)
class Sheet:
    """A table of text, and lines below it; its first ``names`` columns are words, the others figures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    names: int = 1

    def markdown(self) -> str:
        """As Markdown: names to the left, figures to the right.

        Example:
            >>> print(Sheet("Title", ["", "time"], [["one", "1 ms"]], ["✓ fine"]).markdown())
            ### Title
            <BLANKLINE>
            | | time |
            | --- | ---: |
            | one | 1 ms |
            <BLANKLINE>
            - ✓ fine
        """
        sides = ["---" if number < self.names else "---:" for number in range(len(self.header))]
        lines = [_line(self.header), _line(sides), *map(_line, self.rows)]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join([f"### {self.title}", "", *lines] if self.title else lines)


def sheet(outcome: Outcome) -> Sheet:
    """A workload's table: the first contestant's time, the ratios of the others to it, and memory."""
    names = [each.name for each in outcome.workload.present]
    first, *others = names
    absolute = outcome.workload.stopwatch
    weighed = [name for name in names if any(name in each.memory for each in outcome.measured)]
    counted = names if any(each.rows for each in outcome.workload.cases) else []
    rows = [
        [
            each.case,
            show_seconds(each.timings[first].median),
            *(
                show_seconds(each.timings[name].median) if absolute else show_ratio(each.ratio(name, first))
                for name in others
            ),
            *(show_bytes(each.memory[name]) if name in each.memory else "" for name in weighed),
            *(f"{outcome.workload.case(each.case).rows / each.timings[name].median:.3g}" for name in counted),
        ]
        for each in outcome.measured
    ]
    if any(goal.statistic == "geometric mean" for goal in outcome.workload.goals):
        means = [statistics.geometric_mean([each.ratio(name, first) for each in outcome.measured]) for name in others]
        rows.append(["geometric mean", "", *map(show_ratio, means), *[""] * len(weighed + counted)])
    return Sheet(
        title=f"{outcome.workload.name}: {outcome.workload.title}" + (f"; {outcome.target}" if outcome.target else ""),
        header=["", first, *others, *(f"memory: {n}" for n in weighed), *(f"rows/s: {n}" for n in counted)],
        rows=rows,
        notes=[f"{MARKS[each.holds]} {describe(each)}" for each in outcome.verdicts],
    )


def state(goal: Goal) -> str:
    """A goal in a line.

    Example:
        >>> state(Goal("sparsemax", 1 / 30, "entmax.sparsemax"))
        'sparsemax, geometric mean: ≥ 30 × as fast as entmax.sparsemax'
    """
    return f"{subject(goal)}: {wants(goal)}{_against(goal)}"


def describe(verdict: Verdict) -> str:
    """A goal and what became of it, in a line.

    Example:
        >>> describe(Verdict(Goal("sparsemax", 1.0, "torch.softmax"), 0.834))
        'sparsemax, geometric mean: 0.83 × torch.softmax (goal: ≤ 1 ×)'
    """
    goal = verdict.goal
    if verdict.value is None:
        return f"{state(goal)} (not measured)"
    return f"{subject(goal)}: {reached(verdict)}{_against(goal)} (goal: {wants(goal)})"


def subject(goal: Goal) -> str:
    """Of what a goal speaks."""
    kind = {"memory": "peak memory", "seconds": "largest"}.get(goal.statistic, goal.statistic)
    where = "; ".join(goal.cases)
    return f"{goal.of}, {where}, {kind}" if where and goal.statistic == "memory" else f"{goal.of}, {where or kind}"


def wants(goal: Goal) -> str:
    """What a goal asks for."""
    if goal.statistic == "memory":
        return f"≤ {show_bytes(goal.at_most)}"
    if goal.statistic == "seconds":
        return f"≤ {goal.at_most:g} s"
    return f"≥ {1 / goal.at_most:.4g} × as fast" if _is_speedup(goal) else f"≤ {goal.at_most:g} ×"


def reached(verdict: Verdict) -> str:
    """What was measured, in the terms of the goal."""
    if verdict.value is None:
        return "not measured"
    if verdict.goal.statistic == "memory":
        return show_bytes(verdict.value)
    if verdict.goal.statistic == "seconds":
        return show_seconds(verdict.value)
    return f"{1 / verdict.value:.3g} × as fast" if _is_speedup(verdict.goal) else show_ratio(verdict.value)


@dataclass(frozen=True)
class Report:
    """All outcomes of a run, and where they come from; ``since`` is the day of the oldest one that was kept."""

    machine: Machine
    seconds: float
    outcomes: Sequence[Outcome]
    since: str = ""

    def beside(self, earlier: Report, order: Sequence[Workload]) -> Report:
        """This report with those outcomes of an earlier one that it does not have, in the order of the workloads."""
        own = {(each.workload.name, each.target) for each in self.outcomes}
        kept = [each for each in earlier.outcomes if (each.workload.name, each.target) not in own]
        if not kept:
            return self
        places = {workload.name: place for place, workload in enumerate(order)}
        outcomes = sorted([*kept, *self.outcomes], key=lambda each: (places[each.workload.name], each.target))
        return replace(self, outcomes=outcomes, since=earlier.since or earlier.machine.date[:10])

    @property
    def summary(self) -> Sheet:
        """One line per goal, one column per target."""
        rows: dict[tuple[str, Goal], dict[str, Verdict]] = {}
        for each in self.outcomes:
            for verdict in each.verdicts:
                rows.setdefault((each.workload.name, verdict.goal), {})[each.target] = verdict
        return Sheet(
            "",
            ["", "against", "goal", *(target or "measured" for target in self.targets)],
            [
                [
                    f"{name}: {subject(goal)}",
                    goal.against or "–",
                    wants(goal),
                    *(
                        f"{reached(verdicts[target])} {MARKS[verdicts[target].holds]}" if target in verdicts else ""
                        for target in self.targets
                    ),
                ]
                for (name, goal), verdicts in rows.items()
            ],
            names=2,
        )

    @property
    def figures(self) -> Sheet:
        """The summary without goals: what was measured, one column per target."""
        summary = self.summary
        rows = [
            [*row[:2], *(cell.rstrip("".join(MARKS.values())).rstrip() for cell in row[3:])] for row in summary.rows
        ]
        return Sheet("", [*summary.header[:2], *summary.header[3:]], rows, names=2)

    @property
    def front(self) -> Sheet:
        """The five rows of a front page. All five must have been measured."""
        rows = []
        for (workload, of, against, words), shown in FRONT.items():
            found = [
                row
                for row in self.figures.rows
                if row[0].startswith(f"{workload}: {of},") and words in row[0] and row[1] == against
            ]
            if not found:
                raise ValueError(f"the five rows need the workload {workload}, which was not measured")
            rows.append([shown, f"`{against}`" if "." in against else against, *found[0][2:]])
        return Sheet("", self.figures.header, rows, names=2)

    def fill(self, page: str) -> str:
        """A page with its figures written anew: the five rows or all, as its marks ask for."""
        if SHORT not in page:
            return insert(page, f"{self.figures.markdown()}\n\n{self.source}")
        return insert(page, f"{self.front.markdown()}\n\n{self.source}", SHORT)

    @property
    def targets(self) -> list[str]:
        """The instruction sets that it was measured with, in their order."""
        return list(dict.fromkeys(each.target for each in self.outcomes))

    @property
    def source(self) -> str:
        """How and where it was measured."""
        off = " Kernels are off (FENCHEL_KERNELS=off)." if self.machine.kernels == "off" else ""
        wide = "" if self.machine.target.startswith(WIDE) else f" {NO_WIDE}"
        later = f"{self.since} to " if self.since and self.since != self.machine.date[:10] else ""
        where = f"{str(self.machine)[:-10]}{later}{self.machine.date[:10]}"
        return f"Ratios of medians, contestants taking turns in one process, float32. {where}.{off}{wide}"

    @property
    def missing(self) -> list[str]:
        """What to say of contestants that could not be run, each line once."""
        return list(dict.fromkeys(line for each in self.outcomes for line in each.missing))

    def digest(self) -> str:
        """The machine and one line per goal, as Markdown."""
        return "\n\n".join([self.summary.markdown(), self.source, *self.missing]) + "\n"

    def markdown(self) -> str:
        """The digest and every table, as Markdown."""
        return "\n\n".join([self.digest().strip(), *(sheet(each).markdown() for each in self.measured)]) + "\n"

    @property
    def measured(self) -> list[Outcome]:
        """The workloads that had two contestants at least."""
        return [each for each in self.outcomes if each.measured]

    def record(self) -> dict[str, Any]:
        """Everything that was measured, for JSON: seconds, bytes and ratios."""
        return {
            "machine": dataclasses.asdict(self.machine),
            "since": self.since,
            "seconds_each": self.seconds,
            "workloads": [_record(each) for each in self.outcomes],
        }

    def save(self, folder: Path) -> None:
        """Write ``bench.json`` and ``bench.md`` into a folder, made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps(self.record(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        for name, text in zip(FILES, (record, self.markdown()), strict=True):
            (folder / name).write_text(text, encoding="utf-8")


def written(folder: Path) -> Sequence[str]:
    """The files of an earlier benchmark in a folder, if its record is there."""
    try:
        record = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ()
    return FILES if isinstance(record, dict) and {"machine", "seconds_each", "workloads"} <= record.keys() else ()


def read(folder: Path, workloads: Sequence[Workload]) -> Report:
    """The report that ``save`` wrote into a folder, but for workloads that have changed.

    Raises:
        ValueError: if there is none.
    """
    if not written(folder):
        raise ValueError(f"there is no earlier benchmark in {folder} whose figures could be kept")
    record = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
    known = {each.name: each for each in workloads}
    outcomes = []
    for each in record["workloads"]:
        workload = known.get(each["name"])
        if workload is None:
            continue
        measured = [_measured(case) for case in each["cases"]]
        rivals = {contestant.name for contestant in workload.present}
        labels = [case.label for case in workload.cases]
        if [case.case for case in measured] == labels and all(case.timings.keys() == rivals for case in measured):
            outcomes.append(Outcome(workload, measured, each["target"]))
    return Report(Machine(**record["machine"]), record["seconds_each"], outcomes, record.get("since", ""))


def _measured(record: dict[str, Any]) -> Measured:
    contestants: dict[str, dict[str, Any]] = record["contestants"]
    keys = [each.name for each in dataclasses.fields(Timing)]
    timings = {name: Timing(**{key: of[key] for key in keys}) for name, of in contestants.items()}
    return Measured(record["case"], timings, {n: of["memory"] for n, of in contestants.items() if of["memory"]})


OUTPUT = Output("fenchel bench", FILES, written)
"""What ``fenchel bench`` writes."""


def insert(page: str, text: str, mark: str = BEGIN) -> str:
    """A page with the part between its two marks replaced.

    Example:
        >>> insert("before <!-- bench --> old <!-- /bench --> after", "new")
        'before <!-- bench -->\\nnew\\n<!-- /bench --> after'
    """
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must hold the marks {mark} and {END}, in this order")
    return f"{before}{mark}\n{text.strip()}\n{END}{after}"


def show_seconds(seconds: float) -> str:
    """A time with three digits and the unit that suits it.

    Example:
        >>> show_seconds(3.2e-6), show_seconds(0.01234), show_seconds(2.5)
        ('3.20 µs', '12.3 ms', '2.50 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def show_ratio(ratio: float) -> str:
    """A ratio with three digits, or two decimals.

    Example:
        >>> show_ratio(0.8342), show_ratio(12.345), show_ratio(1234.5)
        ('0.83 ×', '12.3 ×', '1234 ×')
    """
    return f"{_digits(ratio)} ×"


def show_bytes(size: float) -> str:
    """Memory in megabytes.

    Example:
        >>> show_bytes(3e8), show_bytes(8192000)
        ('300 MB', '8.2 MB')
    """
    megabytes = size / 1e6
    return f"{megabytes:.0f} MB" if megabytes >= 10 else f"{megabytes:.1f} MB"


def _digits(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _is_speedup(goal: Goal) -> bool:
    """A ratio so small reads better upside down."""
    return bool(goal.against) and goal.at_most < 0.1


def _against(goal: Goal) -> str:
    return f"{' as' if _is_speedup(goal) else ''} {goal.against}" if goal.against else ""


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def _record(outcome: Outcome) -> dict[str, Any]:
    first = outcome.workload.contestants[0].name
    return {
        "name": outcome.workload.name,
        "title": outcome.workload.title,
        "target": outcome.target,
        "first": first,
        "missing": outcome.missing,
        "cases": [
            {
                "case": each.case,
                "contestants": {
                    name: {
                        **dataclasses.asdict(timing),
                        "ratio": each.ratio(name, first),
                        "memory": each.memory.get(name),
                    }
                    for name, timing in each.timings.items()
                },
            }
            for each in outcome.measured
        ],
        "goals": [
            {**dataclasses.asdict(v.goal), "value": v.value, "holds": v.holds, "text": describe(v)}
            for v in outcome.verdicts
        ],
    }
