"""Things with a size, in their order, by as many as fit together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

__all__ = ["batches"]


class _Sized(Protocol):
    """What has a size."""

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        ...


_T = TypeVar("_T", bound=_Sized)


def batches(things: Iterable[_T], limit: int) -> Iterator[Sequence[_T]]:
    """Yield the *things* in groups of at most *limit* bytes; a larger one has its own."""
    batch: list[_T] = []
    held = 0
    for thing in things:
        if batch and held + thing.nbytes > limit:
            yield batch
            batch, held = [], 0
        batch.append(thing)
        held += thing.nbytes
    if batch:
        yield batch
