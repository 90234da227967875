"""Sorting by frequency: the task, models of one size, and training that goes on where it stopped."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel_lab.models import sorting
from fenchel_lab.models.sorting import KINDS, Setting, Sorter

SMALL = Setting(tokens=5, length=60, chunk=16, memory=8, width=8, heads=2, batch=3, steps=4)


def test_targets_are_the_tokens_by_falling_count() -> None:
    tokens, target = sorting.sequences(SMALL, 20, torch.Generator().manual_seed(0))
    assert tokens.shape == (20, 60)
    for row, order in zip(tokens.tolist(), target.tolist(), strict=True):
        assert sorted(order) == [0, 1, 2, 3, 4]
        counts = [row.count(token) for token in order]
        assert counts == sorted(counts, reverse=True)


def test_the_distribution_changes_from_the_first_token_to_the_last() -> None:
    tokens, _ = sorting.sequences(replace(SMALL, length=4000), 20, torch.Generator().manual_seed(0))
    shares = torch.nn.functional.one_hot(tokens, 5).double().reshape(20, 4, 1000, 5).mean(2)
    far, near = (0.5 * (shares[:, 0] - shares[:, k]).abs().sum(-1).mean() for k in (3, 1))
    assert float(far) > 0.15
    assert float(far) > 2 * float(near)


@pytest.mark.parametrize("kind", KINDS)
def test_models_have_about_as_many_parameters_and_the_same_memory(kind: str) -> None:
    def count(kind: str, setting: Setting) -> int:
        return sum(p.numel() for p in Sorter(kind, setting).parameters())

    assert count(kind, Setting()) == pytest.approx(count("long memory", Setting()), rel=0.01)


@pytest.mark.parametrize(("kind", "reach"), [("short-term", 16), ("compressive", 8 + 8 * 4), ("long memory", 60)])
def test_memories_reach_back_as_far_as_they_say(kind: str, reach: int) -> None:
    model = Sorter(kind, SMALL)
    tokens = torch.zeros(2, 60, dtype=torch.long)
    tokens[1, : 60 - reach] = 1  # all that the memory has forgotten, and a bit that it has not
    start = torch.full((2, 1), 5)
    with torch.no_grad():
        same = model(start, model.read(tokens))[0]
        tokens[1, : 60 - reach + 4] = 1
        other = model(start, model.read(tokens))[0]
    if reach < 60:
        torch.testing.assert_close(same[0], same[1])
    assert float((other[0] - other[1]).abs().max()) > 1e-4


def test_pairs_in_order_count_what_is_missing_as_last() -> None:
    target = torch.tensor([[3, 1, 2, 0]])
    assert sorting.pairs_in_order(target, target).tolist() == [1.0]
    assert sorting.pairs_in_order(target.flip(-1), target).tolist() == [0.0]
    # 3 alone was written: it is before the others, which have no order.
    assert sorting.pairs_in_order(torch.full((1, 4), 3), target).tolist() == [0.5]


def test_an_interrupted_training_goes_on_to_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, losses = sorting.trained("long memory", SMALL, 1, lambda part: None)
    calls = []

    def stop(part: float) -> None:
        calls.append(part)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sorting.trained("long memory", SMALL, 1, stop, tmp_path, every=2)
    again, more = sorting.trained("long memory", SMALL, 1, lambda part: None, tmp_path, every=2)
    assert more == losses
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
