"""bitsandbytes: NF4 and FP4 with absmax per block, and LLM.int8() with one per row.

* 4 bits: ``weight`` ``[n, 1]``, the codes of the flattened weight, two a byte, the *high* nibble
  first; ``weight.absmax`` of each block of it, ``weight.quant_map`` the sixteen values. With
  double quantisation absmax is U8 and itself quantised by ``nested_absmax`` and
  ``nested_quant_map``. Shape, dtype and block sizes are in no header: they are the JSON of
  ``weight.quant_state.bitsandbytes__nf4`` (or ``__fp4``), read by :meth:`Bnb4bit.peek`.
  ``weight`` may be stored as any dtype (``bnb_4bit_quant_storage``); its bytes count.
* int8: ``weight`` I8 ``[out, in]`` and ``SCB`` F32 ``[out]``, the absolute maximum of each row:
  ``code * SCB / 127``. ``weight_format`` must be 0, rows: others are permuted for one GPU.

Sources: bitsandbytes 0.50, ``functional.py`` (``QuantState``, ``dequantize_4bit``) and
``backends/default/ops.py``, whose results on a CPU are reproduced to the bit, and
``nn/modules.py`` (``Int8Params``). Modules left out (``llm_int8_skip_modules``) are stored plain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from modelquirks.plugins.affine import must_be_float
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks, Pack

if TYPE_CHECKING:
    import torch

__all__ = ["RECORDS", "Bnb4bit", "BnbInt8", "modelquirks_records", "modelquirks_schemes"]

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
"""Dtypes that codes are stored as, and their bytes."""
_NESTED = ("nested_absmax", "nested_quant_map")
_CHUNK = 1 << 18
"""Codes computed at a time."""
_FORMATS = ("row", "col32", "col_turing", "col_ampere")
"""What the values of weight_format mean: INVERSE_LINEAR_8BIT_WEIGHTS_FORMAT_MAPPING."""


class Bnb4bit(Scheme):
    """Reads codes, ``absmax``, ``quant_map`` and ``quant_state``; nested ones where they are."""

    roles: tuple[str, ...] = ("weight", "absmax", "quant_map", "quant_state")
    peeks: tuple[str, ...] = ("quant_state",)

    def __init__(self, kind: str) -> None:
        """Make the scheme of *kind*: ``nf4`` or ``fp4``."""
        self.kind = kind
        self.name: str = f"bnb_{kind}"

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return dtype and shape that :meth:`peek` found; without it both are unknown.

        RecipeError if the parts do not fit.
        """
        weight = parts["weight"]
        faults: list[str] = []
        if weight.dtype not in _BYTES or (weight.shape or ())[1:] != (1,):
            faults.append("codes must be one column")
        nested = [role for role in _NESTED if role in parts]
        wanted = "U8" if nested else "F32"
        if parts["absmax"].dtype != wanted or len(nested) == 1:
            faults.append(f"absmax must be {wanted}, nested_absmax and nested_quant_map go with it")
        if parts["quant_map"] != TensorType("F32", (16,)):
            faults.append("quant_map must be F32 [16]")
        if nested and parts.get("nested_quant_map") != TensorType("F32", (256,)):
            faults.append("nested_quant_map must be F32 [256]")
        if "nested_absmax" in parts and parts["nested_absmax"].dtype != "F32":
            faults.append("nested_absmax must be F32")
        if not faults and "shape" in settings:
            faults += _count_faults(parts, settings)
        if faults:
            found = ", ".join(f"{role} {kind}" for role, kind in parts.items())
            raise RecipeError(f"not a {self.kind} weight: {found}; {'; '.join(faults)}")
        if "shape" not in settings:
            return TensorType(None, None)
        return TensorType(str(settings["dtype"]), _shape(settings))

    def peek(self, values: Mapping[str, Any], settings: Settings) -> Settings:
        """Return shape, dtype, block sizes and offset from the JSON in ``quant_state``."""
        try:
            said: dict[str, Any] = json.loads(bytes(values["quant_state"].flatten().tolist()))
            told: dict[str, str | int | float] = {
                "shape": "x".join(str(int(size)) for size in said["shape"]),
                "dtype": _DTYPES[said["dtype"]],
                "blocksize": int(said["blocksize"]),
            }
            if "nested_blocksize" in said:
                told["nested_blocksize"] = int(said["nested_blocksize"])
                told["nested_offset"] = float(said["nested_offset"])
            kind = said["quant_type"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecipeError(f"quant_state is not the JSON of bitsandbytes: {error!r}") from error
        if kind != self.kind:
            raise RecipeError(f"quant_state says {kind!r}, its name says {self.kind!r}")
        return told

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the codes from the first to the last of *region*, and their blocks."""
        start, stop = _span(region, _shape(settings))
        block, width = int(settings["blocksize"]), _BYTES[parts["weight"].dtype or ""]
        blocks = (start // block, -(-stop // block))
        needed: dict[str, Region] = {
            role: tuple((0, size) for size in kind.shape or ()) for role, kind in parts.items()
        }
        needed["weight"] = ((start // (2 * width), -(-stop // (2 * width))), (0, 1))
        needed["absmax"] = (blocks,)
        if "nested_absmax" in parts:
            nested = int(settings["nested_blocksize"])
            needed["nested_absmax"] = ((blocks[0] // nested, -(-blocks[1] // nested)),)
        return needed

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype*: value times absmax in float32, rounded once."""
        import torch

        must_be_float(dtype)
        shape = _shape(settings)
        start, stop = _span(region, shape)
        octets = parts["weight"].contiguous().view(torch.uint8).view(-1)
        block = int(settings["blocksize"])
        lead = start % (2 * parts["weight"].element_size())  # codes before the first
        absmax = _absmax(parts, start // block, settings)
        flat = _values(octets[lead // 2 :], parts["quant_map"], absmax, start, stop, block, dtype)
        sizes = tuple(b - a for a, b in region)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return flat.as_strided(sizes, strides)


def _shape(settings: Settings) -> tuple[int, ...]:
    return tuple(int(size) for size in str(settings["shape"]).split("x"))


def _span(region: Region, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the places of the first element of *region* and after its last, row by row.

    >>> _span(((1, 3), (2, 5)), (4, 10))
    (12, 25)
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * step for (start, _), step in zip(region, strides, strict=True))
    last = sum((stop - 1) * step for (_, stop), step in zip(region, strides, strict=True))
    return first, last + 1


def _count_faults(parts: Mapping[str, TensorType], settings: Settings) -> Iterable[str]:
    count, block = math.prod(_shape(settings)), int(settings["blocksize"])
    weight, blocks = parts["weight"], -(-count // block)
    width = 2 * _BYTES[weight.dtype or ""]
    if weight.shape != (-(-count // width), 1):
        yield f"{settings['shape']} values must be {-(-count // width)} rows of codes"
    if parts["absmax"].shape != (blocks,):
        yield f"{blocks} blocks of {block} must have an absmax each"
    if "nested_absmax" not in parts:
        return
    if "nested_blocksize" not in settings:
        yield "quant_state does not say nested_blocksize"
    elif parts["nested_absmax"].shape != (-(-blocks // int(settings["nested_blocksize"])),):
        yield f"nested_absmax must have one for {settings['nested_blocksize']} blocks"


def _absmax(parts: Mapping[str, torch.Tensor], first: int, settings: Settings) -> torch.Tensor:
    """Return the float32 absmax of the blocks at hand, of which *first* is the first."""
    import torch

    absmax = parts["absmax"]
    if "nested_absmax" not in parts:
        return absmax.float()
    nested = int(settings["nested_blocksize"])
    blocks = torch.arange(first, first + absmax.numel(), device=absmax.device)
    outer = parts["nested_absmax"].float()[blocks // nested - first // nested]
    made = parts["nested_quant_map"].float()[absmax.int()] * outer
    return made + float(settings["nested_offset"])


def _values(
    octets: torch.Tensor,
    table: torch.Tensor,
    absmax: torch.Tensor,
    start: int,
    stop: int,
    block: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the values *start* to *stop*; octets from the byte of *start*, absmax of its block."""
    import torch

    byte = torch.arange(256, device=octets.device)
    table = table.float()
    pairs = torch.stack((table[byte >> 4], table[byte & 0x0F]), -1).view(torch.int64).view(256)
    out = torch.empty(stop - start, dtype=dtype, device=octets.device)
    first = start - start % 2
    for begin in range(first, stop, _CHUNK):
        end = min(begin + _CHUNK, stop)
        part = octets[(begin - first) // 2 : -(-(end - first) // 2)]
        values = torch.index_select(pairs, 0, part.int()).view(torch.float32)[: end - begin]
        _scale(values, absmax, begin - start // block * block, block)
        skip = start - begin if begin == first else 0
        out[begin + skip - start : end - start] = values[skip:]
    return out


def _scale(values: torch.Tensor, absmax: torch.Tensor, start: int, block: int) -> None:
    """Multiply *values* in place, the first of which is number *start* of the blocks at hand."""
    head = min(-start % block, values.numel())
    body = head + (values.numel() - head) // block * block
    if head:
        values[:head] *= absmax[start // block]
    n_first, n_body = -(-start // block), (body - head) // block
    if n_body:
        values[head:body].view(n_body, block).mul_(absmax[n_first : n_first + n_body, None])
    if body < values.numel():
        values[body:] *= absmax[n_first + n_body]


class BnbInt8(Scheme):
    """Reads ``weight`` I8 ``[out, in]`` and ``SCB`` F32 ``[out]``."""

    name: str = "bnb_int8"
    roles: tuple[str, ...] = ("weight", "SCB")
    peeks: tuple[str, ...] = ("weight_format",)

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return F16 ``[out, in]``, which is what it was; RecipeError if parts do not fit."""
        weight, maxima = parts["weight"], parts["SCB"]
        shape = weight.shape or ()
        if weight.dtype != "I8" or len(shape) != 2 or maxima != TensorType("F32", shape[:1]):
            raise RecipeError(
                f"not an int8 weight of bitsandbytes: weight {weight} with SCB {maxima}; they must "
                "be I8 [out, in] and F32 [out]"
            )
        return TensorType("F16", shape)

    def peek(self, values: Mapping[str, Any], settings: Settings) -> Settings:
        """Raise RecipeError if ``weight_format`` says that the codes are not in rows."""
        number = int(values["weight_format"].flatten()[0])
        if number:
            named = _FORMATS[number] if number < len(_FORMATS) else str(number)
            raise RecipeError(
                f"weight_format is {named!r}, an order that one kind of GPU wants: save the model "
                "again with a current bitsandbytes, which writes rows"
            )
        return {}

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return *region* and the maxima of its rows."""
        needed = {"weight": region, "SCB": (region[0],)}
        if (kind := parts.get("weight_format")) is not None:
            needed["weight_format"] = tuple((0, size) for size in kind.shape or ())
        return needed

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype*: as ``int8_vectorwise_dequant``, rounded once."""
        import torch

        must_be_float(dtype)
        codes: torch.Tensor = parts["weight"]
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        scales = parts["SCB"].float()[:, None]
        step = max(1, _CHUNK // max(1, codes.shape[1]))
        for start in range(0, codes.shape[0], step):
            part = codes[start : start + step].float()
            out[start : start + step] = part.mul_(scales[start : start + step]).mul_(1 / 127)
        return out


def _record(name: str, match: Match, pack: Pack, why: str, file: str) -> ModelQuirks:
    base = "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/quantizers"
    return ModelQuirks(
        name=f"packed.bitsandbytes_{name}",
        role="quantization",
        match=match,
        packs=(pack,),
        why=why,
        url=f"{base}/{file}",
    )


def _four_bits(kind: str) -> ModelQuirks:
    state = f"**.weight.quant_state.bitsandbytes__{kind}"
    pack = Pack(
        f"bnb_{kind}",
        "**.weight",
        (
            ("weight", "**.weight"),
            ("absmax", "**.weight.absmax"),
            ("quant_map", "**.weight.quant_map"),
            ("quant_state", state),
        ),
        tuple((role, f"**.weight.{role}") for role in _NESTED),
    )
    return _record(
        kind,
        Match(any_of=(state,)),
        pack,
        "bitsandbytes: two 4-bit values a byte in one column; the shape of the weight is "
        "inside the JSON of quant_state",
        "quantizer_bnb_4bit.py",
    )


RECORDS = (
    _four_bits("nf4"),
    _four_bits("fp4"),
    _record(
        "8bit",
        Match(any_of=("**.SCB",)),
        Pack(
            "bnb_int8",
            "**.weight",
            (("weight", "**.weight"), ("SCB", "**.SCB")),
            (("weight_format", "**.weight_format"),),
        ),
        "bitsandbytes LLM.int8(): weight in int8, SCB the absolute maximum of each row",
        "quantizer_bnb_8bit.py",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of bitsandbytes."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the schemes of bitsandbytes."""
    return (Bnb4bit("nf4"), Bnb4bit("fp4"), BnbInt8())
