"""Rolling up: a recipe over many numbered tensors as one stack over their index.

A traced conversion names each of its sources: 256 experts, 256 names. Where consecutive parts of
a concatenation differ only in one index that counts 0, 1, 2…, they are one part with a variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from modelquirks.quirks.recipe import Concat, Join, Node, Reshape, Source, Stack, children, mapped

__all__ = ["rolled"]

_DIGITS = re.compile(r"(?<![0-9{])(0|[1-9][0-9]{0,8})(?![0-9}])")
_INDEX = re.compile(r"(?<![^./:])(0|[1-9][0-9]{0,8})(?![^./:])")
"""An index as families know it; other digits are parts of words."""

Exists = Callable[[str], bool]


def rolled(node: Node, exists: Exists) -> Node:
    """Return *node* with its long concatenations as stacks and joins, counted in the checkpoint.

    *exists* tells whether a pattern names something that the checkpoint has. A numbering that
    does not start at 0 is one only if the numbers before it are there too (they belong to
    another tensor); else it is taken to start at 0, and the audit will say what is lacking.
    """
    used = 0

    def change(inner: Node) -> Node:
        nonlocal used
        if not isinstance(inner, Concat) or len(inner.of) < 2:
            return inner
        variable = f"n{used}"
        single = _unstacked(inner)
        element = _element(single or inner.of, variable, exists)
        if element is None:
            return inner
        used += 1
        return Stack(element, variable) if single else Join(element, variable, inner.dim)

    return mapped(node, change)


def _unstacked(node: Concat) -> tuple[Node, ...] | None:
    """Return the elements that *node* stacks along a new dimension 0; None if it is no stack."""
    parts = [part for part in node.of if isinstance(part, Reshape) and part.shape[:1] == (1,)]
    return (
        tuple(part.of for part in parts) if node.dim == 0 and len(parts) == len(node.of) else None
    )


def _element(parts: Sequence[Node], variable: str, exists: Exists) -> Node | None:
    """Return the one node over *variable* that all *parts* are; None if they are not alike."""
    for digits in (_INDEX, _DIGITS):
        texts = [[digits.split(name) for name in _names(part)] for part in parts]
        places = _places(texts)
        if places is None or not _same_form(parts, digits):
            continue
        values = [int(texts[number][places[0][0]][places[0][1]]) for number in range(len(parts))]
        if _counts(values, texts, places, exists, strict=digits is _DIGITS):
            return _with_variable(parts[0], places, variable, digits)
    return None


def _names(node: Node) -> list[str]:
    if isinstance(node, Source):
        return [node.name]
    return [name for child in children(node) for name in _names(child)]


def _places(texts: Sequence[Sequence[Sequence[str]]]) -> list[tuple[int, int]] | None:
    """Return the (leaf, piece) at which the parts differ, if it is by one and the same number."""
    first = texts[0]
    if any([len(leaf) for leaf in part] != [len(leaf) for leaf in first] for part in texts):
        return None
    places: list[tuple[int, int]] = []
    for leaf, pieces in enumerate(first):
        for piece in range(len(pieces)):
            column = [part[leaf][piece] for part in texts]
            if any(text != column[0] for text in column):
                if piece % 2 == 0:  # text, not a number
                    return None
                places.append((leaf, piece))
    columns = {tuple(part[leaf][piece] for part in texts) for leaf, piece in places}
    # Every leaf must have the variable, or it would be read again for each value.
    complete = {leaf for leaf, _ in places} == set(range(len(first)))
    return places if len(columns) == 1 and complete else None


def _same_form(parts: Sequence[Node], digits: re.Pattern[str]) -> bool:
    def form(node: Node) -> Node:
        return replace(node, name=digits.sub("#", node.name)) if isinstance(node, Source) else node

    return len({mapped(part, form) for part in parts}) == 1


def _counts(
    values: list[int],
    texts: Sequence[Sequence[Sequence[str]]],
    places: list[tuple[int, int]],
    exists: Exists,
    *,
    strict: bool,
) -> bool:
    """Tell whether *values* number the elements of a stack, be it with gaps."""
    if values == list(range(len(values))):
        return True
    if strict or any(b <= a for a, b in pairwise(values)):
        return False
    if values[0] == 0:
        return True  # a gap: the audit will name it
    leaf, piece = places[0]
    before = list(texts[0][leaf])
    before[piece] = str(values[0] - 1)
    contiguous = values == list(range(values[0], values[0] + len(values)))
    return not (contiguous and exists("".join(before)))


def _with_variable(
    node: Node, places: list[tuple[int, int]], variable: str, digits: re.Pattern[str]
) -> Node:
    leaf = -1

    def change(inner: Node) -> Node:
        nonlocal leaf
        if not isinstance(inner, Source):
            return inner
        leaf += 1
        pieces = digits.split(inner.name)
        for number, piece in places:
            if number == leaf:
                pieces[piece] = f"{{{variable}}}"
        return Source("".join(pieces))

    return mapped(node, change)
