"""Transformers' own models: with Shannon as eager; with a sparse Ω as eager with the map in the place of softmax."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    DebertaConfig,
    DebertaModel,
    DynamicCache,
    FalconConfig,
    FalconModel,
    Gemma2Config,
    Gemma2Model,
    GPT2Config,
    GPT2Model,
    GPTJConfig,
    GPTJModel,
    GPTNeoConfig,
    GPTNeoModel,
    GptOssConfig,
    GptOssModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaModel,
    MistralConfig,
    MistralModel,
    OPTConfig,
    OPTModel,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    StableLmConfig,
    StableLmModel,
    StaticCache,
    T5Config,
    T5Model,
    YolosConfig,
    YolosModel,
)

import fenchel
from fenchel import Gini, Norm, Shannon, Tsallis
from fenchel.integrations.transformers import register, unregister
from fenchel.streaming import Plan, using

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning"),  # torch's data loader, on a CPU
]

WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 20}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 20, "dropout_rate": 0.0}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 20,
    "dropout": 0.0,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
DENSE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaModel(LlamaConfig(**WIDTHS, **HEADS)),
    "mistral": lambda: MistralModel(MistralConfig(**WIDTHS, **HEADS, sliding_window=3)),
    "gemma2": lambda: Gemma2Model(Gemma2Config(**WIDTHS, **HEADS, sliding_window=3, attn_logit_softcapping=0.5)),
    "gpt_oss": lambda: GptOssModel(GptOssConfig(**WIDTHS, **HEADS, **EXPERTS, sliding_window=3)),
    "bert": lambda: BertModel(BertConfig(**WIDTHS, **DENSE, num_attention_heads=4)),
    "bart": lambda: BartModel(BartConfig(**BART)),
    "t5": lambda: T5Model(T5Config(**T5)),
}
every_model = pytest.mark.parametrize("kind", MODELS)
TOKENS = torch.tensor([[3, 5, 7, 9, 4, 8, 3], [6, 1, 2, 1, 8, 6, 5], [2, 2, 9, 4, 1, 7, 3]])
PADDING = {
    "none": torch.ones_like(TOKENS),
    "left": (torch.arange(7) >= torch.tensor([[0], [2], [5]])).long(),
    "right": (torch.arange(7) < torch.tensor([[7], [4], [1]])).long(),
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    register("shannon", Shannon())
    yield
    unregister()


def make(kind: str) -> PreTrainedModel:
    """A tiny model with weights large enough that attention is far from even."""
    model = MODELS[kind]()
    if not model._can_set_attn_implementation():
        pytest.skip(f"{kind} does not look its attention up by name in this version of transformers")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5)
            elif "sinks" in name:
                parameter.normal_()
    return model.train()


def run(model: PreTrainedModel, name: str, padding: str = "none", **options: Any) -> Any:
    """The outputs of a model with an attention of that name."""
    model.set_attn_implementation(name)
    if model.config.is_encoder_decoder:
        options |= {
            "decoder_input_ids": TOKENS.flip(0)[:, :5],
            "decoder_attention_mask": PADDING[padding].flip(0)[:, :5],
        }
    return model(TOKENS, attention_mask=PADDING[padding], **options)


def real(model: PreTrainedModel, states: Tensor, padding: str) -> Tensor:
    """The outputs at places that are not padding."""
    mask = PADDING[padding].flip(0)[:, :5] if model.config.is_encoder_decoder else PADDING[padding]
    return states[mask.bool()]


def gradients(model: PreTrainedModel, states: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (states * torch.linspace(-1, 1, states.numel()).reshape(states.shape)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def replace_softmax(monkeypatch: pytest.MonkeyPatch, omega: fenchel.Regularizer) -> None:
    """What the models' own eager attention calls."""

    def choose(scores: Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return omega.argmax(scores if dtype is None else scores.to(dtype), dim=dim)

    monkeypatch.setattr(F, "softmax", choose)


# -- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDING)
@every_model
def test_shannon_is_eager_softmax(kind: str, padding: str) -> None:
    model = make(kind)
    found, expected = (
        real(model, run(model, name, padding).last_hidden_state, padding) for name in ("shannon", "eager")
    )
    assert_close(found, expected, atol=2e-5, rtol=2e-5)
    of_found, of_expected = gradients(model, found), gradients(model, expected)
    assert of_found.keys() == of_expected.keys()
    for name, gradient in of_expected.items():
        assert_close(of_found[name], gradient, atol=2e-4, rtol=2e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("omega", [Gini(), Tsallis(1.5), Norm(2)], ids=str)
@every_model
def test_a_sparse_omega_is_eager_with_its_map_in_the_place_of_softmax(
    kind: str, omega: fenchel.Regularizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(kind).eval()
    register("ours", omega)
    with torch.no_grad():
        found = real(model, run(model, "ours", "left").last_hidden_state, "left")
        softmax = real(model, run(model, "eager", "left").last_hidden_state, "left")
        replace_softmax(monkeypatch, omega)
        expected = real(model, run(model, "eager", "left").last_hidden_state, "left")
    assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(found, softmax, atol=1e-2)


@every_model
def test_weights_are_returned_if_asked_for(kind: str) -> None:
    model = make(kind).eval()
    names = ["attentions"]
    if model.config.is_encoder_decoder:
        names = ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    sparse, softmax, eager = (run(model, n, output_attentions=True) for n in ("sparsemax", "shannon", "eager"))
    for name in names:
        assert len(sparse[name]) == len(eager[name]) == 2
        for ours, smooth, theirs in zip(sparse[name], softmax[name], eager[name], strict=True):
            assert ours.shape == theirs.shape
            assert_close(smooth, theirs, atol=2e-5, rtol=2e-5)
            if kind != "gpt_oss":  # the sink takes a part
                assert_close(ours.sum(-1), torch.ones(ours.shape[:-1]), atol=1e-5, rtol=0)
            assert (ours[theirs > 0] == 0).any()
            assert (ours[theirs == 0] == 0).all()


@pytest.mark.parametrize("name", ["shannon", "entmax15"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "bart", "t5"])
def test_a_cache_filled_step_by_step_changes_nothing(kind: str, name: str) -> None:
    model = make(kind).eval()
    model.set_attn_implementation(name)
    padding = PADDING["left"]
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            encoded = model.encoder(TOKENS, attention_mask=padding)
            given = {"encoder_outputs": encoded, "attention_mask": padding}
            full = model(**given, decoder_input_ids=TOKENS).last_hidden_state
            past, steps = None, []
            for t in range(7):
                output = model(**given, decoder_input_ids=TOKENS[:, t : t + 1], past_key_values=past, use_cache=True)
                past = output.past_key_values
                steps.append(output.last_hidden_state)
            assert_close(torch.cat(steps, 1), full, atol=2e-5, rtol=2e-5)
            return
        places = (padding.cumsum(-1) - 1).clamp_min(0)
        full = model(TOKENS, attention_mask=padding, position_ids=places).last_hidden_state
        past, steps = DynamicCache(config=model.config), []
        for first, last in [(0, 4), (4, 5), (5, 6), (6, 7)]:
            output = model(
                TOKENS[:, first:last],
                attention_mask=padding[:, :last],
                position_ids=places[:, first:last],
                past_key_values=past,
            )
            steps.append(output.last_hidden_state)
        seen = padding.bool()
        assert_close(torch.cat(steps, 1)[seen], full[seen], atol=2e-5, rtol=2e-5)


def test_a_static_cache_is_read_as_far_as_it_is_written() -> None:
    model = make("llama").eval()
    model.set_attn_implementation("entmax15")
    with torch.no_grad():
        full = model(TOKENS).last_hidden_state
        past = StaticCache(config=model.config, max_cache_len=12)
        parts = [model(TOKENS[:, a:b], past_key_values=past).last_hidden_state for a, b in [(0, 5), (5, 6), (6, 7)]]
    assert_close(torch.cat(parts, 1), full, atol=2e-5, rtol=2e-5)


def test_packed_sequences_do_not_see_each_other() -> None:
    model = make("llama").eval()
    model.set_attn_implementation("sparsemax")
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(3, 7)
    with torch.no_grad():
        packed = model(TOKENS, position_ids=places, use_cache=False).last_hidden_state
        alone = [model(part).last_hidden_state for part in (TOKENS[:, :3], TOKENS[:, 3:])]
    assert_close(packed, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_ones_own_is_heeded(additive: bool) -> None:
    model = make("llama").eval()
    own = torch.rand(3, 1, 7, 7) > 0.4
    own |= torch.eye(7, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    float_mask = torch.zeros(own.shape).masked_fill(~own, lowest)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(TOKENS, attention_mask=float_mask).last_hidden_state
        model.set_attn_implementation("shannon")
        found = model(TOKENS, attention_mask=float_mask if additive else own).last_hidden_state
    assert_close(found, expected, atol=2e-5, rtol=2e-5)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What fenchel.attention is called with from now on."""
    calls: list[dict[str, Any]] = []
    module = importlib.import_module("fenchel.integrations.transformers")
    original = module.attention

    def attention(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return original(*args, **options)

    monkeypatch.setattr(module, "attention", attention)
    return calls


def test_a_causal_mask_and_nothing_else_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spy(monkeypatch)
    model = make("llama").eval()
    run(model, "entmax15")
    assert all(c["is_causal"] and c["attn_mask"] is None for c in calls)
    assert len(calls) == 2
    calls.clear()
    run(model, "entmax15", "left")
    assert all(not c["is_causal"] and c["attn_mask"] is not None for c in calls)


def test_a_causal_mask_that_is_written_to_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("fenchel.integrations.transformers")
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    mask = module.make_mask(**sizes)
    assert torch.equal(mask, torch.ones(1, 1, 4, 4, dtype=torch.bool).tril())
    assert module._is_causal(mask)
    mask[..., 3, 0] = False
    assert not module._is_causal(mask)
    assert not module._is_causal(module.make_mask(**sizes).clone())
    assert module.make_mask(batch_size=1, q_length=1, kv_length=4, q_offset=3) is None
    assert not module._is_causal(module.make_mask(batch_size=1, q_length=2, kv_length=4, q_offset=2))


def test_supports_alone_give_what_matrices_give() -> None:
    model = make("llama")
    results = []
    for method in ("supports", "dense"):
        with using(Plan(method)):
            states = run(model, "entmax15").last_hidden_state
            results.append((states, gradients(model, states)))
    assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


def attend(
    module: nn.Module | None = None, name: str = "sparsemax", queries: int = 5, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """A call as models make it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    function = ALL_ATTENTION_FUNCTIONS[name]
    module = nn.Module() if module is None else module
    return function(module, query[..., :queries, :], key, value, **{"attention_mask": None, **options})


def test_dropout_is_for_training() -> None:
    assert (attend(nn.Module().train(), dropout=1.0)[0] == 0).all()
    assert (attend(nn.Module().train(), dropout=1.0, softcap=2.0)[0] == 0).all()
    assert (attend(nn.Module().eval(), dropout=1.0)[0] != 0).any()


def test_a_flag_is_heeded_where_there_is_no_mask() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    module = nn.Module()
    module.is_causal = True  # as decoders are; what they pass along counts
    for options in ({}, {"softcap": 2.0}, {"output_attentions": True}, {"position_bias": torch.randn(1, 2, 5, 5)}):
        results = []
        for given in ({"is_causal": True}, {"attention_mask": mask}, {}):
            torch.manual_seed(1)
            results.append(attend(module, **options, **given)[0])
        assert torch.equal(results[0], results[1])
        assert not torch.allclose(results[0], results[2])
    assert attend(queries=1, is_causal=True)[0].shape == (1, 1, 2, 4)


def test_queries_with_nothing_to_attend_to_get_zeros() -> None:
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 2, :] = False
    for options in ({}, {"softcap": 2.0}, {"position_bias": torch.randn(1, 2, 5, 5)}):
        output, weights = attend(attention_mask=mask, output_attentions=True, **options)
        assert (output[:, 2] == 0).all()
        assert (weights[..., 2, :] == 0).all()
        assert (output[:, 3] != 0).any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache": object()}, NotImplementedError, "continuous batching"),
        ({"indices": torch.zeros(1)}, NotImplementedError, "an index chooses"),
        ({"attention_mask": torch.ones(1, 5)}, ValueError, r"attention_mask must have shape .* got \(1, 5\)"),
        ({"sliding_window": 3}, ValueError, "window of 3 of 5 keys"),
        ({"is_causal": True, "queries": 3}, ValueError, "attention_mask must be given for 3 queries and 5 keys"),
    ],
)
def test_what_would_be_overlooked_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attend(**options)


OTHERS: dict[str, Callable[[str], PreTrainedModel]] = {
    "bloom": lambda name: BloomModel(
        BloomConfig(hidden_size=16, n_layer=1, n_head=4, vocab_size=20, attn_implementation=name)
    ),
    "gptj": lambda name: GPTJModel(
        GPTJConfig(n_embd=16, n_layer=1, n_head=4, rotary_dim=4, vocab_size=20, attn_implementation=name)
    ),
    "gpt_neo": lambda name: GPTNeoModel(
        GPTNeoConfig(
            hidden_size=16,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            vocab_size=20,
            attn_implementation=name,
        )
    ),
    "falcon": lambda name: FalconModel(
        FalconConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=20, attn_implementation=name
        )
    ),
    "deberta": lambda name: DebertaModel(
        DebertaConfig(**WIDTHS, num_attention_heads=4, attn_implementation=name),
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_with_an_attention_of_its_own_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} models have an attention of their own"):
        OTHERS[kind]("entmax15")
    model = OTHERS[kind]("eager")
    with pytest.raises(ValueError, match=f"{kind} models have an attention of their own"):
        model.set_attn_implementation("entmax15")


SWALLOWING: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2Model(GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=20)),
    "opt": lambda: OPTModel(
        OPTConfig(
            hidden_size=16,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=20,
            word_embed_proj_dim=16,
            dropout=0.0,
        )
    ),
    "stablelm": lambda: StableLmModel(StableLmConfig(**WIDTHS, num_attention_heads=4, num_key_value_heads=2)),
    "siglip": lambda: SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
        )
    ),
    "yolos": lambda: YolosModel(
        YolosConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=[8, 8],
            patch_size=4,
            num_detection_tokens=2,
            use_mid_position_embeddings=False,
        )
    ),
}


@pytest.mark.parametrize("kind", SWALLOWING)
def test_weights_are_returned_by_models_that_do_not_ask_their_attention_for_them(kind: str) -> None:
    torch.manual_seed(0)
    model = SWALLOWING[kind]().eval()
    given = {"pixel_values": torch.randn(2, 3, 8, 8)} if kind in ("siglip", "yolos") else {"input_ids": TOKENS}
    found = {}
    for name in ("shannon", "eager", "sparsemax"):
        model.set_attn_implementation(name)
        found[name] = model(**given, output_attentions=True).attentions
        assert model(**given).attentions is None
    assert len(found["shannon"]) == len(found["eager"]) == len(found["sparsemax"]) == 2
    for ours, theirs in zip(found["shannon"], found["eager"], strict=True):
        assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    for sparse in found["sparsemax"]:
        assert_close(sparse.sum(-1), torch.ones(sparse.shape[:-1]), atol=1e-5, rtol=0)


def test_a_layers_own_omega_is_trained_with_the_model() -> None:
    model = make("llama")
    for layer in model.layers:
        layer.self_attn.omega = Tsallis(1.3, learnable=True, shape=(4, 1, 1))
    states = run(model, "sparsemax", "left").last_hidden_state
    gradient = gradients(model, states)["layers.1.self_attn.omega.raw_alpha"]
    assert gradient.shape == (4, 1, 1)
    assert (gradient != 0).all()
    assert "layers.0.self_attn.omega.raw_alpha" in model.state_dict()
    register("fixed", Tsallis(1.3))
    other = make("llama")
    other.load_state_dict(model.state_dict(), strict=False)
    assert_close(run(other, "fixed", "left").last_hidden_state, states, atol=2e-5, rtol=2e-5)


class Learned(LlamaForCausalLM):
    """A model whose heads learn their alphas, as a class: that is what ``from_pretrained`` builds before it loads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for block in self.model.layers:
            block.self_attn.omega = Tsallis(1.5, learnable=True, shape=(4, 1, 1))


def test_alphas_that_a_class_has_are_loaded_with_the_model(tmp_path: Path) -> None:
    model = Learned(LlamaConfig(**WIDTHS, **HEADS)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    loaded = Learned.from_pretrained(tmp_path, attn_implementation="sparsemax").eval()
    model.set_attn_implementation("entmax15")  # either way the layers' own go first
    assert_close(loaded(TOKENS).logits, model(TOKENS).logits, atol=0, rtol=0)


def written(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_a_saved_model_keeps_its_names_and_its_learned_alphas(tmp_path: Path) -> None:
    register("mine", 0.5 * Norm(3.0))
    model = LlamaForCausalLM(LlamaConfig(**WIDTHS, **HEADS, attn_implementation="mine")).eval()
    model.model.layers[1].self_attn.omega = Tsallis(1.5, learnable=True, shape=(4, 1, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    expected = model(TOKENS).logits
    assert written(model, tmp_path)["attn_implementation"] == "mine"
    assert not {"fenchel", "attn_implementation"} & set(vars(model.config))
    unregister()
    for kind in (LlamaForCausalLM, AutoModelForCausalLM):
        loaded, told = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert not told["unexpected_keys"]
        assert not told["missing_keys"]
        assert loaded.config._attn_implementation == "mine"
        assert_close(loaded.eval()(TOKENS).logits, expected, atol=0, rtol=0)
    base = LlamaModel.from_pretrained(tmp_path).eval()
    assert_close(base(TOKENS).last_hidden_state, model.model(TOKENS).last_hidden_state, atol=0, rtol=0)
    base.save_pretrained(tmp_path / "base")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert_close(again.model(TOKENS).last_hidden_state, base(TOKENS).last_hidden_state, atol=0, rtol=0)


def test_a_saved_model_may_be_loaded_with_another_attention_and_then_forgets_the_first(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**WIDTHS, **HEADS, attn_implementation="sparsemax"))
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"
    assert not {"fenchel", "attn_implementation"} & written(loaded, tmp_path / "again").keys()


def test_parts_of_a_model_keep_their_own_names(tmp_path: Path) -> None:
    text = {**WIDTHS, **HEADS, "model_type": "llama"}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config=LlamaConfig(**text), vision_config=SiglipVisionConfig(**vision, image_size=8, patch_size=4)
    )
    model = LlavaModel(config)
    model.set_attn_implementation({"text_config": "sparsemax"})
    model.save_pretrained(tmp_path)
    loaded = LlavaModel.from_pretrained(tmp_path)
    assert loaded.config.text_config._attn_implementation == "sparsemax"
    assert loaded.language_model.config._attn_implementation == "sparsemax"
    assert loaded.config.vision_config._attn_implementation not in ("sparsemax", "entmax15")


def test_what_a_file_cannot_hold_is_warned_of(tmp_path: Path) -> None:
    register("mine", fenchel.Custom(lambda p: 0.5 * (p * p).sum(-1)))
    model = LlamaForCausalLM(LlamaConfig(**WIDTHS, **HEADS, attn_implementation="mine"))
    with pytest.warns(UserWarning, match="a file cannot hold the regularizers of mine: register the name"):
        model.save_pretrained(tmp_path)
    unregister("mine")
    with pytest.raises(ValueError, match="mine"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    register("mine", Gini())
    assert LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "mine"


def test_a_name_that_means_something_else_now_is_warned_of(tmp_path: Path) -> None:
    register("mine", Gini())
    LlamaForCausalLM(LlamaConfig(**WIDTHS, **HEADS, attn_implementation="mine")).save_pretrained(tmp_path)
    register("mine", Norm(2.0))
    with pytest.warns(UserWarning, match=r"saved with Gini\(\) as 'mine'; what is registered.*Norm\(alpha=2\)"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_half_precision_stays_half() -> None:
    model = make("llama").bfloat16().eval()
    output = run(model, "entmax15", "left", output_attentions=True)
    assert output.last_hidden_state.dtype == output.attentions[0].dtype == torch.bfloat16
    assert output.last_hidden_state[PADDING["left"].bool()].isfinite().all()
