"""Which files of a folder are those of ranks, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["RankFile", "Series", "series_in"]

_RANK = re.compile(r"(?P<stem>.+?)[._-]rank[_-]?(?P<rank>\d{1,6})\.(?:bin|pt|pth)")
_WORLD = re.compile(r"world_size_(\d{1,6})")
_REST = re.compile(r"optim|extra_state|rng|random_state|scheduler|dataloader", re.IGNORECASE)


class RankFile(NamedTuple):
    """What one rank wrote."""

    name: str
    rank: int


class Series(NamedTuple):
    """The files that are the weights, and what else there is of the kind."""

    weights: tuple[RankFile, ...] = ()
    """By number."""
    ranks: int = 0
    """How many there are by their names; 0: these do not tell."""
    other: tuple[str, ...] = ()
    """Files of other models, first of each."""
    rest: tuple[str, ...] = ()
    """Files of optimizers and the like."""


def series_in(names: Iterable[str]) -> Series:
    """Return the files of ranks among *names*; the first series by name is the weights.

    >>> found = series_in(["model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt",
    ...                    "model_world_size_2_rank_1.pt"])
    >>> [file.rank for file in found.weights], found.ranks, found.rest
    ([0, 1], 2, ('optim_world_size_2_rank_0.pt',))
    """
    by_stem: dict[str, list[RankFile]] = {}
    rest: list[str] = []
    for name in sorted(names):
        if found := _RANK.fullmatch(name):
            if _REST.search(name):
                rest.append(name)
            else:
                file = RankFile(name, int(found["rank"]))
                by_stem.setdefault(found["stem"], []).append(file)
    if not by_stem:
        return Series()
    first, *others = by_stem
    world = _WORLD.search(first)
    files = tuple(sorted(by_stem[first], key=lambda file: file.rank))
    other = tuple(by_stem[stem][0].name for stem in others)
    return Series(files, int(world[1]) if world else 0, other, tuple(rest))
