"""Row-wise maps on tensors: lay out rows, choose the kernel, share the rows among threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels import rows
from fenchel.kernels.pool import over_rows


def entmax(z: Tensor, c: float | Tensor) -> Tensor:
    """α-entmax along the last dimension for c = α − 1 in [¼, 1]; a number, or one value a row."""
    x = _rows(z)
    out = torch.empty_like(x)
    arrays = (x.numpy(), out.numpy())
    if not isinstance(c, Tensor) and c == 1:
        over_rows(rows.sparsemax, *_size(x), *arrays)
    elif not isinstance(c, Tensor) and c == 0.5:
        over_rows(rows.entmax15, *_size(x), *arrays)
    else:
        over_rows(rows.entmax, *_size(x), arrays[0], _powers(c, x), arrays[1])
    return out.reshape(z.shape)


def normmax(z: Tensor, c: float | Tensor) -> Tensor:
    """α-normmax along the last dimension for c = α − 1 in [¼, 9]; a number, or one value a row."""
    x = _rows(z)
    out = torch.empty_like(x)
    over_rows(rows.normmax, *_size(x), x.numpy(), _powers(c, x), out.numpy())
    return out.reshape(z.shape)


def entmax_product(v: Tensor, p: Tensor, c: float | Tensor) -> Tensor:
    """J v of α-entmax given its result p."""
    return _product(rows.entmax_product, v, p, c)


def normmax_product(v: Tensor, p: Tensor, c: float | Tensor) -> Tensor:
    """J v of α-normmax given its result p."""
    return _product(rows.normmax_product, v, p, c)


def _product(kernel: Any, v: Tensor, p: Tensor, c: float | Tensor) -> Tensor:
    q, w = _rows(p), _rows(v)
    out = torch.empty_like(q)
    over_rows(kernel, *_size(q), q.numpy(), _powers(c, q), w.numpy(), out.numpy())
    return out.reshape(p.shape)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]).contiguous()


def _size(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.numel()


def _powers(c: float | Tensor, x: Tensor) -> Any:
    if isinstance(c, Tensor):
        return c.detach().to(x.dtype).reshape(-1).contiguous().numpy()
    return np.full(x.shape[0], c, dtype=x.numpy().dtype)
