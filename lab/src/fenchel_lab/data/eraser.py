"""ERASER's film reviews: whole texts with an opinion, and the words that people marked as its reasons (JSON lines)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fenchel_lab.data.core import DataSet, Source, count_of, explained, read
from fenchel_lab.data.sst import Review

Split = Literal["train", "dev", "test"]
LABELS = ("NEG", "POS")
# The file, how many reviews, and the checksum of the text.
FILES: dict[str, tuple[str, int, str]] = {
    "train": ("train.jsonl", 1_600, "74610af2e024f59120451a1ac3e01fad972fb875845dce43fc30dc8dcc7decca"),
    "dev": ("val.jsonl", 200, "08f78157c7dc84c81e76f3b8e97ab0b9c711b078e161781271e6d25b98322f94"),
    "test": ("test.jsonl", 199, "49ecf47b9b8db09f1fd83d5da21e4edba001fd6a0087455937e0575a1f73e76d"),
}


@dataclass(frozen=True)
class Annotated(Review):
    """A review, and the places of the words that a person marked, counted from 0, rising."""

    rationale: tuple[int, ...]


def load(split: Split, folder: Path | None = None) -> list[Annotated]:
    """The reviews of a split.

    Those to test with were annotated anew, and more thoroughly: a third of their words is marked, in the other splits
    less than a tenth.

    Args:
        split: "train", "dev" or "test".
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if split not in FILES:
        raise ValueError(f"there is no {split!r}; there are {', '.join(FILES)}")
    name = FILES[split][0]
    content = read(ERASER, name, folder)
    with explained(name):
        return list(parse(content.decode("utf-8")))


def parse(text: str) -> Iterator[Annotated]:
    r"""The reviews of a text: an object a line, with text, label and rationale.

    Example:
        >>> next(parse('{"text": "a plot .\\nso dull", "label": "NEG", "rationale": [3, 4]}\n'))
        Annotated(words=('a', 'plot', '.', 'so', 'dull'), label=0, rationale=(3, 4))
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        entry = json.loads(line)
        missing = {"text", "label", "rationale"} - set(entry)
        if missing or entry["label"] not in LABELS:
            raise ValueError(f"line {number} has no {', '.join(sorted(missing)) or 'label among ' + str(LABELS)}")
        words, rationale = tuple(entry["text"].split()), tuple(entry["rationale"])
        if any(place not in range(len(words)) for place in rationale):
            raise ValueError(f"line {number} marks a word that is not among its {len(words)}")
        yield Annotated(words, LABELS.index(entry["label"]), rationale)


# The benchmark has texts and annotations apart, in an archive: one line a review is made from these.
ERASER = DataSet(
    "eraser_movies",
    "ERASER's film reviews with the words that people marked",
    "not stated; cite DeYoung et al. (2020) and Zaidan et al. (2008)",
    [Source(name, sha256=sha256, check=count_of(parse, count, "reviews")) for name, count, sha256 in FILES.values()],
    ways="the reviews and their annotations are at https://www.eraserbenchmark.com, as movies; each line of a file is "
    "one review: its text, its label (NEG or POS) and the places of the marked words",
)
