"""Refusals: packed weights on devices on which their modules do not work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.placement.memory import Device
from modelquirks.quirks.record import ModelQuirks

__all__ = ["refusals"]


def refusals(
    packed: Mapping[str, Iterable[str]],
    records: Iterable[ModelQuirks],
    devices: Mapping[str, Device],
) -> Iterator[Finding]:
    """Yield an error for each format that some of its tensors' devices do not suit.

    *packed* holds the names of the model that keep packed tensors as they are, by the record that
    knows them; *devices* says where each tensor goes.
    """
    for record in records:
        names = list(packed.get(record.name, ())) if record.refuses else []
        for refusal in record.refuses:
            there = [name for name in names if devices.get(name) == refusal.device]
            if there:
                yield Finding(
                    "device-refused",
                    "error",
                    f"{len(there)} tensors of packed weights ({record.name}) would be on "
                    f"{refusal.device!r}, among them {shown(there, 3)}: {refusal.why}. Place them "
                    "elsewhere, or give a plain model and --dequantize",
                )
