"""Findings: what was noticed about a checkpoint or a plan, as data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

__all__ = ["Finding", "Severity", "shown"]

Severity = Literal["error", "warning", "info"]
"""``error``: the plan cannot be used. ``warning``: look at it. ``info``: good to know."""


class Finding(NamedTuple):
    """One thing that somebody should know, in a sentence."""

    code: str
    """Stable, lower case, hyphens: ``shard-missing``."""
    severity: Severity
    message: str
    """Subject in quotes, what was found, what was expected, what to do."""

    def to_json(self) -> dict[str, str]:
        """Return the finding as plain data."""
        return self._asdict()


def shown(items: Iterable[str], limit: int = 10) -> str:
    """Return *items* in quotes, at most *limit* of them.

    >>> shown(["a", "b", "c"], limit=2)
    "'a', 'b' … and 1 more"
    """
    listed = list(items)
    text = ", ".join(repr(item) for item in listed[:limit])
    return text if len(listed) <= limit else f"{text} … and {len(listed) - limit} more"
