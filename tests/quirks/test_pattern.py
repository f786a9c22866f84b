"""Patterns: anchored at both ends, equal on names and on templates, faults told at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.quirks.family import group, indices_of, template_of
from modelquirks.quirks.pattern import Pattern, PatternError, rename

relaxed = settings(deadline=None)

literals = st.sampled_from(["a", "b", "layers", "w1", "0", "1", "11", "01"])
names = st.lists(literals, min_size=1, max_size=6).map(".".join)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Draw a pattern with at most one ``**``: with two, several readings of a name can fit."""
    segments = draw(
        st.lists(st.one_of(literals, st.sampled_from(["*", "{}"])), max_size=5).filter(
            lambda listed: listed.count("*") < 4  # with the ``**`` no more than a pattern may have
        )
    )
    for number, segment in enumerate(segments):
        if segment == "{}":
            segments[number] = f"{{x{number}}}"
    if draw(st.booleans()) or not segments:
        segments.insert(draw(st.integers(0, len(segments))), "**")
    return ".".join(segments)


@relaxed
@given(names, names)
def test_a_pattern_without_holes_fits_its_own_name_only(text: str, name: str) -> None:
    assert (Pattern(text).match(name) is not None) == (text == name)


@relaxed
@given(patterns(), st.lists(names, min_size=1, max_size=6))
def test_a_family_is_renamed_as_its_members_are(text: str, listed: list[str]) -> None:
    """One match on the template says for each member what a match on its name would say."""
    source, target = Pattern(text), Pattern(f"new.{text}.end")
    for template, family in group(listed).items():
        renamed = rename(source, target, template)
        for name, member in zip(family.names, family.members, strict=True):
            alone = rename(source, target, name)
            if renamed is None:
                assert alone is None
                continue
            new, fixed = renamed
            chosen = all(member[slot] == index for slot, index in fixed.items())
            assert (alone is not None) == chosen
            if alone is not None:
                assert new.format(*member) == alone[0]


@relaxed
@given(patterns(), st.data())
def test_a_name_made_from_a_pattern_fits_and_comes_back(text: str, data: st.DataObject) -> None:
    parts: list[str] = []
    for segment in text.split("."):
        if segment == "**":
            parts += data.draw(st.lists(literals, max_size=3))
        elif segment == "*":
            parts.append(data.draw(literals))
        else:
            parts.append(str(data.draw(st.integers(0, 99))) if segment[0] == "{" else segment)
    name = ".".join(parts or ["a"])
    binding = Pattern(text).match(name)
    assert binding is not None
    assert Pattern(text).fill(binding) == name


@relaxed
@given(st.integers(0, 10**9 - 1), st.lists(literals, max_size=3))
def test_a_prefix_is_renamed_there_and_back(layer: int, rest: list[str]) -> None:
    stored, model = Pattern("transformer.h.{i}.**"), Pattern("model.layers.{i}.**")
    name = ".".join(["transformer.h", str(layer), *rest])
    renamed = rename(stored, model, name)
    assert renamed is not None
    assert renamed[0] == ".".join(["model.layers", str(layer), *rest])
    back = rename(model, stored, renamed[0])
    assert back is not None
    assert back[0] == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("layers.1", "layers.11"),
        ("layers.1.**", "layers.11.w"),
        ("layers.{i}", "layers.1x"),
        ("layers.{i}", "model.layers.1"),
        ("layers.{i}", "layers.1.w"),
        ("layers.{i}", "layers.01"),
        ("layers.{i}", "layers.1234567890"),
        ("layers.{i}", "layers.٣"),
        ("a.*", "a.b.c"),
        ("a.*", "a"),
        ("a.**", "ab"),
        ("**.norm", "xnorm"),
        ("a.b", "axb"),
        ("expert_{e}", "expert_x"),
        ("block.01", "block.{0}"),
    ],
)
def test_a_pattern_claims_no_more_than_it_says(text: str, name: str) -> None:
    assert Pattern(text).match(name) is None


@pytest.mark.parametrize(
    ("text", "name", "index", "wild"),
    [
        ("**", "a.b", {}, ("a.b",)),
        ("a.**", "a", {}, ("",)),
        ("**.a", "a", {}, ("",)),
        ("a.**.b", "a.b", {}, ("",)),
        ("a.**.b", "a.x.y.b", {}, ("x.y",)),
        ("**.mlp.**", "x.y.mlp.w", {}, ("x.y", "w")),
        ("a.*_proj", "a.q_proj", {}, ("q",)),
        ("e_{x}.w{y}", "e_3.w1", {"x": "3", "y": "1"}, ()),
        ("l.{x}.**", "l.{0}.e.{1}", {"x": "{0}"}, ("e.{1}",)),
        ("a/{x}/b", "a/{0}/b", {"x": "{0}"}, ()),
    ],
)
def test_holes_stand_for(
    text: str, name: str, index: dict[str, str], wild: tuple[str, ...]
) -> None:
    binding = Pattern(text).match(name)
    assert binding is not None
    assert (dict(binding.index), binding.wild, dict(binding.fixed)) == (index, wild, {})


def test_a_literal_index_within_a_segment_chooses_members_too() -> None:
    """A slash and a colon part indices as the dot does, so that rank 0 can be named."""
    for text, name, fixed in (
        ("norm.weight/0", "norm.weight/{0}", {0: 0}),
        ("l.{l}.w/0:2", "l.{0}.w/{1}:{2}", {1: 0, 2: 2}),
    ):
        binding = Pattern(text).match(name)
        assert binding is not None and binding.fixed == fixed
    assert Pattern("norm.weight/0").match("norm.weight/0") is not None
    for text in ("norm.weight/01", "norm.weight/1", "norm.weight0"):
        assert Pattern("norm.weight/0").match(text) is None
        assert Pattern(text).match("norm.weight/0") is None
    assert Pattern("w0").match("w{0}") is None


def test_a_literal_index_chooses_members_of_a_family() -> None:
    renamed = rename(Pattern("{l}.proj.1.w"), Pattern("{l}.gate.w"), "{0}.proj.{1}.w")
    assert renamed == ("{0}.gate.w", {1: 1})


@pytest.mark.parametrize(
    ("name", "new"), [("_orig_mod.a", "a"), ("a._orig_mod", "a"), ("a._orig_mod.b", "a.b")]
)
def test_a_wrapper_is_taken_out_wherever_it_is(name: str, new: str) -> None:
    assert rename(Pattern("**._orig_mod.**"), Pattern("**.**"), name) == (new, {})


def test_braces_of_a_real_name_are_no_slot() -> None:
    template = template_of("a.{0}.b")
    assert Pattern("a.{x}.b").match(template) is None
    renamed = rename(Pattern("a.*.b"), Pattern("c.*"), template)
    assert renamed is not None
    assert renamed[0].format(*next(indices_of(["a.{0}.b"]))) == "c.{0}"


def test_holes_are_listed_in_order() -> None:
    pattern = Pattern("**.layers.{layer}.*.{expert}.w")
    assert pattern.holes == ("**", "{layer}", "*", "{expert}")
    assert pattern.placeholders == ("layer", "expert")
    assert pattern.wildcards == ("**", "*")
    assert str(pattern) == pattern.text


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["empty"]),
        (" a", ["blanks around it"]),
        ("a..b", ["an empty segment"]),
        (".a", ["an empty segment"]),
        ("a.x**", ["'**' must be a whole segment, not part of 'x**'"]),
        ("a.{X}", ["placeholder {X} is not a lower-case identifier"]),
        ("a.{}", ["placeholder {} is not"]),
        ("{a}.{a}", ["placeholder {a} is used twice"]),
        ("a.{b", ["unbalanced braces"]),
        ("a.{b}{c}", ["two holes touch in '{b}{c}'"]),
        ("a.*{c}", ["two holes touch in '*{c}'"]),
        (
            "a..{B}.x**.{c}.{c}",
            ["an empty segment", "{B}", "'x**'", "{c} is used twice"],
        ),
    ],
)
def test_every_fault_of_a_pattern_is_told_at_once(text: str, faults: list[str]) -> None:
    with pytest.raises(PatternError) as raised:
        Pattern(text)
    message = str(raised.value)
    assert message.startswith(f"pattern {text!r}: ")
    assert [fault for fault in faults if fault not in message] == []
