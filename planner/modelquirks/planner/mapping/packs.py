"""Packs: companions found and joined to the one logical weight they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from modelquirks.planner.mapping.logical import Logical, matching, renumbered, reordered
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import (
    Dequantize,
    Node,
    Part,
    RecipeError,
    Scheme,
    Setting,
    Transpose,
    mapped,
    sources,
)
from modelquirks.quirks.record import ModelQuirks, Pack
from modelquirks.quirks.resolve import Resolution

__all__ = ["Asker", "Broken", "Packed", "find_packs"]

Settings = tuple[tuple[str, Setting], ...]


class Broken(NamedTuple):
    """A logical tensor that cannot be made, and why."""

    name: str
    reason: str
    quirk: str
    reforms: bool = False
    """It is stored under its own name, but not in the form of the model."""
    parts: tuple[str, ...] = ()
    """Stored names of those of its sources that are there."""
    whole: bool = False
    """All its sources are there: what config.json tells does not do for the rule."""


@dataclass(frozen=True)
class Packed:
    """One family of packed weights."""

    weight: Logical
    """Its node gives the plain weight."""
    parts: tuple[Logical, ...]
    """The companions under their own logical names, with the same members."""
    scheme: str

    @property
    def codes_bear_its_name(self) -> bool:
        """Whether one of the parts is stored under the name of the plain weight."""
        return any(part.name == self.weight.name for part in self.parts)


@dataclass(frozen=True)
class Asker:
    """Asks the schemes what config.json says of a weight."""

    schemes: Mapping[str, Scheme]
    config: Mapping[str, Any]
    _same: dict[str, Settings] = field(default_factory=dict)
    """What is said of all weights of a scheme."""

    def of(self, scheme: str, weight: str) -> Settings:
        """Return the settings of a weight, sorted; RecipeError says what is lacking."""
        if scheme in self._same:
            return self._same[scheme]
        known = self.schemes.get(scheme)
        found = () if known is None else tuple(sorted(known.settings(self.config, weight).items()))
        if known is None or not getattr(known, "varies", _always)(self.config):
            self._same[scheme] = found
        return found

    def of_all(self, packed: Packed) -> Settings | None:
        """Return the settings of all these weights; None if each has to be asked about."""
        try:
            self.of(packed.scheme, packed.weight.name.format(*packed.weight.members[0]))
        except RecipeError:
            return None
        return self._same.get(packed.scheme)


def _always(config: Mapping[str, Any]) -> bool:
    return True


def find_packs(
    pieces: Sequence[Logical], resolution: Resolution, ask: Asker | None = None
) -> tuple[list[Packed], list[Broken]]:
    """Return the packed weights among *pieces*, and those that lack a companion.

    *ask* gives the settings of each; without it they have none, and nothing can be made of them.
    """
    found: list[Packed] = []
    broken: list[Broken] = []
    for record in resolution.records():
        for pack in record.packs:
            for group in _groups(pieces, pack):
                complete, lacking = _join(group, pack, record)
                found += complete
                broken += lacking
    if broken:  # what lacks a companion of one packing may have all of another
        whole = {name for packed in found for name in packed.weight.names}
        broken = [b for b in broken if b.name not in whole]
    if ask is not None:
        return _with_settings(found, broken, ask)
    return found, broken


def _with_settings(
    found: Iterable[Packed], broken: list[Broken], ask: Asker
) -> tuple[list[Packed], list[Broken]]:
    """Return the packed weights with their settings: a family apart where they differ."""
    settled: list[Packed] = []
    for packed in found:
        weight = packed.weight
        if (said := ask.of_all(packed)) is not None:
            settled.append(_settled(packed, said, weight.members))
            continue
        alike: dict[Settings, list[tuple[int, ...]]] = {}
        for name, member in weight.items():
            try:
                alike.setdefault(ask.of(packed.scheme, name), []).append(member)
            except RecipeError as error:
                leaves = (leaf for part in packed.parts for leaf in sources(part.node))
                stored = tuple(leaf.name.format(*member) for leaf in leaves)
                broken.append(Broken(name, str(error), weight.quirks[-1], parts=stored))
        for settings, members in alike.items():
            settled.append(_settled(packed, settings, tuple(members)))
    return settled, broken


def _settled(packed: Packed, settings: Settings, members: tuple[tuple[int, ...], ...]) -> Packed:
    def change(node: Node) -> Node:
        return replace(node, settings=settings) if isinstance(node, Dequantize) else node

    weight = replace(packed.weight, node=mapped(packed.weight.node, change), members=members)
    parts = packed.parts
    if members != packed.weight.members:
        parts = tuple(replace(part, members=members) for part in parts)
    return replace(packed, weight=weight, parts=parts)


class _Group(NamedTuple):
    """Companions of one family of weights."""

    weight: str
    parts: Mapping[str, Sequence[Logical]]
    """Role → pieces; the slots of all are numbered as those of the weight."""


def _groups(pieces: Sequence[Logical], pack: Pack) -> Iterator[_Group]:
    weight = Pattern(pack.weight)
    grouped: dict[str, dict[str, list[Logical]]] = {}
    for role, text in (*pack.parts, *pack.optional):
        for piece, binding in matching(pieces, Pattern(text)):
            name, order = renumbered(weight.fill(binding))
            by_role = grouped.setdefault(name, {})
            by_role.setdefault(role, []).append(reordered(piece, order))
    for name, found in grouped.items():
        yield _Group(name, found)


def _join(group: _Group, pack: Pack, record: ModelQuirks) -> tuple[list[Packed], list[Broken]]:
    """Return the packed weights of *group*, and those of which a required part is not there.

    A part that bears the weight's own name, or an optional one, tells nothing by itself: such
    weights may be plain.
    """
    telling = [role for role, text in pack.parts if text != pack.weight and role in group.parts]
    if not telling:
        return [], []
    if any(text == pack.weight and role not in group.parts for role, text in pack.parts):
        return [], []  # a family without a weight of that name is packed otherwise, or missing
    if (alike := _alike(group, pack)) is not None:
        return [_packed(group.weight, pack, record, alike, alike[telling[0]].members)], []
    where: dict[str, dict[tuple[int, ...], Logical]] = {
        # Stored twice: the first one counts, as everywhere; the account tells of the other.
        role: {member: piece for piece in reversed(pieces) for member in piece.members}
        for role, pieces in group.parts.items()
    }
    required = [role for role, _ in pack.parts]
    broken: list[Broken] = []
    by_parts: dict[tuple[tuple[str, Logical], ...], list[tuple[int, ...]]] = {}
    for member in dict.fromkeys(m for role in telling for m in where[role]):
        present = tuple((role, where[role][member]) for role in where if member in where[role])
        absent = [role for role in required if member not in where.get(role, {})]
        if absent:
            broken.append(_lacking(group, pack, record, member, present, absent))
        else:
            by_parts.setdefault(present, []).append(member)
    packed = [
        _packed(group.weight, pack, record, dict(parts), members)
        for parts, members in by_parts.items()
    ]
    return packed, broken


def _alike(group: _Group, pack: Pack) -> Mapping[str, Logical] | None:
    """Return the piece of each role if there is one each, all with the same members."""
    first = next(iter(group.parts.values()))[0]
    if any(role not in group.parts for role, _ in pack.parts):
        return None
    if any(len(p) > 1 or p[0].members != first.members for p in group.parts.values()):
        return None
    return {role: pieces[0] for role, pieces in group.parts.items()}


def _packed(
    weight: str,
    pack: Pack,
    record: ModelQuirks,
    parts: Mapping[str, Logical],
    members: Iterable[tuple[int, ...]],
) -> Packed:
    node: Node = Dequantize(
        pack.scheme, tuple(Part(role, piece.node) for role, piece in parts.items())
    )
    if pack.transpose is not None:
        node = Transpose(node, *pack.transpose)
    chosen = tuple(members)
    rule = f"{' + '.join(text for _, text in pack.parts)} → {pack.weight} ({pack.scheme})"
    used = [q for piece in parts.values() for q in piece.quirks]
    quirks = tuple(dict.fromkeys([*used, record.name]))
    return Packed(
        weight=Logical(weight, node, chosen, rule, quirks),
        parts=tuple(
            p if p.members == chosen else Logical(p.name, p.node, chosen, p.rule, p.quirks)
            for p in parts.values()
        ),
        scheme=pack.scheme,
    )


def _lacking(
    group: _Group,
    pack: Pack,
    record: ModelQuirks,
    member: tuple[int, ...],
    present: tuple[tuple[str, Logical], ...],
    absent: Sequence[str],
) -> Broken:
    stored = ", ".join(repr(piece.name.format(*member)) for _, piece in present)
    texts = dict(pack.parts)
    binding = Pattern(dict((*pack.parts, *pack.optional))[present[0][0]]).match(present[0][1].name)
    wanted = ", ".join(
        repr(Pattern(texts[role]).fill(binding).format(*member) if binding else texts[role])
        for role in absent
    )
    return Broken(
        name=group.weight.format(*member),
        reason=f"a companion of a packed weight ({pack.scheme}) is not stored: {wanted} "
        f"belongs to {stored}",
        quirk=record.name,
        parts=tuple(leaf.name.format(*member) for _, p in present for leaf in sources(p.node)),
    )
