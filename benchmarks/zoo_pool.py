"""``run_tasks``: worker processes that may hang or die without taking the zoo with them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from zoo_worker import Task

__all__ = ["run_tasks"]

Row = dict[str, Any]

MAX_CLASSES = 250
"""Classes a worker serves before it is replaced: what it imported stays in its memory."""


def run_tasks(
    tasks: Iterable[Task], *, jobs: int, timeout_s: float, on_row: Callable[[Row], None]
) -> None:
    """Have *jobs* workers do *tasks*; *on_row* is called with each row, from one thread at a time.

    A step that takes longer than *timeout_s*, or kills its worker, becomes a row that says so; the
    worker is replaced and the task goes on behind that step.
    """
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    lock = threading.Lock()

    def tell(row: Row) -> None:
        with lock:
            on_row(row)

    threads = [
        threading.Thread(target=_serve, args=(waiting, timeout_s, tell), daemon=True)
        for _ in range(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(waiting: queue.SimpleQueue[Task], timeout_s: float, tell: Callable[[Row], None]) -> None:
    worker: _Worker | None = None
    try:
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            if worker is None or worker.served >= MAX_CLASSES:
                if worker is not None:
                    worker.end()
                worker = _Worker()
            done: dict[str, Row] = {}
            stuck = worker.do(task, timeout_s, partial(_note, done, tell))
            if stuck is not None:
                step, reason = stuck
                worker.end()
                worker = None
                form, _, road = step.rpartition("/")
                tell({
                    "name": task.name, "form": form, "road": road, "verdict": "failed",
                    "reason": reason,
                })  # fmt: skip
                if step not in task.skip and road != "build" and len(task.skip) < 20:
                    known = {**task.known, **done}
                    waiting.put(task._replace(skip=(*task.skip, step), known=known))
    finally:
        if worker is not None:
            worker.end()


def _note(done: dict[str, Row], tell: Callable[[Row], None], row: Row) -> None:
    done[f"{row['form']}/{row['road']}"] = row
    tell(row)


class _Worker:
    """A process, and the lines it writes."""

    def __init__(self) -> None:
        self.served = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zoo_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def do(
        self, task: Task, timeout_s: float, tell: Callable[[Row], None]
    ) -> tuple[str, str] | None:
        """Do *task*; return the step that it is stuck in and why, None if all went well."""
        assert self._process.stdin is not None
        self.served += 1
        step = f"{task.kind}/start"
        try:
            self._process.stdin.write(json.dumps(task._asdict()) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            return step, f"the worker is gone: {error}"
        while True:
            try:
                line = self._lines.get(timeout=timeout_s + (60 if self.served == 1 else 0))
            except queue.Empty:
                return step, f"took longer than {timeout_s:g} s, ended"
            if line is None:
                return step, f"killed the worker (exit status {self._process.wait()})"
            message = json.loads(line)
            if "done" in message:
                return None
            if "start" in message:
                step = message["start"]
            else:
                tell(message["row"])

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
