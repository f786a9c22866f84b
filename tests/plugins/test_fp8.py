"""FP8 and scaled int8 weights, against transformers' own dequantiser and a plain computation."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from modelquirks.plugins.fp8 import Fp8Block, Scaled
from modelquirks.quirks import RecipeError, TensorType

Unpacked = Callable[..., torch.Tensor]
Parts = Mapping[str, torch.Tensor]

BLOCK, SCALED = Fp8Block(), Scaled()
BLOCK128 = {"block_rows": 128, "block_columns": 128}
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def codes(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> torch.Tensor:
    """Return random codes that are numbers, all of them equally likely."""
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    finite = octets.view(dtype).float().isfinite()
    return torch.where(finite, octets, 0x41).view(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) + 0.01).to(dtype)


def exponents(*shape: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(110, 140, shape, dtype=torch.uint8, generator=generator)


def by_transformers(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    dequantize: Any = Fp8Dequantize
    made: torch.Tensor = dequantize(None)._dequantize_one(weight, scale, output_dtype=dtype)
    return made


def by_hand(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """As ``weight_dequant`` of DeepSeek-V3's inference/kernel.py: partial blocks at the edges."""
    rows, columns = weight.shape
    grown = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight.float() * grown[:rows, :columns]).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code", FP8)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_blocks_equal_transformers_to_the_bit(
    dtype: torch.dtype, code: torch.dtype, scale_dtype: torch.dtype, unpacked: Unpacked
) -> None:
    weight, scale = codes(256, 384, dtype=code), scales(2, 3, dtype=scale_dtype)
    got = unpacked(BLOCK, {"weight": weight, "weight_scale_inv": scale}, dtype, settings=BLOCK128)
    assert got.dtype == dtype
    assert torch.equal(got, by_transformers(weight, scale, dtype))


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_every_exponent_equals_transformers_and_255_is_no_number(
    scale_dtype: torch.dtype, unpacked: Unpacked
) -> None:
    """UE8M0 scales; transformers makes 2**128 of 255 in U8, the standard (OCP MX §5.4.1) NaN."""
    octets = torch.arange(256, dtype=torch.uint8).view(16, 16)
    weight = codes(16, 16 * 32)
    scale = octets.view(scale_dtype)
    got = unpacked(BLOCK, {"weight": weight, "weight_scale_inv": scale})
    theirs = by_transformers(weight, scale, torch.float32)
    assert torch.equal(got[:-1], theirs[:-1])
    assert torch.equal(got[-1, : 15 * 32], theirs[-1, : 15 * 32])
    assert got[-1, 15 * 32 :].isnan().all()


def test_blocks_at_the_edges_may_be_partial(unpacked: Unpacked) -> None:
    """576 rows in blocks of 128 are DeepSeek's kv_a_proj_with_mqa; transformers refuses them."""
    weight, scale = codes(576, 200), scales(5, 2)
    parts = {"weight": weight, "weight_scale_inv": scale}
    got = unpacked(BLOCK, parts, torch.bfloat16, settings=BLOCK128)
    assert torch.equal(got, by_hand(weight, scale, (128, 128), torch.bfloat16))


def test_stacked_experts_equal_transformers(unpacked: Unpacked) -> None:
    weight, scale = codes(3, 256, 128), scales(3, 2, 1)
    parts = {"weight": weight, "weight_scale_inv": scale}
    got = unpacked(BLOCK, parts, torch.bfloat16, settings=BLOCK128)
    assert torch.equal(got, by_transformers(weight, scale, torch.bfloat16))


def test_experts_in_pairs_of_e2m1_equal_transformers(unpacked: Unpacked) -> None:
    """DeepSeek-V4 stores them as I8 with an exponent per 32, among linears in blocks of 128."""
    octets = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    weight, scale = octets.view(torch.int8), exponents(3, 16).view(torch.float8_e8m0fnu)
    parts = {"weight": weight, "weight_scale_inv": scale}
    got = unpacked(BLOCK, parts, settings=BLOCK128)
    assert torch.equal(got, by_transformers(weight, scale, torch.float32))
    part = unpacked(BLOCK, parts, region=((1, 3), (33, 90)), settings=BLOCK128)
    assert torch.equal(part, got[1:3, 33:90])


SCALES: dict[str, tuple[int, ...]] = {
    "per tensor, a scalar": (),
    "per tensor": (1,),
    "per tensor, two dimensions": (1, 1),
    "per row": (48,),
    "per row, as a column": (48, 1),
    "per group": (48, 3),
}


@pytest.mark.parametrize("shape", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("code", [*FP8, torch.int8])
def test_scales_of_every_extent(
    shape: tuple[int, ...], code: torch.dtype, unpacked: Unpacked
) -> None:
    """Independent computation: compressed-tensors' ``_dequantize``, codes times scale."""
    weight, scale = codes(48, 96, dtype=code), scales(*shape, dtype=torch.bfloat16)
    groups = scale if scale.dim() == 2 else scale.reshape(-1, 1)
    grown = groups.float().repeat_interleave(96 // groups.shape[1], 1)
    got = unpacked(SCALED, {"weight": weight, "weight_scale": scale}, torch.bfloat16)
    assert torch.equal(got, (weight.float() * grown).bfloat16())


def test_zero_points_are_subtracted_before_scaling(unpacked: Unpacked) -> None:
    weight, scale = codes(6, 8, dtype=torch.int8), scales(6, 2)
    zero = torch.arange(-6, 6, dtype=torch.int8).view(6, 2)
    parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    centred = weight.float() - zero.float().repeat_interleave(4, 1)
    assert torch.equal(unpacked(SCALED, parts), centred * scale.repeat_interleave(4, 1))


def test_llama4_experts_of_fbgemm_have_scales_of_their_outputs(unpacked: Unpacked) -> None:
    """``FbgemmFp8Quantize.convert``: gate_up_proj [E, in, out] with [E, 1, out], down_proj [E, in,
    out] with [E, out, 1]."""
    weight, scale = codes(2, 12, 20), scales(2, 20)
    expected = weight.float() * scale[:, None, :]
    for shape, turned in (((2, 1, 20), False), ((2, 20, 1), True)):
        parts = {"weight": weight, "weight_scale": scale.reshape(shape)}
        said = SCALED.settings(
            {"quantization_config": {"quant_method": "fbgemm_fp8"}},
            f"x.experts.{'down' if turned else 'gate_up'}_proj",
        )
        for known in (said, {}):  # the shapes alone tell as well
            assert torch.equal(unpacked(SCALED, parts, settings=known), expected)
            part = unpacked(SCALED, parts, region=((1, 2), (3, 7), (5, 20)), settings=known)
            assert torch.equal(part, expected[1:2, 3:7, 5:20])


def test_a_square_expert_without_a_config_is_refused() -> None:
    parts = {
        "weight": TensorType("F8_E4M3", (2, 20, 20)),
        "weight_scale": TensorType("F32", (2, 20, 1)),
    }
    with pytest.raises(RecipeError, match=r"rows or columns.*quant_method"):
        SCALED.infer(parts, {})
    assert SCALED.infer(parts, {"turned": True}).shape == (2, 20, 20)


def test_modelopt_writes_blocks_in_four_dimensions(unpacked: Unpacked) -> None:
    weight, scale = codes(256, 384), scales(2, 3)
    got = unpacked(SCALED, {"weight": weight, "weight_scale": scale.view(2, 1, 3, 1)})
    assert torch.equal(got, by_transformers(weight, scale, torch.float32))
    parts = {"weight": weight, "weight_scale": scale.view(2, 1, 3, 1)}
    part = unpacked(SCALED, parts, region=((100, 130), (3, 301)))
    assert torch.equal(part, got[100:130, 3:301])


CASES: list[tuple[Any, str, tuple[int, ...], tuple[int, ...], dict[str, int]]] = [
    (BLOCK, "weight_scale_inv", (300, 200), (3, 2), BLOCK128),
    (BLOCK, "weight_scale_inv", (3, 40, 30), (3, 3, 2), {"block_rows": 16, "block_columns": 16}),
    (SCALED, "weight_scale", (40, 64), (40, 4), {}),
    (SCALED, "weight_scale", (40, 64), (40,), {}),
    (SCALED, "weight_scale", (40, 64), (), {}),
    (SCALED, "weight_scale", (40, 33), (1, 33), {}),
]


@given(data=st.data())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_region_equals_that_part_of_the_whole(data: st.DataObject, unpacked: Unpacked) -> None:
    scheme, role, shape, scale_shape, stated = data.draw(st.sampled_from(CASES))
    parts = {"weight": codes(*shape), role: scales(*scale_shape)}
    region = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    got = unpacked(scheme, parts, torch.bfloat16, region=tuple(region), settings=stated)
    whole = unpacked(scheme, parts, torch.bfloat16, settings=stated)
    assert torch.equal(got, whole[tuple(slice(*bounds) for bounds in region)])


def test_a_region_reads_its_codes_and_the_scales_of_its_blocks_and_nothing_else() -> None:
    parts = {
        "weight": TensorType("F8_E4M3", (576, 7168)),
        "weight_scale_inv": TensorType("F32", (5, 56)),
        "activation_scale": TensorType("F32", (1,)),
    }
    layout = BLOCK.layout(parts, BLOCK128)
    got = BLOCK.regions(((127, 129), (256, 300)), parts, {**BLOCK128, **layout})
    assert got == {
        "weight": ((127, 129), (256, 300)),
        "weight_scale_inv": ((0, 2), (2, 3)),
        "activation_scale": ((0, 0),),
    }


def test_more_rows_than_one_chunk_equal_transformers(unpacked: Unpacked) -> None:
    weight, scale = codes(1280, 1024), scales(10, 8)
    got = unpacked(BLOCK, {"weight": weight, "weight_scale_inv": scale}, torch.bfloat16)
    assert torch.equal(got, by_transformers(weight, scale, torch.bfloat16))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, {}),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}},
            {"block_rows": 128, "block_columns": 64, "turned": False},
        ),
        (
            {"text_config": {"quantization_config": {"weight_block_size": [1, 32]}}},
            {"block_rows": 1, "block_columns": 32},
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"g": {"targets": ["Linear"], "weights": {"group_size": 64}}},
                }
            },
            {"block_rows": 1, "block_columns": 64, "turned": False},
        ),
        (
            {
                "quantization_config": {
                    "config_groups": {"g": {"weights": {"block_structure": "128x128"}}}
                }
            },
            {"block_rows": 128, "block_columns": 128},
        ),
    ],
)
def test_the_config_tells_the_block(config: dict[str, Any], found: dict[str, Any]) -> None:
    assert BLOCK.settings(config, "model.layers.0.mlp.up_proj.weight") == found


def test_a_block_size_that_is_none_is_refused_by_name() -> None:
    config = {"quantization_config": {"weight_block_size": ["a", 3]}}
    with pytest.raises(RecipeError, match=r"blocks of \['a', 3\]"):
        BLOCK.settings(config, "x.weight")


F8, F32 = "F8_E4M3", "F32"


@pytest.mark.parametrize(("stored", "said"), [("F8_E5M2", "e4m3"), ("F8_E4M3", "e5m2")])
def test_codes_of_another_format_than_the_config_says_are_refused(stored: str, said: str) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "fmt": said}}
    settings = BLOCK.settings(config, "x.weight")
    parts = {"weight": TensorType(stored, (128, 128)), "weight_scale_inv": TensorType(F32, (1, 1))}
    with pytest.raises(RecipeError, match=f"weight is {stored}, .* says fmt '{said}'"):
        BLOCK.infer(parts, settings)
    assert BLOCK.infer(parts, {**settings, "fmt": stored[3:].lower()}).shape == (128, 128)


@pytest.mark.parametrize(
    ("scheme", "weight", "scale", "said"),
    [
        (BLOCK, TensorType("BF16", (128, 128)), TensorType(F32, (1, 1)), "weight must be F8_E4M3"),
        (SCALED, TensorType("U8", (8, 8)), TensorType(F32, (8, 1)), "weight must be F8_E4M3"),
        (SCALED, TensorType("I8", (8, 8)), TensorType("I32", (8, 1)), "weight_scale must be a"),
        (SCALED, TensorType("I8", ()), TensorType(F32, ()), "weight must have dimensions"),
        (SCALED, TensorType(F8, (8, 192)), TensorType(F32, (8, 2)), "2 scales for 192 values"),
        (BLOCK, TensorType(F8, (256, 256)), TensorType(F32, (3, 2)), "3 scales for 256 values"),
        (SCALED, TensorType(F8, (8, 8)), TensorType(F32, (2, 2, 2, 3)), "does not belong"),
    ],
)
def test_scales_that_do_not_fit_are_refused_with_both_types(
    scheme: Any, weight: TensorType, scale: TensorType, said: str
) -> None:
    parts = {"weight": weight, scheme.scale_role: scale}
    with pytest.raises(RecipeError, match=said) as raised:
        scheme.infer(parts, {})
    assert str(scale) in str(raised.value)


def test_a_grid_that_contradicts_the_config_is_refused_with_the_way_out() -> None:
    parts = {
        "weight": TensorType(F8, (512, 512)),
        "weight_scale_inv": TensorType(F32, (8, 8)),
    }
    with pytest.raises(RecipeError, match="blocks of 128; state weight_block_size"):
        BLOCK.infer(parts, BLOCK128)
    assert BLOCK.infer(parts, {}).shape == (512, 512)


def test_no_weight_is_made_in_a_dtype_that_cannot_hold_it(unpacked: Unpacked) -> None:
    parts = {"weight": codes(4, 8), "weight_scale": scales(4)}
    with pytest.raises(RuntimeError, match="float8_e5m2"):
        unpacked(SCALED, parts, torch.float8_e5m2)


def test_the_dtype_of_the_model_is_that_of_a_16_bit_scale() -> None:
    weight = TensorType(F8, (256, 128))
    for scale, made in ((F32, "BF16"), ("F16", "F16"), ("BF16", "BF16"), ("U8", "BF16")):
        parts = {"weight": weight, "weight_scale": TensorType(scale, (256, 4))}
        assert SCALED.infer(parts, {}) == TensorType(made, (256, 128))


def test_a_whole_checkpoint_with_an_ignored_module_loads(
    loaded: Callable[..., dict[str, torch.Tensor]],
) -> None:
    """A Linear in modules_to_not_convert is plain; a module of transformers' own keeps codes."""
    config = {
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        }
    }
    weight, scale, head = codes(256, 128), scales(2, 1), torch.randn(8, 128)
    stored = {
        "model.layers.0.mlp.up_proj.weight": weight,
        "model.layers.0.mlp.up_proj.weight_scale_inv": scale,
        "lm_head.weight": head,
    }
    plain = loaded(stored, [*stored][::2], config, dtype=torch.float32)
    assert torch.equal(plain["lm_head.weight"], head)
    assert torch.equal(
        plain["model.layers.0.mlp.up_proj.weight"], by_transformers(weight, scale, torch.float32)
    )
    kept = loaded(stored, [*stored], config)
    assert torch.equal(kept["model.layers.0.mlp.up_proj.weight"].float(), weight.float())
    assert torch.equal(kept["model.layers.0.mlp.up_proj.weight_scale_inv"], scale)


def test_deepseek_v4_names_are_recognised_only_with_their_config(
    loaded: Callable[..., dict[str, torch.Tensor]],
) -> None:
    weight, scale = codes(128, 256), exponents(1, 2).view(torch.float8_e8m0fnu)
    stored = {
        "layers.0.attn.wq_a.weight": weight,
        "layers.0.attn.wq_a.scale": scale,
        "layers.0.attn_norm.weight": torch.ones(4),
        "layers.0.router.scale": torch.ones(3),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    wanted = ["layers.0.attn.wq_a.weight", "layers.0.attn_norm.weight", "layers.0.router.scale"]
    got = loaded(stored, wanted, config, dtype=torch.float32)
    assert torch.equal(got[wanted[0]], by_transformers(weight, scale, torch.float32))
    assert torch.equal(got[wanted[2]], torch.ones(3))


def test_nan_codes_stay_nan(unpacked: Unpacked) -> None:
    weight = torch.full((2, 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = unpacked(SCALED, {"weight": weight, "weight_scale": torch.ones(())})
    assert all(math.isnan(value) for value in got.flatten().tolist())


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (1, 1), (32, 48), (2, 2)])
def test_scales_that_are_not_those_of_the_stated_block_are_refused(shape: tuple[int, ...]) -> None:
    weight, said = TensorType("F8_E4M3", (32, 48)), {"block_rows": 16, "block_columns": 16}
    right = {"weight": weight, "weight_scale_inv": TensorType("F32", (2, 3))}
    assert BLOCK.infer(right, said).shape == (32, 48)
    wrong = {**right, "weight_scale_inv": TensorType("F32", shape)}
    with pytest.raises(RecipeError, match="blocks of 16"):
        BLOCK.infer(wrong, said)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_all_needs_no_block(shape: tuple[int, ...]) -> None:
    parts = {"weight": TensorType("F8_E4M3", (32, 48)), "weight_scale": TensorType("F32", shape)}
    assert SCALED.infer(parts, {"block_rows": 16, "block_columns": 16}).shape == (32, 48)
