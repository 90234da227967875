"""Attention over lists of supports: chunks, threads, memory, second derivatives, and what cannot be listed."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.testing import assert_close

from fenchel import Gini, Norm, Shannon, Tsallis, attention
from fenchel.streaming import dot_product as module
from fenchel.streaming import supports as lean

EXACT = {"atol": 1e-12, "rtol": 1e-12}


@pytest.fixture(autouse=True)
def _lean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAN", 0)


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def results(monkeypatch: pytest.MonkeyPatch, least: int, inputs: tuple[Tensor, ...], **options: object) -> list[Tensor]:
    """Output and gradients with lists from so many scores on."""
    monkeypatch.setattr(module, "LEAN", least)
    output = attention(*inputs, **options)
    direction = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).cos()
    return [output.detach(), *torch.autograd.grad(output, inputs, direction)]


def agree(monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor, ...], **options: object) -> None:
    assert_close(results(monkeypatch, 0, inputs, **options), results(monkeypatch, 1 << 60, inputs, **options), **EXACT)


@pytest.mark.parametrize("chunk", [1, 64, 1000, 1 << 21])
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, chunk: int, causal: bool) -> None:
    monkeypatch.setattr(lean, "CHUNK", chunk)
    monkeypatch.setattr(lean, "WIDE", chunk)
    agree(monkeypatch, (randn(3, 40, 6), randn(3, 50, 6), randn(3, 50, 70)), is_causal=causal)
    agree(monkeypatch, (randn(2, 4, 3, 6), randn(2, 2, 50, 6), randn(2, 2, 50, 5)), is_causal=causal)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_supports_that_are_not_kept_are_made_again(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """By lists all, some chunks, and none."""
    monkeypatch.setattr(lean, "SPARSE", share)
    monkeypatch.setattr(lean, "CHUNK", 10 * 600)
    monkeypatch.setattr(lean, "WIDE", 10 * 600)
    query = randn(2, 30, 4)
    query = (query * torch.linspace(0.1, 5, 30, dtype=query.dtype).unsqueeze(-1)).detach().requires_grad_()
    inputs = (query, randn(2, 600, 4), randn(2, 600, 3))
    agree(monkeypatch, inputs, omega=Tsallis(1.4))
    agree(monkeypatch, inputs, omega=Tsallis(2.0), is_causal=True)
    agree(monkeypatch, inputs, omega=Tsallis(1.5), attn_mask=torch.rand(30, 600) < 0.5)


def test_flat_scores_have_wide_supports_and_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = randn(2, 9, 4), randn(2, 1500, 4), randn(2, 1500, 3)
    agree(monkeypatch, (query, key, value), scale=1e-3)
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


def test_alpha_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = randn(2, 4, 3, 2), randn(2, 2, 5, 2), randn(2, 2, 5, 2)
    alpha = torch.tensor([1.3, 1.5, 1.8, 1.99], dtype=torch.float64).view(4, 1, 1).requires_grad_()
    call = lambda a, *t: attention(*t, Tsallis(a), is_causal=True)  # noqa: E731
    gradcheck(call, (alpha, *inputs))
    gradgradcheck(call, (alpha, *inputs))


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


def test_a_score_that_is_not_finite_spoils_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = randn(3, 4), randn(5, 4), randn(5, 2)
    with torch.no_grad():
        query[1, 2] = torch.nan
    output = attention(query, key, value)
    assert output[1].isnan().all()
    assert not output[[0, 2]].isnan().any()
    output, weights = attention(query, key, value, return_weights="sparse")
    assert weights.to_dense()[1].isnan().all()
    monkeypatch.setattr(module, "LEAN", 1 << 60)
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
def test_no_matrix_of_queries_and_keys_is_held(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    seen = []
    original = lean._Pass.scores

    def watch(self: lean._Pass, chunk: lean.Chunk) -> object:
        scores = original(self, chunk)
        seen.append(self._room.numel())
        assert len(chunk.rows) < 1000
        return scores

    monkeypatch.setattr(lean._Pass, "scores", watch)
    monkeypatch.setattr(lean, "CHUNK", 1 << 16)
    monkeypatch.setattr(lean, "WIDE", 1 << 16)
    monkeypatch.setattr(lean, "SPARSE", share)
    query, key, value = (torch.randn(2, 1000, 8, requires_grad=True) for _ in range(3))
    attention(query, key, value, is_causal=True).sum().backward()
    attention(query, key, value, attn_mask=torch.rand(1000, 1000) < 0.5).sum().backward()
    assert seen
    assert max(seen) <= 1 << 16


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
    task = lean.Task(300, False, None, 0.0, lambda *_: (_[0], _[0]))
    work = lean._Pass(*inputs, 1.5, task)
    output, found = work.forward(keep=True)
    return [output, *work.backward(found, torch.ones_like(output), output.new_empty(0), False)[:3]]


def test_keys_and_values_may_be_grouped_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    agree(monkeypatch, (randn(1, 4, 3, 8), randn(1, 2, 5, 8), randn(1, 4, 5, 8)))
    agree(monkeypatch, (randn(1, 8, 3, 8), randn(1, 2, 5, 8), randn(1, 4, 5, 8)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_in_and_out(dtype: torch.dtype) -> None:
    inputs = tuple(torch.randn(2, 20, 8).to(dtype).requires_grad_() for _ in range(3))
    output = attention(*inputs)
    output.sum().backward()
    exact = attention(*(t.detach().double() for t in inputs))
    assert output.dtype == dtype
    assert all(t.grad is not None and t.grad.dtype == dtype for t in inputs)
    assert_close(output.double(), exact, atol=8 * torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)


def test_only_what_can_be_listed_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("lists")

    monkeypatch.setattr(module, "attend", refuse)
    query, key, value = randn(3, 4), randn(5, 4), randn(5, 2)
    for omega in (Shannon(), Norm(2.0), Tsallis(3.0), Tsallis(0.9)):
        attention(query, key, value, omega)
    attention(query, key, value, return_weights=True)
    attention(query, key, value, attn_mask=randn(3, 5))
    monkeypatch.setattr("fenchel.kernels.ENABLED", False)
    attention(query, key, value)
    monkeypatch.setattr("fenchel.kernels.ENABLED", True)
    with pytest.raises(AssertionError, match="lists"):
        attention(query, key, value)


@pytest.mark.parametrize(("heads", "queries", "keys", "listed"), [(2048, 1, 64, False), (8, 1, 32768, True)])
def test_many_heads_of_few_scores_are_no_work_for_lists(
    heads: int, queries: int, keys: int, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the bounds as they are
    seen: list[int] = []
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *given: seen.append(1) or attend(*given))
    with torch.no_grad():
        attention(*(torch.randn(heads, length, 4) for length in (queries, keys, keys)))
    assert bool(seen) is listed
