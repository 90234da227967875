"""Visual questions: attention to the places of a grid, and to an ellipse of the image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

from fenchel import Gini, Shannon
from fenchel_lab.chapters import densities
from fenchel_lab.data import easy_vqa
from fenchel_lab.data.easy_vqa import Questions
from fenchel_lab.drawing import style
from fenchel_lab.models import pictures, training
from fenchel_lab.models.pictures import Answerer, Attention, Batch, Size, Vocabulary
from fenchel_lab.models.training import Course
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.measure import over_seeds, spread
from fenchel_lab.report.result import Cell

METHODS: list[tuple[str, Attention]] = [
    ("Discrete softmax", Attention(Shannon())),
    ("Discrete sparsemax", Attention(Gini())),
    ("2D continuous softmax", Attention(alpha=1.0)),
    ("2D continuous sparsemax", Attention(alpha=2.0)),
]
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
    runs: int = 3


FULL = Protocol(Size(), Course(40, 5e-3, 0.0, patience=40), runs=5)
SCALED = Protocol(Size(), Course(8, 5e-3, 0.0), images=(2_000, 300))
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
Scaled down to a few minutes: {images[0]:,} of easy-VQA's 4,000 training images, with all their questions, and
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


@dataclass(frozen=True)
class Outcome:
    """A method's accuracies by seed: overall and for each kind of question; the share of attention on the shape."""

    method: str
    scores: Sequence[float]
    kinds: Sequence[Sequence[float]]
    on_shape: Sequence[float]
    model: Answerer


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
    full="With `--full` all images, more epochs and five seeds. What differs from the paper: easy-VQA's drawn "
    "shapes in place of the photographs of VQA-v2, and a small network in place of MCAN.",
)
def visual_questions(context: Context) -> Result:
    """Train a model with every attention, and look where it looks."""
    corpus, protocol, text = _setting(context)
    outcomes = []
    for done, (name, attention) in enumerate(METHODS):
        tell = partial(_tell, context, done, len(METHODS), name)
        seeds = range(context.seed, context.seed + protocol.runs)
        outcomes.append(compared(corpus, name, attention, protocol, seeds, tell))
    return Result(
        f"{SUMMARY}\n{text}".format(**vars(protocol), train=TOY_IMAGES[0]) + f"\n\n{_leader(outcomes)}",
        figures=[_maps(corpus, outcomes), _accuracies(outcomes)],
        tables=[_table(corpus, outcomes)],
    )


def compared(
    corpus: Corpus,
    name: str,
    attention: Attention,
    protocol: Protocol,
    seeds: Sequence[int],
    progress: Callable[[float], None],
) -> Outcome:
    """A method's accuracies on the test questions."""
    kinds = torch.tensor([KINDS.index(kind(answer)) for answer in corpus.asked.answers])
    scores, by_kind, shares, models = [], [], [], []
    for done, seed in enumerate(seeds):
        torch.manual_seed(seed)  # the same start and the same order of images for every method
        model = Answerer(corpus.vocabulary, attention, protocol.size)
        score = partial(_valid, corpus.valid)
        part = partial(_part, progress, done, len(seeds))
        model, _ = training.trained(model, corpus.train, pictures.loss, score, protocol.course, part)
        right = pictures.right(model, corpus.test).float()
        scores.append(float(right.mean()))
        by_kind.append([float(right[kinds == number].mean()) for number in range(len(KINDS))])
        shares.append(pictures.on_shape(model, corpus.test[:MEASURED]))
        models.append(model)
    return Outcome(name, scores, by_kind, shares, models[0])


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


def _part(progress: Callable[[float], None], done: int, all_: int, part: float) -> None:
    progress((done + part) / all_)


def _tell(context: Context, done: int, all_: int, note: str, part: float) -> None:
    context.progress(0.98 * (done + part) / all_, note)


def _leader(outcomes: Sequence[Outcome]) -> str:
    best = max(outcomes, key=lambda outcome: over_seeds(outcome.scores, 100)[0])
    near = max(outcomes, key=lambda outcome: over_seeds(outcome.on_shape, 100)[0])
    return (
        f"The highest mean accuracy of this run is that of {best.method}, {spread(*over_seeds(best.scores, 100))}; the "
        f"most attention inside of the box around the shape is that of {near.method}, "
        f"{over_seeds(near.on_shape, 100)[0]:.0f} %. Deviations over seeds "
        f"reach {max(over_seeds(outcome.scores, 100)[1] for outcome in outcomes):.1f}."
    )


def _table(corpus: Corpus, outcomes: Sequence[Outcome]) -> Table:
    rows: list[list[Cell]] = []
    for outcome in outcomes:
        paper = f"{PAPER[outcome.method]:.2f}" if outcome.method in PAPER else "–"
        parts = [spread(*over_seeds(part, 100)) for part in zip(*outcome.kinds, strict=True)]
        share = f"{over_seeds(outcome.on_shape, 100)[0]:.0f} %"
        rows.append([outcome.method, paper, spread(*over_seeds(outcome.scores, 100)), *parts, share])
    runs = len(outcomes[0].scores)
    return Table(
        ["attention", "paper (VQA-v2)", "accuracy", *KINDS, "on the shape"],
        rows,
        caption=f"Accuracy on {len(corpus.asked.answers):,} test questions in percent, overall and by what is asked "
        f"for, mean ± standard deviation over {runs} seed{'s' * (runs > 1)}; and the share of attention inside of the "
        f"box around the shape, over {sum(len(batch.images) for batch in corpus.test[:MEASURED])} images.",
        paper="Table 2, test-dev, overall: photographs and open questions, so that its figures compare with each other "
        "only.",
    )


@torch.no_grad()
def _maps(corpus: Corpus, outcomes: Sequence[Outcome]) -> Figure:
    """Some test images, and where each attention goes for a question."""
    batch, questions = _examples(corpus)
    drawing, panels = style.panels(len(questions), len(outcomes), height=1.22)
    for column, outcome in enumerate(outcomes):
        look = outcome.model.look(batch)
        answers = outcome.model(batch).argmax(-1).tolist()
        for row in range(len(questions)):
            axes = panels[row * len(outcomes) + column]
            _draw(axes, batch.images[row], pictures.attention_map(look, batch.images.shape[-1])[row])
            if look.density is not None:
                p = look.density
                densities.ellipses(axes, type(p)(p.loc[row], sigma=p.sigma[row], alpha=p.alpha), EDGE, image=True)
            axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
            axes.set_xlabel(corpus.vocabulary.answers[answers[row]], fontsize=7.5, labelpad=1)
            if row == 0:
                axes.set_title(outcome.method.replace(" ", "\n").replace("2D\n", "2D "), fontsize=7.5)
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


def _accuracies(outcomes: Sequence[Outcome]) -> Figure:
    drawing, [axes] = style.panels(1, 1, height=2.4)
    for number, what in enumerate(("all", *KINDS)):
        for place, outcome in enumerate(outcomes):
            scores = outcome.scores if number == 0 else [kinds[number - 1] for kinds in outcome.kinds]
            mean, deviation = over_seeds(scores, 100)
            height = place + 0.18 * (number - 1.5)
            label = what if place == 0 else None
            colour = [style.INK, *style.PALETTE][number]
            axes.errorbar(mean, height, xerr=deviation, fmt="o", ms=4, lw=1, color=colour, label=label)
    axes.set(yticks=range(len(outcomes)), xlabel="accuracy, %")
    axes.set_yticklabels([outcome.method.replace("2D continuous", "2D continuous\n") for outcome in outcomes])
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Figure(
        drawing,
        caption="Test accuracy by what is asked for: mean and standard deviation over seeds.",
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
