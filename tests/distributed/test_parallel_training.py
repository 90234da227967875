"""Training with a learned alpha: DDP, FSDP2 (also with Ω as a unit of its own), and checkpoints across world sizes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import fenchel
from ranks import Ranks, mesh_of, started


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(__name__) as processes:
        yield processes


class Model(nn.Module):
    """Attention with one learned alpha per head, and a loss with one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        omega = fenchel.Tsallis(1.5, learnable=True, shape=(2, 1, 1))
        self.attention = fenchel.nn.MultiheadAttention(8, 2, omega=omega, batch_first=True)
        self.head = nn.Linear(8, 11)
        self.choice = fenchel.Tsallis(1.4, learnable=True, shape=(1,))
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.attention(x, x, x, need_weights=False)[0]
        p = self.choice.argmax(self.head(hidden))
        return -(p.gather(-1, target.unsqueeze(-1)) + 0.1).log().mean() + p.square().mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 5, 8, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 11, (12, 5), generator=generator)


def trained(model: Any, inputs: Tensor, target: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs, target).backward()
        optimizer.step()


def check_training(group: Any, rank: int, ranks: int, how: str) -> float:
    """Parameters after three steps are those of one process; returns how far the alphas have moved."""
    inputs, target = batch()
    plain, model = Model(), Model()
    start = [p.detach().clone() for p in plain.choice.parameters()]
    trained(plain, inputs, target)
    own = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
    if how == "ddp":
        trained(DistributedDataParallel(model, process_group=group), inputs[own], target[own])
    else:
        mesh = mesh_of(ranks)
        if how == "own unit":
            for omega in (model.choice, model.attention.omega):
                fully_shard(omega, mesh=mesh)
                register_fsdp_forward_method(omega, "argmax")
        fully_shard(model, mesh=mesh)
        trained(model, inputs[own], target[own])
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert_close(whole, expected, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    return float((next(plain.choice.parameters()) - start[0]).abs().max())


def save(group: Any, rank: int, ranks: int, folder: str) -> dict[str, Tensor]:
    model = Model()
    fully_shard(model, mesh=mesh_of(ranks))
    trained(model, *batch())
    state = get_model_state_dict(model)
    checkpoint.save(state, checkpoint_id=folder, process_group=group)
    return {name: t.full_tensor() for name, t in state.items()}


def load(group: Any, rank: int, ranks: int, folder: str) -> dict[str, Tensor]:
    model = Model()
    if ranks > 1:
        fully_shard(model, mesh=mesh_of(ranks))
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=folder, process_group=group, no_dist=ranks == 1)
    set_model_state_dict(model, state)
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("how", ["ddp", "fsdp", "own unit"])
def test_a_learned_alpha_is_trained_as_in_one_process(ranks: Ranks, how: str) -> None:
    for count in (2, 3):
        assert min(ranks.run("check_training", how, ranks=count)) > 1e-4


def test_checkpoints_are_loaded_by_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run("save", str(tmp_path / "two"), ranks=2)[0]
    assert "choice.raw_alpha" in saved
    for count in (3, 4, 1):
        for loaded in ranks.run("load", str(tmp_path / "two"), ranks=count):
            assert loaded.keys() == saved.keys()
            for name, tensor in loaded.items():
                assert torch.equal(tensor, saved[name]), name
