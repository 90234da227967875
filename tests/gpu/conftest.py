"""These tests run the kernels for GPUs in Triton's interpreter, in a process of their own: see ``make test-triton``."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("FENCHEL_KERNELS") == "triton" else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.triton)
