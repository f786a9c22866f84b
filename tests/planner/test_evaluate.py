import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelquirks.planner.dtypes import from_torch, to_torch
from modelquirks.planner.execution import evaluate as evaluate_module
from modelquirks.planner.execution.evaluate import EvaluationError, evaluate
from modelquirks.quirks.recipe import (
    Cast,
    Chunk,
    Concat,
    Dequantize,
    Interleave,
    Join,
    Merge,
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
)

Region = tuple[tuple[int, int], ...]
FLOATS = ("F32", "BF16", "F16")


class PerRow(Scheme):
    """A small packing: int8 codes, one float32 scale for each row of the first dimension."""

    name = "per_row"
    roles: tuple[str, ...] = ("codes", "scales")

    def infer(self, parts: Mapping[str, TensorType], settings: Any) -> TensorType:
        shape = parts["codes"].shape
        assert shape is not None
        if parts["scales"].shape != shape[:1]:
            raise RecipeError(f"scales {parts['scales']} do not fit codes {parts['codes']}")
        return TensorType("BF16", shape)

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Any
    ) -> Mapping[str, Region]:
        return {"codes": region, "scales": region[:1]}

    def evaluate(self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Any) -> Any:
        codes, scales = parts["codes"], parts["scales"]
        return (codes.float() * scales.reshape(-1, *[1] * (codes.dim() - 1))).to(dtype)


class Sum(Scheme):
    """The sum of two tensors, as code that nothing is known of."""

    name = "sum"
    roles: tuple[str, ...] = ("0", "1")

    def infer(self, parts: Mapping[str, TensorType], settings: Any) -> TensorType:
        raise AssertionError("the node says its type itself")

    def regions(self, region: Region, parts: Any, settings: Any) -> Mapping[str, Region]:
        raise AssertionError("the node needs all of its sources")

    def evaluate(self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Any) -> Any:
        total = (parts["0"] + parts["1"]) * settings["times"]
        return total.to(dtype)[tuple(slice(a, b) for a, b in region)]


SCHEMES: dict[str, Scheme] = {"per_row": PerRow(), "sum": Sum()}


@dataclass
class Stored:
    """A checkpoint in a dict that counts what is read of it."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    n_read: int = 0

    def read(self, name: str, region: Region | None) -> torch.Tensor:
        tensor = self.tensors[name]
        for dim, (start, stop) in enumerate(region or ()):
            assert 0 <= start <= stop <= tensor.shape[dim]
            tensor = tensor.narrow(dim, start, stop - start)
        self.n_read += tensor.numel()
        return tensor

    def types(self, name: str) -> TensorType:
        tensor = self.tensors[name]
        return TensorType(from_torch(tensor.dtype), tuple(tensor.shape))

    def make(
        self,
        node: Node,
        env: Mapping[str, int] | None = None,
        region: Region | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        return evaluate(
            node,
            env or {},
            read=self.read,
            types=self.types,
            schemes=SCHEMES,
            region=region,
            dtype=dtype,
        )


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape)).reshape(shape).to(dtype)


def plain(node: Node, env: Mapping[str, int], stored: Stored) -> torch.Tensor:
    """Evaluate by torch's own functions on whole tensors."""
    match node:
        case Source(name):
            return stored.tensors[name.format_map(dict(env))]
        case Cast(of, dtype):
            return plain(of, env, stored).to(to_torch(dtype))
        case Concat(of, dim):
            return torch.cat([plain(part, env, stored) for part in of], dim)
        case Interleave(of, dim):
            parts = [plain(part, env, stored) for part in of]
            return torch.stack(parts, dim + 1).flatten(dim, dim + 1)
        case Stack(of, over, count):
            return torch.stack([plain(of, {**env, over: i}, stored) for i in range(count or 0)])
        case Select(of, index, dim):
            return plain(of, env, stored).select(dim, int(index.format_map(dict(env))))
        case Chunk(of, dim, count, part):
            return plain(of, env, stored).chunk(count, dim)[part]
        case Slice(of, dim, start, stop):
            return plain(of, env, stored).narrow(dim, start, stop - start)
        case Transpose(of, dim0, dim1):
            return plain(of, env, stored).transpose(dim0, dim1)
        case Dequantize(_, parts):
            tensors = {part.role: plain(part.of, env, stored) for part in parts}
            return PerRow().evaluate(tensors, (), torch.bfloat16, {})  # type: ignore[no-any-return]
        case Join(of, over, dim, count):
            return torch.cat([plain(of, {**env, over: i}, stored) for i in range(count or 0)], dim)
        case Permute(of, dims):
            return plain(of, env, stored).permute(dims)
        case Reshape(of, shape):
            return plain(of, env, stored).reshape(shape)
        case Opaque(_, of):
            one, other = (plain(part, env, stored) for part in of)
            return (one + other) * 3
        case Split() | View() | Merge():
            raise AssertionError


@dataclass
class Maker:
    """Draws a recipe that gives a wanted dtype and shape, and stores its sources."""

    draw: Any
    stored: Stored
    counts: dict[str, int] = field(default_factory=dict)
    n: int = 0

    def node(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        kinds = ["source"]
        if depth:
            kinds += ["cast"] if dtype in FLOATS else []
            kinds += ["select"]
            kinds += ["chunk"] if math.prod(shape) else []
            kinds += ["slice", "concat", "interleave", "transpose"] if shape else []
            kinds += ["stack"] if shape and shape[0] > 0 else []
            kinds += ["dequantize"] if shape and dtype == "BF16" else []
            kinds += ["join", "permute"] if shape else []
            kinds += ["reshape"] if math.prod(shape) else []
            kinds += ["opaque"] if dtype == "I64" else []
        return getattr(self, self.draw(st.sampled_from(kinds)))(dtype, shape, depth - 1)  # type: ignore[no-any-return]

    def source(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        name = f"t{self.n}" + "".join(f".{{{variable}}}" for variable in self.counts)
        self.n += 1
        for values in itertools.product(*map(range, self.counts.values())):
            env = dict(zip(self.counts, values, strict=True))
            # Small enough for every product with a scale to be exact in all dtypes.
            start = self.draw(st.integers(0, 14))
            full = numbers(*shape, dtype=torch.int64, start=start) % 15
            self.stored.tensors[name.format_map(env)] = full.to(to_torch(dtype))
        return Source(name)

    def cast(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        return Cast(self.node(self.draw(st.sampled_from(FLOATS)), shape, depth), dtype)

    def dim(self, shape: tuple[int, ...]) -> int:
        return int(self.draw(st.integers(0, len(shape) - 1)))

    def slice(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        dim = self.dim(shape)
        before, after = self.draw(st.integers(0, 3)), self.draw(st.integers(0, 3))
        size = before + shape[dim] + after
        of = self.node(dtype, (*shape[:dim], size, *shape[dim + 1 :]), depth)
        return Slice(of, dim, before, before + shape[dim])

    def select(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        dim, size = self.draw(st.integers(0, len(shape))), self.draw(st.integers(1, 3))
        of = self.node(dtype, (*shape[:dim], size, *shape[dim:]), depth)
        return Select(of, str(self.draw(st.integers(0, size - 1))), dim)

    def chunk(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        if not shape:
            return self.node(dtype, shape, depth)
        dim, count = self.dim(shape), self.draw(st.integers(1, 3))
        of = self.node(dtype, (*shape[:dim], shape[dim] * count, *shape[dim + 1 :]), depth)
        return Chunk(of, dim, count, self.draw(st.integers(0, count - 1)))

    def concat(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        dim = self.dim(shape)
        cut = self.draw(st.integers(0, shape[dim]))
        sizes = (cut, shape[dim] - cut)
        return Concat(
            tuple(self.node(dtype, (*shape[:dim], n, *shape[dim + 1 :]), depth) for n in sizes),
            dim,
        )

    def interleave(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        dim = self.dim(shape)
        n = self.draw(st.sampled_from([k for k in (1, 2, 3) if shape[dim] % k == 0]))
        inner = (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])
        return Interleave(tuple(self.node(dtype, inner, depth) for _ in range(n)), dim)

    def transpose(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        dim0, dim1 = self.dim(shape), self.dim(shape)
        inner = list(shape)
        inner[dim0], inner[dim1] = inner[dim1], inner[dim0]
        return Transpose(self.node(dtype, tuple(inner), depth), dim0, dim1)

    def stack(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        over = f"v{len(self.counts)}"
        self.counts[over] = shape[0]
        of = self.node(dtype, shape[1:], depth)
        del self.counts[over]
        return Stack(of, over, shape[0])

    def join(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        over, dim = f"v{len(self.counts)}", self.dim(shape)
        count = self.draw(st.sampled_from([k for k in (1, 2, 3) if shape[dim] % k == 0]))
        self.counts[over] = count
        of = self.node(dtype, (*shape[:dim], shape[dim] // count, *shape[dim + 1 :]), depth)
        del self.counts[over]
        return Join(of, over, dim, count)

    def permute(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        dims = tuple(self.draw(st.permutations(range(len(shape)))))
        inner = [0] * len(shape)
        for number, dim in enumerate(dims):
            inner[dim] = shape[number]
        return Permute(self.node(dtype, tuple(inner), depth), dims)

    def reshape(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        inner: list[int] = []
        left = math.prod(shape)
        for _ in range(self.draw(st.integers(0, 2))):
            inner.append(self.draw(st.sampled_from([k for k in range(1, 7) if left % k == 0])))
            left //= inner[-1]
        inner.append(left)
        free = self.draw(st.booleans()) and len(shape) > 0
        told = (-1, *shape[1:]) if free else shape
        return Reshape(self.node(dtype, tuple(inner), depth), told)

    def opaque(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        of = (self.node(dtype, shape, depth), self.node(dtype, shape, depth))
        return Opaque("sum", of, dtype, shape, (("times", 3),))

    def dequantize(self, dtype: str, shape: tuple[int, ...], depth: int) -> Node:
        codes, scales = self.node("I8", shape, depth), self.node("F32", shape[:1], depth)
        return Dequantize("per_row", (Part("codes", codes), Part("scales", scales)))


@st.composite
def recipes(draw: Any) -> tuple[Node, Stored, tuple[int, ...]]:
    stored = Stored()
    shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    dtype = draw(st.sampled_from([*FLOATS, "I8", "I64"]))
    return Maker(draw, stored).node(dtype, shape, 3), stored, shape


@settings(max_examples=300, deadline=None)
@given(recipe=recipes(), data=st.data())
def test_a_region_of_the_whole_is_the_evaluation_of_the_region(
    recipe: tuple[Node, Stored, tuple[int, ...]], data: st.DataObject
) -> None:
    """And both are what torch's own functions make."""
    node, stored, shape = recipe
    ends = [(data.draw(st.integers(0, n)), data.draw(st.integers(0, n))) for n in shape]
    region = tuple((min(pair), max(pair)) for pair in ends)
    expected = plain(node, {}, stored)
    whole = stored.make(node)
    assert whole.dtype == expected.dtype
    assert torch.equal(whole, expected)
    part = stored.make(node, region=region)
    assert torch.equal(part, expected[tuple(slice(a, b) for a, b in region)])


@settings(max_examples=200, deadline=None)
@given(recipe=recipes(), data=st.data())
def test_no_more_is_read_than_the_region_needs(
    recipe: tuple[Node, Stored, tuple[int, ...]], data: st.DataObject
) -> None:
    """One stored element for each element of the region, and with scales one more at most."""
    node, stored, shape = recipe
    ends = [(data.draw(st.integers(0, n)), data.draw(st.integers(0, n))) for n in shape]
    region = tuple((min(pair), max(pair)) for pair in ends)
    size = math.prod(b - a for a, b in region)
    stored.make(node, region=region)
    if "Opaque" in repr(node):
        assert stored.n_read >= size  # code needs all of its sources
    elif "Dequantize" in repr(node):
        assert stored.n_read <= 2 * max(size, max([b - a for a, b in region], default=1))
    else:
        assert stored.n_read == size


@settings(max_examples=100, deadline=None)
@given(recipe=recipes(), wanted=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_a_wanted_dtype_is_that_of_the_whole_cast_at_the_end(
    recipe: tuple[Node, Stored, tuple[int, ...]], wanted: torch.dtype
) -> None:
    node, stored, _ = recipe
    expected = plain(node, {}, stored)
    if "Dequantize" in repr(node):
        return  # schemes compute in the wanted dtype, see below
    if not expected.is_floating_point():
        with pytest.raises(EvaluationError, match="only floating-point numbers"):
            stored.make(node, dtype=wanted)
        return
    made = stored.make(node, dtype=wanted)
    assert made.dtype == wanted
    assert torch.equal(made, expected.to(wanted))


def test_a_source_is_given_as_it_was_read() -> None:
    stored = Stored({"a.3": numbers(4, 2)})
    assert stored.make(Source("a.{i}"), {"i": 3}).data_ptr() == stored.tensors["a.3"].data_ptr()


def test_rows_of_a_source_are_a_view_and_columns_a_copy() -> None:
    stored = Stored({"a": numbers(4, 2)})
    rows = stored.make(Slice(Source("a"), 0, 1, 3))
    assert rows.data_ptr() == stored.tensors["a"][1].data_ptr()
    columns = stored.make(Slice(Source("a"), 1, 1, 2))
    assert columns.is_contiguous()
    assert torch.equal(columns, stored.tensors["a"][:, 1:2])


def test_what_is_made_is_contiguous() -> None:
    """Modules view and flatten their parameters."""
    made = Stored({"a": numbers(4, 2)}).make(Transpose(Source("a")))
    assert made.is_contiguous()
    assert torch.equal(made, numbers(4, 2).T)


def test_experts_stored_one_by_one_are_stacked_with_gate_and_up_fused() -> None:
    """The recipe of Mixtral in transformers 5."""
    names = [f"layers.1.experts.{e}.{w}.weight" for e in range(3) for w in ("w1", "w3")]
    stored = Stored({name: numbers(4, 2, start=100 * i) for i, name in enumerate(names)})
    w1, w3 = (Source(f"layers.{{layer}}.experts.{{e}}.{w}.weight") for w in ("w1", "w3"))
    made = stored.make(Stack(Concat((w1, w3)), "e", 3), {"layer": 1})
    assert made.shape == (3, 8, 2)
    assert torch.equal(made[2, 4:], stored.tensors["layers.1.experts.2.w3.weight"])


def test_one_expert_of_a_stack_reads_that_expert_alone() -> None:
    stored = Stored({f"e{i}": numbers(4, 2, start=i) for i in range(8)})
    made = stored.make(Stack(Source("e{i}"), "i", 8), region=((5, 6), (0, 4), (0, 2)))
    assert torch.equal(made[0], stored.tensors["e5"])
    assert stored.n_read == 8


def test_a_packed_weight_is_computed_in_the_wanted_dtype() -> None:
    """Rounding to the packing's own dtype first would lose what float32 can hold."""
    stored = Stored(
        {"codes": torch.tensor([[3], [7]], dtype=torch.int8), "scales": torch.tensor([1.001, 1.1])}
    )
    node = Dequantize("per_row", (Part("codes", Source("codes")), Part("scales", Source("scales"))))
    assert stored.make(node).dtype == torch.bfloat16
    exact = torch.tensor([[3], [7]]) * torch.tensor([[1.001], [1.1]])
    assert torch.equal(stored.make(node, dtype=torch.float32), exact)


def test_a_cast_within_a_recipe_rounds() -> None:
    third = torch.tensor([1 / 3])
    made = Stored({"a": third}).make(Cast(Cast(Source("a"), "BF16"), "F32"))
    assert made.dtype == torch.float32
    assert torch.equal(made, third.bfloat16().float())
    assert not torch.equal(made, third)


def test_a_large_packed_weight_is_made_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "_CHUNK", 8)
    sizes: list[int] = []

    class Watched(PerRow):
        def evaluate(
            self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Any
        ) -> Any:
            sizes.append(math.prod(b - a for a, b in region))
            return super().evaluate(parts, region, dtype, settings)

    monkeypatch.setitem(SCHEMES, "per_row", Watched())
    stored = Stored(
        {"codes": numbers(10, 3, dtype=torch.int8), "scales": numbers(10).to(torch.float32)}
    )
    node = Dequantize("per_row", (Part("codes", Source("codes")), Part("scales", Source("scales"))))
    made = stored.make(node)
    assert sizes == [6, 6, 6, 6, 6]
    assert torch.equal(made, plain(node, {}, stored))


def test_f4_experts_are_stacked_byte_by_byte() -> None:
    codes = [torch.arange(8, dtype=torch.uint8).reshape(2, 4) + 8 * i for i in range(2)]
    stored = {f"e{i}": c.view(torch.float4_e2m1fn_x2) for i, c in enumerate(codes)}

    def read(name: str, region: Region | None) -> torch.Tensor:
        assert region == ((0, 2), (0, 8))  # in values, of which a byte holds two
        return stored[name]

    made = evaluate(
        Stack(Source("e{i}"), "i", 2),
        {},
        read=read,
        types=lambda name: TensorType("F4", (2, 8)),
        schemes={},
    )
    assert made.shape == (2, 2, 4)
    assert torch.equal(made.view(torch.uint8), torch.stack(codes))


@pytest.mark.parametrize("node", [Transpose(Source("a")), Concat((Source("a"), Source("a")), 1)])
def test_f4_values_are_not_rearranged_within_bytes(node: Node) -> None:
    with pytest.raises(EvaluationError, match="F4 values, two in a byte"):
        evaluate(
            node,
            {},
            read=lambda name, region: torch.zeros(2, 4, dtype=torch.uint8).view(
                torch.float4_e2m1fn_x2
            ),
            types=lambda name: TensorType("F4", (2, 8)),
            schemes={},
        )


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Source("gone"), "tensor 'gone': "),
        (Slice(Source("a"), 0, 1, 9), r"slice of 'a': rows 1 to 9 are outside"),
        (Concat((Source("a"), Source("narrow"))), r"concat of 'a', 'narrow': shapes .* joined"),
        (Stack(Source("s{i}"), "i", 2), r"stack of 's\{i\}': tensor 's1' is F32 \[4, 2\]"),
        (Stack(Source("d{i}"), "i", 2), r"tensor 'd1' is F16 \[2, 2\], number 0 of the stack is"),
        (Cast(Source("ints"), "BF16"), "cast of 'ints': torch.int64 is not cast"),
        (Split(Source("a"), 0, (1, 1), 0), "split of 'a': sizes of the split are not known"),
        (Dequantize("nf4", (Part("x", Source("a")),)), "dequantize of 'a': stored packed as 'nf4'"),
        (
            Dequantize("per_row", (Part("codes", Source("a")), Part("scales", Source("wide")))),
            r"dequantize of 'a', 'wide': scales F32 \[9\] do not fit codes F32 \[2, 2\]",
        ),
    ],
)
def test_an_error_names_recipe_sources_and_cause(node: Node, message: str) -> None:
    stored = Stored(
        {
            "a": numbers(2, 2),
            "narrow": numbers(2, 1),
            "wide": numbers(9),
            "ints": numbers(2, 2, dtype=torch.int64),
            "s0": numbers(2, 2),
            "s1": numbers(4, 2),
            "d0": numbers(2, 2),
            "d1": numbers(2, 2, dtype=torch.float16),
        }
    )
    with pytest.raises(EvaluationError, match=message):
        stored.make(node)


def test_a_scheme_that_breaks_its_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PerRow):
        def evaluate(
            self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Any
        ) -> Any:
            return super().evaluate(parts, region, dtype, settings)[:1]

    monkeypatch.setitem(SCHEMES, "per_row", Wrong())
    stored = Stored({"codes": numbers(4, 3, dtype=torch.int8), "scales": numbers(4)})
    node = Dequantize("per_row", (Part("codes", Source("codes")), Part("scales", Source("scales"))))
    with pytest.raises(EvaluationError, match=r"shape \[1, 3\] where \[4, 3\] was expected"):
        stored.make(node)


def test_another_default_device_changes_nothing_for_a_scheme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a program has set CUDA as its default, or builds a model on meta."""

    class Plain(PerRow):
        def evaluate(
            self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Any
        ) -> Any:
            return super().evaluate(parts, region, dtype, settings) + torch.ones(1, dtype=dtype)

    monkeypatch.setitem(SCHEMES, "per_row", Plain())
    stored = Stored({"codes": numbers(4, 3, dtype=torch.int8), "scales": numbers(4)})
    node = Dequantize("per_row", (Part("codes", Source("codes")), Part("scales", Source("scales"))))
    expected = plain(node, {}, stored) + 1
    with torch.device("meta"):
        made = stored.make(node)
        assert torch.empty(1).is_meta
    assert torch.equal(made, expected)


def test_a_region_that_is_not_inside_is_refused() -> None:
    with pytest.raises(EvaluationError, match=r"is not inside F32 \[2, 2\]"):
        Stored({"a": numbers(2, 2)}).make(Source("a"), region=((0, 3), (0, 2)))
