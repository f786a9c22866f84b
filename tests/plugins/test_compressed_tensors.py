"""compressed-tensors: integers in words, 4- and 8-bit floats, against what the library itself made.

The files in tests/data/compressed_tensors were written by it; see ABOUT.txt there.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.mapping.offers import Offers
from modelquirks.plugins.compressed_tensors import CtPackQuantized
from modelquirks.plugins.config_groups import group_weights
from modelquirks.plugins.fp8 import Scaled
from modelquirks.plugins.nvfp4 import CtMxfp4, CtNvfp4
from modelquirks.quirks import RecipeError, TensorType
from modelquirks.quirks.recipe import Dequantize, Source

Unpacked = Callable[..., torch.Tensor]
Loaded = Callable[..., dict[str, torch.Tensor]]

DATA = Path(__file__).parents[1] / "data" / "compressed_tensors"
STORED = load_file(DATA / "stored.safetensors") | load_file(DATA / "sorted_stored.safetensors")
EXPECTED = load_file(DATA / "expected.safetensors") | load_file(
    DATA / "sorted_expected.safetensors"
)
CONFIGS: dict[str, Any] = json.loads((DATA / "configs.json").read_text())
CONFIGS["sorted"] = {
    "quantization_config": {
        "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 16, "symmetric": False}}}
    }
}
SCHEME = CtPackQuantized()
SCHEMES: dict[str, Any] = {"nvfp4": CtNvfp4(), "mxfp4": CtMxfp4()}
CASES = pytest.mark.parametrize("case", CONFIGS)
PACKED = [case for case in CONFIGS if f"{case}.weight_shape" in STORED]


def parts_of(case: str) -> dict[str, torch.Tensor]:
    start = f"{case}."
    return {name.removeprefix(start): t for name, t in STORED.items() if name.startswith(start)}


def scheme_of(case: str) -> Any:
    return SCHEME if case in PACKED else SCHEMES.get(case, Scaled())


def types_of(case: str) -> dict[str, TensorType]:
    spelled = {"int32": "I32", "int64": "I64", "bfloat16": "BF16", "float16": "F16"}
    return {
        role: TensorType(spelled.get(str(t.dtype)[6:], "F32"), tuple(t.shape))
        for role, t in parts_of(case).items()
    }


def test_every_case_was_written() -> None:
    assert {name.partition(".")[0] for name in STORED} == set(CONFIGS)
    assert len(PACKED) == 8


@CASES
def test_weights_equal_the_library_s_to_the_bit(case: str, loaded: Loaded) -> None:
    """In the dtype that the library makes, with the config that it wrote."""
    names = {name: t for name, t in STORED.items() if name.startswith(f"{case}.")}
    expected = EXPECTED[f"{case}.weight"]
    (made,) = loaded(names, [f"{case}.weight"], CONFIGS[case], dtype=expected.dtype).values()
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)


@CASES
def test_other_dtypes_are_rounded_once(case: str, unpacked: Unpacked) -> None:
    """A float32 result rounds to the library's, so that nothing was lost before."""
    expected = EXPECTED[f"{case}.weight"]
    said = scheme_of(case).settings(CONFIGS[case], f"{case}.weight")
    whole = unpacked(scheme_of(case), parts_of(case), torch.float32, settings=said)
    assert torch.equal(whole.to(expected.dtype), expected)
    other = torch.float16 if expected.dtype == torch.bfloat16 else torch.bfloat16
    assert torch.equal(
        unpacked(scheme_of(case), parts_of(case), other, settings=said), whole.to(other)
    )


@pytest.mark.parametrize("case", [case for case in CONFIGS if case != "fp8_block"])
def test_without_a_config_the_shapes_tell_the_same(case: str, unpacked: Unpacked) -> None:
    expected = EXPECTED[f"{case}.weight"]
    assert torch.equal(unpacked(scheme_of(case), parts_of(case), expected.dtype), expected)


@given(data=st.data())
@settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_region_equals_that_part_of_the_whole(data: st.DataObject, unpacked: Unpacked) -> None:
    case = data.draw(st.sampled_from([*CONFIGS]))
    expected = EXPECTED[f"{case}.weight"]
    region = []
    for size in expected.shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    said = scheme_of(case).settings(CONFIGS[case], f"{case}.weight")
    got = unpacked(scheme_of(case), parts_of(case), expected.dtype, tuple(region), said)
    assert torch.equal(got, expected[tuple(slice(*bounds) for bounds in region)])


def test_a_region_reads_the_words_and_groups_that_it_touches() -> None:
    """Kimi K2.5's experts: int4 in groups of 32."""
    parts = {
        "weight_packed": TensorType("I32", (2048, 896)),
        "weight_scale": TensorType("BF16", (2048, 224)),
        "weight_shape": TensorType("I64", (2,)),
    }
    known = {"bits": 4, "group_size": 32}
    assert SCHEME.infer(parts, known) == TensorType("BF16", (2048, 7168))
    layout = SCHEME.layout(parts, known)
    got = SCHEME.regions(((3, 5), (31, 34)), parts, {**known, **layout})
    assert got == {
        "weight_packed": ((3, 5), (3, 5)),
        "weight_scale": ((3, 5), (0, 2)),
        "weight_shape": ((0, 0),),
    }


def test_uninitialised_groups_mean_columns_in_order(unpacked: Unpacked) -> None:
    """``-1 in g_idx`` in ``_process_quantization`` of 0.12."""
    parts = parts_of("int4_group")
    columns = EXPECTED["int4_group.weight"].shape[1]
    parts["weight_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)
    got = unpacked(SCHEME, parts, torch.bfloat16)
    assert torch.equal(got, EXPECTED["int4_group.weight"])
    part = unpacked(SCHEME, parts, torch.bfloat16, ((1, 3), (40, 100)))
    assert torch.equal(part, got[1:3, 40:100])


def test_stacked_experts_are_unpacked_like_each_of_them(unpacked: Unpacked) -> None:
    one = parts_of("int4_group")
    shape = EXPECTED["int4_group.weight"].shape
    parts = {
        "weight_packed": torch.stack((one["weight_packed"], one["weight_packed"] + 1)),
        "weight_scale": torch.stack((one["weight_scale"], one["weight_scale"])),
        "weight_shape": torch.tensor([2, *shape]),
    }
    got = unpacked(SCHEME, parts, torch.bfloat16)
    assert torch.equal(got[0], EXPECTED["int4_group.weight"])
    second = {**one, "weight_packed": parts["weight_packed"][1]}
    assert torch.equal(got[1], unpacked(SCHEME, second, torch.bfloat16))


def test_the_shape_is_known_from_headers_only_with_groups_of_a_known_size() -> None:
    group = types_of("int4_group")
    assert SCHEME.infer(group, {"bits": 4, "group_size": 32}).shape == (48, 128)
    assert SCHEME.infer(group, {}).shape is None
    assert SCHEME.infer(types_of("int8_channel"), {"bits": 8, "group_size": 0}).shape is None
    assert SCHEME.infer(types_of("int8_channel"), {"shape": "20x74"}).shape == (20, 74)
    assert SCHEME.peek(parts_of("int8_channel"), {}) == {"shape": "20x74"}


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"bits": 8, "group_size": 32}, r"16 words for 128 values.*num_bits is 8"),
        ({"bits": 4, "group_size": 32, "shape": "48x64"}, r"16 words for 64 values"),
        ({"bits": 4, "shape": "40x128"}, r"weight_shape says \[40, 128\]"),
        ({"bits": 4, "group_size": 64, "shape": "48x128"}, r"4 scales for 128 values"),
    ],
)
def test_what_contradicts_the_words_is_refused(known: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        SCHEME.infer(types_of("int4_group"), known)


@pytest.mark.parametrize(
    ("role", "changed", "said"),
    [
        ("weight_packed", TensorType("U8", (44, 12)), "weight_packed is U8"),
        ("weight_scale", TensorType("I32", (44, 3)), "weight_scale is I32"),
        ("weight_zero_point", TensorType("I32", (44, 3)), "weight_zero_point is I32"),
        ("weight_g_idx", TensorType("I32", (95,)), "must have 96 values"),
    ],
)
def test_companions_that_do_not_fit_are_refused(role: str, changed: TensorType, said: str) -> None:
    parts = {**types_of("int4_group_zero"), role: changed}
    with pytest.raises(RecipeError, match=said):
        SCHEME.infer(parts, {"bits": 4, "group_size": 32})


FEW = TensorType("I32", (4, 1))


def test_bits_that_the_shapes_leave_open_are_not_guessed() -> None:
    parts = {"weight_packed": FEW, "weight_scale": TensorType("BF16", (4, 1))}
    with pytest.raises(RecipeError, match=r"config\.json does not give num_bits"):
        SCHEME.infer(parts, {"shape": "4x4"})


def config(**groups: Any) -> dict[str, Any]:
    return {"config_groups": groups}


def group_of(*targets: str, **weights: Any) -> dict[str, Any]:
    return {"targets": [*targets], "weights": weights}


MIXED = config(
    a=group_of("Linear", num_bits=8),
    b=group_of(r"re:.*experts\.\d+\..*", num_bits=4),
    c=group_of("model.layers.0.mlp.experts.0.up_proj", num_bits=2),
    d=group_of("Embedding", num_bits=3),
)


@pytest.mark.parametrize(
    ("weight", "bits"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 8),
        ("model.layers.0.mlp.experts.1.up_proj.weight", 4),
        ("model.layers.0.mlp.experts.0.up_proj.weight", 2),
        ("language_model.model.layers.0.mlp.experts.0.up_proj.weight", 2),
        ("model.embed_tokens.weight", 3),
    ],
)
def test_names_come_before_expressions_and_these_before_classes(weight: str, bits: int) -> None:
    assert group_weights(MIXED, weight) == {"num_bits": bits}
    assert SCHEME.settings({"quantization_config": MIXED}, weight) == {
        "bits": bits,
        "group_size": 0,
    }


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (config(a=group_of("x", num_bits=4), b=group_of("y", num_bits=8)), "none of them is for"),
        (config(a=group_of("Linear", num_bits=4), b=group_of("Linear", num_bits=8)), "2 of them"),
        (config(a=group_of("re:(", num_bits=4), b=group_of("y", num_bits=8)), "no regular expr"),
        (config(a=group_of("Linear", num_bits=9)), "num_bits is 9"),
        (config(a=group_of("Linear", num_bits="4")), "num_bits is '4'"),
        (config(a=group_of("Linear", num_bits=4, type="float")), "type 'float'"),
    ],
)
def test_configs_that_do_not_tell_are_refused(said: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        SCHEME.settings({"quantization_config": said}, "model.layers.0.mlp.up_proj.weight")


def test_mixed_precision_reads_each_module_by_what_is_stored(loaded: Loaded) -> None:
    """FP8 attention beside int4 experts, in one family of names: as Kimi, and llm-compressor."""
    stored = {
        **{f"layers.0.{name}": t for name, t in parts_of("int4_group").items()},
        **{f"layers.1.{name}": t for name, t in parts_of("fp8_channel").items()},
        "layers.2.weight": torch.ones(4, 4),
    }
    said = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["layers.2"],
            "config_groups": {
                "a": group_of("re:.*0", num_bits=4, group_size=32),
                "b": group_of("re:.*1", num_bits=8, type="float", strategy="channel"),
            },
        }
    }
    wanted = [f"layers.{number}.weight" for number in range(3)]
    got = loaded(stored, wanted, said, dtype=torch.float32)
    assert torch.equal(got[wanted[0]].bfloat16(), EXPECTED["int4_group.weight"])
    assert torch.equal(got[wanted[1]].half(), EXPECTED["fp8_channel.weight"])
    assert torch.equal(got[wanted[2]], torch.ones(4, 4))


def test_a_module_of_the_library_s_own_gets_the_companions_as_they_are(loaded: Loaded) -> None:
    names = {name: t for name, t in STORED.items() if name.startswith("int4_group_zero.")}
    got = loaded(names, [*names], CONFIGS["int4_group_zero"])
    assert {name: torch.equal(t, names[name]) for name, t in got.items()} == dict.fromkeys(
        names, True
    )


def test_every_code_of_every_width_is_read(unpacked: Unpacked) -> None:
    """Bits of code i start at bit i * bits of the row, by the docstring of ``pack_to_int32``."""
    for bits in range(1, 9):
        codes = torch.arange(96).remainder(1 << bits)
        stream = sum(int(code) << (i * bits) for i, code in enumerate(codes))
        count = math.ceil(96 * bits / 32)
        words = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
        signed = [word - (1 << 32) if word >> 31 else word for word in words]
        parts = {
            "weight_packed": torch.tensor([signed], dtype=torch.int32),
            "weight_scale": torch.ones(1, 1),
            "weight_shape": torch.tensor([1, 96]),
        }
        assert torch.equal(unpacked(SCHEME, parts)[0], (codes - (1 << (bits - 1))).float())


@pytest.mark.parametrize("case", ["int4_group_zero", "int8_channel", "nvfp4", "mxfp4", "fp8_block"])
def test_a_file_of_the_library_loads_into_a_plain_module_and_every_byte_is_accounted_for(
    case: str, tmp_path: Path
) -> None:
    stored = {f"up_proj.{role}": tensor for role, tensor in parts_of(case).items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[case]))
    expected = EXPECTED[f"{case}.weight"]
    n_out, n_in = expected.shape
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(n_in, n_out, bias=False)})
    model.to(expected.dtype)
    plan = Dispatcher().plan(tmp_path, model=model, device_map={"": "cpu"}, dequantize=True)
    assert plan.ok, plan.problems
    n_bytes = sum(tensor.nbytes for tensor in stored.values())
    assert open_manifest(tmp_path).total_bytes == n_bytes
    assert not plan.audit.unexpected
    (note,) = (f.message for f in plan.audit.findings if f.code == "dequantized")
    assert f"{n_bytes:,} bytes stored, {expected.nbytes:,} bytes once loaded" in note
    loaded: Any = plan.execute(model)
    assert torch.equal(loaded["up_proj"].weight, expected)


SHARED = Path(__file__).parents[3] / "shared" / "data" / "manifests" / "gemma4-26b-a4b-ct-int4"


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the full collection of manifests is not here")
def test_every_int4_linear_of_a_real_gemma_4_is_one_weight_and_ignored_ones_are_plain(
    offers: Callable[..., Offers],
) -> None:
    names = list(json.loads((SHARED / "index.json").read_text())["weight_map"])
    said = json.loads((SHARED / "config.json").read_text())
    weights = [name.removesuffix("_packed") for name in names if name.endswith("_packed")]
    ignored = [f"{module}.weight" for module in said["quantization_config"]["ignore"]]
    plain = [name for name in ignored if name in names]
    found = offers(names, said, known=frozenset((*weights, *plain)))
    assert len(weights) > 11_000 and len(plain) > 100
    (settled,) = {
        node.settings
        for name in weights
        if isinstance(node := found.best[name].logical.node, Dequantize)
    }
    assert settled == (("bits", 4), ("group_size", 32))
    assert {type(found.best[name].logical.node) for name in plain} == {Source}
    assert not found.broken
