"""What commands say, how they show progress, and how they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer
from rich import progress
from rich.console import Console
from rich.markup import escape

Force = Annotated[bool, typer.Option("--force", help="Write over files that this command did not write.")]

T = TypeVar("T")

console = Console()
errors = Console(stderr=True)


def refusal(reason: object) -> typer.Exit:
    """Say why a command cannot be done; to be raised."""
    errors.print(str(reason), style="red", markup=False, soft_wrap=True)
    return typer.Exit(2)


def failure(reason: object) -> typer.Exit:
    """Say why a command failed in the middle of its work; to be raised."""
    refusal(reason)
    return typer.Exit(1)


def interruption(kept: str) -> typer.Exit:
    """Say what is kept of a command that was interrupted from the keyboard; to be raised."""
    errors.print(f"Interrupted. {kept}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(130)


class Bar:
    """The progress of a work, shown as one of several bars."""

    def __init__(self, shown: progress.Progress, task: progress.TaskID) -> None:
        self.shown, self.task = shown, task

    def __call__(self, fraction: float, note: str = "") -> None:
        # The last of it is drawing or saving, which comes after the last word of the work.
        self.shown.update(self.task, completed=0.98 * fraction, note=escape(note))


class WholeBar(Bar):
    """The progress of one of several works, shown on its own bar and on one for all of them."""

    def __init__(self, shown: progress.Progress, task: progress.TaskID, whole: progress.TaskID, number: int) -> None:
        super().__init__(shown, task)
        self.whole, self.number = whole, number

    def __call__(self, fraction: float, note: str = "") -> None:
        super().__call__(fraction, note)
        self.shown.update(self.whole, completed=self.number + 0.98 * fraction)


def progress_bars(refresh_per_second: float = 10, transient: bool = False) -> progress.Progress:
    """Bars with a title, the time and a note each, to be used in a ``with``; transient ones vanish at its end."""
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=20),
        progress.TimeElapsedColumn(),
        progress.TextColumn("[dim]{task.fields[note]}[/dim]"),
        console=console,
        refresh_per_second=refresh_per_second,
        transient=transient,
    )


def follow(shown: progress.Progress, title: str, work: Callable[[Bar], T]) -> T:
    """Do a work that tells its progress, and show that as a bar."""
    bar = Bar(shown, shown.add_task(escape(title), total=1.0, note=""))
    try:
        result = work(bar)
    except Exception:
        shown.update(bar.task, note="[red]failed[/red]")
        shown.stop_task(bar.task)
        raise
    shown.update(bar.task, completed=1.0, note="")
    return result
