"""Regularizer: the one abstraction. Ω goes in; a maximum, a choice, a loss and a margin come out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn

from fenchel.kernels import concrete
from fenchel.regularizers.configs import Config, from_config, to_config, written_by
from fenchel.regularizers.family import Family, Parameter
from fenchel.regularizers.rows import (
    apply_mask,
    beside,
    check_parameter,
    check_scores,
    parameter_rows,
    shifted,
    to_rows,
)


class Rules(Protocol):
    """The mathematics of an Ω on rows, for a parameter ``a`` of its own kind: a ``Family`` or ``Bounded``."""

    def value(self, p: Tensor, a: Any, /) -> Tensor:
        """Ω(p)."""

    def argmax(self, z: Tensor, a: Any, /) -> Tensor:
        """argmax_Ω, with its derivatives."""

    def max(self, z: Tensor, p: Tensor, a: Any, /) -> Tensor:
        """max_Ω given the argmax, with its derivatives."""


class Regularizer(nn.Module):
    r"""A convex regularizer Ω over distributions, and everything that follows from it.

    ============================  ========================================================  =================
    ``omega(p)``                  :math:`\Omega(p)`                                         one value a row
    ``omega.max(scores)``         :math:`\max_p \langle p, s \rangle - \Omega(p)`           one value a row
    ``omega.argmax(scores)``      the ``p`` that attains it                                 shape of scores
    ``omega.loss(scores, y)``     :math:`\Omega^*(s) + \Omega(y) - \langle s, y \rangle`    one value a row
    ``omega.margin``              the lead at which one choice takes all                    a number
    ============================  ========================================================  =================

    Multiply by a positive number for another temperature: ``(gamma * omega).argmax(s)`` is
    ``omega.argmax(s / gamma)``.

    A subclass sets ``family``, the mathematics, and ``parameter``, the number or tensor that selects a member.
    """

    family: Rules
    zero_at_vertices = True
    """Whether Ω is zero at one-hot vectors, so that the loss of a class is max_Ω less its score."""

    @property
    def parameter(self) -> Parameter:
        """The family's parameter: a number, or a tensor with one value a row or a head."""
        raise NotImplementedError

    @property
    def margin(self) -> float | Tensor | None:
        """The smallest m such that a lead of m over all other scores gives a one-hot choice and zero loss."""
        return None

    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        """Ω(p) of distributions along ``dim``; zero at one-hot vectors."""
        rows = to_rows(p, dim, None)
        return self.family.value(rows, self._parameter_rows(p, dim)).to(p.dtype)

    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The regularized choice, :math:`\\nabla \\Omega^*(s)`, along ``dim``."""
        return cast(Family, self.family).choose(scores, self.parameter, dim, mask)

    def max(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The regularized maximum, :math:`\\Omega^*(s)`, along ``dim``. Its gradient is ``argmax``."""
        rows, top = shifted(to_rows(scores, dim, mask))
        a = self._parameter_rows(scores, dim)
        return (self._max_rows(rows, a) + self._mass(scores, dim, mask) * top.squeeze(-1)).to(scores.dtype)

    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss, one value a row: class indices (integers) or probabilities (shape of scores).

        Never negative, and zero exactly where ``argmax(scores)`` is the target. A target that is masked
        has loss +inf. The gradient is ``argmax(scores) - target``.
        """
        dim = check_scores(scores, dim)
        if not target.is_floating_point():
            index = self.check_classes(target, scores, dim)
            if self.zero_at_vertices:
                return self._hits(scores, index, dim, mask)
            target = torch.zeros_like(scores).scatter(dim, index.unsqueeze(dim), 1.0)
        rows, _ = shifted(to_rows(scores, dim, mask))
        a = self._parameter_rows(scores, dim)
        maximum = self._max_rows(rows, a)
        maximum = torch.where(maximum == -torch.inf, 0.0, maximum)  # nothing to choose from: any target is impossible
        y = self.check_target(target, scores, dim, mask).movedim(dim, -1).to(rows.dtype)
        impossible = ((y != 0) & (rows == -torch.inf)).any(-1)
        reached = (y * torch.where(rows == -torch.inf, 0.0, rows)).sum(-1)
        value = maximum - reached + self._value_rows(y, rows, a)
        # Rounding can leave the sum a hair below zero; the gradient is right as it is.
        value = value + (value.clamp_min(0) - value).detach()
        # Added, not chosen: the other classes of such a row keep their gradient, as in cross_entropy.
        return (value + torch.where(impossible, torch.inf, 0.0)).to(scores.dtype)

    def index_loss(self, scores: Tensor, index: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """``loss`` for class indices that have been checked; a row with a negative one is left out: its loss is 0."""
        if self.zero_at_vertices:
            return self._hits(scores, index, dim, mask)
        kept = index >= 0
        loss = self.loss(torch.where(kept.unsqueeze(dim), scores, 0.0), index.clamp_min(0), dim, mask)
        return torch.where(kept, loss, 0.0)

    def _hits(self, scores: Tensor, index: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        rows = to_rows(scores, dim, mask)
        family = cast(Family, self.family)
        return family.hits(rows, index, self._parameter_rows(scores, dim)).to(scores.dtype)

    def config(self) -> Config | None:
        """Ω as a file can hold it: dictionaries, lists, numbers and strings, as for JSON; None for one that it cannot.

        What is learned is part of it, as it stands. ``Custom``, classes of a user's own, and what is made of them
        cannot be written.

        Example:
            >>> from fenchel import Fused, Regularizer
            >>> (0.5 * Fused(0.2)).config()
            {'kind': 'Scaled', 'omega': {'kind': 'Fused', 'strength': 0.2}, 'gamma': 0.5}
            >>> Regularizer.from_config({"kind": "Tsallis", "alpha": 1.3})
            Tsallis(alpha=1.3)
        """
        return to_config(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The Ω whose :meth:`config` this is.

        Example:
            >>> from fenchel import Regularizer, SparseMAP
            >>> from fenchel.structures import Subsets
            >>> omega = Regularizer.from_config(SparseMAP(Subsets(2)).config())
            >>> omega.structure
            Subsets(k=2)
        """
        return from_config(config, cls)

    def __mul__(self, gamma: float | Tensor) -> Regularizer:
        return Scaled(self, gamma)

    __rmul__ = __mul__

    def check_target(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        """Check a floating-point target: probabilities of the shape of scores."""
        return check_probabilities(target, scores, dim)

    def in_rows(
        self, scores: Tensor, target: Tensor, dim: Any, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Any, Tensor | None, Regularizer]:
        """The arguments of a loss, and Ω, such that choices are made along one dimension: unchanged if they are."""
        return scores, target, dim, mask, self

    def balance(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        """Scale a target that passed the check to the sum that a choice has, exactly."""
        total, mass = target.sum(dim, keepdim=True), self._mass(scores, dim, mask)
        mass = mass.unsqueeze(dim).to(target.dtype) if isinstance(mass, Tensor) else mass
        return torch.where(total > 0, target * (mass / torch.where(total > 0, total, 1.0)), target)

    def check_classes(self, target: Tensor, scores: Tensor, dim: int) -> Tensor:
        """Check a target of class indices; return it as int64."""
        return check_indices(target, scores, dim)

    def _parameter_rows(self, scores: Tensor, dim: int) -> Any:
        return parameter_rows(self.parameter, "alpha", scores, dim)

    def _value_rows(self, y: Tensor, rows: Tensor, a: Any) -> Tensor:
        """Ω of targets; rows of scores tell which entries are masked, for an Ω to which that matters."""
        return self.family.value(y, a)

    def _max_rows(self, rows: Tensor, a: Any) -> Tensor:
        return self.family.max(rows, self.family.argmax(rows, a), a)

    def _mass(self, scores: Tensor, dim: Any, mask: Tensor | None) -> float | Tensor:
        """What a choice sums to, one value per row: the maximum moves by so much for an offset of the scores."""
        return 1.0

    def _dims(self, scores: Tensor, dim: Any) -> tuple[int, ...]:
        """The dimensions that a choice is made over, counted from the front; the last if ``dim`` is None."""
        return (check_scores(scores, -1 if dim is None else dim),)


@written_by("omega", "gamma")
class Scaled(Regularizer):
    """γΩ: the same regularizer at another temperature. Made by ``gamma * omega``.

    Methods take ``dim`` as those of Ω do; None stands for its own default.
    """

    gamma: float | Tensor

    def __init__(self, omega: Regularizer, gamma: float | Tensor) -> None:
        super().__init__()
        self.omega = omega
        hold(self, "gamma", check_parameter(gamma, "gamma", 0.0, "0 < gamma < inf", finite=True))

    def __mul__(self, gamma: float | Tensor) -> Regularizer:
        # One number instead of two: what runs faster for γΩ does not look further inside.
        if isinstance(gamma, Tensor) or isinstance(self.gamma, Tensor):
            return super().__mul__(gamma)
        return self.omega * (self.gamma * check_parameter(gamma, "gamma", 0.0, "0 < gamma < inf", finite=True))

    __rmul__ = __mul__

    @property
    def margin(self) -> float | Tensor | None:
        margin = self.omega.margin
        return None if margin is None else self.gamma * margin

    def forward(self, p: Tensor, dim: Any = None) -> Tensor:
        dims = self._dims(p, dim)
        value: Tensor = self._each_row(p, dims) * self.omega(p, _dim(dims))
        return value.to(p.dtype)

    def argmax(self, scores: Tensor, dim: Any = None, mask: Tensor | None = None) -> Tensor:
        dims = self._dims(scores, dim)
        cooled, _ = self._cool(scores, dims, mask)
        return self.omega.argmax(cooled, _dim(dims)).to(scores.dtype)

    def max(self, scores: Tensor, dim: Any = None, mask: Tensor | None = None) -> Tensor:
        dims = self._dims(scores, dim)
        cooled, top = self._cool(scores, dims, mask)
        mass = self._mass(cooled, _dim(dims), None)
        value = times_gamma(self._each_row(scores, dims), self.omega.max(cooled, _dim(dims)))
        return (value + mass * top).to(scores.dtype)

    def loss(self, scores: Tensor, target: Tensor, dim: Any = None, mask: Tensor | None = None) -> Tensor:
        dims = self._dims(scores, dim)
        cooled, _ = self._cool(scores, dims, mask)
        loss = self.omega.loss(cooled, target, _dim(dims))
        return times_gamma(self._each_row(scores, dims), loss).to(scores.dtype)

    def index_loss(self, scores: Tensor, index: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        kept, dims = (index >= 0).unsqueeze(dim), self._dims(scores, dim)
        cooled, _ = self._cool(torch.where(kept, scores, 0.0), dims, mask)
        loss = self.omega.index_loss(cooled, index, dim)
        return times_gamma(self._each_row(scores, dims), loss).to(scores.dtype)

    def check_target(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        return self.omega.check_target(target, scores, dim, mask)

    def check_classes(self, target: Tensor, scores: Tensor, dim: int) -> Tensor:
        return self.omega.check_classes(target, scores, dim)

    def in_rows(
        self, scores: Tensor, target: Tensor, dim: Any, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Any, Tensor | None, Regularizer]:
        flat, target, row_dim, row_mask, omega = self.omega.in_rows(scores, target, dim, mask)
        if omega is self.omega:
            return flat, target, row_dim, row_mask, self
        dims = self._dims(scores, None if dim == -1 else dim)
        gamma = self._laid_out(scores, dims)
        gamma = flatten(gamma, dims) if isinstance(gamma, Tensor) else gamma
        return flat, target, row_dim, row_mask, Scaled(omega, gamma)

    def extra_repr(self) -> str:
        return f"gamma={show(self.gamma)}"

    def _parameter_rows(self, scores: Tensor, dim: int) -> Any:
        return self.omega._parameter_rows(scores, dim)

    def _mass(self, scores: Tensor, dim: Any, mask: Tensor | None) -> float | Tensor:
        return self.omega._mass(scores, dim, mask)

    def _dims(self, scores: Tensor, dim: Any) -> tuple[int, ...]:
        return self.omega._dims(scores, dim)

    def _cool(self, scores: Tensor, dims: tuple[int, ...], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(s − max s) / γ with masked entries at −inf, and max s, in float32 or better.

        Shifted first, or the division would round away what distinguishes scores with a large offset.
        """
        gamma = self._laid_out(scores, dims)
        scores = apply_mask(scores, mask)
        scores = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
        top = scores.detach().amax(dims, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        masked = scores == -torch.inf
        cooled = torch.where(masked, scores, torch.where(masked, 0.0, scores - top) / gamma)
        return cooled, top.squeeze(dims)

    def _laid_out(self, scores: Tensor, dims: tuple[int, ...]) -> float | Tensor:
        """γ with the number of dimensions of the scores."""
        gamma = self.gamma
        for dim in dims if isinstance(gamma, Tensor) else ():
            gamma = beside(gamma, "gamma", scores, dim)  # type: ignore[arg-type]
        return gamma

    def _each_row(self, scores: Tensor, dims: tuple[int, ...]) -> float | Tensor:
        gamma = self._laid_out(scores, dims)
        return gamma.squeeze(dims) if isinstance(gamma, Tensor) else gamma


def times_gamma(gamma: float | Tensor, value: Tensor) -> Tensor:
    """γ times a value of each row. Infinite values do not depend on γ, and their part of its gradient is 0, not NaN."""
    return (torch.where(value.isinf(), gamma.detach(), gamma) if isinstance(gamma, Tensor) else gamma) * value


def _dim(dims: tuple[int, ...]) -> Any:
    return dims if len(dims) > 1 else dims[0]


def flatten(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Some dimensions made one, which is last."""
    return x.movedim(dims[0], -1) if len(dims) == 1 else x.movedim(dims, (-2, -1)).flatten(-2)


def hold(module: nn.Module, name: str, value: float | Tensor) -> None:
    """Keep a number as it is, a parameter in the state_dict, a fixed tensor with the module but out of it."""
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    elif isinstance(value, Tensor):
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)


def show(value: float | Tensor) -> str:
    """A parameter as a ``repr`` shows it: short numbers, long tensors by their shape."""
    if not isinstance(value, Tensor):
        return f"{value:g}"
    if value.numel() == 1 and not value.is_meta:
        return f"{value.item():.4g}"
    return f"tensor of shape {tuple(value.shape)}"


def check_omega(omega: Regularizer) -> Regularizer:
    """Check what a user passes as ``omega``."""
    if not isinstance(omega, Regularizer):
        raise TypeError(f"omega must be a Regularizer, such as fenchel.Gini(), got {type(omega).__name__}")
    return omega


def check_integers(value: Tensor, name: str, what: str) -> None:
    """Raise a TypeError that names the argument unless it is a tensor of integers."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a tensor of {what}, got {kind}")


def check_indices(target: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Class indices of the shape of scores without ``dim``, as int64."""
    if not isinstance(target, Tensor) or target.is_complex() or target.dtype == torch.bool:
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"target must hold integer class indices or floating-point probabilities, got {kind}")
    expected = scores.shape[:dim] + scores.shape[dim + 1 :]
    if target.shape != expected:
        raise ValueError(
            f"target of class indices must have shape {tuple(expected)} for scores of shape "
            f"{tuple(scores.shape)} with classes along dim {dim}, got {tuple(target.shape)}; "
            "for torch's layout (N, C, …) pass dim=1"
        )
    target = target.long()  # before any comparison: eight bits would wrap around
    classes = scores.shape[dim]
    if concrete(target) and bool(((target < 0) | (target >= classes)).any()):
        wrong = target[(target < 0) | (target >= classes)][0].item()
        raise ValueError(f"target must hold class indices in [0, {classes - 1}], got {wrong}")
    return target


def check_probabilities(target: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Probabilities of the shape of scores: not negative, with sum 1 along ``dim``."""
    if target.shape != scores.shape:
        raise ValueError(
            f"target of probabilities must have the shape of scores, {tuple(scores.shape)}, got {tuple(target.shape)}"
        )
    if concrete(target):
        tolerance = max(1e-3, 4 * torch.finfo(target.dtype).eps)
        totals = target.sum(dim, dtype=torch.promote_types(target.dtype, torch.float32))
        if bool((target < 0).any()) or bool(((totals - 1).abs() > tolerance).any()):
            raise ValueError(f"target must hold probabilities: entries ≥ 0 that sum to 1 along dim {dim}")
    return target
