"""Maps and losses by the kernels for GPUs: against 50-digit arithmetic, finite differences, and counted traffic."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fenchel
import oracles
from counting import counted
from fenchel import kernels
from fenchel.kernels.gpu import boxes, launch, products, rows
from fenchel.kernels.gpu.launch import STARTED

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
ABSOLUTE = {torch.float64: 1e-12, torch.float32: 1e-6}
ALPHAS = [0.3, 1.0, 1 + 1e-9, 1.05, 1.33, 1.5, 2.0]
STEEP = [2.01, 3.0, 50.0, 1000.0]
WIDE = {torch.float64: 4300, torch.float32: 17_000}
"""Rows that are not held in registers, whatever alpha is."""
KINDS = {
    "unit": lambda n: torch.randn(n, dtype=torch.float64),
    "ties": lambda n: torch.randint(-2, 3, (n,)).double() / 2,
    "offset": lambda n: 1e4 + torch.randn(n, dtype=torch.float64),
    "log-uniform": lambda n: -torch.exp(40 * torch.rand(n, dtype=torch.float64) - 35),
    "one-huge": lambda n: torch.cat([torch.tensor([1e30], dtype=torch.float64), torch.randn(n - 1).double()]),
    "one-and-many": lambda n: torch.cat([torch.zeros(1).double(), -0.5 + 1e-3 * torch.randn(n - 1).double()]),
}


def as_tensor(alpha: float, like: Tensor) -> Tensor:
    return torch.full((len(like), 1), alpha, dtype=torch.float64)


@DTYPES
@pytest.mark.parametrize("alpha", ALPHAS)
def test_entmax_is_right_to_the_last_digits(alpha: float, dtype: torch.dtype) -> None:
    for width in (1, 3, 40):
        scores = torch.stack([kind(width).to(dtype) for kind in KINDS.values()])
        given = [alpha] if dtype == torch.float32 else [alpha, as_tensor(alpha, scores)]
        for each in given:
            p = rows.entmax(scores, each)
            for row, z in zip(p, scores, strict=True):
                expected = oracles.entmax(z.tolist(), alpha)
                errors = [abs(x - y) for x, y in zip(oracles.exact(row.tolist()), expected, strict=True)]
                assert max(errors) <= ABSOLUTE[dtype]
                assert abs(sum(oracles.exact(row.tolist())) - 1) <= ABSOLUTE[dtype]
    assert set(STARTED) == {"rows_kernel"}


@DTYPES
@pytest.mark.parametrize("alpha", STEEP)
def test_steep_entmax_is_exact_for_scores_moved_by_an_ulp(alpha: float, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for width in (2, 40):
        scores = torch.stack([kind(width).to(dtype) for kind in KINDS.values()])
        given = [alpha] if dtype == torch.float32 else [alpha, as_tensor(alpha, scores)]
        for each in given:
            for row, z in zip(rows.entmax(scores, each), scores, strict=True):
                moved = oracles.entmax_backward_error((z - z.max()).tolist(), row.tolist(), alpha, info.eps, info.tiny)
                assert moved <= 2 * info.eps
                assert abs(sum(oracles.exact(row.tolist())) - 1) <= ABSOLUTE[dtype]


@DTYPES
@pytest.mark.parametrize("alpha", [0.5, 1.5, 2.0, 3.0, math.inf])
def test_wide_rows_satisfy_the_optimality_conditions(alpha: float, dtype: torch.dtype) -> None:
    """Rows whose candidates fit into a list, and rows whose candidates do not."""
    for spread in (1.0, 1e-4):
        scores = (spread * torch.randn(1, WIDE[dtype], dtype=torch.float64)).to(dtype)
        p = rows.entmax(scores, alpha).double()[0]
        assert abs(math.fsum(p.tolist()) - 1) <= ABSOLUTE[dtype]
        y = scores.double()[0] - scores.double().max()
        if alpha == math.inf:
            assert torch.equal(p, (y == 0).double() / (y == 0).sum())
            continue
        tau = (alpha - 1) * y - p.pow(alpha - 1)
        level = tau[p >= p.max() / 2].mean()
        slack = 64 * torch.finfo(dtype).eps
        assert bool(((alpha - 1) * y[p == 0] <= level + slack).all())
        assert float((tau[p > 0] - level).abs().max()) <= slack * max(1.0, float(p[p > 0].min().pow(alpha - 1)))
    assert STARTED["wide_kernel"] == STARTED["spill_kernel"] == 2


@pytest.mark.parametrize("alpha", [1.01, 1.5, 2.0, 5.0, math.inf])
def test_normmax_satisfies_the_optimality_conditions(alpha: float) -> None:
    """The gradient of the norm, r^(α−1) with r = p/‖p‖, is z − τ on the support, and z ≤ τ elsewhere."""
    for width in (7, WIDE[torch.float64]):
        scores = torch.randn(2, width, dtype=torch.float64)
        p = rows.normmax(scores, alpha)
        torch.testing.assert_close(rows.normmax(scores, as_tensor(alpha, scores)), p, atol=1e-12, rtol=0)
        torch.testing.assert_close(p.sum(-1), torch.ones(2).double(), atol=1e-12, rtol=0)
        for row, z in zip(p, scores, strict=True):
            on = row > 0
            if alpha == math.inf:  # uniform over a support that reaches down to a threshold
                assert float(row[on].max() - row[on].min()) < 1e-15
                assert abs((z[on] - z[~on].max()).clamp_min(0).sum() - 1) < float(on.sum()) * (
                    z[on].min() - z[~on].max()
                )
                continue
            tau = z[on] - (row[on] / row.norm(alpha)).pow(alpha - 1)
            torch.testing.assert_close(tau, tau.mean().expand_as(tau), atol=1e-9, rtol=0)
            assert bool((z[~on] <= tau.mean() + 1e-9).all())


def along(function: object, inputs: tuple[Tensor, ...], directions: tuple[Tensor, ...], step: float = 1e-6) -> Tensor:
    """The derivative of a function along directions, by finite differences."""
    moved = ([t + e * d for t, d in zip(inputs, directions, strict=True)] for e in (step, -step))
    ahead, behind = (function(*each) for each in moved)
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize(
    ("alpha", "width"), [(0.6, 9), (1.5, 9), (1.7, 9), (2.0, 9), (2.4, 9), (0.6, 4300), (1.5, 4300), (2.4, 4300)]
)
def test_products_and_the_derivative_in_alpha(alpha: float, width: int) -> None:
    scores, v = torch.randn(2, 2, width, dtype=torch.float64)
    a = as_tensor(alpha, scores)
    p = rows.entmax(scores, alpha)
    quiet = p > 0.03 if alpha > 1 else p > 0  # entries near the threshold have steep derivatives
    v = torch.where(quiet, v, 0.0) if width == 9 else v
    expected = along(lambda z: rows.entmax(z, alpha), (scores,), (v,))
    for each in (alpha, a):
        torch.testing.assert_close(products.entmax_product(v, None, p, each), expected, atol=2e-5, rtol=1e-4)
    to_scores, to_alpha = products.entmax_pull(v, None, p, a)
    torch.testing.assert_close(to_scores, expected, atol=2e-5, rtol=1e-4)
    change = along(lambda b: rows.entmax(scores, b), (a,), (torch.ones_like(a),))
    torch.testing.assert_close(to_alpha, (v * change).sum(-1, keepdim=True), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("alpha", "width"), [(1.3, 5), (2.0, 5), (5.0, 5), (1.3, 4300), (5.0, 4300)])
def test_products_of_normmax_and_its_derivative_in_alpha(alpha: float, width: int) -> None:
    scores, v = torch.randn(2, 2, width, dtype=torch.float64)
    a, p = as_tensor(alpha, scores), rows.normmax(scores, alpha)
    expected = along(lambda z: rows.normmax(z, alpha), (scores,), (v,))
    torch.testing.assert_close(products.normmax_product(v, None, p, alpha), expected, atol=2e-5, rtol=1e-4)
    to_scores, to_alpha = products.normmax_pull(v, None, p, a)
    torch.testing.assert_close(to_scores, expected, atol=2e-5, rtol=1e-4)
    change = along(lambda b: rows.normmax(scores, b), (a,), (torch.ones_like(a),))
    torch.testing.assert_close(to_alpha, (v * change).sum(-1, keepdim=True), atol=1e-4, rtol=1e-4)


def test_nothing_moves_normmax_at_alpha_infinity() -> None:
    scores, v = torch.randn(2, 2, 6)
    for a in (math.inf, as_tensor(math.inf, scores)):
        to_scores, to_alpha = products.normmax_pull(v, None, rows.normmax(scores, a), a)
        assert bool((to_scores == 0).all() & (to_alpha == 0).all())


SHAPES = {"gini": (boxes.project, lambda y: y.clamp_min(0)), "shannon": (boxes.capped_softmax, torch.exp)}


def by_bisection(scores: Tensor, upper: float | Tensor, budget: float | Tensor, omega: str) -> Tensor:
    """min(f(z − τ), u) with Σ = k, in double precision: τ between levels at which all, or nothing, is free."""
    z, shape = scores.double(), SHAPES[omega][1]
    u, k = (torch.as_tensor(each, dtype=torch.float64) for each in (upper, budget))
    z = z - z.amax(-1, keepdim=True)  # differences are exact
    low, high = z.amin(-1, keepdim=True) - u.amax() - 50.0, 50.0 + torch.zeros_like(z[..., :1])
    for _ in range(200):
        middle = 0.5 * (low + high)
        much = shape(z - middle).minimum(u).sum(-1, keepdim=True) > k
        low, high = torch.where(much, middle, low), torch.where(much, high, middle)
    return shape(z - high).minimum(u)


def bounds_of(kind: str, scores: Tensor) -> tuple[float | Tensor, float | Tensor]:
    width = scores.shape[-1]
    if kind == "one bound":
        return 1.0, min(0.4 * width, 50.0)
    upper = (torch.rand(scores.shape, dtype=torch.float64) + 0.05).to(scores.dtype)
    if kind == "bounds":
        return upper, min(0.5 * float(upper.sum(-1).min()), 50.0)
    upper[:, 0] = upper[:, 0] if width == 1 else 0.0
    return upper, (0.1 + 0.8 * torch.rand(len(scores), 1, dtype=scores.dtype)) * upper.sum(-1, keepdim=True)


@DTYPES
@pytest.mark.parametrize("omega", SHAPES)
@pytest.mark.parametrize("kind", ["one bound", "bounds", "bounds and budgets"])
def test_bounds_and_budgets(kind: str, omega: str, dtype: torch.dtype) -> None:
    rounding = 1e-6 if dtype == torch.float32 else 1e-12
    for width in (1, 9, 300):
        scores = torch.stack([make(width) for name, make in KINDS.items() if name != "one-huge"]).to(dtype)
        upper, budget = bounds_of(kind, scores)
        found = SHAPES[omega][0](scores, upper, budget).double()
        torch.testing.assert_close(found, by_bisection(scores, upper, budget, omega), rtol=rounding, atol=rounding)
        k = torch.as_tensor(budget, dtype=torch.float64).expand(len(scores), 1)
        torch.testing.assert_close(found.sum(-1, keepdim=True), k, rtol=rounding, atol=0)
    assert set(STARTED) == {"project_kernel"}


@pytest.mark.parametrize("omega", SHAPES)
@pytest.mark.parametrize("kind", ["one bound", "bounds", "bounds and budgets"])
def test_bounds_and_budgets_of_wide_rows(kind: str, omega: str) -> None:
    """Rows whose candidates fit into a list, and rows whose candidates do not."""
    for spread in (1.0, 1e-3):
        scores = spread * torch.randn(1, WIDE[torch.float64], dtype=torch.float64)
        upper, budget = bounds_of(kind, scores)
        found = SHAPES[omega][0](scores, upper, budget)
        torch.testing.assert_close(found, by_bisection(scores, upper, budget, omega), rtol=1e-12, atol=1e-12)
    assert STARTED["spill_project_kernel"] == 2


@pytest.mark.parametrize("omega", SHAPES)
def test_products_of_bounded_maps(omega: str) -> None:
    multiply = products.projection_product if omega == "gini" else products.capped_softmax_product
    for kind, width in (("one bound", 9), ("bounds", 9), ("one bound", 4300), ("bounds", 4300)):
        scores, v = torch.randn(2, 1, width, dtype=torch.float64)
        upper, budget = bounds_of(kind, scores)
        solve = SHAPES[omega][0]
        p = solve(scores, upper, budget)
        expected = along(lambda z, solve=solve, u=upper, k=budget: solve(z, u, k), (scores,), (v,))
        found = multiply(v, None, p, upper, budget)
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)
        # An entry at its bound does not move, and what v is there does not matter.
        full = p >= upper
        assert torch.equal(multiply(torch.where(full, math.nan, v), None, p, upper, budget), found)
        assert bool((found[full] == 0).all())


def test_a_projection_of_a_part_of_the_entries_moves_nothing_where_all_are_at_their_bounds() -> None:
    for width in (4, 4300):
        upper = torch.full((1, width), 0.5, dtype=torch.float64)
        p = boxes.project(torch.randn(1, width, dtype=torch.float64), upper, 0.5 * width)
        assert torch.equal(p, upper)
        assert bool((products.projection_product(torch.randn_like(p), None, p, upper, 0.5 * width) == 0).all())


@pytest.mark.parametrize("width", [6, 4300])
@pytest.mark.parametrize("omega", SHAPES)
def test_masked_and_spoilt_rows_of_bounded_maps(omega: str, width: int) -> None:
    scores = torch.randn(4, width, dtype=torch.float64)
    scores[0, 2:4], scores[1], scores[2, 3], scores[3, 0] = -torch.inf, -torch.inf, torch.nan, torch.inf
    p = SHAPES[omega][0](scores, 1.0, 2.0)
    assert bool((p[0, 2:4] == 0).all() & (p[1] == 0).all() & p[2:].isnan().all())
    torch.testing.assert_close(p[0].sum(), torch.tensor(2.0, dtype=torch.float64))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("alpha", [0.5, 1.05, 1.5, 2.0, 3.0, "tensor"])
def test_class_losses_are_those_of_the_definition(alpha: float | str, norm: bool) -> None:
    """⟨p, z⟩ − Ω(p) − z at the target, with Ω written out, and p − y."""
    if norm and alpha == 0.5:
        alpha = 1.01
    number = 1.4 if alpha == "tensor" else alpha
    for width in (6, WIDE[torch.float64]):
        scores = torch.randn(3, width, dtype=torch.float64)
        a = as_tensor(number, scores) if alpha == "tensor" else number
        index = torch.tensor([2, -1, 5])
        found, residual = (rows.normmax_loss if norm else rows.entmax_loss)(scores, index, True, a)
        p = (rows.normmax if norm else rows.entmax)(scores, a)
        omega = p.norm(number, dim=-1) - 1 if norm else (p.pow(number) - p).sum(-1) / (number * (number - 1))
        kept = index >= 0
        expected = (p * scores).sum(-1) - omega - scores.gather(-1, index.clamp_min(0)[:, None]).squeeze(-1)
        torch.testing.assert_close(found, torch.where(kept, expected, 0.0), atol=1e-11, rtol=0)
        p[torch.arange(3), index] -= 1.0
        torch.testing.assert_close(residual, torch.where(kept[:, None], p, 0.0), atol=1e-13, rtol=0)


@pytest.mark.parametrize("width", [6, 4300])
@pytest.mark.parametrize("alpha", [0.5, 1.5, 3.0, "tensor"])
def test_masked_empty_and_bad_rows(alpha: float | str, width: int) -> None:
    scores = torch.randn(4, width, dtype=torch.float64)
    scores[0, 2] = -torch.inf
    scores[1] = -torch.inf
    scores[2, 3] = torch.nan
    scores[3, 0] = torch.inf
    a = as_tensor(1.5, scores) if alpha == "tensor" else alpha
    p = rows.entmax(scores, a)
    assert p[0, 2] == 0
    assert bool((p[1] == 0).all())
    assert bool(p[2:].isnan().all())
    loss, residual = rows.entmax_loss(scores, torch.tensor([2, 0, 1, -1]), True, a)
    assert loss[0] == loss[1] == torch.inf
    assert bool(loss[2].isnan())
    assert loss[3] == 0
    torch.testing.assert_close(residual[0], p[0])
    assert bool((residual[1] == 0).all() & (residual[3] == 0).all())
    assert bool(residual[2].isnan().all())


def test_a_class_that_does_not_exist_gives_nan() -> None:
    """Nobody can check class indices on a device without waiting for it; no other memory is read."""
    for width in (5, 4300):
        loss, residual = rows.entmax_loss(torch.randn(2, width).double(), torch.tensor([width, 2]), True, 1.5)
        assert bool(loss[0].isnan() & residual[0].isnan().all())
        assert bool(loss[1].isfinite() & residual[1].isfinite().all())


def test_a_wrong_alpha_on_the_device_gives_nan() -> None:
    for width in (5, 4300):
        p = rows.entmax(torch.randn(3, width), torch.tensor([[-1.0], [1.5], [math.nan]]))
        assert bool(p[0].isnan().all() & p[2].isnan().all())
        torch.testing.assert_close(p[1].sum(), torch.tensor(1.0))


HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALF
def test_half_precision_is_float32_inside(dtype: torch.dtype) -> None:
    """The results are those of float32, rounded."""
    scores, v = torch.randn(2, 8, 50).to(dtype)
    index = torch.arange(8)

    def same(found: Tensor, single: Tensor) -> None:
        assert torch.equal(found, single.to(dtype))

    for alpha in (1.3, 1.5, 3.0):
        p = rows.entmax(scores, alpha)
        same(p, rows.entmax(scores.float(), alpha))
        loss, residual = rows.entmax_loss(scores, index, True, alpha)
        exact_loss, exact_residual = rows.entmax_loss(scores.float(), index, True, alpha)
        assert torch.equal(loss, exact_loss)  # one number per row: in float32
        same(residual, exact_residual)
        same(products.entmax_product(v, None, p, alpha), products.entmax_product(v.float(), None, p.float(), alpha))
    for solve, multiply in (
        (boxes.project, products.projection_product),
        (boxes.capped_softmax, products.capped_softmax_product),
    ):
        p = solve(scores, 0.7, 3.0)  # 0.7 is no number of these types
        same(p, solve(scores.float(), 0.7, 3.0))
        full = p == p.max()
        assert int(full.sum()) > 1
        assert bool((multiply(v, None, p, 0.7, 3.0)[full] == 0).all())


def converted(call: Callable[[], object], shape: torch.Size) -> int:
    """How often a tensor of a shape is converted to another dtype in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiled:
        call()
    return sum(each.name == "aten::_to_copy" and each.input_shapes[0] == [*shape] for each in profiled.events())


@HALF
@pytest.mark.parametrize("alpha", [0.7, 1.5, 2.0, 3.0, "tensor"])
@pytest.mark.parametrize("norm", [False, True])
def test_rows_in_half_precision_are_converted_nowhere(norm: bool, alpha: float | str, dtype: torch.dtype) -> None:
    """Not forwards and not backwards. The choice is that of float32, rounded, and gradients start from it."""
    alpha = 1.1 if norm and alpha == 0.7 else alpha
    scores = torch.randn(4, 50).to(dtype).requires_grad_()
    direction = torch.randn(4, 50).to(dtype)
    a = torch.linspace(1.2, 3.0, 4)[:, None].requires_grad_() if alpha == "tensor" else alpha
    wanted = (scores, a) if alpha == "tensor" else (scores,)
    choose = fenchel.normmax if norm else fenchel.entmax
    found: list[Tensor] = []

    def call() -> None:
        found.append(choose(scores, a))
        found.extend(torch.autograd.grad(found[0], wanted, direction))

    assert converted(call, scores.shape) == 0
    assert STARTED["rows_kernel"] == STARTED["product_kernel"] == 1
    exact = scores.detach().double().requires_grad_()
    p = choose(exact, a)
    assert torch.equal(found[0], choose(scores.detach().float(), a).to(dtype))
    slopes = torch.autograd.grad(p, (exact, *wanted[1:]), direction.double())
    assert [t.dtype for t in found[1:]] == [t.dtype for t in wanted]
    for ours, theirs in zip(found[1:], slopes, strict=True):
        assert float((ours.double() - theirs).abs().max() / theirs.abs().max()) < 4 * torch.finfo(dtype).eps


@HALF
def test_losses_in_half_precision(dtype: torch.dtype) -> None:
    """Losses are computed in float32, and rounded unless autocast asks for float32; scaled gradients keep digits."""
    scores, index = torch.randn(4, 50).to(dtype).requires_grad_(), torch.tensor([3, 4, -100, 5])
    exact = scores.detach().float().requires_grad_()
    weight = torch.rand(50)
    for alpha in (1.5, 3.0):
        single = fenchel.entmax_loss(exact, index, alpha, reduction="none")
        loss = fenchel.entmax_loss(scores, index, alpha, reduction="none")
        assert torch.equal(loss, single.to(dtype))
        weighted = fenchel.entmax_loss(scores, index, alpha, weight=weight)
        assert torch.equal(weighted, fenchel.entmax_loss(exact, index, alpha, weight=weight).to(dtype))
        with torch.autocast("cpu", dtype):
            assert torch.equal(fenchel.entmax_loss(scores, index, alpha, reduction="none"), single)
            mean = fenchel.entmax_loss(scores, index.clamp_min(0), alpha)
            large = fenchel.entmax_loss(scores, index, alpha, reduction="sum")
        torch.testing.assert_close(mean, fenchel.entmax_loss(exact, index.clamp_min(0), alpha))
        (found,) = torch.autograd.grad(2.0**14 * large, scores)
        (expected,) = torch.autograd.grad(2.0**14 * single.sum(), exact)
        torch.testing.assert_close(found, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)

    # Backwards a product of float32 and half precision converts on the CPU, and in registers on a device.
    expected = 0 if dtype == torch.bfloat16 else 1
    assert converted(lambda: fenchel.entmax_loss(scores, index, reduction="sum"), scores.shape) == expected


def test_second_derivatives_in_half_precision_are_those_of_the_formula() -> None:
    scores = torch.randn(3, 9).bfloat16().requires_grad_()
    exact = scores.detach().float().requires_grad_()
    found = []
    for z in (scores, exact):
        for value in (fenchel.entmax(z, 1.5).square().sum(), fenchel.entmax_loss(z, torch.arange(3), reduction="sum")):
            (slope,) = torch.autograd.grad(value, z, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), z)[0])
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=0.05, rtol=0.05)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    scores = torch.randn(8, 40) * torch.logspace(-3, 2, 8).unsqueeze(-1)
    for alpha in (1.3, 1.5, 2.0, 3.0):
        assert torch.equal(rows.entmax(scores, alpha)[3], rows.entmax(scores[3:4], alpha)[0])


# -- what is read and written ---------------------------------------------------------------------------------------


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The results that kernels are given to write to."""
    made: list[Tensor] = []
    real = torch.empty_like

    def empty_like(tensor: Tensor, **kwargs: object) -> Tensor:
        made.append(real(tensor, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "empty_like", empty_like)
    return made


def traffic(call: object, out: list[Tensor], **tensors: Tensor) -> dict[str, float]:
    """Reads and writes of a call: first to learn where it writes, then to count."""
    with launch.recorded():
        call()
    result = out[-1]
    with counted(**tensors, result=result) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda *_, **__: result)
        call()
    return {f"{kind} {name}": round(value, 3) for (kind, name), value in found.items() if name and value}


ONCE = {"read z": 1.0, "written result": 1.0}


@pytest.mark.parametrize(("width", "dtype"), [(100, torch.float32), (16_384, torch.float32), (16_384, torch.bfloat16)])
@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.3])
def test_a_row_is_read_once_and_written_once(alpha: float, width: int, dtype: torch.dtype, out: list[Tensor]) -> None:
    z = torch.randn(1, width).to(dtype)
    assert traffic(lambda: rows.entmax(z, alpha), out, z=z) == ONCE


@pytest.mark.parametrize("width", [3000, 16_384])
def test_a_loss_reads_its_row_once(width: int, out: list[Tensor]) -> None:
    z = torch.randn(1, width)
    assert traffic(lambda: rows.entmax_loss(z, torch.tensor([5]), True, 1.5), out, z=z) == ONCE


def test_bounded_maps_read_their_row_once(out: list[Tensor]) -> None:
    z, upper = torch.randn(1, 16_384), torch.rand(1, 4096)
    assert traffic(lambda: boxes.project(z, 1.0, 3.0), out, z=z) == ONCE
    part = z[:, :4096].clone()
    for solve in boxes.project, boxes.capped_softmax:
        found = traffic(lambda solve=solve: solve(part, upper, 3.0), out, z=part, upper=upper)
        assert found == {**ONCE, "read upper": 1.0}


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_a_wide_sparse_row_is_read_once(alpha: float, out: list[Tensor]) -> None:
    z = torch.randn(1, 40_000)
    calls = [lambda: rows.entmax(z, alpha)]
    if alpha == 1.5:
        calls.append(lambda: rows.entmax_loss(z, torch.tensor([5]), True, alpha))
    if alpha == 2:
        calls.append(lambda: boxes.project(z, 1.0, 3.0))
    for call in calls:
        found = traffic(call, out, z=z)
        assert found["read z"] <= 1.1
        assert found["written result"] <= 1.1


@pytest.mark.parametrize(("width", "dtype"), [(5000, torch.float32), (5000, torch.bfloat16), (40_000, torch.float32)])
def test_a_product_reads_values_on_the_support_alone(width: int, dtype: torch.dtype, out: list[Tensor]) -> None:
    z = torch.randn(1, width).to(dtype)
    p, v = rows.entmax(z, 1.5), torch.randn_like(z)
    found = traffic(lambda: products.entmax_product(v, None, p, 1.5), out, p=p, v=v)
    assert found["read p"] == 1.0
    assert found["read v"] == float((p > 0).double().mean().round(decimals=3))
    assert found["written result"] <= 1.1


# -- how the library finds them --------------------------------------------------------------------------------------


def test_maps_losses_and_output_layers_reach_the_kernels() -> None:
    scores = torch.randn(3, 6, requires_grad=True)
    fenchel.entmax(scores, 1.5).square().sum().backward()
    assert STARTED["rows_kernel"] == STARTED["product_kernel"] == 1
    fenchel.entmax_loss(scores, torch.tensor([0, 1, 2])).sum().backward()
    assert STARTED["rows_kernel"] == 2
    fenchel.k_subsets(scores, 2).square().sum().backward()
    assert STARTED["project_kernel"] == 1
    assert STARTED["product_kernel"] == 2
    fenchel.constrained_softmax(scores, 0.4).square().sum().backward()
    assert STARTED["project_kernel"] == 2
    assert STARTED["product_kernel"] == 3
    fenchel.normmax(scores, torch.tensor(1.7, requires_grad=True)).square().sum().backward()
    assert STARTED["rows_kernel"] == 3
    assert STARTED["product_kernel"] == 4


def test_a_kernel_that_fails_says_so_once_and_torch_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    table = kernels.table._table["argmax", "tsallis"]
    before = list(table)
    scores = torch.randn(3, 6)
    expected = fenchel.entmax(scores, 1.25)

    def fail(*_: object, **__: object) -> None:
        raise kernels.NotCompiledError("made to fail")

    for row in table:
        if row.device == "cpu" and isinstance(row.kernel, kernels.table._Guarded):
            monkeypatch.setattr(row.kernel, "kernel", fail)
    try:
        with pytest.warns(UserWarning, match="made to fail"):
            torch.testing.assert_close(fenchel.entmax(scores, 1.25), expected)
        half = scores.half()
        assert torch.equal(fenchel.entmax(half, 1.25), fenchel.entmax(half.float(), 1.25).half())
        torch.testing.assert_close(fenchel.entmax(scores, 1.25), expected)  # and no warning, which would be an error
    finally:
        table[:] = before
        kernels.table._found.clear()


def test_a_number_that_is_made_in_a_captured_graph_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rows.entmax(torch.randn(1, 3), 1.25)
    here = torch.device("cpu")
    kept = launch.constant(1.25, here)
    assert launch.constant(1.25, here) is kept
    monkeypatch.setattr(launch, "_is_capturing", lambda device: True)
    assert launch.constant(1.25, here) is not kept


def test_operators_are_right_and_stay_in_graphs() -> None:
    scores = torch.randn(3, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.fenchel.argmax.default, (scores, None, 1.5, None, math.nan, "tsallis"))
    strided, each = torch.randn(5, 3).t(), as_tensor(1.5, scores).float()
    p, upper = torch.softmax(strided, -1), torch.rand(3, 5).clamp_min(0.3)
    fake = {"test_utils": ("test_schema", "test_faketensor")}
    for name in ("tsallis", "norm"):
        given = (each, 0.0, None, math.nan, name)
        torch.library.opcheck(torch.ops.fenchel.argmax.default, (strided, *given), **fake)
        torch.library.opcheck(torch.ops.fenchel.pull.default, (strided, None, p, *given), **fake)
        torch.library.opcheck(torch.ops.fenchel.class_loss.default, (strided, torch.arange(3), True, *given), **fake)
    for name in ("bounded_gini", "bounded_shannon"):
        given = (upper, 0.0, None, 1.0, name)
        torch.library.opcheck(torch.ops.fenchel.argmax.default, (strided, *given), **fake)
        torch.library.opcheck(torch.ops.fenchel.product.default, (strided, strided, p, *given), **fake)
    half = strided.bfloat16()
    for name in ("tsallis", "norm"):
        given = (each, 0.0, None, math.nan, name)
        torch.library.opcheck(torch.ops.fenchel.argmax.default, (half, *given), **fake)
        torch.library.opcheck(torch.ops.fenchel.pull.default, (half, None, half, *given), **fake)
        torch.library.opcheck(torch.ops.fenchel.class_loss.default, (half, torch.arange(3), True, *given), **fake)
    compiled = torch.compile(lambda z: fenchel.entmax(z, 1.5), fullgraph=True, backend="aot_eager")
    for z in (scores, scores.detach().half().requires_grad_()):
        STARTED.clear()
        compiled(z).square().sum().backward()
        assert STARTED["rows_kernel"] == STARTED["product_kernel"] == 1


def test_an_output_layer_keeps_nothing_of_tokens_by_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: blocks of logits by a matrix product, the rest by kernels of rows; no allocation is larger."""
    monkeypatch.setitem(kernels.table._table, ("linear_class_loss", "tsallis"), [])
    kernels.table._found.clear()
    tokens, width, classes = 32, 4, 5000  # a block has 16 tokens
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    target = torch.randint(classes, (tokens,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        fenchel.linear_entmax_loss(hidden, weight, target).backward()
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    assert largest == 4 * 16 * classes
    assert STARTED["rows_kernel"] == 2
    expected = fenchel.entmax_loss(hidden.detach().double() @ weight.detach().double().t(), target).mean()
    torch.testing.assert_close(fenchel.linear_entmax_loss(hidden, weight, target).double(), expected)
    kernels.table._found.clear()
