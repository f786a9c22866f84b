"""torchao: the inner tensors of its weights, of which FP8 and unpacked int8 are made plain.

``Float8Tensor`` and ``Int8Tensor`` (and ``IntxUnpackedToInt8Tensor``) store ``_weight_qdata``
``[out, in]`` in F8 or I8 and ``_weight_scale`` with as many dimensions, one value per row, per
group of inputs or for all; ``_weight_zero_point`` has its shape (``quantize_/workflows`` of torchao
0.18). ``Int4Tensor`` has I8 too, two codes a byte, and its scales are ``[in/g, out]``. Which class
it is stands in the metadata of the file, not in the header of the tensor: where shapes leave it
open, and for classes of four bits, the weight is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelquirks.plugins.fp8 import Scaled
from modelquirks.plugins.packrecords import TRANSFORMERS, pack_record
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks, Pack

__all__ = ["RECORDS", "TorchAo", "modelquirks_records", "modelquirks_schemes"]

_OTHERS = ("scale_and_zero", "per_tensor_scale", "act_pre_scale")


class TorchAo(Scaled):
    """Reads ``qdata`` in F8 or I8 ``[*lead, out, in]`` and ``scale`` of as many dimensions."""

    name: str = "torchao"
    roles: tuple[str, ...] = ("qdata", "scale")
    zero_role: str = "zero_point"

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return type of the plain weight; RecipeError if its class is not known or read."""
        kinds = ", ".join(f"{role} {kind}" for role, kind in parts.items())
        if "scale" not in parts or any(role in parts for role in _OTHERS):
            raise RecipeError(f"of torchao's classes only Float8 and Int8 are made plain: {kinds}")
        codes, scale = parts["qdata"], parts["scale"].shape or ()
        if codes.dtype == "I8" and not _by_row(codes.shape or (), scale):
            raise RecipeError(
                f"{kinds} may be int8 or two int4 a byte, and only the metadata of the file tells "
                "which: load it with torchao"
            )
        return super().infer(parts, settings)


def _by_row(codes: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Tell whether a scale is for whole rows or groups of them, and cannot be ``[in/g, out]``."""
    if len(scale) != len(codes) or len(codes) < 2:
        return False
    *_, rows, groups = scale
    if set(scale) == {1}:
        return codes[-2] > 1
    return rows == codes[-2] and groups != rows


RECORDS = (
    pack_record(
        "torchao",
        Match(any_of=("**._weight_qdata",)),
        Pack(
            "torchao",
            "**.weight",
            (("qdata", "**._weight_qdata"),),
            tuple((role, f"**._weight_{role}") for role in ("scale", "zero_point", *_OTHERS)),
        ),
        not_on=("disk",),
        why="torchao: the inner tensors of its weights; what they are is in the file's metadata",
        url=f"{TRANSFORMERS}/quantizers/quantizer_torchao.py",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the record of torchao."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the scheme of torchao."""
    return (TorchAo(),)
