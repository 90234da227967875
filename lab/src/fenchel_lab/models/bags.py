"""Bags of instances: how they are made of digits, and a classifier that pools them by association."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel import Regularizer
from fenchel.hopfield import HopfieldPooling
from fenchel.seq2seq.checkpoints import check_finite, check_rate, step

NONE = -1
AT_ONCE = 128
"""Bags that are classified at a time."""


@dataclass(frozen=True)
class Bags:
    """Bags as rows of numbers of instances.

    Args:
        pool: (instances, …), shared by many bags.
        members: (bags, most), numbers of instances; ``NONE`` after the last.
        labels: (bags,), whether each is positive.
        targets: (bags,), how many of the first members are those that count, where that is known.
    """

    pool: Tensor
    members: Tensor
    labels: Tensor
    targets: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor) -> Bags:
        members = self.members[rows]
        longest = int((members != NONE).sum(1).max()) if len(rows) else 0
        targets = None if self.targets is None else self.targets[rows]
        return Bags(self.pool, members[:, :longest], self.labels[rows], targets)


@dataclass(frozen=True)
class Setting:
    """The classifier and its training.

    Args:
        embedding: "dense": two layers with ReLU; "convolutional": Ilse, Tomczak and Welling's for images.
        width: of an embedded instance.
        hidden: width of the association space, of each head.
        heads: how many.
        beta: inverse temperature.
        dropout: the share of associations that is dropped in training, which the paper calls bag dropout.
        rate: of learning, …
        decay: … multiplied by this after every epoch.
        batch: bags at a time.
        epochs: at most.
        patience: epochs without a better validation score before training ends.
    """

    embedding: str = "dense"
    width: int = 64
    hidden: int = 16
    heads: int = 8
    beta: float = 1.0
    dropout: float = 0.0
    rate: float = 2e-3
    decay: float = 0.96
    batch: int = 32
    epochs: int = 12
    patience: int = 5


class Classifier(nn.Module):
    """Embeds instances, pools them with a learned query for each head, and scores the bag."""

    def __init__(self, shape: torch.Size, setting: Setting, omega: Regularizer) -> None:
        super().__init__()
        self.embed = _EMBEDDINGS[setting.embedding](shape, setting.width)
        self.pool = HopfieldPooling(
            setting.width,
            setting.hidden,
            num_heads=setting.heads,
            scaling=setting.beta,
            dropout=setting.dropout,
            omega=omega,
        )
        self.score = nn.Linear(setting.width, 1)

    def forward(self, bags: Bags) -> Tensor:
        """A score of each bag: positive if it is above zero."""
        score: Tensor = self.score(self.pool(*self._embedded(bags)))
        return score.squeeze(-1)

    def weights(self, bags: Bags) -> Tensor:
        """What each head took of each instance, (bags, heads, most)."""
        return self.pool.get_association_matrix(*self._embedded(bags)).squeeze(2)

    def _embedded(self, bags: Bags) -> tuple[Tensor, Tensor]:
        """Instances side by side, and where there is none. Nothing is computed for padding."""
        present = bags.members != NONE
        embedded = self.embed(bags.pool[bags.members[present]])
        padded = embedded.new_zeros(*present.shape, embedded.shape[-1])
        return padded.masked_scatter(present.unsqueeze(-1), embedded), ~present


def trained(
    train: Bags, valid: Bags, omega: Regularizer, setting: Setting, progress: Callable[[float], None]
) -> tuple[Classifier, float]:
    """The classifier of the epoch that did best on the validation bags, and its area under the ROC curve there."""
    check_rate(setting.rate)
    classifier = Classifier(train.pool.shape[1:], setting, omega)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=setting.rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, setting.decay)
    best, found, waited = -1.0, classifier, 0
    for epoch in range(setting.epochs):
        classifier.train()
        for rows in torch.split(torch.randperm(len(train)), setting.batch):
            batch = train[rows]
            loss = F.binary_cross_entropy_with_logits(classifier(batch), batch.labels.float())
            step(loss, optimizer, clip=1.0)
        check_finite(classifier)
        schedule.step()
        progress((epoch + 1) / setting.epochs)
        area = area_under_curve(classifier, valid)
        if area > best:
            best, found, waited = area, copy.deepcopy(classifier), 0
        else:
            waited += 1
        if waited == setting.patience:
            break
    progress(1.0)
    return found.eval(), best


@torch.no_grad()
def scores(classifier: Classifier, bags: Bags) -> Tensor:
    """The score of every bag."""
    classifier.eval()
    return torch.cat([classifier(bags[rows]) for rows in torch.split(torch.arange(len(bags)), AT_ONCE)])


def accuracy(classifier: Classifier, bags: Bags) -> float:
    """The share of bags that are classified right."""
    return ((scores(classifier, bags) > 0) == bags.labels).float().mean().item()


def area_under_curve(classifier: Classifier, bags: Bags) -> float:
    """How often a positive bag scores higher than a negative one."""
    return float(roc_auc_score(bags.labels.numpy(), scores(classifier, bags).numpy()))


def of_digits(
    images: Tensor,
    digits: Tensor,
    target: int,
    least: int,
    size: tuple[float, float],
    count: int,
    random: np.random.Generator,
) -> Bags:
    """Bags of images, every other one positive: those with at least so many of the target.

    Args:
        images: (N, …).
        digits: (N,), what each shows.
        target: the digit that counts.
        least: K. A positive bag of n images has K to n of the target, a negative one 0 to K − 1, all equally often.
        size: mean and deviation of the normal distribution that n is drawn from; at least K.
        count: how many bags.
        random: the source of randomness.
    """
    hits, others = (np.flatnonzero(chosen) for chosen in (digits.numpy() == target, digits.numpy() != target))
    members, targets = [], []
    for number in range(count):
        n = max(least, 1, round(random.normal(*size)))
        low, high = (least, n) if number % 2 else (0, least - 1)
        wanted = int(random.integers(low, high, endpoint=True))
        chosen = [random.choice(hits, wanted, replace=False), random.choice(others, n - wanted, replace=False)]
        members.append(torch.from_numpy(np.concatenate(chosen)))
        targets.append(wanted)
    padded = nn.utils.rnn.pad_sequence(members, batch_first=True, padding_value=NONE)
    return Bags(images, padded, torch.arange(count) % 2 == 1, torch.tensor(targets))


def of_lists(instances: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]], labels: Tensor) -> Bags:
    """Bags of vectors, each (instances, features)."""
    sizes = torch.tensor([len(each) for each in instances])
    places = torch.arange(int(sizes.max()))
    members = torch.where(places < sizes.unsqueeze(1), places + (sizes.cumsum(0) - sizes).unsqueeze(1), NONE)
    return Bags(torch.from_numpy(np.concatenate(instances)).float(), members, labels)


def standardized(bags: Bags, like: Bags) -> Bags:
    """Bags whose instances have mean 0 and variance 1 in every feature, over the instances of other bags."""
    seen = like.pool[like.members[like.members != NONE]]
    pool = (bags.pool - seen.mean(0)) / seen.std(0).clamp_min(1e-6)
    return replace(bags, pool=pool)


def _dense(shape: torch.Size, width: int) -> nn.Module:
    middle = 2 * width if len(shape) > 1 else width
    return nn.Sequential(nn.Flatten(), nn.Linear(shape.numel(), middle), nn.ReLU(), nn.Linear(middle, width), nn.ReLU())


def _convolutional(shape: torch.Size, width: int) -> nn.Module:
    sides = [((side - 4) // 2 - 4) // 2 for side in shape]
    return nn.Sequential(
        nn.Unflatten(1, (1, shape[0])),
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * sides[0] * sides[1], width),
        nn.ReLU(),
    )


_EMBEDDINGS = {"dense": _dense, "convolutional": _convolutional}
