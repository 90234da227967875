"""Compiled loops on plain arrays; knows nothing of Ω, autograd or modules.

``import fenchel`` compiles nothing and does not import Numba; the first call that can use a kernel does, and the result
is cached on disk. ``FENCHEL_KERNELS=off`` keeps everything on the torch path.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

SWITCH = "FENCHEL_KERNELS"
"""The environment variable that turns the kernels off."""

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def concrete(*tensors: Tensor) -> bool:
    """Whether tensors hold data that may be looked at: nothing is traced or mapped, and none is fake."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_tracing_state() is not None or _get_current_dispatch_mode() is not None:
        return False
    return all(
        type(t) in _PLAIN
        and not t.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and not torch._C._functorch.is_legacy_batchedtensor(t)
        for t in tensors
    )


def usable(*tensors: Tensor) -> bool:
    """Whether compiled kernels may work on these tensors: concrete float32 or float64 data on the CPU."""
    return (
        os.environ.get(SWITCH, "on") != "off"
        and all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) for t in tensors)
        and concrete(*tensors)
    )
