"""Deformed exponentials and logarithms, of which the densities of Tsallis's Ω are made."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fenchel._checks import check_floats, check_number
from fenchel.continuous.radial import Number, log_shape


def beta_exp(x: Tensor, beta: float) -> Tensor:
    r"""The β-exponential of a tensor of any shape.

    .. math:: \exp_\beta(x) = [1 + (1-\beta) x]_+^{1/(1-\beta)}

    It is exp for β = 1 and relu(1 + x) for β = 0; α-entmax is exp_β(s − τ) with β = 2 − α. For β > 1 it is +inf
    where (β − 1) x ≥ 1.

    Args:
        x: of any shape.
        beta: any finite number.

    Returns:
        The shape and dtype of ``x``. The derivative is the β-th power of the value.

    Example:
        >>> import torch
        >>> from fenchel.continuous import beta_exp
        >>> beta_exp(torch.tensor([-2.0, -0.5, 1.0]), 0.0)
        tensor([0.0000, 0.5000, 2.0000])

    References: Martins et al. (2020), equation 6; Tsallis (1988).
    """
    check_floats(x, "x")
    c = 1 - check_number(beta, "beta")
    if c >= 0:
        return torch.exp(log_shape(-x, c))
    # Where 1 + c x ≤ 0 the function is infinite, and log_shape has −inf, which stands for zero.
    return torch.where(c * x <= -1, math.inf, torch.exp(log_shape(-x, c)))


def beta_log(x: Tensor, beta: float) -> Tensor:
    r"""The β-logarithm of a tensor of any shape, the inverse of ``beta_exp``.

    .. math:: \log_\beta(x) = (x^{1-\beta} - 1) / (1-\beta)

    It is log for β = 1 and x − 1 for β = 0.

    Args:
        x: of any shape, entries ≥ 0; below, the result is NaN.
        beta: any finite number.

    Returns:
        The shape and dtype of ``x``. The derivative is x to the power −β.

    Example:
        >>> import torch
        >>> from fenchel.continuous import beta_log
        >>> beta_log(torch.tensor([0.0, 0.5, 2.0]), 0.0)
        tensor([-1.0000, -0.5000,  1.0000])

    References: Martins et al. (2020), equation 6.
    """
    check_floats(x, "x")
    c = 1 - check_number(beta, "beta")
    if c == 0:
        return x.log()
    # expm1 is precise next to 1, the power and its derivative everywhere else, 0 included.
    near = (c * x.detach().log()).abs() < 0.5
    power = (torch.where(x < 0, math.nan, x) ** c - 1) / c
    return torch.where(near, log_of(torch.where(near, x, 1.0).log(), c), torch.where(near, 0.0, power))


def log_of(log: Tensor, c: Number) -> Tensor:
    """The β-logarithm of exp(log), with c = 1 − β: precise for every c."""
    if not isinstance(c, Tensor):
        return log if c == 0 else torch.expm1(c * log) / c
    bent = torch.where(c == 0, 1.0, c)
    return torch.where(c == 0, log, torch.expm1(bent * log) / bent)


def inverse_softplus(value: float) -> float:
    """The x with log(1 + exp(x)) = value > 0."""
    return value + math.log(-math.expm1(-value))
