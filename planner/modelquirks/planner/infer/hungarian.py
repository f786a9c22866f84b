"""The assignment problem: rows to columns, each used once, with the largest sum."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["assignment"]


def assignment(gain: Sequence[Sequence[float]]) -> list[int]:
    """Return the column of each row, -1 for none, so that the sum of *gain* is largest.

    Gains of 0 or less are never used. By shortest augmenting paths, in each of the parts that no
    gain joins; O(n³). A part of more than :data:`LARGE` is solved row by row instead, the largest
    gain first.

    >>> assignment([[1.0, 2.0], [0.5, 4.0]])
    [0, 1]
    """
    found = [-1] * len(gain)
    for rows, columns in _parts(gain):
        part = [[gain[row][column] for column in columns] for row in rows]
        solve = _exact if len(rows) + len(columns) <= LARGE else _greedy
        for row, column in zip(rows, solve(part), strict=True):
            found[row] = columns[column] if column >= 0 else -1
    return found


LARGE = 160
"""Rows and columns together."""


def _parts(gain: Sequence[Sequence[float]]) -> list[tuple[list[int], list[int]]]:
    """Return rows and columns that gains join, directly or by others."""
    of_row = [[c for c, value in enumerate(row) if value > 0] for row in gain]
    of_column: dict[int, list[int]] = {}
    for row, columns in enumerate(of_row):
        for column in columns:
            of_column.setdefault(column, []).append(row)
    seen: set[int] = set()
    parts: list[tuple[list[int], list[int]]] = []
    for first, columns in enumerate(of_row):
        if first in seen or not columns:
            continue
        rows, found, todo = {first}, set[int](), [first]
        while todo:
            for column in of_row[todo.pop()]:
                if column not in found:
                    found.add(column)
                    todo += [row for row in of_column[column] if row not in rows]
                    rows.update(of_column[column])
        seen |= rows
        parts.append((sorted(rows), sorted(found)))
    return parts


def _greedy(gain: Sequence[Sequence[float]]) -> list[int]:
    found = [-1] * len(gain)
    taken: set[int] = set()
    order = sorted(((-v, r, c) for r, row in enumerate(gain) for c, v in enumerate(row) if v > 0))
    for _, row, column in order:
        if found[row] < 0 and column not in taken:
            found[row] = column
            taken.add(column)
    return found


def _exact(gain: Sequence[Sequence[float]]) -> list[int]:
    n_rows, n_columns = len(gain), len(gain[0]) if gain else 0
    n = n_rows + n_columns  # dummies, for rows and columns that are better left alone
    cost = [
        [-max(gain[r][c], 0.0) if r < n_rows and c < n_columns else 0.0 for c in range(n)]
        for r in range(n)
    ]
    found = [-1] * n_rows
    for column, row in enumerate(_solve(cost)[:n_columns]):
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
