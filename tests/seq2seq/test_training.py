"""Training: it learns, it stops, and cut short it goes on to the same result."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from fenchel import Tsallis
from fenchel.seq2seq import (
    Batches,
    Pair,
    Recurrent,
    Seq2Seq,
    Training,
    Validation,
    Vocabulary,
    beam_search,
    force,
    train,
    validate,
)
from fenchel.seq2seq.checkpoints import DivergedError

LETTERS = Vocabulary("abc")
WORDS = [x + y + z for x in "abc" for y in "abc" for z in "abc"]
PAIRS = [Pair(tuple(word), tuple(word[::-1])) for word in WORDS]


def small(seed: int = 0) -> Recurrent:
    torch.manual_seed(seed)
    return Recurrent(
        LETTERS, LETTERS, embedding=8, hidden=16, layers=1, dropout=0.1, output=Tsallis(1.5, learnable=True)
    )


class Killed(Exception):
    pass


def kill_at(fraction: float) -> Callable[..., None]:
    def progress(part: float, note: str = "") -> None:
        if part > fraction:
            raise Killed

    return progress


def test_a_run_that_was_killed_ends_where_an_uninterrupted_one_ends(tmp_path: Path) -> None:
    how = Training(epochs=6, batch=4, rate=1e-2, optimizer="adamw", weight_decay=1e-3, seed=3)
    straight = small()
    history = train(straight, PAIRS, PAIRS, training=how)
    for moment in (0.45, 0.8):  # in the middle of an epoch, twice
        with pytest.raises(Killed):
            train(small(), PAIRS, PAIRS, training=how, folder=tmp_path, progress=kill_at(moment))
    resumed = small(seed=9)  # whatever it starts with
    continued = train(resumed, PAIRS, PAIRS, training=how, folder=tmp_path)
    assert [each.scores for each in continued.validations] == [each.scores for each in history.validations]
    assert [each.rate for each in continued.validations] == [each.rate for each in history.validations]
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    saved = Seq2Seq.load(tmp_path)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name


def test_a_finished_run_is_not_run_again_but_may_go_on_for_longer(tmp_path: Path) -> None:
    how = Training(epochs=2, batch=8)
    first = train(small(), PAIRS, PAIRS, training=how, folder=tmp_path)
    told: list[float] = []
    again = train(
        small(1), PAIRS, PAIRS, training=how, folder=tmp_path, progress=lambda part, note="": told.append(part)
    )
    assert again == first
    assert not told
    longer = train(small(), PAIRS, PAIRS, training=Training(epochs=3, batch=8), folder=tmp_path)
    assert longer.validations[:2] == first.validations
    assert len(longer.validations) == 3


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    train(small(), PAIRS, PAIRS, training=Training(epochs=1), folder=tmp_path)
    with pytest.raises(ValueError, match=r"another run: its training has rate 0\.001, this one 0\.5"):
        train(small(), PAIRS, PAIRS, training=Training(epochs=1, rate=0.5), folder=tmp_path)
    other = Recurrent(LETTERS, LETTERS, embedding=8, hidden=18, layers=1)
    with pytest.raises(ValueError, match="its model has"):
        train(other, PAIRS, PAIRS, training=Training(epochs=1), folder=tmp_path)
    with pytest.raises(ValueError, match="its data has pairs"):
        train(small(), PAIRS[1:], PAIRS, training=Training(epochs=1), folder=tmp_path)


def test_a_broken_checkpoint_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is not a checkpoint"):
        train(small(), PAIRS, PAIRS, training=Training(epochs=1), folder=tmp_path)
    small().save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "checkpoint.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is not a checkpoint"):
        train(small(), PAIRS, PAIRS, training=Training(epochs=1), folder=tmp_path)


def test_a_folder_that_cannot_be_is_told_before_the_first_epoch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    told: list[float] = []
    with pytest.raises(FileExistsError):
        train(
            small(),
            PAIRS,
            PAIRS,
            training=Training(epochs=1),
            folder=tmp_path / "file",
            progress=lambda part, note="": told.append(part),
        )
    assert not told


def test_it_learns_to_reverse_and_tells_how_it_goes() -> None:
    model, notes = small(), []
    how = Training(epochs=60, batch=9, rate=2e-2, patience=60)
    history = train(model, PAIRS, PAIRS, training=how, progress=lambda part, note="": notes.append(note))
    assert history.best.scores.accuracy > 0.9
    scores = validate(model, Batches(PAIRS, LETTERS, LETTERS))
    assert scores.accuracy == history.best.scores.accuracy  # the best parameters are back
    found = beam_search(model, [pair.source for pair in PAIRS], beam_size=1, max_length=60)
    written = [LETTERS.decode(each.best.tokens) == pair.target for each, pair in zip(found, PAIRS, strict=True)]
    assert sum(written) / len(written) == pytest.approx(scores.accuracy)  # greedy decoding, told by one pass
    assert "tokens/s" in notes[-1]
    assert "accuracy" in notes[-1]
    assert not model.training


def test_the_rate_is_halved_when_the_loss_rises_and_patience_ends() -> None:
    model = small()
    history = train(model, PAIRS, PAIRS, training=Training(epochs=40, batch=27, rate=1.0, patience=3))  # far too fast
    assert len(history.validations) < 40
    losses = [each.scores.loss for each in history.validations]
    rates = [each.rate for each in history.validations]
    assert rates[0] == 1.0
    for number in range(1, len(rates)):
        rose = number > 1 and losses[number - 1] > losses[number - 2]
        assert rates[number] == rates[number - 1] / (2 if rose else 1)
    best = max(range(len(losses)), key=lambda n: (history.validations[n].scores.accuracy, -losses[n]))
    assert best == len(losses) - 1 - 3


@pytest.mark.parametrize("criterion", ["accuracy", "token_accuracy"])
def test_the_best_model_is_that_of_the_criterion(criterion: Literal["accuracy", "token_accuracy"]) -> None:
    model = small()
    how = Training(epochs=12, batch=9, rate=2e-2, criterion=criterion, patience=12)
    history = train(model, PAIRS, PAIRS, training=how)
    scores = [each.scores for each in history.validations]
    assert getattr(history.best.scores, criterion) == max(getattr(each, criterion) for each in scores)
    found = validate(model, Batches(PAIRS, LETTERS, LETTERS))
    assert found.accuracy == history.best.scores.accuracy
    assert found.token_accuracy == history.best.scores.token_accuracy


def test_token_accuracy_counts_symbols_and_ends() -> None:
    model = small().eval()
    right = total = 0
    for pair in PAIRS:
        for choice in force(model, pair.source, LETTERS.encode(pair.target)):
            right += choice.token == choice.alternatives[0][0]
            total += 1
    assert validate(model, Batches(PAIRS, LETTERS, LETTERS)).token_accuracy == pytest.approx(right / total)


def test_the_global_generator_is_left_alone() -> None:
    model = small()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    train(model, PAIRS, PAIRS, training=Training(epochs=1))
    assert torch.equal(torch.rand(1), expected)


def test_bad_settings_are_reported() -> None:
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        Training(epochs=0)
    with pytest.raises(ValueError, match="optimizer must be"):
        Training(optimizer="sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="criterion must be"):
        Training(criterion="bleu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rate must satisfy 0 < rate < inf"):
        Training(rate=0.0)
    with pytest.raises(TypeError, match="rate must be a number, got str"):
        Training(rate="1e-3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="epochs must be an int, got float"):
        Training(epochs=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 0 and 27"):
        train(small(), [], PAIRS)
    with pytest.raises(ValueError, match="cooling must be between 0 and epochs, 3, got 4"):
        Training(epochs=3, cooling=4)
    with pytest.raises(ValueError, match="parts must be between 1 and 27, the number of pairs, got 28"):
        train(small(), PAIRS, PAIRS, training=Training(epochs=1, parts=28))


def test_parts_of_an_epoch_go_once_through_all_pairs_and_anew_the_next_time() -> None:
    batches = Batches(PAIRS, LETTERS, LETTERS, size=4, seed=1, parts=4)

    def words(number: int) -> list[str]:
        return [
            "".join(LETTERS.decode(row.tolist())) for batch in batches.epoch(number) for row in batch.source.numbers
        ]

    first, second = ([words(4 * turn + part) for part in range(4)] for turn in range(2))
    for turn in (first, second):
        assert sorted(word for part in turn for word in part) == sorted(WORDS)
        assert [len(part) for part in turn] == [7, 7, 7, 6]
    assert first != second
    assert words(2) == first[2]


def test_a_run_cools_down_at_its_end_and_is_watched(tmp_path: Path) -> None:
    how = Training(epochs=5, parts=2, batch=9, rate=1e-3, cooling=3)
    seen: list[tuple[int, float]] = []
    model = small()

    def watch(validation: Validation) -> None:
        assert validate(model, Batches(PAIRS, LETTERS, LETTERS, size=18)) == validation.scores
        seen.append((validation.epoch, validation.rate))

    train(model, PAIRS, PAIRS, training=how, folder=tmp_path, watch=watch)
    assert seen == [(1, 1e-3), (2, 1e-3), (3, 5e-4), (4, 2.5e-4), (5, 1.25e-4)]
    with pytest.raises(ValueError, match="its training has epochs 5, this one 6"):  # it would have cooled later
        train(small(), PAIRS, PAIRS, training=replace(how, epochs=6), folder=tmp_path)


def test_a_loss_that_is_not_finite_stops_and_leaves_the_best_before(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="so training stopped"):
        train(small(), PAIRS, PAIRS, training=Training(epochs=3, batch=4, rate=1e38), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    model, how = small(), Training(epochs=4, batch=9)

    def spoil(validation: Validation) -> None:
        if validation.epoch == 2:  # saved already: the next step is what diverges
            model.source_embedding.weight.data[3] = torch.inf

    with pytest.raises(DivergedError, match="training loss is nan"):
        train(model, PAIRS, PAIRS, training=how, folder=tmp_path, watch=spoil)
    straight = small()
    train(straight, PAIRS, PAIRS, training=replace(how, epochs=2))
    saved = Seq2Seq.load(tmp_path).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in straight.state_dict().items())


def test_parameters_that_are_not_finite_are_never_the_best(tmp_path: Path) -> None:
    model = small()

    def spoil(part: float, note: str = "") -> None:
        if part == 1:  # after the last step, where no loss would tell
            model.target_embedding.weight.data[1] = torch.nan

    with pytest.raises(DivergedError, match=r"target_embedding\.weight is no longer finite"):
        train(model, PAIRS, PAIRS, training=Training(epochs=1, batch=9), folder=tmp_path, progress=spoil)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"rate": torch.inf}, {"rate": torch.nan}, {"rate": -1.0}, {"clip": torch.nan}])
def test_rates_that_are_none_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must satisfy 0 < "):
        Training(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_decay must satisfy"):
        Training(weight_decay=torch.inf)


def test_a_bar_is_drawn_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    train(small(), PAIRS, PAIRS, training=Training(epochs=1, batch=9), progress=True)
    told = capsys.readouterr()
    assert not told.out
    assert told.err.startswith("training")
    assert "100%" in told.err
    assert "epoch 1, loss" in told.err
