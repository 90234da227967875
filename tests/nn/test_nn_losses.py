"""Loss modules: drop-in for CrossEntropyLoss, in their arguments, their results and what they keep."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fenchel
from copies import COPIES
from fenchel import Gini, Norm, Shannon, Tsallis
from fenchel.nn import EntmaxLoss, FenchelYoungLoss, NormmaxLoss, SparsemaxLoss

EXACT = {"atol": 1e-13, "rtol": 1e-12}


def problem(classes: int = 5, rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, classes, dtype=torch.float64, requires_grad=True), torch.randint(classes, (rows,))


def gradient(loss: Tensor, scores: Tensor) -> Tensor:
    direction = torch.arange(1, loss.numel() + 1, dtype=loss.dtype).reshape(loss.shape).cos()
    return torch.autograd.grad(loss, scores, direction, retain_graph=True)[0]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_shannon_is_cross_entropy_loss(weighted: bool, smoothing: float, ignore_index: int, reduction: str) -> None:
    options: dict[str, Any] = {
        "weight": torch.rand(5).double() if weighted else None,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": smoothing,
    }
    ours, theirs = FenchelYoungLoss(Shannon(), **options), nn.CrossEntropyLoss(**options)
    scores, target = problem()
    a, b = ours(scores, target), theirs(scores, target)
    assert a.shape == b.shape
    assert_close(gradient(a, scores), gradient(b, scores), **EXACT)
    if not smoothing:
        assert_close(a, b, **EXACT)


def test_classes_may_be_where_cross_entropy_has_them() -> None:
    scores, target = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randint(5, (2, 3, 4))
    assert_close(FenchelYoungLoss(Shannon(), dim=1)(scores, target), nn.CrossEntropyLoss()(scores, target), **EXACT)


def test_soft_targets_and_masks_pass_through() -> None:
    scores, _ = problem()
    soft, mask = torch.softmax(torch.randn(6, 5).double(), -1), torch.tensor([True, True, False, True, True])
    soft = torch.where(mask, soft, 0.0)
    soft = soft / soft.sum(-1, keepdim=True)
    loss = FenchelYoungLoss(Shannon(), reduction="none")(scores, soft, mask)
    hidden = torch.where(mask, scores, -torch.inf)
    entropy = torch.special.entr(soft).sum(-1)
    expected = torch.logsumexp(hidden, -1) - (soft * scores).sum(-1) - entropy
    assert_close(loss, expected, **EXACT)
    assert_close(FenchelYoungLoss(Shannon(), reduction="none")(scores, soft, mask=mask), expected, **EXACT)


@pytest.mark.parametrize(
    ("module", "function", "arguments"),
    [
        (SparsemaxLoss, fenchel.sparsemax_loss, ()),
        (EntmaxLoss, fenchel.entmax_loss, ()),
        (EntmaxLoss, fenchel.entmax_loss, (1.2,)),
        (EntmaxLoss, fenchel.entmax_loss, (torch.tensor(1.2),)),
        (NormmaxLoss, fenchel.normmax_loss, ()),
        (NormmaxLoss, fenchel.normmax_loss, (5.0,)),
    ],
)
def test_modules_are_their_functions(module: type[nn.Module], function: Any, arguments: tuple) -> None:
    scores, target, soft = *problem(), torch.softmax(torch.randn(6, 5).double(), -1)
    options = {"weight": torch.rand(5), "ignore_index": 1, "reduction": "sum", "label_smoothing": 0.2}
    assert torch.equal(module(*arguments, **options)(scores, target), function(scores, target, *arguments, **options))
    assert torch.equal(module(*arguments)(scores, soft), function(scores, soft, *arguments))
    moved = module(*arguments, dim=0)(scores.T, target)
    assert_close(moved, function(scores, target, *arguments), **EXACT)


def test_the_arguments_of_cross_entropy_loss_are_there_with_its_defaults() -> None:
    theirs = inspect.signature(nn.CrossEntropyLoss).parameters
    deprecated = {"size_average", "reduce"}
    for module in (SparsemaxLoss, EntmaxLoss, NormmaxLoss, FenchelYoungLoss):
        ours = inspect.signature(module).parameters
        for name in set(theirs) - deprecated:
            assert name in ours, f"{module.__name__} does not show {name}"
            assert ours[name].default == theirs[name].default


def test_weight_may_come_first_as_in_cross_entropy_loss() -> None:
    scores, target = problem()
    weight = torch.rand(5).double()
    expected = (weight[target] * fenchel.sparsemax_loss(scores, target, reduction="none")).sum() / weight[target].sum()
    assert_close(SparsemaxLoss(weight)(scores, target), expected, **EXACT)


# -- what is kept ---------------------------------------------------------------------------------------


def test_the_state_dict_is_that_of_cross_entropy_loss() -> None:
    weight = torch.rand(5)
    for options in ({}, {"weight": weight}):
        theirs = nn.CrossEntropyLoss(**options)
        for ours in (SparsemaxLoss(**options), EntmaxLoss(1.3, **options), EntmaxLoss(torch.tensor(1.3), **options)):
            assert list(ours.state_dict()) == list(theirs.state_dict())
            ours.load_state_dict(theirs.state_dict(), strict=True)
            theirs.load_state_dict(ours.state_dict(), strict=True)


def test_weight_and_alpha_move_with_the_module() -> None:
    loss = EntmaxLoss(torch.tensor(1.3), weight=torch.rand(5))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert loss.to(dtype).weight.dtype == dtype
        assert loss.omega.alpha.dtype == dtype
        scores, target = problem()
        assert loss(scores.to(dtype), target).dtype == dtype


def test_a_parameter_as_alpha_is_trained() -> None:
    alpha = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
    loss = EntmaxLoss(alpha)
    assert [p is alpha for p in loss.parameters()] == [True]
    assert len(loss.state_dict()) == 1
    scores, target = problem()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.01)
    before = loss(scores, target)
    before.backward()
    optimizer.step()
    assert loss(scores, target) < before
    assert alpha.item() != 1.3


def test_a_learnable_omega_is_trained() -> None:
    omega = Tsallis(1.5, learnable=True)
    loss = FenchelYoungLoss(omega)
    assert list(loss.state_dict()) == ["omega.raw_alpha"]
    loss(*problem()).backward()
    assert omega.raw_alpha is not None
    assert omega.raw_alpha.grad is not None
    assert omega.raw_alpha.grad != 0


@pytest.mark.parametrize(
    "loss",
    [
        SparsemaxLoss(weight=torch.rand(5), ignore_index=3),
        EntmaxLoss(1.3, label_smoothing=0.1),
        EntmaxLoss(torch.tensor(1.3), reduction="sum"),
        NormmaxLoss(3.0, dim=-1),
        FenchelYoungLoss(0.5 * Tsallis(1.5, learnable=True)),
    ],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_equal(loss: FenchelYoungLoss, how: str) -> None:
    copied = COPIES[how](loss)
    scores, target = problem()
    assert torch.equal(copied(scores, target), loss(scores, target))
    assert repr(copied) == repr(loss)


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        (SparsemaxLoss(), ["SparsemaxLoss(", "mean", "dim=-1"]),
        (SparsemaxLoss(reduction="sum", dim=1), ["'sum'", "dim=1"]),
        (SparsemaxLoss(ignore_index=7), ["ignore_index=7"]),
        (SparsemaxLoss(label_smoothing=0.125), ["label_smoothing=0.125"]),
        (SparsemaxLoss(weight=torch.ones(5)), ["weight"]),
        (EntmaxLoss(1.25), ["alpha=1.25"]),
        (EntmaxLoss(torch.full((3, 1), 1.25)), ["alpha=tensor of shape (3, 1)"]),
        (NormmaxLoss(3.5), ["NormmaxLoss(", "alpha=3.5"]),
        (FenchelYoungLoss(0.25 * Norm(7.0)), ["gamma=0.25", "Norm(alpha=7)"]),
        (FenchelYoungLoss(Gini()), ["FenchelYoungLoss(", "Gini()"]),
    ],
)
def test_the_repr_tells_the_parameters(loss: nn.Module, parts: list[str]) -> None:
    for part in parts:
        assert part in repr(loss)


@pytest.mark.parametrize(
    ("make", "error", "names"),
    [
        (lambda: SparsemaxLoss(reduction="average"), ValueError, "reduction"),
        (lambda: SparsemaxLoss(label_smoothing=1.5), ValueError, "label_smoothing"),
        (lambda: EntmaxLoss(0.0), ValueError, "alpha"),
        (lambda: EntmaxLoss("1.5"), TypeError, "alpha"),
        (lambda: EntmaxLoss(math.nan), ValueError, "alpha"),
        (lambda: NormmaxLoss(1.0), ValueError, "alpha"),
        (lambda: FenchelYoungLoss("softmax"), TypeError, "omega"),
        (lambda: FenchelYoungLoss(fenchel.sparsemax), TypeError, "omega"),
        (lambda: SparsemaxLoss(weight=torch.ones(4)), ValueError, "weight"),
        (lambda: SparsemaxLoss(dim=2), ValueError, "dim"),
    ],
)
def test_bad_arguments_are_named_by_the_first_call_at_the_latest(make: Any, error: type, names: str) -> None:
    with pytest.raises(error, match=names):
        make()(*problem())


def test_compiles_to_one_graph_with_the_same_results() -> None:
    torch._dynamo.reset()
    loss = EntmaxLoss(1.5, weight=torch.rand(5).double(), label_smoothing=0.1)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    scores, target = problem()
    expected, actual = loss(scores, target), compiled(scores, target)
    assert_close(actual, expected)
    assert_close(gradient(actual, scores), gradient(expected, scores))


def test_a_classifier_learns() -> None:
    inputs = torch.randn(200, 4)
    target = (inputs @ torch.randn(4, 3)).argmax(-1)
    for loss in (SparsemaxLoss(), EntmaxLoss(1.5), NormmaxLoss(2.0)):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(40):
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()
        assert (model(inputs).argmax(-1) == target).double().mean() > 0.9
