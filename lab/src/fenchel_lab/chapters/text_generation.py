"""Text generation: a model that is trained by an entmax loss and sampled as it is, beside softmax that is cut off."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fenchel
from fenchel_lab.chapters.document_classification import made_up
from fenchel_lab.data import imdb
from fenchel_lab.drawing import style
from fenchel_lab.models import language
from fenchel_lab.models.language import END, EPSILONS, LanguageModel, Rule, Size, Words
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import is_higher, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

LOSSES = {"cross-entropy": 1.0, "1.5-entmax loss": 1.5}
"""What models are trained by, and its α."""


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        size: of the models and their training.
        words: of the vocabulary.
        windows: of validation and of test texts, on which measures are taken.
        prompts: how many texts are continued, …
        given: … from so many words, …
        added: … by so many.
        runs: how many seeds.
    """

    size: Size
    words: int = 8_000
    windows: int = 100
    prompts: int = 64
    given: int = 16
    added: int = 100
    runs: int = 3


FULL = Protocol(Size(width=256, layers=4, steps=20_000), words=20_000)
SCALED = Protocol(Size())
TOY = Protocol(Size(32, 2, 1, 24, 0.0, 16, 250, 1e-2), words=100, windows=20, prompts=8, given=4, added=20, runs=1)
TOY_TEXTS = (400, 100, 100)

SUMMARY = """
A language model gives every word of its vocabulary some probability, always, and so sooner or later it says a word
that nobody would. The usual remedy cuts softmax off when sampling: to the highest score (greedy), to the k highest
(top-k), or to the fewest words with a share p of the probability (nucleus). A model that is trained by an entmax loss
has zeros of its own: it is trained and sampled with the same distribution, and how many words are possible depends on
the context. The perplexity of a distribution with zeros is infinite; in its place are the ε-perplexity, the sparsemax
score (higher is better) and the Jensen-Shannon divergence between the distribution and the word that really follows
(in nats, at most 0.69; lower is better).
"""

REAL = """
A Transformer of {layers} layers, {width} wide, that reads {context} words and is trained for {steps:,} steps of
{batch} windows on film reviews of IMDB with the {words:,} most frequent words, from scratch, a small model of our
own, whose figures are not to be compared with those of large ones. k, p and ε are chosen on validation texts by the
divergence and the ε-perplexity. {prompts} test texts are continued by {added} words.
"""

EMBEDDED = """
This page was made with made-up reviews, one seed; it shows the idea and settles no order. On IMDB run the command below
with `FENCHEL_DATA` set.
"""

CODE = """
import torch, fenchel

hidden, weight = torch.randn(6, 32), torch.randn(1000, 32)
following = torch.randint(1000, (6,))
print(fenchel.linear_entmax_loss(hidden, weight, following, alpha=1.5))  # trains without holding all logits
possible = fenchel.entmax(hidden @ weight.T, alpha=1.5)
print((possible > 0).sum(-1))  # how many words may follow
print(possible.multinomial(1).squeeze(-1))
"""


@study(
    "Sampling without a cut",
    source="Martins, Marinho & Martins (2020), Sparse text generation",
    order=73,
    theme="Sequence to sequence",
    code=CODE,
    tour=False,
    data=["imdb_rt"],
    records=True,
    full="With `--full` the model is twice as wide and deep and trained five times as long; that was not run.",
)
def text_generation(context: Context) -> Result:
    """Train a language model by cross-entropy and by an entmax loss, and sample from both."""
    texts, protocol, text = _setting(context)
    words = Words(texts[0], protocol.words)
    seeds = range(context.seed, context.seed + protocol.runs)
    jobs = [job(name, words, texts, protocol, seed) for seed in seeds for name in LOSSES]
    records = context.records.collect(jobs, lambda part, note="": context.progress(0.98 * part, note))
    rows = _rows(records)
    told = [_found(rows)] if rows else []
    if len(records) < len(jobs):
        told.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    tables = [_table(rows), _speed(records), _texts(rows)] if rows else []
    figures = [_supports(rows)] if rows else []
    claims = _claims(rows) if context.data is not None else []
    return Result(f"{SUMMARY}\n{text}\n\n" + "\n\n".join(told), figures=figures, tables=tables, claims=claims)


Texts = tuple[Sequence[Sequence[str]], Sequence[Sequence[str]], Sequence[Sequence[str]]]
"""To train, to choose and to test with."""


def _setting(context: Context) -> tuple[Texts, Protocol, str]:
    if context.data is None:
        made = [each.words for each in made_up(sum(TOY_TEXTS))]
        first, second = TOY_TEXTS[0], sum(TOY_TEXTS[:2])
        return (made[:first], made[first:second], made[second:]), TOY, EMBEDDED
    protocol = FULL if context.full else SCALED
    parts = [[each.words for each in imdb.load(split, folder=context.data)] for split in ("train", "dev", "test")]
    values = asdict(protocol.size) | {key: value for key, value in vars(protocol).items() if key != "size"}
    return (parts[0], parts[1], parts[2]), protocol, REAL.format(**values)


def job(name: str, words: Words, texts: Texts, protocol: Protocol, seed: int) -> Job:
    """One language model."""
    settings = asdict(protocol) | {"alpha": LOSSES[name], "texts": [len(part) for part in texts]}
    return Job({"trained by": name}, seed, settings, partial(run, name, words, texts, protocol))


def rules(alpha: float) -> dict[str, Rule]:
    """The ways to sample from a model, by name."""
    if alpha > 1:
        return {f"{alpha:g}-entmax": lambda scores: fenchel.entmax(scores, alpha)}
    ways: dict[str, Rule] = {"softmax": lambda scores: scores.softmax(-1), "greedy": language.greedy}
    ways |= {f"top-k, {k}": partial(language.top, k=k) for k in (5, 10, 20, 50, 100)}
    return ways | {f"nucleus, {p:g}": partial(language.nucleus, share=p) for p in (0.7, 0.8, 0.9, 0.95)}


def run(name: str, words: Words, texts: Texts, protocol: Protocol, progress: Callable[[float], None]) -> dict[str, Any]:
    """The figures of a model: for every way to sample, measures on validation and test texts and what it writes."""
    train, valid, test = (words.stream(part) for part in texts)
    model = LanguageModel(len(words.names), protocol.size, LOSSES[name])
    model = language.trained(train, model, lambda part: progress(0.8 * part))
    prompts = _prompts(words, texts[2], protocol)
    ways = rules(LOSSES[name])
    found: dict[str, Any] = {}
    for done, (way, rule) in enumerate(ways.items()):
        written = language.continued(model, prompts, rule, protocol.added).tolist()
        found[way] = {
            "validation": language.measured(model, valid, rule, protocol.windows),
            "test": language.measured(model, test, rule, protocol.windows),
            "distinct": [language.distinct(written, n) for n in (1, 2, 3)],
            "text": " ".join(words.names[row] for row in written[0]),
        }
        progress(0.8 + 0.2 * (done + 1) / len(ways))
    people = [words.stream([text]).tolist()[protocol.given : protocol.given + protocol.added] for text in texts[2]]
    window = train[: protocol.size.batch * (protocol.size.context + 1)].view(protocol.size.batch, -1)
    return {
        "ways": found,
        "people": [language.distinct(people[: protocol.prompts], n) for n in (1, 2, 3)],
        "prompt": " ".join(words.names[row] for row in prompts[0].tolist()),
        "speed": language.speed(model.train(), window),
    }


def _prompts(words: Words, texts: Sequence[Sequence[str]], protocol: Protocol) -> Tensor:
    """The first words of the first test texts that are long enough, after the end of another text."""
    long = [text for text in texts if len(text) >= protocol.given][: protocol.prompts]
    return torch.stack([torch.cat([torch.tensor([END]), words.stream([text[: protocol.given]])[:-1]]) for text in long])


Row = Sequence[Mapping[str, Any]]
"""What a way to sample did with every seed."""


def _rows(records: Sequence[Record]) -> dict[str, Row]:
    """Every way to sample; of top-k and nucleus the one with the least mean divergence on validation texts."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        for way, figures in record.figures["ways"].items():
            found.setdefault(way, []).append(
                {**figures, "people": record.figures["people"], "prompt": record.figures["prompt"]}
            )
    kinds: dict[str, list[str]] = {}
    for way in found:
        kinds.setdefault(way.split(",")[0], []).append(way)
    best = [min(ways, key=lambda way: statistics.fmean(_values(found[way], "divergence"))) for ways in kinds.values()]
    return {way: found[way] for way in best}


def _values(row: Row, name: str, part: str = "validation") -> list[float]:
    return [float(figures[part][name]) for figures in row]


def _perplexity(row: Row) -> str:
    """The ε-perplexity on test texts, with the ε that is best on validation texts."""
    names = [f"perplexity {epsilon:g}" for epsilon in EPSILONS]
    best = min(names, key=lambda name: statistics.fmean(_values(row, name)))
    return with_interval(_values(row, best, "test"))


def _table(rows: Mapping[str, Row]) -> Table:
    body: list[list[Cell]] = []
    for way, row in rows.items():
        told = [with_interval(_values(row, name, "test"), digits=3) for name in ("sparsemax score", "divergence")]
        told += [with_interval(_values(row, "support", "test")), with_interval(_values(row, "repetition", "test"), 100)]
        told += [with_interval([figures["distinct"][n] for figures in row], 100) for n in (0, 1, 2)]
        body.append([way, len(row), _perplexity(row), *told])
    first = next(iter(rows.values()))
    people = [f"{100 * each:.1f}" for each in first[0]["people"]]
    repeated = f"{100 * _values(first, 'repetition of people', 'test')[0]:.1f}"
    body.append(["people", *["–"] * 5, repeated, *people])
    return Table(
        [
            "sampled by",
            "runs",
            "ε-perplexity",
            "sparsemax score",
            "divergence",
            "possible words",
            "repeated, %",
            "distinct, %",
            "pairs, %",
            "triples, %",
        ],
        body,
        caption="On test texts, mean ± half the 95 % interval over seeds: ε-perplexity, sparsemax score, "
        "Jensen-Shannon divergence, how many words are possible on average, the share of sampled words that are among "
        "the 32 before; and the shares of different words, pairs and triples in texts that the model continued.",
    )


def _speed(records: Sequence[Record]) -> Table:
    rows: list[list[Cell]] = []
    for name in LOSSES:
        group = [record.figures["speed"] for record in records if record.cell["trained by"] == name]
        if group:
            rows.append([name, *(with_interval([each[loss] for each in group], digits=0) for loss in group[0])])
    return Table(
        ["trained by", "words/s with `linear_entmax_loss`", "words/s with cross-entropy of all logits"],
        rows,
        caption="Words per second of processor time in the loss and the gradients of a training step, the fastest of "
        "five in turns, with the trained models.",
    )


def _texts(rows: Mapping[str, Row]) -> Table:
    prompt = next(iter(rows.values()))[0]["prompt"]
    body: list[list[Cell]] = [["given", prompt], *([way, row[0]["text"]] for way, row in rows.items())]
    return Table(["by", "text"], body, caption="The first test text, continued by the models of the first seed.")


def _found(rows: Mapping[str, Row]) -> str:
    best = min(rows, key=lambda way: statistics.fmean(_values(rows[way], "divergence", "test")))
    high = max(rows, key=lambda way: statistics.fmean(_values(rows[way], "sparsemax score", "test")))
    return (
        f"Of these runs {best} has the least divergence and {high} the highest sparsemax score; 1.5-entmax leaves "
        f"{with_interval(_values(rows['1.5-entmax'], 'support', 'test'))} words possible."
        if "1.5-entmax" in rows
        else f"Of these runs {best} has the least divergence and {high} the highest sparsemax score."
    )


def _claims(rows: Mapping[str, Row]) -> list[Claim]:
    """What Martins et al. say of sampling, beside these runs."""
    if "1.5-entmax" not in rows or "softmax" not in rows:
        return []
    sparse, claims = rows["1.5-entmax"], []
    seeds = min(len(row) for row in rows.values())
    nearest = min(
        (way for way in rows if way not in ("1.5-entmax", "greedy")),
        key=lambda way: statistics.fmean(_values(rows[way], "divergence", "test")),
    )
    for name, measure, sign in (
        ("lower Jensen-Shannon divergence", "divergence", -1),
        ("higher sparsemax score", "sparsemax score", 1),
    ):
        ours, others = (_values(row, measure, "test")[:seeds] for row in (sparse, rows[nearest]))
        claims.append(
            Claim(
                f"1.5-entmax has a {name} than softmax, cut off or not",
                "so for language models in three data sets",
                f"{with_interval(ours, digits=3)}, {nearest} {with_interval(others, digits=3)} ({seeds} runs each)",
                is_higher([sign * (a - b) for a, b in zip(ours, others, strict=True)]),
            )
        )
    again = {way: _values(row, "repetition", "test")[:seeds] for way, row in rows.items()}
    told = ", ".join(f"{way} {with_interval(values, 100)}" for way, values in again.items())
    claims.append(
        Claim(
            "1.5-entmax repeats fewer words than greedy search",
            "so in all data sets",
            f"repeated, %: {told} ({seeds} runs each)",
            is_higher([b - a for a, b in zip(again["1.5-entmax"], again["greedy"], strict=True)]),
        )
    )
    return claims


def _supports(rows: Mapping[str, Row]) -> Figure:
    drawing, panels = style.panels(1, 2, height=2.2, sharey=True)
    for axes, (name, title) in zip(
        panels, (("divergence", "divergence, nats"), ("support", "possible words")), strict=True
    ):
        for place, row in enumerate(rows.values()):
            values = _values(row, name, "test")
            axes.plot(values, [place] * len(values), "o", ms=4, mew=0, alpha=0.6, color=style.PALETTE[0])
        axes.set(xlabel=title, yticks=range(len(rows)), yticklabels=list(rows))
        axes.grid(axis="y", visible=False)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    panels[1].set_xscale("log")
    return Figure(
        drawing,
        caption="Jensen-Shannon divergence from the words that really follow, and how many words are possible, for "
        "every run.",
        alt="Two panels with a row for each way to sample, and a point for each run.",
    )
