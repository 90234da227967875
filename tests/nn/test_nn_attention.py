"""MultiheadAttention: torch's own module for Shannon, and never its softmax for anything else."""

import copy
import inspect
import io
import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fenchel
from copies import COPIES
from fenchel import Gini, Norm, Regularizer, Shannon, Tsallis
from fenchel.nn import MultiheadAttention
from fenchel.streaming import Plan, using
from watch import Largest

EXACT = {"atol": 1e-12, "rtol": 1e-12}
WIDTH, HEADS, BATCH, TARGETS, SOURCES = 8, 2, 3, 4, 5


def pair(**options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Ours with Shannon and torch's, with the same parameters in float64, none of them at its special start."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    ours = MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, omega=Shannon(), **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def inputs(
    batched: bool = True, batch_first: bool = False, kdim: int = WIDTH, vdim: int = WIDTH
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = []
    for length, width in ((TARGETS, WIDTH), (SOURCES, kdim), (SOURCES, vdim)):
        x = torch.randn(BATCH, length, width, dtype=torch.float64)
        x = x[0] if not batched else x if batch_first else x.transpose(0, 1)
        tensors.append(x.requires_grad_())
    return tuple(tensors)


def assert_same(
    ours: MultiheadAttention, theirs: nn.MultiheadAttention, arguments: tuple[Tensor, ...], **options: Any
) -> None:
    """Outputs, weights, and gradients of every input and parameter."""
    results, slopes = [], []
    for layer in (ours, theirs):
        layer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about mixing boolean and float masks
            output, weights = layer(*arguments, **options)
        results.append((output, weights))
        total = (output * torch.arange(output.numel()).reshape(output.shape).cos()).sum()
        if weights is not None:
            total = total + (weights * torch.arange(weights.numel()).reshape(weights.shape).sin()).sum()
        named = {**dict(layer.named_parameters()), **{str(i): x for i, x in enumerate(arguments)}}
        slopes.append(dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True)))
    (output, weights), (expected, expected_weights) = results
    assert_close(output, expected, **EXACT)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        assert_close(weights, expected_weights, **EXACT)
    assert slopes[0].keys() == slopes[1].keys()
    assert_close(slopes[0], slopes[1], **EXACT)


def boolean(*shape: int) -> Tensor:
    """True = may not attend; the first key is always allowed."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


def additive(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# -- torch's module -------------------------------------------------------------------------------------


def test_the_signature_is_torchs_plus_omega_and_sink() -> None:
    ours, theirs = (
        inspect.signature(layer.__init__).parameters for layer in (MultiheadAttention, nn.MultiheadAttention)
    )
    assert list(ours)[: len(theirs)] == list(theirs)
    assert list(ours)[len(theirs) :] == ["omega", "sink"]
    assert all(ours[name].default == p.default and ours[name].kind == p.kind for name, p in theirs.items())
    ours, theirs = (
        inspect.signature(layer.forward).parameters for layer in (MultiheadAttention, nn.MultiheadAttention)
    )
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
        {"kdim": 6, "vdim": 7},
        {"kdim": 6, "vdim": 7, "bias": False, "add_bias_kv": True},
        {"kdim": 6, "batch_first": True},
        {"vdim": 3},
        {"dropout": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_shannon_is_torchs_multihead_attention(options: dict[str, Any], batched: bool) -> None:
    ours, theirs = pair(**options)
    ours.eval()
    theirs.eval()
    sizes = {k: options[k] for k in ("batch_first", "kdim", "vdim") if k in options}
    arguments = inputs(batched, **sizes)
    copies = BATCH if batched else 1
    for need, average in ((True, True), (True, False), (False, True)):
        assert_same(ours, theirs, arguments, need_weights=need, average_attn_weights=average)
    padding = boolean(BATCH, SOURCES) if batched else boolean(SOURCES)
    assert_same(ours, theirs, arguments, attn_mask=additive(copies * HEADS, TARGETS, SOURCES), key_padding_mask=padding)


@pytest.mark.parametrize("batch_first", [False, True], ids=["length first", "batch first"])
@pytest.mark.parametrize("padding", ["none", "boolean", "float"])
@pytest.mark.parametrize("mask", ["none", "boolean-2", "boolean-3", "float-2", "float-3"])
def test_masks_are_torchs(mask: str, padding: str, batch_first: bool) -> None:
    ours, theirs = pair(batch_first=batch_first)
    make = {"none": lambda *_: None, "boolean": boolean, "float": additive}
    kind, _, rank = mask.partition("-")
    shape = (BATCH * HEADS, TARGETS, SOURCES) if rank == "3" else (TARGETS, SOURCES)
    options = {"attn_mask": make[kind](*shape), "key_padding_mask": make[padding](BATCH, SOURCES)}
    for need in (True, False):
        assert_same(ours, theirs, inputs(batch_first=batch_first), need_weights=need, **options)


@pytest.mark.parametrize("need", [True, False], ids=["weights", "no weights"])
def test_causal_attention_is_torchs(need: bool) -> None:
    ours, theirs = pair(batch_first=True)
    x = torch.randn(BATCH, TARGETS, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(TARGETS, TARGETS, dtype=torch.bool).triu(1)
    padding = boolean(BATCH, TARGETS)
    for arguments in ({}, {"key_padding_mask": padding}):
        options = {"attn_mask": mask, "is_causal": True, "need_weights": need, **arguments}
        results = []
        for layer in (ours, theirs):
            output, _ = layer(x, x, x, **options)
            results.append((output, *torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])))
        assert_close(results[0], results[1], **EXACT)
        # and, unlike torch's, the hint is enough without a mask
        assert_close(ours(x, x, x, **{**options, "attn_mask": None})[0], results[1][0], **EXACT)


def test_all_options_together() -> None:
    ours, theirs = pair(add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=7, batch_first=True)
    arguments = inputs(batch_first=True, kdim=6, vdim=7)
    mask, padding = boolean(BATCH * HEADS, TARGETS, SOURCES), boolean(BATCH, SOURCES)
    for average in (True, False):
        options = {"attn_mask": mask, "key_padding_mask": padding, "average_attn_weights": average}
        assert_same(ours, theirs, arguments, **options)


def test_self_attention_of_one_tensor() -> None:
    ours, theirs = pair()
    x = torch.randn(TARGETS, BATCH, WIDTH, dtype=torch.float64)
    for a, b in zip(ours(x, x, x), theirs(x, x, x), strict=True):
        assert_close(a, b, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    ours, theirs = (layer.to(dtype) for layer in pair(add_bias_kv=True, batch_first=True))
    x = torch.randn(BATCH, TARGETS, WIDTH).to(dtype)
    padding = boolean(BATCH, TARGETS)
    tolerance = 16 * torch.finfo(dtype).eps
    for a, b in zip(ours(x, x, x, padding), theirs(x, x, x, padding), strict=True):
        assert a.dtype == dtype
        assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_autocast_is_torchs() -> None:
    ours, theirs = (layer.float() for layer in pair(add_bias_kv=True, batch_first=True))
    x, mask = torch.randn(BATCH, TARGETS, WIDTH), torch.randn(TARGETS, TARGETS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (output, weights), (expected, _) = (layer(x, x, x, attn_mask=mask) for layer in (ours, theirs))
    assert output.dtype == expected.dtype
    assert weights is not None
    assert_close(output, expected, atol=0.1, rtol=0.1)


def test_dropout_acts_in_training_alone_and_scales_up_the_rest() -> None:
    length, p = 8, 0.25
    layer = MultiheadAttention(length, 1, dropout=p, bias=False, batch_first=True, dtype=torch.float64, omega=Shannon())
    with torch.no_grad():  # values and outputs pass unchanged: the output is the dropped weights
        layer.in_proj_weight[2 * length :] = torch.eye(length)
        layer.out_proj.weight.copy_(torch.eye(length))
    x = torch.randn(500, length, length, dtype=torch.float64)
    value = torch.eye(length, dtype=torch.float64).expand(500, length, length)
    dropped, _ = layer(x, x, value)
    weights, _ = layer.eval()(x, x, value)
    assert_close(weights.sum(-1), torch.ones(500, length, dtype=torch.float64))
    kept = dropped != 0
    assert_close(dropped[kept], (weights / (1 - p))[kept], **EXACT)
    assert abs(1 - kept.double().mean() - p) < 5 * math.sqrt(p * (1 - p) / kept.numel())


def test_initial_parameters_are_torchs() -> None:
    for options in ({}, {"kdim": 6}, {"add_bias_kv": True}, {"bias": False}):
        torch.manual_seed(1)
        theirs = nn.MultiheadAttention(WIDTH, HEADS, **options).state_dict()
        torch.manual_seed(1)
        ours = MultiheadAttention(WIDTH, HEADS, **options).state_dict()
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


# -- sparse regularizers --------------------------------------------------------------------------------

OMEGAS = [Gini(), Tsallis(1.5), Norm(2), 0.5 * Tsallis(1.5)]
every_omega = pytest.mark.parametrize("omega", OMEGAS, ids=lambda o: str(o).replace("\n", ""))


@every_omega
def test_a_loop_over_heads_and_queries(omega: Regularizer) -> None:
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, omega=omega)
    query, key, value = inputs(batch_first=True)
    padding = boolean(BATCH, SOURCES)
    output, weights = layer(query, key, value, key_padding_mask=padding, average_attn_weights=False)
    wq, wk, wv = layer.in_proj_weight.chunk(3)
    bq, bk, bv = layer.in_proj_bias.chunk(3)
    for b, i in itertools.product(range(BATCH), range(TARGETS)):
        heads = []
        for h in range(HEADS):
            part = slice(h * WIDTH // HEADS, (h + 1) * WIDTH // HEADS)
            q = (wq @ query[b, i] + bq)[part]
            keep = (~padding[b]).nonzero().flatten().tolist()
            scores = torch.stack([q @ (wk @ key[b, j] + bk)[part] for j in keep]) / math.sqrt(WIDTH / HEADS)
            p = omega.argmax(scores)
            assert_close(weights[b, h, i, keep], p, **EXACT)
            assert (weights[b, h, i][padding[b]] == 0).all()
            heads.append(sum(w * (wv @ value[b, j] + bv)[part] for w, j in zip(p, keep, strict=True)))
        expected = layer.out_proj.weight @ torch.cat(heads) + layer.out_proj.bias
        assert_close(output[b, i], expected, **EXACT)


@every_omega
def test_a_query_that_may_attend_to_nothing_gets_zero_weights_and_no_nan(omega: Regularizer) -> None:
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, omega=omega)
    x = torch.randn(BATCH, TARGETS, WIDTH, requires_grad=True)
    padding = torch.zeros(BATCH, TARGETS, dtype=torch.bool)
    padding[1] = True
    for mask in (padding, torch.zeros(BATCH, TARGETS).masked_fill(padding, -torch.inf)):
        output, weights = layer(x, x, x, key_padding_mask=mask)
        assert (weights[1] == 0).all()
        assert_close(output[1], layer.out_proj.bias.expand(TARGETS, WIDTH))
        slopes = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
        assert all(g.isfinite().all() for g in slopes)


def test_the_default_is_entmax_of_one_and_a_half() -> None:
    layer = MultiheadAttention(WIDTH, HEADS)
    assert isinstance(layer.omega, Tsallis)
    assert layer.omega.alpha == 1.5


def test_one_learnable_alpha_a_head() -> None:
    omega = Tsallis(1.5, learnable=True, shape=(HEADS, 1, 1))
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, omega=omega)
    torch_keys = list(nn.MultiheadAttention(WIDTH, HEADS).state_dict())
    assert list(layer.state_dict()) == [*torch_keys, "omega.raw_alpha"]
    with torch.no_grad():
        omega.raw_alpha[0] = -50.0  # softmax
        omega.raw_alpha[1] = 50.0  # sparsemax
    x = 4 * torch.randn(BATCH, TARGETS, WIDTH)
    _, weights = layer(x, x, x, average_attn_weights=False)
    for h, reference in enumerate((Shannon(), Gini())):
        other = MultiheadAttention(WIDTH, HEADS, batch_first=True, omega=reference)
        other.load_state_dict(layer.state_dict(), strict=False)
        assert_close(weights[:, h], other(x, x, x, average_attn_weights=False)[1][:, h])
    with torch.no_grad():
        omega.raw_alpha.zero_()
    layer(x, x, x)[0].square().sum().backward()
    assert omega.raw_alpha.grad is not None
    assert (omega.raw_alpha.grad != 0).all()


# -- inside torch's transformers ------------------------------------------------------------------------


def replace(model: nn.Module, omega: Regularizer) -> nn.Module:
    """The same model with every attention exchanged for ours, parameters kept."""
    model = copy.deepcopy(model)
    for name, theirs in list(model.named_modules()):
        if isinstance(theirs, nn.MultiheadAttention):
            ours = MultiheadAttention(
                theirs.embed_dim,
                theirs.num_heads,
                dropout=theirs.dropout,
                bias=theirs.in_proj_bias is not None,
                batch_first=theirs.batch_first,
                omega=omega,
            )
            ours.load_state_dict(theirs.state_dict(), strict=True)
            model.set_submodule(name, ours)
    return model.train(model.training)


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_never_bypasses_it_for_fused_softmax(norm_first: bool) -> None:
    theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, norm_first=norm_first, dropout=0.0).eval()
    ours, softmax = replace(theirs, Gini()).eval(), replace(theirs, Shannon()).eval()
    x = 4 * torch.randn(BATCH, TARGETS, WIDTH)
    padding = boolean(BATCH, TARGETS)
    for options in ({}, {"src_key_padding_mask": padding}, {"src_mask": boolean(TARGETS, TARGETS)}):
        with_graph = ours(x, **options)
        with torch.no_grad():
            without_graph, fused = ours(x, **options), theirs(x, **options)
            assert_close(softmax(x, **options), fused, atol=1e-5, rtol=1e-5)
        with torch.inference_mode():
            in_inference = ours(x, **options)
        assert_close(without_graph, with_graph)
        assert_close(in_inference, with_graph)
        assert (without_graph - fused).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_an_encoder_that_was_built_with_torchs_attention_takes_ours_afterwards() -> None:
    """Without a graph such an encoder hands padded batches to its layers as nested tensors."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0)
    theirs = nn.TransformerEncoder(layer, 2).eval()
    ours, softmax = replace(theirs, Gini()).eval(), replace(theirs, Shannon()).eval()
    x = 4 * torch.randn(BATCH, TARGETS, WIDTH)
    padding = torch.arange(TARGETS) >= torch.tensor([[4], [2], [3]])
    with_graph, exact = ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding)
    with torch.no_grad():
        without_graph = ours(x, src_key_padding_mask=padding)
        softmax_without_graph = softmax(x, src_key_padding_mask=padding)
    assert_close(without_graph[~padding], with_graph.detach()[~padding], atol=1e-5, rtol=1e-5)
    assert_close(softmax_without_graph[~padding], exact.detach()[~padding], atol=1e-5, rtol=1e-5)
    assert (without_graph - exact)[~padding].abs().max() > 1e-2


def test_an_encoder_that_was_built_with_ours_is_never_bypassed() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0)
    layer.self_attn = MultiheadAttention(WIDTH, HEADS, batch_first=True, omega=Gini())
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = 4 * torch.randn(BATCH, TARGETS, WIDTH), torch.arange(TARGETS) >= torch.tensor([[4], [2], [3]])
    with_graph = encoder(x, src_key_padding_mask=padding)
    with torch.no_grad():
        assert_close(encoder(x, src_key_padding_mask=padding), with_graph)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_whole_transformer_with_shannon_is_torchs(training: bool) -> None:
    theirs = nn.Transformer(WIDTH, HEADS, 1, 2, 16, dropout=0.0, batch_first=True).train(training)
    ours = replace(theirs, Shannon()).train(training)
    source, target = torch.randn(BATCH, SOURCES, WIDTH), torch.randn(BATCH, TARGETS, WIDTH)
    causal = nn.Transformer.generate_square_subsequent_mask(TARGETS)
    padding = torch.zeros(BATCH, SOURCES).masked_fill(boolean(BATCH, SOURCES), -torch.inf)
    for options in ({}, {"tgt_is_causal": True}):
        arguments = {"tgt_mask": causal, "memory_key_padding_mask": padding, "src_key_padding_mask": padding, **options}
        assert_close(ours(source, target, **arguments), theirs(source, target, **arguments), atol=1e-5, rtol=1e-5)


# -- keeping it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kdim": 6}, {"add_bias_kv": True}, {"bias": False}], ids=str)
def test_state_dicts_load_strictly_both_ways(options: dict[str, Any]) -> None:
    for omega in (None, Gini(), Tsallis(torch.tensor(1.5)), 0.5 * Norm(2)):
        ours = MultiheadAttention(WIDTH, HEADS, omega=omega, **options)
        theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        stream = io.BytesIO()
        torch.save(ours.state_dict(), stream)
        stream.seek(0)
        theirs.load_state_dict(torch.load(stream, weights_only=True), strict=True)


@pytest.mark.parametrize(
    "omega", [Gini(), Tsallis(1.5, learnable=True, shape=(HEADS, 1, 1))], ids=["fixed", "learnable"]
)
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_equal_and_still_not_bypassed(omega: Regularizer, how: str) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0)
    layer.self_attn = MultiheadAttention(WIDTH, HEADS, batch_first=True, omega=omega)
    layer.eval()
    copied = COPIES[how](layer)
    x = 4 * torch.randn(BATCH, TARGETS, WIDTH)
    with torch.no_grad():
        assert torch.equal(copied(x), layer(x))
    assert_close(copied(x), layer(x))
    assert not any(a is b for a, b in zip(copied.parameters(), layer.parameters(), strict=True))


def test_conversions_of_dtype_take_alpha_along() -> None:
    for omega in (Tsallis(torch.full((HEADS, 1, 1), 1.5)), Tsallis(1.5, learnable=True, shape=(HEADS, 1, 1))):
        layer = MultiheadAttention(WIDTH, HEADS, omega=omega)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
            x = torch.randn(TARGETS, BATCH, WIDTH).to(dtype)
            output, weights = layer.to(dtype)(x, x, x)
            assert output.dtype == weights.dtype == dtype
            assert_close(weights.double().sum(-1), torch.ones(BATCH, TARGETS).double(), atol=0.03, rtol=0)


def test_compiles_to_one_graph_with_the_same_results() -> None:
    torch._dynamo.reset()
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True, omega=Gini())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, padding = torch.randn(BATCH, TARGETS, WIDTH), boolean(BATCH, TARGETS)
    expected, actual = layer(x, x, x, padding), compiled(x, x, x, padding)
    assert_close(actual, expected)
    slopes = [torch.autograd.grad(o.square().sum(), list(layer.parameters())) for o, _ in (expected, actual)]
    assert_close(slopes[0], slopes[1])


def test_empty_batches() -> None:
    ours, theirs = pair(batch_first=True)
    x = torch.randn(0, TARGETS, WIDTH, dtype=torch.float64)
    for a, b in zip(ours(x, x, x), theirs(x, x, x), strict=True):
        assert a.shape == b.shape


def test_the_repr_tells_the_parameters() -> None:
    text = repr(MultiheadAttention(24, 3, dropout=0.25, batch_first=True, omega=fenchel.Norm(5.0)))
    for part in ("24", "3", "0.25", "batch_first", "Norm(alpha=5)"):
        assert part in text.replace("in_features=24, out_features=24", "")


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"query": torch.ones(8)}, ValueError, "query"),
        ({"query": torch.ones(1, 1, 1, 8)}, ValueError, "query"),
        ({"key": torch.ones(5, 8)}, ValueError, "key"),
        ({"value": torch.ones(5, 8)}, ValueError, "value"),
        ({"key": torch.ones(2, 6, 8)}, ValueError, "key and value"),
        ({"key": torch.ones(1, 5, 8), "value": torch.ones(1, 5, 8)}, ValueError, "key"),
        ({"query": torch.ones(2, 4, 7)}, ValueError, "query"),
        ({"key_padding_mask": torch.zeros(5, 2)}, ValueError, "key_padding_mask"),
        ({"key_padding_mask": torch.zeros(2, 5).long()}, TypeError, "key_padding_mask"),
        ({"attn_mask": torch.zeros(5, 4)}, ValueError, "attn_mask"),
        ({"attn_mask": torch.zeros(2, 4, 5)}, ValueError, "attn_mask"),
        ({"attn_mask": torch.zeros(2, 2, 4, 5)}, ValueError, "attn_mask"),
        ({"attn_mask": torch.zeros(4, 5).long()}, TypeError, "attn_mask"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], error: type, names: str) -> None:
    layer = MultiheadAttention(8, 2, batch_first=True)
    arguments = {"query": torch.ones(2, 4, 8), "key": torch.ones(2, 5, 8), "value": torch.ones(2, 5, 8), **changes}
    with pytest.raises(error, match=names):
        layer(**arguments)


@pytest.mark.parametrize("omega", ["softmax", 1.5, fenchel.sparsemax], ids=lambda o: type(o).__name__)
def test_an_omega_that_is_not_a_regularizer_is_named(omega: object) -> None:
    with pytest.raises(TypeError, match="omega"):
        MultiheadAttention(8, 2, omega=omega)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("omega", [Shannon(), Gini(), Tsallis(1.5)], ids=str)
def test_scores_beyond_half_precision_are_as_in_float64(omega: Regularizer, autocast: bool) -> None:
    """The projections are the identity, so that float64 attention on the rounded inputs is the oracle."""
    torch.manual_seed(0)
    layer = MultiheadAttention(4, 1, bias=False, batch_first=True, omega=omega)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(4).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(4))
    x = (300 * torch.randn(2, 5, 4)).half()  # scores of some 1e5; half precision ends at 65504
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), torch.finfo(torch.float16).min)
    expected = fenchel.attention(*(x.double(),) * 3, omega, attn_mask=mask)
    if autocast:
        with torch.autocast("cpu", dtype=torch.float16):
            found, weights = layer(*(x.float(),) * 3, attn_mask=mask)
    else:
        found, weights = layer.half()(*(x,) * 3, attn_mask=mask.half())
    assert found.dtype == torch.float16
    assert weights.isfinite().all()
    assert_close(found.double(), expected, atol=0.5, rtol=1e-3)  # half a unit in the last place of 600


@pytest.mark.parametrize("omega", [Tsallis(1.5), Shannon()], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_without_weights_no_matrix_of_them_is_made(omega: Regularizer, padded: bool, is_causal: bool) -> None:
    length = 1500
    layer = MultiheadAttention(8, 2, batch_first=True, omega=omega)
    x = torch.randn(1, length, 8, requires_grad=True)
    padding = torch.zeros(1, length, dtype=torch.bool)
    padding[0, -7:] = True
    options = {"key_padding_mask": padding if padded else None, "is_causal": is_causal}
    expected, weights = layer(x, x, x, average_attn_weights=False, **options)
    slope = torch.autograd.grad(expected.sum(), x)[0]
    assert weights.shape == (1, 2, length, length)
    plan = Plan("supports" if omega.alpha > 1 else "parts", rows=128)
    with Largest(kernels=True) as seen, using(plan):
        output, none = layer(x, x, x, need_weights=False, **options)
        ours = torch.autograd.grad(output.sum(), x)[0]
    assert none is None
    assert seen.elements <= 2 * 128 * length
    assert_close(output, expected, atol=1e-5, rtol=1e-4)
    assert_close(ours, slope, atol=1e-5, rtol=1e-4)
