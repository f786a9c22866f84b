"""``Outline``: a module tree in which what goes to one device as a whole counts as one tensor.

A checkpoint can have 200,000 tensors, and a solver that keeps 60 layers whole needs to know of
each layer how many bytes move and how many stay, not what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    top = _topmost(tree)
    grouped = {name for group in tree.groups for name in group}
    sizes: dict[str, int] = {}
    buffers: set[str] = set()
    computed: set[str] = set()
    special = tree.buffers | tree.computed
    contents = {unit: content_of(unit) for unit in tree.units}
    for name, size in tree.sizes.items():
        unit = top(parent(name))
        counted = name
        if unit is not None and name not in grouped:
            counted = content_of(unit, _kind(tree, name)) if name in special else contents[unit]
        sizes[counted] = sizes.get(counted, 0) + size
        if name in tree.buffers:
            buffers.add(counted)
        if name in tree.computed:
            computed.add(counted)
    coarse = ModuleTree(
        sizes=sizes,
        modules=tuple(m for m in tree.modules if (unit := top(m)) is None or unit == m),
        units=tree.units,
        aliases=tree.aliases,
        buffers=frozenset(buffers),
        together=tree.together,
        computed=frozenset(computed),
    )
    return Outline(coarse, lambda: tree)


def _kind(tree: ModuleTree, name: str) -> str:
    """Return what sets a tensor apart from others of its unit: some stay where the model runs."""
    if name in tree.computed:
        return "*computed"
    return "*buffers" if name in tree.buffers else "*"


def _topmost(tree: ModuleTree) -> Callable[[str], str | None]:
    """Return the function that gives the outermost unit that a module is or is in."""
    found: dict[str, str | None] = {"": "" if "" in tree.units else None}

    def top(module: str) -> str | None:
        if module not in found:
            above = top(parent(module))
            itself = module if module in tree.units else None
            found[module] = itself if above is None else above
        return found[module]

    return top
