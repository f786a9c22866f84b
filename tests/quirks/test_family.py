"""Families: what is an index, and that a template with its indices is the name again."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.quirks.family import group, indices_of, show, template_of

relaxed = settings(deadline=None)

pieces = st.sampled_from(
    ["a", "w1", "0", "7", "12", "007", "1234567890", "", "{", "}", "{}", "{0}", "{{1}}", "\n", "٣"]
)
names = st.lists(
    st.tuples(pieces, st.sampled_from([".", "/", ":", "_"])), min_size=1, max_size=7
).map(lambda parts: "".join(piece + separator for piece, separator in parts)[:-1])


def starred(name: str) -> str:
    """Read the definition of an index word for word, to compare with."""
    parts = re.split(r"([./:\n])", name)
    return "".join("*" if re.fullmatch("0|[1-9][0-9]{0,8}", part) else part for part in parts)


@relaxed
@given(st.lists(names, max_size=8))
def test_a_template_with_its_indices_is_the_name(listed: list[str]) -> None:
    families = group(listed)
    for template, family in families.items():
        assert family.template == template
        assert family.names == tuple(n for n in listed if template_of(n) == template)
        for name, member in zip(family.names, family.members, strict=True):
            assert template.format(*member) == name
            assert len(member) == family.n_slots
    assert sum(map(len, families.values())) == len(listed)


@relaxed
@given(names)
def test_a_template_is_shown_with_a_star_for_each_index(name: str) -> None:
    assert show(template_of(name)) == starred(name)


@relaxed
@given(names)
def test_indices_are_the_integers_in_the_name(name: str) -> None:
    (indices,) = indices_of([name])
    assert len(indices) == starred(name).count("*")


def test_names_that_differ_in_anything_but_indices_are_apart() -> None:
    families = group(["h.0.w", "h.10.w", "h.x.w", "h.0.b", "h.01.w", "g.0.w"])
    assert [(t, len(f)) for t, f in families.items()] == [
        ("h.{0}.w", 2),
        ("h.x.w", 1),
        ("h.{0}.b", 1),
        ("h.01.w", 1),
        ("g.{0}.w", 1),
    ]


def test_indices_are_found_between_all_three_separators() -> None:
    assert template_of("0:a/3/1.2") == "{0}:a/{1}/{2}.{3}"


def test_a_number_inside_a_segment_is_no_index() -> None:
    assert template_of("w1.expert_3.x2y") == "w1.expert_3.x2y"


def test_numbers_of_more_than_nine_digits_are_text() -> None:
    assert template_of("a.999999999") == "a.{0}"
    assert template_of("a.1000000000") == "a.1000000000"


def test_digits_of_other_scripts_are_text() -> None:
    assert template_of("layers.٣.w") == "layers.٣.w"


def test_nothing_has_no_families() -> None:
    assert group([]) == {}


def test_families_whose_names_have_the_same_digits_have_members_of_their_own() -> None:
    """Found by hypothesis: the digits of ``0`` and ``1`` are those of ``0.w1``."""
    families = group(["0", "0.w1", "1"])
    assert families["{0}"].members == ((0,), (1,))
    assert families["{0}.w1"].members == ((0,),)
