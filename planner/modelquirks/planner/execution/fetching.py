"""``take_over``: accelerate's hooks of a dispatched model, with placeholders between passes.

Imports accelerate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, update_wrapper, wraps
from typing import Any, TypeVar, cast

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import (
    find_device,
    named_module_tensors,
    send_to_device,
    set_module_tensor_to_device,
)
from torch import nn

from modelquirks.planner.execution.placeholder import (
    Origin,
    PassState,
    UnfilledTensor,
    is_placeholder,
    placeholder_of,
)
from modelquirks.planner.execution.slots import meta_attributes
from modelquirks.planner.names import parent

__all__ = ["FetchingHook", "take_over"]

_Known = dict[int, tuple[torch.Tensor, torch.Tensor | None]]
"""Placeholders by the identity of what they stand for, which is kept so that it stays unique."""

_F = TypeVar("_F", bound=Callable[..., Any])


def _untraced(function: _F) -> _F:
    """Keep torch.compile out of a function, as accelerate does for those of its hooks.

    As there, the compiler is imported only once the function is called.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(untraced, "disabled"):
            untraced.disabled = compiler.disable(function)
        return untraced.disabled(*args, **kwargs)

    compiler: Any = torch.compiler
    untraced: Any = call
    return cast(_F, call)


class FetchingHook(AlignDevicesHook):  # type: ignore[misc]
    """Fetches weights for a forward pass as accelerate does, and leaves placeholders after it."""

    placeholders: dict[str, torch.Tensor]
    """By the name below the module of the hook."""
    state: PassState
    # accelerate's own, which it does not annotate.
    tied_pointers_to_remove: set[tuple[int, Any]]
    tied_params_map: dict[int, dict[Any, torch.Tensor]]

    @_untraced
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Fetch the weights of *module*, and send the inputs after them."""
        self.state.forget()
        with torch._C.DisableTorchFunctionSubclass():  # placeholders are meta tensors here
            super().pre_forward(module)
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        return send_to_device(args, self.execution_device), send_to_device(
            kwargs, self.execution_device, skip_keys=self.skip_keys
        )

    @_untraced
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the weights go.

        Not as accelerate does (1.15, ``AlignDevicesHook.post_forward``), which makes each a meta
        tensor first: another thread that runs the module could find that, or have put the
        placeholder back already.
        """
        self.put_back(module)
        for name, _ in list(_fetched(self, module)):
            if name not in self.placeholders:  # a class of parameters that has none
                set_module_tensor_to_device(module, name, "meta")
                if type(module).__name__ == "Linear8bitLt":
                    state: Any = module.state
                    state.SCB = state.CxB = None
        for pointer, device in self.tied_pointers_to_remove:
            self.tied_params_map.get(pointer, {}).pop(device, None)
        self.tied_pointers_to_remove = set()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def put_back(self, module: nn.Module) -> None:
        """Let *module* hold its placeholders again."""
        for name, placeholder in self.placeholders.items():
            owner, leaf = _owner(module, name)
            held: Any = owner._parameters if leaf in owner._parameters else owner._buffers
            if leaf in held:
                held[leaf] = placeholder


def take_over(model: nn.Module) -> None:
    """Replace the hooks that fetch weights, and tensors without data by placeholders.

    Those that no hook fetches, and which are neither parameter nor buffer, refuse to be used.
    """
    for path, module in model.named_modules():
        for key, tensor in meta_attributes(module).items():
            vars(module)[key] = UnfilledTensor.of(tensor, f"{path}.{key}" if path else key)
    state = PassState()
    known: _Known = {}
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    for module in hooked:
        attached: Any = module._hf_hook
        if isinstance(attached, SequentialHook):
            attached.hooks = tuple(_fetching(h, module, state, known) for h in attached.hooks)
        else:
            module._hf_hook = _fetching(attached, module, state, known)
    for module in hooked:
        if "forward" in vars(module):  # accelerate hooks the class of a traced module instead
            inner: Any = module.forward
            module.forward = update_wrapper(partial(_pass, module, state, inner), inner)


def _fetching(hook: Any, module: nn.Module, state: PassState, known: _Known) -> Any:
    """Return the hook that takes the place of *hook*."""
    if not (type(hook) is AlignDevicesHook and hook.offload):
        return hook
    new = FetchingHook.__new__(FetchingHook)
    new.__dict__.update(vars(hook), state=state, placeholders={})
    prefix: str = getattr(hook.weights_map, "prefix", "")
    for name, tensor in list(_fetched(hook, module)):
        placeholder = _placeholder(tensor, Origin(prefix + name, new, name, state), known)
        if placeholder is not None:
            owner, leaf = _owner(module, name)
            # By setattr, because nn.LSTM and the like list their own parameters there.
            setattr(owner, leaf, placeholder)
            new.placeholders[name] = placeholder
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
    """Run *forward* of *module*; also after an error its weights are let go."""
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    with state.running():
        try:
            return forward(*args, **kwargs)
        except BaseException:
            for hook in _hooks(module):
                hook.put_back(module)
            raise
