"""The bar: one line on a terminal, that is drawn again; lines elsewhere."""

import io
import re

import pytest

from fenchel.progress import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    with bar("work", out) as progress:
        for part in range(5):
            progress(part / 4, f"part {part} " + "of many " * 50)
    text = out.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    lines = [re.sub(r"\x1b\[K", "", line) for line in text.rstrip("\n").split("\r")[1:]]
    assert [line.count("█") for line in lines] == [0, 5, 10, 15, 20]
    assert [line.count("░") for line in lines] == [20, 15, 10, 5, 0]
    assert all(len(line) < 80 for line in lines)


def test_elsewhere_there_is_one_line_per_tenth() -> None:
    out = io.StringIO()
    with bar("work", out) as progress:
        for part in range(1001):
            progress(part / 1000, f"part {part}")
    assert len(out.getvalue().splitlines()) == 11
    assert "part 1000" in out.getvalue()


def interrupted(out: io.StringIO) -> None:
    with bar("work", out) as progress:
        progress(0.5)
        raise KeyboardInterrupt


def test_an_error_ends_the_line() -> None:
    out = Terminal()
    with pytest.raises(KeyboardInterrupt):
        interrupted(out)
    assert out.getvalue().endswith("\n")
