"""The style: applied where asked, nowhere else."""

import re
import threading

import matplotlib

from fenchel_lab.drawing import style


def contrast(a: str, b: str) -> float:
    """WCAG's contrast of two colours."""

    def luminance(colour: str) -> float:
        channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_settings_end_with_the_block() -> None:
    before = dict(matplotlib.rcParams)
    with style.applied():
        assert matplotlib.rcParams["svg.hashsalt"] == "fenchel"
    assert dict(matplotlib.rcParams) == before


def test_a_users_settings_do_not_show() -> None:
    with matplotlib.rc_context({"axes.facecolor": "black", "lines.marker": "x"}), style.applied():
        assert matplotlib.rcParams["axes.facecolor"] == "white"
        assert matplotlib.rcParams["lines.marker"] == "None"


def test_another_thread_waits_for_the_settings() -> None:
    entered = threading.Event()

    def other() -> None:
        with style.applied():
            entered.set()

    thread = threading.Thread(target=other)
    with style.applied():
        thread.start()
        assert not entered.wait(0.1)
    thread.join(10)
    assert entered.is_set()


def test_panels_are_in_reading_order_and_a_phone_wide() -> None:
    drawing, axes = style.panels(2, 2, height=1.0)
    assert tuple(drawing.get_size_inches()) == (style.WIDTH, 2.0)
    drawing.draw_without_rendering()
    corners = [(round(-each.get_position().y0, 3), round(each.get_position().x0, 3)) for each in axes]
    assert corners == sorted(corners)


def test_every_colour_is_seen_on_its_page() -> None:
    for page, ground in enumerate(style.THEME["paper"]):
        for name, colours in style.THEME.items():
            assert re.fullmatch("#[0-9a-f]{6}", colours[page])
            if name in ("ink", "muted"):
                assert contrast(colours[page], ground) > 4.5, name
            elif name not in ("paper", "faint"):
                assert contrast(colours[page], ground) > 2.2, name


def test_colours_of_the_light_page_are_distinct() -> None:
    light = [colours[0] for colours in style.THEME.values()]
    assert len(set(light)) == len(light)
