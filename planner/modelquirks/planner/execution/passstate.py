"""``PassState``: what the threads in a forward pass of one model hold and have learned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager

import torch
from torch import nn

from modelquirks.planner.execution.order import Order, Step, Track

__all__ = ["PassState", "ThreadPass"]


class ThreadPass(threading.local):
    """What one thread holds in its pass."""

    depth = 0
    """How many forward passes of modules are nested."""
    track: Track | None = None
    looked_until = 0.0
    """Until when, by ``time.monotonic``, the looks at files count."""

    def __init__(self) -> None:
        """Hold nothing."""
        self.loans: dict[object, torch.Tensor] = {}
        self.looked: set[Hashable] = set()
        """Mapped files that were found as they were when they were mapped."""


class PassState:
    """What the threads in a forward pass of one model have fetched outside of hooks."""

    def __init__(self) -> None:
        """Start with no thread in a pass."""
        self.thread = ThreadPass()
        self._orders: dict[nn.Module, Order] = {}
        self._seen: dict[nn.Module, list[Step]] = {}

    @property
    def is_running(self) -> bool:
        """Whether this thread is in a forward pass."""
        return self.thread.depth > 0

    @contextmanager
    def running(self, module: nn.Module) -> Generator[None, None, None]:
        """Be in a forward pass of *module*; passes nest."""
        depth = self.enter(module)
        try:
            yield
        except BaseException:
            self.leave(module, depth, failed=True)
            raise
        self.leave(module, depth)

    def enter(self, module: nn.Module) -> int:
        """Begin a pass, nested or not; return what :meth:`leave` wants to know."""
        thread = self.thread
        depth = thread.depth
        thread.depth = depth + 1
        if depth == 0:
            thread.looked.clear()
            thread.track = Track(self._orders.get(module))
        return depth

    def leave(self, module: nn.Module, depth: int, *, failed: bool = False) -> None:
        """End it."""
        thread = self.thread
        thread.depth = depth
        if depth:
            return
        self.forget()
        thread.looked.clear()
        track, thread.track = thread.track, None
        if track is not None:
            track.end()
            if not failed:
                self._learn(module, track)

    def _learn(self, module: nn.Module, track: Track) -> None:
        """Expect the order of *track* next time, if it is the first, or came twice in a row."""
        known = self._orders.get(module)
        if known is None or (track.seen != known.steps and track.seen == self._seen.get(module)):
            self._orders[module] = Order(track.seen)
        self._seen[module] = track.seen

    def forget(self) -> None:
        """Drop what was fetched; done whenever another module fetches its weights."""
        self.thread.loans.clear()

    def fetched(self, key: object, fetch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what *fetch* gives; in a pass, once for several readers in a row."""
        if not self.is_running:
            return fetch()
        loans = self.thread.loans
        if key not in loans:
            loans[key] = fetch()
        return loans[key]

    def __reduce__(self) -> tuple[type[PassState], tuple[()]]:
        """Copy as the state of another model: no thread is in a pass of it."""
        return PassState, ()
