"""Importing costs little: what is slow to load waits for the first who needs it."""

import subprocess
import sys

EAGER = """
import sys, torch, fenchel
slow = {"torch._dynamo", "numba", "llvmlite", "scipy", "matplotlib"}
assert not slow & set(sys.modules), slow & set(sys.modules)
fenchel.Custom(lambda p: 0.5 * (p * p).sum(-1)).argmax(torch.zeros(2, 3))
fenchel.tvmax2d(torch.zeros(2, 2))
assert "torch._dynamo" not in sys.modules
omega = fenchel.Custom(lambda p: 0.5 * (p * p).sum(-1))
broken = torch.compile(lambda s: 2 * omega.argmax(3 * s), backend="eager")
assert torch.equal(broken(torch.eye(3)), 2 * torch.eye(3))  # also when the compiler comes later
"""


def test_neither_import_nor_an_eager_call_loads_a_compiler() -> None:
    subprocess.run([sys.executable, "-c", EAGER], check=True)
