"""Eight-bit values times scales: fine-grained FP8, FP8 and int8 per tensor, channel or group.

The weight is stored under its own name, in its own shape, as F8 (E4M3 or E5M2) or I8; the scales
lie beside it, one for each box of a grid (``scalegrid.py``). What multiplies is called
``weight_scale_inv`` by DeepSeek, ``scale`` in DeepSeek-V4, ``qscale_weight`` by Mistral and
``weight_scale`` by everybody else. Scales in U8 or E8M0 are exponents (UE8M0, MXFP8).

Results are ``(codes - zero_point) * scale`` in float32, rounded once: equal to the bit to
``Fp8Dequantize`` of transformers 5.24 (``integrations/finegrained_fp8.py``), and to
``dequantize`` of compressed-tensors 0.20 in the dtype of the scale. An exponent byte of 255 is
no number, as the standard has it; transformers makes it infinite where it is stored as U8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelquirks.plugins.codes import E2M1, Decode, nibble_decoder, value_decoder
from modelquirks.plugins.config_groups import group_weights
from modelquirks.plugins.declared import declared, number, text
from modelquirks.plugins.packrecords import KV_SCALES, TRANSFORMERS, linear, pack_record, roles
from modelquirks.plugins.scalegrid import (
    EXPONENTS,
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
from modelquirks.quirks.record import Match, ModelQuirks, Pack

__all__ = [
    "RECORDS",
    "Fp8Block",
    "Scaled",
    "modelquirks_records",
    "modelquirks_schemes",
    "plain_dtype",
    "scaled_linear",
    "stated_block",
]

_FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALES = ("F32", "BF16", "F16", "F64", *EXPONENTS)


def plain_dtype(scale: TensorType) -> str:
    """Return the dtype of the plain weight: a 16-bit one of the scale is that of the model."""
    return scale.dtype if scale.dtype in ("F16", "BF16") else "BF16"


def stated_block(config: Mapping[str, Any], weight: str) -> Settings:
    """Return ``block_rows`` and ``block_columns`` where config.json gives a block for *weight*.

    ``weight_block_size`` is that of FP8; ``block_structure`` and ``group_size`` are those of
    compressed-tensors and ModelOpt.
    """
    said = declared(config)
    weights = group_weights(said, weight)
    block = said.get("weight_block_size") or weights.get("block_structure")
    if isinstance(block, str):
        block = block.split("x")
    if block is None:
        size = number(weights, "group_size")
        block = (1, size) if size and size > 0 else None
    if block is None:
        return {}
    try:
        rows, columns = (int(size) for size in block)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"quantization_config of config.json says blocks of {block!r}, not rows and columns"
        ) from error
    if rows < 1 or columns < 1:
        raise RecipeError(f"quantization_config of config.json says blocks of {block!r}")
    return {"block_rows": rows, "block_columns": columns}


class Scaled(Scheme):
    """Reads ``weight`` ``[*lead, out, in]`` in F8 or I8 and ``weight_scale``.

    The scale is ``[]``, ``[1]``, ``[out]``, ``[out, 1]``, ``[out, in/g]`` or a grid of blocks;
    ``weight_zero_point``, where there is one, has its shape. The plain weight has the shape of
    ``weight``. FBGEMM's Llama 4 keeps the scales of ``experts.down_proj`` ``[E, in, out]`` as
    ``[E, out, 1]`` (``integrations/fbgemm_fp8.py`` of transformers 5.24): turned round.
    """

    name: str = "scaled"
    roles: tuple[str, ...] = ("weight", "weight_scale")
    codes: tuple[str, ...] = (*_FLOATS, "I8")
    """Dtypes of ``weight`` that this scheme reads."""
    pairs: tuple[str, ...] = ()
    """Dtypes of ``weight`` that hold two E2M1 values an element."""
    usual_block: int | None = None
    """Block size without a config.json, where the format has a usual one."""
    zero_role: str = "weight_zero_point"
    """The companion, of the shape of the scale, that is subtracted."""

    @property
    def code_role(self) -> str:
        """The companion that is multiplied."""
        return self.roles[0]

    @property
    def scale_role(self) -> str:
        """The companion that multiplies."""
        return self.roles[1]

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return the block that config.json states, and whether a scale is turned round."""
        found = dict(stated_block(config, weight))
        if method := text(declared(config), "quant_method"):
            found["turned"] = method == "fbgemm_fp8" and weight.endswith(".experts.down_proj")
        return found

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return a 16-bit float of the shape of the weight; RecipeError if the scale is no fit."""
        weight, scale = parts[self.code_role], parts[self.scale_role]
        faults: list[str] = []
        if weight.dtype not in (*self.codes, *self.pairs):
            faults.append(f"{self.code_role} must be {' or '.join((*self.codes, *self.pairs))}")
        if not weight.shape:
            faults.append(f"{self.code_role} must have dimensions")
        if scale.dtype not in _SCALES:
            faults.append(f"{self.scale_role} must be a float, or an exponent in a byte")
        if faults:
            found = f"{self.code_role} {weight} with {self.scale_role} {scale}"
            raise RecipeError(f"not a weight packed as {self.name}: {found}; {', '.join(faults)}")
        self.layout(parts, settings)
        zero = parts.get(self.zero_role)
        if zero is not None and zero.shape != scale.shape:
            raise RecipeError(f"{self.zero_role} {zero} is not of the shape of its scale {scale}")
        return TensorType(plain_dtype(scale), self._shape(weight))

    def layout(self, parts: Mapping[str, TensorType], settings: Settings) -> Settings:
        """Return ``blocks``, the values that share a scale by dimension, and ``turned``."""
        scale, shape = parts[self.scale_role], self._shape(parts[self.code_role])
        turned = settings.get("turned")
        if turned is None:
            turned = _seems_turned(shape, scale.shape or ())
        if turned and scale.shape is not None:
            scale = TensorType(scale.dtype, _swapped(scale.shape))
        rows, columns = settings.get("block_rows"), settings.get("block_columns")
        stated = None if rows is None or columns is None else (int(rows), int(columns))
        blocks = blocks_of(shape, scale, stated, self.usual_block)
        return {"blocks": written(blocks), "turned": turned}

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return *region* of the weight, the scales of the boxes it touches, and no more."""
        blocks, turned = numbers(settings["blocks"]), settings["turned"]
        shape = parts[self.scale_role].shape or ()
        found = scale_region(region, blocks, _swapped(shape) if turned else shape)
        scales = _swapped(found) if turned else found
        codes = self._stored(region, parts[self.code_role].dtype)
        needed = {self.code_role: codes, self.scale_role: scales}
        if self.zero_role in parts:
            needed[self.zero_role] = scales
        return {**unused(parts), **needed}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype* from the parts that :meth:`regions` named."""
        scale, zero = as_float32(parts[self.scale_role]), parts.get(self.zero_role)
        if settings["turned"]:
            scale = scale.transpose(1, 2)
        return apply_scales(
            self._decoder(parts[self.code_role], region),
            region,
            numbers(settings["blocks"]),
            dtype,
            scale,
            None if zero is None else zero.float(),
        )

    def _shape(self, weight: TensorType) -> tuple[int, ...]:
        shape = weight.shape or ()
        doubled = tuple(2 * columns for columns in shape[-1:])
        return (*shape[:-1], *doubled) if weight.dtype in self.pairs else shape

    def _stored(self, region: Region, dtype: str | None) -> Region:
        *outer, (start, stop) = region
        return (*outer, (start // 2, -(-stop // 2))) if dtype in self.pairs else region

    def _decoder(self, codes: Any, region: Region) -> Decode:
        start, stop = region[-1]
        if _is_byte(codes) and self.pairs:
            return nibble_decoder(codes, E2M1, start % 2, stop - start)
        return value_decoder(codes)


class Fp8Block(Scaled):
    """Reads ``weight`` in F8 and ``weight_scale_inv``, one per block of 128 by 128 values.

    ``weight_block_size`` of config.json says how large blocks are; stacked experts have
    ``[E, out, in]`` and ``[E, out/128, in/128]``. A weight in I8 or U8 holds two E2M1 values a
    byte, ``[out, in/2]``, with an exponent per 32: the experts of DeepSeek-V4.
    """

    name: str = "fp8_block"
    roles: tuple[str, ...] = ("weight", "weight_scale_inv")
    codes: tuple[str, ...] = _FLOATS
    pairs: tuple[str, ...] = ("I8", "U8")
    usual_block: int | None = 128

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return what :class:`Scaled` does, and the ``fmt`` of the codes where it is stated."""
        said = text(declared(config), "fmt")
        return {**super().settings(config, weight), **({"fmt": said} if said else {})}

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """As :class:`Scaled`; RecipeError too for codes of another ``fmt`` than config.json has."""
        made = super().infer(parts, settings)
        said, found = str(settings.get("fmt", ""))[:4].upper(), parts[self.code_role].dtype or ""
        if said in ("E4M3", "E5M2") and found in _FLOATS and not found.startswith(f"F8_{said}"):
            raise RecipeError(
                f"{self.code_role} is {found}, and quantization_config of config.json says fmt "
                f"{settings['fmt']!r}: one of them is wrong, and so would be the values"
            )
        return made


def _is_byte(codes: Any) -> bool:
    return codes.element_size() == 1 and not codes.dtype.is_floating_point


def _swapped(dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return *dims* of a stack of matrices with rows and columns exchanged."""
    return (dims[0], dims[2], dims[1]) if len(dims) == 3 else dims


def _seems_turned(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Tell whether a scale ``[E, n, 1]`` is for the columns of a weight ``[E, m, n]``.

    RecipeError where both n and m would do.
    """
    if len(weight) != 3 or len(scale) != 3 or scale[2] != 1 or scale[1] != weight[2]:
        return False
    if weight[1] == weight[2] != 1:
        raise RecipeError(
            f"a scale {list(scale)} may be for rows or columns of a weight {list(weight)}: state "
            "quant_method in quantization_config of config.json"
        )
    return weight[1] != weight[2]


def scaled_linear() -> Pack:
    """Return the pack of a ``Linear`` in 8 bits, alone or among others with fewer."""
    return linear(
        "scaled",
        "weight weight_scale",
        "weight_zero_point input_scale input_zero_point output_scale",
    )


def _experts(scheme: str, suffix: str, role: str) -> tuple[Pack, ...]:
    """Return the packs of stacked experts, parameters without ``.weight`` of their own."""
    names = ("**.experts.gate_up_proj", "**.experts.down_proj")
    return tuple(
        Pack(scheme, name, (("weight", name), (role, f"{name}_{suffix}"))) for name in names
    )


RECORDS = (
    pack_record(
        "fp8_block",
        Match(any_of=("**.weight_scale_inv", "**.experts.gate_up_proj_scale_inv")),
        linear("fp8_block", "weight weight_scale_inv", "activation_scale input_scale"),
        *_experts("fp8_block", "scale_inv", "weight_scale_inv"),
        extra=KV_SCALES,
        why=(
            "fine-grained FP8 of DeepSeek, Qwen and MiniMax: weight_scale_inv multiplies blocks "
            "of 128 by 128 values"
        ),
        url="https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md",
    ),
    pack_record(
        "fp8_scale",
        # The name alone is also that of norms, routers and layer scales.
        Match(
            quant_methods=("fp8",),
            all_of=("**.weight", "**.scale"),
            none_of=("**.weight_scale_inv", "**.qscale_weight"),
        ),
        Pack("fp8_block", "**.weight", (*roles("weight"), ("weight_scale_inv", "**.scale"))),
        why="DeepSeek-V4 calls the scale of a weight scale, and packs the experts as E2M1",
        url=f"{TRANSFORMERS}/quantizers/quantizer_finegrained_fp8.py",
    ),
    pack_record(
        "mistral_fp8",
        Match(any_of=("**.qscale_weight",)),
        Pack(
            "fp8_block",
            "**.weight",
            (*roles("weight"), ("weight_scale_inv", "**.qscale_weight")),
            (("activation_scale", "**.qscale_act"),),
        ),
        why="Mistral's own FP8 checkpoints call the scale of a weight qscale_weight",
        url=f"{TRANSFORMERS}/quantizers/quantizer_finegrained_fp8.py",
    ),
    pack_record(
        "scaled",
        Match(
            any_of=("**.weight_scale", "**.experts.gate_up_proj_scale"),
            none_of=(
                "**.weight_packed",
                "**.weight_scale_2",
                "**.weight_scale_inv",
                "**.centroids.weight",
            ),
        ),
        scaled_linear(),
        *_experts("scaled", "scale", "weight_scale"),
        extra=KV_SCALES,
        why=(
            "F8 or int8 values times weight_scale, one for all, per row or per group: FBGEMM, "
            "compressed-tensors (float- and int-quantized) and ModelOpt FP8"
        ),
        url=f"{TRANSFORMERS}/quantizers/quantizer_fbgemm_fp8.py",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of FP8 and of scaled 8-bit values."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the schemes of those records."""
    return (Fp8Block(), Scaled())
