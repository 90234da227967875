"""Hopfield layers: torch's attention for Shannon without updates, a plain loop with them, and bags of any size.

One file, because all three layers go through the same comparisons.
"""

import copy
import inspect
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fenchel
from fenchel import Custom, Gini, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.hopfield import Hopfield, HopfieldLayer, HopfieldPooling, association, update
from fenchel.structures import SequentialSubsets

EXACT = {"atol": 1e-11, "rtol": 1e-11}
WIDTH, HEADS, BATCH, STATES, STORED = 8, 2, 3, 4, 5
PLAIN: dict[str, bool] = {
    "normalize_stored_pattern": False,
    "normalize_state_pattern": False,
    "normalize_pattern_projection": False,
}
STATIC: dict[str, bool] = {
    **PLAIN,
    "stored_pattern_as_static": True,
    "state_pattern_as_static": True,
    "pattern_projection_as_static": True,
    "disable_out_projection": True,
}
OMEGAS = [Shannon(), Tsallis(1.5), Gini(), Norm(2.0), Norm(5.0), KSubsets(2)]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def patterns() -> tuple[Tensor, Tensor, Tensor]:
    """Stored patterns, state patterns and pattern projections."""
    return normal(BATCH, STORED, WIDTH), normal(BATCH, STATES, WIDTH), normal(BATCH, STORED, WIDTH)


def stirred(layer: nn.Module) -> Any:
    """The layer in float64 with no parameter at its special start."""
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def pair(**options: Any) -> tuple[Hopfield, nn.MultiheadAttention]:
    """Ours with Shannon and torch's, with the same parameters."""
    kinds = {
        "batch_first": "batch_first",
        "concat_bias_pattern": "add_bias_kv",
        "add_zero_association": "add_zero_attn",
    }
    renamed = {kinds[name]: value for name, value in options.items()}
    theirs = stirred(nn.MultiheadAttention(WIDTH, HEADS, **renamed))
    ours = Hopfield(WIDTH, num_heads=HEADS, omega=Shannon(), **PLAIN, **options).double()
    with torch.no_grad():
        places = (ours.state_proj, ours.stored_proj, ours.pattern_proj)
        for place, weight, bias in zip(
            places, theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
        ):
            place.weight.copy_(weight)
            place.bias.copy_(bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
        if options.get("concat_bias_pattern"):
            ours.bias_stored.copy_(theirs.bias_k.reshape(1, HEADS, 1, -1))
            ours.bias_pattern.copy_(theirs.bias_v.reshape(1, HEADS, 1, -1))
    return ours, theirs


def masks(kind: str) -> dict[str, Tensor]:
    padding = torch.arange(STORED) >= torch.tensor([[5], [3], [2]])
    apart = torch.eye(STATES, STORED, dtype=torch.bool)
    return {
        "none": {},
        "padding": {"stored_pattern_padding_mask": padding},
        "boolean": {"association_mask": apart},
        "added": {"association_mask": normal(STATES, STORED)},
        "a head": {"association_mask": torch.rand(BATCH * HEADS, STATES, STORED) < 0.3},
        "both": {"association_mask": apart, "stored_pattern_padding_mask": padding},
        "both, added": {
            "association_mask": normal(BATCH * HEADS, STATES, STORED),
            "stored_pattern_padding_mask": padding,
        },
    }[kind]


@pytest.mark.parametrize("kind", ["none", "padding", "boolean", "added", "a head", "both", "both, added"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": False},
        {"concat_bias_pattern": True},
        {"add_zero_association": True},
        {"concat_bias_pattern": True, "add_zero_association": True},
    ],
    ids=str,
)
def test_shannon_without_updates_is_torchs_attention(kind: str, options: dict[str, bool]) -> None:
    ours, theirs = pair(**{"batch_first": True, **options})
    given = tuple(x if ours.batch_first else x.transpose(0, 1) for x in patterns())
    stored, state, projection = (x.detach().requires_grad_() for x in given)
    mask = masks(kind)
    names = {"stored_pattern_padding_mask": "key_padding_mask", "association_mask": "attn_mask"}
    renamed = {names[name]: value for name, value in mask.items()}
    if kind == "both, added":  # torch wants both of one kind
        renamed["key_padding_mask"] = (
            torch.zeros(BATCH, STORED).double().masked_fill(renamed["key_padding_mask"], -torch.inf)
        )
    expected, weights = theirs(state, stored, projection, average_attn_weights=False, **renamed)
    found = ours((stored, state, projection), **mask)
    assert_close(found, expected, **EXACT)
    assert_close(ours.get_association_matrix((stored, state, projection), **mask), weights.detach(), **EXACT)
    slopes = [torch.autograd.grad(out.square().sum(), (stored, state, projection)) for out in (found, expected)]
    for one, other in zip(*slopes, strict=True):
        assert_close(one, other, **EXACT)


def softmax_step(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def sparsemax_step(scores: Tensor) -> Tensor:
    """By sorting, as Martins & Astudillo have it."""
    ordered = scores.sort(-1, descending=True).values
    rank = torch.arange(1, scores.shape[-1] + 1)
    tau = (ordered.cumsum(-1) - 1) / rank
    size = (ordered > tau).sum(-1, keepdim=True)
    return (scores - tau.gather(-1, size - 1)).clamp_min(0)


@pytest.mark.parametrize(
    ("omega", "choose"), [(Shannon(), softmax_step), (Gini(), sparsemax_step)], ids=["softmax", "sparsemax"]
)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_updates_are_a_plain_loop_in_each_head(
    omega: Regularizer, choose: Callable[[Tensor], Tensor], steps: int
) -> None:
    beta = torch.tensor([0.7, 2.5], dtype=torch.float64)
    layer = Hopfield(
        WIDTH,
        hidden_size=3,
        output_size=7,
        pattern_size=2,
        num_heads=HEADS,
        scaling=beta,
        update_steps_max=steps,
        update_steps_eps=0.0,
        normalize_hopfield_space=True,
        normalize_hopfield_space_affine=True,
        omega=omega,
    )
    layer = stirred(layer)
    stored, state, projection = patterns()
    key = layer.stored_proj(layer.norm_stored_pattern(stored))
    value = layer.pattern_proj(layer.norm_pattern_projection(projection))
    xi = layer.state_proj(layer.norm_state_pattern(state))
    heads, chosen = [], []
    for head, b in enumerate(beta):
        k, q = (layer.norm_hopfield_space(x[..., 3 * head : 3 * head + 3]) for x in (key, xi))
        for _ in range(steps):
            q = choose(b * q @ k.transpose(1, 2)) @ k
        chosen.append(choose(b * q @ k.transpose(1, 2)))
        heads.append(chosen[-1] @ value[..., 2 * head : 2 * head + 2])
    assert_close(layer((stored, state, projection)), layer.out_proj(torch.cat(heads, -1)), **EXACT)
    assert_close(layer.get_association_matrix((stored, state, projection)), torch.stack(chosen, 1), **EXACT)
    split = torch.stack([value[..., :2], value[..., 2:]], 1)
    assert_close(layer.get_projected_pattern_matrix((stored, state, projection)), split, **EXACT)


def test_updates_without_end_come_to_rest_at_a_stored_pattern() -> None:
    layer = Hopfield(hidden_size=6, num_heads=2, scaling=30.0, update_steps_max=None, omega=Gini(), **STATIC)
    stored, state = normal(BATCH, STORED, 6), normal(BATCH, STATES, 6)
    weights = layer.get_association_matrix((stored, state, stored))
    assert ((weights == 0) | (weights == 1)).all()
    found = layer((stored, state, stored))
    assert_close(update(found[..., :6], stored, omega=Gini(), beta=30.0), found[..., :6], **EXACT)
    assert_close(found[..., 6:], found[..., :6])


def test_the_tolerance_ends_updates_early() -> None:
    def after(steps: int, eps: float) -> Tensor:
        layer = Hopfield(
            hidden_size=6, scaling=1.0, update_steps_max=steps, update_steps_eps=eps, omega=Shannon(), **STATIC
        )
        return layer((stored, state, stored))

    stored, state = normal(1, 9, 6), normal(1, 20, 6)
    assert_close(after(50, 1e9), after(1, 0.0), **EXACT)
    assert not torch.equal(after(50, 0.0), after(1, 0.0))


def test_static_patterns_without_projections_are_a_memory() -> None:
    layer = Hopfield(hidden_size=6, pattern_size=3, scaling=0.8, omega=Tsallis(1.5), **STATIC)
    assert not list(layer.parameters())
    stored, state, projection = normal(BATCH, STORED, 6), normal(BATCH, STATES, 6), normal(BATCH, STORED, 3)
    expected = fenchel.attention(state, stored, projection, Tsallis(1.5), scale=0.8)
    assert_close(layer((stored, state, projection)), expected, **EXACT)


def test_connected_projections_pass_through_the_projection_of_the_stored_patterns() -> None:
    layer = stirred(Hopfield(WIDTH, hidden_size=3, num_heads=HEADS, pattern_projection_as_connected=True))
    stored, state, projection = patterns()
    value = layer.pattern_proj(layer.stored_proj(layer.norm_pattern_projection(projection)))
    weights = layer.get_association_matrix((stored, state, projection))
    read = torch.cat([weights[:, head] @ value[..., 3 * head : 3 * head + 3] for head in range(HEADS)], -1)
    assert_close(layer((stored, state, projection)), layer.out_proj(read), **EXACT)


@pytest.mark.parametrize("omega", OMEGAS, ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_bag_is_pooled_the_same_alone_and_padded_with_nan(omega: Regularizer, steps: int) -> None:
    layer = stirred(
        HopfieldPooling(WIDTH, num_heads=HEADS, quantity=2, scaling=2.0, update_steps_max=steps, omega=omega)
    )
    sizes = [7, 1, 3, 5]
    bags = [normal(size, WIDTH) for size in sizes]
    padded = nn.utils.rnn.pad_sequence(bags, batch_first=True, padding_value=math.nan).requires_grad_()
    absent = torch.arange(max(sizes)) >= torch.tensor(sizes).unsqueeze(1)
    found = layer(padded, absent)
    found.square().sum().backward()
    together = {name: p.grad.clone() for name, p in layer.named_parameters()}
    assert not padded.grad[absent].any()
    layer.zero_grad()
    for row, bag, slope, size in zip(found, bags, padded.grad, sizes, strict=True):
        alone = bag.requires_grad_()
        pooled = layer(alone.unsqueeze(0))
        assert_close(pooled.squeeze(0), row, **EXACT)
        pooled.square().sum().backward()
        assert_close(alone.grad, slope[:size], **EXACT)
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad, together[name], **EXACT)


def test_what_is_read_out_may_be_another_than_what_is_compared() -> None:
    layer = stirred(HopfieldPooling(WIDTH, pattern_projection_size=3, hidden_size=4, output_size=5))
    bags, values = normal(BATCH, STORED, WIDTH), normal(BATCH, STORED, 3)
    absent = torch.arange(STORED) >= torch.tensor([[5], [3], [2]])
    expected = layer((bags, values), absent)
    assert expected.shape == (BATCH, 5)
    spoilt = values.masked_fill(absent.unsqueeze(-1), math.inf)
    assert_close(layer((bags, spoilt), absent), expected, **EXACT)


def test_projected_patterns_are_what_the_weights_add_up() -> None:
    pooling = stirred(HopfieldPooling(WIDTH, num_heads=HEADS, disable_out_projection=True))
    layer = stirred(HopfieldLayer(WIDTH, num_heads=HEADS, quantity=6, disable_out_projection=True))
    x = normal(BATCH, STORED, WIDTH)
    for each in (pooling, layer):
        read = each.get_association_matrix(x) @ each.get_projected_pattern_matrix(x)
        assert_close(read.transpose(1, 2).flatten(-2).reshape(each(x).shape), each(x).detach(), **EXACT)


def test_a_bag_without_instances_reads_out_nothing() -> None:
    layer = stirred(HopfieldPooling(WIDTH, num_heads=HEADS))
    bags = normal(2, STORED, WIDTH).requires_grad_()
    absent = torch.tensor([[True], [False]]).expand(2, STORED)
    found = layer(bags, absent)
    assert_close(found[0], layer.hopfield.out_proj.bias)
    found.sum().backward()
    assert not bags.grad[0].any()
    assert bags.grad[1].any()


def test_pooling_does_not_see_the_order_of_instances() -> None:
    layer = stirred(HopfieldPooling(WIDTH, num_heads=HEADS, omega=KSubsets(2), update_steps_max=1))
    bags, order = normal(BATCH, STORED, WIDTH), torch.randperm(STORED)
    assert_close(layer(bags[:, order]), layer(bags), **EXACT)


def test_pooling_is_a_hopfield_layer_with_its_queries_as_states() -> None:
    layer = stirred(HopfieldPooling(WIDTH, num_heads=HEADS, quantity=3, batch_first=False))
    bags = normal(STORED, BATCH, WIDTH)
    states = layer.pooling_weights.expand(3, BATCH, WIDTH)
    expected = layer.hopfield((bags, states, bags)).transpose(0, 1).flatten(1)
    assert_close(layer(bags), expected, **EXACT)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layer_looks_up_in_its_own_memory(batch_first: bool) -> None:
    options: dict[str, Any] = {"quantity": 6, "scaling": 2.0, "batch_first": batch_first}
    layer = stirred(HopfieldLayer(WIDTH, num_heads=HEADS, lookup_weights_as_separated=True, **options))
    states = normal(*((BATCH, STATES) if batch_first else (STATES, BATCH)), WIDTH)
    shape = (BATCH, 6, WIDTH) if batch_first else (6, BATCH, WIDTH)
    memory, targets = (x.expand(shape) for x in (layer.lookup_weights, layer.target_weights))
    assert_close(layer(states), layer.hopfield((memory, states, targets)), **EXACT)
    gone = torch.tensor([[False, True, False, False, True, False]])
    weights = layer.get_association_matrix(states, gone)
    assert weights.shape == (BATCH, HEADS, STATES, 6)
    assert not weights[..., [1, 4]].any()
    assert_close(weights.sum(-1), torch.ones(BATCH, HEADS, STATES).double(), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("omega", "steps"), [(OMEGAS[0], 0), *((omega, 2) for omega in OMEGAS)], ids=str)
def test_gradients_reach_inputs_and_every_parameter(omega: Regularizer, steps: int) -> None:
    layer = stirred(
        Hopfield(
            4,
            hidden_size=3,
            num_heads=2,
            update_steps_max=steps,
            update_steps_eps=0.0,
            learnable_scaling=True,
            scaling=1.3,
            concat_bias_pattern=True,
            normalize_hopfield_space=True,
            omega=omega,
        )
    )
    names = [name for name, _ in layer.named_parameters()]

    def call(stored: Tensor, state: Tensor, projection: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        out: Tensor = torch.func.functional_call(layer, given, ((stored, state, projection),))
        return out

    inputs = [normal(2, 3, 4), normal(2, 2, 4), normal(2, 3, 4), *(p.detach() for p in layer.parameters())]
    assert torch.autograd.gradcheck(call, [x.clone().requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", [HopfieldPooling, HopfieldLayer])
def test_gradients_reach_what_is_learned_to_second_order(make: Callable[..., nn.Module]) -> None:
    layer = stirred(make(4, num_heads=2, quantity=3, scaling=2.0, learnable_scaling=True, omega=Tsallis(1.5)))
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return out

    inputs = [normal(2, 5, 4), *(p.detach() for p in layer.parameters())]
    inputs = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def test_any_omega_will_do() -> None:
    bags = torch.randn(2, 6, WIDTH)
    for omega in (
        fenchel.SparseMAP(SequentialSubsets(2, 0.5)),
        Custom(lambda p: 0.5 * p.square().sum(-1)),
        0.5 * Gini(),
    ):
        layer = HopfieldPooling(WIDTH, num_heads=HEADS, update_steps_max=1, omega=omega)
        layer(bags).sum().backward()
        assert torch.isfinite(layer.pooling_weights.grad).all()


def test_a_learned_alpha_may_differ_from_head_to_head() -> None:
    omega = Tsallis(1.5, learnable=True, bounds=(1, 2), shape=(HEADS, 1, 1))
    layer = HopfieldPooling(WIDTH, num_heads=HEADS, omega=omega, scaling=3.0)
    layer(torch.randn(BATCH, STORED, WIDTH)).sum().backward()
    grads = [p.grad for p in omega.parameters()]
    assert grads
    assert all(g is not None and g.shape == (HEADS, 1, 1) and g.any() for g in grads)


def test_beta_is_trained_one_a_head_and_stays_positive() -> None:
    layer = HopfieldPooling(WIDTH, num_heads=HEADS, scaling=0.5, learnable_scaling=True)
    assert "hopfield.log_scaling" in layer.state_dict()
    assert_close(layer.hopfield.scaling.detach(), torch.tensor([0.5, 0.5]))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e4)
    layer(torch.randn(BATCH, STORED, WIDTH)).square().sum().backward()
    assert layer.hopfield.log_scaling.grad.any()
    optimizer.step()
    assert (layer.hopfield.scaling >= 0).all()


def test_a_fixed_beta_is_not_in_the_state_dict() -> None:
    layer = Hopfield(WIDTH, num_heads=HEADS, scaling=torch.tensor([1.0, 2.0]))
    assert not [name for name in layer.state_dict() if "scaling" in name]
    assert layer.double().scaling.dtype == torch.float64
    assert Hopfield(WIDTH, num_heads=HEADS).scaling == 0.5


@pytest.mark.parametrize(
    "layer",
    [
        Hopfield(WIDTH, num_heads=HEADS, concat_bias_pattern=True, learnable_scaling=True),
        HopfieldPooling(WIDTH, quantity=2),
        HopfieldLayer(WIDTH, quantity=4, lookup_weights_as_separated=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_what_is_saved_and_copied_is_the_same_layer(layer: Any) -> None:
    x = torch.randn(BATCH, STORED, WIDTH)
    copied = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    layer.reset_parameters()
    assert not torch.equal(layer(x), copied(x))
    layer.load_state_dict(torch.load(file), strict=True)
    assert_close(layer(x), copied(x), atol=0, rtol=0)


def test_instances_are_dropped_in_training_alone_and_one_always_stays() -> None:
    layer = HopfieldPooling(WIDTH, num_heads=HEADS, bag_dropout=0.75, omega=Shannon())
    bags = torch.randn(400, 6, WIDTH)
    absent = torch.arange(6) >= torch.tensor([2, 6]).repeat(200).unsqueeze(1)
    weights = layer.get_association_matrix(bags, absent).squeeze(2)
    assert_close(weights.sum(-1), torch.ones(400, HEADS))
    seen = weights > 0
    assert torch.equal(seen[:, 0], seen[:, 1])
    assert not seen[:, 0][absent].any()
    kept = seen[1::2, 0].sum(1).double()  # 1 + binomial(5, ¼), nearly: the largest draw stays in any case
    assert kept.min() == 1
    expected = sum(max(1, n) * math.comb(6, n) * 0.25**n * 0.75 ** (6 - n) for n in range(7))
    assert kept.mean().item() == pytest.approx(expected, abs=0.25)
    layer.eval()
    assert torch.equal(
        layer.get_association_matrix(bags, absent).squeeze(2) > 0, ~absent[:, None].expand(-1, HEADS, -1)
    )


def test_associations_are_dropped_in_training_and_right_on_average() -> None:
    layer = HopfieldPooling(WIDTH, num_heads=HEADS, dropout=0.5, disable_out_projection=True).double()
    bag = normal(1, STORED, WIDTH)
    drawn = layer(bag.expand(4000, -1, -1))
    expected = layer.eval()(bag)
    assert drawn.std(0).min() > 0
    error = (drawn.mean(0) - expected).abs() / (drawn.std(0) / len(drawn) ** 0.5)
    assert error.max() < 5
    assert_close(layer(bag), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_come_near_float32(dtype: torch.dtype) -> None:
    layer = HopfieldPooling(WIDTH, num_heads=HEADS, update_steps_max=1)
    bags = torch.randn(BATCH, STORED, WIDTH)
    expected = layer(bags)
    found = copy.deepcopy(layer).to(dtype)(bags.to(dtype))
    assert found.dtype == dtype
    assert_close(found.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.slow
def test_layers_are_captured_whole() -> None:
    layer = HopfieldPooling(WIDTH, num_heads=HEADS, update_steps_max=2, update_steps_eps=0.0, scaling=2.0).eval()
    bags = torch.randn(BATCH, STORED, WIDTH)
    absent = torch.arange(STORED) >= torch.tensor([[5], [3], [2]])
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_close(compiled(bags, absent), layer(bags, absent))
    endless = HopfieldPooling(WIDTH, update_steps_max=None)
    with pytest.raises(Exception, match="update_steps_max"):
        torch.compile(endless, fullgraph=True, backend="eager")(bags)


@pytest.mark.parametrize("make", [Hopfield, HopfieldPooling, HopfieldLayer])
@pytest.mark.parametrize("options", [{}, {"bag_dropout": 0.5}, {"update_steps_max": 2}], ids=str)
def test_no_bags_and_bags_of_nothing_are_no_error(make: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    layer = make(WIDTH, num_heads=HEADS, **options)
    pooled = make is HopfieldPooling
    assert layer(torch.zeros(0, STORED, WIDTH)).shape == ((0, WIDTH) if pooled else (0, STORED, WIDTH))
    found = layer(torch.zeros(BATCH, 0, WIDTH))
    assert found.shape == ((BATCH, WIDTH) if pooled else (BATCH, 0, WIDTH))
    assert not found.any()


def test_layers_go_through_transformations_and_autocast() -> None:
    layer = stirred(HopfieldPooling(WIDTH, num_heads=HEADS, update_steps_max=1, learnable_scaling=True)).eval()
    bags, direction = normal(BATCH, STORED, WIDTH), normal(BATCH, STORED, WIDTH)
    _, slope = torch.func.jvp(layer, (bags,), (direction,))
    step = 1e-6 * direction
    assert_close(slope, (layer(bags + step) - layer(bags - step)) / 2e-6, atol=1e-7, rtol=1e-6)
    alone = torch.func.vmap(lambda bag: layer(bag.unsqueeze(0)).squeeze(0))(bags)
    assert_close(alone, layer(bags), **EXACT)
    assert_close(torch.export.export(layer, (bags,)).module()(bags), layer(bags), **EXACT)
    narrow = layer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = narrow(bags.float())
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), narrow(bags.float()), atol=0.1, rtol=0.1)


def test_layers_show_what_they_are() -> None:
    text = repr(HopfieldPooling(WIDTH, num_heads=2, scaling=2.0, quantity=3, omega=Gini()))
    for part in ("quantity=3", "num_heads=2", "scaling=2", "Gini"):
        assert part in text
    assert "until converged" in repr(Hopfield(WIDTH, update_steps_max=None))


REFERENCE = """
input_size hidden_size output_size pattern_size num_heads scaling update_steps_max update_steps_eps
normalize_stored_pattern normalize_stored_pattern_affine normalize_stored_pattern_eps normalize_state_pattern
normalize_state_pattern_affine normalize_state_pattern_eps normalize_pattern_projection
normalize_pattern_projection_affine normalize_pattern_projection_eps normalize_hopfield_space
normalize_hopfield_space_affine normalize_hopfield_space_eps stored_pattern_as_static state_pattern_as_static
pattern_projection_as_static pattern_projection_as_connected stored_pattern_size pattern_projection_size batch_first
association_activation dropout input_bias concat_bias_pattern add_zero_association disable_out_projection
"""


def test_arguments_are_the_reference_layers_in_their_order() -> None:
    names = list(inspect.signature(Hopfield).parameters)
    assert names[: len(REFERENCE.split())] == REFERENCE.split()
    for make, more in (
        (HopfieldPooling, {"quantity", "trainable"}),
        (HopfieldLayer, {"quantity", "trainable", "lookup_weights_as_separated", "lookup_targets_as_trainable"}),
    ):
        own = set(inspect.signature(make).parameters) - {"options"}
        assert own | set(association.Options.__annotations__) == set(names) | more


def test_the_activation_is_of_the_output() -> None:
    bags = torch.randn(BATCH, STORED, WIDTH)
    layer = HopfieldPooling(WIDTH, association_activation="relu")
    found = layer(bags)
    layer.hopfield.association_activation = None
    assert_close(found, layer(bags).relu())
    assert (found == 0).any()


def test_queries_and_memories_that_are_not_trained_get_no_gradient() -> None:
    x = torch.randn(BATCH, STORED, WIDTH)
    pooling = HopfieldPooling(WIDTH, trainable=False)
    layer = HopfieldLayer(
        WIDTH, quantity=3, trainable=False, lookup_weights_as_separated=True, lookup_targets_as_trainable=False
    )
    for each, names in ((pooling, ["pooling_weights"]), (layer, ["lookup_weights", "target_weights"])):
        each(x).sum().backward()
        for name in names:
            assert getattr(each, name).grad is None


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"input_size": 8, "num_heads": 3}, ValueError, ["input_size", "multiple", "8", "3"]),
        ({"input_size": 0}, ValueError, ["input_size", "0"]),
        ({"input_size": 8.0}, TypeError, ["input_size", "float"]),
        ({}, ValueError, ["hidden_size", "input_size"]),
        ({"hidden_size": 4}, ValueError, ["input_size", "static"]),
        ({"input_size": 8, "scaling": 0.0}, ValueError, ["scaling", "0"]),
        ({"input_size": 8, "scaling": math.inf}, ValueError, ["scaling", "inf"]),
        ({"input_size": 8, "scaling": math.nan}, ValueError, ["scaling", "nan"]),
        ({"input_size": 8, "scaling": torch.tensor([1.0, -1.0]), "num_heads": 2}, ValueError, ["scaling", "-1"]),
        ({"input_size": 8, "scaling": torch.ones(3), "num_heads": 2}, ValueError, ["scaling", "head", "(3,)"]),
        ({"input_size": 8, "scaling": "hot"}, TypeError, ["scaling", "str"]),
        ({"input_size": 8, "update_steps_max": -1}, ValueError, ["update_steps_max", "-1"]),
        ({"input_size": 8, "update_steps_max": 1.5}, TypeError, ["update_steps_max", "float"]),
        ({"input_size": 8, "update_steps_eps": -1e-3}, ValueError, ["update_steps_eps", "-0.001"]),
        ({"input_size": 8, "dropout": 1.0}, ValueError, ["dropout", "1.0"]),
        ({"input_size": 8, "bag_dropout": -0.1}, ValueError, ["bag_dropout", "-0.1"]),
        ({"input_size": 8, "association_activation": "no such"}, ValueError, ["association_activation", "no such"]),
        ({"input_size": 8, "omega": "sparsemax"}, TypeError, ["omega", "str"]),
        ({"input_size": 8, "disable_out_projection": True, "output_size": 3}, ValueError, ["output_size", "8", "3"]),
        (
            {"input_size": 8, "pattern_projection_as_connected": True, "stored_pattern_as_static": True},
            ValueError,
            ["pattern_projection_as_connected", "static"],
        ),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        Hopfield(**options)
    for word in words:
        assert word in str(caught.value)


def good(*shape: int) -> Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        (good(2, 8), {}, ValueError, ["input", "3 dimensions", "(2, 8)"]),
        (good(2, 5, 7), {}, ValueError, ["input", "stored pattern", "8", "(2, 5, 7)"]),
        (good(2, 5, 8).long(), {}, TypeError, ["input", "int64"]),
        ((good(2, 5, 8), good(2, 4, 8)), {}, ValueError, ["input", "three", "2"]),
        ((good(2, 5, 8), good(2, 4, 8), good(2, 4, 8)), {}, ValueError, ["input", "(2, 4, 8)", "(2, 5, 8)"]),
        ((good(2, 5, 8), good(3, 4, 8), good(2, 5, 8)), {}, ValueError, ["input", "batch", "(3, 4, 8)"]),
        ((good(2, 5, 8), good(2, 4, 9), good(2, 5, 8)), {}, ValueError, ["input", "state pattern", "(2, 4, 9)"]),
        (
            good(2, 5, 8),
            {"stored_pattern_padding_mask": good(2, 5)},
            TypeError,
            ["stored_pattern_padding_mask", "boolean", "float32"],
        ),
        (
            good(2, 5, 8),
            {"stored_pattern_padding_mask": good(2, 4).bool()},
            ValueError,
            ["stored_pattern_padding_mask", "(2, 5)", "(2, 4)"],
        ),
        (
            good(2, 5, 8),
            {"association_mask": good(4, 5).bool()},
            ValueError,
            ["association_mask", "(5, 5)", "(4, 5)"],
        ),
        (good(2, 5, 8), {"association_mask": good(5, 5).long()}, TypeError, ["association_mask", "int64"]),
    ],
    ids=str,
)
def test_bad_input_is_named(given: Any, options: dict[str, Tensor], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        Hopfield(WIDTH, num_heads=HEADS)(given, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("make", [HopfieldPooling, HopfieldLayer])
def test_a_bad_quantity_is_named(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match="quantity must be at least 1, got 0"):
        make(8, quantity=0)
    with pytest.raises(TypeError, match="quantity"):
        make(8, quantity=2.0)


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_an_association_mask_of_one_column_masks_all(kind: str) -> None:
    torch.manual_seed(0)
    layer = Hopfield(8, num_heads=2, scaling=1.0, omega=fenchel.Gini(), concat_bias_pattern=True)
    stored, state = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    column = torch.tensor([[True], [False], [False]])
    column = column if kind == "boolean" else torch.where(column, -torch.inf, 0.0)
    narrow, wide = (layer((stored, state, stored), association_mask=m) for m in (column, column.expand(3, 5)))
    assert torch.equal(narrow, wide)


def test_an_update_with_a_tensor_beta_in_half_precision_is_as_in_float64() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 5, 8).half(), torch.randn(2, 3, 6, 8).half()
    beta = torch.tensor([1e5, 0.3, 7.0]).reshape(3, 1, 1)  # the first makes β·query overflow in half precision
    for omega in (Shannon(), Gini()):
        exact = update(query.double(), key.double(), omega=omega, beta=beta.double())
        found = update(query, key, omega=omega, beta=beta)
        assert found.dtype == torch.float16
        assert_close(found.double(), exact, atol=2e-3, rtol=2e-3)
