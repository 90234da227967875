"""Images for studies: parts that share nothing, of the size that was asked for."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fenchel_lab.data import images, mnist


def test_digits_are_split_and_every_one_is_used_once() -> None:
    loaded = images.load(None)
    assert [len(part) for part in (loaded.train, loaded.valid, loaded.test)] == [1000, 300, 497]
    assert loaded.side == 8
    together = torch.cat([loaded.train, loaded.valid, loaded.test])
    assert (together.min(), together.max()) == (0, 1)
    again = images.load(None)
    assert torch.equal(loaded.test, again.test)


@pytest.mark.parametrize("halved", [False, True])
def test_mnist_keeps_its_last_sixth_to_choose_with(
    halved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(part: str, folder: Path) -> mnist.Images:
        count = {"train": 12, "test": 4}[part]
        pixels = np.repeat(np.arange(count, dtype=np.uint8), 16).reshape(count, 4, 4) * 17
        return mnist.Images(pixels, np.zeros(count, np.uint8))

    monkeypatch.setattr(mnist, "load", load)
    loaded = images.load(tmp_path, halved)
    assert loaded.side == (2 if halved else 4)
    shown = [[round(image[0, 0].item() * 15) for image in part] for part in (loaded.train, loaded.valid, loaded.test)]
    assert shown == [list(range(10)), [10, 11], list(range(4))]
