"""``in_background``: one thread that makes things ahead of time for all models of the process.

It starts with the first job and ends when it has had none for a second, so that a process which
only has models holds no thread. A forked child starts its own. When the interpreter ends, the
thread finishes what it is at, and no more.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable

from modelquirks.planner.execution.helper import Helper

__all__ = ["in_background"]

_LINGER = 1.0
"""Seconds without a job after which the thread ends; starting one takes some 0.1 ms."""

_Job = Callable[[], None]


class _Worker:
    """A thread and its jobs."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: Helper | None = None
        self._guard = threading.Lock()
        self._closed = False

    def submit(self, job: _Job) -> bool:
        """Have the thread do *job*; False if the interpreter is ending, or there is no thread."""
        with self._guard:
            if self._closed:
                return False
            self._jobs.put(job)
            if self._thread is None:
                # A daemon, because the interpreter joins others before it calls `close`.
                self._thread = Helper(target=self._run, name="modelquirks-ahead", daemon=True)
                if not self._thread.begin():  # nothing is made ahead then
                    self._thread = None
                    self._jobs = queue.SimpleQueue()
                    return False
            return True

    def close(self) -> None:
        """Take no more jobs, and wait for the one at hand."""
        with self._guard:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_LINGER)
            except queue.Empty:
                with self._guard:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            if job is None or self._closed:
                return
            job()
            del job  # it may hold the last reference to a model


_worker = _Worker()


def in_background(job: _Job) -> bool:
    """Have *job*, which must not raise, done by the thread; False if there is none any more."""
    return _worker.submit(job)


def _renew() -> None:
    """Forget the thread of the parent process, which a child does not have."""
    global _worker
    _worker = _Worker()


def _close() -> None:
    _worker.close()


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
