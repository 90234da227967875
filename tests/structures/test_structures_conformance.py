"""What holds for every map holds for SparseMAP over every structure."""

import numpy as np
import pytest
import torch
from catalogue import MEMBERS, Member
from torch import Tensor

from fenchel import SparseMAP

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}

every_member = pytest.mark.parametrize("case", MEMBERS, ids=lambda m: m.name)
every_masked = pytest.mark.parametrize("case", [m for m in MEMBERS if m.masks], ids=lambda m: m.name)
every_of_one_size = pytest.mark.parametrize(
    "case", [m for m in MEMBERS if m.structure(torch.zeros(m.transition or ())).fixed_dims], ids=lambda m: m.name
)


def setting(case: Member, *batch: int, seed: int = 0) -> tuple[SparseMAP, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    transition = case.draw(generator)
    return SparseMAP(case.structure(transition)), torch.randn(
        *batch, *case.shape, generator=generator, dtype=torch.float64
    )


@every_member
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shape_and_dtype_come_back(case: Member, dtype: torch.dtype) -> None:
    omega, scores = setting(case, 2, 3)
    narrow = scores.to(dtype)
    mu = omega.argmax(narrow)
    assert mu.shape == scores.shape
    assert mu.dtype == dtype
    assert torch.allclose(mu.double(), omega.argmax(narrow.double()), atol=TOLERANCE[dtype])
    assert omega.max(narrow).dtype == dtype
    assert omega.max(narrow).shape == (2, 3)
    mixture = omega.solve(narrow)
    assert mixture.weights.dtype == mixture.structures.dtype == mixture.gap.dtype == dtype
    assert mixture.structures.shape == (2, 3, mixture.weights.shape[-1], *case.shape)
    again = omega.solve(narrow, start=mixture)
    assert torch.allclose(again.marginals.double(), mu.double(), atol=TOLERANCE[dtype])


@every_masked
def test_what_stands_under_the_mask_does_not_matter(case: Member) -> None:
    omega, scores = setting(case, 4)
    first = torch.zeros(case.shape, dtype=torch.bool)
    first.reshape(-1)[case.shape[-1] - 1] = True  # one part alone leaves a choice to every structure
    mask = ~first
    clean, dirty = (torch.where(mask, scores, value).requires_grad_() for value in (0.0, torch.nan))
    wanted, reached = omega.argmax(clean, mask=mask), omega.argmax(dirty, mask=mask)
    assert torch.equal(wanted, reached)
    assert torch.equal(omega.argmax(torch.where(mask, scores, -torch.inf)), reached)
    assert not reached[:, first].any()
    (slope,) = torch.autograd.grad(reached.square().sum() + omega.max(dirty, mask=mask).sum(), dirty)
    (other,) = torch.autograd.grad(wanted.square().sum() + omega.max(clean, mask=mask).sum(), clean)
    assert torch.equal(slope, other)
    assert not slope[:, first].any()


@every_masked
def test_rows_with_nothing_left_are_zero_with_a_zero_gradient(case: Member) -> None:
    omega, scores = setting(case, 3)
    scores[1] = -torch.inf
    scores.requires_grad_()
    mu = omega.argmax(scores)
    assert not mu[1].any()
    assert torch.equal(mu[[0, 2]], omega.argmax(scores[[0, 2]]))
    assert omega.max(scores)[1] == -torch.inf
    (slope,) = torch.autograd.grad(mu.square().sum(), scores)
    assert not slope[1].any()
    assert slope.isfinite().all()
    mixture = omega.solve(scores)
    assert not mixture.weights[1].any()
    assert mixture.gap[1] == 0


@every_member
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_bad_row_is_nan_and_touches_no_other(case: Member, value: float) -> None:
    omega, scores = setting(case, 3)
    wanted = omega.argmax(scores)
    scores[1].reshape(-1)[0] = value
    mu = omega.argmax(scores)
    assert mu[1].isnan().all()
    assert torch.equal(mu[[0, 2]], wanted[[0, 2]])
    assert omega.solve(scores).gap[1].isnan()
    assert omega.structure.map(scores)[1].isnan().all() or "user" in case.name


@every_member
def test_huge_scores_give_a_structure(case: Member) -> None:
    omega, scores = setting(case, 5)
    mu = omega.argmax(1e30 * scores)
    assert ((mu == 0) | (mu == 1)).all()
    best = torch.from_numpy(
        np.stack([max(case.members, key=lambda y, s=s: float((y * s.numpy()).sum())) for s in scores])
    )
    assert torch.equal(mu.detach(), best)


@every_of_one_size
def test_an_offset_changes_nothing(case: Member) -> None:
    omega, scores = setting(case, 5)
    scores = (64 * scores).round() / 64  # so that the sum with the offset is exact
    assert torch.allclose(omega.argmax(scores + 2.0**40), omega.argmax(scores), atol=1e-12)
    target = torch.from_numpy(case.members[0]).expand_as(scores)
    assert torch.allclose(omega.loss(scores + 2.0**40, target), omega.loss(scores, target), atol=1e-11)


@every_member
def test_a_batch_is_its_rows(case: Member) -> None:
    omega, scores = setting(case, 2, 3)
    mu = omega.argmax(scores)
    assert torch.equal(mu[1, 2], omega.argmax(scores[1, 2]))
    assert torch.equal(mu, omega.argmax(scores.transpose(0, 1).contiguous().transpose(0, 1)))
    wide = scores[:1].expand(4, *scores.shape[1:])
    assert torch.equal(omega.argmax(wide), mu[:1].expand_as(wide))
    empty = scores[:0].requires_grad_()
    assert omega.argmax(empty).shape == empty.shape
    assert omega.max(empty).shape == (0, 3)
    assert omega.solve(empty).weights.shape[:2] == (0, 3)
    omega.argmax(empty).sum().backward()


@every_member
def test_rows_do_not_depend_on_threads(case: Member) -> None:
    omega, scores = setting(case, 40)
    one = omega.solve(scores)
    torch.set_num_threads(2)
    try:
        two = omega.solve(scores)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one.marginals, two.marginals)
    assert torch.equal(one.weights, two.weights)


@every_masked
def test_a_masked_target_has_infinite_loss(case: Member) -> None:
    omega, scores = setting(case, 1)
    target = torch.from_numpy(case.members[-1])[None]
    mask = torch.ones(case.shape, dtype=torch.bool)
    mask.reshape(-1)[int(target.reshape(-1).nonzero()[0])] = False
    assert omega.loss(scores, target, mask=mask).isinf().all()
    assert omega.violation(scores, target, mask=mask).isinf().all()


def test_autocast_leaves_the_choice_alone() -> None:
    for case in MEMBERS:
        omega, scores = setting(case, 2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mu = omega.argmax(scores.float())
        assert torch.equal(mu, omega.argmax(scores.float()))


def test_a_module_says_what_it_is() -> None:
    for case in MEMBERS:
        omega, _ = setting(case, 1)
        assert "SparseMAP" in repr(omega)
        assert type(omega.structure).__name__ in repr(omega)
