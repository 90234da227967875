"""Maps and losses by the kernels for GPUs: against 50-digit arithmetic, finite differences, and counted traffic."""

import math

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
        scores = (spread * torch.randn(1, 17_000, dtype=torch.float64)).to(dtype)
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
    for width in (7, 17_000):
        scores = torch.randn(2, width, dtype=torch.float64)
        p = rows.normmax(scores, alpha)
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
    ("alpha", "width"), [(0.6, 9), (1.5, 9), (1.7, 9), (2.0, 9), (2.4, 9), (0.6, 5000), (1.5, 17_000), (2.4, 5000)]
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


@pytest.mark.parametrize("alpha", [1.3, 2.0, 5.0])
def test_products_of_normmax(alpha: float) -> None:
    for width in (5, 17_000):
        scores, v = torch.randn(2, 2, width, dtype=torch.float64)
        expected = along(lambda z, a=alpha: rows.normmax(z, a), (scores,), (v,))
        found = products.normmax_product(v, None, rows.normmax(scores, alpha), alpha)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@DTYPES
@pytest.mark.parametrize("kind", ["one bound", "bounds", "bounds and budgets"])
def test_projections_on_bounds_and_budgets(kind: str, dtype: torch.dtype) -> None:
    """Against the threshold found by bisection in double precision, entry by entry."""
    rounding = 1e-6 if dtype == torch.float32 else 1e-12
    for width in (1, 9, 300):
        scores = torch.stack([make(width) for name, make in KINDS.items() if name != "one-huge"]).to(dtype)
        z, upper, budget = scores.double(), 1.0, 0.4 * width
        if kind != "one bound":
            upper = torch.rand(len(scores), width, dtype=dtype) + 0.05
            budget = 0.5 * float(upper.sum(-1).min())
        if kind == "bounds and budgets":
            upper[:, 0] = upper[:, 0] if width == 1 else 0.0
            budget = (0.1 + 0.8 * torch.rand(len(scores), 1, dtype=dtype)) * upper.sum(-1, keepdim=True)
        found = boxes.project(scores, upper, budget)
        u, k = (torch.as_tensor(each, dtype=torch.float64) for each in (upper, budget))
        u, k = u.expand(z.shape), k.expand(len(z), 1)
        top = z.amax(-1, keepdim=True)
        z = z - top  # differences are exact
        low, high = z.amin(-1, keepdim=True) - u.amax() - 1.0, torch.zeros_like(top)
        for _ in range(200):
            middle = 0.5 * (low + high)
            much = (z - middle).clamp_min(0).minimum(u).sum(-1, keepdim=True) > k
            low, high = torch.where(much, middle, low), torch.where(much, high, middle)
        expected = (z - high).clamp_min(0).minimum(u)
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=rounding)
        torch.testing.assert_close(found.double().sum(-1, keepdim=True), k, rtol=rounding, atol=0)
    assert set(STARTED) == {"project_kernel"}


def test_masked_and_spoilt_rows_of_projections() -> None:
    scores = torch.randn(4, 6)
    scores[0, 2:4], scores[1], scores[2, 3], scores[3, 0] = -torch.inf, -torch.inf, torch.nan, torch.inf
    p = boxes.project(scores, 1.0, 2.0)
    assert bool((p[0, 2:4] == 0).all() & (p[1] == 0).all() & p[2:].isnan().all())
    torch.testing.assert_close(p[0].sum(), torch.tensor(2.0))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("alpha", [0.5, 1.05, 1.5, 2.0, 3.0, "tensor"])
def test_class_losses_are_those_of_the_definition(alpha: float | str, norm: bool) -> None:
    """⟨p, z⟩ − Ω(p) − z at the target, with Ω written out, and p − y."""
    if norm and alpha == 0.5:
        alpha = 1.01
    number = 1.4 if alpha == "tensor" else alpha
    for width in (6, 17_000):
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


@pytest.mark.parametrize("width", [6, 17_000])
@pytest.mark.parametrize("alpha", [0.5, 1.5, 3.0, "tensor"])
def test_masked_empty_and_bad_rows(alpha: float | str, width: int) -> None:
    scores = torch.randn(4, width)
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


def test_a_wrong_alpha_on_the_device_gives_nan() -> None:
    for width in (5, 17_000):
        p = rows.entmax(torch.randn(3, width), torch.tensor([[-1.0], [1.5], [math.nan]]))
        assert bool(p[0].isnan().all() & p[2].isnan().all())
        torch.testing.assert_close(p[1].sum(), torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_float32_inside(dtype: torch.dtype) -> None:
    scores = torch.randn(8, 50).to(dtype)
    for alpha in (1.3, 1.5, 3.0):
        torch.testing.assert_close(rows.entmax(scores, alpha), rows.entmax(scores.float(), alpha).to(dtype))


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
    replay = iter([result])
    torch.empty_like = lambda *_, **__: next(replay)
    with counted(**tensors, result=result) as found:
        call()
    return {f"{kind} {name}": round(value, 3) for (kind, name), value in found.items() if value}


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.3])
@pytest.mark.parametrize("width", [100, 4096, 16_384])
def test_a_row_is_read_once_and_written_once(alpha: float, width: int, out: list[Tensor]) -> None:
    z = torch.randn(2, width)
    assert traffic(lambda: rows.entmax(z, alpha), out, z=z) == {"read z": 1.0, "written result": 1.0}


def test_a_loss_reads_its_row_once(out: list[Tensor]) -> None:
    z = torch.randn(2, 3000)
    found = traffic(lambda: rows.entmax_loss(z, torch.tensor([5, 7]), True, 1.5), out, z=z)
    assert found == {"read z": 1.0, "written result": 1.0}


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_a_wide_sparse_row_is_read_once(alpha: float, out: list[Tensor]) -> None:
    z = torch.randn(1, 40_000)
    found = traffic(lambda: rows.entmax(z, alpha), out, z=z)
    assert found["read z"] <= 1.1
    assert found["written result"] <= 1.1


def test_a_product_reads_values_on_the_support_alone(out: list[Tensor]) -> None:
    z = torch.randn(1, 40_000)
    p, v = rows.entmax(z, 1.5), torch.randn_like(z)
    found = traffic(lambda: products.entmax_product(v, None, p, 1.5), out, p=p, v=v)
    assert found["read p"] == 1.0
    assert found["read v"] <= 0.1
    assert found["written result"] <= 1.1


# -- how the library finds them --------------------------------------------------------------------------------------


def test_maps_losses_and_output_layers_reach_the_kernels() -> None:
    scores = torch.randn(3, 6, requires_grad=True)
    fenchel.entmax(scores, 1.5).square().sum().backward()
    assert STARTED["rows_kernel"] == STARTED["product_kernel"] == 1
    fenchel.entmax_loss(scores, torch.tensor([0, 1, 2])).sum().backward()
    assert STARTED["rows_kernel"] == 2
    fenchel.k_subsets(scores, 2).square().sum().backward()
    assert STARTED["project_kernel"] == STARTED["box_product_kernel"] == 1
    fenchel.normmax(scores).square().sum().backward()
    assert STARTED["rows_kernel"] == 3


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
        torch.testing.assert_close(fenchel.entmax(scores, 1.25), expected)  # and no warning, which would be an error
    finally:
        table[:] = before
        kernels.table._found.clear()


def test_operators_are_right_and_stay_in_graphs() -> None:
    scores = torch.randn(3, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.fenchel.argmax.default, (scores, None, 1.5, None, math.nan, "tsallis"))
    compiled = torch.compile(lambda z: fenchel.entmax(z, 1.5), fullgraph=True, backend="aot_eager")
    STARTED.clear()
    compiled(scores).square().sum().backward()
    assert STARTED["rows_kernel"] == STARTED["product_kernel"] == 1


def test_an_output_layer_keeps_nothing_of_tokens_by_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: blocks of logits by a matrix product, the rest by kernels of rows; no allocation is larger."""
    monkeypatch.setitem(kernels.table._table, ("linear_class_loss", "tsallis"), [])
    kernels.table._found.clear()
    tokens, width, classes = 160, 4, 5000  # a block has 16 tokens
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    target = torch.randint(classes, (tokens,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        fenchel.linear_entmax_loss(hidden, weight, target).backward()
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    assert largest == 4 * 16 * classes
    assert STARTED["rows_kernel"] == 10
    expected = fenchel.entmax_loss(hidden.detach().double() @ weight.detach().double().t(), target).mean()
    torch.testing.assert_close(fenchel.linear_entmax_loss(hidden, weight, target).double(), expected)
    kernels.table._found.clear()
