"""GloVe: word vectors of 50 numbers, the 50,000 most frequent words (npz, or the original text)."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fenchel_lab.data.core import DataSet, MissingDataError, Source, explained, read

PACKED, ORIGINAL = "glove6B_50d_top50k.npz", "glove.6B.50d.txt"
WORDS, SIZE = 50_000, 50


@dataclass(frozen=True)
class Vectors:
    """The row of every word in a matrix of vectors."""

    rows: dict[str, int]
    vectors: NDArray[np.float32]

    def __getitem__(self, word: str) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self.vectors[self.rows[word]]
        return vector


def load(folder: Path | None = None) -> Vectors:
    """The vectors of the most frequent words, most frequent first.

    Args:
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    try:
        content, name, parse = read(GLOVE, PACKED, folder), PACKED, parse_npz
    except MissingDataError:
        content, name, parse = read(GLOVE, ORIGINAL, folder), ORIGINAL, parse_text
    with explained(name):
        return parse(content)


def parse_npz(content: bytes) -> Vectors:
    """Vectors of an npz file with ``words`` and ``vecs``."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        words, vectors = file["words"].tolist(), file["vecs"].astype(np.float32)
    if vectors.shape != (len(words), SIZE):
        raise ValueError(f"{len(words)} words and vectors of shape {vectors.shape}")
    return Vectors({word: row for row, word in enumerate(words)}, vectors)


def parse_text(content: bytes) -> Vectors:
    """Vectors of a text: a word and its numbers per line."""
    lines = content.decode("utf-8").split("\n")[:WORDS]
    rows = [line.split(" ") for line in lines if line]
    if any(len(row) != 1 + SIZE for row in rows):
        raise ValueError(f"a line is not a word and {SIZE} numbers")
    return Vectors({row[0]: i for i, row in enumerate(rows)}, np.array([row[1:] for row in rows], dtype=np.float32))


# The original comes in one archive with five times as much: take that by hand.
GLOVE = DataSet(
    "glove",
    "GloVe 6B word vectors",
    "PDDL 1.0",
    [Source(ORIGINAL)],
    ways=f"{ORIGINAL} is in https://nlp.stanford.edu/data/glove.6B.zip",
    repacked=[Source(PACKED)],
)
