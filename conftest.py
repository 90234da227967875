"""Shared set-up: reproducible, unhurried hypothesis, one thread per test process."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

os.environ.setdefault("FENCHEL_KERNELS", "wait")  # before fenchel is imported: results come from kernels alone
hypothesis.settings.register_profile("default", deadline=None, max_examples=12, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without searching for garbage, now or later, among the million objects that modules consist of."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
