"""``Base``: the model that an adapter is put on, as far as names and shapes go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from modelquirks.planner.mapping.nearest import closest
from modelquirks.quirks.pattern import Pattern, rename
from modelquirks.quirks.record import Alias

__all__ = ["Base", "Shape"]

Shape = tuple[int, ...] | None


@dataclass(frozen=True)
class Base:
    """Names of the base model; of a plan without a model, names as the checkpoint offers them."""

    shapes: Mapping[str, Shape]
    """By name; None: not known."""
    called: Mapping[str, str]
    """Stored name → name in the model: adapters of older models go by the former."""
    aliases: Sequence[Alias] = ()
    """The user's, tried where nothing else fits."""
    turned: Collection[str] = ()
    """Modules whose stacked experts are ``[in, out]``."""

    def find(self, name: str) -> str | None:
        """Return what the model calls the tensor *name* of the adapter's base; None: nothing."""
        if name in self.shapes:
            return name
        if (called := self.called.get(name)) in self.shapes:
            return called
        for alias in self.aliases:
            found = rename(Pattern(alias.stored), Pattern(alias.model), name)
            if found is not None and found[0] in self.shapes:
                return found[0]
        return None

    @cached_property
    def modules(self) -> Mapping[str, Shape]:
        """The modules that have a ``weight``, with its shape."""
        return {
            name.removesuffix(".weight"): shape
            for name, shape in self.shapes.items()
            if name.endswith(".weight")
        }

    def prefixes(self, names: Collection[str]) -> tuple[str, str] | None:
        """Return the prefix to take off and the one to put before, so that all *names* are known.

        None if there are none: the difference is not one of wrappers.
        """
        for source, target in _prefix_pairs(names, self.shapes):
            if all(_moved(name, source, target) in self.shapes for name in names):
                return source, target
        return None

    def nearest(self, name: str) -> tuple[str, ...]:
        """Return the names of the model that come closest to *name*."""
        return closest(name, self.shapes)


def _moved(name: str, source: str, target: str) -> str | None:
    return target + name.removeprefix(source) if name.startswith(source) else None


def _prefix_pairs(names: Collection[str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of prefixes by which the first of *names* would be one that is *known*."""
    first = next(iter(names), "")
    segments = first.split(".")
    for cut in range(len(segments) - 1):  # a leaf alone says nothing
        tail = ".".join(segments[cut:])
        source = ".".join(segments[:cut]) + "." if cut else ""
        for other in known:
            if other == tail or other.endswith(f".{tail}"):
                target = other.removesuffix(tail)
                if source != target:
                    yield source, target
