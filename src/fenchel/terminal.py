"""What commands say, and how they refuse."""

from __future__ import annotations

import typer
from rich.console import Console

console = Console()
errors = Console(stderr=True)


def refusal(reason: object) -> typer.Exit:
    """Say why a command cannot be done; to be raised."""
    errors.print(str(reason), style="red", markup=False, soft_wrap=True)
    return typer.Exit(2)
