"""Installations and devices without Triton take torch operations; so does a kernel that fails, which says so once."""

import subprocess
import sys
from importlib.metadata import requires

import pytest
import torch

_BLOCKED = """
import os, sys, warnings
os.environ["FENCHEL_KERNELS"] = "triton"  # whatever kernels for devices there are would serve tensors of the CPU
sys.modules["triton"] = None
warnings.simplefilter("error")
import torch, fenchel
from fenchel.kernels import table

assert not any(str(row.kernel).startswith("gpu.") for rows in table._table.values() for row in rows)
for device in ("cuda", "mps", "xpu"):
    assert not any(row.device == device for rows in table._table.values() for row in rows)
with fenchel.kernels.enabled(False):
    scores = torch.randn(3, 6, requires_grad=True)
    fenchel.entmax(scores, 1.5).square().sum().backward()
    fenchel.entmax_loss(scores, torch.tensor([0, 1, 2])).backward()
    fenchel.k_subsets(scores, 2)
    fenchel.attention(*torch.randn(3, 1, 1, 5, 4))
assert not [name for name in sys.modules if name.startswith("fenchel.kernels.gpu")]
"""

_BROKEN = """
import os, sys, types, warnings, importlib.machinery
os.environ["FENCHEL_KERNELS"] = "triton"
broken = types.ModuleType("triton")  # as of a release that is too old, or of another platform
broken.__spec__ = importlib.machinery.ModuleSpec("triton", None)
sys.modules["triton"] = broken
import torch, fenchel

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        p = fenchel.entmax(torch.tensor([[1.0, 0.5, -1.0]]), 2.0)
        fenchel.k_subsets(torch.randn(3, 6), 2)
torch.testing.assert_close(p, torch.tensor([[0.75, 0.25, 0.0]]))
assert ["cannot be imported" in str(each.message) for each in said] == [True], said
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_installation_without_triton_is_silent() -> None:
    run(_BLOCKED)


def test_a_triton_that_cannot_be_imported_is_said_once() -> None:
    run(_BROKEN)


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu"])
def test_devices_that_triton_does_not_serve_have_no_kernels(device: str) -> None:
    from fenchel.kernels import table

    assert not any(row.device == device for rows in table._table.values() for row in rows)
    assert {row.device for rows in table._table.values() for row in rows} <= {"cpu", "cuda"}
    assert not table.offers("argmax", "tsallis", torch.empty(2, 3, device="meta"))


def test_the_library_itself_does_not_require_triton() -> None:
    needed = [each for each in requires("fenchel") or [] if each.startswith("triton")]
    assert needed
    assert all('extra == "dev"' in each or "extra == 'dev'" in each for each in needed)
