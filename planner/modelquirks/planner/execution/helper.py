"""``Helper``: a thread that the work can do without, should there be no room for it."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Helper"]

_START_S = 10.0
"""Seconds after which a thread that has not said that it runs is given up."""


class _Begun(threading.Event):
    """An event that nobody waits for longer than that."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(_START_S if timeout is None else timeout)


class Helper(threading.Thread):
    """A thread that may fail to begin.

    Where memory is short the system refuses a new thread, or the thread dies before Python runs in
    it. ``Thread.start`` waits for such a one for ever (CPython 3.11 to 3.14, ``Lib/threading.py``:
    ``self._started.wait()``), with whatever locks its caller holds.
    """

    def __init__(self, **options: Any) -> None:
        """As ``threading.Thread``."""
        super().__init__(**options)
        self._started = _Begun()
        self._guard = threading.Lock()
        self._is_given_up = False

    def begin(self) -> bool:
        """Start; False if there is no such thread now, nor will be."""
        try:
            self.start()
        except (RuntimeError, MemoryError):  # "can't start new thread"
            return False
        with self._guard:
            self._is_given_up = not self._started.is_set()
            return not self._is_given_up

    def run(self) -> None:
        """Do what it is for, if somebody still waits for that."""
        with self._guard:
            if self._is_given_up:
                return
        super().run()
