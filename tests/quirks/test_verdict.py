"""Why a record applies or not, what records claim, and what holds of every record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelquirks.quirks import (
    Alias,
    Convert,
    Expected,
    Match,
    ModelQuirks,
    Origin,
    Pack,
    Registered,
    Registry,
    Source,
    Tie,
    group,
)
from modelquirks.quirks.claims import claims
from modelquirks.quirks.invariants import invariant_faults
from modelquirks.quirks.matching import conditions, why_matches
from modelquirks.quirks.record_json import record_json
from modelquirks.quirks.resolve import Facts, resolve
from modelquirks.quirks.verdict import Verdict, verdicts


def record(name: str = "acme", match: Match | None = None, **rules: Any) -> ModelQuirks:
    rules.setdefault("role", "architecture")
    rules.setdefault("why", "because")
    return ModelQuirks(name=name, match=match or Match(model_types=("acme",)), **rules)


def registered(*records: ModelQuirks) -> list[Registered]:
    return [Registered(r, Origin("test", f"dist-{r.name}", "1.0")) for r in records]


def judged(
    records: Iterable[ModelQuirks],
    names: Iterable[str] = (),
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Verdict]:
    given = registered(*records)
    facts = Facts(config or {}, tuple(group(names).values()))
    found = verdicts(given, resolve(given, facts, **options), facts)
    return {verdict.registered.record.name: verdict for verdict in found}


ACME = {"model_type": "acme"}


# Why, and why not


def test_every_condition_that_fails_is_told_with_what_was_found() -> None:
    match = Match(
        model_types=("acme", "acme_two"),
        quant_methods=("fp8",),
        containers=("lightning",),
        any_of=("body.{i}.w", "trunk.{i}.w"),
        all_of=("head.w",),
        none_of=("stem.**",),
    )
    verdict = judged([record(match=match)], ["stem.w"], {"model_type": "llama"})["acme"]
    assert not verdict.applies
    assert verdict.why == (
        "model_type is 'llama', expected 'acme' or 'acme_two'",
        "there is no quant_method, expected 'fp8'",
        "there is no container, expected 'lightning'",
        "no name fits 'body.{i}.w' or 'trunk.{i}.w'",
        "no name fits 'head.w'",
        "names like 'stem.w' fit 'stem.**', and must not",
    )


def test_what_fits_all_the_same_is_told_too() -> None:
    match = Match(model_types=("acme",), all_of=("head.w",))
    verdict = judged([record(match=match)], ["body.0.w"], ACME)["acme"]
    assert (verdict.why, verdict.fits) == (("no name fits 'head.w'",), ("model_type 'acme'",))
    assert verdict.is_near


def test_a_record_that_only_shares_common_names_is_not_near() -> None:
    match = Match(quant_methods=("fp8",), all_of=("**.weight",))
    assert not judged([record(match=match)], ["a.weight"])["acme"].is_near


def test_a_match_is_judged_on_the_names_that_it_sees() -> None:
    """Those of architectures have no wrappers, those of packed weights have all aliases behind."""
    wrapper = record(
        "wrap", Match(any_of=("module.**",)), role="wrapper", aliases=(Alias("module.**", "**"),)
    )
    architecture = record(
        "arch", Match(any_of=("body.**", "gone.**")), aliases=(Alias("body.**", "layers.**"),)
    )
    packed = record("pack", Match(all_of=("body.w", "layers.w")), role="quantization")
    found = judged([wrapper, architecture, packed], ["module.body.w"])
    assert found["wrap"].applies and found["arch"].applies
    assert found["pack"].why == ("no name fits 'body.w'",)
    assert found["pack"].fits == ("names like 'layers.w'",)


def test_the_less_specific_record_is_told_which_one_is_preferred() -> None:
    found = judged([record("loose", Match(any_of=("w",))), record("tight")], ["w"], ACME)
    assert found["tight"].applies
    assert found["loose"].why == ("'tight' matches by more",)


def test_records_in_conflict_are_both_told_so() -> None:
    found = judged([record("left"), record("right")], ["w"], ACME)
    told = {name: verdict.why for name, verdict in found.items()}
    assert told == dict.fromkeys(("left", "right"), ("it is in conflict with another record",))


def test_an_overridden_record_is_told_by_whom() -> None:
    over = record("over", overrides=frozenset({"acme", "idle"}))
    idle = record("idle", Match(model_types=("other",)))
    found = judged([record(), over, idle], ["w"], ACME)
    assert found["over"].applies
    assert found["acme"].why == ("'over' overrides it",)
    assert found["idle"].why == ("model_type is 'acme', expected 'other'",)


def test_a_record_left_out_by_name_is_told_so() -> None:
    assert judged([record()], ["w"], ACME, exclude=["acme"])["acme"].why == (
        "it is left out by name",
    )
    found = judged([record(), record("other")], ["w"], ACME, force=["other"])
    assert found["acme"].why == ("another one is asked for by name",)


_TEXTS = st.sampled_from(["a.w", "b.{i}.w", "c.**", "**.w"])
_MATCHES = st.builds(
    Match,
    model_types=st.sampled_from([(), ("acme",), ("acme", "other")]),
    quant_methods=st.sampled_from([(), ("fp8",)]),
    any_of=st.lists(_TEXTS, max_size=2).map(tuple),
    all_of=st.lists(_TEXTS, max_size=2).map(tuple),
    none_of=st.lists(_TEXTS, max_size=1).map(tuple),
).filter(lambda match: not match.is_empty)
_CONFIGS = st.sampled_from(
    [{}, ACME, {"model_type": "no"}, {**ACME, "quantization_config": {"quant_method": "fp8"}}]
)
_NAMES = st.lists(st.sampled_from(["a.w", "b.0.w", "c.x", "d"]), unique=True)


@given(_MATCHES, _CONFIGS, _NAMES)
def test_a_record_applies_exactly_if_nothing_is_said_against_it(
    match: Match, config: dict[str, Any], names: list[str]
) -> None:
    verdict = judged([record(match=match)], names, config)["acme"]
    assert verdict.applies == (why_matches(match, config, names) is not None)
    if not verdict.applies:
        assert verdict.why

    def first(pattern: Any) -> str | None:
        return next((name for name in names if pattern.match(name)), None)

    assert verdict.applies == all(c.holds for c in conditions(match, config, first, ""))


# Claims


def test_rivals_are_records_that_nothing_tells_apart() -> None:
    same = record("same")
    assert [c.kind for c in claims(registered(record(), same))] == ["rivals"]
    for apart in (
        Match(model_types=("other",)),
        Match(architectures=("Acme",)),
        Match(model_types=("acme",), any_of=("body.**",)),
    ):
        assert claims(registered(record(), record("same", apart))) == ()
    fp8 = Match(model_types=("acme",), quant_methods=("fp8",))
    awq = Match(model_types=("acme",), quant_methods=("awq",))
    assert claims(registered(record("one", fp8), record("two", awq))) == ()
    settled = record("same", overrides=frozenset({"acme"}))
    assert [c.kind for c in claims(registered(record(), settled))] == ["override"]


def test_a_record_may_go_before_the_rules_of_a_library() -> None:
    (claim,) = claims(registered(record("acme", overrides=frozenset({"transformers"}))))
    assert claim.kind == "override"
    assert "renames before 'transformers' does" in claim.text


def test_an_override_of_another_role_does_nothing_and_is_told() -> None:
    over = record("over", Match(any_of=("w",)), role="wrapper", overrides=frozenset({"acme"}))
    (claim,) = claims(registered(record(), over))
    assert claim.kind == "idle-override"
    assert "it is of role 'architecture', not 'wrapper'" in claim.text


# Invariants


@pytest.mark.parametrize("one", Registry.load().records, ids=lambda one: one.record.name)
def test_every_record_that_ships_is_sound(one: Registered) -> None:
    assert invariant_faults(one.record) == ()
    assert record_json(one.record)["match"]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            {"aliases": (Alias("a.**", "b.a.**"), Alias("b.**", "c.**"))},
            "must come out as it stays",
        ),
        ({"aliases": (Alias("a.w", "c.w"), Alias("a.*", "b.*"))}, None),
        ({"aliases": (Alias("a.**", "b.**"), Alias("a.*.w", "c.*.w"))}, "'a.*.w' is never used"),
        ({"role": "wrapper", "aliases": (Alias("**", "m.**"),)}, "never comes to rest"),
        ({"role": "wrapper", "aliases": (Alias("m.**", "**"),)}, None),
        ({"ties": (Tie(("a", "b")), Tie(("b", "c")))}, "share 'b': make them one tie"),
        ({"ties": (Tie(("a", "b")), Tie(("b", "c"), when=None))}, None),
        ({"why": " "}, "why is empty"),
        ({"extra": (Expected("a", ""),)}, "'a' is expected without a why"),
        (
            {
                "extra": (Expected("**.s", "not needed"),),
                "packs": (Pack("fp8", "**.weight", (("scale", "**.s"),)),),
            },
            "is declared extra (not wanted) and is read",
        ),
        ({"conversions": (Convert("a", Source("b")),) * 2}, "is there twice"),
    ],
)
def test_what_is_unsound_is_said(rules: dict[str, Any], said: str | None) -> None:
    faults = invariant_faults(record(**rules))
    if said is None:
        assert faults == ()
    else:
        assert any(said in fault for fault in faults), faults


def test_an_example_that_no_rule_fits_is_said() -> None:
    one = record(aliases=(Alias("body.{i}.**", "layers.{i}.**"),))
    assert invariant_faults(one, ["body.0.w"]) == ()
    assert invariant_faults(one, ["body.0.w", "trunk.w"]) == (
        "no rule of the record fits the example 'trunk.w'",
    )
