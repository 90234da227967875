"""Row-wise maps on tensors: lay out rows, choose the kernel, share the rows among threads."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.maps import rows
from fenchel.kernels.cpu.threads import SERIAL, over_rows

WHOLE = {1.0: 1, 0.5: 2}
"""1/c for those c = α − 1 that the kernels of entmax are specialised for."""

_ONE = {1.0: 1}  # the same for normmax
_LIKE = {torch.float32: np.float32(0), torch.float64: np.float64(0)}


def entmax(z: Tensor, alpha: float | Tensor) -> Tensor:
    """α-entmax along the last dimension for α ≠ 1; a number, or one value per row."""
    return _map(rows.entmax, rows.entmax_at, z, alpha - 1, WHOLE)


def normmax(z: Tensor, alpha: float | Tensor) -> Tensor:
    """α-normmax along the last dimension for α in [1¼, 10]; a number, or one value per row."""
    return _map(rows.normmax, rows.normmax_at, z, alpha - 1, _ONE)


def entmax_product(v: Tensor, z: Any, p: Tensor, alpha: float | Tensor) -> Tensor:
    """J v of α-entmax given its result p."""
    return _product(rows.entmax_product, v, p, alpha - 1, WHOLE)


def entmax_pull(v: Tensor, z: Any, p: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """J v of α-entmax given its result p, and ⟨v, ∂p/∂α⟩ for α ≤ 2, one value per row, dimension kept."""
    q = as_rows(p)
    out = torch.empty((*p.shape[:-1], 1), dtype=p.dtype, device="cpu")
    over_rows(rows.entmax_alpha, q.shape[0], q.size, q, parameter(alpha - 1, q), as_rows(v), out.numpy().reshape(-1))
    return entmax_product(v, z, p, alpha), out


def normmax_product(v: Tensor, z: Any, p: Tensor, alpha: float | Tensor) -> Tensor:
    """J v of α-normmax given its result p."""
    return _product(rows.normmax_product, v, p, alpha - 1, _ONE)


def entmax_loss(z: Tensor, index: Tensor, residual: bool, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """The loss of rows with class indices and, if asked for, its gradient p − y (else an empty tensor)."""
    return _loss(rows.entmax_loss, z, index, alpha - 1, residual, WHOLE)


def normmax_loss(z: Tensor, index: Tensor, residual: bool, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """As ``entmax_loss`` for normmax."""
    return _loss(rows.normmax_loss, z, index, alpha - 1, residual, _ONE)


def _loss(
    kernel: Any, z: Tensor, index: Tensor, c: float | Tensor, residual: bool, whole: dict[float, int]
) -> tuple[Tensor, Tensor]:
    x = as_rows(z)
    loss = torch.empty(z.shape[:-1], dtype=z.dtype, device="cpu")
    out = like(z) if residual else z.new_empty(0, z.shape[-1])
    target = index.contiguous().numpy().reshape(-1)
    over_rows(kernel, x.shape[0], x.size, x, parameter(c, x, whole), target, loss.numpy().reshape(-1), as_rows(out))
    return loss, out


def _map(kernel: Any, at: Any, z: Tensor, c: float | Tensor, whole: dict[float, int]) -> Tensor:
    out = like(z)
    size = z.numel()
    if size < SERIAL and type(c) is float and z.is_contiguous() and size:
        n = z.shape[-1]
        at(z.data_ptr(), out.data_ptr(), _LIKE[z.dtype], size // n, n, whole.get(c, c))
        return out
    x = as_rows(z)
    over_rows(kernel, x.shape[0], x.size, x, parameter(c, x, whole), as_rows(out))
    return out


def _product(kernel: Any, v: Tensor, p: Tensor, c: float | Tensor, whole: dict[float, int]) -> Tensor:
    q, out = as_rows(p), like(p)
    over_rows(kernel, q.shape[0], q.size, q, parameter(c, q, whole), as_rows(v), as_rows(out))
    return out


def like(tensor: Tensor) -> Tensor:
    """Room for a contiguous tensor of the same shape."""
    if tensor.is_contiguous():
        return torch.empty_like(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def as_rows(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The rows of a tensor as a matrix, copied only if they are not contiguous."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: np.ndarray[Any, Any] = (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy()
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])


def parameter(c: float | Tensor, x: np.ndarray[Any, Any], whole: dict[float, int] = WHOLE) -> np.ndarray[Any, Any]:
    """One parameter for all rows, or one per row, in the form that ``exponents`` describes."""
    if isinstance(c, Tensor):
        return np.asarray(c.detach().reshape(-1).contiguous().numpy(), dtype=x.dtype)
    return _single(whole[c], np.int64) if c in whole else _single(c, x.dtype)


def each(value: float | Tensor, rows: int) -> np.ndarray[Any, Any]:
    """A parameter in double precision, one value per row."""
    if isinstance(value, Tensor):
        return np.asarray(value.detach().double().reshape(-1).contiguous().numpy())
    return np.full(rows, value, dtype=np.float64)


@lru_cache
def _single(c: float, dtype: Any) -> np.ndarray[Any, Any]:
    return np.array([c], dtype=dtype)
