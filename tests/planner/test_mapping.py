"""Packs, conversions and ties on names alone, and the account that must hold for any of them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner import Dispatcher
from modelquirks.planner.checkpoint.manifest import Manifest, StoredTensor
from modelquirks.planner.mapping.conversions import bound
from modelquirks.planner.mapping.derive import Derived, Waivers, derive
from modelquirks.planner.mapping.fit import DtypeRule
from modelquirks.planner.mapping.offers import Offers, find_offers
from modelquirks.planner.mapping.recipes import stored_names
from modelquirks.planner.mapping.ties import TieGroup
from modelquirks.planner.model.skeleton import ModelTensor, Skeleton
from modelquirks.quirks.family import group
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import (
    Chunk,
    Concat,
    Node,
    RecipeError,
    Region,
    Reshape,
    Scheme,
    Select,
    Source,
    Split,
    Stack,
    TensorType,
    Transpose,
    View,
)
from modelquirks.quirks.record import Alias, Convert, Expected, Match, ModelQuirks, Pack
from modelquirks.quirks.registry import Origin, Registered, Registry
from modelquirks.quirks.resolve import Facts, Resolution, resolve

Shape = tuple[int, ...]


class Halves(Scheme):
    """A scheme whose plain weight has the shape of its codes."""

    name = "halves"
    roles = ("codes", "scale")

    def infer(self, parts: Mapping[str, TensorType], settings: Any) -> TensorType:
        return TensorType("F32", parts["codes"].shape)

    def regions(self, region: Region, parts: Any, settings: Any) -> Mapping[str, Region]:
        raise AssertionError("nothing is read here")

    def evaluate(self, parts: Any, region: Region, dtype: Any, settings: Any) -> Any:
        raise AssertionError("nothing is made here")


def record(
    *conversions: Convert,
    packs: tuple[Pack, ...] = (),
    extra: tuple[Expected, ...] = (),
    absent: tuple[Expected, ...] = (),
) -> ModelQuirks:
    return ModelQuirks(
        name="test.record",
        role="architecture",
        match=Match(any_of=("**",)),
        packs=packs,
        conversions=conversions,
        extra=extra,
        absent=absent,
    )


class ModuleOf:
    """A plugin with one record."""

    def __init__(self, quirks: ModelQuirks) -> None:
        self._quirks = quirks

    @hookimpl
    def modelquirks_records(self) -> tuple[ModelQuirks, ...]:
        return (self._quirks,)


def manifest_of(stored: Mapping[str, TensorType | Shape]) -> Manifest:
    tensors: dict[str, StoredTensor] = {}
    for at, (name, given_type) in enumerate(stored.items()):
        dtype, shape = given_type if isinstance(given_type, TensorType) else ("F32", given_type)
        tensors[name] = StoredTensor(name, "model.safetensors", dtype, shape, at, at + 1)
    return Manifest(Path(), Path(), "safetensors", tensors, (), {})


def found(
    stored: Mapping[str, TensorType | Shape],
    wanted: Mapping[str, Shape],
    quirks: ModelQuirks,
    aliases: Sequence[Alias] = (),
) -> tuple[Manifest, Skeleton, Resolution, Offers]:
    manifest = manifest_of(stored)
    tensors = {name: ModelTensor(name, "F32", shape) for name, shape in wanted.items()}
    skeleton = Skeleton("test", tensors, {"": "Test"})
    resolution = resolve(
        [Registered(quirks, Origin("test"))],
        Facts({}, tuple(manifest.families.values())),
        known=skeleton.wanted,
        aliases=aliases,
    )
    return manifest, skeleton, resolution, find_offers(resolution, {}, skeleton.wanted, {})


NOTHING_ALLOWED = Waivers()


def derived(
    stored: Mapping[str, TensorType | Shape],
    wanted: Mapping[str, Shape],
    quirks: ModelQuirks | None = None,
    *,
    aliases: Sequence[Alias] = (),
    ties: Sequence[TieGroup] = (),
    waivers: Waivers = NOTHING_ALLOWED,
) -> Derived:
    manifest, skeleton, resolution, offers = found(stored, wanted, quirks or record(), aliases)
    return derive(
        manifest,
        skeleton,
        offers,
        resolution,
        ties=ties,
        schemes={"halves": Halves()},
        dtype=DtypeRule.of(None, skeleton, ()),
        waivers=waivers,
    )


def derived_from(
    manifest: Manifest, wanted: Mapping[str, ModelTensor], ties: Sequence[TieGroup]
) -> Derived:
    """Derive without any record."""
    skeleton = Skeleton("test", wanted, {"": "Test"})
    resolution = resolve([], Facts({}, tuple(manifest.families.values())))
    return derive(
        manifest,
        skeleton,
        find_offers(resolution, {}, wanted, {}),
        resolution,
        ties=ties,
        schemes={},
        dtype=DtypeRule.of(None, skeleton, ()),
        waivers=Waivers(),
    )


def reads(result: Derived, name: str) -> list[str]:
    """Return the stored tensors that *name* is made from, in order."""
    return next(
        list(stored_names(recipe.node, env))
        for recipe in result.recipes
        for target, env in recipe.items()
        if target == name
    )


def reason_of(result: Derived, name: str) -> str:
    entries = (*result.audit.model, *result.audit.stored)
    return next(entry.reason for entry in entries if name in entry.names)


HALVES = Pack(
    "halves",
    "**.weight",
    (("codes", "**.codes"), ("scale", "**.scale")),
    optional=(("order", "**.order"),),
)


def test_optional_companion_alone_makes_no_weight_incomplete() -> None:
    quirks = record(packs=(HALVES,))
    result = derived({"a.order": (2,), "a.weight": (2,)}, {"a.weight": (2,)}, quirks)
    assert result.audit.by_class() == {"matched": 1, "used": 1, "unexpected": 1}
    *_, offers = found({"a.order": (2,)}, {}, quirks)
    assert not offers.broken


def test_companions_whose_indices_come_in_another_order_still_belong_together() -> None:
    pack = Pack(
        "halves",
        "l.{layer}.e.{expert}.weight",
        (("codes", "codes.{expert}.of.{layer}"), ("scale", "l.{layer}.e.{expert}.scale")),
    )
    stored = {
        name: (2,)
        for layer in range(2)
        for expert in range(3)
        for name in (f"codes.{expert}.of.{layer}", f"l.{layer}.e.{expert}.scale")
    }
    wanted = {f"l.{layer}.e.{expert}.weight": (2,) for layer in range(2) for expert in range(3)}
    result = derived(stored, wanted, record(packs=(pack,)))
    assert result.audit.by_class() == {"made": 6, "used": 12}
    assert reads(result, "l.1.e.2.weight") == ["codes.2.of.1", "l.1.e.2.scale"]


def test_companion_stored_twice_is_a_duplicate_not_a_guess() -> None:
    stored = {"a.codes": (2,), "a.scale": (2,), "wrapped.a.codes": (2,)}
    result = derived(
        stored,
        {"a.weight": (2,)},
        record(packs=(HALVES,)),
        aliases=[Alias("wrapped.**", "**")],
    )
    assert result.audit.duplicates == ("wrapped.a.codes",)
    assert "'a.codes' is served by 'a.codes'" in reason_of(result, "wrapped.a.codes")


def test_source_of_a_conversion_stored_twice_is_a_duplicate_not_a_guess() -> None:
    quirks = record(Convert("both", Concat((Source("a"), Source("b")))))
    stored = {"a": (2,), "b": (2,), "wrapped.b": (2,)}
    result = derived(stored, {"both": (4,)}, quirks, aliases=[Alias("wrapped.**", "**")])
    assert result.audit.duplicates == ("wrapped.b",)


def test_part_of_a_pack_that_is_also_a_source_serves_whatever_the_model_wants() -> None:
    stack = Convert("l.{layer}.codes", Stack(Source("l.{layer}.e.{expert}.codes"), "expert"))
    plain = Convert("l.{layer}.weight", Stack(Source("l.{layer}.e.{expert}.weight"), "expert"))
    quirks = record(stack, plain, packs=(HALVES,))
    stored = {f"l.0.e.{e}.{part}": (2,) for e in range(2) for part in ("codes", "scale")}
    result = derived(stored, {"l.0.weight": (2, 2)}, quirks)
    assert result.audit.by_class() == {"made": 1, "used": 4}
    result = derived(stored, {"l.0.codes": (2, 2)}, quirks)
    assert result.audit.by_class() == {"made": 1, "used": 2, "unexpected": 2}


def test_stack_of_which_no_element_is_stored_is_named_not_a_crash() -> None:
    quirks = record(
        Convert("l.{i}.all", Concat((Stack(Source("l.{i}.e.{e}"), "e"), Source("l.{i}.shared"))))
    )
    result = derived({"l.0.shared": (2, 2)}, {"l.0.all": (4, 2)}, quirks)
    assert result.audit.missing == ("l.0.all",)
    assert "'l.0.e.*'" in reason_of(result, "l.0.all")


def test_source_of_which_no_example_is_stored_is_named_for_its_layer() -> None:
    quirks = record(Convert("l.{i}.both", Concat((Source("l.{i}.a"), Source("l.{i}.b")))))
    result = derived({"l.3.a": (2,)}, {"l.3.both": (4,)}, quirks)
    assert "'l.3.b'" in reason_of(result, "l.3.both")


def expert_stack(node: Node) -> ModelQuirks:
    return record(Convert("l.{layer}.all", Stack(node, "expert")), packs=(HALVES,))


def test_index_that_is_part_of_a_word_is_stacked_over_in_its_order() -> None:
    quirks = expert_stack(Transpose(Source("l.{layer}.expert_{expert}.weight")))
    stored = {f"l.{i}.expert_{e}.weight": (2, 3) for i in range(2) for e in (10, *range(10))}
    result = derived(stored, {f"l.{i}.all": (11, 3, 2) for i in range(2)}, quirks)
    assert result.audit.by_class() == {"made": 2, "used": 22}
    assert len(result.recipes) == 1
    assert reads(result, "l.1.all") == [f"l.1.expert_{e}.weight" for e in range(11)]


def test_gap_among_indices_that_are_part_of_a_word_is_named() -> None:
    quirks = expert_stack(Source("l.{layer}.expert_{expert}.weight"))
    stored = {f"l.0.expert_{e}.weight": (2,) for e in (0, 1, 3)}
    result = derived(stored, {"l.0.all": (4, 2)}, quirks)
    assert "'l.0.expert_2.weight'" in reason_of(result, "l.0.all")
    result = derived({"l.0.expert_1.weight": (2,)}, {"l.0.all": (2, 2)}, quirks)
    assert "not stored: 'l.0.expert_0.weight'" in reason_of(result, "l.0.all")


def test_stack_of_packed_and_plain_elements_takes_each_as_it_is() -> None:
    quirks = expert_stack(Source("l.{layer}.e.{expert}.weight"))
    stored = {"l.0.e.0.codes": (2,), "l.0.e.0.scale": (1,), "l.0.e.1.weight": (2,)}
    result = derived(stored, {"l.0.all": (2, 2)}, quirks)
    assert result.audit.by_class() == {"made": 1, "used": 3}
    assert reads(result, "l.0.all") == ["l.0.e.0.codes", "l.0.e.0.scale", "l.0.e.1.weight"]


def test_nested_stacks_that_are_scattered_keep_their_order() -> None:
    quirks = record(Convert("all", Stack(Stack(Source("x.a_{a}.b_{b}"), "b"), "a")))
    stored = {f"x.a_{a}.b_{b}": (5,) for b in range(3) for a in range(2)}
    result = derived(stored, {"all": (2, 3, 5)}, quirks)
    assert reads(result, "all") == [f"x.a_{a}.b_{b}" for a in range(2) for b in range(3)]
    assert not result.audit.mismatched


def test_what_is_stored_as_the_model_wants_it_is_not_incomplete_for_want_of_other_sources(
    tmp_path: Path,
) -> None:
    """Without a model: a stack is stored, and one of the single elements lies beside it."""
    quirks = expert_stack(Source("l.{layer}.e.{expert}.weight"))
    registry = Registry()
    registry.register(ModuleOf(quirks), name="test", distribution="test", version="1")
    index = {"weight_map": dict.fromkeys(("l.0.all", "l.0.e.1.weight"), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    findings = Dispatcher(registry).plan(tmp_path).all_findings
    assert not [f for f in findings if f.code == "incomplete"]
    index = {"weight_map": {"l.0.e.1.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding,) = (f for f in Dispatcher(registry).plan(tmp_path).findings if f.code == "incomplete")
    assert "'l.0.e.0.weight'" in finding.message


def test_form_that_cannot_be_made_is_missing_not_taken_as_it_lies() -> None:
    """The stored tensor has the right shape by chance; the rule says that it must be cut."""
    quirks = record(Convert("qkv", Split(Source("qkv"), 0, ("heads",), 0)))
    result = derived({"qkv": (4,)}, {"qkv": (4,)}, quirks)
    assert result.audit.missing == ("qkv",) and "'heads'" in reason_of(result, "qkv")


def test_sizes_are_worked_out_from_config_json() -> None:
    def made(config: Mapping[str, Any]) -> Node:
        rule = View(Source("v"), (-1, "text_config.dim/heads", "3*heads"))
        return bound(rule, iter([Source("v")]), counts={}, index={}, config=config)

    text_config = {"dim": 24}
    assert made({"heads": 6, "text_config": text_config}) == Reshape(Source("v"), (-1, 4, 18))
    for config, reason in (
        ({"heads": 5, "text_config": text_config}, "24 is no multiple of 'heads'"),
        ({"heads": 0, "text_config": text_config}, "24 is no multiple of 'heads'"),
        ({"heads": 6}, "no integer 'text_config.dim', which the size 'text_config.dim/heads'"),
    ):
        with pytest.raises(RecipeError, match=reason):
            made(config)


def test_stored_tensor_that_serves_several_is_used_once_and_counted_once() -> None:
    quirks = record(
        *(
            Convert(name, Chunk(Source("both.weight"), 0, 2, part))
            for part, name in enumerate("ab")
        ),
        packs=(HALVES,),
    )
    stored = {"both.codes": (4,), "both.scale": (1,)}
    wanted = {"a": (2,), "b": (2,)}
    result = derived(stored, wanted, quirks, waivers=Waivers(dequantize=True))
    (note,) = result.audit.findings
    assert (note.code, note.severity) == ("dequantized", "info")
    assert note.message.startswith("2 packed weights") and "2 bytes stored" in note.message


def test_packed_weights_become_plain_ones_only_if_that_is_asked_for() -> None:
    quirks = record(packs=(HALVES,))
    stored = {"a.codes": (4,), "a.scale": (1,)}
    (error,) = derived(stored, {"a.weight": (4,)}, quirks).audit.findings
    assert (error.code, error.severity) == ("packed-into-plain", "error")
    assert "2 bytes stored, 16 bytes once loaded" in error.message
    assert "dequantize=True" in error.message


def tied(*names: str, only_fills: bool = False) -> TieGroup:
    return TieGroup(names, only_fills=only_fills)


def test_tie_named_twice_does_not_make_one_copy_two() -> None:
    """By the user and by the model: only one is stored, so there is nothing to compare."""
    result = derived(
        {"embed": (2,)},
        {"embed": (2,), "head": (2,)},
        ties=[tied("head", "embed", only_fills=True), tied("embed", "head")],
    )
    assert result.aliases == {"head": "embed"} and not result.compare
    assert not result.audit.findings and result.audit.ties == (("embed", "head"),)


def test_ties_that_meet_in_one_name_share_one_owner() -> None:
    wanted: dict[str, Shape] = dict.fromkeys("abcd", (2,))
    fills = [tied("b", "c", only_fills=True), tied("d", "c", only_fills=True)]
    result = derived({"a": (2,)}, wanted, ties=[tied("a", "b"), *fills])
    assert result.aliases == dict.fromkeys("bcd", "a") and not result.audit.missing


def test_views_of_one_storage_are_one_tensor_also_for_names_tied_to_them_before() -> None:
    place = StoredTensor("a", "model.bin", "F32", (2,), 0, 8)
    tensors = {"a": place, "b": place._replace(name="b")}
    manifest = Manifest(Path(), Path(), "torch", tensors, (), {})
    wanted = {name: ModelTensor(name, "F32", (2,)) for name in "abc"}
    result = derived_from(manifest, wanted, [tied("b", "c", only_fills=True), tied("a", "b")])
    assert result.aliases == {"b": "a", "c": "a"} and not result.compare
    assert [name for recipe in result.recipes for name, _ in recipe.items()] == ["a"]


def test_tie_of_different_shapes_is_an_error_that_names_both() -> None:
    result = derived({"a": (2,)}, {"a": (2,), "b": (3,)}, ties=[tied("a", "b", only_fills=True)])
    assert result.audit.missing == ("b",) and not result.aliases
    (finding,) = result.audit.findings
    assert finding.severity == "error" and "'b' [3]" in finding.message


def test_copies_of_a_tie_of_which_only_the_names_are_known_are_left_to_be_compared() -> None:
    tensors = {name: StoredTensor(name, "model.safetensors") for name in "ab"}
    manifest = Manifest(Path(), Path(), "safetensors", tensors, (), {})
    wanted = {name: ModelTensor(name, "F32", (2,)) for name in "ab"}
    result = derived_from(manifest, wanted, [tied("a", "b")])
    assert result.compare == (("a", "b"),) and not result.aliases


def test_what_a_record_expects_to_be_there_or_not_is_no_fault() -> None:
    quirks = record(
        extra=(Expected("l.*.inv_freq", "computed anew"),),
        absent=(Expected("l.{i}.late", "made while training"),),
    )
    stored = {"l.0.inv_freq": (2,), "l.0.w": (2,)}
    result = derived(stored, {"l.0.w": (2,), "l.0.late": (2,), "l.0.other": (2,)}, quirks)
    assert result.audit.by_class() == {
        "matched": 1,
        "used": 1,
        "absent": 1,
        "extra": 1,
        "missing": 1,
    }
    assert reason_of(result, "l.0.late") == "made while training"


def test_element_of_a_stack_goes_to_the_member_that_the_rule_names() -> None:
    quirks = record(Convert("l.0.e.{e}", Select(Source("first"), "{e}")))
    wanted = {f"l.{layer}.e.{e}": (2,) for layer in range(2) for e in range(3)}
    result = derived({"first": (3, 2)}, wanted, quirks)
    assert result.audit.names("made") == ("l.0.e.0", "l.0.e.1", "l.0.e.2")
    assert set(result.audit.missing) == {"l.1.e.0", "l.1.e.1", "l.1.e.2"}


def test_f8_weights_beside_unread_scales_are_one_finding_a_family() -> None:
    f8 = TensorType("F8_E4M3", (2, 2))
    stored: dict[str, TensorType | Shape] = {}
    for i in range(30):
        stored |= {f"l.{i}.weight": f8, f"l.{i}.weight_scale": (1,)}
    result = derived(stored, {f"l.{i}.weight": (2, 2) for i in range(30)})
    (finding,) = (f for f in result.audit.findings if f.code == "scale-unread")
    assert "'l.9.weight' … and 20 more" in finding.message


def test_proposals_for_thousands_of_families_come_in_a_moment_and_are_no_coincidences() -> None:
    """2,000 names on each side that differ in every word but the last."""
    wanted = {f"model.{hex(i)}.weight": (i % 7,) for i in range(2000)}
    stored = {f"net.{hex(i)}_.weight": (i % 7,) for i in range(2000)}
    started = time.process_time()
    audit = derived(stored, wanted).audit
    assert time.process_time() - started < 8  # comparing all with all took 14 seconds for aliases
    assert len(audit.missing) == 2000 and not audit.suggestions


def test_both_sides_of_a_large_difference_get_near_names() -> None:
    wanted = {f"model.{hex(i)}.weight": (2,) for i in range(90)}
    stored = {f"net.{hex(i)}.weight": (2,) for i in range(90)}
    audit = derived(stored, wanted).audit
    assert audit.model[0].nearest[0] == "net.0x0.weight"
    assert audit.stored[0].nearest[0] == "model.0x0.weight"


def test_proposal_that_would_take_too_many_aliases_is_not_made() -> None:
    """A stripped prefix would also rename what fits; each module would need an alias of its own."""
    stored: dict[str, TensorType | Shape] = {f"a.{hex(i)}.w": (2,) for i in range(40)}
    wanted = {f"b.{hex(i)}.w": (2,) for i in range(40)} | {"a.fits": (2,)}
    audit = derived(stored | {"a.fits": (2,)}, wanted).audit
    assert len(audit.missing) == 40 and not audit.suggestions


def test_no_alias_is_proposed_that_only_a_shape_speaks_for() -> None:
    """An embedding and the output head have one shape: either stored one could be either."""
    wanted = {"model.embed.weight": (8, 4), "lm_head.weight": (8, 4), "model.norm.weight": (4,)}
    stored: dict[str, TensorType | Shape] = {"tok.weight": (8, 4), "out.weight": (8, 4)}
    assert not derived(stored, wanted).audit.suggestions
    one = derived(stored | {"core.norm.weight": (4,)}, wanted).audit.suggestions
    assert [found.option for found in one] == ["--alias 'core.**=model.**'"]


SIMPLE = st.sampled_from(("a", "b", "c"))
LAYERS = st.integers(0, 1)
STORED = st.one_of(
    st.builds("{}".format, SIMPLE),
    st.builds("l.{}.{}".format, LAYERS, SIMPLE),
    st.builds("l.{}.e.{}.{}".format, LAYERS, LAYERS, SIMPLE),
    st.builds("l.{}.{}.{}".format, LAYERS, SIMPLE, st.sampled_from(("codes", "scale", "weight"))),
    st.builds("l.{}.x_{}".format, LAYERS, LAYERS),
    st.builds("wrapped.l.{}.{}".format, LAYERS, SIMPLE),
)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "stack": st.just(Convert("l.{i}.all", Stack(Source("l.{i}.e.{e}.a"), "e"))),
        "words": st.just(Convert("l.{i}.words", Stack(Source("l.{i}.x_{x}"), "x"))),
        "join": st.just(Convert("l.{i}.ab", Concat((Source("l.{i}.a"), Source("l.{i}.b"))))),
        "plain": st.just(Convert("l.{i}.w", Source("l.{i}.a.weight"))),
        "half": st.just(Convert("l.{i}.half", Chunk(Source("l.{i}.c"), 0, 2, 1))),
        "one": st.just(Convert("l.{i}.e.{e}.one", Select(Source("l.{i}.b"), "{e}"))),
        "turned": st.just(Convert("l.{i}.b", Transpose(Source("l.{i}.b")))),
    },
)
ALIASES = st.lists(
    st.sampled_from(
        (
            Alias("wrapped.**", "**"),
            Alias("l.0.**", "l.7.**"),
            Alias("l.{i}.e.{e}.*", "l.{i}.experts.{e}.*"),
            Alias("l.{i}.e.{e}.c", "l.{e}.e.{i}.c"),
        )
    ),
    unique=True,
    max_size=3,
)
WANTED = st.one_of(
    STORED,
    st.builds("l.{}.{}".format, LAYERS, st.sampled_from(("all", "words", "ab", "w", "half"))),
    st.builds("l.{}.e.{}.one".format, LAYERS, LAYERS),
)


@settings(max_examples=200, deadline=None)
@given(
    stored=st.dictionaries(STORED, st.sampled_from(((2, 2), (4, 2))), max_size=14),
    wanted=st.dictionaries(WANTED, st.sampled_from(((2, 2), (4, 2), (2, 4), (2,))), max_size=10),
    rules=RULES,
    packed=st.booleans(),
    aliases=ALIASES,
    pairs=st.lists(st.tuples(WANTED, WANTED, st.booleans()), max_size=3),
)
def test_every_tensor_of_both_sides_has_one_class_and_recipes_cover_what_arrives(
    stored: dict[str, Shape],
    wanted: dict[str, Shape],
    rules: dict[str, Convert],
    packed: bool,
    aliases: list[Alias],
    pairs: list[tuple[str, str, bool]],
) -> None:
    quirks = record(*rules.values(), packs=(HALVES,) if packed else ())
    ties = [TieGroup((a, b), only_fills=fills) for a, b, fills in pairs if a != b]
    result = derived(stored, wanted, quirks, aliases=aliases, ties=ties)
    audit = result.audit
    assert sorted(n for entry in audit.model for n in entry.names) == sorted(wanted)
    assert sorted(n for entry in audit.stored for n in entry.names) == sorted(stored)
    made = [(name, stored_names(r.node, env)) for r in result.recipes for name, env in r.items()]
    assert sorted(n for n, _ in made) == sorted((*audit.names("matched"), *audit.names("made")))
    assert {read for _, names in made for read in names} <= set(audit.names("used"))
    assert set(audit.names("tied")) == set(result.aliases)
    assert set(result.aliases.values()) <= {name for name, _ in made}
    assert {n for names in result.compare for n in names} <= {name for name, _ in made}


@given(names=st.sets(STORED, min_size=1, max_size=14), aliases=ALIASES)
def test_every_stored_tensor_has_one_logical_name(names: set[str], aliases: list[Alias]) -> None:
    *_, offers = found(dict.fromkeys(sorted(names), (2, 2)), {}, record(), aliases)
    assert sorted(offers.called) == sorted(names)
    for stored, logical in offers.called.items():
        if not any(Pattern(alias.stored).match(stored) for alias in aliases):
            assert logical == stored
    assert sum(len(family) for family in group(offers.called).values()) == len(names)
