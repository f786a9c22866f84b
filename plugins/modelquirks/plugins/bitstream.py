"""Integers of 1 to 8 bits in 32-bit words: one stream of bits, the lowest first.

Code number i takes bits ``i * bits`` to ``(i + 1) * bits`` of the stream, across the boundary of
two words where ``bits`` does not divide 32. So do GPTQ (``qlinear/__init__.py`` of GPTQModel
7.7, ``pack_block``), AWQ (but for the order within a word) and MLX (``ops.cpp``, ``quantize``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["WORD", "Block", "block", "unpack", "words_for"]

WORD = 32


class Block(NamedTuple):
    """The smallest run of codes that ends where a word does."""

    codes: int
    words: int


def block(bits: int) -> Block:
    """Return how many codes fill how many words exactly.

    >>> block(4), block(3), block(6)
    (Block(codes=8, words=1), Block(codes=32, words=3), Block(codes=16, words=3))
    """
    common = math.gcd(WORD, bits)
    return Block(WORD // common, bits // common)


def words_for(start: int, stop: int, bits: int, size: int) -> tuple[int, int]:
    """Return the words of the blocks with the codes *start* to *stop*, of *size* words in all.

    >>> words_for(33, 40, 3, 9), words_for(0, 10, 4, 2)
    ((3, 6), (0, 2))
    """
    codes, words = block(bits)
    return start // codes * words, min(-(-stop // codes) * words, size)


def unpack(
    words: torch.Tensor, bits: int, dim: int, order: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the codes in *words* along *dim*, as many as the blocks begun there hold.

    They are I32, or U8 where bytes can be looked up: torch makes no bytes of words fast.
    *words* are I32 or U32, from the begin of a block. With *order* the code at place i of its
    block counts as number ``order[i]``. Missing words at the end are taken for zeros.
    """
    import torch

    per_block, n_words = block(bits)
    dim %= words.dim()
    if order is None and 8 % bits == 0 and dim == words.dim() - 1:
        return _bytewise(words.contiguous().view(torch.uint8), bits)
    words = words.view(torch.int32)
    if lacking := -words.shape[dim] % n_words:
        ends = (*words.shape[:dim], lacking, *words.shape[dim + 1 :])
        words = torch.cat((words, words.new_zeros(ends)), dim)
    outer, inner = words.shape[:dim], words.shape[dim + 1 :]
    blocks = words.reshape(*outer, -1, n_words, *inner)
    shape = (*outer, blocks.shape[dim], per_block, *inner)
    codes = torch.empty(shape, dtype=torch.int32, device=words.device)
    for place in range(per_block):
        number = place if order is None else order[place]
        codes.select(dim + 1, number).copy_(_codes_at(blocks, bits, place, dim + 1))
    return codes.flatten(dim, dim + 1)


def _codes_at(blocks: torch.Tensor, bits: int, place: int, dim: int) -> torch.Tensor:
    """Return the code at *place* of every block; the words of a block lie along *dim*."""
    word, shift = divmod(place * bits, WORD)
    codes = blocks.select(dim, word) >> shift
    if shift + bits > WORD:
        low = WORD - shift  # the shift has filled up with the sign
        codes = (codes & ((1 << low) - 1)) | (blocks.select(dim, word + 1) << low)
    return codes & ((1 << bits) - 1)


def _bytewise(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of bytes along the last dimension, 8 // *bits* of each."""
    import torch

    if bits == 8:
        return octets
    byte = torch.arange(256, device=octets.device)
    codes = torch.stack([(byte >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)
    wide = {1: torch.int64, 2: torch.int32, 4: torch.int16}[bits]
    table = codes.to(torch.uint8).view(wide).view(256)
    found = torch.index_select(table, 0, octets.reshape(-1).int())
    return found.view(torch.uint8).view(*octets.shape[:-1], octets.shape[-1] * 8 // bits)
