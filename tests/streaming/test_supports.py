"""Attention over lists of supports: chunks, threads, memory, second derivatives, and what cannot be listed."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.testing import assert_close

from fenchel import Gini, Norm, Shannon, Tsallis, attention, kernels
from fenchel.regularizers.tsallis import TSALLIS
from fenchel.streaming import Plan, dot_product, supports, using
from watch import Largest

EXACT = {"atol": 1e-12, "rtol": 1e-12}


@pytest.fixture(autouse=True)
def _by_supports() -> Iterator[None]:
    with using(Plan("supports")):
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def results(plan: Plan, inputs: tuple[Tensor, ...], **options: object) -> list[Tensor]:
    """Output and gradients by a plan."""
    with using(plan):
        output = attention(*inputs, **options)
        direction = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).cos()
        return [output.detach(), *torch.autograd.grad(output, inputs, direction)]


def agree(inputs: tuple[Tensor, ...], plan: Plan = Plan("supports"), **options: object) -> None:  # noqa: B008
    assert_close(results(plan, inputs, **options), results(Plan("dense"), inputs, **options), **EXACT)


@pytest.mark.parametrize("rows", [1, 16, 24, 1 << 16])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_do_not_matter(rows: int, causal: bool) -> None:
    plan = Plan("supports", rows=rows)
    agree((randn(3, 40, 6), randn(3, 50, 6), randn(3, 50, 70)), plan, is_causal=causal)
    agree((randn(2, 4, 3, 6), randn(2, 2, 50, 6), randn(2, 2, 50, 5)), plan, is_causal=causal)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_supports_that_are_not_kept_are_made_again(share: float) -> None:
    """By lists none, some blocks, and all."""
    plan = Plan("supports", rows=16, share=share)
    query = randn(2, 30, 4)
    query = (query * torch.linspace(0.1, 5, 30, dtype=query.dtype).unsqueeze(-1)).detach().requires_grad_()
    inputs = (query, randn(2, 600, 4), randn(2, 600, 3))
    agree(inputs, plan, omega=Tsallis(1.4))
    agree(inputs, plan, omega=Tsallis(2.0), is_causal=True)
    agree(inputs, plan, omega=Tsallis(1.5), attn_mask=torch.rand(30, 600) < 0.5)


def test_flat_scores_have_wide_supports_and_stay_exact() -> None:
    query, key, value = randn(2, 9, 4), randn(2, 1500, 4), randn(2, 1500, 3)
    agree((query, key, value), scale=1e-3)
    weights = attention(query, key, value, scale=1e-3, return_weights="sparse")[1]
    assert weights.values().numel() > 0.9 * 2 * 9 * 1500


@pytest.mark.parametrize("alpha", [1.25, 1.6, 2.0])
def test_one_row_against_its_definition(alpha: float) -> None:
    query, key, value = (t.detach() for t in (randn(1, 5), randn(40, 5), randn(40, 2)))
    expected = Tsallis(alpha).argmax(key @ query[0] / math.sqrt(5)) @ value
    assert_close(attention(query, key, value, Tsallis(alpha))[0], expected, **EXACT)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"omega": Gini()}, {"omega": 0.3 * Tsallis(1.7)}], ids=str
)
def test_derivatives_of_first_and_second_order(options: dict) -> None:
    inputs = randn(2, 3, 2), randn(2, 4, 2), randn(2, 4, 2)
    gradcheck(lambda *t: attention(*t, **options), inputs)
    gradgradcheck(lambda *t: attention(*t, **options), inputs)


def test_alpha_is_learned() -> None:
    inputs = randn(2, 4, 3, 2), randn(2, 2, 5, 2), randn(2, 2, 5, 2)
    alpha = torch.tensor([1.3, 1.5, 1.8, 1.99], dtype=torch.float64).view(4, 1, 1).requires_grad_()
    call = lambda a, *t: attention(*t, Tsallis(a), is_causal=True)  # noqa: E731
    gradcheck(call, (alpha, *inputs))
    gradgradcheck(call, (alpha, *inputs))


def test_heads_may_have_alphas_of_every_size() -> None:
    """Dense ones next to 1, and steep ones above 2, beside a sparse one; lists for some blocks, none, or all."""
    alphas = torch.tensor([1.5, 1.0, 1.0003, 0.8, 2.5, torch.inf], dtype=torch.float64).reshape(6, 1, 1)
    inputs = (randn(6, 20, 5), randn(6, 300, 5), randn(6, 300, 4))
    for rows, share in ((20, 0.15), (1 << 16, 0.0), (1 << 16, 1.0)):
        agree(inputs, Plan("supports", rows=rows, share=share), omega=Tsallis(alphas))


def test_steep_alphas_have_the_derivatives_of_finite_differences() -> None:
    alpha = torch.tensor([[1.3], [2.5], [1.0], [3.0]], dtype=torch.float64).requires_grad_()
    inputs = (randn(2, 4, 3), randn(2, 9, 3), randn(2, 9, 2), alpha)
    assert gradcheck(lambda q, k, v, a: attention(q, k, v, Tsallis(a)), inputs)


def test_sparse_weights_are_differentiable_in_lists() -> None:
    inputs = randn(2, 3, 2), randn(2, 4, 2), randn(2, 4, 2)

    def both(*t: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = attention(*t, return_weights="sparse")
        return output, weights.to_dense().sin()

    gradcheck(both, inputs)
    assert_close(both(*inputs)[1].arcsin(), attention(*inputs, return_weights=True)[1].flatten(0, 1), **EXACT)


def test_dropout_is_the_same_in_both_passes() -> None:
    query, key, value = randn(2, 30, 4), randn(2, 60, 4), randn(2, 60, 3)

    def call(*t: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attention(*t, dropout_p=0.4)

    gradcheck(call, (query, key, value), fast_mode=True)
    gradgradcheck(call, (query, key, value), fast_mode=True)
    mean = torch.stack([attention(query, key, value, dropout_p=0.4).detach() for _ in range(2000)]).mean(0)
    assert_close(mean, attention(query, key, value).detach(), atol=0.1, rtol=0)


def test_a_score_that_is_not_finite_spoils_its_own_row() -> None:
    query, key, value = randn(3, 4), randn(5, 4), randn(5, 2)
    with torch.no_grad():
        query[1, 2] = torch.nan
    output = attention(query, key, value)
    assert output[1].isnan().all()
    assert not output[[0, 2]].isnan().any()
    output, weights = attention(query, key, value, return_weights="sparse")
    assert weights.to_dense()[1].isnan().all()
    with using(Plan("dense")):
        assert_close(output, attention(query, key, value), equal_nan=True, **EXACT)


def test_forward_mode_is_right() -> None:
    query, key, value = (t.detach() for t in (randn(3, 4), randn(5, 4), randn(5, 2)))
    direction = torch.randn_like(query)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(attention(forward_ad.make_dual(query, direction), key, value)).tangent
    step = 1e-6
    change = attention(query + step * direction, key, value) - attention(query - step * direction, key, value)
    assert_close(tangent, change / (2 * step), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("share", [0.0, 1 / 16])
def test_no_matrix_of_queries_and_keys_is_held(share: float) -> None:
    query, key, value = (torch.randn(2, 1000, 8, requires_grad=True) for _ in range(3))
    mask = torch.rand(1000) < 0.5
    for options in ({"is_causal": True}, {"attn_mask": mask}):
        with using(Plan("supports", rows=64, share=share)), Largest(kernels=True) as seen:
            attention(query, key, value, **options).sum().backward()
        assert 8000 <= seen.elements <= 2 * 64 * 1000
        with using(Plan("dense")), Largest() as seen:
            attention(query, key, value, **options).sum().backward()
        assert seen.elements == 2 * 1000 * 1000


def test_rows_are_the_same_to_the_bit_whatever_the_threads() -> None:
    inputs = tuple(torch.randn(2, 300, 24, requires_grad=True) for _ in range(3))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(_lists(inputs))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def _lists(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What the loops make of given scores; the product that gives these is torch's."""
    task = supports.Task(TSALLIS, 128, 18, (2,), 300)
    work = supports.Blocks(*inputs, None, 1.5, task)
    output, found = work.forward(keep=True)
    return [output, *work.backward(found, torch.ones_like(output), None, (True, True, True, False))[:3]]


def test_keys_and_values_may_be_grouped_differently() -> None:
    agree((randn(1, 4, 3, 8), randn(1, 2, 5, 8), randn(1, 4, 5, 8)))
    agree((randn(1, 8, 3, 8), randn(1, 2, 5, 8), randn(1, 4, 5, 8)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_in_and_out(dtype: torch.dtype) -> None:
    inputs = tuple(torch.randn(2, 20, 8).to(dtype).requires_grad_() for _ in range(3))
    output = attention(*inputs)
    output.sum().backward()
    exact = attention(*(t.detach().double() for t in inputs))
    assert output.dtype == dtype
    assert all(t.grad is not None and t.grad.dtype == dtype for t in inputs)
    assert_close(output.double(), exact, atol=8 * torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)


def test_only_what_can_be_listed_is(set_kernels: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("lists")

    monkeypatch.setattr(dot_product, "attend", refuse)
    query, key, value = randn(3, 4), randn(5, 4), randn(5, 2)
    for omega in (Shannon(), Norm(2.0), Tsallis(1.0), Tsallis(0.9)):
        attention(query, key, value, omega)
    attention(query, key, value, return_weights=True)
    attention(query, key, value, attn_mask=randn(3, 5))
    set_kernels(False)
    attention(query, key, value)
    set_kernels(True)
    for omega in (Tsallis(1.5), Tsallis(3.0), Tsallis(1.0003), Tsallis(torch.tensor([[1.0], [1.5], [2.5]]))):
        with pytest.raises(AssertionError, match="lists"):
            attention(query, key, value, omega)


def test_how_many_rows_there_are_does_not_decide_how_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    attend = kernels.find("attend", "tsallis", (1.5,))

    def spy(*args: Tensor, **options: object) -> object:
        called.append(1)
        return attend(*args, **options)

    remove = kernels.register("attend", "tsallis", spy)
    try:
        for keys, listed in ((64, False), (255, False), (256, True), (32768, True)):
            for heads, queries in ((1, 1), (8, 1), (3, 40)):
                called.clear()
                with torch.no_grad(), using(None):
                    attention(*(torch.randn(heads, length, 4) for length in (queries, keys, keys)))
                assert bool(called) is listed
    finally:
        remove()
