"""Tensors of which only the name and the file are known, as an index alone tells."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView

from modelquirks.planner.checkpoint.header import stored_tensors
from modelquirks.planner.checkpoint.manifest import StoredTensor

__all__ = ["NamesOnly"]


class NamesOnly(Mapping[str, StoredTensor]):
    """A mapping of names to tensors without shapes, each made when it is asked for.

    An index of 35,743 names is then open in little more than the time to parse it; what works by
    names alone, as families do, never makes a tensor.
    """

    __slots__ = ("_files",)

    def __init__(self, weight_map: Mapping[str, str]) -> None:
        """Take the mapping of names to files; it must not change afterwards."""
        self._files = weight_map

    def __getitem__(self, name: str) -> StoredTensor:
        """Return the tensor of that name."""
        return StoredTensor(name, self._files[name])

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._files)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name."""
        return name in self._files

    def values(self) -> ValuesView[StoredTensor]:
        """Return the tensors, as fast to go through as a list."""
        return _Values(self)

    def items(self) -> ItemsView[str, StoredTensor]:
        """Return names and tensors, as fast to go through as a dict."""
        return _Items(self)

    def made(self) -> Iterator[StoredTensor]:
        """Make all tensors, in order."""
        return iter(stored_tensors(self._files, self._files.values()))


class _Values(ValuesView[StoredTensor]):
    _mapping: NamesOnly

    def __iter__(self) -> Iterator[StoredTensor]:
        return self._mapping.made()


class _Items(ItemsView[str, StoredTensor]):
    _mapping: NamesOnly

    def __iter__(self) -> Iterator[tuple[str, StoredTensor]]:
        return zip(self._mapping, self._mapping.made(), strict=True)
