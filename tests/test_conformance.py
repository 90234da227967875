"""What holds for every map: each a named property, each property for every map.

One file, because it is one list: what a map must hold.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from maps import MAPS, Map

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def every(wanted: Callable[[Map], bool] = lambda _: True) -> pytest.MarkDecorator:
    """One test for each map of a kind. The maps that have kernels come once more without them, among the slow tests."""
    chosen = [m for m in MAPS if wanted(m)]
    cases = [pytest.param(m, id=str(m), marks=[pytest.mark.slow] if m.plain else []) for m in chosen]
    return pytest.mark.parametrize("case", cases)


every_map = every()
every_graph_map = every(lambda m: not m.opaque)
every_opaque_map = every(lambda m: m.opaque)
every_curved_map = every(lambda m: m.curved)
every_map_of_a_set = every(lambda m: not m.placed)
every_map_without_gaps = every(lambda m: not m.rigid)
every_map_with_vertices = every(lambda m: m.vertices)
every_map_level_at_its_vertices = every(lambda m: m.vertices and not m.grouped)


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    if hasattr(request.node, "callspec") and request.node.callspec.params["case"].plain:
        set_kernels(False)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, int, Tensor]:
    """Scores of any shape, dimension, dtype and scale, and a mask."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = draw(st.integers(1, 12))
    dtype = draw(st.sampled_from(DTYPES))
    scale = 10.0 ** draw(st.integers(-6, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    unit = torch.randn(shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):  # ties
        unit = unit.round()
    limit = torch.finfo(dtype).max
    scores = (unit * scale).clamp(-limit, limit).to(dtype)
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    return scores, dim, mask


def rows(p: Tensor, dim: int) -> Tensor:
    return p.movedim(dim, -1).reshape(-1, p.shape[dim])


def equalities(p: Tensor) -> Tensor:
    """Which entries of a row share a value."""
    return p.unsqueeze(-1) == p.unsqueeze(-2)


def kinks(case: Map, shape: tuple[int, ...], count: int) -> Iterator[Tensor]:
    """Random float64 scores away from the kinks of a sparse map, where finite differences mean nothing."""
    *leading, width = shape
    needed = count * math.prod(leading)
    good = torch.empty(0, width, dtype=torch.float64)
    while len(good) < needed:
        scores = torch.randn(16, width, dtype=torch.float64)
        # A face that survives every perturbation of size 1e-2 is not next to a kink, except from within: ask too
        # that no probability is small, for the powers of p in the Jacobian are steep there.
        p, near = case.choose(scores), case.choose(scores + 1e-2 * torch.randn(8, *scores.shape, dtype=torch.float64))
        alike = (case.faces(p) == case.faces(near)).all(-1).all(0) & ((p == 0) | (p > 2e-2)).all(-1)
        if case.grouped:
            alike &= (equalities(p) == equalities(near)).flatten(-2).all(-1).all(0)
        good = torch.cat([good, scores[alike]])
    for scores in good[:needed].reshape(count, *shape):
        yield scores.clone()


@every_map
@given(problem=problems())
def test_shape_and_dtype_are_kept(case: Map, problem: tuple[Tensor, int, Tensor]) -> None:
    scores, dim, mask = problem
    p = case.choose(scores, dim=dim, mask=mask)
    assert p.shape == scores.shape
    assert p.dtype == scores.dtype


@every_map
@given(problem=problems())
def test_rows_are_distributions_or_zero(case: Map, problem: tuple[Tensor, int, Tensor]) -> None:
    scores, dim, mask = problem
    p = case.choose(scores, dim=dim, mask=mask).double()
    assert (p >= 0).all()
    assert (p[~mask] == 0).all()
    expected = mask.sum(dim).double().clamp_max(case.mass)
    assert ((p.sum(dim) - expected).abs() <= TOLERANCE[scores.dtype] * case.mass).all()


@every_map
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_thousands_of_ordinary_rows_sum_to_one(case: Map, dtype: torch.dtype) -> None:
    for width, count in ((10, 200), (64, 10)) if case.dense else ((10, 2000), (64, 500), (700, 100)):
        for spread in (1e-4, 0.3, 0.7, 2.0):
            p = case.choose((spread * torch.randn(count, width, dtype=torch.float64)).to(dtype)).double()
            assert ((p.sum(-1) - case.mass).abs() <= TOLERANCE[dtype] * case.mass).all()


@every_map
@given(problem=problems())
def test_function_is_argmax_of_its_omega(case: Map, problem: tuple[Tensor, int, Tensor]) -> None:
    scores, dim, mask = problem
    p, q = case.choose(scores, dim=dim, mask=mask), case.omega.argmax(scores, dim, mask)
    assert torch.allclose(p, q, atol=TOLERANCE[scores.dtype], rtol=0)


@every_map_without_gaps
@given(problem=problems())
def test_masking_is_removing(case: Map, problem: tuple[Tensor, int, Tensor]) -> None:
    scores, dim, mask = problem
    p = case.choose(scores, dim=dim, mask=mask)
    some = slice(4 if case.opaque else None)  # these are slow one by one
    for row, keep, s in zip(rows(p, dim)[some], rows(mask, dim)[some], rows(scores, dim)[some], strict=True):
        if keep.any():
            assert torch.allclose(row[keep], case.choose(s[keep]), atol=TOLERANCE[scores.dtype], rtol=0)


@every_map
@given(problem=problems(), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e4]))
def test_what_stands_at_a_masked_position_does_not_matter(
    case: Map, problem: tuple[Tensor, int, Tensor], junk: float
) -> None:
    scores, dim, mask = problem
    clean = scores.masked_fill(~mask, 0.0).requires_grad_()
    dirty = scores.masked_fill(~mask, junk).requires_grad_()
    p, q = case.choose(clean, dim=dim, mask=mask), case.choose(dirty, dim=dim, mask=mask)
    assert torch.equal(p, q)
    direction = torch.randn_like(p)
    (g,), (h,) = torch.autograd.grad(p, clean, direction), torch.autograd.grad(q, dirty, direction)
    assert torch.equal(g, h)
    assert (h[~mask] == 0).all()


@every_map
@given(problem=problems())
def test_minus_inf_is_masked(case: Map, problem: tuple[Tensor, int, Tensor]) -> None:
    scores, dim, mask = problem
    assert torch.equal(
        case.choose(scores.masked_fill(~mask, -torch.inf), dim=dim), case.choose(scores, dim=dim, mask=mask)
    )


@every_map
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_with_nothing_left_gives_zeros_and_a_zero_gradient(case: Map, dtype: torch.dtype) -> None:
    scores = torch.randn(3, 4, dtype=dtype)
    scores[1] = -torch.inf
    scores.requires_grad_()
    mask = torch.tensor([[True] * 4, [True] * 4, [False] * 4])
    p = case.choose(scores, mask=mask)
    p.backward(torch.randn_like(p))
    assert (p[1:] == 0).all()
    assert scores.grad is not None
    assert (scores.grad[1:] == 0).all()
    assert scores.grad.isfinite().all()


@every_map
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_or_inf_spoils_its_own_row_alone(case: Map, bad: float) -> None:
    scores = torch.randn(5, 4)
    expected = case.choose(scores)
    spoilt = scores.clone()
    spoilt[2, 1] = bad
    spoilt.requires_grad_()
    p = case.choose(spoilt)
    assert p[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(p[others], expected[others])
    p.backward(torch.randn_like(p))
    assert spoilt.grad is not None
    assert spoilt.grad[2].isnan().all()
    assert spoilt.grad[others].isfinite().all()


@every_map
@given(offset=st.sampled_from([-1024.0, 2.0**20, -(2.0**40)]), seed=st.integers(0, 1000))
def test_shifting_all_scores_changes_nothing(case: Map, offset: float, seed: int) -> None:
    # multiples of 2⁻¹⁰ below 2¹⁰: the sum with the offset is exact in float64
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3000, 3000, (4, 7), generator=generator).double() / 1024
    assert torch.equal(case.choose(scores + offset), case.choose(scores))


@every_map_with_vertices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_huge_scores_choose_the_best(case: Map, dtype: torch.dtype) -> None:
    scores = torch.tensor([[1e30, -1e30, 3e30], [-1e30, -3e30, -2e30]], dtype=dtype, requires_grad=True)
    p = case.choose(scores)
    p.backward(torch.randn_like(p))
    expected = torch.tensor([[0, 0, 1], [1, 0, 0]], dtype=dtype)
    # entmax with α < 1 has polynomial tails: what is left at a distance of 1e30 is far below the tolerance
    assert torch.allclose(p, expected, atol=1e-12, rtol=0)
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@every_map_of_a_set
@given(problem=problems())
def test_ties_share(case: Map, problem: tuple[Tensor, int, Tensor]) -> None:
    scores, dim, _ = problem
    doubled = torch.cat([scores, scores], dim)
    first, second = case.choose(doubled, dim=dim).chunk(2, dim)
    eps = torch.finfo(scores.dtype).eps
    assert torch.allclose(first, second, atol=8 * eps if case.dense else 0, rtol=8 * eps)


@every_map_of_a_set
@given(problem=problems(), seed=st.integers(0, 1000))
def test_order_does_not_matter(case: Map, problem: tuple[Tensor, int, Tensor], seed: int) -> None:
    scores, dim, mask = problem
    order = torch.randperm(scores.shape[dim], generator=torch.Generator().manual_seed(seed))
    p = case.choose(scores.index_select(dim, order), dim=dim, mask=mask.index_select(dim, order))
    q = case.choose(scores, dim=dim, mask=mask).index_select(dim, order)
    assert torch.allclose(p, q, atol=TOLERANCE[scores.dtype], rtol=0)


@every_map
def test_higher_scores_get_no_less(case: Map) -> None:
    scores = torch.randn(50, 8, dtype=torch.float64).sort(dim=-1).values
    p = case.choose(scores)
    assert (p.diff(dim=-1) >= -1e-15).all()


@every_map
@given(problem=problems())
def test_any_dim_is_the_last_dim_moved(case: Map, problem: tuple[Tensor, int, Tensor]) -> None:
    scores, dim, mask = problem
    moved = case.choose(scores.movedim(dim, -1), mask=mask.movedim(dim, -1)).movedim(-1, dim)
    assert torch.equal(case.choose(scores, dim=dim, mask=mask), moved)
    assert torch.equal(case.choose(scores, dim=dim % scores.dim(), mask=mask), moved)


@every_map
def test_strided_and_expanded_inputs(case: Map) -> None:
    base = torch.randn(6, 10, 8)
    for view in (base[::2, 1::3], base.transpose(0, 2), base[:1].expand(4, 10, 8), base[..., :1].expand(6, 10, 5)):
        assert torch.allclose(case.choose(view), case.choose(view.contiguous()), atol=1e-6)


@every_map
def test_mask_broadcasts(case: Map) -> None:
    scores, mask = torch.randn(3, 4, 5), torch.tensor([True, False, True, True, False])
    assert torch.equal(case.choose(scores, mask=mask), case.choose(scores, mask=mask.expand(3, 4, 5)))
    column = torch.rand(4, 1) < 0.5
    assert torch.equal(case.choose(scores, mask=column), case.choose(scores, mask=column.expand(3, 4, 5)))


@every_map
@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 1)])
def test_a_batch_of_zero_rows(case: Map, shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape, requires_grad=True)
    p = case.choose(scores)
    p.sum().backward()
    assert p.shape == scores.shape


@every_map
def test_a_row_does_not_depend_on_its_batch(case: Map) -> None:
    scores = torch.randn(64, 37)
    together = case.choose(scores)
    assert all(torch.allclose(together[i], case.choose(scores[i]), atol=1e-6) for i in range(4 if case.opaque else 64))


@every_map
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_computes_in_single(case: Map, dtype: torch.dtype) -> None:
    scores = torch.randn(16, 300).to(dtype)
    assert torch.equal(case.choose(scores), case.choose(scores.float()).to(dtype))


@every_map_with_vertices
def test_no_choice_scores_better(case: Map) -> None:
    scores = torch.randn(4, 6, dtype=torch.float64)
    best = case.omega.max(scores)
    p = case.choose(scores)
    assert torch.allclose((p * scores).sum(-1) - case.omega(p), best, atol=1e-12, rtol=0)
    for concentration in (0.1, 1.0, 10.0):
        others = torch.distributions.Dirichlet(torch.full((6,), concentration, dtype=torch.float64)).sample((500, 4))
        others = torch.cat([others, 0.999 * p + 0.001 * others])
        others = others / others.sum(-1, keepdim=True)
        assert ((others * scores).sum(-1) - case.omega(others) <= best + 1e-12).all()


# -- derivatives ----------------------------------------------------------------------------------------


@every_map
def test_gradients_against_finite_differences(case: Map) -> None:
    for scores in kinks(case, (2, 4), 2):
        scores.requires_grad_()
        options = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
        assert gradcheck(case.choose, (scores,), **options)


@every_curved_map
def test_second_derivatives_against_finite_differences(case: Map) -> None:
    for scores in kinks(case, (2, 4), 2):
        scores.requires_grad_()
        assert gradgradcheck(case.choose, (scores,), check_fwd_over_rev=True, check_batched_grad=True)


@every_map
def test_gradients_through_a_mask_and_another_dim(case: Map) -> None:
    mask = torch.tensor([True, True, False, True])
    (scores,) = kinks(case, (2, 4), 1)
    scores.requires_grad_()
    assert gradcheck(lambda s: case.choose(s, mask=mask), (scores,), check_forward_ad=True)
    assert gradcheck(lambda s: case.choose(s.T, dim=0), (scores,), check_forward_ad=True)


@every_map
def test_the_jacobian_is_symmetric_and_positive_with_rows_that_sum_to_zero(case: Map) -> None:
    for scores in kinks(case, (6,), 5):
        jacobian = jacrev(case.choose)(scores)
        assert torch.allclose(jacobian, jacobian.T, atol=1e-12)
        assert torch.allclose(jacobian.sum(-1), torch.zeros(6, dtype=torch.float64), atol=1e-12)
        assert torch.linalg.eigvalsh(jacobian).min() > -1e-12


@every_map
def test_forward_and_reverse_mode_agree_at_every_order(case: Map) -> None:
    (scores,) = kinks(case, (4,), 1)
    modes = (jacrev, jacfwd)
    first = [a(case.choose)(scores) for a in modes]
    second = [a(b(case.choose))(scores) for a in modes for b in modes]
    third = [a(b(c(case.choose)))(scores) for a in modes for b in modes for c in modes]
    for derivatives in (first, second, third):
        scale = derivatives[0].abs().max().clamp_min(1)
        assert all(torch.allclose(d, derivatives[0], atol=1e-12 * scale) for d in derivatives)
    # The first and the second check each other by their own finite differences.
    step = 1e-6
    for i in range(4):
        unit = torch.zeros(4, dtype=torch.float64)
        unit[i] = step
        for f, derivative in ((jacrev(case.choose), second[0]), (jacrev(jacrev(case.choose)), third[0])):
            difference = (f(scores + unit) - f(scores - unit)) / (2 * step)
            scale = derivative.abs().max().clamp_min(1)
            assert torch.allclose(difference, derivative[..., i], atol=1e-6 * scale)


@every_map
def test_jvp_equals_vjp(case: Map) -> None:
    scores, direction = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    _, forward = jvp(case.choose, (scores,), (direction,))
    (backward,) = vjp(case.choose, scores)[1](direction)
    assert torch.allclose(forward, backward, atol=1e-13)


@every_map
def test_forward_mode_passes_through_a_backward_pass(case: Map) -> None:
    """Tangents of a gradient, without a graph of it: an Hessian-vector product."""
    (scores,) = kinks(case, (5,), 1)
    direction, weights = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    expected = torch.einsum("pij,p,j->i", jacrev(jacrev(case.choose))(scores), weights, direction)
    scores.requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        p = case.choose(torch.autograd.forward_ad.make_dual(scores, direction))
        (gradient,) = torch.autograd.grad(p, scores, weights)
        tangent = torch.autograd.forward_ad.unpack_dual(gradient).tangent
    tangent = torch.zeros(5, dtype=torch.float64) if tangent is None else tangent
    assert torch.allclose(tangent, expected, atol=1e-10)


@every_map
def test_vmap_is_a_loop(case: Map) -> None:
    scores, mask = torch.randn(4, 3, 5), torch.rand(4, 3, 5) < 0.7
    expected = case.choose(scores, mask=mask)
    mapped = vmap(lambda s, m: case.choose(s, mask=m))
    assert torch.equal(mapped(scores, mask), expected)
    assert torch.equal(vmap(mapped)(scores[None], mask[None])[0], expected)
    inner = vmap(lambda s: case.choose(s, dim=0), in_dims=1, out_dims=1)
    assert torch.equal(inner(scores), case.choose(scores, dim=0))
    gradients = vmap(jacrev(case.choose))(scores[:, 0])
    assert torch.allclose(gradients[2], jacrev(case.choose)(scores[2, 0]))


# -- graphs ---------------------------------------------------------------------------------------------


@every_graph_map
def test_compiles_to_one_graph_with_the_same_results(case: Map) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda s, m: case.choose(s, dim=1, mask=m), fullgraph=True, backend="aot_eager")
    mask = torch.rand(3, 5, 2) < 0.8
    for size in (3, 3):
        eager = torch.randn(size, 5, 2, requires_grad=True)
        graph = eager.detach().clone().requires_grad_()
        p, q = case.choose(eager, dim=1, mask=mask), compiled(graph, mask)
        assert torch.equal(p, q)
        direction = torch.randn_like(p)
        p.backward(direction)
        q.backward(direction)
        assert eager.grad is not None
        assert torch.allclose(eager.grad, graph.grad, atol=1e-6)


@pytest.fixture(scope="module")
def compiles_forward_mode() -> bool:
    """Whether this torch compiles a function of dual tensors at all; newer releases refuse."""
    compiled = torch.compile(lambda x: 2 * x, fullgraph=True, backend="aot_eager")
    with torch.autograd.forward_ad.dual_level():
        try:
            compiled(torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)))
        except torch._dynamo.exc.Unsupported:
            return False
    return True


@pytest.mark.slow
@every_graph_map
def test_a_compiled_map_keeps_forward_mode_or_refuses_it(case: Map, compiles_forward_mode: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(case.choose, fullgraph=True, backend="aot_eager")
    scores, direction = torch.randn(3, 5), torch.randn(3, 5)
    compiled(scores)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(scores, direction)
        try:
            result = compiled(dual)
        except torch._dynamo.exc.Unsupported:  # it may still run the graph that it made of plain scores
            assert not compiles_forward_mode
            return
        tangent = torch.autograd.forward_ad.unpack_dual(result).tangent
        expected = torch.autograd.forward_ad.unpack_dual(case.choose(dual)).tangent
    assert torch.equal(tangent, expected)


@pytest.mark.slow
@every_graph_map
def test_a_trace_gives_the_same_results(case: Map) -> None:
    scores, others = torch.randn(3, 5), torch.randn(3, 5)
    graph = make_fx(lambda s: case.choose(s))(scores)
    assert torch.allclose(graph(others), case.choose(others), atol=1e-6)


@every_graph_map
def test_exports_with_a_dynamic_batch(case: Map) -> None:
    class Module(torch.nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return case.choose(scores, dim=-1)

    program = torch.export.export(
        Module(), (torch.randn(3, 5),), dynamic_shapes=({0: torch.export.Dim("batch"), 1: None},)
    )
    scores = torch.randn(7, 5)
    if case.plain:  # the graph holds torch operations with a fixed number of steps, which eager mode ends early
        torch.testing.assert_close(program.module()(scores), case.choose(scores))
    else:
        assert torch.equal(program.module()(scores), case.choose(scores))


@every_opaque_map
def test_what_cannot_be_in_a_graph_says_so_and_compiles_around_it(case: Map) -> None:
    torch._dynamo.reset()
    scores = torch.randn(3, 5)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="rounds that depend on the data"):
        torch.compile(lambda s: case.choose(s), fullgraph=True, backend="aot_eager")(scores)
    broken = torch.compile(lambda s: 2 * case.choose(3 * s), backend="aot_eager")
    assert torch.allclose(broken(scores), 2 * case.choose(3 * scores))
    with pytest.raises(RuntimeError, match="cannot be traced"):
        make_fx(lambda s: case.choose(s))(scores)

    class Module(torch.nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return case.choose(scores)

    with pytest.raises(RuntimeError, match="cannot be"):
        torch.export.export(Module(), (scores,), strict=False)


@every_map
def test_autocast_changes_nothing(case: Map) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        scores = torch.randn(3, 5).to(dtype)
        expected = case.choose(scores)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            p = case.choose(scores)
        assert p.dtype == dtype
        assert torch.equal(p, expected)


# -- max and loss ---------------------------------------------------------------------------------------


@every_map_level_at_its_vertices
@given(problem=problems())
def test_max_is_at_least_the_best_score_and_grows_with_choice(case: Map, problem: tuple[Tensor, int, Tensor]) -> None:
    scores, dim, mask = problem
    value = case.omega.max(scores, dim, mask).double()
    best = scores.masked_fill(~mask, -torch.inf).amax(dim).double()
    slack = TOLERANCE[scores.dtype] * best.abs().clamp_min(1)
    assert (value >= best - slack.nan_to_num(0)).all()
    assert (value[~mask.any(dim)] == -torch.inf).all()


@every_map
def test_the_gradient_of_max_is_argmax(case: Map) -> None:
    scores = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(case.omega.max(scores).sum(), scores)
    assert torch.allclose(gradient, case.choose(scores), atol=1e-15)


@every_map_with_vertices
def test_max_and_loss_have_right_derivatives_of_first_and_second_order(case: Map) -> None:
    (scores,) = kinks(case, (2, 4), 1)
    scores.requires_grad_()
    soft = torch.tensor([[0.2, 0.5, 0.3, 0.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    for f in (case.omega.max, lambda s: case.omega.loss(s, torch.tensor([1, 3])), lambda s: case.omega.loss(s, soft)):
        assert gradcheck(f, (scores,), check_forward_ad=True)
        assert gradgradcheck(f, (scores,), check_fwd_over_rev=True, fast_mode=True)


@every_map_with_vertices
@given(problem=problems(), seed=st.integers(0, 1000))
def test_the_loss_is_never_negative_and_its_gradient_is_p_minus_y(
    case: Map, problem: tuple[Tensor, int, Tensor], seed: int
) -> None:
    scores, dim, mask = problem
    scores = rows(scores, dim)
    mask = rows(mask, dim)
    target = torch.randint(scores.shape[-1], scores.shape[:-1], generator=torch.Generator().manual_seed(seed))
    scores.requires_grad_()
    loss = case.omega.loss(scores, target, mask=mask)
    allowed = mask.gather(-1, target[:, None]).squeeze(-1)
    assert (loss[~allowed] == torch.inf).all()
    assert (loss >= 0).all()
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    y = torch.nn.functional.one_hot(target, scores.shape[-1]).to(scores.dtype)
    expected = torch.where(mask, case.choose(scores, mask=mask) - y, 0.0)
    assert torch.allclose(gradient, expected, atol=TOLERANCE[scores.dtype], rtol=0)


@every_map_with_vertices
def test_the_loss_is_zero_exactly_at_its_own_choice(case: Map) -> None:
    scores = torch.randn(20, 5, dtype=torch.float64)
    p = case.choose(scores)
    assert (case.omega.loss(scores, p) < 1e-14).all()
    other = torch.distributions.Dirichlet(torch.ones(5, dtype=torch.float64)).sample((20,))
    assert (case.omega.loss(scores, other) > 1e-6).all()


@every_map_with_vertices
def test_class_indices_are_one_hot_targets(case: Map) -> None:
    scores, target = torch.randn(6, 3, 5, dtype=torch.float64), torch.randint(5, (6, 3))
    y = torch.nn.functional.one_hot(target, 5).double()
    assert torch.allclose(case.omega.loss(scores, target), case.omega.loss(scores, y), atol=1e-14)
    by_dim = case.omega.loss(scores.movedim(-1, 1), target, dim=1)
    assert torch.equal(by_dim, case.omega.loss(scores, target))


@every_map_with_vertices
def test_the_margin_is_the_lead_that_takes_all(case: Map) -> None:
    margin = case.omega.margin
    if margin is None:  # not known
        return
    if not math.isfinite(margin):
        scores = torch.tensor([5.0, 0.0], dtype=torch.float64)
        assert case.omega.loss(scores, torch.tensor(0)) > 0
        return
    margin = float(margin)
    for rest in (torch.zeros(1), -torch.rand(6)):
        rest = rest.double() - rest.max()
        at = torch.cat([torch.tensor([margin * (1 + 1e-9) + 1e-300], dtype=torch.float64), rest])
        assert case.choose(at)[0] == 1
        assert case.omega.loss(at, torch.tensor(0)) == 0
        if margin > 0:
            below = at.clone()
            below[0] = margin / 2
            assert case.choose(below)[0] < 1
            assert case.omega.loss(below, torch.tensor(0)) > 0


@every_map_level_at_its_vertices
def test_omega_is_zero_at_the_vertices_and_not_positive_between(case: Map) -> None:
    assert torch.equal(case.omega(torch.eye(4, dtype=torch.float64)), torch.zeros(4, dtype=torch.float64))
    inside = torch.distributions.Dirichlet(torch.ones(4, dtype=torch.float64)).sample((100,))
    assert (case.omega(inside) <= 1e-15).all()


# -- bad input ------------------------------------------------------------------------------------------


@every_map
@pytest.mark.parametrize(
    ("scores", "options", "error", "names"),
    [
        (torch.ones(3, dtype=torch.long), {}, TypeError, "scores"),
        (torch.ones(3, dtype=torch.bool), {}, TypeError, "scores"),
        (torch.ones(3, dtype=torch.complex64), {}, TypeError, "scores"),
        ([1.0, 2.0], {}, TypeError, "scores"),
        (torch.tensor(1.0), {}, ValueError, "scores"),
        (torch.ones(2, 0), {}, ValueError, "scores"),
        (torch.ones(0, 2), {"dim": 0}, ValueError, "scores"),
        (torch.ones(2, 3), {"dim": 2}, ValueError, "dim"),
        (torch.ones(2, 3), {"dim": -3}, ValueError, "dim"),
        (torch.ones(2, 3), {"dim": 1.0}, TypeError, "dim"),
        (torch.ones(2, 3), {"mask": torch.ones(2, 2, dtype=torch.bool)}, ValueError, "mask"),
        (torch.ones(3), {"mask": torch.ones(2, 3, dtype=torch.bool)}, ValueError, "mask"),
        (torch.ones(1, 3), {"mask": torch.ones(2, 3, dtype=torch.bool)}, ValueError, "mask"),
        (torch.ones(2, 3), {"mask": torch.ones(2, 3)}, TypeError, "mask"),
        (torch.ones(2, 3), {"mask": True}, TypeError, "mask"),
    ],
)
def test_bad_input_is_named(case: Map, scores: Tensor, options: dict, error: type, names: str) -> None:
    for f in (case.choose, case.omega.argmax, case.omega.max):
        if case.name == "scaled" and f is case.choose and isinstance(scores, list):
            continue  # the lambda divides before the library sees it
        with pytest.raises(error, match=names):
            f(scores, **options)
