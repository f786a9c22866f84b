"""``Manifest``: what a checkpoint holds, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from modelquirks.planner.checkpoint.lazy_tensors import LazyTensors
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.checkpoint.origin import HubOrigin
from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.finding import Finding
from modelquirks.quirks.block import Block, blocks_in, cut_up
from modelquirks.quirks.family import Family, distinct, grouped, numbered, templates_of, uneven
from modelquirks.quirks.recipe import Node, Source, sources

__all__ = ["MARK", "Format", "Manifest", "Shard", "StoredTensor", "shared_groups"]

Format = Literal["safetensors", "torch", "flax", "gguf", "unknown"]

_T = TypeVar("_T")
DtypeAndShape = tuple[str | None, tuple[int, ...] | None]
"""Of a stored tensor; ``None``: the index alone does not tell."""

MARK = "adapter:"
"""Before the names of the tensors of an adapter that is planned together with its base."""


class StoredTensor(NamedTuple):
    """Where one tensor of the checkpoint is. ``None``: the index alone does not tell."""

    name: str
    shard: str
    """File, relative to the checkpoint folder, with ``/``; of an adapter the absolute path."""
    dtype: str | None = None
    """As safetensors spells it."""
    shape: tuple[int, ...] | None = None
    begin: int | None = None
    """Offset of the first byte in the file."""
    end: int | None = None
    """Offset behind the last byte in the file."""
    stride: tuple[int, ...] | None = None
    """Elements between neighbours, by dimension; None: dense, row after row."""

    @property
    def nbytes(self) -> int | None:
        """Bytes stored, or None if only the name is known."""
        return None if self.begin is None or self.end is None else self.end - self.begin


def shared_groups(tensors: Iterable[StoredTensor]) -> tuple[tuple[str, ...], ...]:
    """Return the names that share one place: same file, bytes, dtype, shape and stride.

    Files of ``torch.save`` tell by this that tensors are tied; safetensors files cannot.
    """
    places: dict[tuple[object, ...], list[str]] = {}
    for tensor in tensors:
        if tensor.nbytes:
            places.setdefault(tensor[1:], []).append(tensor.name)
    return tuple(tuple(names) for names in places.values() if len(names) > 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the checkpoint as it was when its header was read."""

    name: str
    """Relative to the checkpoint folder, with ``/``."""
    size_bytes: int | None
    """None: the file is not there."""
    mtime_ns: int | None
    digest: str | None
    """sha256 of the header: safetensors' JSON, or the records and the pickle of a zip file."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: names, dtypes, shapes, byte ranges, config, oddities found."""

    root: Path
    """Folder of the checkpoint."""
    path: Path
    """What the user named: the folder, a file or an index."""
    format: str
    """A :data:`Format`, or what the plugin says that opened it."""
    tensors: Mapping[str, StoredTensor]
    shards: tuple[Shard, ...]
    config: Mapping[str, Any]
    """Content of config.json, ``{}`` without one."""
    findings: tuple[Finding, ...] = ()
    declared_bytes: int | None = None
    """``metadata.total_size`` of the index where it is believable."""
    container: str = ""
    """What the weights were wrapped in: ``lightning``, ``state_dict``, ``deepspeed``…"""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """``__metadata__`` of the safetensors headers, first file wins."""
    assembled: Mapping[str, Node] = field(default_factory=dict)
    """Of tensors that lie in several places: how each is made, over names in ``places``. They are
    among ``tensors`` with dtype and shape, and without begin and end."""
    places: Mapping[str, StoredTensor] = field(default_factory=dict)
    """With ``assembled``: every byte range that may be read, by name."""
    options: OpenOptions = AS_USUAL
    """What was chosen of it, by somebody or by the format: opens just this again."""
    origin: HubOrigin | None = None
    """Where the files come from if they need not be here: ``root`` is where they will be."""

    @property
    def shown(self) -> str:
        """What to call it to people: the path, or the repository."""
        return str(self.origin or self.path)

    @cached_property
    def families(self) -> Mapping[str, Family]:
        """The tensors by family, in stored order."""
        return grouped([block.names for block in self._blocks], self.templates)

    @cached_property
    def templates(self) -> Sequence[Sequence[str]]:
        """The raw templates of the tensors, in order: of each block of names."""
        return templates_of(self._blocks)

    @cached_property
    def _blocks(self) -> Sequence[Block]:
        if isinstance(self.tensors, LazyTensors):
            return cut_up(self.tensors.blocks)
        return blocks_in([*self.tensors])

    @property
    def readable(self) -> Mapping[str, StoredTensor]:
        """What a recipe of a plan may read, by name: the tensors, or the parts of them."""
        return self.places if self.assembled else self.tensors

    @cached_property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that share one place in a file, which is evidence of a tie.

        So do those that are made of the same parts.
        """
        alike: dict[Node, list[str]] = {}
        stored: list[StoredTensor] = []
        for name, tensor in self.tensors.items():
            node = self.assembled.get(name)
            if node is None:
                stored.append(tensor)
            elif isinstance(node, Source):  # a tensor that lies in one place, under another name
                stored.append(self.places[node.name]._replace(name=name))
            else:
                alike.setdefault(node, []).append(name)
        made = (tuple(names) for names in alike.values() if len(names) > 1)
        return (*shared_groups(stored), *made)

    @cached_property
    def has_headers(self) -> bool:
        """Whether the shapes of all tensors are known."""
        if isinstance(self.tensors, LazyTensors):
            return True
        if self.assembled:
            return all(size is not None for size in self.sizes.values())
        return all(t.begin is not None for t in self.tensors.values())

    @cached_property
    def sizes(self) -> Mapping[str, int | None]:
        """Bytes of each tensor, None where only the name is known."""
        if isinstance(self.tensors, LazyTensors):
            return self.tensors.sizes
        found = {name: tensor.nbytes for name, tensor in self.tensors.items()}
        for name in self.assembled:
            _, _, dtype, shape, *_ = self.tensors[name]
            found[name] = None if dtype is None or shape is None else nbytes(dtype, shape)
        return found

    @cached_property
    def even_sizes(self) -> Mapping[str, int]:
        """Bytes of each tensor of a family, by template, where that is one number."""
        return _first(*self._sized, but=self._uneven_in_bytes)

    @cached_property
    def uneven_sizes(self) -> Mapping[str, Sequence[int]]:
        """Bytes of each member of the other families, in order, by template."""
        return _members(self.templates, self._n_bytes, of=self._uneven_in_bytes)

    @cached_property
    def even_types(self) -> Mapping[str, DtypeAndShape]:
        """Dtype and shape of each tensor of a family, by template, where all have the same."""
        types = _first(*self._typed, but=self._uneven)
        return {template: type_[-2:] for template, type_ in types.items()}

    @cached_property
    def uneven_types(self) -> Mapping[str, Sequence[DtypeAndShape]]:
        """Dtype and shape of each member of the other families, in order, by template."""
        found = _members(self.templates, self._types, of=self._uneven)
        return {template: [type_[-2:] for type_ in types] for template, types in found.items()}

    @cached_property
    def _uneven(self) -> frozenset[str]:
        """The raw templates of families whose members differ in dtype or shape."""
        return uneven(*self._typed)

    @cached_property
    def _uneven_in_bytes(self) -> frozenset[str]:
        """The same of those that differ in bytes, which dtype and shape make."""
        return uneven(*self._sized) if self._uneven else frozenset()

    @cached_property
    def _typed(self) -> tuple[Sequence[str], Sequence[Any]]:
        """Raw templates, and dtype and shape behind something else: all pairs that occur."""
        return distinct(self.templates, self._types)

    @cached_property
    def _sized(self) -> tuple[Sequence[str], Sequence[int]]:
        """Raw templates and bytes, all pairs that occur; nothing where they are not at hand."""
        return distinct(self.templates, self._n_bytes) if self._n_bytes else ((), ())

    @property
    def _n_bytes(self) -> Sequence[int]:
        """The bytes of each tensor; nothing where they are not at hand."""
        return self.tensors.n_bytes if isinstance(self.tensors, LazyTensors) else ()

    def dtype_of(self, name: str) -> str | None:
        """Return the dtype of a tensor, without making all that could be known of the others."""
        if isinstance(self.tensors, LazyTensors):
            return self.tensors.type_of(name)[1]
        return self.tensors[name].dtype

    @property
    def _types(self) -> Sequence[Any]:
        """Dtype and shape, behind something else, of each tensor."""
        if isinstance(self.tensors, LazyTensors):
            return self.tensors.types
        return [tensor[2:4] for tensor in self.tensors.values()]

    @property
    def _parts(self) -> Iterable[StoredTensor]:
        """Everything with a place that the tensors are made of."""
        leaves = (leaf.name for node in self.assembled.values() for leaf in sources(node))
        whole = (t for name, t in self.tensors.items() if name not in self.assembled)
        return (*whole, *(self.places[name] for name in leaves))

    @cached_property
    def total_bytes(self) -> int | None:
        """Bytes of all tensors by their headers, else what the index declares, else None.

        Tensors in the same place count once.
        """
        if isinstance(self.tensors, LazyTensors):
            return sum(self.tensors.n_bytes)
        if self.has_headers and self.tensors:
            places = {(t.shard, t.begin, t.end): t.nbytes or 0 for t in self._parts}
            return sum(places.values())
        return self.declared_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the ``checkpoint`` object of the reports."""
        hub = {} if self.origin is None else {"hub": self.origin.to_json()}
        return {
            "path": self.shown,
            **hub,
            "format": self.format,
            "tensors": len(self.tensors),
            "families": len(self.families),
            "shards": len(self.shards),
            "total_bytes": self.total_bytes,
            "chosen": self.options.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }


def _first(raws: Sequence[str], values: Sequence[_T], *, but: frozenset[str]) -> dict[str, _T]:
    """Return the value of each family, by template, *but* of those that have several."""
    found = dict(zip(raws, values, strict=True))
    return {numbered(raw): value for raw, value in found.items() if raw not in but}


def _members(
    templates: Sequence[Sequence[str]], values: Sequence[_T], *, of: frozenset[str]
) -> dict[str, list[_T]]:
    """Return the value of each member *of* these families, in order, by template."""
    found: dict[str, list[_T]] = {}
    if of and values:
        raws = [*chain.from_iterable(templates)]
        pairs = zip(raws, values, strict=True)
        for raw, value in compress(pairs, map(of.__contains__, raws)):
            found.setdefault(raw, []).append(value)
    return {numbered(raw): listed for raw, listed in found.items()}
