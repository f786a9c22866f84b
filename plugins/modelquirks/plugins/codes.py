"""Stored codes of 8 and 4 bits as float32 values, by lookup tables.

torch converts float8 on a CPU one value at a time; looking two codes up at once is five times as
fast. Values are exact: float32 holds all of E4M3, E5M2 and E2M1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["E2M1", "INT4", "Decode", "nibble_decoder", "value_decoder"]

Decode = Callable[[slice], "torch.Tensor"]
"""Some rows of a matrix of codes → their values, a float32 matrix that may be overwritten."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""The sixteen values of four bits: sign, two bits of exponent, one of mantissa. Source: OCP
Microscaling Formats 1.0 §5.3.3."""


INT4 = tuple(float(value) for value in range(-8, 8))
"""Signed integers of four bits that are stored plus 8."""


def value_decoder(codes: torch.Tensor) -> Decode:
    """Return the decoder of float8 or integer *codes*, any shape: rows are all but the last."""
    import torch

    matrix = codes.reshape(-1, codes.shape[-1])
    if not codes.dtype.is_floating_point:
        return lambda rows: matrix[rows].to(torch.float32)
    octets = matrix.contiguous().view(torch.uint8)
    single = _octets(codes.dtype).to(codes.device)
    double = _octet_pairs(codes.dtype).to(codes.device)

    def decode(rows: slice) -> torch.Tensor:
        chosen = octets[rows]
        flat = chosen.view(-1)
        if flat.numel() % 2 or flat.storage_offset() % 2:
            found = torch.index_select(single, 0, flat.int())
        else:
            found = torch.index_select(double, 0, flat.view(torch.uint16).int())
        return found.view(torch.float32).view(chosen.shape)

    return decode


def nibble_decoder(
    octets: torch.Tensor, values: tuple[float, ...], skip: int, columns: int
) -> Decode:
    """Return the decoder of bytes, or words of such, with two codes each, the low nibble first.

    A code stands for one of 16 *values*. Of each row it gives *columns* after the first *skip*.
    """
    import torch

    matrix = octets.contiguous().view(torch.uint8)
    matrix = matrix.view(-1, matrix.shape[-1])
    table = _nibble_pairs(values).to(octets.device)

    def decode(rows: slice) -> torch.Tensor:
        chosen = matrix[rows]
        found = torch.index_select(table, 0, chosen.reshape(-1).int())
        pairs = found.view(torch.float32).view(chosen.shape[0], 2 * chosen.shape[1])
        return pairs[:, skip : skip + columns]

    return decode


@cache
def _octets(dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)


@cache
def _octet_pairs(dtype: torch.dtype) -> torch.Tensor:
    """Return for each two bytes their two float32 values, as one element of 64 bits."""
    import torch

    values, pair = _octets(dtype), torch.arange(1 << 16, device="cpu")
    both = (values[pair & 0xFF], values[pair >> 8])
    return _paired(*(both if sys.byteorder == "little" else both[::-1]))


@cache
def _nibble_pairs(values: tuple[float, ...]) -> torch.Tensor:
    import torch

    known = torch.tensor(values, dtype=torch.float32, device="cpu")
    octet = torch.arange(256, device="cpu")
    return _paired(known[octet & 0x0F], known[octet >> 4])


def _paired(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return two float32 values as one element of 64 bits, *first* at the lower address."""
    import torch

    return torch.stack((first, second), dim=-1).view(torch.int64).view(-1)
