"""``pick``: which experts an index into a stacked tensor asks for, and what becomes of them.

Only forms that name experts are known here; whatever else torch understands (masks, ``...``,
tensors beside other tensors) is left to torch and the whole tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch

__all__ = ["Pick", "pick"]

Index = Any
"""Whatever stands in the brackets."""


class Pick(NamedTuple):
    """What one index asks for."""

    numbers: tuple[int, ...]
    """Of the experts, from 0, in the order wanted; one may come twice."""
    shape: tuple[int, ...] | None
    """What takes the place of dimension 0; None: it is gone, *numbers* has one element."""
    rest: tuple[Index, ...]
    """What is to be done with the other dimensions: numbers, slices, ``None`` and ``...``."""

    def of(
        self, expert: Callable[[int], torch.Tensor], empty: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return what the index gives; *expert* makes one, *empty* a stack of none."""
        if self.shape is None:
            alone = expert(self.numbers[0])
            return alone[self.rest] if self.rest else alone
        made = {number: expert(number) for number in dict.fromkeys(self.numbers)}
        stacked = torch.stack([made[number] for number in self.numbers]) if made else empty()
        stacked = stacked.reshape(*self.shape, *stacked.shape[1:])
        return stacked[(slice(None), *self.rest)] if self.rest else stacked


def pick(index: Index, n: int) -> Pick | None:
    """Return what *index* asks for of *n* experts; None if it does not go by experts.

    IndexError, in torch's words, for a number that no expert has.

    >>> pick(-1, 4), pick(slice(0, 4, 2), 4)
    (Pick(numbers=(3,), shape=None, rest=()), Pick(numbers=(0, 2), shape=(2,), rest=()))
    >>> pick(torch.tensor([[3, 0]]), 4), pick((1, None), 4)
    (Pick(numbers=(3, 0), shape=(1, 2), rest=()), Pick(numbers=(1,), shape=None, rest=(None,)))
    """
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    if not all(map(_is_basic, rest)):
        return None
    if isinstance(first, slice):
        return _of_slice(first, n, tuple(rest))
    if (number := _number(first)) is not None:
        return Pick((_checked(number, n),), None, tuple(rest))
    found = None if rest else _several(first)
    if found is None:
        return None
    numbers, shape = found
    return Pick(tuple(_checked(number, n) for number in numbers), shape, ())


def _of_slice(index: slice, n: int, rest: tuple[Index, ...]) -> Pick | None:
    """Return the experts of a slice; None if it is all of them, or none of torch's."""
    if (index.step or 1) <= 0:
        return None
    numbers = tuple(range(*index.indices(n)))
    return None if len(numbers) == n else Pick(numbers, (len(numbers),), rest)


def _number(index: Index) -> int | None:
    """Return the one number that *index* is; torch takes Booleans and bytes for masks."""
    if isinstance(index, torch.Tensor):
        single = index.dim() == 0 and not _is_mask(index) and _is_whole(index)
        return int(index.item()) if single else None
    if isinstance(index, SupportsIndex) and not isinstance(index, bool):
        return operator.index(index)
    return None


def _several(index: Index) -> tuple[Sequence[int], tuple[int, ...]] | None:
    if isinstance(index, list) and index and all(type(each) is int for each in index):
        return index, (len(index),)
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int64, torch.int32):
        return None
    return (index.flatten().tolist(), tuple(index.shape)) if _is_several(index) else None


def _is_several(index: torch.Tensor) -> bool:
    return index.dim() > 0 and not index.is_meta


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _is_whole(index: torch.Tensor) -> bool:
    real = index.is_floating_point() or index.is_complex() or index.is_meta
    return not real


def _is_basic(index: Index) -> bool:
    if index is None or index is Ellipsis:
        return True
    return type(index) in (int, slice)


def _checked(number: int, n: int) -> int:
    if not -n <= number < n:
        raise IndexError(f"index {number} is out of bounds for dimension 0 with size {n}")
    return number % n
