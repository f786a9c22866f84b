"""Device maps: emitting compact ones, reading given ones, and what may be wrong with either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.nearest import closest
from modelquirks.planner.names import parent
from modelquirks.planner.placement.memory import Device, parse_device, show_devices
from modelquirks.planner.placement.moduletree import Module, ModuleTree, runs_on

__all__ = ["GivenMap", "checked", "compact", "expand", "main_of", "read_given"]


@dataclass(frozen=True)
class GivenMap:
    """A device map as somebody wrote it, read against a model."""

    devices: Mapping[str, Device]
    """The device of each tensor that has one."""
    keys: Mapping[str, str]
    """Tensor → the key that decided."""
    main: Device
    findings: tuple[Finding, ...]


def expand(device_map: Mapping[str, Device], names: Iterable[str]) -> dict[str, str]:
    """Return for each of *names* the key of *device_map* that decides: the longest, by segments.

    Names that no key covers are left out.

    >>> expand({"layers": 0, "layers.1": 1}, ["layers.1.w", "layers.10.w", "head.w"])
    {'layers.1.w': 'layers.1', 'layers.10.w': 'layers'}
    """
    found: dict[str, str | None] = {"": "" if "" in device_map else None}

    def decide(name: str) -> str | None:
        if name not in found:
            found[name] = name if name in device_map else decide(parent(name))
        return found[name]

    return {name: key for name in names if (key := decide(name)) is not None}


def compact(tree: ModuleTree, devices: Mapping[str, Device]) -> dict[str, Device]:
    """Return the smallest device map that says *devices*: disjoint prefixes, in module order.

    A tensor has a key of its own only where its module's parts are apart. Modules without tensors
    have none.
    """
    return dict(_prefixes(tree.root, devices))


def _prefixes(module: Module, devices: Mapping[str, Device]) -> Iterator[tuple[str, Device]]:
    found = {devices[name] for name in module.below() if name in devices}
    if len(found) == 1 and all(name in devices for name in module.below()):
        yield module.name, found.pop()
        return
    yield from ((name, devices[name]) for name in module.tensors if name in devices)
    for part in module.parts:
        yield from _prefixes(part, devices)


def main_of(devices: Iterable[Device]) -> Device:
    """Return the main device that accelerate documents: the first that is no cpu and no disk."""
    return next((device for device in devices if device not in ("cpu", "disk")), "cpu")


def read_given(tree: ModuleTree, given: Mapping[Any, object]) -> GivenMap:
    """Read a device map that somebody wrote; the longest key that covers a tensor decides.

    Buffers that no checkpoint holds may be left out, as with accelerate, which then does not
    move them; they go to the main device here, with a warning.
    """
    findings: list[Finding] = []
    device_map = _parsed(given, findings)
    findings += _unknown_keys(tree, device_map)
    keys = expand(device_map, tree.tensors)
    devices = {name: device_map[key] for name, key in keys.items()}
    used = set(devices.values())
    main = main_of(device for device in device_map.values() if device in used)
    lost = [name for name in tree.tensors if name not in devices]
    computed = [name for name in lost if name in tree.computed]
    if computed:
        devices |= dict.fromkeys(computed, main)
        findings.append(_left_out(computed, main))
    if rest := [name for name in lost if name not in tree.computed]:
        findings.append(_without_device(rest))
    findings += _idle(tree, device_map, keys)
    if main == "mps" and "cpu" in used:
        findings.append(_beside_mps())
    ordered = {name: devices[name] for name in tree.tensors if name in devices}
    return GivenMap(ordered, keys, main, tuple(findings))


def checked(
    tree: ModuleTree, devices: Mapping[str, Device], main: Device, *, given: bool
) -> Iterator[Finding]:
    """Yield what accelerate would get wrong if *tree* were on *devices*."""
    if given:
        yield from _torn(tree, devices)
        yield from _split_units(tree, devices)
    for module in tree.root.walk():
        yield from _own_tensors(module, devices, main)


def _parsed(given: Mapping[Any, object], findings: list[Finding]) -> dict[str, Device]:
    parsed: dict[str, Device] = {}
    for written, value in given.items():
        if not isinstance(written, str):
            text = f"key {written!r} of the device map is not a name; write a module's name"
            findings.append(Finding("device-map-key", "error", text))
            continue
        key = written.strip().removesuffix(".")
        try:
            device = parse_device(value)
        except ValueError as error:
            text = f"{key!r} of the device map: {error}"
            findings.append(Finding("device-map-device", "error", text))
            continue
        if parsed.setdefault(key, device) != device:
            text = (
                f"{key!r} is twice in the device map, on {parsed[key]!r} and on {device!r}; "
                "leave one out"
            )
            findings.append(Finding("device-map-conflict", "error", text))
    return parsed


def _unknown_keys(tree: ModuleTree, keys: Iterable[str]) -> Iterator[Finding]:
    modules = {"", *tree.modules, *(module.name for module in tree.root.walk())}
    known = modules | set(tree.tensors)
    for key in keys:
        if key not in known:
            nearest = closest(key, sorted(known - {""}))
            hint = f"; the nearest names are {shown(nearest)}" if nearest else ""
            text = f"key {key!r} of the device map is no module and no tensor of the model{hint}"
            yield Finding("device-map-unknown-key", "error", text)


def _without_device(names: list[str]) -> Finding:
    modules = dict.fromkeys(parent(name) or name for name in names)
    text = (
        f"the device map has no device for {len(names)} tensors, those of {shown(modules)}; "
        "add these modules, or '' for all that is not named"
    )
    return Finding("device-map-incomplete", "error", text)


def _left_out(names: list[str], main: Device) -> Finding:
    text = (
        f"the device map has no device for the buffers {shown(names)}, which accelerate would not "
        f"move; they go to the main device {main!r}"
    )
    return Finding("device-map-buffer", "warning", text)


def _beside_mps() -> Finding:
    text = "accelerate moves what a device map puts on 'cpu' to 'mps' if that is the main device"
    return Finding("device-map-mps", "warning", text)


def _idle(
    tree: ModuleTree, device_map: Mapping[str, Device], keys: Mapping[str, str]
) -> Iterator[Finding]:
    deciding = set(keys.values())
    with_tensors = {m.name for m in tree.root.walk()}
    for key in device_map:
        if key not in deciding and key in with_tensors:
            text = f"key {key!r} of the device map decides nothing: longer keys cover all of it"
            yield Finding("device-map-idle-key", "warning", text)


def _torn(tree: ModuleTree, devices: Mapping[str, Device]) -> Iterator[Finding]:
    for group in tree.groups:
        places = {name: devices[name] for name in group if name in devices}
        if len(set(places.values())) > 1:
            told = ", ".join(f"{name!r} on {device!r}" for name, device in places.items())
            tied = all(name in tree.aliases or name in tree.aliases.values() for name in group)
            what = "are one tensor" if tied else "belong together"
            text = f"{told}: these {what} and must be on one device"
            yield Finding("ties-torn" if tied else "companions-torn", "error", text)


def _split_units(tree: ModuleTree, devices: Mapping[str, Device]) -> Iterator[Finding]:
    for module in tree.root.walk():
        if module.name in tree.units:
            places = {devices[name] for name in module.below() if name in devices}
            if len(places) > 1:
                text = (
                    f"module {module.name!r} must not be split and is on "
                    f"{show_devices(places)}; put all of it on one device"
                )
                yield Finding("unit-split", "warning", text)


def _own_tensors(module: Module, devices: Mapping[str, Device], main: Device) -> Iterator[Finding]:
    """Yield what is wrong with the tensors of a module whose parts are apart.

    accelerate 1.15 gives such a module no hook (``attach_align_device_hook_on_blocks``), the
    root excepted, whose tensors and inputs it moves to the main device.
    """
    if not module.tensors or not module.parts:
        return
    places = [devices[name] for name in module.below() if name in devices]
    if len(set(places)) < 2:
        return
    for name in module.tensors:
        if devices.get(name) == "disk":
            text = (
                f"{name!r} is on 'disk', from where accelerate by itself never reads it because "
                f"the parts of {module.name!r} are on several devices; put it on {main!r}"
            )
            yield Finding("own-tensor-on-disk", "warning", text)
    own = {devices[name] for name in module.tensors if name in devices} - {"disk"}
    near = {runs_on(device, main) for device in places}
    if not module.name and own - {main}:
        text = f"accelerate moves {shown(module.tensors)} of the model itself to {main!r}"
        yield Finding("own-tensor-moved", "warning", text)
    elif module.name and (len(near) > 1 or own - near):
        text = (
            f"{shown(module.tensors)} belong to {module.name!r} itself, whose parts run on "
            f"{show_devices(near)}; accelerate moves neither these nor the inputs of "
            f"{module.name!r}, so running it may fail: put all of it on one device"
        )
        yield Finding("own-tensor-apart", "warning", text)
