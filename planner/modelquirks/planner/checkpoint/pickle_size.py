"""How large the value of a pickle is for whoever goes through it, which its bytes do not tell.

A pickle of some hundred bytes can hold a list of two lists, each of which is the same list of two
lists… sixty deep: in memory that is little, and shown, compared or walked through it never ends.
So a value is measured once, each container once, before anybody looks into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.pickle_machine import MAX_OPCODES, Opaque, PickleProblem

__all__ = ["check_size"]

_AGAIN = 8
"""So many times as many leaves may be reached as there are places in all containers,"""
_ALWAYS = 500_000
"""and so many in any case;"""
_MAX_LEAVES = 2 * MAX_OPCODES
"""but no more than this."""
_MAX_DEPTH = 400
_MAX_CHARACTERS = 1 << 27
"""Of all names together, when those of nested dictionaries are joined: those of 200,000 tensors
have 20 millions."""
_CONTAINERS = (list, tuple, dict)  # themselves: tensors are tuples of a class of their own


class _Size(NamedTuple):
    leaves: int = 1
    depth: int = 0
    characters: int = 0


_LEAF = _Size()
_Sizes = dict[int, _Size | None]
"""By identity; None: being measured. A container in itself counts as a leaf."""


def check_size(value: Any) -> None:
    """Raise :class:`PickleProblem` for a *value* that is endless for whoever goes through it.

    What objects that were not made would have got is looked at too, but not as part of what holds
    them: they are shown by their class alone, and may hold each other in circles.
    """
    sizes: _Sizes = {}
    opaque: set[int] = set()
    roots = [value]
    reached = written = 0
    for root in roots:  # grows on the way
        if type(root) is Opaque:
            if id(root) not in opaque:
                opaque.add(id(root))
                roots += (root.args, root.items, root.state)
            continue
        for item in _in_order(root, sizes):
            sizes[id(item)] = _checked(_size(item, sizes))
            written += len(item)
            roots += (part for part in _values(item) if type(part) is Opaque)
        reached += (sizes.get(id(root)) or _LEAF).leaves
    if reached > min(_AGAIN * written + _ALWAYS, _MAX_LEAVES):
        raise _endless()


def _in_order(root: Any, sizes: _Sizes) -> Iterator[Any]:
    """Yield each container that *sizes* does not have yet, behind those in it."""
    todo = [root]
    while todo:
        item = todo[-1]
        if type(item) not in _CONTAINERS or sizes.get(id(item)) is not None:
            todo.pop()
        elif id(item) not in sizes:
            sizes[id(item)] = None
            todo += (
                part
                for part in _values(item)
                if type(part) in _CONTAINERS and id(part) not in sizes
            )
        else:
            yield todo.pop()


def _values(item: Any) -> Iterable[Any]:
    values: Iterable[Any] = item.values() if type(item) is dict else item
    return values


def _size(item: Any, sizes: _Sizes) -> _Size:
    leaves, depth, characters = len(item), 0, 0
    pairs = item.items() if type(item) is dict else enumerate(item)
    for key, value in pairs:
        characters += _length(key)
        if type(value) in _CONTAINERS:
            inner = sizes.get(id(value)) or _LEAF
            leaves += inner.leaves - 1
            depth = max(depth, inner.depth)
            characters += inner.characters + (inner.leaves - 1) * _length(key)
    return _Size(max(1, leaves), depth + 1, characters)


def _length(key: Any) -> int:
    """Return how many characters a key and the dot behind it have at most, when shown."""
    if type(key) is str:
        return len(key) + 1
    return 8 if type(key) is int and -1 < key < 1_000_000 else 64


def _checked(size: _Size) -> _Size:
    if size.leaves > _MAX_LEAVES or size.characters > _MAX_CHARACTERS or size.depth > _MAX_DEPTH:
        raise _endless()
    return size


def _endless() -> PickleProblem:
    return PickleProblem(
        "has a pickle of containers within containers without end: it is no checkpoint, or is "
        "meant to exhaust memory"
    )
