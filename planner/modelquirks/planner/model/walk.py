"""Walks over the modules of a model, in their order: with every name, or without any.

A model with an expert in each of 90,000 modules takes longer to name than to place. So what is only
counted is walked without names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from modelquirks.planner.model.skeleton import Kind

if TYPE_CHECKING:
    import torch

    Entry = tuple[str, Kind, torch.Tensor]

__all__ = ["Contents", "Flat", "entries_of", "flat", "modules_of", "outside"]

_LONGEST = 10_000
"""Letters of a module's name."""


def modules_of(model: torch.nn.Module, prefix: str = "") -> dict[str, torch.nn.Module]:
    """Return every module by its name, in module order; one that is shared, under each name.

    This is ``named_modules(prefix=prefix, remove_duplicate=False)``, whose generators within
    generators take several times as long. ValueError for a module that contains itself.
    """
    return outside(model, frozenset(), prefix)[0]


def outside(
    model: torch.nn.Module, classes: frozenset[str], prefix: str = ""
) -> tuple[dict[str, torch.nn.Module], frozenset[str]]:
    """Return every module that is not in one of *classes*, and the names of those that are one.

    Names as for :func:`modules_of`, ValueError too.
    """
    found: dict[str, torch.nn.Module] = {}
    units: set[str] = set()
    left: list[tuple[str, torch.nn.Module]] = [(prefix, model)]
    while left:
        name, module = left.pop()
        found[name] = module
        if len(name) > _LONGEST:
            raise ValueError(f"{name[:60]!r} … has no end: a module of the model contains itself")
        if classes and type(module).__name__ in classes:
            units.add(name)
        elif parts := module._modules:
            dot = f"{name}." if name else ""
            some = reversed(parts.items())
            left += [(dot + part, below) for part, below in some if below is not None]
    return found, frozenset(units)


def entries_of(modules: Mapping[str, torch.nn.Module]) -> Iterator[Entry]:
    """Yield every parameter and buffer of *modules* under its full name, in module order."""
    for prefix, module in modules.items():
        if parameters := module._parameters:
            dot = f"{prefix}." if prefix else ""
            for name, parameter in parameters.items():
                if parameter is not None:
                    yield dot + name, "parameter", parameter
        if buffers := module._buffers:
            dot = f"{prefix}." if prefix else ""
            for name, buffer in buffers.items():
                if buffer is not None:
                    computed = name in module._non_persistent_buffers_set
                    yield dot + name, "computed" if computed else "buffer", buffer


class Contents(NamedTuple):
    """The tensors of a module and of all below it, without names."""

    parameter: Sequence[torch.Tensor]
    buffer: Sequence[torch.Tensor]
    computed: Sequence[torch.Tensor]


class Flat(NamedTuple):
    """A model without names: what :func:`modules_of` returns, in the same order."""

    modules: list[torch.nn.Module]
    heights: list[int]
    """Falls below that of a module after the last one below it."""
    starts: list[int]
    """Parameters before each module, then all of them."""
    parameters: list[torch.Tensor]
    buffered: list[int]
    """Numbers of the modules that have buffers."""

    def each(self, classes: frozenset[str]) -> Iterator[Contents]:
        """Yield what is in each module of *classes* that is in no other one."""
        known = {kind for kind in {*map(type, self.modules)} if kind.__name__ in classes}
        after = 0
        for number, module in enumerate(self.modules):
            if number >= after and type(module) in known:
                after = self._after(number)
                yield self._contents(number, after)

    def _after(self, number: int) -> int:
        """Return the number of the first module that is not below that one."""
        height, heights = self.heights[number], self.heights
        for other in range(number + 1, len(heights)):
            if heights[other] < height:
                return other
        return len(heights)

    def _contents(self, first: int, after: int) -> Contents:
        buffers: list[torch.Tensor] = []
        computed: list[torch.Tensor] = []
        low, high = bisect_left(self.buffered, first), bisect_left(self.buffered, after)
        for number in self.buffered[low:high]:
            module = self.modules[number]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    apart = name in module._non_persistent_buffers_set
                    (computed if apart else buffers).append(buffer)
        parameters = self.parameters[self.starts[first] : self.starts[after]]
        return Contents(parameters, buffers, computed)


def flat(model: torch.nn.Module) -> Flat:
    """Return *model* without names. ValueError for a module that contains itself."""
    found = Flat([], [], [], [], [])
    modules, heights, starts, parameters, buffered = found
    left, many = [model], _MANY
    while left:
        module = left.pop()
        if module._buffers:
            buffered.append(len(modules))
        modules.append(module)
        heights.append(len(left))
        starts.append(len(parameters))
        if own := module._parameters:
            for tensor in own.values():  # a comprehension is a call, and slower
                if tensor is not None:
                    parameters.append(tensor)
        if parts := module._modules:
            for below in reversed(parts.values()):
                if below is not None:
                    left.append(below)
        if len(modules) == many:
            modules_of(model)  # it knows whether there is an end
            many *= 8
    starts.append(len(parameters))
    return found


_MANY = 1_000_000
"""Modules that are walked before anybody asks whether there is an end."""
