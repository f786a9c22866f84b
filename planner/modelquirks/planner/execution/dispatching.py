"""``hand_over``: have accelerate run a model whose weights are in place or in a weights map."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelquirks.planner.execution.ahead import AHEAD_BYTES
from modelquirks.planner.execution.experts import ExpertOffload
from modelquirks.planner.execution.route import Route
from modelquirks.planner.execution.slots import Slot
from modelquirks.planner.execution.weights import WeightsMap
from modelquirks.planner.placement.memory import Device

__all__ = ["DispatchOptions", "hand_over", "loose_modules"]


@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """Arguments of ``accelerate.dispatch_model`` that are only passed on, and one of our own."""

    skip_keys: str | Sequence[str] | None = None
    preload_module_classes: Sequence[str] | None = None
    force_hooks: bool = False
    offload_buffers: bool = False
    ahead_bytes: int = AHEAD_BYTES
    """How much may be made ahead of what a forward pass is at."""


def hand_over(
    model: nn.Module,
    device_map: Mapping[str, Any],
    *,
    route: Route,
    weights: WeightsMap,
    loose: Mapping[str, nn.Module],
    slots: Mapping[str, Slot],
    options: DispatchOptions,
    experts: ExpertOffload | None = None,
) -> None:
    """Have accelerate dispatch *model* along *route*; *experts* are brought one by one.

    Afterwards ``hf_device_map`` is *device_map* as it was given.

    The empty ``offload_index`` keeps accelerate 1.15 from looking for an offload folder and from
    writing one; its ``OffloadedWeightsLoader`` asks ``state_dict``, here *weights*, first.
    """
    from accelerate import dispatch_model

    arguments: dict[str, Any] = {
        "main_device": route.main_device,
        "offload_buffers": options.offload_buffers,
        "skip_keys": _listed(options.skip_keys),
        "preload_module_classes": [*(options.preload_module_classes or ()), *_fused(model)],
        "force_hooks": options.force_hooks,
    }
    if route.hooked:
        # accelerate below 1.15 gives a model that is on disk as a whole hooks only if it must.
        arguments |= {"state_dict": weights, "offload_index": {}, "force_hooks": True}
    with _set_aside(loose), _known_keys(route, slots):
        dispatch_model(model, dict(route.device_map), **arguments)
    _hook_loose(loose, route, weights, options)
    _make_removable(model)
    if route.hooked:
        from modelquirks.planner.execution.fetching import take_over

        take_over(model, experts)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]


def loose_modules(
    model: nn.Module, route: Route, is_offloaded: Callable[[str], bool]
) -> Mapping[str, nn.Module]:
    """Return the modules with offloaded parameters of their own that no key covers as a whole.

    Such a module has its children on several devices. accelerate 1.15 attaches no hook to it, or
    for the whole model one that cannot fetch.
    """
    return {
        path: module
        for path, module in model.named_modules()
        if route.is_loose(path)
        and any(
            is_offloaded(f"{path}.{leaf}" if path else leaf)
            for leaf, parameter in module._parameters.items()
            if parameter is not None
        )
    }


@contextmanager
def _set_aside(loose: Mapping[str, nn.Module]) -> Generator[None, None, None]:
    """Hide the parameters of loose modules, which accelerate would refuse on the meta device."""
    aside = [(module, dict(module._parameters)) for module in loose.values()]
    for module, parameters in aside:
        module._parameters.update(dict.fromkeys(parameters))
    try:
        yield
    finally:
        for module, parameters in aside:
            module._parameters.update(parameters)


@contextmanager
def _known_keys(route: Route, slots: Mapping[str, Slot]) -> Generator[None, None, None]:
    """Silence accelerate's warning about keys that are no modules if all of them are tensors."""
    with warnings.catch_warnings():
        if all(key in route.modules or key in slots for key in route.device_map):
            warnings.filterwarnings("ignore", "The following device_map keys do not match any")
        yield


def _hook_loose(
    loose: Mapping[str, nn.Module], route: Route, weights: WeightsMap, options: DispatchOptions
) -> None:
    if not loose:
        return
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

    arguments: dict[str, Any] = {"state_dict": weights, "index": {}, "device": route.main_device}
    loader = OffloadedWeightsLoader(**arguments)
    for path, module in loose.items():
        hook = AlignDevicesHook(
            execution_device=route.main_device,
            offload=True,
            io_same_device=not path,
            weights_map=PrefixedDataset(loader, f"{path}." if path else ""),
            offload_buffers=False,  # theirs are in memory, see Route.is_loose
            skip_keys=_listed(options.skip_keys),
        )
        add_hook_to_module(module, hook)


def _fused(model: nn.Module) -> Iterable[str]:
    """Return the classes that compute otherwise unless they have the weights of all children.

    They ask for plain tensors before they take their fused kernel (``torch.nn`` 2.13).
    """
    fused = nn.TransformerEncoderLayer
    kinds = {type(module) for module in model.modules()}
    return {k.__name__ for k in kinds if getattr(k, "forward", None) is fused.forward}


def _make_removable(model: nn.Module) -> None:
    """Let hooks, when they are removed, bring weights back to the CPU.

    They remember where the parameters were before, which here is the meta device, and would
    leave them there without data.
    """
    for module in model.modules():
        attached = getattr(module, "_hf_hook", None)
        # A module that the model has under two names got a hook for each.
        for hook in getattr(attached, "hooks", (attached,)):
            devices: dict[str, Device | torch.device] = getattr(hook, "original_devices", {})
            for name, device in devices.items():
                if device == torch.device("meta"):
                    devices[name] = torch.device("cpu")


def _listed(names: str | Sequence[str] | None) -> str | list[str] | None:
    return names if names is None or isinstance(names, str) else list(names)
