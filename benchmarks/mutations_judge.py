"""The judge: a damaged checkpoint is planned and loaded, and held against the truth.

``refused``: by an error that names the thing. ``reported``: loaded, values differ, and something
was said that names it. ``harmless``: loaded, and every value and tie is right. ``unseen``: values
differ and nothing was said, of a damage that was declared as not visible before. Those are right.
``SILENT``: values differ and nothing was said. ``UNNAMED``: refused, but the reason does not name
the thing. ``CRASH``: an error that is not the package's own, or too long a time.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mutations_copy import Copy
from mutations_subjects import Subject, value_registry
from torch import nn
from zoo_compare import differences

__all__ = ["BAD", "OUTCOMES", "Load", "Loaded", "Refusal", "Verdict", "judged", "ours"]

GOOD = ("refused", "reported", "harmless", "unseen")
BAD = ("UNNAMED", "SILENT", "CRASH")
OUTCOMES = (*GOOD, *BAD)
LIMIT_S = 30
"""A case that takes longer hangs."""


class Verdict(NamedTuple):
    """The outcome, and what it rests on."""

    outcome: str
    said: tuple[str, ...] = ()
    """What the package said beyond what it says of the right checkpoint."""
    differing: tuple[str, ...] = ()
    """In what the loaded model is not the truth."""


class Refusal(Exception):
    """The checkpoint is not loaded; the text says why."""


class Hang(BaseException):
    """The time is over. No handler of ``Exception`` may take it for something else."""


@dataclass(frozen=True)
class Loaded:
    """What came of loading."""

    model: nn.Module
    said: tuple[str, ...]


Load = Callable[[Subject, Path, nn.Module, str], Loaded]
"""Loads what is in a folder into a model, on ``cpu`` or ``disk``; raises :class:`Refusal`."""


def ours(subject: Subject, folder: Path, model: nn.Module, device: str) -> Loaded:
    """Load by modelquirks, with the default options."""
    from modelquirks.planner import Dispatcher

    options = dict(subject.options)
    if subject.adapter:
        options["adapter"] = folder / subject.adapter
    if device == "disk":
        options["device_map"] = {"": "disk"}
    try:
        plan = Dispatcher(value_registry()).plan(folder / subject.path, model=model, **options)
        if not plan.ok:
            raise Refusal(plan.refusal())
        report = plan.load_into(model)
    except Exception as error:
        if type(error).__module__.startswith("modelquirks."):
            raise Refusal(f"{type(error).__name__}: {error}") from error
        raise
    findings = [f"{f.code}: {f.message}" for f in (*plan.all_findings, *report.notes)]
    entries = [
        f"{e.kind}: {name}"
        for e in (*plan.audit.model, *plan.audit.stored)
        if e.kind not in ("matched", "made", "tied", "used")
        for name in e.names
    ]
    return Loaded(model, (*findings, *entries))


def judged(
    subject: Subject,
    folder: Path,
    copy: Copy,
    *,
    usual: Sequence[str],
    device: str = "cpu",
    load: Load = ours,
) -> Verdict:
    """Load the damaged *copy* that was written to *folder*, and say what came of it.

    *usual* is what is said of the right checkpoint.
    """
    try:
        with _limited():
            model = _built(subject, copy)
            loaded = load(subject, folder, model, device)
            found = differences(loaded.model, subject.truth)
    except Refusal as refusal:
        text = str(refusal)
        return Verdict("refused" if copy.is_named_in([text]) else "UNNAMED", (text,))
    except Hang:
        return Verdict("CRASH", (f"took more than {LIMIT_S} s",))
    except Exception:
        return Verdict("CRASH", (traceback.format_exc(limit=-8),))
    said = tuple(text for text in loaded.said if text not in usual)
    differing = tuple(map(str, found))
    if not found and not (copy.behaves_otherwise and copy.may_be_unseen):
        return Verdict("harmless", said)
    if copy.is_named_in(said):
        return Verdict("reported", said, differing)
    return Verdict("unseen" if copy.may_be_unseen else "SILENT", said, differing)


def _built(subject: Subject, copy: Copy) -> nn.Module:
    try:
        return subject.build(copy.config)
    except Exception as error:
        if type(error).__module__.startswith("modelquirks."):
            raise Refusal(f"no model can be built: {error}") from error
        raise


@contextmanager
def _limited() -> Generator[None, None, None]:
    """Raise :class:`Hang` after the limit."""

    def over(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shown(verdict: Verdict) -> Iterable[str]:
    """Yield the lines that tell people what a verdict rests on."""
    yield verdict.outcome
    yield from (f"  said: {text}" for text in verdict.said[:12])
    yield from (f"  differs: {text}" for text in verdict.differing[:12])
