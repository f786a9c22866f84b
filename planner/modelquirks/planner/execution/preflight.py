"""Checks before anything is made: does the plan fit this model and these files?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelquirks.planner.dtypes import is_cast, to_torch
from modelquirks.planner.execution.evaluate import node_type, torch_shape
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.reader import Reader
from modelquirks.planner.execution.route import Route, same_device
from modelquirks.planner.execution.slots import Slot, meta_attributes
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.recipes import stored_names
from modelquirks.planner.names import parent
from modelquirks.quirks.recipe import Scheme

__all__ = [
    "faults",
    "followers",
    "hook_faults",
    "left_behind",
    "needs",
    "route_faults",
    "shared_places",
    "split_places",
    "type_faults",
    "unfilled",
    "waived",
]


def faults(
    model: nn.Module,
    slots: Mapping[str, Slot],
    items: Sequence[LoadItem],
    *,
    reader: Reader,
    schemes: Mapping[str, Scheme],
) -> Iterator[str]:
    """Yield every reason why the items cannot be loaded into that model, a sentence each."""
    hooked = [path or "(the model)" for path, m in model.named_modules() if hasattr(m, "_hf_hook")]
    if hooked:
        yield (
            f"{len(hooked)} modules, among them {shown(hooked, 3)}, have accelerate hooks of an "
            "earlier dispatch: call accelerate.hooks.remove_hook_from_submodules(model) first, "
            "or build the model anew"
        )
    yield from _name_faults(slots, items)
    yield from _uncovered(slots, items)
    known: dict[str, LoadItem] = {}
    for item in items:
        yield from type_faults(item, reader, schemes)
        for name in needs(item):
            known.setdefault(name, item)
    for name, wanted in known.items():
        yield from (f"{wanted}: {fault}" for fault in reader.faults([name]))


def route_faults(
    slots: Mapping[str, Slot], items: Iterable[LoadItem], route: Route
) -> Iterator[str]:
    """Yield what is wrong between the items and the device map."""
    for item in items:
        mapped = route.device_of(item.name)
        if mapped is None:
            yield f"{item} has no device in the device map"
        elif not same_device(mapped, item.device):
            yield f"{item} is planned for {item.device!r}, the device map says {mapped!r}"
        devices = {name: route.device_of(name) for name in item.names if name in slots}
        resident = {d for d in devices.values() if d is not None and d not in route.offloaded}
        if len(resident) > 1:
            listed = ", ".join(f"{name!r} on {device!r}" for name, device in devices.items())
            yield f"tied weights must be on one device, here are {listed}"


def hook_faults(slots: Mapping[str, Slot], is_fetched: Callable[[str], bool]) -> Iterator[str]:
    """Yield the modules that cannot compute with weights which a hook of accelerate fetches."""
    fetched = {parent(name): slot.module for name, slot in slots.items() if is_fetched(name)}
    for path, module in fetched.items():
        if isinstance(module, torch.jit.ScriptModule):
            yield f"module {path!r} is scripted and runs no hooks, so it cannot be offloaded"


def shared_places(slots: Mapping[str, Slot], items: Iterable[LoadItem]) -> Iterator[str]:
    """Yield the names that are one place in the model, yet have several tensors planned."""
    owners = {name: item.name for item in items for name in item.names}
    for names in _places(slots, owners):
        if len({owners[name] for name in names}) > 1:
            yield (
                f"{shown(names)} belong to one module that the model has under several names, but "
                "the checkpoint stores different values for them"
            )


def split_places(slots: Mapping[str, Slot], route: Route) -> Iterator[str]:
    """Yield the names that are one place in the model and have several devices.

    accelerate 1.15 hooks such a module once for each name. Which of the devices it can be given
    depends on their order.
    """
    for names in _places(slots, slots):
        if len({route.device_of(name) for name in names}) > 1:
            listed = ", ".join(f"{name!r} on {route.device_of(name)!r}" for name in names)
            yield f"one module has several names and several devices: {listed}"


def _places(slots: Mapping[str, Slot], names: Iterable[str]) -> Iterator[list[str]]:
    """Yield *names* in groups that are one place in the model."""
    places: dict[tuple[int, str], list[str]] = {}
    for name in names:
        if (slot := slots.get(name)) is not None:
            places.setdefault((id(slot.module), slot.leaf), []).append(name)
    yield from places.values()


def needs(item: LoadItem) -> list[str]:
    """Return the stored tensors that the item is made of; none if a variable has no value."""
    try:
        return list(stored_names(item.node, item.env))
    except KeyError:
        return []


def followers(slots: Mapping[str, Slot], items: Iterable[LoadItem]) -> Mapping[str, str]:
    """Return, for names that no item has but whose very tensor an item replaces, that name."""
    provided = {name for item in items for name in item.names}
    owners = {id(slots[name].tensor): name for name in slots if name in provided}
    return {
        name: owners[id(slot.tensor)]
        for name, slot in slots.items()
        if name not in provided and id(slot.tensor) in owners
    }


def waived(slots: Mapping[str, Slot], items: Iterable[LoadItem]) -> list[str]:
    """Return the names that no item provides: they keep the values they have."""
    provided = {name for item in items for name in item.names}
    return [name for name, slot in slots.items() if slot.persistent and name not in provided]


def unfilled(model: nn.Module) -> list[Finding]:
    """Return a warning for each module that keeps meta tensors outside of what can be loaded."""
    return [
        Finding(
            "meta-attribute",
            "warning",
            f"module {path!r} keeps {key!r} on the meta device, and it is neither parameter nor "
            "buffer, so nothing will fill it; build the model outside of torch.device('meta')",
        )
        for path, module in model.named_modules()
        for key in meta_attributes(module)
    ]


def left_behind(
    model: nn.Module, slots: Mapping[str, Slot], items: Iterable[LoadItem]
) -> list[Finding]:
    """Return a warning for whatever still holds a tensor that was replaced, or is a view of it.

    *slots* are those from before the replacement.
    """
    replaced = {_memory(slots[name].tensor): name for item in items for name in item.names}
    found = [
        (f"buffer {path + '.' * bool(path) + leaf!r}", buffer)
        for path, module in model.named_modules()
        for leaf, buffer in module._buffers.items()
    ]
    found += [
        (f"attribute {key!r} of module {path!r}", value)
        for path, module in model.named_modules()
        for key, held in vars(module).items()
        for value in (held if isinstance(held, (list, tuple)) else (held,))
    ]
    return [
        Finding(
            "left-behind",
            "warning",
            f"{what} is or shares the tensor that {replaced[memory]!r} was before loading, and "
            "keeps its old values until it is made anew",
        )
        for what, value in found
        if isinstance(value, torch.Tensor) and (memory := _memory(value)) in replaced
    ]


def _memory(tensor: torch.Tensor) -> int:
    """Return where the storage of *tensor* lies; its identity if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass, or a lazy one
        return id(tensor)


def _name_faults(slots: Mapping[str, Slot], items: Sequence[LoadItem]) -> Iterator[str]:
    seen: dict[str, LoadItem] = {}
    for item in items:
        for name in item.names:
            if name in seen:
                yield f"{name!r} is provided twice, as {seen[name]} and as {item}"
            seen[name] = item
            slot = slots.get(name)
            if slot is None:
                yield f"{item}: the model has no parameter or buffer {name!r}"
            else:
                yield from _slot_faults(item, name, slot)


def _slot_faults(item: LoadItem, name: str, slot: Slot) -> Iterator[str]:
    if is_lazy(slot.tensor):
        yield f"{name!r} is a lazy parameter without shape: run the model once before loading"
    elif tuple(slot.tensor.shape) != torch_shape(item.dtype, item.shape):
        yield (
            f"{item} has shape {list(item.shape)}, the model has "
            f"{list(slot.tensor.shape)} at {name!r}"
        )
    if slot.is_parameter != (item.kind == "parameter"):
        found = "parameter" if slot.is_parameter else "buffer"
        yield f"{item} is planned as a {item.kind}, the model has a {found} at {name!r}"


def _uncovered(slots: Mapping[str, Slot], items: Sequence[LoadItem]) -> Iterator[str]:
    provided = {name for item in items for name in item.names} | set(followers(slots, items))
    on_meta = [n for n, slot in slots.items() if slot.tensor.is_meta and n not in provided]
    if missing := [name for name in on_meta if slots[name].persistent]:
        yield (
            f"on the meta device, and nothing in the plan provides them: {shown(missing)}. What "
            "may be missing keeps the values it has: build the model on a real device"
        )
    if computed := [name for name in on_meta if not slots[name].persistent]:
        yield (
            f"non-persistent buffers on the meta device: {shown(computed)}. No checkpoint holds "
            "them, the model's own code computes them: build the model with "
            "accelerate.init_empty_weights(include_buffers=False)"
        )


def type_faults(item: LoadItem, reader: Reader, schemes: Mapping[str, Scheme]) -> Iterator[str]:
    """Yield why the recipe of the item does not give what the item says, by headers."""
    try:
        for _ in stored_names(item.node, item.env):
            pass
        made = node_type(
            item.node, item.env, types=reader.type_of, schemes=schemes, read=reader.read
        )
        to_torch(item.dtype)
    except KeyError as error:
        yield f"{item}: variable {error} of its recipe has no value"
        return
    except Exception as error:  # schemes are anybody's
        yield f"{item}: {error}"
        return
    if made.shape != item.shape:
        yield f"{item} would be {made}, the plan says {item.dtype} {list(item.shape)}"
    elif not is_cast(made.dtype, item.dtype):
        yield f"{item} would be {made}, which cannot become {item.dtype}"
