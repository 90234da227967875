"""Diaries of trainings: an entry for every epoch, also after an interruption, which changes nothing."""

from pathlib import Path

import torch

from fenchel.seq2seq import Pair, Recurrent, Training, Vocabulary
from fenchel_lab.models import diary

LETTERS = Vocabulary("ab")
PAIRS = [Pair(tuple(word), tuple(reversed(word))) for word in ("a", "ab", "abb", "ba", "bba")]


def trained(epochs: int, folder: Path | None) -> tuple[list[diary.Entry], Recurrent, list[int]]:
    torch.manual_seed(0)
    model, measured = Recurrent(LETTERS, LETTERS, embedding=4, hidden=4, layers=1), []

    def measure(epoch: int) -> dict[str, int]:
        assert not model.training
        measured.append(epoch)
        return {"squared": epoch**2}

    how = Training(epochs=epochs, batch=2, rate=1e-2, patience=9)
    return diary.trained(model, PAIRS, PAIRS, how, folder, measure), model, measured


def test_an_interrupted_training_goes_on_with_its_diary(tmp_path: Path) -> None:
    straight, model, _ = trained(4, None)
    trained(2, tmp_path)
    resumed, other, measured = trained(4, tmp_path)
    assert measured == [3, 4]
    untimed = [[{k: v for k, v in each.items() if k != "seconds"} for each in run] for run in (straight, resumed)]
    assert untimed[0] == untimed[1]
    assert [each["squared"] for each in resumed] == [1, 4, 9, 16]
    assert [each["seconds"] for each in resumed] == sorted(each["seconds"] for each in resumed)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert diary.best(resumed)["epoch"] in (1, 2, 3, 4)
    again, _, measured = trained(4, tmp_path)
    assert (again, measured) == (resumed, [])
