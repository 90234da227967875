"""Maps as modules, drop-in for ``torch.nn.Softmax``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fenchel import regularizers
from fenchel._checks import check_integer
from fenchel.regularizers import Capped, Fused, Gini, Hard, Norm, Oscar, Regularizer, Shannon, TotalVariation2d, Tsallis
from fenchel.regularizers.base import check_omega


class Argmax(nn.Module):
    """The map argmax_Ω along a dimension of scores, for any Ω; one-hot (``Hard``) by default.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.Argmax(fenchel.Tsallis(1.5), dim=-1)(torch.tensor([2.0, 1.0, -1.0]))
        tensor([0.8307, 0.1693, 0.0000])
    """

    def __init__(self, omega: Regularizer | None = None, dim: int = -1) -> None:
        super().__init__()
        self.omega = Hard() if omega is None else check_omega(omega)
        self.dim = check_integer(dim, "dim")

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the map to scores; ``mask`` is True where an entry may receive mass."""
        dim = (
            self.omega.default_dim if self.dim == -1 else self.dim
        )  # −1 stands for the last two dimensions if Ω is over pairs
        return self.omega.argmax(scores, dim, mask)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Softmax(Argmax):
    """``torch.nn.Softmax`` with a mask.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.Softmax()(torch.tensor([1.0, 0.0]))
        tensor([0.7311, 0.2689])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__(Shannon(), dim)


class Sparsemax(Argmax):
    """Projection onto the simplex, in place of ``torch.nn.Softmax``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.Sparsemax()(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__(Gini(), dim)


class Entmax(Argmax):
    """α-entmax, in place of ``torch.nn.Softmax``; alpha fixed or learned.

    ``Entmax(1.5, learnable=True, shape=(num_heads, 1, 1))`` has one alpha per head for scores (batch, num_heads,
    queries, keys), each inside ``bounds`` (Correia et al., 2019).

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.Entmax(1.5)(torch.tensor([2.0, 1.0, -1.0]))
        tensor([0.8307, 0.1693, 0.0000])
    """

    def __init__(
        self,
        alpha: float | Tensor = 1.5,
        dim: int = -1,
        learnable: bool = False,
        bounds: tuple[float, float] = (1.0, 2.0),
        shape: Sequence[int] = (),
    ) -> None:
        super().__init__(Tsallis(alpha, learnable=learnable, bounds=bounds, shape=shape), dim)


class Normmax(Argmax):
    """α-normmax, in place of ``torch.nn.Softmax``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.Normmax(5.0)(torch.tensor([1.0, 0.8, -1.0]))
        tensor([0.5221, 0.4779, 0.0000])
    """

    def __init__(self, alpha: float | Tensor = 2.0, dim: int = -1) -> None:
        super().__init__(Norm(alpha), dim)


class Fusedmax(Argmax):
    """Fusedmax (neighbours share a probability), in place of ``torch.nn.Softmax`` over a sequence.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.Fusedmax(0.2)(torch.tensor([1.0, 0.7, 0.9, -1.0]))
        tensor([0.3333, 0.3333, 0.3333, 0.0000])
    """

    def __init__(self, strength: float | Tensor = 0.1, dim: int = -1) -> None:
        super().__init__(Fused(strength), dim)


class Oscarmax(Argmax):
    """Oscarmax (entries with similar scores share a probability), in place of ``torch.nn.Softmax``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.Oscarmax(0.1)(torch.tensor([0.5, -1.0, 0.3, 0.48]))
        tensor([0.3467, 0.0000, 0.3067, 0.3467])
    """

    def __init__(self, strength: float | Tensor = 0.1, dim: int = -1) -> None:
        super().__init__(Oscar(strength), dim)


class TVmax2d(nn.Module):
    """Sparsemax with a total-variation penalty over a grid (…, height, width): neighbours share a probability.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.TVmax2d(0.1)(torch.tensor([[[1.0, 0.9], [0.8, -1.0]]]))
        tensor([[[0.3500, 0.3500],
                 [0.3000, 0.0000]]])
    """

    def __init__(self, strength: float | Tensor = 0.1) -> None:
        super().__init__()
        self.omega = TotalVariation2d(strength)

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the map to scores; ``mask`` is True where a pixel may receive mass."""
        return self.omega.argmax(scores, mask=mask)


class ConstrainedSoftmax(Argmax):
    """Softmax with an upper bound per entry. If bounds differ between calls, use ``fenchel.constrained_softmax``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.ConstrainedSoftmax(0.5)(torch.tensor([3.0, 1.0, 0.0]))
        tensor([0.5000, 0.3655, 0.1345])
    """

    def __init__(self, upper: float | Tensor, dim: int = -1) -> None:
        super().__init__(Capped(upper, Shannon()), dim)


class ConstrainedSparsemax(Argmax):
    """Sparsemax with an upper bound per entry. If bounds differ between calls, use ``fenchel.constrained_sparsemax``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.ConstrainedSparsemax(torch.tensor([0.4, 1.0, 1.0]))(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.4000, 0.6000, 0.0000])
    """

    def __init__(self, upper: float | Tensor, dim: int = -1) -> None:
        super().__init__(Capped(upper), dim)


class KSubsets(Argmax):
    """Projection onto the vectors in [0, 1]ⁿ with sum k: a relaxed choice of k entries. Its Ω is ``fenchel.KSubsets``.

    Example:
        >>> import torch, fenchel
        >>> fenchel.nn.KSubsets(2)(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
        tensor([0.0000, 0.1250, 0.3750, 0.6250, 0.8750])
    """

    def __init__(self, k: float | Tensor, dim: int = -1) -> None:
        super().__init__(regularizers.KSubsets(k), dim)
