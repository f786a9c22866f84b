"""Converting: the converters of transformers as rules, by running them on traced tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

from modelquirks.planner.finding import shown
from modelquirks.plugins.bridge.families import by_family
from modelquirks.plugins.bridge.internals import Found, converted, found, source_shapes
from modelquirks.plugins.bridge.naming import Naming
from modelquirks.plugins.bridge.opaque import opaque
from modelquirks.plugins.bridge.rolling import rolled
from modelquirks.quirks.family import (
    Family,
    group,
    indices_of,
    raw_templates,
    show,
    template_of,
)
from modelquirks.quirks.recipe import Node, Opaque, Source, TensorType, mapped
from modelquirks.quirks.record import Convert

__all__ = ["Converting"]

Index = tuple[int, ...]
_DIGITS = re.compile(r"[0-9]{1,4000}")  # what int takes


class _Target(NamedTuple):
    """One thing that a converter makes, by the first of its targets, and of what."""

    name: str
    number: int
    """Of the converter."""
    sources: Mapping[str, tuple[str, ...]]
    """Source pattern → names offered, in the order in which transformers takes them."""


@dataclass
class Converting:
    """The converters of one model."""

    model: Any
    naming: Naming
    offered: Mapping[str, TensorType]
    """Names that can be had, with their types; a shape is None where nobody knows it."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Template of a name offered → template of the name in the files, where that is another."""
    problems: dict[str, None] = field(default_factory=dict)
    """What could not be converted, a sentence each."""

    def conversions(self) -> Iterator[Convert]:
        """Yield a rule for each family of targets that transformers makes of what is offered."""
        if not self.naming.rules.converters:
            return
        by_template: dict[tuple[str, int], list[_Target]] = {}
        for target in self._targets():
            by_template.setdefault((template_of(target.name), target.number), []).append(target)
        for alike in by_template.values():
            yield from self._rules(alike)

    @cached_property
    def _families(self) -> Mapping[str, Family]:
        return group(self.offered)

    def _targets(self) -> Iterator[_Target]:
        """Yield what the converters would make, each with all of its sources."""
        collected: dict[tuple[str, int], dict[str, list[str]]] = {}
        for name, target, by in self._taken():
            patterns = collected.setdefault((target, by.number), {})
            patterns.setdefault(by.pattern, []).append(name)
        for (name, number), patterns in collected.items():
            if unlike := next(filter(None, map(_unlike, patterns.values())), None):
                one, other = map(self._told, unlike)
                text = (
                    f"transformers would make {name!r} of {one!r} and {other!r}, which are not "
                    "numbered alike and one after another, so that their order is a guess: nothing "
                    "is made of them"
                )
                self.problems[text] = None
                continue
            yield _Target(name, number, {p: _sorted(names) for p, names in patterns.items()})

    def _taken(self) -> Iterator[tuple[str, str, Found]]:
        """Yield each name that a converter takes, with the model's name of the first target."""
        rules = self.naming.rules

        def apply(name: str) -> tuple[tuple[str], Found | None]:
            target, by = found(rules, name)
            return (target,), by

        for family in self._families.values():
            names = dict(zip(family.members, family.names, strict=True))
            for outcome in by_family(family.template, family.members, apply, self.naming.literals):
                if outcome.tag is None:
                    continue
                for member in outcome.members:
                    place = self.naming.placed(outcome.templates[0].format(*member))
                    if place is not None:
                        yield names[member], place[0], outcome.tag

    def _rules(self, alike: Sequence[_Target]) -> Iterator[Convert]:
        """Yield the rules for the targets of one family: one for all, if they are made alike.

        A target whose sources do not fit together (one is lacking, say) says nothing about how
        it would be made: the others do, and the account will name what it lacks.
        """
        groups: dict[object, list[_Target]] = {}
        for target in alike:
            groups.setdefault(self._signature(target), []).append(target)
        if self._are_whole_families(alike):
            found = [self._general(members) for members in groups.values()]
            made = [rules for rules in found if rules != {}] or [{}]
            if made[0] is not None and all(rules == made[0] for rules in made):
                yield from starmap(Convert, made[0].items())
                return
        for target in alike:
            rules = self._general([target], literal=True) or {}
            yield from starmap(Convert, rules.items())

    def _are_whole_families(self, alike: Sequence[_Target]) -> bool:
        """Tell whether every name like the sources is a source: a pattern takes them all."""
        taken = Counter(
            template_of(n) for t in alike for names in t.sources.values() for n in names
        )
        return all(len(self._families[template]) == n for template, n in taken.items())

    def _general(
        self, members: Sequence[_Target], *, literal: bool = False
    ) -> dict[str, Node] | None:
        """Return target pattern → recipe for *members*; None if no pattern fits them all."""
        first = members[0]
        made = self._made(first)
        texts = {name: name for names in first.sources.values() for name in names}
        slots = {name: name for name in made}
        if not literal:
            bound = _bound(members)
            if bound is None or any(isinstance(node, Opaque) for node in made.values()):
                return None  # what code makes may depend on the name
            texts = bound
            slots = {name: _slotted(name) for name in made}

        def change(node: Node) -> Node:
            return Source(texts[node.name]) if isinstance(node, Source) else node

        def exists(pattern: str) -> bool:
            values = {f"i{slot}": value for slot, value in enumerate(_index(first.name))}
            return "{n" not in pattern and pattern.format_map(values) in self.offered

        return {
            slots[name]: rolled(mapped(node, change), exists)
            for name, node in made.items()
            if node != Source(name)
        }

    def _made(self, target: _Target) -> dict[str, Node]:
        """Return what the converter makes of traced tensors: name in the model → node."""
        from modelquirks.plugins.bridge.tracing import Traced, UntraceableError

        converter = self.naming.rules.converters[target.number]
        try:
            types = self._types(target)
            tensors = {
                pattern: [Traced.source(Source(name), *types[name]) for name in names]
                for pattern, names in target.sources.items()
            }
            made = converted(converter, target.name, tensors, self.model)
        except UntraceableError:
            return opaque(self.model, target.number, target.name, target.sources)
        except Exception as error:  # an operation of transformers, on what it does not expect
            family = show(template_of(target.name))
            text = f"transformers cannot make {family!r} of what is stored: {error}"
            self.problems[f"{text}{self._odd(target)}"] = None
            return {}
        return {
            name: value.node
            for name, value in made.items()
            if isinstance(value, Traced) and name in self.naming.known
        }

    def _odd(self, target: _Target) -> str:
        """Return what is unlike the rest in the sources of *target*, as the end of a sentence."""
        told: list[str] = []
        longest = max(target.sources.values(), key=len)
        for names in target.sources.values():
            types = [self.offered[name] for name in names]
            usual = Counter(types).most_common(1)[0][0]
            odd = [name for name, other in zip(names, types, strict=True) if other != usual]
            if odd and 2 * len(odd) < len(names):
                told.append(f"unlike its siblings: {shown(map(self._told, odd), 4)}")
            if lacking := _lacking(names, longest):
                told.append(f"not there: {shown(map(self._told, lacking), 4)}")
        return f" ({'; '.join(told)})" if told else ""

    def _told(self, name: str) -> str:
        """Return a name offered as it is in the files."""
        template = template_of(name)
        return self.stored.get(template, template).format(*_index(name))

    def _types(self, target: _Target) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each source; of a bare index, as the model's tensors tell.

        Converters go both ways: what transformers would save is what it expects to load.
        """
        shapes: Mapping[str, tuple[int, ...]] | None = None
        types: dict[str, tuple[str, tuple[int, ...]]] = {}
        for pattern, names in target.sources.items():
            for name in names:
                dtype, shape = self.offered[name]
                if shape is None:
                    shapes = shapes or self._saved(target)
                    shape = shapes[pattern]
                types[name] = dtype or "F32", shape
        return types

    def _signature(self, target: _Target) -> object:
        """Return all that the recipe depends on: how many sources of which types."""
        return tuple(
            (pattern, tuple([self.offered[name] for name in names]))
            for pattern, names in target.sources.items()
        )

    def _saved(self, target: _Target) -> Mapping[str, tuple[int, ...]]:
        from modelquirks.plugins.bridge.tracing import Traced

        converter = self.naming.rules.converters[target.number]
        parameters = dict(self.model.state_dict())
        wanted: dict[str, Traced] = {}
        for pattern in converter.target_patterns:
            name = target.name.replace(converter.target_patterns[0], pattern)
            wanted[pattern] = Traced(Source(name), parameters[name].shape, parameters[name].dtype)
        return source_shapes(converter, wanted, self.model)


def _sorted(names: Sequence[str]) -> tuple[str, ...]:
    """Return *names*, which are alike, in the order of their numbers.

    transformers sorts whole names: of names of which some lack the prefix of the rest
    (``layers.0…3``, ``model.layers.0…1``) it stacks expert 3 before 1.
    """
    return tuple(sorted(names, key=lambda name: [*map(int, _DIGITS.findall(name))]))


def _unlike(names: Sequence[str]) -> tuple[str, str] | None:
    """Return a name of *names* that differs from most in more than numbers, and one of these.

    ``e.x.w``, ``e.0.w``; ``e.f1.w``, ``e.e0.w``. None if all are alike, but for a prefix without
    numbers. Digits within words count as numbers: ``e.e10.w`` is like ``e.e9.w``.
    """
    words = [_DIGITS.sub("#", name) for name in names]
    counts = Counter(words)
    if _are_alike(counts):
        return _gap(names)
    (usual, _), *rest = counts.most_common()
    odd = rest[-1][0]
    return names[words.index(odd)], names[words.index(usual)]


def _lacking(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the names like *names* with the numbers that only *others* have."""
    template, known = template_of(names[0]), {*indices_of(names)}
    if {*map(template_of, names)} != {template} or len(_index(others[0])) != len(_index(names[0])):
        return []
    return [template.format(*index) for index in indices_of(others) if index not in known]


def _gap(names: Sequence[str]) -> tuple[str, str] | None:
    """Return two of *names* between which a number is missing or comes twice: ``e.e2``, ``e.e4``.

    Of names that differ in more than indices, which are the account's business: ``e.01`` is ``e.1``
    here, and no index.
    """
    if _are_alike({*raw_templates(names)}):
        return None
    ordered = _sorted(names)
    columns = zip(*([*map(int, _DIGITS.findall(name))] for name in ordered), strict=False)
    varying = [column for column in columns if len({*column}) > 1]
    if varying == [(*range(len(names)),)]:
        return None
    numbers = varying[0] if varying else ()
    at = next((n for n, number in enumerate(numbers) if number != n), 1)
    return ordered[max(at - 1, 0)], ordered[max(at, 1)]


def _are_alike(texts: Collection[str]) -> bool:
    """Tell whether these are one and the same, but for a prefix without numbers."""
    shortest = min(texts, key=len)
    return all(
        text == shortest
        or (text.endswith(f".{shortest}") and {*"#{"}.isdisjoint(text[: -len(shortest)]))
        for text in texts
    )


def _index(name: str) -> Index:
    return next(indices_of([name]))


def _bound(members: Sequence[_Target]) -> dict[str, str] | None:
    """Return the sources of the first of *members* as patterns over the slots of its name.

    None if the indices of the others do not fit the same patterns.
    """
    targets = [_index(target.name) for target in members]
    columns = zip(
        *([n for names in t.sources.values() for n in names] for t in members), strict=True
    )
    bound: dict[str, str] = {}
    for names in columns:
        first = names[0]
        found_in = [_index(name) for name in names]
        if len({template_of(name) for name in names}) > 1:
            return None
        texts: list[str] = []
        used: set[int | None] = set()
        for position, value in enumerate(found_in[0]):
            column = [indices[position] for indices in found_in]
            slot = _slot_of(column, targets, used)
            used.add(slot)
            if slot is None and len(set(column)) > 1:
                return None
            texts.append(str(value) if slot is None else f"{{i{slot}}}")
        bound[first] = template_of(first).format(*texts)
    return bound


def _slot_of(
    column: Sequence[int], targets: Sequence[Index], used: Collection[int | None]
) -> int | None:
    """Return the slot of the targets that has these values, of those not *used* in the name."""
    for slot in range(len(targets[0])):
        if slot not in used and [target[slot] for target in targets] == list(column):
            return slot
    return None


def _slotted(name: str) -> str:
    """Return the name of a target as a pattern over its slots."""
    return template_of(name).format(*(f"{{i{slot}}}" for slot in range(len(_index(name)))))
