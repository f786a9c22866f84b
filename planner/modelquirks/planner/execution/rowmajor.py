"""``row_major``: a tensor in pieces, each of them in one piece in memory, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from modelquirks.planner.execution.reader import Region

__all__ = ["row_major"]


def row_major(shape: tuple[int, ...], limit: int) -> Iterator[Region]:
    """Yield regions that make up *shape*, of at most *limit* values each, in row-major order.

    Rows come in multiples of 128 where there are so many, the largest block of the known packing
    schemes, so that scales are not read twice. An even *limit* never parts two F4 values.

    >>> list(row_major((2, 3), 4))
    [((0, 1), (0, 3)), ((1, 2), (0, 3))]
    >>> list(row_major((2, 3), 2))
    [((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))]
    """
    cut, inner = len(shape), 1
    while cut and inner * shape[cut - 1] <= limit:
        cut -= 1
        inner *= shape[cut]
    if not cut:
        yield tuple((0, size) for size in shape)
        return
    *outer, size = shape[:cut]
    rest = tuple((0, n) for n in shape[cut:])
    rows = max(1, limit // inner)
    if rows > 128:
        rows -= rows % 128
    for index in product(*map(range, outer)):
        before = tuple((i, i + 1) for i in index)
        for start in range(0, size, rows):
            yield (*before, (start, min(start + rows, size)), *rest)
