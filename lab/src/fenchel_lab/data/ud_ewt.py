"""Universal Dependencies, English Web Treebank: sentences with the head of every word (CoNLL-U)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fenchel_lab.data.core import DataSet, Source, count_of, explained, read

Split = Literal["train", "dev", "test"]
SENTENCES: dict[Split, int] = {"train": 12_544, "dev": 2_001, "test": 2_077}


@dataclass(frozen=True)
class Sentence:
    """Words, their universal parts of speech, their heads (1-based; 0 is the root) and relations to these."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def load(split: Split, folder: Path | None = None) -> list[Sentence]:
    """The sentences of a split.

    Args:
        split: "train", "dev" or "test".
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if split not in SENTENCES:
        raise ValueError(f"split must be one of {', '.join(SENTENCES)}, got {split!r}")
    content = read(UD_EWT, _name(split), folder)
    with explained(_name(split)):
        return list(parse(content.decode("utf-8")))


def parse(text: str) -> Iterator[Sentence]:
    r"""The sentences of a text in CoNLL-U; words of several tokens and words that are not written are left out.

    Example:
        >>> rows = ["1 Dogs dog NOUN _ _ 2 nsubj _ _", "2 bark bark VERB _ _ 0 root _ _"]
        >>> next(parse("\n".join(row.replace(" ", "\t") for row in rows))).heads
        (2, 0)
    """
    for block in text.replace("\r\n", "\n").split("\n\n"):
        rows = [line.split("\t") for line in block.split("\n") if line and not line.startswith("#")]
        for row in rows:
            if len(row) != 10:
                raise ValueError(f"a line has {len(row)} columns, not 10: {' '.join(row)[:60]!r}")
        words = [row for row in rows if row[0].isdigit()]
        if words:
            heads = tuple(int(row[6]) for row in words)
            if max(heads) > len(words) or 0 not in heads:
                raise ValueError(f"the heads {heads} are not those of a tree over {len(words)} words")
            yield Sentence(
                tuple(row[1] for row in words), tuple(row[3] for row in words), heads, tuple(row[7] for row in words)
            )


def _name(split: Split) -> str:
    return f"en_ewt-ud-{split}.conllu"


# The treebank is revised twice a year: its sentences stay, their annotation moves, so that no checksum holds for long.
UD_EWT = DataSet(
    "ud_ewt",
    "Universal Dependencies English EWT",
    "CC BY-SA 4.0",
    [
        Source(
            _name(split),
            f"https://raw.githubusercontent.com/UniversalDependencies/UD_English-EWT/master/{_name(split)}",
            check=count_of(parse, SENTENCES[split], "sentences"),
        )
        for split in SENTENCES
    ],
)
