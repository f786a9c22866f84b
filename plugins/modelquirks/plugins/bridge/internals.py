"""What the bridge uses of transformers beyond its public interface, in one place.

Written against transformers 5.24 (``core_model_loading.py``, ``conversion_mapping.py``). Whatever
of it another version lacks is named by :func:`lacking`; the bridge then is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from modelquirks.plugins.bridge.deferred import compiled_later

__all__ = [
    "TESTED",
    "Found",
    "Rules",
    "converted",
    "found",
    "guards",
    "has_pretrained",
    "is_pretrained",
    "lacking",
    "renamed",
    "rules_of",
    "source_shapes",
    "version",
]

TESTED = "5.24"
"""The version, as major and minor number, that the tests run with."""

_CORE = "transformers.core_model_loading"
_MAPPING = "transformers.conversion_mapping"
_NEEDED = {
    _CORE: (
        "WeightConverter",
        "WeightRenaming",
        "WeightTransform",
    ),
    _MAPPING: ("get_model_conversion_mapping",),
}
_OF_TRANSFORM = ("rename_source_key", "source_patterns", "target_patterns", "collected_tensors")


def version() -> str:
    """Return the version of transformers that is installed."""
    return str(import_module("transformers").__version__)


def lacking() -> tuple[str, ...]:
    """Return what the bridge needs and this version of transformers does not have."""
    names: list[str] = []
    for module, needed in _NEEDED.items():
        if find_spec(module) is None:
            names.append(module)
            continue
        loaded = import_module(module)
        names += [f"{module}.{name}" for name in needed if not hasattr(loaded, name)]
    if not names:
        transform = import_module(_CORE).WeightConverter
        names += [f"WeightConverter.{n}" for n in _OF_TRANSFORM if not hasattr(transform, n)]
        names += [] if hasattr(transform, "convert") else ["WeightConverter.convert"]
    return tuple(names)


def is_pretrained(module: object) -> bool:
    """Tell whether *module* is a model of transformers."""
    return isinstance(module, import_module("transformers").PreTrainedModel)


def has_pretrained(module: Any) -> bool:
    """Tell whether *module* is a model of transformers or has one inside."""
    return any(is_pretrained(part) for part in module.modules())


class Rules(NamedTuple):
    """The conversion table of one model, in the order in which it is applied."""

    renamings: tuple[Any, ...]
    """``WeightRenaming``: all are applied, one after another."""
    converters: tuple[Any, ...]
    """``WeightConverter``: the first that matches."""

    @property
    def texts(self) -> Iterable[str]:
        """Every pattern of every rule, for whatever digits it has."""
        for rule in (*self.renamings, *self.converters):
            yield from (*rule.source_patterns, *rule.target_patterns)
            yield getattr(getattr(rule, "pattern", None), "pattern", "")


class Found(NamedTuple):
    """The converter that takes a name, and the pattern by which it does."""

    number: int
    """Position among the converters."""
    pattern: str


def rules_of(model: Any) -> Rules:
    """Return the conversion table of *model*, legacy rules included, nothing of it used yet."""
    core, mapping = import_module(_CORE), import_module(_MAPPING)
    tested = version().startswith(f"{TESTED}.")
    with compiled_later(core) if tested else nullcontext():  # another one may want real expressions
        table = mapping.get_model_conversion_mapping(model, add_legacy=True)
    return Rules(
        renamings=tuple(rule for rule in table if isinstance(rule, core.WeightRenaming)),
        converters=tuple(rule for rule in table if isinstance(rule, core.WeightConverter)),
    )


def guards(rules: Rules, names: Iterable[str]) -> None:
    """Let rules that wait for a first name see all *names*, so that order says nothing later.

    ``GroupWeightRename`` renames ``norm0`` and ``norm1`` only after it has seen a ``norm0``: what
    has none was converted before. Before 5.14 transformers had no such rule.
    """
    kind = getattr(import_module(_CORE), "GroupWeightRename", ())
    waiting = [n for n, rule in enumerate(rules.renamings) if isinstance(rule, kind)]
    listed = list(names) if waiting else []
    for position in waiting:
        for name in listed:
            renamed(Rules(rules.renamings[: position + 1], ()), name)


def renamed(rules: Rules, name: str) -> str:
    """Return *name* after all renamings."""
    for rule in rules.renamings:
        name, _ = rule.rename_source_key(name)
    return name


def found(rules: Rules, name: str) -> tuple[str, Found | None]:
    """Return the first target of the converter that takes the renamed *name*, if one does."""
    for number, rule in enumerate(rules.converters):
        target, pattern = rule.rename_source_key(name)
        if pattern is not None:
            return target, Found(number, pattern)
    return name, None


def converted(
    converter: Any, target: str, tensors: Mapping[str, Sequence[Any]], model: Any
) -> dict[str, Any]:
    """Return what *converter* makes of *tensors* (by source pattern), by name in the model."""
    converter.collected_tensors.clear()
    for pattern, listed in tensors.items():
        converter.collected_tensors[pattern] = list(listed)
    made = converter.convert(target, model=model, config=model.config)
    if isinstance(made, tuple):  # early versions of 5 return the errors too, which here are raised
        made = made[0]
    return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}


def source_shapes(
    converter: Any, targets: Mapping[str, Any], model: Any
) -> dict[str, tuple[int, ...]]:
    """Return the shape of what *converter* takes, by source pattern, from its *targets*.

    *targets* holds a tensor of the model by target pattern. As when transformers saves.
    """
    back = converter.reverse_transform()
    tensors: dict[str, Any] = {
        source: [targets[target]]
        for source, target in zip(back.source_patterns, converter.target_patterns, strict=True)
    }
    for operation in back.operations:
        tensors = operation.convert(
            tensors,
            source_patterns=back.source_patterns,
            target_patterns=back.target_patterns,
            full_layer_name="",
            model=model,
            config=model.config,
            missing_keys=None,
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for source, target in zip(converter.source_patterns, back.target_patterns, strict=True):
        value: Any = tensors.get(target, tensors.get(target.replace("*", "0")))
        shapes[source] = tuple((value[0] if isinstance(value, list) else value).shape)
    return shapes
