"""How large the value of a pickle is for whoever goes through it, which its bytes do not tell.

A pickle of some hundred bytes can hold a list of two lists, each of which is the same list of two
lists… sixty deep: in memory that is little, and shown, compared or walked through it never ends.
So a value is measured once, each container once, before anybody looks into it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.pickle_machine import MAX_OPCODES, Opaque, PickleProblem

__all__ = ["check_size"]

_MAX_LEAVES = 2 * MAX_OPCODES
_MAX_DEPTH = 400
_MAX_CHARACTERS = 1 << 28
"""Of all names together, when those of nested dictionaries are joined."""


class _Size(NamedTuple):
    leaves: int = 1
    depth: int = 0
    characters: int = 0


_LEAF = _Size()


def check_size(value: Any) -> None:
    """Raise :class:`PickleProblem` for a *value* that is endless for whoever goes through it.

    What objects that were not made would have got is looked at too, but not as part of what holds
    them: they are shown by their class alone.
    """
    sizes: dict[int, _Size | None] = {}
    todo: list[Any] = [value]
    while todo:
        item = todo[-1]
        if type(item) is Opaque:
            todo.pop()
            if sizes.setdefault(id(item), None) is None:
                sizes[id(item)] = _LEAF
                todo += (item.args, item.state, item.items)
        elif type(item) not in (list, tuple, dict):
            todo.pop()
        elif id(item) not in sizes:
            sizes[id(item)] = None  # being measured: a container in itself counts as a leaf
            todo += [child for child in _children(item) if id(child) not in sizes]
        else:
            todo.pop()
            if sizes[id(item)] is None:
                sizes[id(item)] = _checked(_size(item, sizes))


def _children(item: Any) -> Any:
    """Return what is in a container and may hold something itself."""
    values = item.values() if isinstance(item, dict) else item
    return (value for value in values if type(value) in (list, tuple, dict, Opaque))


def _size(item: Any, sizes: dict[int, _Size | None]) -> _Size:
    leaves = depth = characters = 0
    pairs = item.items() if isinstance(item, dict) else (("", value) for value in item)
    for key, value in pairs:
        inner = sizes.get(id(value)) if type(value) in (list, tuple, dict) else _LEAF
        inner = inner or _LEAF
        leaves += inner.leaves
        depth = max(depth, inner.depth + 1)
        characters += inner.characters + inner.leaves * (len(key) if isinstance(key, str) else 8)
    return _Size(max(1, leaves), depth, characters)


def _checked(size: _Size) -> _Size:
    if size.leaves > _MAX_LEAVES or size.characters > _MAX_CHARACTERS or size.depth > _MAX_DEPTH:
        raise PickleProblem(
            "has a pickle of containers within containers without end: it is no checkpoint, or is "
            "meant to exhaust memory"
        )
    return size
