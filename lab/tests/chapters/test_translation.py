"""Translation: counts, scores and proofs of models on a miniature; sentences to sub-words and back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fenchel import Tsallis
from fenchel.seq2seq import STOP, Choice, Pair, Recurrent, Training, Vocabulary, force
from fenchel_lab.chapters import translation
from fenchel_lab.chapters.translation import FULL, SCALED, TOY
from fenchel_lab.data import multi30k
from fenchel_lab.drawing import hypotheses
from fenchel_lab.models import translating
from fenchel_lab.models.translating import (
    ALPHAS,
    LONGEST,
    Dense,
    bleu,
    captions,
    empty_is_best,
    greedily,
    joined,
    length,
    made_up,
    nonzeros,
    searched,
)
from fenchel_lab.report import Context, Run, find, run
from fenchel_lab.report.records import Records

TINY = replace(TOY, how=Training(epochs=1, batch=16, criterion="token_accuracy"), width=4, pieces=60)


@pytest.mark.slow
def test_sparse_models_have_few_candidates_and_exact_beams(chapter: Callable[[str], Run]) -> None:
    result = chapter("translation").result
    assert result is not None
    scores, counts, searches, variants, _ = (table.rows for table in result.tables)
    assert [row[0] for row in scores] == list(ALPHAS)
    assert all(float(str(row[column])) > 40 for row in scores for column in (4, 5))
    exact = [float(str(row[6])) for row in scores]
    assert exact[0] == 0
    assert min(exact[1:]) > 0
    assert all(float(str(row[7])) >= float(str(row[6])) for row in scores)
    attended, possible = ([float(str(row[column])) for row in counts[:3]] for column in (2, 4))
    corpus = made_up(*translation.TOY_SENTENCES)
    assert possible[0] == len(Vocabulary.of(pair.target for pair in corpus.train))
    assert all(1 <= count < possible[0] / 4 for count in possible[1:])
    assert all(1 <= count < attended[0] / 2 for count in attended[1:])
    assert all(float(str(row[3])) > 0 for row in searches)
    assert [row[0] for row in variants] == [*ALPHAS, "sparsemax with fertility", "references"]
    heat = result.figures[1].drawing
    shaded = [int(axes.images[0].get_array().count()) for axes in heat.axes]  # blank cells are masked
    cells = len(heat.axes[0].get_xticklabels()) * len(heat.axes[0].get_yticklabels())
    assert shaded[0] == cells  # softmax looks at everything
    assert all(count < cells for count in shaded[1:])


def test_it_is_no_chapter_of_the_tour() -> None:
    assert not find("translation").tour
    assert find("inflection").tour


def test_captions_of_a_folder_are_sub_words_and_every_kind_of_model_is_run_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("sentencepiece")
    corpus = made_up(40, 10, 10)
    parts = {"train": corpus.train, "val": corpus.validation, "test": corpus.test}

    def load(split: multi30k.Split, folder: Path) -> list[tuple[str, str]]:
        return [(joined(pair.source), joined(pair.target).capitalize()) for pair in parts[split]]

    monkeypatch.setattr(multi30k, "load", load)
    monkeypatch.setattr(translation, "SCALED", TINY)
    found = captions(tmp_path, 60)
    assert [joined(pair.target) for pair in found.test] == [text.lower() for text in found.references]
    assert any(len(pair.source) > len(joined(pair.source).split()) for pair in found.test)  # words are cut
    folders = {"records": Records(tmp_path / "runs"), "checkpoints": tmp_path / "checkpoints"}
    first = run(find("translation"), Context(data=tmp_path, **folders))
    assert first.result is not None, first.error
    assert Records(tmp_path / "runs").count == 3 + 4 + 2 + 1
    assert [row[0] for row in first.result.tables[3].rows[:-1]] == [
        *ALPHAS,
        *translating.ATTENTIONS,
        *translating.COMBINED,
    ]
    monkeypatch.setattr(translating, "fitted", None)  # nothing is trained again
    again = run(find("translation"), Context(data=tmp_path, **folders))
    assert again.result is not None, again.error
    assert again.result.tables == first.result.tables


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


def test_the_empty_string_is_compared_with_what_was_found() -> None:
    torch.manual_seed(0)
    letters = Vocabulary("abc")
    model = Recurrent(letters, letters, embedding=8, hidden=8, layers=1, output=Tsallis(1.0)).eval()
    sources = ["abc", "c", "bacab"]
    with torch.no_grad():
        model.output.bias[STOP] = -4.0
    beams, _ = searched(model, sources, 2)
    shares = []
    for source, beam in zip(sources, beams, strict=True):
        (end,) = force(model, source, [])
        shares.append(bool(beam.best.tokens) and end.probability > beam.best.probability)
    assert empty_is_best(model, sources, beams) == pytest.approx(sum(shares) / 3)


def test_bleu_is_blind_to_case() -> None:
    references = ["A boy's T-shirt, red.", "Two dogs run; a man (old) waits!", 'He said "no".']
    assert bleu([text.lower() for text in references], references) == pytest.approx(100)
    assert length(["one two", "three."], ["one", "two three four"]) == pytest.approx(4 / 4)
    assert bleu(["the cat is here now", "we see no man", "she left"], references) < 10


def test_made_up_sentences_are_the_same_every_time_and_some_words_have_two_translations() -> None:
    corpus = made_up(100, 10, 20)
    assert corpus == made_up(100, 10, 20)
    assert list(map(len, (corpus.train, corpus.validation, corpus.test, corpus.references))) == [100, 10, 20, 20]
    after = {pair.target[1] for pair in corpus.train if pair.source[1] == "▁kleiner"}
    assert after == {"▁small", "▁little"}


def test_the_full_protocol_is_larger() -> None:
    assert FULL.width > SCALED.width > TOY.width
    assert FULL.how.epochs > SCALED.how.epochs


def test_steps_list_what_was_possible_besides() -> None:
    vocabulary = Vocabulary(["on", "at", "by"])
    choices = [Choice(2, 0.6, ((2, 0.6), (3, 0.396), (4, 0.004))), Choice(STOP, 1.0, ((STOP, 1.0),))]
    (axes,) = hypotheses.steps(choices, vocabulary).axes
    assert [text.get_text() for text in axes.texts] == ["on", "at 40, by <1", "▪", ""]
    assert [round(bar.get_width(), 3) for bar in axes.patches] == [1, 0.6, 1, 1]
