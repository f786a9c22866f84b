"""Tensors of which names and sizes are at hand, and the rest is made when first asked for.

A checkpoint can have 200,000 tensors. What a plan without a model needs of them is their names and
bytes; a tuple of seven values for each would cost more than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING

from modelquirks.quirks.block import Block, names_of

if TYPE_CHECKING:
    from modelquirks.planner.checkpoint.manifest import StoredTensor

__all__ = ["LazyTensors", "StoredType", "joined"]

StoredType = tuple[int, str, tuple[int, ...]]
"""Bytes, dtype and shape of a tensor. Most tensors have one of a few, which are made once."""


class LazyTensors(Mapping[str, "StoredTensor"]):
    """Tensors of files that keep every rule: all sizes are known, and no two share bytes."""

    def __init__(
        self,
        blocks: Sequence[Block],
        types: Sequence[StoredType],
        shapes: frozenset[tuple[int, ...]],
        layout: tuple[str, ...],
        make: Callable[[], Mapping[str, StoredTensor]],
    ) -> None:
        """Take what is known; *types* are in the order of the names in *blocks*, all different."""
        self.blocks = blocks
        self.types = types
        """The type of each tensor, in order."""
        self.shapes = shapes
        """Every shape that occurs."""
        self.layout = layout
        """Equal for two of these only if all tensors of both are at the same places."""
        self._make = make
        self._n_asked = 0

    @cached_property
    def names(self) -> Sequence[str]:
        """The names, in order."""
        return self.blocks[0].names if len(self.blocks) == 1 else [*names_of(self.blocks)]

    @cached_property
    def by_name(self) -> Mapping[str, StoredType]:
        """The type of each tensor by its name."""
        return dict(zip(self.names, self.types, strict=True))

    def type_of(self, name: str) -> StoredType:
        """Return the type of one tensor; KeyError if there is none of that name."""
        self._n_asked += 1
        if self._n_asked * len(self.blocks) > len(self.types):  # then a table costs less
            return self.by_name[name]
        begin = 0
        for block in self.blocks:
            place = block.place(name)
            if place is not None:
                return self.types[begin + place]
            begin += len(block)
        raise KeyError(name)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by name."""
        return dict(zip(self.names, self.n_bytes, strict=True))

    @cached_property
    def n_bytes(self) -> Sequence[int]:
        """Bytes of each tensor, in order."""
        return [*map(itemgetter(0), self.types)]

    @cached_property
    def made(self) -> Mapping[str, StoredTensor]:
        """The tensors themselves, in order."""
        return self._make()

    def __getitem__(self, name: str) -> StoredTensor:
        """Return the tensor of that name."""
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.names)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.types)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return name in self.by_name

    def values(self) -> ValuesView[StoredTensor]:
        """Return the tensors."""
        return self.made.values()

    def items(self) -> ItemsView[str, StoredTensor]:
        """Return names and tensors."""
        return self.made.items()


def joined(
    parts: Sequence[LazyTensors], blocks: Sequence[Block], types: Sequence[StoredType]
) -> LazyTensors:
    """Return the tensors of several files as one mapping, in the order of *blocks*."""

    def made() -> Mapping[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for part in parts:
            found.update(part.made)
        return {name: found[name] for name in names_of(blocks)}

    shapes = frozenset[tuple[int, ...]]().union(*(part.shapes for part in parts))
    layout = tuple(sorted(line for part in parts for line in part.layout))
    return LazyTensors(blocks, types, shapes, layout, made)
