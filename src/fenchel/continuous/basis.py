"""Basis functions of time or space, and ridge regression of values at words or pixels on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fenchel._checks import check_count, check_floats, check_kind, check_mask, check_number, check_shape
from fenchel._torch import concrete, tracks_forward
from fenchel.continuous.matrices import check_positive_definite
from fenchel.regularizers.configs import written_by


class Basis(nn.Module):
    """Base class of n functions of D dimensions, with ridge regression on them; subclasses define ``forward``.

    A subclass also sets ``dim`` and defines ``__len__``, the number n of functions. ``FunctionBasis`` makes a basis of
    any module.

    Example:
        >>> import torch
        >>> from fenchel.continuous import Basis
        >>> class Line(Basis):  # 1 and t
        ...     dim = 1
        ...     def __len__(self): return 2
        ...     def forward(self, t): return torch.cat([torch.ones_like(t), t], -1)
        >>> function = Line().fit(torch.tensor([[1.0], [2.0], [3.0]]), ridge=1e-6)
        >>> function(torch.tensor([[0.5]]))
        tensor([[2.0000]])
    """

    dim: int
    """The number of dimensions, D."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} functions of {self.dim} dimension{'s' * (self.dim > 1)})"

    def forward(self, t: Tensor) -> Tensor:
        """The values ψ(t), (…, n), at points (…, D)."""
        raise NotImplementedError

    def precise(self, t: Tensor) -> Tensor:
        """The values ψ(t) in double precision, computed as precisely as the basis allows."""
        value: Tensor = self(t)
        return value.double()

    @property
    def _tensors(self) -> list[Tensor]:
        """What the functions depend on."""
        return [*self.parameters(), *self.buffers()]

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and device of the results."""
        floats = [each for each in self._tensors if each.is_floating_point()]
        return floats[0] if floats else torch.empty(0)

    def regression(self, positions: Tensor, mask: Tensor | None = None, *, ridge: float = 0.1) -> Tensor:
        r"""The matrix G of ridge regression, (…, L, n): values H (L, width) have the coefficients B = Gᵀ H.

        .. math:: \operatorname{argmin}_B \; \|F^\top B - H\|^2 + \lambda \|B\|^2, \qquad F_{j\ell} = \psi_j(t_\ell)

        Args:
            positions: of the values, (…, L, D); they need not be regular.
            mask: boolean (…, L); True = there is a value. Rows of G that are masked are zero.
            ridge: λ > 0.

        Returns:
            (…, L, n), in the dtype of the basis; computed in double precision.
        """
        check_number(ridge, "ridge", 0)
        check_shape(positions, "positions", "…", "L", self.dim)
        if mask is not None:
            _check_mask(mask, positions.shape[-2])
        full = self.precise(positions.double())  # (…, L, n): Fᵀ
        if mask is not None:
            full = torch.where(mask.unsqueeze(-1), full, 0.0)
        few = full.shape[-2] < full.shape[-1]  # of two systems with the same solution the smaller one is solved
        rows = full if few else full.mT
        system = rows @ rows.mT + ridge * torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
        found = torch.cholesky_solve(rows, torch.linalg.cholesky_ex(system).L)
        return (found if few else found.mT).to(self.like.dtype)

    def weights(
        self,
        shape: tuple[int, ...],
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        ridge: float = 0.1,
    ) -> Tensor:
        """``regression`` for sequences and images with regular positions; the result is cached.

        Args:
            shape: (L,) words, in the middles of L cells of [0, 1]; (h, w) for the pixels of an image, row by row.
            mask: boolean (…, L); True = there is a value. Positions are spread over [0, 1] up to the last value.
            positions: (…, L, D), in place of regular ones.
            ridge: λ > 0.

        Returns:
            (L, n) or (…, L, n).
        """
        check_number(ridge, "ridge", 0)
        size = math.prod(shape)
        if size == 0:
            raise ValueError(f"the sequence must not be empty, got shape {shape}")
        if positions is None and len(shape) != self.dim:
            raise ValueError(
                f"for a basis of {self.dim} dimensions give positions, or a shape of as many sizes; got {shape}"
            )
        if mask is not None:
            _check_mask(mask, size)
        if positions is not None and positions.dim() > 1 and positions.shape[-2] != size:
            raise ValueError(f"positions must be those of {size} values, got {tuple(positions.shape)}")
        if positions is not None or (mask is not None and self.dim > 1):
            where = grid_positions(shape, self.like) if positions is None else positions
            return self.regression(where, mask, ridge=ridge)
        if mask is None:
            return self._cached(shape, ridge)
        return self._padded(mask, ridge)

    def _padded(self, mask: Tensor, ridge: float) -> Tensor:
        """The matrices of a padded batch, cached by length where the mask only depends on lengths."""
        size = mask.shape[-1]
        place = torch.arange(1, size + 1, device=mask.device)
        lengths = (mask * place).amax(-1)
        full_prefix = torch.equal(mask, place <= lengths.unsqueeze(-1)) if concrete(mask) else False
        if full_prefix and not self._trained:
            unique, index = lengths.unique(return_inverse=True)  # type: ignore[no-untyped-call]
            table = self.like.new_zeros(len(unique), size, len(self))
            for row, length in enumerate(unique.tolist()):
                if length:
                    table[row, :length] = self._cached((length,), ridge)
            return table[index]
        return self.regression(word_positions(mask), mask, ridge=ridge)

    @property
    def _trained(self) -> bool:
        return any(each.requires_grad for each in self._tensors)

    def _cached(self, shape: tuple[int, ...], ridge: float) -> Tensor:
        def make() -> Tensor:
            return self.regression(grid_positions(shape, self.like), ridge=ridge)

        return self.cached(("regular", shape, ridge), make)

    def cached(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """A matrix that depends on the basis and the key alone; a subclass may cache it."""
        return make()

    def fit(
        self,
        values: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        ridge: float = 0.1,
        shape: tuple[int, ...] | None = None,
    ) -> ValueFunction:
        """Fit a function of t to values at words or pixels by ridge regression.

        Args:
            values: (…, L, width).
            mask: boolean (…, L); True = there is a value. Values at other positions are ignored.
            positions: (…, L, D); the middles of L cells of [0, 1] if None.
            ridge: λ > 0.
            shape: (h, w) for the L pixels of an image, row by row.
        """
        shape = tuple(values.shape[-2:-1]) if shape is None else shape
        check_floats(values, "values", "…", math.prod(shape), "width")
        solver = self.weights(shape, mask, positions, ridge=ridge).to(values.dtype)
        if mask is not None:
            values = torch.where(mask.unsqueeze(-1), values, 0.0)
        return ValueFunction(self, solver.mT @ values)


@written_by("centers", "covariances")
class GaussianBasis(Basis):
    r"""n Gaussian functions of D dimensions: :math:`\psi_j(t) = \mathcal{N}(t; \mu_j, \Sigma_j)`.

    Args:
        centers: μ, (n, D).
        covariances: Σ, (n, D, D). Both are buffers of the module, or parameters if given as ``nn.Parameter``.

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis
        >>> basis = GaussianBasis.line(6, widths=(0.1, 0.5))  # three of each width, spread over [0, 1]
        >>> basis
        GaussianBasis(6 functions of 1 dimension)
        >>> basis(torch.tensor([[0.0], [0.4]])).shape
        torch.Size([2, 6])
        >>> times = (torch.arange(20) + 0.5) / 20  # where the words stand: the middles of 20 cells
        >>> function = basis.fit(torch.sin(3 * times).unsqueeze(-1), ridge=1e-4)
        >>> function(torch.tensor([[0.5]]))  # sin(1.5) = 0.9975
        tensor([[1.0002]])

    References: Martins et al. (2020), section 3.1.
    """

    centers: Tensor
    covariances: Tensor
    cache_bytes: int = 2**25
    """The largest size of the matrices of regressions that a basis caches."""

    def __init__(self, centers: Tensor, covariances: Tensor) -> None:
        super().__init__()
        n, dim = check_floats(centers, "centers", "n", "D").shape
        check_floats(covariances, "covariances", n, dim, dim)
        if concrete(centers, covariances):
            check_positive_definite(covariances, "covariances")
        for name, value in (("centers", centers), ("covariances", covariances)):
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)
        self._cache: dict[tuple[object, ...], tuple[Tensor, ...]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cache": {}}  # its keys name tensors of this basis, not those of a copy

    @classmethod
    def line(
        cls, n: int, *, widths: Sequence[float] = (0.1, 0.5), interval: tuple[float, float] = (0.0, 1.0)
    ) -> GaussianBasis:
        """A basis of ``n`` functions on the line, equally many of each width, with evenly spaced centres."""
        _check_widths(widths)
        if check_count(n, "n") % len(widths):
            raise ValueError(f"n must be a multiple of the number of widths, {len(widths)}, got {n}")
        centers = torch.linspace(*interval, n // len(widths)).unsqueeze(-1)
        return cls._of_widths(centers, widths)

    @classmethod
    def grid(
        cls,
        rows: int,
        columns: int | None = None,
        *,
        widths: Sequence[float] = (0.1,),
        interval: tuple[float, float] = (0.0, 1.0),
    ) -> GaussianBasis:
        """A basis of rows × columns isotropic functions per width, with centres on a grid over a square."""
        _check_widths(widths)
        lines = [torch.linspace(*interval, n) for n in (rows, rows if columns is None else columns)]
        return cls._of_widths(torch.cartesian_prod(*lines), widths)

    @classmethod
    def _of_widths(cls, centers: Tensor, widths: Sequence[float]) -> GaussianBasis:
        eye = torch.eye(centers.shape[-1], device=centers.device)
        covariances = [w * w * eye.expand(len(centers), -1, -1) for w in widths]
        return cls(centers.repeat(len(widths), 1), torch.cat(covariances))

    @property
    def dim(self) -> int:  # type: ignore[override]
        """The number of dimensions, D."""
        return int(self.centers.shape[-1])

    def __len__(self) -> int:
        return int(self.centers.shape[0])

    def forward(self, t: Tensor) -> Tensor:
        """The values ψ(t), (…, n), at points (…, D)."""
        check_shape(t, "t", "…", self.dim)
        root = torch.linalg.cholesky_ex(self.covariances).L
        x = (t.unsqueeze(-2) - self.centers).unsqueeze(-1)
        u = torch.linalg.solve_triangular(root, x, upper=False)
        log = -0.5 * u.square().sum((-2, -1)) - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        value: Tensor = torch.exp(log - 0.5 * self.dim * math.log(2 * math.pi))
        return value

    def precise(self, t: Tensor) -> Tensor:
        value: Tensor = self._in_double()(t.double())
        return value

    @property
    def like(self) -> Tensor:
        return self.centers

    def cached(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        tensors = self.centers, self.covariances
        # Tensors that are made inside torch.func transforms must not be used outside.
        if self._trained or tracks_forward() or not concrete(*tensors) or any(t.is_inference() for t in tensors):
            return make()
        key = (*key, self.centers.dtype, self.centers.device, *((id(t), t._version) for t in tensors))
        if key not in self._cache:
            with torch.inference_mode(False), torch.no_grad():  # the cached matrix may be used with gradients later
                found = make()
            if found.nbytes + sum(each[0].nbytes for each in self._cache.values()) > self.cache_bytes:
                self._cache.clear()
            self._cache[key] = found, *tensors  # with the tensors, so that their ids are not reused
        return self._cache[key][0]

    def _in_double(self) -> GaussianBasis:
        """The same functions in double precision; gradients reach this basis."""
        if self.centers.dtype == torch.float64 and self.covariances.dtype == torch.float64:
            return self
        twin = GaussianBasis.__new__(GaussianBasis)
        Basis.__init__(twin)
        twin.centers, twin.covariances = self.centers.double(), self.covariances.double()
        return twin


class FunctionBasis(Basis):
    """The n functions of D dimensions that a module computes: any ψ(t), such as a network, polynomials or cosines.

    Args:
        function: a module that returns ψ(t), (…, n), at points (…, D).
        dim: D.

    Expectations of its functions are computed by quadrature.

    Example:
        >>> import torch
        >>> from fenchel.continuous import BetaGaussian, FunctionBasis
        >>> class Powers(torch.nn.Module):
        ...     def forward(self, t): return torch.cat([t**k for k in range(3)], -1)
        >>> basis = FunctionBasis(Powers())
        >>> basis
        FunctionBasis(3 functions of 1 dimension)
        >>> p = BetaGaussian(torch.ones(1), sigma=torch.tensor([[2 / 3]]))  # variance 1/5
        >>> p.integrate(basis)
        tensor([1.0000, 1.0000, 1.2000])
    """

    def __init__(self, function: nn.Module, dim: int = 1) -> None:
        super().__init__()
        if not isinstance(function, nn.Module):
            raise TypeError(f"function must be a module that returns ψ(t), got {type(function).__name__}")
        self.function, self.dim = function, check_count(dim, "dim")
        like = self.like
        with torch.no_grad():
            found = function(torch.full((1, self.dim), 0.5, dtype=like.dtype, device=like.device))
        if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != 1 or not found.shape[-1]:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"function must return ψ(t), (…, n), at points (…, {dim}); got {shape} for (1, {dim})")
        self._size = int(found.shape[-1])

    def __len__(self) -> int:
        return self._size

    def forward(self, t: Tensor) -> Tensor:
        """The values ψ(t), (…, n), at points (…, D)."""
        check_shape(t, "t", "…", self.dim)
        value: Tensor = self.function(t.to(self.like.dtype) if self._tensors else t)
        return value


def as_basis(basis: nn.Module) -> Basis:
    """A ``Basis`` as it is, another module as a ``FunctionBasis`` of one dimension."""
    check_kind(basis, "basis", nn.Module, what="a Basis, or a module that returns ψ(t)")
    return basis if isinstance(basis, Basis) else FunctionBasis(basis)


def as_line_basis(basis: nn.Module) -> Basis:
    """``as_basis``, where functions of one dimension are needed."""
    found = as_basis(basis)
    if found.dim != 1:
        raise ValueError(f"basis must have functions of one dimension, got {found}")
    return found


@dataclass(frozen=True)
class ValueFunction:
    """The function V(t) = Bᵀψ(t) of points (…, D), with values (…, width).

    Args:
        basis: ψ.
        coefficients: B, (…, n, width).

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis, ValueFunction
        >>> function = ValueFunction(GaussianBasis(torch.zeros(1, 1), torch.ones(1, 1, 1)), torch.ones(1, 2))
        >>> function(torch.tensor([[0.0], [1.0]]))
        tensor([[0.3989, 0.3989],
                [0.2420, 0.2420]])
    """

    basis: Basis
    coefficients: Tensor

    def __call__(self, t: Tensor) -> Tensor:
        """Values (…, N, width) at points (…, N, D)."""
        value: Tensor = self.basis(t).to(self.coefficients.dtype) @ self.coefficients
        return value


def grid_positions(shape: Sequence[int], like: Tensor) -> Tensor:
    """The middles of a grid of cells of [0, 1]^D, (∏ shape, D), row by row, in double precision.

    Example:
        >>> import torch
        >>> grid_positions((2,), torch.zeros(1)).flatten().tolist()
        [0.25, 0.75]
    """
    lines = [(torch.arange(n, dtype=torch.float64, device=like.device) + 0.5) / n for n in shape]
    return lines[0].unsqueeze(-1) if len(lines) == 1 else torch.cartesian_prod(*lines)


def word_positions(mask: Tensor) -> Tensor:
    """Positions (…, L, 1) for a mask (…, L): middles of cells of [0, 1] up to the last value, in double precision."""
    place = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    lengths = (mask * place).amax(-1, keepdim=True).clamp_min(1)
    return ((place - 0.5).double() / lengths).unsqueeze(-1)


def _check_widths(widths: Sequence[float]) -> None:
    if not isinstance(widths, Sequence):
        raise TypeError(f"widths must be a sequence of numbers, such as (0.1,), got {widths!r}")
    if not widths:
        raise ValueError("widths must hold at least one number, got none")
    for width in widths:
        check_number(width, "widths", 0)


def _check_mask(mask: Tensor, size: int) -> None:
    check_shape(check_mask(mask, true="there is a value"), "mask", "…", size)
