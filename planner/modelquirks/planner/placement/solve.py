"""Solving: of all ways to cut and to place, the one that takes least time.

Policies, by accelerate's names: ``auto`` is the cheapest placement that can be found, with a bound
that says how far from the best it can be; ``balanced``, ``balanced_low_0`` and ``sequential`` are
accelerate's rules, which look at bytes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Literal

from modelquirks.planner.placement.cheapest import cheaper, least, priced
from modelquirks.planner.placement.cost import Costs
from modelquirks.planner.placement.fill import (
    UNLIMITED,
    Assignment,
    Problem,
    greedy,
    search,
    spread,
    unplaced,
)
from modelquirks.planner.placement.items import Cut, Cuts, Item
from modelquirks.planner.placement.memory import Device, canonical_order

__all__ = ["POLICIES", "Memory", "Policy", "Setting", "Shortage", "Solution", "lack", "solve"]

Policy = Literal["auto", "balanced", "balanced_low_0", "sequential"]
POLICIES: tuple[Policy, ...] = ("auto", "balanced", "balanced_low_0", "sequential")

Memory = Mapping[Device, int | None]
"""Bytes of each device, None for no limit."""

_SLACK = 1.001
"""A coarse cut may take this much more than a fine one: maps stay short."""
_LOOSE = 1.01
"""So much more may filling in module order take than filling every gap."""
_RESERVES = 16
"""So many sizes of the room for streaming are tried."""


@dataclass(frozen=True)
class Setting:
    """What a problem is about, beside the items."""

    memory: Memory
    costs: Costs
    running: int = 0
    """Bytes kept free on each device that computes: activations."""
    kept_free: Mapping[Device, int] = field(default_factory=dict)
    """Bytes that somebody wants to keep free."""

    def room(self, device: Device, *, computes: bool) -> int:
        """Return the bytes that items may take on *device*."""
        size = self.memory.get(device)
        if size is None:
            return UNLIMITED
        return max(0, size - self.kept_free.get(device, 0) - (self.running if computes else 0))


@dataclass(frozen=True)
class Solution:
    """A device for each item."""

    problem: Problem
    devices: Assignment
    seconds: float
    """Of one step, as the costs predict it."""
    bound: float | None = None
    """No placement takes less; None where nobody asked."""

    @cached_property
    def reserve(self) -> Item | None:
        """The largest item that is moved to the main device to run."""
        moved = [i for i, d in self.pairs if d in self.problem.offloaded]
        return max(moved, key=lambda item: item.run_bytes, default=None)

    @property
    def pairs(self) -> list[tuple[Item, Device]]:
        """The items with their devices, in module order."""
        return list(zip(self.problem.items, self.devices, strict=True))


@dataclass(frozen=True)
class Shortage:
    """Why nothing fits."""

    item: Item
    """The first that finds no room."""
    left: Memory
    """What each device has left then; what must stay free for streaming is taken off."""
    reserve: int


def solve(
    cuts: Cuts,
    setting: Setting,
    policy: Policy,
    *,
    even: bool = True,
) -> Solution | None:
    """Return a placement that fits, or None.

    The model runs on an accelerator if it can, and only if even the room for moving things in is
    too small, on the cpu. ``auto`` takes the placement that takes least time; where nothing is
    offloaded and *even*, one that takes no more but crossings and is spread evenly, as nobody
    knows then how much room the cache will need. ``sequential`` fills the devices in order;
    ``balanced`` spreads evenly what fits on accelerators; ``balanced_low_0`` leaves the first
    accelerator as empty as the others allow. Coarse cuts are preferred to fine ones.
    """
    memory = setting.memory
    accelerators = [d for d in canonical_order(memory) if d not in ("cpu", "disk")]
    for mains in ([d for d in accelerators if memory[d] != 0], ["cpu"]):
        ruled = _by_rule(cuts, setting, mains, policy)
        found = ruled if policy != "auto" else _cheapest(cuts, setting, mains, ruled, even=even)
        if found is not None:
            return found
    return None


def _by_rule(
    cuts: Cuts, setting: Setting, mains: Sequence[Device], policy: Policy
) -> Solution | None:
    """Return what accelerate's rules give on the first of *mains* that can be."""
    for cut in cuts:
        for main in mains:
            problem = _problem(cut, setting, main, offload=False)
            if (devices := _resident(problem, policy)) is not None:
                return Solution(problem, *priced(problem, devices, setting.costs))
    for some in (cuts.coarse, [cuts.finest]):
        for main in mains:
            problems = [_problem(cut, setting, main, offload=True) for cut in some]
            found = [
                Solution(problem, *priced(problem, devices, setting.costs))
                for given in problems
                for problem, devices in _offloading(given)
            ]
            if found:
                return _preferred(found)
    return None


def _cheapest(
    cuts: Cuts,
    setting: Setting,
    mains: Sequence[Device],
    ruled: Solution | None,
    *,
    even: bool,
) -> Solution | None:
    """Return the placement that takes least time; *ruled* is one that rules have found."""
    best = ruled
    for cut in cuts:
        for main in _unlike(mains, setting.costs):
            whole = _problem(cut, setting, main, offload=True, all_near=True)
            for problem in (_kept_whole(whole), *_with_reserves(whole)):
                known = inf if best is None else best.seconds
                slack = 1.0 if best is None or best.problem.cut is cut else _SLACK
                if (found := cheaper(problem, setting.costs, known / slack)) is not None:
                    best = Solution(problem, *found)
    if best is None:
        return None
    fine = [_problem(cuts.finest, setting, m, offload=True, all_near=True) for m in mains]
    bound = least(fine, setting.costs, best.seconds)
    if even and ruled is not None and not ruled.problem.offloaded:
        hops = setting.costs.machine.crossing_seconds * 2 * len(setting.memory)
        if ruled.seconds - hops <= best.seconds:
            best = ruled
    return replace(best, bound=bound)


def _unlike(mains: Sequence[Device], costs: Costs) -> list[Device]:
    """Return *mains* without those that are like one before."""
    return list({costs.machine[main]: main for main in reversed(mains)}.values())[::-1]


def _kept_whole(problem: Problem) -> Problem:
    """Return *problem* without anything offloaded, and so without room for that."""
    near = tuple(home for home in problem.homes if home not in problem.offloaded)
    return replace(problem, homes=near, offloaded=frozenset())


def lack(cut: Cut, setting: Setting) -> Shortage | None:
    """Return what is missing where :func:`solve` finds nothing; None for want of any device."""
    memory = setting.memory
    usable = [device for device in canonical_order(memory) if memory[device] != 0]
    if not usable:
        return None
    tries: list[tuple[list[Item], Mapping[Device, int], int]] = []
    for main in dict.fromkeys([usable[0] if usable[0] != "disk" else "cpu", "cpu"]):
        problem = _problem(cut, setting, main, offload=True)
        reserved = list(_with_reserves(problem))
        for p in (problem, *reserved[:1], *reserved[-1:]):
            tries.append((*unplaced(p), p.reserve))
    lost, left, reserve = min(tries, key=lambda t: sum(item.n_bytes for item in t[0]))
    if not lost:  # every item has its place, but nothing would be on the main device
        lost = [min(cut.items, key=lambda item: item.n_bytes)]
    limited = {d: None if n > UNLIMITED // 2 else max(n, 0) for d, n in left.items()}
    return Shortage(lost[0], limited, reserve)


def _problem(
    cut: Cut, setting: Setting, main: Device, *, offload: bool, all_near: bool = False
) -> Problem:
    """Return the problem of running on *main*: it and the devices after it, or *all_near* it.

    Without any ``cpu`` in *memory* a model that is all on disk still runs on the cpu.
    """
    memory = setting.memory
    order = [device for device in canonical_order(memory) if memory[device] != 0]
    first = order.index(main) if main in order else len(order)
    near = [d for d in order[0 if all_near else first :] if d not in ("cpu", "disk")]
    if main == "cpu":
        near = [main] if main in order else []
    elif all_near:
        near = [main, *(d for d in near if d != main)]
    far = [d for d in order if d == "disk" or (d == "cpu" and main not in ("cpu", "mps"))]
    homes = (*near, *far) if offload else tuple(near)
    rooms = {d: setting.room(d, computes=d not in far) for d in (*homes, main)}
    return Problem(cut, rooms, homes, main, frozenset(far) if offload else frozenset())


def _resident(problem: Problem, policy: Policy) -> Assignment | None:
    if not problem.homes or not problem.fits_in_sum:
        return None
    spare_first = policy == "balanced_low_0"
    found = None if policy == "sequential" else spread(problem, spare_first=spare_first)
    if found is None and spare_first:
        last = replace(problem, homes=(*problem.homes[1:], *problem.homes[:1]))
        found = greedy(last, back=True)
    return found or greedy(problem, back=False) or greedy(problem, back=True) or search(problem)


def _offloading(problem: Problem) -> Iterator[tuple[Problem, Assignment]]:
    """Yield placements in the order in which to prefer them; all run on the main device."""
    if not problem.offloaded:
        return
    any_found = False
    for reserved in _with_reserves(problem):
        for filled in _filled(reserved):
            any_found = True
            yield reserved, filled
    if any_found:
        return
    for reserved in _with_reserves(problem):
        if (found := search(reserved)) is not None:
            yield reserved, found
            return


def _filled(problem: Problem) -> Iterator[Assignment]:
    """Yield what the greedy rules find for one size of the room for streaming."""
    if not problem.fits_in_sum:
        return
    hold = problem.cut.kept_bytes
    for back in (False, True):
        devices = greedy(problem, back=back)
        if devices is None and hold:
            devices = greedy(problem, back=back, hold=hold)
        if devices is not None and (problem.main == "cpu" or problem.main in devices):
            yield devices


def _with_reserves(problem: Problem) -> Iterator[Problem]:
    """Yield *problem* with each room for streaming that may be worth keeping, largest first.

    Items that need more than that to run cannot be offloaded, so less is not always better.
    """
    fitting = [size for size in problem.cut.run_sizes if size <= problem.rooms[problem.main]]
    step = max(1, -(-len(fitting) // _RESERVES))
    for size in dict.fromkeys([*fitting[::step], *fitting[-1:]]):
        yield replace(problem, reserve=size)


def _preferred(found: Iterable[Solution]) -> Solution:
    """Return the first that takes hardly more than the best and uses as many devices."""
    solutions = list(found)
    best = min(solutions, key=lambda s: s.seconds)
    n_used = len(set(best.devices))
    return next(
        s for s in solutions if s.seconds <= best.seconds * _LOOSE and len(set(s.devices)) >= n_used
    )
