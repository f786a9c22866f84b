"""Items: the pieces that a solver places, cut from a module tree.

An item is a module that is not taken apart, a tensor of a module whose parts may end up on
several devices, or several of these that must stay together (ties, companions).
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

from modelquirks.planner.names import parent
from modelquirks.planner.placement.cost import NOTHING, Load
from modelquirks.planner.placement.memory import Device
from modelquirks.planner.placement.moduletree import Module, ModuleTree

__all__ = ["Cut", "Cuts", "Item", "Kind"]

_PARTS = (16, 128)
"""Coarse cuts keep a module whole that is at most one part in so many of the model."""


@dataclass(frozen=True, slots=True)
class Item:
    """What goes to one device as a whole."""

    names: tuple[str, ...]
    """Modules in module order; the tensor's name for a tensor that is alone."""
    tensors: tuple[str, ...]
    moved_bytes: int
    """What leaves the main device if the item is offloaded."""
    kept_bytes: int
    """What stays on the main device even then."""
    run_bytes: int
    """What has to be on the main device at once when an offloaded item runs, beside
    ``kept_bytes``: all that was moved, or less if it is more than one unit, or has stacked experts
    that come one by one."""
    pinned: bool
    """Must be on the main device.

    accelerate 1.15, ``attach_align_device_hook_on_blocks``: only modules of the device map get a
    hook that moves their tensors and inputs. Tensors of a module whose parts are apart are left
    where they are, and never read from the disk; those of the root are moved to the main device.
    """
    load: Load = NOTHING
    """What one step asks for."""
    pad_bytes: int = 0
    """More that it takes on an accelerator, whose allocator rounds up."""
    pin: Device | None = None
    """Where somebody wants it."""
    state_bytes: int = 0
    """The part of ``kept_bytes`` that is cache, not weights."""

    @property
    def n_bytes(self) -> int:
        """All bytes of the item, its cache included."""
        return self.moved_bytes + self.kept_bytes

    @property
    def fixed(self) -> bool:
        """Whether there is no choice."""
        return self.pinned or self.pin is not None

    def padding(self, device: Device) -> int:
        """Return what it takes on *device* beside ``n_bytes``."""
        return 0 if device in ("cpu", "disk") else self.pad_bytes

    @property
    def kind(self) -> Hashable:
        """What items have in common that are alike for a solver."""
        return (
            self.moved_bytes, self.kept_bytes, self.run_bytes, self.pinned, self.load,
            self.pad_bytes, self.pin,
        )  # fmt: skip


class Kind(NamedTuple):
    """Items that are alike."""

    item: Item
    numbers: tuple[int, ...]
    """Their places among the items of the problem, in module order."""

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.numbers)


@dataclass(frozen=True)
class Cut:
    """A whole model as items in module order."""

    items: tuple[Item, ...]

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of the model."""
        return sum(item.n_bytes for item in self.items)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes that would stay on the main device if all were offloaded that can be."""
        return sum(item.kept_bytes for item in self.items if not item.fixed)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The items by kind."""
        alike: dict[Hashable, list[int]] = {}
        for number, item in enumerate(self.items):
            alike.setdefault(item.kind, []).append(number)
        return tuple(Kind(self.items[numbers[0]], tuple(numbers)) for numbers in alike.values())

    @cached_property
    def run_sizes(self) -> tuple[int, ...]:
        """Each ``run_bytes`` of items that can be offloaded, largest first."""
        sizes = {item.run_bytes for item in self.items if not item.pinned}
        return tuple(sorted(sizes, reverse=True))


class _Piece(NamedTuple):
    name: str
    tensors: tuple[str, ...]
    run_bytes: int
    pinned: bool = False


class Cuts:
    """The ways to cut a tree, each made when it is first asked for.

    *pins* are tensors with the device that somebody wants for them; a module of which some have
    one and others not is not kept whole, if it may be parted.

    A coarse cut keeps modules whole that are at most 1/16 (then 1/128) of the model. That makes
    short maps, and modules with tensors of their own (the embeddings of a vision model) run on
    one device.
    """

    def __init__(
        self,
        tree: ModuleTree,
        *,
        offload_buffers: bool,
        pins: Mapping[str, Device] | None = None,
    ) -> None:
        """Take a tree and what decides how it can be cut."""
        self._cutter = _Cutter(tree, offload_buffers, pins or {})
        total = self._cutter.totals[""]
        self._bounds = (*(total // part for part in _PARTS), -1)
        self._made: dict[int, Cut] = {}

    def __iter__(self) -> Iterator[Cut]:
        """Iterate over cuts that differ, coarse ones first; the last is the finest."""
        n_items = -1
        for bound in self._bounds:
            cut = self._cut(bound)
            if len(cut.items) != n_items:
                n_items = len(cut.items)
                yield cut

    @property
    def finest(self) -> Cut:
        """The cut that keeps nothing whole that may be parted."""
        return self._cut(self._bounds[-1])

    @property
    def coarse(self) -> list[Cut]:
        """All cuts but the finest."""
        return [cut for cut in self if len(cut.items) < len(self.finest.items)]

    def up_to(self, n_items: int) -> Cuts:
        """Return the cuts of at most so many items, the coarsest in any case."""
        fewer = copy(self)
        first, *others = self._bounds
        fewer._bounds = (first, *(b for b in others if len(self._cut(b).items) <= n_items))
        return fewer

    def _cut(self, bound: int) -> Cut:
        if bound not in self._made:
            self._made[bound] = self._cutter.cut(bound)
        return self._made[bound]


class _Cutter:
    """Sums over one tree, made once for all its cuts."""

    def __init__(self, tree: ModuleTree, offload_buffers: bool, pins: Mapping[str, Device]) -> None:
        self._tree = tree
        self._pins = pins
        self._leaving = {
            name: 0 if tree.stays(name, offload_buffers=offload_buffers) else size
            for name, size in tree.sizes.items()
        }
        """Bytes of each tensor that leave the main device if it is offloaded."""
        self.totals: dict[str, int] = {}
        """Bytes of each module, its parts included."""
        self._run: dict[str, int] = {}
        for module in reversed(list(tree.root.walk())):
            parts = [part.name for part in module.parts]
            own = sum(tree.sizes.get(name, 0) for name in module.tensors)
            self.totals[module.name] = own + sum(self.totals[part] for part in parts)
            if module.name in tree.units:
                self._run[module.name] = self._at_once(module.below())
            else:
                most = max((self._run[part] for part in parts), default=0)
                self._run[module.name] = self._at_once(module.tensors) + most

    def cut(self, bound: int) -> Cut:
        """Return the cut that keeps modules whole up to *bound* bytes."""
        return Cut(tuple(self._joined(list(self._pieces(self._tree.root, bound)))))

    def _moved(self, tensors: Iterable[str]) -> int:
        """Return the bytes that leave the main device if these tensors are offloaded."""
        return sum(map(self._leaving.__getitem__, self._owners(tensors)))

    def _at_once(self, tensors: Sequence[str]) -> int:
        """Return how many of these come back at a time when an offloaded module runs."""
        some = self._tree.at_once
        if not some:
            return self._moved(tensors)
        leaving = self._leaving
        owners = self._owners(tensors)
        return sum(math.ceil(some.get(n, leaving[n])) if leaving[n] else 0 for n in owners)

    def _owners(self, tensors: Iterable[str]) -> Iterable[str]:
        aliases = self._tree.aliases
        return {aliases.get(name, name) for name in tensors} if aliases else tensors

    def _pieces(self, module: Module, bound: int) -> Iterator[_Piece]:
        pins = {self._pins.get(name) for name in module.below()} if self._pins else {None}
        small = module.name != "" and self.totals[module.name] <= bound and len(pins) == 1
        asked = len(pins) == 1 and pins != {None}
        if small or asked or module.name in self._tree.units or not module.parts:
            if tensors := module.below():
                yield _Piece(module.name, tensors, self._run[module.name])
            return
        for tensor in module.tensors:
            yield _Piece(tensor, (tensor,), self._at_once([tensor]), pinned=True)
        for part in module.parts:
            yield from self._pieces(part, bound)

    def _joined(self, pieces: list[_Piece]) -> Iterator[Item]:
        """Yield the items: *pieces*, with those that share a group of the tree made one."""
        place = {name: number for number, piece in enumerate(pieces) for name in piece.tensors}
        first = list(range(len(pieces)))

        def find(number: int) -> int:
            while first[number] != number:
                first[number] = first[first[number]]
                number = first[number]
            return number

        for group in self._tree.groups:
            low, *rest = sorted({find(place[name]) for name in group})
            for number in rest:
                first[number] = low
        members: dict[int, list[_Piece]] = {}
        for number, piece in enumerate(pieces):
            members.setdefault(find(number), []).append(piece)
        tree = self._tree
        homes = _homes(pieces, dict.fromkeys((*tree.state, *tree.state_read)))
        states = _summed(homes, tree.state)
        reads = _summed(homes, tree.state_read) if tree.state_read else states
        return (self._item(joined, states, reads) for joined in members.values())

    def _item(
        self, pieces: list[_Piece], states: Mapping[str, int], reads: Mapping[str, int]
    ) -> Item:
        tree = self._tree
        tensors = tuple(name for piece in pieces for name in piece.tensors)
        owned = [(name, tree.sizes[name]) for name in tensors if name in tree.sizes]
        size = sum(n for _, n in owned)
        moved = self._moved(tensors)
        state = sum(states.get(piece.name, 0) for piece in pieces)
        load = Load(
            size=size,
            read=_sum(owned, tree.read),
            streamed=max(0.0, _sum(owned, tree.streamed) - (size - moved)),
            state=sum(reads.get(piece.name, 0) for piece in pieces),
            made=sum(tree.made.get(name, 0.0) for name, _ in owned) if tree.made else 0.0,
        )
        return Item(
            names=tuple(piece.name for piece in pieces),
            tensors=tensors,
            moved_bytes=moved,
            kept_bytes=size - moved + state,
            run_bytes=max(piece.run_bytes for piece in pieces),
            pinned=any(piece.pinned for piece in pieces),
            pin=next((self._pins[name] for name in tensors if name in self._pins), None),
            load=load,
            state_bytes=state,
            pad_bytes=sum(map(tree.padding.get, tensors, repeat(0))) if tree.padding else 0,
        )


def _sum(owned: Sequence[tuple[str, int]], some: Mapping[str, float]) -> float:
    """Return the sum of sizes, of those in *some* what is told there."""
    return sum(some.get(name, size) for name, size in owned) if some else sum(n for _, n in owned)


def _homes(pieces: Sequence[_Piece], modules: Iterable[str]) -> Mapping[str, str]:
    """Return the piece that has the cache of each of *modules*.

    A module that is in a piece gives its cache to that; one whose parts are pieces, to the one
    that attends, which is where it is needed, else to the first.
    """
    modules = [*modules]
    if not modules:
        return {}
    names = {piece.name for piece in pieces}
    below: dict[str, list[str]] = {}
    for name in names:
        above = parent(name)
        while above:
            below.setdefault(above, []).append(name)
            above = parent(above)
    found: dict[str, str] = {}
    for module in modules:
        home = module
        while home and home not in names:
            home = parent(home)
        if not home and (parts := sorted(below.get(module, ()))):
            home = next((part for part in parts if _ATTENDS.search(part)), parts[0])
        found[module] = home
    return found


def _summed(homes: Mapping[str, str], some: Mapping[str, int]) -> Mapping[str, int]:
    """Return the bytes of cache by piece."""
    found: dict[str, int] = {}
    for module, n_bytes in some.items():
        found[homes[module]] = found.get(homes[module], 0) + n_bytes
    return found


_ATTENDS = re.compile(r"attn|attention|mixer|mamba|conv", re.I)
