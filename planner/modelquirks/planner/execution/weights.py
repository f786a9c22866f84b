"""``WeightsMap``: the weights that accelerate fetches at each forward pass, by model name."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from modelquirks.planner.dtypes import to_torch
from modelquirks.planner.execution.evaluate import Types, evaluate
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.reader import Reader
from modelquirks.quirks.recipe import Scheme, Slice, Source

__all__ = ["WeightsMap", "is_view"]


class _Entry(NamedTuple):
    item: LoadItem
    dtype: torch.dtype
    reader: Reader
    source: str | None
    """The tensor of *reader* that it is, if it is one without any change."""
    kept: torch.Tensor | None


class WeightsMap(Mapping[str, torch.Tensor]):
    """Offloaded weights under every name they have in the model.

    A weight on disk is made when asked for: a view of its file if that holds it as it is, else
    computed, in the planned dtype; nothing is remembered. A weight kept in memory is given as it
    is. Asking whether a name is there, and listing the names, makes nothing.
    """

    def __init__(
        self,
        items: Iterable[LoadItem],
        *,
        reader: Reader,
        schemes: Mapping[str, Scheme],
        kept: Mapping[str, torch.Tensor],
        extra: Mapping[str, torch.Tensor] | None = None,
        computed: Mapping[str, Reader] | None = None,
    ) -> None:
        """Serve *items*; those whose name is in *kept* from memory, and *extra* as it is.

        *computed* has the reader of those that were computed and written before, by name.
        """
        self._reader = reader
        self._schemes = schemes
        self._extra = dict(extra or {})
        self._entries: dict[str, _Entry] = {}
        for item in items:
            written = (computed or {}).get(item.name)
            source = _unchanged(item, reader) if written is None else item.name
            home, dtype = written or reader, to_torch(item.dtype)
            entry = _Entry(item, dtype, home, source, kept.get(item.name))
            self._entries.update(dict.fromkeys(item.names, entry))

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the weight, on the CPU unless it is kept elsewhere."""
        entry = self._entries.get(name)
        if entry is None:
            return self._extra[name]
        if entry.kept is not None:
            return entry.kept
        if entry.source is not None:
            return entry.reader.read(entry.source)
        return evaluate(
            entry.item.node,
            entry.item.env,
            read=self._reader.read,
            types=self._reader.type_of,
            schemes=self._schemes,
            dtype=entry.dtype,
        )

    def __contains__(self, name: object) -> bool:
        """Tell whether the weight is there, without making it."""
        return name in self._entries or name in self._extra

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        yield from self._entries
        yield from self._extra

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._entries) + len(self._extra)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightsMap:
        """Return a map of its own: other tensors in memory, the same files."""
        other = object.__new__(WeightsMap)
        other._reader = copy.deepcopy(self._reader, memo)
        other._schemes = self._schemes
        other._extra = copy.deepcopy(self._extra, memo)
        other._entries = {
            name: entry._replace(
                kept=copy.deepcopy(entry.kept, memo), reader=copy.deepcopy(entry.reader, memo)
            )
            for name, entry in self._entries.items()
        }
        return other

    @property
    def bytes_read(self) -> int:
        """Bytes asked of the files so far, the checkpoint's and those of computed weights."""
        readers = {id(r): r for r in (self._reader, *(e.reader for e in self._entries.values()))}
        return sum(reader.bytes_read for reader in readers.values())

    def is_cheap(self, name: str) -> bool:
        """Tell whether the weight is there as it is, so that nothing is computed to give it."""
        entry = self._entries.get(name)
        if entry is None or entry.kept is not None or entry.source is not None:
            return True
        return is_view(entry.item, self._reader.type_of)

    def origin(self, name: str) -> str | int:
        """Return the same for two names exactly if one tensor serves both.

        For a weight in memory that is its address, for one on disk the name that owns it.
        """
        entry = self._entries.get(name)
        if entry is None:
            return self._extra[name].data_ptr()
        return entry.item.name if entry.kept is None else entry.kept.data_ptr()


def is_view(item: LoadItem, types: Types) -> bool:
    """Tell whether the tensor lies in a file as it is, whole or as rows of a stored one."""
    node = item.node
    while isinstance(node, Slice) and node.dim == 0:
        node = node.of
    if not isinstance(node, Source):
        return False
    return types(node.name.format_map(dict(item.env))).dtype == item.dtype


def _unchanged(item: LoadItem, reader: Reader) -> str | None:
    if not isinstance(item.node, Source):
        return None
    name = item.node.name.format_map(dict(item.env))
    return name if reader.type_of(name).dtype == item.dtype else None
