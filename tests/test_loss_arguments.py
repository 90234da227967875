"""Arguments of losses that are refused, and losses of distributed tensors."""

import datetime
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import fenchel
from fenchel import (
    Capped,
    Fused,
    Gini,
    KSubsets,
    Regularizer,
    Shannon,
    entmax_loss,
    fy_loss,
    linear_entmax_loss,
    normmax_loss,
    sparsemax_loss,
)
from test_losses import EXACT

# -- bad input ------------------------------------------------------------------------------------------

SCORES, TARGET, SOFT = torch.zeros(3, 4), torch.tensor([0, 1, 2]), torch.full((3, 4), 0.25)


@pytest.mark.parametrize(
    ("scores", "target", "options", "error", "names"),
    [
        (SCORES.long(), TARGET, {}, TypeError, "scores"),
        ([[1.0, 2.0]], TARGET, {}, TypeError, "scores"),
        (torch.tensor(1.0), torch.tensor(0), {}, ValueError, "scores"),
        (torch.zeros(3, 0), TARGET, {}, ValueError, "scores"),
        (SCORES, [0, 1, 2], {}, TypeError, "target"),
        (SCORES, TARGET.bool(), {}, TypeError, "target"),
        (SCORES, TARGET.to(torch.complex64), {}, TypeError, "target"),
        (SCORES, TARGET[:2], {}, ValueError, "target"),
        (SCORES, TARGET[:1], {}, ValueError, "target"),
        (SCORES, TARGET[:, None], {}, ValueError, "target"),
        (SCORES, TARGET, {"dim": 0}, ValueError, "target"),
        (SCORES, torch.tensor(1), {}, ValueError, "target"),
        (SCORES, torch.tensor([0, -1, 2]), {}, ValueError, "target"),
        (SCORES, torch.tensor([0, 4, 2]), {}, ValueError, "target"),
        (SCORES, torch.tensor([0, -100, 2]), {"ignore_index": 1}, ValueError, "target.*-100"),
        (SCORES, TARGET.float(), {}, ValueError, "target"),
        (SCORES, SOFT[:2], {}, ValueError, "target"),
        (SCORES, SOFT[:1], {}, ValueError, "target"),
        (SCORES, SOFT * 1.1, {}, ValueError, "target"),
        (SCORES, SOFT * 0, {}, ValueError, "target"),
        (SCORES, torch.tensor([[1.5, -0.5, 0.0, 0.0]] * 3), {}, ValueError, "target"),
        (SCORES, torch.tensor([[1.5, -0.5, 0.0, 0.0]] * 3), {"label_smoothing": 0.9}, ValueError, "target"),
        (SCORES, SOFT * 2, {"label_smoothing": 1.0}, ValueError, "target"),
        (SCORES, TARGET, {"reduction": "average"}, ValueError, "reduction"),
        (SCORES, TARGET, {"reduction": None}, ValueError, "reduction"),
        (SCORES, TARGET, {"label_smoothing": -0.1}, ValueError, "label_smoothing"),
        (SCORES, TARGET, {"label_smoothing": 1.1}, ValueError, "label_smoothing"),
        (SCORES, TARGET, {"label_smoothing": math.nan}, ValueError, "label_smoothing"),
        (SCORES, TARGET, {"label_smoothing": None}, TypeError, "label_smoothing"),
        (SCORES, TARGET, {"weight": torch.ones(3)}, ValueError, "weight"),
        (SCORES, TARGET, {"weight": torch.ones(3, 4)}, ValueError, "weight"),
        (SCORES, TARGET, {"weight": torch.tensor(1.0)}, ValueError, "weight"),
        (SCORES, TARGET, {"weight": [1.0, 1.0, 1.0, 1.0]}, TypeError, "weight"),
        (SCORES, SOFT, {"weight": torch.ones(4)}, ValueError, "weight"),
        (SCORES, TARGET, {"weight": torch.tensor([1.0, -1, 1, 1]), "label_smoothing": 0.1}, ValueError, "weight"),
        (SCORES, TARGET, {"mask": torch.ones(3, 4)}, TypeError, "mask"),
        (SCORES, TARGET, {"mask": torch.ones(3, dtype=torch.bool)}, ValueError, "mask"),
        (SCORES, TARGET, {"dim": 2}, ValueError, "dim"),
        (SCORES, TARGET, {"dim": None}, TypeError, "dim"),
    ],
)
def test_bad_input_is_named(scores: Tensor, target: Tensor, options: dict, error: type, names: str) -> None:
    for loss in (sparsemax_loss, entmax_loss, normmax_loss):
        with pytest.raises(error, match=names):
            loss(scores, target, **options)


def test_an_error_of_targets_shows_the_first_wrong_row_and_what_is_ignored() -> None:
    soft = SOFT.clone()
    soft[1] = 0.1
    with pytest.raises(ValueError, match=r"along dim 1, got entries from 0.1 with sum 0.4 in target\[1, :\]"):
        entmax_loss(SCORES, soft)
    with pytest.raises(ValueError, match=r"along dim 0, got entries from 0.1 with sum 0.4 in target\[:, 1\]"):
        entmax_loss(SCORES.T, soft.T, dim=0)
    with pytest.raises(ValueError, match=r"got entries from -0.5 with sum 1 in target\[:\]"):
        sparsemax_loss(torch.zeros(4), torch.tensor([1.5, -0.5, 0.0, 0.0]))
    wrong = torch.tensor([0, 4, -100])
    with pytest.raises(ValueError, match=r"class indices in \[0, 3\] or ignore_index, -100, got 4"):
        entmax_loss(SCORES, wrong)
    with pytest.raises(ValueError, match=r"class indices in \[0, 3\] or ignore_index, -100, got 4"):
        linear_entmax_loss(SCORES, torch.zeros(4, 4), wrong)
    with pytest.raises(ValueError, match=r"class indices in \[0, 3\], got 4"):  # it has no ignore_index
        Gini().loss(SCORES, wrong)


@pytest.mark.parametrize(
    "omega", ["softmax", None, 1.5, fenchel.sparsemax, torch.ones(3)], ids=lambda o: type(o).__name__
)
def test_an_omega_that_is_not_a_regularizer_is_named(omega: object) -> None:
    with pytest.raises(TypeError, match="omega"):
        fy_loss(SCORES, TARGET, omega)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, torch.tensor(0.0), torch.tensor([[1.5], [-1.0], [2.0]])])
def test_an_alpha_out_of_range_is_named(alpha: float | Tensor) -> None:
    for loss in (entmax_loss, normmax_loss):
        with pytest.raises(ValueError, match="alpha"):
            loss(SCORES, TARGET, alpha)
    with pytest.raises(ValueError, match="alpha"):
        normmax_loss(SCORES, TARGET, 1.0)


@pytest.mark.parametrize("alpha", [torch.full((4,), 1.5), torch.full((2, 1), 1.5), torch.full((1, 3, 1), 1.5)], ids=str)
def test_an_alpha_of_the_wrong_shape_is_named(alpha: Tensor) -> None:
    with pytest.raises(ValueError, match="alpha"):
        entmax_loss(SCORES, TARGET, alpha)


@pytest.mark.parametrize("alpha", ["1.5", None, True, torch.tensor(True)], ids=str)
def test_an_alpha_of_the_wrong_type_is_named(alpha: object) -> None:
    with pytest.raises(TypeError, match="alpha"):
        entmax_loss(SCORES, TARGET, alpha)


def test_ignored_targets_may_lie_outside_the_classes_but_others_may_not() -> None:
    target = torch.tensor([0, 999, 2])
    assert sparsemax_loss(SCORES, target, ignore_index=999).isfinite()
    with pytest.raises(ValueError, match="999"):
        sparsemax_loss(SCORES, target)


# -- distributed tensors --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A group of this process alone."""
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=30)
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


DISTRIBUTED: dict[str, Callable[..., Tensor]] = {
    "entmax": lambda s, y, w: entmax_loss(s, y),
    "none": lambda s, y, w: entmax_loss(s, y, reduction="none").sum(),
    "weighted": lambda s, y, w: entmax_loss(s, y, weight=w[0], label_smoothing=0.1),
    "probabilities": lambda s, y, w: sparsemax_loss(s, w),
    "shannon": lambda s, y, w: fy_loss(s, y, Shannon()),
    "norm": lambda s, y, w: normmax_loss(s, y),
    "max": lambda s, y, w: (Gini().max(s) ** 2).sum(),
    "linear": lambda s, y, w: linear_entmax_loss(s, w, y),
}


@pytest.mark.parametrize("kind", DISTRIBUTED)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_losses_of_distributed_tensors_have_the_gradients_of_plain_ones(mesh: Any, kind: str, placement: Any) -> None:
    torch.manual_seed(0)
    plain = torch.randn(4, 4, dtype=torch.float64), torch.tensor([1, 3, -100, 0]), torch.full((4, 4), 0.25).double()
    scores, target, other = (distribute_tensor(t, mesh, [placement]) for t in plain)
    loss = DISTRIBUTED[kind](scores.requires_grad_(), target, other)
    loss.backward()
    leaf = plain[0].clone().requires_grad_()
    expected = DISTRIBUTED[kind](leaf, *plain[1:])
    expected.backward()
    assert_close(loss.full_tensor(), expected, **EXACT)
    assert_close(scores.grad.full_tensor(), leaf.grad, **EXACT)


def test_plain_scores_with_a_distributed_target_are_named(mesh: Any) -> None:
    target = distribute_tensor(torch.tensor([0, 1]), mesh, [Replicate()])
    with pytest.raises(TypeError, match="scores must be a DTensor as other arguments are"):
        entmax_loss(torch.zeros(2, 3), target)


@pytest.mark.parametrize("omega", [Fused(0.1), KSubsets(2), 0.5 * Capped(0.7)], ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_losses_of_any_omega_take_distributed_tensors(omega: Regularizer, placement: Any, mesh: Any) -> None:
    scores = torch.randn(2, 3, dtype=torch.float64)
    target = omega.argmax(torch.randn(2, 3, dtype=torch.float64))
    there, wanted = (distribute_tensor(t, mesh, [placement]) for t in (scores, target))
    assert_close(fy_loss(there, wanted, omega).full_tensor(), fy_loss(scores, target, omega), **EXACT)
