"""Kernels of the grouping maps: they agree with the torch path, whatever the threads; and the sort that they use."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fenchel import Fused, Oscar
from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.maps import fused, grid, oscar
from fenchel.regularizers.total_variation import GRID

KERNELS = {"fused": fused, "oscar": oscar, "grid": grid}
RULES = {"fused": Fused.rule, "oscar": Oscar.rule}
TOLERANCE = {torch.float64: 1e-14, torch.float32: 3e-7}
sort = kernel(oscar._sort.py_func)  # Python cannot call a helper of kernels
every_kernel = pytest.mark.parametrize("name", RULES)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Rows of any width and scale, with ties, plateaus and masked entries."""
    width = draw(st.sampled_from([1, 2, 3, 7, 31, 32, 33, 64, 65, 200, 513]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randn(3, width, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "ties", "masked", "sparse", "walk"]))
    if kind == "ties":
        scores = scores.round()
    elif kind in ("masked", "sparse"):
        scores[scores > (0.5 if kind == "masked" else -1.0)] = -torch.inf
    elif kind == "walk":
        scores = 0.1 * scores.cumsum(-1)
    scale = draw(st.sampled_from([1e-2, 0.3, 1.0, 20.0]))
    return (scale * scores).to(draw(st.sampled_from([torch.float32, torch.float64])))


def plain(name: str, scores: Tensor, strength: float) -> Tensor:
    """The torch path, in double precision."""
    top = scores.amax(-1, keepdim=True)
    empty = top == -torch.inf
    shifted = torch.where(empty, 0.0, scores.double() - torch.where(empty, 0.0, top))
    return torch.where(empty, 0.0, RULES[name].solve(shifted, strength))


@every_kernel
@given(scores=rows(), strength=st.sampled_from([0.0, 1e-3, 0.02, 0.1, 1.0, 50.0]), seed=st.integers(0, 1000))
def test_forward_and_product_agree_with_the_torch_path(name: str, scores: Tensor, strength: float, seed: int) -> None:
    p = getattr(KERNELS[name], name)(scores, strength)
    expected = plain(name, scores, strength)
    assert p.dtype == scores.dtype
    assert torch.allclose(p.double(), expected, atol=TOLERANCE[scores.dtype] * max(1, strength), rtol=0)
    assert not p.signbit().any()
    each = torch.full((3, 1), strength, dtype=torch.float64)
    assert torch.equal(getattr(KERNELS[name], name)(scores, each), p)

    v = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype)
    product = getattr(KERNELS[name], f"{name}_product")(v, scores, p, strength)
    exact = RULES[name].product(v.double(), scores.double(), p.double(), strength)
    assert torch.allclose(product.double(), exact, atol=20 * TOLERANCE[scores.dtype], rtol=0)
    assert (product[p == 0] == 0).all()


@pytest.mark.parametrize("name", ["fused", "oscar", "grid"])
def test_rows_are_the_same_to_the_bit_whatever_the_threads_and_the_batch(name: str) -> None:
    shape = (12,) if name == "grid" else ()
    choose, product = getattr(KERNELS[name], name), getattr(KERNELS[name], f"{name}_product")
    for strength in (0.1, 0.005):
        scores, v = 0.5 * torch.randn(301, 144), torch.randn(301, 144)
        results = []
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                p = choose(scores, strength, *shape)
                results.append(torch.stack([p, product(v, scores, p, strength, *shape)]))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(r, results[0]) for r in results)
        alone = torch.cat([choose(scores[i : i + 1], strength, *shape) for i in range(0, 301, 50)])
        assert torch.equal(alone, results[0][0][::50])


@pytest.mark.parametrize("name", ["fused", "oscar", "grid"])
def test_what_comes_back_off_the_support_does_not_matter(name: str) -> None:
    shape = (8,) if name == "grid" else ()
    z = 4 * torch.randn(4, 64)
    p = getattr(KERNELS[name], name)(z, 0.01, *shape)
    v = torch.randn_like(p)
    product = getattr(KERNELS[name], f"{name}_product")
    hidden = torch.where(p == 0, torch.nan, v)
    assert torch.equal(product(hidden, z, p, 0.01, *shape), product(v, z, p, 0.01, *shape))


@pytest.mark.parametrize("size", [1, 2, 16, 17, 40, 48, 49, 100, 1000, 2048, 5000])
def test_numbers_are_sorted(size: int) -> None:
    generator = np.random.default_rng(size)
    for dtype in (np.float32, np.float64):
        numbers = (generator.normal(size=size) * 10.0 ** generator.integers(-30, 30, size=size)).astype(dtype)
        numbers[generator.random(size) < 0.1] = 0
        work = [np.empty(size, np.uint32), np.empty(size, np.uint32), np.empty(3 << 11, np.int32)]
        found = numbers.copy()
        sort(found, size, np.empty_like(found), *work)
        assert np.array_equal(found, np.sort(numbers))


@pytest.mark.parametrize(("height", "width"), [(14, 14), (8, 9), (1, 70), (70, 1), (17, 21)])
@pytest.mark.parametrize("kind", ["normal", "flat", "ties", "masked", "walk", "peak"])
def test_grids_with_excluded_entries_agree_with_the_torch_path(height: int, width: int, kind: str) -> None:
    scores = torch.randn(2, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if kind == "flat":
        scores *= 1e-3
    elif kind == "ties":
        scores = (2 * scores).round() / 2
    elif kind == "masked":
        scores[scores > 0.5] = -torch.inf
    elif kind == "walk":
        scores = 0.2 * scores.cumsum(-1).cumsum(-2)
    elif kind == "peak":
        scores[:, 0, 0] += 20
    rows = scores.flatten(1)
    for strength in (0.1, 0.6, 1.0, 30.0):
        p = grid.grid(rows, strength, width)
        top = rows.amax(-1, keepdim=True)
        expected = GRID.solve(rows - top, strength, float(width))
        assert torch.allclose(p, expected, atol=1e-13 * max(1, strength), rtol=0)
        single = grid.grid(rows.float(), strength, width)
        assert torch.allclose(single.double(), expected, atol=3e-7 * max(1, strength), rtol=0)


@pytest.mark.parametrize("kind", ["normal", "ties", "masked"])
@pytest.mark.parametrize("name", ["fused", "oscar", "grid"])
def test_losses_of_classes_are_those_of_one_hot_targets(name: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    for n, strength in ((1, 0.3), (12, 0.02), (12, 0.3), (12, 50.0), (144, 0.1), (144, 2.0)):
        scores = torch.randn(16, n, generator=generator, dtype=torch.float64)
        if kind == "ties":
            scores = scores.round()
        elif kind == "masked":
            scores[scores > 0.8] = -torch.inf
        layout = (1.0 if n == 1 else 12.0,) if name == "grid" else ()
        rule = GRID if name == "grid" else RULES[name]
        index = torch.randint(n, (16,), generator=generator)
        index[3] = -1
        loss, slope = getattr(KERNELS[name], f"{name}_loss")(scores, index, 0.25, strength, *layout)
        p = getattr(KERNELS[name], name)(scores, strength, *layout)
        for row, (z, y) in enumerate(zip(scores, index.tolist(), strict=True)):
            masked = z == -torch.inf
            if y < 0 or masked[y]:
                assert loss[row] == (0 if y < 0 else torch.inf)
                assert torch.equal(slope[row], torch.zeros(n, dtype=z.dtype) if y < 0 else 0.25 * p[row])
                continue
            target = torch.zeros_like(z).index_fill(0, torch.tensor([y]), 1.0)
            at = [rule.value(q, strength, *layout, masked=masked) for q in (p[row], target)]
            value = torch.where(masked, 0.0, (p[row] - target) * z).sum() - at[0] + at[1]
            assert torch.allclose(loss[row], value, atol=1e-12 * max(1, strength) * n, rtol=1e-12)
            assert torch.allclose(slope[row], 0.25 * (p[row] - target), atol=1e-15, rtol=0)
