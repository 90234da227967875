"""One of each mixed distribution, by its number of vertices and its parameters as leaves that a test may perturb."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel.mixed import GaussianSparsemax, HardConcrete, MaximumEntropy, Mixed, MixedDirichlet


@dataclass(frozen=True)
class Member:
    name: str
    vertices: int
    make: Callable[..., Mixed]
    parameters: tuple[Tensor, ...]

    def __call__(self, *parameters: Tensor) -> Mixed:
        return self.make(*(parameters or self.parameters))


def double(*values: object) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)


FACTOR = double([[0.9, 0, 0, 0], [0.3, 0.6, 0, 0], [-0.4, 0.2, 0.8, 0], [0.1, -0.3, 0.2, 0.7]])
LOC, SCALE = double(0.4, -0.2, 0.1, -0.5), double(0.8, 0.5, 1.1, 0.6)
LOGITS, ALPHA = double(0.6, -0.3, 0.2, -1.0), double(1.5, 0.8, 2.3, 1.1)


def diagonal(loc: Tensor, scale: Tensor) -> Mixed:
    return GaussianSparsemax(loc, scale=scale)


def full(loc: Tensor, scale_tril: Tensor) -> Mixed:
    return GaussianSparsemax(loc, scale_tril=scale_tril.tril())


def largest(vertices: int) -> Callable[[Tensor], Mixed]:
    return lambda precision: MaximumEntropy(vertices, precision)


MEMBERS = [
    *(Member(f"gaussian-{k}", k, diagonal, (LOC[:k], SCALE[:k])) for k in (2, 3, 4)),
    *(Member(f"gaussian-full-{k}", k, full, (LOC[:k], FACTOR[:k, :k])) for k in (2, 3, 4)),
    *(Member(f"dirichlet-{k}", k, MixedDirichlet, (LOGITS[:k], ALPHA[:k])) for k in (2, 3, 4)),
    Member("dirichlet-shared-3", 3, MixedDirichlet, (LOGITS[:3], ALPHA[:1])),
    Member("concrete-2", 2, HardConcrete, (LOGITS[:2], double(0.7), double(1.3))),
    *(Member(f"largest-{k}", k, largest(k), (double(1.5),)) for k in (2, 3, 4)),
]
