"""Texts with labels in files of one's own: tab-separated, or an object a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from fenchel.seq2seq.saving import short
from fenchel_lab.data import glove
from fenchel_lab.drawing import highlights
from fenchel_lab.models.documents import Vocabulary

SUFFIXES = (".tsv", ".txt", ".jsonl", ".ndjson", ".json")
MOST = 50_000
"""Words of a file of vectors that are kept, besides those of the texts."""


@dataclass(frozen=True)
class Labelled:
    """A text, its label if it has one, and the line of the file that it stands in."""

    text: str
    label: str | None
    line: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """As a vocabulary has them."""
        return tuple(highlights.normal(self.text[start:end]) for start, end in highlights.places(self.text))


def read(path: Path) -> list[Labelled]:
    """The texts of a file.

    In .tsv and .txt a line is a label, a tab and a text, or a text alone; a first line ``label TAB text`` is a header.
    In .jsonl (.ndjson, .json) a line is an object with ``text`` and perhaps ``label``. Blank lines are left out.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}, so that its format is known")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    rows = _objects(lines, path) if "j" in path.suffix else _columns(lines, path)
    return list(rows)


def _columns(lines: Sequence[str], path: Path) -> Iterator[Labelled]:
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        columns = line.split("\t")
        if not line.strip() or (number == 1 and [each.lower() for each in columns] == ["label", "text"]):
            continue
        if len(columns) > 2:
            raise ValueError(f"{path}, line {number}: {len(columns)} columns, not a label, a tab and a text")
        yield Labelled(columns[-1], _label(columns[0]) if len(columns) == 2 else None, number)


def _objects(lines: Sequence[str], path: Path) -> Iterator[Labelled]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, deep nesting
            raise ValueError(f"{path}, line {number}: not an object: {short(error, 200)}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise ValueError(f'{path}, line {number}: must be an object with a "text"')
        label = entry.get("label")
        if not isinstance(label, str | int | float | None):
            raise ValueError(f"{path}, line {number}: the label must be a string or a number")
        found = Labelled(entry["text"], None if label is None else _label(str(label)), number)
        if any("\ud800" <= char <= "\udfff" for char in f"{found.text}{found.label}"):
            raise ValueError(f"{path}, line {number}: half of a surrogate pair, which no file can hold")
        yield found


def _label(text: str) -> str | None:
    return text.strip() or None


def vocabulary(texts: Sequence[Labelled], longest: int, width: int = 50, least: int = 2) -> Vocabulary:
    """The words that occur often enough, with random vectors, to be trained."""
    counts = Counter(word for text in texts for word in text.words)
    words = [word for word, count in counts.most_common() if count >= least]
    return Vocabulary({word: row for row, word in enumerate(words)}, 0.3 * torch.randn(len(words), width), longest)


def given_vectors(path: Path, texts: Sequence[Labelled], longest: int) -> Vocabulary:
    """Vectors of a file: GloVe's text format, a word and its numbers per line, or an npz file with words and vecs."""
    if path.suffix == ".npz":
        try:
            known = glove.parse_npz(path.read_bytes())
        except (BadZipFile, KeyError, ValueError) as error:
            raise ValueError(f"{path} has no word vectors: {error}") from None
        return Vocabulary(known.rows, torch.from_numpy(known.vectors), longest)
    wanted = {word for text in texts for word in text.words}
    rows: dict[str, int] = {}
    vectors: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            word, *numbers = line.rstrip("\n").split(" ")
            if number > MOST and word not in wanted:
                continue
            try:
                vector = np.asarray_chkfinite(numbers, dtype=np.float32)
            except ValueError:
                raise ValueError(f"{path}, line {number}: not a word and numbers") from None
            if not len(vector) or (vectors and len(vector) != len(vectors[0])):
                raise ValueError(f"{path}, line {number}: {len(vector)} numbers, not as many as before")
            if word not in rows:
                rows[word] = len(vectors)
                vectors.append(vector)
    if not vectors:
        raise ValueError(f"{path} has no vectors")
    return Vocabulary(rows, torch.from_numpy(np.stack(vectors)), longest)
