"""Tensor subclasses, dispatch modes, fake tensors, and NumPy scalars."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import fenchel
from fenchel import Gini, SparseMAP, TotalVariation2d
from fenchel.continuous import BetaGaussian
from fenchel.dp import Lattice, LinearChain, barycenter, dtw
from fenchel.factors import Budget, Exactly, Knapsack
from fenchel.hopfield import Hopfield, Memory, capacity
from fenchel.mixed import MaximumEntropy
from fenchel.seq2seq import (
    repetition,
)
from fenchel.structures import Chain, DependencyTree, SequentialSubsets, Subsets
from maps import MAPS, Map
from test_devices import HEADS, PATTERNS, ROWS, SERIES, STATES, STEP, TARGET


class Plain(Tensor):
    """A subclass that changes nothing."""


class Wrapped(Tensor):
    """A subclass that holds another tensor and computes with it."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapped":
        made: Wrapped = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda t: t.held if isinstance(t, Wrapped) else t, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map(lambda t: Wrapped(t) if isinstance(t, Tensor) and not isinstance(t, Wrapped) else t, result)


class Counting(TorchDispatchMode):
    """A mode that counts operations and computes them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def unwrapped(t: Tensor) -> Tensor:
    return t.held if isinstance(t, Wrapped) else t.as_subclass(Tensor)


@pytest.mark.parametrize("case", [m for m in MAPS if not m.plain], ids=str)
def test_subclasses_and_dispatch_modes_give_the_same(case: Map) -> None:
    scores = torch.randn(3, 6, dtype=torch.float64)
    direction = torch.randn_like(scores)
    leaf = scores.clone().requires_grad_()
    expected = case.choose(leaf)
    (slope,) = torch.autograd.grad(expected, leaf, direction)
    for make in (lambda: scores.clone().as_subclass(Plain), lambda: Wrapped(scores.clone()), scores.clone):
        leaf = make().requires_grad_()
        if isinstance(leaf, Plain | Wrapped):
            p = case.choose(leaf)
            (found,) = torch.autograd.grad((p * direction).sum(), leaf)
        else:
            with Counting() as mode:
                p = case.choose(leaf)
                (found,) = torch.autograd.grad(p, leaf, direction)
            assert mode.count > 0
        assert torch.allclose(unwrapped(p.detach()), expected, atol=1e-12)
        assert torch.allclose(unwrapped(found), slope, atol=1e-9)


@pytest.mark.parametrize("case", [m for m in MAPS if not m.plain], ids=str)
def test_fake_tensors_give_a_shape_or_a_clear_error(case: Map) -> None:
    with FakeTensorMode():
        scores = torch.randn(3, 6)
        if case.opaque:
            with pytest.raises(RuntimeError, match="no fake or meta tensors"):
                case.choose(scores)
        else:
            assert case.choose(scores).shape == (3, 6)


@pytest.mark.parametrize(
    ("structure", "shape"),
    [(Chain(STEP), (2, 5, 3)), (DependencyTree(), (2, 4, 5)), (SequentialSubsets(2, transition=0.3), (2, 6))],
    ids=lambda each: type(each).__name__,
)
def test_subclasses_and_dispatch_modes_give_the_same_structures(structure: Any, shape: tuple[int, ...]) -> None:
    omega, scores = SparseMAP(structure), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    target, direction = structure.map(scores.flip(-2)), torch.linspace(0, 1, scores.numel()).reshape(shape)

    def results(s: Tensor) -> list[Tensor]:
        s = s.requires_grad_()
        p = omega.argmax(s)
        return [p, omega.loss(s, target), torch.autograd.grad((p * direction).sum(), s)[0]]

    expected = results(scores.clone())
    with Counting():
        watched = results(scores.clone())
    for found in (results(scores.clone().as_subclass(Plain)), watched):
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x.as_subclass(Tensor), y)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.int32])
def test_numpy_scalars_are_numbers(kind: type) -> None:
    two, dim = kind(2), np.int64(-1)
    assert torch.equal(fenchel.entmax(ROWS, two, dim), fenchel.entmax(ROWS, 2.0))
    assert torch.equal(fenchel.normmax(ROWS, two, dim), fenchel.normmax(ROWS, 2.0))
    assert torch.equal(fenchel.k_subsets(ROWS, two, dim), fenchel.k_subsets(ROWS, 2))
    assert torch.equal(fenchel.fusedmax(ROWS, two, dim), fenchel.fusedmax(ROWS, 2.0))
    assert torch.equal(fenchel.constrained_softmax(ROWS, two, dim), fenchel.constrained_softmax(ROWS, 2.0))
    assert torch.equal((two * Gini()).argmax(ROWS, dim), (2.0 * Gini()).argmax(ROWS))
    assert torch.equal(fenchel.tvmax2d(ROWS, two), fenchel.tvmax2d(ROWS, 2.0))
    assert torch.equal(
        fenchel.entmax_loss(ROWS.T, TARGET, two, dim=np.int32(0)), fenchel.entmax_loss(ROWS.T, TARGET, 2.0, dim=0)
    )
    for loss in (fenchel.sparsemax_loss, lambda s, y, **options: fenchel.linear_entmax_loss(s, s, y, **options)):
        assert torch.equal(loss(ROWS, TARGET, label_smoothing=kind(1)), loss(ROWS, TARGET, label_smoothing=1.0))
    if kind in (np.int32, np.int64):
        assert torch.equal(SparseMAP(Subsets(two)).argmax(ROWS), SparseMAP(Subsets(2)).argmax(ROWS))
    grid = TotalVariation2d(two, shape=(np.int64(2), np.int64(3)))
    assert torch.equal(grid.argmax(ROWS, dim), TotalVariation2d(2.0, shape=(2, 3)).argmax(ROWS))
    with pytest.raises(TypeError, match="alpha"):
        fenchel.entmax(ROWS, np.bool_(True))
    with pytest.raises(TypeError, match="dim"):
        fenchel.entmax(ROWS, dim=np.float64(1))


@pytest.mark.parametrize("kind", [np.int64, np.int8])
def test_numpy_counts_are_taken_by_programs_graphs_and_memories(kind: Any) -> None:
    """Also by those that would overflow if they were calculated with as they are."""
    many = kind(100)
    chain = LinearChain(STATES, STEP)
    torch.testing.assert_close(chain.top(kind(3)).probs, chain.top(3).probs)
    assert chain.sample(kind(3)).shape == (3, 2, 5)
    assert torch.equal(dtw(SERIES, SERIES, band=many), dtw(SERIES, SERIES, band=100))
    ends = torch.tensor([0, 0]), torch.tensor([1, 1])
    assert torch.equal(Lattice(*ends, ROWS[:, :2], kind(2)).value, Lattice(*ends, ROWS[:, :2], 2).value)
    assert torch.equal(barycenter(SERIES, max_iter=kind(2)), barycenter(SERIES, max_iter=2))
    values = []
    for two in (kind(2), 2):
        graph = fenchel.FactorGraph()
        u = graph.variables(ROWS, batch_dims=type(two)(1))
        graph.add(Budget(u, two))
        graph.add(Exactly(u[:4], two))
        graph.add(Knapsack(u, torch.ones(6), two))
        graph.solve(max_iter=type(two)(100))
        values.append(u.value)
    assert torch.equal(*values)
    states = [Memory(PATTERNS, chunk_size=n).retrieve(ROWS[:, :4], n).state for n in (many, 100)]
    assert torch.equal(*states)
    assert capacity(many, 10.0, Gini()) == capacity(100, 10.0, Gini())
    layer = Hopfield(kind(4), num_heads=kind(2), update_steps_max=kind(3))
    assert layer(HEADS).shape == HEADS.shape
    density = BetaGaussian(torch.zeros(1), sigma=torch.ones(1, 1))
    torch.testing.assert_close(density.integrate(torch.cos, nodes=many), density.integrate(torch.cos, nodes=100))
    assert MaximumEntropy(kind(3)).sample().shape == (3,)
    assert repetition(TARGET, kind(2)) == 0
