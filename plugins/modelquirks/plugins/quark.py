"""AMD Quark: FP8 and int8 per tensor or channel, and MXFP4, as its ``QParamsLinear`` exports them.

``weight`` is F8 or I8 ``[out, in]`` with ``weight_scale`` ``[]`` or ``[out]``, or U8
``[out, in/2]`` with an exponent per 32 values (``Pack_fp4`` in ``torch/utils/pack.py`` and
``to_e8m0_uint8`` in ``torch/utils/numerics.py`` of amd-quark 0.13). Integers with a scale per group
lie transposed, and those of 4 bits in one of two orders within a word: they are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelquirks.plugins.nvfp4 import ByStorage
from modelquirks.plugins.packrecords import KV_SCALES, TRANSFORMERS, linear, pack_record
from modelquirks.plugins.scalegrid import EXPONENTS
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks

__all__ = ["RECORDS", "Quark", "modelquirks_records", "modelquirks_schemes"]


class Quark(ByStorage):
    """Reads what Quark makes of a ``Linear``, but for integers per group and of 4 bits."""

    name: str = "quark"

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return type of the plain weight; RecipeError if there is none."""
        weight, scale = parts["weight"], parts["weight_scale"]
        per_group = weight.dtype == "I8" and min(scale.shape or (), default=1) > 1
        per_group &= len(scale.shape or ()) > 1
        unsigned = weight.dtype == "U8" and scale.dtype not in EXPONENTS
        if per_group or unsigned or weight.dtype == "I32":
            raise RecipeError(
                f"integers of Quark that are unsigned, per group or of 4 bits are not read: weight "
                f"{weight} with weight_scale {scale}; load them with Quark's own modules"
            )
        return super().infer(parts, settings)


RECORDS = (
    pack_record(
        "quark",
        Match(quant_methods=("quark",), any_of=("**.weight_scale",)),
        linear(
            "quark",
            "weight weight_scale",
            "weight_zero_point input_scale input_zero_point output_scale output_zero_point "
            "bias_scale bias_zero_point",
        ),
        overrides=("scaled",),
        extra=KV_SCALES,
        why="AMD Quark: weight in FP8, int8 or 4-bit floats, told by its dtype and the scales",
        url=f"{TRANSFORMERS}/quantizers/quantizer_quark.py",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the record of Quark."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the scheme of Quark."""
    return (Quark(),)
