"""Types of tensors in GGUF: what a block is, how many bytes it has.

Source: ``GGML_QUANT_SIZES`` of gguf 0.19, which the tests hold this table against.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PACKED", "PLAIN", "TYPES", "BlockType"]


class BlockType(NamedTuple):
    """A type: elements of the last dimension that are stored together, and their bytes."""

    name: str
    elements: int
    nbytes: int
    dtype: str | None = None
    """That of plain elements; None: packed."""
    known: bool = True
    """Whether gguf 0.19 can make plain values of it."""


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, "F32"),
    1: BlockType("F16", 1, 2, "F16"),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40, known=False),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292, known=False),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1, "I8"),
    25: BlockType("I16", 1, 2, "I16"),
    26: BlockType("I32", 1, 4, "I32"),
    27: BlockType("I64", 1, 8, "I64"),
    28: BlockType("F64", 1, 8, "F64"),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, "BF16"),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18, known=False),
}
"""By the number in the file."""

PLAIN = {number: type_ for number, type_ in TYPES.items() if type_.dtype is not None}
PACKED = {number: type_ for number, type_ in TYPES.items() if type_.dtype is None}
