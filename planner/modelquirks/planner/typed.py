"""``misfits``: does plain data that was read back have the types that the code says?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from modelquirks.planner.finding import brief

__all__ = ["misfits"]


def misfits(value: Any, kind: Any, at: str) -> Iterator[str]:
    """Yield where *value*, or something in it, is not of the type *kind*; *at* names it.

    Knows what plans are made of: unions, literals, tuples, mappings, named tuples, dataclasses
    and plain classes.

    >>> list(misfits({"a": (1, "x")}, Mapping[str, tuple[int, ...]], "sizes"))
    ["sizes['a'][1] is 'x', expected int"]
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if origin in (Union, UnionType):
        if all(any(misfits(value, each, at)) for each in arguments):
            yield _told(value, kind, at)
    elif origin is Literal:
        if value not in arguments:
            yield _told(value, kind, at)
    elif not isinstance(value, origin or kind) or (kind is int and isinstance(value, bool)):
        yield _told(value, kind, at)
    elif origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            yield _told(value, kind, at)
            return
        for number, (item, each) in enumerate(zip(value, kinds, strict=True)):
            yield from misfits(item, each, f"{at}[{number}]")
    elif origin is Mapping:
        for key, item in value.items():
            yield from misfits(key, arguments[0], f"a key of {at}")
            yield from misfits(item, arguments[1], f"{at}[{key!r}]")
    elif is_dataclass(kind) or hasattr(kind, "_fields"):
        for name, hint in get_type_hints(kind).items():
            yield from misfits(getattr(value, name), hint, f"{at}.{name}")


def _told(value: object, kind: Any, at: str) -> str:
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return f"{at} is {brief(value, 80)}, expected {name}"
