"""EETQ: recognised, never made plain: its bytes lie in an order that the checkpoint does not tell.

``weight`` is I8 ``[in, out]`` beside ``weight_scales`` F16 ``[out]``, but what
``quant_weights(weight, torch.int8, False)`` returns, which ``EetqQuantize`` of transformers 5.24
stores (``integrations/eetq.py``), is the *processed* tensor of
``symmetric_quantize_last_axis_of_tensor`` (``csrc/weightonly.cu`` of EETQ): rows permuted and
columns interleaved in tiles, with a bias of 128, as the tensor cores of the GPU at hand read them.
Which GPU that was is not stored, so that the values cannot be put back in order with certainty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelquirks.plugins.packrecords import linear, pack_record
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks

__all__ = ["RECORDS", "Eetq", "modelquirks_records", "modelquirks_schemes"]

_REFUSED = (
    "EETQ stores int8 weights in the tile order of the GPU that quantised them, and not which GPU "
    "that was: load them into EETQ's own modules, or take a checkpoint that is not packed"
)


class Eetq(Scheme):
    """Refuses to make a plain weight of ``weight`` and ``weight_scales``."""

    name: str = "eetq"
    roles: tuple[str, ...] = ("weight", "weight_scales")

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Raise :class:`RecipeError`."""
        raise RecipeError(_REFUSED)

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Raise :class:`RecipeError`."""
        raise RecipeError(_REFUSED)

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Raise :class:`RecipeError`."""
        raise RecipeError(_REFUSED)


RECORDS = (
    pack_record(
        "eetq",
        Match(any_of=("**.weight_scales",)),
        linear("eetq", "weight weight_scales"),
        not_on=("disk",),
        why=(
            "EETQ: weight in int8, transposed and in the tile order of a GPU, with a scale per "
            "output"
        ),
        url="https://github.com/NetEase-FuXi/EETQ",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the record of EETQ."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the scheme that says why there is no plain weight."""
    return (Eetq(),)
