"""``beside``: base and adapter as one checkpoint, which execution reads from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modelquirks.planner.checkpoint.manifest import MARK, Manifest, Shard, StoredTensor
from modelquirks.quirks.recipe import Node, Source, mapped

__all__ = ["beside", "marked"]


def marked(name: str) -> str:
    """Return what the tensor *name* of the adapter is called beside the base."""
    return MARK + name


def beside(base: Manifest, adapter: Manifest) -> Manifest:
    """Return the tensors of both: those of *base* as they are, then those of *adapter*, marked.

    The adapter's files are named by their absolute path, as they lie elsewhere.
    """
    home = os.path.abspath(adapter.root)
    tensors = {**base.tensors, **_tensors(adapter.tensors, home)}
    assembled = {marked(n): _renamed(node) for n, node in adapter.assembled.items()}
    places: Mapping[str, StoredTensor] = {}
    if base.assembled or assembled:
        places = {**base.readable, **_tensors(adapter.readable, home)}
    return replace(
        base,
        tensors=tensors,
        shards=(*base.shards, *(_shard(shard, home) for shard in adapter.shards)),
        assembled={**base.assembled, **assembled},
        places=places,
    )


def _tensors(tensors: Mapping[str, StoredTensor], home: str) -> Mapping[str, StoredTensor]:
    return {
        marked(name): tensor._replace(name=marked(name), shard=_path(home, tensor.shard))
        for name, tensor in tensors.items()
    }


def _shard(shard: Shard, home: str) -> Shard:
    return replace(shard, name=_path(home, shard.name))


def _path(home: str, name: str) -> str:
    return Path(home, name).as_posix()


def _renamed(node: Node) -> Node:
    return mapped(node, lambda n: Source(marked(n.name)) if isinstance(n, Source) else n)
