"""``Skeleton``: what a model needs, without its weights and without torch types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Literal, NamedTuple

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.dtypes import nbytes
from modelquirks.quirks.block import Block, blocks_in
from modelquirks.quirks.family import (
    Family,
    distinct,
    grouped,
    numbered,
    templates_of,
    uneven,
)

__all__ = ["Kind", "ModelTensor", "Skeleton"]

Kind = Literal["parameter", "buffer", "computed"]
"""``computed``: a non-persistent buffer, which no checkpoint holds."""


class ModelTensor(NamedTuple):
    """One tensor of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind = "parameter"
    on_meta: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in memory in its own dtype."""
        return nbytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Skeleton:
    """Parameters, buffers, modules, ties and classes that must not be split."""

    source: str
    """Where it comes from, for people: ``transformers GptOssForCausalLM``, ``mypkg.model:make``."""
    tensors: Mapping[str, ModelTensor]
    """Every parameter and buffer under every name it has, in module order."""
    modules: Mapping[str, str]
    """Module name → class name, in module order; the root is ``""``."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names that share one tensor, or that the model declares to."""
    no_split: frozenset[str] = frozenset()
    """Names of module classes that must stay on one device."""
    keep_dtype: tuple[str, ...] = ()
    """Name patterns of tensors that keep their dtype when a 16-bit one is asked for."""
    keep_dtype_f16: tuple[str, ...] = ()
    """The same, only when float16 is asked for (its range is too small for them)."""
    config: Mapping[str, object] = field(default_factory=dict)
    turned: frozenset[str] = frozenset()
    """Modules whose stacked experts are ``[in, out]`` (transformers: ``is_transposed``)."""

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds that occur."""
        return frozenset(map(_KIND, self.tensors.values()))

    def of_kinds(self, *kinds: Kind) -> frozenset[str]:
        """Return the names of the tensors of these kinds."""
        if self.kinds.isdisjoint(kinds):
            return frozenset()
        return frozenset(name for name, t in self.tensors.items() if t.kind in kinds)

    @cached_property
    def wanted(self) -> Mapping[str, ModelTensor]:
        """The tensors that a checkpoint has to provide: all but the computed ones."""
        if "computed" not in self.kinds:
            return self.tensors
        return {name: t for name, t in self.tensors.items() if t.kind != "computed"}

    @cached_property
    def families(self) -> Mapping[str, Family]:
        """The wanted tensors by family."""
        return grouped([block.names for block in self._blocks], self._templates)

    @cached_property
    def even_types(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of a family's tensors, by template, where all have the same."""
        keys, types = distinct(self._templates, map(_TYPE, self.wanted.values()))
        apart = uneven(keys, types)
        found = dict(zip(keys, types, strict=True))
        return {numbered(raw): type_ for raw, type_ in found.items() if raw not in apart}

    def take_families(self, manifest: Manifest) -> None:
        """Take the families of *manifest* for one's own, if it has the same names in one order."""
        if len(self.wanted) == len(manifest.tensors) and [*self.wanted] == [*manifest.tensors]:
            vars(self)["_templates"] = manifest.templates  # what the properties would make anew
            vars(self)["families"] = manifest.families

    @cached_property
    def _templates(self) -> Sequence[Sequence[str]]:
        """The raw templates of the wanted tensors, in order: of each block of names."""
        return templates_of(self._blocks)

    @cached_property
    def _blocks(self) -> Sequence[Block]:
        return blocks_in([*self.wanted])


_TYPE, _KIND = itemgetter(1, 2), itemgetter(3)
