"""Rules: the fewest aliases and conversions of records that say what claims say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from modelquirks.planner.infer.claim import STACKED, Claim, Tier, least, pattern_of
from modelquirks.quirks.pattern import Pattern, rename
from modelquirks.quirks.recipe import Join, Node, Select, Source, Stack, mapped
from modelquirks.quirks.record import Alias, Convert, alias_faults

__all__ = ["Rule", "rules_of"]


@dataclass(frozen=True)
class Rule:
    """A rule of a record, how sure it is, and what it explains."""

    rule: Alias | Convert
    tier: Tier
    """That of its least sure claim."""
    claims: tuple[Claim, ...]

    @property
    def n_tensors(self) -> int:
        """How many tensors of the model it serves."""
        return sum(len(c.model) * max(1, c.model.count) for c in self.claims)

    @property
    def why(self) -> str:
        """The evidence, for people."""
        return "; ".join(dict.fromkeys(claim.why for claim in self.claims))


def rules_of(claims: Iterable[Claim], stored: Iterable[str] = ()) -> tuple[Rule, ...]:
    """Return the rules for *claims*: aliases, then conversions of the names that these give.

    *stored* are patterns of other stored names, which no alias may touch. Each alias is right for
    every name that it fits, so their order does not matter.
    """
    claims = [*claims]
    plain = {
        c.recipe.name: c for c in claims if isinstance(c.recipe, Source) and c.model.over is None
    }
    renamed = {name: c for name, c in plain.items() if name != c.target}
    fixed = {name for name, c in plain.items() if name == c.target} | {*stored} - {*plain}
    aliases = _cover({name: c.target for name, c in renamed.items()}, fixed)
    rules = [
        Rule(_named_alias(alias), _least(renamed[n] for n in names),
             tuple(renamed[n] for n in names))
        for alias, names in aliases
    ]  # fmt: skip
    made = [c for c in claims if not isinstance(c.recipe, Source) or c.model.over is not None]
    chosen = [alias for alias, _ in aliases]
    rules += [Rule(_convert(c, chosen), c.tier, (c,)) for c in made]
    return tuple(rules)


def _least(claims: Iterable[Claim]) -> Tier:
    tiers: list[Tier] = [claim.tier for claim in claims]
    return least(*tiers)


def _cover(renamed: Mapping[str, str], fixed: Iterable[str]) -> list[tuple[Alias, tuple[str, ...]]]:
    """Return aliases that rename all as they should be, and what each is the first to rename."""
    fixed = [*fixed]
    candidates: dict[Alias, set[str]] = {}
    for name, target in renamed.items():
        for alias in _aliases(name, target):
            if alias not in candidates:
                hits = _hits(alias, renamed, fixed)
                candidates[alias] = set() if hits is None else hits
    left = set(renamed)
    found: list[tuple[Alias, tuple[str, ...]]] = []
    while left and candidates:
        best = max(candidates, key=lambda a: (len(candidates[a] & left), -len(a.stored)))
        served = candidates.pop(best) & left
        if not served:
            break
        left -= served
        found.append((best, tuple(name for name in renamed if name in served)))
    return found


def _aliases(name: str, target: str) -> Iterable[Alias]:
    """Yield the aliases that give *name* its *target*: whole, and without a common end."""
    was, now = name.split("."), target.split(".")
    for n in range(min(len(was), len(now)) + 1):
        if n and was[-n] != now[-n]:
            return
        end = ["**"] if n else []
        alias = Alias(
            ".".join([*was[: len(was) - n], *end]), ".".join([*now[: len(now) - n], *end])
        )
        if alias.stored != alias.model and not list(alias_faults(alias)):
            yield alias


def _hits(alias: Alias, renamed: Mapping[str, str], fixed: Sequence[str]) -> set[str] | None:
    """Return the names that *alias* renames rightly; None if it renames one wrongly."""
    stored, model = Pattern(alias.stored), Pattern(alias.model)
    if any(rename(stored, model, _template(name)) is not None for name in fixed):
        return None
    found: set[str] = set()
    for name, target in renamed.items():
        outcome = rename(stored, model, _template(name))
        if outcome is None:
            continue
        if outcome[0] != _template(target) or outcome[1]:
            return None
        found.add(name)
    return found


def _template(pattern: str) -> str:
    """Return a pattern of indices as a template with numbered slots."""
    return re.sub(r"\{i([0-9]+)\}", r"{\1}", pattern).replace(f"{{{STACKED}}}", "{9}")


def _convert(claim: Claim, aliases: Sequence[Alias]) -> Convert:
    """Return the conversion, over the names that *aliases* give."""

    def called(node: Node) -> Node:
        return Source(_called(node.name, aliases)) if isinstance(node, Source) else node

    recipe = mapped(claim.recipe, called)
    if isinstance(recipe, Source) and recipe.name != claim.target:
        pass  # a selection of one: kept as it is
    names = _words(claim.target, pattern_of(claim.model))
    names.setdefault(STACKED, "expert" if "expert" not in names.values() else STACKED)
    return Convert(_put(claim.target, names), mapped(recipe, lambda n: _renamed(n, names)))


def _called(name: str, aliases: Sequence[Alias]) -> str:
    for alias in aliases:
        outcome = rename(Pattern(alias.stored), Pattern(alias.model), _template(name))
        if outcome is not None:
            text = outcome[0].replace("{9}", f"{{{STACKED}}}")
            return re.sub(r"\{([0-9]+)\}", r"{i\1}", text)
    return name


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    match node:
        case Source(name):
            return Source(_put(name, names))
        case Stack(_, over) | Join(_, over):
            return replace(node, over=names.get(over, over))
        case Select(_, index):
            return replace(node, index=_put(index, names))
        case _:
            return node


def _named_alias(alias: Alias) -> Alias:
    names = _words(alias.model)
    return Alias(_put(alias.stored, names), _put(alias.model, names))


def _words(*patterns: str) -> dict[str, str]:
    """Return a word for each placeholder: what it is an index of."""
    found: dict[str, str] = {}
    for pattern in patterns:
        for list_name, hole in re.findall(r"([A-Za-z_]+)\.\{([a-z0-9]+)\}", pattern):
            word = list_name.lower().strip("_").removesuffix("s") or hole
            if hole not in found and word not in found.values() and not word.isdigit():
                found[hole] = word
    return found


def _put(pattern: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\{([a-z0-9]+)\}", lambda m: f"{{{names.get(m[1], m[1])}}}", pattern)
