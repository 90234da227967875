"""Compiled loops on plain arrays; knows nothing of Ω, autograd or modules.

``import fenchel`` compiles nothing and does not import Numba; the first call that can use a kernel does, and the result
is cached on disk. ``FENCHEL_KERNELS=off`` keeps everything on the torch path.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

SWITCH = "FENCHEL_KERNELS"
"""The environment variable that turns the kernels off."""

_PLAIN = (Tensor, torch.nn.Parameter)


def usable(*tensors: Tensor) -> bool:
    """Whether compiled kernels may work on these tensors: real float32 or float64 data on the CPU."""
    return os.environ.get(SWITCH, "on") != "off" and all(
        type(t) in _PLAIN
        and t.device.type == "cpu"
        and t.dtype in (torch.float32, torch.float64)
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and not torch._C._functorch.is_legacy_batchedtensor(t)
        for t in tensors
    )
