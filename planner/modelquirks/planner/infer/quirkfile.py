"""A quirk and its test as source text, from what was inferred."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from modelquirks.planner.infer.inference import Inference
from modelquirks.planner.infer.rules import Rule
from modelquirks.planner.wording import clean
from modelquirks.quirks.family import group, show
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import nodes, sources
from modelquirks.quirks.record import Alias, Convert, Match, ModelQuirks

__all__ = ["quirk_text", "record_of", "text_of_test"]

_MAX_MATCHED = 3
"""Stored names that a checkpoint must have to be of this kind, where no config tells."""


def record_of(found: Inference, config: Mapping[str, Any], name: str) -> ModelQuirks:
    """Return the record of all rules that are certain or likely; RecordError if there is none.

    It applies by the architecture or model type of *config*, or by stored names that it renames.
    """
    return ModelQuirks(
        name=_record_name(name),
        role="architecture",
        match=_match(found, config),
        aliases=tuple(r.rule for r in found.rules if isinstance(r.rule, Alias)),
        conversions=tuple(r.rule for r in found.rules if isinstance(r.rule, Convert)),
        why="proposed by `modelquirks infer` from names and shapes",
    )


def _record_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "inferred"


def _match(found: Inference, config: Mapping[str, Any]) -> Match:
    named = config.get("architectures")
    if isinstance(named, list) and (classes := [name for name in named if isinstance(name, str)]):
        return Match(architectures=tuple(classes))
    if isinstance(kind := config.get("model_type"), str) and kind:
        return Match(model_types=(kind,))
    read = (pattern for rule in found.rules for pattern in _read(rule))
    return Match(all_of=tuple(dict.fromkeys(read))[:_MAX_MATCHED])


def _read(rule: Rule) -> Iterator[str]:
    """Yield the stored names that a rule is for, as patterns."""
    if isinstance(rule.rule, Alias):
        yield rule.rule.stored
    else:
        yield from (leaf.name for leaf in sources(rule.rule.recipe))


def quirk_text(found: Inference, config: Mapping[str, Any], name: str) -> str:
    """Return a module with the record: ready to use, each rule with how sure it is and why."""
    record = record_of(found, config, name)
    used = {type(n).__name__ for c in record.conversions for n in nodes(c.recipe)}
    used |= {"Match", "ModelQuirks", "hookimpl"}
    used |= {"Alias"} if record.aliases else set()
    used |= {"Convert"} if record.conversions else set()
    lines = [
        '"""Names of a checkpoint, as `modelquirks infer` read them. Check what is likely."""',
        "",
        f"from modelquirks.quirks import {', '.join(sorted(used))}",
        "",
        "RECORD = ModelQuirks(",
        f"    name={record.name!r},",
        f"    role={record.role!r},",
        f"    match={_call(record.match)},",
    ]
    for field, aliases in (("aliases", True), ("conversions", False)):
        sure = [rule for rule in found.rules if isinstance(rule.rule, Alias) is aliases]
        unsure = [rule for rule in found.open if isinstance(rule.rule, Alias) is aliases]
        if sure or unsure:
            lines += [f"    {field}=(", *_rule_lines(sure, unsure), "    ),"]
    lines += [
        f"    why={record.why!r},",
        ")",
        "",
        "",
        "@hookimpl",
        "def modelquirks_records():",
        '    """Return what this module knows."""',
        "    return [RECORD]",
    ]
    return "\n".join(lines) + "\n"


def _rule_lines(sure: Iterable[Rule], unsure: Iterable[Rule]) -> Iterator[str]:
    """Yield the rules as source; words of names are in comments, which must not end there."""
    for rule in sure:
        yield f"        # {rule.tier}, {rule.n_tensors} tensors: {clean(rule.why)}"
        yield f"        {_call(rule.rule)},"
    for rule in unsure:
        about = f"one of several readings: {clean(rule.why)}"
        yield f"        # open, {rule.n_tensors} tensors, {about}"
        yield f"        # {_call(rule.rule)},"


def _call(value: object) -> str:
    """Return *value* as the call that makes it, without what is as by default."""
    if isinstance(value, Alias):
        return f"Alias({value.stored!r}, {value.model!r})"
    if isinstance(value, Convert):
        return f"Convert({value.target!r}, {value.recipe!r})"
    assert isinstance(value, Match)
    given = ((key, getattr(value, key)) for key in ("architectures", "model_types", "all_of"))
    return f"Match({', '.join(f'{key}={found!r}' for key, found in given if found)})"


def text_of_test(found: Inference, config: Mapping[str, Any], name: str, module: str) -> str:
    """Return a test of the record that needs no torch and no file: names in, names out."""
    record = record_of(found, config, name)
    stored = [family.names[0] for family in group(found.stored).values()]
    called: dict[str, str] = {}
    for text in stored:
        for alias in record.aliases:
            if (binding := Pattern(alias.stored).match(text)) is not None:
                called[text] = Pattern(alias.model).fill(binding)
                break
    made = {c.target: [s.name for s in sources(c.recipe)] for c in record.conversions}
    names = "".join(f"    {was!r}: {now!r},\n" for was, now in list(called.items())[:40])
    return _TEST.format(module=module, names=names, made=sorted(made), subject=show(record.name))


_TEST = '''"""What {module}.py says of names; needs neither torch nor a checkpoint."""

import pytest
from modelquirks.quirks import Pattern, rename

from {module} import RECORD

NAMES = {{
{names}}}


@pytest.mark.parametrize("stored", NAMES)
def test_stored_names_get_the_names_of_the_model(stored):
    outcomes = (rename(Pattern(a.stored), Pattern(a.model), stored) for a in RECORD.aliases)
    assert next(found[0] for found in outcomes if found is not None) == NAMES[stored]


def test_conversions_make_what_the_model_wants():
    assert sorted(convert.target for convert in RECORD.conversions) == {made!r}
'''
