"""``Place``: where one offloaded weight is put for a forward pass, and what stands there after."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from modelquirks.planner.execution.placeholder import has_rows
from modelquirks.planner.execution.weights import Steady, WeightsMap

__all__ = ["Place"]


class Place:
    """One tensor that a hook fetches: its module, and what the module holds in a pass."""

    __slots__ = (
        "by_row", "is_buffer", "kind", "leaf", "name", "owner", "placeholder", "ready", "steady",
    )  # fmt: skip

    by_row: bool
    """Whether it is of stacked experts, which come one by one."""
    ready: torch.Tensor | None
    """What a pass without gradients puts there, if the weight is the same memory every time."""
    steady: Steady | None

    def __init__(
        self, owner: nn.Module, leaf: str, name: str, placeholder: torch.Tensor | None
    ) -> None:
        """Take the tensor *leaf* of *owner*, which the hook's map has under *name*.

        *placeholder* is None for a class that has none: accelerate then fetches and drops it.
        """
        self.owner, self.leaf, self.name, self.placeholder = owner, leaf, name, placeholder
        self.is_buffer, self.by_row = leaf in owner._buffers, has_rows(placeholder)
        plain: Any = getattr(type(placeholder), "plain", nn.Parameter)
        self.kind: type[nn.Parameter] = plain
        self.ready = self.steady = None

    @property
    def held(self) -> dict[str, Any]:
        """Where the module holds it."""
        held: dict[str, Any] = self.owner._buffers if self.is_buffer else self.owner._parameters
        return held

    def settle(self, weights: WeightsMap, name: str) -> None:
        """Find out whether *weights* gives the same memory for *name* every time."""
        self.ready, self.steady = None, weights.steady(name)
        if self.steady is not None and self.steady.tensor.device.type == "cpu":
            self.ready = self.dressed(self.steady.tensor, requires_grad=False)

    def dressed(self, value: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
        """Return *value* as the module holds it: a parameter of the class that it had."""
        if self.is_buffer:
            return value
        return torch.Tensor._make_subclass(self.kind, value, requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        """Return the place in the copied module; what it holds in a pass is found anew."""
        other = Place.__new__(Place)
        memo[id(self)] = other  # before the module, which may be what is being copied
        other.leaf, other.name, other.is_buffer = self.leaf, self.name, self.is_buffer
        other.kind, other.by_row, other.ready, other.steady = self.kind, self.by_row, None, None
        other.owner = copy.deepcopy(self.owner, memo)
        other.placeholder = copy.deepcopy(self.placeholder, memo)
        return other
