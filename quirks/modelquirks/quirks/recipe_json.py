"""Recipes as plain data, for the plan file."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast, get_args

from modelquirks.quirks.recipe import Concat, Interleave, Node, Opaque, Part, RecipeError, Setting

__all__ = ["from_json", "to_json"]

_SEVERAL = (Concat, Interleave, Opaque)
"""Nodes with a tuple of nodes in ``of``."""
_OPS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Node)}


def to_json(node: Node) -> dict[str, Any]:
    """Return *node* as plain data, for the plan file."""
    data: dict[str, Any] = {"op": type(node).__name__.lower()}
    for field in fields(node):
        value = getattr(node, field.name)
        if field.name == "parts":
            value = [{"role": role, "of": to_json(of)} for role, of in value]
        elif field.name == "of":
            value = [to_json(v) for v in value] if isinstance(value, tuple) else to_json(value)
        elif field.name == "settings":
            value = dict(value)
        elif isinstance(value, tuple):
            value = list(value)
        data[field.name] = value
    return data


def from_json(data: Any) -> Node:
    """Return the node that :func:`to_json` wrote; :class:`RecipeError` if it is none."""
    try:
        kind = _OPS[data["op"]]
        values = {f.name: _field_from_json(f.name, data[f.name]) for f in fields(kind)}
        if len(values) + 1 != len(data):
            raise RecipeError(f"unknown fields in recipe node {data['op']!r}")
        if isinstance(values.get("of"), tuple) != (kind in _SEVERAL):
            raise TypeError(f"'of' of {data['op']!r} has the wrong form")
        return cast(Node, kind(**values))
    except (KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"not a recipe: {error}") from error


def _field_from_json(name: str, value: Any) -> Any:
    match name:
        case "parts":
            return tuple(Part(str(p["role"]), from_json(p["of"])) for p in value)
        case "of":
            return tuple(map(from_json, value)) if isinstance(value, list) else from_json(value)
        case "sizes":
            return tuple(value)
        case "dims" | "shape":
            return tuple(int(size) for size in value)
        case "settings":
            return tuple(sorted(_setting(key, v) for key, v in value.items()))
        case "name" | "dtype" | "over" | "index" | "scheme":
            fits = isinstance(value, str)
        case _:  # a number; the count of a stack may be unknown
            fits = isinstance(value, int) or (name == "count" and value is None)
    if not fits:
        raise TypeError(f"{name!r} is {value!r}")
    return value


def _setting(name: str, value: Any) -> tuple[str, Setting]:
    if not isinstance(value, Setting):
        raise TypeError(f"setting {name!r} is {value!r}")
    return name, value
