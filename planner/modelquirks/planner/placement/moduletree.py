"""``ModuleTree``: what placement has to know of a model, in bytes and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from modelquirks.planner.finding import shown
from modelquirks.planner.names import parent
from modelquirks.planner.placement.memory import Device

__all__ = ["Module", "ModuleTree", "held", "is_offloaded", "runs_on", "used_bytes"]


@dataclass(frozen=True, slots=True)
class Module:
    """A module that has tensors, its own or below."""

    name: str
    tensors: tuple[str, ...]
    """Full names of the tensors that belong to it directly, owners before aliases."""
    parts: tuple[Module, ...]
    """Its direct sub-modules that have tensors, in module order."""

    def walk(self) -> Iterator[Module]:
        """Yield this module and all below it, in module order."""
        left: list[Module] = [self]
        while left:
            module = left.pop()
            yield module
            left.extend(reversed(module.parts))

    def below(self) -> tuple[str, ...]:
        """Return every tensor of this module and below, in module order."""
        return tuple(name for module in self.walk() for name in module.tensors)


@dataclass(frozen=True)
class ModuleTree:
    """Sizes, modules and what must stay together.

    ValueError if an alias or a group names a tensor that has no size, or a size is negative.
    """

    sizes: Mapping[str, int]
    """Bytes in memory of each tensor under its owner's name, in module order; no aliases."""
    modules: tuple[str, ...]
    """Every module name in module order, ``""`` first."""
    units: frozenset[str] = frozenset()
    """Modules that must not be split."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name → name of the owner."""
    buffers: frozenset[str] = frozenset()
    """Tensors that are buffers. Those of an offloaded module stay on the main device, unless
    buffers are offloaded too."""
    together: tuple[tuple[str, ...], ...] = ()
    """More groups of tensors that must share a device: companions."""
    computed: frozenset[str] = frozenset()
    """Buffers that no checkpoint holds. They stay on the main device in any case."""
    read: Mapping[str, float] = field(default_factory=dict)
    """Bytes that one step reads of a tensor where it runs, if not all: of routed experts, of an
    embedding's rows."""
    streamed: Mapping[str, float] = field(default_factory=dict)
    """Bytes that one step moves of an offloaded tensor, if not all: of experts with a module
    each, or of a tie, which each of its modules moves."""
    at_once: Mapping[str, float] = field(default_factory=dict)
    """Bytes of an offloaded tensor that are where it runs at a time, if not all: of stacked experts
    that are brought one by one."""
    made: Mapping[str, float] = field(default_factory=dict)
    """Bytes of a tensor that are computed whenever it is moved from the disk, if no file holds it
    as it is (``execution.weights.WeightsMap``)."""
    padding: Mapping[str, int] = field(default_factory=dict)
    """Bytes by which an accelerator's allocator rounds a tensor up, if any."""
    state: Mapping[str, int] = field(default_factory=dict)
    """Bytes of cache that a module keeps, at most, on the device it runs on."""
    state_read: Mapping[str, int] = field(default_factory=dict)
    """Bytes of it that one step reads, if it is not all: a window keeps its whole prompt at
    first."""

    def __post_init__(self) -> None:
        """Raise ValueError with all faults."""
        groups = [name for group in self.together for name in group]
        lost = [f"owner {o!r} of {a!r}" for a, o in self.aliases.items() if o not in self.sizes]
        lost += [f"tensor {name!r} of a group" for name in groups if not self._has(name)]
        if min(self.sizes.values(), default=0) < 0:
            lost += [f"size {size} of {name!r}" for name, size in self.sizes.items() if size < 0]
        if lost:
            raise ValueError(f"a module tree cannot be made: wrong or not known are {shown(lost)}")

    def _has(self, name: str) -> bool:
        return name in self.sizes or name in self.aliases

    @cached_property
    def root(self) -> Module:
        """The whole model; modules that only a tensor's name tells of are there too."""
        parts: dict[str, list[str]] = {"": []}
        own: dict[str, list[str]] = {}
        for module in self.modules:
            _enter(module, parts)
        for name in (*self.sizes, *self.aliases):
            _enter(parent(name), parts)
            own.setdefault(parent(name), []).append(name)
        return _module("", parts, own)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor name, aliases too, in module order."""
        return self.root.below()

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Tensors that must share a device: each alias with its owner, then ``together``."""
        return (*((owner, alias) for alias, owner in self.aliases.items()), *self.together)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data, those that are empty left out."""
        data: dict[str, Any] = {"sizes": dict(self.sizes), "modules": list(self.modules)}
        for name in _MAPPINGS:
            if given := getattr(self, name):
                data[name] = dict(given)
        for name in _SETS:
            if given := getattr(self, name):
                data[name] = sorted(given)
        if self.together:
            data["together"] = [list(group) for group in self.together]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModuleTree:
        """Return what :meth:`to_json` told."""
        fields = dict(data)
        fields["modules"] = tuple(data["modules"])
        fields |= {n: frozenset(data[n]) for n in _SETS if n in data}
        if "together" in data:
            fields["together"] = tuple(tuple(group) for group in data["together"])
        return cls(**fields)

    def stays(self, name: str, *, offload_buffers: bool) -> bool:
        """Tell whether this tensor of an offloaded module stays on the main device.

        accelerate 1.15, ``AlignDevicesHook.init_hook``: without ``offload_buffers`` every buffer,
        with it only the non-persistent ones.
        """
        return name in self.computed or (name in self.buffers and not offload_buffers)


_SETS = ("units", "buffers", "computed")
_MAPPINGS = ("aliases", "read", "streamed", "at_once", "made", "padding", "state", "state_read")


def is_offloaded(device: Device, main: Device | None) -> bool:
    """Tell whether accelerate moves what is on *device* to *main* each time it runs.

    accelerate 1.15, ``dispatch_model``: the disk always, the cpu if the main device is an
    accelerator with memory of its own. Beside ``mps`` the cpu is no place at all:
    what a map puts there is moved to ``mps`` for good.
    """
    return device == "disk" or (device == "cpu" and main not in ("cpu", "mps", None))


def runs_on(device: Device, main: Device | None) -> Device:
    """Return the device that a module on *device* runs on."""
    moved = is_offloaded(device, main) or (device == "cpu" and main == "mps")
    return main if moved and main is not None else device


def used_bytes(
    tree: ModuleTree,
    devices: Mapping[str, Device],
    main: Device | None,
    *,
    offload_buffers: bool,
) -> dict[Device, int]:
    """Return the bytes that each device holds when *tree* is placed on *devices*."""
    used: dict[Device, int] = {}
    for name, device in held(tree, devices, main, offload_buffers=offload_buffers):
        used[device] = used.get(device, 0) + tree.sizes[name]
    return used


def held(
    tree: ModuleTree,
    devices: Mapping[str, Device],
    main: Device | None,
    *,
    offload_buffers: bool,
) -> Iterator[tuple[str, Device]]:
    """Yield each tensor that is placed, with the device whose memory it takes.

    Ties count once, under their owner. What stays on the main device counts there.
    """
    for name in tree.sizes:
        device = devices.get(name)
        if device is None:
            continue
        stays = tree.stays(name, offload_buffers=offload_buffers)
        if stays or not is_offloaded(device, main):
            device = runs_on(device, main)
        yield name, device


def _enter(name: str, parts: dict[str, list[str]]) -> None:
    """Make sure that *name* and the modules above it are in *parts*."""
    if name not in parts:
        _enter(parent(name), parts)
        parts[parent(name)].append(name)
        parts[name] = []


def _module(name: str, parts: Mapping[str, list[str]], own: Mapping[str, list[str]]) -> Module:
    made = (_module(part, parts, own) for part in parts[name])
    return Module(
        name,
        tuple(own.get(name, ())),
        tuple(part for part in made if part.tensors or part.parts),
    )
