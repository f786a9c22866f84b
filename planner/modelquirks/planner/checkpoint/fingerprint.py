"""Whether the files of a checkpoint are still those whose headers were read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from modelquirks.planner.checkpoint.file_kind import Kind, look
from modelquirks.planner.checkpoint.lazy_tensors import LazyTensors
from modelquirks.planner.checkpoint.manifest import Shard, StoredTensor
from modelquirks.planner.checkpoint.pickle_machine import MAX_BYTES
from modelquirks.planner.checkpoint.safetensors_header import header_digest
from modelquirks.planner.finding import Finding

__all__ = ["changed", "copies_among", "digest_of", "layout_digest"]

_GGUF_BYTES = 1 << 24


def layout_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Return a digest of where each tensor is read from.

    The files may all be as they were, and yet another index, or a further file in the folder, have
    tensors read from elsewhere.
    """
    places: Iterable[str]
    if isinstance(tensors, LazyTensors):  # all that is in some files: their headers tell
        places = tensors.layout
    else:
        places = sorted(f"{t.name}\0{t.shard}\0{t.begin}" for t in tensors.values())
    return hashlib.sha256("\n".join(places).encode("utf-8", "surrogatepass")).hexdigest()


def changed(root: Path, shards: Sequence[Shard], *, same_place: bool) -> list[Finding]:
    """Return an error for each file of *shards* in the folder *root* that is not as it was.

    Sizes and headers are compared. *same_place*: the files should not have been written since, so
    that the time of the last change counts as well: equal headers do not mean equal weights. Leave
    it False where the checkpoint was copied.
    """
    return [
        Finding("shard-changed", "error", f"{shard.name!r} {what}")
        for shard in shards
        for what in _differences(root, shard, same_place=same_place)
    ]


def _differences(root: Path, shard: Shard, *, same_place: bool) -> Iterator[str]:
    """Yield at most one difference, the plainest, and what to do."""
    again = "; make the plan again."
    path = root / shard.name
    now = look(path)
    if shard.size_bytes is None:
        if now.kind != "absent":
            yield f"was not there when the plan was made and is now{again}"
    elif now.kind in ("absent", "special"):
        yield f"{'is gone' if now.kind == 'absent' else 'can no longer be read'}{again}"
    elif now.kind == "unreadable":
        yield f"can no longer be read ({now.trouble})."
    elif now.size_bytes != shard.size_bytes:
        had = f"had {shard.size_bytes:,} bytes when the plan was made"
        yield f"{had} and has {now.size_bytes:,}{again}"
    elif digest_of(path, now.kind) != shard.digest:
        trouble = _trouble(path)
        yield trouble or f"has another header than when the plan was made{again}"
    elif same_place and shard.mtime_ns is not None and now.mtime_ns != shard.mtime_ns:
        yield f"was written again since the plan was made, with the same header{again}"


def _trouble(path: Path) -> str:
    """Return why the file cannot be read now, if it cannot: then its header is as it was."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return f"can no longer be read ({error.strerror or error})."
    return ""


def copies_among(shards: Iterable[Shard]) -> Iterator[tuple[str, ...]]:
    """Yield the names of files of ``torch.save`` that are one and the same, as far as is seen.

    The digest of a zip file covers its directory, which has a checksum of every record.
    """
    places: dict[str, list[str]] = {}
    for shard in shards:
        if shard.digest is not None:
            places.setdefault(shard.digest, []).append(shard.name)
    yield from (tuple(names) for names in places.values() if len(names) > 1)


def digest_of(path: Path, kind: Kind) -> str | None:
    """Return the digest of the header of a file of that kind, None if it has none.

    Of a pickle it is that of all its bytes, if they are not too many to be read as one; of GGUF,
    whose header is as long as its tokenizer, that of the first 16 MiB.
    """
    if kind in ("absent", "special", "unreadable"):  # opening a named pipe would wait for ever
        return None
    if kind in ("zip", "legacy", "tar"):
        from modelquirks.planner.checkpoint.torch_zip import (
            read_torch,  # 10 ms that others do without
        )

        return read_torch(path).shard.digest
    try:
        if kind == "pickle" and path.stat().st_size <= MAX_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        if kind == "gguf":
            with path.open("rb") as file:
                return hashlib.sha256(file.read(_GGUF_BYTES)).hexdigest()
        return header_digest(path)
    except OSError:
        return None
