"""One safetensors file of computed weights: its bytes, and what it says of their making."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import BITS, nbytes

__all__ = ["Sized", "Weight", "by_key", "file_of", "head_of", "widest_first"]

_KEYS = "modelquirks.keys"
"""In the metadata of a file: a JSON object of tensor name → digest of how it is made."""


class Sized(Protocol):
    """What the head of a file says of a tensor."""

    @property
    def name(self) -> str:
        """Its name in the file."""
        ...

    @property
    def dtype(self) -> str:
        """As safetensors spells it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In values."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        ...


class Weight(NamedTuple):
    """One tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    """Digest of how it is made."""
    chunks: Callable[[], Iterable[memoryview]]
    """Gives its bytes in row-major order, piece by piece."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return nbytes(self.dtype, self.shape)


_Sized = TypeVar("_Sized", bound=Sized)


def file_of(weights: Iterable[Weight], *, about: str) -> tuple[bytes, Iterator[memoryview]]:
    """Return the head of a file with *weights*, and its data, made piece by piece."""
    ordered = widest_first(weights)
    keys = json.dumps({weight.name: weight.key for weight in ordered})
    return head_of(ordered, {"format": "pt", "about": about, _KEYS: keys}), _data(ordered)


def widest_first(tensors: Iterable[_Sized]) -> list[_Sized]:
    """Return *tensors* by the width of their values: each then lies at a multiple of its width.

    That is so behind the 8·n bytes of a head.
    """
    return sorted(tensors, key=lambda tensor: -BITS[tensor.dtype])


def head_of(tensors: Iterable[Sized], metadata: Mapping[str, str]) -> bytes:
    """Return the head of a safetensors file with *tensors* in this order.

    That is the length of the JSON, and the JSON, which ends at a multiple of 8 bytes.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def by_key(header: Header) -> Mapping[str, StoredTensor]:
    """Return the tensors of such a file by the digest of how they are made.

    ValueError if it is no such file, or is damaged.
    """
    if errors := [found.message for found in header.findings if found.severity == "error"]:
        raise ValueError(errors[0])
    try:
        keys = json.loads(header.metadata.get(_KEYS, ""))
    except RecursionError as error:
        raise ValueError(f"its {_KEYS!r} are nested without end") from error
    if not isinstance(keys, dict) or keys.keys() != header.entries.keys():
        raise ValueError(f"its {_KEYS!r} are not of its tensors")
    if not all(isinstance(key, str) for key in keys.values()):
        raise ValueError(f"its {_KEYS!r} are no digests")
    return {keys[name]: tensor for name, tensor in header.entries.items()}


def _data(weights: Iterable[Weight]) -> Iterator[memoryview]:
    for weight in weights:
        written = 0
        for chunk in weight.chunks():
            written += chunk.nbytes
            yield chunk
        if written != weight.nbytes:
            raise RuntimeError(f"{weight.name!r} came to {written} bytes, not {weight.nbytes}")
