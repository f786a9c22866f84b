"""Judging a family at once gives what judging each of its tensors by its name gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from modelquirks.planner.checkpoint.manifest import Manifest, StoredTensor
from modelquirks.planner.mapping import derive as derive_module
from modelquirks.planner.mapping.derive import Derived, Waivers, derive
from modelquirks.planner.mapping.fit import DtypeRule
from modelquirks.planner.mapping.judge import Judge
from modelquirks.planner.mapping.offers import Offers, find_offers
from modelquirks.planner.mapping.ties import tie_groups
from modelquirks.planner.mapping.wholes import Account, judged_all
from modelquirks.planner.model.skeleton import Kind, ModelTensor, Skeleton
from modelquirks.planner.placement.model_tree import ModelTree
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import (
    Concat,
    Region,
    Scheme,
    Select,
    Source,
    Stack,
    TensorType,
    Transpose,
)
from modelquirks.quirks.record import Alias, Convert, Expected, Match, ModelQuirks, Pack, Tie
from modelquirks.quirks.registry import Origin, Registered
from modelquirks.quirks.resolve import Facts, Resolution, resolve

N_LAYERS, N_EXPERTS = 3, 3


class Halves(Scheme):
    """A scheme whose plain weight has the shape of its codes."""

    name = "halves"
    roles = ("codes", "scale")

    def __init__(self, *, by_name: bool) -> None:
        self._by_name = by_name

    def settings(self, config: Mapping[str, Any], weight: str) -> Mapping[str, Any]:
        return {"bits": 4 + weight.count("2")} if self._by_name else {}

    def varies(self, config: Mapping[str, Any]) -> bool:
        return self._by_name

    def infer(self, parts: Mapping[str, TensorType], settings: Any) -> TensorType:
        return TensorType("F32", parts["codes"].shape)

    def regions(self, region: Region, parts: Any, settings: Any) -> Mapping[str, Region]:
        raise AssertionError("nothing is read here")

    def evaluate(self, parts: Any, region: Region, dtype: Any, settings: Any) -> Any:
        raise AssertionError("nothing is made here")


EXPERT = Source("l.{i}.e.{e}.w")
RECORD = ModelQuirks(
    name="test.record",
    role="architecture",
    match=Match(any_of=("**",)),
    aliases=(Alias("old.{i}.**", "l.{i}.**"),),
    packs=(Pack("halves", "**.w", (("codes", "**.w_codes"), ("scale", "**.w_scale"))),),
    conversions=(
        Convert("l.{i}.all", Stack(Concat((EXPERT, Source("l.{i}.e.{e}.u"))), "e")),
        Convert("l.{i}.words", Stack(Source("l.{i}.word_{e}.w"), "e")),
        Convert("l.{i}.turned", Transpose(Source("l.{i}.turned")), either=True),
        Convert("l.{i}.one.{e}.w", Select(Source("l.{i}.stack"), "{e}")),
    ),
    extra=(Expected("l.{i}.inv_freq", "computed anew"),),
    absent=(Expected("l.{i}.bias", "zeros"),),
    ties=(Tie(("head.w", "embed.w"), None),),
)  # fmt: skip

Types = dict[str, TensorType]


@dataclass
class Case:
    """A checkpoint and a model, and what was asked for."""

    stored: Types
    wanted: dict[str, ModelTensor]
    ties: list[tuple[str, ...]] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    asked: str | None = None
    keep: tuple[str, ...] = ()
    waivers: Waivers = field(default_factory=Waivers)
    by_name: bool = False
    """Each weight of the packing has settings of its own."""


def layers(*texts: str) -> list[str]:
    return [
        name
        for text in texts
        for i in range(N_LAYERS)
        for name in dict.fromkeys(text.format(i=i, e=e) for e in range(N_EXPERTS))
    ]


WANTED: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]] = {
    "plain": [("l.{i}.attn.w", (2, 4)), ("l.{i}.norm.w", (4,))],
    "experts": [("l.{i}.e.{e}.w", (2, 4)), ("l.{i}.e.{e}.u", (2, 4))],
    "codes": [("l.{i}.e.{e}.w_codes", (2, 4)), ("l.{i}.e.{e}.w_scale", (2,))],
    "stacked": [("l.{i}.all", (N_EXPERTS, 4, 4))],
    "words": [("l.{i}.words", (N_EXPERTS, 2, 4))],
    "turned": [("l.{i}.turned", (4, 2))],
    "one": [("l.{i}.one.{e}.w", (2, 4))],
    "bias": [("l.{i}.bias", (4,))],
    "ends": [("embed.w", (8, 4)), ("head.w", (8, 4))],
}
STORED: Mapping[str, Sequence[tuple[str, str, tuple[int, ...]]]] = {
    "plain": [("l.{i}.attn.w", "BF16", (2, 4)), ("l.{i}.norm.w", "BF16", (4,))],
    "renamed": [("old.{i}.attn.w", "BF16", (2, 4)), ("old.{i}.norm.w", "BF16", (4,))],
    "experts": [("l.{i}.e.{e}.w", "BF16", (2, 4)), ("l.{i}.e.{e}.u", "BF16", (2, 4))],
    "narrow": [("l.{i}.attn.w", "F8_E4M3", (2, 4)), ("l.{i}.attn.scale", "F32", (1,))],
    "packed": [
        ("l.{i}.e.{e}.w_codes", "I8", (2, 4)),
        ("l.{i}.e.{e}.w_scale", "BF16", (2,)),
        ("l.{i}.e.{e}.u", "F32", (2, 4)),
    ],
    "words": [("l.{i}.word_{e}.w", "F16", (2, 4))],
    "turned": [("l.{i}.turned", "F32", (2, 4))],
    "stack": [("l.{i}.stack", "F32", (N_EXPERTS, 2, 4))],
    "more": [("l.{i}.inv_freq", "F32", (4,)), ("other.{i}.w", "F32", (4,))],
    "ends": [("embed.w", "BF16", (8, 4)), ("head.w", "BF16", (8, 4))],
}


def wanted_as(text: str, shape: tuple[int, ...], dtype: str, kind: Kind) -> dict[str, ModelTensor]:
    dtype = "I8" if text.endswith("codes") else dtype
    return {name: ModelTensor(name, dtype, shape, kind) for name in layers(text)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stored: Types = {}
    for part in draw(st.sets(st.sampled_from([*STORED]), min_size=1)):
        for text, dtype, shape in STORED[part]:
            stored |= dict.fromkeys(layers(text), TensorType(dtype, shape))
    wanted: dict[str, ModelTensor] = {}
    kinds: st.SearchStrategy[Kind] = st.sampled_from(["parameter", "parameter", "buffer"])
    for part in draw(st.sets(st.sampled_from([*WANTED]), min_size=1)):
        for text, shape in WANTED[part]:
            wanted |= wanted_as(text, shape, draw(st.sampled_from(["F32", "BF16"])), draw(kinds))
    if draw(st.booleans()):
        wanted = {name: tensor._replace(on_meta=True) for name, tensor in wanted.items()}
    order = Random(draw(st.integers(0, 99)))
    case = Case(
        {n: stored[n] for n in mixed(order, stored)}, {n: wanted[n] for n in mixed(order, wanted)}
    )
    for odd in draw(st.lists(st.sampled_from([*ODD]), max_size=3)):
        if case.stored and case.wanted:
            ODD[odd](draw, case)
            event(odd)
    return case


def mixed(order: Random, names: Iterable[str]) -> list[str]:
    """Return *names* as they are, sorted, or in no order."""
    listed = [*names]
    return [listed, sorted(listed), order.sample(listed, len(listed))][order.randrange(3)]


def an_own_type(draw: st.DrawFn, case: Case) -> None:
    name = draw(st.sampled_from([*case.stored]))
    types = [("F32", (2, 4)), ("BF16", (4,)), ("I8", (2, 4)), ("F8_E4M3", (2, 4)), ("I8", (5,))]
    case.stored[name] = TensorType(*draw(st.sampled_from(types)))


def an_own_want(draw: st.DrawFn, case: Case) -> None:
    name = draw(st.sampled_from([*case.wanted]))
    case.wanted[name] = case.wanted[name]._replace(
        dtype="F16", shape=draw(st.sampled_from([(4,), (2, 4)]))
    )


def one_not_stored(draw: st.DrawFn, case: Case) -> None:
    del case.stored[draw(st.sampled_from([*case.stored]))]


def one_not_wanted(draw: st.DrawFn, case: Case) -> None:
    del case.wanted[draw(st.sampled_from([*case.wanted]))]


def one_computed(draw: st.DrawFn, case: Case) -> None:
    name = draw(st.sampled_from([*case.wanted]))
    case.wanted[name] = case.wanted[name]._replace(kind="computed")


def a_tie(draw: st.DrawFn, case: Case) -> None:
    case.ties.append(tuple(draw(st.lists(st.sampled_from([*case.wanted]), min_size=2, max_size=3))))


def an_alias(draw: st.DrawFn, case: Case) -> None:
    texts = [
        ("l.1.**", "l.9.**"),
        ("l.{i}.**", "old.{i}.**"),
        ("other.{i}.w", "l.{i}.attn.w"),
        ("l.0.attn.w", "x"),
    ]
    case.aliases.append(Alias(*draw(st.sampled_from(texts))))


def a_dtype(draw: st.DrawFn, case: Case) -> None:
    keep = ["**.norm.w", "l.1.**", "l.{i}.e.{e}.w_scale", "l.*.e.*2.w", "**.u"]
    case.asked = draw(st.sampled_from(["F16", "BF16", "F32", "auto"]))
    case.keep = tuple(draw(st.sets(st.sampled_from(keep), max_size=2)))


def what_is_allowed(draw: st.DrawFn, case: Case) -> None:
    case.waivers = Waivers(missing=("l.1.**",), dequantize=draw(st.booleans()))


def settings_by_name(draw: st.DrawFn, case: Case) -> None:
    case.by_name = True


ODD = {
    f.__name__: f
    for f in (
        an_own_type, an_own_want, one_not_stored, one_not_wanted, one_computed, a_tie, an_alias,
        a_dtype, what_is_allowed, settings_by_name,
    )
}  # fmt: skip


class Setting:
    """What a case is derived from."""

    def __init__(self, case: Case) -> None:
        tensors: dict[str, StoredTensor] = {}
        end = 0
        for name, (dtype, shape) in case.stored.items():
            begin, end = end, end + 1 + len(name)
            tensors[name] = StoredTensor(name, "model.safetensors", dtype, shape, begin, end)
        self.case = case
        self.manifest = Manifest(Path(), Path(), "safetensors", tensors, (), {})
        self.skeleton = Skeleton("test", case.wanted, {"": "Test"}, ties=tuple(case.ties))
        self.schemes = {"halves": Halves(by_name=case.by_name)}
        self.resolution: Resolution = resolve(
            [Registered(RECORD, Origin("test"))],
            Facts({}, tuple(self.manifest.families.values())),
            known=self.skeleton.wanted,
            aliases=case.aliases,
        )
        self.offers: Offers = find_offers(self.resolution, {}, self.skeleton.wanted, self.schemes)
        self.rule = DtypeRule(case.asked, tuple(map(Pattern, case.keep)), self.offers.companions)
        self.ties = tie_groups(self.skeleton, self.resolution, {})

    def derived(self) -> Derived:
        return derive(
            self.manifest, self.skeleton, self.offers, self.resolution,
            ties=self.ties, schemes=self.schemes, dtype=self.rule, waivers=self.case.waivers,
        )  # fmt: skip

    def account(self, *, by_name: bool = False) -> Account:
        judge = Judge(self.manifest, self.rule, self.schemes)
        tied = [tie.names for tie in self.ties]
        tied += [tuple(self.skeleton.wanted)] if by_name else []
        return judged_all(judge, self.skeleton, self.offers, tied)


def by_name(
    judge: Judge, skeleton: Skeleton, offers: Offers, tied: Iterable[Sequence[str]]
) -> Account:
    """Judge all by name, as what is tied is."""
    return judged_all(judge, skeleton, offers, [*tied, tuple(skeleton.wanted)])


@settings(deadline=None, max_examples=400)
@given(cases())
def test_families_judged_at_once_give_recipes_and_audit_of_names_judged_one_by_one(
    case: Case,
) -> None:
    found = Setting(case).derived()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(derive_module, "judged_all", by_name)
        expected = Setting(case).derived()
    assert found == expected
    assert [*found.audit.stored] == [*expected.audit.stored]


@settings(deadline=None, max_examples=200)
@given(cases())
def test_what_is_offered_for_each_name_is_the_same_either_way(case: Case) -> None:
    found, expected = Setting(case).account(), Setting(case).account(by_name=True)
    event("some wholes" if found.wholes else "no whole")
    assert not expected.wholes
    assert [*found.each] == [*expected.judged]
    for name, one in found.each.items():
        other = expected.judged[name]
        assert one.offer.name == name
        assert (one.offer.logical.name, one.offer.member) == (
            other.offer.logical.name,
            other.offer.member,
        )
        assert one[1:] == other[1:]
    assert found.used.names == expected.used.names
    assert {*found.rivals} == {*expected.rivals}


@settings(deadline=None, max_examples=100)
@given(cases())
def test_bytes_of_a_model_are_those_of_each_of_its_tensors(case: Case) -> None:
    setting = Setting(case)
    found = setting.derived()
    tree = ModelTree(setting.skeleton, found.recipes, found.aliases, ()).whole
    made = {name: r.type for r in found.recipes for name in r.names()}
    expected = {
        name: tensor if (t := made.get(name)) is None else tensor._replace(dtype=str(t.dtype))
        for name, tensor in case.wanted.items()
        if name not in found.aliases
    }
    assert [*tree.sizes.items()] == [(name, t.nbytes) for name, t in expected.items()]
    assert tree.computed == {n for n, t in case.wanted.items() if t.kind == "computed"}
    assert tree.buffers == {n for n, t in case.wanted.items() if t.kind != "parameter"}


def of(stored: Iterable[str], wanted: Iterable[str], **asked: Any) -> Setting:
    types = {
        name: TensorType(dtype, shape)
        for part in stored
        for text, dtype, shape in STORED[part]
        for name in layers(text)
    }
    tensors: dict[str, ModelTensor] = {}
    for part in wanted:
        for text, shape in WANTED[part]:
            tensors |= wanted_as(text, shape, "F32", "parameter")
    return Setting(Case(types, tensors, **asked))


def test_what_is_alike_is_judged_by_family() -> None:
    account = of(["plain", "experts"], ["plain", "stacked"]).account()
    assert {whole.family.template for whole in account.wholes} == {
        "l.{0}.attn.w", "l.{0}.norm.w", "l.{0}.all",
    }  # fmt: skip
    assert not account.apart
    assert {*account.used.families} == {
        "l.{0}.attn.w",
        "l.{0}.norm.w",
        "l.{0}.e.{1}.w",
        "l.{0}.e.{1}.u",
    }
    account = of(["packed"], ["codes"], asked="F16").account()
    assert len(account.wholes) == 2
    account = of(["renamed"], ["plain"]).account()
    assert len(account.wholes) == 2


@pytest.mark.parametrize("odd", ["type", "want", "lack", "tie", "rival", "keep"])
def test_one_odd_member_has_its_family_judged_by_name_and_no_other(odd: str) -> None:
    name = "l.1.attn.w"
    setting = of(["plain"], ["plain"])
    case = setting.case
    if odd == "type":
        case.stored[name] = TensorType("F16", (2, 4))
    if odd == "want":
        case.wanted[name] = ModelTensor(name, "BF16", (2, 4))
    if odd == "lack":
        del case.stored[name]
    if odd == "tie":
        case.ties = [(name, "l.2.attn.w")]
    if odd == "rival":
        case.stored["old.1.attn.w"] = TensorType("BF16", (2, 4))
    if odd == "keep":
        case.asked, case.keep = "F16", ("l.1.attn.w",)
    account = Setting(case).account()
    assert [whole.family.template for whole in account.wholes] == ["l.{0}.norm.w"]
    assert [*account.apart] == layers("l.{i}.attn.w")
