"""Patterns and whole families: what the template tells of all names, so that few are matched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from modelquirks.quirks.family import Family
from modelquirks.quirks.pattern import Pattern

__all__ = ["fitting", "may_fit", "may_part"]

_PARTIAL = re.compile(r"[*}][0-9]|[0-9][*{]")
"""Where a pattern may fit some indices by their digits, which a template does not have."""


def may_fit(pattern: Pattern, template: str) -> bool:
    """Tell whether some name of the family *template* may fit *pattern*.

    >>> may_fit(Pattern("a.*.w"), "a.{0}.w"), may_fit(Pattern("a.w"), "a.{0}.w")
    (True, False)
    """
    return pattern.match(template) is not None or _PARTIAL.search(pattern.text) is not None


def may_part(pattern: Pattern, template: str) -> bool:
    """Tell whether some names of the family *template* may fit *pattern*, and others not.

    >>> may_part(Pattern("a.1.w"), "a.{0}.w"), may_part(Pattern("a.*.w"), "a.{0}.w")
    (True, False)
    """
    found = pattern.match(template)
    if _PARTIAL.search(pattern.text) is not None:
        return True
    return found is not None and bool(found.fixed)


def fitting(pattern: Pattern, families: Mapping[str, Family]) -> Iterator[str]:
    """Yield the names of *families* that fit *pattern*, by family."""
    for template, family in families.items():
        if may_fit(pattern, template):
            yield from (name for name in family.names if pattern.match(name) is not None)
