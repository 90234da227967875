"""Regularizers as JSON can hold them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fenchel.regularizers import Gini, Hard, Norm, Regularizer, Shannon, Tsallis
from fenchel.regularizers.base import Scaled

Description = dict[str, Any]


def describe(omega: Regularizer, name: str) -> Description | None:
    """A regularizer as JSON can hold it; None for one that it cannot.

    Example:
        >>> describe(0.5 * Tsallis(1.5), "output")
        {'kind': 'Scaled', 'gamma': 0.5, 'omega': {'kind': 'Tsallis', 'alpha': 1.5}}
    """
    kind = type(omega).__name__
    if type(omega) in (Shannon, Gini, Hard):
        return {"kind": kind}
    if isinstance(omega, Scaled) and not isinstance(omega.gamma, Tensor):
        inner = describe(omega.omega, name)
        return inner and {"kind": kind, "gamma": omega.gamma, "omega": inner}
    if type(omega) is Tsallis and omega.bounds is not None:
        assert omega.raw_alpha is not None
        middle = sum(omega.bounds) / 2  # the learned one is among the parameters
        return {"kind": kind, "alpha": middle, "bounds": list(omega.bounds), "shape": list(omega.raw_alpha.shape)}
    if type(omega) in (Tsallis, Norm) and not isinstance(omega.parameter, Tensor):
        return {"kind": kind, "alpha": omega.parameter}
    return None


def restore(description: Description | None, name: str) -> Regularizer:
    """The regularizer that was described."""
    if description is None:
        raise ValueError(f"the model's {name} regularizer is not one that a file can hold: load with {name}=…")
    kind = description["kind"]
    if kind == "Scaled":
        return float(description["gamma"]) * restore(description["omega"], name)
    if "bounds" in description:
        low, high = description["bounds"]
        return Tsallis(description["alpha"], learnable=True, bounds=(low, high), shape=description["shape"])
    simple: dict[str, Any] = {"Shannon": Shannon, "Gini": Gini, "Hard": Hard, "Tsallis": Tsallis, "Norm": Norm}
    if kind not in simple:
        raise ValueError(f"{name} was a {kind}, which this version does not know")
    omega: Regularizer = simple[kind](*([description["alpha"]] if "alpha" in description else []))
    return omega
