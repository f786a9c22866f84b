"""The ``mxfp4`` scheme: 32 four-bit values share one scale byte.

``blocks`` hold two values a byte along the input dimension, the low nibble first; a scale byte is
an E8M0 exponent, ``2 ** (byte - 127)``. Sources: OCP Microscaling Formats 1.0 §5, and
``integrations/mxfp4.py`` of transformers 5.24, whose results are reproduced to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from modelquirks.plugins.codes import E2M1
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType

if TYPE_CHECKING:
    import torch

__all__ = ["Mxfp4"]

_GROUP = 32
"""Values that share a scale."""
_BYTES = _GROUP // 2
_CHUNK = 1 << 14
"""Groups computed at a time: a few MiB of temporary memory, which is what fits in a cache."""


class Mxfp4(Scheme):
    """Reads ``blocks`` ``[*lead, out, in/32, 16]`` and ``scales`` ``[*lead, out, in/32]``.

    The plain weight is ``[*lead, out, in]``.
    """

    name: str = "mxfp4"
    roles: tuple[str, ...] = ("blocks", "scales")

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return BF16 ``[*lead, out, in]``; RecipeError if blocks and scales do not fit.

        BF16 is what transformers makes of it; any other floating-point dtype may be asked for.
        """
        blocks, scales = parts["blocks"], parts["scales"]
        shape = list(blocks.shape or ())
        faults: list[str] = []
        if blocks.dtype != "U8":
            faults.append("blocks must be U8")
        if scales.dtype not in ("U8", "F8_E8M0"):
            faults.append("scales must be U8")
        if len(shape) < 3 or shape[-1] != _BYTES:
            faults.append(f"blocks must be [..., out, in/{_GROUP}, {_BYTES}]")
        elif scales.shape != tuple(shape[:-1]):
            faults.append(f"scales must be {shape[:-1]}")
        if faults:
            found = f"blocks {blocks} with scales {scales}"
            raise RecipeError(f"not an mxfp4 weight: {found}; {', '.join(faults)}")
        *outer, n_groups, _ = shape
        return TensorType("BF16", (*outer, n_groups * _GROUP))

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the groups that *region* touches: its last dimension aligned outwards to 32."""
        *outer, (start, stop) = region
        groups = (start // _GROUP, -(-stop // _GROUP))
        scales = (*outer, groups)
        return {"blocks": (*scales, (0, _BYTES)), "scales": scales}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype* from the groups that :meth:`regions` named."""
        import torch

        blocks: torch.Tensor = parts["blocks"]
        bits = parts["scales"].contiguous().view(torch.uint8)
        *outer, n_groups = bits.shape
        result = _unpacked(blocks.reshape(-1, _BYTES), bits.reshape(-1), dtype)
        start, stop = region[-1]
        skip = start % _GROUP
        return result.view(*outer, n_groups * _GROUP)[..., skip : skip + stop - start]


def _unpacked(blocks: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[n, 32]`` values of ``[n, 16]`` bytes and their n scale bytes."""
    import torch

    pairs = _pairs(dtype).to(blocks.device)
    packed = torch.empty(blocks.shape, dtype=pairs.dtype, device=blocks.device)
    for start in range(0, blocks.shape[0], _CHUNK):
        chunk = slice(start, start + _CHUNK)
        index = blocks[chunk].reshape(-1).int()
        torch.index_select(pairs, 0, index, out=packed[chunk].view(-1))
        _scale(packed[chunk].view(dtype), bits[chunk, None])
    return packed.view(dtype)


@cache  # an expert of a few thousand groups takes little longer than the table
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """Return for each byte its two values, as one element that is twice as wide as *dtype*."""
    import torch

    wide = {2: torch.int32, 4: torch.int64, 8: torch.complex128}.get(dtype.itemsize)
    if wide is None or not dtype.is_floating_point:
        raise RecipeError(f"an mxfp4 weight cannot be made in {dtype}: ask for a 16-bit float")
    values = torch.tensor(E2M1, dtype=dtype, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack((values[byte & 0x0F], values[byte >> 4]), dim=-1).view(wide).view(256)


def _scale(values: torch.Tensor, bits: torch.Tensor) -> None:
    """Multiply *values* by ``2 ** (bits - 127)``, in place and exactly.

    An E8M0 byte is the exponent field of a float32; byte 0 is the subnormal 2**-127. Byte 255 is
    no number in the standard, and 2**128, no float32, in transformers: left to what it calls,
    which takes ten times as long.
    """
    import torch

    if bool((bits == 255).any()):
        torch.ldexp(values, bits.to(torch.int32) - 127, out=values)
        return
    field = bits.to(torch.int32) << 23
    scales = torch.where(field == 0, 1 << 22, field).view(torch.float32)
    # Fewer bytes to multiply with; float16 has too few exponents to hold the scales.
    values.mul_(scales.to(values.dtype) if values.dtype == torch.bfloat16 else scales)
