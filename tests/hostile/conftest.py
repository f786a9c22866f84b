"""What the tests of hostile input share: a process that is watched, and places to attack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
from modelquirks.planner.finding import Finding

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.py")
_SECONDS = 120
"""More than anything here takes on a busy machine: what takes longer hangs."""


@dataclass(frozen=True)
class Watched:
    """What became of one command or checkpoint, and what was touched meanwhile."""

    code: int
    out: str
    err: str
    findings: tuple[tuple[str, str, str], ...]
    """Code, severity, message."""
    events: tuple[tuple[str, str], ...]

    def of(self, kind: str) -> list[str]:
        """Return the events of one kind."""
        return [what for name, what in self.events if name == kind]

    @property
    def errors(self) -> dict[str, str]:
        """The errors among the findings."""
        return {code: text for code, severity, text in self.findings if severity == "error"}

    def touched(self, *, below: Path, but: Iterable[Path]) -> list[str]:
        """Return the files below a folder that were opened, other than those in *but*."""
        inside, allowed = below.resolve(), [path.resolve() for path in but]
        paths = {Path(path) for kind in ("read", "write") for path in self.of(kind)}
        found = (path for path in paths if path.is_relative_to(inside))
        return sorted(str(p) for p in found if not any(p.is_relative_to(a) for a in allowed))

    def strange(self, area: Path) -> list[str]:
        """Return what must never happen: calls, sockets, code or modules of the files read."""
        code = [path for path in self.of("exec") if path.startswith(str(area))]
        modules = [name for name in self.of("import") if "canary" in name]
        return [*self.of("call"), *self.of("network"), *code, *modules]


Watch = Callable[..., list[Watched]]


@pytest.fixture
def watched(tmp_path: Path) -> Watch:
    """Give the function that does jobs in a process of its own, which it watches.

    A job is the words of a command, or the path of a checkpoint to open; *beside* are folders with
    installed packages.
    """

    def run(
        *jobs: Sequence[str] | Path,
        environment: Mapping[str, str] | None = None,
        beside: Sequence[Path] = (),
    ) -> list[Watched]:
        asked = [{"open": str(j)} if isinstance(j, Path) else {"argv": [*j]} for j in jobs]
        answers = tmp_path.parent / f"{tmp_path.name}-answers.json"
        roots = os.pathsep.join(str(ROOT / layer) for layer in ("quirks", "planner", "plugins"))
        paths = (*map(str, beside), os.environ.get("PYTHONPATH"), roots)
        path = os.pathsep.join(filter(None, paths))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MODELQUIRKS_", "HF_"))}
        done = subprocess.run(
            [sys.executable, "-P", str(DRIVER), str(answers)],
            input=json.dumps(asked),
            env={**kept, "PYTHONPATH": path, "COLUMNS": "120", **(environment or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [_watched(answer) for answer in json.loads(answers.read_text())]

    return run


def _watched(answer: Mapping[str, Any]) -> Watched:
    return Watched(
        code=answer.get("code", 0),
        out=answer.get("out", ""),
        err=answer.get("err", ""),
        findings=tuple(
            (code, severity, text) for code, severity, text in answer.get("findings", ())
        ),
        events=tuple((kind, what) for kind, what in answer["events"]),
    )


@pytest.fixture(scope="session")
def opened() -> Callable[[Path], Sequence[Finding]]:
    """Give the function that returns the findings of a checkpoint, of a refused one its error."""
    from modelquirks.quirks.registry import Registry

    registry = Registry.load()

    def findings(path: Path) -> Sequence[Finding]:
        try:
            return open_manifest(path, lambda: registry).findings
        except CheckpointError as error:
            return (Finding("refused", "error", str(error)),)

    return findings
