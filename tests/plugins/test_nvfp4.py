"""NVFP4 and MXFP4 in bytes, and what ModelOpt, Quark and EETQ store under ``weight``."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from modelquirks.plugins.eetq import Eetq
from modelquirks.plugins.nvfp4 import CtMxfp4, CtNvfp4, ModelOpt
from modelquirks.plugins.quark import Quark
from modelquirks.quirks import RecipeError, TensorType

Unpacked = Callable[..., torch.Tensor]
Loaded = Callable[..., dict[str, torch.Tensor]]

DATA = Path(__file__).parents[1] / "data" / "modelopt"
MODELOPT, QUARK, NVFP4, MXFP4 = ModelOpt(), Quark(), CtNvfp4(), CtMxfp4()


def e2m1(code: int) -> float:
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(size, -1.0 if sign else 1.0)


def values(octets: torch.Tensor) -> torch.Tensor:
    """Return the two E2M1 values of each byte, the low nibble first."""
    pairs = [[e2m1(octet & 15), e2m1(octet >> 4)] for octet in octets.flatten().tolist()]
    return torch.tensor(pairs).view(*octets.shape[:-1], -1)


def octets(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(3))


def block_scales(*shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.manual_seed(4)) * 400 + 1).to(torch.float8_e4m3fn)


def nvfp4(*shape: int) -> dict[str, torch.Tensor]:
    *outer, columns = shape
    return {
        "weight": octets(*outer, columns // 2),
        "weight_scale": block_scales(*outer, columns // 16),
        "weight_scale_2": torch.tensor(0.00137),
        "input_scale": torch.tensor(0.5),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_second_scale_of_modelopt_multiplies(dtype: torch.dtype, unpacked: Unpacked) -> None:
    """As ``NVFP4QTensor.dequantize`` of nvidia-modelopt 0.47: both scales first, in float32."""
    parts = nvfp4(24, 96)
    per_block = parts["weight_scale"].float() * parts["weight_scale_2"]
    expected = values(parts["weight"]).view(24, 6, 16) * per_block[..., None]
    got = unpacked(MODELOPT, parts, dtype)
    assert torch.equal(got, expected.view(24, 96).to(dtype))


def test_a_weight_of_modelopt_s_own_class_equals_it_to_the_bit(unpacked: Unpacked) -> None:
    """See ABOUT.txt beside the file."""
    stored = load_file(DATA / "nvfp4.safetensors")
    expected = stored.pop("expected")
    assert torch.equal(unpacked(MODELOPT, stored, torch.bfloat16), expected)


def test_the_global_scale_of_compressed_tensors_divides(unpacked: Unpacked) -> None:
    parts = nvfp4(8, 32)
    theirs = {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": torch.tensor([7.0]),
    }
    per_block = parts["weight_scale"].float() / 7.0
    expected = values(parts["weight"]).view(8, 2, 16) * per_block[..., None]
    assert torch.equal(unpacked(NVFP4, theirs), expected.view(8, 32))


def test_every_byte_is_two_values_with_the_low_nibble_first(unpacked: Unpacked) -> None:
    parts = {
        "weight": torch.arange(256, dtype=torch.uint8).view(1, 256),
        "weight_scale": torch.ones(1, 32).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1.0),
    }
    got = unpacked(MODELOPT, parts)
    expected = values(parts["weight"])
    assert torch.equal(got, expected)
    assert torch.equal(got.signbit(), expected.signbit())


@pytest.mark.parametrize(
    ("scheme", "role"), [(MXFP4, "weight_packed"), (QUARK, "weight"), (MODELOPT, "weight")]
)
@pytest.mark.parametrize("view", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4_has_an_exponent_per_32(
    scheme: Any, role: str, view: torch.dtype, unpacked: Unpacked
) -> None:
    exponents = torch.arange(1, 255, dtype=torch.uint8)[:12].view(4, 3) + 115
    parts = {role: octets(4, 48), "weight_scale": exponents.view(view)}
    factors = torch.tensor([2.0 ** (e - 127) for e in exponents.flatten().tolist()]).view(4, 3, 1)
    expected = (values(parts[role]).view(4, 3, 32) * factors).view(4, 96)
    assert torch.equal(unpacked(scheme, parts), expected)
    part = unpacked(scheme, parts, region=((1, 4), (31, 65)))
    assert torch.equal(part, expected[1:4, 31:65])


@given(data=st.data())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_region_equals_that_part_of_the_whole(data: st.DataObject, unpacked: Unpacked) -> None:
    shape = data.draw(st.sampled_from([(5, 64), (2, 3, 48)]))
    parts = nvfp4(*shape)
    region = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        region.append((start, data.draw(st.integers(start + 1, size))))
    got = unpacked(MODELOPT, parts, torch.bfloat16, region=tuple(region))
    whole = unpacked(MODELOPT, parts, torch.bfloat16)
    assert torch.equal(got, whole[tuple(slice(*bounds) for bounds in region)])


def test_the_real_header_of_deepseek_r1_fp4_gives_the_shape_and_what_a_region_reads() -> None:
    """nvidia/DeepSeek-R1-0528-FP4: weight [7168, 9216] U8 with scales [7168, 1152]."""
    parts = {
        "weight": TensorType("U8", (7168, 9216)),
        "weight_scale": TensorType("F8_E4M3", (7168, 1152)),
        "weight_scale_2": TensorType("F32", ()),
        "input_scale": TensorType("F32", ()),
    }
    assert MODELOPT.infer(parts, {}) == TensorType("BF16", (7168, 18432))
    assert MODELOPT.regions(((5, 6), (15, 35)), parts, {}) == {
        "weight": ((5, 6), (7, 18)),
        "weight_scale": ((5, 6), (0, 3)),
        "weight_scale_2": (),
        "input_scale": (),
    }


def test_fp8_layers_of_an_nvfp4_checkpoint_are_made_plain_beside_it(loaded: Loaded) -> None:
    code = torch.arange(32, dtype=torch.uint8).view(4, 8).view(torch.float8_e4m3fn)
    stored = {
        **{f"model.layers.0.mlp.up_proj.{role}": t for role, t in nvfp4(4, 32).items()},
        "model.layers.0.self_attn.o_proj.weight": code,
        "model.layers.0.self_attn.o_proj.weight_scale": torch.tensor(0.5),
        "model.layers.0.mlp.gate.weight": torch.ones(2, 2),
    }
    config = {"quantization_config": {"quant_method": "modelopt", "exclude_modules": ["*gate*"]}}
    wanted = [name for name in stored if name.endswith(".weight")]
    got = loaded(stored, wanted, config, dtype=torch.float32)
    assert torch.equal(got["model.layers.0.self_attn.o_proj.weight"], code.float() * 0.5)
    assert got["model.layers.0.mlp.up_proj.weight"].shape == (4, 32)
    assert torch.equal(got["model.layers.0.mlp.gate.weight"], torch.ones(2, 2))
    kept = loaded(stored, [*stored], config)
    assert all(torch.equal(kept[name].float(), stored[name].float()) for name in stored)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (6,)])
def test_quark_has_scales_per_tensor_or_channel(
    dtype: torch.dtype, shape: tuple[int, ...], unpacked: Unpacked
) -> None:
    """``Pack_8_bits`` leaves both as they are; ``dequantize`` is (codes - zero) * scale."""
    code = torch.arange(48, dtype=torch.uint8).view(6, 8).view(dtype)
    scale = torch.full(shape, 0.25)
    parts = {
        "weight": code,
        "weight_scale": scale,
        "weight_zero_point": torch.full(shape, 3).char(),
    }
    assert torch.equal(unpacked(QUARK, parts), (code.float() - 3) * 0.25)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (TensorType("I8", (64, 8)), TensorType("F32", (2, 8))),
        (TensorType("U8", (8, 64)), TensorType("F32", (8,))),
        (TensorType("I32", (64, 8)), TensorType("F32", (2, 64))),
    ],
)
def test_what_quark_transposes_or_reorders_is_refused(
    weight: TensorType, scale: TensorType
) -> None:
    with pytest.raises(RecipeError, match="Quark's own modules"):
        QUARK.infer({"weight": weight, "weight_scale": scale}, {})


def test_awq_of_modelopt_is_refused_as_it_scales_the_inputs() -> None:
    parts = {
        "weight": TensorType("U8", (8, 16)),
        "weight_scale": TensorType("F8_E4M3", (8, 2)),
        "weight_scale_2": TensorType("F32", ()),
        "pre_quant_scale": TensorType("BF16", (32,)),
    }
    with pytest.raises(RecipeError, match="pre_quant_scale scales the inputs"):
        MODELOPT.infer(parts, {})


def test_the_tile_order_of_eetq_is_refused_and_not_read_as_rows() -> None:
    parts = {"weight": TensorType("I8", (64, 32)), "weight_scales": TensorType("F16", (32,))}
    with pytest.raises(RecipeError, match=r"tile order of the GPU.*EETQ's own modules"):
        Eetq().infer(parts, {})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weight_packed": TensorType("I8", (8, 16))}, "weight_packed must be U8"),
        ({"weight_scale": TensorType("F8_E4M3", (8, 4))}, "weight_scale must be F8_E4M3"),
        ({"weight_scale": TensorType("U8", (8, 2))}, "weight_scale must be F8_E4M3"),
        ({"weight_packed": TensorType("U8", (8, 12))}, "weight_scale must be F8_E4M3"),
        ({"weight_global_scale": TensorType("F32", (2,))}, "weight_global_scale must be one"),
    ],
)
def test_companions_that_do_not_fit_are_refused(changed: dict[str, TensorType], said: str) -> None:
    parts = {
        "weight_packed": TensorType("U8", (8, 16)),
        "weight_scale": TensorType("F8_E4M3", (8, 2)),
        "weight_global_scale": TensorType("F32", (1,)),
        **changed,
    }
    with pytest.raises(RecipeError, match=said):
        NVFP4.infer(parts, {})
    with pytest.raises(RecipeError, match="not an MXFP4 weight"):
        MXFP4.infer({"weight_packed": FP4, "weight_scale": TensorType("F32", (8, 1))}, {})


FP4 = TensorType("U8", (8, 16))
