"""Every map under test. A new map joins the conformance harness by one line in ``MAPS``."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fenchel
from fenchel import Regularizer


@dataclass(frozen=True)
class Map:
    """A map and its Ω.

    ``curved``: p is differentiable with a Jacobian that is not zero. ``compiled``: it has kernels on the CPU, and is
    tested a second time without them, as ``plain``. ``opaque``: it iterates until it is done, so that graphs cannot
    hold it; ``dense``: by solving systems over whole rows, which know small entries only to the rounding of large ones.
    ``grouped``: entries that share a value are tied to each other, and Ω has a penalty that is not zero at the
    vertices. ``placed``: where an entry stands matters. ``rigid``: a masked entry leaves a gap. ``vertices``: one-hot
    vectors are in the domain of Ω. ``mass``: what a row sums to, or its number of unmasked entries if that is less.
    ``upper``: the bound of each entry.
    """

    name: str
    choose: Callable[..., Tensor]  # choose(scores, dim=-1, mask=None)
    omega: Regularizer
    curved: bool = True
    compiled: bool = False
    plain: bool = False
    opaque: bool = False
    dense: bool = False
    grouped: bool = False
    placed: bool = False
    rigid: bool = False
    vertices: bool = True
    mass: float = 1.0
    upper: float = 1.0

    def faces(self, p: Tensor) -> Tensor:
        """Which entries are at zero, free, and at their bound: p is smooth while that stays."""
        return (p > 0).int() + (p >= self.upper).int()

    def __str__(self) -> str:
        return self.name


def _tensor_alpha(values: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    return fenchel.entmax(values, torch.tensor(1.3, dtype=torch.float64), dim, mask)


_GINI = fenchel.Custom(lambda p: 0.5 * (p.square().sum(-1) - 1))
_SHANNON = fenchel.Custom(lambda p: -torch.special.entr(p).sum(-1))  # infinite slope and curvature at 0
_COUPLED = fenchel.Custom(lambda p: 0.5 * (p.square().sum(-1) - 1) + 0.25 * (p.square().sum(-1).square() - 1))


def _tensor_strength(values: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    return fenchel.fusedmax(values, torch.tensor(0.3), dim, mask)


def _by_index(values: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """entmax of rows as groups of one long row, in an order in which they do not stand together."""
    good = isinstance(values, Tensor) and values.is_floating_point() and type(dim) is int and values.numel()
    if not good or not -values.dim() <= dim < values.dim() or (mask is not None and not _fits(mask, values)):
        return fenchel.entmax(values, 1.5, dim, mask)  # bad input, which the library shall name
    rows = (values if mask is None else torch.where(mask, values, -torch.inf)).movedim(dim, -1)
    width = rows.shape[-1]
    by_column = rows.reshape(-1, width).T.flatten()
    p = fenchel.segment_entmax(by_column, torch.arange(by_column.numel() // width).repeat(width))
    return p.reshape(width, -1).T.reshape(rows.shape).movedim(-1, dim)


def _fits(mask: Tensor, values: Tensor) -> bool:
    try:
        return mask.dtype == torch.bool and mask.expand(values.shape) is not None
    except (AttributeError, RuntimeError):
        return False


class _Grids(fenchel.TotalVariation2d):
    """Rows as grids of two lines, if their width is even."""

    def dims(self, scores: Tensor, dim: int | tuple[int, int] | None) -> tuple[int, ...]:
        place = -1 if dim is None else dim
        known = isinstance(scores, Tensor) and isinstance(place, int) and -scores.dim() <= place < scores.dim()
        size = max(scores.shape[place], 1) if known else 1
        self.shape = (2, size // 2) if size % 2 == 0 else (1, size)
        return super().dims(scores, dim)


class Roomy:
    """``Capped`` at ⅝, and at 1 where a row has a single entry: every problem of the harness has an answer."""

    margin = None

    def __init__(self, choose: Callable[..., Tensor], base: Regularizer) -> None:
        self.choose, self.base = choose, base

    def __call__(self, p: Tensor) -> Tensor:
        return fenchel.Capped(0.625, self.base)(p)

    def map(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return self.choose(scores, self._upper(scores, dim, mask), dim, mask)

    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return fenchel.Capped(self._upper(scores, dim, mask), self.base).argmax(scores, dim, mask)

    def max(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        return fenchel.Capped(self._upper(scores, dim, mask), self.base).max(scores, dim, mask)

    def _upper(self, scores: Tensor, dim: int, mask: Tensor | None) -> float | Tensor:
        try:
            unmasked = (scores != -torch.inf) & (True if mask is None else mask.expand_as(scores))
            return torch.where(unmasked.sum(dim, keepdim=True) > 1, 0.625, 1.0).double()
        except (AttributeError, IndexError, RuntimeError, TypeError):  # bad input, which the library shall name
            return 0.625


ROOMY = [
    Roomy(fenchel.constrained_softmax, fenchel.Shannon()),
    Roomy(fenchel.constrained_sparsemax, fenchel.Gini()),
]

MAPS = [
    Map("argmax", fenchel.argmax, fenchel.Hard(), curved=False),
    Map("softmax", fenchel.softmax, fenchel.Shannon()),
    Map("sparsemax", fenchel.sparsemax, fenchel.Gini(), compiled=True),
    Map("entmax-0.5", lambda s, dim=-1, mask=None: fenchel.entmax(s, 0.5, dim, mask), fenchel.Tsallis(0.5)),
    Map("entmax-1.05", lambda s, dim=-1, mask=None: fenchel.entmax(s, 1.05, dim, mask), fenchel.Tsallis(1.05)),
    Map("entmax-1.5", fenchel.entmax, fenchel.Tsallis(1.5), compiled=True),
    Map("entmax-3", lambda s, dim=-1, mask=None: fenchel.entmax(s, 3, dim, mask), fenchel.Tsallis(3)),
    Map("segment_entmax", _by_index, fenchel.Tsallis(1.5), opaque=True),
    Map("entmax-tensor", _tensor_alpha, fenchel.Tsallis(torch.tensor(1.3, dtype=torch.float64)), compiled=True),
    Map(
        "normmax-1.5", lambda s, dim=-1, mask=None: fenchel.normmax(s, 1.5, dim, mask), fenchel.Norm(1.5), compiled=True
    ),
    Map("normmax-2", fenchel.normmax, fenchel.Norm(), compiled=True),
    Map("normmax-5", lambda s, dim=-1, mask=None: fenchel.normmax(s, 5.0, dim, mask), fenchel.Norm(5.0), compiled=True),
    Map(
        "normmax-inf",
        lambda s, dim=-1, mask=None: fenchel.normmax(s, torch.inf, dim, mask),
        fenchel.Norm(torch.inf),
        False,
    ),
    Map("custom-gini", _GINI.argmax, _GINI, opaque=True),
    Map("custom-shannon", _SHANNON.argmax, _SHANNON, opaque=True),
    Map("custom-coupled", _COUPLED.argmax, _COUPLED, opaque=True, dense=True),
    Map("fusedmax", fenchel.fusedmax, fenchel.Fused(), compiled=True, grouped=True, placed=True),
    Map("fusedmax-tensor", _tensor_strength, fenchel.Fused(torch.tensor(0.3)), grouped=True, placed=True),
    Map("oscarmax", fenchel.oscarmax, fenchel.Oscar(), compiled=True, grouped=True),
    Map("tvmax2d", _Grids().argmax, _Grids(), grouped=True, placed=True, rigid=True, opaque=True),
    Map("constrained_softmax", ROOMY[0].map, ROOMY[0], vertices=False, upper=0.625),
    Map("constrained_sparsemax", ROOMY[1].map, ROOMY[1], compiled=True, vertices=False, upper=0.625),
    Map("k_subsets-1", lambda s, dim=-1, mask=None: fenchel.k_subsets(s, 1, dim, mask), fenchel.KSubsets(1)),
    Map(
        "k_subsets-2.5",
        lambda s, dim=-1, mask=None: fenchel.k_subsets(s, 2.5, dim, mask),
        fenchel.KSubsets(2.5),
        vertices=False,
        mass=2.5,
    ),
    Map("scaled", (0.5 * fenchel.Tsallis(1.5)).argmax, 0.5 * fenchel.Tsallis(1.5)),
]
MAPS += [replace(m, name=f"{m.name}-plain", plain=True) for m in MAPS if m.compiled]
