"""The mxfp4 scheme, against a computation by hand and against transformers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from modelquirks.plugins import mxfp4
from modelquirks.plugins.mxfp4 import Mxfp4
from modelquirks.quirks import RecipeError, TensorType

SCHEME = Mxfp4()


def packed(*shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random companions whose scales cause neither overflow nor underflow."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, shape, dtype=torch.uint8, generator=generator)
    return {"blocks": blocks, "scales": scales}


def types_of(parts: dict[str, torch.Tensor]) -> dict[str, TensorType]:
    return {role: TensorType("U8", tuple(tensor.shape)) for role, tensor in parts.items()}


def whole(parts: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    shape = SCHEME.infer(types_of(parts), {}).shape
    assert shape is not None
    weight: torch.Tensor = SCHEME.evaluate(parts, tuple((0, size) for size in shape), dtype, {})
    return weight


def region_of(parts: dict[str, torch.Tensor], region: Any, dtype: torch.dtype) -> torch.Tensor:
    regions = SCHEME.regions(region, types_of(parts), {})
    cut = {
        role: tensor[tuple(slice(*bounds) for bounds in regions[role])]
        for role, tensor in parts.items()
    }
    part: torch.Tensor = SCHEME.evaluate(cut, region, dtype, {})
    return part


def test_the_low_nibble_comes_first_and_the_scale_is_a_power_of_two() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :3] = torch.tensor([0x21, 0x7F, 0x90])
    scales = torch.tensor([[130]], dtype=torch.uint8)  # 2 ** 3
    weight = whole({"blocks": blocks, "scales": scales}, torch.float32)
    expected = [0.5 * 8, 1.0 * 8, -6.0 * 8, 6.0 * 8, 0.0, -0.5 * 8]
    assert weight[0, :6].tolist() == expected
    assert weight[0, 6:].tolist() == [0.0] * 26


def test_all_sixteen_values_are_those_of_the_standard() -> None:
    blocks = torch.arange(8, dtype=torch.uint8) * 0x22 + 0x10  # nibbles 0,1, 2,3 … 14,15
    parts = {
        "blocks": torch.cat((blocks, blocks)).view(1, 1, 16),
        "scales": torch.tensor([[127]], dtype=torch.uint8),
    }

    def e2m1(code: int) -> float:
        sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return math.copysign(size, -1.0 if sign else 1.0)

    got = whole(parts, torch.float32)[0, :16]
    assert [math.copysign(1, v) for v in got] == [math.copysign(1, e2m1(c)) for c in range(16)]
    assert got.tolist() == [e2m1(code) for code in range(16)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_every_byte_with_every_scale_equals_transformers(dtype: torch.dtype) -> None:
    """Bit for bit, also where the scale over- or underflows."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16)
    parts = {"blocks": blocks, "scales": scales}
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    ours = whole(parts, dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours.signbit(), theirs.signbit())


def test_more_groups_than_one_chunk_equal_transformers() -> None:
    parts = packed(2, mxfp4._CHUNK // 6, 7)
    theirs = convert_moe_packed_tensors(parts["blocks"], parts["scales"]).transpose(1, 2)
    assert torch.equal(whole(parts, torch.bfloat16), theirs)


def test_companions_need_not_be_contiguous() -> None:
    parts = packed(3, 5, 4)
    strided = {
        "blocks": parts["blocks"].transpose(0, 1).contiguous().transpose(0, 1),
        "scales": parts["scales"].transpose(0, 1).contiguous().transpose(0, 1),
    }
    assert torch.equal(whole(strided, torch.float32), whole(parts, torch.float32))


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_region_equals_that_part_of_the_whole(data: st.DataObject) -> None:
    parts = packed(3, 6, 3, seed=data.draw(st.integers(0, 9)))
    region = []
    for size in (3, 6, 96):
        start = data.draw(st.integers(0, size))
        region.append((start, data.draw(st.integers(start, size))))
    slices = tuple(slice(*bounds) for bounds in region)
    got = region_of(parts, tuple(region), torch.bfloat16)
    assert torch.equal(got, whole(parts, torch.bfloat16)[slices])


def test_a_region_reads_only_the_groups_that_it_touches() -> None:
    parts = types_of(packed(4, 8, 5))
    got = SCHEME.regions(((1, 2), (0, 8), (31, 65)), parts, {})
    assert got == {
        "blocks": ((1, 2), (0, 8), (0, 3), (0, 16)),
        "scales": ((1, 2), (0, 8), (0, 3)),
    }
    assert SCHEME.regions(((0, 4), (2, 3), (64, 96)), parts, {})["scales"][2] == (2, 3)


def test_the_released_shapes_give_the_shape_of_the_weight() -> None:
    parts = {
        "blocks": TensorType("U8", (32, 5760, 90, 16)),
        "scales": TensorType("U8", (32, 5760, 90)),
    }
    assert SCHEME.infer(parts, {}) == TensorType("BF16", (32, 5760, 2880))


@pytest.mark.parametrize(
    ("blocks", "scales", "said"),
    [
        (TensorType("F8_E4M3", (2, 3, 16)), TensorType("U8", (2, 3)), "blocks must be U8"),
        (TensorType("U8", (2, 3, 16)), TensorType("BF16", (2, 3)), "scales must be U8"),
        (TensorType("U8", (2, 3, 16)), TensorType("U8", (2, 4)), r"scales must be \[2, 3\]"),
        (TensorType("U8", (2, 3, 8)), TensorType("U8", (2, 3)), r"blocks must be \[..., out"),
        (TensorType("U8", (16,)), TensorType("U8", ()), r"blocks must be \[..., out"),
    ],
)
def test_companions_that_do_not_fit_are_refused_with_both_types(
    blocks: TensorType, scales: TensorType, said: str
) -> None:
    with pytest.raises(RecipeError, match=said) as raised:
        SCHEME.infer({"blocks": blocks, "scales": scales}, {})
    assert str(blocks) in str(raised.value)


def test_no_weight_is_made_in_a_dtype_that_cannot_hold_it() -> None:
    with pytest.raises(RecipeError, match="int32"):
        whole(packed(2, 3), torch.int32)
