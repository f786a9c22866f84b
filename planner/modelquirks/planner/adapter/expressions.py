"""``may_run_on``: regular expressions of other people that could take for ever.

Python's ``re`` tries one way after the other. Where a repeat is within a repeat, as in ``(a+)+b``,
there are twice as many ways for each letter more, and nothing can stop it.
"""

from __future__ import annotations

import re
from re import _parser  # type: ignore[attr-defined]
from typing import Any

__all__ = ["may_run_on"]

_MAX_LETTERS = 20_000
_MAX_REPEATS = 4
"""Without end, one after the other: as many as those that tools write (``.*?``) have."""
_ENDLESS = 16
"""A repeat of more than so many times counts as one without end."""


def may_run_on(pattern: str) -> bool:
    r"""Tell whether *pattern* has repeats within repeats, or very many of them.

    False for what is no expression at all: that is told where it is used.

    >>> may_run_on(r".*\.(q|k)_proj"), may_run_on(r"(\w+\.)*proj"), may_run_on("(a|a)*b")
    (False, True, True)
    """
    if len(pattern) > _MAX_LETTERS:
        return True
    try:
        parsed: Any = _parser.parse(pattern)
    except (re.error, OverflowError):
        return False
    except RecursionError:
        return True
    return _repeats(parsed) > _MAX_REPEATS


def _repeats(parsed: Any) -> int:
    """Return how many repeats without end follow each other; too many if one is in another."""
    found = 0
    for operation, argument in parsed:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, inner = argument
            within = _repeats(inner)
            if int(most) > _ENDLESS:
                if within or _branches(inner):
                    return _MAX_REPEATS + 1
                found += 1
            found += within
        elif name == "BRANCH":
            found += max(map(_repeats, _parts(argument)), default=0)
        else:
            found += sum(map(_repeats, _parts(argument)))
    return found


def _branches(parsed: Any) -> bool:
    """Tell whether there is a choice of longer texts in *parsed* (of letters it is a set)."""
    return any(
        str(operation) == "BRANCH" or any(map(_branches, _parts(argument)))
        for operation, argument in parsed
    )


def _parts(argument: Any) -> list[Any]:
    """Return the expressions within the argument of an operation."""
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    if isinstance(argument, tuple | list):
        return [part for each in argument for part in _parts(each)]
    return []
