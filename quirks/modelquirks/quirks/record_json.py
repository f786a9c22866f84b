"""Records as plain data: what ``plugins show --json`` prints."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from modelquirks.quirks.recipe_json import to_json
from modelquirks.quirks.record import Convert, ModelQuirks

__all__ = ["match_json", "record_json"]


def record_json(record: ModelQuirks) -> dict[str, Any]:
    """Return *record* as strings, numbers, lists and objects; fields that are empty are left out.

    >>> from modelquirks.quirks.record import Alias, Match
    >>> match = Match(model_types=("acme",))
    >>> record_json(ModelQuirks(name="acme", role="wrapper", match=match, why="Acme's."))
    {'name': 'acme', 'role': 'wrapper', 'match': {'model_types': ['acme']}, 'why': "Acme's."}
    """
    found: dict[str, Any] = {"name": record.name, "role": record.role}
    found["match"] = match_json(record)
    for field in fields(ModelQuirks):
        value = getattr(record, field.name)
        if field.name not in found and value:
            found[field.name] = _plain(value)
    return found


def match_json(record: ModelQuirks) -> dict[str, list[str]]:
    """Return what the match of *record* asks for."""
    match = record.match
    asked = {field.name: list(getattr(match, field.name)) for field in fields(match)}
    return {name: values for name, values in asked.items() if values}


def _plain(value: object) -> Any:
    if isinstance(value, frozenset):
        return sorted(map(str, value))
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Convert):
        made: dict[str, Any] = {"target": value.target, "recipe": to_json(value.recipe)}
        return {**made, "either": True} if value.either else made
    if hasattr(value, "__dataclass_fields__"):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}  # type: ignore[arg-type]
        return {name: _plain(part) for name, part in parts.items() if part not in ((), None)}
    return value
