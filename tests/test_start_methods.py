"""Fresh processes and systems without fork, as on macOS and Windows: kernels are found, and results are the same."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fenchel

HERE = Path(__file__).parent


def scores(seed: int) -> torch.Tensor:
    return torch.randn(8, 100, generator=torch.Generator().manual_seed(seed))


class Choices(Dataset[torch.Tensor]):
    """Rows of 1.5-entmax, computed in the process that loads them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return fenchel.entmax(scores(index), 1.5)


def run_pytest(arguments: list[str]) -> int:
    return int(pytest.main(arguments))


def test_the_suite_starts_in_a_spawned_process() -> None:
    """Neither set-up nor tests need what a forked process would have inherited."""
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(HERE.parent)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        code = pool.apply_async(run_pytest, ([*quiet, str(HERE / "test_checks.py")],)).get(timeout=120)
    assert code == 0


def test_workers_that_are_spawned_give_the_same_rows() -> None:
    loader = DataLoader(Choices(), batch_size=None, num_workers=1, multiprocessing_context="spawn", timeout=120)
    for index, rows in enumerate(loader):
        assert torch.equal(rows, fenchel.entmax(scores(index), 1.5))


WITHOUT_POSIX = """
import os, sys
import numba, torch  # these ask for the system themselves
sys.modules["fcntl"] = None  # as on Windows: no locks among processes ...
del os.register_at_fork, os.fork  # ... and no fork
import fenchel
p = fenchel.entmax(torch.tensor([[2.0, 1.4, 0.2]], requires_grad=True), 1.5)
p[0, 0].backward()
fenchel.warmup("losses")
print(p.tolist())
"""


def test_nothing_needs_locks_or_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_POSIX], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(fenchel.entmax(torch.tensor([[2.0, 1.4, 0.2]]), 1.5).tolist())
