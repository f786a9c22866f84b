"""``Snapshot``: what a model was before an attempt to load it."""

from __future__ import annotations

from typing import Any

from torch import nn

from modelquirks.planner.execution.slots import meta_attributes

__all__ = ["Snapshot"]

_ATTACHED = (
    *("_hf_hook", "_old_forward", "forward", "hf_device_map"),
    *("to", "cuda", "npu", "mlu", "sdaa", "musa", "xpu", "neuron"),
)
"""What ``dispatch_model`` of accelerate 1.15 puts on modules and on the model."""


class Snapshot:
    """Remembers parameters, buffers and attached hooks of a model; takes no copies of tensors."""

    def __init__(self, model: nn.Module) -> None:
        """Look at *model* as it is."""
        self._modules = [
            (
                module,
                dict(module._parameters),
                dict(module._buffers),
                {key: vars(module)[key] for key in _ATTACHED if key in vars(module)}
                | dict(meta_attributes(module)),
            )
            for module in model.modules()
        ]
        # accelerate hooks the class of a traced module, which belongs to that module alone.
        self._traced = [
            (type(module), type(module).forward)
            for module in model.modules()
            if "GraphModuleImpl" in str(type(module))
        ]
        # Loading makes new Parameter objects, but moving a model to a device changes in place
        # those that were not loaded.
        self._parameters = [
            (parameter, parameter.data, parameter.requires_grad, dict(vars(parameter)))
            for parameter in model.parameters()
        ]

    def restore(self) -> None:
        """Give the model back the very objects that it had."""
        for module, parameters, buffers, attached in self._modules:
            for key in (*_ATTACHED, *attached):
                _reset(vars(module), key, attached)
            for leaf, parameter in parameters.items():
                if module._parameters.get(leaf) is not parameter:
                    setattr(module, leaf, parameter)
            module._buffers.update(buffers)
        for kind, forward in self._traced:
            kind.forward = forward
        for parameter, data, requires_grad, attributes in self._parameters:
            if parameter.device != data.device:
                parameter.data = data
            parameter.requires_grad_(requires_grad)
            vars(parameter).update(attributes)


def _reset(owner: dict[str, Any], key: str, before: dict[str, Any]) -> None:
    if key in before:
        owner[key] = before[key]
    else:
        owner.pop(key, None)
