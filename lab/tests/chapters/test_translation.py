"""Translation: counts, scores and proofs of the three models on a miniature; sentences to words and back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fenchel import Tsallis
from fenchel.seq2seq import STOP, Choice, Pair, Recurrent, Vocabulary, force
from fenchel_lab.chapters import translation
from fenchel_lab.chapters.translation import (
    FULL,
    LONGEST,
    SCALED,
    TOY,
    Dense,
    bleu,
    captions,
    greedily,
    joined,
    length,
    made_up,
    nonzeros,
    words,
)
from fenchel_lab.data import multi30k
from fenchel_lab.drawing import hypotheses
from fenchel_lab.report import Context, Run, find, run


def number(cell: object) -> float:
    return float(str(cell).rstrip(" %").replace(",", ""))


@pytest.mark.slow
def test_sparse_models_have_few_candidates_and_exact_beams(chapter: Callable[[str], Run]) -> None:
    result = chapter("translation").result
    assert result is not None
    scores, counts, _ = (table.rows for table in result.tables)
    assert [row[0] for row in scores] == ["softmax", "1.5-entmax", "sparsemax"]
    assert all(number(row[column]) > 40 for row in scores for column in (2, 4))
    exact = [number(row[6]) for row in scores]
    assert exact[0] == 0
    assert min(exact[1:]) > 0
    assert all(number(row[7]) >= number(row[6]) for row in scores)
    attended, possible = ([number(row[column]) for row in counts] for column in (2, 4))
    symbols = len(Vocabulary.of(pair.target for pair in made_up(*translation.TOY_SENTENCES).train))
    assert possible[0] == symbols
    assert all(1 <= count < possible[0] / 4 for count in possible[1:])
    assert all(1 <= count < attended[0] / 2 for count in attended[1:])


@pytest.mark.slow
def test_the_drawn_sentence_is_the_same_in_both_figures(chapter: Callable[[str], Run]) -> None:
    result = chapter("translation").result
    assert result is not None
    heat, listed = (figure.drawing for figure in result.figures)
    rows = [label.get_text() for label in heat.axes[0].get_yticklabels()]
    assert len(heat.axes) == 3
    assert [text.get_text() for text in listed.axes[0].texts[::2]] == rows
    shaded = [int(axes.images[0].get_array().count()) for axes in heat.axes]  # blank cells are masked
    columns = len(heat.axes[0].get_xticklabels())
    assert shaded[0] == columns * len(rows)  # softmax looks at everything
    assert all(len(rows) <= count < columns * len(rows) for count in shaded[1:])


def test_it_is_no_chapter_of_the_tour() -> None:
    assert not find("translation").tour
    assert find("inflection").tour


@pytest.mark.parametrize("full", [False, True])
def test_captions_of_a_folder_long_ones_too_if_asked(
    full: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corpus = made_up(30, 10, 10)
    parts = {"train": corpus.train, "val": corpus.validation, "test": corpus.test}

    def load(split: str, folder: Path) -> list[tuple[str, str]]:
        assert folder == tmp_path
        return [(joined(pair.source), joined(pair.target)) for pair in parts[split]]

    monkeypatch.setattr(multi30k, "load", load)
    short = [pair for pair in corpus.test if len(pair.source) <= 7]
    assert 0 < len(short) < 10
    found = captions(tmp_path, 7)
    assert found.test == short
    assert found.references == [joined(pair.target) for pair in short]
    how = translation.Training(epochs=1, batch=16)
    monkeypatch.setattr(translation, "SCALED", translation.Size(4, 4, 1, how, longest=7))
    monkeypatch.setattr(translation, "FULL", translation.Size(4, 4, 1, how, seeds=2))
    outcome = run(find("translation"), Context(data=tmp_path, full=full))
    assert outcome.error is None, outcome.error
    assert outcome.result is not None
    assert ("scaled down" in outcome.result.summary) is not full
    assert all(("±" in str(row[2])) is full for row in outcome.result.tables[0].rows)


def test_torchs_loss_is_that_of_softmax() -> None:
    letters = Vocabulary("abc")
    sizes = {"embedding": 4, "hidden": 4, "layers": 1, "dropout": 0.0}
    options = {"attention": Tsallis(1.0), "output": Tsallis(1.0), **sizes}
    dense, model = (kind(letters, letters, **options) for kind in (Dense, Recurrent))
    model.load_state_dict(dense.state_dict())
    hidden, targets = torch.randn(2, 3, 4), torch.tensor([[1, 2, -100], [4, 0, 3]])
    for reduction in ("mean", "sum"):
        found, wanted = (each.loss(hidden, targets, reduction=reduction) for each in (dense, model))
        torch.testing.assert_close(found, wanted)


def test_nonzeros_are_those_of_every_step_of_every_pair() -> None:
    torch.manual_seed(0)
    letters = Vocabulary("abc")
    model = Recurrent(
        letters, letters, embedding=8, hidden=8, layers=1, attention=Tsallis(2.0), output=Tsallis(2.0)
    ).eval()
    with torch.no_grad():
        model.output.weight *= 9
        model.key.weight *= 9
    pairs = [Pair(tuple("abc"), tuple("ab")), Pair(tuple("cabba"), tuple("cabc"))]
    choices = [choice for pair in pairs for choice in force(model, pair.source, letters.encode(pair.target))]
    attended = [int(row.count_nonzero()) for pair in pairs for row in model.attend(pair.source, pair.target)]
    means = sum(attended) / 8, sum(len(choice.alternatives) for choice in choices) / 8
    assert nonzeros(model, pairs) == pytest.approx(means)


def test_greedy_decoding_takes_the_first_of_every_steps_candidates() -> None:
    torch.manual_seed(0)
    letters = Vocabulary("abc")
    model = Recurrent(
        letters, letters, embedding=8, hidden=8, layers=1, attention=Tsallis(1.0), output=Tsallis(1.0)
    ).eval()
    with torch.no_grad():
        model.output.weight *= 9
    sources = ["abc", "c", "bacab"]
    found = greedily(model, sources)
    assert min(map(len, found)) < LONGEST
    for source, tokens in zip(sources, found, strict=True):
        choices = force(model, source, tokens)[:LONGEST]
        assert all(choice.token == choice.alternatives[0][0] for choice in choices)


def test_bleu_is_blind_to_case_and_whole_for_what_is_joined_again() -> None:
    references = ["A boy's T-shirt, red.", "Two dogs run; a man (old) waits!", 'He said "no".']
    assert bleu([joined(words(text)) for text in references], references) == pytest.approx(100)
    assert length(["one two", "three."], ["one", "two three four"]) == pytest.approx(4 / 4)
    assert bleu(["the cat is here now", "we see no man", "she left"], references) < 10


def test_made_up_sentences_are_the_same_every_time_and_some_words_have_two_translations() -> None:
    corpus = made_up(100, 10, 20)
    assert corpus == made_up(100, 10, 20)
    assert list(map(len, (corpus.train, corpus.validation, corpus.test, corpus.references))) == [100, 10, 20, 20]
    after = {pair.target[1] for pair in corpus.train if pair.source[1] == "kleiner"}
    assert after == {"small", "little"}


def test_the_full_protocol_is_larger() -> None:
    assert FULL.hidden > SCALED.hidden > TOY.hidden
    assert FULL.how.epochs > SCALED.how.epochs
    assert FULL.longest is None
    assert FULL.seeds == 3


def test_steps_list_what_was_possible_besides() -> None:
    vocabulary = Vocabulary(["on", "at", "by"])
    choices = [Choice(2, 0.6, ((2, 0.6), (3, 0.396), (4, 0.004))), Choice(STOP, 1.0, ((STOP, 1.0),))]
    (axes,) = hypotheses.steps(choices, vocabulary).axes
    assert [text.get_text() for text in axes.texts] == ["on", "at 40, by <1", "▪", ""]
    assert [round(bar.get_width(), 3) for bar in axes.patches] == [1, 0.6, 1, 1]
