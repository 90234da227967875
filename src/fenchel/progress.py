"""Long work tells how far it is: what it calls, and what it calls if nobody listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far a work is: a fraction in [0, 1], and what it is doing, or how it goes."""

    def __call__(self, fraction: float, note: str = "") -> None: ...


def silent(fraction: float, note: str = "") -> None:
    """Nobody listens."""
