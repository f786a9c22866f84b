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
_MAX_BITS = 16
"""Of other choices: ``a?`` is one, a choice of four words two; ``a?`` fifty times runs on."""
_ENDLESS = 16
"""A repeat of more than so many times counts as one without end."""


def may_run_on(pattern: str, repeats: int = _MAX_REPEATS) -> bool:
    r"""Tell whether *pattern* has repeats within repeats, more than *repeats*, or many choices.

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
    endless, bits = _ways(parsed)
    return endless > repeats or bits > _MAX_BITS


def _ways(parsed: Any) -> tuple[int, int]:
    """Return how many repeats without end follow each other, and the bits of other choices.

    A repeat without end of what can be matched in several ways is more than any number of them.
    """
    endless = bits = 0
    for operation, argument in parsed:
        name = str(operation)
        ways = [_ways(part) for part in _parts(argument)]
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most = int(argument[0]), int(argument[1])
            ((inner, choices),) = ways
            if most <= _ENDLESS:
                endless += inner * most
                bits += choices * most + (most - least).bit_length()
            else:
                endless += _MAX_LETTERS if inner or choices else 1
        elif name == "BRANCH":
            endless += max((inner for inner, _ in ways), default=0)
            bits += max((choices for _, choices in ways), default=0)
            bits += (len(ways) - 1).bit_length()
        else:
            endless += sum(inner for inner, _ in ways)
            bits += sum(choices for _, choices in ways)
    return endless, bits


def _parts(argument: Any) -> list[Any]:
    """Return the expressions within the argument of an operation."""
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    if isinstance(argument, tuple | list):
        return [part for each in argument for part in _parts(each)]
    return []
