"""``compare``: which tensors of a checkpoint are not as a digest says.

Imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.digest.digest import Digest, TensorDigest
from modelquirks.planner.digest.hashing import hash_tensors
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.wording import show_shape
from modelquirks.quirks.registry import Registry

__all__ = ["Change", "Comparison", "Kind", "compare"]

Kind = Literal["changed", "unreadable", "missing", "extra"]
"""``changed``: other bytes, dtype or shape. ``unreadable``: the checkpoint has it, and its bytes
cannot be had. ``missing``: only the digest has it. ``extra``: only the checkpoint has it."""

_WHY = {
    "bytes": "other bytes",
    "missing": "not in the checkpoint",
    "extra": "not in the digest",
}


class Change(NamedTuple):
    """A tensor that is not as the digest says."""

    name: str
    kind: Kind
    why: str


@dataclass(frozen=True)
class Comparison:
    """What a checkpoint is, measured by a digest."""

    n_same: int
    """Tensors whose dtype, shape and bytes are those of the digest."""
    n_bytes: int
    """Bytes that were read to find out."""
    changes: tuple[Change, ...]
    """In the order of the checkpoint, then what it lacks."""

    @property
    def is_same(self) -> bool:
        """Whether there is no difference."""
        return not self.changes

    @property
    def counts(self) -> Mapping[str, int]:
        """How many changes there are of each kind that occurs."""
        found = Counter(change.kind for change in self.changes)
        return {kind: found[kind] for kind in get_args(Kind) if found[kind]}

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "same": self.is_same,
            "tensors": self.n_same,
            "bytes": self.n_bytes,
            "changes": [change._asdict() for change in self.changes],
        }


def compare(
    manifest: Manifest,
    digest: Digest,
    names: Collection[str] | None = None,
    *,
    registry: Registry | None = None,
    options: LoadOptions | None = None,
) -> Comparison:
    """Compare the tensors *names* of *manifest*, by default all and with all of *digest*.

    What differs by name, dtype or shape is not read.
    """
    wanted = [name for name in manifest.tensors if names is None or name in names]
    told = {name: change for name in wanted if (change := _by_header(manifest, digest, name))}
    hashed = hash_tensors(
        manifest,
        frozenset(name for name in wanted if name not in told),
        registry=registry,
        options=options,
    )
    for name, found in hashed.tensors.items():
        if found.sha256 != digest.tensors[name].sha256:
            told[name] = Change(name, "changed", _WHY["bytes"])
    for name, why in hashed.unreadable.items():
        told[name] = Change(name, "unreadable", why)
    return Comparison(
        n_same=len(wanted) - len(told),
        n_bytes=hashed.n_bytes,
        changes=(
            *(told[name] for name in wanted if name in told),
            *_missing(manifest, digest, names),
        ),
    )


def _by_header(manifest: Manifest, digest: Digest, name: str) -> Change | None:
    """Return what is known without reading the tensor."""
    tensor, expected = manifest.tensors[name], digest.tensors.get(name)
    if expected is None:
        return Change(name, "extra", _WHY["extra"])
    if tensor.dtype is None or tensor.shape is None:
        return None
    found = TensorDigest(tensor.dtype, tensor.shape, "")
    if found[:2] == expected[:2]:
        return None
    return Change(name, "changed", f"{_type(found)}, the digest has {_type(expected)}")


def _missing(manifest: Manifest, digest: Digest, names: Collection[str] | None) -> Iterator[Change]:
    for name in digest.tensors if names is None else names:
        if name not in manifest.tensors:
            yield Change(name, "missing", _WHY["missing"])


def _type(tensor: TensorDigest) -> str:
    return f"{tensor.dtype} {show_shape(tensor.shape)}"
