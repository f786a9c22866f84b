"""From ``.metadata`` and the ``*.distcp`` files beside it to places and recipes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.file_kind import Look, look
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.opened import Opened, shard_of
from modelquirks.planner.checkpoint.place_tensors import dense_stride
from modelquirks.planner.checkpoint.state_dict import find_weights
from modelquirks.planner.checkpoint.torch_pickle import StorageRecord, TensorRecord
from modelquirks.planner.checkpoint.torch_zip import read_item
from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.dcp.grid import Chunk, assembled, shown_region
from modelquirks.plugins.dcp.metadata import DistributedTensor, Metadata, Where, read_metadata
from modelquirks.quirks.recipe import Node, RecipeError

__all__ = ["open_folder", "unassembled"]


class _Piece(NamedTuple):
    """A chunk of a weight, and where it should lie (None: the metadata do not say)."""

    place: StoredTensor
    """Without begin and end."""
    where: Where | None


def open_folder(root: Path, *, below: str = "") -> Opened:
    """Return what the checkpoint in *root*, or in the folder *below* of it, holds."""
    prefix = f"{below}/" if below else ""
    shard = f"{prefix}.metadata"
    if look(root / shard).kind == "absent":
        return _without_metadata(root, below)
    found = read_metadata(root / shard, shard=shard)
    weights = find_weights(shard, _nested(found))
    names = {record.storage.key: name for name, record in weights.tensors.items()}
    files = {w.file for tensor in found.tensors.values() for w in tensor.where.values()}
    seen = {f"{prefix}{file}": look(root / prefix / file) for file in sorted(files) if _safe(file)}
    absent = {name.removeprefix(prefix) for name, now in seen.items() if now.kind == "absent"}
    chunks = {n: _chunks(n, found.tensors[key]) for key, n in names.items()}
    recipes, faults = _recipes(chunks, {n: found.tensors[k].shape for k, n in names.items()})
    pieces = [
        piece
        for key, name in names.items()
        for piece in _pieces(chunks[name], found.tensors[key], prefix)
    ]
    places, about_places = _placed(root, pieces, seen)
    return Opened(
        format="dcp",
        places=places,
        tensors=recipes,
        shards=tuple(shard_of(root, name) for name in (shard, *seen)),
        findings=(
            *found.findings,
            *weights.findings,
            *unassembled(faults),
            *about_places,
            *_about_flat(recipes),
            *_about_rest(found, names, absent),
        ),
        container=weights.container,
    )


def unassembled(faults: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the error for tensors whose chunks do not make them up, by name."""
    if faults:
        told = "; ".join(f"{name!r}: {why}" for name, why in [*faults.items()][:10])
        more = f" … and {len(faults) - 10} more" if len(faults) > 10 else ""
        text = f"{len(faults)} tensors are not whole, and left out: {told}{more}."
        yield Finding("chunk-missing", "error", text)


def _without_metadata(root: Path, below: str) -> Opened:
    folder = root / below
    files = sorted(path.name for path in folder.glob("*.distcp"))
    text = (
        f"there is no '.metadata' beside {shown(files, 3)}: it is written last, so that the save "
        "was interrupted, or the file was not copied. Without it no chunk has a name."
    )
    shards = tuple(shard_of(root, f"{below}/{n}" if below else n) for n in files)
    return Opened("dcp", {}, {}, shards, (Finding("metadata-missing", "error", text),))


def _nested(found: Metadata) -> dict[Any, Any]:
    """Return the dictionary that was saved, with records in the place of tensors."""
    value: dict[Any, Any] = {}
    for name, tensor in found.tensors.items():
        storage = StorageRecord(name, tensor.dtype, 0)
        record = TensorRecord(storage, tensor.dtype, tensor.shape, dense_stride(tensor.shape), 0)
        _enter(value, tensor.path, record)
    for path in found.others.values():
        _enter(value, path, "")
    return value


def _enter(value: dict[Any, Any], path: tuple[str | int, ...], item: Any) -> None:
    *keys, last = path
    for key in keys:
        inner = value.setdefault(key, {})
        value = inner if isinstance(inner, dict) else value.setdefault(f"{key}.", {})
    value[last] = item


def _chunks(name: str, tensor: DistributedTensor) -> list[Chunk]:
    """Return the chunks with the names of their places: the tensor's own if there is only one."""
    whole = tuple((0, size) for size in tensor.shape)
    if tensor.chunks == (whole,):
        return [Chunk(name, whole)]
    kept = [region for region in tensor.chunks if all(a < b for a, b in region)]
    return [Chunk(f"{name}{shown_region(region)}", region) for region in kept]


def _recipes(
    chunks: Mapping[str, list[Chunk]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Node], dict[str, str]]:
    """Return how each tensor is made of its chunks, and of the others why they cannot be."""
    recipes: dict[str, Node] = {}
    faults: dict[str, str] = {}
    for name, parts in chunks.items():
        try:
            recipes[name] = assembled(parts, shapes[name])
        except RecipeError as error:
            faults[name] = str(error)
    return recipes, faults


def _pieces(chunks: Iterable[Chunk], tensor: DistributedTensor, prefix: str) -> Iterator[_Piece]:
    for place, region in chunks:
        where = tensor.where.get(tuple(start for start, _ in region))
        shape = tuple(stop - start for start, stop in region)
        file = f"{prefix}{where.file}" if where else ""
        yield _Piece(StoredTensor(place, file, tensor.dtype, shape), where)


def _placed(
    root: Path, pieces: Iterable[_Piece], seen: Mapping[str, Look]
) -> tuple[dict[str, StoredTensor], list[Finding]]:
    """Return the places with begin and end, as far as they are there, and what is wrong."""
    found: dict[str, StoredTensor] = {}
    findings: list[Finding] = []
    ordered = sorted(pieces, key=lambda p: (p.place.shard, p.where.offset if p.where else 0))
    for file, group in groupby(ordered, key=lambda piece: piece.place.shard):
        several = [*group]
        found |= {piece.place.name: piece.place for piece in several}
        names = [piece.place.name for piece in several]
        if fault := _fault_of_file(file, seen.get(file), names):
            findings.append(fault)
            continue
        size = seen[file].size_bytes
        good = [p for p in several if p.where and p.where.offset + p.where.length <= size]
        findings += _about_bad(file, size, several, good)
        with (root / file).open("rb") as opened:
            read = {piece.place.name: _read(opened, piece) for piece in good if piece.where}
        found |= {n: place for n, place in read.items() if isinstance(place, StoredTensor)}
        findings += _once_each([one for one in read.values() if isinstance(one, Finding)])
    return found, findings


def _fault_of_file(file: str, seen: Look | None, names: list[str]) -> Finding | None:
    parts = f"{len(names)} chunks: {shown(names)}"
    if not file:
        text = f"'.metadata' does not say where these chunks lie: {parts}."
        return Finding("chunk-missing", "error", text)
    if seen is None:
        text = f"{file!r} is outside of the folder, and not opened; it should hold {parts}."
        return Finding("shard-path", "error", text)
    if seen.kind == "absent":
        return Finding("shard-missing", "error", f"{file!r} is not there; it holds {parts}.")
    if seen.kind in ("special", "unreadable"):
        text = f"{file!r} cannot be read ({seen.trouble or 'no regular file'}); it holds {parts}."
        return Finding("file-unreadable", "error", text)
    return None


def _about_bad(
    file: str, size: int, pieces: Iterable[_Piece], good: list[_Piece]
) -> Iterator[Finding]:
    kept = {piece.place.name for piece in good}
    bad = [p for p in pieces if p.where and p.place.name not in kept]
    if bad:
        end = max(p.where.offset + p.where.length for p in bad if p.where)
        text = (
            f"{file!r} is cut off: it has {size:,} bytes, and by '.metadata' chunks go up to byte "
            f"{end:,}. Lost are {len(bad)} chunks: {shown([p.place.name for p in bad])}."
        )
        yield Finding("shard-truncated", "error", text)


def _read(file: Any, piece: _Piece) -> StoredTensor | Finding:
    place, where = piece
    if where is None or where.encoding:
        text = f"{place.name!r} in {place.shard!r} is packed with {where and where.encoding!r}"
        return Finding("chunk-encoded", "error", f"{text}, which is not read here.")
    found = read_item(file, place.name, shard=place.shard, begin=where.offset, length=where.length)
    if isinstance(found, Finding) or (found.dtype, found.shape) == (place.dtype, place.shape):
        return found
    text = (
        f"{place.name!r} in {place.shard!r} is {found.dtype} {list(found.shape or ())}; by "
        f"'.metadata' it is {place.dtype} {list(place.shape or ())}: they are not of one save."
    )
    return Finding("chunk-differs", "error", text)


def _once_each(findings: list[Finding]) -> Iterator[Finding]:
    """Yield one finding for each code, the first ten texts in it."""
    for code in dict.fromkeys(one.code for one in findings):
        texts = [one.message.rstrip(".") for one in findings if one.code == code]
        more = f" … and {len(texts) - 10} more" if len(texts) > 10 else ""
        yield Finding(code, "error", f"{'; '.join(texts[:10])}{more}.")


def _about_flat(names: Iterable[str]) -> Iterator[Finding]:
    if flat := [name for name in names if name.rpartition(".")[2] == "_flat_param"]:
        text = (
            f"{shown(flat)} hold the weights of several modules end to end, as FSDP1 writes them "
            "with LOCAL_STATE_DICT; which are where, the checkpoint does not say. Save with "
            "SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
        yield Finding("flat-parameters", "error", text)


def _about_rest(
    found: Metadata, names: Mapping[str, str], absent: Collection[str]
) -> Iterator[Finding]:
    """Say what else was saved (the optimizer), how much it is, and whether it is complete.

    *absent* are files that are not there.
    """
    rest = {key: tensor for key, tensor in found.tensors.items() if key not in names}
    for top in dict.fromkeys(str(tensor.path[0]) for tensor in rest.values()):
        tensors = {key: t for key, t in rest.items() if str(t.path[0]) == top}
        size = sum(nbytes(t.dtype, t.shape) for t in tensors.values())
        torn = [
            key for key, t in tensors.items() if any(w.file in absent for w in t.where.values())
        ]
        state = f"; of {len(torn)} a file is missing: {shown(torn, 3)}" if torn else ""
        text = f"{top!r} holds {len(tensors)} tensors, {size:,} bytes, not loaded{state}."
        yield Finding("not-loaded", "info", text)


def _safe(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts
