"""A sink of attention is one more key whose value is zero, on every path."""

import itertools

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel import (
    Capped,
    Custom,
    Fused,
    Gini,
    KSubsets,
    LPSparseMAP,
    Norm,
    Regularizer,
    Shannon,
    SparseMAP,
    TotalVariation2d,
    Tsallis,
)
from fenchel.factors import Xor
from fenchel.streaming import Plan, using
from fenchel.structures import SequentialSubsets, Subsets

H, L, S, E, D = 4, 7, 9, 5, 3
PLANS = {"own": None, "dense": Plan("dense"), "parts": Plan("parts", rows=3), "supports": Plan("supports", rows=4)}
OMEGAS = [Tsallis(1.5), Gini(), Shannon(), 0.5 * Tsallis(1.3), Norm(2.0), KSubsets(2), Tsallis(3.0)]


def tensors(heads: int = H, dtype: torch.dtype = torch.float64, keys: int = S) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, H, L, E), (2, heads, keys, E), (2, heads, keys, D), (H, 1, 1)
    return tuple(2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def expected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor,
    omega: Regularizer,
    mask: Tensor | None = None,
    scale: float = 0.4,
) -> tuple[Tensor, Tensor]:
    """By hand: a last column of scores, which is left out of the product."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = scale * query @ key.mT
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    weights = omega.argmax(scores)[..., :-1]
    return weights @ value, weights


def masks() -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    some = torch.rand(L, S, generator=generator) < 0.6
    some[2] = False  # a query without keys
    return {
        "none": None,
        "boolean": some,
        "keys": some[0],
        "one": torch.tensor([[True], [False]]).repeat(4, 1)[:L],
        "batch": torch.rand(2, 1, L, S, generator=generator) < 0.6,
        "added": torch.randn(H, L, S, generator=generator, dtype=torch.float64),
    }


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("omega", OMEGAS, ids=str)
def test_a_sink_is_one_more_key_without_a_value(omega: Regularizer, plan: str) -> None:
    query, key, value, sink = tensors()
    wanted, weights = expected(query, key, value, sink, omega)
    with using(PLANS[plan]):
        torch.testing.assert_close(fenchel.attention(query, key, value, omega, scale=0.4, sink=sink), wanted)
        output, dense = fenchel.attention(query, key, value, omega, scale=0.4, sink=sink, return_weights=True)
        torch.testing.assert_close((output, dense), (wanted, weights))
        output, sparse = fenchel.attention(query, key, value, omega, scale=0.4, sink=sink, return_weights="sparse")
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(sparse.to_dense(), weights.reshape(-1, S))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", masks())
def test_a_sink_is_never_masked(name: str, plan: str) -> None:
    query, key, value, sink = tensors()
    mask = masks()[name]
    wanted, weights = expected(query, key, value, sink, Gini(), mask)
    with using(PLANS[plan]):
        for how in (False, True, "sparse"):
            result = fenchel.attention(
                query, key, value, Gini(), attn_mask=mask, scale=0.4, sink=sink, return_weights=how
            )
            torch.testing.assert_close(result if how is False else result[0], wanted)
            if how:
                found = result[1] if how is True else result[1].to_dense().reshape(weights.shape)
                torch.testing.assert_close(found, weights)
    if name == "boolean":
        assert not bool(wanted[..., 2, :].any())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_causal_attention_and_shared_heads_have_a_sink(plan: str, heads: int) -> None:
    query, key, value, sink = tensors(heads)
    for keys in (S, L, 3):
        k, v = key[..., :keys, :], value[..., :keys, :]
        causal = torch.ones(L, keys, dtype=torch.bool).tril()
        for omega in (Tsallis(1.5), Shannon(), Tsallis(torch.linspace(1.1, 1.9, L, dtype=torch.float64).unsqueeze(-1))):
            wanted, weights = expected(query, k, v, sink, omega, causal)
            with using(PLANS[plan]):
                output = fenchel.attention(query, k, v, omega, is_causal=True, scale=0.4, sink=sink)
                torch.testing.assert_close(output, wanted)
                options = {"is_causal": True, "scale": 0.4, "sink": sink, "return_weights": "sparse"}
                output, sparse = fenchel.attention(query, k, v, omega, **options)
            torch.testing.assert_close(output, wanted)
            torch.testing.assert_close(sparse.to_dense(), weights.reshape(-1, keys))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("omega", [Tsallis(1.5), Shannon(), Gini()], ids=str)
def test_gradients_are_those_of_one_more_key(omega: Regularizer, causal: bool, plan: str) -> None:
    inputs = [t.requires_grad_() for t in tensors(2)]
    mask = torch.ones(L, S, dtype=torch.bool).tril() if causal else None
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(2, H, L, D, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected(*inputs, omega, mask)[0] * direction).sum(), inputs)
    with using(PLANS[plan]):
        query, key, value, sink = inputs
        output = fenchel.attention(query, key, value, omega, is_causal=causal, scale=0.4, sink=sink)
        torch.testing.assert_close(torch.autograd.grad((output * direction).sum(), inputs), wanted)


def test_derivatives_of_second_order_and_forward_mode() -> None:
    query, key, value, sink = (t[:1, :2, :3] if t.dim() == 4 else t[:2] for t in tensors())

    def attend(query: Tensor, sink: Tensor) -> Tensor:
        return fenchel.attention(query, key, value, Tsallis(1.5), scale=0.4, sink=sink)

    inputs = query.clone().requires_grad_(), sink.clone().requires_grad_()
    assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, inputs)
    mapped = torch.vmap(lambda each: attend(query, each))(torch.stack([sink, -sink]))
    torch.testing.assert_close(mapped, torch.stack([attend(query, sink), attend(query, -sink)]))


@pytest.mark.parametrize("shape", [(), (1,), (H, 1, 1), (2, 1, 1, 1), (2, H, L, 1), (L, 1)])
def test_a_sink_broadcasts_to_one_score_per_query(shape: tuple[int, ...]) -> None:
    query, key, value, _ = tensors()
    sink = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wanted = expected(query, key, value, sink, Gini())[0]
    torch.testing.assert_close(fenchel.attention(query, key, value, Gini(), scale=0.4, sink=sink), wanted)
    one = fenchel.attention(query[0, :1], key, value, Gini(), scale=0.4, sink=sink) if len(shape) < 4 else None
    if one is not None:
        torch.testing.assert_close(one, expected(query[0, :1].expand(2, H, L, E), key, value, sink, Gini())[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_digits_of_the_sink(dtype: torch.dtype) -> None:
    query, key, value, sink = tensors(dtype=dtype)
    found = fenchel.attention(query, key, value, Gini(), scale=0.4, sink=sink)
    assert found.dtype == dtype
    wanted = expected(query.double(), key.double(), value.double(), sink.double(), Gini())[0]
    # Scores of up to 40 in float32, and a result that is rounded to the dtype.
    tolerance = max(64 * torch.finfo(torch.float32).eps, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = fenchel.attention(query.float(), key.float(), value.float(), Gini(), scale=0.4, sink=sink.float())
    assert mixed.dtype == torch.bfloat16


def test_a_sink_of_minus_infinity_is_none_and_a_high_one_takes_all() -> None:
    query, key, value, _ = tensors()
    for scale in (0.4, 0.0):
        none = fenchel.attention(query, key, value, scale=scale, sink=torch.tensor(-torch.inf, dtype=torch.float64))
        torch.testing.assert_close(none, fenchel.attention(query, key, value, scale=scale))
    high = fenchel.attention(query, key, value, sink=torch.tensor(1e6, dtype=torch.float64))
    assert not bool(high.any())
    empty = fenchel.attention(query, key[..., :0, :], value[..., :0, :], sink=torch.tensor(0.0, dtype=torch.float64))
    assert torch.equal(empty, torch.zeros(2, H, L, D, dtype=torch.float64))


@pytest.mark.parametrize("omega", [Tsallis(1.5), Shannon()], ids=str)
@pytest.mark.parametrize("keys", [S, 300])
def test_a_compiled_graph_has_a_sink(omega: Regularizer, keys: int) -> None:
    query, key, value, sink = tensors(keys=keys)

    def attend(query: Tensor, sink: Tensor) -> Tensor:
        return fenchel.attention(query, key, value, omega, scale=0.4, sink=sink)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = query.requires_grad_(), sink.requires_grad_()
    wanted, found = attend(*inputs), compiled(*inputs)
    torch.testing.assert_close(found, wanted)
    pairs = [torch.autograd.grad(each.square().sum(), inputs) for each in (found, wanted)]
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("need", [True, False])
def test_a_layer_has_one_sink_per_head(need: bool) -> None:
    torch.manual_seed(0)
    layer = fenchel.nn.MultiheadAttention(8, 2, batch_first=True, sink=True).double()
    assert "sink" in layer.state_dict()
    assert layer.sink is not None
    assert layer.sink.shape == (2,)
    with torch.no_grad():
        layer.sink.copy_(torch.tensor([0.5, -0.2]))
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    q, k, v = (layer._split(each) for each in layer._project(x, x, x))
    heads = expected(q, k, v, layer.sink.reshape(2, 1, 1), Tsallis(1.5), scale=0.5)[0]
    output, weights = layer(x, x, x, need_weights=need)
    torch.testing.assert_close(output, layer.out_proj(heads.transpose(1, 2).flatten(-2)))
    assert (weights is not None) == need
    output.sum().backward()
    assert layer.sink.grad is not None
    assert fenchel.nn.MultiheadAttention(8, 2).sink is None
    assert not any("sink" in name for name in fenchel.nn.MultiheadAttention(8, 2).state_dict())


@pytest.mark.parametrize(
    "omega",
    [
        Fused(0.1),
        TotalVariation2d(0.1, shape=(3, 3)),
        SparseMAP(SequentialSubsets(2, 0.3)),
        LPSparseMAP(lambda graph, u: graph.add(Xor(u))),
        Capped(torch.linspace(0.3, 1.0, S, dtype=torch.float64)),
        0.5 * Fused(0.2),
    ],
    ids=str,
)
def test_an_omega_that_tells_keys_apart_refuses_a_sink(omega: Regularizer) -> None:
    query, key, value, sink = tensors()
    with pytest.raises(ValueError, match="sink must be None"):
        fenchel.attention(query, key, value, omega, sink=sink)


def test_an_omega_without_an_order_takes_a_sink() -> None:
    query, key, value, sink = tensors()
    for omega in (Fused(0.0), SparseMAP(Subsets(2)), Capped(0.4), Custom(lambda p: p.square().sum(-1) / 2)):
        wanted = expected(query, key, value, sink, omega)[0]
        found = fenchel.attention(query, key, value, omega, scale=0.4, sink=sink)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_bad_sinks_are_refused() -> None:
    query, key, value, _ = tensors()
    for error, match, sink in (
        (ValueError, r"sink must broadcast to one score per query", torch.zeros(S)),
        (ValueError, r"sink must broadcast to one score per query", torch.zeros(3, 1, 1)),
        (TypeError, "sink must be a floating-point tensor", torch.zeros(H, 1, 1, dtype=torch.long)),
        (TypeError, "sink must be a floating-point tensor", 1.0),
    ):
        with pytest.raises(error, match=match):
            fenchel.attention(query, key, value, sink=sink)


def test_long_rows_are_served_by_supports() -> None:
    """From 256 keys on the kernel of supports: with and without a mask, causal or not."""
    generator = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(2, 300, 16, generator=generator) for _ in range(3))
    sink = torch.tensor([[[1.0]], [[-1.0]]])
    for causal, omega in itertools.product((False, True), (Tsallis(1.5), Gini())):
        mask = torch.ones(300, 300, dtype=torch.bool).tril() if causal else None
        wanted, weights = expected(*(t.double() for t in (query, key, value, sink)), omega, mask, 1.0)
        options = {"is_causal": causal, "scale": 1.0, "sink": sink}
        found, sparse = fenchel.attention(query, key, value, omega, return_weights="sparse", **options)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(sparse.to_dense().double(), weights.reshape(-1, 300), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_have_a_sink(causal: bool) -> None:
    generator = torch.Generator().manual_seed(8)
    sequences = [[torch.randn(H, n, E, generator=generator) for n in (3, 7, 4)] for _ in range(3)]
    sink = torch.randn(H, 1, 1, generator=generator)

    def packed(each: list[Tensor]) -> Tensor:
        nested = torch.nested.nested_tensor([t.transpose(0, 1) for t in each], layout=torch.jagged)
        return nested.transpose(1, 2)

    query, key, value = map(packed, sequences)
    found = fenchel.attention(query, key, value, Gini(), is_causal=causal, scale=0.4, sink=sink)
    for output, q, k, v in zip(found.transpose(1, 2).unbind(), *sequences, strict=True):
        mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril() if causal else None
        torch.testing.assert_close(output.transpose(0, 1), expected(q, k, v, sink, Gini(), mask)[0])
    with pytest.raises(ValueError, match="sink must be one score"):
        fenchel.attention(query, key, value, sink=torch.zeros(3, 1, 1, 1))
