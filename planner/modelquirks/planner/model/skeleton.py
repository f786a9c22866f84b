"""``Skeleton``: what a model needs, without its weights and without torch types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from modelquirks.planner.dtypes import nbytes
from modelquirks.quirks.family import Family, group

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

    @cached_property
    def wanted(self) -> Mapping[str, ModelTensor]:
        """The tensors that a checkpoint has to provide: all but the computed ones."""
        return {name: t for name, t in self.tensors.items() if t.kind != "computed"}

    @cached_property
    def families(self) -> Mapping[str, Family]:
        """The wanted tensors by family."""
        return group(self.wanted)
