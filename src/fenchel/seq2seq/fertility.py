"""Fertility: how much attention each symbol of a source may receive in all steps of a decoder together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fenchel._checks import check_count, check_entries, check_floats, check_number, check_shape
from fenchel._torch import concrete
from fenchel.regularizers.base import Regularizer
from fenchel.regularizers.capped import Capped
from fenchel.regularizers.configs import written_by

SINK = 100.0
"""How far the score of the sink lies below all others. More than the margin of Gini, 1; exp(−100) is negligible."""


@written_by("width", "most")
class FertilityPredictor(nn.Module):
    """Predicts the fertility of each symbol, (…, J), from its encoding, (…, J, width): most · sigmoid(wᵀh + b).

    It is trained with the rest of a model, because the loss depends on the bounds.

    Args:
        width: of the encodings, ``hidden`` of ``Recurrent``.
        most: the largest fertility.

    Example:
        >>> import torch
        >>> from fenchel.seq2seq import FertilityPredictor
        >>> FertilityPredictor(8)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5])

    References: Malaviya, Ferreira & Martins (2018), whose predictor is trained on word alignments.
    """

    def __init__(self, width: int, *, most: float = 3.0) -> None:
        super().__init__()
        self.width, self.most = check_count(width, "width"), check_number(most, "most", 0)
        self.score = nn.Linear(self.width, 1)

    def forward(self, encodings: Tensor) -> Tensor:
        check_shape(encodings, "encodings", "…", self.width)
        return self.most * torch.sigmoid(self.score(encodings).squeeze(-1))

    def extra_repr(self) -> str:
        return f"most={self.most:g}"


def check_fertility(fertility: object, symbols: int) -> float | Tensor | nn.Module:
    """Check a fertility: a number, a tensor with one entry per symbol of the source vocabulary, or a module.

    Tensors are copied, and modules too, so that two models do not share them; a parameter stays one, and is trained.
    """
    if isinstance(fertility, nn.Module):
        return copy.deepcopy(fertility)
    if not isinstance(fertility, Tensor):
        return check_number(fertility, "fertility", 0)
    check_floats(fertility, "fertility", symbols)
    if concrete(fertility):
        check_entries(fertility.detach() >= 0, fertility.detach(), "fertility", "not be negative")
    values = fertility.detach().clone()
    return nn.Parameter(values, fertility.requires_grad) if isinstance(fertility, nn.Parameter) else values


def fertilities(given: float | Tensor | nn.Module, numbers: Tensor, encodings: Tensor) -> Tensor:
    """The fertility of each symbol of a batch, (N, J), given its number (N, J) and its encoding (N, J, D)."""
    if isinstance(given, nn.Module):
        found: Tensor = given(encodings)
        found = found.squeeze(-1) if found.dim() == 3 and found.shape[-1] == 1 else found
        if found.shape != encodings.shape[:-1]:
            raise ValueError(
                f"fertility must be a module that maps encodings {tuple(encodings.shape)} to one number per symbol, "
                f"{tuple(encodings.shape[:-1])}; got shape {tuple(found.shape)}"
            )
        return found.to(encodings.dtype)
    if isinstance(given, Tensor):
        # Padding has a number beyond the vocabulary; it is masked.
        return given.to(encodings.dtype)[numbers.clamp_max(len(given) - 1)]
    return torch.full_like(encodings[..., 0], given)


def check_base(omega: Regularizer) -> None:
    """Raise a ValueError for an Ω whose choice cannot be bounded entry by entry."""
    base, _ = omega.canonical()
    try:
        Capped(1.0, base)
    except (TypeError, ValueError):
        raise ValueError(
            f"attention must be Gini() or Shannon(), or one of them at a temperature, with a fertility; got {omega}"
        ) from None


def constrained(scores: Tensor, left: Tensor, omega: Regularizer) -> Tensor:
    """The choice of Ω among scores (N, J) with weights of at most ``left``, (N, J): their sum is 1, or that of
    ``left``.

    What cannot be given to any symbol goes to a sink, one more entry without a bound whose score is below all others.
    Scores of −inf are masked.
    """
    base, gamma = omega.canonical()
    scores = scores / gamma
    lowest = torch.where(scores == -torch.inf, torch.inf, scores).detach().amin(-1, keepdim=True)
    sink = torch.where(lowest == torch.inf, 0.0, lowest - SINK)
    upper = F.pad(left.clamp_min(0.0), (0, 1), value=1.0)
    return Capped(upper, base).argmax(torch.cat([scores, sink], -1))[..., :-1]


def describe(fertility: float | Tensor | nn.Module, to_config: Any) -> Any:
    """A fertility as a file describes it. A module that cannot be described is given by the name of its class."""
    if isinstance(fertility, (int, float)):
        return float(fertility)
    if isinstance(fertility, Tensor):
        return {"symbols": len(fertility), "trained": isinstance(fertility, nn.Parameter)}
    return to_config(fertility) or {"module": type(fertility).__name__}


def read_fertility(config: Any, from_config: Any) -> float | Tensor | nn.Module | None:
    """The fertility that a file describes; the entries of a tensor are among the model's tensors."""
    if config is None or isinstance(config, (int, float)):
        return config
    if "module" in config:
        kind = config["module"]
        raise ValueError(f"the model's fertility is a {kind}, which is not in the file: load with fertility=…")
    if "symbols" in config:
        values = torch.ones(check_count(config["symbols"], "symbols"), device="cpu")
        return nn.Parameter(values) if config["trained"] else values
    found: nn.Module = from_config(config, nn.Module)
    return found
