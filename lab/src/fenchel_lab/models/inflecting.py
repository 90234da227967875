"""Runs of models that inflect: trained or taken from a checkpoint, judged, and searched by beams."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fenchel import Tsallis
from fenchel.seq2seq import Ensemble, Pair, Recurrent, Training, Vocabulary, force
from fenchel_lab.drawing import hypotheses
from fenchel_lab.models import diary
from fenchel_lab.models.diary import Entry
from fenchel_lab.models.inflection import Inflected, inflect

BEAM = 5
COUNTED = (1, 2, 4, 8, 12, 16, 20, 25, 30)
"""Epochs after which beams are counted."""


@dataclass(frozen=True)
class Protocol:
    """How large models are, how they are trained, and how many.

    Args:
        high: training on many words, …
        medium: … and on few.
        embedding: width of letters.
        hidden: width of states.
        layers: of encoder and decoder.
        dropout: in training.
        drawn: validation words whose beams are counted after training, …
        asked: … and during it.
        runs: how many seeds.
    """

    high: Training
    medium: Training
    embedding: int = 64
    hidden: int = 128
    layers: int = 1
    dropout: float = 0.3
    drawn: int = 1_000
    asked: int = 200
    runs: int = 3


@dataclass(frozen=True)
class Corpus:
    """Words of a language to train with, to choose the epoch by, and to test with; high or medium."""

    language: str
    setting: str
    train: Sequence[Pair]
    validation: Sequence[Pair]
    test: Sequence[Pair]


def name(alpha: float) -> str:
    """Of a regularizer.

    Example:
        >>> name(1.0), name(4 / 3)
        ('softmax', '1.33-entmax')
    """
    return {1.0: "softmax", 2.0: "sparsemax"}.get(alpha, f"{alpha:.3g}-entmax")


def fitted(
    corpus: Corpus,
    output: float,
    attention: float,
    seed: int,
    protocol: Protocol,
    folder: Path | None,
    progress: Callable[[float], None],
) -> tuple[Recurrent, list[Entry]]:
    """A model, and an entry for every epoch; from its checkpoint, if there is one."""
    torch.manual_seed(seed)
    model = Recurrent(
        Vocabulary.of(pair.source for pair in corpus.train),
        Vocabulary.of(pair.target for pair in corpus.train),
        embedding=protocol.embedding,
        hidden=protocol.hidden,
        layers=protocol.layers,
        dropout=protocol.dropout,
        attention=Tsallis(attention),
        output=Tsallis(output),
    )
    asked = corpus.validation[: protocol.asked]

    def measure(epoch: int) -> Mapping[str, float]:
        return counted(asked, found_by(model, asked)) if epoch in COUNTED and output > 1 else {}

    sides = (name(output), name(attention))
    own = None if folder is None else folder / ".".join([corpus.language, corpus.setting, *sides, f"seed-{seed}"])
    how = replace(protocol.high if corpus.setting == "high" else protocol.medium, seed=seed)
    return model, diary.trained(model, corpus.train, corpus.validation, how, own, measure, progress)


def run(
    corpus: Corpus,
    output: float,
    attention: float,
    seed: int,
    protocol: Protocol,
    folder: Path | None,
    progress: Callable[[float], None],
) -> dict[str, Any]:
    """The figures of a model."""
    model, entries = fitted(corpus, output, attention, seed, protocol, folder, lambda part: progress(0.9 * part))
    drawn = corpus.validation[: protocol.drawn]
    found = found_by(model, drawn, n_best=100)
    best = diary.best(entries)
    return {
        "test": counted(corpus.test, found_by(model, corpus.test))["right"],
        "validation": best["accuracy"],
        "token accuracy": best["token accuracy"],
        "epoch": best["epoch"],
        **counted(drawn, found),
        "entries": entries,
        "lists": lists(drawn, found),
        "followed": followed(model, drawn, found),
        "attended": attended(model, drawn[0]),
    }


def run_together(
    corpus: Corpus,
    output: float,
    attention: float,
    seeds: Sequence[int],
    protocol: Protocol,
    folder: Path | None,
    progress: Callable[[float], None],
) -> dict[str, Any]:
    """The accuracy of an ensemble."""
    models = []
    for turn, seed in enumerate(seeds):

        def tell(part: float, turn: int = turn) -> None:
            progress((turn + 0.9 * part) / len(seeds))

        models.append(fitted(corpus, output, attention, seed, protocol, folder, tell)[0])
    found = inflect(models[0], [pair.source for pair in corpus.test], BEAM, stepper=Ensemble(models))
    return {"test": counted(corpus.test, found)["right"]}


def found_by(model: Recurrent, pairs: Sequence[Pair], n_best: int | None = None) -> list[Inflected]:
    """The forms that a model finds for the sources of pairs."""
    return inflect(model, [pair.source for pair in pairs], BEAM, n_best=n_best)


def counted(pairs: Sequence[Pair], found: Sequence[Inflected]) -> dict[str, float]:
    """Shares of words: whose first form is right, that have a single form, an exact beam, a form proved to be best."""
    return {
        "right": statistics.fmean(f.form == "".join(p.target) for f, p in zip(found, pairs, strict=True)),
        "single": statistics.fmean(each.single for each in found),
        "exact": statistics.fmean(each.beam.exact for each in found),
        "optimal": statistics.fmean(each.beam.optimal for each in found),
    }


def lists(pairs: Sequence[Pair], found: Sequence[Inflected], most: int = 8) -> list[Any]:
    """Words with two to four forms, and nothing else possible: their forms and probabilities."""
    several = [
        [*told(pair), [[form, round(p, 4)] for form, p in each.forms]]
        for pair, each in zip(pairs, found, strict=True)
        if each.beam.exact and 1 < len(each.forms) <= 4
    ]
    return several[:most]


def followed(model: Recurrent, pairs: Sequence[Pair], found: Sequence[Inflected]) -> dict[str, Any]:
    """The word with the most evenly shared forms, of those that can be drawn: its beam, and its right form's steps."""

    def doubt(entry: tuple[Pair, Inflected]) -> float:
        pair, each = entry
        right = "".join(pair.target) in dict(each.forms)
        drawable = each.beam.exact and 2 < len(each.forms) <= hypotheses.MOST
        return -sum(p * math.log(p) for _, p in each.forms if p > 0) + 100 * (right and drawable) + 10 * drawable

    pair, each = max(zip(pairs, found, strict=True), key=doubt)
    choices = force(model, pair.source, model.target.encode(pair.target), k=hypotheses.MOST)
    return {
        "source": list(pair.source),
        "target": list(pair.target),
        "symbols": list(model.target.symbols),
        "forms": [[list(h.tokens), h.log_probability] for h in each.beam.hypotheses[: hypotheses.MOST]],
        "exact": each.beam.exact,
        "steps": [[c.token, c.probability, [list(other) for other in c.alternatives]] for c in choices],
    }


def attended(model: Recurrent, pair: Pair) -> dict[str, Any]:
    """Attention of the letters of a form, where it is not zero."""
    weights = [[float(f"{w:.3g}") for w in row] for row in model.attend(pair.source, pair.target).tolist()]
    return {"source": list(pair.source), "target": list(pair.target), "weights": weights}


def told(pair: Pair) -> tuple[str, str, str]:
    """Lemma, tags and form in words."""
    lemma = "".join(symbol for symbol in pair.source if len(symbol) == 1)
    return lemma, " ".join(hypotheses.name(symbol) for symbol in pair.source if len(symbol) > 1), "".join(pair.target)
