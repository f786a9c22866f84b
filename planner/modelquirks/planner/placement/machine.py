"""``Machine``: devices, their sizes, and how fast bytes get to where they are used.

Only two rates matter for a model that generates token by token: how fast a device reads its own
memory, and how fast bytes come over the link to an accelerator. A machine is asked, described in a
file, or one of the few that ship (``machines/*.json``), so a plan needs no such hardware.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.json_text import JsonProblem, read_json
from modelquirks.planner.placement.memory import (
    Device,
    canonical_order,
    parse_device,
    parse_size,
)

__all__ = [
    "ASSUMED",
    "DeviceSpec",
    "Machine",
    "MachineError",
    "assumed",
    "of_memory",
    "read_machine",
    "shipped_machines",
]

GB = 1e9
"""Bandwidths are told in GB/s, powers of 1000, as data sheets do."""

ASSUMED = "assumed"
"""Name of a machine whose rates nobody gave."""

CROSSING_SECONDS = 20e-6
"""One hop of the hidden states from one device to another: 10 to 30 µs, mostly latency."""


MAKE_RATE = 2e9
"""Bytes a second, of the result, that a cast or a stack writes into fresh memory."""


class MachineError(ValueError):
    """A description that means nothing; the message lists all faults."""


class DeviceSpec(NamedTuple):
    """One device. Rates are what programs reach, about 80 % of a data sheet."""

    capacity_bytes: int | None
    """What may be used; None: no limit, or none that is known."""
    read_rate: float
    """Bytes a second from its own memory to where it computes; from the disk to the cpu."""
    link_rate: float | None = None
    """Bytes a second from the cpu's memory to it; None where that is no copy at all."""
    source: str = ASSUMED
    """Who says so: ``assumed``, or the name of the description."""


@dataclass(frozen=True)
class Machine:
    """Devices in canonical order, and what one hop between two of them takes."""

    name: str
    devices: Mapping[Device, DeviceSpec]
    crossing_seconds: float = CROSSING_SECONDS
    make_rate: float = MAKE_RATE
    """Bytes a second of weights that the cpu computes from what is stored."""

    def __getitem__(self, device: Device) -> DeviceSpec:
        """Return the device; what is not described has the rates of its kind."""
        return self.devices.get(device) or assumed(device)

    @property
    def memory(self) -> dict[Device, int | None]:
        """Bytes of each device, as ``max_memory`` gives them."""
        return {device: spec.capacity_bytes for device, spec in self.devices.items()}

    def limited(self, memory: Mapping[Device, int | None]) -> Machine:
        """Return the machine with those devices only, of that size each."""
        devices = {d: self[d]._replace(capacity_bytes=n) for d, n in memory.items()}
        return replace(self, devices=_ordered(devices))

    def to_json(self) -> dict[str, Any]:
        """Return the description, in bytes and bytes a second."""
        return {
            "name": self.name,
            "crossing_seconds": self.crossing_seconds,
            "make_rate": self.make_rate,
            "devices": {str(device): spec._asdict() for device, spec in self.devices.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """Return what :meth:`to_json` told."""
        devices = {parse_device(d): DeviceSpec(**spec) for d, spec in data["devices"].items()}
        return cls(data["name"], devices, data["crossing_seconds"], data["make_rate"])


_RATES: Mapping[str, tuple[float, float | None]] = {
    "accelerator": (800 * GB, 24 * GB),
    "mps": (300 * GB, None),
    "cpu": (50 * GB, None),
    "disk": (5 * GB, None),
}
"""What a device reaches of which nothing is known: a card with GDDR6X on PCIe 4.0 x16 with pinned
memory, unified memory of a notebook, two channels of DDR5, an NVMe drive of PCIe 4.0 read in large
blocks."""


def assumed(device: Device, capacity_bytes: int | None = None) -> DeviceSpec:
    """Return a device of which only the kind is known."""
    kind = device if isinstance(device, str) and device in _RATES else "accelerator"
    return DeviceSpec(capacity_bytes, *_RATES[kind])


def shipped_machines() -> list[str]:
    """Return the names of the descriptions that ship."""
    folder = files("modelquirks.planner.placement") / "machines"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name[-5:] == ".json")


def read_machine(name: str) -> Machine:
    """Return the machine of that name that ships, or that a file of that path describes.

    MachineError says what is wrong with it, or which there are.
    """
    if name in shipped_machines():
        text = (files("modelquirks.planner.placement") / "machines" / f"{name}.json").read_text()
        return described(json.loads(text), name)
    data, _ = read_json(Path(name))
    if isinstance(data, JsonProblem):
        known = ", ".join(shipped_machines())
        raise MachineError(
            f"machine {name!r} is none of {known}, nor a file that can be read: it {data.text}"
        )
    return described(data, name)


def described(data: Any, name: str) -> Machine:
    """Return the machine that *data*, the JSON of a description, is; all faults in one error.

    >>> described({"devices": {"cpu": {"capacity": "1GiB"}}}, "small").memory
    {'cpu': 1073741824}
    """
    given = data.get("devices") if isinstance(data, dict) else None
    if not isinstance(given, dict) or not given:
        raise MachineError(
            f'machine {name!r} must be an object with "devices": '
            '{"0": {"capacity": "22GiB", "read_gb_per_s": 800, "link_gb_per_s": 24}, "cpu": …}'
        )
    faults = [f"key {key!r} is not known" for key in data if key not in _MACHINE_KEYS]
    devices: dict[Device, DeviceSpec] = {}
    for written, values in given.items():
        try:
            device = parse_device(written)
            if device in devices:
                raise ValueError("is given twice")
            devices[device] = _spec(device, values, name)
        except ValueError as error:
            faults.append(f"device {written!r}: {error}")
    crossing = data.get("crossing_us", CROSSING_SECONDS * 1e6)
    if not _positive(crossing):
        faults.append(f"crossing_us {crossing!r} is not a positive number of microseconds")
    made = data.get("make_gb_per_s", MAKE_RATE / GB)
    if not _positive(made):
        faults.append(f"make_gb_per_s {made!r} is not a positive number")
    if faults:
        raise MachineError(f"machine {name!r}: {'; '.join(faults)}")
    return Machine(name, _ordered(devices), crossing * 1e-6, made * GB)


_MACHINE_KEYS = {"devices", "crossing_us", "make_gb_per_s", "about"}
_DEVICE_KEYS = ("capacity", "read_gb_per_s", "link_gb_per_s")


def _spec(device: Device, values: Any, name: str) -> DeviceSpec:
    if not isinstance(values, dict):
        raise MachineError(f"{values!r} is no object with {', '.join(_DEVICE_KEYS)}")
    faults = [f"key {key!r} is not known" for key in values if key not in _DEVICE_KEYS]
    spec = assumed(device)
    rates = {"read_gb_per_s": spec.read_rate, "link_gb_per_s": spec.link_rate}
    for key in rates:
        if (rate := values.get(key)) is not None:
            if not _positive(rate):
                faults.append(f"{key} {rate!r} is not a positive number")
            else:
                rates[key] = rate * GB
    capacity: int | None = None
    if "capacity" in values:
        try:
            capacity = parse_size(values["capacity"])
        except ValueError as error:
            faults.append(str(error))
    elif device != "disk":
        faults.append("has no capacity; only the disk may be without one")
    if "link_gb_per_s" in values and device in ("cpu", "disk"):
        faults.append("link_gb_per_s is of accelerators; give read_gb_per_s")
    if faults:
        raise MachineError("; ".join(faults))
    read = rates["read_gb_per_s"]
    return DeviceSpec(capacity, read or spec.read_rate, rates["link_gb_per_s"], name)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12


def of_memory(memory: Mapping[Device, int | None]) -> Machine:
    """Return a machine of those sizes with the rates that are assumed for such devices."""
    return Machine(ASSUMED, _ordered({d: assumed(d, n) for d, n in memory.items()}))


def _ordered(devices: Mapping[Device, DeviceSpec]) -> dict[Device, DeviceSpec]:
    return {device: devices[device] for device in canonical_order(devices)}
