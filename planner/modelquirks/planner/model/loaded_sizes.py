"""``LoadedSizes``: the bytes of a module's tensors once they are loaded, cast or not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from modelquirks.planner.dtypes import from_torch, to_torch
from modelquirks.planner.model.from_module import declared, pattern_of

if TYPE_CHECKING:
    import torch

__all__ = ["LoadedSizes"]


@dataclass(frozen=True)
class LoadedSizes:
    """How many bytes a tensor takes once it is loaded."""

    bits: int | None = None
    """Of a float that is cast; None: as the model has it."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Bits of one value, by name of the tensor."""
    dtype: str = ""
    kept: re.Pattern[str] | None = None
    """Finds the names of floats that are not cast."""

    @classmethod
    def of(cls, dtype: Any, special: Mapping[str, Any] | None) -> LoadedSizes:
        """Return the sizes for those dtypes; ValueError for one that nobody knows."""
        each = {name: _bits(asked) for name, asked in (special or {}).items()}
        return cls(None if dtype is None else _bits(dtype), each, str(dtype))

    def keeping(self, modules: Iterable[torch.nn.Module]) -> LoadedSizes:
        """Return the sizes without casts of what *modules* keep in float32."""
        words: frozenset[str] = frozenset()
        if self.dtype.endswith(("float16", "fp16", "half", "bf16")):
            words = declared(modules, "_keep_in_fp32_modules_strict")
            if not self.dtype.endswith(("bfloat16", "bf16")):
                words |= declared(modules, "_keep_in_fp32_modules")
        return replace(self, kept=pattern_of(words))

    def are_plain(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Tell whether :meth:`of_all` knows the bytes of *tensors*, whatever their names."""
        from torch import Tensor
        from torch.nn import Parameter

        return self.kept is None and {*map(type, tensors)} <= {Tensor, Parameter}

    def of_all(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of plain tensors together, none of which is special."""
        if self.bits is None:
            return sum(map(_NBYTES, tensors))
        return sum(self.of_tensor("", tensor) for tensor in tensors)

    def of_tensor(self, name: str, tensor: torch.Tensor) -> int:
        """Return the bytes of one tensor; ValueError if it has no shape yet."""
        try:
            if name in self.special:
                return (tensor.numel() * self.special[name] + 7) // 8
            flatten = getattr(tensor, "__tensor_flatten__", None)
            if flatten is not None:  # a packed one, of several tensors
                parts, _ = flatten()
                return sum(LoadedSizes().of_tensor(name, getattr(tensor, part)) for part in parts)
            if self.bits is None or not self._is_cast(name, tensor.dtype):
                return tensor.nbytes if tensor.shape.numel() else 0
            return (tensor.numel() * self.bits + 7) // 8
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{name!r} of the model has no size yet: {error}") from None

    def _is_cast(self, name: str, dtype: torch.dtype) -> bool:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return False
        return self.kept is None or self.kept.search(name) is None


_NBYTES = attrgetter("nbytes")

_CUSTOM = {"fp8": 8, "int4": 4, "int2": 2}
"""accelerate's ``CustomDtype``: bits of values that are packed when they are loaded."""


def _bits(dtype: Any) -> int:
    """Return the bits of one value of *dtype*, as torch holds it: 8 for its types below a byte."""
    custom = getattr(dtype, "value", None)
    if isinstance(custom, str) and custom in _CUSTOM:
        return _CUSTOM[custom]
    if isinstance(dtype, str):
        import torch

        found = getattr(torch, dtype.removeprefix("torch."), None)
        dtype = found if isinstance(found, torch.dtype) else to_torch(from_torch(dtype))
    itemsize = getattr(dtype, "itemsize", None)
    if not isinstance(itemsize, int):
        raise ValueError(f"dtype {dtype!r} is not known: give a torch dtype, or its name")
    return itemsize * 8
