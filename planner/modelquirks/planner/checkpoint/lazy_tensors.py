"""Tensors of which names and sizes are at hand, and the rest is made when first asked for.

A checkpoint can have 200,000 tensors. What a plan without a model needs of them is their names and
bytes; a tuple of seven values for each would cost more than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.manifest import StoredTensor

__all__ = ["LazyTensors", "StoredType", "joined"]

StoredType = tuple[Any, ...]
"""Dtype and shape of a tensor, and maybe more in front of them."""


class LazyTensors(Mapping[str, "StoredTensor"]):
    """Tensors of files that keep every rule: all sizes are known, and no two share bytes."""

    def __init__(
        self,
        names: Mapping[str, object],
        sizes: Mapping[str, int] | Sequence[int],
        shapes: frozenset[tuple[int, ...]],
        layout: tuple[str, ...],
        make: Callable[[], Mapping[str, StoredTensor]],
        types: Callable[[], Iterable[StoredType]] | None = None,
    ) -> None:
        """Take what is known; all but *names* is in the order of *names*."""
        self._names = names
        self._sizes = sizes
        self.shapes = shapes
        """Every shape that occurs."""
        self.layout = layout
        """Equal for two of these only if all tensors of both are at the same places."""
        self._make = make
        self._types = types

    @cached_property
    def types(self) -> Sequence[StoredType]:
        """The type of each tensor, in order."""
        if self._types is not None:
            return [*self._types()]
        return [tensor[2:4] for tensor in self.made.values()]

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by name."""
        if isinstance(self._sizes, Mapping):
            return self._sizes
        return dict(zip(self._names, self._sizes, strict=True))

    @property
    def n_bytes(self) -> Iterable[int]:
        """Bytes of each tensor, in order."""
        return self._sizes.values() if isinstance(self._sizes, Mapping) else self._sizes

    @cached_property
    def made(self) -> Mapping[str, StoredTensor]:
        """The tensors themselves, in order."""
        return self._make()

    def __getitem__(self, name: str) -> StoredTensor:
        """Return the tensor of that name."""
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return name in self._names

    def values(self) -> ValuesView[StoredTensor]:
        """Return the tensors."""
        return self.made.values()

    def items(self) -> ItemsView[str, StoredTensor]:
        """Return names and tensors."""
        return self.made.items()


def joined(
    parts: Sequence[LazyTensors],
    names: Mapping[str, object],
    n_bytes: Sequence[int],
    types: Callable[[], Iterable[StoredType]],
) -> LazyTensors:
    """Return the tensors of several files as one mapping, in the order of *names*."""

    def made() -> Mapping[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for part in parts:
            found.update(part.made)
        return {name: found[name] for name in names}

    shapes = frozenset[tuple[int, ...]]().union(*(part.shapes for part in parts))
    layout = tuple(sorted(line for part in parts for line in part.layout))
    return LazyTensors(names, n_bytes, shapes, layout, made, types)
