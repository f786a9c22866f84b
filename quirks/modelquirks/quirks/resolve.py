"""Which records apply to a checkpoint, and what its tensors are called after their aliases.

Roles compose in a fixed order, wrapper → architecture → quantization, each seeing the names that
the previous one produced:

* aliases of the user come first: for each name the first one that matches, once;
* wrappers: any number, repeated until none matches; a name that no alias of the user matched as it
  is stored is then tried again as it is without wrappers;
* architecture: one, the most specific match; two that match equally well are a conflict;
* quantization: any number, as long as no two rename the same names differently.

A record in conflict is not applied; the conflict names both records and their distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from modelquirks.quirks.family import Family, show
from modelquirks.quirks.matching import why
from modelquirks.quirks.pattern import Pattern, rename
from modelquirks.quirks.recipe import sources
from modelquirks.quirks.record import ROLES, Alias, ModelQuirks, Pack

if TYPE_CHECKING:
    from modelquirks.quirks.library import LibraryRules
    from modelquirks.quirks.registry import Registered

__all__ = ["Applied", "Facts", "Renamed", "Resolution", "Step", "first_name", "resolve"]

_MAX_WRAPPERS = 16
"""How often wrapper aliases are repeated on one name: more nesting than that is a loop."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a match may look at."""

    config: Mapping[str, Any]
    families: Sequence[Family]
    container: str = ""


class Applied(NamedTuple):
    """A record that applies, and why."""

    registered: Registered
    why: str

    @property
    def record(self) -> ModelQuirks:
        """The record itself."""
        return self.registered.record


class Step(NamedTuple):
    """One alias on the way from the stored to the logical name."""

    quirk: str
    """Name of the record; ``user`` for an alias of the user."""
    rule: str
    """``stored → model`` as written in the rule."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A family of stored names, or some members of one, under the name that the aliases give."""

    family: Family
    name: str
    """Template over the slots of ``family.template``."""
    members: tuple[tuple[int, ...], ...] | None = None
    """The members this is about; None: all of the family."""
    steps: tuple[Step, ...] = ()

    def indices(self) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the members this is about."""
        return self.family.members if self.members is None else self.members

    def items(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each logical name with its indices."""
        if self.members is None and self.name == self.family.template:
            yield from zip(self.family.names, self.family.members, strict=True)
            return
        for member in self.indices():
            yield self.name.format(*member), member


@dataclass(frozen=True, slots=True)
class Resolution:
    """The records that apply and the logical names of all stored families."""

    applied: tuple[Applied, ...]
    renamed: tuple[Renamed, ...]
    conflicts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Requests that could not be met: a record asked for that does not exist."""
    library: LibraryRules | None = None
    """What the library that the model comes from knows, if it is in use."""
    unwrapped: tuple[Renamed, ...] = ()
    """The names without wrappers: what the matches of architectures look at."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Records that match and are not applied all the same: why, as a phrase."""

    def records(self) -> Iterator[ModelQuirks]:
        """Yield the records in the order of their roles."""
        for applied in self.applied:
            yield applied.record


@dataclass(frozen=True, slots=True)
class _Request:
    force: frozenset[str]
    exclude: frozenset[str]
    known: Collection[str]
    conflicts: list[str] = field(default_factory=list)
    passed_over: dict[str, str] = field(default_factory=dict)


def resolve(
    registered: Sequence[Registered],
    facts: Facts,
    *,
    known: Collection[str] = (),
    aliases: Sequence[Alias] = (),
    force: Iterable[str] = (),
    exclude: Iterable[str] = (),
    library: LibraryRules | None = None,
) -> Resolution:
    """Return the records that apply to *facts* and what they call each stored family.

    *known* holds the names of the model, if there is one: no alias of a record takes a name away
    that the model has. *aliases* are the user's own. Records named in *force* apply even if they
    do not match, those in *exclude* never. *library* holds the rules of the library that the model
    comes from: what it knows to use is not renamed by records of architectures.
    """
    request = _Request(frozenset(force), frozenset(exclude), known)
    existing = {r.record.name for r in registered}
    if library is not None:
        existing.add(library.record.name)
        library = None if library.record.name in request.exclude else library
    names = [Renamed(family, family.template) for family in facts.families]
    by_user = [("user", alias) for alias in aliases]
    names = _pass(names, by_user)
    wrappers, names = _unwrapped(
        [r for r in registered if r.record.role == "wrapper"], facts, names, request
    )
    names = unwrapped = _pass_once(names, by_user)
    applied = list(wrappers)
    by_role = {role: [r for r in registered if r.record.role == role] for role in ROLES[1:]}
    packed = _choose(by_role["quantization"], facts, names, request)
    packs = [pack for a in packed for pack in a.record.packs]
    chosen = _choose(by_role["architecture"], facts, names, request)
    if library is not None and not _goes_before(library, chosen):
        weights = _weights(names, packs)
        taken, left = library.named(names, weights)
        matched = chosen
        chosen = [a for a in chosen if _has_work(a.record, left, weights, request)]
        _pass_over(request, matched, chosen, f"{library.record.name!r} knows these names better")
    else:
        taken, left = (), tuple(names)
    chosen = _most_specific(chosen, request)
    names = _in_order(names, [*taken, *_by_rules(_rules(chosen), left, library, packs, known)])
    applied += chosen
    chosen = _choose(by_role["quantization"], facts, names, request)
    chosen, names = _quantized(chosen, names, request)
    applied += chosen
    problems = [
        f"quirk {name!r} does not exist; `modelquirks plugins list` shows those that do"
        for name in sorted((request.force | request.exclude) - existing)
    ]
    return Resolution(
        tuple(applied),
        tuple(names),
        tuple(request.conflicts),
        tuple(problems),
        library,
        tuple(unwrapped),
        request.passed_over,
    )


def _pass_over(
    request: _Request, before: Iterable[Applied], kept: Collection[Applied], why: str
) -> None:
    """Note *why* those of *before* that are not *kept* do not apply."""
    names = {a.record.name for a in kept}
    left = (a.record.name for a in before if a.record.name not in names)
    request.passed_over.update(dict.fromkeys(left, why))


def _goes_before(library: LibraryRules, chosen: Sequence[Applied]) -> bool:
    """Tell whether a record is to rename before *library* does."""
    return any(library.record.name in applied.record.overrides for applied in chosen)


def _has_work(
    record: ModelQuirks,
    left: Sequence[Renamed],
    weights: Mapping[str, str],
    request: _Request,
) -> bool:
    """Tell whether *record* is more than a guess by names which the library knows better.

    *left* is what the library does not know, *weights* says what companions belong to.
    """
    if record.match.specificity > 1 or record.name in request.force:
        return True
    texts = [alias.stored for alias in record.aliases]
    texts += [leaf.name for convert in record.conversions for leaf in sources(convert.recipe)]
    packed = [replace(p, name=weights[p.name]) for p in left if p.name in weights]
    return any(first_name(Pattern(text), [*left, *packed]) is not None for text in texts)


def _by_rules(
    rules: Sequence[tuple[str, Alias]],
    pieces: Sequence[Renamed],
    library: LibraryRules | None,
    packs: Sequence[Pack],
    known: Collection[str],
) -> list[Renamed]:
    """Rename by *rules*, and what they rename by the library again."""
    renamed = _pass(pieces, rules, _leads_away(known))
    if library is None:
        return renamed
    before = {piece.name for piece in pieces}
    new = [piece for piece in renamed if piece.name not in before]
    taken, left = library.named(new, _weights(new, packs)) if new else ((), ())
    return [*(piece for piece in renamed if piece.name in before), *taken, *left]


def _in_order(before: Sequence[Renamed], after: Iterable[Renamed]) -> list[Renamed]:
    """Return *after* in the order of the families of *before*."""
    order = {piece.family.template: number for number, piece in enumerate(before)}
    return sorted(after, key=lambda piece: order[piece.family.template])


def _weights(pieces: Iterable[Renamed], packs: Iterable[Pack]) -> dict[str, str]:
    """Return which packed weight each companion belongs to, by templates.

    Only for the names that have no other reading: ``weight`` is that of a plain weight too.
    """
    parts = [
        (Pattern(text), Pattern(pack.weight))
        for pack in packs
        for _, text in (*pack.parts, *pack.optional)
        if text != pack.weight
    ]
    found: dict[str, str] = {}
    for piece in pieces:
        for part, weight in parts:
            if (binding := part.match(piece.name)) is not None:
                found.setdefault(piece.name, weight.fill(binding))
                break
    return found


def first_name(pattern: Pattern, pieces: Iterable[Renamed]) -> str | None:
    """Return the name of the first piece that has a member which fits *pattern*."""
    for piece in pieces:
        binding = pattern.match(piece.name)
        if binding is not None and (not binding.fixed or _hits(piece.indices(), binding.fixed)):
            return piece.name
    return None


def _choose(
    candidates: Sequence[Registered], facts: Facts, names: Sequence[Renamed], request: _Request
) -> list[Applied]:
    """Return the candidates that match or are forced, without those that others override."""
    chosen: list[Applied] = []
    for registered in candidates:
        record = registered.record
        if record.name in request.exclude:
            request.passed_over[record.name] = "it is left out by name"
            continue
        reason = why(record.match, facts.config, lambda p: first_name(p, names), facts.container)
        if reason is None and record.name in request.force:
            reason = "asked for by name"
        if reason is not None:
            chosen.append(Applied(registered, reason))
    overriding = {name: a.record.name for a in chosen for name in sorted(a.record.overrides)}
    kept = [applied for applied in chosen if applied.record.name not in overriding]
    for name in (a.record.name for a in chosen if a not in kept):
        request.passed_over[name] = f"{overriding[name]!r} overrides it"
    return kept


def _most_specific(chosen: Sequence[Applied], request: _Request) -> list[Applied]:
    forced = [a for a in chosen if a.record.name in request.force]
    pool = forced or list(chosen)
    if forced:
        _pass_over(request, chosen, forced, "another one is asked for by name")
    if not pool:
        return []
    top = max(a.record.match.specificity for a in pool)
    best = [a for a in pool if a.record.match.specificity == top]
    _pass_over(request, pool, best, f"{best[0].record.name!r} matches by more")
    if len(best) == 1:
        return best
    _pass_over(request, best, (), "it is in conflict with another record")
    request.conflicts.append(
        f"{len(best)} architecture quirks match equally well: {_named(best)}. "
        f"Choose with --quirk {best[0].record.name} or --no-quirk {best[1].record.name}; "
        "their authors can settle it with overrides={…}"
    )
    return []


def _named(applied: Iterable[Applied]) -> str:
    return ", ".join(f"{a.record.name!r} from {a.registered.origin} ({a.why})" for a in applied)


def _rules(chosen: Iterable[Applied]) -> list[tuple[str, Alias]]:
    return [(a.record.name, alias) for a in chosen for alias in a.record.aliases]


def _has(known: Collection[str], piece: Renamed) -> bool:
    """Tell whether the model has a tensor by one of the names of *piece*."""
    return bool(known) and any(name in known for name, _ in piece.items())


def _apply(piece: Renamed, quirk: str, alias: Alias) -> tuple[Renamed, Renamed | None] | None:
    """Return *piece* renamed and the rest that the rule does not touch; None if no match."""
    found = rename(Pattern(alias.stored), Pattern(alias.model), piece.name)
    if found is None:
        return None
    name, fixed = found
    step = Step(quirk, f"{alias.stored} → {alias.model}")
    if not fixed:
        return replace(piece, name=name, steps=(*piece.steps, step)), None
    hits, rest = _partition(piece.indices(), fixed)
    if not hits:
        return None
    renamed = replace(piece, name=name, members=hits, steps=(*piece.steps, step))
    return renamed, replace(piece, members=rest) if rest else None


_Members = tuple[tuple[int, ...], ...]


def _hits(members: _Members, fixed: Mapping[int, int]) -> _Members:
    """Return the *members* with the *fixed* indices."""
    if not fixed:
        return members
    return tuple(m for m in members if all(m[slot] == value for slot, value in fixed.items()))


def _partition(members: _Members, fixed: Mapping[int, int]) -> tuple[_Members, _Members]:
    """Split *members* into those with the *fixed* indices and the others."""
    hits = _hits(members, fixed)
    chosen = set(hits)
    return hits, tuple(m for m in members if m not in chosen)


def _pass(
    pieces: Sequence[Renamed],
    rules: Sequence[tuple[str, Alias]],
    protected: Callable[[Renamed, Renamed], bool] = lambda before, after: False,
) -> list[Renamed]:
    """Apply the first alias that matches to each piece, once, unless it is *protected* from it."""
    done: list[Renamed] = []
    todo = list(reversed(pieces))
    while todo:
        piece = todo.pop()
        for quirk, alias in rules:
            outcome = _apply(piece, quirk, alias)
            if outcome is None:
                continue
            renamed, rest = outcome
            if protected(replace(renamed, name=piece.name), renamed):
                continue
            done.append(renamed)
            if rest is not None:
                todo.append(rest)
            break
        else:
            done.append(piece)
    return done


def _leads_away(known: Collection[str]) -> Callable[[Renamed, Renamed], bool]:
    """Return the test for an alias that would take a name away that the model has."""
    return lambda before, after: _has(known, before) and not _has(known, after)


def _pass_once(pieces: Sequence[Renamed], rules: Sequence[tuple[str, Alias]]) -> list[Renamed]:
    """Apply *rules* to the pieces that none of their records has renamed yet."""
    records = {quirk for quirk, _ in rules}
    return [
        new
        for piece in pieces
        for new in (
            [piece] if any(step.quirk in records for step in piece.steps) else _pass([piece], rules)
        )
    ]


def _unwrapped(
    candidates: Sequence[Registered],
    facts: Facts,
    pieces: Sequence[Renamed],
    request: _Request,
) -> tuple[list[Applied], list[Renamed]]:
    """Remove wrappers until none matches: what one hid, the next round sees."""
    chosen: dict[str, Applied] = {}
    done = list(pieces)
    for _ in range(_MAX_WRAPPERS):
        for applied in _choose(candidates, facts, done, request):
            chosen.setdefault(applied.record.name, applied)
        before = [piece.name for piece in done]
        done = _unwrap(done, list(chosen.values()), request.known)
        if [piece.name for piece in done] == before:
            break
    else:
        request.conflicts.append(
            f"the aliases of {_named(chosen.values())} still find something to rename after "
            f"{_MAX_WRAPPERS} rounds: they undo each other. Switch one off with --no-quirk"
        )
    return list(chosen.values()), done


def _unwrap(
    pieces: Sequence[Renamed], chosen: Sequence[Applied], known: Collection[str]
) -> list[Renamed]:
    """Apply each wrapper's aliases once to the names that the model does not have."""
    # The longest prefix first: `_fsdp_wrapped_module.` must not be half eaten by `module.`.
    flat = sorted(_rules(chosen), key=lambda rule: -len(rule[1].stored))
    return _pass(pieces, flat, lambda before, after: _has(known, before))


def _quantized(
    chosen: Sequence[Applied], pieces: Sequence[Renamed], request: _Request
) -> tuple[list[Applied], list[Renamed]]:
    """Apply the aliases of all quantisation records; drop records that contradict each other."""
    bad: dict[str, None] = {}
    for piece in pieces:
        if clashing := _clashing(piece, chosen):
            both = [applied for applied, _ in clashing]
            names = " and ".join(repr(show(t)) for t in dict.fromkeys(r.name for _, r in clashing))
            message = f"{_named(both)} rename {show(piece.name)!r} differently: to {names}"
            if message not in request.conflicts:
                request.conflicts.append(message)
            bad.update(dict.fromkeys(a.record.name for a in both))
    kept = [a for a in chosen if a.record.name not in bad]
    _pass_over(request, chosen, kept, "it is in conflict with another record")
    return kept, _pass(pieces, _rules(kept), _leads_away(request.known))


def _clashing(piece: Renamed, chosen: Sequence[Applied]) -> list[tuple[Applied, Renamed]]:
    """Return the records that rename a member of *piece* in different ways, and to what."""
    found: list[tuple[Applied, Renamed]] = []
    for applied in chosen:
        name = applied.record.name
        outcomes = (_apply(piece, name, alias) for alias in applied.record.aliases)
        if (outcome := next((o for o in outcomes if o is not None), None)) is not None:
            found.append((applied, outcome[0]))
    return [
        (applied, renamed)
        for applied, renamed in found
        if any(
            renamed.name != other.name and set(renamed.indices()) & set(other.indices())
            for _, other in found
        )
    ]
