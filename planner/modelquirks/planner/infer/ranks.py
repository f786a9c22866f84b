"""Ranks: which of several alike comes first, where names count or where custom says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from modelquirks.planner.infer.kin import SLOT, Path
from modelquirks.planner.infer.words import spelt, words_of

__all__ = ["Ranks", "ranks_of"]

Ranks = Mapping[int, tuple[int, int]]
"""How many segments from the end the one that differs is → rank, and number of those alike."""

_DEPTH = 3
_ORDINALS = {"first": 1, "second": 2, "third": 3, "fourth": 4, "in": 1, "out": 2}


def ranks_of(
    paths: Sequence[Path], shapes: Mapping[Path, object], *, by_name: bool
) -> Mapping[Path, Ranks]:
    """Return the rank of each path among those of one shape that differ in one segment.

    In the order of *paths*, which is that of a model; or *by_name*, as numbers and custom say,
    without a rank where they do not.
    """
    found: dict[Path, dict[int, tuple[int, int]]] = {path: {} for path in paths}
    for depth in range(1, _DEPTH + 1):
        groups: dict[object, list[Path]] = {}
        for path in paths:
            if len(path) >= depth and path[-depth] != SLOT:
                rest = path[: len(path) - depth], path[len(path) - depth + 1 :]
                groups.setdefault((rest, shapes[path]), []).append(path)
        for group in groups.values():
            if len(group) < 2 or (not by_name and _by_custom(group, depth)):
                continue
            ordered = _ordered(group, depth, by_name) or ([] if by_name else group)
            for rank, path in enumerate(ordered):
                found[path][depth] = rank, len(group)
    return found


def _ordered(group: Sequence[Path], depth: int, numbers: bool) -> Sequence[Path]:
    """Return the paths in the order of their segments; none if there is no order."""
    texts = [path[-depth] for path in group]
    for key in (_number, _ordinal, _place) if numbers else (_place,):
        values = [key(text) for text in texts]
        if None not in values and len({v for v in values}) == len(values):
            if key is not _number or len({re.sub(r"[0-9]+", "#", t) for t in texts}) == 1:
                return [p for _, p in sorted(zip(values, group, strict=True))]  # type: ignore
    return []


def _by_custom(group: Sequence[Path], depth: int) -> bool:
    """Tell whether these are numbered in other orders, too, than that of the model."""
    return any({"gate", "q", "k"} & set(spelt((path[-depth],))) for path in group)


def _number(text: str) -> tuple[int, ...] | None:
    return tuple(int(d) for d in re.findall(r"[0-9]+", text)) or None


def _ordinal(text: str) -> int | None:
    return next((_ORDINALS[word] for word in words_of(text) if word in _ORDINALS), None)


def _place(text: str) -> float | None:
    """Return where in a block a norm is, by what it is called after."""
    words = spelt((text,))
    if "norm" not in words:
        return None
    if words == ("norm",):
        return 2.5
    place = 2.0 if "mlp" in words else 1.0 if "cross" in words else 0.0
    if "attn" not in words and "mlp" not in words and ("after" in words or "post" in words):
        return 3.0
    if "final" in words or "output" in words:
        return 4.0
    return place + (0.5 if "post" in words or "after" in words else 0.0)


_Key = Callable[[str], object]
