"""Metastable states are counted as the paper counts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fenchel
from fenchel.hopfield import Memory
from fenchel_lab.chapters.basins import size_histogram
from fenchel_lab.chapters.metastable_states import OMEGAS, PAPER, embedded, metastable_states, sizes
from fenchel_lab.report import Context


def test_the_printed_table_adds_up() -> None:
    assert np.abs(PAPER.sum(0) - 100).max() < 0.5  # but for what rounding to a digit leaves


@pytest.mark.parametrize("name", list(OMEGAS))
def test_sizes_are_those_of_a_plain_loop(name: str) -> None:
    torch.manual_seed(0)
    patterns, q = torch.randn(30, 5), torch.randn(12, 5)
    memory = Memory(patterns, OMEGAS[name], beta=0.7)
    found = sizes(memory, q, 3)
    for _ in range(3):
        weights = OMEGAS[name].argmax(0.7 * q @ patterns.T)
        q = weights @ patterns
    assert torch.equal(found, (weights > (0.01 if name == "softmax" else 0)).sum(-1))


def test_a_state_below_every_threshold_is_of_the_largest_kind() -> None:
    share = size_histogram(torch.tensor([1, 1, 10, 11, 500, 0, 2, 2, 2, 2]), 10)
    assert share == [20, 40, 0, 0, 0, 0, 0, 0, 0, 10, 30]


def test_the_chapter() -> None:
    result = metastable_states(Context(data=None))
    shares = np.array([[[float(c) for c in row[1:]] for row in table.rows] for table in result.tables])
    assert np.abs(shares.sum(1) - 100).max() < 0.6
    softmax, sparsemax = 0, 2
    assert shares[1, 0, sparsemax] > shares[1, 0, softmax]  # sparsemax retrieves single patterns more often
    for j, k in ((5, 2), (6, 4), (7, 8)):
        assert shares[:, : k - 1, j].sum() == 0  # nothing smaller than k is recalled


def test_stored_digits_retrieve_themselves() -> None:
    images = embedded()
    memory = Memory(images.patterns, fenchel.Gini(), beta=10.0)
    stationary = memory.certify().stationary
    found = sizes(memory, images.patterns[stationary])
    assert stationary.float().mean() > 0.5
    assert bool((found == 1).all())
