"""Trainings of encoder-decoders that keep, after every epoch, the processor time and what is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fenchel.seq2seq import Pair, Seq2Seq, Training, Validation, train
from fenchel.seq2seq.saving import write_whole

Entry = Mapping[str, Any]
"""Of an epoch: its number, seconds of processor time in training since the start, losses, accuracies, and more."""

DIARY = "diary.json"


def trained(
    model: Seq2Seq,
    pairs: Sequence[Pair],
    validation: Sequence[Pair],
    training: Training,
    folder: Path | None = None,
    measure: Callable[[int], Mapping[str, Any]] = lambda epoch: {},
    progress: Callable[[float], None] = lambda part: None,
) -> list[Entry]:
    """Train a model in place, to the parameters of its best validation, and return an entry for every validation.

    Args:
        model: to be trained.
        pairs: to train on.
        validation: to choose the epoch by.
        training: how.
        folder: of checkpoints and entries; an interrupted training goes on from there.
        measure: what else to measure of the model, in evaluation mode, after the validation of an epoch.
        progress: told the share that is done.
    """
    file = None if folder is None else folder / DIARY
    entries: list[Entry] = []
    if file is not None and file.exists():
        entries = json.loads(file.read_text(encoding="utf-8"))
    start = time.process_time()

    def watch(found: Validation) -> None:
        nonlocal entries, start
        spent = time.process_time() - start
        entries = [each for each in entries if each["epoch"] < found.epoch]  # an epoch may be done again
        scores = found.scores
        entry = {
            "epoch": found.epoch,
            "seconds": round(spent + (entries[-1]["seconds"] if entries else 0.0), 1),
            "training loss": round(found.training_loss, 6),
            "loss": round(scores.loss, 6),
            "accuracy": round(scores.accuracy, 6),
            "token accuracy": round(scores.token_accuracy, 6),
        }
        model.eval()
        entries.append(entry | dict(measure(found.epoch)))
        model.train()
        if file is not None:
            text = json.dumps(entries)
            write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))
        start = time.process_time()

    train(
        model,
        pairs,
        validation,
        training=training,
        folder=folder,
        progress=lambda part, note="": progress(part),
        watch=watch,
    )
    return entries


def best(entries: Sequence[Entry], criterion: str = "accuracy") -> Entry:
    """The entry of the model that was kept."""
    return max(entries, key=lambda each: (each[criterion], -each["loss"]))
