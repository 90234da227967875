"""Records of finished runs: one small JSON file per run, so that a study of many hours can be done in parts.

A study lists its jobs, one per cell of its tables and seed, and computes everything it shows from their records:

    jobs = [Job({"method": name}, seed, settings, partial(trained, name)) for seed in seeds for name in METHODS]
    found = context.records.collect(jobs, context.progress)
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fenchel.progress import Progress, silent
from fenchel.seq2seq.saving import write_whole
from fenchel_lab.report.origin import commit, cpu_model, version

Work = Callable[[Callable[[float], None]], Mapping[str, Any]]
"""Does a run, given a function that is called with the share that is done, and returns its figures."""


@dataclass(frozen=True)
class Job:
    """A run that a study needs.

    Args:
        cell: what tells it from the other runs of the study besides the seed, such as the method and the data.
        seed: of torch's global generator, which is seeded before the work.
        settings: all that the figures depend on, as JSON can hold it.
        work: does the run and returns its figures, as JSON can hold them.
    """

    cell: Mapping[str, str]
    seed: int
    settings: Mapping[str, Any]
    work: Work

    @property
    def name(self) -> str:
        """The name of the record's file.

        Example:
            >>> Job({"method": "Gumbel-Softmax ST", "side": "28"}, 3, {}, dict).name
            'gumbel-softmax-st.28.seed-3.json'
        """
        words = [re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-") for value in self.cell.values()]
        return ".".join([*words, f"seed-{self.seed}", "json"])


@dataclass(frozen=True)
class Record:
    """A run that was finished: what was run, what came out, and how many seconds of processor time it took."""

    cell: dict[str, str]
    seed: int
    settings: dict[str, Any]
    figures: dict[str, Any]
    seconds: float
    processor: str
    version: str
    commit: str | None

    @classmethod
    def read(cls, file: Path) -> Record:
        """The record of a file."""
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is not the record of a run: {error}") from None


@dataclass(frozen=True)
class Records:
    """The records of a study in a folder; without a folder nothing is kept.

    Args:
        folder: where the records are, and where new ones are written.
        minutes: no run is begun later than this many minutes after the first.

    Example:
        >>> import tempfile
        >>> job = Job({"method": "guess"}, 0, {"sides": 6}, lambda progress: {"success": 1 / 6})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     records = Records(Path(folder))
        ...     _ = records.collect([job])
        ...     records.count, Records(Path(folder), minutes=0).collect([job])[0].figures
        (1, {'success': 0.16666666666666666})
    """

    folder: Path | None = None
    minutes: float = math.inf
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def count(self) -> int:
        """How many runs are recorded."""
        return len(self._files())

    def clear(self) -> None:
        """Remove all records."""
        for file in self._files():
            Record.read(file)  # no other file is removed
            file.unlink()

    def collect(self, jobs: Sequence[Job], progress: Progress = silent) -> list[Record]:
        """The records of jobs, in their order; those that are not recorded are run, as long as the time allows.

        A record whose settings are not those of its job is an error.
        """
        found = [self._recorded(job) for job in jobs]
        missing = [row for row, record in enumerate(found) if record is None]
        ready = f"{len(jobs) - len(missing)} of {len(jobs)} runs are recorded"
        progress(0.0, ready)
        for done, row in enumerate(missing):
            if time.monotonic() - self.began >= 60 * self.minutes:
                break
            job = jobs[row]
            note = f"{ready}; " + ", ".join([*job.cell.values(), f"seed {job.seed}"])

            def tell(part: float, done: int = done, note: str = note) -> None:
                progress((done + part) / len(missing), note)

            found[row] = self._run(job, tell)
        return [record for record in found if record is not None]

    def _files(self) -> list[Path]:
        return [] if self.folder is None else sorted(self.folder.glob("*.json"))

    def _recorded(self, job: Job) -> Record | None:
        if self.folder is None or not (file := self.folder / job.name).exists():
            return None
        record, settings = Record.read(file), _plain(job.settings)
        if record.cell != dict(job.cell) or record.seed != job.seed:
            raise ValueError(f"{file} is the record of another run")
        if changed := sorted(
            name for name in record.settings | settings if record.settings.get(name) != settings.get(name)
        ):
            raise ValueError(
                f"{file} was run with other settings ({', '.join(changed)}): remove it, or add --fresh to begin anew"
            )
        return record

    def _run(self, job: Job, progress: Callable[[float], None]) -> Record:
        start = time.process_time()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            figures = job.work(progress)
        seconds = round(time.process_time() - start, 1)
        record = Record(
            dict(job.cell), job.seed, _plain(job.settings), _plain(figures), seconds, cpu_model(), version(), commit()
        )
        if self.folder is not None:
            text = json.dumps(asdict(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / job.name, lambda path: path.write_text(text, encoding="utf-8"))
        return record


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they are read again from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return plain
