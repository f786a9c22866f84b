"""Why a placement is as it is, and what would help where there is none, in sentences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.names import parent
from modelquirks.planner.placement.items import Cuts, Item
from modelquirks.planner.placement.memory import Device, show_bytes, show_devices
from modelquirks.planner.placement.moduletree import ModuleTree, is_offloaded
from modelquirks.planner.placement.solve import Memory, Setting, Solution, lack, solve

__all__ = ["does_not_fit", "given_reasons", "remarks", "solved_reasons"]

_MANY = 2_000
"""With more items than that, the finest cut is left out when looking for what would help."""
_EXACT = 4_096
"""What would help is told to one part in so many of the model: 12 tries a device."""


def solved_reasons(
    tree: ModuleTree, device_map: Mapping[str, Device], solution: Solution, main: Device
) -> dict[str, str]:
    """Return for each key of *device_map* why it is there."""
    item_of = {name: item for item in solution.problem.items for name in item.tensors}
    modules = {module.name: module for module in tree.root.walk()}
    near = [d for d in solution.problem.homes if not is_offloaded(d, main)]
    reasons: dict[str, str] = {}
    for key, device in device_map.items():
        if key == "" and not is_offloaded(device, main):
            reasons[key] = f"the whole model fits on {device!r}"
        elif key not in modules:
            owner = f"a tensor of {parent(key)!r} itself, whose parts are apart"
            reasons[key] = f"{owner}: on the main device"
        else:
            items = [item_of[name] for name in modules[key].below()]
            reasons[key] = _why(device, main, near, items)
    return reasons


def _why(device: Device, main: Device, near: Sequence[Device], items: Sequence[Item]) -> str:
    pinned = bool(items) and all(item.pin == device for item in items)
    if pinned:
        moved = f"; moved to {main!r} when it runs" if is_offloaded(device, main) else ""
        text = f"pinned there{moved}"
    elif device == "disk":
        text = f"no room but on the disk; read from there when it runs on {main!r}"
    elif is_offloaded(device, main):
        text = f"no room on {show_devices(near)}; moved to {main!r} when it runs"
    else:
        text = (
            "fits on the main device" if device == main else f"fits on {device!r}, and runs there"
        )
    tied = next((item for item in items if len(item.names) > 1), None)
    return text if tied is None else f"{text}; {shown(tied.names)} must be on one device"


def given_reasons(device_map: Mapping[str, Device], keys: Mapping[str, str]) -> dict[str, str]:
    """Return for each key of *device_map* the given keys that decided."""
    deciding: dict[str, dict[str, None]] = {key: {} for key in device_map}
    for name, given in keys.items():
        key = name
        while key not in deciding and key:
            key = parent(key)
        deciding.setdefault(key, {})[given] = None
    return {
        key: f"given as {shown(deciding[key])}" if deciding[key] else "not given"
        for key in device_map
    }


def remarks(solution: Solution, memory: Memory, main: Device) -> Iterator[Finding]:
    """Yield what is good to know of a placement that fits."""
    if (largest := solution.reserve) is not None:
        text = (
            f"{show_bytes(largest.run_bytes)} on {main!r} are left free for "
            f"{largest.names[0]!r}, the largest that is moved there to run"
        )
        yield Finding("room-for-streaming", "info", text)
    idle = [d for d in memory if d not in ("cpu", "disk")]
    if main == "cpu" and idle:
        text = (
            f"the model runs on 'cpu': on {show_devices(idle)} is no room for a part of it "
            "beside the room for moving in the rest"
        )
        yield Finding("accelerator-unused", "warning", text)
    if main == "mps" and "cpu" in memory:
        text = "'cpu' is not used: accelerate moves all that is on it to 'mps', which shares memory"
        yield Finding("device-map-mps", "info", text)


def does_not_fit(ways: Cuts, setting: Setting) -> Finding:
    """Return the error that says what finds no room and the smallest changes that help."""
    shortage = lack(ways.finest, setting)
    if shortage is None:
        text = "no device has any memory; give max_memory such as {'cpu': '8GiB', 'disk': '1TiB'}"
        return Finding("does-not-fit", "error", text)
    item = shortage.item
    far = [d for d, n in shortage.left.items() if d == "disk" and (n is None or n >= item.n_bytes)]
    left = ", ".join(f"{show_bytes(n)} on {d!r}" for d, n in shortage.left.items() if d not in far)
    lacks = "finds room on the disk, but not where it runs" if far else "finds no room"
    beside = (
        f" beside {show_bytes(shortage.reserve)} for moving in what is offloaded"
        if shortage.reserve
        else ""
    )
    if setting.running:
        beside += f" and {show_bytes(setting.running)} for activations where it runs"
    remedies = " or ".join(_remedies(ways, setting))
    return Finding(
        "does-not-fit",
        "error",
        f"{' with '.join(map(repr, item.names))} ({show_bytes(item.n_bytes)}, in one piece) "
        f"{lacks}: left are {left}{beside}; {remedies or 'more memory on one device is no help'}",
    )


def _remedies(ways: Cuts, setting: Setting) -> Iterator[str]:
    memory = setting.memory
    ways = ways.up_to(_MANY)
    if memory.get("disk", 0) is not None and _fits(ways, setting, "disk", None):
        yield "add 'disk' without a limit to max_memory"
    needed: dict[Device, int] = {}
    alike: set[tuple[bool, int]] = set()
    for device, size in memory.items():
        kind = (device in ("cpu", "disk"), size or 0)
        if size and kind not in alike:
            alike.add(kind)
            if (n_bytes := _more(ways, setting, device)) is not None:
                needed[device] = n_bytes
    if needed:
        device = min(needed, key=needed.__getitem__)
        n_bytes = needed[device]
        yield f"give device {device!r} {n_bytes} bytes more ({show_bytes(n_bytes)})"


def _fits(ways: Cuts, setting: Setting, device: Device, size: int | None) -> bool:
    """Tell whether there is a placement if *device* has *size*; by the quickest policy."""
    other = replace(setting, memory={**setting.memory, device: size})
    return solve(ways, other, "sequential") is not None


def _more(ways: Cuts, setting: Setting, device: Device) -> int | None:
    """Return how many bytes more on *device* are enough; None if no number is."""
    size = setting.memory[device] or 0
    most = ways.finest.n_bytes * 2
    step = max(1, most // _EXACT)

    def fits(n_steps: int) -> bool:
        return _fits(ways, setting, device, size + n_steps * step)

    n_steps = bisect_left(range(most // step + 1), True, key=fits)
    return n_steps * step if n_steps <= most // step else None
