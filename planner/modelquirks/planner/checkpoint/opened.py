"""``Opened``: what a plugin found in a checkpoint of a format that only it knows.

Such a checkpoint has two levels. *Places* are the byte ranges in its files, each with a name of its
own: the part of a weight that one rank wrote, say. *Tensors* are what the training model had, each
a recipe over places. Everything that knows nothing of the format (quirks, audit, placement) goes by
the tensors; what is written into a plan, and what execution reads, are the places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.fingerprint import digest_of
from modelquirks.planner.checkpoint.manifest import Shard, StoredTensor
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.checkpoint.shards import Content
from modelquirks.planner.finding import Finding
from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.recipe import Node, RecipeError, Source, TensorType, sources

__all__ = ["Opened", "content_of", "shard_of"]


@dataclass(frozen=True, slots=True)
class Opened:
    """What the hook ``modelquirks_open`` returns."""

    format: str
    """One lower-case word for people: ``dcp``."""
    places: Mapping[str, StoredTensor]
    """Byte ranges by name. Of one that is not there (its file is missing) dtype and shape are
    known, begin and end are None, and an error among the findings names it.

    A name that begins with that of its tensor (``lin.weight[0:4]``) lets the tensors of all layers
    share one recipe in the plan."""
    tensors: Mapping[str, Node]
    """How each tensor of the model that was saved is made, in its order. The leaves are names of
    places; ``Source`` of its own name is a tensor that lies in one place."""
    shards: tuple[Shard, ...]
    """Every file that was looked at, so that execution notices when one has changed. The digest is
    that of :func:`~modelquirks.planner.checkpoint.fingerprint.digest_of`."""
    findings: tuple[Finding, ...] = ()
    container: str = ""
    """As in a :class:`~modelquirks.planner.checkpoint.manifest.Manifest`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    chosen: OpenOptions = AS_USUAL
    """Which state and weights these are, as the options that would open just them again; None where
    the format has no such choice."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the files say in the words of config.json, used where there is no such file."""
    without_weights: tuple[str, ...] = ()
    """Files of the format that look like weights by their names, and hold none of the model."""


def content_of(opened: Opened) -> Content:
    """Return the content of a checkpoint: each tensor with the type that its recipe gives."""
    tensors: dict[str, StoredTensor] = {}
    assembled: dict[str, Node] = {}
    faults: list[str] = []
    for name, node in opened.tensors.items():
        if node == Source(name) and name in opened.places:
            tensors[name] = opened.places[name]
            continue
        try:
            tensors[name] = _whole(name, node, opened.places)
        except RecipeError as error:
            faults.append(f"{name!r}: {error}")
        else:
            assembled[name] = node
    return Content(
        format=opened.format,
        tensors=tensors,
        shards=opened.shards,
        findings=(*opened.findings, *_about(faults)),
        container=opened.container,
        metadata=opened.metadata,
        config=opened.config,
        assembled=assembled,
        places=opened.places,
    )


def shard_of(root: Path, name: str) -> Shard:
    """Return a file below *root* as it is now, for ``shards``."""
    seen = look(root / name)
    if seen.kind == "absent":
        return Shard(name, None, None, None)
    return Shard(name, seen.size_bytes, seen.mtime_ns, digest_of(root / name, seen.kind))


def _whole(name: str, node: Node, places: Mapping[str, StoredTensor]) -> StoredTensor:
    """Return a tensor without a place of its own: its dtype and shape, and its first file."""
    parts = [leaf.name for leaf in sources(node)]
    if absent := [part for part in parts if part not in places]:
        raise RecipeError(f"there is no place {absent[0]!r}")
    type_ = infer(node, lambda part: TensorType(places[part].dtype, places[part].shape), {})
    return StoredTensor(name, places[parts[0]].shard, type_.dtype, type_.shape)


def _about(faults: list[str]) -> Iterator[Finding]:
    if faults:
        more = f" … and {len(faults) - 10} more" if len(faults) > 10 else ""
        text = (
            f"{len(faults)} tensors cannot be put together from their parts: "
            f"{'; '.join(faults[:10])}{more}."
        )
        yield Finding("assembly-broken", "error", text)
