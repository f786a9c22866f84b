"""``ExpertOffload``: offloaded stacked experts, of which each is brought only when it is used.

transformers 5 keeps all experts of a layer in one parameter, and accelerate moves parameters
whole: with k of N experts routed to, N/k times what a token needs. The parameters named here are
left where they are instead. Indexing their placeholder by expert evaluates that expert's region of
the recipe; any other operation gets the whole tensor, and is counted.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from modelquirks.planner.execution.placeholder import OffloadedWriteError
from modelquirks.planner.execution.weights import WeightsMap
from modelquirks.planner.finding import shown
from modelquirks.planner.placement.memory import this_machine

__all__ = ["ExpertOffload", "ExpertOptions", "ExpertReport", "Rows", "expert_offload"]

_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child must not inherit a lock that nobody will release
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


class ExpertOptions(NamedTuple):
    """How experts are to be offloaded."""

    offload: bool = True
    """One by one; False: as accelerate does, with their whole parameter."""
    cache: int | None = None
    """Bytes kept on each device that computes; None: a default."""
    room: int | None = None
    """Bytes that the plan leaves unused on the device that computes, if that is known."""

    def limit(self, device: torch.device) -> int:
        """Return the bytes to keep: by default a quarter of what is free, and at most the room."""
        if self.cache is not None:
            return self.cache
        quarter = _free(device) // 4
        return quarter if self.room is None else min(quarter, self.room)


def _free(device: torch.device) -> int:
    """Return the free bytes of a device; 0 if it cannot be asked."""
    if device.type == "cpu":
        return this_machine(ask_torch=False)["cpu"] or 0
    ask: Any = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    return 0 if ask is None else int(ask(device)[0])


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """What was brought of the experts since the model was loaded, or ``reset``."""

    tensors: tuple[str, ...]
    """Names of the stacked parameters that are offloaded by expert."""
    limit_bytes: int
    """Of the cache, on each device that computes."""
    hits: int
    """Experts that the cache had."""
    made: int
    """Experts that were computed from their files, or moved to the device that computes."""
    views: int
    """Experts used as they lie in their file or in memory: nothing to compute, move or keep."""
    bytes_read: int
    """Of stored tensors that were asked for, expert by expert."""
    held_bytes: Mapping[str, int]
    """In the cache now, by device."""
    peak_bytes: Mapping[str, int]
    """In the cache at most, by device."""
    whole: Mapping[str, int]
    """How often a parameter was brought as a whole, by its name."""
    whole_bytes: int
    """Of the tensors so brought."""

    @property
    def hit_rate(self) -> float:
        """Share of the experts that the cache had, of those that a cache can serve; 0 to 1."""
        asked = self.hits + self.made
        return self.hits / asked if asked else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "tensors": list(self.tensors),
            "limit_bytes": self.limit_bytes,
            "hits": self.hits,
            "made": self.made,
            "views": self.views,
            "hit_rate": self.hit_rate,
            "bytes_read": self.bytes_read,
            "held_bytes": dict(self.held_bytes),
            "peak_bytes": dict(self.peak_bytes),
            "whole": dict(self.whole),
            "whole_bytes": self.whole_bytes,
        }


class _Held(NamedTuple):
    """An expert in the cache."""

    tensor: torch.Tensor
    version: int


@dataclass
class _Cache:
    """Experts on one device, the one used last at the end."""

    held: OrderedDict[tuple[str, int], _Held] = field(default_factory=OrderedDict)
    n_bytes: int = 0
    peak: int = 0

    def add(self, key: tuple[str, int], tensor: torch.Tensor, limit: int) -> None:
        """Keep *tensor*, and drop what was not used for longest until all fit into *limit*."""
        if key in self.held or tensor.nbytes > limit:
            return
        while self.n_bytes + tensor.nbytes > limit:
            self.drop(next(iter(self.held)))
        self.held[key] = _Held(tensor, tensor._version)
        self.n_bytes += tensor.nbytes
        self.peak = max(self.peak, self.n_bytes)

    def drop(self, key: tuple[str, int]) -> None:
        """Let one go."""
        self.n_bytes -= self.held.pop(key).tensor.nbytes


class ExpertOffload:
    """The stacked experts of one model that are offloaded, with their cache.

    The cache keeps what had to be computed or moved, up to *limit* bytes on each device that
    computes; the least recently used goes first. What lies in a file or in memory as it is needed
    is used there, and never kept twice. Safe to use from several threads.
    """

    def __init__(self, weights: WeightsMap, names: Iterable[str], *, limit: int) -> None:
        """Bring those *names* of *weights* by expert."""
        self._weights = weights
        self._names = frozenset(names)
        self._limit = limit
        self._caches: dict[torch.device, _Cache] = {}
        self._n: Counter[str] = Counter()
        self._whole: Counter[str] = Counter()

    @property
    def names(self) -> frozenset[str]:
        """Every name of the parameters that are brought by expert."""
        return self._names

    def __contains__(self, name: object) -> bool:
        """Tell whether that parameter is brought by expert."""
        return name in self._names

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertOffload:
        """Return one with an empty cache for the copied model."""
        weights = copy.deepcopy(self._weights, memo)
        memo[id(self)] = other = ExpertOffload(weights, self._names, limit=self._limit)
        return other

    def rows(self, name: str) -> Rows | None:
        """Return what brings the experts of that parameter; None if it is brought whole."""
        return Rows(self, name) if name in self._names else None

    def expert(self, name: str, number: int, device: torch.device) -> torch.Tensor:
        """Return one expert of a parameter on *device*, to be read only.

        OffloadedWriteError if somebody wrote to what was given before.
        """
        key = (name, number)
        with _lock:
            cache = self._caches.setdefault(device, _Cache())
            if (held := cache.held.get(key)) is not None:
                if held.tensor._version != held.version:
                    cache.drop(key)
                    raise OffloadedWriteError(
                        f"expert {number} of {name!r} is offloaded, and was written to after it "
                        "was brought: the change is lost. Give its module a device that "
                        "computes in the device map, or change the checkpoint"
                    )
                cache.held.move_to_end(key)
                self._n["hits"] += 1
                return held.tensor
        # Not while locked: two threads may make the same expert, and one is then dropped.
        with torch.inference_mode(False), torch.no_grad():  # for whoever comes later
            row = self._weights.row(name, number)
            tensor = row.tensor.to(device)
        is_new = row.is_new or tensor is not row.tensor
        with _lock:
            self._n["made" if is_new else "views"] += 1
            self._n["bytes_read"] += row.bytes_read
            if is_new:
                cache.add(key, tensor, self._limit)
        return tensor

    def count_whole(self, name: str, n_bytes: int) -> None:
        """Take down that all of a parameter was asked for."""
        with _lock:
            self._whole[name] += 1
            self._n["whole_bytes"] += n_bytes

    def report(self) -> ExpertReport:
        """Return what was brought so far."""
        with _lock:
            return ExpertReport(
                tensors=tuple(sorted(self._names)),
                limit_bytes=self._limit,
                hits=self._n["hits"],
                made=self._n["made"],
                views=self._n["views"],
                bytes_read=self._n["bytes_read"],
                held_bytes={str(d): cache.n_bytes for d, cache in self._caches.items()},
                peak_bytes={str(d): cache.peak for d, cache in self._caches.items()},
                whole=dict(self._whole),
                whole_bytes=self._n["whole_bytes"],
            )

    def reset(self) -> None:
        """Count from 0 again; the cache keeps what it has."""
        with _lock:
            self._n.clear()
            self._whole.clear()

    def clear(self) -> None:
        """Let go of every expert in the cache."""
        with _lock:
            self._caches.clear()

    def __repr__(self) -> str:
        """Name the parameters."""
        return f"ExpertOffload({shown(sorted(self._names), 3)}, limit={self._limit})"


class Rows(NamedTuple):
    """The experts of one parameter."""

    offload: ExpertOffload
    name: str

    def one(self, number: int, device: torch.device) -> torch.Tensor:
        """Return the expert of that number on *device*."""
        return self.offload.expert(self.name, number, device)

    def count_whole(self, n_bytes: int) -> None:
        """Take down that all of them were asked for at once."""
        self.offload.count_whole(self.name, n_bytes)


def expert_offload(model: nn.Module) -> ExpertOffload | None:
    """Return the offload of the experts of a dispatched *model*; None if it has none."""
    for parameter in model.parameters():
        rows: Rows | None = getattr(getattr(parameter, "origin", None), "rows", None)
        if rows is not None:
            return rows.offload
    return None
