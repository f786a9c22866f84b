"""``Target``: where computed weights are kept, and what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelquirks.planner.checkpoint.manifest import Shard
from modelquirks.planner.execution.loaditem import ExecutionError, LoadItem
from modelquirks.planner.execution.offloadstore import FORMAT, OffloadStore
from modelquirks.quirks.recipe_json import to_json

__all__ = ["Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where computed weights are kept, and the checkpoint that they are made from."""

    folder: Path
    """The user's offload folder; other things may be in it, but no checkpoint."""
    root: Path
    """The folder of the checkpoint."""
    shards: tuple[Shard, ...]
    layout: str
    """Digest of which tensor is read from where in them."""
    makers: Mapping[str, str]
    """Who makes what: packing scheme → distribution and version."""

    def store(self) -> OffloadStore:
        """Return the store for the checkpoint as it is; ExecutionError if it may not be there."""
        places = {self.root, *((self.root / shard.name).parent for shard in self.shards)}
        for place in places:
            if self.folder.exists() and place.exists() and os.path.samefile(self.folder, place):
                raise ExecutionError(
                    f"offload folder {str(self.folder)!r} holds the checkpoint itself: weights "
                    "written there would look like a part of it; name another folder"
                )
        files = [_facts(shard) for shard in self.shards]
        # With the path: fine-tunes of one model have equal headers and sizes, and where times are
        # set to a fixed value, as in some images of containers, equal times as well.
        path = str(self.root.resolve())
        text = json.dumps([FORMAT, path, self.layout, files])
        return OffloadStore(
            self.folder,
            fingerprint=hashlib.sha256(text.encode()).hexdigest(),
            checkpoint={"path": path, "layout": self.layout, "files": files},
        )

    def key(self, item: LoadItem) -> str:
        """Return a digest of everything that decides the bytes of *item*, but the checkpoint."""
        schemes = {scheme for node in item.nodes() if (scheme := getattr(node, "scheme", None))}
        made_by = sorted(self.makers.get(scheme, "") for scheme in schemes)
        recipe = to_json(item.node)
        parts = [item.name, item.dtype, list(item.shape), recipe, dict(item.env), made_by]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _facts(shard: Shard) -> dict[str, Any]:
    return {
        "name": shard.name,
        "size_bytes": shard.size_bytes,
        "mtime_ns": shard.mtime_ns,
        "digest": shard.digest,
    }
