"""Codes to weights where a group of codes shares a scale and a zero point or an offset.

Everything is computed in float32, a part that fits in a cache at a time, and rounded once to the
dtype that is asked for. ``(code - zero) * scale`` is exact in float32 for codes of up to 8 bits
and float16 or bfloat16 scales, so that the result is the correctly rounded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from modelquirks.quirks.recipe import RecipeError

if TYPE_CHECKING:
    import torch

__all__ = ["columns", "grouped", "must_be_float"]

_CHUNK = 1 << 20
"""Codes computed at a time: 4 MiB in float32."""


def columns(
    codes: Callable[[int, int], torch.Tensor],
    group: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    dtype: torch.dtype,
    step: int,
) -> torch.Tensor:
    """Return ``[out, in]`` in *dtype* of codes that lie as ``[in, out]``.

    *codes* gives the codes of the inputs start to stop, start being a multiple of *step*.
    *group* ``[in]`` holds the row of *scales* and *zeros* ``[groups, out]`` of each input.
    """
    import torch

    must_be_float(dtype)
    n_in, n_out = group.shape[0], scales.shape[1]
    scales, zeros = scales.float(), zeros.float()
    out = torch.empty((n_out, n_in), dtype=dtype, device=scales.device)
    for start, stop in _spans(n_in, n_out, step):
        rows = group[start:stop]
        part = codes(start, stop).float()
        part -= zeros.index_select(0, rows)
        part *= scales.index_select(0, rows)
        # First into order, then into place: a copy that does both at once is ten times as slow.
        out[:, start:stop] = part.to(dtype).T.contiguous()
    return out


def grouped(
    codes: Callable[[int, int], torch.Tensor],
    scales: torch.Tensor,
    dtype: torch.dtype,
    *,
    zeros: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    size: int,
) -> torch.Tensor:
    """Return ``[rows, groups * size]`` in *dtype* of codes that lie just so.

    *codes* gives the codes of the rows start to stop; *scales*, *zeros* (subtracted before)
    and *offsets* (added after) are ``[rows, groups]``.
    """
    import torch

    must_be_float(dtype)
    n_rows, n_groups = scales.shape
    out = torch.empty((n_rows, n_groups * size), dtype=dtype, device=scales.device)
    for start, stop in _spans(n_rows, n_groups * size, 1):
        part = codes(start, stop).float().view(stop - start, n_groups, size)
        if zeros is not None:
            part -= zeros[start:stop, :, None].float()
        part *= scales[start:stop, :, None].float()
        if offsets is not None:
            part += offsets[start:stop, :, None].float()
        out[start:stop] = part.view(stop - start, -1)
    return out


def _spans(size: int, width: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield spans of *size* rows of *width* codes: multiples of *step*, each of bounded memory."""
    length = max(step, _CHUNK // max(1, width) // step * step)
    for start in range(0, size, length):
        yield start, min(start + length, size)


def must_be_float(dtype: torch.dtype) -> None:
    """Raise RecipeError if weights cannot be made in *dtype*."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise RecipeError(f"no weight can be made in {dtype}: ask for a float of 16 bits or more")
