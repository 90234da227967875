"""What commands say, and how they refuse."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

Force = Annotated[bool, typer.Option("--force", help="Write over files that this command did not write.")]

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
