"""Multi30k: captions of images in German and English."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fenchel_lab.data.core import BrokenDataError, DataSet, Source, count_of, explained, read

Split = Literal["train", "val", "test"]
FILES: dict[Split, tuple[str, int]] = {
    "train": ("train", 29_000),
    "val": ("val", 1_014),
    "test": ("test_2016_flickr", 1_000),
}
"""The files of a split, and how many sentences each has."""


def load(split: Split, folder: Path | None = None) -> list[tuple[str, str]]:
    """The sentence pairs of a split, German and English.

    Args:
        split: "train", "val" or "test" (2016).
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if split not in FILES:
        raise ValueError(f"split must be one of {', '.join(FILES)}, got {split!r}")
    name = FILES[split][0]
    sides = []
    for language in ("de", "en"):
        content = read(MULTI30K, f"{name}.{language}", folder)
        with explained(f"{name}.{language}"):
            sides.append(parse(content.decode("utf-8")))
    german, english = sides
    if len(german) != len(english):
        raise BrokenDataError(f"{name} has {len(german)} German sentences and {len(english)} English ones")
    return list(zip(german, english, strict=True))


def parse(text: str) -> list[str]:
    r"""The sentences of a text, a line each.

    Example:
        >>> parse("A dog .\nTwo dogs .\n")
        ['A dog .', 'Two dogs .']
    """
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


MULTI30K = DataSet(
    "multi30k",
    "Multi30k: image captions, German and English",
    "CC BY-NC-SA 4.0, captions of Flickr30k",
    [
        Source(
            f"{name}.{language}",
            f"https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{name}.{language}.gz",
            check=count_of(parse, count, "sentences"),
        )
        for name, count in FILES.values()
        for language in ("de", "en")
    ],
)
