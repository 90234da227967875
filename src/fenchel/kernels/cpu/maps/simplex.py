"""Row-wise maps on tensors: lay out rows, choose the kernel, share the rows among threads."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.maps import products, rows, values
from fenchel.kernels.cpu.maps.blocks import NARROW_WIDTH
from fenchel.kernels.cpu.maps.parameters import SOFTMAX, SQUARES, WITHOUT_POWERS
from fenchel.kernels.cpu.threads import SERIAL, entry_point, over_rows

_LIKE: dict[torch.dtype, np.ndarray[Any, Any]] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}

_NO_CLASSES = np.empty(0, np.int64)

# A map and its loss.
_NARROW = rows.argmax_of_narrow, rows.loss_of_narrow
_WIDE = rows.argmax_of_wide, rows.loss_of_wide
_STEEP_NARROW = rows.steep_argmax_of_narrow, rows.steep_loss_of_narrow
_STEEP_WIDE = rows.steep_argmax_of_wide, rows.steep_loss_of_wide

# What a small entmax calls: compiled code by alpha, dtype and whether rows are narrow, and its last arguments.
_small: dict[tuple[Parameter, torch.dtype, bool], tuple[Any, ...]] = {}
_MANY = 1 << 10

Parameter = float | Tensor


def _kernels(z: Tensor) -> tuple[Any, Any]:
    return _NARROW if z.shape[-1] <= NARROW_WIDTH else _WIDE


def _steep_kernels(z: Tensor) -> tuple[Any, Any]:
    return _STEEP_NARROW if z.shape[-1] <= NARROW_WIDTH else _STEEP_WIDE


def entmax(z: Tensor, alpha: Parameter) -> Tensor:
    """α-entmax along the last dimension; a number, or one value per row."""
    size, n = z.numel(), z.shape[-1]
    if size < SERIAL and type(alpha) is float:  # the time of a small call is that of its Python lines
        found = _small.get((alpha, z.dtype, n <= NARROW_WIDTH))
        if found is not None and size and z.is_contiguous():
            out = torch.empty_like(z)
            entry, powers, dtype = found
            entry(0, size // n, z.data_ptr(), out.data_ptr(), size, n, 0, powers, dtype)
            return out
    if type(alpha) is float and alpha == 1:
        return _softmax(z)
    if type(alpha) is float and alpha > 2:
        return _map([_steep_kernels(z)[0]], z, alpha, False)
    kernel = _NARROW[0] if n <= NARROW_WIDTH else _WIDE[0]
    p = _map([kernel, _STEEP_WIDE[0]] if has_steep(alpha - 1) else [kernel], z, alpha, False)
    key = alpha, z.dtype, n <= NARROW_WIDTH
    if size < SERIAL and type(alpha) is float and key not in _small and len(_small) < _MANY:
        rest = parameters(alpha - 1, False), _LIKE[z.dtype]
        _small[key] = entry_point(kernel, 0, 0, 0, 0, 0, 0, 0, *rest), *rest
    return p


def normmax(z: Tensor, alpha: Parameter) -> Tensor:
    """α-normmax along the last dimension; a number, or one value per row."""
    return _map([_kernels(z)[0]], z, alpha, True)


def entmax_product(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> Tensor:
    """J v of α-entmax given its result p."""
    c = alpha - 1
    if _is_steep(c):
        return _product([products.steep_entmax_product], v, p, c, False)
    steep = [products.steep_entmax_product] if has_steep(c) else []
    return _product([products.entmax_product, *steep], v, p, c, False)


def entmax_pull(v: Tensor, z: Any, p: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """J v of α-entmax given its result p, and ⟨v, ∂p/∂α⟩, one value per row, dimension kept."""
    q = as_rows(p)
    out = torch.empty((*p.shape[:-1], 1), dtype=p.dtype, device="cpu")
    c = parameters(alpha - 1, False)
    over_rows(products.entmax_alpha, q.shape[0], q.size, q, c, as_rows(v), out.numpy().reshape(-1))
    return entmax_product(v, z, p, alpha), out


def normmax_product(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> Tensor:
    """J v of α-normmax given its result p."""
    return _product([products.normmax_product], v, p, alpha - 1, True)


def entmax_loss(z: Tensor, index: Tensor, residual: float, alpha: Parameter) -> tuple[Tensor, Tensor]:
    """The loss of rows with class indices and residual·(p − y), its gradient at 1; an empty tensor for 0."""
    c = alpha - 1
    if type(c) is float and c == 0:
        return _cross_entropy(z, index, residual)
    if _is_steep(c):
        return _loss([_steep_kernels(z)[1]], z, index, c, residual, False)
    kernels = [_kernels(z)[1], _STEEP_WIDE[1]] if has_steep(c) else [_kernels(z)[1]]
    return _loss(kernels, z, index, c, residual, False)


def entmax_value(p: Tensor, alpha: Parameter) -> Tensor:
    """Ω of rows, one value per row."""
    return _value(p, p.new_empty(0, p.shape[-1]), alpha)


def entmax_max(z: Tensor, p: Tensor, alpha: Parameter) -> Tensor:
    """max_Ω of rows z whose argmax is p, one value per row."""
    return _value(p, z, alpha)


def entmax_given(z: Tensor, p: Tensor, target: Tensor, alpha: Parameter) -> Tensor:
    """The losses of targets, given p = argmax_Ω(z): of probabilities, where p becomes p − target, or of classes."""
    q, out = as_rows(p), torch.empty(p.shape[:-1], dtype=p.dtype, device="cpu")
    soft = target.is_floating_point()
    y = as_rows(target) if soft else np.empty((0, q.shape[1]), q.dtype)
    index = _NO_CLASSES if soft else target.contiguous().numpy().reshape(-1)
    rest = as_rows(z), y, index, each(alpha - 1, len(q)), out.numpy().reshape(-1)
    over_rows(values.entmax_losses, len(q), q.size, q, *rest)
    return out


def _value(p: Tensor, z: Tensor, alpha: Parameter) -> Tensor:
    q, out = as_rows(p), torch.empty(p.shape[:-1], dtype=p.dtype, device="cpu")
    rest = as_rows(z), each(alpha - 1, len(q)), out.numpy().reshape(-1)
    over_rows(values.entmax_value, len(q), q.size, q, *rest)
    return out


def entmax_envelope(p: Tensor, alpha: Parameter) -> Tensor:
    """The derivative of max_Ω in α where its argmax is p, one value per row, dimension kept."""
    q, out = as_rows(p), torch.empty((*p.shape[:-1], 1), dtype=p.dtype, device="cpu")
    rest = each(alpha - 1, len(q)), out.numpy().reshape(-1)
    over_rows(values.entmax_envelope, len(q), q.size, q, *rest)
    return out


def normmax_loss(z: Tensor, index: Tensor, residual: float, alpha: Parameter) -> tuple[Tensor, Tensor]:
    """As ``entmax_loss`` for normmax."""
    return _loss([_kernels(z)[1]], z, index, alpha - 1, residual, True)


def _softmax(z: Tensor) -> Tensor:
    p = torch.softmax(z, -1)
    first = p[..., :1]
    if bool(first.isnan().any()):  # also where all scores are −inf, and nothing is chosen
        p = torch.where(z.amax(-1, keepdim=True) == -torch.inf, 0.0, p)
    return p


def _cross_entropy(z: Tensor, index: Tensor, residual: float) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax(z, -1)
    place = index.clamp_min(0).unsqueeze(-1)
    kept = (index >= 0).unsqueeze(-1)
    loss = -logs.gather(-1, place)
    hit = z.gather(-1, place) > -torch.inf
    regular = bool((kept & hit & loss.isfinite()).all())
    if not regular:  # targets that are left out or impossible, rows with NaN or infinity
        top = z.amax(-1, keepdim=True)
        loss = torch.where(hit, loss, torch.where(top < torch.inf, torch.inf, torch.nan))
        loss = torch.where(kept, loss, 0.0)
        hit = hit & kept
    if not residual:
        return loss.squeeze(-1), z.new_empty(0, z.shape[-1])
    p = logs.exp_() if regular else torch.where(kept, _softmax(z), 0.0)
    p = p.scatter_add_(-1, place, -hit.to(p.dtype))
    return loss.squeeze(-1), p if residual == 1 else p.mul_(residual)


def _is_steep(c: Parameter) -> bool:
    return not isinstance(c, Tensor) and c > 1


def has_steep(c: Parameter) -> bool:
    """Whether some rows have a c > 1 of their own: further kernels take these."""
    return isinstance(c, Tensor) and bool((c > 1).any())


def _loss(
    kernels: list[Any], z: Tensor, index: Tensor, c: Parameter, residual: float, norm: bool
) -> tuple[Tensor, Tensor]:
    x = z if z.is_contiguous() else z.contiguous()
    size, n = x.numel(), x.shape[-1]
    loss = torch.empty(z.shape[:-1], dtype=z.dtype, device="cpu")
    out = torch.empty_like(x) if residual else z.new_empty(0, n)
    if size:
        target = index.contiguous().numpy().reshape(-1)
        addresses = x.data_ptr(), loss.data_ptr(), out.data_ptr() if residual else 0
        rest = size, n, int(norm), parameters(c, norm), target, np.array([residual], _LIKE[x.dtype].dtype)
        for kernel in kernels:
            over_rows(kernel, size // n, size, *addresses, *rest)
    return loss, out


def _map(kernels: list[Any], z: Tensor, alpha: Parameter, norm: bool) -> Tensor:
    x = z if z.is_contiguous() else z.contiguous()
    out, size = torch.empty_like(x), x.numel()
    if size:
        n = x.shape[-1]
        powers = parameters(alpha - 1, norm)
        for kernel in kernels:
            over_rows(kernel, size // n, size, x.data_ptr(), out.data_ptr(), size, n, int(norm), powers, _LIKE[x.dtype])
    return out


def _product(kernels: list[Any], v: Tensor, p: Tensor, c: Parameter, norm: bool) -> Tensor:
    p, v = p if p.is_contiguous() else p.contiguous(), v if v.is_contiguous() else v.contiguous()
    out, size = torch.empty_like(p), p.numel()
    if size:
        n = p.shape[-1]
        powers = SOFTMAX if type(c) is float and c == 0 and not norm else parameters(c, norm)
        arguments = p.data_ptr(), v.data_ptr(), out.data_ptr(), size, n, powers, _LIKE[p.dtype]
        for kernel in kernels:
            over_rows(kernel, size // n, size, *arguments)
    return out


def parameters(c: float | Tensor, norm: bool) -> np.ndarray[Any, Any]:
    """c for kernels: one number for all rows, or one per row."""
    if isinstance(c, Tensor):
        return np.asarray(c.detach().double().reshape(-1).contiguous().numpy())
    return _single(c, norm)


def parameters_of_rows(c: float | Tensor) -> np.ndarray[Any, Any]:
    """c of entmax, as one number where all rows have the same."""
    if isinstance(c, Tensor):
        low, high = map(float, c.aminmax())
        if low < high:
            return parameters(c, False)
        c = low
    return parameters(c, False)


@lru_cache
def _single(c: float, norm: bool) -> np.ndarray[Any, Any]:
    if c == (math.inf if norm else 1.0):
        return np.empty(0, WITHOUT_POWERS)
    if c == (1.0 if norm else 0.5):
        return np.array([1 if norm else 2], SQUARES)
    return np.array([c], np.float64)


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


def each(value: float | Tensor, rows: int) -> np.ndarray[Any, Any]:
    """A parameter in double precision, one value per row."""
    if isinstance(value, Tensor):
        values = np.asarray(value.detach().double().reshape(-1).contiguous().numpy())
        if len(values) != rows:  # or a kernel would read what is not there
            raise ValueError(f"a parameter must have one value per row, {rows}, got {len(values)}")
        return values
    return np.full(rows, value, dtype=np.float64)
