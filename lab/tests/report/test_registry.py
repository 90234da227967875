"""The registry: discovery, order, names."""

import sys
from pathlib import Path

import pytest
import torch

from fenchel_lab import chapters
from fenchel_lab.report import Context, Result, Study, UnknownStudyError, find, registry, studies, study

CHAPTER = """
from fenchel_lab.report import Context, Result, study

@study("An extra chapter", source="Somebody (2020), figure 1", order=0.5)
def extra_chapter(context: Context) -> Result:
    return Result("Found.")
"""


def test_the_first_chapters_come_in_their_order() -> None:
    names = [each.name for each in studies()]
    assert [name for name in names if name in ("paths", "saturation", "two_classes")] == [
        "paths",
        "saturation",
        "two_classes",
    ]


def test_the_tour_begins_with_six_of_several_themes() -> None:
    toured = [each for each in studies() if each.tour]
    assert [each.name for each in toured[:6]] == [
        "paths",
        "basins",
        "tree_budgets",
        "hidden_alignments",
        "alignments_of_series",
        "inflection",
    ]
    assert all(each.theme for each in studies())


@pytest.mark.parametrize("name", [each.name for each in studies()])
def test_the_code_of_every_chapter_runs_and_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = find(name).code
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(compile(lines, f"the code of {name}", "exec"), {"__name__": "copied"})
    assert capsys.readouterr().out
    assert max(map(len, lines.splitlines())) <= 120


def test_a_chapter_is_the_module_of_its_name() -> None:
    for each in studies():
        assert each.function.__module__ == f"fenchel_lab.chapters.{each.name}"


def test_a_new_module_needs_no_other_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studies()
    monkeypatch.setattr(registry, "_STUDIES", dict(registry._STUDIES))
    monkeypatch.setattr(chapters, "__path__", [*chapters.__path__, str(tmp_path)])
    (tmp_path / "extra_chapter.py").write_text(CHAPTER)
    try:
        first = studies()[0]
        assert (first.name, first.title) == ("extra_chapter", "An extra chapter")
        assert first.function(Context()).summary == "Found."
    finally:
        sys.modules.pop("fenchel_lab.chapters.extra_chapter", None)
        vars(chapters).pop("extra_chapter", None)


def test_order_sorts_and_names_break_ties(registered: dict[str, Study]) -> None:
    for name, order in (("c", 1), ("b", 2), ("a", 2), ("d", 1.5)):

        def function(context: Context) -> Result:
            return Result("")

        function.__name__ = name
        study(name.upper(), source="", order=order)(function)
    assert [each.name for each in studies()] == ["c", "d", "a", "b"]


def test_two_studies_of_one_name_are_refused(registered: dict[str, Study]) -> None:
    def twice(context: Context) -> Result:
        return Result("")

    study("Once", source="", order=1)(twice)
    with pytest.raises(ValueError, match="two studies are called 'twice'"):
        study("Again", source="", order=2)(twice)


def test_registering_leaves_the_function_as_it_was(registered: dict[str, Study]) -> None:
    def plain(context: Context) -> Result:
        return Result("plain")

    assert study("Plain", source="", order=1)(plain) is plain
    assert find("plain").function is plain


def test_a_study_names_data_that_exists(registered: dict[str, Study]) -> None:
    def reader(context: Context) -> Result:
        return Result("")

    with pytest.raises(ValueError, match="data names minst; there are mnist, "):
        study("Reader", source="", order=1, data=["minst"])(reader)
    study("Reader", source="", order=1, data=["mnist"], full="Everything.")(reader)
    assert (find("reader").data, find("reader").full) == (("mnist",), "Everything.")


def test_an_unknown_name_is_answered_with_close_ones_and_all() -> None:
    with pytest.raises(UnknownStudyError, match=r"'satuartion'.*mean saturation\?.*paths.*saturation.*two_classes"):
        find("satuartion")
    with pytest.raises(UnknownStudyError, match=r"'qqq'\. Studies: "):
        find("qqq")


def test_data_comes_from_the_environment_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCHEL_DATA", raising=False)
    assert Context().data is None
    monkeypatch.setenv("FENCHEL_DATA", "")
    assert Context().data is None
    monkeypatch.setenv("FENCHEL_DATA", str(tmp_path))
    assert Context().data == tmp_path
    assert Context(data=None).data is None
