"""MNIST: handwritten digits (idx)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fenchel_lab.data.core import DataSet, Source, explained, read

Split = Literal["train", "test"]
PREFIX: dict[Split, str] = {"train": "train", "test": "t10k"}
UNSIGNED_BYTE = 8


@dataclass(frozen=True)
class Images:
    """Images, bytes (N, height, width) or (N, height, width, channels), and their classes (N,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]


def load(split: Split, folder: Path | None = None) -> Images:
    """60,000 images to train with, or 10,000 to test with, of 28 × 28.

    Args:
        split: "train" or "test".
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if split not in PREFIX:
        raise ValueError(f"split must be one of {', '.join(PREFIX)}, got {split!r}")
    arrays = []
    for kind in ("images-idx3", "labels-idx1"):
        name = f"{PREFIX[split]}-{kind}-ubyte"
        content = read(MNIST, name, folder)
        with explained(name):
            arrays.append(parse(content))
    images, labels = arrays
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"images {images.shape} and labels {labels.shape} do not belong together")
    return Images(images, labels)


def parse(content: bytes) -> NDArray[np.uint8]:
    r"""The array of an idx file of bytes.

    Example:
        >>> parse(b"\0\0\x08\x02" + b"\0\0\0\x01" + b"\0\0\0\x03" + b"\x07\x08\x09").tolist()
        [[7, 8, 9]]
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE:
        raise ValueError(f"not an idx file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}")
    ndim = content[3]
    start = 4 + 4 * ndim
    if len(content) < start:
        raise ValueError("it ends inside its header")
    shape = struct.unpack(f">{ndim}I", content[4:start])
    if len(content) - start != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{len(content) - start} bytes for an array of shape {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _source(name: str, sha256: str) -> Source:
    return Source(name, f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", sha256=sha256)


# Checksums of the unpacked files: whoever packs them, these stay.
MNIST = DataSet(
    "mnist",
    "MNIST handwritten digits",
    "CC BY-SA 3.0",
    [
        _source("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        _source("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        _source("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        _source("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ],
)
