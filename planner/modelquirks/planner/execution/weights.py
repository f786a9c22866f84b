"""``WeightsMap``: the weights that accelerate fetches at each forward pass, by model name."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from modelquirks.planner.execution.ahead import AHEAD_BYTES, Ahead
from modelquirks.planner.execution.evaluate import Types, whole
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.order import Need
from modelquirks.planner.execution.preflight import needs
from modelquirks.planner.execution.reader import Reader, Region
from modelquirks.quirks.recipe import Scheme, Slice, Source

__all__ = ["Row", "Steady", "Viewed", "WeightsMap", "is_view"]


class _Entry(NamedTuple):
    item: LoadItem
    reader: Reader
    source: str | None
    """The tensor of *reader* that it is, if it is one without any change."""
    kept: torch.Tensor | None


class Row(NamedTuple):
    """One element of the first dimension of a weight."""

    tensor: torch.Tensor
    is_new: bool
    """Whether it was computed, and is no view of a file or of what is kept in memory."""
    bytes_read: int


class Viewed(NamedTuple):
    """A stored tensor that a weight is a view of."""

    reader: Reader
    name: str

    @property
    def file(self) -> Hashable:
        """The same for tensors of one mapped file."""
        return id(self.reader), self.reader.span(self.name).path

    def look(self) -> None:
        """Raise ``ReadError`` if its file was written to."""
        self.reader.look(self.name)


class Steady(NamedTuple):
    """A weight that is the same memory at every use."""

    tensor: torch.Tensor
    viewed: Viewed | None
    """Where it lies, if it is no tensor in memory."""


class WeightsMap(Mapping[str, torch.Tensor]):
    """Offloaded weights under every name they have in the model.

    A weight on disk is made when asked for: a view of its file if that holds it as it is, else
    computed, in the planned dtype; nothing is remembered, but *ahead* may have made it already. A
    weight kept in memory is given as it is. Asking whether a name is there, and listing the
    names, makes nothing.
    """

    ahead: Ahead
    """Makes computed weights in the background."""

    def __init__(
        self,
        items: Iterable[LoadItem],
        *,
        reader: Reader,
        schemes: Mapping[str, Scheme],
        kept: Mapping[str, torch.Tensor],
        extra: Mapping[str, torch.Tensor] | None = None,
        computed: Mapping[str, Reader] | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """Serve *items*; those whose name is in *kept* from memory, and *extra* as it is.

        *computed* has the reader of those that were computed and written before, by name. At
        most *ahead_bytes* are made ahead.
        """
        self.ahead = Ahead(self, ahead_bytes)
        self._reader = reader
        self._schemes = schemes
        self._extra = dict(extra or {})
        self._entries: dict[str, _Entry] = {}
        for item in items:
            written = (computed or {}).get(item.name)
            source = _unchanged(item, reader) if written is None else item.name
            entry = _Entry(item, written or reader, source, kept.get(item.name))
            self._entries.update(dict.fromkeys(item.names, entry))

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the weight, on the CPU unless it is kept elsewhere."""
        entry = self._entries.get(name)
        if entry is None:
            return self._extra[name]
        if entry.kept is not None:
            return entry.kept
        made = self.ahead.take(entry.item.name)
        return self._make(entry) if made is None else made

    def make(self, key: str) -> torch.Tensor:
        """Return the weight of that :class:`Need`, read or computed now."""
        return self._make(self._entries[key])

    def _make(self, entry: _Entry) -> torch.Tensor:
        if entry.source is not None:
            return entry.reader.read(entry.source)
        reader = self._reader
        return entry.item.make(read=reader.read, types=reader.type_of, schemes=self._schemes)

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

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs; it makes nothing ahead that is not asked for."""
        return self.__dict__ | {"ahead": self.ahead.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with nothing made ahead."""
        self.__dict__.update(state)
        self.ahead = Ahead(self, state["ahead"])

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightsMap:
        """Return a map of its own: other tensors in memory, the same files."""
        other = object.__new__(WeightsMap)
        other.ahead = Ahead(other, self.ahead.limit)
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

    def row(self, name: str, number: int) -> Row:
        """Return one element of the first dimension of a weight, reading no more than it needs."""
        entry = self._entries[name]
        if entry.kept is not None:
            return Row(entry.kept[number], is_new=False, bytes_read=0)
        read = _Counted(entry.reader if entry.source is not None else self._reader)
        region = ((number, number + 1), *whole(entry.item.shape[1:]))
        if entry.source is not None:
            made = read(entry.source, region)
        else:
            types = self._reader.type_of
            made = entry.item.make(read=read, types=types, schemes=self._schemes, region=region)
        is_new = made.untyped_storage().data_ptr() not in read.storages
        return Row(made[0], is_new, read.n_bytes)

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

    def steady(self, name: str) -> Steady | None:
        """Return the weight if it is the same memory at every use: a view, or kept in memory.

        None for one that is computed or copied each time.
        """
        entry = self._entries.get(name)
        kept = self._extra.get(name) if entry is None else entry.kept
        if kept is not None:
            return Steady(kept, None)
        if entry is None:
            raise KeyError(name)
        viewed = self._viewed(entry)
        if viewed is None:
            return None
        with torch.inference_mode(False):  # or autograd could never use it
            tensor = self._make(entry)
        entry.reader.count(-entry.item.nbytes)  # counted whenever it is used
        return Steady(tensor, viewed)

    def count(self, nbytes: int) -> None:
        """Count bytes of steady weights as having been read."""
        self._reader.count(nbytes)

    def need(self, name: str) -> Need | None:
        """Return what it takes to have a weight; None for one in memory."""
        entry = self._entries.get(name)
        if entry is None or entry.kept is not None:
            return None
        sources = [entry.source] if entry.source is not None else needs(entry.item)
        spans = tuple(entry.reader.span(source) for source in sources)
        # What code of others makes is not made in the background: it may change global state.
        is_made = self._viewed(entry) is None and not entry.item.is_opaque
        return Need(entry.item.name, entry.item.nbytes, is_made, spans)

    def _viewed(self, entry: _Entry) -> Viewed | None:
        """Return which tensor of which file the weight is a view of, if of any."""
        source = entry.source
        if source is None and is_view(entry.item, self._reader.type_of):
            (source,) = needs(entry.item)
        if source is None or not entry.item.nbytes or not entry.reader.is_view(source):
            return None
        return Viewed(entry.reader, source)

    def origin(self, name: str) -> str | int:
        """Return the same for two names exactly if one tensor serves both.

        For a weight in memory that is its address, for one on disk the name that owns it.
        """
        entry = self._entries.get(name)
        if entry is None:
            return self._extra[name].data_ptr()
        return entry.item.name if entry.kept is None else entry.kept.data_ptr()


class _Counted:
    """Reads as *reader* does, and remembers how much and what for one caller."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.n_bytes = 0
        self.storages: set[int] = set()

    def __call__(self, name: str, region: Region | None) -> torch.Tensor:
        tensor = self._reader.read(name, region)
        self.n_bytes += tensor.nbytes
        if self._reader.is_view(name):
            self.storages.add(tensor.untyped_storage().data_ptr())
        return tensor


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
