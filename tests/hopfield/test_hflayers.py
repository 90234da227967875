"""Layers with the parameters of an hflayers checkpoint, beside its formulas in plain torch, written out here."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import fenchel
from fenchel import Gini, Shannon
from fenchel.hopfield import (
    Hopfield,
    HopfieldDecoderLayer,
    HopfieldEncoderLayer,
    HopfieldLayer,
    HopfieldPooling,
    load_hflayers,
)

EXACT = {"atol": 1e-11, "rtol": 1e-11}
WIDTH, HEADS, BATCH, STATES, STORED = 8, 2, 3, 4, 5
State = dict[str, Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def norm(prefix: str, width: int) -> State:
    return {f"{prefix}.weight": 1 + 0.3 * normal(width), f"{prefix}.bias": 0.3 * normal(width)}


def linear(prefix: str, out: int, width: int) -> State:
    return {f"{prefix}.weight": normal(out, width), f"{prefix}.bias": normal(out)}


def checkpoint(hidden: int = WIDTH // HEADS, pattern: int | None = None, **sizes: int) -> State:
    """What hflayers saves of a Hopfield layer: joint projections if all three are alike, else one for each."""
    stored, projection = sizes.get("stored", WIDTH), sizes.get("projection", WIDTH)
    space, patterns = HEADS * hidden, HEADS * (hidden if pattern is None else pattern)
    core: State = {"in_proj_bias": normal(2 * space + patterns), **linear("out_proj", WIDTH, patterns)}
    if pattern is None and stored == projection == WIDTH and not sizes.get("connected"):
        core["in_proj_weight"] = normal(2 * space + patterns, WIDTH)
    else:
        core["q_proj_weight"] = normal(space, WIDTH)
        core["k_proj_weight"] = normal(space, stored)
        core["v_proj_weight"] = normal(patterns, space if sizes.get("connected") else projection)
    return {
        **{f"association_core.{name}": tensor for name, tensor in core.items()},
        **norm("norm_stored_pattern", stored),
        **norm("norm_state_pattern", WIDTH),
        **norm("norm_pattern_projection", projection),
    }


def under(prefix: str, state: State) -> State:
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def below(prefix: str, state: State) -> State:
    return {name.removeprefix(f"{prefix}."): t for name, t in state.items() if name.startswith(f"{prefix}.")}


def normed(state: State, prefix: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{prefix}.weight"], state[f"{prefix}.bias"])


def reference(
    state: State,
    stored: Tensor,
    states: Tensor,
    projection: Tensor,
    hidden: int = WIDTH // HEADS,
    connected: bool = False,
    hide: Tensor | None = None,
) -> Tensor:
    """Softmax association by the tensors of a checkpoint alone; β = 1/√hidden."""
    core, space = below("association_core", state), HEADS * hidden
    if "in_proj_weight" in core:
        w_q, w_k, w_v = core["in_proj_weight"].split([space, space, len(core["in_proj_weight"]) - 2 * space])
    else:
        w_q, w_k, w_v = (core[f"{name}_proj_weight"] for name in "qkv")
    b_q, b_k, b_v = core["in_proj_bias"].split([space, space, len(core["in_proj_bias"]) - 2 * space])
    q = normed(state, "norm_state_pattern", states) @ w_q.T + b_q
    k = normed(state, "norm_stored_pattern", stored) @ w_k.T + b_k
    v = normed(state, "norm_pattern_projection", projection)
    v = v @ w_k.T + b_k if connected else v
    v = v @ w_v.T + b_v
    heads = []
    for i, j, values in zip(q.split(hidden, -1), k.split(hidden, -1), v.chunk(HEADS, -1), strict=True):
        scores = i @ j.transpose(1, 2) / hidden**0.5
        scores = scores if hide is None else scores.masked_fill(hide, -torch.inf)
        heads.append(scores.softmax(-1) @ values)
    return torch.cat(heads, -1) @ core["out_proj.weight"].T + core["out_proj.bias"]


def build(make: Any, state: State, *args: Any, **options: Any) -> Any:
    layer = make(*args, num_heads=HEADS, omega=Shannon(), **options).double()
    load_hflayers(layer, state)
    return layer


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"hidden": 3}, {"hidden_size": 3}),
    ({"hidden": 3, "pattern": 6}, {"hidden_size": 3, "pattern_size": 6}),
    ({"stored": 7, "projection": 6}, {"stored_pattern_size": 7, "pattern_projection_size": 6}),
    ({"connected": True}, {"pattern_projection_as_connected": True}),
    ({"connected": True, "stored": 6, "projection": 6}, {"pattern_projection_as_connected": True}),
]


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=str)
def test_a_loaded_layer_computes_what_its_checkpoint_says(sizes: dict[str, Any], options: dict[str, Any]) -> None:
    state = checkpoint(**sizes)
    if "stored" in sizes:
        options = {**options, "stored_pattern_size": sizes["stored"], "pattern_projection_size": sizes["projection"]}
    layer = build(Hopfield, state, WIDTH, **options)
    stored, states = normal(BATCH, STORED, sizes.get("stored", WIDTH)), normal(BATCH, STATES, WIDTH)
    projection = normal(BATCH, STORED, sizes.get("projection", WIDTH))
    expected = reference(
        state, stored, states, projection, sizes.get("hidden", WIDTH // HEADS), sizes.get("connected", False)
    )
    assert_close(layer((stored, states, projection)), expected, **EXACT)


def test_connected_projections_read_the_third_input() -> None:
    layer = Hopfield(WIDTH, num_heads=HEADS, pattern_projection_as_connected=True)
    stored, states = torch.randn(BATCH, STORED, WIDTH), torch.randn(BATCH, STATES, WIDTH)
    third = torch.randn(BATCH, STORED, WIDTH).requires_grad_()
    found = layer((stored, states, third))
    assert not torch.equal(found, layer((stored, states, stored)))
    assert torch.autograd.grad(found.sum(), third)[0].abs().max() > 0
    with pytest.raises(ValueError, match=r"pattern_projection_size must be that of the stored patterns.*8, got 6"):
        Hopfield(WIDTH, pattern_projection_as_connected=True, pattern_projection_size=6)


def test_pooling_and_lookup_load_with_what_they_have_learned() -> None:
    x = normal(BATCH, STORED, WIDTH)
    queries = normal(1, 3, WIDTH)
    state = {"pooling_weights": queries, **under("hopfield", checkpoint())}
    pooled = build(HopfieldPooling, state, WIDTH, quantity=3)(x)
    expected = reference(below("hopfield", state), x, queries.expand(BATCH, -1, -1), x).flatten(1)
    assert_close(pooled, expected, **EXACT)
    keys, targets = normal(1, 6, WIDTH), normal(1, 6, WIDTH)
    state = {"lookup_weights": keys, "target_weights": targets, **under("hopfield", checkpoint())}
    found = build(HopfieldLayer, state, WIDTH, quantity=6, lookup_weights_as_separated=True)(x)
    both = (t.expand(BATCH, -1, -1) for t in (keys, targets))
    stored, projection = both
    assert_close(found, reference(below("hopfield", state), stored, x, projection), **EXACT)


def feed_forward(state: State, x: Tensor) -> Tensor:
    inner = (x @ state["linear_residual.weight"].T + state["linear_residual.bias"]).relu()
    return x + inner @ state["linear_output.weight"].T + state["linear_output.bias"]


def encoder_state() -> State:
    return {
        **under("hopfield_association", checkpoint()),
        **linear("linear_residual", 11, WIDTH),
        **linear("linear_output", WIDTH, 11),
        **norm("norm_residual", WIDTH),
        **norm("norm_output", WIDTH),
    }


def association() -> Hopfield:
    return Hopfield(WIDTH, num_heads=HEADS, omega=Shannon())


def test_a_loaded_encoder_layer_computes_what_its_checkpoint_says() -> None:
    state, x = encoder_state(), normal(BATCH, STATES, WIDTH)
    layer = HopfieldEncoderLayer(association(), 11).double().eval()
    load_hflayers(layer, state)
    inner = below("hopfield_association", state)
    for causal in (False, True):
        hide = torch.ones(STATES, STATES, dtype=torch.bool).triu(1) if causal else None
        y = normed(state, "norm_residual", x + reference(inner, x, x, x, hide=hide))
        expected = normed(state, "norm_output", feed_forward(state, y))
        assert_close(layer(x, is_causal=causal), expected, **EXACT)
        assert_close(layer(x, src_mask=hide), expected, **EXACT)
    absent = torch.tensor([[False, False, False, True]] * BATCH)
    y = normed(state, "norm_residual", x + reference(inner, x, x, x, hide=absent.unsqueeze(1)))
    expected = normed(state, "norm_output", feed_forward(state, y))
    assert_close(layer(x, src_key_padding_mask=absent), expected, **EXACT)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_loaded_decoder_layer_computes_what_its_checkpoint_says(batch_first: bool) -> None:
    state = {
        **under("hopfield_association_self", checkpoint()),
        **under("hopfield_association_cross", checkpoint(stored=7, projection=7)),
        **linear("linear_residual", 11, WIDTH),
        **linear("linear_output", WIDTH, 11),
        **norm("norm_residual_self", WIDTH),
        **norm("norm_residual_cross", WIDTH),
        **norm("norm_output", WIDTH),
    }
    options: dict[str, Any] = {"num_heads": HEADS, "omega": Shannon(), "batch_first": batch_first}
    own = Hopfield(WIDTH, **options)
    cross = Hopfield(WIDTH, stored_pattern_size=7, pattern_projection_size=7, **options)
    layer = HopfieldDecoderLayer(own, cross, 11).double().eval()
    load_hflayers(layer, state)
    x, memory = normal(BATCH, STATES, WIDTH), normal(BATCH, STORED, 7)
    absent = torch.arange(STORED) >= torch.tensor([[5], [3], [2]])
    future = torch.ones(STATES, STATES, dtype=torch.bool).triu(1)
    y = x + reference(below("hopfield_association_self", state), x, x, x, hide=future)
    y = normed(state, "norm_residual_self", y)
    read = reference(below("hopfield_association_cross", state), memory, y, memory, hide=absent.unsqueeze(1))
    y = normed(state, "norm_residual_cross", y + read)
    expected = normed(state, "norm_output", feed_forward(state, y))
    given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    found = layer(*given, tgt_is_causal=True, memory_key_padding_mask=absent)
    assert_close(found if batch_first else found.transpose(0, 1), expected, **EXACT)


def test_static_and_normalised_layers_load() -> None:
    """in_proj_bias has a part for the pattern projection even where that is static."""
    state = {
        "association_core.in_proj_weight": normal(WIDTH, WIDTH),
        "association_core.in_proj_bias": normal(2 * WIDTH),
        "association_core.p_norm_weight": normal(WIDTH),
        "association_core.p_norm_bias": normal(WIDTH),
        **norm("norm_state_pattern", WIDTH),
    }
    layer = Hopfield(
        WIDTH,
        stored_pattern_as_static=True,
        pattern_projection_as_static=True,
        normalize_stored_pattern=False,
        normalize_pattern_projection=False,
        normalize_hopfield_space=True,
        normalize_hopfield_space_affine=True,
        disable_out_projection=True,
        omega=Shannon(),
    ).double()
    load_hflayers(layer, state)
    stored, states, projection = normal(2, 5, WIDTH), normal(2, 4, WIDTH), normal(2, 5, WIDTH)
    core = below("association_core", state)
    q = normed(state, "norm_state_pattern", states) @ core["in_proj_weight"].T + core["in_proj_bias"][:WIDTH]
    q, k = (F.layer_norm(t, (WIDTH,), core["p_norm_weight"], core["p_norm_bias"]) for t in (q, stored))
    expected = (q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ projection
    assert_close(layer((stored, states, projection)), expected, **EXACT)


def test_appended_patterns_and_models_of_several_layers_load() -> None:
    keys, values = normal(1, 1, WIDTH), normal(1, 1, WIDTH)
    state = {**checkpoint(), "association_core.bias_k": keys, "association_core.bias_v": values}
    layer = build(Hopfield, state, WIDTH, concat_bias_pattern=True)
    assert torch.equal(layer.bias_stored.flatten(), keys.flatten())
    assert torch.equal(layer.bias_pattern.flatten(), values.flatten())
    model = nn.Sequential(HopfieldEncoderLayer(association(), 11), nn.Linear(WIDTH, 2)).double().eval()
    first = encoder_state()
    load_hflayers(model, {**under("0", first), **linear("1", 2, WIDTH)})
    alone = HopfieldEncoderLayer(association(), 11).double().eval()
    load_hflayers(alone, first)
    x = normal(BATCH, STATES, WIDTH)
    assert torch.equal(model[0](x), alone(x))


def test_what_hflayers_does_not_save_stays() -> None:
    omega = fenchel.Tsallis(1.3, learnable=True)
    layer = Hopfield(WIDTH, num_heads=HEADS, scaling=0.7, learnable_scaling=True, omega=omega).double()
    load_hflayers(layer, checkpoint())
    assert_close(layer.scaling.detach(), torch.full((HEADS,), 0.7).double())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("association_core.in_proj_bias"), ["missing association_core.in_proj_bias"]),
        (lambda s: s.pop("association_core.out_proj.weight"), ["missing association_core.out_proj.weight"]),
        (lambda s: s.pop("norm_state_pattern.bias"), ["missing norm_state_pattern.bias"]),
        (lambda s: s.update({"association_core.bias_k": normal(1, 1, 8)}), ["unexpected association_core.bias_k"]),
        (lambda s: s.update(pooling_weights=normal(1, 1, 8)), ["unexpected pooling_weights"]),
        (lambda s: s.update({"association_core.in_proj_weight": normal(25, 8)}), ["25 rows", "8 + 8 + 8"]),
        (lambda s: s.update({"norm_state_pattern.bias": normal(7)}), ["(7,)", "norm_state_pattern.bias", "(8,)"]),
        (lambda s: s.clear(), ["missing association_core.in_proj_bias", "association_core.q_proj_weight"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_loaded(change: Any, words: list[str]) -> None:
    state = checkpoint()
    change(state)
    layer = Hopfield(WIDTH, num_heads=HEADS).double()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(ValueError, match="state_dict") as caught:
        load_hflayers(layer, state)
    for word in words:
        assert word in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_a_layer_that_projects_nothing_has_a_scaling_of_one() -> None:
    static = {
        "stored_pattern_as_static": True,
        "state_pattern_as_static": True,
        "pattern_projection_as_static": True,
    }
    assert Hopfield(hidden_size=9, disable_out_projection=True, **static).scaling == 1.0
    assert Hopfield(9, **static).scaling == pytest.approx(1 / 3)
    assert Hopfield(9, disable_out_projection=True, normalize_hopfield_space=True, **static).scaling == pytest.approx(
        1 / 3
    )
    assert Hopfield(9, disable_out_projection=True).scaling == pytest.approx(1 / 3)


# -- the transformer layers with any Ω ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_stacks_take_the_layers(batch_first: bool) -> None:
    options: dict[str, Any] = {"num_heads": HEADS, "omega": Gini(), "batch_first": batch_first}
    encoder = nn.TransformerEncoder(HopfieldEncoderLayer(Hopfield(WIDTH, **options), 16), 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(HopfieldDecoderLayer(Hopfield(WIDTH, **options), Hopfield(WIDTH, **options)), 2)
    encoder, decoder = encoder.double().eval(), decoder.double().eval()
    x, target = normal(BATCH, STORED, WIDTH), normal(BATCH, STATES, WIDTH)
    given = (x, target) if batch_first else (x.transpose(0, 1), target.transpose(0, 1))
    absent = torch.arange(STORED) >= torch.tensor([[5], [3], [2]])
    memory = encoder(given[0], src_key_padding_mask=absent)
    future = nn.Transformer.generate_square_subsequent_mask(STATES, dtype=torch.float64)
    found = decoder(given[1], memory, tgt_mask=future, memory_key_padding_mask=absent)
    spoilt = given[0].clone()
    (spoilt if batch_first else spoilt.transpose(0, 1))[absent] = 7.0
    again = encoder(spoilt, src_key_padding_mask=absent)
    kept = ~absent if batch_first else ~absent.T
    assert_close(again[kept], memory[kept], **EXACT)
    changed = given[1].clone()
    (changed if batch_first else changed.transpose(0, 1))[:, -1] = 3.0
    later = decoder(changed, memory, tgt_mask=future, memory_key_padding_mask=absent)
    first, second = ((t if batch_first else t.transpose(0, 1))[:, :-1] for t in (found, later))
    assert_close(first, second, **EXACT)


@pytest.mark.slow
def test_gradients_reach_every_parameter_of_the_transformer_layers() -> None:
    own = Hopfield(4, num_heads=2, omega=Gini(), scaling=1.3)
    layer = HopfieldDecoderLayer(own, own, 5, 0.0, "gelu").double()
    assert layer.hopfield_association_self is not own
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Tensor, memory: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        found: Tensor = torch.func.functional_call(layer, given, (x, memory))
        return found

    inputs = [normal(2, 3, 4), normal(2, 4, 4), *(p.detach().clone() for p in layer.parameters())]
    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in inputs], fast_mode=True)
    weights = layer.get_association_matrix_cross((inputs[1], inputs[0], inputs[1]))
    assert weights.shape == (2, 2, 3, 4)


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (TypeError, "hopfield_association must be a.*got Linear", lambda: HopfieldEncoderLayer(nn.Linear(3, 3))),
        (ValueError, "output_size 3 and states of width 8", lambda: HopfieldEncoderLayer(Hopfield(8, output_size=3))),
        (ValueError, "dim_feedforward must be at least 1", lambda: HopfieldEncoderLayer(Hopfield(8), 0)),
        (ValueError, "dropout must satisfy", lambda: HopfieldEncoderLayer(Hopfield(8), dropout=1.5)),
        (ValueError, "activation must name", lambda: HopfieldEncoderLayer(Hopfield(8), activation="no such")),
        (ValueError, "states as wide as", lambda: HopfieldDecoderLayer(Hopfield(8), Hopfield(4))),
        (ValueError, "batch_first", lambda: HopfieldDecoderLayer(Hopfield(8), Hopfield(8, batch_first=False))),
        (
            ValueError,
            "src_key_padding_mask must be boolean",
            lambda: HopfieldEncoderLayer(Hopfield(8))(torch.zeros(1, 2, 8), None, torch.ones(1, 2)),
        ),
    ],
)
def test_bad_arguments_of_transformer_layers_are_named(error: type[Exception], match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()
