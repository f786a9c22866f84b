"""``LoadItem``: one tensor of the model, what makes it and where it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from modelquirks.planner.dtypes import nbytes, to_torch
from modelquirks.planner.execution.evaluate import EvaluationError, Read, Types, evaluate
from modelquirks.planner.execution.reader import Region
from modelquirks.planner.placement.memory import Device
from modelquirks.quirks.family import show, template_of
from modelquirks.quirks.recipe import Node, Opaque, Scheme, nodes

__all__ = ["ExecutionError", "LoadItem", "Readable"]


class Readable(Protocol):
    """What gives stored tensors and their types by name."""

    @property
    def read(self) -> Read:
        """Give a region of a stored tensor."""
        ...

    @property
    def type_of(self) -> Types:
        """Give dtype and shape of a stored tensor."""
        ...


class ExecutionError(RuntimeError):
    """The plan could not be executed; the model is as it was before."""


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One tensor to load. A tensor that has several names in the model is one item."""

    name: str
    node: Node
    env: Mapping[str, int]
    """Values of the variables in the names of ``node``."""
    dtype: str
    """What it has in memory, as safetensors spells it."""
    shape: tuple[int, ...]
    """Counts values, also where two share a byte (F4)."""
    device: Device
    kind: Literal["parameter", "buffer"] = "parameter"
    aliases: tuple[str, ...] = ()
    """Other names of the model that are tied to it."""
    rule: str = ""
    """The rule as text, for messages; empty if the checkpoint has the model's own name."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it has in the model, its own first."""
        return (self.name, *self.aliases)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return nbytes(self.dtype, self.shape)

    @property
    def is_opaque(self) -> bool:
        """Whether code makes it, or what it is made of, as a whole: no region of it is cheap."""
        return any(isinstance(node, Opaque) for node in self.nodes())

    def nodes(self) -> Iterator[Node]:
        """Yield every node of the recipe, those above first."""
        return nodes(self.node)

    def make(
        self,
        *,
        read: Read,
        types: Types,
        schemes: Mapping[str, Scheme],
        region: Region | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the tensor, or a region of it, on the CPU as it will be in memory.

        As :func:`~modelquirks.planner.execution.evaluate.evaluate`, errors too.
        """
        return evaluate(
            self.node,
            self.env,
            read=read,
            types=types,
            schemes=schemes,
            region=region,
            dtype=to_torch(self.dtype),
            out=out,
        )

    def made(
        self,
        reader: Readable,
        schemes: Mapping[str, Scheme],
        *,
        region: Region | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what :meth:`make` does, from *reader*; :class:`ExecutionError` names the item."""
        try:
            return self.make(
                read=reader.read, types=reader.type_of, schemes=schemes, region=region, out=out
            )
        except EvaluationError as error:
            raise ExecutionError(f"{self}: {error}") from error

    def __str__(self) -> str:
        """Return the name with family and rule, as messages give it."""
        family = show(template_of(self.name))
        of = "" if family == self.name else f" of family {family!r}"
        by = f" by rule {self.rule!r}" if self.rule else ""
        return f"{self.name!r}{of}{by}"
