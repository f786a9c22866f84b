"""``run``: jobs on a few threads, within a bound of memory; the first failure ends all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from modelquirks.planner.execution.helper import Helper

__all__ = ["available_cpus", "run"]

_Job = TypeVar("_Job")


def run(
    jobs: Iterable[_Job],
    work: Callable[[_Job], None],
    *,
    n_threads: int,
    cost: Callable[[_Job], int],
    limit: int,
) -> int:
    """Do *work* on every job, begun in their order; return the most they cost at a time.

    *cost* is the memory that a job takes while it lasts. Jobs are begun as long as the sum stays
    within *limit*; one that costs more is done while no other is. The first exception ends the
    run: what was begun is finished, nothing else is begun, and the exception is raised here. So
    does an interrupt of the calling thread.
    """
    pool = _Pool(iter(jobs), work, cost, limit)
    before = torch.get_num_threads()
    threads = [
        Helper(target=pool.worker, args=(before,), name=f"modelquirks-load-{number}")
        for number in range(n_threads)
    ]
    started: list[Helper] = []
    try:
        for thread in threads:
            if not thread.begin():  # fewer do the work then
                break
            started.append(thread)
        if not started:
            pool.worker(before)
        for thread in started:
            thread.join()
    except BaseException as error:
        pool.stop(error)
        for thread in started:
            thread.join()
    if pool.failure is not None:
        raise pool.failure
    return pool.peak


def available_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Pool(Generic[_Job]):
    """What the threads of one run share."""

    def __init__(
        self,
        jobs: Iterator[_Job],
        work: Callable[[_Job], None],
        cost: Callable[[_Job], int],
        limit: int,
    ) -> None:
        self.failure: BaseException | None = None
        self.peak = 0
        self._jobs, self._work, self._cost, self._limit = jobs, work, cost, limit
        self._in_use = 0
        self._taking = threading.Lock()
        self._changed = threading.Condition()

    def worker(self, n_torch_threads: int) -> None:
        with _alone(n_torch_threads):
            try:
                while (taken := self._taken()) is not None:
                    job, cost = taken
                    try:
                        self._work(job)
                    finally:
                        self._give_back(cost)
            except BaseException as error:
                self.stop(error)

    def stop(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _taken(self) -> tuple[_Job, int] | None:
        """Return the next job with its cost once there is room for it; None: there is no more."""
        with self._taking:  # in order: a large job is not overtaken for ever by small ones
            if self.failure is not None:
                return None
            for job in self._jobs:
                cost = self._cost(job)
                return (job, cost) if self._has_taken(cost) else None
            return None

    def _has_taken(self, cost: int) -> bool:
        """Wait until there is room, and take it; False if the run has failed meanwhile."""
        with self._changed:
            while self.failure is None and self._in_use and self._in_use + cost > self._limit:
                self._changed.wait()
            self._in_use += cost
            self.peak = max(self.peak, self._in_use)
            return self.failure is None

    def _give_back(self, cost: int) -> None:
        with self._changed:
            self._in_use -= cost
            self._changed.notify_all()


@contextmanager
def _alone(n_torch_threads: int) -> Generator[None]:
    """Have torch compute in this thread alone; new threads get *n_torch_threads* again.

    In torch 2.13 (aten/src/ATen/ParallelOpenMP.cpp) the number belongs to the thread that sets
    it, and is the default of threads that begin later.
    """
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_torch_threads)
