"""``open_adapter``: what an adapter holds, from its config and the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelquirks.planner.adapter.config import AdapterConfig, config_of
from modelquirks.planner.checkpoint.confined import confined
from modelquirks.planner.checkpoint.json_text import JsonProblem, parse_json, read_json
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.open import CheckpointError, open_manifest
from modelquirks.planner.finding import Finding, shown

if TYPE_CHECKING:
    from modelquirks.quirks.registry import Registry

__all__ = ["CONFIG", "Adapter", "adapter_folders", "open_adapter", "read_config"]

CONFIG = "adapter_config.json"
_WEIGHTS = (
    "adapter_model.safetensors",
    "adapter_model.safetensors.index.json",
    "adapter_model.bin",
    "adapter_model.bin.index.json",
)
"""As peft looks for them, safetensors first; the indexes are of those who cut large adapters."""
_PARTS = re.compile(r"adapter_model-\d+-of-(\d+)\.(safetensors|bin)")


@dataclass(frozen=True)
class Adapter:
    """An adapter: its config, what its files hold, and what is odd about both."""

    path: Path
    """As the user named it."""
    config: AdapterConfig
    manifest: Manifest
    findings: tuple[Finding, ...] = ()

    @property
    def name(self) -> str:
        """For people: ``LoRA``, ``DoRA``, or peft's word for another kind."""
        kinds = {"LORA": "DoRA" if self.config.dora else "LoRA", "TRAINABLE_TOKENS": "trained rows"}
        return kinds.get(self.config.kind, self.config.kind)


def open_adapter(path: str | Path, registry: Callable[[], Registry] | None = None) -> Adapter:
    """Return the adapter *path*: a folder with adapter_config.json, or a weight file beside one.

    Reads headers only and executes nothing, as
    :func:`~modelquirks.planner.checkpoint.open.open_manifest` does. Raises
    :class:`~modelquirks.planner.checkpoint.open.CheckpointError` if it is no adapter, saying what
    it is instead.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    weights = _weights(path) if path.is_dir() else path
    with confined(path):
        config = read_config(folder)
    if config is None:
        raise CheckpointError(_no_adapter(path, folder))
    if isinstance(config, str):
        raise CheckpointError(f"{str(folder / CONFIG)!r} {config}")
    if weights is None:
        raise CheckpointError(
            f"{str(path)!r} has {CONFIG!r} and no weights: none of {', '.join(_WEIGHTS)}"
        )
    manifest = open_manifest(weights, registry)
    findings = tuple(f for f in manifest.findings if f.code != "adapter")
    return Adapter(path, config, replace(manifest, findings=findings), findings)


def read_config(folder: Path) -> AdapterConfig | str | None:
    """Return adapter_config.json of *folder*, or why it cannot be used; None if there is none."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    data, raw = read_json(path)
    if isinstance(data, JsonProblem):
        return data.text
    twice: dict[str, bool] = {}
    parse_json(raw.decode("utf-8-sig"), duplicates=twice)
    if twice:
        return f"has keys twice in one object: {shown(twice)}"
    if not isinstance(data, Mapping):
        return f"holds a JSON {type(data).__name__}, expected an object"
    try:
        return config_of(data)
    except ValueError as error:
        return f"cannot be used: {error}"


def adapter_folders(folder: Path) -> list[str]:
    """Return the names of the folders directly below *folder* that hold an adapter."""
    try:
        below = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    except OSError:
        return []
    return [entry.name for entry in below if (entry / CONFIG).is_file()]


def _weights(folder: Path) -> Path | None:
    """Return the file or index that holds the weights of the adapter in *folder*."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    if any(_PARTS.fullmatch(entry.name) for entry in folder.iterdir()):
        return folder  # parts without an index: they are all there is, as open_manifest finds
    return None


def _no_adapter(path: Path, folder: Path) -> str:
    """Return why *path* is no adapter, and what to do."""
    if not path.exists():
        return f"{str(path)!r} is not a file or folder that exists"
    if below := adapter_folders(folder):
        return (
            f"{str(path)!r} holds adapters in the folders {shown(below)}: give one of them; "
            "several are not merged together"
        )
    if (folder / "config.json").is_file():
        return (
            f"{str(path)!r} is no adapter but a whole model: it has 'config.json' and no "
            f"{CONFIG!r}. Give it as the checkpoint, and the adapter with --adapter"
        )
    return f"{str(path)!r} is no adapter: there is no {CONFIG!r}"
