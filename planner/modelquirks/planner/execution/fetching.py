"""``take_over``: accelerate's hooks of a dispatched model, with placeholders between passes.

Imports accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, update_wrapper
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import named_module_tensors
from torch import nn

from modelquirks.planner.execution.experts import ExpertOffload
from modelquirks.planner.execution.hook import FetchingHook
from modelquirks.planner.execution.passstate import PassState
from modelquirks.planner.execution.place import Place
from modelquirks.planner.execution.placeholder import (
    Origin,
    UnfilledTensor,
    is_placeholder,
    placeholder_of,
)
from modelquirks.planner.execution.slots import meta_attributes
from modelquirks.planner.execution.weights import WeightsMap
from modelquirks.planner.names import parent

__all__ = ["FetchingHook", "take_over"]

_Known = dict[int, tuple[torch.Tensor, torch.Tensor | None]]
"""Placeholders by the identity of what they stand for, which is kept so that it stays unique."""


def take_over(model: nn.Module, experts: ExpertOffload | None = None) -> None:
    """Replace the hooks that fetch weights, and tensors without data by placeholders.

    Those of *experts* stay during a pass. Tensors that no hook fetches, and which are neither
    parameter nor buffer, refuse to be used.
    """
    for path, module in model.named_modules():
        for key, tensor in meta_attributes(module).items():
            vars(module)[key] = UnfilledTensor.of(tensor, f"{path}.{key}" if path else key)
    state = PassState()
    known: _Known = {}

    def fetching(hook: Any, module: nn.Module) -> Any:
        return _fetching(hook, module, state, known, experts)

    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    for module in hooked:
        attached: Any = module._hf_hook
        if isinstance(attached, SequentialHook):
            attached.hooks = tuple(fetching(hook, module) for hook in attached.hooks)
        else:
            module._hf_hook = fetching(attached, module)
    for module in hooked:
        if "forward" in vars(module):  # accelerate hooks the class of a traced module instead
            inner: Any = module.forward
            module.forward = update_wrapper(partial(_pass, module, state, inner), inner)


def _fetching(
    hook: Any,
    module: nn.Module,
    state: PassState,
    known: _Known,
    experts: ExpertOffload | None,
) -> Any:
    """Return the hook that takes the place of *hook*."""
    if type(hook) is not AlignDevicesHook:
        return hook
    new = FetchingHook.__new__(FetchingHook)
    prefix: str = getattr(hook.weights_map, "prefix", "")
    weights = getattr(getattr(hook.weights_map, "dataset", None), "state_dict", None)
    new.__dict__.update(
        vars(hook),
        state=state,
        places=[],
        prefix=prefix,
        weights=weights if isinstance(weights, WeightsMap) else None,
        given_map=hook.weights_map,
        tied_pointers_to_remove=set(),
    )
    for name, tensor in list(_fetched(hook, module)) if hook.offload else ():
        owner, leaf = _owner(module, name)
        rows = None if experts is None else experts.rows(prefix + name)
        placeholder = _placeholder(tensor, Origin(prefix + name, new, name, state, rows), known)
        if placeholder is not None:
            # By setattr, because nn.LSTM and the like list their own parameters there.
            setattr(owner, leaf, placeholder)
        new.places.append(Place(owner, leaf, name, placeholder))
    return new


def _placeholder(tensor: torch.Tensor, origin: Origin, known: _Known) -> torch.Tensor | None:
    """Return the one placeholder for *tensor*, also if it has several names or hooks."""
    if is_placeholder(tensor) or not tensor.is_meta:
        return tensor
    if id(tensor) not in known:
        known[id(tensor)] = tensor, placeholder_of(tensor, origin)
    return known[id(tensor)][1]


def _fetched(hook: Any, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors that *hook* fetches, as it lists them itself."""
    yield from named_module_tensors(
        module,
        include_buffers=hook.offload_buffers,
        recurse=hook.place_submodules,
        remove_non_persistent=True,
    )


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    return module.get_submodule(parent(name)), name.rpartition(".")[2]


def _hooks(module: nn.Module) -> Iterator[FetchingHook]:
    attached = getattr(module, "_hf_hook", None)
    for hook in getattr(attached, "hooks", (attached,)):
        if isinstance(hook, FetchingHook):
            yield hook


def _pass(module: nn.Module, state: PassState, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run *forward* of *module*; also after an error its weights are let go.

    *forward* is accelerate's function around the module's own. With a hook of ours alone, what
    that does is done here.
    """
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    own = module.__dict__
    hook = own.get("_hf_hook")
    depth = state.enter(module)
    try:
        if type(hook) is FetchingHook and "_old_forward" in own and not hook.is_changed:
            output = hook.around(module, own["_old_forward"], args, kwargs)
        else:
            output = forward(*args, **kwargs)
    except BaseException:
        for hook in _hooks(module):
            hook.put_back(module)
        state.leave(module, depth, failed=True)
        raise
    state.leave(module, depth)
    return output
