"""One process of the zoo: takes classes from standard input, answers road by road.

A line in is a :class:`Task` as JSON. Lines out are ``{"start": step}`` before each step,
``{"row": {...}}`` after it, and ``{"done": name}`` at the end of a task. What libraries print goes
to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Task", "main", "rows_of"]

MEMORY_BYTES = 10 << 30
"""A class that wants more is ended by an error, not by the machine."""


class Task(NamedTuple):
    """Roads to take with one class."""

    name: str
    root: str
    """The folder of the cache for this pass."""
    kind: str
    """``fresh`` or ``released``."""
    roads: Sequence[str]
    known: Mapping[str, Mapping[str, Any]]
    """Results from before, by ``form/road``."""
    skip: Sequence[str] = ()
    """Steps that killed a worker before."""


def rows_of(task: Task, start: Callable[[str], None]) -> Iterable[dict[str, Any]]:
    """Yield a row for every step of *task*; *start* is told before each."""
    import zoo_released

    forms = _fresh if task.kind == "fresh" else zoo_released.forms
    yield from forms(task, start)


def _fresh(task: Task, start: Callable[[str], None]) -> Iterable[dict[str, Any]]:
    from zoo_models import made

    folder = Path(task.root) / task.name
    if not (folder / "about.json").exists():
        if "fresh/build" in task.skip:
            return
        start("fresh/build")
        row = {"name": task.name, "form": "fresh", "road": "build"}
        try:
            yield row | {"verdict": "right", "reason": "", "more": made(task.name, folder)}
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            yield row | {"verdict": "failed", "reason": text[:300]}
            return
    yield from taken(task, "fresh", folder, start)


def taken(
    task: Task,
    form: str,
    folder: Path,
    start: Callable[[str], None],
    about: Mapping[str, Any] = {},
) -> Iterable[dict[str, Any]]:
    """Yield a row for each road taken with the checkpoint in *folder*.

    *about* says into which class, what is missing there, and whether that is on purpose.
    """
    from zoo_models import load_truth
    from zoo_roads import Case, travel

    truth = load_truth(folder)
    oracle = dict(task.known.get(f"{form}/transformers", {}).get("more") or {})
    for road in task.roads:
        step = f"{form}/{road}"
        if step in task.skip or step in task.known:
            continue
        start(step)
        case = Case(
            about.get("class", task.name),
            folder / "checkpoint",
            truth,
            oracle.get("unsure", ()),
            tuple(about.get("free", ())),
            oracle.get("judge_forward", True),
        )
        result = travel(road, case)
        if road == "transformers":
            oracle = dict(result.more)
            result = _as_saved(result, about)
        yield {"name": task.name, "form": form, "road": road} | result.to_json()
        gc.collect()


def _as_saved(result: Any, about: Mapping[str, Any]) -> Any:
    """Return *result*; ``wrong`` if transformers itself cannot read back a complete file."""
    if about.get("as_saved", True) or about["partial"] or result.verdict != "right":
        return result
    lacks = len(about["missing"]), len(about["unexpected"])
    reason = f"not what was saved: {lacks[0]} missing, {lacks[1]} unexpected"
    return replace(result, verdict="wrong", reason=reason)


def main() -> None:
    """Serve tasks until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    quiet()

    def tell(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    for line in sys.stdin:
        task = Task(**json.loads(line))
        try:
            for row in rows_of(task, lambda step: tell({"start": step})):
                tell({"row": row})
        except Exception as error:  # a fault of the zoo itself: said, and on to the next class
            tell({"row": {
                "name": task.name, "form": task.kind, "road": "zoo", "verdict": "failed",
                "reason": f"{type(error).__name__}: {error}"[:500],
            }})  # fmt: skip
        tell({"done": task.name})


def quiet() -> None:
    """One thread, and no progress bars."""
    import torch
    import transformers

    torch.set_num_threads(1)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()


if __name__ == "__main__":
    main()
