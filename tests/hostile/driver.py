"""Runs commands and opens checkpoints in a process of its own, and tells what they touched.

Started by ``watched`` in conftest.py with a list of jobs as JSON on standard input; answers with a
list of what became of each. Events are those of ``sys.addaudithook``: what Python itself says of
files, imports, processes and sockets, whoever asks for them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

PROCESSES = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn")
CALLS = (*PROCESSES, "subprocess.Popen", "pty.spawn", "pickle.find_class")
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

WATCHED = frozenset(("open", "import", "exec", "ctypes.dlopen", *CALLS, *NETWORK))

events: list[tuple[str, str]] = []
is_on = False


@cache
def resolved(path: str) -> str:
    return os.path.realpath(path)


def hook(name: str, args: tuple[Any, ...]) -> None:
    global is_on
    if not is_on or name not in WATCHED:
        return
    is_on = False  # what is asked here is not of interest
    try:
        if name == "open" and isinstance(args[0], str | bytes | os.PathLike):
            kind = "write" if isinstance(args[2], int) and args[2] & WRITES else "read"
            events.append((kind, resolved(os.fsdecode(args[0]))))
        elif name == "import":
            events.append(("import", str(args[0])))
        elif name == "ctypes.dlopen":
            events.append(("exec", str(args[0])))
        elif name == "exec":
            events.append(("exec", str(getattr(args[0], "co_filename", ""))))
        elif name in CALLS:
            events.append(("call", f"{name} {args!r:.200}"))
        elif name in NETWORK:
            events.append(("network", f"{name} {args[1:]!r:.200}"))
    finally:
        is_on = True


def done(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job: ``argv`` for the command, ``open`` for a checkpoint."""
    if "open" in job:
        return {"findings": opened(job["open"])}
    from modelquirks.planner.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(job["argv"])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 2
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def opened(path: str) -> list[list[str]]:
    from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest

    try:
        manifest = open_manifest(path, lambda: registry())
    except CheckpointError as error:
        return [["refused", "error", str(error)]]
    return [[*finding] for finding in manifest.findings]


def registry() -> Any:
    from modelquirks.quirks.registry import Registry

    if not known:
        known.append(Registry.load())
    return known[0]


known: list[Any] = []


def run() -> None:
    global is_on
    jobs = json.load(sys.stdin)
    answers: list[dict[str, Any]] = []
    sys.addaudithook(hook)
    for job in jobs:
        events.clear()
        is_on = True
        answer = done(job)
        is_on = False
        answers.append({**answer, "events": list(dict.fromkeys(events))})
    Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    run()
