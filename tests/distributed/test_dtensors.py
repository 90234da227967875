"""DTensors on several ranks: the answers of one process, no collectives where rows are whole, tensor parallelism."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.testing import assert_close

import fenchel
from ranks import Ranks, mesh_of, started

EXACT = {"rtol": 1e-12, "atol": 1e-12}
MAPS: dict[str, Callable[..., Tensor]] = {
    "softmax": fenchel.softmax,
    "entmax": fenchel.entmax,
    "flat": lambda s, **k: fenchel.entmax(s, 1.2, **k),
    "sparsemax": fenchel.sparsemax,
    "steep": lambda s, **k: fenchel.entmax(s, 3.0, **k),
    "normmax": fenchel.normmax,
    "k_subsets": lambda s, **k: fenchel.k_subsets(s, 2, **k),
    "fusedmax": fenchel.fusedmax,
    "scaled": lambda s, **k: (0.5 * fenchel.Tsallis(1.5)).argmax(s, **k),
    "class": lambda s, **k: fenchel.nn.Entmax(1.5)(s),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(__name__) as processes:
        yield processes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_maps(group: Any, rank: int, ranks: int, places: list[Any], shape: tuple[int, ...]) -> int:
    """Maps with and without a mask; the number of collectives of both passes where rows are whole."""
    mesh = mesh_of(*(shape or (ranks,)))
    plain, direction = normal(5, 6, 7), normal(5, 6, 7, seed=1)
    mask = normal(6, 7, seed=2) < 1
    total = 0
    for name, call in MAPS.items():
        for dim in (-1, 0) if name == "entmax" else (-1,):
            options: dict[str, Any] = {} if name == "class" else {"dim": dim}
            if name not in ("class", "fusedmax"):
                options["mask"] = mask
            whole = plain.clone().requires_grad_()
            expected = call(whole, **options)
            expected.backward(direction)
            assert (expected > 0).sum(dim).max() > 1
            scores = distribute_tensor(plain, mesh, places).requires_grad_()
            there = distribute_tensor(direction, mesh, places)
            with CommDebugMode() as seen:
                found = call(scores, **options)
                found.backward(there)
            split = any(isinstance(p, Shard) and p.dim % 3 == dim % 3 for p in places)
            total += 0 if split else seen.get_total_counts()
            assert isinstance(found, DTensor)
            assert tuple(found.placements) == tuple(there.placements)
            assert_close(found.full_tensor(), expected, **EXACT)
            assert_close(scores.grad.full_tensor(), whole.grad, **EXACT)
    return total


def check_losses(group: Any, rank: int, ranks: int, places: list[Any], shape: tuple[int, ...]) -> None:
    mesh = mesh_of(*(shape or (ranks,)))
    plain, target = normal(5, 6, 7), torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(3))
    target[1, 2] = -100
    weight = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
    soft = fenchel.softmax(normal(5, 6, 7, seed=4))
    for reduction in ("mean", "sum", "none"):
        for case in ("entmax", "learned", "cross", "weighted", "smoothed", "norm", "soft", "scaled"):
            results = []
            for spread in (True, False):
                scores = distribute_tensor(plain, mesh, places) if spread else plain.clone()
                scores.requires_grad_()
                options: dict[str, Any] = {"reduction": reduction}
                omega: Any = {
                    "learned": fenchel.Tsallis(1.4, learnable=True).double(),
                    "cross": fenchel.Shannon(),
                    "norm": fenchel.Norm(2.0),
                    "scaled": 0.7 * fenchel.Tsallis(1.5),
                }.get(case, fenchel.Tsallis(1.5))
                goal = distribute_tensor(soft, mesh, places) if spread and case == "soft" else target
                goal = soft if not spread and case == "soft" else goal
                options |= {"weight": weight} if case == "weighted" else {}
                options |= {"label_smoothing": 0.1} if case == "smoothed" else {}
                loss = fenchel.fy_loss(scores, goal, omega, **options)
                loss.sum().backward()
                grads = [scores.grad, *(p.grad for p in omega.parameters())]
                results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (loss, *grads)])
            for found, expected in zip(*results, strict=True):
                assert_close(found, expected, **EXACT)


def check_linear(
    group: Any, rank: int, ranks: int, shape: tuple[int, ...], rows: list[Any], classes: list[Any]
) -> None:
    mesh = mesh_of(*(shape or (ranks,)))
    hidden, weight, bias = normal(4, 6, 5), normal(11, 5, seed=1), normal(11, seed=2)
    target = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(3))
    target[0, 1] = -100
    for reduction in ("mean", "sum", "none"):
        results = []
        for spread in (True, False):
            alpha = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
            if spread:
                tensors = [
                    distribute_tensor(t, mesh, p).requires_grad_()
                    for t, p in ((hidden, rows), (weight, classes), (bias, classes))
                ]
            else:
                tensors = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
            h, w, b = tensors
            loss = fenchel.linear_entmax_loss(h, w, target, b, alpha=alpha, reduction=reduction)
            loss.sum().backward()
            every = (loss, *(t.grad for t in (*tensors, alpha)))
            results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in every])
        for found, expected in zip(*results, strict=True):
            assert_close(found, expected, **EXACT)


def check_attention(group: Any, rank: int, ranks: int, places: list[Any], shape: tuple[int, ...], alone: bool) -> int:
    mesh = mesh_of(*(shape or (ranks,)))
    tensors = [normal(4, 8, 10, 6, seed=i) for i in range(3)]
    counts = 0
    for is_causal in (False,) if alone else (False, True):
        results = []
        for spread in (True, False):
            omega = fenchel.Tsallis(1.5, learnable=True, shape=(8, 1, 1)).double()
            own = [t.clone() for t in tensors]
            if spread:
                others = [Replicate()] * mesh.ndim if alone else places
                own = [distribute_tensor(t, mesh, p) for t, p in zip(own, (places, others, others), strict=True)]
            own = [t.requires_grad_() for t in own]
            with CommDebugMode() as seen:
                found = fenchel.attention(*own, omega, is_causal=is_causal)
            counts += seen.get_total_counts()
            found.square().sum().backward()
            every = (found, *(t.grad for t in own), omega.raw_alpha.grad)
            results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in every])
        for found, expected in zip(*results, strict=True):
            assert_close(found, expected, rtol=1e-11, atol=1e-11)
    return counts


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 13)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def check_tensor_parallel(group: Any, rank: int, ranks: int) -> None:
    """A column-parallel head with ``Shard(-1)`` logits, and the fused layer, beside torch's own cross-entropy."""
    mesh = mesh_of(ranks)
    inputs, target = normal(9, 6).float(), torch.arange(9) % 13
    plain = Model()
    fenchel.nn.EntmaxLoss(1.5)(plain(inputs), target).backward()
    model = Model()
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    logits = model(inputs)
    assert tuple(logits.placements) == (Shard(1),)
    with loss_parallel():
        loss = fenchel.nn.EntmaxLoss(1.5)(logits, target)
        cross = nn.functional.cross_entropy(logits, target)
        same = fenchel.nn.EntmaxLoss(1.0)(logits, target)
        assert_close(same.full_tensor(), cross.full_tensor())
        loss.backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        assert_close(grad, expected.grad, msg=lambda m, name=name: f"{name}: {m}")
    for learnable in (False, True):
        results = []
        for spread in (True, False):
            torch.manual_seed(1)
            layer = fenchel.nn.LinearEntmaxLoss(6, 13, learnable=learnable)
            if spread and learnable:  # ColwiseParallel would shard alpha too, which has no dimension
                for name in ("weight", "bias"):
                    setattr(
                        layer, name, nn.Parameter(distribute_tensor(getattr(layer, name).detach(), mesh, [Shard(0)]))
                    )
            elif spread:
                parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))
            own = inputs.clone().requires_grad_()
            loss = layer(own, target)
            loss.backward()
            grads = {name: p.grad for name, p in layer.named_parameters()} | {"hidden": own.grad}
            results.append({n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()})
        for name, expected in results[1].items():
            assert_close(results[0][name], expected, msg=lambda m, name=name: f"{name}: {m}")


def errors(group: Any, rank: int, ranks: int) -> list[str]:
    mesh = mesh_of(ranks)
    partial = DTensor.from_local(torch.zeros(4, 6), mesh, [Partial()])
    rows, columns = (distribute_tensor(torch.zeros(4, 6), mesh, [Shard(d)]) for d in (0, 1))
    target = torch.zeros(4, dtype=torch.long)
    found = []
    for call in (
        lambda: fenchel.entmax(partial),
        lambda: fenchel.linear_entmax_loss(rows, columns, target),
        lambda: fenchel.attention(columns, columns, columns),
        lambda: fenchel.attention(rows, columns, rows),
    ):
        try:
            call()
            found.append("nothing")
        except (ValueError, NotImplementedError) as error:
            found.append(str(error))
    return found


PLACES = [[Replicate()], [Shard(0)], [Shard(1)], [Shard(2)]]
TWO = [[Shard(0), Shard(2)], [Shard(1), Replicate()], [Shard(2), Shard(0)]]


def test_maps_equal_those_of_the_whole_tensor_without_collectives_on_whole_rows(ranks: Ranks) -> None:
    for places in PLACES:
        assert ranks.run("check_maps", places, (), ranks=3) == [0, 0, 0]
    for places in TWO:
        assert ranks.run("check_maps", places, (2, 2)) == [0] * 4


def test_losses_equal_those_of_the_whole_tensor(ranks: Ranks) -> None:
    for places in PLACES:
        ranks.run("check_losses", places, (), ranks=2)
    ranks.run("check_losses", TWO[0], (2, 2))


def test_output_layers_take_sharded_tokens_and_classes(ranks: Ranks) -> None:
    for rows, classes in (([Replicate()], [Shard(0)]), ([Shard(1)], [Replicate()]), ([Shard(0)], [Shard(0)])):
        ranks.run("check_linear", (), rows, classes, ranks=3)
    ranks.run("check_linear", (2, 2), [Shard(0), Replicate()], [Replicate(), Shard(0)])


def test_attention_takes_sharded_batches_heads_and_sequences(ranks: Ranks) -> None:
    for places in ([Replicate()], [Shard(0)], [Shard(1)]):
        assert ranks.run("check_attention", places, (), False, ranks=2) == [0, 0]
    ranks.run("check_attention", [Shard(2)], (), False, ranks=3)
    ranks.run("check_attention", [Shard(1), Shard(2)], (2, 2), False)
    assert ranks.run("check_attention", [Shard(2)], (), True, ranks=2) == [0, 0]


def test_tensor_parallel_models_work_unchanged(ranks: Ranks) -> None:
    ranks.run("check_tensor_parallel", ranks=2)


def test_what_cannot_be_is_an_error(ranks: Ranks) -> None:
    for partial, weight, width, mixed in ranks.run("errors", ranks=2):
        assert "redistribute it to Replicate()" in partial
        assert "weight must be replicated, or sharded along its classes" in weight
        assert "must not be sharded along their last dimension" in width
        assert "sharded along" in mixed
