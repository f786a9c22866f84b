"""``Route``: which names accelerate offloads, and where the others are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modelquirks.planner.names import parent
from modelquirks.planner.placement.memory import Device

__all__ = ["Route", "make_route", "same_device"]

Given = Device | torch.device


@dataclass(frozen=True, slots=True)
class Route:
    """A device map as accelerate 1.15 acts on it.

    Hooks are attached if there are several devices, if one is ``disk`` or if they are asked for.
    What is offloaded then is fetched at each forward pass and computed on the main device:
    ``disk`` always, ``cpu`` if the main device is not the CPU (or ``mps``).
    """

    device_map: Mapping[str, Device]
    main_device: Device
    modules: frozenset[str]
    """Paths of all modules of the model."""
    offloaded: frozenset[Device]
    """Devices whose tensors are offloaded; empty without hooks."""

    @property
    def hooked(self) -> bool:
        """Whether accelerate attaches hooks."""
        return bool(self.offloaded)

    def device_of(self, name: str) -> Device | None:
        """Return the device of the longest key that covers the tensor; None if none does."""
        while name not in self.device_map:
            if not name:
                return None
            name = parent(name)
        return self.device_map[name]

    def is_offloaded(self, name: str) -> bool:
        """Tell whether the tensor is fetched at each forward pass."""
        return self.device_of(name) in self.offloaded

    def is_loose(self, module: str) -> bool:
        """Tell whether only keys below that module, not the module itself, have a device."""
        while module not in self.device_map or module not in self.modules:
            if not module:
                return True
            module = parent(module)
        return False


def make_route(
    device_map: Mapping[str, Given],
    *,
    main_device: Given | None,
    force_hooks: bool,
    modules: frozenset[str],
) -> Route:
    """Return the route of *device_map*; the default main device is its first that computes.

    accelerate takes one of them in the order of a set, which for strings differs between runs.
    """
    plain = {key: _plain(device) for key, device in device_map.items()}
    devices = set(plain.values())
    first = next((d for d in plain.values() if d not in ("cpu", "disk")), "cpu")
    main = first if main_device is None else _plain(main_device)
    hooked = len(devices) > 1 or "disk" in devices or force_hooks
    offloaded = ("disk",) if main in ("cpu", "mps") else ("cpu", "disk")
    return Route(plain, main, modules, frozenset(offloaded if hooked else ()))


def same_device(one: Device, other: Device) -> bool:
    """Tell whether two spellings mean one device: ``0`` is ``"cuda:0"``."""
    return _spelt(one) == _spelt(other)


def _spelt(device: Device) -> str:
    return f"cuda:{device}" if isinstance(device, int) else device


def _plain(device: Given) -> Device:
    # accelerate compares with "cpu" and "disk", which a torch.device does not equal.
    return str(device) if isinstance(device, torch.device) else device
