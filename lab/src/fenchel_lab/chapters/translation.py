"""Translation: dense and sparse attention and output on captions, scored, counted and timed."""

from __future__ import annotations

import copy
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Literal

import torch
from sacrebleu import BLEU
from torch import Tensor
from torch.nn import functional as F

from fenchel import Tsallis
from fenchel.seq2seq import (
    IGNORED,
    STOP,
    Batches,
    Beam,
    Choice,
    Pair,
    Recurrent,
    Training,
    Vocabulary,
    beam_search,
    force,
    train,
)
from fenchel.seq2seq.checkpoints import step
from fenchel_lab.data import multi30k
from fenchel_lab.drawing import hypotheses
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.measure import spread_over_seeds
from fenchel_lab.report.result import Cell

NAMES = {1.0: "softmax", 1.5: "1.5-entmax", 2.0: "sparsemax"}
ALPHAS = tuple(NAMES)
BEAM = 5
SEEN = 2
"""How often a word must be seen in training to have a number of its own."""

PAPER_BLEU = {1.0: "25.70 ± 0.15", 1.5: "26.17 ± 0.13", 2.0: "24.69 ± 0.22"}
"""Table 2, German to English."""
PAPER_NONZEROS = {1.0: ("24.25", "17,993"), 1.5: ("5.55", "16.13"), 2.0: ("3.75", "7.55")}
"""Table 3: what is attended to, and what may be written, at a step."""
PAPER_SPEED = {1.0: "14,500", 1.5: "13,000", 2.0: "–"}
"""Target words per second in training, on a GPU; of sparsemax the text says nothing."""

LONGEST = 60
"""Words that a translation may have."""

TIMED = 20
"""Batches by which the speed of training is told."""

SUMMARY = """
An encoder-decoder reads a German sentence and writes an English one: a bidirectional LSTM, an LSTM with input feeding
and global attention (`fenchel.seq2seq.Recurrent`). At every step it chooses which words to look at (`attention=`) and
which word to write (`output=`): by softmax for both, by 1.5-entmax for both, or by sparsemax for both. The sparse ones
are trained by `linear_entmax_loss`, softmax by torch's own cross entropy, so that no speed is compared with less than
that.

With a sparse output nearly all words have probability exactly zero at every step. What is left is a list that a
translator can read, and a beam search that can tell, for some sentences, that nothing better exists.
"""

VOCABULARY_TEXT = """
Words are the symbols: lower-cased, cut at spaces and punctuation, those seen at least twice in training; {source:,}
German and {target:,} English symbols, with the end and one for all other words. The paper segments words (BPE).
"""

SCALED_TEXT = """
What was scaled down: captions of images (Multi30k) in place of the paper's talks (IWSLT 2017, 206,112 sentences), so
its numbers are another data set's; of these the sentences of at most {size.longest} German words: {train:,} to train
with, {validation:,} to count non-zeros on, {test:,} to test with. {size.layers} layer of width {size.hidden} (the
paper: 500), {size.how.epochs} epochs with a constant rate for every model, the last one is taken; one seed, which
settles no small difference.
"""

FULL_TEXT = """
All sentences of Multi30k ({train:,} to train with, {test:,} to test with; the paper's talks, IWSLT 2017, are 206,112),
{size.layers} layers of width {size.hidden}, at most {size.how.epochs} epochs, {size.seeds} seeds.
"""

TOY_TEXT = """
This page was made with a made-up set: {train} sentences from a template, in which some German words have two
translations, and {test} others; {size.layers} layer of width {size.hidden}, {size.how.epochs} epochs. On Multi30k run
the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Size:
    """How large the models are, how they are trained, and on which sentences."""

    embedding: int
    hidden: int
    layers: int
    how: Training
    dropout: float = 0.1
    seeds: int = 1
    longest: int | None = None
    """German words that a sentence may have."""


TOY = Size(32, 32, 1, Training(epochs=6, batch=16, rate=1e-2, every=6), dropout=0.0)
SCALED = Size(128, 128, 1, Training(epochs=3, batch=32, rate=1e-3, every=3), longest=10)
FULL = Size(500, 500, 2, Training(epochs=20, batch=64, rate=1e-3, patience=20), dropout=0.3, seeds=3)

TOY_SENTENCES = (300, 40, 40)


@dataclass(frozen=True)
class Corpus:
    """Sentences to train with, to count on, and to test with; and the test's translations as they were written."""

    train: Sequence[Pair]
    validation: Sequence[Pair]
    test: Sequence[Pair]
    references: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """Models of one α, one per seed; what the first of them does; and words per second of processor time."""

    alpha: float
    models: Sequence[Recurrent]
    bleus: Sequence[float]
    greedy_bleus: Sequence[float]
    length: float
    greedy_length: float
    """Words that are written for a word of the reference."""
    translations: Sequence[str]
    beams: Sequence[Beam]
    attended: float
    possible: float
    trained_a_second: float
    decoded_a_second: float


class Dense(Recurrent):
    """The same model with torch's own loss for softmax."""

    def loss(self, hidden: Tensor, target: Tensor, *, reduction: Literal["none", "mean", "sum"] = "mean") -> Tensor:
        scores = self.output(hidden).flatten(0, -2)
        return F.cross_entropy(scores, target.flatten(), ignore_index=IGNORED, reduction=reduction)


CODE = """
import torch, fenchel

hidden, weight = torch.randn(64, 128), torch.randn(10_000, 128, requires_grad=True)
target = torch.randint(10_000, (64,))
loss = fenchel.linear_entmax_loss(hidden, weight, target)  # no matrix of 64 × 10,000
loss.backward()
print(f"{(weight.grad.abs().sum(-1) > 0).float().mean():.1%} of the words received a gradient")
"""


@study(
    "Few candidates per word: translating captions",
    source="Peters, Niculae & Martins (2019), Sparse Sequence-to-Sequence Models, tables 2 and 3, figures 2 and 5",
    order=72,
    theme="Sequence to sequence",
    code=CODE,
    data=["multi30k"],
    full="With `--full` all captions, the paper's width and three seeds. What differs from the paper: captions "
    "of images (Multi30k, 29,000 sentences) in place of talks (IWSLT 2017) and of its other language "
    "pairs, and whole words in place of BPE.",
    tour=False,
)
def translation(context: Context) -> Result:
    """Train the three models, score and time them, and look at a sentence."""
    corpus, size, text = _setting(context)
    first = trained(corpus, size, context.seed, partial(_tell, context, 0, size.seeds))
    others = [
        trained(corpus, size, context.seed + turn, partial(_tell, context, turn, size.seeds))
        for turn in range(1, size.seeds)
    ]
    context.progress(0.9, "translating")
    outcomes = judged(corpus, size, [first, *others])
    sentence = telling(outcomes, corpus.test)
    vocabularies = VOCABULARY_TEXT.format(source=len(first[0].source), target=len(first[0].target))
    return Result(
        SUMMARY + vocabularies + text,
        figures=[_attention(outcomes, sentence), _alternatives(outcomes[1], sentence)],
        tables=[_scores(outcomes), _counts(outcomes), _examples(outcomes, corpus)],
    )


# -- training and judging ----------------------------------------------------------------------------------------------


def trained(corpus: Corpus, size: Size, seed: int, tell: Callable[[float, str], None]) -> list[Recurrent]:
    """A model for every α: the same start, the same batches."""
    source = Vocabulary.of((pair.source for pair in corpus.train), min_count=SEEN)
    target = Vocabulary.of((pair.target for pair in corpus.train), min_count=SEEN)
    models = []
    for number, alpha in enumerate(ALPHAS):
        torch.manual_seed(seed)
        kind = Dense if alpha == 1 else Recurrent
        omega = Tsallis(alpha)
        model = kind(
            source,
            target,
            embedding=size.embedding,
            hidden=size.hidden,
            layers=size.layers,
            dropout=size.dropout,
            attention=omega,
            output=omega,
        )
        train(
            model,
            corpus.train,
            corpus.validation,
            training=size.how,
            progress=partial(_nth, tell, number, NAMES[alpha]),
        )
        models.append(model)
    return models


def judged(corpus: Corpus, size: Size, runs: Sequence[Sequence[Recurrent]]) -> list[Outcome]:
    """All that is measured of the models of all seeds."""
    sources = [pair.source for pair in corpus.test]
    searches = [searched(models, sources) for models in runs]
    speeds = paces(runs[0], corpus.train, size.how)
    outcomes = []
    for number, alpha in enumerate(ALPHAS):
        models = [each[number] for each in runs]
        written = [
            [_sentence(model, beam.best.tokens) for beam in found[number][0]]
            for model, found in zip(models, searches, strict=True)
        ]
        greedy = [[_sentence(model, tokens) for tokens in greedily(model, sources)] for model in models]
        beams, decoded = searches[0][number]
        attended, possible = nonzeros(models[0], corpus.validation)
        outcomes.append(
            Outcome(
                alpha,
                models,
                [bleu(each, corpus.references) for each in written],
                [bleu(each, corpus.references) for each in greedy],
                length(written[0], corpus.references),
                length(greedy[0], corpus.references),
                written[0],
                beams,
                attended,
                possible,
                speeds[number],
                decoded,
            )
        )
    return outcomes


def searched(models: Sequence[Recurrent], sources: Sequence[Sequence[str]]) -> list[tuple[list[Beam], float]]:
    """Beams of all sources in their order, and words per second, for every model; in turns, batch by batch."""
    order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
    found: list[dict[int, Beam]] = [{} for _ in models]
    seconds = [0.0] * len(models)
    for first in range(0, len(order), 32):
        rows = order[first : first + 32]
        for number, model in enumerate(models):
            start = time.process_time()
            beams = beam_search(model, [sources[row] for row in rows], beam_size=BEAM, n_best=1, max_length=LONGEST)
            seconds[number] += time.process_time() - start
            found[number].update(zip(rows, beams, strict=True))
    words = [sum(len(beam.best.tokens) + 1 for beam in each.values()) for each in found]
    return [
        ([each[row] for row in range(len(sources))], count / spent)
        for each, count, spent in zip(found, words, seconds, strict=True)
    ]


@torch.no_grad()
def greedily(model: Recurrent, sources: Sequence[Sequence[str]]) -> list[list[int]]:
    """The most probable symbol at every step, until that is the end.

    A beam of one returns the same string, ties aside, with two exceptions. If no step had more than one possible
    continuation besides the end, the search was exact, and it returns the most probable string, which may end earlier.
    If the end was never the most probable symbol, it returns a string that could have ended, where this one is cut.
    """
    state, tokens = model.start(sources), torch.full((len(sources),), model.begin)
    written = []
    for _ in range(LONGEST):
        probabilities, state = model.step(tokens, state)
        tokens = probabilities.argmax(-1)
        written.append(tokens)
    rows: list[list[int]] = torch.stack(written, 1).tolist()
    return [row[: row.index(STOP)] if STOP in row else row for row in rows]


def paces(models: Sequence[Recurrent], pairs: Sequence[Pair], how: Training) -> list[float]:
    """Words per second in steps of training, by copies of trained models, in turns."""
    copies = [copy.deepcopy(model).train() for model in models]
    optimizers = [torch.optim.Adam(each.parameters(), lr=how.rate) for each in copies]
    batches = Batches(pairs, models[0].source, models[0].target, size=how.batch, seed=how.seed)
    taken: list[list[float]] = [[] for _ in models]
    words = []
    for batch in islice(batches.epoch(how.epochs), TIMED):
        words.append(batch.tokens)
        for model, optimizer, seconds in zip(copies, optimizers, taken, strict=True):
            start = time.process_time()
            step(model(batch), optimizer, how.clip)
            seconds.append(time.process_time() - start)
    return [sum(words) / sum(each) for each in taken]


@torch.no_grad()
def nonzeros(model: Recurrent, pairs: Sequence[Pair]) -> tuple[float, float]:
    """How many words are attended to, and how many may be written, on average over the steps of known targets."""
    attended = possible = steps = 0
    for batch in Batches(pairs, model.source, model.target):
        hidden, weights = model.decode(model.encode(batch.source), batch.inputs)
        there = batch.target != IGNORED
        attended += int((weights[there] > 0).sum())
        possible += int((model.omega.argmax(model.output(hidden[there])) > 0).sum())
        steps += batch.tokens
    return attended / steps, possible / steps


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of a whole test set, without case, as sacreBLEU counts it."""
    return float(BLEU(lowercase=True).corpus_score(list(translations), [list(references)]).score)


def length(translations: Sequence[str], references: Sequence[str]) -> float:
    """Words of all translations for a word of the references."""
    score = BLEU(lowercase=True).corpus_score(list(translations), [list(references)])
    return float(score.sys_len / score.ref_len)


def telling(outcomes: Sequence[Outcome], pairs: Sequence[Pair]) -> Pair:
    """The short sentence with the most steps of which 1.5-entmax has a few candidates, the right one among them.

    It is to be possible in both sparse models, and every step's list short enough to be read.
    """
    sparse, sparsest = (outcome.models[0] for outcome in outcomes[1:])

    def worth(pair: Pair) -> float:
        known = all(word in sparse.source for word in pair.source) and all(
            word in sparse.target for word in pair.target
        )
        if not known or not 4 < len(pair.source) < 10 or len(pair.target) > 10:
            return -1
        choices, others = (force(model, pair.source, model.target.encode(pair.target)) for model in (sparse, sparsest))
        possible = all(each.probability > 0 for each in (*choices, *others))
        counts = [len(each.alternatives) for each in choices]
        return 100 * possible + 50 * (max(counts) <= hypotheses.MOST) + sum(count > 1 for count in counts)

    return max(pairs[:200], key=worth)


def _nth(tell: Callable[[float, str], None], number: int, name: str, part: float, note: str = "") -> None:
    tell((number + part) / len(ALPHAS), f"{name}: {note}")


def _tell(context: Context, done: int, all_: int, part: float, note: str) -> None:
    context.progress(0.9 * (done + part) / all_, note)


# -- sentences ---------------------------------------------------------------------------------------------------------

_WORDS = re.compile(r"'s\b|\w+(?:-\w+)*|[^\w\s]")
_JOINED = re.compile(r" ('s\b|[.,!?;:)])")


def words(sentence: str) -> tuple[str, ...]:
    """The symbols of a sentence.

    Example:
        >>> words("A boy's T-shirt, red.")
        ('a', 'boy', "'s", 't-shirt', ',', 'red', '.')
    """
    return tuple(_WORDS.findall(sentence.lower()))


def joined(symbols: Sequence[str]) -> str:
    """A sentence of its symbols.

    Example:
        >>> joined(words("A boy's T-shirt, red."))
        "a boy's t-shirt, red."
    """
    return _JOINED.sub(r"\1", " ".join(symbols))


def _sentence(model: Recurrent, tokens: Sequence[int]) -> str:
    # As a word, lest BLEU take its brackets for words of their own.
    return joined([{"<unk>": "unk"}.get(word, word) for word in model.target.decode(tokens)])


def _setting(context: Context) -> tuple[Corpus, Size, str]:
    if context.data is None:
        corpus, size, text = made_up(*TOY_SENTENCES), TOY, TOY_TEXT
    else:
        size, text = (FULL, FULL_TEXT) if context.full else (SCALED, SCALED_TEXT)
        corpus = captions(context.data, size.longest)
    counts = {"train": len(corpus.train), "validation": len(corpus.validation), "test": len(corpus.test)}
    return corpus, size, text.format(size=size, **counts)


def captions(folder: Path, longest: int | None) -> Corpus:
    """Multi30k, without the sentences whose German is longer than ``longest``."""

    def read(split: multi30k.Split) -> tuple[list[Pair], list[str]]:
        sides = [(Pair(words(german), words(english)), english) for german, english in multi30k.load(split, folder)]
        kept = [side for side in sides if longest is None or len(side[0].source) <= longest]
        return [pair for pair, _ in kept], [english for _, english in kept]

    return Corpus(read("train")[0], read("val")[0], *read("test"))


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
    pairs = [Pair(words(german), words(english)) for german, english in sentences[: train + validation + test]]
    last = train + validation
    references = [english for _, english in sentences[last : last + test]]
    return Corpus(pairs[:train], pairs[train:last], pairs[last:], references)


# -- tables and pictures -----------------------------------------------------------------------------------------------


def _scores(outcomes: Sequence[Outcome]) -> Table:
    rows: list[list[Cell]] = []
    for each in outcomes:
        proved = [[beam.exact for beam in each.beams], [beam.optimal for beam in each.beams]]
        shares = [f"{100 * statistics.fmean(which):.1f} %" for which in proved]
        scores = [spread_over_seeds(each.bleus), f"{each.length:.2f}"]
        scores += [spread_over_seeds(each.greedy_bleus), f"{each.greedy_length:.2f}"]
        rows.append([NAMES[each.alpha], PAPER_BLEU[each.alpha], *scores, *shares])
    scorer = BLEU(lowercase=True)
    scorer.corpus_score(["a"], [["a"]])  # its signature is told once it has counted
    return Table(
        [
            "attention and output",
            "paper: BLEU",
            "BLEU",
            "length",
            "greedy: BLEU",
            "greedy: length",
            "exact beam",
            "proved best",
        ],
        rows,
        caption=f"BLEU on the test sentences with a beam of {BEAM}, no length penalty (sacreBLEU, "
        f"{scorer.get_signature()}), and words written for a word of the reference; the same for greedy decoding. The "
        "beam ends a translation where the end is among the 5 most probable continuations; if it has seen every "
        "translation of non-zero probability, it returns the most probable one. Then the share of sentences for which "
        "it has; and the share whose translation is proved to be the most probable one, because nothing that was "
        "pruned can be more probable.",
        paper="Table 2, German to English: other sentences (IWSLT 2017 talks) and tokenized BLEU, so only the order "
        "can be compared. There 1.5-entmax is ahead in all six directions.",
    )


def _counts(outcomes: Sequence[Outcome]) -> Table:
    rows: list[list[Cell]] = []
    for each in outcomes:
        attended, possible = PAPER_NONZEROS[each.alpha]
        row: list[Cell] = [NAMES[each.alpha], attended, f"{each.attended:.2f}", possible, f"{each.possible:,.2f}"]
        rows.append([*row, PAPER_SPEED[each.alpha], f"{each.trained_a_second:,.0f}", f"{each.decoded_a_second:,.0f}"])
    header = ["attention and output", "paper: attended", "attended", "paper: possible", "possible"]
    return Table(
        [*header, "paper: words/s", "words/s, training", "words/s, beam search"],
        rows,
        caption=f"Words of the source with any attention, and words of the {len(outcomes[0].models[0].target):,} that "
        "may be written, at a step: averages over the validation sentences with known targets. Target words per second "
        "of processor time, summed over threads: in whole steps of training (loss, gradients, Adam) after the "
        f"training proper, {TIMED} batches at most, and in the beam searches of the test sentences; the three models "
        "take turns.",
        paper="Table 3 and the text under it: 17,993 sub-words, longer sentences, and speeds in training on one "
        "GeForce GTX 1080; sparsemax's is not told.",
    )


def _examples(outcomes: Sequence[Outcome], corpus: Corpus) -> Table:
    rows: list[list[Cell]] = []
    count = len(corpus.test)
    for row in range(0, count, max(1, count // 4))[:4] if count else ():
        rows.append(["German", joined(corpus.test[row].source)])
        rows.append(["reference", joined(corpus.test[row].target)])
        rows += [[NAMES[each.alpha], each.translations[row]] for each in outcomes]
    return Table(
        ["by", "sentence"],
        rows,
        caption="Four test sentences, evenly spaced, and their translations; unk stands for a word that the "
        "vocabulary does not have.",
    )


def _attention(outcomes: Sequence[Outcome], pair: Pair) -> Figure:
    panels = [(NAMES[each.alpha], each.models[0].attend(pair.source, pair.target)) for each in outcomes]
    seen = [f"{float((weights > 0).sum(1).float().mean()):.1f} with {name}" for name, weights in panels]
    return Figure(
        hypotheses.attention(panels, pair.source, pair.target, across=True),
        caption=f"Attention of the words of “{joined(pair.target)}” (rows, ▪ is the end) to those of "
        f"“{joined(pair.source)}” (columns), as each model writes the reference; zero is blank. Words "
        f"looked at for a word, on average: {', '.join(seen)}.",
        alt=f"Three tables of shades, one row per English word, one column per German word. All "
        f"{len(pair.source)} cells of a row have a shade with softmax, a few with the others.",
        paper="Figure 5 draws the attention of 1.5-entmax for a sentence of the talks, with few words per row.",
    )


def _alternatives(outcome: Outcome, pair: Pair) -> Figure:
    model = outcome.models[0]
    choices = force(model, pair.source, model.target.encode(pair.target))
    counts = [len(each.alternatives) for each in choices]
    return Figure(
        hypotheses.steps(choices, model.target),
        caption=f"Forced decoding of “{joined(pair.target)}” from “{joined(pair.source)}” with 1.5-entmax: every word, "
        "its probability as a bar, and beside it all other words that had any, with their per cents. "
        f"{_certain(choices)} of {len(choices)} words, the end (▪) counted, were the only ones possible.",
        alt=f"A list of {len(choices)} words, with {', '.join(map(str, counts))} possibilities each.",
        paper="Figure 2 draws this for “the tree of life” and a list of synonyms for “view”: certain inside a phrase, "
        "a handful of candidates elsewhere.",
    )


def _certain(choices: Sequence[Choice]) -> int:
    return sum(last - first + 1 for first, last in hypotheses.certain(choices))
