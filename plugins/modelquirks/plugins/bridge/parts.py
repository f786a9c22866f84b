"""Models of transformers inside of another module: the rules of each, under its path."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from modelquirks.plugins.bridge.internals import is_pretrained, version
from modelquirks.plugins.bridge.rules import NAME, URL, TransformersRules
from modelquirks.quirks.library import Named
from modelquirks.quirks.recipe import Node, Source, TensorType, mapped
from modelquirks.quirks.record import Convert, Match, ModelQuirks, Parallel
from modelquirks.quirks.resolve import Renamed

__all__ = ["PartRules", "rules_for"]


def rules_for(model: Any, names: Collection[str]) -> TransformersRules | PartRules | None:
    """Return the rules for *model*, be it of transformers or with such models inside."""
    if is_pretrained(model):
        return TransformersRules(model, names)
    parts = {
        path: TransformersRules(part, frozenset(_below(path, names)))
        for path, part in _outermost(model)
    }
    return PartRules(type(model).__name__, parts) if parts else None


@dataclass(frozen=True)
class PartRules:
    """The rules of several models, each for the names below its path."""

    what: str
    """Class of the module that holds them."""
    parts: Mapping[str, TransformersRules]

    @cached_property
    def record(self) -> ModelQuirks:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        inside = ", ".join(f"{path}: {type(r.model).__name__}" for path, r in self.parts.items())
        return ModelQuirks(
            name=NAME,
            role="architecture",
            match=Match(architectures=(self.what,)),
            parallel=tuple(
                Parallel(f"{path}.{cut.modules}", cut.style)
                for path, rules in self.parts.items()
                for cut in rules.record.parallel
            ),
            why=f"transformers {version()} converts checkpoints of what is inside: {inside}",
            url=URL,
        )

    @property
    def problems(self) -> Sequence[str]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        found = (problem for rules in self.parts.values() for problem in rules.problems)
        return tuple(dict.fromkeys(found))

    def named(self, pieces: Sequence[Renamed], weights: Mapping[str, str]) -> Named:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        taken: list[Renamed] = []
        left = list(pieces)
        for path, rules in self.parts.items():
            inner = [p for p in left if p.name.startswith(f"{path}.")]
            left = [p for p in left if not p.name.startswith(f"{path}.")]
            bare = [replace(p, name=p.name[len(path) + 1 :]) for p in inner]
            known, unknown = rules.named(bare, dict(_pairs_below(path, weights)))
            taken += [replace(p, name=f"{path}.{p.name}") for p in known]
            left += [replace(p, name=f"{path}.{p.name}") for p in unknown]
        return Named(tuple(taken), tuple(left))

    def conversions(self, offered: Mapping[str, TensorType]) -> Sequence[Convert]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        return tuple(
            Convert(f"{path}.{rule.target}", _under(path, rule.recipe))
            for path, rules in self.parts.items()
            for rule in rules.conversions(
                {n: offered[f"{path}.{n}"] for n in _below(path, offered)}
            )
        )

    def extra(self, names: Iterable[str]) -> Mapping[str, str]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        listed = list(names)
        return {
            f"{path}.{name}": why
            for path, rules in self.parts.items()
            for name, why in rules.extra(_below(path, listed)).items()
        }

    def absent(self, names: Iterable[str]) -> Mapping[str, str]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        listed = list(names)
        return {
            f"{path}.{name}": why
            for path, rules in self.parts.items()
            for name, why in rules.absent(_below(path, listed)).items()
        }

    def computed(self, names: Collection[str]) -> Mapping[str, Any]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        return {
            f"{path}.{name}": value
            for path, rules in self.parts.items()
            for name, value in rules.computed(_below(path, names)).items()
        }


def _outermost(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the models of transformers in *model* that are not part of another one."""
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if is_pretrained(module) and not inside:
            found.append(path)
            yield path, module


def _below(path: str, names: Iterable[str]) -> list[str]:
    return [name[len(path) + 1 :] for name in names if name.startswith(f"{path}.")]


def _pairs_below(path: str, weights: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for part, weight in weights.items():
        if part.startswith(f"{path}.") and weight.startswith(f"{path}."):
            yield part[len(path) + 1 :], weight[len(path) + 1 :]


def _under(path: str, recipe: Node) -> Node:
    return mapped(recipe, lambda n: Source(f"{path}.{n.name}") if isinstance(n, Source) else n)
