"""GPTQ, AWQ and AutoRound, against files and plain weights made by the formats' own libraries."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.dtypes import from_torch
from modelquirks.plugins.auto_round import AutoRound
from modelquirks.plugins.awq import Awq
from modelquirks.plugins.gptq import Gptq
from modelquirks.quirks import RecipeError, Scheme, Settings, TensorType

DATA = Path(__file__).parents[1] / "data"
Tensors = dict[str, torch.Tensor]
Load = Callable[..., Tensors]
Find = Callable[..., Any]


def stored(folder: str, name: str) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Return what is stored, the plain weights and config.json."""
    base = DATA / folder
    config = base / f"{name}.json"
    said = json.loads(config.read_text()) if config.exists() else {}
    tensors, plain = (load_file(base / f"{name}{end}.safetensors") for end in ("", "_plain"))
    return tensors, plain, said


def module(tensors: Tensors, name: str) -> Tensors:
    return {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}


def types_of(parts: Mapping[str, torch.Tensor]) -> dict[str, TensorType]:
    return {role: TensorType(from_torch(t.dtype), tuple(t.shape)) for role, t in parts.items()}


def region_of(
    scheme: Scheme, parts: Tensors, region: Any, said: Settings, dtype: torch.dtype
) -> torch.Tensor:
    regions = scheme.regions(region, types_of(parts), said)
    cut = {r: t[tuple(slice(*bounds) for bounds in regions[r])] for r, t in parts.items()}
    made: torch.Tensor = scheme.evaluate(cut, region, dtype, said)
    return made


def whole(scheme: Scheme, parts: Tensors, said: Settings, dtype: torch.dtype) -> torch.Tensor:
    shape = scheme.infer(types_of(parts), said).shape
    assert shape is not None
    return region_of(scheme, parts, tuple((0, size) for size in shape), said, dtype)


GEMV = {"quantization_config": {"quant_method": "awq", "version": "gemv"}}
V1, V2 = stored("gptq", "v1"), stored("gptq", "v2")
GPTQ = [(*case, name) for case in (V1, V2) for name in sorted(case[1])]


@pytest.mark.parametrize(("tensors", "plain", "config", "name"), GPTQ, ids=lambda v: str(v)[:12])
def test_gptq_weights_equal_those_of_gptqmodel_to_the_bit(
    tensors: Tensors, plain: Tensors, config: dict[str, Any], name: str
) -> None:
    scheme, parts = Gptq(), module(tensors, name.removesuffix(".weight"))
    said = scheme.settings(config, name)
    ours = whole(scheme, parts, said, torch.float16)
    assert torch.equal(ours, plain[name])
    assert scheme.infer(types_of(parts), said) == TensorType("F16", tuple(plain[name].shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_are_rounded_once_from_the_exact_product(dtype: torch.dtype) -> None:
    tensors, _, config = V1
    parts, said = module(tensors, "b8a32"), Gptq().settings(config, "b8a32.weight")
    exact = whole(Gptq(), parts, said, torch.float64)
    assert torch.equal(whole(Gptq(), parts, said, dtype), exact.to(dtype))


def test_a_whole_checkpoint_is_loaded_into_plain_modules(loaded: Load) -> None:
    for tensors, plain, config in (V1, V2):
        made = loaded(tensors, list(plain), config)
        assert made.keys() == plain.keys()
        assert all(torch.equal(made[name], plain[name]) for name in plain)


def test_a_module_that_keeps_the_packed_form_is_given_the_companions(offers: Find) -> None:
    tensors, _, config = V1
    best = offers(tensors, config, known=list(tensors)).best
    assert {type(best[name].logical.node).__name__ for name in tensors} == {"Source"}


@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_any_region_of_a_gptq_weight_equals_that_part_of_the_whole(data: st.DataObject) -> None:
    tensors, plain, config = data.draw(st.sampled_from((V1, V2)))
    name = data.draw(st.sampled_from(sorted(plain)))
    parts, said = module(tensors, name.removesuffix(".weight")), Gptq().settings(config, name)
    if not said["desc_act"] and data.draw(st.booleans()):
        del parts["g_idx"]
    region = drawn(data, plain[name].shape)
    got = region_of(Gptq(), parts, region, said, torch.float16)
    assert torch.equal(got, plain[name][tuple(slice(*bounds) for bounds in region)])


def drawn(data: st.DataObject, shape: torch.Size) -> tuple[tuple[int, int], ...]:
    region: list[tuple[int, int]] = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    return tuple(region)


def test_a_region_of_unsorted_inputs_reads_its_words_and_groups_only() -> None:
    tensors, _, config = V1
    parts, said = module(tensors, "b4a32"), Gptq().settings(config, "b4a32.weight")
    del parts["g_idx"]
    assert Gptq().regions(((3, 20), (33, 50)), types_of(parts), said) == {
        "qweight": ((4, 7), (3, 20)),
        "scales": ((1, 2), (3, 20)),
        "qzeros": ((1, 2), (0, 3)),
    }


def test_without_qzeros_the_zero_is_the_middle_where_config_json_says_symmetric() -> None:
    tensors, plain, config = V1
    parts, said = module(tensors, "b4s32"), Gptq().settings(config, "b4s32.weight")
    del parts["qzeros"]
    assert torch.equal(whole(Gptq(), parts, said, torch.float16), plain["b4s32.weight"])
    with pytest.raises(RecipeError, match="does not say sym"):
        Gptq().infer(types_of(parts), {**said, "sym": False})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "quantization_config of config.json does not say how many bits"),
    ({"bits": "4"}, "bits is '4', not a number"),
    ({"bits": 5}, "has 5 bits"),
    ({"bits": 4, "checkpoint_format": "marlin"}, "stored in the layout 'marlin'"),
    ({"bits": 4, "is_marlin_format": True}, "stored in the layout 'marlin'"),
    ({"bits": 3, "format": "gptq_p"}, "stored in the layout 'gptq_p'"),
    ({"bits": 4, "dynamic": {"-:.*mlp": {}}}, "leaves 'model.mlp.up_proj' plain"),
    ({"bits": 4, "dynamic": {"+:(": {}}}, "no regular expression"),
]


@pytest.mark.parametrize(("said", "reason"), REFUSED)
def test_what_config_json_leaves_open_or_forbids_is_refused_by_name(
    said: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RecipeError, match=reason):
        Gptq().settings({"quantization_config": said}, "model.mlp.up_proj.weight")


def test_the_first_dynamic_rule_that_matches_the_begin_of_the_name_counts() -> None:
    rules = {r"+:model\.layers\.1\.": {"bits": 8}, "model.layers.2.mlp": {"group_size": 32}}
    config = {"quantization_config": {"bits": 4, "group_size": 128, "dynamic": rules}}
    said = [
        Gptq().settings(config, name)
        for name in (
            "model.layers.1.mlp.weight",
            "model.layers.11.mlp.weight",
            "model.layers.2.mlp.weight",
        )
    ]
    assert [(s["bits"], s["group_size"]) for s in said] == [(8, 128), (4, 128), (4, 32)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"qweight": TensorType("I32", (11, 64))}, "96 inputs of 4 bits must be 12 rows"),
        ({"scales": TensorType("F16", (3, 32))}, "scales must have 64 columns"),
        ({"qzeros": TensorType("I32", (3, 6))}, r"qzeros must be \[3, 8\]"),
        ({"qzeros": TensorType("I16", (3, 8))}, "qzeros must be I32"),
        ({"g_idx": TensorType("I32", (96, 1))}, "g_idx must have 1 dimensions"),
    ],
)
def test_companions_that_do_not_fit_are_refused_with_their_types(
    change: dict[str, TensorType], reason: str
) -> None:
    tensors, _, config = V1
    kinds = {**types_of(module(tensors, "b4a32")), **change}
    with pytest.raises(RecipeError, match=reason) as raised:
        Gptq().infer(kinds, Gptq().settings(config, "b4a32.weight"))
    assert str(kinds["qweight"]) in str(raised.value)


def test_sorted_inputs_without_an_order_are_refused() -> None:
    kinds = types_of(module(V1[0], "b4a32"))
    del kinds["g_idx"]
    said = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "v1": True}
    with pytest.raises(RecipeError, match="no g_idx that says how"):
        Gptq().infer(kinds, said)


def test_marlin_is_recognised_and_refused_with_the_way_out(offers: Find) -> None:
    names = ["model.layers.0.mlp.up_proj.B", "model.layers.0.mlp.up_proj.s"]
    wanted = ["model.layers.0.mlp.up_proj.weight"]
    found = offers(names, {"quantization_config": {"quant_method": "gptq"}}, known=wanted)
    assert not found.best
    assert "packed for the Marlin kernel" in found.broken[wanted[0]].reason


def test_gemm_weights_equal_those_of_autoawq_to_the_bit(loaded: Load) -> None:
    tensors, plain, _ = stored("awq", "gemm")
    assert torch.equal(loaded(tensors, list(plain))["gemm.weight"], plain["gemm.weight"])


def test_gemv_weights_equal_what_autoawq_packed(loaded: Load) -> None:
    tensors, plain, _ = stored("awq", "gemv")
    for name, weight in plain.items():
        size = int(name[1:].removesuffix(".weight"))
        config = {"quantization_config": {**GEMV["quantization_config"], "group_size": size}}
        parts = {k: t for k, t in tensors.items() if k.startswith(name.removesuffix("weight"))}
        assert torch.equal(loaded(parts, [name], config)[name], weight)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_region_of_an_awq_weight_equals_that_part_of_the_whole(data: st.DataObject) -> None:
    gemv = data.draw(st.booleans())
    tensors, plain, _ = stored("awq", "gemv" if gemv else "gemm")
    name = data.draw(st.sampled_from(sorted(plain)))
    size = int(name[1:].removesuffix(".weight")) if gemv else 0
    said: Settings = {"bits": 4, "group_size": size, "gemv": gemv}
    region = drawn(data, plain[name].shape)
    parts = module(tensors, name.removesuffix(".weight"))
    got = region_of(Awq(), parts, region, said, torch.float16)
    assert torch.equal(got, plain[name][tuple(slice(*bounds) for bounds in region)])


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_awq_of_other_widths_is_one_stream_of_bits_in_plain_order(bits: int) -> None:
    """As ``_pack_contiguous`` of GPTQModel 7.7: here bit by bit, with Python's integers."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (64, 32), generator=generator)
    zeros = torch.randint(0, 1 << bits, (2, 32), generator=generator)
    scales = torch.rand(2, 32, generator=generator).half()
    parts = {"qweight": stream(codes, bits), "qzeros": stream(zeros, bits), "scales": scales}
    said = Awq().settings({"quantization_config": {"bits": bits}}, "a.weight")
    exact = (codes - zeros.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)
    assert torch.equal(whole(Awq(), parts, said, torch.float32), exact.T)


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    rows: list[list[int]] = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        n_words = -(-len(row) * bits // 32)
        words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(n_words)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"version": "gemv_fast"}, "AWQ's layout 'gemv_fast'"),
        ({"version": "gemv"}, "add 'group_size' there"),
        ({"version": "gemv", "bits": 3, "group_size": 64}, "has 3 bits"),
    ],
)
def test_awq_layouts_that_cannot_be_read_are_refused(said: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Awq().settings({"quantization_config": said}, "a.weight")


def test_gptq_without_g_idx_and_without_config_json_is_not_taken_for_awq(offers: Find) -> None:
    kinds = types_of(module(V1[0], "b4a32"))
    del kinds["g_idx"]
    with pytest.raises(RecipeError, match="must say quant_method 'gptq'"):
        Awq().infer(kinds, Awq().settings({}, "a.weight"))


AUTO_ROUND = {
    "auto_round:auto_gptq": (V1, "b4a32"),
    "auto_round": (V2, "b4a32"),
    "auto_round:gptqmodel": (V2, "b8aall"),
    "auto_round:auto_awq": (stored("awq", "gemm"), "gemm"),
}


@pytest.mark.parametrize("layout", AUTO_ROUND)
def test_autoround_is_read_as_its_packing_format_says(layout: str, loaded: Load) -> None:
    (tensors, plain, _), name = AUTO_ROUND[layout]
    own = {"bits": 8, "group_size": -1} if name == "b8aall" else {}
    declared = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "packing_format": layout,
        "extra_config": {"b8aall": own, "lm_head": {"bits": 16}},
    }
    parts = {k: t for k, t in tensors.items() if k.startswith(f"{name}.") and "g_idx" not in k}
    made = loaded(parts, [f"{name}.weight"], {"quantization_config": declared})
    assert torch.equal(made[f"{name}.weight"], plain[f"{name}.weight"])


def test_extra_config_of_autoround_names_modules_or_patterns() -> None:
    extra = {"a.1.up": {"bits": 8}, ".*a.2.*": {"bits": 2}, "a.3": {"bits": 3}}
    config = {"quantization_config": {"bits": 4, "extra_config": extra}}
    names = ("a.1.up.weight", "a.2.up.weight", "a.3.up.weight")
    bits = [AutoRound().settings(config, name)["bits"] for name in names]
    assert bits == [8, 2, 4]
    with pytest.raises(RecipeError, match="packing_format 'auto_round:nv_fp'"):
        AutoRound().settings(
            {"quantization_config": {"bits": 4, "packing_format": "auto_round:nv_fp"}}, "a.weight"
        )


def test_bytes_of_a_packed_file_are_counted_to_the_last(tmp_path: Path) -> None:
    tensors, _, config = V1
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = (DATA / "gptq" / "v1.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    plan = Dispatcher().plan(tmp_path, max_memory={"cpu": "1GB"})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert open_manifest(tmp_path).total_bytes == total
    assert sum(memory.used_bytes for memory in plan.placement.memory.values()) == total
