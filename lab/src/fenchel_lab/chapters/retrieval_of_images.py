"""Images out of memory: which Ω finds a stored image again from its upper half, or from noise, among how many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from matplotlib import figure as mpl
from matplotlib.axes import Axes
from torch import Tensor

from fenchel import Gini, Hard, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.hopfield import ClassicalMemory, DenseMemory, Memory
from fenchel_lab.data import cifar10, mnist
from fenchel_lab.drawing import style
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.result import Cell

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)
QUERIES = 200
STEPS = 20
SIGMA = 1.0
NEAR = 0.01
"""The mean squared error of a pixel up to which an image counts as nearly retrieved: 5% of the range of a pixel."""

CERTIFIED, SHARE = 1000, 0.95
"""β is the smallest at which this share of so many images is certified as stationary under 1.5-entmax."""

FACTORS = (0.25, 1.0, 4.0)
DRAWN_AT = 1000
TILE, GAP = 32, 3
CORRUPTIONS = ("masked", "noisy")

Recall = Callable[["Images", "Queries", float], "Outcome"]

SUMMARY = """
A memory is asked for an image of which it sees the upper half alone, or which noise covers. Pixels are scaled to
[−1, 1]; a masked pixel is 0, grey, and adds nothing to any score; noise is Gaussian with σ = {sigma:g}, half the range
of a pixel. There are {queries} queries to each memory: its own first images, in turn. Each is updated until it stands
still, at most {steps} times.

`Memory(images, omega, beta, values=images, normalize="sphere")` compares on the unit sphere and recalls the pixels.
Without the sphere a bright image scores above a dull one for the query that is the dull one: not even the hardest
choice finds it then (“argmax, raw”). An image is retrieved exactly if no other has any weight; under `KSubsets(2)`,
which recalls two, if it is one of them, whole. (`KSubsets(1)` is sparsemax.) Softmax never retrieves exactly; it counts
as near if the mean squared error of a pixel is at most {near:g}.

β is the same for every Ω, and chosen before any query is seen: the smallest at which `certify()` calls
{share:.0%} of the first {certified} images stationary under 1.5-entmax, to two digits: {betas}. With more contrast
every Ω comes closer to argmax, which is its limit; the last table tells how much that matters.

Classical and dense associative memories store ±1: pixels above or below the mean of their image, in each colour. Their
masked pixels are ±1 at random, for they have no grey. The classical one has Hebb's weights without self-coupling.
"""

EMBEDDED = """
Here with the digits of scikit-learn, 8 × 8 pixels. For MNIST and CIFAR-10 run the command below with `FENCHEL_DATA`
set.
"""

REAL = """
MNIST: the first images of the training set. CIFAR-10: the first {cifar} of the test set. Scaled down to minutes on one
core: {queries} queries, one draw of the noise. Small memories are asked for the same few images again and again: two
much alike are the dip at 30 of MNIST.

With seed 0 the sparse Ω retrieve 90 to 96 percent of their queries exactly among 10,000 images of MNIST, sparsemax
most. What softmax recalls blurs as more is stored: of noisy images of CIFAR-10 it comes near all among 30, and one in
a hundred among 3,000, where sparse Ω on the simplex still find 91 to 99 percent. It needs more contrast: with four
times β every Ω finds at least as many of 1,000 as argmax does.

No contrast helps where argmax errs: of half images of CIFAR-10 it misses a third among 3,000. An image that is alike
above, and has most of its norm there, scores higher than the right one. As ±1 all halves have one norm, and nearly all
are found, by argmax as by the exponential energy: that is the merit of the code, not of the energy. For noisy digits ±1
is the worse code. The classical memory and the cubic one, promised many random patterns, fail on ten digits: these have
most of their pixels in common, and in the picture every query ends in the same mixture.
"""


@dataclass(frozen=True)
class Images:
    """Images to store: pixels (N, D) in [−1, 1], and the shape of one, (height, width, channels)."""

    name: str
    pixels: Tensor
    shape: tuple[int, int, int]

    def first(self, count: int) -> Images:
        """The first so many."""
        return Images(self.name, self.pixels[:count], self.shape)

    @property
    def hidden(self) -> Tensor:
        """Which pixels the mask covers, boolean (D,): the lower half."""
        height, width, channels = self.shape
        return (torch.arange(height) >= height // 2).repeat_interleave(width * channels)


@dataclass(frozen=True)
class Queries:
    """Corrupted images (Q, D): their pixels, and the same for memories of ±1."""

    pixels: Tensor
    signs: Tensor


@dataclass(frozen=True)
class Outcome:
    """What some queries recalled.

    Args:
        exact: (Q,), whether the image was found and nothing else had weight.
        error: (Q,), the mean squared error of a pixel.
        shown: (Q, D), the recalled pixels.
        single: whether one image is recalled, so that the error has a meaning.
    """

    exact: Tensor
    error: Tensor
    shown: Tensor
    single: bool = True

    @property
    def near(self) -> Tensor:
        """(Q,), whether the error is within the tolerance."""
        return self.error <= NEAR


CODE = """
import torch, fenchel
from fenchel.hopfield import Memory
from sklearn.datasets import load_digits

images = torch.tensor(load_digits().data[:100], dtype=torch.float32) / 16
centred = images - images.mean(0)
half = centred.clone()
half[:, 32:] = 0  # the lower half is missing
found = Memory(centred, fenchel.Gini(), beta=4.0).retrieve(half)
print(f"{(found.weights.argmax(-1) == torch.arange(100)).float().mean():.0%} of the images found from their upper half")
"""


@study(
    "Retrieval of images",
    source="Santos et al. (2024), exact retrieval (section 3.2); Ramsauer et al. (2021); baselines of Hopfield (1982), "
    "Krotov & Hopfield (2016) and Demircigil et al. (2017)",
    order=41,
    theme="Memories",
    code=CODE,
    data=["mnist", "cifar10"],
)
def retrieval_of_images(context: Context) -> Result:
    """Store more and more images, ask for them by halves and through noise, draw and tabulate what comes back."""
    sets = _sets(context)
    betas = {images.name: contrast(images) for images in sets}
    found = {
        key: outcome
        for place, images in enumerate(sets)
        for key, outcome in _trials(images, betas[images.name], context, place / len(sets), 1 / len(sets)).items()
    }
    chosen = ", ".join(f"{beta:g} for {name}" for name, beta in betas.items())
    numbers = {"sigma": SIGMA, "queries": QUERIES, "steps": STEPS, "near": NEAR, "share": SHARE, "betas": chosen}
    text = SUMMARY.format(**numbers, certified=min(CERTIFIED, min(len(images.pixels) for images in sets)))
    text += EMBEDDED if context.data is None else REAL.format(cifar=len(sets[-1].pixels), queries=QUERIES)
    figures = [_curves_of_maps(sets, found), _curves_of_baselines(sets, found), _strip(sets, found, context.seed)]
    return Result(text, figures=figures, tables=[*_tables(sets, found), _contrasts(sets, betas, context.seed)])


# -- queries -------------------------------------------------------------------------------------------


def corrupted(images: Images, kind: str, seed: int) -> Queries:
    """The images in turn, their lower half grey (of ±1: at random), or under Gaussian noise."""
    whole = images.pixels[places(images)]
    random = torch.Generator().manual_seed(seed)
    if kind == "masked":
        coins = 2.0 * torch.randint(2, whole.shape, generator=random) - 1
        half = torch.where(images.hidden, coins, signs(whole, images.shape))
        return Queries(whole.masked_fill(images.hidden, 0.0), half)
    noisy = whole + SIGMA * torch.randn(whole.shape, generator=random)
    return Queries(noisy, signs(noisy, images.shape))


def places(images: Images) -> Tensor:
    """Which image each query is made of, (Q,)."""
    return torch.arange(QUERIES) % len(images.pixels)


def signs(pixels: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Images (…, D) as ±1: above the mean of the image in that channel, or not."""
    colours = pixels.reshape(*pixels.shape[:-1], -1, shape[-1])
    return torch.where(colours > colours.mean(-2, keepdim=True), 1.0, -1.0).flatten(-2)


def contrast(images: Images) -> float:
    """The smallest β, to two digits, that makes most of the first images stationary under 1.5-entmax."""
    memory = Memory(images.pixels[:CERTIFIED], Tsallis(1.5), normalize="sphere")
    return float(f"{memory.certify().min_beta.quantile(SHARE).item():.2g}")


# -- memories ------------------------------------------------------------------------------------------


def by_omega(omega: Regularizer, normalize: Literal["sphere", "layer"] | None = "sphere") -> Recall:
    """Retrieval by a Hopfield-Fenchel-Young network."""

    def recall(images: Images, queries: Queries, beta: float) -> Outcome:
        count = int(omega.mass(len(images.pixels)) or 1)
        memory = Memory(images.pixels, omega, beta, values=images.pixels, normalize=normalize)
        with torch.no_grad():
            found = memory.retrieve(queries.pixels, max_steps=STEPS)
            target = places(images)
            own = found.weights.gather(-1, target.unsqueeze(-1)).squeeze(-1)
            exact = ((found.weights > 0).sum(-1) == count) & (own >= 1 - 1e-6)
            shown = found.value / count
        return Outcome(exact, (shown - images.pixels[target]).square().mean(-1), shown, count == 1)

    return recall


def by_signs(build: Callable[[Tensor], ClassicalMemory | DenseMemory | Memory]) -> Recall:
    """Retrieval by a memory of ±1."""

    def recall(images: Images, queries: Queries, _: float) -> Outcome:
        stored = signs(images.pixels, images.shape)
        with torch.no_grad():
            state = build(stored).retrieve(queries.signs, max_steps=STEPS).state
        error = (state - stored[places(images)]).square().mean(-1)
        return Outcome(error == 0, error, state)

    return recall


MAPS: dict[str, Recall] = {
    "softmax": by_omega(Shannon()),
    "1.5-entmax": by_omega(Tsallis(1.5)),
    "sparsemax": by_omega(Gini()),
    "2-normmax": by_omega(Norm(2.0)),
    "5-normmax": by_omega(Norm(5.0)),
    "k_subsets 2": by_omega(KSubsets(2)),
}
BASELINES: dict[str, Recall] = {
    "argmax": by_omega(Hard()),
    "argmax, raw": by_omega(Hard(), None),
    "argmax, ±1": by_signs(lambda stored: Memory(stored, Hard())),
    "dense, exp": by_signs(lambda stored: DenseMemory(stored, math.inf)),
    "dense, cubic": by_signs(lambda stored: DenseMemory(stored, 3)),
    "classical": by_signs(lambda stored: ClassicalMemory(stored, diagonal=False)),
}
MEMORIES = MAPS | BASELINES

Key = tuple[str, str, int, str]
"""Name of the images, corruption, how many are stored, memory."""


def _trials(images: Images, beta: float, context: Context, start: float, part: float) -> dict[Key, Outcome]:
    found: dict[Key, Outcome] = {}
    sizes = _sizes(images)
    for turn, size in enumerate(sizes):
        context.progress(start + part * turn / len(sizes), f"{images.name}, {size} images")
        stored = images.first(size)
        for kind in CORRUPTIONS:
            queries = corrupted(stored, kind, context.seed)
            for name, recall in MEMORIES.items():
                found[images.name, kind, size, name] = recall(stored, queries, beta)
    return found


def _sizes(images: Images) -> list[int]:
    return [size for size in SIZES if size <= len(images.pixels)]


def _sets(context: Context) -> list[Images]:
    if context.data is None:
        from sklearn.datasets import load_digits

        digits = load_digits().images[: max(size for size in SIZES if size <= 1000)]
        return [_scaled("digits", digits, 16)]
    count = max(SIZES)
    written = mnist.load("train", context.data).images[:count]
    # The re-packed file has 3,000; whoever has the archive gets the same result.
    photographs = cifar10.load("test", context.data).images[: min(count, 3000)]
    return [_scaled("MNIST", written, 255), _scaled("CIFAR-10", photographs, 255)]


def _scaled(name: str, images: np.ndarray, largest: int) -> Images:
    pixels = torch.tensor(images.reshape(len(images), -1), dtype=torch.float32) * (2 / largest) - 1
    height, width, *channels = images.shape[1:]
    return Images(name, pixels, (height, width, channels[0] if channels else 1))


# -- pictures ------------------------------------------------------------------------------------------


def _curves(axes: Axes, images: Images, kind: str, names: Sequence[str], found: dict[Key, Outcome]) -> None:
    sizes = _sizes(images)
    for number, name in enumerate(names):
        outcomes = [found[images.name, kind, size, name] for size in sizes]
        soft = name == "softmax"
        shares = [_percent(name, each) for each in outcomes]
        label = "softmax, nearly" if soft else name
        # Lines that coincide stay visible: later ones are thinner.
        width = 3.2 - 0.45 * number
        axes.plot(
            sizes, shares, label=label, color=style.PALETTE[number], linewidth=width, linestyle=":" if soft else "-"
        )
    axes.set(title=f"{images.name}, {kind}", xscale="log", ylim=(-4, 104), yticks=[0, 50, 100])


def _panels(sets: Sequence[Images], names: Sequence[str], found: dict[Key, Outcome]) -> mpl.Figure:
    drawing, panels = style.panels(len(sets), 2, height=2.3 if len(sets) > 1 else 3.0, sharey=True, sharex="row")
    for axes, (images, kind) in zip(panels, ((i, k) for i in sets for k in CORRUPTIONS), strict=True):
        _curves(axes, images, kind, names, found)
    drawing.supylabel("retrieved, percent", fontsize=9)
    drawing.supxlabel("stored images", fontsize=9)
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return drawing


def _told(sets: Sequence[Images], names: Sequence[str], found: dict[Key, Outcome]) -> str:
    """The ends of the curves in words."""
    ends = []
    for images in sets:
        last = _sizes(images)[-1]
        for kind in CORRUPTIONS:
            shares = (f"{name} {_percent(name, found[images.name, kind, last, name]):.0f}" for name in names)
            ends.append(f"{images.name}, {kind}, {last} stored: {'; '.join(shares)}.")
    return "Curves that fall as more images are stored, some of them hardly. Where they end, in percent. " + " ".join(
        ends
    )


def _percent(name: str, outcome: Outcome) -> float:
    """Of queries that count as retrieved: exactly, or nearly for softmax, which never does so exactly."""
    return 100 * (outcome.near if name == "softmax" else outcome.exact).double().mean().item()


def _curves_of_maps(sets: Sequence[Images], found: dict[Key, Outcome]) -> Figure:
    return Figure(
        _panels(sets, list(MAPS), found),
        caption="Share of queries that retrieve their image exactly, against the number of stored images, at one β for "
        f"all Ω; softmax (dotted) within a mean squared error of {NEAR:g}.",
        alt=_told(sets, list(MAPS), found),
        paper="Santos et al. prove that patterns are retrieved exactly if they are separated "
        "by m/β (Proposition 2), exponentially many in the dimension (Proposition 3); for softmax Ramsauer et al. "
        "prove it up to an error.",
    )


def _curves_of_baselines(sets: Sequence[Images], found: dict[Key, Outcome]) -> Figure:
    return Figure(
        _panels(sets, list(BASELINES), found),
        caption="The same for memories without a temperature: argmax on the sphere, the limit of every Ω as β grows; "
        "argmax of raw inner products, and of images as ±1; dense memories with an exponential and a cubic energy; "
        "Hopfield's network.",
        alt=_told(sets, list(BASELINES), found),
        paper="For random patterns the literature promises 0.138 D to Hopfield's network "
        f"({', '.join(f'{0.138 * i.pixels.shape[1]:.0f} for {i.name}' for i in sets)}), on the order of D² to the "
        "cubic energy, and exponentially many to exp. Images resemble each other far more than random patterns do.",
    )


def _strip(sets: Sequence[Images], found: dict[Key, Outcome], seed: int) -> Figure:
    columns = [(images, *pick) for images in sets for pick in _picks(len(sets))]
    drawing, (axes,) = style.panels(1, 1, height=7.9)
    names = ["original", "query", *MEMORIES]
    pitch = TILE + GAP
    canvas = np.zeros((pitch * len(names) - GAP, pitch * len(columns) - GAP, 4))  # gaps are transparent
    for column, (images, kind, place) in enumerate(columns):
        size = _drawn_at(images)
        stored = images.first(size)
        rows = [stored.pixels[place], corrupted(stored, kind, seed).pixels[place]]
        rows += [found[images.name, kind, size, name].shown[place] for name in MEMORIES]
        for row, pixels in enumerate(rows):
            tile = _tile(pixels, images.shape)
            place_of = slice(pitch * row, pitch * row + TILE), slice(pitch * column, pitch * column + TILE)
            canvas[*place_of, :3], canvas[*place_of, 3] = tile, 1.0
    axes.imshow(canvas, interpolation="nearest")
    centres = [pitch * i + TILE / 2 for i in range(max(len(names), len(columns)))]
    axes.set_yticks(centres[: len(names)], names)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    for number, (images, kind, _) in enumerate(columns):
        before = columns[number - 1][:2] if number else (None, "")
        left = pitch * number
        if images is not before[0]:
            axes.text(left, -0.62 * TILE, images.name, fontweight="bold")
        if (images, kind) != before:
            axes.text(left, -0.2 * TILE, kind)
    return Figure(
        drawing,
        caption="What memories of "
        + " and ".join(f"{_drawn_at(images)} images of {images.name}" for images in sets)
        + " recall: the first images of each set, not chosen by hand. k_subsets 2 is drawn as the mean of the two it "
        "recalls; memories of ±1 recall black and white, in each colour.",
        alt=f"Six columns of images, one row per memory. Of the six queries are retrieved: {_counted(columns, found)}.",
    )


def _counted(columns: Sequence[tuple[Images, str, int]], found: dict[Key, Outcome]) -> str:
    def retrieved(name: str) -> int:
        outcomes = ((found[i.name, kind, _drawn_at(i), name], place) for i, kind, place in columns)
        return sum(bool((each.near if name == "softmax" else each.exact)[place]) for each, place in outcomes)

    return "; ".join(f"{name} {retrieved(name)}" for name in MEMORIES)


def _picks(sets: int) -> list[tuple[str, int]]:
    """Which queries to draw of each set: six columns in all."""
    return [("masked", i) for i in range(4 - sets)] + [("noisy", i) for i in range(4 - sets, 6 // sets)]


def _drawn_at(images: Images) -> int:
    return max(size for size in _sizes(images) if size <= DRAWN_AT)


def _tile(pixels: Tensor, shape: tuple[int, int, int]) -> np.ndarray:
    """An image as (TILE, TILE, 3) in [0, 1]: enlarged if it is small, with a dark border if it does not fill it."""
    image = ((pixels.clamp(-1, 1) + 1) / 2).reshape(shape).numpy()
    larger = TILE // max(shape[:2])
    image = image.repeat(larger, 0).repeat(larger, 1)
    top, left = (TILE - image.shape[0]) // 2, (TILE - image.shape[1]) // 2
    tile = np.zeros((TILE, TILE, 3))
    tile[top : top + image.shape[0], left : left + image.shape[1]] = image
    return tile


# -- tables --------------------------------------------------------------------------------------------


def _tables(sets: Sequence[Images], found: dict[Key, Outcome]) -> list[Table]:
    sizes = sorted({size for images in sets for size in _sizes(images)})

    def table(show: Callable[[Outcome], str], caption: str) -> Table:
        rows: list[list[Cell]] = []
        for images in sets:
            for kind in CORRUPTIONS:
                for name in MEMORIES:
                    cells = [found.get((images.name, kind, size, name)) for size in sizes]
                    rows.append([images.name, kind, name, *("" if cell is None else show(cell) for cell in cells)])
        return Table(["images", "query", "memory", *map(str, sizes)], rows, caption=caption)

    return [
        table(lambda o: f"{100 * o.exact.double().mean():.0f}", "Retrieved exactly, percent, by the number stored."),
        table(
            lambda o: f"{100 * o.near.double().mean():.0f}" if o.single else "–",
            f"Retrieved within a mean squared error of {NEAR:g} a pixel, percent; for memories of ±1, of their ±1.",
        ),
        table(
            lambda o: f"{o.error.mean():.4f}" if o.single else "–",
            "Mean squared error of a pixel, of range 2; for memories of ±1, against the stored ±1.",
        ),
    ]


def _contrasts(sets: Sequence[Images], betas: dict[str, float], seed: int) -> Table:
    rows: list[list[Cell]] = []
    for images in sets:
        stored = images.first(_drawn_at(images))
        for kind in CORRUPTIONS:
            queries = corrupted(stored, kind, seed)
            for name, recall in MAPS.items():
                shares = []
                for factor in FACTORS:
                    outcome = recall(stored, queries, factor * betas[images.name])
                    shares.append(f"{_percent(name, outcome):.0f}")
                rows.append([images.name, kind, "softmax, nearly" if name == "softmax" else name, *shares])
    return Table(
        ["images", "query", "Ω", *(f"{factor:g} β" for factor in FACTORS)],
        rows,
        caption="The same with less and with more contrast, percent, for "
        + " and ".join(f"{_drawn_at(images)} images of {images.name}" for images in sets)
        + ".",
    )
