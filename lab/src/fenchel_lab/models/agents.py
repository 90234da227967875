"""Two agents and a code: one describes an image, the other picks it among candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F

from fenchel.mixed import Concrete, GaussianSparsemax, HardConcrete, StraightThroughConcrete
from fenchel.seq2seq import checkpoints

COOLEST = 0.5
"""The lowest temperature."""

AT_ONCE = 500
"""Images whose games are played at a time when nothing is learned."""


@dataclass(frozen=True)
class Setting:
    """The game, the agents and their training. The defaults are the authors'.

    Args:
        symbols: K, the length of a code.
        candidates: images to pick among, the right one included.
        width: of embedded images and codes.
        hidden: sigmoids in the function that the sender applies to every entry of an embedded image.
        division: the sender's scores are divided by it (tau_s in the authors' code).
        rate: of learning (Adam).
        cooling: the temperature after t updates is exp(−cooling · t).
        stretch: τ of the Hard Concrete.
        scale: σ of the Gaussian-Sparsemax.
        batch: games at a time.
        updates: of the parameters.
    """

    symbols: int = 256
    candidates: int = 16
    width: int = 256
    hidden: int = 512
    division: float = 10.0
    rate: float = 1e-3
    cooling: float = 1e-5
    stretch: float = 1.1
    scale: float = 1.0
    batch: int = 64
    updates: int = 50_000


def cooled(updates: int, cooling: float) -> float:
    """The temperature after so many updates: exp(−cooling · updates), but at least 0.5.

    Example:
        >>> cooled(0, 1e-5), round(cooled(50_000, 1e-5), 4), cooled(10**6, 1e-5)
        (1.0, 0.6065, 0.5)
    """
    return max(COOLEST, math.exp(-cooling * updates))


Channel = Callable[[Tensor, float, Setting], Distribution]
"""The distribution of codes, given the sender's scores and the temperature."""

CHANNELS: dict[str, Channel] = {
    "Gumbel-Softmax": lambda scores, temperature, _: Concrete(
        scores.new_tensor(temperature), logits=scores, validate_args=False
    ),
    "Gumbel-Softmax ST": lambda scores, temperature, _: StraightThroughConcrete(
        scores.new_tensor(temperature), logits=scores, validate_args=False
    ),
    "K-D Hard Concrete": lambda scores, temperature, setting: HardConcrete(
        scores, temperature, setting.stretch, validate_args=False
    ),
    "Gaussian-Sparsemax": lambda scores, _, setting: GaussianSparsemax(
        scores, scale=torch.full_like(scores, setting.scale), validate_args=False
    ),
}


class Shared(nn.Module):
    r"""One scalar function, a sum of sigmoids, applied to every entry of a tensor.

    .. math:: f(x) = \sum_j v_j \, \operatorname{sigmoid}(w_j x)

    It is evaluated at ``points`` equally spaced points between the smallest and the largest entry, and linear between
    them, which takes as many sigmoids as there are points, not entries.

    Args:
        hidden: how many sigmoids.
        points: of the grid.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> shared, x = Shared(512), torch.randn(4, 6)
        >>> exact = (x.unsqueeze(-1) * shared.inner).sigmoid() @ shared.outer
        >>> shared(x).allclose(exact, atol=1e-4)
        True
    """

    def __init__(self, hidden: int, points: int = 257) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.empty(hidden).uniform_(-1, 1))
        self.outer = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / math.sqrt(hidden))
        self.points = points

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.detach().aminmax()
        cells = self.points - 1
        width = ((high - low) / cells).clamp_min(torch.finfo(x.dtype).tiny)
        grid = low + width * torch.arange(self.points, dtype=x.dtype, device=x.device)
        values = (grid.unsqueeze(-1) * self.inner).sigmoid() @ self.outer
        place = (x - low) / width
        cell = place.detach().long().clamp_(0, cells - 1)
        lower = values.index_select(0, cell.flatten()).view_as(x)
        step = values.diff().index_select(0, cell.flatten()).view_as(x)
        return lower + (place - cell) * step


class Agents(nn.Module):
    """A sender, which sees one image, and a receiver, which sees a code and the candidates; neither has biases."""

    def __init__(self, pixels: int, setting: Setting, channel: Channel) -> None:
        super().__init__()
        self.setting, self.channel = setting, channel
        self.temperature = 1.0
        self.describe = nn.Sequential(
            nn.Linear(pixels, setting.width, bias=False),
            Shared(setting.hidden),
            nn.Sigmoid(),
            nn.Linear(setting.width, setting.symbols, bias=False),
        )
        self.look = nn.Linear(pixels, setting.width, bias=False)
        self.read = nn.Linear(setting.symbols, setting.width, bias=False)

    def code(self, images: Tensor) -> Tensor:
        """A random code of each image, (N, K), in the closed simplex."""
        scores = self.describe(images) / self.setting.division
        code: Tensor = self.channel(scores, self.temperature, self.setting).rsample()
        return code

    def forward(self, code: Tensor, images: Tensor, candidates: Tensor) -> Tensor:
        """The receiver's scores of the candidates (N, C), numbers of images, given the codes (N, K)."""
        scores: Tensor = self.read(code) @ self.look(images).mT
        return scores.gather(1, candidates)


def games(count: int, candidates: int, generator: torch.Generator | None = None) -> Tensor:
    """Numbers (count, candidates) of the images in each game: its own first, then others of the batch, none twice.

    The receiver does not know of an order, so the right answer may always be the first.
    """
    if candidates > count:
        raise ValueError(f"candidates must be at most the {count} images of a batch, got {candidates}")
    order = torch.rand(count, count, generator=generator).fill_diagonal_(2.0)  # itself is above all others
    return order.topk(candidates, dim=1).indices


@dataclass(frozen=True)
class Outcome:
    """What a pair of agents does on images it has not learned with.

    Args:
        success: the share of games in which the image is found.
        nonzeros: of a code, on average.
        used: how many symbols are the largest of some code.
        codes: (N, K), of all the images.
    """

    success: float
    nonzeros: float
    used: int
    codes: Tensor


@torch.no_grad()
def played(agents: Agents, images: Tensor, seed: int) -> Outcome:
    """Describe each image once, and look for it. The games and the codes' noise are the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    found, codes, shown = [], [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for rows in _batches(len(images), AT_ONCE, generator):
            code = agents.code(images[rows])
            candidates = games(len(rows), agents.setting.candidates, generator)
            found.append(agents(code, images[rows], candidates).argmax(1) == 0)
            codes.append(code)
            shown.append(rows)
    kept = torch.cat(codes)[torch.cat(shown).argsort()]
    return Outcome(
        torch.cat(found).float().mean().item(),
        (kept > 0).sum(1).float().mean().item(),
        int((torch.bincount(kept.argmax(1)) > 0).sum()),
        kept,
    )


def trained(
    images: Tensor, setting: Setting, channel: Channel, after: Callable[[int, Agents], None] = lambda updates, _: None
) -> Agents:
    """Agents after so many updates of games among the images (N, pixels).

    Args:
        images: drawn in a new random order in every pass through them.
        setting: of the game and the training.
        channel: the distribution of codes.
        after: called after every update with its number and the agents.
    """
    checkpoints.check_rate(setting.rate)
    agents = Agents(images.shape[1], setting, channel)
    optimizer = torch.optim.Adam(agents.parameters(), lr=setting.rate, fused=True)
    right = torch.zeros(setting.batch, dtype=torch.long)
    batches = _endless(len(images), setting.batch)
    for done in range(setting.updates):
        agents.temperature = cooled(done, setting.cooling)
        shown = images[next(batches)]
        scores = agents(agents.code(shown), shown, games(setting.batch, setting.candidates))
        checkpoints.step(F.cross_entropy(scores, right), optimizer)
        after(done + 1, agents)
    agents.temperature = cooled(setting.updates, setting.cooling)
    checkpoints.check_finite(agents)
    return agents


def _endless(count: int, size: int) -> Iterator[Tensor]:
    """Rows, ``size`` at a time, in a new random order in every pass; what is left over is not used in that pass."""
    while True:
        for rows in torch.split(torch.randperm(count), size):
            if len(rows) == size:
                yield rows


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows in a random order; what is left over joins the last batch."""
    order = torch.randperm(count, generator=generator)
    whole = max(count // size, 1) * size
    for first in range(0, min(whole, count), size):
        yield order[first : first + size] if first + size < whole else order[first:]
