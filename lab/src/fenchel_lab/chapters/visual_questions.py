"""Visual questions: attention to the places of a grid, and to an ellipse of the image."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

from fenchel import Gini, Shannon
from fenchel.continuous import BetaGaussian
from fenchel_lab.chapters import densities
from fenchel_lab.data import easy_vqa
from fenchel_lab.data.easy_vqa import Questions
from fenchel_lab.drawing import style
from fenchel_lab.models import pictures, training
from fenchel_lab.models.pictures import Answerer, Attention, Batch, Look, Size, Vocabulary
from fenchel_lab.models.training import Course
from fenchel_lab.report import Claim, Context, Figure, Result, Table, study
from fenchel_lab.report.measure import half_width, over_seeds, with_interval
from fenchel_lab.report.records import Job, Record
from fenchel_lab.report.result import Cell

METHODS: dict[str, Attention] = {
    "Discrete softmax": Attention(Shannon()),
    "Discrete sparsemax": Attention(Gini()),
    "2D continuous softmax": Attention(alpha=1.0),
    "2D continuous sparsemax": Attention(alpha=2.0),
}
PAPER = {"Discrete softmax": 65.83, "2D continuous softmax": 65.96, "2D continuous sparsemax": 65.79}
"""Table 2: accuracy on VQA-v2, test-dev, overall."""

KINDS = ("yes or no", "colour", "shape")
SHAPES = ("circle", "rectangle", "triangle")
DRAWN = 3
MEASURED = 4
"""Batches of test images on which it is measured how much of attention is on the shape."""
EDGE = "#d6006c"
"""Of the drawn ellipses: no shape has this colour."""


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        size: of the model.
        course: of its training.
        images: to train and to choose the epoch with; None for nine tenths and the rest.
        runs: how many seeds.
    """

    size: Size
    course: Course
    images: tuple[int, int] | None = None
    runs: int = 8


FULL = Protocol(Size(strides=(2, 2, 1, 1), places=16, functions=10), Course(40, 5e-3, 0.0, patience=40))
SCALED = Protocol(Size(), Course(16, 5e-3, 0.0, patience=16), images=(2_000, 300))
TOY = Protocol(
    Size(channels=(12, 16, 24), strides=(2, 2, 1), width=24, batch=16), Course(7, 1e-2, 0.0), images=(240, 40), runs=1
)
TOY_IMAGES = (280, 100)

SUMMARY = """
Which shape, which colour, is there a red one? Convolutions turn an image into {size.places} × {size.places} places, a
question is a bag of words, and attention to the places, scored by the question, sums up what is needed for an answer.
Discrete attention weighs every place by itself. Continuous attention has a density in the unit square with the mean
and the covariance of discrete softmax weights: a Gaussian (α = 1) or a paraboloid that ends (α = 2), so that the
image outside of an ellipse counts nothing: `ContinuousAttention(GaussianBasis.grid({size.functions}), alpha=2.0,
encoder=MatchedEncoder(exact=True))`. It is the density's own covariance that matches, where the paper's matches the Σ
of its score, and a place has the variance of its square. All have the same parameters.

The paper's images are photographs (VQA-v2), its network a large one (MCAN over 14 × 14 places, 100 basis functions);
its table stands beside ours for the order only, which is a tie there.
"""

SOME = """
Scaled down: {images[0]:,} of easy-VQA's 4,000 training images, with all their questions, and
{images[1]} more to choose the epoch with.
"""

REAL = """
The images are easy-VQA's: one shape of one of eight colours on a pale ground. {course.epochs} epochs of batches of
{size.batch} images at a rate of {course.rate:g} that falls to zero; {size.functions} × {size.functions} basis
functions with standard deviation {size.spread:g}; {runs} seeds; all 1,000 test images with 9,673 questions.
"""

EMBEDDED = """
This page was made with {train} made-up pictures of 32 × 32 pixels in the manner of easy-VQA, and one seed, which
shows the idea and settles no order. On easy-VQA itself run the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Corpus:
    """Batches to train, to choose the epoch and to test with, and the questions to test with."""

    vocabulary: Vocabulary
    train: Sequence[Batch]
    valid: Sequence[Batch]
    test: Sequence[Batch]
    asked: Questions


CODE = """
import torch
from fenchel.continuous import ContinuousAttention, GaussianBasis, PooledEncoder

pixels = torch.randn(8, 14 * 14, 64)
attention = ContinuousAttention(GaussianBasis.grid(10), encoder=PooledEncoder(64, dim=2))  # an ellipse
print(attention(pixels, pixels.mean(1), shape=(14, 14)).shape)
"""


@study(
    "Attention to places and to ellipses",
    source="Martins et al. (2020), Sparse and Continuous Attention Mechanisms, table 2 and figure 3",
    order=53,
    theme="Continuous attention",
    code=CODE,
    tour=False,
    data=["easy_vqa"],
    records=True,
    full="With `--full` all images, more epochs, 16 × 16 places (an image of 64 pixels does not halve to the paper's "
    "14) and the paper's 100 basis functions. What differs from the paper: easy-VQA's drawn shapes in place of the "
    "photographs of VQA-v2, and a small network in place of MCAN.",
)
def visual_questions(context: Context) -> Result:
    """Train a model with every attention, and look where it looks."""
    corpus, protocol, text = _setting(context)
    seeds = range(context.seed, context.seed + protocol.runs)
    jobs = [job(corpus, name, protocol, seed) for seed in seeds for name in METHODS]
    records = context.records.collect(jobs, context.progress)
    told = [f"{SUMMARY}\n{text}".format(**vars(protocol), train=TOY_IMAGES[0])]
    if len(records) < len(jobs):
        told.append(f"{len(records)} of {len(jobs)} runs are finished; the same command runs the others.")
    groups = {name: [each for each in records if each.cell["attention"] == name] for name in METHODS}
    if not all(groups.values()):
        return Result("\n\n".join(told))
    return Result(
        "\n\n".join([*told, _leader(groups)]),
        figures=[_maps(corpus, groups), _accuracies(groups)],
        tables=[_table(corpus, groups)],
        claims=[_claim(groups)] if context.data is not None else [],
    )


def job(corpus: Corpus, name: str, protocol: Protocol, seed: int) -> Job:
    """One model. All methods have the same start and the same order of images for a seed."""
    settings = {"size": asdict(protocol.size), "course": asdict(protocol.course), "images": protocol.images}
    return Job({"attention": name}, seed, settings, partial(answered, corpus, name, protocol))


def answered(corpus: Corpus, name: str, protocol: Protocol, progress: Callable[[float], None]) -> dict[str, Any]:
    """The figures of a model: its accuracies, how much of attention is on the shape, and where it looks for three."""
    model = Answerer(corpus.vocabulary, METHODS[name], protocol.size)
    score = partial(_valid, corpus.valid)
    model, best = training.trained(model, corpus.train, pictures.loss, score, protocol.course, progress)
    right = pictures.right(model, corpus.test).float()
    kinds = torch.tensor([KINDS.index(kind(answer)) for answer in corpus.asked.answers])
    return {
        "validation": best,
        "test": float(right.mean()),
        "kinds": [float(right[kinds == number].mean()) for number in range(len(KINDS))],
        "on shape": pictures.on_shape(model, corpus.test[:MEASURED]),
        "examples": _looked(corpus, model),
    }


@torch.no_grad()
def _looked(corpus: Corpus, model: Answerer) -> dict[str, Any]:
    """Weights, densities and answers for the questions that are drawn."""
    batch, _ = _examples(corpus)
    look = model.look(batch)
    shown: dict[str, Any] = {
        "answers": [corpus.vocabulary.answers[row] for row in model(batch).argmax(-1).tolist()],
        "weights": [[[round(each, 4) for each in row] for row in weights] for weights in look.weights.tolist()],
    }
    if look.density is not None:
        shown["density"] = [look.density.loc.tolist(), look.density.sigma.tolist(), look.density.alpha]
    return shown


def _look(shown: Mapping[str, Any]) -> Look:
    """What a record keeps of attention."""
    weights = torch.tensor(shown["weights"])
    density = None
    if "density" in shown:
        loc, sigma, alpha = shown["density"]
        density = BetaGaussian(torch.tensor(loc), sigma=torch.tensor(sigma), alpha=alpha)
    return Look(torch.empty(len(weights), 0), weights, density)


def kind(answer: str) -> str:
    """What was asked for.

    Example:
        >>> kind("no"), kind("teal"), kind("circle")
        ('yes or no', 'colour', 'shape')
    """
    return KINDS[0] if answer in ("yes", "no") else KINDS[2] if answer in SHAPES else KINDS[1]


def chosen(data: Questions, first: int, last: int) -> Questions:
    """Images from one number to another, with their questions in the order of the images."""
    order = np.argsort(data.image, kind="stable")
    rows = order[(data.image[order] >= first) & (data.image[order] < last)]
    return Questions(
        data.images[first:last],
        [data.questions[row] for row in rows],
        [data.answers[row] for row in rows],
        data.image[rows] - first,
    )


def _setting(context: Context) -> tuple[Corpus, Protocol, str]:
    if context.data is None:
        protocol, text = TOY, EMBEDDED
        whole, asked = made_up(TOY_IMAGES[0], 0), made_up(TOY_IMAGES[1], 1)
    else:
        protocol, text = (FULL, REAL) if context.full else (SCALED, f"{REAL}\n{SOME}")
        whole, asked = easy_vqa.load("train", context.data), easy_vqa.load("test", context.data)
        asked = chosen(asked, 0, len(asked.images))
    if protocol.images is None:
        kept = len(whole.images) * 9 // 10
        protocol = replace(protocol, images=(kept, len(whole.images) - kept))
    assert protocol.images is not None
    count, more = protocol.images
    vocabulary, size = Vocabulary(whole), protocol.size.batch
    train = vocabulary.batches(chosen(whole, 0, count), size)
    valid = vocabulary.batches(chosen(whole, len(whole.images) - more, len(whole.images)), 2 * size)
    test = vocabulary.batches(asked, 2 * size)
    return Corpus(vocabulary, train, valid, test, asked), protocol, text


def _valid(batches: Sequence[Batch], model: Answerer) -> float:
    return pictures.accuracy(model, batches)


Groups = Mapping[str, Sequence[Record]]


def _values(group: Sequence[Record], name: str) -> list[float]:
    return [100 * float(record.figures[name]) for record in group]


def _leader(groups: Groups) -> str:
    means = {name: statistics.fmean(_values(group, "test")) for name, group in groups.items()}
    near = {name: statistics.fmean(_values(group, "on shape")) for name, group in groups.items()}
    best, nearest = max(means, key=means.__getitem__), max(near, key=near.__getitem__)
    return (
        f"The highest mean accuracy is that of {best}, {means[best]:.1f}; the most attention inside of the box around "
        f"the shape is that of {nearest}, {near[nearest]:.0f} %. Deviations over seeds "
        f"reach {max(over_seeds(_values(group, 'test'))[1] for group in groups.values()):.1f}."
    )


def _claim(groups: Groups) -> Claim:
    """Whether attention to ellipses is level with attention to places, as far as the seeds tell."""
    continuous, discrete = "2D continuous softmax", "Discrete softmax"
    scores = {
        name: dict(zip((r.seed for r in groups[name]), _values(groups[name], "test"), strict=True)) for name in groups
    }
    seeds = sorted(scores[continuous].keys() & scores[discrete].keys())
    differences = [scores[continuous][seed] - scores[discrete][seed] for seed in seeds]
    holds = "too few runs"
    if len(seeds) >= 3:
        mean, width = statistics.fmean(differences), half_width(differences)
        holds = "no" if abs(mean) > width else "yes" if width < 2 else "not shown"
    told = " and ".join(with_interval([scores[name][seed] for seed in seeds]) for name in (continuous, discrete))
    return Claim(
        "Attention to ellipses is level with attention to places (softmax; a difference within 2 points)",
        f"{PAPER[continuous]} and {PAPER[discrete]} (VQA-v2)",
        f"{told} (easy-VQA, {len(seeds)} runs), a difference of {with_interval(differences)}",
        holds,
    )


def _table(corpus: Corpus, groups: Groups) -> Table:
    rows: list[list[Cell]] = []
    for name, group in groups.items():
        paper = f"{PAPER[name]:.2f}" if name in PAPER else "–"
        parts = [
            with_interval([record.figures["kinds"][number] for record in group], 100) for number in range(len(KINDS))
        ]
        share = f"{statistics.fmean(_values(group, 'on shape')):.0f} %"
        deviation = f"{over_seeds(_values(group, 'test'))[1]:.1f}" if len(group) > 1 else "–"
        rows.append([name, paper, len(group), with_interval(_values(group, "test")), deviation, *parts, share])
    return Table(
        ["attention", "paper (VQA-v2)", "runs", "accuracy", "deviation", *KINDS, "on the shape"],
        rows,
        caption=f"Accuracy on {len(corpus.asked.answers):,} test questions in percent, overall and by what is asked "
        "for, mean ± half the 95 % interval over seeds, and the standard deviation; and the share of attention inside "
        f"of the box around the shape, over {sum(len(batch.images) for batch in corpus.test[:MEASURED])} images.",
        paper="Table 2, test-dev, overall: photographs and open questions, so that its figures compare with each other "
        "only.",
    )


def _maps(corpus: Corpus, groups: Groups) -> Figure:
    """Some test images, and where each attention goes for a question."""
    batch, questions = _examples(corpus)
    drawing, panels = style.panels(len(questions), len(groups), height=1.22)
    for column, (name, group) in enumerate(groups.items()):
        shown = group[0].figures["examples"]
        look = _look(shown)
        for row in range(len(questions)):
            axes = panels[row * len(groups) + column]
            _draw(axes, batch.images[row], pictures.attention_map(look, batch.images.shape[-1])[row])
            if look.density is not None:
                p = look.density
                densities.ellipses(axes, type(p)(p.loc[row], sigma=p.sigma[row], alpha=p.alpha), EDGE, image=True)
            axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
            axes.set_xlabel(shown["answers"][row], fontsize=7.5, labelpad=1)
            if row == 0:
                axes.set_title(name.replace(" ", "\n").replace("2D\n", "2D "), fontsize=7.5)
    asked = "; ".join(f"“{question}”" for question in questions)
    return Figure(
        drawing,
        caption=f"Test images, and where attention goes (dark) when asked, from top to bottom: {asked} Below each, the "
        "answer. The line is the edge of the paraboloid's support, outside of which nothing counts; for the Gaussian, "
        "which has none, it is the ellipse of two standard deviations.",
        alt="Rows of one picture of a coloured shape, four times. Discrete attention shades squares of the grid, the "
        "continuous ones a round region with a line around it, on the shape or next to it.",
        paper="Figure 3 draws a photograph: discrete attention is scattered, the continuous ones have one region, "
        "which the paraboloid's ellipse encloses.",
    )


def _examples(corpus: Corpus) -> tuple[Batch, list[str]]:
    """The first test image with each shape, and a question about it: for the shape, for the colour, for yes or no."""
    first, wanted = corpus.test[0], KINDS[::-1]
    rows: list[int] = []
    used: set[int] = set()
    for row, answer in enumerate(corpus.asked.answers[: len(first.answers)]):
        image = int(first.image[row])
        if len(rows) < DRAWN and image not in used and kind(answer) == wanted[len(rows)]:
            rows.append(row)
            used.add(image)
    images = first.images[first.image[rows]]
    batch = Batch(images, first.words[rows], first.answers[rows], torch.arange(len(rows)))
    return batch, [corpus.asked.questions[row] for row in rows]


def _draw(axes: Axes, image: Tensor, mass: Tensor) -> None:
    """An image, darkened where attention is: with the square root, so that little is seen too."""
    axes.imshow((image + 0.5).permute(1, 2, 0).clamp(0, 1).numpy(), extent=(0, 1, 1, 0))
    shade = np.zeros((*mass.shape, 4))
    shade[..., 3] = 0.75 * (mass / mass.max().clamp_min(1e-12)).sqrt().numpy()
    axes.imshow(shade, extent=(0, 1, 1, 0))
    axes.grid(visible=False)


def _accuracies(groups: Groups) -> Figure:
    drawing, [axes] = style.panels(1, 1, height=2.4)
    for number, what in enumerate(("all", *KINDS)):
        for place, group in enumerate(groups.values()):
            scores = [
                100 * (record.figures["kinds"][number - 1] if number else record.figures["test"]) for record in group
            ]
            height, label = place + 0.18 * (number - 1.5), what if place == 0 else None
            colour = [style.INK, *style.PALETTE][number]
            axes.plot(scores, [height] * len(scores), "o", ms=3, mew=0, alpha=0.5, color=colour, label=label)
            axes.plot(statistics.fmean(scores), height, "|", ms=7, mew=1.5, color=colour)
    axes.set(yticks=range(len(groups)), xlabel="accuracy, %")
    axes.set_yticklabels([name.replace("2D continuous", "2D continuous\n") for name in groups])
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Figure(
        drawing,
        caption="Test accuracy of every run by what is asked for, and the means (bars).",
        alt="Four rows of points, one per kind of attention; one colour for all questions and one per kind of them.",
        paper="Table 2 has all models within 0.2 points of each other overall.",
    )


COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0), "black": (0, 0, 0)}


def made_up(count: int, seed: int, side: int = 32) -> Questions:
    """Pictures in the manner of easy-VQA, each with four questions."""
    random = np.random.default_rng(seed)
    images = np.empty((count, side, side, 3), np.uint8)
    questions, answers = [], []
    for number in range(count):
        shape, colour = (str(random.choice(list(names))) for names in (SHAPES, COLOURS))
        images[number] = random.integers(225, 256, 3)
        images[number][_outline(shape, side, random)] = COLOURS[colour]
        other = str(random.choice([each for each in COLOURS if each != colour]))
        questions += ["what shape is in the image?", "what color is the shape?"]
        questions += [f"is there a {colour} shape?", f"is there a {other} shape?"]
        answers += [shape, colour, "yes", "no"]
    return Questions(images, questions, answers, np.arange(count).repeat(4))


def _outline(shape: str, side: int, random: np.random.Generator) -> NDArray[np.bool_]:
    """The pixels of a shape somewhere in an image."""
    radius = random.uniform(0.12, 0.22) * side
    row, column = random.uniform(radius, side - radius, 2)
    y, x = np.mgrid[:side, :side] + 0.5 - np.array([row, column]).reshape(2, 1, 1)
    inside: dict[str, NDArray[np.bool_]] = {
        "circle": x**2 + y**2 < radius**2,
        "rectangle": (np.abs(x) < radius) & (np.abs(y) < 0.7 * radius),
        "triangle": (np.abs(x) < (y + radius) / 2) & (y < radius),
    }
    return inside[shape]
