"""``Progress``: what is told of a load while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """Is told how much there is to do, and then of every piece that is done, from any thread."""

    def begin(self, totals: Mapping[str, int]) -> None:
        """Hear of the bytes that are about to be made, by where they go.

        That is a device, or ``verification`` for bytes that are compared.
        """
        ...

    def add(self, where: str, n_bytes: int) -> None:
        """Hear that so many more bytes are there."""
        ...


class Silent:
    """Tells nobody."""

    def begin(self, totals: Mapping[str, int]) -> None:
        """Say nothing."""

    def add(self, where: str, n_bytes: int) -> None:
        """Say nothing."""
