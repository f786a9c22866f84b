"""Faults of the network: a hub on this machine that breaks off, stalls, refuses, and comes back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faults_calls import Trap
from faults_jobs import Job, Load, Stage, registry
from faults_kinds import Place
from faults_whole import Disarm, Level, Whole
from hub_server import Blob, HubServer, Repo, serving
from huggingface_hub import constants

from modelquirks.planner import Dispatcher
from modelquirks.planner.hub import client

__all__ = ["NETWORK", "Hub"]

NAME = "org/name"
SHARD = "model-00002-of-00002.safetensors"


_kept: list[ExitStack] = []


class Hub(Load):
    """Plan a repository by ranges, download what it takes, and load that."""

    name = "hub"
    is_local = False
    device_map: Mapping[str, Any] = {"": "cpu"}
    broken: Mapping[str, list[str]] = {}

    def begin(self) -> None:
        super().begin()
        self.server = HubServer(faults={**self.broken})
        stack = ExitStack()
        stack.enter_context(serving(self.server))
        _kept.append(stack)  # a forked process must not shut down what it has no thread for
        client._PAUSES = (0.0,) * 4

    def watched(self, root: Path) -> list[Path]:
        return [root / "hf"]  # the rest is the server's

    def end(self) -> None:
        _kept[-1].close()

    def run(self, root: Path, stage: Stage) -> None:
        server, home = self.server, root / "hf"
        files = {
            path.name: Blob(path.read_bytes(), lfs=path.suffix == ".safetensors")
            for path in (root / self.input).iterdir()
        }
        server.repos[NAME] = Repo.of(files)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_ASSETS_CACHE": str(home / "assets"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DOWNLOAD_TIMEOUT": 1,
            "HF_HUB_ETAG_TIMEOUT": 1,
        }.items():
            setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY"):
            os.environ.pop(name, None)
        assert self.model is not None
        plan = Dispatcher(registry()).plan(
            f"hf://{NAME}", model=self.model, device_map={"": "cpu"}, dtype="bfloat16"
        )
        stage("planned")
        report = plan.load_into(self.model)
        self.messages = tuple(note.message for note in report.notes)
        stage("loaded")
        self.compute(self.model)


def _broken(trap: Trap, job: Job, place: Place, level: Level) -> Disarm:
    """Have the server do what *level* says: a part of the path, requests let through, the fault."""
    part, before, fault, times = str(level).split()
    assert isinstance(job, Hub)
    job.broken = {part: [""] * int(before) + [fault] * int(times)}

    def disarm() -> list[str]:
        job.broken = {}
        job.server.faults.clear()
        return []

    return disarm


_ALWAYS = 99
_MOMENTS = (("/api/models", 0), (".index.json", 0), (SHARD, 0), ("/blobs/", 0), ("/blobs/", 2))


def _levels(*faults: str) -> tuple[str, ...]:
    return tuple(
        f"{part} {before} {fault} {times}"
        for fault in faults
        for part, before in _MOMENTS
        for times in (1, _ALWAYS)
    )


def _of_hub(job: Job) -> bool:
    return isinstance(job, Hub)


NETWORK: tuple[Whole, ...] = (
    Whole("connection reset", _levels("reset:0", "reset:3000"), _broken, _of_hub),
    Whole("body cut", _levels("cut:10", "cut:3000"), _broken, _of_hub),
    Whole("body shorter than said", _levels("short:100"), _broken, _of_hub),
    Whole("stall", _levels("stall:0", "stall:3000"), _broken, _of_hub),
    Whole("server error", _levels("500", "503", "429"), _broken, _of_hub),
    Whole("another range, or none", _levels("shift", "whole"), _broken, _of_hub),
)
