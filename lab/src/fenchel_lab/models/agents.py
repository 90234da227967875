"""Two agents and a code: one describes an image, the other picks it among candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F

from fenchel.mixed import Concrete, GaussianSparsemax, HardConcrete, StraightThroughConcrete
from fenchel.seq2seq import checkpoints

COOLEST = 0.5
"""The temperature that annealing ends at, from 1."""

AT_ONCE = 500
"""Images whose games are played at a time when nothing is learned."""


@dataclass(frozen=True)
class Setting:
    """The game, the agents and their training.

    Args:
        symbols: K, the length of a code.
        candidates: images to pick among, the right one included.
        width: of embedded images and codes.
        hidden: of the layer before.
        rate: of learning (Adam).
        anneal: the share of training after which the temperature is down at 0.5, at an even rate from 1.
        stretch: τ of the Hard Concrete.
        scale: σ of the Gaussian-Sparsemax.
        batch: games at a time.
        epochs: how often each training image is described.
    """

    symbols: int = 256
    candidates: int = 16
    width: int = 128
    hidden: int = 256
    rate: float = 1e-3
    anneal: float = 0.2
    stretch: float = 1.1
    scale: float = 1.0
    batch: int = 64
    epochs: int = 5


def cooled(progress: float, anneal: float) -> float:
    """The temperature after a share of training: from 1 down to 0.5, where it is at a share of ``anneal``.

    Example:
        >>> cooled(0.0, 0.2), cooled(0.2, 0.2), cooled(1.0, 0.2)
        (1.0, 0.5, 0.5)
    """
    return float(max(COOLEST, COOLEST ** (progress / anneal)))


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


class Agents(nn.Module):
    """A sender, which sees one image, and a receiver, which sees a code and the candidates."""

    def __init__(self, pixels: int, setting: Setting, channel: Channel) -> None:
        super().__init__()
        self.setting, self.channel = setting, channel
        self.temperature = 1.0
        self.describe = _network(pixels, setting.hidden, setting.symbols)
        self.look = _network(pixels, setting.hidden, setting.width)
        self.read = nn.Linear(setting.symbols, setting.width, bias=False)

    def code(self, images: Tensor) -> Tensor:
        """A random code of each image, (N, K), in the closed simplex."""
        code: Tensor = self.channel(self.describe(images), self.temperature, self.setting).rsample()
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
    """Describe each image once, and look for it. The games are the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    found, codes, shown = [], [], []
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


def trained(images: Tensor, setting: Setting, channel: Channel, progress: Callable[[float], None]) -> Agents:
    """Agents after so many epochs of games among the images (N, pixels)."""
    checkpoints.check_rate(setting.rate)
    agents = Agents(images.shape[1], setting, channel)
    optimizer = torch.optim.Adam(agents.parameters(), lr=setting.rate, fused=True)
    right = torch.zeros(setting.batch, dtype=torch.long)
    steps = setting.epochs * (len(images) // setting.batch)
    done = 0
    for _ in range(setting.epochs):
        for rows in torch.split(torch.randperm(len(images)), setting.batch):
            if len(rows) < setting.batch:
                continue
            agents.temperature = cooled(done / steps, setting.anneal)
            shown = images[rows]
            scores = agents(agents.code(shown), shown, games(setting.batch, setting.candidates))
            checkpoints.step(F.cross_entropy(scores, right), optimizer)
            done += 1
        progress(done / steps)
    checkpoints.check_finite(agents)
    return agents


def _network(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows in a random order; what is left over joins the last batch."""
    order = torch.randperm(count, generator=generator)
    whole = max(count // size, 1) * size
    for first in range(0, min(whole, count), size):
        yield order[first : first + size] if first + size < whole else order[first:]
