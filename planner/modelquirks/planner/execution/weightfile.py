"""One safetensors file of computed weights: its bytes, and what it says of their making."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import BITS, nbytes

__all__ = ["Weight", "by_key", "file_of"]

_KEYS = "modelquirks.keys"
"""In the metadata of a file: a JSON object of tensor name → digest of how it is made."""


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


def file_of(weights: Iterable[Weight], *, about: str) -> tuple[bytes, Iterator[memoryview]]:
    """Return the head of a file with *weights*, and its data, made piece by piece."""
    # The widest first: each then lies at a multiple of its width, behind 8·n bytes of header.
    ordered = sorted(weights, key=lambda weight: -BITS[weight.dtype])
    return _head(ordered, about), _data(ordered)


def by_key(header: Header) -> Mapping[str, StoredTensor]:
    """Return the tensors of such a file by the digest of how they are made."""
    keys = json.loads(header.metadata[_KEYS])
    return {keys[name]: tensor for name, tensor in header.entries.items()}


def _head(weights: Sequence[Weight], about: str) -> bytes:
    """Return the head of a safetensors file: the length of the JSON, and the JSON."""
    keys = json.dumps({weight.name: weight.key for weight in weights})
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "about": about, _KEYS: keys}}
    begin = 0
    for weight in weights:
        end = begin + weight.nbytes
        entries[weight.name] = {
            "dtype": weight.dtype,
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _data(weights: Iterable[Weight]) -> Iterator[memoryview]:
    for weight in weights:
        written = 0
        for chunk in weight.chunks():
            written += chunk.nbytes
            yield chunk
        if written != weight.nbytes:
            raise RuntimeError(f"{weight.name!r} came to {written} bytes, not {weight.nbytes}")
