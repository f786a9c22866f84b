"""Scales laid over a weight: one for all, one per row, per group of columns or per block.

A scale tensor has one value for each box of a grid on the weight. Which boxes is told by the two
shapes and, where they leave that open, by config.json. Partial boxes at the far edges are legal:
576 columns in blocks of 128 have 5 scales. Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from modelquirks.quirks.recipe import RecipeError, Region, TensorType

if TYPE_CHECKING:
    import torch

__all__ = [
    "EXPONENTS",
    "Blocks",
    "aligned",
    "apply_scales",
    "as_float32",
    "blocks_of",
    "numbers",
    "scale_region",
    "unused",
    "written",
]

Blocks = tuple[int, ...]
"""Values that share a scale, by dimension of the weight."""

EXPONENTS = ("U8", "F8_E8M0")
"""How scales of MX formats are stored: a byte is the exponent of a power of two."""
_MX_GROUP = 32
"""Values that share an exponent, by OCP Microscaling Formats 1.0 §5.1."""
_CHUNK = 1 << 18
"""Values computed at a time: 1 MiB of float32, which fits in a cache."""


def written(numbers: Sequence[int]) -> str:
    """Return sizes as a setting, for example ``128x128``."""
    return "x".join(map(str, numbers))


def numbers(setting: object) -> tuple[int, ...]:
    """Return the sizes in a setting that :func:`written` wrote.

    >>> numbers(written((1, 128)))
    (1, 128)
    """
    return tuple(int(size) for size in str(setting).split("x"))


def unused(parts: Mapping[str, TensorType]) -> dict[str, Region]:
    """Return an empty region of each of *parts*: what a scheme need not read."""
    return {role: tuple((0, 0) for _ in kind.shape or ()) for role, kind in parts.items()}


def aligned(scale: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the shape of a scale tensor with as many dimensions as the weight has.

    ``[]``, ``[1]`` and ``[out]`` lack dimensions at the end; ModelOpt writes a block scale as
    ``[out/128, 1, in/128, 1]``.

    >>> aligned((), 2), aligned((64,), 2), aligned((5, 1, 7, 1), 2)
    ((1, 1), (64, 1), (5, 7))
    """
    if len(scale) == 2 * rank and set(scale[1::2]) == {1}:
        return scale[::2]
    return (*scale, *([1] * (rank - len(scale))))


def blocks_of(
    weight: tuple[int, ...],
    scale: TensorType,
    stated: tuple[int, int] | None = None,
    usual: int | None = None,
) -> Blocks:
    """Return how many values share a scale in each dimension; RecipeError if that is open.

    *stated* is the block of the last two dimensions that config.json gives: the scales must be
    those of it, or one for all; *usual* is tried without it.

    >>> blocks_of((576, 7168), TensorType("F32", (5, 56)), (128, 128))
    (128, 128)
    >>> blocks_of((64, 96), TensorType("BF16", (64, 1)))
    (1, 96)
    """
    rank, shape = len(weight), aligned(scale.shape or (), len(weight))
    if len(scale.shape or ()) < 2 and set(shape) == {1}:
        stated = None  # one scale for all has no block
    if len(shape) != rank:
        raise RecipeError(f"a scale {scale} does not belong to a weight {list(weight)}")
    per_dim = (None,) * (rank - 2) + (stated or (None, None))
    blocks: list[int] = []
    for size, count, known in zip(weight, shape, per_dim[-rank:], strict=True):
        mx = _MX_GROUP if scale.dtype in EXPONENTS else None
        block = _block(size, count, known, usual, mx)
        if block is None:
            said = f"blocks of {known}" if known else "config.json does not tell the block size"
            raise RecipeError(
                f"{count} scales for {size} values ({scale} for a weight {list(weight)}): {said}; "
                "state weight_block_size (or group_size) in quantization_config of config.json"
            )
        blocks.append(block)
    return tuple(blocks)


def _block(
    size: int, count: int, stated: int | None, usual: int | None, mx: int | None
) -> int | None:
    if stated and not mx:  # a scale that covers more, or less, than config.json says is damaged
        return (max(size, 1) if count == 1 else stated) if -(-size // stated) == count else None
    if count == 1:
        return max(size, 1)
    if count == size:
        return 1
    for known in (stated, mx, None if stated else usual):
        if known and -(-size // known) == count:
            return known
    even = size // count if count and size % count == 0 else 0
    # Without config.json only powers of two are believed: 2 scales of 192 values may be 128 + 64.
    return even if stated is None and even and even & (even - 1) == 0 else None


def scale_region(region: Region, blocks: Blocks, scale: tuple[int, ...]) -> Region:
    """Return the region of a *scale* of that shape which *region* of the weight needs."""
    rank = len(region)
    shape = aligned(scale, rank)
    found = [
        (0, 1) if count == 1 else (start // block, -(-stop // block))
        for (start, stop), block, count in zip(region, blocks, shape, strict=True)
    ]
    if len(scale) == 2 * rank:
        return tuple(bounds for pair in found for bounds in (pair, (0, 1)))
    return tuple(found[: len(scale)])


def as_float32(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; bytes are E8M0 exponents, of which 255 is not a number."""
    import torch

    if scale.dtype == torch.uint8:
        scale = scale.contiguous().view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def apply_scales(
    decode: Callable[[slice], torch.Tensor],
    region: Region,
    blocks: Blocks,
    dtype: torch.dtype,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``(values - zero) * scale`` of *region* in *dtype*, computed in float32.

    *decode* gives some rows of the region (all dimensions but the last in one) as a float32
    matrix that may be overwritten. *scale* and *zero* are float32 and hold what
    :func:`scale_region` named. *groups* says for each column in which group it is, where columns
    were sorted; then *scale* and *zero* hold all groups.
    """
    import torch

    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise RecipeError(f"a packed weight cannot be made in {dtype}: ask for a 16-bit float")
    sizes = [stop - start for start, stop in region]
    n_rows, n_columns, start = math.prod(sizes[:-1]), sizes[-1], region[-1][0]
    factors = _by_row(scale, region[:-1], blocks)
    offsets = None if zero is None else _by_row(zero, region[:-1], blocks)
    block = 1 if groups is not None else blocks[-1]
    out = torch.empty((n_rows, n_columns), dtype=dtype, device=scale.device)
    step = max(1, _CHUNK // max(1, n_columns))
    for first in range(0, n_rows, step):
        rows = slice(first, first + step)
        values = decode(rows)
        if offsets is not None:
            for piece, offset in _pieces(values, _chosen(offsets[rows], groups), start, block):
                piece.sub_(offset)
        for piece, factor in _pieces(values, _chosen(factors[rows], groups), start, block):
            piece.mul_(factor)
        out[rows] = values
    return out.view(sizes)


def _chosen(factors: torch.Tensor, groups: torch.Tensor | None) -> torch.Tensor:
    return factors if groups is None else factors.index_select(1, groups)


def _by_row(scale: torch.Tensor, rows: Region, blocks: Sequence[int]) -> torch.Tensor:
    """Return the factors of each row, ``[rows, groups]``, of all dimensions but the last."""
    import torch

    shape = aligned(tuple(scale.shape), len(rows) + 1)
    scale = scale.reshape(shape)
    for dim, (start, stop) in enumerate(rows):
        if shape[dim] > 1 and blocks[dim] > 1:
            number = torch.arange(start, stop, device=scale.device) // blocks[dim]
            scale = scale.index_select(dim, number - start // blocks[dim])
    sizes = [stop - start for start, stop in rows]
    return scale.expand(*sizes, -1).reshape(math.prod(sizes), shape[-1])


def _pieces(
    values: torch.Tensor, factors: torch.Tensor, start: int, block: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of *values* with the factors that broadcast over them.

    Column 0 of *values* is column *start* of the weight: a partial group, whole ones, a partial.
    """
    if factors.shape[1] == 1:
        yield values, factors
        return
    stop = start + values.shape[1]
    head = min(stop, -(-start // block) * block)
    tail = max(head, stop // block * block)
    if start < head:
        yield values[:, : head - start], factors[:, :1]
    if head < tail:
        first, count = head // block - start // block, (tail - head) // block
        whole = values[:, head - start : tail - start]
        whole = whole.view(values.shape[0], count, block)
        yield whole, factors[:, first : first + count, None]
    if tail < stop:
        yield values[:, tail - start :], factors[:, -1:]
