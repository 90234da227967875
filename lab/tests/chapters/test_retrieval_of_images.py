"""The chapter on images: queries as described, memories as plain loops run them, shares as they are counted."""

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fenchel import Gini, Hard, KSubsets, Shannon
from fenchel.hopfield import ClassicalMemory
from fenchel_lab.chapters import retrieval_of_images
from fenchel_lab.chapters.retrieval_of_images import (
    NEAR,
    QUERIES,
    Images,
    by_omega,
    by_signs,
    contrast,
    corrupted,
    places,
    signs,
)
from fenchel_lab.report import Context, Run, find, run

SHAPE = (4, 3, 2)


@pytest.fixture
def images() -> Images:
    """Eight at random, of different norms, in two colours; the first two are alike."""
    generator = np.random.default_rng(3)
    pixels = generator.uniform(-1, 1, (8, 24)) * np.linspace(0.4, 1, 8)[:, None]
    pixels[1] = pixels[0] + 0.3 * pixels[1]
    return Images("random", torch.tensor(pixels, dtype=torch.float32), SHAPE)


def sparsemax(scores: np.ndarray) -> np.ndarray:
    """Projection onto the simplex by sorting."""
    ordered = np.sort(scores)[::-1]
    sums = np.cumsum(ordered) - 1
    size = np.flatnonzero(ordered * np.arange(1, len(scores) + 1) > sums)[-1] + 1
    return np.maximum(scores - sums[size - 1] / size, 0)


def test_masks_hide_the_lower_half_and_noise_has_its_deviation(images: Images) -> None:
    whole = images.pixels[places(images)].reshape(QUERIES, *SHAPE)
    masked = corrupted(images, "masked", 0)
    pixels, coins = masked.pixels.reshape(QUERIES, *SHAPE), masked.signs.reshape(QUERIES, *SHAPE)
    assert torch.equal(pixels[:, :2], whole[:, :2])
    assert not bool(pixels[:, 2:].any())
    means = whole.mean((1, 2), keepdim=True)
    assert torch.equal(coins[:, :2] > 0, (whole > means)[:, :2])
    assert abs(float(coins[:, 2:].mean())) < 0.1
    noise = corrupted(images, "noisy", 0).pixels.reshape(QUERIES, *SHAPE) - whole
    assert float(noise.std()) == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(noise[0], noise[8]), "the same image, the same noise"


@pytest.mark.parametrize("kind", ["masked", "noisy"])
def test_sparsemax_retrieves_what_a_plain_loop_does(kind: str, images: Images) -> None:
    beta, x = 6.0, images.pixels.double().numpy()
    queries = corrupted(images, kind, 1)
    found = by_omega(Gini())(images, queries, beta)
    sphere = x / np.linalg.norm(x, axis=-1, keepdims=True)
    states = queries.pixels.double().numpy()
    for query, place, shown, exact, error in zip(
        states, places(images).tolist(), found.shown.numpy(), found.exact.tolist(), found.error.tolist(), strict=True
    ):
        for _ in range(retrieval_of_images.STEPS):
            weights = sparsemax(beta * sphere @ (query / np.linalg.norm(query)))
            query = sphere.T @ weights
        np.testing.assert_allclose(shown, weights @ x, atol=1e-3)
        assert exact == (weights[place] > 1 - 1e-9)
        assert error == pytest.approx(np.square(weights @ x - x[place]).mean(), abs=1e-3)
    assert 0 < int(found.exact.sum()) < QUERIES


def test_one_subset_is_sparsemax_and_two_hold_the_image_more_often(images: Images) -> None:
    queries = corrupted(images, "noisy", 0)
    one, same = (by_omega(omega)(images, queries, 50.0) for omega in (KSubsets(1), Gini()))
    assert torch.equal(one.exact, same.exact)
    torch.testing.assert_close(one.shown, same.shown)
    two = by_omega(KSubsets(2))(images, queries, 1000.0)
    assert int(two.exact.sum()) > int(by_omega(Hard())(images, queries, 1.0).exact.sum())
    assert not two.single


def test_softmax_is_near_and_never_there(images: Images) -> None:
    found = by_omega(Shannon())(images, corrupted(images, "masked", 0), 20.0)
    assert not bool(found.exact.any())
    assert bool(found.near.any())
    assert torch.equal(found.near, found.error <= NEAR)


def test_signs_are_retrieved_by_hebbs_weights(images: Images) -> None:
    queries = corrupted(images, "masked", 0)
    found = by_signs(lambda stored: ClassicalMemory(stored, diagonal=False))(images.first(2), queries, 1.0)
    x = signs(images.pixels[:2], SHAPE).numpy()
    hebb = x.T @ x
    np.fill_diagonal(hebb, 0)
    for start, shown in zip(queries.signs.numpy(), found.shown.numpy(), strict=True):
        state = start
        for _ in range(retrieval_of_images.STEPS):
            field = hebb @ state
            state = np.where(field == 0, state, np.sign(field))
        np.testing.assert_array_equal(shown, state)


def test_contrast_makes_most_images_stationary(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_of_images, "SHARE", 1.0)
    x = images.pixels.double().numpy()
    sphere = x / np.linalg.norm(x, axis=-1, keepdims=True)
    largest = (sphere @ sphere.T - 2 * np.eye(len(x))).max()
    assert contrast(images) == pytest.approx(2 / (1 - largest), rel=0.05)  # two digits


@pytest.mark.slow
def test_digits_are_harder_to_find_among_more(chapter: Callable[[str], Run]) -> None:
    result = chapter("retrieval_of_images").result
    assert result is not None
    exact = {(str(row[1]), str(row[2])): [float(cell) for cell in row[3:]] for row in result.tables[0].rows}
    for kind in ("masked", "noisy"):
        assert exact[kind, "softmax"] == [0.0] * 5
        for name in ("1.5-entmax", "sparsemax", "2-normmax", "5-normmax", "argmax"):
            assert exact[kind, name][0] > exact[kind, name][-1]
        assert exact[kind, "argmax"][0] > 90
        assert exact[kind, "dense, exp"][0] > exact[kind, "classical"][0]
    more = {(row[1], row[2]): [float(cell) for cell in row[3:]] for row in result.tables[-1].rows}
    assert all(shares[0] < shares[-1] for shares in more.values())


@pytest.mark.slow
def test_digits_and_photographs_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCHEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retrieval_of_images, "SIZES", (4, 12))
    random = np.random.default_rng(0)
    written = random.integers(0, 256, (12, 28, 28), dtype=np.uint8)
    labels = np.zeros(12, dtype=np.uint8)
    (tmp_path / "mnist").mkdir()
    for name, array in (("images-idx3", written), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / "mnist" / f"train-{name}-ubyte").write_bytes(header + array.tobytes())
    packed = io.BytesIO()
    np.savez(packed, X=random.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8), y=labels[:6])
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar10_test_first3000.npz").write_bytes(packed.getvalue())
    outcome = run(find("retrieval_of_images"), Context(data=tmp_path))
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    rows = {tuple(row[:3]): row[3:] for row in outcome.result.tables[0].rows}
    # Images of independent pixels are far apart: any memory tells a few of them from each other.
    assert rows["MNIST", "masked", "sparsemax"] == ["100", "100"]
    assert rows["CIFAR-10", "noisy", "classical"] == ["100", ""]
    assert len(outcome.result.figures[0].drawing.axes) == 4
