"""Running a study, and keeping what came out: pictures, tables and how to get them again."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from fenchel_lab.data import VARIABLE
from fenchel_lab.drawing import style
from fenchel_lab.outputs import Output
from fenchel_lab.report.origin import commit, version
from fenchel_lab.report.registry import Context, Study
from fenchel_lab.report.result import Cell, Result

RECORD = "result.json"
NAMES = (RECORD, "figure-*.png", "table-*.csv")
"""Of the files that a run may write."""


@dataclass(frozen=True)
class Run:
    """A study that was run: its result, or the error that stopped it."""

    study: Study
    context: Context
    seconds: float
    result: Result | None
    error: Exception | None = None

    @property
    def command(self) -> str:
        """The command that does this run again. It does not contain the folder of the data."""
        words = ["fenchel", "study", "run", self.study.name, "--seed", str(self.context.seed)]
        if self.context.full:
            words += ["--full"]
        command = shlex.join(words)
        return command if self.context.data is None else f"{VARIABLE}=… {command}"

    def save(self, folder: Path) -> None:
        """Write ``result.json``, ``figure-1.png``, …, ``table-1.csv``, … into a folder, made if need be.

        Figures and tables that the record of an earlier run lists are removed, and no other file.
        """
        if self.result is None:
            raise ValueError(f"{self.study.name} failed and has no result to save")
        folder.mkdir(parents=True, exist_ok=True)
        for old in written(folder):
            (folder / old).unlink(missing_ok=True)
        figures, tables = [], []
        for number, figure in enumerate(self.result.figures, 1):
            name = f"figure-{number}.png"
            (folder / name).write_bytes(figure.png)
            figures.append({"file": name, "caption": figure.caption, "alt": figure.alt, "paper": figure.paper})
        for number, table in enumerate(self.result.tables, 1):
            name = f"table-{number}.csv"
            rows = [[_plain(cell) for cell in row] for row in table.rows]
            with (folder / name).open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([table.header, *rows])
            header = list(table.header)
            tables.append(
                {"file": name, "caption": table.caption, "paper": table.paper, "header": header, "rows": rows}
            )
        record = {
            "study": self.study.name,
            "title": self.study.title,
            "source": self.study.source,
            "command": self.command,
            "seed": self.context.seed,
            "data": [] if self.context.data is None else list(self.study.data),
            "version": version(),
            "commit": commit(),
            "seconds": round(self.seconds, 3),
            "summary": self.result.paragraphs,
            "figures": figures,
            "tables": tables,
        }
        if self.result.claims:
            record["claims"] = [asdict(claim) for claim in self.result.claims]
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def run(study: Study, context: Context) -> Run:
    """Run a study. Its failure is recorded, not raised, so that it cannot take other studies with it."""
    start = time.perf_counter()
    try:
        # A study's numbers may not depend on which studies ran before it.
        with style.applied(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            result = study.function(context)
        if study.full and (context.data is not None or not study.data):
            result = replace(result, summary=f"{result.summary}\n\n{study.full}")
        # A figure that cannot be drawn is the failure of its study: find out here.
        for figure in result.figures:
            _ = figure.svg
    except Exception as error:
        return Run(study, context, time.perf_counter() - start, None, error)
    return Run(study, context, time.perf_counter() - start, result)


def output(name: str) -> Output:
    """What ``fenchel study run`` writes of the study called ``name``."""
    return Output(f"fenchel study run {name}", NAMES, lambda folder: written(folder, name))


def written(folder: Path, name: str | None = None) -> list[str]:
    """The files of an earlier run in a folder, as its record lists them.

    Args:
        folder: perhaps a run was saved to it.
        name: of the study; any if None.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if name not in (None, record["study"]):
            return []
        files = [each["file"] for part in ("figures", "tables") for each in record[part]]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # not a record of ours
        return []
    # A record may have been edited: nothing is removed that a run does not write.
    return [RECORD, *(each for each in files if re.fullmatch(r"figure-\d+\.png|table-\d+\.csv", str(each)))]


def _plain(cell: Cell) -> Cell:
    """A cell that JSON can hold: infinities and NaN become text."""
    return str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell
