"""Compiled bounds and budgets: they agree with the torch path and with sorting, on every kind of row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.maps import bounded
from fenchel.regularizers.bounded import BOUNDED_GINI, BOUNDED_SHANNON
from fenchel.regularizers.solvers.thresholds import capped_projection

PRODUCTS = {
    "bounded_gini": (bounded.product, bounded.pull),
    "bounded_shannon": (bounded.entropic_product, bounded.entropic_pull),
}
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-7}


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, float | Tensor, float]:
    """Rows of any width and scale, bounds, and a budget that they can carry."""
    width = draw(st.sampled_from([1, 2, 7, 31, 32, 33, 64, 65, 130, 512, 700, 1500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(3, width, generator=generator, dtype=torch.float64)
    noise = torch.rand(3, width, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "ties", "log", "masked", "wide", "huge"]))
    if kind == "ties":
        scores = scores.round()
    elif kind == "log":
        scores = -torch.exp(60 * noise - 30)
    elif kind == "masked":
        scores[:, 1:][scores[:, 1:] < 0.3] = -torch.inf
    else:
        scores = scores * {"normal": 1.0, "wide": 300.0, "huge": 1e30}[kind]
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    bounds = draw(st.sampled_from(["none", "small", "steep"]))
    if bounds == "none":
        return scores.to(dtype), 1.0, draw(st.sampled_from([0.5, 1.0, 2.5, width / 16 + 1, width / 2, 2.0 * width]))
    upper = (4 * noise + 0.5) / width if bounds == "small" else noise**8
    return scores.to(dtype), upper.to(dtype), 1.0


def plain(scores: Tensor, upper: float | Tensor, budget: float) -> Tensor:
    bound = upper.clamp_max(budget) if isinstance(upper, Tensor) else torch.full_like(scores, upper)
    return capped_projection(scores, torch.where(scores == -torch.inf, 0.0, bound), budget)


@given(problem=problems())
def test_forward_agrees_with_the_torch_path(problem: tuple[Tensor, float | Tensor, float]) -> None:
    scores, upper, budget = problem
    p = bounded.project(scores, upper, budget)
    expected = plain(scores.double(), upper.double() if isinstance(upper, Tensor) else upper, budget)
    assert p.dtype == scores.dtype
    assert torch.allclose(p.double(), expected, atol=TOLERANCE[scores.dtype], rtol=0)
    each = bounded.project(scores, upper, torch.full((3, 1), budget, dtype=scores.dtype))
    if budget == float(torch.tensor(budget, dtype=scores.dtype)):
        assert torch.equal(each, p)


sorted_projection = kernel(bounded._sorted_projection.py_func)  # Python cannot call a helper of kernels


@given(problem=problems())
def test_sorting_agrees_with_the_torch_path(problem: tuple[Tensor, float | Tensor, float]) -> None:
    scores, upper, budget = problem
    bound = upper if isinstance(upper, Tensor) else torch.full_like(scores, upper)
    out = torch.empty_like(scores)
    for i in range(3):
        sorted_projection(scores[i].numpy(), bound[i].numpy(), budget, out[i].numpy())
    expected = plain(scores.double(), upper.double() if isinstance(upper, Tensor) else upper, budget)
    assert torch.allclose(out.double(), expected, atol=TOLERANCE[scores.dtype], rtol=0)


@given(problem=problems(), seed=st.integers(0, 1000))
def test_products_agree_with_the_torch_path(problem: tuple[Tensor, float | Tensor, float], seed: int) -> None:
    scores, upper, budget = problem
    for rules in (BOUNDED_GINI, BOUNDED_SHANNON):
        p = rules.solve_any(scores, upper, budget)
        v = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
        expected = rules.pull(v, scores, p, upper, budget)
        product, pull = PRODUCTS[rules.name]
        for mine, theirs in zip(pull(v, scores, p, upper, budget), expected, strict=True):
            assert torch.allclose(mine, theirs, atol=20 * TOLERANCE[p.dtype])
        assert torch.allclose(product(v, None, p, upper, budget), expected[0], atol=20 * TOLERANCE[p.dtype])


@given(problem=problems())
def test_a_capped_softmax_agrees_with_the_torch_path(problem: tuple[Tensor, float | Tensor, float]) -> None:
    scores, upper, _ = problem
    p = BOUNDED_SHANNON.solve_any(scores, upper, 1.0)
    expected = BOUNDED_SHANNON.solve_plainly(
        scores.double(), upper.double() if isinstance(upper, Tensor) else upper, 1.0
    )
    assert torch.allclose(p.double(), expected, atol=TOLERANCE[scores.dtype], rtol=0)


def test_rows_are_the_same_to_the_bit_whatever_the_threads_and_the_batch() -> None:
    for width in (64, 2000):
        scores, v = torch.randn(301, width), torch.randn(301, width)
        for upper, budget in ((1.0, width / 16), ((4 * torch.rand(301, width) + 0.5) / width, 1.0)):
            results = []
            before = torch.get_num_threads()
            try:
                for threads in (1, 2, 3, 7):
                    torch.set_num_threads(threads)
                    p = bounded.project(scores, upper, budget)
                    results.append(
                        torch.cat(
                            [
                                p,
                                *bounded.pull(v, scores, p, upper, budget)[:2],
                                bounded.product(v, None, p, upper, budget),
                            ]
                        )
                    )
            finally:
                torch.set_num_threads(before)
            assert all(torch.equal(r, results[0]) for r in results)
            for i in range(0, 301, 50):
                alone = bounded.project(
                    scores[i : i + 1], upper[i : i + 1] if isinstance(upper, Tensor) else upper, budget
                )
                assert torch.equal(alone[0], results[0][i])


def test_what_comes_back_off_the_free_entries_does_not_matter() -> None:
    for width in (5, 700):
        p = bounded.project(4 * torch.randn(4, width), 1.0, 2.0)
        v = torch.randn_like(p)
        spoilt = torch.where((p > 0) & (p < 1), v, torch.nan)
        for product in (bounded.product, bounded.entropic_product):
            assert torch.equal(product(spoilt, None, p, 1.0, 2.0), product(v, None, p, 1.0, 2.0))


def test_room_is_what_is_not_masked() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, 1.0, 2.0], [-torch.inf] * 3])
    upper = torch.tensor([0.25, -1.0, 0.5])
    wrong, total = bounded.bound_sums(scores, upper.expand(3, 3))
    np.testing.assert_allclose(wrong.numpy(), [0, 1, 0])  # negative where it is masked does not matter
    np.testing.assert_allclose(total.numpy(), [0.75, -0.25, 0.0])
    wrong, _ = bounded.bound_sums(scores, torch.tensor([0.25, torch.nan, 0.5]).expand(3, 3))
    assert wrong.tolist() == [0, 1, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_spoilt_row_is_nan_in_every_derivative(bad: float) -> None:
    scores = torch.randn(3, 40)
    scores[1, 7] = bad
    p = bounded.project(scores, 1.0, 3.0)
    assert p.isnan().any(-1).tolist() == [False, True, False]
    v = torch.randn(3, 40)
    for part in (*bounded.pull(v, scores, p, 1.0, 3.0), bounded.product(v, None, p, 1.0, 3.0)):
        assert part[1].isnan().all()
        assert part[[0, 2]].isfinite().all()
