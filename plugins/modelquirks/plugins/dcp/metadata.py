"""``.metadata`` of torch.distributed.checkpoint: which chunks there are, and where each lies.

The file is a pickle that torch loads as such, classes and all. Here nothing of it is executed.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``) of
torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint import pickle_machine
from modelquirks.planner.checkpoint.file_kind import look
from modelquirks.planner.checkpoint.pickle_machine import Global, Opaque, PickleProblem
from modelquirks.planner.checkpoint.pickle_names import about_names
from modelquirks.planner.dtypes import MAX_DIMS, from_torch
from modelquirks.planner.finding import Finding, brief, cut
from modelquirks.quirks.recipe import Region

__all__ = ["DistributedTensor", "Metadata", "Where", "read_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = frozenset(
    (
        *(f"{_METADATA}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(f"{_METADATA}.{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *(f"{_METADATA}.{name}" for name in ("ChunkStorageMetadata", "TensorProperties")),
        f"{_METADATA}._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib._local"),
        "pathlib._local.PosixPath",
        *(  # Megatron keeps the plans of its ranks in it
            f"torch.distributed.checkpoint.planner.{name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
        ),
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
    )
)


_MAX_KEYS = 64
"""Of a path: so deep nobody nests a state dict."""
_CHUNKS, _ALWAYS = 4, 1000
"""So many chunks may be named for each that lies anywhere, and so many in any case."""


class Where(NamedTuple):
    """Bytes of a file that are one item, a file of ``torch.save``."""

    file: str
    offset: int
    length: int
    encoding: str
    """What it was packed with (``zstd``); empty: as it is."""


class DistributedTensor(NamedTuple):
    """A tensor as it was before it was cut."""

    path: tuple[str | int, ...]
    """Keys from the top of the dictionary that was saved."""
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Region, ...]
    where: Mapping[tuple[int, ...], Where]
    """Where each chunk lies, by the offsets of its first element."""


class Metadata(NamedTuple):
    """Tensors by flattened name, the paths of what is no tensor, and what to say of the file."""

    tensors: Mapping[str, DistributedTensor]
    others: Mapping[str, tuple[str | int, ...]]
    findings: tuple[Finding, ...]


def read_metadata(path: Path, *, shard: str) -> Metadata:
    """Return the content of ``.metadata``, called *shard*; OSError if the file cannot be read.

    What is no metadata, or is damaged, is an error among the findings.
    """
    try:
        seen = look(path)
        if seen.kind in ("absent", "special", "unreadable"):
            raise PickleProblem(f"cannot be read: {seen.trouble or 'it is no regular file'}")
        with path.open("rb") as file:
            loaded = pickle_machine.load(file, rebuild=_REBUILD, persistent=_nothing)
        content = _state(loaded.value, "Metadata")
        stored, paths, storage = (
            _of_kind(content.get(key), dict, key)
            for key in ("state_dict_metadata", "planner_data", "storage_data")
        )
        where = _places(storage)
        findings = list(about_names(shard, (g for g in loaded.globals if str(g) not in _NAMES)))
        tensors: dict[str, DistributedTensor] = {}
        others: dict[str, tuple[str | int, ...]] = {}
        if _n_chunks(stored) > _CHUNKS * len(storage) + _ALWAYS:
            raise ValueError("many times as many chunks as there are places for")
        for name, item in stored.items():
            if not isinstance(name, str):
                raise ValueError(f"{brief(name)} as the name of a tensor")
            keys = _path(paths.get(name), name)
            if _is(item, "TensorStorageMetadata"):
                tensors[name] = _tensor(item.state, keys, where.get(name, {}))
            else:
                others[name] = keys
        return Metadata(tensors, others, tuple(findings))
    except (PickleProblem, TypeError, ValueError, LookupError, AttributeError) as error:
        text = f"{shard!r} is no metadata of a torch distributed checkpoint, or is damaged: it "
        text += str(error) if isinstance(error, PickleProblem) else f"has {cut(str(error), 200)}"
        return Metadata({}, {}, (Finding("metadata-invalid", "error", f"{text}."),))


def _path(keys: Any, name: Any) -> tuple[str | int, ...]:
    found = keys if isinstance(keys, tuple) and keys else (name,)
    if len(found) > _MAX_KEYS:
        raise ValueError(f"a tensor below {len(found):,} keys")
    return tuple(key if isinstance(key, int | str) else brief(key) for key in found)


def _n_chunks(stored: Mapping[Any, Any]) -> int:
    """Return how many chunks there are: one list of them may stand for many tensors."""
    states = (item.state for item in stored.values() if isinstance(item, Opaque))
    lists = (state.get("chunks") for state in states if isinstance(state, dict))
    return sum(len(chunks) for chunks in lists if isinstance(chunks, list | tuple))


def _tensor(
    state: Any, path: tuple[str | int, ...], where: Mapping[tuple[int, ...], Where]
) -> DistributedTensor:
    shape = _numbers(state["size"])
    properties = state["properties"]
    dtype = properties.state[0] if isinstance(properties.state, tuple) else None
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise ValueError("a tensor without a dtype")
    chunks = tuple(_region(_state(chunk, "ChunkStorageMetadata")) for chunk in state["chunks"])
    if any(len(chunk) != len(shape) for chunk in chunks):
        raise ValueError("a chunk with other dimensions than its tensor")
    return DistributedTensor(path, from_torch(dtype.name), shape, chunks, where)


def _region(chunk: Mapping[str, Any]) -> Region:
    offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
    return tuple((o, o + size) for o, size in zip(offsets, sizes, strict=True))


def _places(storage: Mapping[Any, Any]) -> Mapping[str, Mapping[tuple[int, ...], Where]]:
    """Return where items lie, by name and offsets (none for what is no tensor)."""
    found: dict[str, dict[tuple[int, ...], Where]] = {}
    for key, info in storage.items():
        index, place = _state(key, "MetadataIndex"), _state(info, "_StorageInfo")
        name, offset = index.get("fqn"), index.get("offset")
        encodings = place.get("transform_descriptors") or ()
        begin, length = _numbers((place.get("offset"), place.get("length")))
        file = _of_kind(place.get("relative_path"), str, "relative_path")
        where = Where(file, begin, length, brief(encodings) if encodings else "")
        found.setdefault(name if isinstance(name, str) else brief(name), {})[
            () if offset is None else _numbers(offset)
        ] = where
    return found


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Opaque) and value.kind.rpartition(".")[2] == kind


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not _is(value, kind) or not isinstance(value.state, dict):
        raise ValueError(f"{brief(value)} where a {kind} belongs")
    state: dict[str, Any] = value.state
    return state


def _of_kind(value: Any, kind: type[Any], what: str) -> Any:
    if value is None and kind is dict:  # no planner data: names are as they were given
        return {}
    if not isinstance(value, kind):
        raise ValueError(f"{brief(value)} as {what}, a {kind.__name__} was expected")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    fits = isinstance(values, tuple | list) and len(values) <= MAX_DIMS
    if not fits or not all(type(number) is int and 0 <= number < 1 << 63 for number in values):
        raise ValueError(f"{brief(values)} where whole numbers from 0 belong")
    return tuple(values)


def _nothing(_: Any) -> Any:
    raise ValueError("an object outside the pickle")


def _items(items: Any = ()) -> dict[Any, Any]:
    return {key: value for key, value in items if isinstance(key, str | int)}


_REBUILD: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): _items,
    ("builtins", "dict"): _items,
}
