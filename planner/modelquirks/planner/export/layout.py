"""``lay_out``: which tensor lies where in which file of an export. Arithmetic only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from modelquirks.planner.batches import batches
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.execution.weightfile import Sized, head_of, widest_first

__all__ = ["INDEX", "OutFile", "index_of", "lay_out"]

INDEX = ".safetensors.index.json"
"""What follows the stem in the name of the index."""

_Tensor = TypeVar("_Tensor", bound=Sized)


@dataclass(frozen=True, slots=True)
class OutFile:
    """One safetensors file that will be written."""

    name: str
    head: bytes
    """Length and JSON of the header."""
    places: Mapping[str, StoredTensor]
    """Every tensor of it, in order; offsets count from the start of the file."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""
        return max([len(self.head), *(place.end or 0 for place in self.places.values())])


def lay_out(
    tensors: Sequence[Sized], *, shard_bytes: int, stem: str, metadata: Mapping[str, str]
) -> tuple[OutFile, ...]:
    """Return the files for *tensors*, each with at most *shard_bytes* of them.

    As in huggingface_hub's ``split_state_dict_into_shards_factory``: in the order given, and
    nothing is optimised, so that sizes 6, 6, 2, 6, 2, 2 with a limit of 10 make files of 6, 8 and
    10. A tensor larger than the limit has a file of its own. One file is called
    ``model.safetensors`` (for the *stem* ``model``), several ``model-00001-of-00003.safetensors``.
    Within a file the widest values come first, so that every tensor is aligned.
    """
    groups = [*batches(tensors, shard_bytes)]
    names = [_name(stem, number, len(groups)) for number in range(1, len(groups) + 1)]
    return tuple(_file(name, group, metadata) for name, group in zip(names, groups, strict=True))


def index_of(files: Iterable[OutFile], metadata: Mapping[str, str]) -> bytes:
    """Return the text of ``model.safetensors.index.json`` for *files*, as of save_pretrained."""
    places = [place for file in files for place in file.places.values()]
    content = {
        "metadata": {**metadata, "total_size": sum(place.nbytes or 0 for place in places)},
        "weight_map": {place.name: place.shard for place in places},
    }
    return f"{json.dumps(content, indent=2, sort_keys=True)}\n".encode()


def _name(stem: str, number: int, count: int) -> str:
    part = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
    return f"{stem}{part}.safetensors"


def _file(name: str, tensors: Iterable[Sized], metadata: Mapping[str, str]) -> OutFile:
    ordered = widest_first(tensors)
    head = head_of(ordered, metadata)
    places: dict[str, StoredTensor] = {}
    begin = len(head)
    for tensor in ordered:
        end = begin + tensor.nbytes
        places[tensor.name] = StoredTensor(
            tensor.name, name, tensor.dtype, tensor.shape, begin, end
        )
        begin = end
    return OutFile(name, head, places)
