"""The assignment problem: rows to columns, each used once, with the largest sum."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assignment"]


def assignment(gain: Sequence[Sequence[float]]) -> list[int]:
    """Return the column of each row, -1 for none, so that the sum of *gain* is largest.

    Gains of 0 or less are never used. By shortest augmenting paths, O(n³).

    >>> assignment([[1.0, 2.0], [0.5, 4.0]])
    [0, 1]
    """
    n_rows, n_columns = len(gain), len(gain[0]) if gain else 0
    n = n_rows + n_columns  # dummies, for rows and columns that are better left alone
    cost = [
        [-max(gain[r][c], 0.0) if r < n_rows and c < n_columns else 0.0 for c in range(n)]
        for r in range(n)
    ]
    row_of = _solve(cost)
    found = [-1] * n_rows
    for column, row in enumerate(row_of[:n_columns]):
        if row < n_rows and gain[row][column] > 0:
            found[row] = column
    return found


def _solve(cost: Sequence[Sequence[float]]) -> list[int]:
    n = len(cost)
    u, v = [0.0] * (n + 1), [0.0] * (n + 1)
    matched, way = [0] * (n + 1), [0] * (n + 1)
    for row in range(1, n + 1):
        matched[0] = row
        at = 0
        least = [float("inf")] * (n + 1)
        used = [False] * (n + 1)
        while True:
            used[at] = True
            here, delta, then = matched[at], float("inf"), 0
            for column in range(1, n + 1):
                if used[column]:
                    continue
                reduced = cost[here - 1][column - 1] - u[here] - v[column]
                if reduced < least[column]:
                    least[column], way[column] = reduced, at
                if least[column] < delta:
                    delta, then = least[column], column
            for column in range(n + 1):
                if used[column]:
                    u[matched[column]] += delta
                    v[column] -= delta
                else:
                    least[column] -= delta
            at = then
            if matched[at] == 0:
                break
        while at:
            matched[at] = matched[way[at]]
            at = way[at]
    return [matched[column] - 1 for column in range(1, n + 1)]
