"""What an accelerator's allocator takes beyond the bytes of a tensor."""

from __future__ import annotations

__all__ = ["padding"]

_BLOCK = 512
_LARGE = 10 << 20
_SEGMENT = 2 << 20


def padding(n_bytes: int) -> int:
    """Return by how many bytes an allocation of *n_bytes* is rounded up.

    torch 2.13, c10/cuda/CUDACachingAllocator: blocks are multiples of 512 bytes
    (``kMinBlockSize``); from 10 MiB on (``kMinLargeAlloc``) a tensor gets a segment of its own, in
    multiples of 2 MiB (``kRoundLarge``).

    >>> padding(1), padding(1024), padding((10 << 20) + 1)
    (511, 0, 2097151)
    """
    return -n_bytes % (_SEGMENT if n_bytes >= _LARGE else _BLOCK)
