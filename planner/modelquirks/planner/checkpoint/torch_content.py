"""``TorchContent``: what a file of ``torch.save`` says, whichever part of it is weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.manifest import Shard
from modelquirks.planner.checkpoint.pickle_names import about_names
from modelquirks.planner.checkpoint.place_tensors import place_tensors
from modelquirks.planner.checkpoint.state_dict import find_weights
from modelquirks.planner.checkpoint.torch_pickle import TensorRecord, TorchPickle
from modelquirks.planner.finding import Finding, shown

__all__ = ["Faults", "TorchContent", "record_findings", "weights_of"]

Faults = Mapping[str, list[tuple[str, str]]]
"""By code of the finding: the key of each storage whose record is wrong, and a remark."""


@dataclass(frozen=True, eq=False)
class TorchContent:
    """One file of ``torch.save``: its pickle as plain data, and where each storage lies."""

    shard: Shard
    saved: TorchPickle | None
    """None: it could not be read, and the findings say why."""
    begins: Mapping[str, int] = field(default_factory=dict)
    """Offset in the file of each storage whose bytes are there, by key."""
    faults: Faults = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    written_as: str = ""
    """The folder within a zip file: what ``torch.save`` was told as the file's name, without its
    suffix (PyTorchFileWriter of torch 2.13). ``archive`` if it was told none."""


def weights_of(content: TorchContent) -> Header:
    """Return the weights in a file, as if it were a checkpoint of its own."""
    shard, saved = content.shard, content.saved
    if saved is None:
        return Header(shard, findings=content.findings)
    weights = find_weights(shard.name, saved.value)
    entries, beyond = place_tensors(shard.name, weights.tensors, begins=content.begins)
    found = (
        *about_names(shard.name, saved.globals),
        *weights.findings,
        *beyond,
        *record_findings(shard.name, content.faults, weights.tensors),
        *content.findings,
    )
    return Header(shard, "torch", entries, {}, found, weights.container)


_RECORD_FAULTS = {
    "record-missing": "storages without a record in the file",
    "record-compressed": "storages that are compressed: they cannot be read in place; save again",
    "record-size": "storages whose records have another size",
    "record-differs": "storages whose records are not what the directory of the file says",
    "record-overlap": "storages that lie in each other's records",
    "record-misplaced": "storages whose records are not where they should be",
}


def record_findings(
    shard: str, faults: Faults, tensors: Mapping[str, TensorRecord]
) -> Iterator[Finding]:
    """Say which records are wrong and which tensors that costs."""
    for code, records in faults.items():
        keys = {key for key, _ in records}
        names = [name for name, tensor in tensors.items() if tensor.storage.key in keys]
        listed = ", ".join(f"'data/{key}' ({remark})" for key, remark in records[:5])
        more = f" … and {len(records) - 5} more" if len(records) > 5 else ""
        text = f"{shard!r}: {_RECORD_FAULTS[code]}: {listed}{more}; of {shown(names)}."
        yield Finding(code, "error", text)
