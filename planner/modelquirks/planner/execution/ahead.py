"""``Ahead``: weights made before they are asked for, in a bounded amount of memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch

from modelquirks.planner.execution.background import in_background

__all__ = ["AHEAD_BYTES", "Ahead", "Counts"]

AHEAD_BYTES = 1 << 30
"""How much may be made ahead unless the caller says otherwise."""


class _Maker(Protocol):
    """What makes the weights; it owns its ``Ahead``, which refers to it weakly."""

    @property
    def ahead(self) -> Ahead: ...

    def make(self, key: str) -> torch.Tensor:
        """Return the weight, on the CPU."""
        ...


class Counts(NamedTuple):
    """What became of weights that were to be made ahead."""

    used: int
    """Handed over."""
    unused: int
    """Made for nothing: another weight was asked for."""
    too_large: int
    """Not made, because one alone exceeds the limit."""
    peak_bytes: int
    """The most that was held at one time, made or being made."""


class _Made:
    """A weight that is made, or is being made."""

    __slots__ = ("done", "is_wanted", "nbytes", "tensor")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_wanted = True
        self.done = threading.Event()
        self.tensor: torch.Tensor | None = None


class Ahead:
    """What the background makes for one model.

    A weight is handed over once, and then no longer counts. One that is not there, or whose
    making failed, is made by whoever needs it: a wrong guess costs time and nothing else. Safe
    to use from several threads; a forked child starts with nothing.
    """

    def __init__(self, maker: _Maker, limit: int) -> None:
        """Have *maker* make weights, of which at most *limit* bytes are held at one time."""
        self.limit = limit
        self._maker = weakref.ref(maker)
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._guard = threading.Lock()
        self._made: dict[str, _Made] = {}
        self._pending: dict[str, int] = {}
        self._held = 0
        self._is_making = False
        self._used = self._unused = self._too_large = self._peak = 0

    @property
    def counts(self) -> Counts:
        """What became of the weights so far."""
        return Counts(self._used, self._unused, self._too_large, self._peak)

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights that are made or being made now."""
        return self._held

    def want(self, weights: Mapping[str, int]) -> None:
        """Make *weights*, given with their bytes, in that order as far as there is room."""
        with self._guard:
            for key, nbytes in weights.items():
                made = self._made.get(key)
                if made is not None:
                    made.is_wanted = True
                elif nbytes > self.limit:
                    self._too_large += 1
                else:
                    self._pending.setdefault(key, nbytes)
            self._start()

    def take(self, key: str) -> torch.Tensor | None:
        """Return the weight if it is made or being made; None: make it yourself."""
        if not self._made and not self._pending:
            return None
        with self._guard:
            self._pending.pop(key, None)
            made = self._made.pop(key, None)
            if made is None:
                return None
        made.done.wait()
        with self._guard:
            self._held -= made.nbytes
            self._used += made.tensor is not None
            self._start()
        return made.tensor

    def drop(self, keys: Iterable[str]) -> None:
        """Let go of weights that nobody will ask for."""
        with self._guard:
            for key in keys:
                self._pending.pop(key, None)
                made = self._made.get(key)
                if made is not None:
                    made.is_wanted = False
                    if made.done.is_set():
                        self._remove(key, made)
            self._start()

    def _start(self) -> None:
        """Have the thread go on if there is something to make, and room."""
        if self._is_making or not self._pending or not self._has_room():
            return
        self._is_making = in_background(partial(_make, self._maker))

    def _has_room(self) -> bool:
        return self._held + next(iter(self._pending.values())) <= self.limit

    def next(self) -> tuple[str, _Made] | None:
        """Return what is to be made now; None: nothing, or there is no room."""
        with self._guard:
            if not self._pending or not self._has_room():
                self._is_making = False
                return None
            key = next(iter(self._pending))
            made = self._made[key] = _Made(self._pending.pop(key))
            self._held += made.nbytes
            self._peak = max(self._peak, self._held)
            return key, made

    def finish(self, key: str, made: _Made, tensor: torch.Tensor | None) -> None:
        """Have a weight ready; without *tensor* it could not be made."""
        with self._guard:
            made.tensor = tensor
            if self._made.get(key) is made and (tensor is None or not made.is_wanted):
                self._remove(key, made)
            made.done.set()

    def _remove(self, key: str, made: _Made) -> None:
        del self._made[key]
        self._held -= made.nbytes
        self._unused += made.tensor is not None


_all: weakref.WeakSet[Ahead] = weakref.WeakSet()


def _make(owner: weakref.ref[_Maker]) -> None:
    """Make one weight of those wanted, in the background, if the model still lives."""
    maker = owner()
    task = None if maker is None else maker.ahead.next()
    if maker is None or task is None:
        return
    key, made = task
    tensor = None
    try:
        tensor = maker.make(key)
    except Exception:  # not lost: who needs the weight makes it again and has the error
        tensor = None
    finally:
        maker.ahead.finish(key, made, tensor)
    in_background(partial(_make, owner))  # the next one after what others want


def _renew() -> None:
    """Forget in a child what a thread of the parent was to make, and locks that it held."""
    for ahead in list(_all):
        ahead._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
