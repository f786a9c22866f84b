"""Offers: for every name that the checkpoint can provide, what provides it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from modelquirks.planner.mapping.conversions import find_conversions, selects
from modelquirks.planner.mapping.logical import Logical, from_renamed
from modelquirks.planner.mapping.packs import Broken, Packed, asker, find_packs
from modelquirks.planner.mapping.recipes import Env, stored_names
from modelquirks.planner.mapping.selections import find_selections
from modelquirks.quirks.family import group
from modelquirks.quirks.recipe import Scheme
from modelquirks.quirks.resolve import Resolution

__all__ = ["Offer", "Offers", "find_offers"]


class Offer(NamedTuple):
    """One way to have one tensor."""

    logical: Logical
    member: tuple[int, ...]

    @property
    def env(self) -> Env:
        """The values of the variables of the piece."""
        return dict(zip(self.logical.bound.variables, self.member, strict=True))

    def reads(self) -> Iterator[str]:
        """Yield the names of the stored tensors that it is made from."""
        return stored_names(self.logical.bound.node, self.env)


@dataclass(frozen=True)
class Offers:
    """Everything that can be had for the names that a model wants (without one: for all)."""

    wanted: Collection[str]
    """Names of the model; none: no model."""
    direct: tuple[Logical, ...]
    """The stored tensors under their logical names, each once."""
    packed: tuple[Packed, ...]
    made: tuple[Logical, ...]
    """What conversions make."""
    unreadable: frozenset[str]
    """Names that must not be served by the stored tensor of that name: it holds codes, or has
    another form than the model's."""
    broken: Mapping[str, Broken]
    """Names that could almost be had, and what they lack."""

    @property
    def best(self) -> Mapping[str, Offer]:
        """The offer that counts, by logical name."""
        return self._collected.best

    @property
    def rivals(self) -> Mapping[str, Sequence[Offer]]:
        """Further ways to have the same name: stored twice, or stored and made."""
        return self._collected.rivals

    @cached_property
    def _collected(self) -> _Collector:
        """All offers by name; a plan without a model never asks."""
        collector = _Collector(self.wanted)
        for piece in self.made:
            if piece.reforms:
                collector.add(piece)
        for piece in self.direct:
            collector.add(piece, skip=self.unreadable)
        raw = frozenset(collector.best)
        for pack in self.packed:
            kept_packed = raw if pack.codes_bear_its_name else frozenset[str]()
            collector.add(pack.weight, skip=kept_packed)
        for piece in self.made:
            if not piece.reforms:
                collector.add(piece)
        return collector

    @cached_property
    def called(self) -> Mapping[str, str]:
        """Stored name → logical name, for every stored tensor."""
        return {stored: name for piece in self.direct for stored, name in piece.stored_as()}

    @cached_property
    def companions(self) -> frozenset[str]:
        """Logical names of the parts of packed weights."""
        return frozenset(name for pack in self.packed for part in pack.parts for name in part.names)


@dataclass
class _Collector:
    wanted: Collection[str]
    best: dict[str, Offer] = field(default_factory=dict)
    rivals: dict[str, list[Offer]] = field(default_factory=dict)

    def add(self, logical: Logical, skip: Collection[str] = ()) -> None:
        for name, member in logical.items():
            if name in skip or (self.wanted and name not in self.wanted):
                continue
            if name in self.best:
                self.rivals.setdefault(name, []).append(Offer(logical, member))
            else:
                self.best[name] = Offer(logical, member)


def find_offers(
    resolution: Resolution,
    config: Mapping[str, Any],
    wanted: Collection[str],
    schemes: Mapping[str, Scheme],
) -> Offers:
    """Return what the checkpoint can provide under *resolution*.

    A stored tensor under the model's own name comes before a packed weight, and that before a
    conversion, except for one that gives a stored tensor another form under its own name. A part
    of a pack that bears the weight's own name (``weight`` beside ``weight_scale_inv``) is
    offered as it lies only to a model that wants all the companions.
    """
    direct = tuple(from_renamed(piece) for piece in resolution.renamed)
    packs, broken = find_packs(direct, resolution, asker(schemes, config) if wanted else None)
    codes = _codes(packs, wanted)
    plain = [piece.without(codes) for piece in direct]
    pool = [piece for piece in plain if piece.members] + [p.weight for p in packs]
    made, lacking = find_conversions(pool, resolution, config)
    if any(selects(c.recipe) for record in resolution.records() for c in record.conversions):
        made += find_selections(pool, resolution, config, group(wanted))
    return Offers(
        wanted=wanted,
        direct=direct,
        packed=tuple(packs),
        made=tuple(made),
        unreadable=codes | {b.name for b in lacking if b.reforms},
        broken={b.name: b for b in (*broken, *lacking)},
    )


def _codes(packs: Sequence[Packed], wanted: Collection[str]) -> frozenset[str]:
    """Return the weights' own names that hold codes which this model cannot read."""
    codes: set[str] = set()
    for pack in packs:
        if pack.codes_bear_its_name:
            rows = zip(*(part.names for part in pack.parts), strict=True)
            codes.update(
                name
                for name, companions in zip(pack.weight.names, rows, strict=True)
                if not all(companion in wanted for companion in companions)
            )
    return frozenset(codes)
