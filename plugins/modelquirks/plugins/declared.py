"""What config.json declares about its quantisation, read with the checks that all formats need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from modelquirks.quirks.recipe import RecipeError

__all__ = ["Declared", "declared", "flag", "module_of", "number", "required", "text"]

_KEYS = ("quantization_config", "quantization", "compression_config")

Declared = Mapping[str, Any]


def declared(config: Mapping[str, Any], *keys: str) -> Declared:
    """Return the first non-empty object under *keys*, also in a sub-config; else an empty one.

    Without *keys*, those that any format uses.

    >>> declared({"text_config": {"quantization_config": {"bits": 4}}})
    {'bits': 4}
    """
    for part in _parts(config):
        for key in keys or _KEYS:
            if isinstance(found := part.get(key), dict) and found:
                return cast(Declared, found)
    return {}


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for key, value in config.items():
        if key.endswith("_config") and key not in _KEYS and isinstance(value, dict):
            yield cast(Mapping[str, Any], value)


def module_of(weight: str) -> str:
    """Return the name of the module that *weight* is of.

    >>> module_of("model.layers.0.mlp.up_proj.weight"), module_of("mlp.experts.down_proj")
    ('model.layers.0.mlp.up_proj', 'mlp.experts.down_proj')
    """
    return weight.removesuffix(".weight")


def number(said: Declared, *names: str) -> int | None:
    """Return the first integer of those *names*; RecipeError if it is something else."""
    found = _first(said, names)
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        return found
    raise RecipeError(f"config.json says {names[0]} is {found!r}, not a number")


def flag(said: Declared, name: str) -> bool | None:
    """Return the boolean under *name*; RecipeError if it is something else."""
    found = said.get(name)
    if found is None or isinstance(found, bool):
        return found
    raise RecipeError(f"config.json says {name} is {found!r}, neither true nor false")


def text(said: Declared, *names: str) -> str:
    """Return the first string of those *names* in lower case; empty if there is none."""
    found = _first(said, names)
    return found.lower() if isinstance(found, str) else ""


def required(value: int | None, name: str, weight: str, where: str) -> int:
    """Return *value*; RecipeError that tells what is lacking for *weight*, and *where*."""
    if value is None:
        raise RecipeError(
            f"{where} does not say how many {name} the packed {weight!r} has: nothing else "
            f"tells, so add {name!r} there"
        )
    return value


def _first(said: Declared, names: Iterable[str]) -> Any:
    return next((said[name] for name in names if said.get(name) is not None), None)
