"""Blocks: what is told of one for all that are alike is what their names would tell."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.quirks.block import (
    Block,
    Tails,
    all_different,
    blocks_in,
    cut_up,
    heads_of,
    names_of,
)
from modelquirks.quirks.family import distinct, group, grouped, raw_templates, templates_of, uneven

relaxed = settings(deadline=None)

segments = st.sampled_from(["a", "w1", "0", "7", "12", "007", "", "{", "{0}", "x/3", "٣", "\n"])
tails = st.lists(
    st.lists(segments, min_size=1, max_size=3).map(".".join), min_size=1, max_size=5
).map(Tails)
heads = st.sampled_from(
    ["", "h.0.", "h.1.", "h.12.", "h.1.x.7.", "h.{0}.3.", "3.", "h.07.", "g/1."]
)


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    kinds = draw(st.lists(tails, min_size=1, max_size=3))
    pairs = st.tuples(heads, st.sampled_from(kinds))
    return [Block(*pair) for pair in draw(st.lists(pairs, max_size=6))]


@relaxed
@given(blocks())
def test_names_that_occur_twice_are_found(found: list[Block]) -> None:
    names = [*names_of(found)]
    assert all_different(found) == (len({*names}) == len(names))


@relaxed
@given(blocks())
def test_templates_are_those_of_each_name_and_one_object_where_blocks_are_alike(
    found: list[Block],
) -> None:
    templates = templates_of(found)

    assert templates == [raw_templates(block.names) for block in found]
    one = Tails(["a", "b.3"])
    first, second, other = templates_of([Block("h.1.", one), Block("h.12.", one), Block("", one)])
    assert first is second
    assert first is not other


@relaxed
@given(blocks())
def test_families_of_blocks_are_those_of_their_names(found: list[Block]) -> None:
    families = grouped([block.names for block in found], templates_of(found))

    expected = group(names_of(found))
    assert [*families.items()] == [*expected.items()]
    assert [f.members for f in families.values()] == [f.members for f in expected.values()]


@relaxed
@given(blocks(), st.data())
def test_what_repeats_may_be_left_out_where_values_are_compared(
    found: list[Block], data: st.DataObject
) -> None:
    templates = templates_of(found)
    keys = [raw for raws in templates for raw in raws]
    values = [data.draw(st.integers(0, 1)) for _ in keys]

    fewer = distinct(templates, values)

    assert {*zip(*fewer, strict=True)} == {*zip(keys, values, strict=True)}
    assert uneven(*fewer) == uneven(keys, values)


def test_more_values_than_templates_are_an_error() -> None:
    with pytest.raises(ValueError, match="more values"):
        distinct([["w"]], [1, 2])


@relaxed
@given(blocks(), st.lists(segments, max_size=5).map(".".join))
def test_a_name_is_found_where_it_is(found: list[Block], name: str) -> None:
    for block in found:
        for each in (*block.names, name):
            place = block.place(each)
            assert (place is None) == (each not in block.names)
            assert place is None or block.names[place] == each


experts = [f"mlp.experts.{n}.{kind}" for n in range(9) for kind in ("w1", "w2")]
layer = st.sampled_from(
    [experts, ["norm", *experts], [*experts[:-1], "w3"], experts[:5], ["a\nb"] * 17]
)


@relaxed
@given(st.lists(st.tuples(heads, layer), max_size=7), st.lists(segments, max_size=3))
def test_names_are_cut_into_blocks_and_none_is_lost(
    layers: list[tuple[str, list[str]]], more: list[str]
) -> None:
    names = [f"{head}{tail}" for head, tails in layers for tail in tails] + more

    for found in (blocks_in(names), cut_up([Block("", Tails(names))])):
        assert [*names_of(found)] == names
        assert sum(map(len, found)) == len(names)


def test_layers_are_alike_whatever_is_between_them() -> None:
    layers = [[f"h.{number}.{tail}" for tail in experts] for number in range(12)]
    names = ["embed", *layers[0], "norm", *layers[1], *layers[2], *layers[10][:4], *layers[11]]

    found = blocks_in(names)

    assert [(block.head, len(block)) for block in found] == [
        ("", 1), ("h.0.", 18), ("", 1), ("h.1.", 18), ("h.2.", 18), ("", 4), ("h.11.", 18),
    ]  # fmt: skip
    assert len({block.tails for block in found if block.head}) == 1


def test_names_with_breaks_are_not_taken_for_others() -> None:
    """Of the same text when joined, and as many."""
    one = [*experts[:-2], "a\nh.2.b", "c"]
    other = [*experts[:-2], "a", "b\nh.2.c"]
    names = [f"h.{number}.{tail}" for number, tails in ((1, one), (2, other)) for tail in tails]

    assert [*names_of(blocks_in(names))] == names


def test_names_that_are_made_to_be_compared_in_vain_take_little_time() -> None:
    """From each a block seems to go on that is as long as the first, and ends as that does."""
    n = 200_000
    first = [*["h.0.v"] * (n - 1), "h.0.w"]
    begins, ends = ([f"h.{number}.{tail}" for number in range(1, n)] for tail in "vw")
    names = [*first, *begins, *ends]
    assert names[2 * n - 1 + 5] == "h.6.w"
    assert names[n + 5] == "h.6.v"
    started = time.process_time()

    found = blocks_in(names)

    assert time.process_time() - started < 5
    assert [*names_of(found)] == names


def test_many_names_in_no_order_by_layer_are_one_block() -> None:
    names = [f"h.{n}.{kind}" for kind in ("a", "b") for n in range(20_000)]

    assert [block.head for block in blocks_in(names)] == [""]


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("h.1.w", "h.2.w", ("h.1.", "h.2.")),
        ("1.w", "22.w", ("1.", "22.")),
        ("h.1.x.7.w", "h.1.x.8.w", ("h.1.x.7.", "h.1.x.8.")),
        ("h.1.w", "h.1.w", None),
        ("h.1.w", "h.2.b", None),
        ("h.1.x.1.w", "h.2.x.2.w", None),
        ("h.01.w", "h.02.w", None),
        ("h.a.w", "h.b.w", None),
        ("h.٣.w", "h.٤.w", None),
        ("h.1", "h.2", None),
        ("h.1.w", "h.2", None),
        ("h.1\n.w", "h.2\n.w", None),
    ],
)
def test_two_names_begin_alike_up_to_one_index_in_which_they_differ(
    name: str, other: str, expected: tuple[str, str] | None
) -> None:
    assert heads_of(name, other) == expected
    assert heads_of(other, name) == (None if expected is None else expected[::-1])
