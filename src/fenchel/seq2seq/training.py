"""Training of encoder-decoders, with early stopping and checkpoints to resume from."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._checks import check_count, check_number, check_one_of
from fenchel.progress import Progress, bar, silent
from fenchel.seq2seq.batches import IGNORED, Batches, Pair
from fenchel.seq2seq.checkpoints import CHECKPOINT, Checkpoint, DivergedError, check_finite, check_rate, step
from fenchel.seq2seq.model import Seq2Seq
from fenchel.seq2seq.saving import whole


@dataclass(frozen=True)
class Training:
    """Settings of a training.

    Args:
        epochs: the largest number of epochs.
        parts: the number of epochs in which every pair is seen once; more than one for large corpora.
        batch: the number of pairs in a batch.
        rate: the initial learning rate; it is halved whenever the validation loss rises.
        cooling: the number of last epochs before each of which the rate is halved.
        optimizer: ``"adam"`` or ``"adamw"``.
        weight_decay: of AdamW, or of Adam.
        clip: the largest norm of the gradient of all parameters.
        patience: the number of consecutive validations without a better accuracy after which training stops.
        every: the number of epochs between validations; the last epoch is always validated.
        seed: of the order of the pairs and of dropout.
    """

    epochs: int = 30
    parts: int = 1
    batch: int = 64
    rate: float = 1e-3
    cooling: int = 0
    optimizer: Literal["adam", "adamw"] = "adam"
    weight_decay: float = 0.0
    clip: float = 5.0
    patience: int = 5
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "parts", "batch", "patience", "every"):
            object.__setattr__(self, name, check_count(getattr(self, name), name))  # NumPy's do not go into a file
        object.__setattr__(self, "cooling", check_count(self.cooling, "cooling", 0))
        if self.cooling > self.epochs:
            raise ValueError(f"cooling must be between 0 and epochs, {self.epochs}, got {self.cooling}")
        check_one_of(self.optimizer, "optimizer", "adam", "adamw")
        check_rate(self.rate)
        check_number(self.clip, "clip", 0, ends="(]")
        check_number(self.weight_decay, "weight_decay", 0, ends="[)")


@dataclass(frozen=True)
class Scores:
    """Validation scores: the mean loss per symbol, and the share of targets that greedy decoding writes exactly.

    Greedy decoding writes a target exactly if, fed with it, the model ranks every symbol of it first: so one pass with
    known inputs gives the accuracy.
    """

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Validation:
    """A validation: epoch, training loss since the last validation, scores, learning rate, tokens per second."""

    epoch: int
    training_loss: float
    scores: Scores
    rate: float
    tokens_per_second: float


@dataclass(frozen=True)
class History:
    """All validations of a run; ``best`` is the one whose parameters the model has now."""

    validations: Sequence[Validation]

    @property
    def best(self) -> Validation:
        return max(self.validations, key=lambda each: (each.scores.accuracy, -each.scores.loss))


@dataclass(frozen=True)
class _Run:
    """The progress of a training after an epoch."""

    epoch: int = 0
    rate: float = 0.0
    waited: int = 0
    validations: tuple[Validation, ...] = ()

    @property
    def last_loss(self) -> float:
        return self.validations[-1].scores.loss if self.validations else float("inf")

    @property
    def best(self) -> tuple[float, float]:
        return max(((each.scores.accuracy, -each.scores.loss) for each in self.validations), default=(-1.0, 0.0))


@kernels.waiting()
def train(
    model: Seq2Seq,
    pairs: Sequence[Pair],
    validation: Sequence[Pair],
    *,
    training: Training | None = None,
    folder: Path | str | None = None,
    progress: Progress | bool = False,
    watch: Callable[[Validation], None] | None = None,
) -> History:
    """Train a model in place; afterwards it has the parameters that validated best, and is in evaluation mode.

    With a folder, a checkpoint is written after every epoch, and the best model so far is saved there. If the folder
    has a checkpoint of the same training, the run goes on from it, to the same parameters, bit by bit, that it would
    have reached without the interruption.

    A loss that is not finite stops the training with a :class:`DivergedError`, and nothing more is saved.

    Args:
        model: trained in place.
        pairs: to learn from.
        validation: to judge by.
        training: rates, sizes and seeds; ``Training()`` by default.
        folder: where checkpoints and the model go.
        progress: called as batches pass; True shows a bar on standard error.
        watch: called after every validation, while the model is as it was validated.

    Returns:
        All validations.
    """
    how = training or Training()
    if not pairs or not validation:
        raise ValueError(f"there must be pairs to train and to validate with, got {len(pairs)} and {len(validation)}")
    # To train on for more epochs, or with more patience, is to go on; unless the rate knows when the end is.
    free = frozenset({"patience"} if how.cooling else {"epochs", "patience"})
    wanted = {"training": asdict(how), "model": model.settings(), "data": _digests(pairs, validation)}
    checkpoint = None if folder is None else Checkpoint(Path(folder) / CHECKPOINT, wanted, free)
    if checkpoint is not None:  # what cannot be written is known before an epoch is spent on it
        model._check_writable()
        checkpoint.prepare()
    batches = Batches(pairs, model.source, model.target, size=how.batch, seed=how.seed, parts=how.parts)
    judged = Batches(validation, model.source, model.target, size=2 * how.batch)
    kind = torch.optim.Adam if how.optimizer == "adam" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=how.rate, weight_decay=how.weight_decay)
    devices = [model.device] if model.device.type == "cuda" else []
    with _listener(progress) as tell, torch.random.fork_rng(devices=devices):
        torch.manual_seed(how.seed)
        run, best = _Run(rate=how.rate), _copy(model)
        if checkpoint is not None:
            run, best = _resumed(checkpoint, model, optimizer)
        while run.epoch < how.epochs and run.waited < how.patience:
            if run.epoch >= how.epochs - how.cooling:
                run = replace(run, rate=run.rate / 2)
            for group in optimizer.param_groups:
                group["lr"] = run.rate
            loss, speed = _epoch(model, batches, optimizer, how, run, tell)
            run = replace(run, epoch=run.epoch + 1)
            check_finite(model)
            if run.epoch % how.every == 0 or run.epoch == how.epochs:
                run, better = _validated(run, loss, validate(model, judged), speed)
                best = _copy(model) if better else best
                if better and folder is not None:
                    model.save(folder)
                if watch is not None:
                    watch(run.validations[-1])
            if checkpoint is not None:
                checkpoint.keep(model, best, optimizer, asdict(run))
    model.load_state_dict(best)
    model.eval()
    return History(run.validations)


def _epoch(
    model: Seq2Seq, batches: Batches, optimizer: torch.optim.Optimizer, how: Training, run: _Run, tell: Progress
) -> tuple[float, float]:
    """One pass over all batches: the mean loss per symbol, and tokens per second."""
    model.train()
    total, tokens, start = 0.0, 0, time.perf_counter()
    for number, batch in enumerate(batches.epoch(run.epoch)):
        total += step(model(batch), optimizer, how.clip) * batch.tokens
        tokens += batch.tokens
        speed = tokens / (time.perf_counter() - start)
        part = (run.epoch + (number + 1) / len(batches)) / how.epochs
        tell(part, f"epoch {run.epoch + 1}, loss {total / tokens:.3f}{_valid(run)}, {speed:,.0f} tokens/s")
    return total / tokens, speed


def _valid(run: _Run) -> str:
    return f", accuracy {run.best[0]:.1%}" if run.validations else ""


def _validated(run: _Run, loss: float, scores: Scores, speed: float) -> tuple[_Run, bool]:
    """The run after a validation, and whether that was the best so far."""
    if not math.isfinite(scores.loss):
        raise DivergedError(f"the validation loss is {scores.loss} after epoch {run.epoch}, so training stopped")
    better = (scores.accuracy, -scores.loss) > run.best
    rate = run.rate / 2 if scores.loss > run.last_loss else run.rate
    here = Validation(run.epoch, loss, scores, run.rate, speed)
    waited = 0 if better else run.waited + 1
    return replace(run, rate=rate, waited=waited, validations=(*run.validations, here)), better


@torch.no_grad()
def validate(model: Seq2Seq, batches: Batches) -> Scores:
    """Scores on pairs, with the model in evaluation mode."""
    training = model.training
    model.eval()
    loss, right, tokens, targets = 0.0, 0, 0, 0
    for batch in batches:
        numbers = batch.target.to(model.device)
        hidden = model.hidden_states(model.encode(batch.source.to(model.device)), batch.inputs.to(model.device))
        loss += float(model.loss(hidden, numbers, reduction="sum"))
        hit = (model.output(hidden).argmax(-1) == numbers) | (numbers == IGNORED)
        right += int(hit.all(1).sum())
        tokens += batch.tokens
        targets += len(numbers)
    model.train(training)
    return Scores(loss / tokens, right / targets)


# -- checkpoints -----------------------------------------------------------------------------------------------------


def _digests(pairs: Sequence[Pair], validation: Sequence[Pair]) -> dict[str, str]:
    """Hashes of the training and validation pairs."""
    sides = {"pairs": pairs, "validation": validation}
    return {name: hashlib.sha256(repr(list(side)).encode()).hexdigest()[:16] for name, side in sides.items()}


def _copy(model: Seq2Seq) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _resumed(
    checkpoint: Checkpoint, model: Seq2Seq, optimizer: torch.optim.Optimizer
) -> tuple[_Run, dict[str, Tensor]]:
    """The progress and the best parameters of a checkpoint; those of the start if there is none."""
    kept = checkpoint.resume(model, optimizer)
    if kept is None:
        return _Run(rate=checkpoint.what["training"]["rate"]), _copy(model)
    found, best = kept
    with whole(checkpoint.file, "checkpoint"):
        validations = tuple(Validation(**{**each, "scores": Scores(**each["scores"])}) for each in found["validations"])
        return _Run(int(found["epoch"]), float(found["rate"]), int(found["waited"]), validations), best


def _listener(progress: Progress | bool) -> contextlib.AbstractContextManager[Progress]:
    """The function of the caller, a progress bar, or a function that does nothing."""
    if progress is True:
        return bar("training")
    return contextlib.nullcontext(progress or silent)
