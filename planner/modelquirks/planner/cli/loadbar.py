"""``loading_shown``: a bar for each device while weights are loaded."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from modelquirks.planner.execution.progress import Progress as Listener

__all__ = ["loading_shown"]

_AFTER_S = 1.0
"""A load that is over sooner shows nothing."""

_EVERY_S = 0.1


@contextmanager
def loading_shown(title: str = "Loading") -> Generator[Listener | None]:
    """Show bytes, rate and time left by device, on standard error; give what hears of them.

    *title* is shown until the first bytes are announced. Nothing is shown, and None given, where
    that is not a terminal.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    counts = _Counts()
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(counts, done, title), daemon=True)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()


class _Counts:
    """Hears of bytes from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[int, int]] = {}

    def begin(self, totals: Mapping[str, int]) -> None:
        """Take note of bytes to come."""
        with self._lock:
            for where, n_bytes in totals.items():
                done, total = self._counts.get(where, (0, 0))
                self._counts[where] = (done, total + n_bytes)

    def add(self, where: str, n_bytes: int) -> None:
        """Count bytes that have come."""
        with self._lock:
            done, total = self._counts.get(where, (0, 0))
            self._counts[where] = (done + n_bytes, total)

    def now(self) -> Mapping[str, tuple[int, int]]:
        """Return bytes done and in all, by where they go."""
        with self._lock:
            return dict(self._counts)


def _show(counts: _Counts, done: threading.Event, title: str) -> None:
    if done.wait(_AFTER_S):
        return
    with _bars() as bars:
        general = bars.add_task(title, total=None)
        tasks: dict[str, TaskID] = {}
        while True:
            for where, (n_bytes, total) in counts.now().items():
                bars.update(general, visible=False)
                if where not in tasks:
                    tasks[where] = bars.add_task(where)
                bars.update(tasks[where], completed=n_bytes, total=total)
            if done.wait(_EVERY_S):
                return


def _bars() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
