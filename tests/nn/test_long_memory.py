"""Attention with a long memory: causal, chunk by chunk, padded or not, with a state that says all."""

import math

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel.continuous import GaussianBasis, LongMemory
from fenchel.nn import ChunkState, LongMemoryAttention


def layer(recent: int = 5, sticky: bool = False, horizon: int = 1, alpha: float = 2.0) -> LongMemoryAttention:
    torch.manual_seed(1)
    basis = GaussianBasis.line(6, widths=(0.15,))
    return LongMemoryAttention(
        LongMemory(basis, 8, 2, alpha, sticky=sticky, horizon=horizon, contraction=0.6), recent=recent
    ).double()


def inputs(length: int = 21, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def run(layer: LongMemoryAttention, x: Tensor, size: int) -> tuple[Tensor, ChunkState]:
    outputs, state = [], None
    for part in x.split(size, 1):
        found = layer(part, state)
        outputs.append(found.output)
        state = found.state
    assert state is not None
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("omega", [fenchel.Shannon(), fenchel.Gini()])
def test_without_the_memory_it_is_attention_to_a_window(omega: fenchel.Regularizer) -> None:
    basis = GaussianBasis.line(6, widths=(0.15,))
    module = LongMemoryAttention(LongMemory(basis, 8, 2), recent=5, omega=omega).double()
    torch.nn.init.zeros_(module.memory.out.weight)
    x = inputs()
    found, _ = run(module, x, 7)
    weights, biases = module.attention.in_proj_weight.chunk(3), module.attention.in_proj_bias.chunk(3)
    q, k, v = ((x @ w.mT + b).unflatten(-1, (2, 4)).transpose(1, 2) for w, b in zip(weights, biases, strict=True))
    place = torch.arange(21)
    begin = (place // 7 * 7 - 5).clamp_min(0)  # of the window of each query
    seen = (place <= place[:, None]) & (place >= begin[:, None])
    p = omega.argmax((q @ k.mT / 2).masked_fill(~seen, -math.inf))
    expected = module.attention.out_proj((p @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(found, expected)


def test_the_memory_adds_what_attend_finds_in_all_that_is_not_recent() -> None:
    module, x = layer(), inputs()
    found, state = run(module, x, 7)
    memory = module.memory.update(x[:, :2])  # 7 inputs, of which 5 are recent
    memory = module.memory.update(x[:, 2:9], memory)
    context = module.memory.attend(x[:, 14:], memory).context
    torch.nn.init.zeros_(module.memory.out.weight)
    torch.testing.assert_close(found[:, 14:], run(module, x, 7)[0][:, 14:] + context)
    assert state.memory is not None
    torch.testing.assert_close(state.memory.coefficients, module.memory.update(x[:, 9:16], memory).coefficients)
    assert torch.equal(state.recent, x[:, 16:])


@pytest.mark.parametrize("sticky", [False, True])
def test_later_inputs_change_no_earlier_output(sticky: bool) -> None:
    module, x = layer(sticky=sticky), inputs()
    changed = x.clone()
    changed[:, 12] += 1
    first, second = run(module, x, 7)[0], run(module, changed, 7)[0]
    assert torch.equal(first[:, :12], second[:, :12])
    assert bool(((first - second)[:, 12:].abs().amax((0, 2)) > 0).all())


def test_the_memory_reaches_back_to_the_first_input() -> None:
    module, x = layer(recent=2), inputs(40)
    x.requires_grad_()
    module.memory.horizon = 100
    (grad,) = torch.autograd.grad(run(module, x, 4)[0][:, -1].sum(), x)
    assert bool((grad.abs().amax((0, 2)) > 0).all())


def test_padded_chunks_are_those_without_padding() -> None:
    module, x = layer(), inputs(24)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[1, 5:8] = mask[1, 12:16] = mask[1, 20:] = False
    outputs, state = [], None
    for part, there in zip(torch.where(mask[..., None], x, math.nan).split(8, 1), mask.split(8, 1), strict=True):
        found = module(part, state, there)
        outputs.append(found.output)
        state = found.state
    together = torch.cat(outputs, 1)
    assert not together[~mask].any()
    assert not together.isnan().any()
    # Padding counts as recent, so the parts that the layer sees at once are compared where nothing is pushed out.
    alone = module(x[1:, :5])
    torch.testing.assert_close(together[1:, :5], alone.output)
    whole = run(module, x[:1], 8)[0]
    torch.testing.assert_close(together[:1], whole, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("masked", [False, True])
def test_remember_gives_the_state_of_forward(masked: bool) -> None:
    module, x = layer(), inputs()
    mask = torch.arange(7) < torch.tensor([[7], [4]]) if masked else None
    state = module(x[:, :7]).state
    one, two = module(x[:, 7:14], state, mask).state, module.remember(x[:, 7:14], state, mask)
    assert torch.equal(one.recent, two.recent)
    assert one.memory is not None
    assert two.memory is not None
    assert torch.equal(one.memory.coefficients, two.memory.coefficients)
    assert (one.mask is None) == (two.mask is None) == (not masked)


def test_backward_after_every_chunk_works_with_a_detached_state() -> None:
    module, state = layer(), None
    for part in inputs().split(7, 1):
        found = module(part, state)
        (found.output.square().sum() + found.penalty.sum()).backward()
        state = found.state.detach()
    assert all(p.grad is not None for p in module.parameters())


def test_the_penalty_is_that_of_the_memory() -> None:
    module, x = layer(), inputs()
    state = module(x[:, :7]).state
    found = module(x[:, 7:14], state)
    assert torch.equal(found.penalty, module.memory.attend(x[:, 7:14], state.memory).penalty)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_derivatives_agree_with_finite_differences(alpha: float) -> None:
    module = layer(recent=2, horizon=2, alpha=alpha)
    x = inputs(9, 1)[..., :].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: run(module, x, 3)[0][:, -2:], (x,))


def test_bad_input_is_refused() -> None:
    module = layer()
    with pytest.raises(TypeError, match="memory must be a LongMemory"):
        LongMemoryAttention(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recent must be"):
        LongMemoryAttention(module.memory, recent=-1)
    with pytest.raises(ValueError, match="x must have shape"):
        module(torch.zeros(2, 3, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match="mask must have shape"):
        module(inputs(), None, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="state must be that of the chunk before"):
        module(inputs(), torch.zeros(2))
    with pytest.raises(ValueError, match="state must have 3 sequences of width 8"):
        module(inputs(batch=3), module(inputs()).state)
