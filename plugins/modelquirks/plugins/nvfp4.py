"""NVFP4 and MXFP4 in bytes: two E2M1 values a byte along the inputs, a scale per 16 or 32.

The low nibble comes first. NVFP4 has a scale in E4M3 per 16 values and one float32 for the whole
weight: ModelOpt's ``weight_scale_2`` **multiplies** (``NVFP4QTensor.dequantize`` of nvidia-modelopt
0.47), the ``weight_global_scale`` of compressed-tensors **divides** (``_dequantize`` in
``quantization/lifecycle/forward_helpers.py`` of 0.20). Both libraries combine the two scales in
float32 first, multiply, and round once; results here equal theirs to the bit. MXFP4 has an
exponent byte per 32 values (OCP Microscaling Formats 1.0 §5) and is left to ``mxfp4.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelquirks.plugins.codes import E2M1, nibble_decoder
from modelquirks.plugins.fp8 import Scaled, scaled_linear
from modelquirks.plugins.mxfp4 import Mxfp4
from modelquirks.plugins.packrecords import COMPRESSED_TENSORS, KV_SCALES, linear, pack_record
from modelquirks.plugins.scalegrid import EXPONENTS, apply_scales, unused
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks

__all__ = [
    "RECORDS",
    "ByStorage",
    "CtMxfp4",
    "CtNvfp4",
    "ModelOpt",
    "modelquirks_records",
    "modelquirks_schemes",
]

_GROUP = 16
"""Values that share a scale in NVFP4."""
_MX_GROUP = 32
_MX_BYTES = _MX_GROUP // 2


class CtNvfp4(Scheme):
    """Reads ``weight_packed`` ``[*lead, out, in/2]`` and ``weight_scale`` ``[*lead, out, in/16]``.

    ``weight_global_scale``, one value, divides. The plain weight is ``[*lead, out, in]``.
    """

    name: str = "ct_nvfp4"
    roles: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_global_scale")
    divides: bool = True
    """Whether the scale of the whole weight divides."""

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return BF16 ``[*lead, out, in]``; RecipeError if the companions do not fit."""
        packed, scale, of_all = (parts[role] for role in self.roles)
        shape = packed.shape or ()
        faults: list[str] = []
        if packed.dtype != "U8" or not shape:
            faults.append(f"{self.roles[0]} must be U8 with dimensions")
        if scale.dtype != "F8_E4M3" or scale.shape != _groups(shape, _GROUP // 2):
            faults.append(f"weight_scale must be F8_E4M3 {[*shape[:-1], f'in/{_GROUP}']}")
        if of_all.dtype not in ("F32", "BF16", "F16") or of_all.shape not in ((), (1,)):
            faults.append(f"{self.roles[2]} must be one float")
        if faults:
            found = ", ".join(f"{role} {parts[role]}" for role in self.roles)
            raise RecipeError(f"not an NVFP4 weight: {found}; {', '.join(faults)}")
        return TensorType("BF16", _doubled(shape))

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the bytes of *region*, the scales of the groups it touches, that of them all."""
        packed, scale, of_all = self.roles
        *outer, (start, stop) = region
        return {
            **unused(parts),
            packed: (*outer, (start // 2, -(-stop // 2))),
            scale: (*outer, (start // _GROUP, -(-stop // _GROUP))),
            of_all: tuple((0, size) for size in parts[of_all].shape or ()),
        }

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype* from the parts that :meth:`regions` named."""
        packed, scale, of_all = (parts[role] for role in self.roles)
        of_all, scale = of_all.float().reshape(()), scale.float()
        scale = scale / of_all if self.divides else scale * of_all
        start, stop = region[-1]
        blocks = (*([1] * (len(region) - 1)), _GROUP)
        return apply_scales(
            nibble_decoder(packed, E2M1, start % 2, stop - start), region, blocks, dtype, scale
        )


class CtMxfp4(Scheme):
    """Reads ``weight_packed`` ``[*lead, out, in/2]`` and ``weight_scale`` ``[*lead, out, in/32]``.

    The scale is an E8M0 exponent, ``2 ** (byte - 127)``. The plain weight is ``[*lead, out, in]``.
    """

    name: str = "ct_mxfp4"
    roles: tuple[str, ...] = ("weight_packed", "weight_scale")

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return BF16 ``[*lead, out, in]``; RecipeError if the companions do not fit."""
        packed, scale = (parts[role] for role in self.roles)
        shape = packed.shape or ()
        if (
            packed.dtype != "U8"
            or scale.dtype not in EXPONENTS
            or not shape
            or scale.shape != _groups(shape, _MX_BYTES)
        ):
            raise RecipeError(
                f"not an MXFP4 weight: {self.roles[0]} {packed}, weight_scale {scale}; they must "
                f"be U8 [..., out, in/2] and U8 or F8_E8M0 [..., out, in/{_MX_GROUP}]"
            )
        return TensorType("BF16", _doubled(shape))

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the groups that *region* touches."""
        packed, scale = self.roles
        *outer, (start, stop) = region
        groups = (start // _MX_GROUP, -(-stop // _MX_GROUP))
        octets = (groups[0] * _MX_BYTES, groups[1] * _MX_BYTES)
        return {**unused(parts), packed: (*outer, octets), scale: (*outer, groups)}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype* from the parts that :meth:`regions` named."""
        packed, scale = (parts[role] for role in self.roles)
        blocks = packed.view(*scale.shape, _MX_BYTES)
        return Mxfp4().evaluate({"blocks": blocks, "scales": scale}, region, dtype, settings)


class _ByteNvfp4(CtNvfp4):
    roles: tuple[str, ...] = ("weight", "weight_scale", "weight_scale_2")
    divides: bool = False


class _ByteMxfp4(CtMxfp4):
    roles: tuple[str, ...] = ("weight", "weight_scale")


class ByStorage(Scheme):
    """Reads ``weight`` with ``weight_scale`` by what is stored.

    ``weight`` in U8 ``[out, in/2]`` is NVFP4 with ``weight_scale_2``, and MXFP4 without; in F8 or
    I8 ``[out, in]`` it is a scaled weight.
    """

    roles: tuple[str, ...] = ("weight", "weight_scale")

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return the block of 8-bit weights, where config.json states one."""
        return Scaled().settings(config, weight)

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return type of the plain weight; RecipeError if the companions do not fit."""
        return _chosen(parts).infer(parts, settings)

    def layout(self, parts: Mapping[str, TensorType], settings: Settings) -> Settings:
        """Return the layout of 8-bit weights."""
        return _chosen(parts).layout(parts, settings)

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the regions that the format of this weight needs."""
        return _chosen(parts).regions(region, parts, settings)

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype* from the parts that :meth:`regions` named."""
        scheme = Scaled() if "blocks" in settings else _four_bits(parts)
        return scheme.evaluate(parts, region, dtype, settings)


class ModelOpt(ByStorage):
    """Reads what ModelOpt makes of a ``Linear``: NVFP4, MXFP4, FP8 or int8.

    ``pre_quant_scale`` (AWQ) belongs to the inputs and makes the weight another one than that of
    a plain module: refused.
    """

    name: str = "modelopt"

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return type of the plain weight; RecipeError if there is none."""
        if "pre_quant_scale" in parts:
            raise RecipeError(
                "pre_quant_scale scales the inputs of this Linear, so that its weight alone is not "
                "that of the plain module: load it with ModelOpt's own modules"
            )
        return super().infer(parts, settings)


def _chosen(parts: Mapping[str, TensorType]) -> Scheme:
    return _four_bits(parts) if parts["weight"].dtype == "U8" else Scaled()


def _four_bits(parts: Mapping[str, Any]) -> Scheme:
    return _ByteNvfp4() if "weight_scale_2" in parts else _ByteMxfp4()


def _doubled(octets: tuple[int, ...]) -> tuple[int, ...]:
    return (*octets[:-1], *(2 * size for size in octets[-1:]))


def _groups(octets: tuple[int, ...], per_group: int) -> tuple[int, ...] | None:
    """Return the shape of the scales of so many *octets*; None if the last group is partial."""
    if not octets or octets[-1] % per_group:
        return None
    return (*octets[:-1], octets[-1] // per_group)


RECORDS = (
    pack_record(
        "compressed_tensors_nvfp4",
        Match(all_of=("**.weight_packed", "**.weight_global_scale")),
        scaled_linear(),
        linear("ct_nvfp4", "weight_packed weight_scale weight_global_scale", "input_global_scale"),
        extra=KV_SCALES,
        why=(
            "compressed-tensors, nvfp4-pack-quantized: two 4-bit floats a byte, an F8 scale per "
            "16 values and one scale of all, which divides"
        ),
        url=COMPRESSED_TENSORS,
    ),
    pack_record(
        "compressed_tensors_mxfp4",
        Match(
            all_of=("**.weight_packed", "**.weight_scale"),
            none_of=("**.weight_shape", "**.weight_global_scale"),
        ),
        scaled_linear(),
        linear("ct_mxfp4", "weight_packed weight_scale", "input_global_scale"),
        extra=KV_SCALES,
        why=(
            "compressed-tensors, mxfp4-pack-quantized: two 4-bit floats a byte and an E8M0 scale "
            "per 32 values"
        ),
        url=COMPRESSED_TENSORS,
    ),
    pack_record(
        "modelopt",
        Match(any_of=("**.weight_scale_2",)),
        # Optional: the same checkpoint may keep some layers in plain FP8.
        linear("modelopt", "weight weight_scale", "weight_scale_2 input_scale pre_quant_scale"),
        extra=KV_SCALES,
        why=(
            "NVFP4 of NVIDIA ModelOpt: two 4-bit floats a byte in weight, an F8 scale per 16 "
            "values and weight_scale_2 over all, which multiplies; without the latter it is FP8"
        ),
        url="https://github.com/huggingface/transformers/issues/46772",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of 4-bit floats in bytes."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the schemes of those records."""
    return (CtNvfp4(), CtMxfp4(), ModelOpt())
