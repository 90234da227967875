"""Training a classifier: epochs over batches, and the one that did best on other data is kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

Batch = TypeVar("Batch")
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Course:
    """How long and how fast.

    Args:
        epochs: at most.
        rate: of learning, falling to zero in a straight line.
        decay: of weights.
        patience: epochs without a better validation score before training ends.
    """

    epochs: int
    rate: float = 1e-3
    decay: float = 1e-4
    patience: int = 5

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be positive and finite, got {self.rate}")


def trained(
    model: Model,
    batches: Sequence[Batch],
    loss: Callable[[Model, Batch], Tensor],
    score: Callable[[Model], float],
    course: Course,
    progress: Callable[[float], None],
) -> tuple[Model, float]:
    """The model of the epoch with the best validation score, and that score."""
    optimizer = torch.optim.Adam(model.parameters(), lr=course.rate, weight_decay=course.decay)
    steps = course.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    best, found, waited = -1.0, model, 0
    for epoch in range(course.epochs):
        model.train()
        for place, row in enumerate(torch.randperm(len(batches)).tolist(), 1):
            value = loss(model, batches[row])
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
            progress((epoch + place / len(batches)) / course.epochs)
        model.eval()
        reached = score(model)
        if reached > best:
            best, found, waited = reached, copy.deepcopy(model), 0
        else:
            waited += 1
        if waited == course.patience:
            break
    progress(1.0)
    return found.eval(), best
