"""compressed-tensors, ``pack-quantized``: integers of 1 to 8 bits in 32-bit words.

``weight_packed`` I32 ``[*lead, out, ceil(in*bits/32)]`` holds codes along the inputs as one stream
of bits; a code minus ``2**(bits-1)`` is the signed integer. ``weight_scale`` is ``[1]``,
``[out, 1]`` or ``[out, in/group]``; ``weight_shape`` I64 holds the shape **as values**. Without a
value at hand the shape is known where scales are per group: groups are never partial.
``weight_zero_point`` is I32, packed along the outputs, or I8, as it is; ``weight_g_idx`` I32
``[in]`` says in which group each input is (-1: not sorted). Sources: ``compressors/pack_quantized``
and ``quantization/lifecycle/forward_helpers.py`` of compressed-tensors 0.20, and for
``weight_g_idx``, gone since, ``forward.py`` of 0.12.

Results are ``(integer - zero_point) * scale`` in float32, rounded once: in the dtype of the scale
equal to those of the library to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from modelquirks.plugins.bitstream import WORD, block, unpack, words_for
from modelquirks.plugins.codes import INT4, Decode, nibble_decoder
from modelquirks.plugins.config_groups import group_weights
from modelquirks.plugins.declared import declared, number
from modelquirks.plugins.fp8 import plain_dtype, scaled_linear
from modelquirks.plugins.packrecords import COMPRESSED_TENSORS, KV_SCALES, linear, pack_record
from modelquirks.plugins.scalegrid import (
    apply_scales,
    as_float32,
    blocks_of,
    numbers,
    scale_region,
    unused,
    written,
)
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks

if TYPE_CHECKING:
    import torch

__all__ = ["RECORDS", "CtPackQuantized", "modelquirks_records", "modelquirks_schemes"]

_PACKED, _SCALE, _SHAPE = "weight_packed", "weight_scale", "weight_shape"
_ZERO, _SORTED = "weight_zero_point", "weight_g_idx"


class CtPackQuantized(Scheme):
    """Reads ``weight_packed``, ``weight_scale``, ``weight_shape``, zero points and groups."""

    name: str = "ct_pack_quantized"
    roles: tuple[str, ...] = (_PACKED, _SCALE, _SHAPE)
    peeks: tuple[str, ...] = (_SHAPE,)

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return ``bits`` and ``group_size`` (0: none) of the config group of *weight*.

        Without a config both follow from the shapes, once ``weight_shape`` is read.
        """
        weights = group_weights(declared(config), weight)
        if (kind := weights.get("type", "int")) != "int":
            raise RecipeError(f"config.json says {weight!r} is of type {kind!r}, it is stored int")
        found: dict[str, int] = {}
        if (bits := number(weights, "num_bits")) is not None:
            if not 1 <= bits <= 8:
                raise RecipeError(f"config.json says num_bits is {bits}: 1 to 8 are possible")
            found["bits"] = bits
        if weights:
            found["group_size"] = max(0, number(weights, "group_size") or 0)
        return found

    def varies(self, config: Mapping[str, Any]) -> bool:
        """Tell whether there are several config groups."""
        groups = declared(config).get("config_groups")
        return isinstance(groups, Mapping) and len(groups) > 1

    def peek(self, values: Mapping[str, Any], settings: Settings) -> Settings:
        """Return ``shape``, for example ``4096x4096``, from the values of ``weight_shape``."""
        return {"shape": written([int(size) for size in values[_SHAPE].tolist()])}

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return a 16-bit float; RecipeError if the companions do not fit.

        The shape is None without ``shape``, unless the scales are per group of a known size.
        """
        packed, scale = parts[_PACKED], parts[_SCALE]
        if packed.dtype != "I32" or not packed.shape or len(packed.shape) < 2:
            raise RecipeError(f"{_PACKED} is {packed}, it must be I32 with two dimensions or more")
        if scale.dtype not in ("F32", "BF16", "F16"):
            raise RecipeError(f"{_SCALE} is {scale}, it must be a float")
        shape = _shape(parts, settings)
        if shape is not None:
            _fitting(parts, shape, settings)
        return TensorType(plain_dtype(scale), shape)

    def layout(self, parts: Mapping[str, TensorType], settings: Settings) -> Settings:
        """Return ``bits``, ``blocks`` and ``shape`` of the whole weight."""
        shape = _shape(parts, settings)
        if shape is None:
            raise RecipeError("the shape of the weight is in weight_shape, which was not read")
        bits, blocks = _fitting(parts, shape, settings)
        return {"bits": bits, "blocks": written(blocks), "shape": written(shape)}

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the words with the codes of *region*, its scales, zero points and groups."""
        bits, blocks = int(settings["bits"]), numbers(settings["blocks"])
        *outer, (start, stop) = region
        words = words_for(start, stop, bits, _words(parts[_PACKED]))
        scale = parts[_SCALE].shape or ()
        factors = scale_region(region, blocks, scale)
        needed = {_PACKED: (*outer, words), _SCALE: factors}
        if _SORTED in parts:
            needed[_SORTED] = ((start, stop),)
        if _SORTED in parts and scale:
            needed[_SCALE] = factors = (*factors[:-1], (0, scale[-1]))
        if _ZERO in parts:
            needed[_ZERO] = _zero_region(parts[_ZERO], region, factors, bits)
        return {**unused(parts), **needed}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype* from the parts that :meth:`regions` named."""
        bits, blocks = int(settings["bits"]), numbers(settings["blocks"])
        scale, zero = as_float32(parts[_SCALE]), _zero(parts.get(_ZERO), region, bits)
        start, groups = region[-1][0], parts.get(_SORTED)
        if groups is not None and bool((groups < 0).any()):  # never filled in: not sorted
            groups = None
            first, last = start // blocks[-1], -(-region[-1][1] // blocks[-1])
            scale, zero = scale[..., first:last], None if zero is None else zero[..., first:last]
        decode = _decoder(parts[_PACKED], bits, start, region[-1][1] - start)
        return apply_scales(decode, region, blocks, dtype, scale, zero, groups)


def _words(packed: TensorType) -> int:
    return packed.shape[-1] if packed.shape else 0


def _shape(parts: Mapping[str, TensorType], settings: Settings) -> tuple[int, ...] | None:
    """Return the shape that was read, or that scales per group give; None if neither does."""
    packed, scale = parts[_PACKED].shape or (), parts[_SCALE].shape or (1,)
    if (said := settings.get("shape")) is not None:
        shape = numbers(said)
        if len(shape) != len(packed) or shape[:-1] != packed[:-1]:
            raise RecipeError(
                f"weight_shape says {list(shape)}, but {_PACKED} is {parts[_PACKED]}: its "
                "dimensions but the last must be the same"
            )
        return shape
    size = settings.get("group_size")
    if not size or len(scale) != len(packed):
        return None
    return (*packed[:-1], scale[-1] * int(size))


def _fitting(
    parts: Mapping[str, TensorType], shape: tuple[int, ...], settings: Settings
) -> tuple[int, tuple[int, ...]]:
    """Return bits and blocks of a weight of that *shape*; RecipeError if parts contradict it."""
    words, (*_, columns) = _words(parts[_PACKED]), shape
    possible = [bits for bits in range(1, 9) if math.ceil(columns * bits / WORD) == words]
    bits = settings.get("bits", possible[0] if len(possible) == 1 else None)
    if bits not in possible:
        said = "config.json does not give num_bits" if bits is None else f"num_bits is {bits}"
        raise RecipeError(
            f"{words} words for {columns} values (weight_packed {parts[_PACKED]}), but {said}: "
            "correct num_bits in config_groups of quantization_config"
        )
    group = int(settings.get("group_size") or 0)
    blocks = blocks_of(shape, parts[_SCALE], (1, group) if group else None)
    _zero_fits(parts, int(bits))
    groups = parts.get(_SORTED)
    if groups is not None and groups.shape != (columns,):
        raise RecipeError(f"{_SORTED} is {groups}, it must have {columns} values")
    return int(bits), blocks


def _zero_fits(parts: Mapping[str, TensorType], bits: int) -> None:
    zero, scale = parts.get(_ZERO), parts[_SCALE].shape or ()
    if zero is None:
        return
    expected = scale
    if zero.dtype == "I32" and len(scale) > 1:
        expected = (*scale[:-2], math.ceil(scale[-2] * bits / WORD), scale[-1])
    if zero.dtype not in ("I32", "I8") or zero.shape != expected:
        raise RecipeError(
            f"{_ZERO} is {zero}, it must be I8 like its scale {parts[_SCALE]}, or I32 with "
            f"{bits} bits a value along the outputs"
        )


def _zero_region(zero: TensorType, region: Region, factors: Region, bits: int) -> Region:
    """Return the region of zero points: of packed ones the words with those of the rows."""
    if zero.dtype != "I32" or len(factors) < 2:
        return factors
    words = words_for(*region[-2], bits, (zero.shape or (0, 0))[-2])
    return (*factors[:-2], words, factors[-1])


def _zero(zero: torch.Tensor | None, region: Region, bits: int) -> torch.Tensor | None:
    """Return zero points in float32, one for each scale."""
    import torch

    if zero is None or zero.dtype != torch.int32 or zero.dim() < 2:
        return None if zero is None else zero.float()
    start, stop = region[-2]
    skip = start % block(bits).codes
    rows = unpack(zero, bits, -2).narrow(-2, skip, stop - start)
    return rows.float() - (1 << (bits - 1))


def _decoder(packed: torch.Tensor, bits: int, start: int, count: int) -> Decode:
    """Return what gives the signed integers of rows of words: *count* of them from *start* on."""
    skip = start % block(bits).codes
    if bits == 4:
        return nibble_decoder(packed, INT4, skip, count)
    matrix = packed.reshape(-1, packed.shape[-1])

    def decode(rows: slice) -> torch.Tensor:
        codes = unpack(matrix[rows], bits, -1).narrow(-1, skip, count)
        return codes.float().sub_(1 << (bits - 1))

    return decode


RECORDS = (
    pack_record(
        "compressed_tensors",
        Match(all_of=("**.weight_packed", "**.weight_shape")),
        scaled_linear(),
        linear(
            "ct_pack_quantized",
            "weight_packed weight_scale weight_shape",
            "weight_zero_point weight_g_idx input_scale input_zero_point output_scale",
        ),
        extra=KV_SCALES,
        why=(
            "compressed-tensors, pack-quantized: integers of 1 to 8 bits in int32 words; "
            "weight_shape holds the shape as values"
        ),
        url=COMPRESSED_TENSORS,
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the record of pack-quantized weights."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the scheme of pack-quantized weights."""
    return (CtPackQuantized(),)
