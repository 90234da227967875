"""Training: epochs over batches; the epoch that did best on other data is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fenchel.seq2seq.checkpoints import Checkpoint, check_finite, check_rate, step
from fenchel.seq2seq.saving import whole

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
        check_rate(self.rate)
        for name in ("epochs", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def trained(
    model: Model,
    batches: Sequence[Batch],
    loss: Callable[[Model, Batch], Tensor],
    score: Callable[[Model], float] | None,
    course: Course,
    progress: Callable[[float], None],
    checkpoint: Checkpoint | None = None,
    save: Callable[[Model], object] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[Model, float]:
    """The model of the epoch with the best validation score, in evaluation mode, and that score.

    Args:
        model: trained in place.
        batches: an epoch goes once through all, in random order.
        loss: of a batch; if it is not finite, training stops with a :class:`fenchel.seq2seq.DivergedError`.
        score: of a model in evaluation mode, on other data; with None the last epoch is taken, whose score is −1.
        course: how long and how fast.
        progress: told as batches pass.
        checkpoint: written after every epoch, and gone on from.
        save: called with every model that is better than all before.
        optimizer: of the model; Adam with the decay of the course by default. Its rate is that of the course.
    """
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=course.rate, weight_decay=course.decay)
    steps = course.epochs * len(batches)
    best, found, waited, epoch = -1.0, model, 0, 0
    if checkpoint is not None:
        checkpoint.prepare()
        if (kept := checkpoint.resume(model, optimizer)) is not None:
            run, parameters = kept
            with whole(checkpoint.file, "checkpoint"):
                best, waited, epoch = float(run["best"]), int(run["waited"]), int(run["epoch"])
            found = copy.deepcopy(model)
            found.load_state_dict(parameters)
    while epoch < course.epochs and waited < course.patience:
        model.train()
        for place, row in enumerate(torch.randperm(len(batches)).tolist()):
            for group in optimizer.param_groups:
                group["lr"] = course.rate * (1 - (epoch * len(batches) + place) / steps)
            step(loss(model, batches[row]), optimizer, clip=5.0)
            progress((epoch + (place + 1) / len(batches)) / course.epochs)
        check_finite(model)
        epoch += 1
        if score is not None:
            model.eval()
            reached, waited = score(model), waited + 1
            if reached > best:
                best, found, waited = reached, copy.deepcopy(model), 0
                if save is not None:
                    save(found)
        if checkpoint is not None:
            checkpoint.keep(model, found.state_dict(), optimizer, {"best": best, "waited": waited, "epoch": epoch})
    progress(1.0)
    return found.eval(), best


def by_length(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Rows of about equal length together, so that little is computed for padding; ``size`` at a time.

    Example:
        >>> list(by_length([3, 1, 2, 1], 2))
        [[1, 3], [2, 0]]
    """
    rows = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
