"""The packing schemes of GGUF, one a type: blocks of a row become plain values.

The values are those of ``gguf.quants.dequantize``, computed by it for the blocks that a region
touches. One scheme more undoes what llama.cpp's converter does to the norms of Gemma and Nemotron:
it stores them plus one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from modelquirks.plugins.gguf.types import PACKED, BlockType
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType

__all__ = ["PLUS_ONE", "Blocks", "PlusOne", "all_schemes", "scheme_name"]

PLUS_ONE = "plus_one"
_ROWS = 256
"""Rows computed at a time."""


def scheme_name(kind: str) -> str:
    """Return the scheme of a type, or of :data:`PLUS_ONE`.

    >>> scheme_name("Q4_K")
    'gguf_q4_k'
    """
    return f"gguf_{kind.lower()}"


def all_schemes() -> Iterable[Scheme]:
    """Return a scheme for every packed type."""
    return (*(Blocks(number, type_) for number, type_ in PACKED.items()), PlusOne())


class Blocks(Scheme):
    """Reads ``blocks`` U8 ``[*lead, blocks of a row × bytes of a block]``; makes F32."""

    roles: tuple[str, ...] = ("blocks",)

    def __init__(self, number: int, type_: BlockType) -> None:
        """Take a type and its number in the file."""
        self.name = scheme_name(type_.name)
        self._number = number
        self._type = type_

    def varies(self, config: Mapping[str, Any]) -> bool:
        """Return False: the header says everything."""
        return False

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return F32 ``[*lead, in]``; RecipeError if the blocks do not fit, or gguf is missing."""
        blocks = parts["blocks"]
        shape = blocks.shape or ()
        if blocks.dtype != "U8" or not shape or shape[-1] % self._type.nbytes:
            raise RecipeError(
                f"not a weight of {self._type.name}: blocks {blocks}, expected U8 with rows of "
                f"whole blocks of {self._type.nbytes} bytes"
            )
        if not self._type.known:
            raise RecipeError(f"gguf has no way to make plain values of {self._type.name}")
        if find_spec("gguf") is None:
            raise RecipeError(
                f"plain values of {self._type.name} are made by the package gguf, which is not "
                "installed: pip install 'modelquirks[gguf]'"
            )
        return TensorType(
            "F32", (*shape[:-1], shape[-1] // self._type.nbytes * self._type.elements)
        )

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the blocks that *region* touches."""
        *outer, (start, stop) = region
        first, last = start // self._type.elements, -(-stop // self._type.elements)
        return {"blocks": (*outer, (first * self._type.nbytes, last * self._type.nbytes))}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype* from the blocks that :meth:`regions` named."""
        import numpy as np
        import torch
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(self._number)
        shape = tuple(end - begin for begin, end in region)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device="cpu")
        blocks = parts["blocks"].contiguous().cpu()
        rows = blocks.view(-1, blocks.shape[-1]).numpy()
        start, stop = region[-1]
        skip = start % self._type.elements
        result = torch.empty((rows.shape[0], stop - start), dtype=dtype, device="cpu")
        for begin in range(0, rows.shape[0], _ROWS):
            with np.errstate(all="ignore"):  # scales may be infinite: that is what is stored
                values = torch.from_numpy(dequantize(rows[begin : begin + _ROWS], kind))
            result[begin : begin + _ROWS] = values[:, skip : skip + stop - start]
        return result.view(shape).to(parts["blocks"].device)


class PlusOne(Scheme):
    """Reads ``value``, a float that is stored plus one."""

    name: str = scheme_name(PLUS_ONE)
    roles: tuple[str, ...] = ("value",)

    def varies(self, config: Mapping[str, Any]) -> bool:
        """Return False: there are no settings."""
        return False

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return the type of the part, which must be a float."""
        if parts["value"].dtype not in ("F32", "F16", "BF16"):
            raise RecipeError(f"{parts['value']} is no float that could be stored plus one")
        return parts["value"]

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return *region* itself."""
        return {"value": region}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return the part minus one, computed in float32 as transformers does."""
        return (parts["value"].float() - 1).to(dtype)
