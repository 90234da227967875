"""What training loops share: rates, steps, checkpoints."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fenchel.seq2seq import saving
from fenchel.seq2seq.checkpoints import CHECKPOINT, Checkpoint, DivergedError, check_finite, check_rate, step


@pytest.mark.parametrize("rate", [0.0, -1e-3, float("inf"), float("nan"), -float("inf")])
def test_a_rate_is_positive_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must satisfy 0 < rate < inf"):
        check_rate(rate)


def test_a_step_follows_the_clipped_gradient() -> None:
    x = nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer = torch.optim.SGD([x], lr=0.5)
    assert step(x.square().sum() / 2, optimizer, clip=1.0) == 12.5  # the gradient is x, of norm 5
    torch.testing.assert_close(x.detach(), torch.tensor([3.0, -4.0]) - 0.5 * torch.tensor([0.6, -0.8]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_stops_and_changes_nothing(bad: float) -> None:
    x = nn.Parameter(torch.tensor([1.0]))
    with pytest.raises(DivergedError, match=r"training loss is -?(nan|inf), .* lower than 0\.5"):
        step((x * bad).sum(), torch.optim.SGD([x], lr=0.5))
    assert x.item() == 1
    assert x.grad is None
    layer = nn.Linear(2, 2)
    check_finite(layer)
    layer.bias.data[1] = bad
    with pytest.raises(DivergedError, match="bias is no longer finite"):
        check_finite(layer)


def small() -> tuple[nn.Linear, torch.optim.Adam]:
    model = nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters())


def kept(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint(folder / CHECKPOINT, {"training": {"rate": 0.1, "patience": 3}}, frozenset({"patience"}))
    model, optimizer = small()
    step(model(torch.ones(2)).square().sum(), optimizer)
    checkpoint.prepare()
    checkpoint.keep(model, model.state_dict(), optimizer, {"epoch": 1})
    return checkpoint


def test_a_checkpoint_brings_back_parameters_moments_and_random_numbers(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path / CHECKPOINT, {}).resume(*small()) is None
    checkpoint = kept(tmp_path)
    wanted = torch.rand(3)
    model, optimizer = small()
    found = checkpoint.resume(model, optimizer)
    assert found is not None
    run, best = found
    assert run == {"epoch": 1}
    assert all(torch.equal(best[name], tensor) for name, tensor in model.state_dict().items())
    assert {len(state) for state in optimizer.state_dict()["state"].values()} == {3}
    assert torch.equal(torch.rand(3), wanted)
    longer = Checkpoint(checkpoint.file, {"training": {"rate": 0.1, "patience": 9}}, checkpoint.free)
    assert longer.resume(*small()) is not None
    other = Checkpoint(checkpoint.file, {"training": {"rate": 0.2, "patience": 3}}, checkpoint.free)
    with pytest.raises(ValueError, match=r"another run: its training has rate 0\.1, this one 0\.2"):
        other.resume(*small())


def test_checkpoints_that_were_tampered_with_are_told_in_one_line(tmp_path: Path) -> None:
    checkpoint = kept(tmp_path)
    content = checkpoint.file.read_bytes()
    tensors, words = saving.read_tensors(checkpoint.file, "a checkpoint")
    record = json.loads(words["fenchel"])

    def refused(tensors: dict[str, torch.Tensor], record: Any) -> None:
        text = record if isinstance(record, str) else json.dumps(record)
        saving.safetensors().save_file(tensors, checkpoint.file, metadata={"fenchel": text})
        with pytest.raises(ValueError, match=f"^{checkpoint.file} [^\n]+$"):
            checkpoint.resume(*small())

    for name, tensor in tensors.items():
        refused({key: value for key, value in tensors.items() if key != name}, record)
        refused({**tensors, name: torch.cat([tensor.reshape(-1)] * 3)}, record)
        if name != "random":
            refused({**tensors, name: tensor * torch.nan}, record)
            refused({**tensors, name: tensor.to(torch.int64)}, record)
            refused({**tensors, name: tensor.to(torch.complex64)}, record)
    for name, value in itertools.product(("epoch", "waited", "rate"), (-1, "x", None, True, 1e400, float("nan"), [])):
        refused(tensors, {**record, "run": {**record["run"], name: value}})
    for name in ("epoch", "waited"):
        refused(tensors, {**record, "run": {**record["run"], name: 1.5}})
    refused(tensors, {**record, "run": {**record["run"], "best": float("nan")}})
    for strange in ("", "[", "[]", "[" * 50_000, {}, {**record, "run": 3}, {**record, "training": 3}, {"run": {}}):
        refused(tensors, strange)
    for cut in (0, 7, 8, 100, len(content) - 1):
        checkpoint.file.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=f"^{checkpoint.file} is not a checkpoint"):
            checkpoint.resume(*small())
    checkpoint.file.unlink()
    checkpoint.file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        checkpoint.resume(*small())
