"""Highlights: words and their places, spans, pages, and measures."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from fenchel_lab.drawing import highlights, style
from fenchel_lab.drawing.highlights import Explanation

TEXT = "It’s not <b>bad</b> & I didn't leave."


def explanation(text: str = TEXT, chosen: tuple[str, ...] = ("not", "bad", "n't", "leave")) -> Explanation:
    places = highlights.places(text)
    weights = [0.5 if text[start:end] in chosen else 0.0 for start, end in places]
    return Explanation(text, places, weights, "good", {"bad": 0.25, "good": 0.75}, ("zyx",) if text else ())


class Text(HTMLParser):
    """What a browser would show, and what is in marks."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.shown, self.marked = "", []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "mark":
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.shown += data
        if self.tags[-1:] == ["mark"]:
            self.marked[-1] += data


def parsed(html: str) -> Text:
    parser = Text()
    parser.feed(html)
    parser.close()
    assert not parser.tags
    return parser


def test_words_and_what_is_between_make_the_text() -> None:
    assert " ".join(explanation().words) == "It ’s not < b > bad < / b > & I did n't leave ."
    assert highlights.places(" \n_ ") == []


def test_accents_and_vowel_signs_stay_with_their_letters() -> None:
    text = "A cafe\u0301's décor, हिन्दी फ़िल्म! \u2764\ufe0fgood"
    assert [text[start:end] for start, end in highlights.places(text)] == [
        *("A", "cafe\u0301", "'s", "décor", ",", "हिन्दी", "फ़िल्म", "!", "\u2764\ufe0f", "good")
    ]
    assert highlights.places("\u0301") == [(0, 1)]


def test_spans_join_neighbours_and_add_up_their_weights() -> None:
    spans = explanation().spans
    assert [(span.text, span.weight) for span in spans] == [("not", 0.5), ("bad", 0.5), ("n't leave", 1.0)]
    assert all(TEXT[span.start : span.end] == span.text for span in spans)


def test_html_shows_the_text_as_it_is_and_marks_the_spans() -> None:
    shown = parsed(explanation().html)
    assert shown.shown == TEXT
    assert shown.marked == ["not", "bad", "n't leave"]
    assert parsed(explanation("").html).shown == ""


def test_a_page_has_every_text_escaped() -> None:
    page = highlights.page([explanation(), explanation("")], "a < b")
    assert page.count("<article>") == 2
    assert "<title>a &lt; b</title>" in page
    assert "4 of 17 words in 3 spans; unknown: zyx" in page
    assert "<b>" not in page
    assert "There is no text." in highlights.page([])


@pytest.mark.parametrize(
    ("chosen", "marked", "f1"),
    [
        ([0, 1], [0, 1], 1.0),
        ([0], [1], 0.0),
        ([], [1], 0.0),
        ([], [], 0.0),
        ([1, 2], [2], 2 / 3),
        ([1, 2], [2, 2], 2 / 3),
    ],
)
def test_overlap_is_f1_of_places(chosen: list[int], marked: list[int], f1: float) -> None:
    assert highlights.overlap(chosen, marked) == pytest.approx(f1)


def test_f1_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import f1_score

    predicted, labels = [0, 2, 1, 1, 0, 2, 0], [0, 1, 1, 1, 2, 2, 0]
    assert highlights.f1(predicted, labels) == pytest.approx(f1_score(labels, predicted, average="macro"))


def test_a_picture_has_every_word_and_a_ground_for_each_chosen() -> None:
    words = ["word"] * 30
    with style.applied():
        drawing = highlights.picture([("one", words, [1.0, 0.5] + [0.0] * 28), ("none", [], [])], {0})
    first, second = drawing.axes
    assert [text.get_text() for text in first.texts] == ["one", *words]
    assert len(first.patches) == 2
    assert len(first.lines) == 1
    assert len(second.patches) == 0
