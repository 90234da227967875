"""The table of kernels: a back end from outside the package is reached by maps and losses, and by nothing else."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import fenchel
from fenchel import kernels


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

    def class_loss(self, z: Tensor, index: Tensor, residual: bool, alpha: float) -> tuple[Tensor, Tensor]:
        self.calls.append("class_loss")
        p = self.argmax(z, alpha)
        y = torch.nn.functional.one_hot(index, z.shape[-1])
        return (p * z).sum(-1) - (p.square().sum(-1) - 1) / 2 - (y * z).sum(-1), p - y


@pytest.fixture
def back_end() -> Iterator[Numpy]:
    own = Numpy()
    removers = [
        kernels.register(step, "tsallis", getattr(own, step), dtypes=(torch.float64,), ranges=((2.0, 2.0),))
        for step in ("argmax", "product", "class_loss")
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
    from fenchel.kernels import markov

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
        assert calls == ["advance", "expect"]
        fenchel.dp.LinearChain(unary.float(), step.float(), omega=fenchel.Gini()).marginals  # noqa: B018
        fenchel.dp.LinearChain(unary, step, omega=fenchel.Tsallis(1.5)).marginals  # noqa: B018
        assert calls == ["advance", "expect"]
    finally:
        remove()
    assert torch.equal(found, fenchel.dp.LinearChain(unary, step, omega=0.5 * fenchel.Gini()).marginals)


def test_a_back_end_serves_what_it_was_registered_for_and_no_more(back_end: Numpy) -> None:
    scores = torch.randn(3, 5, dtype=torch.float64)
    fenchel.entmax(scores, 1.5)
    fenchel.normmax(scores)
    fenchel.sparsemax(scores.float())
    assert back_end.calls == []
    fenchel.entmax(scores, torch.tensor([[2.0], [2.0], [1.5]], dtype=torch.float64))
    assert back_end.calls == []


def test_kernels_that_are_off_are_not_found(back_end: Numpy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ENABLED", False)
    fenchel.sparsemax(torch.randn(3, 5, dtype=torch.float64))
    assert back_end.calls == []


def test_the_table_knows_the_ranges_of_parameters() -> None:
    scores = torch.randn(3, 5)
    for alpha, known in ((1.5, True), (2, True), (1.0, False), (1.0005, False), (0.5, True), (1e4, False)):
        assert (kernels.find("argmax", "tsallis", (alpha,), scores) is not None) == known
    for alpha, known in ((1.5, True), (2.5, False), (1.0005, False)):
        assert (kernels.find("attend", "tsallis", (alpha,), scores) is not None) == known
    assert kernels.find("argmax", "tsallis", (1.5,), scores.to("meta")) is None
    assert kernels.find("argmax", "tsallis", (1.5,), scores.half()) is None
    assert kernels.find("argmax", "nobody", (1.5,), scores) is None
