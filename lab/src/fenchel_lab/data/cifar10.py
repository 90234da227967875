"""CIFAR-10: small colour images of ten classes (the archive's binary version, or the first test images re-packed)."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np

from fenchel_lab.data.core import DataSet, MissingDataError, Source, explained, locate, read
from fenchel_lab.data.mnist import Images

Split = Literal["train", "test"]
ARCHIVE, REPACKED = "cifar-10-binary.tar.gz", "cifar10_test_first3000.npz"
MEMBERS: dict[Split, list[str]] = {
    "train": [f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["cifar-10-batches-bin/test_batch.bin"],
}
CHANNELS, SIDE = 3, 32


def load(split: Split, folder: Path | None = None) -> Images:
    """50,000 images to train with, or 10,000 to test with; from the re-packed file the first 3,000 of these.

    Args:
        split: "train" or "test".
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if split not in MEMBERS:
        raise ValueError(f"split must be one of {', '.join(MEMBERS)}, got {split!r}")
    try:
        path = locate(CIFAR10, ARCHIVE, folder)
    except MissingDataError:
        if split == "train":
            raise
        try:
            content = read(CIFAR10, REPACKED, folder)
        except MissingDataError:
            pass
        else:
            with explained(REPACKED):
                return parse_npz(content)
        raise
    with explained(ARCHIVE), tarfile.open(path) as archive:
        batches = []
        for member in MEMBERS[split]:
            file = archive.extractfile(member)
            if file is None:
                raise ValueError(f"{member} is not a file")
            batches.append(parse(file.read()))
    return Images(
        np.concatenate([batch.images for batch in batches]), np.concatenate([batch.labels for batch in batches])
    )


def parse(content: bytes) -> Images:
    """The images of a batch: for each a byte of class, then the red, the green and the blue plane."""
    record = 1 + CHANNELS * SIDE * SIDE
    if not content or len(content) % record:
        raise ValueError(f"{len(content)} bytes are no whole number of images of {record}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return Images(rows[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), rows[:, 0])


def parse_npz(content: bytes) -> Images:
    """The images of an npz file with ``X`` (N, 32, 32, 3) and ``y`` (N,)."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        images, labels = file["X"], file["y"]
    if images.shape != (len(labels), SIDE, SIDE, CHANNELS) or images.dtype != np.uint8:
        raise ValueError(f"images {images.dtype} {images.shape} and labels {labels.shape} do not belong together")
    return Images(images, labels)


CIFAR10 = DataSet(
    "cifar10",
    "CIFAR-10 images",
    "free for research; cite Krizhevsky (2009)",
    [
        Source(
            ARCHIVE,
            f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}",
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        )
    ],
    repacked=[Source(REPACKED, sha256="26972956ea39ae66cb9c6264b2adccac67393fee5f1199628b2e9feb177cf065")],
)
