"""The library against the published test vectors, by kernels and by the torch path."""

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch

import fenchel

FOLDER = Path(__file__).parent / "vectors"


def _cases(name: str) -> list[Any]:
    cases = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    return [pytest.param(case, id=f"{case['name']}, {case.get('alpha', '')}") for case in cases]


def _row(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([float(v) for v in values], dtype=dtype)


@pytest.fixture(params=["kernels", "torch path"])
def path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    if request.param == "torch path":
        set_kernels(False)


@pytest.mark.parametrize("name", ["sparsemax", "entmax", "half_precision", "entmax_loss"])
def test_the_answers_are_what_the_script_computes(name: str) -> None:
    """Every eleventh case: all of them take a minute."""
    digits = mpmath.mp.dps
    generate: Any = runpy.run_path(str(FOLDER / "generate.py"))
    for case in json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"][::11]:
        row, alpha = [float(s) for s in case["scores"]], float(case.get("alpha", 2))
        if name == "entmax_loss":
            loss, gradient = generate["entmax_loss"](row, case["target"], alpha)
            assert case["loss"] == float(loss)
            assert case["gradient"] == [float(g) for g in gradient]
        elif name == "sparsemax":
            assert case["exact"] == [str(x) for x in generate["sparsemax"](row)]
        else:
            assert case["expected"] == [float(x) for x in generate["entmax"](row, alpha)]
    assert mpmath.mp.dps == digits  # or every other test that uses mpmath would take many times as long


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", _cases("sparsemax"))
@pytest.mark.usefixtures("path")
def test_sparsemax_gives_the_published_answer(case: Any, dtype: torch.dtype) -> None:
    expected = _row(case["expected"], torch.float64)
    found = fenchel.sparsemax(_row(case["scores"], dtype))
    torch.testing.assert_close(found.double(), expected, atol=2 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", _cases("entmax"))
@pytest.mark.usefixtures("path")
def test_entmax_gives_the_published_answer(case: Any, dtype: torch.dtype) -> None:
    scores, alpha = _row(case["scores"], dtype), float(case["alpha"])
    expected = _row(case["expected"], torch.float64)
    for given in (alpha, torch.tensor([alpha], dtype=dtype)):
        found = fenchel.entmax(scores, given)
        torch.testing.assert_close(found.double(), expected, atol=8 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", _cases("half_precision"))
@pytest.mark.usefixtures("path")
def test_half_precision_rounds_the_published_answer(case: Any, dtype: torch.dtype) -> None:
    found = fenchel.entmax(_row(case["scores"], dtype), case["alpha"])
    assert found.dtype == dtype
    torch.testing.assert_close(found, _row(case["expected"], torch.float64).to(dtype), atol=1e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", _cases("entmax_loss"))
@pytest.mark.usefixtures("path")
def test_the_loss_and_its_gradient_are_the_published_ones(case: Any, dtype: torch.dtype) -> None:
    scores = _row(case["scores"], dtype).requires_grad_()
    loss = fenchel.entmax_loss(scores, torch.tensor(case["target"]), case["alpha"])
    loss.backward()
    spread = max(abs(s) for s in scores.tolist() if math.isfinite(s)) + 1
    eps = torch.finfo(dtype).eps
    assert abs(loss.item() - case["loss"]) <= 4 * eps * max(spread, case["loss"])
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad.double(), _row(case["gradient"], torch.float64), atol=8 * eps, rtol=0)
