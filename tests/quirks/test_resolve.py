"""Which records apply, in which order, and what names come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from modelquirks.quirks.family import group
from modelquirks.quirks.matching import why_matches
from modelquirks.quirks.record import Alias, Match, ModelQuirks, Role
from modelquirks.quirks.registry import Origin, Registered
from modelquirks.quirks.resolve import Facts, Resolution, resolve


def record(
    name: str,
    role: Role,
    match: Match,
    *aliases: tuple[str, str],
    overrides: frozenset[str] = frozenset(),
    distribution: str = "modelquirks-test",
) -> Registered:
    quirks = ModelQuirks(
        name=name,
        role=role,
        match=match,
        aliases=tuple(Alias(*alias) for alias in aliases),
        overrides=overrides,
    )
    return Registered(quirks, Origin(name, distribution, "1.0"))


def resolved(
    records: Sequence[Registered], names: Sequence[str], **options: Any
) -> tuple[Resolution, dict[str, str]]:
    """Resolve *names*; return the resolution and stored name → logical name."""
    config = options.pop("config", {})
    facts = Facts(config, tuple(group(names).values()))
    resolution = resolve(records, facts, **options)
    renamed: dict[str, str] = {}
    for piece in resolution.renamed:
        for logical, member in piece.items():
            renamed[piece.family.template.format(*member)] = logical
    return resolution, renamed


DYNAMO = record(
    "compile", "wrapper", Match(any_of=("**._orig_mod.**",)), ("**._orig_mod.**", "**.**")
)
DDP = record("ddp", "wrapper", Match(any_of=("module.**",)), ("module.**", "**"))
GPT = record(
    "gpt", "architecture", Match(model_types=("gpt",)), ("h.{layer}.**", "model.layers.{layer}.**")
)


def test_roles_compose_in_order_each_seeing_the_names_of_the_one_before() -> None:
    resolution, names = resolved(
        [GPT, DDP, DYNAMO],
        ["module._orig_mod.h.0.w", "module._orig_mod.h.1.w"],
        config={"model_type": "gpt"},
    )
    assert names["module._orig_mod.h.1.w"] == "model.layers.1.w"
    assert [a.record.name for a in resolution.applied] == ["ddp", "compile", "gpt"]


def test_nested_wrappers_are_removed_until_none_is_left() -> None:
    _, names = resolved([DDP, DYNAMO], ["module.module._orig_mod.a._orig_mod.w"])
    assert names == {"module.module._orig_mod.a._orig_mod.w": "a.w"}


def test_wrapper_never_takes_away_a_name_that_the_model_has() -> None:
    _, names = resolved([DDP], ["module.a", "module.b"], known={"module.a", "b"})
    assert names == {"module.a": "module.a", "module.b": "b"}


def test_alias_that_leads_nowhere_keeps_the_name_the_model_has() -> None:
    _, names = resolved([GPT], ["h.0.w"], config={"model_type": "gpt"}, known={"h.0.w"})
    assert names == {"h.0.w": "h.0.w"}


def test_wrapper_keeps_a_family_of_which_the_model_has_only_some_members() -> None:
    """Also if the member that is stored first is one that the model does not have."""
    stored = ["module.9.a", "module.0.a"]
    _, names = resolved([DDP], stored, known={"module.0.a", "module.1.a"})
    assert names == {name: name for name in stored}


def test_only_the_members_that_a_rule_renames_decide_whether_the_model_has_them() -> None:
    rule = record("r", "architecture", Match(any_of=("**",)), ("p.1.w", "p.linear.w"))
    _, names = resolved([rule], ["p.0.w", "p.1.w"], known={"p.0.w", "p.other.w"})
    assert names == {"p.0.w": "p.0.w", "p.1.w": "p.linear.w"}


@pytest.mark.parametrize(("layers", "applies"), [((0, 61), True), ((0, 1), False)])
def test_literal_digit_of_a_match_asks_for_that_member(
    layers: Sequence[int], applies: bool
) -> None:
    mtp = record("mtp", "architecture", Match(any_of=("model.layers.61.*",)), ("a", "b"))
    resolution, _ = resolved([mtp], [f"model.layers.{layer}.w" for layer in layers])
    assert [a.record.name for a in resolution.applied] == ["mtp"] * applies


def test_wrappers_that_undo_each_other_are_named_not_left_half_done() -> None:
    there = record("there", "wrapper", Match(any_of=("a.**",)), ("a.**", "b.**"))
    back = record("back", "wrapper", Match(any_of=("b.**",)), ("b.**", "a.**"))
    resolution, _ = resolved([there, back], ["a.w"])
    (conflict,) = resolution.conflicts
    assert "'there'" in conflict and "'back'" in conflict and "--no-quirk" in conflict


def test_quantisation_records_that_rename_different_members_do_not_conflict() -> None:
    first = record("first", "quantization", Match(any_of=("**",)), ("p.0.w", "a"))
    second = record("second", "quantization", Match(any_of=("**",)), ("p.1.w", "b"))
    resolution, names = resolved([first, second], ["p.0.w", "p.1.w"])
    assert not resolution.conflicts and names == {"p.0.w": "a", "p.1.w": "b"}


def test_literal_digit_of_a_rule_renames_only_that_member() -> None:
    rule = record("r", "architecture", Match(model_types=("x",)), ("**.proj.0.w", "**.proj.1.w"))
    _, names = resolved([rule], ["a.proj.0.w", "a.proj.2.w"], config={"model_type": "x"})
    assert names == {"a.proj.0.w": "a.proj.1.w", "a.proj.2.w": "a.proj.2.w"}


def test_layers_1_is_not_layers_11() -> None:
    rule = record("r", "architecture", Match(model_types=("x",)), ("layers.1.**", "first.**"))
    _, names = resolved([rule], ["layers.1.w", "layers.11.w"], config={"model_type": "x"})
    assert names == {"layers.1.w": "first.w", "layers.11.w": "layers.11.w"}


def test_users_alias_is_applied_once_first_match_wins() -> None:
    _, names = resolved([], ["a.w", "b.w"], aliases=[Alias("a.**", "b.**"), Alias("b.**", "c.**")])
    assert names == {"a.w": "b.w", "b.w": "c.w"}


def test_more_specific_architecture_wins() -> None:
    by_class = record("by_class", "architecture", Match(architectures=("M",)), ("a", "x"))
    by_type = record("by_type", "architecture", Match(model_types=("m",)), ("a", "y"))
    resolution, names = resolved(
        [by_type, by_class], ["a"], config={"architectures": ["M"], "model_type": "m"}
    )
    assert names == {"a": "x"} and not resolution.conflicts


def test_equally_specific_architectures_conflict_and_both_distributions_are_named() -> None:
    one = record("one", "architecture", Match(model_types=("m",)), distribution="dist-one")
    two = record("two", "architecture", Match(model_types=("m",)), distribution="dist-two")
    resolution, _ = resolved([one, two], ["a"], config={"model_type": "m"})
    (conflict,) = resolution.conflicts
    for word in ("'one'", "'two'", "dist-one 1.0", "dist-two 1.0", "--no-quirk"):
        assert word in conflict
    assert not resolution.applied


def test_override_settles_the_conflict_openly() -> None:
    one = record("one", "architecture", Match(model_types=("m",)))
    two = record("two", "architecture", Match(model_types=("m",)), overrides=frozenset({"one"}))
    resolution, _ = resolved([one, two], ["a"], config={"model_type": "m"})
    assert [a.record.name for a in resolution.applied] == ["two"] and not resolution.conflicts


def test_user_settles_the_conflict_with_force_or_exclude() -> None:
    one = record("one", "architecture", Match(model_types=("m",)))
    two = record("two", "architecture", Match(model_types=("m",)))
    for options in ({"force": ["one"]}, {"exclude": ["two"]}):
        resolution, _ = resolved([one, two], ["a"], config={"model_type": "m"}, **options)
        assert [a.record.name for a in resolution.applied] == ["one"]
        assert not resolution.conflicts


def test_quantisation_records_that_rename_one_name_differently_conflict() -> None:
    one = record("q1", "quantization", Match(any_of=("**.codes",)), ("**.codes", "**.a"))
    two = record("q2", "quantization", Match(any_of=("**.codes",)), ("**.codes", "**.b"))
    resolution, names = resolved([one, two], ["m.codes"])
    assert len(resolution.conflicts) == 1 and "'q1'" in resolution.conflicts[0]
    assert names == {"m.codes": "m.codes"} and not resolution.applied


def test_forced_record_applies_without_a_match_and_says_so() -> None:
    resolution, names = resolved([GPT], ["h.0.w"], force=["gpt"])
    assert names == {"h.0.w": "model.layers.0.w"}
    assert resolution.applied[0].why == "asked for by name"


def test_asking_for_a_record_that_does_not_exist_is_a_problem() -> None:
    resolution, _ = resolved([GPT], ["a"], force=["nonsense"])
    assert "'nonsense'" in resolution.problems[0]


@pytest.mark.parametrize(
    ("match", "config", "expected"),
    [
        (Match(model_types=("a",)), {"text_config": {"model_type": "a"}}, "model_type 'a'"),
        (Match(quant_methods=("q",)), {"quantization_config": {"quant_method": "q"}}, "quant_m"),
        (Match(model_types=("a",), any_of=("x.**",)), {"model_type": "a"}, None),
        (Match(any_of=("w.{i}",), none_of=("n",)), {}, None),
        (Match(all_of=("w.{i}", "n")), {}, "names like"),
        (Match(containers=("lightning",)), {}, None),
    ],
)
def test_match_fields_are_anded(match: Match, config: Any, expected: str | None) -> None:
    why = why_matches(match, config, ["w.{0}", "n"])
    assert why is None if expected is None else why is not None and expected in why
