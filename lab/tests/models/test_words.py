"""Words in context: batches and padding change nothing, nor do texts without words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fenchel_lab.models.words import WordEncoder


def encoder(trainable: bool = False) -> WordEncoder:
    torch.manual_seed(0)
    return WordEncoder(torch.randn(9, 5), hidden=3, trainable=trainable).eval()


def test_a_batch_is_its_texts_one_by_one() -> None:
    torch.manual_seed(1)
    words, lengths = torch.randint(9, (4, 6)), torch.tensor([6, 2, 0, 1])
    states = encoder()(words, lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(states[row, length:], torch.zeros(6 - length, 6))
        if length:
            alone = encoder()(words[row : row + 1, :length], lengths[row : row + 1])
            torch.testing.assert_close(states[row, :length], alone[0])


def test_what_stands_behind_the_end_does_not_matter() -> None:
    words, lengths = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 1])
    other = words.clone()
    other[1, 1:] = 10_000  # not even a row
    assert torch.equal(encoder()(words, lengths), encoder()(other, lengths))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_nothing_to_read_has_states_of_zero(shape: tuple[int, int]) -> None:
    states = encoder()(torch.zeros(shape, dtype=torch.long), torch.zeros(shape[0], dtype=torch.long))
    assert states.shape == (*shape, 6)
    assert not states.any()


def test_states_have_the_dtype_of_the_vectors() -> None:
    double = WordEncoder(torch.randn(9, 5, dtype=torch.float64), hidden=3)
    assert double(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1])).dtype == torch.float64


def test_vectors_are_trained_only_where_asked_and_saved_always() -> None:
    fixed, free = encoder(), encoder(trainable=True)
    assert "vectors" in fixed.state_dict()
    assert "vectors" not in dict(fixed.named_parameters())
    assert isinstance(free.vectors, nn.Parameter)
    free(torch.tensor([[1, 2]]), torch.tensor([2])).sum().backward()
    assert free.vectors.grad is not None
    assert free.vectors.grad[[1, 2]].abs().sum(-1).min() > 0
    assert not free.vectors.grad[3:].any()


def test_vectors_that_are_none_are_refused() -> None:
    for vectors in (torch.zeros(3), torch.zeros(3, 2, dtype=torch.long), [[0.0]]):
        with pytest.raises(ValueError, match="vectors must be"):
            WordEncoder(vectors, 2)  # type: ignore[arg-type]
