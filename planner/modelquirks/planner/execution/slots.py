"""``Slot``: the place of one parameter or buffer in a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["Slot", "find_slots", "meta_attributes"]


class Slot(NamedTuple):
    """One name of a model: the module that holds the tensor and what it holds now."""

    module: nn.Module
    leaf: str
    tensor: torch.Tensor
    is_parameter: bool
    persistent: bool
    """Whether checkpoints hold it: false for buffers that the model computes itself."""

    def put(self, value: torch.Tensor) -> None:
        """Let the module hold *value* instead.

        Parameters go through ``setattr``, because modules such as ``nn.LSTM`` keep a list of
        their own parameters up to date there.
        """
        if self.is_parameter:
            setattr(self.module, self.leaf, value)
        else:
            self.module._buffers[self.leaf] = value


def find_slots(model: nn.Module) -> Mapping[str, Slot]:
    """Return every parameter and buffer of *model* under every name it has, in module order."""
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                slots[prefix + leaf] = Slot(module, leaf, parameter, True, True)
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                kept = leaf not in module._non_persistent_buffers_set
                slots[prefix + leaf] = Slot(module, leaf, buffer, False, kept)
    return slots


def meta_attributes(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return what *module* keeps on the meta device that is neither parameter nor buffer."""
    held = vars(module).items()
    return {k: v for k, v in held if isinstance(v, torch.Tensor) and v.is_meta}
