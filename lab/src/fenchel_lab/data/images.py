"""Images for studies: MNIST of a folder, or the digits that scikit-learn carries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from fenchel_lab.data import mnist


@dataclass(frozen=True)
class Images:
    """Grey images (N, height, width) in [0, 1], to learn, to choose and to test with."""

    train: Tensor
    valid: Tensor
    test: Tensor

    @property
    def side(self) -> int:
        """Width and height."""
        return self.train.shape[-1]


def load(folder: Path | None, halved: bool = False) -> Images:
    """MNIST, the last 10,000 of its training images to choose with; without a folder, scikit-learn's digits.

    Args:
        folder: of data sets; None for the digits, 1,000 to learn, 300 to choose and 497 to test with.
        halved: whether MNIST is averaged to half its width and height.
    """
    if folder is None:
        loaded = load_digits().images / 16
        order = np.random.default_rng(0).permutation(len(loaded))
        digits = torch.from_numpy(loaded[order]).float()
        return Images(digits[:1000], digits[1000:1300], digits[1300:])
    first, test = _mnist("train", folder, halved), _mnist("test", folder, halved)
    kept = len(first) - len(first) // 6
    return Images(first[:kept], first[kept:], test)


def _mnist(part: mnist.Split, folder: Path, halved: bool) -> Tensor:
    images = torch.from_numpy(mnist.load(part, folder).images.copy()).float() / 255
    return F.avg_pool2d(images, 2) if halved else images
