"""Questions about pictures: a small CNN, a bag of words, and attention to a grid of places, discrete or continuous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fenchel import Regularizer, Shannon
from fenchel.continuous import BetaGaussian, ContinuousAttention, GaussianBasis, MatchedEncoder
from fenchel_lab.data.easy_vqa import Questions

PAD = 0


@dataclass(frozen=True)
class Attention:
    """How places are summed up.

    Args:
        omega: of discrete attention; None for a density.
        alpha: of a density in the plane that has the mean and the covariance of discrete softmax attention.
    """

    omega: Regularizer | None = None
    alpha: float = 1.0


@dataclass(frozen=True)
class Size:
    """How large the model is.

    Args:
        channels: of the convolutions, …
        strides: … and their steps; the product divides the side of an image, …
        places: … and leaves so many places along it.
        width: of questions and of what joins them with places.
        functions: basis functions along a side of the image, …
        spread: … and their standard deviation.
        batch: images at a time, with all their questions.
    """

    channels: tuple[int, ...] = (16, 32, 48, 48)
    strides: tuple[int, ...] = (2, 2, 2, 1)
    places: int = 8
    width: int = 48
    functions: int = 8
    spread: float = 0.1
    batch: int = 32


@dataclass(frozen=True)
class Batch:
    """Images (N, 3, side, side); numbers of words (Q, W), answers (Q,), and the image (Q,) asked about."""

    images: Tensor
    words: Tensor
    answers: Tensor
    image: Tensor


class Vocabulary:
    """Words of questions, and answers, as numbers."""

    def __init__(self, data: Questions) -> None:
        words = sorted({word for question in set(data.questions) for word in _words(question)})
        self.words = {word: number for number, word in enumerate(words, PAD + 1)}
        self.answers = sorted(set(data.answers))

    def batches(self, data: Questions, size: int) -> list[Batch]:
        """So many images at a time, each with all its questions."""
        number = {answer: i for i, answer in enumerate(self.answers)}
        # A word that was not trained says nothing; an answer that was not trained cannot be given.
        rows = [torch.tensor([self.words.get(word, PAD) for word in _words(q)]) for q in data.questions]
        words = pad_sequence(rows, batch_first=True, padding_value=PAD)
        answers = torch.tensor([number.get(answer, -1) for answer in data.answers])
        image, images = torch.from_numpy(data.image), pixels(data.images)
        found = []
        for first in range(0, len(images), size):
            asked = ((image >= first) & (image < first + size)).nonzero()[:, 0]
            if len(asked):
                part = images[first : first + size]
                found.append(Batch(part, words[asked], answers[asked], image[asked] - first))
        return found


@dataclass(frozen=True)
class Look:
    """What attention saw of a batch.

    Args:
        context: (Q, channels).
        weights: (Q, h, w), discrete: those of discrete attention, or those whose moments a density has.
        density: (Q,), of positions (row, column) in the unit square; None if attention is discrete.
    """

    context: Tensor
    weights: Tensor
    density: BetaGaussian | None = None


class Answerer(nn.Module):
    """Scores of answers."""

    def __init__(self, vocabulary: Vocabulary, attention: Attention, size: Size) -> None:
        super().__init__()
        self.attention = attention
        layers: list[nn.Module] = []
        for before, after, stride in zip((3, *size.channels), size.channels, size.strides, strict=False):
            side = 3 if layers else 5
            layers += [nn.Conv2d(before, after, side, stride, side // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.see = nn.Sequential(*layers)
        places, width = size.channels[-1], size.width
        self.ask = nn.EmbeddingBag(len(vocabulary.words) + 1, width, mode="sum", padding_idx=PAD)
        self.place, self.query = nn.Linear(places, width, bias=False), nn.Linear(width, width)
        self.seen, self.asked = nn.Linear(places, width), nn.Linear(width, width)
        self.answer = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU())
        self.choose = nn.Linear(2 * width, len(vocabulary.answers))
        if attention.omega is None:
            basis = GaussianBasis.grid(size.functions, widths=(size.spread,))
            within = 1 / (12 * size.places**2)  # the variance of positions inside of a place
            encoder = MatchedEncoder(Shannon(), eps=within, exact=True)
            self.density = ContinuousAttention(basis, attention.alpha, encoder)

    def forward(self, batch: Batch) -> Tensor:
        question = self.ask(batch.words)
        joint = self.seen(self.look(batch).context) * torch.tanh(self.asked(question))
        scores: Tensor = self.choose(self.answer(torch.cat([joint, question], -1)))
        return scores

    def look(self, batch: Batch) -> Look:
        """Where attention goes."""
        seen = self.see(batch.images)
        shape = tuple(seen.shape[-2:])
        places = seen.flatten(2).mT
        query = self.query(self.ask(batch.words))
        values = places[batch.image]
        scores = (self.place(places)[batch.image] @ query.unsqueeze(-1)).squeeze(-1)
        if self.attention.omega is not None:
            weights = self.attention.omega.argmax(scores)
            return Look((weights.unsqueeze(1) @ values).squeeze(1), weights.reshape(-1, *shape))
        found = self.density.attend(values, scores, shape=shape)
        assert found.focus.discrete is not None
        density = BetaGaussian(
            found.focus.loc[..., 0, 0, :], sigma=found.focus.sigma[..., 0, 0, :, :], alpha=found.alpha
        )
        return Look(found.context, found.focus.discrete.reshape(-1, *shape), density)


def loss(model: Answerer, batch: Batch) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(model(batch), batch.answers)


@torch.no_grad()
def right(model: Answerer, batches: Sequence[Batch]) -> Tensor:
    """Whether each question was answered right, (Q,)."""
    return torch.cat([model(batch).argmax(-1) == batch.answers for batch in batches])


def accuracy(model: Answerer, batches: Sequence[Batch]) -> float:
    """The share of questions that are answered right."""
    return float(right(model, batches).float().mean())


@torch.no_grad()
def on_shape(model: Answerer, batches: Sequence[Batch]) -> float:
    """The share of attention inside of the box around the shape, on average over questions."""
    shares = []
    for batch in batches:
        mass = attention_map(model.look(batch), batch.images.shape[-1])
        inside = boxes(batch.images)[batch.image]
        shares.append((mass * inside).sum((1, 2)) / mass.sum((1, 2)).clamp_min(1e-12))
    return float(torch.cat(shares).mean())


def attention_map(look: Look, side: int) -> Tensor:
    """What a pixel weighs, (Q, side, side): its part of a place, or the density there."""
    if look.density is None:
        each = side // look.weights.shape[-1]
        return look.weights.repeat_interleave(each, 1).repeat_interleave(each, 2) / each**2
    middles = (torch.arange(side) + 0.5) / side
    points = torch.cartesian_prod(middles, middles)
    p = look.density.log_prob(points.unsqueeze(1)).exp() / side**2
    return p.mT.reshape(-1, side, side)


def boxes(images: Tensor) -> Tensor:
    """Where the box around the shape is, boolean (N, side, side): around all that is not the commonest colour."""
    background = images.flatten(2).median(-1).values[..., None, None]
    shape = ((images - background).abs() > 1e-3).any(1)
    sides = []
    for along in (2, 1):
        hit = shape.any(along)
        sides.append((hit.cumsum(1) > 0) & (hit.flip(1).cumsum(1).flip(1) > 0))
    return sides[0].unsqueeze(2) & sides[1].unsqueeze(1)


def pixels(images: NDArray[np.uint8]) -> Tensor:
    """Bytes (N, side, side, 3) as numbers from −½ to ½, channels first."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - 0.5


def _words(question: str) -> list[str]:
    return question.rstrip("?").split()
