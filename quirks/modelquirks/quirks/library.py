"""``LibraryRules``: what the library that a model comes from knows about its checkpoints.

A library such as transformers has rules of its own for each of its models: renamings written as
code, conversions that depend on the config and on shapes. A plugin turns them into the project's
own words for one model and one checkpoint, in two steps: names first, and, once wrappers, packed
weights and other records have had their say, conversions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from modelquirks.quirks.recipe import TensorType
from modelquirks.quirks.record import Convert, ModelQuirks
from modelquirks.quirks.resolve import Renamed

__all__ = ["LibraryRules", "Named"]


class Named(NamedTuple):
    """What the rules say of some families of stored names."""

    taken: tuple[Renamed, ...]
    """Those that the library knows how to use, under the names it gives them."""
    left: tuple[Renamed, ...]
    """The others, as they were."""


class LibraryRules(Protocol):
    """The rules of a library for one of its models."""

    @property
    def record(self) -> ModelQuirks:
        """What is fixed: the name, what may be absent or extra, how the model is cut in parts."""
        ...

    @property
    def problems(self) -> Sequence[str]:
        """What somebody should know, a sentence each: a version that was not tested."""
        ...

    def named(self, pieces: Sequence[Renamed], weights: Mapping[str, str]) -> Named:
        """Return *pieces* under the names that the library gives them.

        *weights* says for each companion of a packed weight (by the template of its name) which
        weight it belongs to: the weight's name decides.
        """
        ...

    def conversions(self, offered: Mapping[str, TensorType]) -> Sequence[Convert]:
        """Return how the library makes what the model wants from the names that are *offered*.

        A shape is None where nobody knows it.
        """
        ...

    def extra(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return those of the stored *names*, unused otherwise, that the library ignores: why."""
        ...

    def absent(self, names: Iterable[str]) -> Mapping[str, str]:
        """Return those of the model's *names* that may be missing for the library: why."""
        ...

    def computed(self, names: Collection[str]) -> Mapping[str, Any]:
        """Return tensors for those of the absent *names* that the model computes itself."""
        ...
