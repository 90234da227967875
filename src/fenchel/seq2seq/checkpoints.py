"""Parts of training loops: optimizer steps that check the loss, and checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from fenchel._checks import check_number, is_integer
from fenchel.seq2seq.saving import (
    FLOATS,
    check_tensors,
    parse_settings,
    read_tensors,
    safetensors,
    short,
    whole,
    write_whole,
)

__all__ = ["CHECKPOINT", "Checkpoint", "DivergedError", "check_finite", "check_rate", "record", "step"]

CHECKPOINT = "checkpoint.safetensors"
"""The name of a checkpoint in the folder of its model."""
ADAM = {"step", "exp_avg", "exp_avg_sq"}
"""The names of the tensors that Adam and AdamW keep per parameter."""


class DivergedError(ValueError):
    """Raised if the loss or the parameters of a training are no longer finite.

    Example:
        >>> issubclass(DivergedError, ValueError)
        True
    """


def check_rate(rate: float) -> None:
    """Check a learning rate.

    Example:
        >>> check_rate(float("inf"))
        Traceback (most recent call last):
            ...
        ValueError: rate must satisfy 0 < rate < inf, got inf
    """
    check_number(rate, "rate", 0)


def step(loss: Tensor, optimizer: torch.optim.Optimizer, clip: float | None = None) -> float:
    """Take one step of an optimizer along the gradient of a loss, and return its value.

    Args:
        loss: a scalar; if it is not finite, a :class:`DivergedError` is raised and no parameter changes.
        optimizer: of the parameters of the loss.
        clip: the largest norm of the gradient of all these parameters; no clipping by default.

    Example:
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> step(x.square().sum(), torch.optim.SGD([x], lr=0.5)), x.item()
        (9.0, 0.0)
    """
    value, rate = loss.item(), float(optimizer.param_groups[0]["lr"])
    if not math.isfinite(value):
        raise DivergedError(f"the training loss is {value}, so training stopped: try a rate lower than {rate:g}")
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], clip)
    try:
        optimizer.step()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise DivergedError(f"a step overflowed, so training stopped: try a rate lower than {rate:g}") from None
    return value


def check_finite(model: nn.Module) -> None:
    """Raise a :class:`DivergedError` if a parameter of a model is not finite.

    Example:
        >>> check_finite(nn.Linear(2, 1))
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise DivergedError(f"{name} is no longer finite, so training stopped: try a lower rate")


@dataclass(frozen=True)
class Checkpoint:
    """A file from which a training resumes after an interruption, with the same result to the bit.

    Args:
        file: the path; the file is written atomically.
        what: a description of the model, the settings and the data. A training resumes only if it is equal.
        free: names in ``what["training"]`` that may differ.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = Checkpoint(Path(folder) / CHECKPOINT, {"training": {"rate": 0.1}})
        ...     checkpoint.keep(model, model.state_dict(), optimizer, {"epoch": 3})
        ...     run, best = checkpoint.resume(model, optimizer)
        ...     found = record(checkpoint.file)
        >>> run["epoch"], sorted(best), found["training"]
        (3, ['bias', 'weight'], {'rate': 0.1})
    """

    file: Path
    what: Mapping[str, Mapping[str, Any]]
    free: frozenset[str] = frozenset()

    def prepare(self) -> None:
        """Create the folder, so that errors are raised before the first epoch."""
        safetensors()
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def keep(
        self,
        model: nn.Module,
        best: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        run: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint.

        Args:
            model: with its current parameters.
            best: the parameters of the best validation so far.
            optimizer: of the model.
            run: the state of the training, for JSON.
        """
        tensors = {f"model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
        # Copies, because safetensors refuses a tensor twice, and the best parameters may be the current ones.
        tensors |= {f"best.{name}": tensor.contiguous().clone() for name, tensor in best.items()}
        for number, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": tensor for name, tensor in state.items()}
        tensors["random"] = torch.get_rng_state()
        device = next(model.parameters()).device
        if device.type == "cuda":
            tensors["random_cuda"] = torch.cuda.get_rng_state(device)
        words = {"fenchel": json.dumps({**self.what, "run": run})}
        write_whole(self.file, lambda path: safetensors().save_file(tensors, path, metadata=words))

    def resume(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Load a checkpoint into the model, the optimizer and the random number generators.

        Returns:
            The state of the training, and the best parameters so far; None if there is no checkpoint.
        """
        if not self.file.exists() and not self.file.is_symlink():
            return None
        tensors, words = read_tensors(self.file, "a checkpoint")
        found = _parsed(self.file, words)
        self._check_same(found)

        def part_of(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        with whole(self.file, "checkpoint"):
            parameters, best = part_of("model."), part_of("best.")
            for part in (parameters, best):
                check_tensors(model.state_dict(), part)
            moments = _moments(part_of("optimizer."), optimizer)
            run = dict(found["run"])
            _check_run(run)
            model.load_state_dict(parameters)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
            torch.set_rng_state(tensors["random"])
            if "random_cuda" in tensors:
                torch.cuda.set_rng_state(tensors["random_cuda"], next(model.parameters()).device)
        return run, best

    def _check_same(self, record: Mapping[str, Any]) -> None:
        for part, now in self.what.items():
            before = record.get(part)
            for name, value in json.loads(json.dumps(now)).items():
                was = before.get(name) if isinstance(before, dict) else None
                if was != value and not (part == "training" and name in self.free):
                    raise ValueError(
                        f"{self.file} is the checkpoint of another run: its {part} has {name} {short(was)}, "
                        f"this one {short(value)}; take another folder, or remove the checkpoint"
                    )


def record(file: Path) -> dict[str, Any]:
    """Read the description of a checkpoint without its tensors: ``what``, and the state of the training as ``"run"``.

    Args:
        file: a file that ``Checkpoint.keep`` wrote.
    """
    return _parsed(file, read_tensors(file, "a checkpoint", names=())[1])


def _parsed(file: Path, words: Mapping[str, str]) -> dict[str, Any]:
    if "fenchel" not in words:
        raise ValueError(f"{file} is not a checkpoint of Fenchel")
    return parse_settings(words["fenchel"], file, "a checkpoint")


def _check_run(run: Mapping[str, Any]) -> None:
    """Check the numbers of the state of a training: numbers of epochs, the rate, scores."""
    for name in ("epoch", "waited"):
        if name in run and (not is_integer(run[name]) or run[name] < 0):
            raise ValueError(f"{name} must be an integer ≥ 0, got {short(run[name])}")
    if "rate" in run:
        check_rate(run["rate"])
    for name, value in run.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


def _moments(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """The tensors of an optimizer by parameter, checked: of the shape of the parameter or scalars, and finite."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        if not int(number) < len(parameters) or tensor.shape not in ((), parameters[int(number)].shape):
            raise ValueError(f"optimizer.{name} does not fit any parameter")
        if tensor.dtype not in FLOATS or not bool(tensor.isfinite().all()):
            raise ValueError(f"optimizer.{name} must hold finite floating-point numbers")
        moments.setdefault(int(number), {})[key] = tensor
    for place, state in moments.items():
        if state.keys() != ADAM:
            raise ValueError(f"optimizer.{place} has {', '.join(sorted(state))}, not {', '.join(sorted(ADAM))}")
    return moments
