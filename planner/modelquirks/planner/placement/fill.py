"""Filling: which device for each item, by simple rules. Pure, and in bytes only.

Three rules, from the plainest to the last resort: :func:`spread` (evenly, in module order, no
offloading), :func:`greedy` (in module order, with or without going back to an earlier device) and
:func:`search` (every way, within a limit of steps).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from modelquirks.planner.placement.items import Cut, Item
from modelquirks.planner.placement.memory import Device

__all__ = ["UNLIMITED", "Assignment", "Problem", "greedy", "search", "spread", "unplaced"]

UNLIMITED = 1 << 62
"""Room of a device without limit, in bytes."""

_STEPS = 5_000
"""Steps of :func:`search`: enough to be exact for half a dozen items, and under a second."""

Assignment = tuple[Device, ...]
"""The device of each item of a problem."""


@dataclass(frozen=True)
class Problem:
    """Items, and the devices they may go to while the model runs on ``main``."""

    cut: Cut
    rooms: Mapping[Device, int]
    """Bytes on each device, in the order in which devices are filled."""
    homes: tuple[Device, ...]
    """Devices for items that are not pinned, in order."""
    main: Device
    offloaded: frozenset[Device]
    """Those of ``homes`` whose items are moved to ``main`` to run."""
    reserve: int = 0
    """Bytes kept free on ``main``: no item that needs more to run may be offloaded."""

    @property
    def items(self) -> tuple[Item, ...]:
        """The items in module order."""
        return self.cut.items

    def homes_of(self, item: Item) -> tuple[Device, ...]:
        """Return the homes that *item* may go to, in order."""
        if item.pin is not None:
            return (item.pin,) if item.pin in self.homes or item.pin == self.main else ()
        return (self.main,) if item.pinned else self.homes

    @property
    def fits_in_sum(self) -> bool:
        """Whether there are enough bytes if items could be cut anywhere."""
        room = sum(self.rooms[home] for home in {*self.homes, self.main})
        return self.cut.n_bytes <= room - self.reserve


class _Free:
    """What is left of each room while a problem is being filled."""

    def __init__(self, problem: Problem, hold: int = 0) -> None:
        self.left = dict(problem.rooms)
        self.left[problem.main] -= problem.reserve
        self._problem = problem
        self._hold = hold

    def takes(self, item: Item, device: Device) -> bool:
        main = self._problem.main
        if device in self._problem.offloaded:
            return (
                item.run_bytes <= self._problem.reserve
                and item.moved_bytes <= self.left[device]
                and item.kept_bytes <= self.left[main]
            )
        hold = self._hold if device == main and not item.fixed else 0
        return item.n_bytes + item.padding(device) <= self.left[device] - hold

    def put(self, item: Item, device: Device, sign: int = 1) -> None:
        """Count *item* on *device*; with *sign* -1, take it away again."""
        if device in self._problem.offloaded:
            self.left[device] -= sign * item.moved_bytes
            self.left[self._problem.main] -= sign * item.kept_bytes
        else:
            self.left[device] -= sign * (item.n_bytes + item.padding(device))


def greedy(problem: Problem, *, back: bool, hold: int = 0) -> Assignment | None:
    """Give each item in turn the first device that has room; None if one finds none.

    Pinned items come first. Without *back* no item goes to a device before that of the item
    before it, so that a run through the model crosses devices as rarely as may be. *hold* bytes
    of the main device are left to what offloaded items leave there.
    """
    free = _Free(problem, hold)
    found: dict[int, Device] = {}
    start = 0
    for number in sorted(range(len(problem.items)), key=lambda n: not problem.items[n].fixed):
        item = problem.items[number]
        homes = problem.homes_of(item)[0 if back or item.fixed else start :]
        home = next((home for home in homes if free.takes(item, home)), None)
        if home is None:
            return None
        if not item.fixed:
            start = problem.homes.index(home)
        found[number] = home
        free.put(item, home)
    return tuple(found[number] for number in range(len(problem.items)))


def unplaced(problem: Problem) -> tuple[list[Item], Mapping[Device, int]]:
    """Return the items that find no device, the others placed, and what is left of each room."""
    free = _Free(problem)
    lost: list[Item] = []
    for item in sorted(problem.items, key=lambda item: not item.fixed):
        home = next((home for home in problem.homes_of(item) if free.takes(item, home)), None)
        if home is None:
            lost.append(item)
        else:
            free.put(item, home)
    return lost, free.left


def spread(problem: Problem, *, spare_first: bool = False) -> Assignment | None:
    """Spread the items over all homes in module order; None if they do not fit like that.

    The fullest device holds as little as is possible in that order, and the others come as close
    to an even share as that allows. With *spare_first* the first home gets only what the others
    have no room for.
    """
    loose = [item for item in problem.items if not item.fixed]
    sums = [0, *accumulate(item.n_bytes + item.pad_bytes for item in loose)]
    base = [0] * len(problem.homes)
    for item in problem.items:
        if item.fixed:
            if not (homes := problem.homes_of(item)):
                return None
            base[problem.homes.index(homes[0])] += item.n_bytes + item.padding(homes[0])
    rooms = [problem.rooms[home] - b for home, b in zip(problem.homes, base, strict=True)]
    first = 0
    if spare_first and len(rooms) > 1:
        first = _starts(sums, rooms)[1]
        if sums[first] > rooms[0]:
            return None
        ends = [first, *_even(sums, rooms[1:], base[1:], first)]
    else:
        ends = _even(sums, rooms, base, 0)
    if min(rooms) < 0 or ends[-1] < len(loose):
        return None
    loosely = iter([home for n, home in enumerate(problem.homes) for _ in range(*_span(ends, n))])
    return tuple(
        problem.homes_of(item)[0] if item.fixed else next(loosely) for item in problem.items
    )


def _span(ends: Sequence[int], number: int) -> tuple[int, int]:
    return (ends[number - 1] if number else 0), ends[number]


def _even(sums: list[int], rooms: list[int], base: list[int], first: int) -> list[int]:
    """Return where each device's items end; the last end is short if they do not fit."""
    if _ends(sums, rooms, first)[-1] < len(sums) - 1:
        return _ends(sums, rooms, first)

    def limited(most: int) -> list[int]:
        return [min(room, most - b) for room, b in zip(rooms, base, strict=True)]

    top = sums[-1] + max(base)
    least = bisect_left(
        range(top), True, key=lambda most: _ends(sums, limited(most), first)[-1] == len(sums) - 1
    )
    rooms = limited(least)
    starts = [*_starts(sums, rooms), len(sums) - 1]
    ends: list[int] = []
    for number, room in enumerate(rooms):
        share = (sums[-1] - sums[first] + sum(base[number:])) / (len(rooms) - number) - base[number]
        wanted = max(first + 1, _closest(sums, sums[first] + share))  # no device left empty
        first = max(starts[number + 1], min(wanted, _reach(sums, first, room)))
        ends.append(first)
    return ends


def _closest(sums: list[int], value: float) -> int:
    after = min(bisect_left(sums, value), len(sums) - 1)
    closer = after > 0 and value - sums[after - 1] <= sums[after] - value
    return after - 1 if closer else after


def _reach(sums: list[int], first: int, room: int) -> int:
    """Return where the items from *first* on end that *room* bytes take."""
    return max(first, bisect_right(sums, sums[first] + room) - 1)


def _ends(sums: list[int], rooms: Sequence[int], first: int) -> list[int]:
    """Return where each device's items end if every device takes all it can."""
    return [first := _reach(sums, first, room) for room in rooms]


def _starts(sums: list[int], rooms: Sequence[int]) -> list[int]:
    """Return the least start of each device such that it and those after it take all the rest."""
    last = len(sums) - 1
    starts: list[int] = []
    for room in reversed(rooms):
        last = min(last, bisect_left(sums, sums[last] - max(room, 0)))
        starts.append(last)
    return starts[::-1]


def search(problem: Problem) -> Assignment | None:
    """Try every way, largest items first; None if there is none, or none within the steps.

    Policies ask this many times to say what would make a model fit, so it is bounded by steps;
    :mod:`~modelquirks.planner.placement.counts`, which proves optimality, takes a hundred times as
    long where there is no way.
    """
    items = problem.items
    if len(items) > _STEPS or not problem.fits_in_sum:
        return None
    order = sorted(range(len(items)), key=lambda n: (not items[n].fixed, -items[n].n_bytes))
    free = _Free(problem)
    seen: set[tuple[int, ...]] = set()
    chosen: list[Device] = []
    ways = [_ways(problem, free, items[order[0]])] if order else []
    while ways and len(seen) < _STEPS:
        device = next(ways[-1], None)
        if device is None:
            ways.pop()
            if chosen:
                free.put(items[order[len(chosen) - 1]], chosen.pop(), -1)
            continue
        free.put(items[order[len(chosen)]], device)
        chosen.append(device)
        if len(chosen) == len(items) and _runs_on_main(problem, chosen):
            found = dict(zip(order, chosen, strict=True))
            return tuple(found[number] for number in range(len(items)))
        state = (len(chosen), chosen.count(problem.main) > 0, *free.left.values())
        if len(chosen) == len(items) or state in seen:
            free.put(items[order[len(chosen) - 1]], chosen.pop(), -1)
            continue
        seen.add(state)
        ways.append(_ways(problem, free, items[order[len(chosen)]]))
    return None


def _ways(problem: Problem, free: _Free, item: Item) -> Iterator[Device]:
    """Yield the homes that take *item*; of homes that are alike the first."""
    tried: set[tuple[bool, bool, int]] = set()
    for home in problem.homes_of(item):
        alike = (home in problem.offloaded, home == problem.main, free.left[home])
        if alike not in tried and free.takes(item, home):
            tried.add(alike)
            yield home


def _runs_on_main(problem: Problem, devices: Sequence[Device]) -> bool:
    """Whether accelerate would take ``main`` for the main device: something has to be there."""
    return problem.main == "cpu" or problem.main in devices
