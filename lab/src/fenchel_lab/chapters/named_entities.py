"""Named entities: a tagger trained with the CRF loss and with its sparse counterpart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import Any, Literal

import torch
from seqeval.metrics import f1_score

from fenchel import Gini, Regularizer, Shannon
from fenchel_lab.data import ner
from fenchel_lab.data.ner import Sentence
from fenchel_lab.drawing import style
from fenchel_lab.models import tagging
from fenchel_lab.models.tagging import Size, Tagger, Vocabulary
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import half_width, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

CRF, GINI = "Shannon (CRF)", "Gini"
OMEGAS: dict[str, Regularizer] = {CRF: Shannon(), GINI: Gini()}
LANGUAGES: tuple[Literal["spanish", "dutch"], ...] = ("spanish", "dutch")

PAPER = {("spanish", "Shannon (CRF)"): 86.68, ("spanish", "Gini"): 85.51}
PAPER |= {("dutch", "Shannon (CRF)"): 87.56, ("dutch", "Gini"): 86.58}

SCALED = Size()
FULL = Size(epochs=50, rate=1e-3)
TOY = Size(word=16, character=8, filters=12, hidden=16, dropout=0.2, epochs=8, batch=16, rate=2e-2)
TOY_SENTENCES = (300, 200)
RUNS = 3

DRAWN_LENGTHS = range(5, 13)
CANDIDATES = 8
"""Sentences that every record tells about; the one of them is drawn of which the sparse model is least sure."""
MOST_PATHS = 8
"""Tag sequences of a sentence that are listed."""
EDGES = (0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
"""Upper ends of the groups of probabilities in which sequences are counted."""
CERTAIN = 1 - 1e-4

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
What was scaled down: at most {size.epochs} epochs instead of 50, the best of them by the F1 of the development
sentences, {runs} seeds. Word embeddings are learned from the training sentences alone, beside a CNN over the characters
of a word; the paper's taggers start from embeddings of large corpora, which no package registry has for Spanish and
Dutch under a name that we found. So the scores are below the paper's.
"""

WHOLE = """
All sentences, at most {size.epochs} epochs, {runs} seeds; as in the scaled run, word embeddings are learned from the
training sentences alone, where the paper's taggers start from embeddings of large corpora.
"""

EMBEDDED = """
This page was made with a made-up set: {train} sentences from templates such as “… flew from … to …”, with names that
may be a person's, a place's or a company's, and new ones among those of the {test} test sentences. On CoNLL-2002 run
the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Corpus:
    """Sentences to train, to choose the epoch and to test with."""

    name: str
    train: Sequence[Sentence]
    valid: Sequence[Sentence]
    test: Sequence[Sentence]


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
    records=True,
    full="With `--full` there are 50 epochs. What differs from the paper: no pretrained word embeddings, and two "
    "of its four languages.",
)
def named_entities(context: Context) -> Result:
    """Train with both losses, score entities, and draw the tag distributions of a sentence."""
    corpora, size, runs, scale = _setting(context)
    seeds = range(context.seed, context.seed + runs)
    jobs = [job(corpus, name, size, seed) for seed in seeds for corpus in corpora for name in OMEGAS]
    records = context.records.collect(jobs, context.progress)
    told = [SUMMARY, scale]
    if len(records) < len(jobs):
        told.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    groups = {
        (corpus.name, name): [each for each in records if each.cell == {"sentences": corpus.name, "loss": name}]
        for corpus in corpora
        for name in OMEGAS
    }
    groups = {cell: group for cell, group in groups.items() if group}
    tables, figures = [_scores(groups), _calibration(groups)] if groups else [], []
    corpus = corpora[0]
    if all((corpus.name, name) in groups for name in OMEGAS):
        pair = {name: groups[corpus.name, name][0].figures["sentences"] for name in OMEGAS}
        number = doubtful(pair[GINI])
        shown = {name: listed[number] for name, listed in pair.items()}
        sentence = candidates(corpus)[number]
        figures.append(_figure(shown, sentence, groups[corpus.name, GINI][0].figures["states"]))
        tables.append(_sequences(shown, sentence))
    claims = [_claim(corpus.name, groups) for corpus in corpora] if context.data is not None else []
    return Result("\n\n".join(told), figures=figures, tables=tables, claims=claims)


def job(corpus: Corpus, name: str, size: Size, seed: int) -> Job:
    """One tagger. Both losses have the same start and the same order of sentences for a seed."""
    settings = asdict(size) | {"texts": [len(corpus.train), len(corpus.valid), len(corpus.test)]}
    return Job({"sentences": corpus.name, "loss": name}, seed, settings, partial(trained, corpus, name, size))


def trained(corpus: Corpus, name: str, size: Size, progress: Callable[[float], None]) -> dict[str, Any]:
    """The figures of a tagger: its F1, what has any probability, and what probabilities are worth."""

    def score(tagger: Tagger, vocabulary: Vocabulary) -> float:
        return f1(tagger, vocabulary, corpus.valid)

    tagger, vocabulary, best = tagging.train(corpus.train, OMEGAS[name], size, lambda part: progress(0.9 * part), score)
    tags, certain = mass(tagger, vocabulary, corpus.test)
    return {
        "validation": best,
        "test": f1(tagger, vocabulary, corpus.test),
        "states": vocabulary.tags,
        "tags": tags,
        "certain": certain,
        "calibration": calibration(tagger, vocabulary, corpus.test),
        "sentences": [listed(tagger, vocabulary, sentence) for sentence in candidates(corpus)],
    }


def f1(tagger: Tagger, vocabulary: Vocabulary, sentences: Sequence[Sentence]) -> float:
    """Of whole entities."""
    found = tagging.tagged(tagger, vocabulary, sentences)
    return float(f1_score([list(sentence.tags) for sentence in sentences], found))


@torch.no_grad()
def mass(tagger: Tagger, vocabulary: Vocabulary, sentences: Sequence[Sentence]) -> tuple[float, float]:
    """How many tags of a word have probability, on average; and of which share one sequence has it all."""
    tags = words = certain = 0
    for group in tagging.grouped(sentences, 64):
        batch = vocabulary.batch(group)
        marginals = tagger(batch).marginals
        tags += int((marginals > 0).sum())
        words += int(batch.lengths.sum())
        certain += int(((marginals > 0).sum((1, 2)) == batch.lengths).sum())
    return tags / words, certain / len(sentences)


@torch.no_grad()
def calibration(tagger: Tagger, vocabulary: Vocabulary, sentences: Sequence[Sentence]) -> list[list[float]]:
    """Of the listed sequences with a probability up to each of ``EDGES``: number, sum, and how many are right."""
    groups = [[0.0, 0.0, 0.0] for _ in EDGES]
    for group in tagging.grouped(sentences, 64):
        found = tagger(vocabulary.batch(group)).top(MOST_PATHS)
        for sentence, paths, probs in zip(group, found.paths.tolist(), found.probs.tolist(), strict=True):
            for path, p in zip(paths, probs, strict=True):
                if p > 0:
                    told = tagging.iob2([vocabulary.tags[state] for state in path[: len(sentence.words)]])
                    row = next((row for row, edge in enumerate(EDGES) if p <= edge), len(EDGES) - 1)
                    for column, value in enumerate((1.0, p, float(tuple(told) == sentence.tags))):
                        groups[row][column] += value
    return [[round(value, 3) for value in row] for row in groups]


def candidates(corpus: Corpus) -> list[Sentence]:
    """The short test sentences with entities that have the most words that training does not have."""
    known = {word for sentence in corpus.train for word in sentence.words}
    short = [s for s in corpus.test if len(s.words) in DRAWN_LENGTHS and any(tag != "O" for tag in s.tags)]
    return sorted(short, key=lambda s: -sum(word not in known for word in s.words))[:CANDIDATES]


@torch.no_grad()
def listed(tagger: Tagger, vocabulary: Vocabulary, sentence: Sentence) -> dict[str, Any]:
    """The most probable tag sequences of a sentence, as entities, and the probabilities of its words' tags."""
    chain = tagger(vocabulary.batch([sentence]))
    found = chain.top(MOST_PATHS)
    paths = [
        [p, entities(sentence.words, tagging.iob2([vocabulary.tags[state] for state in path]))]
        for path, p in zip(found.paths[0].tolist(), found.probs[0].tolist(), strict=True)
        if p > 0
    ]
    marginals = [[float(f"{p:.6g}") for p in row] for row in chain.marginals[0].tolist()]
    return {"paths": paths, "marginals": marginals, "entropy": float(chain.entropy())}


def doubtful(found: Sequence[Mapping[str, Any]]) -> int:
    """The number of the sentence with the highest entropy among those whose list has all the probability."""

    def doubt(number: int) -> float:
        whole = sum(p for p, _ in found[number]["paths"]) > CERTAIN
        return float(found[number]["entropy"]) if whole else -1.0

    return max(range(len(found)), key=doubt)


def _setting(context: Context) -> tuple[list[Corpus], Size, int, str]:
    if context.data is None:
        train, test = made_up(*TOY_SENTENCES)
        text = EMBEDDED.format(train=len(train), test=len(test))
        return [Corpus("made up", train, made_up(TOY_SENTENCES[0], 60, 1)[1], test)], TOY, 1, text
    corpora = [
        Corpus(name, *(ner.load(name, split, context.data) for split in ("train", "dev", "test"))) for name in LANGUAGES
    ]
    size, text = (FULL, WHOLE) if context.full else (SCALED, REAL)
    return corpora, size, RUNS, text.format(size=size, runs=RUNS)


Groups = Mapping[tuple[str, str], Sequence[Record]]


def _values(group: Sequence[Record], name: str) -> list[float]:
    return [float(record.figures[name]) for record in group]


def _claim(corpus: str, groups: Groups) -> Claim:
    """Both losses on the same seeds: level if the interval of their difference holds 0 and is narrow."""
    scores = {
        name: {record.seed: 100 * float(record.figures["test"]) for record in groups.get((corpus, name), ())}
        for name in OMEGAS
    }
    seeds = sorted(scores[CRF].keys() & scores[GINI].keys())
    differences = [scores[GINI][seed] - scores[CRF][seed] for seed in seeds]
    paper = f"{PAPER[corpus, GINI]} and {PAPER[corpus, CRF]}"
    holds = "too few runs"
    if len(seeds) >= 3:
        mean, width = statistics.fmean(differences), half_width(differences)
        behind = abs(PAPER[corpus, GINI] - PAPER[corpus, CRF])
        holds = "yes" if mean - width > -behind - 1 else "no" if mean + width < -behind - 1 else "not shown"
    told = " and ".join(with_interval([scores[name][seed] for seed in seeds]) for name in (GINI, CRF))
    return Claim(
        f"A loss with Gini tags about as well as a CRF (F1, {corpus}: at most a point behind the paper's difference)",
        paper,
        f"{told}, a difference of {with_interval(differences)} ({len(seeds)} runs)",
        holds,
    )


def _scores(groups: Groups) -> Table:
    rows: list[list[Cell]] = []
    for (corpus, name), group in groups.items():
        paper = PAPER.get((corpus, name))
        row: list[Cell] = [corpus, name, len(group), "–" if paper is None else f"{paper:.2f}"]
        row += [with_interval(_values(group, part), 100, 2) for part in ("validation", "test")]
        tags = f"{with_interval(_values(group, 'tags'), digits=2)} of {len(group[0].figures['states'])}"
        rows.append([*row, tags, f"{with_interval(_values(group, 'certain'), 100, 0)} %"])
    return Table(
        ["sentences", "loss", "runs", "paper: F1", "development", "test", "tags per word", "certain"],
        rows,
        caption="Entity F1 (whole entities, as conlleval counts; seqeval) on development and on test sentences, mean ± "
        "half the 95 % interval over seeds; how many tags of a word have any probability, on average; and for how many "
        "sentences one sequence has all of it.",
        paper="The paper reports 86.68 and 85.51 on Spanish, 87.56 and 86.58 on Dutch, for the CRF loss and the "
        "squared norm's, with larger taggers and pretrained embeddings; it finds the two on a par.",
    )


def _calibration(groups: Groups) -> Table:
    """What the probabilities of listed sequences are worth."""
    header = [f"≤ {edge:g}" for edge in EDGES]
    rows: list[list[Cell]] = []
    for (corpus, name), group in groups.items():
        cells = []
        for place in range(len(EDGES)):
            count, total, right = (
                sum(record.figures["calibration"][place][column] for record in group) for column in range(3)
            )
            told = f"{100 * right / count:.0f} ({100 * total / count:.0f}, {count:.0f})" if count else "–"
            cells.append(told)
        rows.append([corpus, name, *cells])
    return Table(
        ["sentences", "loss", *header],
        rows,
        caption=f"Of the at most {MOST_PATHS} most probable tag sequences of every test sentence, grouped by "
        "probability: what percentage of them is right from the first word to the last, and in brackets their mean "
        "probability in percent and their number, over all seeds. Where the two percentages agree, probabilities are "
        "calibrated.",
        paper="The paper does not measure calibration.",
    )


def _sequences(shown: Mapping[str, Mapping[str, Any]], sentence: Sentence) -> Table:
    rows: list[list[Cell]] = []
    for name, found in shown.items():
        rows += [[name, f"{p:.4f}", told] for p, told in found["paths"]]
        rows.append([name, f"{sum(p for p, _ in found['paths']):.4f}", "sum of these"])
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


def _figure(shown: Mapping[str, Mapping[str, Any]], sentence: Sentence, tags: Sequence[str]) -> Figure:
    marginals = {name: torch.tensor(found["marginals"]) for name, found in shown.items()}
    columns = [i for i in range(len(tags)) if max(float(p[:, i].max()) for p in marginals.values()) > 0.02]
    drawing, panels = style.panels(1, 2, height=1.1 + 0.22 * len(sentence.words), sharey=True)
    for axes, (name, p) in zip(panels, marginals.items(), strict=True):
        values = p[:, columns]
        image = torch.where(values > 0, values, torch.nan)  # what has no mass stays blank
        axes.imshow(image.numpy(), cmap=style.MASS, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_xticks(range(len(columns)), [tags[i] for i in columns], rotation=90)
        axes.set_yticks(range(len(sentence.words)), sentence.words)
        axes.set_title(name)
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[:].set_visible(False)
    zeros = [int((p > 0).sum()) for p in marginals.values()]
    return Figure(
        drawing,
        caption="Probability of each tag (columns) of each word (rows) of a test sentence, under the tagger trained "
        f"with either loss; blank is exactly zero. Of {marginals[CRF].numel()} entries {zeros[0]} have mass under "
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
