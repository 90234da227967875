"""Named entities: a tagger trained with the CRF loss and with its sparse counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

import torch
from seqeval.metrics import f1_score
from torch import Tensor

from fenchel import Gini, Regularizer, Shannon
from fenchel_lab.data import ner
from fenchel_lab.data.ner import Sentence
from fenchel_lab.drawing import style
from fenchel_lab.models import tagging
from fenchel_lab.models.tagging import Size, Tagger, Vocabulary
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

OMEGAS: list[tuple[str, Regularizer]] = [("Shannon (CRF)", Shannon()), ("Gini", Gini())]
LANGUAGES: tuple[Literal["spanish", "dutch"], ...] = ("spanish", "dutch")

PAPER = {("spanish", "Shannon (CRF)"): 86.68, ("spanish", "Gini"): 85.51}
PAPER |= {("dutch", "Shannon (CRF)"): 87.56, ("dutch", "Gini"): 86.58}

SCALED = Size()
FULL = Size(epochs=50, rate=1e-3)
TOY = Size(word=16, character=8, filters=12, hidden=16, dropout=0.2, epochs=8, batch=16, rate=2e-2)
TOY_SENTENCES = (300, 200)

DRAWN_LENGTHS = range(5, 13)
MOST_PATHS = 8
"""Tag sequences of the drawn sentence: some, so that there is doubt to see, and few enough for a table."""

SUMMARY = """
A bidirectional LSTM over word embeddings and a character CNN scores the tags of every word, a matrix scores a tag
after a tag, and `LinearChain(unary, transition, lengths, start, end, omega)` makes a distribution over whole tag
sequences of that. With `omega=Shannon()` the loss, max_Ω over all sequences minus the score of the right one, is the
conditional random field's. With `omega=Gini()` it is the same recursion with sparsemax in place of softmax: its
distribution has few sequences, and `top(k)` lists them all.

The paper finds that both tag about equally well. What differs is what is known at test time: the random field gives
every one of the astronomically many sequences some probability, the sparse model a few, often a single one, with
probabilities that sum to 1.
"""

REAL = """
What was scaled down: {size.epochs} epochs instead of 50, no pretrained word embeddings (the paper's taggers start from
embeddings of large corpora), one run with one seed. So the scores are below the paper's, and which of the two losses
is ahead in a language is not settled by one run.
"""

WHOLE = """
All sentences, {size.epochs} epochs; as in the scaled run, word embeddings are learned from the training sentences
alone, where the paper's taggers start from embeddings of large corpora.
"""

EMBEDDED = """
This page was made with a made-up set: {train} sentences from templates such as “… flew from … to …”, with names that
may be a person's, a place's or a company's, and new ones among those of the {test} test sentences. On CoNLL-2002 run
the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Corpus:
    """Sentences to train and to test with."""

    name: str
    train: Sequence[Sentence]
    test: Sequence[Sentence]


@dataclass(frozen=True)
class Outcome:
    """A trained tagger on its test sentences."""

    corpus: Corpus
    loss: str
    tagger: Tagger
    vocabulary: Vocabulary
    f1: float


CODE = """
import torch, fenchel

crf = fenchel.nn.CRF(3, omega=fenchel.Gini(), constraints="BIO", labels=["O", "B-PER", "I-PER"])
emissions = torch.randn(1, 6, 3)
best = crf(emissions).top(4)
print(best.paths[0].tolist())
print(best.probs[0])  # sparse: some of the four have probability zero
"""


@study(
    "Named entities with a sparse random field",
    source="Blondel (2019), Structured Attention and Differentiable Dynamic Programming, table of F1 scores; Mensch & "
    "Blondel (2018)",
    order=31,
    theme="Dynamic programs",
    code=CODE,
    data=["ner"],
    full="With `--full` there are 50 epochs. What differs from the paper: no pretrained word embeddings, two "
    "of its four languages, and one seed.",
)
def named_entities(context: Context) -> Result:
    """Train with both losses, score entities, and draw the tag distributions of a sentence."""
    corpora, size, scale = _setting(context)
    outcomes = []
    for number, corpus in enumerate(corpora):
        for turn, (name, omega) in enumerate(OMEGAS):
            torch.manual_seed(context.seed)  # the same start and the same order of sentences for both losses
            done, all_ = number * len(OMEGAS) + turn, len(corpora) * len(OMEGAS)
            tell = partial(_tell, context, done, all_, f"{corpus.name}, {name}")
            outcomes.append(trained(corpus, name, omega, size, tell))
    pair = outcomes[: len(OMEGAS)]
    sentence = doubtful(pair[1])
    return Result(
        SUMMARY + scale, figures=[_figure(pair, sentence)], tables=[_scores(outcomes), _sequences(pair, sentence)]
    )


def trained(corpus: Corpus, name: str, omega: Regularizer, size: Size, progress: partial[None]) -> Outcome:
    """A tagger trained on a corpus, and its score there."""
    tagger, vocabulary = tagging.train(corpus.train, omega, size, progress)
    predicted = tagging.tagged(tagger, vocabulary, corpus.test)
    f1 = f1_score([list(sentence.tags) for sentence in corpus.test], predicted)
    return Outcome(corpus, name, tagger, vocabulary, float(f1))


@torch.no_grad()
def mass(outcome: Outcome) -> tuple[float, float]:
    """How many tags of a word have probability, on average; and of how many sentences a single sequence has it all."""
    tags = words = certain = 0
    for group in tagging.grouped(outcome.corpus.test, 64):
        batch = outcome.vocabulary.batch(group)
        marginals = outcome.tagger(batch).marginals
        tags += int((marginals > 0).sum())
        words += int(batch.lengths.sum())
        certain += int(((marginals > 0).sum((1, 2)) == batch.lengths).sum())
    return tags / words, certain / len(outcome.corpus.test)


@torch.no_grad()
def doubtful(outcome: Outcome) -> Sentence:
    """The short test sentence of which the sparse model is least sure, with few enough tag sequences to list."""

    def doubt(sentence: Sentence) -> float:
        chain = outcome.tagger(outcome.vocabulary.batch([sentence]))
        listed = chain.top(MOST_PATHS).probs[0]
        return float(chain.entropy()) if listed.sum() > 1 - 1e-4 else -1.0

    short = [s for s in outcome.corpus.test if len(s.words) in DRAWN_LENGTHS and any(tag != "O" for tag in s.tags)]
    return max(short[:400], key=doubt)


def _setting(context: Context) -> tuple[list[Corpus], Size, str]:
    if context.data is None:
        train, test = made_up(*TOY_SENTENCES)
        return [Corpus("made up", train, test)], TOY, EMBEDDED.format(train=len(train), test=len(test))
    corpora = [
        Corpus(name, ner.load(name, "train", context.data), ner.load(name, "test", context.data)) for name in LANGUAGES
    ]
    size, text = (FULL, WHOLE) if context.full else (SCALED, REAL)
    return corpora, size, text.format(size=size)


def _tell(context: Context, done: int, all_: int, note: str, part: float) -> None:
    context.progress(0.97 * (done + part) / all_, note)


def _scores(outcomes: Sequence[Outcome]) -> Table:
    rows: list[list[Cell]] = []
    for outcome in outcomes:
        paper = PAPER.get((outcome.corpus.name, outcome.loss))
        tags, certain = mass(outcome)
        row = [outcome.corpus.name, outcome.loss, "–" if paper is None else f"{paper:.2f}", f"{100 * outcome.f1:.2f}"]
        rows.append([*row, f"{tags:.2f} of {len(outcome.vocabulary.tags)}", f"{100 * certain:.0f} %"])
    return Table(
        ["sentences", "loss", "paper: F1", "F1", "tags per word", "certain"],
        rows,
        caption="Entity F1 on the test sentences (whole entities, as conlleval counts; seqeval); how many tags of a "
        "word have any probability, on average; and for how many sentences one sequence has all of it.",
        paper="The paper reports 86.68 and 85.51 on Spanish, 87.56 and 86.58 on Dutch, for the CRF loss and the "
        "squared norm's, with larger taggers and pretrained embeddings; it finds the two on a par.",
    )


@torch.no_grad()
def _sequences(pair: Sequence[Outcome], sentence: Sentence) -> Table:
    rows: list[list[Cell]] = []
    for outcome in pair:
        listed = outcome.tagger(outcome.vocabulary.batch([sentence])).top(MOST_PATHS)
        for path, probability in zip(listed.paths[0].tolist(), listed.probs[0].tolist(), strict=True):
            if probability > 0:
                tags = tagging.iob2([outcome.vocabulary.tags[state] for state in path])
                rows.append([outcome.loss, f"{probability:.4f}", entities(sentence.words, tags)])
        kept = f"{listed.probs[0].sum().item():.4f}"
        rows.append([outcome.loss, kept, "sum of these"])
    right = entities(sentence.words, sentence.tags)
    return Table(
        ["loss", "probability", "entities"],
        rows,
        caption=f"The most probable tag sequences of the sentence drawn above, at most {MOST_PATHS}, as the entities "
        f"that they find, which may be the same for two of them. Right is: {right}.",
        paper="The paper's point about test time: sequences can be ranked by probability, and the list ends.",
    )


def entities(words: Sequence[str], tags: Sequence[str]) -> str:
    """The entities of a sentence in words.

    Example:
        >>> entities(["Ann", "Lee", "left", "Rome"], ["B-PER", "I-PER", "O", "B-LOC"])
        'Ann Lee (PER), Rome (LOC)'
    """
    found: list[tuple[str, list[str]]] = []
    before = "O"
    for word, tag in zip(words, tags, strict=True):
        if tag.startswith("I-") and before != "O" and found[-1][0] == tag[2:]:
            found[-1][1].append(word)
        elif tag != "O":
            found.append((tag[2:], [word]))
        before = tag
    return ", ".join(f"{' '.join(parts)} ({kind})" for kind, parts in found) or "none"


@torch.no_grad()
def _figure(pair: Sequence[Outcome], sentence: Sentence) -> Figure:
    tags = pair[0].vocabulary.tags
    marginals: list[Tensor] = [outcome.tagger(outcome.vocabulary.batch([sentence])).marginals[0] for outcome in pair]
    shown = [tag for i, tag in enumerate(tags) if max(float(p[:, i].max()) for p in marginals) > 0.02]
    columns = [tags.index(tag) for tag in shown]
    drawing, panels = style.panels(1, 2, height=1.1 + 0.22 * len(sentence.words), sharey=True)
    for axes, outcome, p in zip(panels, pair, marginals, strict=True):
        values = p[:, columns]
        image = torch.where(values > 0, values, torch.nan)  # what has no mass stays blank
        axes.imshow(image.numpy(), cmap=style.MASS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_xticks(range(len(shown)), shown, rotation=90)
        axes.set_yticks(range(len(sentence.words)), sentence.words)
        axes.set_title(outcome.loss)
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
    zeros = [int((p > 0).sum()) for p in marginals]
    return Figure(
        drawing,
        caption="Probability of each tag (columns) of each word (rows) of a test sentence, under the tagger trained "
        f"with either loss; blank is exactly zero. Of {marginals[0].numel()} entries {zeros[0]} have mass under "
        f"Shannon's, {zeros[1]} under Gini's; columns without a visible entry are left out.",
        alt="Two tables of shades, one row per word. Left, every cell has some shade; right, most cells are blank, "
        "and the mass is on one tag for most words and on a few for the doubtful ones.",
        paper="The paper draws such soft assignments for both: dense ones of the CRF, sparse ones of the squared norm.",
    )


PEOPLE = [
    "Ann",
    "Bob",
    "Carla",
    "Dmitri",
    "Eva",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jordan",
    "Karim",
    "Lena",
    "Milan",
    "Nora",
    "Paris",
    "Victoria",
]
SURNAMES = [
    "Adams",
    "Bauer",
    "Costa",
    "Diaz",
    "Evans",
    "Ford",
    "Hill",
    "Jackson",
    "Lincoln",
    "Moreau",
    "Novak",
    "Olsen",
    "Santander",
    "Washington",
]
PLACES = [
    "Athens",
    "Berlin",
    "Cairo",
    "Dublin",
    "Jackson",
    "Jordan",
    "Lincoln",
    "Milan",
    "Oslo",
    "Paris",
    "Quito",
    "Santander",
    "Victoria",
    "Washington",
]
COMPANIES = ["Acme", "Bolt", "Ford", "Globex", "Initech", "Nimbus", "Olsen", "Santander", "Umbrella", "Vertex"]
TEMPLATES = [
    "{PER} flew from {LOC} to {LOC} .",
    "{PER} works for {ORG} in {LOC} .",
    "{ORG} opened an office in {LOC} .",
    "yesterday {PER} met {PER} .",
    "{ORG} hired {PER} .",
    "shares of {ORG} fell .",
    "it rained in {LOC} again .",
    "{PER} left {ORG} .",
    "{PER} left {LOC} .",
    "he praised {PER} , not {ORG} .",
    "nothing happened .",
]


def made_up(train: int, test: int, seed: int = 0) -> tuple[list[Sentence], list[Sentence]]:
    """Sentences from templates; the test sentences have names that training has not."""
    random = Random(seed)

    def name(kind: str, new: bool) -> list[str]:
        if kind == "PER":
            first = random.choice(PEOPLE)
            return [first, random.choice(SURNAMES)] if random.random() < 0.6 else [first]
        words = {"LOC": PLACES, "ORG": COMPANIES}[kind]
        word = _coined(random, kind) if new and random.random() < 0.5 else random.choice(words)
        return [word, random.choice(["Bank", "Motors"])] if kind == "ORG" and random.random() < 0.3 else [word]

    def sentence(new: bool) -> Sentence:
        words, tags = [], []
        for part in random.choice(TEMPLATES).split():
            kind = part.strip("{}")
            parts = name(kind, new) if part.startswith("{") else [part]
            words += parts
            tags += [f"B-{kind}", *[f"I-{kind}"] * (len(parts) - 1)] if part.startswith("{") else ["O"]
        return Sentence(tuple(words), tuple(tags))

    return [sentence(False) for _ in range(train)], [sentence(True) for _ in range(test)]


def _coined(random: Random, kind: str) -> str:
    stem = "".join(random.choice(part) for part in ("BDGKLMNPRST", "aeiou", "lmnrst", "aeiou"))
    return stem + {"LOC": "burg", "ORG": "tex"}[kind]
