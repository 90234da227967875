"""Locations (…, D) and matrices (…, D, D) of densities: Cholesky roots, distances and checks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Distribution

from fenchel._checks import check_entries, check_floats, check_shape, check_tril


def broadcast_shapes(*shapes: torch.Size) -> torch.Size:
    """``torch.broadcast_shapes``, with type annotations."""
    shape: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return shape


def matrix_root(covariance: Tensor) -> Tensor:
    """The lower triangular root of positive definite matrices; NaN where they are not."""
    if covariance.shape[-1] == 1:
        return covariance.sqrt()
    root: Tensor = torch.linalg.cholesky_ex(covariance).L
    return root


def half_logdet(root: Tensor) -> Tensor:
    """log det L of triangular matrices (…, D, D): half the logarithm of the determinant of L Lᵀ."""
    return root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def mahalanobis(root: Tensor, x: Tensor) -> Tensor:
    """‖L⁻¹x‖² for vectors (…, D)."""
    if root.shape[-1] == 1:
        return (x / root.squeeze(-1)).square().sum(-1)
    batch = broadcast_shapes(root.shape[:-2], x.shape[:-1])
    u = torch.linalg.solve_triangular(root.expand(*batch, -1, -1), x.expand(*batch, -1).unsqueeze(-1), upper=False)
    square: Tensor = u.square().sum((-2, -1))
    return square


def in_one_precision(loc: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in the wider dtype of the two, float32 at least: half precision has no linear algebra."""
    full = torch.promote_types(torch.promote_types(loc.dtype, matrix.dtype), torch.float32)
    return loc.to(full), matrix.to(full)


def check_value(density: Distribution, value: Tensor) -> Tensor:
    """Check points (…, D) of a density."""
    if not isinstance(value, Tensor):
        raise TypeError(f"value must be a torch.Tensor, got {type(value).__name__}")
    return check_shape(value, "value", "…", density.event_shape[0])


def check_shapes(loc: Tensor, matrix: Tensor, name: str) -> None:
    """Check the dtypes and shapes of a location (…, D) and a matrix (…, D, D) with a name."""
    check_floats(loc, "loc", "…", "D")
    check_floats(matrix, name, "…", loc.shape[-1], loc.shape[-1])


def check_values(loc: Tensor, matrix: Tensor, name: str) -> None:
    """Check that a location is finite, and a matrix lower triangular (``scale_tril``) or positive definite."""
    check_entries(loc.isfinite(), loc, "loc", "be finite")
    if name == "scale_tril":
        check_tril(matrix, name)
    else:
        check_positive_definite(matrix, name)


def check_positive_definite(matrix: Tensor, name: str) -> None:
    """Check that matrices (…, D, D), whose values can be read, are symmetric and positive definite."""
    bad = ~torch.isclose(matrix, matrix.mT, rtol=1e-4, atol=0.0).flatten(-2).all(-1)
    bad |= torch.linalg.cholesky_ex(matrix.detach()).info != 0
    bad |= ~torch.isfinite(matrix).flatten(-2).all(-1)
    if bool(bad.any()):
        raise ValueError(f"{name} must be symmetric and positive definite, got {matrix[bad][0].tolist()}")
