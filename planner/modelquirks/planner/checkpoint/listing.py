"""``Listing``: the names, dtypes and shapes in a checkpoint and its config.json; no weights.

What proves a quirk, small enough to be kept beside its test and to be sent to somebody: a JSON file
with an object ``config`` and an object ``tensors`` of name → ``"BF16 [32, 128]"``, a tensor a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelquirks.planner.checkpoint.manifest import Manifest, StoredTensor
from modelquirks.planner.dtypes import BITS, nbytes
from modelquirks.planner.finding import shown
from modelquirks.planner.writing import write_whole
from modelquirks.quirks.recipe import TensorType

__all__ = ["Listing", "ListingError"]

_TYPE = re.compile(r"([A-Z][A-Z0-9_]*|\?) \[([0-9, ]*|\?)\]")


class ListingError(ValueError):
    """A listing that cannot be read; the message says where it is wrong."""


@dataclass(frozen=True)
class Listing:
    """What a checkpoint holds, by name, and its config."""

    tensors: Mapping[str, str] = field(default_factory=dict)
    """Stored name → dtype and shape, as ``"BF16 [32, 128]"``; ``"? [?]"`` where only the name is
    known."""
    config: Mapping[str, Any] = field(default_factory=dict)
    container: str = ""
    """What the weights are wrapped in, as ``inspect`` says it."""

    def __post_init__(self) -> None:
        """Raise :class:`ListingError` for every type that is none."""
        faults = [f"{name}: {text}" for name, text in self.tensors.items() if not _is_type(text)]
        if faults:
            raise ListingError(f"no dtype with a shape, as 'BF16 [32, 128]': {shown(faults)}")

    @classmethod
    def named(cls, names: Iterable[str], config: Mapping[str, Any] | None = None) -> Listing:
        """Return a listing of *names* alone."""
        return cls(dict.fromkeys(names, "? [?]"), config or {})

    @classmethod
    def of(cls, manifest: Manifest) -> Listing:
        """Return what *manifest* holds."""
        tensors = {
            name: str(TensorType(tensor.dtype, tensor.shape))
            for name, tensor in manifest.tensors.items()
        }
        return cls(tensors, manifest.config, manifest.container)

    @classmethod
    def read(cls, path: str | Path) -> Listing:
        """Read what :meth:`write` wrote; :class:`ListingError` if the file is none."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ListingError(f"{str(path)!r} is no JSON: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("tensors"), dict):
            raise ListingError(
                f"{str(path)!r} has no object 'tensors'; `inspect --listing` writes it"
            )
        return cls(data["tensors"], data.get("config") or {}, data.get("container") or "")

    def write(self, path: str | Path) -> None:
        """Write it as JSON, a tensor a line."""
        write_whole(Path(path), self.to_text())

    def to_text(self) -> str:
        """Return the JSON that :meth:`write` writes."""
        data = {"config": self.config, "container": self.container, "tensors": self.tensors}
        kept = {name: value for name, value in data.items() if value or name == "tensors"}
        return json.dumps(kept, indent=1) + "\n"

    def manifest(self) -> Manifest:
        """Return a manifest as of a file that holds these tensors; nothing can be read from it."""
        tensors: dict[str, StoredTensor] = {}
        end = 0
        for name, text in self.tensors.items():
            dtype, shape = _type(text)
            if dtype is None or shape is None:
                tensors[name] = StoredTensor(name, _FILE, dtype, shape)
                continue
            begin, end = end, end + nbytes(dtype, shape)
            tensors[name] = StoredTensor(name, _FILE, dtype, shape, begin, end)
        return Manifest(
            root=Path(),
            path=Path(_FILE),
            format="safetensors",
            tensors=tensors,
            shards=(),
            config=self.config,
            container=self.container,
        )


_FILE = "listing.json"


def _is_type(text: object) -> bool:
    if not isinstance(text, str) or (found := _TYPE.fullmatch(text)) is None:
        return False
    return found[1] == "?" or found[1] in BITS


def _type(text: str) -> TensorType:
    """Return what :meth:`TensorType.__str__` wrote as *text*."""
    dtype, _, shape = text.partition(" ")
    sizes = None if shape == "[?]" else tuple(int(size) for size in shape[1:-1].split(",") if size)
    return TensorType(None if dtype == "?" else dtype, sizes)
