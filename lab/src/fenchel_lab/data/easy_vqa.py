"""easy-VQA: questions about pictures of one coloured shape (the package's archive, or npz)."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fenchel_lab.data.core import DataSet, MissingDataError, Source, explained, read

Split = Literal["train", "test"]
ARCHIVE = "easy_vqa-1.0-py3-none-any.whl"
SIZES: dict[str, tuple[int, int]] = {"train": (4_000, 38_575), "test": (1_000, 9_673)}
"""How many images and questions there are."""


@dataclass(frozen=True)
class Questions:
    """Images, bytes (N, height, width, 3); questions, their answers, and the image (Q,) that each asks about."""

    images: NDArray[np.uint8]
    questions: list[str]
    answers: list[str]
    image: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or self.images.shape[3] != 3:
            raise ValueError(f"images are {self.images.dtype} {self.images.shape}, not bytes (N, height, width, 3)")
        if not len(self.questions) == len(self.answers) == len(self.image):
            raise ValueError(f"{len(self.questions)} questions, {len(self.answers)} answers, {len(self.image)} images")
        if len(self.image) and not 0 <= self.image.min() <= self.image.max() < len(self.images):
            raise ValueError(f"a question asks about an image that is not among the {len(self.images)}")


def load(split: Split, folder: Path | None = None) -> Questions:
    """4,000 images with 38,575 questions to train with, or 1,000 with 9,673 to test with; 64 × 64 pixels.

    Args:
        split: "train" or "test".
        folder: where to look first. Default: ``$FENCHEL_DATA``.
    """
    if split not in SIZES:
        raise ValueError(f"split must be one of {', '.join(SIZES)}, got {split!r}")
    try:
        content = read(EASY_VQA, f"{split}.npz", folder)
    except MissingDataError:
        content = read(EASY_VQA, ARCHIVE, folder)
        with explained(ARCHIVE):
            return parse(content, split)
    with explained(f"{split}.npz"):
        return parse_npz(content)


def parse(content: bytes, split: Split) -> Questions:
    """A split of the archive: an image a file, numbered from 0, and a list of question, answer and image."""
    from PIL import Image  # it comes with matplotlib, which the studies need and the library does not

    folder = f"easy_vqa/data/{split}"
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        rows = json.loads(archive.read(f"{folder}/questions.json"))
        names = [name for name in archive.namelist() if name.startswith(f"{folder}/images/") and name.endswith(".png")]
        files = [io.BytesIO(archive.read(f"{folder}/images/{number}.png")) for number in range(len(names))]
    images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    questions, answers, image = ([row[i] for row in rows] for i in range(3))
    return Questions(np.stack(images), questions, answers, np.array(image, dtype=np.int64))


def parse_npz(content: bytes) -> Questions:
    """The content of an npz file with ``images``, ``questions``, ``answers`` and ``image_id``."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return Questions(
            file["images"], file["questions"].tolist(), file["answers"].tolist(), file["image_id"].astype(np.int64)
        )


EASY_VQA = DataSet(
    "easy_vqa",
    "easy-VQA: questions about pictures of shapes",
    "MIT",
    [
        Source(
            ARCHIVE,
            "https://files.pythonhosted.org/packages/32/e7/dbdd733ea110ff04c8b0b7ce7d49acce06f1dd18ed304d9f8f9b3f26c1a3/"
            + ARCHIVE,
            sha256="fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
        )
    ],
    ways="the package easy-vqa on PyPI carries it",
    repacked=[
        Source("train.npz", sha256="0dec1acf65f0f7c24c69a68b87f8597c01ac2b5f90c91e8af1afb979806d02bd"),
        Source("test.npz", sha256="afe8cd07736c428b2e497db62456342aad11c5c779e053d5c761132a6c1e23a5"),
    ],
)
