"""A bit-vector auto-encoder: bits that are relaxed, discrete, or mixed, and what each costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel_lab.data import images
from fenchel_lab.drawing import style
from fenchel_lab.models import bits
from fenchel_lab.models.bits import KINDS, AutoEncoder, Outcome, Setting
from fenchel_lab.report import Context, Figure, Result, Table, study
from fenchel_lab.report.measure import spread_over_seeds
from fenchel_lab.report.result import Cell


@dataclass(frozen=True)
class Protocol:
    """How much is done.

    Args:
        setting: of the auto-encoders.
        halved: whether images are averaged to half their width and height.
        runs: how many seeds.
        weighted: how many test images the likelihood is estimated for.
        samples: how many importance samples each.
    """

    setting: Setting
    halved: bool = False
    runs: int = 3
    weighted: int = 500
    samples: int = 100


FULL = Protocol(Setting(bits=128, hidden=512, batch=64, epochs=100), weighted=10_000, samples=1024)
SCALED = Protocol(Setting(rate=2e-3, epochs=4), halved=True, weighted=200)
TOY = Protocol(Setting(bits=16, hidden=128, rate=3e-3, batch=50, epochs=20), runs=1, weighted=100, samples=50)

SUMMARY = """
An image is encoded as {count} bits and decoded again. Each bit is a random vector of two entries in the simplex: inside
the open interval (Gumbel-Softmax, here the Binary Concrete), at its ends (straight-through, ST, which draws a true bit
and takes the relaxed one's gradient), or mixed, with mass at 0, at 1 and between (`HardConcrete`, and
`GaussianSparsemax`, which for two vertices is a Gaussian cut off on both sides). The bound on log p(image), the ELBO,
is what the decoder makes of the bits less KL(q ‖ prior). The priors tell nothing of a bit: the Binary Concrete with
score 0, a fair coin, and for mixed bits that of maximum entropy, at a precision of 0 bits: ⅓ for 0, ⅓ for 1 and ⅓
uniform between.

The KL divergence of a relaxed bit with score s is s coth(s/2) − 2, of a discrete one log 2 − H, of a mixed one log 3 −
H⊕, with the direct-sum entropy H⊕ = H(F) + H(Y | F). That is in closed form for the Gaussian-Sparsemax; for the Hard
Concrete both ends are, and the edge is one smooth integral by Gauss-Legendre quadrature. Bounds of different
distributions may be compared: each bounds the log-probability of the same pixels. The likelihood is estimated with
{samples} importance samples for each of {weighted:,} test images, and is a bound that is tighter than the ELBO.
"""

SCALED_DOWN = """
MNIST, averaged to 14 × 14, 50,000 images to learn with and 10,000 to test with, pixels cut at ½ to be 0 or 1; {runs}
seeds. The paper has grey Fashion-MNIST, which is not at hand. Scaled down from the authors' code: {count} bits instead
of 128, batches of {batch} instead of 64, {epochs} epochs instead of 100 and a rate of {rate:g} instead of 1e-3.
As there, σ = 1; temperatures fall from 1 to 0.5 in the first {share:.0f} % of the
training; the stretch is {stretch:g}. Nothing was tuned.
"""

WHOLE = """
MNIST, 28 × 28, 50,000 images to learn with and 10,000 to test with, pixels cut at ½ to be 0 or 1; {runs} seeds. The
paper has grey Fashion-MNIST, which is not at hand; bits, batches, epochs, rate and σ are those of the authors' code.
"""

EMBEDDED = """
This page was made with scikit-learn's digits, 1,000 of 8 × 8 pixels to learn with, cut at ½ to be 0 or 1, and one seed,
which shows the idea and settles no order. On MNIST run the command below with `FENCHEL_DATA` set.
"""


@dataclass(frozen=True)
class Compared:
    """A kind of bits: what was measured, an outcome a seed, and the first seed's auto-encoder."""

    name: str
    outcomes: Sequence[Outcome]
    model: AutoEncoder

    def values(self, name: str) -> list[float]:
        """A measure, for every seed."""
        return [float(getattr(outcome, name)) for outcome in self.outcomes]


CODE = """
import torch
from fenchel.mixed import HardConcrete

bits = HardConcrete(torch.zeros(5, 2), temperature=0.5, stretch=1.2)
print(bits.rsample()[:, 1])  # exact zeros and ones, and something between
"""


@study(
    "Bits between discrete and continuous",
    source="Farinhas, Aziz, Niculae & Martins (2022), Sparse communication via mixed distributions: the bit-vector VAE",
    order=83,
    theme="Between discrete and continuous",
    code=CODE,
    data=["mnist"],
    full="With `--full` bits, widths, batches, epochs and rate are those of the authors' code. What differs "
    "from the paper: MNIST with pixels cut at ½ in place of grey Fashion-MNIST.",
)
def bit_vector_vae(context: Context) -> Result:
    """Train an auto-encoder with every kind of bits."""
    protocol, text = _protocol(context)
    shown = images.load(context.data, protocol.halved)
    train, test = ((part > 0.5).float().flatten(1) for part in (shown.train, shown.test))
    found: list[Compared] = []
    for number, name in enumerate(KINDS):
        first = number / len(KINDS)

        def progress(part: float, first: float = first, name: str = name) -> None:
            context.progress(0.98 * (first + part / len(KINDS)), name)

        seeds = range(context.seed, context.seed + protocol.runs)
        found.append(compared(name, train, test, protocol, seeds, progress))
    setting = protocol.setting
    values = vars(setting) | vars(protocol) | {"count": setting.bits, "share": 100 * setting.anneal}
    return Result(
        f"{SUMMARY}\n{text}".format(**values) + f"\n\n{_found(found)}",
        figures=[_reconstructions(found, test, shown.side), _shares(found)],
        tables=[_table(found, test.shape[1])],
    )


def compared(
    name: str,
    train: Tensor,
    test: Tensor,
    protocol: Protocol,
    seeds: Sequence[int],
    progress: Callable[[float], None],
) -> Compared:
    """Auto-encoders with one kind of bits, one per seed."""
    outcomes: list[Outcome] = []
    models: list[AutoEncoder] = []
    for number, seed in enumerate(seeds):
        torch.manual_seed(seed)  # the same start and order of images for every kind

        def part(share: float, number: int = number) -> None:
            progress((number + share) / len(seeds))

        models.append(bits.trained(train, protocol.setting, KINDS[name], part))
        outcomes.append(bits.measured(models[-1], test, protocol.weighted, protocol.samples))
    return Compared(name, outcomes, models[0])


def _protocol(context: Context) -> tuple[Protocol, str]:
    if context.data is None:
        return TOY, EMBEDDED
    return (FULL, WHOLE) if context.full else (SCALED, SCALED_DOWN)


def _table(found: Sequence[Compared], pixels: int) -> Table:
    rows: list[list[Cell]] = []
    for each in found:
        measures = [spread_over_seeds(each.values(name)) for name in ("bound", "distortion", "rate", "likelihood")]
        per_pixel = [value / (pixels * math.log(2)) for value in each.values("likelihood")]
        exact = [100 * value for value in each.values("exact")]
        measures.insert(3, f"{_silent(each):.2f}")
        rows.append([each.name, *measures, spread_over_seeds(per_pixel, digits=4), spread_over_seeds(exact, digits=1)])
    runs = len(found[0].outcomes)
    return Table(
        ["", "−ELBO", "decoder's part", "KL", "KL at score 0", "−log p(image)", "bits per pixel", "exactly 0 or 1, %"],
        rows,
        caption="In nats per image, on test images (lower is better): the negative ELBO and its two parts; the KL of "
        "bits that tell nothing, all with score 0; the importance-weighted negative log-likelihood, also in bits a "
        "pixel; and the share of bits that are exactly 0 "
        f"or 1. {f'Means ± standard deviations over {runs} seeds.' if runs > 1 else 'One seed.'} A relaxed bit that "
        "is 0 or 1 by rounding alone does not count.",
    )


def _found(found: Sequence[Compared]) -> str:
    """What this run shows, in words."""
    order = sorted(found, key=lambda each: statistics.fmean(each.values("bound")))
    listed = ", ".join(f"{each.name} ({statistics.fmean(each.values('bound')):.1f})" for each in order)
    mixed = [each for each in found if issubclass(KINDS[each.name], bits.Mixed)]
    shares = " and ".join(f"{100 * statistics.fmean(each.values('exact')):.0f} % of {each.name}" for each in mixed)
    silent = " and ".join(f"{_silent(each):.1f} nats for {each.name}" for each in mixed)
    return (
        f"The negative ELBO of this run, from the best: {listed} nats per image. Of the mixed bits, {shares} bits are "
        "exactly 0 or 1. Part of this order is the priors' doing: with score 0, where they tell nothing of the image, "
        "relaxed and discrete bits are their prior and cost nothing, while mixed bits, whose noise is fixed, are not "
        f"theirs and cost an image {silent}."
    )


def _silent(each: Compared) -> float:
    """The KL divergence of an image's bits that all have score 0."""
    model = each.model
    return float(KINDS[each.name](torch.zeros(model.setting.bits), model.temperature, model.setting).kl())


def _reconstructions(found: Sequence[Compared], test: Tensor, side: int) -> Figure:
    columns = 10
    some = test[:columns]
    rows = {"image": some}
    for each in found:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            posterior = each.model.posterior(some)
            rows[each.name] = each.model.decode(posterior.bits(posterior.draw())).sigmoid()
    drawing, panels = style.panels(len(rows), 1, height=0.42)
    for axes, (name, pixels) in zip(panels, rows.items(), strict=True):
        strip = torch.cat(list(pixels.reshape(-1, side, side)), 1)
        axes.imshow(strip.numpy(), cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    return Figure(
        drawing,
        caption="Test images, and what each decoder makes of bits drawn for them once, by the auto-encoders of the "
        "first seed.",
        alt="Rows of handwritten digits: the images first, then a row of greyer copies for each kind of bits.",
    )


def _shares(found: Sequence[Compared]) -> Figure:
    drawing, (axes,) = style.panels(1, 1, height=2.2)
    places = range(len(found))
    left = [0.0] * len(found)
    parts = (("exactly 0", style.PALETTE[0]), ("between", style.FAINT), ("exactly 1", style.PALETTE[1]))
    for (label, colour), number in zip(parts, (0, 2, 1), strict=True):
        widths = [100 * statistics.fmean(outcome.shares[number] for outcome in each.outcomes) for each in found]
        axes.barh(places, widths, left=left, color=colour, label=label, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(yticks=places, yticklabels=[each.name for each in found], xlim=(0, 100), xlabel="% of bits")
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    drawing.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return Figure(
        drawing,
        caption="How many of the bits drawn for test images are exactly 0, exactly 1, and between.",
        alt="A bar for each kind of bits, split into exactly 0, between and exactly 1: relaxed bits are all between, "
        "discrete ones never, mixed ones partly.",
    )
