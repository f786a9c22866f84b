"""Name patterns: how rules speak of tensor names without regular expressions.

A pattern is a dotted name, anchored at both ends, with three kinds of holes:

======== ==============================================================
``{x}``   an integer index, whole segment or part of one (``expert_{e}``)
``*``     some text inside one segment
``**``    any number of whole segments, none included
======== ==============================================================

Patterns are matched against *templates*: names in which each index is replaced by a numbered
slot (``model.layers.{0}.mlp.experts.{1}.w1.weight``), see :mod:`modelquirks.quirks.family`. A
plain name is a template without slots, so the same code serves both, and a rule costs one match
per family instead of one per tensor. A digit that a rule means literally (``proj.0`` →
``proj.1``) restricts the slot it meets: only the members with that index are renamed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

__all__ = ["Binding", "Pattern", "PatternError", "rename"]

_INTEGER = r"(?:0|[1-9][0-9]{0,8})"  # what a family takes for an index, and nothing else
_SLOT = r"\{[0-9]+\}"
_HOLE = re.compile(r"\*\*|\*|\{([^{}]*)\}")
_PIECE = re.compile(rf"{_HOLE.pattern}|(?<![^/:]){_INTEGER}(?![^/:])")
"""A hole, or an index that is meant literally: a whole part between ``.``, ``/`` or ``:``."""
_LITERAL = re.compile(r"\{[^{}]*\}|[*.0-9]+")
"""What may stand for something else in a name that fits, or for nothing."""
_TOUCHING = re.compile(r"[*}][*{]")
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_MAX_WILD = 4
"""More of them take as long as one cares to wait, for a long name that does not fit."""


class PatternError(ValueError):
    """A pattern that cannot be used; the message lists every fault found in it."""


@dataclass(frozen=True, slots=True)
class Binding:  # no tuple: its `index` is a method of those
    """What the holes of a pattern stood for in one template."""

    index: Mapping[str, str]
    """Placeholder name → integer or slot text (``"3"`` or ``"{0}"``)."""
    wild: tuple[str, ...]
    """Text of each ``*`` and ``**``, in order; ``""`` for a ``**`` that matched nothing."""
    fixed: Mapping[int, int]
    """Slot number → the only index that a literal digit of the pattern allows."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A name pattern, checked when made.

    >>> Pattern("model.layers.{layer}.mlp.*").match("model.layers.{0}.mlp.gate").index
    {'layer': '{0}'}
    >>> Pattern("block.0.weight").match("block.{0}.weight").fixed
    {0: 0}
    >>> Pattern("layers.1").match("layers.11") is None
    True
    """

    text: str

    def __post_init__(self) -> None:
        """Raise :class:`PatternError` with all faults of the text."""
        if faults := _faults(self.text):
            raise PatternError(f"pattern {self.text!r}: " + "; ".join(faults))

    def __str__(self) -> str:
        """Return the text as written."""
        return self.text

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Names of the ``{x}`` holes, in order."""
        return _parts(self.text).placeholders

    @property
    def wildcards(self) -> tuple[str, ...]:
        """The ``*`` and ``**`` holes, in order."""
        return _parts(self.text).wildcards

    @property
    def holes(self) -> tuple[str, ...]:
        """Every hole, in order."""
        return _parts(self.text).holes

    def match(self, template: str) -> Binding | None:
        """Return what the holes stand for if the whole of *template* fits, else None."""
        if _longest(self.text) not in template:
            return None
        regex, names, n_wild, literals = _compiled(self.text)
        found = regex.fullmatch(template)
        if found is None:
            return None
        fixed: dict[int, int] = {}
        for number, digits in enumerate(literals):
            text = found.group(f"d{number}")
            if text[0] == "{" and fixed.setdefault(int(text[1:-1]), int(digits)) != int(digits):
                return None
        index = {name: found.group(f"i_{name}") for name in names}
        wild = tuple(found.group(f"w{number}") or "" for number in range(n_wild))
        return Binding(index, wild, fixed)

    def fill(self, binding: Binding) -> str:
        """Return the name that this pattern makes of *binding*; empty ``**`` leave no dot behind.

        >>> Pattern("**.norm").fill(Binding({}, ("",), {}))
        'norm'
        """
        wild = iter(binding.wild)
        segments: list[str] = []
        for segment in self.text.split("."):
            if segment == "**":
                if text := next(wild):
                    segments.append(text)
                continue
            segments.append(
                _HOLE.sub(
                    lambda m: next(wild) if m.group(0) == "*" else binding.index[m.group(1)],
                    segment,
                )
            )
        return ".".join(segments)


def rename(source: Pattern, target: Pattern, template: str) -> tuple[str, Mapping[int, int]] | None:
    """Return *template* renamed by ``source → target`` and the slots it fixes; None if no match.

    >>> rename(Pattern("transformer.h.{i}.**"), Pattern("model.layers.{i}.**"),
    ...        "transformer.h.{0}.attn.weight")
    ('model.layers.{0}.attn.weight', {})
    """
    binding = source.match(template)
    if binding is None:
        return None
    name = target.fill(binding)
    return (name, binding.fixed) if name else None  # `module.**` leaves nothing of `module`


class _Parts(NamedTuple):
    """What a pattern is made of."""

    holes: tuple[str, ...]
    placeholders: tuple[str, ...]
    wildcards: tuple[str, ...]


@cache
def _parts(text: str) -> _Parts:
    holes = tuple(m.group(0) for m in _HOLE.finditer(text))
    return _Parts(
        holes,
        placeholders=tuple(hole[1:-1] for hole in holes if hole[0] == "{"),
        wildcards=tuple(hole for hole in holes if hole[0] == "*"),
    )


@cache
def _longest(text: str) -> str:
    """Return a text that every name which fits must have: most do not, and cost no more."""
    return max(_LITERAL.split(text), key=len)


@cache
def _faults(text: str) -> tuple[str, ...]:
    faults: list[str] = []
    if not text or text != text.strip():
        faults.append("empty, or with blanks around it")
    segments = text.split(".")
    if "" in segments:
        faults.append("an empty segment (two dots in a row, or one at an end)")
    for segment in segments if "*" in text or "}" in text else ():
        if "**" in segment and segment != "**":
            faults.append(f"'**' must be a whole segment, not part of {segment!r}")
        elif segment != "**" and _TOUCHING.search(segment):
            faults.append(f"two holes touch in {segment!r}, so nobody knows where one ends")
    names = _parts(text).placeholders
    for name in names:
        if not _NAME.fullmatch(name):
            faults.append(f"placeholder {{{name}}} is not a lower-case identifier")
    for name in sorted({n for n in names if names.count(n) > 1}):
        faults.append(f"placeholder {{{name}}} is used twice")
    if len(wild := _parts(text).wildcards) > _MAX_WILD:
        faults.append(f"{len(wild)} of '*' and '**', where at most {_MAX_WILD} can be matched")
    if set(_HOLE.sub("", text)) & set("{}"):
        faults.append("unbalanced braces")
    return tuple(faults)


_Compiled = tuple[re.Pattern[str], tuple[str, ...], int, tuple[str, ...]]


@cache
def _compiled(text: str) -> _Compiled:
    names: list[str] = []
    literals: list[str] = []
    n_wild = 0
    regex = ""
    glue = ""  # the dot that separates the next segment from what came before
    segments = text.split(".")
    for position, segment in enumerate(segments):
        if segment == "**":
            greed = "" if position == len(segments) - 1 else "?"
            hole = rf"(?P<w{n_wild}>.+{greed})"
            n_wild += 1
            if position == len(segments) - 1:
                regex += rf"(?:{glue}{hole})?" if glue else hole
            else:
                regex += rf"{glue}(?:{hole}\.)?"
                glue = ""
            continue
        regex += glue
        glue = r"\."
        end = 0
        for found in _PIECE.finditer(segment):
            regex += re.escape(segment[end : found.start()])
            end = found.end()
            if found.group(0) == "*":
                regex += rf"(?P<w{n_wild}>[^.]+)"
                n_wild += 1
            elif found.group(0)[0] == "{":
                names.append(found.group(1))
                regex += rf"(?P<i_{found.group(1)}>{_INTEGER}|{_SLOT})"
            else:
                regex += rf"(?P<d{len(literals)}>{found.group(0)}|{_SLOT})"
                literals.append(found.group(0))
        regex += re.escape(segment[end:])
    return re.compile(regex, re.DOTALL), tuple(names), n_wild, tuple(literals)
