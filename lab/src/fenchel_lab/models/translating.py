"""Runs of models that translate captions: sentences as sub-words, trainings, and all that is measured of a model."""

from __future__ import annotations

import copy
import io
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from sacrebleu import BLEU
from torch import Tensor
from torch.nn import functional as F

from fenchel import Fused, Gini, Oscar, Regularizer, Shannon, Tsallis
from fenchel.continuous import ContinuousAttention, GaussianBasis, MatchedEncoder
from fenchel.seq2seq import (
    IGNORED,
    STOP,
    Batches,
    Beam,
    FertilityPredictor,
    Pair,
    Recurrent,
    Seq2Seq,
    Training,
    Transformer,
    Vocabulary,
    beam_search,
    force,
)
from fenchel.seq2seq.checkpoints import step
from fenchel_lab.data import multi30k
from fenchel_lab.drawing import hypotheses
from fenchel_lab.models import diary
from fenchel_lab.models.diary import Entry
from fenchel_lab.models.training import by_length

BEAM, WIDE = 5, 20
LONGEST = 80
"""Sub-words that a translation may have."""
TIMED = 20
"""Batches by which the speed of training is told."""
DROPPED = 0.2
"""A sub-word of the source that receives less attention in all steps together counts as dropped."""


@dataclass(frozen=True)
class Size:
    """How large models are, and how they are trained.

    Args:
        how: the training.
        width: of embeddings and states.
        layers: of encoder and decoder.
        dropout: in training.
        heads: of Transformers.
        pieces: sub-words of both languages together.
        runs: how many seeds of the main models.
    """

    how: Training
    width: int = 256
    layers: int = 1
    dropout: float = 0.3
    heads: int = 4
    pieces: int = 6_000
    runs: int = 3


@dataclass(frozen=True)
class Corpus:
    """Sentences to train with, to choose the epoch by and to test with; and English ones as they were written."""

    train: Sequence[Pair]
    validation: Sequence[Pair]
    test: Sequence[Pair]
    held: Sequence[str]
    references: Sequence[str]


# -- sentences ---------------------------------------------------------------------------------------------------------


def joined(symbols: Sequence[str]) -> str:
    """The sentence of sub-words, of which those that begin a word begin with ▁.

    Example:
        >>> joined(["▁two", "▁dog", "s", "."])
        'two dogs.'
    """
    # Without brackets, lest BLEU take them for words of their own.
    return "".join(symbols).replace("<unk>", "unk").replace("▁", " ").strip()


@cache
def captions(folder: Path, pieces: int) -> Corpus:
    """All sentences of Multi30k, in lower case, as sub-words that are learned from both languages (BPE)."""
    import sentencepiece

    splits: tuple[multi30k.Split, ...] = ("train", "val", "test")
    train, held, test = (multi30k.load(split, folder) for split in splits)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([side.lower() for pair in train for side in pair]),
        model_writer=written,
        vocab_size=pieces,
        model_type="bpe",
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    reader = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())

    def read(pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        sides = [reader.encode([pair[side].lower() for pair in pairs], out_type=str) for side in (0, 1)]
        return [Pair(tuple(german), tuple(english)) for german, english in zip(*sides, strict=True)]

    return Corpus(read(train), read(held), read(test), [e for _, e in held], [e for _, e in test])


ADJECTIVES = [("kleiner", "small"), ("kleiner", "little"), ("großer", "big"), ("großer", "tall"), ("alter", "old")]
NOUNS = [("hund", "dog"), ("mann", "man"), ("junge", "boy"), ("vogel", "bird"), ("clown", "clown"), ("koch", "cook")]
VERBS = [("läuft", "runs"), ("läuft", "walks"), ("springt", "jumps"), ("schläft", "sleeps"), ("wartet", "waits")]
PLACES = [("im park", "in the park"), ("am strand", "at the beach"), ("auf der straße", "on the street")]
PLACES += [("auf der straße", "in the street"), ("im schnee", "in the snow")]


def made_up(train: int, validation: int, test: int, seed: int = 0) -> Corpus:
    """Sentences of a template, in an order that does not change; some words have two translations."""
    sentences = [
        tuple(
            f"{article} {' '.join(parts)} ."
            for article, parts in zip(("ein", "a"), zip(*each, strict=True), strict=True)
        )
        for each in product(ADJECTIVES, NOUNS, VERBS, PLACES)
    ]
    Random(seed).shuffle(sentences)
    sides = [[tuple(f"▁{word}" for word in side.split()) for side in each] for each in sentences]
    pairs, english = [Pair(*side) for side in sides], [each[1] for each in sentences]
    last = train + validation
    parts = pairs[:train], pairs[train:last], pairs[last : last + test]
    return Corpus(*parts, english[train:last], english[last : last + test])


# -- models ------------------------------------------------------------------------------------------------------------


class Dense(Recurrent):
    """The same model with torch's own loss for softmax."""

    def loss(self, hidden: Tensor, target: Tensor, *, reduction: Literal["none", "mean", "sum"] = "mean") -> Tensor:
        scores = self.output(hidden).flatten(0, -2)
        return F.cross_entropy(scores, target.flatten(), ignore_index=IGNORED, reduction=reduction)


ALPHAS = {"softmax": 1.0, "1.5-entmax": 1.5, "sparsemax": 2.0}
"""Of attention and output of the main models."""
ATTENTIONS: dict[str, Regularizer] = {
    "sparsemax attention": Gini(),
    "fusedmax attention": Fused(0.1),
    "oscarmax attention": Oscar(0.1),
    "sparsemax with fertility": Gini(),
}
"""With a 1.5-entmax output."""
COMBINED: dict[str, tuple[float, Regularizer]] = {
    "discrete + continuous softmax": (1.0, Shannon()),
    "discrete + continuous sparsemax": (2.0, Gini()),
}
"""α of the density and discrete attention, with a softmax output as in the paper."""
HEADS = {"softmax heads": 1.0, "1.5-entmax heads": 1.5, "sparsemax heads": 2.0, "learned heads": None}
"""Of Transformers with a softmax output."""


def built(kind: str, corpus: Corpus, size: Size) -> Seq2Seq:
    """A model before it learns."""
    sides = [
        Vocabulary.of(pair.source for pair in corpus.train),
        Vocabulary.of(pair.target for pair in corpus.train),
    ]
    if kind in HEADS:
        alpha = HEADS[kind]
        omega = Tsallis(1.5, learnable=True, shape=(size.heads, 1, 1)) if alpha is None else Tsallis(alpha)
        widths: Any = {"width": size.width, "inner": 2 * size.width, "num_heads": size.heads}
        widths |= {"layers": size.layers, "dropout": size.dropout}
        return Transformer(*sides, **widths, attention=omega, output=Shannon())
    sizes: Any = {"embedding": size.width, "hidden": size.width, "layers": size.layers, "dropout": size.dropout}
    if kind in COMBINED:
        alpha, discrete = COMBINED[kind]
        both = ContinuousAttention(GaussianBasis.line(30), alpha, encoder=MatchedEncoder(discrete), combined=True)
        return Dense(*sides, **sizes, attention=both, output=Shannon())
    if kind in ATTENTIONS:
        fertility = FertilityPredictor(size.width) if "fertility" in kind else None
        return Recurrent(*sides, **sizes, attention=ATTENTIONS[kind], output=Tsallis(1.5), fertility=fertility)
    omega = Tsallis(ALPHAS[kind])
    return (Dense if kind == "softmax" else Recurrent)(*sides, **sizes, attention=omega, output=omega)


def alphas(model: Seq2Seq) -> dict[str, list[list[float]]]:
    """The α of every head, one list for each layer, of all attentions of a Transformer."""
    assert isinstance(model, Transformer)

    def of(omega: Any) -> list[float]:
        found: list[float] = torch.as_tensor(omega.parameter).expand(model.num_heads, 1, 1).flatten().tolist()
        return [round(alpha, 4) for alpha in found]

    return {
        "encoder": [of(layer.own.omega) for layer in model.encoder],  # type: ignore[union-attr]
        "decoder": [of(layer.own.omega) for layer in model.decoder],  # type: ignore[union-attr]
        "cross": [of(layer.cross.omega) for layer in model.decoder],  # type: ignore[union-attr]
    }


# -- runs --------------------------------------------------------------------------------------------------------------


def fitted(
    kind: str, corpus: Corpus, size: Size, seed: int, folder: Path | None, progress: Callable[[float], None]
) -> tuple[Seq2Seq, list[Entry]]:
    """A model, and an entry for every epoch; from its checkpoint, if there is one."""
    torch.manual_seed(seed)
    model = built(kind, corpus, size)

    def measure(epoch: int) -> Mapping[str, Any]:
        written = [text(model, tokens) for tokens in greedily(model, [pair.source for pair in corpus.validation])]
        found: dict[str, Any] = {"bleu": round(bleu(written, corpus.held), 2)}
        return found | ({"alphas": alphas(model)} if kind == "learned heads" else {})

    own = None if folder is None else folder / f"{kind.replace(' ', '-')}.seed-{seed}"
    how = replace(size.how, seed=seed)
    return model, diary.trained(model, corpus.train, corpus.validation, how, own, measure, progress)


def run(
    kind: str, corpus: Corpus, size: Size, seed: int, folder: Path | None, progress: Callable[[float], None]
) -> dict[str, Any]:
    """The figures of a model."""
    model, entries = fitted(kind, corpus, size, seed, folder, lambda part: progress(0.9 * part))
    sources = [pair.source for pair in corpus.test]
    beams, seconds = searched(model, sources, BEAM)
    written = [text(model, beam.best.tokens) for beam in beams]
    ways = {"greedy": [text(model, tokens) for tokens in greedily(model, sources)], f"beam {BEAM}": written}
    ways[f"beam {WIDE}"] = [text(model, beam.best.tokens) for beam in searched(model, sources, WIDE)[0]]
    best = diary.best(entries, "token accuracy")
    attended, possible = nonzeros(model, corpus.validation)
    chosen = telling(corpus)
    choices = force(model, chosen.source, model.target.encode(chosen.target), k=hypotheses.MOST)
    weights = model.attend(chosen.source, chosen.target).tolist()
    covered = [beam.best.coverage for beam in beams]
    return {
        "ways": {
            way: {
                "bleu": bleu(each, corpus.references),
                "length": length(each, corpus.references),
                "empty": sum(not sentence for sentence in each),
            }
            for way, each in ways.items()
        },
        "validation": max(each["bleu"] for each in entries),
        "epoch": best["epoch"],
        "empty is best": empty_is_best(model, sources, beams),
        "exact": statistics.fmean(beam.exact for beam in beams),
        "optimal": statistics.fmean(beam.optimal for beam in beams),
        "attended": attended,
        "possible": possible,
        "repeated": repeated(written),
        "dropped": None
        if any(each is None for each in covered)
        else statistics.fmean(float((each < DROPPED).float().mean()) for each in covered if each is not None),
        "decoding": sum(len(beam.best.tokens) + 1 for beam in beams) / seconds,
        "entries": entries,
        "examples": examples(written),
        "alphas": alphas(model) if isinstance(model, Transformer) else None,
        "sentence": {
            "source": list(chosen.source),
            "target": list(chosen.target),
            "weights": [[float(f"{weight:.3g}") for weight in row] for row in weights],
            "steps": [
                [model.target.name(c.token), c.probability, [[model.target.name(t), p] for t, p in c.alternatives]]
                for c in choices
            ],
        },
    }


def examples(written: Sequence[str], count: int = 4) -> list[str]:
    """Some of all sentences, evenly spaced."""
    return list(written[:: max(1, len(written) // count)][:count])


def telling(corpus: Corpus) -> Pair:
    """The first short test sentence of which every sub-word was seen in training."""
    known = {symbol for pair in corpus.train for symbol in (*pair.source, *pair.target)}
    short = [pair for pair in corpus.test if 5 < len(pair.source) < 13 and len(pair.target) < 13]
    return next((pair for pair in short if known.issuperset((*pair.source, *pair.target))), corpus.test[0])


def text(model: Seq2Seq, tokens: Sequence[int]) -> str:
    """The sentence of the numbers of symbols."""
    return joined(model.target.decode(tokens))


def searched(model: Seq2Seq, sources: Sequence[Sequence[str]], width: int) -> tuple[list[Beam], float]:
    """Beams of all sources, in their order, and seconds of processor time."""
    found: dict[int, Beam] = {}
    start = time.process_time()
    for rows in by_length([len(source) for source in sources], 32):
        beams = beam_search(model, [sources[row] for row in rows], beam_size=width, n_best=1, max_length=LONGEST)
        found.update(zip(rows, beams, strict=True))
    return [found[row] for row in range(len(sources))], time.process_time() - start


@torch.no_grad()
def greedily(model: Seq2Seq, sources: Sequence[Sequence[str]]) -> list[list[int]]:
    """The most probable symbol at every step, until that is the end."""
    found: dict[int, list[int]] = {}
    for rows in by_length([len(source) for source in sources], 64):
        state, tokens = model.start([sources[row] for row in rows]), torch.full((len(rows),), model.begin)
        written: list[Tensor] = []
        ended = torch.zeros(len(rows), dtype=torch.bool)
        while len(written) < LONGEST and not bool(ended.all()):
            probabilities, state = model.step(tokens, state)
            tokens = probabilities.argmax(-1)
            ended |= tokens == STOP
            written.append(tokens)
        for row, line in zip(rows, torch.stack(written, 1).tolist(), strict=True):
            found[row] = line[: line.index(STOP)] if STOP in line else line
    return [found[row] for row in range(len(sources))]


@torch.no_grad()
def empty_is_best(model: Seq2Seq, sources: Sequence[Sequence[str]], beams: Sequence[Beam]) -> float:
    """The share of sources for which an empty translation is more probable than the one that was found."""
    found = 0
    for rows in by_length([len(source) for source in sources], 64):
        state = model.start([sources[row] for row in rows])
        first, _ = model.step(torch.full((len(rows),), model.begin), state)
        for row, p in zip(rows, first[:, STOP].tolist(), strict=True):
            best = beams[row].best
            found += bool(best.tokens) and p > 0 and math.log(p) > best.log_probability
    return found / len(sources)


@torch.no_grad()
def nonzeros(model: Seq2Seq, pairs: Sequence[Pair]) -> tuple[float, float]:
    """How many sub-words are attended to, and how many may be written, on average over the steps of known targets."""
    attended = possible = steps = 0
    for batch in Batches(pairs, model.source, model.target):
        hidden, weights = model.decode(model.encode(batch.source), batch.inputs)
        there = batch.target != IGNORED
        attended += int((weights[there] != 0).sum())
        possible += int((model.omega.argmax(model.output(hidden[there])) > 0).sum())
        steps += batch.tokens
    return attended / steps, possible / steps


def repeated(sentences: Sequence[str], n: int = 2) -> float:
    """The share of n-grams of words that occur in the same sentence before.

    Example:
        >>> repeated(["a dog and a dog", "a cat"])
        0.2
    """
    again = total = 0
    for sentence in sentences:
        words = sentence.lower().split()
        grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
        again, total = again + len(grams) - len(set(grams)), total + len(grams)
    return again / total if total else 0.0


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of a whole test set, without case, as sacreBLEU counts it."""
    return float(BLEU(lowercase=True).corpus_score(list(translations), [list(references)]).score)


def length(translations: Sequence[str], references: Sequence[str]) -> float:
    """Words of all translations for a word of the references."""
    score = BLEU(lowercase=True).corpus_score(list(translations), [list(references)])
    return float(score.sys_len / score.ref_len)


# -- speed -------------------------------------------------------------------------------------------------------------


class Bisected(Recurrent):
    """The same model with the loss of the package `entmax`, whose threshold is found by bisection."""

    def loss(self, hidden: Tensor, target: Tensor, *, reduction: Literal["none", "mean", "sum"] = "mean") -> Tensor:
        from entmax import entmax_bisect_loss

        there = target.flatten() != IGNORED
        losses: Tensor = entmax_bisect_loss(self.output(hidden).flatten(0, -2)[there], target.flatten()[there], 1.5)
        return losses.mean() if reduction == "mean" else losses.sum()


def paces(
    corpus: Corpus, size: Size, seed: int, folder: Path | None, progress: Callable[[float], None]
) -> dict[str, float]:
    """Target symbols per second of processor time in steps of training, by trained models, in turns."""
    models: dict[str, Seq2Seq] = {}
    for turn, kind in enumerate(ALPHAS):

        def tell(part: float, turn: int = turn) -> None:
            progress((turn + part) / len(ALPHAS))

        models[kind] = fitted(kind, corpus, size, seed, folder, tell)[0]
    try:
        import entmax  # noqa: F401
    except ImportError:
        pass
    else:
        models["1.5-entmax by bisection"] = copy.deepcopy(models["1.5-entmax"])
        models["1.5-entmax by bisection"].__class__ = Bisected
    optimizers = {
        kind: torch.optim.Adam(model.train().parameters(), lr=size.how.rate) for kind, model in models.items()
    }
    first = models["softmax"]
    batches = Batches(corpus.train, first.source, first.target, size=size.how.batch, seed=seed)
    seconds, tokens = dict.fromkeys(models, 0.0), 0
    for batch in islice(batches.epoch(size.how.epochs), TIMED):
        tokens += batch.tokens
        for kind, model in models.items():
            start = time.process_time()
            step(model(batch), optimizers[kind], size.how.clip)
            seconds[kind] += time.process_time() - start
    return {kind: tokens / spent for kind, spent in seconds.items()}
