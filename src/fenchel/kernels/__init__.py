"""Compiled loops on plain arrays; knows nothing of Ω, autograd or modules.

``import fenchel`` compiles nothing and does not import Numba; the first call that can use a kernel does, and the result
is cached on disk. ``FENCHEL_KERNELS=off`` keeps everything on the torch path.
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

_ASKED = os.environ.get("FENCHEL_KERNELS", "on")
if _ASKED not in ("on", "off"):
    warnings.warn(f"FENCHEL_KERNELS must be 'on' or 'off', got {_ASKED!r}: taken as 'on'", stacklevel=2)

ENABLED = _ASKED != "off"
"""Whether kernels may be used at all."""

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_FLOATS = (torch.float32, torch.float64)
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_batched = torch._C._functorch.is_legacy_batchedtensor


def concrete(*tensors: Tensor) -> bool:
    """Whether tensors hold data that may be looked at: nothing is traced or mapped, and none is fake.

    Raises a RuntimeError if the memory of one was freed: compiled code, and some of torch's own, would crash.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_tracing_state() is not None or _get_current_dispatch_mode() is not None:
        return False
    for t in tensors:
        if type(t) not in _PLAIN or t.is_meta or t.is_neg() or _wrapped(t) or _batched(t):
            return False
        try:
            if not t.untyped_storage().nbytes() and t.numel():
                raise RuntimeError(
                    f"a tensor of shape {tuple(t.shape)} holds no data: its storage has been freed (resized to 0 bytes)"
                )
        except NotImplementedError:  # sparse and other layouts have no such storage
            return False
    return True


def readable(*tensors: Tensor) -> bool:
    """Whether Python code may depend on the values of tensors, whatever their class and whoever watches them.

    More than ``concrete``: data in subclasses, or seen by a dispatch mode that computes, cannot be handed to kernels,
    but torch's own operations give values that can be read. Those of fake tensors and of traces cannot.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if hasattr(_get_current_dispatch_mode(), "_mode_key"):  # torch's own modes: fake, proxy, functional
        return False
    return not any(t.is_meta or _wrapped(t) or _batched(t) or hasattr(type(t), "_mode_key") for t in tensors)


def plain(tensor: Tensor) -> bool:
    """Whether a tensor is data for kernels and nothing else: no derivative and no transformation looks at it."""
    return (
        ENABLED
        and type(tensor) is Tensor
        and tensor.dtype in _FLOATS
        and tensor.is_cpu
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and concrete(tensor)
    )


def usable(*tensors: Tensor) -> bool:
    """Whether compiled kernels may work on these tensors: concrete float32 or float64 data on the CPU."""
    for t in tensors:
        if t.dtype not in _FLOATS:
            return False
    return reachable(*tensors)


def reachable(*tensors: Tensor) -> bool:
    """Whether kernels may work on what these tensors hold, once it is in a precision of theirs."""
    if not ENABLED:
        return False
    for t in tensors:
        if not t.is_cpu:
            return False
    return concrete(*tensors)
