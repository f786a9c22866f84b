"""bitsandbytes, against weights that the library quantised and made plain again on a CPU."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.dtypes import from_torch
from modelquirks.plugins.bitsandbytes import Bnb4bit, BnbInt8
from modelquirks.quirks import RecipeError, Scheme, TensorType

DATA = Path(__file__).parents[1] / "data" / "bitsandbytes"
TENSORS, PLAIN = (load_file(DATA / f"formats{end}.safetensors") for end in ("", "_plain"))
FOUR_BITS = sorted(name for name in PLAIN if name != "int8.weight")

Tensors = dict[str, torch.Tensor]
Load = Callable[..., Tensors]
Find = Callable[..., Any]
Manifest = Callable[[str], tuple[list[str], dict[str, Any]]]


def packed(name: str) -> tuple[Scheme, Tensors, dict[str, Any]]:
    """Return scheme, parts and settings of a stored weight."""
    parts = {k.removeprefix(name).lstrip("."): t for k, t in TENSORS.items() if k.startswith(name)}
    parts["weight"] = parts.pop("")
    if name == "int8.weight":
        return BnbInt8(), {"weight": parts["weight"], "SCB": TENSORS["int8.SCB"]}, {}
    kind = "fp4" if name.startswith("four") else "nf4"
    parts["quant_state"] = parts.pop(f"quant_state.bitsandbytes__{kind}")
    scheme = Bnb4bit(kind)
    return scheme, parts, dict(scheme.peek({"quant_state": parts["quant_state"]}, {}))


def types_of(parts: Tensors) -> dict[str, TensorType]:
    return {role: TensorType(from_torch(t.dtype), tuple(t.shape)) for role, t in parts.items()}


@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_equal_bitsandbytes_to_the_bit_in_its_dtype(name: str, loaded: Load) -> None:
    stored = {k: t for k, t in TENSORS.items() if k.startswith(name)}
    made = loaded(stored, [name])[name]
    assert made.dtype == PLAIN[name].dtype
    assert torch.equal(made, PLAIN[name])


def test_int8_equals_bitsandbytes_to_the_bit(loaded: Load) -> None:
    stored = {k: t for k, t in TENSORS.items() if k.startswith("int8")}
    made = loaded(stored, ["int8.weight"], dtype=torch.float32)["int8.weight"]
    assert torch.equal(made, PLAIN["int8.weight"])


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_any_region_equals_that_part_of_the_whole(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(PLAIN)))
    scheme, parts, said = packed(name)
    region: list[tuple[int, int]] = []
    for size in PLAIN[name].shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    regions = scheme.regions(tuple(region), types_of(parts), said)
    cut = {r: t[tuple(slice(*bounds) for bounds in regions[r])] for r, t in parts.items()}
    got = scheme.evaluate(cut, tuple(region), PLAIN[name].dtype, said)
    assert torch.equal(got, PLAIN[name][tuple(slice(*bounds) for bounds in region)])


def test_a_region_of_rows_reads_only_their_codes_and_blocks() -> None:
    scheme, parts, said = packed("nested.weight")  # [136, 128], two blocks a row
    regions = scheme.regions(((130, 132), (0, 128)), types_of(parts), said)
    assert regions["weight"] == ((130 * 64, 132 * 64), (0, 1))
    assert regions["absmax"] == ((260, 264),)
    assert regions["nested_absmax"] == ((1, 2),)


def test_without_its_values_the_shape_is_unknown_and_with_them_it_is_checked() -> None:
    scheme, parts, said = packed("nested.weight")
    kinds = types_of(parts)
    assert scheme.infer(kinds, {}) == TensorType(None, None)
    assert scheme.infer(kinds, said) == TensorType("BF16", (136, 128))
    with pytest.raises(RecipeError, match="must be 4352 rows of codes"):
        scheme.infer(kinds, {**said, "shape": "68x128"})


def json_octets(**said: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (torch.tensor([123, 34], dtype=torch.uint8), "not the JSON of bitsandbytes"),
        (json_octets(shape=[2, 2]), "not the JSON of bitsandbytes"),
        (
            json_octets(shape=[2, 2], dtype="float16", blocksize=64, quant_type="fp4"),
            "says 'fp4', its name says 'nf4'",
        ),
    ],
)
def test_a_quant_state_that_says_something_else_is_refused(
    state: torch.Tensor, reason: str
) -> None:
    with pytest.raises(RecipeError, match=reason):
        Bnb4bit("nf4").peek({"quant_state": state}, {})


@pytest.mark.parametrize(
    ("role", "kind", "reason"),
    [
        ("weight", TensorType("U8", (8704,)), "codes must be one column"),
        ("absmax", TensorType("F32", (272,)), "absmax must be U8"),
        ("quant_map", TensorType("F32", (256,)), r"quant_map must be F32 \[16\]"),
        ("absmax", TensorType("U8", (271,)), "272 blocks of 64 must have an absmax each"),
        ("nested_absmax", TensorType("F32", (1,)), "nested_absmax must have one for 256 blocks"),
    ],
)
def test_companions_that_do_not_fit_are_refused(role: str, kind: TensorType, reason: str) -> None:
    scheme, parts, said = packed("nested.weight")
    with pytest.raises(RecipeError, match=reason):
        scheme.infer({**types_of(parts), role: kind}, said)


@pytest.mark.parametrize(("number", "named"), [(1, "col32"), (2, "col_turing"), (3, "col_ampere")])
def test_int8_codes_in_the_order_of_a_gpu_are_refused_by_its_name(number: int, named: str) -> None:
    with pytest.raises(RecipeError, match=f"weight_format is '{named}'.* writes rows"):
        BnbInt8().peek({"weight_format": torch.tensor(number, dtype=torch.uint8)}, {})


def test_int8_companions_that_do_not_fit_are_refused() -> None:
    parts = {"weight": TensorType("I8", (24, 96)), "SCB": TensorType("F32", (96,))}
    with pytest.raises(RecipeError, match=r"I8 \[out, in\] and F32 \[out\]"):
        BnbInt8().infer(parts, {})


def test_a_module_that_keeps_the_packed_form_is_given_the_companions(offers: Find) -> None:
    best = offers(TENSORS, known=list(TENSORS)).best
    assert {type(best[name].logical.node).__name__ for name in TENSORS} == {"Source"}


def test_every_packed_weight_of_a_real_checkpoint_with_adapters_is_found(
    offers: Find, manifest: Manifest
) -> None:
    names, config = manifest("llava-next-video-7b-nf4-lora")
    found = offers(names, config)
    states = [name for name in names if name.endswith("quant_state.bitsandbytes__nf4")]
    assert sum(len(pack.weight.members) for pack in found.packed) == len(states) > 200
    assert not found.broken


def test_bytes_of_a_packed_file_are_counted_to_the_last(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((DATA / "formats.safetensors").read_bytes())
    plan = Dispatcher().plan(tmp_path, max_memory={"cpu": "1GB"})
    total = sum(math.prod(t.shape) * t.element_size() for t in TENSORS.values())
    assert open_manifest(tmp_path).total_bytes == total
    assert sum(memory.used_bytes for memory in plan.placement.memory.values()) == total


def test_a_plan_reads_the_shapes_and_loads_plain_weights_equal_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((DATA / "formats.safetensors").read_bytes())
    model = torch.nn.Module()
    for name, weight in PLAIN.items():
        part = torch.nn.Module()
        part.weight = torch.nn.Parameter(torch.empty_like(weight, device="meta"))
        model.add_module(name.removesuffix(".weight"), part)
    plan = Dispatcher().plan(tmp_path, model=model, max_memory={"cpu": "1GB"}, dequantize=True)
    assert plan.ok, plan.problems
    made = dict(plan.execute(model).named_parameters())
    assert all(torch.equal(made[name], weight) for name, weight in PLAIN.items())


@pytest.mark.parametrize(
    ("role", "type_"),
    [
        ("nested_quant_map", TensorType("BOOL", (256,))),
        ("nested_quant_map", TensorType("F32", (16,))),
        ("nested_absmax", TensorType("I32", (1,))),
    ],
)
def test_nested_companions_of_another_type_are_refused(role: str, type_: TensorType) -> None:
    scheme, parts, said = packed("nested.weight")
    types = types_of(parts)
    assert scheme.infer(types, said).shape == tuple(PLAIN["nested.weight"].shape)
    with pytest.raises(RecipeError, match=f"{role} must be F32"):
        scheme.infer({**types, role: type_}, said)
