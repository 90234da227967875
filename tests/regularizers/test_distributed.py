"""Maps of distributed tensors: those of the whole tensor, with the placements of the scores, and their gradients."""

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import fenchel

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda s: fenchel.entmax(s, 1.0),
    "entmax": fenchel.entmax,
    "steep": lambda s: fenchel.entmax(s, 3.0),
    "sparsemax": fenchel.sparsemax,
    "normmax": fenchel.normmax,
    "first dimension": lambda s: fenchel.entmax(s, dim=0),
}
PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(-2), Shard(2)]


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A group of this process alone."""
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=30)
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("enabled", [True, False], ids=["kernels", "torch"])
def test_a_distributed_map_is_that_of_the_whole_tensor(
    mesh: Any, kind: str, placement: Any, enabled: bool, set_kernels: Callable[[bool], None]
) -> None:
    set_kernels(enabled)
    torch.manual_seed(0)
    plain = torch.randn(3, 4, 7, dtype=torch.float64)
    plain[0, 1] = -torch.inf
    direction = torch.randn(3, 4, 7, dtype=torch.float64)
    scores = distribute_tensor(plain, mesh, [placement]).requires_grad_()
    with torch.no_grad():
        assert_close(MAPS[kind](scores).full_tensor(), MAPS[kind](plain))
    p = MAPS[kind](scores)
    assert isinstance(p, DTensor)
    assert p.shape == plain.shape
    p.backward(distribute_tensor(direction, mesh, p.placements))
    whole = plain.clone().requires_grad_()
    MAPS[kind](whole).backward(direction)
    assert_close(p.full_tensor().detach(), MAPS[kind](plain))
    assert isinstance(scores.grad, DTensor)
    assert_close(scores.grad.full_tensor(), whole.grad)


def test_one_alpha_per_row_is_distributed_as_the_scores_are(mesh: Any) -> None:
    torch.manual_seed(0)
    plain, alpha = torch.randn(4, 5, dtype=torch.float64), torch.tensor([[1.0], [1.3], [1.5], [2.0]]).double()
    scores = distribute_tensor(plain, mesh, [Shard(0)]).requires_grad_()
    own = distribute_tensor(alpha, mesh, [Shard(0)]).requires_grad_()
    whole, beside = plain.clone().requires_grad_(), alpha.clone().requires_grad_()
    fenchel.entmax(scores, own).square().sum().backward()
    fenchel.entmax(whole, beside).square().sum().backward()
    assert_close(scores.grad.full_tensor(), whole.grad)
    assert_close(own.grad.full_tensor(), beside.grad)
