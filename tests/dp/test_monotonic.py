"""Tokens and frames: real sizes against a plain recursion, infeasible lengths, durations."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fenchel
from fenchel import Gini, Hard, Regularizer, Shannon, Tsallis
from fenchel.dp import LinearChain, Monotonic

OMEGAS = [Hard(), Shannon(), Gini(), Tsallis(1.5), 0.3 * Shannon(), 4.0 * Tsallis(1.5)]


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def compiled(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> bool:
    set_kernels(request.param)
    return bool(request.param)


def recursion(scores: np.ndarray, join: np.ufunc) -> np.ndarray:
    """The values of all cells of one table (N, T), frame by frame."""
    v = np.full(scores.shape, -np.inf)
    v[0, 0] = scores[0, 0]
    for t in range(1, scores.shape[1]):
        v[0, t] = scores[0, t] + v[0, t - 1]
        v[1:, t] = scores[1:, t] + join(v[:-1, t - 1], v[1:, t - 1])
    return v


def best(scores: np.ndarray) -> np.ndarray:
    v, token, path = recursion(scores, np.maximum), len(scores) - 1, []
    for t in range(scores.shape[1] - 1, -1, -1):
        path.append(token)
        if t and token and v[token - 1, t - 1] > v[token, t - 1]:
            token -= 1
    return np.array(path[::-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_paths_and_values_of_real_size_are_those_of_a_plain_recursion(dtype: torch.dtype) -> None:
    scores = torch.randn(3, 70, 300, dtype=dtype, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([[70, 300], [33, 257], [64, 64]])
    d = Monotonic(scores, lengths)
    path = d.map()
    for b, (n, m) in enumerate(lengths.tolist()):
        table = scores[b, :n, :m].double().numpy()
        assert np.array_equal(path[b, :m], best(table))
        assert (path[b, m:] == -1).all()
        torch.testing.assert_close(d.exact_maximum()[b].item(), recursion(table, np.logaddexp)[-1, -1])
        forward, backward = recursion(table, np.logaddexp), recursion(table[::-1, ::-1], np.logaddexp)[::-1, ::-1]
        expected = np.exp(forward + backward - table - forward[-1, -1])
        np.testing.assert_allclose(d.marginals[b, :n, :m], expected, atol=1e-6 if dtype == torch.float32 else 1e-12)
    assert torch.equal(d.durations(hard=True).sum(-1), lengths[:, 1])
    torch.testing.assert_close(d.durations().sum(-1), lengths[:, 1].to(dtype), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 17])
def test_it_is_the_chain_whose_states_are_tokens(omega: Regularizer, tokens: int, compiled: bool) -> None:
    scores = torch.randn(2, tokens, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
    steps = torch.full((tokens, tokens), -torch.inf, dtype=torch.float64)
    steps.diagonal().zero_()
    steps.diagonal(1).zero_()
    ends = torch.full((2, tokens), -torch.inf, dtype=torch.float64)
    ends[0, 0] = ends[1, -1] = 0.0
    chain = LinearChain(scores.mT, steps, start=ends[0], end=ends[1], omega=omega)
    d = Monotonic(scores, omega=omega)
    torch.testing.assert_close(d.value, chain.value)
    torch.testing.assert_close(d.marginals, chain.marginals.mT)
    assert torch.equal(d.map(), chain.map())
    torch.testing.assert_close(d.entropy(), chain.entropy())
    torch.testing.assert_close(d.log_prob(chain.map()), chain.log_prob(chain.map()))


@pytest.mark.parametrize("omega", OMEGAS[:4], ids=str)
def test_with_fewer_frames_than_tokens_there_is_no_alignment(omega: Regularizer, compiled: bool) -> None:
    scores = torch.randn(2, 4, 6, dtype=torch.float64).requires_grad_()
    d = Monotonic(scores, torch.tensor([[4, 3], [4, 6]]), omega)
    assert d.value[0] == -torch.inf
    assert d.value[1].isfinite()
    assert (d.marginals[0] == 0).all()
    assert (d.map()[0] == -1).all()
    assert (d.sample(3)[:, 0] == -1).all()
    assert (d.top(2).probs[0] == 0).all()
    assert (d.durations(hard=True)[0] == 0).all()
    assert d.loss(d.map())[0] == torch.inf
    assert d.log_prob(d.map())[0] == -torch.inf
    d.value[1].backward()
    assert scores.grad is not None
    assert (scores.grad[0] == 0).all()
    assert Monotonic(torch.zeros(1, 3, 2)).value.item() == -torch.inf


def test_scores_that_no_alignment_can_use_do_not_matter(compiled: bool) -> None:
    scores = torch.randn(2, 4, 6, dtype=torch.float64)
    lengths = torch.tensor([[4, 5], [3, 6]])
    spoilt = scores.clone()
    for b, (n, m) in enumerate(lengths.tolist()):
        for i, t in itertools.product(range(4), range(6)):
            if i > t or i >= n or t >= m or n - i > m - t:
                spoilt[b, i, t] = torch.nan
    for omega in (Shannon(), Gini()):
        d, expected = Monotonic(spoilt, lengths, omega), Monotonic(scores, lengths, omega)
        assert torch.equal(d.value, expected.value)
        assert torch.equal(d.marginals, expected.marginals)
        assert torch.equal(d.map(), expected.map())
        torch.testing.assert_close(d.loss(d.map()), expected.loss(d.map()))


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_values_and_marginals_have_their_derivatives(omega: Regularizer) -> None:
    scores = torch.randn(2, 3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    lengths = torch.tensor([[3, 11], [2, 7]])

    def value(s: Tensor) -> Tensor:
        return Monotonic(s, lengths, omega).value

    assert gradcheck(value, scores)
    assert gradgradcheck(value, scores)
    assert gradcheck(lambda s: Monotonic(s, lengths, omega).durations(), scores)


@pytest.mark.parametrize(
    ("path", "message"),
    [([1, 1, 1, 1], "begin with token 0"), ([0, 0, 0, 0], "got"), ([0, 0, 1, 0], "steps of 0 or 1")],
)
def test_a_target_that_is_no_alignment_is_named(path: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Monotonic(torch.zeros(1, 2, 4)).loss(torch.tensor([path]))


def test_it_shows_what_it_is_and_names_wrong_shapes() -> None:
    assert repr(Monotonic(torch.zeros(2, 3, 4), omega=Gini())) == (
        "Monotonic(2 alignments of up to 3 tokens to 4 frames, omega=Gini())"
    )
    with pytest.raises(ValueError, match=r"target must have shape \(…, 1, 4\): tokens"):
        Monotonic(torch.zeros(1, 2, 4)).loss(torch.zeros(1, 3).long())
    with pytest.raises(ValueError, match="lengths must be in"):
        fenchel.dp.Monotonic(torch.zeros(1, 2, 4), torch.tensor([[3, 4]]))
