"""Families: all names that differ only in integer indices.

``model.layers.0.mlp.w1.weight`` and ``model.layers.31.mlp.w1.weight`` are two members of the
family ``model.layers.{0}.mlp.w1.weight``. The 35,743 tensors of one real index are 57 families,
so rules, audit and reports that work by family stay small however large the checkpoint is.

An index is a whole part of a name between ``.``, ``/`` or ``:`` (or an end) that is written as
Python would write it: ``01`` and numbers of more than nine digits are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Family", "group", "indices_of", "show", "template_of"]

_INTEGER = r"(?:0|[1-9][0-9]{0,8})(?=[./:\n])"
# One expression per separator: each starts with a literal, which `re` finds four times as fast
# as a set of characters.
_INDEX = {sep: re.compile(re.escape(sep) + _INTEGER) for sep in "./:\n"}
_VALUE = re.compile(rf"[./:\n]({_INTEGER})")


@dataclass(frozen=True)
class Family:
    """Names that share one template.

    ``template`` is in the syntax of :meth:`str.format` with numbered slots, so that
    ``template.format(*indices)`` is the name of a member; braces that a name really contains are
    doubled.
    """

    template: str
    names: tuple[str, ...]

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Indices of each name, in the order of ``names``."""
        if not self.n_slots:
            return ((),) * len(self.names)
        found = map(int, _VALUE.findall("\n{}\n".format("\n".join(self.names))))
        return tuple(zip(*[found] * self.n_slots, strict=True))

    @cached_property
    def n_slots(self) -> int:
        """Number of index slots in the template."""
        return len(next(indices_of(self.names[:1])))

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.names)


def group(names: Iterable[str]) -> dict[str, Family]:
    """Group *names* into families, by template, in the order of first appearance.

    >>> [(f.template, len(f)) for f in group(["a.0.w", "a.1.w", "b"]).values()]
    [('a.{0}.w', 2), ('b', 1)]
    """
    listed = list(names)
    members: dict[str, list[str]] = {}
    for template, name in zip(_raw_templates(listed), listed, strict=True):
        try:
            members[template].append(name)
        except KeyError:
            members[template] = [name]
    families = (Family(_numbered(raw), tuple(found)) for raw, found in members.items())
    return {family.template: family for family in families}


def template_of(name: str) -> str:
    """Return the template of one name.

    >>> template_of("model.layers.7.mlp.experts.31.w1.weight")
    'model.layers.{0}.mlp.experts.{1}.w1.weight'
    """
    return _numbered(_raw_templates([name])[0])


def indices_of(names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the indices in each name, in order.

    >>> list(indices_of(["a.3.b.14", "c"]))
    [(3, 14), ()]
    """
    for name in names:
        yield tuple(map(int, _VALUE.findall(f"\n{name}\n")))


def show(template: str) -> str:
    """Return a template as people read it: each slot as ``*``.

    >>> show("model.layers.{0}.mlp.weight")
    'model.layers.*.mlp.weight'
    """
    return re.sub(r"(?<!\{)\{\d+\}(?!\})", "*", template).replace("{{", "{").replace("}}", "}")


def _raw_templates(names: Sequence[str]) -> list[str]:
    """Return each name with ``{}`` for each index: one substitution over all names at once."""
    if not names:
        return []
    text = "\n".join(names)
    if "{" in text or "}" in text:
        names = [name.replace("{", "{{").replace("}", "}}") for name in names]
        text = "\n".join(names)
    if text.count("\n") >= len(names):  # some name has a line break in it
        return [_without_indices(name) for name in names]
    return _without_indices(text).split("\n")


def _without_indices(text: str) -> str:
    text = f"\n{text}\n"
    for separator, index in _INDEX.items():
        if separator in text:
            text = index.sub(separator + "{}", text)
    return text[1:-1]


def _numbered(raw: str) -> str:
    parts = re.split(r"(?<!\{)\{\}(?!\})", raw)
    slots = iter(range(len(parts)))
    return parts[0] + "".join(f"{{{next(slots)}}}{part}" for part in parts[1:])
