"""``Shell``: the parts that one rank has of a model, as a model of plain tensors.

It has the module paths, names, ties and devices of the sharded model and nothing else, so that
whatever loads a plain model loads the parts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from modelquirks.planner.distributed.part import PartError
from modelquirks.planner.distributed.shard import local_part, local_tensor, sharded_like
from modelquirks.planner.execution.loaditem import ExecutionError, LoadItem
from modelquirks.planner.execution.slots import Slot, find_slots

__all__ = ["Shell"]


class Shell:
    """A sharded model beside the plain one of this rank's parts."""

    def __init__(self, model: nn.Module) -> None:
        """Build the plain model; tensors with data share it."""
        self._slots = find_slots(model)
        self._tensors: dict[int, torch.Tensor] = {}
        self.model = self._hull(model, {})

    def _hull(self, module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        hull = made[id(module)] = nn.Module()
        for leaf, parameter in module._parameters.items():
            part = None if parameter is None else self._parameter(parameter)
            hull._parameters[leaf] = part
        for leaf, buffer in module._buffers.items():
            hull._buffers[leaf] = None if buffer is None else self._buffer(buffer)
        hull._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            hull._modules[name] = None if child is None else self._hull(child, made)
        return hull

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        made = self._tensors.get(id(parameter))
        if not isinstance(made, nn.Parameter):
            learns = parameter.requires_grad
            made = nn.Parameter(local_tensor(parameter), requires_grad=learns)
            self._tensors[id(parameter)] = made
        return made

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        if not isinstance(buffer, DTensor):
            return buffer
        return self._tensors.setdefault(id(buffer), local_tensor(buffer))

    def items(self, items: Iterable[LoadItem]) -> list[LoadItem]:
        """Return the parts of *items* that this rank has, a recipe for each.

        A tensor that has several names is one item only if it is one tensor in the model:
        ``fully_shard`` and its like have settled by then what is shared. ExecutionError for
        tensors of which it is not certain what the rank has.
        """
        parts: list[LoadItem] = []
        faults: list[str] = []
        for item in items:
            for own in self._of_one_tensor(item):
                try:
                    parts.append(self._part(own))
                except PartError as error:
                    faults.append(f"{own}: {error}")
        if faults:
            more = f"\n… and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ExecutionError("\n".join(faults[:10]) + more)
        return parts

    def _of_one_tensor(self, item: LoadItem) -> Iterator[LoadItem]:
        names: dict[int, list[str]] = {}
        for name in item.names:
            if name in self._slots:
                names.setdefault(id(self._slots[name].tensor), []).append(name)
        for first, *others in names.values():
            yield replace(item, name=first, aliases=tuple(others))

    def _part(self, item: LoadItem) -> LoadItem:
        part = local_part(self._slots[item.name].tensor)
        if item.dtype == "F4" and item.shape:  # the model counts bytes of two values
            part = part.times(2)
        if len(part.runs) != len(item.shape):
            return item  # the checks before loading say so
        node = part.recipe(item.node, item.shape)
        return replace(item, node=node, shape=part.shape)

    def apart(self, items: Iterable[LoadItem]) -> Iterator[list[str]]:
        """Yield the names that one tensor is to have and the sharded model has as several."""
        for item in items:
            owns = list(self._of_one_tensor(item))
            if len(owns) > 1:
                yield [own.name for own in owns]

    def torn(self) -> Iterator[list[str]]:
        """Yield the names that were one tensor and, after loading, have several values."""
        loaded = find_slots(self.model)
        shared: dict[int, list[str]] = {}
        for name, slot in self._slots.items():
            shared.setdefault(id(slot.tensor), []).append(name)
        for names in shared.values():
            if len({id(loaded[name].tensor) for name in names}) > 1:
                yield names

    def adopt(self, items: Iterable[LoadItem]) -> Mapping[str, Slot]:
        """Put the parts that were loaded into the sharded model; return its slots from before."""
        loaded = find_slots(self.model)
        made: dict[int, torch.Tensor] = {}
        for name in (name for item in items for name in item.names):
            slot, part = self._slots[name], loaded[name].tensor
            if isinstance(slot.tensor, DTensor):
                if id(part) not in made:
                    learns = part.requires_grad
                    made[id(part)] = sharded_like(slot.tensor, part.detach(), learns=learns)
                slot.put(made[id(part)])
            else:
                slot.put(part)
        return self._slots
