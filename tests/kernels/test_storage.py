"""Memory that was freed is refused before compiled code reads it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel import Custom, Gini, SparseMAP, Tsallis
from fenchel.dp import LinearChain, dtw
from fenchel.hopfield import Memory
from fenchel.structures import Chain, DependencyTree

ROWS, COLUMN, TARGET = torch.randn(4, 6), torch.full((4, 1), 1.5), torch.tensor([0, 1, 2, 3])
WHOLE = torch.full((4, 1), 2)
HEADS, STATES, STEP, SERIES = torch.randn(2, 8, 4), torch.randn(2, 5, 3), torch.randn(3, 3), torch.randn(2, 5, 1)

CALLS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "sparsemax": (fenchel.sparsemax, (ROWS,)),
    "of a view": (fenchel.sparsemax, (torch.randn(9, 6)[3:7],)),
    "with a gradient": (lambda s: fenchel.sparsemax(s.requires_grad_()), (ROWS,)),
    "of a dimension": (lambda s: fenchel.sparsemax(s, dim=0), (ROWS,)),
    "softmax": (fenchel.softmax, (ROWS,)),
    "entmax": (fenchel.entmax, (ROWS, COLUMN)),
    "masked": (lambda s, mask: fenchel.entmax(s, mask=mask), (ROWS, ROWS > 0)),
    "normmax": (fenchel.normmax, (ROWS,)),
    "fusedmax": (fenchel.fusedmax, (ROWS, COLUMN)),
    "oscarmax": (fenchel.oscarmax, (ROWS,)),
    "tvmax2d": (fenchel.tvmax2d, (ROWS,)),
    "k_subsets": (fenchel.k_subsets, (ROWS, COLUMN)),
    "custom": (Custom(lambda p: p.square().sum(-1)).argmax, (ROWS,)),
    "max": (Gini().max, (ROWS,)),
    "scaled": (lambda s, gamma: (gamma * Gini()).argmax(s), (ROWS, COLUMN)),
    "loss": (fenchel.sparsemax_loss, (ROWS, TARGET)),
    "weighted loss": (lambda s, y, w: fenchel.sparsemax_loss(s, y, weight=w), (ROWS, TARGET, torch.arange(6))),
    "integer alpha": (fenchel.entmax, (ROWS, WHOLE)),
    "integer alpha of normmax": (fenchel.normmax, (ROWS, WHOLE)),
    "integer k": (fenchel.k_subsets, (ROWS, WHOLE)),
    "integer temperature": (lambda s, gamma: (gamma * Gini()).argmax(s), (ROWS, WHOLE)),
    "support": (fenchel.support_size, (ROWS,)),
    "attention": (lambda q, k, v: fenchel.attention(q, k, v, Tsallis(1.5)), (HEADS, HEADS, HEADS)),
    "output": (fenchel.linear_entmax_loss, (torch.randn(4, 3), torch.randn(6, 3), TARGET)),
    "chain": (lambda unary, transition: LinearChain(unary, transition).value, (STATES, STEP)),
    "dtw": (dtw, (SERIES, SERIES)),
    "structures": (lambda s, transition: SparseMAP(Chain(transition)).argmax(s), (STATES, STEP)),
    "loss of structures": (
        lambda s, y: fenchel.fy_loss(s, y, SparseMAP(Chain(STEP))),
        (STATES, torch.eye(3, dtype=torch.bool)[[0, 1, 2, 0, 0]].repeat(2, 1, 1)),
    ),
    "trees": (SparseMAP(DependencyTree()).argmax, (torch.randn(2, 4, 5),)),
    "memory": (lambda patterns, query: Memory(patterns, omega=Gini()).retrieve(query), (HEADS[0], HEADS[1])),
}


def freed(tensor: Tensor) -> Tensor:
    """A view of memory that is gone, as far from its start as the tensor was."""
    start = tensor.storage_offset()
    room = torch.empty(start + tensor.numel(), dtype=tensor.dtype)
    view = room[start:].view(tensor.shape)
    room.untyped_storage().resize_(0)
    return view


@pytest.mark.parametrize("name", CALLS)
def test_tensors_whose_memory_was_freed_are_an_error(name: str) -> None:
    call, tensors = CALLS[name]
    for place in range(len(tensors)):
        arguments = [freed(t) if i == place else t.clone() for i, t in enumerate(tensors)]
        with pytest.raises(RuntimeError, match=r"storage|not allocated"):
            call(*arguments)


def test_memory_that_is_freed_before_the_backward_pass_is_an_error() -> None:
    scores = ROWS.clone().requires_grad_()
    p = fenchel.sparsemax(scores)
    total = (p * 2.0).sum()
    p.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"storage|not allocated"):
        total.backward()


def test_empty_tensors_hold_all_their_data() -> None:
    assert fenchel.sparsemax(torch.empty(0, 5)).shape == (0, 5)
    assert fenchel.sparsemax_loss(torch.empty(0, 5), torch.empty(0, dtype=torch.long), reduction="sum") == 0
