"""Inference on real checkpoints of full size, and how the benchmark knows what is right there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelquirks.planner import Dispatcher
from modelquirks.planner.infer.inference import infer
from modelquirks.quirks.recipe import (
    Chunk,
    Concat,
    Interleave,
    Node,
    Reshape,
    Slice,
    Source,
    Stack,
    TensorType,
    Transpose,
)  # fmt: skip

ROOT = Path(__file__).parents[1]
MANIFESTS = ROOT / "tests" / "data" / "manifests"
MODULES = ("infer_equal", "infer_real", "infer_score", "infer_shapes")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Yield the modules of the benchmark."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield SimpleNamespace(**{name[6:]: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def dispatcher() -> Dispatcher:
    return Dispatcher()


def scored(bench: Any, less: Any, full: Any) -> Any:
    found = infer(less.stored, less.model, less.ties)
    return bench.score.scored(less, full.stored, found)


@pytest.mark.parametrize("slug", ["granite-3.1-1b-a400m", "olmocr-7b", "wizardlm-2-8x22b"])
@pytest.mark.parametrize("seed", [None, 7, 8])
def test_nothing_certain_is_wrong(
    slug: str, seed: int | None, bench: Any, dispatcher: Dispatcher
) -> None:
    listing = bench.real.listing_of(MANIFESTS / slug, dispatcher)
    share = 0.0 if seed is None else 0.1
    verdicts = scored(bench, bench.score.dropped(listing, share, seed or 0), listing)
    certain = {name: v for name, v in verdicts.items() if v.tier == "certain"}
    assert certain
    assert {name for name, v in certain.items() if not v.right} == set()


def test_a_whole_mapping_is_recovered(bench: Any, dispatcher: Dispatcher) -> None:
    """Experts stored one by one under other names, 141 billion parameters."""
    listing = bench.real.listing_of(MANIFESTS / "wizardlm-2-8x22b", dispatcher)
    w1 = "model.layers.55.block_sparse_moe.experts.7.w1.weight"
    assert listing.stored[w1].shape == (16384, 6144)
    verdicts = scored(bench, listing, listing)
    assert bench.score.state_of(verdicts) == ("converted", "right")


def test_packed_weights_are_left_out_by_name(bench: Any, dispatcher: Dispatcher) -> None:
    left = bench.real.listing_of(MANIFESTS / "gpt-oss-20b", dispatcher)
    assert isinstance(left, bench.real.Left)
    assert left.why.startswith("packed")


STORED = {
    "a": TensorType("F32", (400, 300)),
    "b": TensorType("F32", (400, 300)),
    "e.0": TensorType("F32", (400, 300)),
    "e.1": TensorType("F32", (400, 300)),
}
A, B = Source("a"), Source("b")
HALVES = Concat((Slice(A, 0, 0, 200), Slice(A, 0, 200, 400)))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Chunk(A, 0, 2, 1), Slice(A, 0, 200, 400), True),
        (Chunk(A, 0, 2, 1), Slice(A, 0, 0, 200), False),
        (HALVES, A, True),
        (Interleave((A, B)), Concat((A, B)), False),
        (Concat((A, B)), Concat((B, A)), False),
        (Transpose(Transpose(A)), A, True),
        (Transpose(A), Reshape(A, (300, 400)), False),
        (Stack(Source("e.{n}"), "n"), Stack(Source("e.{expert}"), "expert", 2), True),
        (Concat((A, Slice(A, 0, 0, 1))), Concat((A, Slice(A, 0, 1, 2))), False),
    ],
)
def test_recipes_are_equal_if_they_make_the_same(
    one: Node, other: Node, same: bool, bench: Any
) -> None:
    assert bench.equal.equal(one, other, STORED) is same
    assert bench.equal.equal(other, one, STORED) is same


def types_of(bench: Any, truth: Mapping[str, Node], **shapes: tuple[int, ...]) -> Any:
    model = {name: TensorType("BF16", shape) for name, shape in shapes.items()}
    return bench.shapes.stored_types(truth.items(), model, {}.get)


def test_shapes_follow_from_what_is_made(bench: Any) -> None:
    qkv = Source("qkv")
    truth: dict[str, Node] = {
        "q": Slice(qkv, 0, 0, 8),
        "kv": Slice(qkv, 0, 8, 12),
        "gate_up": Concat(tuple(Stack(Source(f"{{e}}.{n}"), "e", 2) for n in "gu"), 1),
        "c": Transpose(Source("conv")),
    }
    found = types_of(bench, truth, q=(8, 5), kv=(4, 5), gate_up=(2, 6, 5), c=(3, 7))
    assert {name: type_.shape for name, type_ in found.items()} == {
        "qkv": (12, 5), **{f"{e}.{n}": (3, 5) for e in (0, 1) for n in "gu"}, "conv": (7, 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("truth", "shapes"),
    [
        ({"q": Slice(A, 0, 0, 8), "v": Slice(A, 0, 10, 12)}, {"q": (8, 5), "v": (2, 5)}),
        ({"qkv": Concat((A, B))}, {"qkv": (12, 5)}),
        ({"x": Reshape(A, (12, 5))}, {"x": (12, 5)}),
        ({"x": A, "y": A}, {"x": (12, 5), "y": (12, 6)}),
    ],
)
def test_where_recipes_leave_a_choice_no_shape_is_made_up(
    truth: Mapping[str, Node], shapes: Any, bench: Any
) -> None:
    with pytest.raises(bench.shapes.AmbiguousError):
        types_of(bench, truth, **shapes)
