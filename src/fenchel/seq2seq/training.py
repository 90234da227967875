"""Training of encoder-decoders, with early stopping and checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fenchel import kernels
from fenchel._checks import check_callable, check_count, check_kind, check_number, check_one_of
from fenchel.progress import Progress, bar, silent
from fenchel.seq2seq.batches import IGNORED, Batches, Pair, check_pairs
from fenchel.seq2seq.checkpoints import CHECKPOINT, Checkpoint, DivergedError, check_finite, check_rate, step
from fenchel.seq2seq.model import Seq2Seq
from fenchel.seq2seq.saving import whole

Criterion = Literal["accuracy", "token_accuracy"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training: sizes, learning rate, optimizer and seed.

    Args:
        epochs: the largest number of epochs.
        parts: the number of epochs in which every pair is used once; more than one for large corpora.
        batch: the number of pairs in a batch.
        rate: the initial learning rate; it is halved whenever the validation loss rises.
        cooling: the number of epochs at the end before each of which the rate is halved.
        optimizer: ``"adam"`` or ``"adamw"``.
        weight_decay: of AdamW, or of Adam.
        clip: the largest norm of the gradient of all parameters.
        criterion: the score of the validation that decides which model is best, ``"accuracy"`` or ``"token_accuracy"``.
            Where whole targets are hardly ever right, as in translation, take the latter.
        patience: the number of consecutive validations without a better one after which training stops.
        every: the number of epochs between validations; the last epoch is always validated.
        seed: of the order of the pairs and of dropout.

    Example:
        >>> Training(epochs=3, rate=1e-2).batch
        64
    """

    epochs: int = 30
    parts: int = 1
    batch: int = 64
    rate: float = 1e-3
    cooling: int = 0
    optimizer: Literal["adam", "adamw"] = "adam"
    weight_decay: float = 0.0
    clip: float = 5.0
    criterion: Criterion = "accuracy"
    patience: int = 5
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "parts", "batch", "patience", "every"):
            object.__setattr__(self, name, check_count(getattr(self, name), name))  # JSON has no NumPy integers
        object.__setattr__(self, "cooling", check_count(self.cooling, "cooling", 0))
        if self.cooling > self.epochs:
            raise ValueError(f"cooling must be between 0 and epochs, {self.epochs}, got {self.cooling}")
        check_one_of(self.optimizer, "optimizer", "adam", "adamw")
        check_one_of(self.criterion, "criterion", "accuracy", "token_accuracy")
        check_rate(self.rate)
        check_number(self.clip, "clip", 0, ends="(]")
        check_number(self.weight_decay, "weight_decay", 0, ends="[)")


@dataclass(frozen=True)
class Scores:
    """Validation scores: the mean loss per symbol, and the shares of targets and of symbols that are right.

    Greedy decoding reproduces a target exactly if each of its symbols is the most probable one given those before it,
    so that one forward pass with known inputs gives the accuracy. The token accuracy is the share of symbols, ends
    included, that are the most probable ones given the symbols of the target before them.

    Example:
        >>> Scores(loss=0.2, accuracy=0.9, token_accuracy=0.97).accuracy
        0.9
    """

    loss: float
    accuracy: float
    token_accuracy: float = 0.0

    def rank(self, criterion: Criterion) -> tuple[float, float]:
        """What scores are compared by: the criterion, then the loss.

        Example:
            >>> Scores(0.2, 0.9, 0.97).rank("token_accuracy")
            (0.97, -0.2)
        """
        return (self.accuracy if criterion == "accuracy" else self.token_accuracy), -self.loss


@dataclass(frozen=True)
class Validation:
    """A validation: epoch, training loss since the last validation, scores, learning rate, tokens per second.

    Example:
        >>> Validation(1, 0.5, Scores(0.4, 0.8), rate=1e-3, tokens_per_second=1e4).scores.loss
        0.4
    """

    epoch: int
    training_loss: float
    scores: Scores
    rate: float
    tokens_per_second: float


@dataclass(frozen=True)
class History:
    """All validations of a run.

    Example:
        >>> first, second = (Validation(n, 0.5, Scores(0.4, n / 10), rate=1e-3, tokens_per_second=1e4) for n in (2, 1))
        >>> History([first, second]).best.epoch
        2
    """

    validations: Sequence[Validation]
    criterion: Criterion = "accuracy"

    @property
    def best(self) -> Validation:
        """The validation with the highest criterion, then the smallest loss; the model has its parameters."""
        return max(self.validations, key=lambda each: each.scores.rank(self.criterion))


@dataclass(frozen=True)
class _Run:
    """The state of a training after an epoch."""

    epoch: int = 0
    rate: float = 0.0
    waited: int = 0
    validations: tuple[Validation, ...] = ()

    @property
    def last_loss(self) -> float:
        return self.validations[-1].scores.loss if self.validations else float("inf")

    def best(self, criterion: Criterion) -> tuple[float, float]:
        return max((each.scores.rank(criterion) for each in self.validations), default=(-1.0, 0.0))


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
    """Train a model in place; afterwards it has the parameters of the best validation, and is in evaluation mode.

    With a folder, a checkpoint is written after every epoch, and the best model so far is saved there. If the folder
    has a checkpoint of the same training, the run resumes from it, and ends with the same parameters, to the bit, as
    without the interruption.

    A loss that is not finite stops the training with a :class:`DivergedError`, and nothing more is saved.

    Args:
        model: the model.
        pairs: to train on.
        validation: pairs to validate on.
        training: rates, sizes and seeds; ``Training()`` by default.
        folder: of the checkpoints and the saved model.
        progress: called after every batch; True shows a progress bar on standard error.
        watch: called after every validation, with the model as it was validated.

    Returns:
        All validations.

    Example:
        >>> from fenchel.seq2seq import Pair, Recurrent, Vocabulary
        >>> letters = Vocabulary("ab")
        >>> pairs = [Pair(tuple(word), tuple(word)) for word in ("a", "ab", "ba")]
        >>> model = Recurrent(letters, letters, embedding=4, hidden=4, layers=1)
        >>> len(train(model, pairs, pairs, training=Training(epochs=2)).validations)
        2
    """
    check_kind(model, "model", Seq2Seq)
    if training is not None:
        check_kind(training, "training", Training)
    check_pairs(pairs, "pairs")
    check_pairs(validation, "validation")
    if folder is not None:
        check_kind(folder, "folder", str, os.PathLike, what="a path")
    if watch is not None:
        check_callable(watch, "watch", "a function of a validation")
    settings = training or Training()
    if not pairs or not validation:
        raise ValueError(f"there must be pairs to train and to validate with, got {len(pairs)} and {len(validation)}")
    # A run may be resumed with more epochs or patience; with cooling, the rate depends on the number of epochs.
    free = frozenset({"patience"} if settings.cooling else {"epochs", "patience"})
    wanted = {"training": asdict(settings), "model": model.settings(), "data": _digests(pairs, validation)}
    checkpoint = None if folder is None else Checkpoint(Path(folder) / CHECKPOINT, wanted, free)
    if checkpoint is not None:  # errors of writing are raised before the first epoch
        model._check_writable()
        checkpoint.prepare()
    batches = Batches(pairs, model.source, model.target, size=settings.batch, seed=settings.seed, parts=settings.parts)
    held_out = Batches(validation, model.source, model.target, size=2 * settings.batch)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=settings.rate, weight_decay=settings.weight_decay)
    devices = [model.device] if model.device.type == "cuda" else []
    with _listener(progress) as report, torch.random.fork_rng(devices=devices):
        torch.manual_seed(settings.seed)
        run, best = _Run(rate=settings.rate), _copy(model)
        if checkpoint is not None:
            run, best = _resumed(checkpoint, model, optimizer)
        while run.epoch < settings.epochs and run.waited < settings.patience:
            if run.epoch >= settings.epochs - settings.cooling:
                run = replace(run, rate=run.rate / 2)
            for group in optimizer.param_groups:
                group["lr"] = run.rate
            loss, speed = _epoch(model, batches, optimizer, settings, run, report)
            run = replace(run, epoch=run.epoch + 1)
            check_finite(model)
            if run.epoch % settings.every == 0 or run.epoch == settings.epochs:
                run, better = _validated(run, settings.criterion, loss, validate(model, held_out), speed)
                best = _copy(model) if better else best
                if better and folder is not None:
                    model.save(folder)
                if watch is not None:
                    watch(run.validations[-1])
            if checkpoint is not None:
                checkpoint.keep(model, best, optimizer, asdict(run))
    model.load_state_dict(best)
    model.eval()
    return History(run.validations, settings.criterion)


def _epoch(
    model: Seq2Seq, batches: Batches, optimizer: torch.optim.Optimizer, settings: Training, run: _Run, report: Progress
) -> tuple[float, float]:
    """Train on all batches once; the mean loss per symbol, and tokens per second."""
    model.train()
    total, tokens, start = 0.0, 0, time.perf_counter()
    named = settings.criterion.replace("_", " ")
    accuracy = f", {named} {run.best(settings.criterion)[0]:.1%}" if run.validations else ""
    for number, batch in enumerate(batches.epoch(run.epoch)):
        total += step(model(batch), optimizer, settings.clip) * batch.tokens
        tokens += batch.tokens
        speed = tokens / (time.perf_counter() - start)
        part = (run.epoch + (number + 1) / len(batches)) / settings.epochs
        report(part, f"epoch {run.epoch + 1}, loss {total / tokens:.3f}{accuracy}, {speed:,.0f} tokens/s")
    return total / tokens, speed


def _validated(run: _Run, criterion: Criterion, loss: float, scores: Scores, speed: float) -> tuple[_Run, bool]:
    """The run after a validation, and whether it is the best so far."""
    if not math.isfinite(scores.loss):
        raise DivergedError(f"the validation loss is {scores.loss} after epoch {run.epoch}, so training stopped")
    better = scores.rank(criterion) > run.best(criterion)
    rate = run.rate / 2 if scores.loss > run.last_loss else run.rate
    here = Validation(run.epoch, loss, scores, run.rate, speed)
    waited = 0 if better else run.waited + 1
    return replace(run, rate=rate, waited=waited, validations=(*run.validations, here)), better


@torch.no_grad()
def validate(model: Seq2Seq, batches: Batches) -> Scores:
    """The scores of a model on batches, in evaluation mode.

    Example:
        >>> from fenchel.seq2seq import Batches, Pair, Recurrent, Vocabulary
        >>> letters = Vocabulary("ab")
        >>> batches = Batches([Pair(("a",), ("b",))], letters, letters)
        >>> validate(Recurrent(letters, letters, embedding=4, hidden=4, layers=1), batches).loss > 0
        True
    """
    check_kind(model, "model", Seq2Seq)
    check_kind(batches, "batches", Batches)
    training = model.training
    model.eval()
    loss, right, tokens, targets, right_tokens = 0.0, 0, 0, 0, 0
    for batch in batches:
        numbers = batch.target.to(model.device)
        hidden = model.hidden_states(model.encode(batch.source.to(model.device)), batch.inputs.to(model.device))
        loss += float(model.loss(hidden, numbers, reduction="sum"))
        equal, padding = model.output(hidden).argmax(-1) == numbers, numbers == IGNORED
        right += int((equal | padding).all(1).sum())
        right_tokens += int(equal.sum())
        tokens += batch.tokens
        targets += len(numbers)
    model.train(training)
    return Scores(loss / tokens, right / targets, right_tokens / tokens)


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
    """The state and the best parameters of a checkpoint; those of a new run if there is none."""
    kept = checkpoint.resume(model, optimizer)
    if kept is None:
        return _Run(rate=checkpoint.what["training"]["rate"]), _copy(model)
    found, best = kept
    with whole(checkpoint.file, "checkpoint"):
        validations = tuple(Validation(**{**each, "scores": Scores(**each["scores"])}) for each in found["validations"])
        return _Run(int(found["epoch"]), float(found["rate"]), int(found["waited"]), validations), best


def _listener(progress: Progress | bool) -> contextlib.AbstractContextManager[Progress]:
    """The function of the caller, a progress bar, or a function that does nothing, as a context."""
    if progress is True:
        return bar("training")
    if progress is not False:
        check_callable(progress, "progress", "True, False or a function")
    return contextlib.nullcontext(progress or silent)
