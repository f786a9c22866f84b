"""Drop-ins for accelerate's ``infer_auto_device_map`` and ``get_balanced_memory``: only the map.

Both look at sizes and names only, so the model may be on meta and of any dtype. Sizes are the bytes
that torch will hold: accelerate 1.15 (``compute_module_sizes``) counts ``uint4`` and other types
below a byte as 0, ``bool`` as an eighth, and a wider *dtype* than the model's not at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelquirks.planner.collector import collector_paused
from modelquirks.planner.model.loaded_sizes import LoadedSizes
from modelquirks.planner.model.walk import entries_of
from modelquirks.planner.placement.memory import Device, normalize_max_memory, this_machine
from modelquirks.planner.placement.module_outline import tree_of_module
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.placement import Placement, place
from modelquirks.planner.plan import PlanError
from modelquirks.planner.tell import tell

if TYPE_CHECKING:
    import torch

__all__ = ["get_balanced_memory", "infer_auto_device_map"]


def infer_auto_device_map(
    model: torch.nn.Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, Device]:
    """Return a device map that fills the devices in order, with accelerate's arguments.

    First the accelerators, then the cpu, and the disk takes the rest, unless *max_memory* limits
    it too; without *max_memory* this machine is asked. Nothing holds more than it may, tied
    tensors count once and are together, and room to move in what is offloaded is kept free only
    if something is. Classes that the model itself declares are not split either. *dtype*
    goes to floats, but not to those of 8 bits, nor to what the model keeps in float32;
    *special_dtypes* by tensor name to any; accelerate's ``CustomDtype`` may be given too.

    *verbose* prints why each key is where it is. Keys are as few as can be; without *clean_result*
    a model that is all on one device gets a key for each of its parts instead of ``""``. Modules
    without tensors have no key of their own. *fallback_allocation* changes nothing: gaps are
    filled in any case.

    Raises :class:`~modelquirks.planner.plan.PlanError` with what would help if nothing fits,
    ValueError for sizes, devices or dtypes that mean nothing. What else is odd is logged.
    """
    del fallback_allocation
    memory = _memory(max_memory)
    with collector_paused():
        tree = tree_of_module(model, no_split_module_classes, LoadedSizes.of(dtype, special_dtypes))
        placed = _placed(tree, "sequential", memory, offload_buffers=offload_buffers)
    if not placed.ok:
        errors = [f.message for f in placed.findings if f.severity == "error"]
        raise PlanError("there is no device map: " + "; ".join(errors))
    tell(placed.findings)
    if verbose:
        for key, device in placed.device_map.items():
            print(f"{key or 'the model'} on {device}: {placed.reasons[key]}")
    found = OrderedDict(placed.device_map)
    return found if clean_result or "" not in found else _by_part(model, found[""])


def get_balanced_memory(
    model: torch.nn.Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[Device, int | None]:
    """Return a *max_memory* such that filling in order is even, with accelerate's arguments.

    The last accelerator that is needed keeps what it has, as with accelerate; each before it is
    limited to its even share, in whole modules. With *low_zero* the first one is to get only what
    the others have no room for: 0 bytes if they have room for all. Where not all fits
    on accelerators, or there are not two, nothing is to be spread and *max_memory* comes back as
    it is, in bytes. Numbers of devices may have gaps.
    """
    memory = _memory(max_memory)
    near = [device for device, size in memory.items() if device not in ("cpu", "disk") and size]
    with collector_paused():
        tree = tree_of_module(model, no_split_module_classes, LoadedSizes.of(dtype, special_dtypes))
        room = sum(memory[device] or 0 for device in near)
        if len(near) < 2 or sum(tree.sizes.values()) > room:
            return memory
        placed = _placed(tree, "balanced_low_0" if low_zero else "balanced", memory)
        shares = [_shares(tree, placed, near, main) for main in (placed.main_device, near[0])]
        limits = [*({**memory, **share} for share in shares), memory]
        loaded = near[:1] if low_zero else near
        return min(limits, key=lambda limited: _load(tree, limited, near, loaded))


def _shares(
    tree: ModuleTree, placed: Placement, near: Sequence[Device], main: Device | None
) -> dict[Device, int]:
    """Return what each accelerator needs for its part of a placement, but for the last of them.

    Tensors of a module that has parts count on *main* as well: filling has to find room there
    before it can know that the module is all on another one.
    """
    used = {device: placed.memory[device].used_bytes for device in near}
    last = max((n for n, device in enumerate(near) if used[device]), default=0)
    shares = {device: used[device] for device in near[:last]}
    if main in shares:
        apart = (m for m in tree.root.walk() if m.parts and m.name not in tree.units)
        own = [name for module in apart for name in module.tensors if name in tree.sizes]
        elsewhere = sum(tree.sizes[name] for name in own if placed.devices.get(name) != main)
        shares[main] = min(placed.memory[main].capacity_bytes or 0, shares[main] + elsewhere)
    return shares


def _load(
    tree: ModuleTree,
    memory: Mapping[Device, int | None],
    near: Sequence[Device],
    loaded: Sequence[Device],
) -> tuple[bool, int]:
    """Return whether filling in order offloads anything, and the most that is on *loaded*."""
    filled = _placed(tree, "sequential", memory).memory
    used = sum(filled[device].used_bytes for device in near)
    return used < sum(tree.sizes.values()), max(filled[device].used_bytes for device in loaded)


def _memory(max_memory: Mapping[Any, Any] | None) -> dict[Device, int | None]:
    return this_machine() if max_memory is None else normalize_max_memory(max_memory)


def _placed(
    tree: ModuleTree,
    policy: str,
    memory: Mapping[Device, int | None],
    *,
    offload_buffers: bool = False,
) -> Placement:
    unlimited: dict[Device, int | None] = {"disk": None}
    everything = unlimited | dict(memory)
    return place(tree, device_map=policy, max_memory=everything, offload_buffers=offload_buffers)


def _by_part(model: torch.nn.Module, device: Device) -> OrderedDict[str, Device]:
    """Return a key for each tensor and each part that *model* has directly."""
    own = [name for name, _, _ in entries_of({"": model})]
    parts = [name for name, part in model._modules.items() if part is not None]
    return OrderedDict.fromkeys([*own, *parts], device)
