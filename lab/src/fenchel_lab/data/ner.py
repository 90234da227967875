"""Named entities (CoNLL-2002, Spanish and Dutch) and chunks (CoNLL-2000, English): words in columns, tags in IOB2."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fenchel_lab.data.core import DataSet, Source, explained, read

Language = Literal["spanish", "dutch"]
Split = Literal["train", "dev", "test"]

# The archive's member, and how many sentences it has.
MEMBERS: dict[tuple[str, str], tuple[str, int]] = {
    ("spanish", "train"): ("conll2002/esp.train", 8_323),
    ("spanish", "dev"): ("conll2002/esp.testa", 1_915),
    ("spanish", "test"): ("conll2002/esp.testb", 1_517),
    ("dutch", "train"): ("conll2002/ned.train", 15_806),
    ("dutch", "dev"): ("conll2002/ned.testa", 2_895),
    ("dutch", "test"): ("conll2002/ned.testb", 5_195),
    ("chunks", "train"): ("conll2000/train.txt", 8_936),
    ("chunks", "test"): ("conll2000/test.txt", 2_012),
}


@dataclass(frozen=True)
class Sentence:
    """Words and their tags: ``B-PER`` begins an entity, ``I-PER`` goes on with it, ``O`` is outside."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def load(language: Language, split: Split, folder: Path | None = None) -> list[Sentence]:
    """Sentences with named entities.

    Args:
        language: "spanish" or "dutch".
        split: "train", "dev" (testa) or "test" (testb).
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    return _load(language, split, folder)


def load_chunks(split: Literal["train", "test"], folder: Path | None = None) -> list[Sentence]:
    """English sentences with their chunks: noun phrases, verb phrases, …"""
    return _load("chunks", split, folder)


def parse(text: str) -> Iterator[Sentence]:
    r"""The sentences of a text in columns: the word first, the tag last, a blank line between sentences.

    Example:
        >>> next(parse("Sao NC B-LOC\nPaulo VMI I-LOC\n"))
        Sentence(words=('Sao', 'Paulo'), tags=('B-LOC', 'I-LOC'))
    """
    words: list[str] = []
    tags: list[str] = []
    for line in [*text.splitlines(), ""]:
        columns = line.split(" ")
        if not line.strip():
            if words:
                yield Sentence(tuple(words), tuple(tags))
            words, tags = [], []
        elif len(columns) != 3 or not (columns[2] == "O" or columns[2][:2] in ("B-", "I-")):
            raise ValueError(f"a line is not a word, a part of speech and a tag: {line[:60]!r}")
        elif columns[0] != "-DOCSTART-":  # an article begins; the sentence follows without a blank line
            words.append(columns[0])
            tags.append(columns[2])


def _load(kind: str, split: str, folder: Path | None) -> list[Sentence]:
    if (kind, split) not in MEMBERS:
        known = ", ".join(f"{kind} {split}" for kind, split in MEMBERS)
        raise ValueError(f"there is no {kind!r} {split!r}; there are {known}")
    archive = "conll2000.zip" if kind == "chunks" else "conll2002.zip"
    content = read(NER, archive, folder)
    with explained(archive):
        return _member(content, MEMBERS[kind, split][0])


def _member(content: bytes, member: str) -> list[Sentence]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return list(parse(archive.read(member).decode("utf-8")))


def _check(folder: str, content: bytes) -> None:
    for member, count in MEMBERS.values():
        if member.startswith(folder) and (found := len(_member(content, member))) != count:
            raise ValueError(f"{member} has {found} sentences, not {count}")


NER = DataSet(
    "ner",
    "CoNLL-2002 named entities (Spanish, Dutch) and CoNLL-2000 chunks",
    "research in the context of the shared tasks only",
    [
        Source(
            f"{name}.zip",
            f"https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/{name}.zip",
            check=partial(_check, name),
        )
        for name in ("conll2002", "conll2000")
    ],
    ways="nltk.download('conll2002') and nltk.download('conll2000') fetch the same archives",
)
