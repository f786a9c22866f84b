"""Recipes: types agree with what numpy makes, misfits are told, the plan file keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.recipe import (
    Cast,
    Chunk,
    Concat,
    Dequantize,
    Interleave,
    Join,
    Node,
    Opaque,
    Part,
    Permute,
    RecipeError,
    Reshape,
    Scheme,
    Select,
    Slice,
    Source,
    Split,
    Stack,
    TensorType,
    Transpose,
    View,
    children,
    mapped,
    sources,
)
from modelquirks.quirks.recipe_json import from_json, to_json

relaxed = settings(deadline=None)

Shape = tuple[int, ...]
Array = Any
shapes = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


class Nibbles(Scheme):
    """A scheme of two values in a byte, to have one."""

    name = "nibbles"
    roles: tuple[str, ...] = ("blocks", "scales")

    def infer(self, parts: Mapping[str, TensorType], settings: Any) -> TensorType:
        shape = parts["blocks"].shape
        assert shape is not None
        return TensorType("BF16", (*shape[:-1], shape[-1] * 2))

    def regions(self, region: Any, parts: Any, settings: Any) -> Any:
        raise NotImplementedError

    def evaluate(self, parts: Any, region: Any, dtype: Any, settings: Any) -> Any:
        raise NotImplementedError


SCHEMES: dict[str, Scheme] = {"nibbles": Nibbles()}


def lookup(**types: Shape | None) -> Callable[[str], TensorType]:
    return {name: TensorType("F32", shape) for name, shape in types.items()}.__getitem__


_KINDS = [Cast, Chunk, Concat, Interleave, Join, Permute, Reshape, Select, Stack, Slice, Transpose]


@st.composite
def made(draw: st.DrawFn, depth: int = 3) -> tuple[Node, Array, dict[str, Shape]]:
    """Draw a recipe that fits, what numpy makes of it, and the shapes of its sources."""
    if depth == 0 or draw(st.booleans()):
        shape = draw(shapes)
        return Source("s"), np.zeros(shape), {"s": shape}
    node, array, known = draw(made(depth - 1))
    rank = array.ndim
    dim = draw(st.integers(0, rank - 1))
    kind = draw(st.sampled_from(_KINDS))
    if kind is Permute:
        dims = tuple(draw(st.permutations(range(rank))))
        return Permute(node, dims), array.transpose(dims), known
    if kind is Reshape:
        sizes = (-1, array.shape[-1]) if array.size else (*array.shape, 1)
        return Reshape(node, sizes), array.reshape(sizes), known
    if kind is Join:
        count = draw(st.integers(1, 3))
        return Join(node, "e", dim, count), np.concatenate([array] * count, dim), known
    if kind is Chunk:
        count = draw(st.sampled_from([n for n in (1, 2, 3) if array.shape[dim] % n == 0]))
        part = draw(st.integers(0, count - 1))
        return Chunk(node, dim, count, part), np.split(array, count, dim)[part], known
    if kind is Select and rank > 1 and array.shape[dim]:
        return Select(node, "0", dim), array.take(0, dim), known
    if kind is Select:
        return node, array, known
    if kind is Cast:
        return Cast(node, "BF16"), array, known
    if kind is Stack:
        count = draw(st.integers(1, 3))
        return Stack(node, "e", count), np.stack([array] * count), known
    if kind is Slice:
        start = draw(st.integers(0, array.shape[dim]))
        stop = draw(st.integers(start, array.shape[dim]))
        return Slice(node, dim, start, stop), array.take(range(start, stop), dim), known
    if kind is Transpose:
        other = draw(st.integers(0, rank - 1))
        return Transpose(node, dim, other), array.swapaxes(dim, other), known
    if kind is Interleave:
        woven = np.stack([array, array], dim + 1)
        shape = (*array.shape[:dim], 2 * array.shape[dim], *array.shape[dim + 1 :])
        return Interleave((node, node), dim), woven.reshape(shape), known
    extra = (*array.shape[:dim], draw(st.integers(0, 3)), *array.shape[dim + 1 :])
    name = f"extra{depth}"
    joined = np.concatenate([array, np.zeros(extra)], dim)
    # Of one dtype on both sides, whatever casts are below.
    parts = (Cast(node, "F16"), Cast(Source(name), "F16"))
    return Concat(parts, dim), joined, {**known, name: extra}


def _above(below: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(below, max_size=3).map(tuple)
    numbers = st.lists(_numbers, max_size=3).map(tuple)
    parts = st.lists(st.builds(Part, _texts, below), max_size=3).map(tuple)
    sizes = st.lists(st.one_of(_numbers, st.just("a*b")), max_size=3).map(tuple)
    return st.one_of(
        st.builds(Cast, below, st.sampled_from(["BF16", "F32"])),
        st.builds(Concat, several, _numbers),
        st.builds(Interleave, several, _numbers),
        st.builds(Stack, below, _texts, st.one_of(st.none(), _numbers)),
        st.builds(Select, below, _texts, _numbers),
        st.builds(Chunk, below, _numbers, _numbers, _numbers),
        st.builds(Slice, below, _numbers, _numbers, _numbers),
        st.builds(Split, below, _numbers, sizes, _numbers),
        st.builds(Transpose, below, _numbers, _numbers),
        st.builds(Permute, below, numbers),
        st.builds(Reshape, below, numbers),
        st.builds(View, below, sizes),
        st.builds(Join, below, _texts, _numbers, st.one_of(st.none(), _numbers)),
        st.builds(Dequantize, _texts, parts, _settings),
        st.builds(Opaque, _texts, several, st.just("F32"), numbers, _settings),
    )


_settings = st.dictionaries(
    st.text(max_size=4), st.one_of(st.integers(), st.booleans(), st.text(max_size=3)), max_size=2
).map(lambda found: tuple(sorted(found.items())))
_texts = st.text(max_size=4)
_numbers = st.integers(0, 9)
nodes: st.SearchStrategy[Node] = st.recursive(st.builds(Source, _texts), _above, max_leaves=6)
"""Any recipe, whether it fits or not."""


@relaxed
@given(made())
def test_a_recipe_has_the_shape_that_numpy_makes(
    case: tuple[Node, Array, dict[str, Shape]],
) -> None:
    node, array, known = case
    assert infer(node, lookup(**known), {}).shape == array.shape


@relaxed
@given(st.lists(shapes, min_size=1, max_size=3), st.integers(0, 3))
def test_parts_are_joined_exactly_where_numpy_joins_them(listed: list[Shape], dim: int) -> None:
    named = {f"s{number}": shape for number, shape in enumerate(listed)}
    node = Concat(tuple(map(Source, named)), dim)
    try:
        expected = np.concatenate([np.zeros(shape) for shape in listed], dim).shape
    except ValueError:  # also numpy's AxisError
        with pytest.raises(RecipeError):
            infer(node, lookup(**named), {})
    else:
        assert infer(node, lookup(**named), {}).shape == expected


@relaxed
@given(nodes)
def test_the_plan_file_gives_the_recipe_back(node: Node) -> None:
    assert from_json(json.loads(json.dumps(to_json(node)))) == node


@relaxed
@given(nodes)
def test_mapping_reaches_every_node_once_and_changes_no_more_than_told(node: Node) -> None:
    seen: list[Node] = []

    def see(one: Node) -> Node:
        seen.append(one)
        return Source("new." + one.name) if isinstance(one, Source) else one

    renamed = mapped(node, see)
    assert [s.name for s in sources(renamed)] == [f"new.{s.name}" for s in sources(node)]
    assert mapped(node, lambda one: one) == node

    def count(one: Node) -> int:
        return 1 + sum(map(count, children(one)))

    assert len(seen) == count(node)


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (Concat((Source("a"), Source("b"))), "shapes [2, 3], [4, 5] cannot be joined"),
        (Concat((Source("a"), Cast(Source("a"), "BF16"))), "different dtypes: BF16, F32"),
        (Concat(()), "nothing to join"),
        (Interleave((Source("a"), Source("c"))), "interleaved parts are not alike"),
        (Concat((Source("a"),), 2), "shape [2, 3] has no dimension 2"),
        (Stack(Source("a"), "e"), "the number of tensors to stack is not known"),
        (Stack(Source("a"), "e", 0), "nothing to stack"),
        (Slice(Source("a"), 0, 1, 3), "rows 1 to 3 are outside of dimension 0 of F32 [2, 3]"),
        (Slice(Source("a"), 0, 2, 1), "rows 2 to 1 are outside"),
        (Transpose(Source("a"), 0, 2), "shape [2, 3] has no dimension 2"),
        (Split(Source("a"), 0, (1, "n"), 0), "config.json does not give them"),
        (View(Source("a"), (-1, "n")), "sizes of the view are not known"),
        (
            Dequantize("other", (Part("blocks", Source("a")),)),
            "stored packed as 'other' (blocks), and no plugin knows",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_says_why(node: Node, sentence: str) -> None:
    with pytest.raises(RecipeError) as raised:
        infer(node, lookup(a=(2, 3), b=(4, 5), c=(4, 3)), SCHEMES)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "node",
    [
        Concat((Source("known"), Source("unknown"))),
        Interleave((Source("known"), Source("unknown"))),
        Stack(Source("unknown"), "e", 3),
        Slice(Source("unknown"), 5, 0, 9),
        Transpose(Source("unknown"), 4, 7),
        Dequantize("nibbles", (Part("blocks", Source("unknown")),)),
    ],
)
def test_what_a_bare_index_does_not_tell_is_unknown_and_no_fault(node: Node) -> None:
    types = {"known": TensorType("F32", (2, 3)), "unknown": TensorType(None, None)}
    assert infer(node, types.__getitem__, SCHEMES).shape is None


def test_a_packed_weight_has_the_type_its_scheme_says() -> None:
    node = Dequantize("nibbles", (Part("blocks", Source("b")), Part("scales", Source("s"))))
    assert infer(node, lookup(b=(8, 16), s=(8, 1)), SCHEMES) == TensorType("BF16", (8, 32))


def test_a_stack_lists_its_source_once() -> None:
    node = Concat((Stack(Source("e.{e}.w1"), "e", 8), Source("w2")))
    assert [leaf.name for leaf in sources(node)] == ["e.{e}.w1", "w2"]


@pytest.mark.parametrize(
    "data",
    [
        None,
        "source",
        [],
        {},
        {"op": "explode"},
        {"op": ["source"]},
        {"op": "source"},
        {"op": "source", "name": 3},
        {"op": "source", "name": "a", "more": 1},
        {"op": "cast", "of": None, "dtype": "BF16"},
        {"op": "cast", "of": [{"op": "source", "name": "a"}], "dtype": "BF16"},
        {"op": "concat", "of": {"op": "source", "name": "a"}, "dim": 0},
        {"op": "concat", "of": [], "dim": "0"},
        {"op": "stack", "of": {"op": "source", "name": "a"}, "over": "e", "count": "3"},
        {"op": "dequantize", "scheme": "x", "parts": [{"role": "blocks"}]},
    ],
)
def test_data_that_is_no_recipe_is_refused(data: Any) -> None:
    with pytest.raises(RecipeError, match=r"recipe"):
        from_json(data)


def test_types_are_shown_as_people_write_them() -> None:
    assert str(TensorType("BF16", (32, 128))) == "BF16 [32, 128]"
    assert str(TensorType(None, None)) == "? [?]"
