"""Subsets whose size is a share of what is not masked: as many structures as there are lengths, in one batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fenchel
from fenchel.hopfield import HopfieldPooling, Memory
from fenchel.structures import AtMost, SequentialSubsets, Share, Structure, Subsets

LENGTHS = [12, 1, 7, 0, 10]
SIZES = {0.3: [4, 1, 2, 0, 3], 0.5: [6, 1, 4, 0, 5], 1.0: LENGTHS}  # rounded, halves up, at least one of any


class PlainSequences(SequentialSubsets):
    """The same subsets, found by the oracle alone."""

    def explorer(self, batch: torch.Size, shape: torch.Size) -> None:
        return None


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.arange(12) < torch.tensor(LENGTHS).unsqueeze(-1)
    scores = torch.randn(len(LENGTHS), 12, dtype=torch.float64)
    return torch.where(mask, scores, torch.nan), mask


MAKERS: dict[str, Callable[[int | Share], Structure]] = {
    "Subsets": Subsets,
    "SequentialSubsets, plain": SequentialSubsets,
    "SequentialSubsets": lambda k: SequentialSubsets(k, 0.7),
    "SequentialSubsets, by the oracle": lambda k: PlainSequences(k, 0.7),
}


@pytest.mark.parametrize("share", SIZES)
@pytest.mark.parametrize("name", MAKERS)
def test_every_row_is_that_of_its_own_size(name: str, share: float) -> None:
    scores, mask = batch()
    together = MAKERS[name](Share(share))
    best, soft = together.map(scores, mask), fenchel.SparseMAP(together).argmax(scores, mask=mask)
    for row, (length, k) in enumerate(zip(LENGTHS, SIZES[share], strict=True)):
        assert best[row].sum() == k
        assert soft[row, length:].abs().sum() == 0
        if k:
            alone, own = MAKERS[name](k), scores[row, :length]
            assert torch.equal(best[row, :length], alone.map(own))
            torch.testing.assert_close(soft[row, :length], fenchel.SparseMAP(alone).argmax(own), rtol=0, atol=1e-6)


def test_rows_do_not_depend_on_the_threads() -> None:
    torch.manual_seed(0)
    scores, mask = torch.randn(16, 100), torch.arange(100) < torch.randint(1, 101, (16, 1))
    omega, before, found = fenchel.SparseMAP(SequentialSubsets(Share(0.2), 0.7)), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(omega.argmax(scores, mask=mask))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", MAKERS)
def test_derivatives_are_those_of_each_row(name: str) -> None:
    scores, mask = batch()
    scores = torch.where(mask, scores, 0.0).requires_grad_()
    omega = fenchel.SparseMAP(MAKERS[name](Share(0.3)))
    assert torch.autograd.gradcheck(lambda s: omega.argmax(s, mask=mask), scores)
    assert torch.autograd.gradcheck(lambda s: omega.max(s, mask=mask).nan_to_num(neginf=0.0), scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MAKERS)
def test_dtype_stays(name: str, dtype: torch.dtype) -> None:
    scores, mask = batch()
    found = fenchel.SparseMAP(MAKERS[name](Share(0.5))).argmax(scores.to(dtype), mask=mask)
    assert found.dtype == dtype
    torch.testing.assert_close(found.sum(-1), torch.tensor(SIZES[0.5]).to(dtype), rtol=0.02, atol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_loss_of_the_choice_of_each_size(name: str) -> None:
    scores, mask = batch()
    omega = fenchel.SparseMAP(MAKERS[name](Share(0.5)))
    best = omega.structure.map(50 * scores, mask)
    assert omega.loss(50 * scores, best, mask=mask)[[0, 1, 2, 4]].max() < 1e-9
    with pytest.raises(ValueError, match="target must be a structure"):
        omega.loss(scores, best.flip(0), mask=mask)


def test_pooling_reads_a_share_of_every_bag() -> None:
    torch.manual_seed(0)
    omega = fenchel.SparseMAP(SequentialSubsets(Share(0.5), 0.3))
    layer = HopfieldPooling(4, omega=omega)
    padding = torch.arange(12) >= torch.tensor(LENGTHS).unsqueeze(-1)
    weights = layer.get_association_matrix(torch.randn(5, 12, 4), padding)
    torch.testing.assert_close(weights.sum((1, 2, 3)), torch.tensor(SIZES[0.5]).float())


def test_memory_certifies_a_share_as_the_number_it_is() -> None:
    patterns = 3 * torch.eye(4)
    chosen = torch.tensor([[True, True, False, False]])
    share, number = (Memory(patterns, fenchel.SparseMAP(Subsets(k)), beta=2.0).certify(chosen) for k in (Share(0.5), 2))
    assert torch.equal(share.separation, number.separation)


@pytest.mark.parametrize("of", [0.0, -0.1, 1.1, float("nan")])
def test_shares_lie_between_zero_and_one(of: float) -> None:
    with pytest.raises(ValueError, match="of must satisfy 0 < of <= 1"):
        Share(of)


def test_shares_are_numbers_and_not_limits() -> None:
    with pytest.raises(TypeError, match="of must be a number"):
        Share("half")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="k must be an int"):
        AtMost(Share(0.5))  # type: ignore[arg-type]
    assert repr(Subsets(Share(0.5))) == "Subsets(k=Share(of=0.5))"
