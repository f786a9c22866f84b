"""Dtypes by the names that safetensors uses, their sizes, and their torch counterparts.

Source of the names: the ``Dtype`` enumeration of safetensors 0.8. ``C64`` is torch.complex64;
``C128`` is not a safetensors dtype but occurs in ``torch.save`` files.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "BITS",
    "FLOATS",
    "MAX_DIMS",
    "from_torch",
    "is_cast",
    "is_float",
    "nbytes",
    "to_torch",
    "torch_name",
]

BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "C128": 128,
}
"""Bits of one element in a file. An F4 shape counts values, two of which share a byte."""

FLOATS = frozenset(name for name in BITS if name[0] == "F" or name == "BF16")
"""Real floating-point dtypes: those that a cast may go between."""

MAX_DIMS = 64
"""Dimensions of a tensor, as torch allows them; a file that tells of more is not believed."""

_TORCH: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
    "C128": "complex128",
}
_NAMES = {torch_name: name for name, torch_name in _TORCH.items()}


def is_float(dtype: str | None) -> bool:
    """Tell whether *dtype* is a real floating-point type; an unknown one (None) is not."""
    return dtype in FLOATS


def is_cast(stored: str, planned: str) -> bool:
    """Tell whether values may go from one dtype to another: floats, and integers into wider ones.

    Below 8 bits values share bytes, so that torch copies none of them.

    >>> is_cast("BF16", "F32"), is_cast("U8", "I16"), is_cast("I16", "U8"), is_cast("F4", "BF16")
    (True, True, False, False)
    """
    if stored == planned:
        return True
    if is_float(stored) and is_float(planned):
        return min(BITS[stored], BITS[planned]) >= 8
    widens = stored[0] + planned[0] in ("II", "UU", "UI")
    return widens and BITS.get(stored, 0) < BITS.get(planned, 0)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes that a dense tensor takes.

    >>> nbytes("BF16", (201088, 2880)), nbytes("F4", (32,))
    (1158266880, 16)
    """
    return (math.prod(shape) * BITS[dtype] + 7) // 8


def from_torch(dtype: torch.dtype | str) -> str:
    """Return the safetensors name of a torch dtype, given as such or by any usual name.

    >>> from_torch("bfloat16"), from_torch("torch.float16"), from_torch("bf16"), from_torch("F32")
    ('BF16', 'F16', 'BF16', 'F32')
    """
    text = str(dtype).removeprefix("torch.")
    if text.upper() in BITS:
        return text.upper()
    aliases = {"bf16": "BF16", "fp16": "F16", "half": "F16", "fp32": "F32", "float": "F32"}
    name = _NAMES.get(text) or aliases.get(text) or {"double": "F64"}.get(text)
    if name is None:
        raise ValueError(
            f"dtype {text!r} is not known; known are torch's names such as 'bfloat16', and "
            f"{', '.join(sorted(BITS))}"
        )
    return name


def torch_name(dtype: str) -> str:
    """Return what torch and config.json call the dtype; ValueError if torch has none.

    >>> torch_name("BF16")
    'bfloat16'
    """
    if dtype not in _TORCH:
        raise ValueError(f"torch has no dtype for {dtype!r}")
    return _TORCH[dtype]


def to_torch(dtype: str) -> torch.dtype:
    """Return the torch dtype of that safetensors name; ValueError if this torch has none."""
    import torch

    found = getattr(torch, _TORCH.get(dtype, ""), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype for {dtype!r}")
    return found
