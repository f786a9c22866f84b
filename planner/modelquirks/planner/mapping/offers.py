"""Offers: for every name that the checkpoint can provide, what provides it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from modelquirks.planner.mapping.conversions import find_conversions, selects
from modelquirks.planner.mapping.fit import Types
from modelquirks.planner.mapping.logical import Logical, from_renamed, slots
from modelquirks.planner.mapping.packs import Asker, Broken, Packed, find_packs
from modelquirks.planner.mapping.recipes import Env, stored_names
from modelquirks.planner.mapping.selections import find_selections
from modelquirks.quirks.family import Family, group
from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.recipe import (
    RecipeError,
    Scheme,
    Source,
    TensorType,
)
from modelquirks.quirks.record import Convert, ModelQuirks
from modelquirks.quirks.resolve import Renamed, Resolution

__all__ = ["Offer", "Offers", "Ranked", "find_offers"]


class Offer(NamedTuple):
    """One way to have one tensor."""

    logical: Logical
    member: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name in the model."""
        return self.logical.name.format(*self.member)

    @property
    def env(self) -> Env:
        """The values of the variables of the piece."""
        return dict(zip(self.logical.bound.variables, self.member, strict=True))

    def reads(self) -> Iterator[str]:
        """Yield the names of the stored tensors that it is made from."""
        if isinstance(node := self.logical.node, Source):
            return iter((node.name.format(*self.member),))
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
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Stored tensors that nobody is to use, and why: an adapter brings others."""

    @property
    def best(self) -> Mapping[str, Offer]:
        """The offer that counts, by logical name."""
        return self._ranked.best

    @property
    def rivals(self) -> Mapping[str, Sequence[Offer]]:
        """Further ways to have the same name: stored twice, or stored and made."""
        return self._ranked.rivals

    @cached_property
    def _ranked(self) -> Ranked:
        """All offers by name; a plan without a model never asks."""
        return self.ranked(None)

    def ranked(self, families: Collection[str] | None) -> Ranked:
        """Return the offers for the names of these *families*, by template; None: for all names."""
        ranked = Ranked(self.wanted, families)
        for piece in self.made:
            if piece.reforms:
                ranked.add(piece)
        for piece in self.direct:
            ranked.add(piece, skip=self.unreadable)
        raw = frozenset(ranked.best)
        for pack in self.packed:
            kept_packed = raw if pack.codes_bear_its_name else frozenset[str]()
            ranked.add(pack.weight, skip=kept_packed)
        for piece in self.made:
            if not piece.reforms:
                ranked.add(piece)
        return ranked

    @cached_property
    def alone(self) -> Mapping[str, Logical]:
        """By template, each piece that nothing else offers a name of."""
        pieces = [piece.without(self.unreadable) for piece in self.direct]
        pieces += [*(pack.weight for pack in self.packed), *self.made]
        found: dict[str, list[Logical]] = {}
        for piece in pieces:
            templates = [piece.name] if piece.is_family else group(piece.names)
            for template in templates if piece.members else ():
                found.setdefault(template, []).append(piece)
        firsts = {template: several[0] for template, several in found.items() if len(several) == 1}
        return {template: piece for template, piece in firsts.items() if piece.is_family}

    @cached_property
    def called(self) -> Mapping[str, str]:
        """Stored name → logical name, for every stored tensor."""
        return {stored: name for piece in self.direct for stored, name in piece.stored_as()}

    @property
    def companions(self) -> Collection[str]:
        """Logical names of the parts of packed weights; they are written when first asked for."""
        return _Companions(self.packed)


@dataclass(frozen=True)
class _Companions(Collection[str]):
    packed: Sequence[Packed]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for pack in self.packed for part in pack.parts for name in part.names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass
class Ranked:
    """Offers by name: the one that counts, and the others."""

    wanted: Collection[str]
    families: Collection[str] | None
    best: dict[str, Offer] = field(default_factory=dict)
    rivals: dict[str, list[Offer]] = field(default_factory=dict)

    def add(self, logical: Logical, skip: Collection[str] = ()) -> None:
        """Enter a piece, behind those that are there already."""
        if self.families is not None and logical.is_family and logical.name not in self.families:
            return
        wanted, best = self.wanted, self.best
        for name, member in logical.items():
            if name in skip or (wanted and name not in wanted):
                continue
            offer = Offer(logical, member)
            if best.setdefault(name, offer) is not offer:
                self.rivals.setdefault(name, []).append(offer)


def find_offers(
    resolution: Resolution,
    config: Mapping[str, Any],
    wanted: Collection[str],
    schemes: Mapping[str, Scheme],
    types: Types = lambda stored: TensorType(None, None),
) -> Offers:
    """Return what the checkpoint can provide under *resolution*.

    *types*, of stored tensors, are for the rules of a library.

    A stored tensor under the model's own name comes before a packed weight, and that before a
    conversion, except for one that gives a stored tensor another form under its own name. What the
    library of the model converts, no other record does. A part
    of a pack that bears the weight's own name (``weight`` beside ``weight_scale_inv``) is
    offered as it lies only to a model that wants all the companions.
    """
    direct = tuple(from_renamed(piece) for piece in resolution.renamed)
    packs, broken = find_packs(direct, resolution, Asker(schemes, config) if wanted else None)
    codes = _codes(packs, wanted)
    plain = [piece.without(codes) for piece in direct]
    pool = [piece for piece in plain if piece.members] + [p.weight for p in packs]
    made, lacking = find_conversions(pool, _library_rules(resolution, pool, schemes, types), config)
    others = [(record, record.conversions) for record in resolution.records()]
    by_others, more = find_conversions(pool, others, config)
    served = {name for piece in made for name in piece.names}
    by_others = [_as_the_library_calls_it(piece, resolution, wanted) for piece in by_others]
    made += [rest for piece in by_others if (rest := piece.without(served)).members]
    lacking += [broken for broken in more if broken.name not in served]
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


def _as_the_library_calls_it(
    piece: Logical, resolution: Resolution, wanted: Collection[str]
) -> Logical:
    """Return what a record's rule made under the library's name, if its own is not wanted."""
    if resolution.library is None or piece.names[0] in wanted:
        return piece
    family = Renamed(Family(piece.name, piece.names), piece.name)
    taken = resolution.library.named([family], {}).taken
    if len(taken) != 1 or taken[0].members is not None or slots(taken[0].name) != slots(piece.name):
        return piece
    return replace(piece, name=taken[0].name)


def _library_rules(
    resolution: Resolution, pool: Sequence[Logical], schemes: Mapping[str, Scheme], types: Types
) -> Iterator[tuple[ModelQuirks, Sequence[Convert]]]:
    """Yield the conversions of the library that the model comes from."""
    if (library := resolution.library) is not None:
        offered = {
            name: type_ for piece in pool for name, type_ in _typed(piece, schemes, types).items()
        }
        yield library.record, library.conversions(offered)


def _typed(piece: Logical, schemes: Mapping[str, Scheme], types: Types) -> Mapping[str, TensorType]:
    """Return the type of each member of *piece*, as far as headers tell."""
    if isinstance(piece.node, Source):
        return {name: types(stored) for stored, name in piece.stored_as()}
    found: dict[str, TensorType] = {}
    _, node, variables = piece.bound
    for name, member in piece.items():
        env = dict(zip(variables, member, strict=True))
        try:
            found[name] = infer(node, lambda text: types(text.format_map(env)), schemes)  # noqa: B023
        except RecipeError:
            found[name] = TensorType(None, None)
    return found


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
