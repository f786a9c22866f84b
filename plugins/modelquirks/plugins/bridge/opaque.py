"""Opaque conversions: what no recipe can say is left to transformers' own code.

The recipe holds what it takes to run the converter again: the class and the config of the model,
from which transformers makes the same table, and the number of the converter in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from modelquirks.plugins.bridge.internals import converted, rules_of
from modelquirks.plugins.transformers import plain_config
from modelquirks.quirks.recipe import (
    Node,
    Opaque,
    RecipeError,
    Region,
    Scheme,
    Setting,
    Settings,
    Source,
    TensorType,
)

__all__ = ["NAME", "Converter", "opaque"]

NAME = "transformers.converter"


def opaque(
    model: Any, number: int, first: str, sources: Mapping[str, Sequence[str]]
) -> dict[str, Node]:
    """Return an opaque node for each target of converter *number*, by name in the model.

    *first* is the name of its first target, *sources* the names that each pattern takes.
    """
    from modelquirks.planner.dtypes import from_torch

    converter = rules_of(model).converters[number]
    parameters = dict(model.state_dict())
    leaves = tuple(Source(name) for names in sources.values() for name in names)
    counts = json.dumps({pattern: len(names) for pattern, names in sources.items()})
    made: dict[str, Node] = {}
    for pattern in converter.target_patterns:
        name = first.replace(converter.target_patterns[0], pattern)
        if name not in parameters:
            continue
        settings: dict[str, Setting] = {
            "class": type(model).__name__,
            "config": json.dumps(model.config.to_dict(), sort_keys=True, default=str),
            "converter": number,
            "first": first,
            "sources": counts,
            "target": name,
        }
        kind = parameters[name]
        made[name] = Opaque(
            NAME, leaves, from_torch(kind.dtype), tuple(kind.shape), tuple(sorted(settings.items()))
        )
    return made


class Converter(Scheme):
    """Runs a converter of transformers on whole tensors."""

    name: str = NAME
    roles: tuple[str, ...] = ("0",)

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Raise: this is no packing, its nodes say their type themselves."""
        raise RecipeError(f"{NAME!r} is no packing of weights")

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return all of every part."""
        return {role: tuple((0, n) for n in kind.shape or ()) for role, kind in parts.items()}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* of what the converter makes of the *parts*, in *dtype*."""
        model = _model(str(settings["class"]), str(settings["config"]))
        converter = rules_of(model).converters[int(settings["converter"])]
        tensors: dict[str, list[Any]] = {}
        numbers = iter(range(len(parts)))
        for pattern, count in json.loads(str(settings["sources"])).items():
            tensors[pattern] = [parts[str(next(numbers))] for _ in range(count)]
        made = converted(converter, str(settings["first"]), tensors, model)
        whole = made[str(settings["target"])].to(dtype)
        return whole[tuple(slice(start, stop) for start, stop in region)]


@lru_cache(maxsize=2)
def _model(name: str, config: str) -> Any:
    """Return the model of that class and config without weights."""
    import torch

    from modelquirks.planner.model.build import without_network

    transformers: Any = import_module("transformers")
    model_class: Any = getattr(transformers, name, None)
    is_class = isinstance(model_class, type)
    if not is_class or not issubclass(model_class, transformers.PreTrainedModel):
        raise RecipeError(f"transformers has no model {name!r}, which this recipe needs")
    settings = model_class.config_class.from_dict(plain_config(json.loads(config)))
    # Loading threads come here. So neither empty_weights, which changes nn.Module for all of them,
    # nor the config's dtype, which transformers would make the default of all meanwhile.
    with torch.device("meta"), without_network():
        return model_class._from_config(settings, dtype=torch.get_default_dtype())
