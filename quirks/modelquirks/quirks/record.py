"""``ModelQuirks``: what is peculiar about one kind of checkpoint, as data.

A record says *when it applies* (:class:`Match`) and *what is so* (the rules). Records are frozen,
hold only strings, numbers and tuples, and are checked when made: all faults of a record come in
one :class:`RecordError`.

The names a rule speaks of depend on its stage. Stored names pass through the aliases of wrapper
records, then of architecture records, then of quantisation records; packs, conversions and ties
see the names that come out of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Literal, get_args

from modelquirks.quirks.pattern import Pattern, PatternError
from modelquirks.quirks.recipe import (
    Join,
    Node,
    Select,
    Source,
    Split,
    Stack,
    View,
    children,
    sources,
)

__all__ = [
    "LIBRARIES",
    "ROLES",
    "Alias",
    "Convert",
    "Expected",
    "Match",
    "ModelQuirks",
    "Pack",
    "Parallel",
    "RecordError",
    "Refusal",
    "Role",
    "Tie",
]

Role = Literal["wrapper", "architecture", "quantization"]
ROLES: tuple[Role, ...] = get_args(Role)
"""The roles in the order in which they compose."""

LIBRARIES = frozenset({"transformers"})
"""Names of records that a plugin makes for the model at hand, of the rules of its library."""

_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")
_FACTOR = r"(?:[1-9][0-9]{0,8}|[a-z_]\w*(?:\.[a-z_]\w*)*)"
_SIZE = re.compile(rf"{_FACTOR}(?:[*/]{_FACTOR})*")


class RecordError(ValueError):
    """A record that cannot be used; the message lists every fault found in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """When a record applies. Fields are ANDed, values inside a field ORed.

    Only config.json and the names in headers are looked at, never tensors. An empty match
    matches nothing.
    """

    architectures: tuple[str, ...] = ()
    """Class names, as in ``config["architectures"]``."""
    model_types: tuple[str, ...] = ()
    """``config["model_type"]``, also of sub-configs (``text_config``)."""
    quant_methods: tuple[str, ...] = ()
    """``config["quantization_config"]["quant_method"]``."""
    any_of: tuple[str, ...] = ()
    """Name patterns of which at least one must be in the manifest."""
    all_of: tuple[str, ...] = ()
    """Name patterns that must all be in the manifest."""
    none_of: tuple[str, ...] = ()
    """Name patterns of which none may be in the manifest."""
    containers: tuple[str, ...] = ()
    """What the weights were wrapped in, as the manifest says (``lightning``, ``deepspeed``…)."""

    @property
    def specificity(self) -> int:
        """Rank of the most telling field: architectures 4, model_types 3, quant_methods 2, 1."""
        ranked = (self.architectures, self.model_types, self.quant_methods)
        return next((4 - i for i, values in enumerate(ranked) if values), 1)

    @property
    def is_empty(self) -> bool:
        """Whether the match says nothing that could be true of a checkpoint."""
        asked = (f.name for f in fields(self) if f.name != "none_of")
        return not any(getattr(self, name) for name in asked)


@dataclass(frozen=True, slots=True)
class Alias:
    """Names that fit ``stored`` are called ``model`` in the model.

    Both have the same placeholders and wildcards. A wrapper alias is applied again until it no
    longer matches, and never to a name that the model already has.
    """

    stored: str
    model: str


@dataclass(frozen=True, slots=True)
class Tie:
    """Names that stand for one tensor: when one copy is stored it serves all.

    The first name is the preferred owner. ``when`` is a boolean field of config.json that must
    be true; with ``None`` the tie holds if only one copy is stored. When several copies are
    stored, nobody can tell from headers whether they are equal: they are compared on loading.
    """

    names: tuple[str, ...]
    when: str | None = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class Pack:
    """Companions that together are one logical weight. They never part and are never cast.

    ``parts`` are ``(role, pattern)`` pairs with the same holes as ``weight``. ``optional`` parts
    may be absent. ``transpose`` exchanges two dimensions of the plain weight that the scheme
    makes, for modules that hold it the other way round.
    """

    scheme: str
    weight: str
    parts: tuple[tuple[str, str], ...]
    optional: tuple[tuple[str, str], ...] = ()
    transpose: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Convert:
    """The model's ``target`` is made by ``recipe`` from the names its sources match.

    Placeholders of the target are the variables of the recipe; every other placeholder of a
    source must be the ``over`` of a :class:`~modelquirks.quirks.recipe.Stack`.
    """

    target: str
    recipe: Node
    either: bool = False
    """For a recipe that changes the form of its own target (transposes it, say) where some
    checkpoints already have the model's form, or to which another rule for the same target is the
    alternative. The shape decides; where both forms fit, the plan is refused."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Names whose absence (or presence) is as it should be, and why."""

    names: str
    why: str


@dataclass(frozen=True, slots=True)
class Parallel:
    """How modules are cut among the ranks of a job: ``colwise``, ``rowwise``…

    ``modules`` is a name pattern, ``style`` the word of the library that the model comes from.
    """

    modules: str
    style: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A device on which modules that keep these weights packed cannot be, and why."""

    device: str
    """``cpu`` or ``disk``."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuirks:
    """What is peculiar about a kind of checkpoint."""

    name: str
    """Unique in the process: lower case, dotted (``gpt_oss.mxfp4``)."""
    role: Role
    match: Match
    aliases: tuple[Alias, ...] = ()
    packs: tuple[Pack, ...] = ()
    conversions: tuple[Convert, ...] = ()
    ties: tuple[Tie, ...] = ()
    extra: tuple[Expected, ...] = ()
    """Stored, not wanted by the model: no fault."""
    absent: tuple[Expected, ...] = ()
    """Wanted by the model, may be missing: no fault."""
    no_split: tuple[str, ...] = ()
    """Classes of modules that must stay on one device."""
    keep_dtype: tuple[str, ...] = ()
    """Name patterns of model tensors that keep their dtype when another is asked for."""
    parallel: tuple[Parallel, ...] = ()
    """How the model is cut among ranks, where its library says so."""
    refuses: tuple[Refusal, ...] = ()
    """Where the packed weights must not be placed, if the model keeps them packed."""
    overrides: frozenset[str] = field(default_factory=frozenset)
    """Names of records that this one openly replaces. With that of a library (``transformers``) it
    renames before the library does, which may know the same names for something else."""
    why: str = ""
    """One sentence for people: what this is about."""
    url: str = ""
    """What proves it: a document, an issue, a file of the format."""

    def __post_init__(self) -> None:
        """Raise :class:`RecordError` with all faults of the record."""
        if faults := list(_type_faults(self)) or list(_faults(self)):
            raise RecordError(f"quirks {self.name!r}: " + "; ".join(faults))


_MEMBERS: dict[str, type] = {
    "aliases": Alias,
    "packs": Pack,
    "conversions": Convert,
    "ties": Tie,
    "extra": Expected,
    "absent": Expected,
    "parallel": Parallel,
    "refuses": Refusal,
}  # of every other tuple: str


def _type_faults(record: ModelQuirks) -> Iterator[str]:
    """Yield what is no tuple: ``(x)`` is ``x``, and a string would pass for a tuple of letters."""
    found: list[tuple[str, object, type]] = [
        (f.name, getattr(record, f.name), _MEMBERS.get(f.name, str))
        for f in fields(record)
        if f.default == ()
    ]
    found += [(f"match.{f.name}", getattr(record.match, f.name, None), str) for f in fields(Match)]
    found += [("tie.names", getattr(t, "names", ()), str) for t in _members(record.ties)]
    for name, value, kind in found:
        if not isinstance(value, tuple):
            yield f"{name} is {value!r}, expected a tuple: is a comma missing?"
        for item in _members(value):
            if not isinstance(item, kind):
                yield f"{name} has {item!r}, expected a {kind.__name__}"


def _members(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


def _faults(record: ModelQuirks) -> Iterator[str]:
    if not _NAME.fullmatch(record.name):
        yield "the name must be lower case words with dots between them"
    if record.role not in ROLES:
        yield f"role {record.role!r} is none of {', '.join(ROLES)}"
    if record.match.is_empty:
        yield "the match is empty, so it would never apply"
    if record.name in record.overrides:
        yield "it overrides itself"
    yield from _lone_patterns(record)
    for alias in record.aliases:
        yield from alias_faults(alias)
    for pack in record.packs:
        yield from _pack_faults(pack)
    for convert in record.conversions:
        yield from _convert_faults(convert)
    for tie in record.ties:
        if len(set(tie.names)) < 2:
            yield f"tie {tie.names} needs two different names"
        holes = {name: p.holes for name in tie.names if (p := _pattern(name))}
        if len(set(holes.values())) > 1:
            yield f"the names of tie {tie.names} have different holes"


def _lone_patterns(record: ModelQuirks) -> Iterator[str]:
    match = record.match
    texts = [*match.any_of, *match.all_of, *match.none_of, *record.keep_dtype]
    texts += [e.names for e in (*record.extra, *record.absent)]
    texts += [name for tie in record.ties for name in tie.names]
    for text in texts:
        yield from _pattern_faults(text)


def _pattern(text: str) -> Pattern | None:
    made = _tried(text)
    return made if isinstance(made, Pattern) else None


def _pattern_faults(text: str) -> Iterator[str]:
    made = _tried(text)
    if isinstance(made, str):
        yield made


@cache  # one pattern is in many rules
def _tried(text: str) -> Pattern | str:
    """Return the pattern, or what is wrong with it."""
    try:
        return Pattern(text)
    except PatternError as error:
        return str(error)


def alias_faults(alias: Alias) -> Iterator[str]:
    """Yield what is wrong with *alias*: no pattern, or two names that it would make one."""
    yield from _pattern_faults(alias.stored)
    yield from _pattern_faults(alias.model)
    stored, model = _pattern(alias.stored), _pattern(alias.model)
    if stored is None or model is None:
        return
    if unbound := set(model.placeholders) - set(stored.placeholders):
        yield f"alias {alias.stored!r}: {_braced(unbound)} of {alias.model!r} is not bound by it"
    if lost := set(stored.placeholders) - set(model.placeholders):
        yield f"alias {alias.stored!r}: {_braced(lost)} is lost in {alias.model!r}"
    if stored.wildcards != model.wildcards:
        yield f"alias {alias.stored!r} and {alias.model!r} have different wildcards"
    if alias.stored == alias.model:
        yield f"alias {alias.stored!r} changes nothing"


def _pack_faults(pack: Pack) -> Iterator[str]:
    yield from _pattern_faults(pack.weight)
    weight = _pattern(pack.weight)
    if not pack.parts:
        yield f"pack {pack.weight!r} has no parts"
    roles = [role for role, _ in (*pack.parts, *pack.optional)]
    for role in sorted({r for r in roles if roles.count(r) > 1}):
        yield f"pack {pack.weight!r} has two parts with the role {role!r}"
    for _, text in (*pack.parts, *pack.optional):
        yield from _pattern_faults(text)
        part = _pattern(text)
        if weight and part and _unordered_holes(part) != _unordered_holes(weight):
            yield f"part {text!r} of pack {pack.weight!r} has other holes than the weight"


def _unordered_holes(pattern: Pattern) -> tuple[set[str], tuple[str, ...]]:
    return set(pattern.placeholders), pattern.wildcards


def _convert_faults(convert: Convert) -> Iterator[str]:
    yield from _pattern_faults(convert.target)
    target = _pattern(convert.target)
    leaves = list(sources(convert.recipe))
    if not leaves:
        yield f"the recipe for {convert.target!r} reads nothing"
    for leaf in leaves:
        yield from _pattern_faults(leaf.name)
    if target is None:
        return
    for variables, leaf in _scopes(convert.recipe, frozenset(target.placeholders)):
        source = _pattern(leaf.name)
        if source is None:
            continue
        if source.wildcards != target.wildcards:
            yield f"source {leaf.name!r} has other wildcards than target {convert.target!r}"
        wanted = set(variables)
        if unbound := set(source.placeholders) - wanted:
            yield (
                f"source {leaf.name!r}: {_braced(unbound)} is neither in target "
                f"{convert.target!r} nor stacked over, or it is selected"
            )
        if lost := wanted - set(source.placeholders):
            yield f"source {leaf.name!r} does not have {_braced(lost)}"
    for node in _nodes(convert.recipe):
        if isinstance(node, Split | View):
            yield from _size_faults(node, convert.target)
        if isinstance(node, Select):
            yield from _select_faults(node, target)
        if isinstance(node, Stack | Join) and node.over in target.placeholders:
            yield f"target {convert.target!r} has {{{node.over}}}, so nothing is stacked over it"


def _select_faults(node: Select, target: Pattern) -> Iterator[str]:
    if node.index not in {f"{{{name}}}" for name in target.placeholders}:
        yield f"index {node.index!r} of a selection is no placeholder of target {target.text!r}"


def _size_faults(node: Split | View, target: str) -> Iterator[str]:
    if isinstance(node, Split) and not 0 <= node.part < len(node.sizes):
        yield f"split for {target!r} has no part {node.part}"
    for size in node.sizes:
        if isinstance(size, str) and not _SIZE.fullmatch(size):
            yield f"size {size!r} for {target!r} is no product or quotient of config fields"


def _scopes(node: Node, variables: frozenset[str]) -> Iterator[tuple[frozenset[str], Source]]:
    """Yield each leaf with the variables it must have: more below a stack, fewer below a select."""
    if isinstance(node, Source):
        yield variables, node
        return
    if isinstance(node, Stack | Join):
        variables |= {node.over}
    if isinstance(node, Select):
        variables -= {node.index[1:-1]}
    for child in children(node):
        yield from _scopes(child, variables)


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from _nodes(child)


def _braced(names: set[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names))
