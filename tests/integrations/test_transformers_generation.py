"""Names in files, generation and training with transformers' own models."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_transformers import HEADS, PADDING, TOKENS, WIDTHS, _registered, make, pytestmark, run  # noqa: F401
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss

import fenchel
from fenchel import Gini, Shannon, Tsallis
from fenchel.integrations.transformers import EntmaxLogitsProcessor, TrainerLoss, register, unregister

# -- names --------------------------------------------------------------------------------------------------------


def test_a_forgotten_name_is_an_error_and_not_softmax() -> None:
    model = make("llama")
    register("mine", Gini())
    model.set_attn_implementation("mine")
    unregister("mine")
    with pytest.raises(KeyError, match="mine"):
        model(TOKENS)
    with pytest.raises(ValueError, match="not supported"):
        LlamaModel(LlamaConfig(**WIDTHS, **HEADS, attn_implementation="mine"))
    with pytest.raises(ValueError, match=r"name must be one that was registered.*got 'mine'"):
        unregister("mine")


def test_a_name_can_be_given_another_omega() -> None:
    model = make("llama").eval()
    register("mine", Gini())
    first = run(model, "mine").last_hidden_state
    register("mine", Shannon())
    assert_close(run(model, "mine").last_hidden_state, run(model, "shannon").last_hidden_state)
    assert not torch.allclose(first, run(model, "shannon").last_hidden_state, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("eager", Gini()), ValueError, "transformers' own"),
        (("sdpa", Gini()), ValueError, "transformers gives a meaning"),
        (("my_flash_attention", Gini()), ValueError, "transformers gives a meaning"),
        (("user/kernel", Gini()), ValueError, "letters, digits and underscores"),
        (("mine", None), ValueError, "name needs an omega"),
        ((None, Gini()), ValueError, "omega must be registered under a name"),
        (("mine", 1.5), TypeError, "omega must be a Regularizer"),
        ((1.5, Gini()), TypeError, "name must be a string"),
    ],
)
def test_bad_names_are_refused(arguments: tuple[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        register(*arguments)


WITHOUT = """
import sys
import fenchel
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    import fenchel.integrations.transformers
except ImportError as error:
    assert "pip install 'fenchel[transformers]'" in str(error), error
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_without_transformers_the_error_says_what_to_install() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)


# -- generation ---------------------------------------------------------------------------------------------------


def language_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        **WIDTHS, **HEADS, attn_implementation="entmax15", bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    return model


PROMPT = {"input_ids": TOKENS[:, :4], "attention_mask": PADDING["left"][:, 3:]}
KEEP = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 6, "top_k": 0}


def test_the_processor_gives_logarithms_of_entmax() -> None:
    scores = torch.tensor([[2.0, 1.4, 0.2, -torch.inf], [0.0, 9.0, 0.0, 0.0], [torch.nan, 0.0, 0.0, 0.0]])
    found = EntmaxLogitsProcessor()(TOKENS, scores)
    assert_close(found[:2].exp(), fenchel.entmax(scores[:2]))
    assert (found[0, 2:] == -torch.inf).all()
    assert found[2].isnan().all()
    warm = EntmaxLogitsProcessor(Gini(), temperature=3.0)(TOKENS, scores[:2])
    assert_close(warm.exp(), fenchel.sparsemax(scores[:2] / 3.0))
    assert warm[0, 3] == -torch.inf
    assert EntmaxLogitsProcessor()(TOKENS, scores.bfloat16()).dtype == torch.bfloat16
    for temperature in (0.0, torch.inf):
        with pytest.raises(ValueError, match="temperature must satisfy"):
            EntmaxLogitsProcessor(temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generate_draws_from_the_support_alone(temperature: float) -> None:
    processor = EntmaxLogitsProcessor(Tsallis(1.5), temperature=temperature)
    output = language_model().generate(
        **PROMPT, **KEEP, do_sample=True, num_return_sequences=8, logits_processor=[processor]
    )
    drawn = output.sequences[:, 4:]
    ended = torch.zeros(24, dtype=torch.bool)
    chosen_zeros = 0
    for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        p = fenchel.entmax(logits / temperature, 1.5)
        assert_close(scores.exp(), p, atol=1e-6, rtol=1e-5)
        assert (p.gather(1, drawn[:, step : step + 1]).squeeze(1) > 0)[~ended].all()
        chosen_zeros += int((p == 0).sum())
        ended |= drawn[:, step] == 2
    assert chosen_zeros > 0


def test_beam_search_adds_up_logarithms_of_entmax() -> None:
    model = language_model()
    output = model.generate(
        **PROMPT, **KEEP, do_sample=False, num_beams=3, length_penalty=0.0, logits_processor=[EntmaxLogitsProcessor()]
    )
    sequences = output.sequences
    mask = torch.cat([PROMPT["attention_mask"], torch.ones_like(sequences[:, 4:])], 1)
    with torch.no_grad():
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        p = fenchel.entmax(model(sequences, attention_mask=mask, position_ids=places).logits)
    for row in range(3):
        total = 0.0
        for t in range(4, sequences.shape[1]):
            total += p[row, t - 1, sequences[row, t]].log().item()
            if sequences[row, t] == 2:
                break
        assert_close(output.sequences_scores[row].item(), total, atol=1e-4, rtol=1e-4)


def test_beam_sampling_goes_on_when_beams_end() -> None:
    processor = EntmaxLogitsProcessor(Gini(), temperature=0.3)
    output = language_model().generate(**PROMPT, **KEEP, do_sample=True, num_beams=3, logits_processor=[processor])
    assert output.sequences.shape[0] == 3
    assert output.sequences_scores.isfinite().all()
    supports = torch.stack([(scores > -torch.inf).sum(-1) for scores in output.scores])
    assert (supports < 6).any()  # fewer words than beam sampling draws


# -- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [None, 13, torch.tensor(13)])
def test_the_loss_of_shannon_is_that_of_causal_models(count: float | Tensor | None) -> None:
    logits, labels = torch.randn(3, 7, 20, requires_grad=True), TOKENS.masked_fill(PADDING["left"] == 0, -100)
    expected = ForCausalLMLoss(logits, labels, vocab_size=20, num_items_in_batch=count)
    found = TrainerLoss(Shannon(), shift_labels=True)({"logits": logits}, labels, num_items_in_batch=count)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (found, expected)))


def test_the_loss_takes_what_models_return() -> None:
    logits, labels = torch.randn(3, 20), torch.tensor([4, -100, 5])
    loss = TrainerLoss(Gini(), shift_labels=False)
    expected = fenchel.sparsemax_loss(logits, labels)
    assert_close(loss((logits, "more"), labels), expected)
    assert_close(loss({"logits": logits}, labels), expected)
    assert loss({"logits": logits.bfloat16()}, labels).dtype == torch.float32
    smooth = TrainerLoss(Gini(), shift_labels=False, label_smoothing=0.1, ignore_index=5)
    expected = fenchel.sparsemax_loss(logits[:1], labels[:1], label_smoothing=0.1)
    assert_close(smooth({"logits": logits[[0, 2]]}, labels[[0, 2]]), expected)
    with pytest.raises(ValueError, match="labels must be in the batch"):
        loss({"logits": logits}, None)
    with pytest.raises(ValueError, match="to be shifted"):
        TrainerLoss(shift_labels=True)({"logits": logits}, labels)


def train(folder: Path, *, batch: int, accumulation: int) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    torch.manual_seed(0)
    model = language_model()
    rows = [
        {"input_ids": row, "labels": row.masked_fill(torch.arange(7) < cut, -100)} for cut, row in enumerate(TOKENS)
    ]
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    data = [*rows, rows[0]]
    trainer = Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, compute_loss_func=TrainerLoss(shift_labels=True)
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.evaluate()["eval_loss"] < logs[0]["loss"]
    return model.state_dict(), logs


@pytest.mark.slow
def test_a_trainer_learns_alike_in_one_step_and_in_two(tmp_path: Path) -> None:
    whole, logs = train(tmp_path, batch=4, accumulation=1)
    parts, logs_of_parts = train(tmp_path, batch=2, accumulation=2)
    assert logs[-1]["loss"] < logs[0]["loss"]
    for first, second in zip(logs, logs_of_parts, strict=True):
        assert_close(first["loss"], second["loss"], atol=1e-3, rtol=1e-3)
    assert_close(whole, parts, atol=1e-4, rtol=1e-4)
