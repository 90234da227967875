"""German nouns and their plurals, from the package `german-nouns` (WiktionaryDE, CC BY-SA 4.0): it is read, not run."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

from fenchel_lab.data.core import MissingDataError, explained
from fenchel_lab.data.sigmorphon2018 import Inflection

GENDERS = {"m": "MASC", "f": "FEM", "n": "NEUT"}


def load() -> list[Inflection]:
    """Every noun with one gender and one plural, in the order of the package: lemma, plural, gender as the tag.

    A word that is listed several times (*die See*, *der See*) is there once, as it is listed last.
    """
    spec = importlib.util.find_spec("german_nouns")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDataError("German nouns come with the package german-nouns: pip install german-nouns")
    with (
        explained("nouns.csv"),
        (Path(spec.submodule_search_locations[0]) / "nouns.csv").open(encoding="utf-8") as file,
    ):
        nouns = {}
        for row in csv.DictReader(file):
            lemma, plural, gender = row["lemma"], row["nominativ plural"], GENDERS.get(row["genus"])
            if gender and plural and lemma.isalpha() and plural.isalpha() and row["pos"] == "Substantiv":
                nouns[lemma] = Inflection(lemma, plural, (gender,))
        return list(nouns.values())
