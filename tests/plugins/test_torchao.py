"""torchao's inner tensors: FP8 and int8 made plain, what may be int4 refused."""

from collections.abc import Callable

import pytest
import torch

from modelquirks.plugins.torchao import TorchAo
from modelquirks.quirks import RecipeError, TensorType

Unpacked = Callable[..., torch.Tensor]

SCHEME = TorchAo()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("shape", [(6, 1), (6, 4), (1, 1)])
def test_codes_times_scales(dtype: torch.dtype, shape: tuple[int, int], unpacked: Unpacked) -> None:
    """As ``dequantize_affine`` of torchao 0.18: (codes - zero point) * scale, by blocks."""
    codes = torch.arange(96, dtype=torch.uint8).view(6, 16).view(dtype)
    scale = torch.rand(shape, generator=torch.manual_seed(0)).bfloat16()
    grown = scale.float().repeat_interleave(6 // shape[0], 0).repeat_interleave(16 // shape[1], 1)
    parts = {"qdata": codes, "scale": scale}
    assert torch.equal(unpacked(SCHEME, parts, torch.bfloat16), (codes.float() * grown).bfloat16())
    parts["zero_point"] = torch.full(shape, 3, dtype=torch.int8)
    assert torch.equal(unpacked(SCHEME, parts), (codes.float() - 3) * grown)


I8 = TensorType("I8", (64, 32))


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"qdata": I8}, "only Float8 and Int8"),
        ({"qdata": I8, "scale_and_zero": TensorType("BF16", (2, 64, 2))}, "only Float8 and Int8"),
        (
            {"qdata": I8, "scale": TensorType("F32", (64, 1)), "act_pre_scale": I8},
            "only Float8 and Int8",
        ),
        ({"qdata": I8, "scale": TensorType("BF16", (2, 64))}, "int8 or two int4 a byte"),
        ({"qdata": I8, "scale": TensorType("BF16", (64, 64))}, "int8 or two int4 a byte"),
        ({"qdata": I8, "scale": TensorType("BF16", (64,))}, "int8 or two int4 a byte"),
    ],
)
def test_what_may_be_int4_is_refused(parts: dict[str, TensorType], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        SCHEME.infer(parts, {})
