"""Regularizer: the base class of every Ω. It defines the regularized maximum, the choice, the loss and the margin."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from fenchel._checks import check_device, check_kind, check_positive
from fenchel._torch import known
from fenchel.regularizers.configs import Config, from_config, to_config, written_by
from fenchel.regularizers.packed import takes_packed
from fenchel.regularizers.rowmap import Parameter, RowMap, finish_loss
from fenchel.regularizers.rows import (
    apply_mask,
    beside,
    check_indices,
    check_probabilities,
    check_scores,
    from_rows,
    parameter_rows,
    shifted,
    to_rows,
)


class Posed(NamedTuple):
    """A problem on rows: scores with masked entries at −inf, the map, and its parameters laid out beside the rows."""

    rows: Tensor
    rule: RowMap
    parameters: tuple[Any, ...]

    def shifted(self) -> Posed:
        """The same problem with largest score 0 in each row, so that the maximum is a sum of small terms."""
        return self._replace(rows=shifted(self.rows)[0])

    def argmax(self) -> Tensor:
        """argmax_Ω of the rows."""
        return self.rule.argmax(self.rows, *self.parameters)

    def max(self) -> Tensor:
        """max_Ω of the rows."""
        return self.rule.max(self.rows, self.argmax(), *self.parameters)


def range_of(parameter: float | Tensor | None) -> tuple[float, float] | None:
    """The least and the largest value of a parameter; None if reading it would wait for a device."""
    if isinstance(parameter, Tensor):
        own = parameter.detach()
        return (float(own.amin()), float(own.amax())) if known(own) and own.numel() else None
    return None if parameter is None else (float(parameter), float(parameter))


class Regularizer(nn.Module):
    r"""A convex regularizer Ω over distributions, and everything that follows from it.

    ============================  ========================================================  =================
    ``omega(p)``                  :math:`\Omega(p)`                                         one value per row
    ``omega.max(scores)``         :math:`\max_p \langle p, s \rangle - \Omega(p)`           one value per row
    ``omega.argmax(scores)``      the ``p`` that attains it                                 shape of scores
    ``omega.loss(scores, y)``     :math:`\Omega^*(s) + \Omega(y) - \langle s, y \rangle`    one value per row
    ``omega.margin``              the lead at which one choice takes all                    a number
    ============================  ========================================================  =================

    Multiply by a positive number for another temperature: ``(gamma * omega).argmax(s)`` is
    ``omega.argmax(s / gamma)``.

    Engines such as attention, memories and dynamic programs never look at the type of Ω. They ask the questions below;
    each has a default that is right for any Ω. A subclass sets ``rule``, the mathematics on rows (a ``RowMap``), and
    ``parameter``, the number or tensor that selects a member; or it writes ``forward`` and ``argmax`` in differentiable
    torch operations, and ``max`` and ``loss`` follow.

    Example:
        >>> import torch, fenchel
        >>> class Squares(fenchel.Regularizer):  # Ω(p) = ‖p‖²
        ...     def forward(self, p, dim=-1):
        ...         return p.square().sum(dim)
        ...
        ...     def argmax(self, scores, dim=-1, mask=None):
        ...         return fenchel.sparsemax(scores / 2, dim, mask)
        >>> omega, scores = Squares(), torch.tensor([1.0, 0.5, -1.0])
        >>> omega.argmax(scores), omega.max(scores), omega.loss(scores, torch.tensor(0))
        (tensor([0.6250, 0.3750, 0.0000]), tensor(0.2812), tensor(0.2812))
    """

    rule: RowMap | None = None
    ordered: bool = False
    """Whether the choice depends on the order of the entries, or on what each of them stands for."""

    associative: bool = False
    """Whether max_Ω of the parts' max_Ω is that of the whole, so that partial results merge by ``max`` and ``argmax``
    of their stacked values. Shannon's is."""

    parameter_name: ClassVar[str] = "alpha"
    """The attribute that holds ``parameter``, and what errors call it."""

    default_dim: Any = -1
    """The dimensions that a choice is made over if ``dim`` is not given."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let what a subclass writes take packed rows."""
        super().__init_subclass__(**kwargs)
        for name in ("argmax", "log_argmax", "max", "loss", "forward"):
            if name in vars(cls) and not hasattr(vars(cls)[name], "takes_packed"):
                setattr(cls, name, takes_packed(vars(cls)[name]))

    # -- what an engine may ask ------------------------------------------------------------------------

    def canonical(self) -> tuple[Regularizer, float | Tensor]:
        """The simplest equal Ω and a factor: this Ω is the factor times that one.

        Only Python numbers are simplified; tensors are neither replaced nor read.

        Example:
            >>> from fenchel import Fused, KSubsets
            >>> (0.5 * KSubsets(1)).canonical(), Fused(0.0).canonical()
            ((Gini(), 0.5), (Gini(), 1.0))
        """
        return self, 1.0

    @property
    def name(self) -> str | None:
        """The name of the family, by which kernels are looked up; None for an Ω without a ``rule``."""
        return None if self.rule is None else self.rule.name

    @property
    def parameter(self) -> Parameter | None:
        """The parameter that selects a member of the family: a number, or a tensor with one value per row.

        The attribute called ``parameter_name`` of an Ω with a ``rule``, by default.
        """
        return None if self.rule is None else getattr(self, self.parameter_name, None)

    @property
    def zero_at_vertices(self) -> bool:
        """Whether Ω is zero at one-hot vectors, so that the loss of a class is max_Ω less its score.

        As its ``rule`` says; an Ω without one sets it in its class.
        """
        return self.rule is not None and self.rule.zero_at_vertices

    @property
    def parameter_shape(self) -> torch.Size | None:
        """The shape that the tensors of Ω broadcast to: what varies from row to row. None if that is not known."""
        shapes = map(attrgetter("shape"), (*self.parameters(), *self.buffers()))
        return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]

    @property
    def parameter_range(self) -> tuple[float, float] | None:
        """The least and the largest value of ``parameter``; None if reading it would wait for a device."""
        return range_of(self.parameter)

    @property
    def margin(self) -> float | Tensor | None:
        """The smallest m such that a lead of m over all other scores gives a one-hot choice and zero loss.

        inf if no lead is enough, None if that is not known.
        """
        return None

    def mass(self, count: int | Tensor) -> float | Tensor | None:
        """The sum of a choice among ``count`` unmasked entries; None if that is not fixed.

        Args:
            count: the number of unmasked entries, or a tensor of them with size 1 along the dimension of the choice.
        """
        return 1.0

    def line(self, scores: Tensor, dim: int = -1) -> Tensor | None:
        """The score below which no entry can have mass, not even if more entries are added later; size 1 along ``dim``.

        −inf where all scores are masked. None for an Ω without such a level. Not differentiable.

        Example:
            >>> import torch
            >>> from fenchel import Gini
            >>> Gini().line(torch.tensor([1.0, 0.5, -1.0]))
            tensor([0.2500])
        """
        return None

    def dims(self, scores: Tensor, dim: Any) -> tuple[int, ...]:
        """The dimensions of scores that a choice is made over, counted from the front. Only shapes matter.

        A ValueError says why scores of this shape cannot be chosen from.
        """
        return (check_scores(scores, dim),)

    @takes_packed
    def log_argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The logarithm of the choice, −inf where it is zero, with derivatives of 0 there."""
        p = self.argmax(scores, dim, mask)
        some = p > 0
        return torch.where(some, torch.where(some, p, 1.0).log(), torch.where(p == 0, -torch.inf, p))

    # -- what it does ----------------------------------------------------------------------------------

    @takes_packed
    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        """Ω(p) of distributions along ``dim``."""
        rows, rule, a = self._pose(p, dim)
        return rule.value(rows, *a).to(p.dtype)

    @takes_packed
    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The regularized choice, :math:`\\nabla \\Omega^*(s)`, along ``dim``."""
        return from_rows(self._pose(scores, dim, mask).argmax(), scores, dim)

    @takes_packed
    def max(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The regularized maximum, :math:`\\Omega^*(s)`, along ``dim``. Its gradient is ``argmax``."""
        posed = self._pose(scores, dim, mask)
        rows, top = shifted(posed.rows)
        offset = self._masses(scores, dim, mask) * top.squeeze(-1)
        return (posed._replace(rows=rows).max() + offset).to(scores.dtype)

    @takes_packed
    def loss(self, scores: Tensor, target: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss, one value per row: class indices (integers) or probabilities (shape of scores).

        Never negative, and zero exactly where ``argmax(scores)`` is the target. A target that is masked
        has loss +inf. The gradient is ``argmax(scores) - target``.
        """
        dim = check_scores(scores, dim)
        check_kind(target, "target", Tensor)
        check_device(scores, "scores", target=target)
        if target.is_floating_point():
            target = self.check_target(target, scores, dim, mask)
        else:
            index = self.check_classes(target, scores, dim)
            if self.has_class_losses(scores):
                return self.class_loss(scores, index, dim, mask).to(scores.dtype)
            target = torch.zeros_like(scores).scatter(dim, index.unsqueeze(dim), 1.0)
        posed = self._pose(scores, dim, mask)
        y = target.movedim(dim, -1).to(posed.rows.dtype)
        loss = posed.rule.soft_loss(posed.rows, y, *posed.parameters)
        if loss is not None:
            return loss.to(scores.dtype)
        posed = posed.shifted()
        rows, rule, a = posed
        if known(rows) and rows.numel() and bool(rows.detach().amin() > -torch.inf):  # nothing is masked
            value = rule.target_value(y, *a)
            impossible = torch.zeros_like(rows[..., 0], dtype=torch.bool)
            return finish_loss(posed.max(), (y * rows).sum(-1), impossible, value).to(scores.dtype)
        masked = rows == -torch.inf
        reached = (y * torch.where(masked, 0.0, rows)).sum(-1)
        value = rule.target_value(y, *a, masked=masked & (y == 0))
        return finish_loss(posed.max(), reached, ((y != 0) & masked).any(-1), value).to(scores.dtype)

    def has_class_losses(self, scores: Tensor) -> bool:
        """Whether the losses of class indices are those of the ``rule``; else the target is a one-hot vector."""
        return self.zero_at_vertices

    def class_loss(self, scores: Tensor, index: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """``loss`` for class indices that have been checked; rows with a negative index have loss 0.

        If ``reads_half``, losses are in float32.
        """
        if self.has_class_losses(scores):
            (rows, rule, a), dtype = self._pose_classes(scores, dim, mask)
            return rule.class_loss(rows, index, *a).to(dtype)
        kept = index >= 0
        loss = self.loss(torch.where(kept.unsqueeze(dim), scores, 0.0), index.clamp_min(0), dim, mask)
        return torch.where(kept, loss, 0.0)

    def reduced_class_loss(
        self, scores: Tensor, index: Tensor, dim: int, mask: Tensor | None, reduction: str
    ) -> Tensor:
        """``class_loss`` of all rows, none of which is left out; their mean or sum unless ``reduction`` is "none"."""
        own = self.rule is None or type(self).class_loss is not Regularizer.class_loss
        if reduction == "none" or own or not self.has_class_losses(scores):
            loss = self.class_loss(scores, index, dim, mask)
            return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
        (rows, rule, a), dtype = self._pose_classes(scores, dim, mask)
        return rule.reduced_class_loss(rows, index, reduction == "mean", *a).to(dtype)

    def reads_half(self, scores: Tensor) -> bool:
        """Whether ``class_loss`` leaves scores in half precision to a kernel as they are.

        Not float16: p − y is kept for the backward pass, and lacks the range there, before a scaled loss multiplies it.
        """
        if scores.dtype != torch.bfloat16 or self.rule is None or type(self).class_loss is not Regularizer.class_loss:
            return False
        return self.zero_at_vertices and self.rule.reads("class_loss", scores, self.parameter)

    def extra_repr(self) -> str:
        own = self.parameter
        return "" if own is None else f"{self.parameter_name}={show(own)}"

    def __mul__(self, gamma: float | Tensor) -> Regularizer:
        return Scaled(self, gamma)

    __rmul__ = __mul__

    def __truediv__(self, number: float | Tensor) -> Regularizer:
        return self * (1 / check_positive(number, "the divisor"))

    # -- files -----------------------------------------------------------------------------------------

    def config(self) -> Config | None:
        """Describe Ω by dictionaries, lists, numbers and strings, as for JSON; None if that is not possible.

        Learned parameters are included with their current values. ``Custom``, ``LPSparseMAP``, classes of your own, and
        what contains them cannot be described.

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
        """Make the Ω that :meth:`config` described.

        Example:
            >>> from fenchel import Regularizer, SparseMAP
            >>> from fenchel.structures import Subsets
            >>> omega = Regularizer.from_config(SparseMAP(Subsets(2)).config())
            >>> omega.structure
            Subsets(k=2)
        """
        return from_config(config, cls)

    # -- arguments of losses ---------------------------------------------------------------------------

    def check_target(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        """Check a floating-point target: probabilities of the shape of scores."""
        return check_probabilities(target, scores, dim)

    def check_classes(self, target: Tensor, scores: Tensor, dim: int, ignored: int | None = None) -> Tensor:
        """Check a target of class indices, without the one that is ignored; return it as int64."""
        return check_indices(target, scores, dim, ignored)

    def in_rows(
        self, scores: Tensor, target: Tensor, dim: Any, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Any, Tensor | None, Regularizer]:
        """The arguments of a loss, and Ω, for choices along one dimension; those over two dimensions are flattened."""
        return scores, target, dim, mask, self

    def balance(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        """Scale a checked target so that it sums exactly to what a choice sums to."""
        total, mass = target.sum(dim, keepdim=True), self._masses(scores, dim, mask)
        mass = mass.unsqueeze(dim).to(target.dtype) if isinstance(mass, Tensor) else mass
        return torch.where(total > 0, target * (mass / torch.where(total > 0, total, 1.0)), target)

    # -- what they are made of -------------------------------------------------------------------------

    def _pose(self, scores: Tensor, dim: int, mask: Tensor | None = None) -> Posed:
        """The problem on rows."""
        return self._pose_rows(to_rows(scores, dim, mask), scores, dim)

    def _pose_classes(self, scores: Tensor, dim: int, mask: Tensor | None) -> tuple[Posed, torch.dtype]:
        """The problem of class losses, and their dtype; see ``reads_half``."""
        if not self.reads_half(scores):
            return self._pose(scores, dim, mask), scores.dtype
        return self._pose_rows(to_rows(scores, dim, mask, as_they_are=True), scores, dim), torch.float32

    def _pose_rows(self, rows: Tensor, scores: Tensor, dim: int) -> Posed:
        """The problem on these rows of scores."""
        if self.rule is None:
            return Posed(rows, _Written(self), ())
        a = self.parameter
        return Posed(
            rows, self.rule, (parameter_rows(a, self.parameter_name, scores, dim) if isinstance(a, Tensor) else a,)
        )

    def _masses(self, scores: Tensor, dim: int, mask: Tensor | None) -> float | Tensor:
        """The sum of the choice in each row; the maximum changes by this times an offset of the scores."""
        mass = self.mass(1)
        if not isinstance(mass, Tensor) and mass == self.mass(2):
            return mass  # type: ignore[return-value]
        count = (apply_mask(scores.detach(), mask) != -torch.inf).sum(dim, keepdim=True)
        mass = self.mass(count.to(torch.promote_types(scores.dtype, torch.float32)))
        assert isinstance(mass, Tensor)
        return mass.expand(count.shape).squeeze(dim)


class _Written(RowMap):
    """The map of an Ω whose ``forward`` and ``argmax`` are written in differentiable torch operations."""

    name = "written"

    def __init__(self, omega: Regularizer) -> None:
        if type(omega).argmax is Regularizer.argmax or type(omega).forward is Regularizer.forward:
            raise NotImplementedError(f"{type(omega).__name__} must set rule, or write forward and argmax")
        self.omega = omega
        self.zero_at_vertices = True  # or there is no call of ``class_loss``

    def value(self, p: Tensor, *a: Any, masked: Tensor | None = None) -> Tensor:
        value: Tensor = self.omega(p)
        return value

    def argmax(self, z: Tensor, *a: Any) -> Tensor:
        return self.omega.argmax(z)

    def max(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        masked = z == -torch.inf
        value = torch.where(masked, 0.0, p * torch.where(masked, 0.0, z)).sum(-1) - self.value(p)
        return torch.where(masked.all(-1), -torch.inf, value)

    def class_loss(self, z: Tensor, index: Tensor, *a: Any) -> Tensor:
        return self.class_loss_plainly(z, index, False, *a)[0]

    def solve(self, z: Tensor, *a: Any) -> Tensor:
        return self.omega.argmax(z)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("derivatives are those of argmax as it is written")

    product = pull = push = envelope = _refuse


@written_by("omega", "gamma")
class Scaled(Regularizer):
    """γΩ: the same regularizer at another temperature. Made by ``gamma * omega``.

    Methods take ``dim`` as those of Ω do; None stands for the default of Ω. There is ``solve`` if Ω has it.

    Example:
        >>> import torch, fenchel
        >>> scores = torch.tensor([1.0, 0.5, -1.0])
        >>> (4.0 * fenchel.Gini()).argmax(scores), fenchel.Gini().argmax(scores / 4.0)
        (tensor([0.5417, 0.4167, 0.0417]), tensor([0.5417, 0.4167, 0.0417]))
    """

    gamma: float | Tensor

    def __init__(self, omega: Regularizer, gamma: float | Tensor) -> None:
        super().__init__()
        self.omega = check_omega(omega)
        hold(self, "gamma", check_positive(gamma, "gamma"))

    def __mul__(self, gamma: float | Tensor) -> Regularizer:
        # One number instead of two.
        if isinstance(gamma, Tensor) or isinstance(self.gamma, Tensor):
            return super().__mul__(gamma)
        return self.omega * (self.gamma * check_positive(gamma, "gamma"))

    __rmul__ = __mul__

    # -- what an engine may ask ------------------------------------------------------------------------

    def canonical(self) -> tuple[Regularizer, float | Tensor]:
        omega, gamma = self.omega.canonical()
        return omega, self.gamma * gamma

    @property
    def parameter_shape(self) -> torch.Size | None:
        return None if self.omega.parameter_shape is None else super().parameter_shape

    @property
    def zero_at_vertices(self) -> bool:
        return self.omega.zero_at_vertices

    @property
    def margin(self) -> float | Tensor | None:
        margin = self.omega.margin
        return None if margin is None else self.gamma * margin

    def mass(self, count: int | Tensor) -> float | Tensor | None:
        return self.omega.mass(count)

    def line(self, scores: Tensor, dim: int = -1) -> Tensor | None:
        dims = self.dims(scores, dim)
        with torch.no_grad():
            divided, top = self._divide(scores, dims)
            line = self.omega.line(divided, dim)
            return None if line is None else (self._laid_out(scores, dims) * line + top).to(scores.dtype)

    def log_argmax(self, scores: Tensor, dim: Any = None, mask: Tensor | None = None) -> Tensor:
        divided, _ = self._divide(apply_mask(scores, mask), self.dims(scores, dim))
        return self.omega.log_argmax(divided, self._or_default(dim)).to(scores.dtype)

    # -- what it does ----------------------------------------------------------------------------------

    def forward(self, p: Tensor, dim: Any = None) -> Tensor:
        value: Tensor = self._each_row(p, self.dims(p, dim)) * self.omega(p, self._or_default(dim))
        return value.to(p.dtype)

    def argmax(self, scores: Tensor, dim: Any = None, mask: Tensor | None = None) -> Tensor:
        divided, _ = self._divide(apply_mask(scores, mask), self.dims(scores, dim))
        return self.omega.argmax(divided, self._or_default(dim)).to(scores.dtype)

    def max(self, scores: Tensor, dim: Any = None, mask: Tensor | None = None) -> Tensor:
        dims, dim = self.dims(scores, dim), self._or_default(dim)
        divided, top = self._divide(apply_mask(scores, mask), dims)
        value = times_gamma(self._each_row(scores, dims), self.omega.max(divided, dim))
        offset = 0.0 if self.mass(1) is None else self._masses(divided, dim, None) * top.squeeze(dims)
        return (value + offset).to(scores.dtype)

    def loss(self, scores: Tensor, target: Tensor, dim: Any = None, mask: Tensor | None = None) -> Tensor:
        dims = self.dims(scores, dim)
        divided, _ = self._divide(apply_mask(scores, mask), dims)
        loss = self.omega.loss(divided, target, self._or_default(dim))
        return times_gamma(self._each_row(scores, dims), loss).to(scores.dtype)

    def class_loss(self, scores: Tensor, index: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        kept, dims = (index >= 0).unsqueeze(dim), self.dims(scores, dim)
        divided, _ = self._divide(torch.where(kept, apply_mask(scores, mask), 0.0), dims)
        loss = self.omega.class_loss(divided, index, dim)
        return times_gamma(self._each_row(scores, dims), loss).to(scores.dtype)

    def solve(self, scores: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        """``solve`` of Ω for the scores divided by γ; see :meth:`fenchel.SparseMAP.solve`."""
        if not hasattr(self.omega, "solve"):
            raise TypeError(f"solve goes with SparseMAP, got {self.omega}")
        divided, _ = self._divide(apply_mask(scores, mask), self.dims(scores, None))
        solve: Any = self.omega.solve
        return solve(divided, **options).to(scores.dtype)

    # -- arguments of losses ---------------------------------------------------------------------------

    def check_target(self, target: Tensor, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        return self.omega.check_target(target, scores, dim, mask)

    def check_classes(self, target: Tensor, scores: Tensor, dim: int, ignored: int | None = None) -> Tensor:
        return self.omega.check_classes(target, scores, dim, ignored)

    def in_rows(
        self, scores: Tensor, target: Tensor, dim: Any, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Any, Tensor | None, Regularizer]:
        flat, target, row_dim, row_mask, omega = self.omega.in_rows(scores, target, dim, mask)
        if omega is self.omega:
            return flat, target, row_dim, row_mask, self
        dims = self.dims(scores, None if dim == -1 else dim)
        gamma = self._laid_out(scores, dims)
        gamma = flatten(gamma, dims) if isinstance(gamma, Tensor) else gamma
        return flat, target, row_dim, row_mask, Scaled(omega, gamma)

    def extra_repr(self) -> str:
        return f"gamma={show(self.gamma)}"

    # -- what they are made of -------------------------------------------------------------------------

    @property
    def default_dim(self) -> Any:
        return self.omega.default_dim

    def _or_default(self, dim: Any) -> Any:
        return self.default_dim if dim is None else dim

    def dims(self, scores: Tensor, dim: Any) -> tuple[int, ...]:
        return self.omega.dims(scores, self._or_default(dim))

    def _masses(self, scores: Tensor, dim: int, mask: Tensor | None) -> float | Tensor:
        return self.omega._masses(scores, dim, mask)

    def _divide(self, scores: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(s − max s) / γ, and max s; in float32 or better, double if an offset of the scores matters to Ω.

        Shifted first, or the division would round away what distinguishes scores with a large offset. Where an offset
        matters, it is not taken off, and 0 is returned in its place.
        """
        gamma = self._laid_out(scores, dims)
        if self.mass(1) is None:
            scores = scores.double()
            top = torch.zeros_like(scores.detach().sum(dims, keepdim=True))
        else:
            scores = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
            top = scores.detach().amax(dims, keepdim=True)
            top = torch.where(top == -torch.inf, 0.0, top)
        masked = scores == -torch.inf
        return torch.where(masked, scores, torch.where(masked, 0.0, scores - top) / gamma), top

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
    """Multiply one value per row by γ. Infinite values do not depend on γ: their gradient in γ is 0, not NaN."""
    return (torch.where(value.isinf(), gamma.detach(), gamma) if isinstance(gamma, Tensor) else gamma) * value


def flatten(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Flatten one or two dimensions into one, which is last."""
    return x.movedim(dims[0], -1) if len(dims) == 1 else x.movedim(dims, (-2, -1)).flatten(-2)


def hold(module: nn.Module, name: str, value: float | Tensor) -> None:
    """Set an attribute: a parameter is in the state_dict, a fixed tensor is a buffer outside of it."""
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    elif isinstance(value, Tensor):
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)


def show(value: float | Tensor) -> str:
    """A parameter for a ``repr``: a number, or the shape of a tensor with several entries."""
    if not isinstance(value, Tensor):
        return f"{value:g}"
    if value.numel() == 1 and not value.is_meta:
        return f"{value.item():.4g}"
    return f"tensor of shape {tuple(value.shape)}"


def simplified(omega: Regularizer) -> Regularizer:
    """The canonical form of an Ω as one Ω again, for engines that call its methods."""
    base, gamma = omega.canonical()
    if base is omega or (isinstance(omega, Scaled) and base is omega.omega):
        return omega
    return base if not isinstance(gamma, Tensor) and gamma == 1 else gamma * base


def check_omega(omega: Regularizer, name: str = "omega") -> Regularizer:
    """Check what a user passes as ``omega``."""
    if not isinstance(omega, Regularizer):
        raise TypeError(f"{name} must be a Regularizer, such as fenchel.Gini(), got {type(omega).__name__}")
    return omega
