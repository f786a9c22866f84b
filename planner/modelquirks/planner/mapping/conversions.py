"""Conversions: the targets of ``Convert`` rules, made from what the checkpoint offers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, islice, product, repeat
from typing import Any, NamedTuple

from modelquirks.planner.finding import shown
from modelquirks.planner.mapping.logical import Logical, Members, matching, renumbered, with_slots
from modelquirks.planner.mapping.packs import Broken
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import (
    Chunk,
    Concat,
    Dequantize,
    Interleave,
    Join,
    Merge,
    Node,
    Opaque,
    Part,
    RecipeError,
    Reshape,
    Select,
    Slice,
    Source,
    Split,
    Stack,
    View,
    children,
    mapped,
    sources,
)
from modelquirks.quirks.record import Convert, ModelQuirks

__all__ = ["bound", "find_conversions", "rule_text", "selects", "size_of"]

Index = tuple[int, ...]

_TEXT_PARTS = ("text_config", "llm_config")
"""Where config.json of a model of several parts has the sizes of the language model."""


def find_conversions(
    pieces: Sequence[Logical],
    rules: Iterable[tuple[ModelQuirks, Sequence[Convert]]],
    config: Mapping[str, Any],
) -> tuple[list[Logical], list[Broken]]:
    """Return what the conversions of each record can make, and what lacks a source."""
    made: list[Logical] = []
    broken: list[Broken] = []
    for record, conversions in rules:
        for convert in conversions:
            if selects(convert.recipe):
                continue
            for target in _targets(pieces, convert.target, convert.recipe).values():
                complete, lacking = target.gathered(pieces).build(convert, record, config)
                made += complete
                broken += lacking
    return made, broken


@dataclass
class _Leaf:
    """One source pattern of the recipe, and what was found for it."""

    pattern: Pattern
    over: tuple[str, ...]
    """Variables of the stacks around it, outermost first."""
    found: dict[Index, dict[Index, tuple[Logical, Node]]] = field(default_factory=dict)
    """Indices of the target → indices of the stacks → piece, and its node over both."""
    sizes: dict[str, int] = field(default_factory=dict)
    """How many values each stack variable has here: one more than the largest seen."""
    pieces: int = 0
    """From how many pieces."""

    def collect(self, piece: Logical, outer_slots: Sequence[int], index: Mapping[str, str]) -> None:
        """Enter the members of *piece*, by the target's and the stacks' indices.

        *index* says what the placeholders of the pattern stand for in the name of the piece.
        """
        texts = {slot: f"{{{position}}}" for position, slot in enumerate(outer_slots)}
        inner_slots: list[int | str] = []
        for name in self.over:
            slot = _slot(index[name])
            inner_slots.append(slot)
            if isinstance(slot, int):
                texts[slot] = f"{{{name}}}"
        found = (piece, with_slots(piece.node, texts))
        self.pieces += 1
        rows = _rows(piece.members, tuple(outer_slots), tuple(inner_slots))
        for outer, inners in rows.runs:
            there = self.found.setdefault(outer, {})
            # Stored twice: the first one counts, as everywhere; the account tells of the other.
            there |= {**dict.fromkeys(inners, found), **there}
        for name, size in zip(self.over, rows.sizes, strict=True):
            self.sizes[name] = max(self.sizes.get(name, 0), size)

    def pieces_of(self, outer: Index) -> Iterable[Logical]:
        """Return the pieces that are found for *outer*; some may be named more than once."""
        found = self.found[outer].values()
        return (piece for piece, _ in (islice(found, 1) if self.pieces == 1 else found))

    def lacking(self, outer: Index, counts: Mapping[str, int]) -> list[Index] | None:
        """Return the stacks' indices that *outer* lacks; None: nobody knows how many."""
        found = self.found.get(outer, {})
        sizes = [counts.get(name, 0) for name in self.over]
        if not all(sizes):
            return None
        if len(found) == math.prod(sizes):
            return []
        return [inner for inner in product(*map(range, sizes)) if inner not in found]

    def is_scattered(self) -> bool:
        """Tell whether some stack has its elements under several namings."""
        for found in self.found.values() if self.over and self.pieces > 1 else ():
            nodes = {id(node): node for _, node in found.values()}  # mostly one: hash few of them
            if len(set(nodes.values())) > 1:
                return True
        return False


@dataclass
class _Target:
    """One family of targets while its sources are being collected."""

    name: str
    pattern: Pattern
    recipe: Node
    leaves: list[_Leaf]

    @property
    def counts(self) -> dict[str, int]:
        """How many values each stack variable has."""
        counts: dict[str, int] = {}
        for leaf in self.leaves:
            for name, size in leaf.sizes.items():
                counts[name] = max(counts.get(name, 0), size)
        return counts

    def gathered(self, pieces: Sequence[Logical]) -> _Target:
        """Return the target with each element of its stacks on its own, if they are scattered.

        A stack's elements are members of one family as a rule. Where they are not (their index is
        part of a word, ``expert_3``; some are packed and some plain), the recipe names them all.
        """
        if not any(leaf.is_scattered() for leaf in self.leaves):
            return self
        spread = _spread(self.recipe, self.counts)
        return _targets(pieces, self.pattern.text, spread)[self.name]

    def build(
        self, convert: Convert, record: ModelQuirks, config: Mapping[str, Any]
    ) -> tuple[list[Logical], list[Broken]]:
        """Return the families that can be made, and the members that cannot."""
        counts, rule = self.counts, rule_text(convert)
        reforms = any(leaf.pattern.text == convert.target for leaf in self.leaves)
        alike: dict[tuple[Node, tuple[str, ...]], list[Index]] = {}
        broken: list[Broken] = []
        for outer in dict.fromkeys(o for leaf in self.leaves for o in leaf.found):
            try:
                node = self._made(outer, counts, config)
            except RecipeError as error:
                name, parts = self.name.format(*outer), tuple(self._parts(outer))
                whole = all(leaf.lacking(outer, counts) == [] for leaf in self.leaves)
                broken.append(Broken(name, str(error), record.name, reforms, parts, whole))
                continue
            found = (piece for leaf in self.leaves for piece in leaf.pieces_of(outer))
            used = [q for piece in dict.fromkeys(found) for q in piece.quirks]
            quirks = tuple(dict.fromkeys([*used, record.name]))
            alike.setdefault((node, quirks), []).append(outer)
        made = [
            Logical(self.name, node, tuple(members), rule, quirks, reforms, convert.either)
            for (node, quirks), members in alike.items()
        ]
        return made, broken

    def _made(self, outer: Index, counts: Mapping[str, int], config: Mapping[str, Any]) -> Node:
        """Return the recipe of one member; RecipeError if a source is not stored."""
        lacking = [name for leaf in self.leaves for name in self._lacking(leaf, outer, counts)]
        if lacking:
            raise RecipeError(f"{len(lacking)} of its sources not stored: {shown(lacking)}")
        nodes = (next(iter(leaf.found[outer].values()))[1] for leaf in self.leaves)
        return bound(self.recipe, nodes, counts=counts, index={}, config=config)

    def _parts(self, outer: Index) -> Iterator[str]:
        """Yield the stored names of the sources that *outer* has."""
        for leaf in self.leaves:
            for inner, (_, node) in leaf.found.get(outer, {}).items():
                env = dict(zip(leaf.over, inner, strict=True))
                yield from (source.name.format(*outer, **env) for source in sources(node))

    def _lacking(self, leaf: _Leaf, outer: Index, counts: Mapping[str, int]) -> Iterator[str]:
        """Yield the names of the sources that *outer* lacks: as stored, where an example tells."""
        lacking = leaf.lacking(outer, counts)
        if lacking == []:
            return
        example = next((node for f in leaf.found.values() for _, node in f.values()), None)
        holes = [f"{{{name}}}" for name in leaf.over]
        found = self.pattern.match(self.name.format(*outer))
        for inner in lacking if lacking is not None else [("*",) * len(leaf.over)]:
            env = {name: str(value) for name, value in zip(leaf.over, inner, strict=True)}
            if isinstance(example, Source) and all(hole in example.name for hole in holes):
                yield example.name.format(*outer, **env)
            elif found is not None:
                yield leaf.pattern.fill(replace(found, index={**found.index, **env}))


class _Rows(NamedTuple):
    """The members of a piece, by the target that they are for."""

    runs: Sequence[tuple[Index, Sequence[Index]]]
    """Indices of a target, and those of the stacks; a target may come more than once."""
    sizes: Sequence[int]
    """One more than the largest index of each stack."""


@lru_cache(maxsize=4)  # companions have the very same members
def _rows(members: Members, outer: tuple[int, ...], inner: tuple[int | str, ...]) -> _Rows:
    """Return *members* by their slots *outer*, with those that are *inner*.

    A text among these is an index that all have.
    """
    columns = [*zip(*members, strict=True)]
    stacks = [columns[s] if isinstance(s, int) else (int(s),) * len(members) for s in inner]
    inners = [*zip(*stacks, strict=True)] if inner else [()] * len(members)
    outers = zip(*(columns[s] for s in outer), strict=True) if outer else repeat((), len(members))
    runs: list[tuple[Index, Sequence[Index]]] = []
    end = 0
    for index, run in groupby(outers):
        begin, end = end, end + len([*run])
        runs.append((index, inners[begin:end]))
    return _Rows(runs, [1 + max(column) for column in stacks])


def _slot(text: str) -> int | str:
    """Return what a placeholder stands for: a slot (``{0}``) as its number, an index as it is."""
    return int(text[1:-1]) if text[0] == "{" else text


def _spread(recipe: Node, counts: Mapping[str, int]) -> Node:
    """Return *recipe* with each stack as its elements, one after another."""

    def change(node: Node) -> Node:
        if not isinstance(node, Stack | Join) or node.count is not None:
            return node
        elements = (_at(node.of, node.over, value) for value in range(counts[node.over]))
        if isinstance(node, Join):
            return Concat(tuple(elements), node.dim)
        return Concat(tuple(Stack(element, node.over, 1) for element in elements), 0)

    return mapped(recipe, change)


def _at(node: Node, variable: str, value: int) -> Node:
    """Return *node* with one value for *variable* in the patterns of its sources."""
    hole = f"{{{variable}}}"
    return mapped(
        node, lambda n: Source(n.name.replace(hole, str(value))) if isinstance(n, Source) else n
    )


def bound(
    recipe: Node,
    leaves: Iterator[Node],
    *,
    counts: Mapping[str, int],
    index: Mapping[str, str],
    config: Mapping[str, Any],
) -> Node:
    """Return *recipe* with its sources replaced by *leaves*, left to right, and all sizes known.

    *counts* gives the size of each stack, *index* what the placeholders of the target stand for.
    """

    def bind(node: Node) -> Node:
        match node:
            case Source():
                return next(leaves)
            case Stack(of, over, count) | Join(of, over, _, count):
                known = counts[over] if count is None else count
                return replace(node, of=bind(of), count=known)
            case Select(of, text, dim):
                return Select(bind(of), index[text[1:-1]], dim)
            case Split(of, dim, sizes, part):
                bounds = [size_of(size, config) for size in sizes]
                start = sum(bounds[:part])
                return Slice(bind(of), dim, start, start + bounds[part])
            case View(of, sizes):
                return Reshape(bind(of), tuple(size_of(size, config) for size in sizes))
            case Concat(of) | Interleave(of) | Opaque(_, of):
                return replace(node, of=tuple(map(bind, of)))
            case Dequantize(_, parts) | Merge(_, parts):
                return replace(node, parts=tuple(Part(r, bind(n)) for r, n in parts))
            case _:
                return replace(node, of=bind(node.of))

    return bind(recipe)


def selects(recipe: Node) -> bool:
    """Tell whether *recipe* takes single elements out of stacks: then the model says which."""
    return isinstance(recipe, Select) or any(map(selects, children(recipe)))


def _targets(pieces: Sequence[Logical], target: str, recipe: Node) -> dict[str, _Target]:
    """Return, by canonical template, each target family with the sources that were found."""
    pattern = Pattern(target)
    targets: dict[str, _Target] = {}
    scopes = list(_scopes(recipe, ()))
    for number, (_, text) in enumerate(scopes):
        for piece, binding in matching(pieces, Pattern(text)):
            name, outer_slots = renumbered(pattern.fill(binding))
            if name not in targets:
                leaves = [_Leaf(Pattern(t), o) for o, t in scopes]
                targets[name] = _Target(name, pattern, recipe, leaves)
            targets[name].leaves[number].collect(piece, outer_slots, binding.index)
    return targets


def _scopes(node: Node, over: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each leaf's stacks and pattern, left to right."""
    if isinstance(node, Source):
        yield over, node.name
        return
    if isinstance(node, Stack | Join) and node.count is None:
        over = (*over, node.over)
    for child in children(node):
        yield from _scopes(child, over)


def size_of(size: int | str, config: Mapping[str, Any]) -> int:
    """Return a size in a rule: a number, or an expression in integer fields of config.json.

    A field that the whole does not have is looked for in its text part.

    >>> size_of("num_attention_heads*head_dim", {"num_attention_heads": 64, "head_dim": 64})
    4096
    >>> size_of("hidden_size/2", {"vocab_size": 99, "text_config": {"hidden_size": 64}})
    32
    """
    if isinstance(size, int):
        return size
    value = 1
    for sign, text in re.findall(r"([*/]?)([^*/]+)", size):
        factor = _factor(text, size, config)
        if sign == "/" and (factor == 0 or value % factor):
            raise RecipeError(f"config.json: {value} is no multiple of {text!r}, as {size!r} needs")
        value = value // factor if sign == "/" else value * factor
    return value


def _factor(text: str, size: str, config: Mapping[str, Any]) -> int:
    if text.isdecimal():
        return int(text)
    for prefix in ("", *(f"{part}." for part in _TEXT_PARTS)):
        value: Any = config
        for name in f"{prefix}{text}".split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise RecipeError(f"config.json has no integer {text!r}, which the size {size!r} needs")


def rule_text(convert: Convert) -> str:
    """Return a conversion as people read it."""
    return f"{_told(convert.recipe)} → {convert.target}"


def _told(node: Node) -> str:
    match node:
        case Source(name):
            return name
        case Stack(of, over):
            return f"stack over {over} ({_told(of)})"
        case Join(of, over, dim):
            return f"join over {over} along {dim} ({_told(of)})"
        case Split(of, dim, _, part) | Chunk(of, dim, _, part):
            return f"part {part} along {dim} of ({_told(of)})"
        case Select(of, index, _):
            return f"number {index} of ({_told(of)})"
        case _:
            inner = ", ".join(_told(child) for child in children(node))
            return f"{type(node).__name__.lower()} ({inner})"
