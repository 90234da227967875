"""Models: what is learned at once is what is written step by step; padding, folders, every Ω."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fenchel import (
    Capped,
    Custom,
    Fused,
    Gini,
    Hard,
    KSubsets,
    Norm,
    Oscar,
    Regularizer,
    Shannon,
    SparseMAP,
    Tsallis,
    fy_loss,
)
from fenchel.seq2seq import (
    Batches,
    Pair,
    Recurrent,
    Seq2Seq,
    Training,
    Transformer,
    Vocabulary,
    beam_search,
    collate,
    force,
    read,
    saving,
    train,
)
from fenchel.streaming import Plan, using
from fenchel.structures import Subsets
from watch import Largest

LETTERS = Vocabulary("abcdef")
PAIRS = [Pair(tuple("abc"), tuple("fed")), Pair(tuple("a"), tuple("bb")), Pair(tuple("fedcba"), ())]


def recurrent(layers: int = 1, **omegas: Regularizer) -> Seq2Seq:
    return Recurrent(LETTERS, LETTERS, embedding=6, hidden=8, layers=layers, **omegas)


def transformer(layers: int = 2, **omegas: Regularizer) -> Seq2Seq:
    return Transformer(LETTERS, LETTERS, width=8, num_heads=2, layers=layers, inner=12, **omegas)


Maker = Callable[..., Seq2Seq]
makers = pytest.mark.parametrize("make", [recurrent, transformer])


@makers
@pytest.mark.parametrize("layers", [1, 2])
def test_step_by_step_a_model_writes_what_it_learned_at_once(make: Maker, layers: int) -> None:
    model = make(layers).double().eval()
    for pair in PAIRS:
        batch = collate([pair], LETTERS, LETTERS)
        hidden, attention = model.decode(model.encode(batch.source), batch.inputs)
        known = model.omega.argmax(model.output(hidden))[0]
        choices = force(model, pair.source, LETTERS.encode(pair.target))
        for row, choice in zip(known, choices, strict=True):
            assert dict(choice.alternatives) == pytest.approx(
                {token: p for token, p in enumerate(row.tolist()) if p}, abs=1e-9
            )
        torch.testing.assert_close(model.attend(pair.source, pair.target), attention[0])
        torch.testing.assert_close(attention.sum(-1), torch.ones_like(attention[..., 0]))


@makers
def test_padding_changes_nothing(make: Maker) -> None:
    model = make().double().eval()
    batch = collate(PAIRS, LETTERS, LETTERS)
    hidden, attention = model.decode(model.encode(batch.source), batch.inputs)
    for row, pair in enumerate(PAIRS):
        alone = collate([pair], LETTERS, LETTERS)
        own, weights = model.decode(model.encode(alone.source), alone.inputs)
        steps, length = own.shape[1], len(pair.source)
        torch.testing.assert_close(hidden[row, :steps], own[0])
        torch.testing.assert_close(attention[row, :steps, :length], weights[0])
        assert not attention[row, :, length:].any()
    together = beam_search(model, [pair.source for pair in PAIRS], beam_size=3, max_length=5)
    for pair, found in zip(PAIRS, together, strict=True):
        (alone,) = beam_search(model, [pair.source], beam_size=3, max_length=5)
        assert [each.tokens for each in alone.hypotheses] == [each.tokens for each in found.hypotheses]
        assert alone.best.probability == pytest.approx(found.best.probability)


def test_where_symbols_are_is_known_of_numbers_on_any_device() -> None:
    source = read(["ab", "a"], LETTERS).to(torch.device("meta"))  # as on a GPU: lengths stay behind
    assert source.mask.tolist() == [[True, True], [True, False]]
    model = transformer().to("meta")
    assert model(collate(PAIRS, LETTERS, LETTERS)).device.type == "meta"


@makers
def test_a_model_in_training_is_not_searched(make: Maker) -> None:
    with pytest.raises(RuntimeError, match=r"call model\.eval\(\)"):
        beam_search(make().train(), ["ab"])


@makers
def test_looking_at_attention_leaves_the_mode_as_it_was(make: Maker) -> None:
    model = make().train()
    model.attend("ab", "a")
    assert model.training
    with pytest.raises(ValueError, match="at least one symbol"):
        model.attend("", "a")
    assert model.training


@makers
def test_reordered_states_go_on_where_they_were(make: Maker) -> None:
    model = make().double().eval()
    state = model.start([pair.source for pair in PAIRS])
    _, state = model.step(torch.full((3,), model.begin), state)
    chosen = model.reorder(state, torch.tensor([2, 0, 2]))
    straight, _ = model.step(torch.tensor([2, 3, 4]), state)
    crossed, _ = model.step(torch.tensor([4, 2, 5]), chosen)
    torch.testing.assert_close(crossed[:2], straight[[2, 0]])
    assert not torch.equal(crossed[2], straight[2])


@makers
@pytest.mark.parametrize(
    "omega",
    [Shannon(), Tsallis(1.3), Gini(), Tsallis(2.5), Norm(2.0), 0.5 * Gini(), Tsallis(1.5, learnable=True)],
    ids=str,
)
def test_every_regularizer_trains_attention_and_output(make: Maker, omega: Regularizer) -> None:
    model = make(attention=omega, output=omega)
    batch = collate(PAIRS, LETTERS, LETTERS)
    model(batch).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None or not parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    if isinstance(omega, Tsallis) and omega.bounds is not None:
        assert model.omega.raw_alpha.grad.abs() > 0


@pytest.mark.parametrize("omega", [Shannon(), Tsallis(1.5), Gini(), Tsallis(3.0), Norm(2.0)], ids=str)
def test_the_loss_is_the_mean_over_symbols_of_the_fenchel_young_loss(omega: Regularizer) -> None:
    model = recurrent(output=omega).double().eval()
    batch = collate(PAIRS, LETTERS, LETTERS)
    hidden, _ = model.decode(model.encode(batch.source), batch.inputs)
    rows = [
        fy_loss(model.output(hidden[row, step]), target, omega)
        for row, targets in enumerate(batch.target)
        for step, target in enumerate(targets)
        if target >= 0
    ]
    torch.testing.assert_close(model(batch), torch.stack(rows).mean())


def test_softmax_output_is_cross_entropy() -> None:
    model = recurrent(output=Shannon()).double().eval()
    batch = collate(PAIRS, LETTERS, LETTERS)
    hidden, _ = model.decode(model.encode(batch.source), batch.inputs)
    expected = nn.functional.cross_entropy(model.output(hidden).flatten(0, 1), batch.target.flatten())
    torch.testing.assert_close(model(batch), expected)


def test_every_layer_of_a_transformer_learns_its_own_alphas() -> None:
    model = transformer(attention=Tsallis(1.5, learnable=True, shape=(2, 1, 1)))
    model(collate(PAIRS, LETTERS, LETTERS)).backward()
    learned = [p for name, p in model.named_parameters() if "raw_alpha" in name and p.requires_grad]
    assert len(learned) == 6  # two encoder layers, two decoder layers with two attentions each
    assert all(each.shape == (2, 1, 1) and each.grad is not None for each in learned)


@makers
@pytest.mark.parametrize(
    "omega",
    [
        Hard(),
        Norm(3.0),
        2.0 * Tsallis(1.5),
        Tsallis(1.2, learnable=True),
        Fused(0.2),
        Oscar(torch.tensor(0.1)),
        Capped(1.0, Shannon()),
        KSubsets(1),
        SparseMAP(Subsets(1)),
    ],
    ids=lambda omega: str(omega).replace("\n", ""),
)
def test_a_folder_gives_the_model_back(make: Maker, omega: Regularizer, tmp_path: Path) -> None:
    output = Gini() if isinstance(omega, Capped | SparseMAP) else omega  # these have no loss of class indices
    model = make(attention=omega, output=output).eval()
    model.save(tmp_path / "deep" / "folder")
    loaded = Seq2Seq.load(tmp_path / "deep" / "folder")
    assert type(loaded) is type(model)
    assert not loaded.training
    assert str(loaded) == str(model)
    batch = collate(PAIRS, LETTERS, LETTERS)
    assert torch.equal(loaded(batch), model(batch))


@makers
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_precision_trains_searches_and_is_kept_by_a_folder(
    make: Maker, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make().to(dtype)
    model(collate(PAIRS, LETTERS, LETTERS)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.eval().save(tmp_path)
    loaded = Seq2Seq.load(tmp_path)
    for own, given in zip(loaded.parameters(), model.parameters(), strict=True):
        assert own.dtype == dtype
        assert torch.equal(own, given)
    assert beam_search(loaded, ["abc"], beam_size=2, max_length=3) == beam_search(
        model, ["abc"], beam_size=2, max_length=3
    )


@makers
@pytest.mark.parametrize("where", ["attention", "output"])
def test_what_a_file_cannot_hold_is_refused_before_anything_is_written(make: Maker, where: str, tmp_path: Path) -> None:
    model = make(**{where: Custom(lambda p: 0.5 * (p * p).sum(-1))})
    with pytest.raises(ValueError, match=rf"{where} is Custom.*which a file cannot hold; save model\.state_dict\(\)"):
        model.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    with pytest.raises(ValueError, match="which a file cannot hold"):
        train(model, PAIRS, PAIRS, training=Training(epochs=1), folder=tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_folder_of_the_first_version_is_loaded(tmp_path: Path) -> None:
    """It told a learned alpha by its shape, had None for other Ω, and kept a copy that no layer used."""
    model = transformer(attention=Tsallis(1.5, learnable=True)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "raw_alpha" in name:
                parameter.normal_()
    old = {"kind": "Tsallis", "alpha": 1.5, "bounds": [1.0, 2.0], "shape": []}
    tensors = {**model.state_dict(), "attention_omega.raw_alpha": torch.tensor(0.0)}
    saving.save(tmp_path, model.settings() | {"attention": old}, tensors)
    batch = collate(PAIRS, LETTERS, LETTERS)
    assert torch.equal(Seq2Seq.load(tmp_path)(batch), model(batch))
    saving.save(tmp_path, model.settings() | {"attention": None}, tensors)
    with pytest.raises(ValueError, match="load with attention="):
        Seq2Seq.load(tmp_path)
    loaded = Seq2Seq.load(tmp_path, attention=Tsallis(1.5, learnable=True))
    assert torch.equal(loaded(batch), model(batch))


def test_the_attention_of_a_transformer_is_the_one_that_is_trained() -> None:
    model = transformer(attention=Tsallis(1.5, learnable=True, shape=(2, 1, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(collate(PAIRS, LETTERS, LETTERS)).backward()
    optimizer.step()
    assert (model.attention_omega.alpha != 1.5).all()
    assert model.attention_omega is model.decoder[-1].cross.omega
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(name.startswith("attention_omega") for name in model.state_dict())


def test_a_folder_without_a_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.json"):
        Seq2Seq.load(tmp_path)
    recurrent().save(tmp_path)
    with pytest.raises(ValueError, match="has a Recurrent"):
        Transformer.load(tmp_path)


def test_a_model_that_is_being_saved_is_whole_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recurrent().eval()
    before.save(tmp_path)
    library = saving.safetensors()

    def cut_short(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(library.save(tensors)[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "save_file", cut_short)
    with pytest.raises(KeyboardInterrupt):
        recurrent().save(tmp_path)
    assert torch.equal(Seq2Seq.load(tmp_path).output.weight, before.output.weight)


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{"])
def test_a_broken_file_is_told_by_its_name(name: str, content: bytes, tmp_path: Path) -> None:
    recurrent().save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is not a file of a saved model"):
        Seq2Seq.load(tmp_path)


def test_bad_sizes_and_empty_sources_are_reported() -> None:
    with pytest.raises(ValueError, match="hidden must be even"):
        Recurrent(LETTERS, LETTERS, hidden=7)
    with pytest.raises(ValueError, match="width must be a multiple of num_heads, 4, got 10"):
        Transformer(LETTERS, LETTERS, width=10)
    for kind in (Recurrent, Transformer):
        with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
            kind(LETTERS, LETTERS, layers=0)
        for dropout in (1.0, -0.1):
            with pytest.raises(ValueError, match=f"dropout must satisfy 0 <= dropout < 1, got {dropout}"):
                kind(LETTERS, LETTERS, dropout=dropout)
        for output in (KSubsets(2), 0.5 * KSubsets(2), SparseMAP(Subsets(2))):
            with pytest.raises(ValueError, match="output must be a choice of one symbol"):
                kind(LETTERS, LETTERS, output=output)
    with pytest.raises(TypeError, match=r"sources must be a list of sequences, such as \['ab'\]"):
        read("ab", LETTERS)
    with pytest.raises(ValueError, match="at least one symbol; number 1"):
        read(["a", ""], LETTERS)
    for make in (read, lambda rows, letters: collate(rows, letters, letters)):
        with pytest.raises(ValueError, match="a batch must have at least one"):
            make([], LETTERS)
    with pytest.raises(ValueError, match="'a' occurs twice"):
        Vocabulary("aba")
    with pytest.raises(ValueError, match=r"\[0, 7\], got 8"):
        LETTERS.name(8)


def test_batches_hold_every_pair_once_in_an_order_of_their_own() -> None:
    pairs = [Pair(tuple("a" * (1 + n % 5)), tuple("b" * (n % 7))) for n in range(50)]
    batches = Batches(pairs, LETTERS, LETTERS, size=8, seed=1)
    epochs = [[batch.target.tolist() for batch in batches.epoch(number)] for number in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert len(epochs[0]) == len(batches) == 7
    for epoch in (*epochs, [batch.target.tolist() for batch in batches]):
        rows = sorted(tuple(token for token in row if token >= 0) for batch in epoch for row in batch)
        assert rows == sorted((3,) * (n % 7) + (0,) for n in range(50))


def test_a_vocabulary_keeps_the_most_frequent() -> None:
    words = [["the", "dog"], ["the", "cat"], ["a", "dog"]]
    assert Vocabulary.of(words, min_count=2).symbols == ("dog", "the")
    assert Vocabulary.of(words, max_size=3).symbols == ("dog", "the", "a")
    assert "cat" in Vocabulary.of(words)


@pytest.mark.parametrize("change", [lambda s: s.pop("source"), lambda s: s["sizes"].update(hidden=32)])
def test_a_folder_without_a_whole_model_is_reported(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    recurrent().save(tmp_path)
    settings = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    change(settings)
    (tmp_path / "model.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match="does not have a whole Recurrent"):
        Seq2Seq.load(tmp_path)


def test_training_a_transformer_makes_no_matrix_of_weights() -> None:
    model, length = transformer(), 700
    pair = Pair(tuple("abcdef"[i % 6] for i in range(length)), tuple("abcdef"[i % 5] for i in range(length - 1)))
    batch = collate([pair, Pair(pair.source[:80], pair.target[:500])], LETTERS, LETTERS)
    model.eval()  # without dropout
    with using(Plan("dense")), Largest() as seen:
        expected = model(batch)
    assert seen.elements >= 2 * 2 * length * length
    with using(Plan("supports", rows=64)), Largest(kernels=True) as seen:
        loss = model(batch)
        loss.backward()
    assert seen.elements <= 2 * 64 * length
    assert torch.allclose(loss, expected, atol=1e-5)
    weights = model.decode(model.encode(batch.source), batch.inputs)[1]
    assert weights.shape == (2, length, length)
