"""CoNLL-SIGMORPHON 2018, task 1: lemmas, inflected forms and morphological tags of seven languages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fenchel_lab.data.core import DataSet, Source, count_of, explained, read

Language = Literal["english", "finnish", "french", "german", "russian", "spanish", "turkish"]
Split = Literal["train-high", "train-medium", "train-low", "dev", "test"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
WORDS: dict[Split, int] = {"train-high": 10_000, "train-medium": 1_000, "train-low": 100, "dev": 1_000, "test": 1_000}


@dataclass(frozen=True)
class Inflection:
    """A lemma, its form, and the tags that ask for it; the form is empty where it is asked for."""

    lemma: str
    form: str
    tags: tuple[str, ...]


def load(language: Language, split: Split, folder: Path | None = None) -> list[Inflection]:
    """The inflections of a split.

    Args:
        language: one of ``LANGUAGES``.
        split: "train-high", "train-medium", "train-low", "dev" or "test".
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if language not in LANGUAGES or split not in WORDS:
        raise ValueError(
            f"there is no {language!r} {split!r}; there are {', '.join(LANGUAGES)}, each {', '.join(WORDS)}"
        )
    content = read(SIGMORPHON2018, f"{language}-{split}", folder)
    with explained(f"{language}-{split}"):
        return list(parse(content.decode("utf-8")))


def parse(text: str | Iterable[str], forms: bool = True) -> Iterator[Inflection]:
    r"""The inflections of a text, a line each: lemma, form and tags, between tabs; tags between semicolons.

    Blank lines are passed over; a line that is anything else is an error that tells its number.

    Args:
        text: of a file; or its lines, which are read one by one.
        forms: False where forms are asked for: then a line may be a lemma and tags alone.

    Example:
        >>> next(parse("draw\tdrew\tV;PST\n"))
        Inflection(lemma='draw', form='drew', tags=('V', 'PST'))
    """
    for number, line in enumerate(text.split("\n") if isinstance(text, str) else text, 1):
        line = line.removeprefix("\ufeff") if number == 1 else line
        line = line.removesuffix("\n")
        columns = [column.strip() for column in line.rstrip("\r").split("\t")]
        if columns == [""]:
            continue
        names = ["lemma", "form", "tags"] if forms or len(columns) == 3 else ["lemma", "tags"]
        if len(columns) != len(names):
            wanted = ", ".join(names) if forms else "lemma, tags, or lemma, form, tags"
            raise ValueError(f"line {number}: {len(columns)} columns between tabs, not {wanted}: {line[:60]!r}")
        for name, column in zip(names, columns, strict=True):
            if not column:
                raise ValueError(f"line {number}: the {name} must not be empty: {line[:60]!r}")
        tags = tuple(tag.strip() for tag in columns[-1].split(";"))
        if not all(tags):
            raise ValueError(f"line {number}: a tag must not be empty: {columns[-1][:60]!r}")
        yield Inflection(columns[0], columns[1] if len(names) == 3 else "", tags)


SIGMORPHON2018 = DataSet(
    "sigmorphon2018",
    "CoNLL-SIGMORPHON 2018 task 1: inflections of seven languages",
    "CC BY-SA 3.0, from Wiktionary",
    [
        Source(
            f"{language}-{split}",
            f"https://raw.githubusercontent.com/sigmorphon/conll2018/master/task1/all/{language}-{split}",
            check=count_of(parse, count, "inflections"),
        )
        for language in LANGUAGES
        for split, count in WORDS.items()
    ],
)
