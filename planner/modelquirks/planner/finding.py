"""Findings: what was noticed about a checkpoint or a plan, as data."""

from __future__ import annotations

from collections.abc import Iterable
from reprlib import Repr
from typing import Any, Literal, NamedTuple

__all__ = ["Finding", "Severity", "brief", "cut", "shown"]

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


class _Brief(Repr):
    def repr_bytes(self, value: bytes, _: int) -> str:
        return repr(value[: self.maxother])


_BRIEF = _Brief()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxtuple = 3, 8, 8, 8
_BRIEF.maxstring = _BRIEF.maxother = 200


def brief(value: Any, limit: int = 60) -> str:
    """Return *value* as Python writes it, cut to *limit* characters.

    What comes from a file may be of any size, and deep: ``f"{value!r:.60}"`` writes all of it
    first, which of lists that hold each other several times is more than any memory has.

    >>> brief([[[[]]]]), brief("a" * 80, 10)
    ('[[[[...]]]]', "'aaaaaaaa…")
    """
    try:
        text = _BRIEF.repr(value)
    except ValueError:  # a number of more digits than Python writes
        text = f"<{type(value).__name__}>"
    return cut(text, limit)


def cut(text: str, limit: int) -> str:
    """Return *text*, of which no more than *limit* characters are shown.

    >>> cut("a long tale", 7)
    'a long…'
    """
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(items: Iterable[str], limit: int = 10) -> str:
    """Return *items* in quotes, at most *limit* of them.

    >>> shown(["a", "b", "c"], limit=2)
    "'a', 'b' … and 1 more"
    """
    listed = list(items)
    text = ", ".join(repr(item) for item in listed[:limit])
    return text if len(listed) <= limit else f"{text} … and {len(listed) - limit} more"
