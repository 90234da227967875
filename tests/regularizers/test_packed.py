"""Jagged nested tensors: maps and losses of packed rows are those of each sequence."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fenchel
from fenchel import Custom, Fused, Gini, KSubsets, Regularizer, Shannon, SparseMAP, Tsallis, entmax_loss, fy_loss
from fenchel.structures import DependencyTree

LENGTHS = (3, 1, 40, 0, 6)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def packed(*rest: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Tensor:
    parts = [drawn(length, *rest, seed=seed + i) for i, length in enumerate(lengths)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def like(values: Tensor, nested: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, nested.offsets())


def check_parts(found: Tensor, parts: list[Tensor]) -> None:
    assert found.is_nested
    for one, other in zip(found.unbind(), parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


MAPS: dict[str, Callable[..., Tensor]] = {
    "argmax": fenchel.argmax,
    "softmax": fenchel.softmax,
    "sparsemax": fenchel.sparsemax,
    "entmax": fenchel.entmax,
    "entmax 1.3": lambda s, dim: fenchel.entmax(s, 1.3, dim),
    "normmax": fenchel.normmax,
    "constrained_softmax": lambda s, dim: fenchel.constrained_softmax(s, 1.0, dim),
    "constrained_sparsemax": lambda s, dim: fenchel.constrained_sparsemax(s, 1.0, dim),
    "k_subsets": lambda s, dim: fenchel.k_subsets(s, 2, dim),
    "fusedmax": fenchel.fusedmax,
    "oscarmax": fenchel.oscarmax,
    "module": lambda s, dim: fenchel.nn.Entmax(1.5, dim)(s),
    "scaled": lambda s, dim: (0.5 * Tsallis(1.5)).argmax(s, dim),
    "custom": lambda s, dim: Custom(lambda p: p.square().sum(-1)).argmax(s, dim),
}


@pytest.mark.parametrize("choose", MAPS.values(), ids=MAPS)
def test_maps_choose_in_each_sequence(choose: Callable[..., Tensor]) -> None:
    scores = packed()
    found = choose(scores, dim=-1)
    assert found.shape == scores.shape
    assert (found * scores).shape == scores.shape  # of one ragged structure
    check_parts(found, [choose(s, dim=-1) if len(s) else s for s in scores.unbind()])
    wide = packed(4)
    for dim in (1, 2, -1, -2):
        inner = dim - 1 if dim > 0 else dim
        check_parts(choose(wide, dim=dim), [choose(s, dim=inner) if len(s) else s for s in wide.unbind()])


def test_the_ragged_dimension_may_be_any_but_the_first() -> None:
    turned = packed(4).transpose(1, 2)
    check_parts(fenchel.entmax(turned), [fenchel.entmax(s) if s.numel() else s for s in turned.unbind()])
    check_parts(fenchel.entmax(turned, dim=1), [fenchel.entmax(s, dim=0) if s.numel() else s for s in turned.unbind()])


def test_gaps_between_sequences_belong_to_none() -> None:
    base = drawn(3, 6, 2)
    gappy = torch.nested.narrow(base, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]), layout=torch.jagged)
    parts = [base[0, :2], base[1, 1:4], base[2, 2:3]]
    for dim in (1, 2):
        found = fenchel.sparsemax(gappy, dim)
        assert (found * gappy).shape == gappy.shape
        check_parts(found, [fenchel.sparsemax(s, dim - 1) for s in parts])
    target = [torch.tensor([0, 1]), torch.tensor([1, 1, 0]), torch.tensor([0])]
    losses = torch.cat([entmax_loss(s, y, reduction="none") for s, y in zip(parts, target, strict=True)])
    gapless = torch.nested.nested_tensor(target, layout=torch.jagged)
    torch.testing.assert_close(entmax_loss(gappy, gapless), losses.mean())


@pytest.mark.parametrize("dim", [1, 2])
def test_gradients_are_those_of_the_sequences(dim: int) -> None:
    values = drawn(sum(LENGTHS), 3, seed=9)
    weights = drawn(sum(LENGTHS), 3, seed=10)
    offsets = packed(3).offsets()

    def total(values: Tensor) -> Tensor:
        p = fenchel.entmax(torch.nested.nested_tensor_from_jagged(values, offsets), 1.5, dim)
        return (p.values() * weights).sum()

    def one_by_one(values: Tensor) -> Tensor:
        parts = [fenchel.entmax(s, 1.5, dim - 1) for s in values.split(LENGTHS) if len(s)]
        return (torch.cat(parts) * weights).sum()

    values.requires_grad_()
    slopes = [torch.autograd.grad(f(values), values)[0] for f in (total, one_by_one)]
    torch.testing.assert_close(*slopes)
    (slope,) = torch.autograd.grad(total(values), values, create_graph=True)
    with pytest.raises(NotImplementedError):  # torch has no second derivatives of nested tensors
        torch.autograd.grad(slope.sum(), values)


def test_parameters_and_masks_go_with_sequences() -> None:
    scores = packed(2)
    alpha = torch.tensor([1.0, 1.2, 1.5, 1.7, 2.0], dtype=torch.float64).requires_grad_()
    rows = [(s, a) for s, a in zip(scores.unbind(), alpha, strict=True)]
    for dim in (1, 2):
        found = fenchel.entmax(scores, alpha[:, None, None], dim)
        check_parts(found, [fenchel.entmax(s, a, dim - 1) if len(s) else s for s, a in rows])
    (slope,) = torch.autograd.grad(found.values().square().sum(), alpha)
    assert slope.count_nonzero() == 4  # all but that of the empty one
    mask = like(drawn(sum(LENGTHS), 2, seed=3) > 0, scores)
    for dim in (1, 2):
        found = fenchel.sparsemax(scores, dim, mask)
        pairs = zip(scores.unbind(), mask.unbind(), strict=True)
        check_parts(found, [fenchel.sparsemax(s, dim - 1, m) if len(s) else s for s, m in pairs])
    columns = torch.tensor([True, False])
    check_parts(
        fenchel.sparsemax(scores, 2, columns),
        [fenchel.sparsemax(s, 1, columns) if len(s) else s for s in scores.unbind()],
    )
    upper = like(drawn(sum(LENGTHS), 2, seed=4).abs() + 1, scores)
    pairs = zip(scores.unbind(), upper.unbind(), strict=True)
    check_parts(
        fenchel.constrained_sparsemax(scores, upper, 1),
        [fenchel.constrained_sparsemax(s, u, 0) if len(s) else s for s, u in pairs],
    )


@pytest.mark.parametrize("omega", [Tsallis(1.5), Gini(), 0.3 * Shannon(), KSubsets(2), Fused(0.2)], ids=str)
def test_omega_answers_for_packed_rows(omega: Regularizer) -> None:
    scores = packed(3, lengths=(4, 2, 30))
    parts = scores.unbind()
    for dim in (1, 2):
        p = omega.argmax(scores, dim)
        check_parts(p, [omega.argmax(s, dim - 1) for s in parts])
        maximum, value = omega.max(scores, dim), omega(p, dim)
        if dim == 1:
            torch.testing.assert_close(maximum, torch.stack([omega.max(s, 0) for s in parts]))
            torch.testing.assert_close(value, torch.stack([omega(omega.argmax(s, 0), 0) for s in parts]))
        else:
            check_parts(maximum, [omega.max(s, 1) for s in parts])
            check_parts(value, [omega(omega.argmax(s, 1), 1) for s in parts])
        loss = omega.loss(scores, p, dim)
        assert (loss.values() if loss.is_nested else loss).abs().max() < 1e-12


def test_an_empty_sequence_has_nothing_to_choose_from() -> None:
    assert Gini().max(packed(), 1)[3] == -math.inf


def test_losses_of_tokens_are_those_of_all_rows() -> None:
    scores = packed(5)
    target = torch.randint(0, 5, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    target[::7] = -100
    weight = torch.rand(5, dtype=torch.float64)
    for options in ({}, {"reduction": "sum"}, {"weight": weight}, {"label_smoothing": 0.1}):
        ours = fy_loss(scores, like(target, scores), Shannon(), **options)
        theirs = cross_entropy(scores.values(), target, **options)
        if "label_smoothing" in options:  # which differ by Ω of the smoothed target
            theirs = fy_loss(scores.values(), target, Shannon(), **options)
        torch.testing.assert_close(ours, theirs)
    each = entmax_loss(scores, like(target, scores), reduction="none")
    check_parts(each, list(entmax_loss(scores.values(), target, reduction="none").split(LENGTHS)))
    soft = fenchel.softmax(packed(5, seed=8))
    torch.testing.assert_close(
        entmax_loss(scores, like(soft.values(), scores)), entmax_loss(scores.values(), soft.values())
    )


def test_losses_of_sequences_choose_among_their_entries() -> None:
    scores = packed()
    target = torch.tensor([2, 0, 17, -100, 5])
    rows = [(s, y) for s, y in zip(scores.unbind(), target, strict=True) if len(s)]
    each = torch.stack([cross_entropy(s, y) for s, y in rows])
    torch.testing.assert_close(fy_loss(scores, target, Shannon(), dim=1), each.mean())
    torch.testing.assert_close(fy_loss(scores, target, Shannon(), dim=1, reduction="sum"), each.sum())
    none = fy_loss(scores, target, Shannon(), dim=1, reduction="none")
    torch.testing.assert_close(none[[0, 1, 2, 4]], each)
    assert none[3] == 0
    soft = [torch.softmax(drawn(len(s), seed=5), 0) for s, _ in rows]
    some = torch.nested.nested_tensor([s for s, _ in rows], layout=torch.jagged)
    loss = fy_loss(some, torch.nested.nested_tensor(soft, layout=torch.jagged), Shannon(), dim=1, reduction="none")
    kl = [(y * (y.log() - torch.log_softmax(s, 0))).sum() for (s, _), y in zip(rows, soft, strict=True)]
    torch.testing.assert_close(loss, torch.stack(kl))


def test_no_sequences() -> None:
    none = torch.nested.nested_tensor_from_jagged(torch.zeros(0, 3), torch.tensor([0]))
    assert fenchel.sparsemax(none).shape[0] == 0
    assert fenchel.sparsemax(none, 1).shape[0] == 0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s: fenchel.sparsemax(s, 0), "dim must not be the batch dimension"),
        (lambda s: fenchel.sparsemax(s, 3), r"dim must be in \[-3, 2\]"),
        (lambda s: fenchel.sparsemax(s, 1, torch.ones(5, 7, 1, dtype=torch.bool)), "mask must be nested as scores is"),
        (lambda s: fenchel.sparsemax(s, 1, packed(2, lengths=(3, 1)) > 0), "mask must have the sequences of scores"),
        (lambda s: fenchel.sparsemax(s, 1, torch.ones(1, 5, 1, 2, dtype=torch.bool)), "mask must broadcast to scores"),
        (lambda s: Tsallis(torch.tensor([1.2, 1.5])).argmax(s), r"alpha must have size 1 along dim -1"),
        (lambda s: fenchel.tvmax2d(s), "dim must be one dimension where it is ragged"),
        (lambda s: entmax_loss(s, torch.zeros(5, dtype=torch.long), dim=1), r"target of class indices must have shape"),
        (lambda s: entmax_loss(s, torch.full((5, 2), 3), dim=1), "got 3 for sequence 0 of length 3"),
        (lambda s: entmax_loss(s, torch.zeros(5, 2).long(), dim=1, weight=torch.ones(3)), "weight goes with as many"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[Tensor], Tensor], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(packed(2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"layout torch\.jagged"):
        fenchel.sparsemax(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def test_grids_and_structures_of_packed_batches() -> None:
    grids = packed(3, 2, lengths=(2, 1, 3))
    check_parts(fenchel.tvmax2d(grids, 0.2), [fenchel.tvmax2d(s, 0.2) for s in grids.unbind()])
    arcs = packed(3, 4, lengths=(2, 1, 3))
    omega = SparseMAP(DependencyTree())
    check_parts(omega.argmax(arcs), [omega.argmax(s) for s in arcs.unbind()])
