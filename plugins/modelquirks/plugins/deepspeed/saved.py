"""``SavedState``: one file of the checkpoint as plain data, tensors as places in the file."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.manifest import Shard, StoredTensor
from modelquirks.planner.checkpoint.pickle_machine import Opaque
from modelquirks.planner.checkpoint.pickle_names import about_names
from modelquirks.planner.checkpoint.place_tensors import place_tensors
from modelquirks.planner.checkpoint.torch_content import TorchContent, record_findings
from modelquirks.planner.checkpoint.torch_pickle import TensorRecord
from modelquirks.planner.checkpoint.torch_zip import read_content
from modelquirks.planner.dtypes import MAX_DIMS
from modelquirks.planner.finding import Finding
from modelquirks.plugins.deepspeed.files import StateName, parsed

__all__ = ["Placed", "SavedState", "mapping", "names", "read_saved", "shapes", "state_of", "whole"]

Shapes = Mapping[str, tuple[int, ...]]

_SCALARS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}


class Placed(NamedTuple):
    """Tensors by name, and what is wrong with those whose bytes are not there."""

    tensors: Mapping[str, StoredTensor]
    """One that is damaged has neither begin nor end."""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, eq=False)
class SavedState:
    """One file; ``value`` is ``{}`` if it could not be read, and ``findings`` say why."""

    name: StateName
    shard: Shard
    value: Mapping[Any, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    content: TorchContent | None = None
    path: Path = Path()
    written_as: StateName | None = None
    """The name that it had when ``torch.save`` wrote it, where the file tells."""

    @property
    def readable(self) -> bool:
        """Whether its content is known."""
        return self.content is not None

    def place(self, tensors: Mapping[str, Any]) -> Placed:
        """Return where *tensors*, some values of this file by name, lie in it."""
        if self.content is None:
            return Placed({})
        records = {k: v for k, v in tensors.items() if isinstance(v, TensorRecord)}
        placed, beyond = place_tensors(self.shard.name, records, begins=self.content.begins)
        used = {record.storage.key for record in records.values()}
        faults = {
            code: hit
            for code, found in self.content.faults.items()
            if (hit := [fault for fault in found if fault[0] in used])
        }
        return Placed(placed, (*beyond, *record_findings(self.shard.name, faults, records)))

    def number(self, value: Any) -> float | None:
        """Return a number, or that in a tensor of one element, which alone is read; else None."""
        if isinstance(value, int | float):  # up to 256 bits, as the pickle machine has them
            return float(value)
        stored = self.place({"": value}).tensors.get("")
        if stored is None or stored.begin is None or stored.dtype not in _SCALARS:
            return None
        form = struct.Struct(_SCALARS[stored.dtype])
        if stored.nbytes != form.size:
            return None
        with self.path.open("rb") as file:
            file.seek(stored.begin)
            content = file.read(form.size)
        return float(form.unpack(content)[0]) if len(content) == form.size else None


def read_saved(folder: Path, name: StateName, *, shard: str = "") -> SavedState:
    """Return the content of a file in *folder*. Never raises for what is in it.

    Classes of DeepSpeed are taken as data without remark; others are findings.
    """
    content = read_content(folder / name.name, shard=shard or name.name)
    if content.saved is None:
        return SavedState(name, content.shard, findings=content.findings)
    strange = [g for g in content.saved.globals if not g.module.startswith("deepspeed.")]
    found = (*content.findings, *about_names(content.shard.name, strange))
    value = content.saved.value
    if isinstance(value, TensorRecord):  # universal, from ZeRO 3
        value = {"param": value}
    if not isinstance(value, dict):
        text = f"{content.shard.name!r} holds {type(value).__name__}, not a dictionary."
        found = (*found, Finding("state-invalid", "error", text))
        value = {}
    written_as = parsed(f"{content.written_as}.pt")
    path = folder / name.name
    return SavedState(name, content.shard, value, found, content, path, written_as)


def mapping(value: Any) -> Mapping[Any, Any]:
    """Return *value* if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def whole(value: Any) -> int | None:
    """Return *value* if it is a whole number from 0, or an enumeration of one, else None."""
    if isinstance(value, Opaque) and isinstance(value.args, tuple) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def state_of(value: Any) -> Mapping[Any, Any]:
    """Return the attributes of an object that was not made."""
    return mapping(value.state) if isinstance(value, Opaque) else {}


def names(value: Any) -> tuple[str, ...]:
    """Return the texts in a list."""
    listed: Iterable[Any] = value if isinstance(value, list | tuple) else ()
    return tuple(item for item in listed if isinstance(item, str))


def shapes(value: Any) -> dict[str, tuple[int, ...]]:
    """Return names with their shapes: torch.Size, or a tuple, as in checkpoints with experts."""
    return {
        name: shape
        for name, shape in mapping(value).items()
        if isinstance(name, str)
        and isinstance(shape, tuple)
        and not isinstance(shape, TensorRecord)
        and len(shape) <= MAX_DIMS
        and all(whole(length) is not None for length in shape)
    }
