"""Which studies exist: a decorator adds one, importing the modules of `fenchel_lab.chapters` finds them all."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fenchel.progress import Progress, silent
from fenchel_lab.data import SETS, local
from fenchel_lab.report.records import Records
from fenchel_lab.report.result import Result


@dataclass(frozen=True)
class Context:
    """What a study is asked.

    Args:
        data: local folder of real data; without one, the embedded sample. Default: ``$FENCHEL_DATA``.
        seed: of everything random. Torch's global generator is seeded with it before the study starts.
        full: the longest protocol that the study has, as near to the paper as the data allow.
        progress: called as the work advances.
        checkpoints: folder for checkpoints, if the study writes any; it resumes from those that are there.
        records: of the runs that are finished, if the study keeps any; it does not run these again.
    """

    data: Path | None = field(default_factory=local)
    seed: int = 0
    full: bool = False
    progress: Progress = silent
    checkpoints: Path | None = None
    records: Records = field(default_factory=Records)


Function = Callable[[Context], Result]


@dataclass(frozen=True)
class Study:
    """A registered study: a chapter of the report."""

    name: str
    title: str
    source: str
    order: float
    function: Function
    data: tuple[str, ...] = ()
    full: str = ""
    tour: bool = True
    resumes: bool = False
    theme: str = ""
    code: str = ""
    records: bool = False


class UnknownStudyError(LookupError):
    """No study has the name that was asked for."""


_STUDIES: dict[str, Study] = {}


def study(
    title: str,
    *,
    source: str,
    order: float,
    data: Sequence[str] = (),
    full: str = "",
    tour: bool = True,
    resumes: bool = False,
    theme: str = "",
    code: str = "",
    records: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as the study of its name.

    Args:
        title: the chapter's heading.
        source: the paper, and which of its figures or tables.
        order: chapters are sorted by it; leave gaps.
        data: the sets of `fenchel_lab.data` that it reads when it is given a folder; none if it has no use for one.
        full: what ``--full`` does, and what still differs from the paper; empty if there is one protocol only.
        tour: whether it is a chapter of the tour; one that says little without its data, or takes long, is not.
        resumes: whether it writes checkpoints to a folder that it is given, and resumes from them.
        theme: under which the contents list it.
        code: a few lines of Python to copy that show the chapter's idea; they import what they need, and print.
        records: whether it keeps a record of every finished run, and computes what it shows from these.
    """
    if unknown := sorted(set(data) - set(SETS)):
        raise ValueError(f"data names {', '.join(unknown)}; there are {', '.join(SETS)}")

    def register(function: Function) -> Function:
        name = function.__name__
        if name in _STUDIES:
            raise ValueError(
                f"two studies are called {name!r}: in {_STUDIES[name].function.__module__} and {function.__module__}"
            )
        sets, lines = tuple(data), code.strip()
        _STUDIES[name] = Study(name, title, source, order, function, sets, full, tour, resumes, theme, lines, records)
        return function

    return register


def studies() -> list[Study]:
    """Every study of `fenchel_lab.chapters`, in the order of the chapters."""
    package = importlib.import_module("fenchel_lab.chapters")
    for module in pkgutil.iter_modules(package.__path__, prefix=f"{package.__name__}."):
        importlib.import_module(module.name)
    return sorted(_STUDIES.values(), key=lambda study: (study.order, study.name))


def find(name: str) -> Study:
    """The study called ``name``."""
    known = {study.name: study for study in studies()}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise UnknownStudyError(f"There is no study called {name!r}.{hint} Studies: {', '.join(known)}.")
