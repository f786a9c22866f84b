"""``Outline``: a module tree in which what goes to one device as a whole counts as one tensor.

A checkpoint can have 200,000 tensors, and a solver that keeps 60 layers whole needs to know of
each layer how many bytes move and how many stay, not what is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from modelquirks.planner.names import parent
from modelquirks.planner.placement.devicemap import expand
from modelquirks.planner.placement.memory import Device
from modelquirks.planner.placement.moduletree import ModuleTree

__all__ = ["Outline", "Spread", "content_of", "outlined"]


@dataclass(frozen=True)
class Outline:
    """A tree for policies, which never split a unit, and the whole one for everything else."""

    coarse: ModuleTree
    """Each unit has at most one tensor of its own for each of: moved, buffers, computed."""
    make: Callable[[], ModuleTree]

    @cached_property
    def whole(self) -> ModuleTree:
        """The tree with every tensor."""
        return self.make()


class Spread(Mapping[str, Device]):
    """The device of every tensor of a tree, by a device map; worked out when first asked for."""

    def __init__(self, device_map: Mapping[str, Device], tree: Callable[[], ModuleTree]) -> None:
        """Take a map that covers every tensor of *tree*."""
        self._device_map = device_map
        self._tree = tree

    @cached_property
    def _devices(self) -> Mapping[str, Device]:
        keys = expand(self._device_map, self._tree().tensors)
        return {name: self._device_map[key] for name, key in keys.items()}

    def __getitem__(self, name: str) -> Device:
        """Return the device of one tensor."""
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tensors in module order."""
        return iter(self._devices)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._devices)


def content_of(unit: str, kind: str = "*") -> str:
    """Return the name under which the tensors of a unit count as one.

    >>> content_of("model.layers.3"), content_of("")
    ('model.layers.3.*', '*')
    """
    return f"{unit}.{kind}" if unit else kind


def outlined(tree: ModuleTree) -> Outline:
    """Return the outline of *tree*. Tensors that are tied or have companions keep their names."""
    if not tree.units:
        return Outline(tree, lambda: tree)
    counts = _Counts(tree)
    sizes: dict[str, int] = defaultdict(int)
    modules = (name.rpartition(".")[0] for name in tree.sizes)
    contents = map(counts.contents.__getitem__, modules)
    odd = counts.odd
    for name, content, size in zip(tree.sizes, contents, tree.sizes.values(), strict=True):
        sizes[content if content and name not in odd else counts.of(name)] += size
    coarse = ModuleTree(
        sizes=dict(sizes),
        modules=tuple(filter(counts.is_outside, tree.modules)),
        units=tree.units,
        aliases=tree.aliases,
        buffers=frozenset(counts.of(name) for name in tree.buffers if name in tree.sizes),
        together=tree.together,
        computed=frozenset(counts.of(name) for name in tree.computed if name in tree.sizes),
        read=_summed(tree, tree.read, sizes, counts),
        streamed=_summed(tree, tree.streamed, sizes, counts),
        at_once=_summed(tree, tree.at_once, sizes, counts),
        made=_added(tree.made, counts),
        padding={name: int(n) for name, n in _added(tree.padding, counts).items()},
        state=tree.state,
        state_read=tree.state_read,
    )
    return Outline(coarse, lambda: tree)


class _Counts:
    """As what each tensor counts: in a unit as its content, else as itself."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self.contents = _Contents(tree.units)
        self._tied = {name for group in tree.groups for name in group}
        self.odd = self._tied | tree.buffers | tree.computed
        """Tensors that may count otherwise than others of their module."""

    def of(self, name: str) -> str:
        """Return as what one tensor counts."""
        content = self.contents[parent(name)]
        if not content or name in self._tied:
            return name
        if name not in self.odd:
            return content
        # Some tensors of a unit stay where the model runs.
        return f"{content}computed" if name in self._tree.computed else f"{content}buffers"

    def is_outside(self, module: str) -> bool:
        """Tell whether a module is in no other one that is a unit."""
        content = self.contents[module]
        return not content or (module in self._tree.units and content == content_of(module))


def _summed(
    tree: ModuleTree,
    some: Mapping[str, float],
    sizes: Mapping[str, int],
    counts: _Counts,
) -> Mapping[str, float]:
    """Return the bytes that are read or moved of what counts as one: all of those not in *some*."""
    found: dict[str, float] = {}
    for name, n_bytes in some.items():
        counted = counts.of(name)
        found[counted] = found.get(counted, sizes[counted]) + n_bytes - tree.sizes[name]
    return found


def _added(some: Mapping[str, float], counts: _Counts) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for name, n_bytes in some.items():
        counted = counts.of(name)
        found[counted] = found.get(counted, 0.0) + n_bytes
    return found


class _Contents(dict[str, str]):
    """Module → as what the tensors count of the outermost unit that it is or is in.

    Empty for a module that is in none.
    """

    def __init__(self, units: Collection[str]) -> None:
        super().__init__({"": content_of("") if "" in units else ""})
        self._units = units

    def __missing__(self, module: str) -> str:
        above = self[module.rpartition(".")[0]]
        found = self[module] = above or (content_of(module) if module in self._units else "")
        return found
