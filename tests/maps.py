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
    vertices. ``placed``: where an entry stands matters. ``rigid``: a masked entry leaves a gap.
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

    def __str__(self) -> str:
        return self.name


def _tensor_alpha(values: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    return fenchel.entmax(values, torch.tensor(1.3, dtype=torch.float64), dim, mask)


_GINI = fenchel.Custom(lambda p: 0.5 * (p.square().sum(-1) - 1))
_COUPLED = fenchel.Custom(lambda p: 0.5 * (p.square().sum(-1) - 1) + 0.25 * (p.square().sum(-1).square() - 1))


def _tensor_strength(values: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    return fenchel.fusedmax(values, torch.tensor(0.3), dim, mask)


class _Grids(fenchel.TotalVariation2d):
    """Rows as grids of two lines, if their width is even."""

    def _dims(self, scores: Tensor, dim: int | tuple[int, int] | None) -> tuple[int, ...]:
        place = -1 if dim is None else dim
        known = isinstance(scores, Tensor) and isinstance(place, int) and -scores.dim() <= place < scores.dim()
        size = max(scores.shape[place], 1) if known else 1
        self.shape = (2, size // 2) if size % 2 == 0 else (1, size)
        return super()._dims(scores, dim)


MAPS = [
    Map("argmax", fenchel.argmax, fenchel.Hard(), curved=False),
    Map("softmax", fenchel.softmax, fenchel.Shannon()),
    Map("sparsemax", fenchel.sparsemax, fenchel.Gini(), compiled=True),
    Map("entmax-0.5", lambda s, dim=-1, mask=None: fenchel.entmax(s, 0.5, dim, mask), fenchel.Tsallis(0.5)),
    Map("entmax-1.05", lambda s, dim=-1, mask=None: fenchel.entmax(s, 1.05, dim, mask), fenchel.Tsallis(1.05)),
    Map("entmax-1.5", fenchel.entmax, fenchel.Tsallis(1.5), compiled=True),
    Map("entmax-3", lambda s, dim=-1, mask=None: fenchel.entmax(s, 3, dim, mask), fenchel.Tsallis(3)),
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
    Map("custom-coupled", _COUPLED.argmax, _COUPLED, opaque=True, dense=True),
    Map("fusedmax", fenchel.fusedmax, fenchel.Fused(), compiled=True, grouped=True, placed=True),
    Map("fusedmax-tensor", _tensor_strength, fenchel.Fused(torch.tensor(0.3)), grouped=True, placed=True),
    Map("oscarmax", fenchel.oscarmax, fenchel.Oscar(), compiled=True, grouped=True),
    Map("tvmax2d", _Grids().argmax, _Grids(), grouped=True, placed=True, rigid=True, opaque=True),
    Map("scaled", (0.5 * fenchel.Tsallis(1.5)).argmax, 0.5 * fenchel.Tsallis(1.5)),
]
MAPS += [replace(m, name=f"{m.name}-plain", plain=True) for m in MAPS if m.compiled]
