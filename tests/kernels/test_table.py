"""The table of kernels: a back end from outside is reached by maps, losses, attention, memories and output layers."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import fenchel
from fenchel import kernels
from fenchel.streaming import Plan, using


class Numpy:
    """Sparsemax by sorting, in NumPy, and a list of the calls that reached it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def argmax(self, z: Tensor, alpha: float) -> Tensor:
        self.calls.append("argmax")
        x = z.detach().numpy()
        ordered = -np.sort(-x, -1)
        sums = ordered.cumsum(-1) - 1
        count = (ordered * np.arange(1, x.shape[-1] + 1) > sums).sum(-1, keepdims=True)
        return torch.from_numpy(np.maximum(x - np.take_along_axis(sums, count - 1, -1) / count, 0))

    def product(self, v: Tensor, z: Tensor | None, p: Tensor, alpha: float) -> Tensor:
        self.calls.append("product")
        support = p > 0
        mean = torch.where(support, v, 0.0).sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
        return torch.where(support, v - mean, 0.0)

    def class_loss(self, z: Tensor, index: Tensor, residual: float, alpha: float) -> tuple[Tensor, Tensor]:
        self.calls.append("class_loss")
        p = self.argmax(z, alpha)
        y = torch.nn.functional.one_hot(index, z.shape[-1])
        return (p * z).sum(-1) - (p.square().sum(-1) - 1) / 2 - (y * z).sum(-1), residual * (p - y)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, alpha: float, *, mask, key_counts, dropout, most, workspace
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        self.calls.append("attend")
        keys = key.shape[1] if key_counts is None else int(key_counts.max())
        scores = np.einsum("hre,hse->hrs", query.numpy(), key.numpy()[:, :keys])
        if key_counts is not None:
            scores[:, np.arange(keys) >= key_counts.numpy()[:, None]] = -np.inf
        if mask is not None:
            scores = np.where(mask.numpy(), scores, -np.inf)
        weights = self.argmax(torch.from_numpy(scores), alpha).numpy()
        assert dropout == 0
        output = torch.from_numpy(np.einsum("hrs,hsd->hrd", weights, value.numpy()[:, :keys]))
        if np.count_nonzero(weights) > most:
            return output, None
        _, _, indices = weights.nonzero()
        starts = np.concatenate([[0], (weights > 0).reshape(-1, keys).sum(-1).cumsum()])
        found = starts, indices.astype(np.int32), weights[weights > 0], np.empty(0)
        return output, tuple(map(torch.from_numpy, found))

    def attend_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, alpha: float, *, supports, to_weights, **to
    ) -> tuple[Tensor, None]:
        self.calls.append("attend_backward")
        starts, indices, weights, _ = supports
        heads, rows, _ = query.shape
        to_query = torch.zeros_like(query)
        for row in range(heads * rows):
            h, r = divmod(row, rows)
            at = indices[starts[row] : starts[row + 1]].long()
            p = weights[starts[row] : starts[row + 1]]
            slope = value[h, at] @ grad[h, r]
            slope = slope - slope.mean()
            to_query[h, r] = slope @ key[h, at]
            to["to_key"][h].index_add_(0, at, slope.outer(query[h, r]))
            to["to_value"][h].index_add_(0, at, p.outer(grad[h, r]))
        return to_query, None

    def linear_class_loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        index: Tensor,
        alpha: float,
        *,
        rates,
        most,
        workspace,
        **_,
    ) -> tuple[Tensor, None, None]:
        self.calls.append("linear_class_loss")
        losses, residual = self.class_loss(hidden @ weight.T + (0 if bias is None else bias), index, True, alpha)
        if rates is not None:
            workspace[: len(hidden)] = rates.unsqueeze(-1) * residual
        return losses, None, None


@pytest.fixture
def back_end() -> Iterator[Numpy]:
    own = Numpy()
    removers = [
        kernels.register(step, "tsallis", getattr(own, step), dtypes=(torch.float64,), ranges=((2.0, 2.0),))
        for step in ("argmax", "product", "class_loss", "attend", "attend_backward", "linear_class_loss")
    ]
    yield own
    for remove in removers:
        remove()


def test_a_back_end_serves_maps_derivatives_and_losses(back_end: Numpy) -> None:
    scores = torch.randn(3, 5, dtype=torch.float64)
    expected = fenchel.sparsemax(scores.float())
    assert back_end.calls == []  # of another dtype
    for spelling in (fenchel.sparsemax, fenchel.Gini().argmax, (1.0 * fenchel.Gini()).argmax):
        back_end.calls.clear()
        assert torch.allclose(spelling(scores), expected.double(), atol=1e-6)
        assert back_end.calls == ["argmax"]
    back_end.calls.clear()
    leaf = scores.clone().requires_grad_()
    fenchel.sparsemax(leaf).square().sum().backward()
    assert back_end.calls == ["argmax", "product"]
    back_end.calls.clear()
    loss = fenchel.sparsemax_loss(leaf, torch.tensor([0, 1, 2]))
    loss.backward()
    assert back_end.calls[0] == "class_loss"
    with torch.no_grad():
        assert torch.allclose(loss.float(), fenchel.sparsemax_loss(scores.float(), torch.tensor([0, 1, 2])), atol=1e-6)
    assert torch.autograd.gradcheck(lambda s: fenchel.sparsemax(s), leaf)


def test_a_back_end_serves_dynamic_programs() -> None:
    from fenchel.kernels.cpu.dp import markov

    calls: list[str] = []

    class Counted:
        """The kernels of chains, and a list of the calls that reached them."""

        def __getattr__(self, name: str) -> Callable[..., object]:
            calls.append(name)
            return getattr(markov, name)

    remove = kernels.register("chain", "tsallis", Counted(), dtypes=(torch.float64,), ranges=((2.0, 2.0),))
    try:
        unary, step = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
        found = fenchel.dp.LinearChain(unary, step, omega=0.5 * fenchel.KSubsets(1)).marginals
        assert calls == ["forward", "gradient"]
        fenchel.dp.LinearChain(unary.float(), step.float(), omega=fenchel.Gini()).marginals  # noqa: B018
        fenchel.dp.LinearChain(unary, step, omega=fenchel.Tsallis(1.5)).marginals  # noqa: B018
        assert calls == ["forward", "gradient"]
    finally:
        remove()
    assert torch.equal(found, fenchel.dp.LinearChain(unary, step, omega=0.5 * fenchel.Gini()).marginals)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_a_back_end_serves_attention(back_end: Numpy, is_causal: bool, share: float) -> None:
    inputs = [torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True) for n in (30, 40, 40)]
    plan = Plan("supports", rows=16, share=share)

    def run(plan: Plan) -> list[Tensor]:
        with using(plan):
            output = fenchel.attention(*inputs, fenchel.Gini(), is_causal=is_causal)
            return [output.detach(), *torch.autograd.grad(output.sin().sum(), inputs)]

    found = run(plan)
    listed = {"attend", "attend_backward"} if share else {"attend", "product"}
    assert listed <= set(back_end.calls)
    back_end.calls.clear()
    torch.testing.assert_close(found, run(Plan("dense")), atol=1e-12, rtol=1e-12)
    assert "attend" not in back_end.calls


def test_a_back_end_serves_modules_memories_and_output_layers(back_end: Numpy) -> None:
    layer = fenchel.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64, omega=fenchel.Gini())
    x = torch.randn(1, 300, 6, dtype=torch.float64)
    padding = torch.zeros(1, 300, dtype=torch.bool)
    padding[0, -20:] = True
    output, _ = layer(x, x, x, need_weights=False, key_padding_mask=padding, is_causal=True)
    assert "attend" in back_end.calls
    torch.testing.assert_close(output, layer(x, x, x, key_padding_mask=padding, is_causal=True)[0])
    back_end.calls.clear()
    memory = fenchel.hopfield.Memory(torch.nn.Parameter(x[0]), fenchel.Gini())
    memory.step(x[0, :5])
    assert "attend" in back_end.calls
    back_end.calls.clear()
    hidden, weight = x[0].clone().requires_grad_(), torch.randn(50, 6, dtype=torch.float64)
    target = torch.randint(50, (300,))
    loss = fenchel.linear_entmax_loss(hidden, weight, target, alpha=2.0)
    assert "linear_class_loss" in back_end.calls
    expected = fenchel.sparsemax_loss(hidden @ weight.T, target)
    torch.testing.assert_close(loss, expected)
    slopes = [torch.autograd.grad(each, hidden)[0] for each in (loss, expected)]
    torch.testing.assert_close(*slopes)


def test_a_back_end_serves_what_it_was_registered_for_and_no_more(back_end: Numpy) -> None:
    scores = torch.randn(3, 5, dtype=torch.float64)
    fenchel.entmax(scores, 1.5)
    fenchel.normmax(scores)
    fenchel.sparsemax(scores.float())
    assert back_end.calls == []
    fenchel.entmax(scores, torch.tensor([[2.0], [2.0], [1.5]], dtype=torch.float64))
    assert back_end.calls == []


def test_kernels_that_are_off_are_not_found(back_end: Numpy, set_kernels: Callable[[bool], None]) -> None:
    set_kernels(False)
    fenchel.sparsemax(torch.randn(3, 5, dtype=torch.float64))
    assert back_end.calls == []


def test_the_table_knows_the_ranges_of_parameters() -> None:
    scores = torch.randn(3, 5)
    for alpha, known in ((1.5, True), (1.0, True), (1.0005, True), (0.5, True), (math.inf, True), (1e-3, False)):
        assert (kernels.find("argmax", "tsallis", (alpha,), scores) is not None) == known
    for alpha, known in ((1.5, True), (2.5, True), (1.0005, True), (1e-3, False)):
        assert (kernels.find("attend", "tsallis", (alpha,), scores) is not None) == known
    for alpha, known in ((1.5, True), (2.5, False), (1.0005, True), (1.0, False)):
        assert (kernels.find("linear_class_loss", "tsallis", (alpha,), scores) is not None) == known
    assert kernels.find("argmax", "tsallis", (1.5,), scores.to("meta")) is None
    assert kernels.find("argmax", "tsallis", (1.5,), scores.half()) is None
    assert kernels.find("argmax", "nobody", (1.5,), scores) is None
