"""What a pickle of ``torch.save`` means, without torch: tensors as records of where they lie.

torch itself is not imported: what its rebuild functions would do with their arguments is told here
in a few lines each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

from modelquirks.planner import dtypes
from modelquirks.planner.checkpoint import pickle_machine
from modelquirks.planner.checkpoint.pickle_machine import Global, PickleProblem
from modelquirks.planner.checkpoint.pickle_names import STORAGE_MODULES, STORAGES

__all__ = ["StorageRecord", "TensorRecord", "TorchPickle", "load"]


_MAX_NAME = 64


class StorageRecord(NamedTuple):
    """A storage that the pickle refers to."""

    key: str
    dtype: str | None
    """None: a storage of bytes without type."""
    length: int
    """In elements of the dtype; in bytes without one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage."""
        return self.length if self.dtype is None else dtypes.nbytes(self.dtype, (self.length,))


class TensorRecord(NamedTuple):
    """A tensor in the pickle: a view of a storage. Offset and stride count elements."""

    storage: StorageRecord
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def span(self) -> int:
        """Elements from the first to behind the last."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((length - 1) * step for length, step in steps)


class TorchPickle(NamedTuple):
    """A pickle of ``torch.save``: its value, what it names, the storages that it refers to."""

    value: Any
    globals: tuple[Global, ...]
    storages: dict[str, StorageRecord]


def load(file: BinaryIO, known: Mapping[str, Any] | None = None) -> TorchPickle:
    """Return the next pickle in *file*, with a :class:`TensorRecord` for every plain tensor.

    *known* are the values of its identifiers, for formats that have them elsewhere. Raises
    :class:`PickleProblem` for bytes that are no pickle.
    """
    storages: dict[str, StorageRecord] = {}

    def persistent(identifier: Any) -> Any:
        if known is not None and isinstance(identifier, str | int) and str(identifier) in known:
            return known[str(identifier)]
        storage = _storage(identifier)
        if storages.setdefault(storage.key, storage).nbytes != storage.nbytes:
            raise PickleProblem(f"gives the storage {storage.key!r} two sizes")
        return storage

    value, names = pickle_machine.load(file, rebuild=_REBUILD, persistent=persistent)
    return TorchPickle(value, names, storages)


def _storage(identifier: Any) -> StorageRecord:
    """Return the storage of ``("storage", type, key, location, length[, view])``."""
    if not isinstance(identifier, tuple) or not 5 <= len(identifier) <= 6:
        raise ValueError("not a storage")
    kind, storage, key, _, length, *view = identifier
    if kind != "storage" or not isinstance(storage, Global) or not isinstance(key, str):
        raise ValueError("not a storage")
    if storage.module not in STORAGE_MODULES or storage.name not in STORAGES:
        raise ValueError("a storage of no plain dtype")
    if any(view) or not _whole(length):
        raise ValueError("a view of a storage, as written before torch 0.4")
    return StorageRecord(key, STORAGES[storage.name], length)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> TensorRecord:
    if not isinstance(storage, StorageRecord) or storage.dtype is None:
        raise ValueError("no typed storage")
    return _checked(storage, storage.dtype, shape, stride, offset)


def _tensor_v2(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, flags: Any = None
) -> TensorRecord:
    if flags:  # {"conj": True} or {"neg": True}: the bytes are not the values
        raise ValueError("a lazily conjugated or negated tensor")
    return _tensor(storage, offset, shape, stride)


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    flags: Any = None,
) -> TensorRecord:
    if flags or not isinstance(storage, StorageRecord) or not isinstance(dtype, Global):
        raise ValueError("not plain")
    if len(dtype.name) > _MAX_NAME:  # it would be in the message of the error, each time
        raise ValueError("not plain")
    name = dtypes.from_torch(dtype.name)
    tensor = _checked(storage, name, shape, stride, offset)
    return _unpacked(tensor) if name == "F4" else tensor


def _unpacked(tensor: TensorRecord) -> TensorRecord:
    """Return a tensor of pairs of F4 values as one of values, which is how they count elsewhere."""
    if not tensor.stride or tensor.stride[-1] != 1:
        raise ValueError("pairs of values that do not follow each other")
    shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
    stride = (*(2 * step for step in tensor.stride[:-1]), 1)
    return TensorRecord(tensor.storage, "F4", shape, stride, 2 * tensor.offset)


def _checked(
    storage: StorageRecord, dtype: str, shape: Any, stride: Any, offset: Any
) -> TensorRecord:
    if not isinstance(shape, tuple | list) or not isinstance(stride, tuple | list):
        raise TypeError("shape and stride must be tuples")
    if len(shape) > dtypes.MAX_DIMS:
        raise ValueError(f"more than {dtypes.MAX_DIMS} dimensions, as torch allows them")
    if len(shape) != len(stride) or not all(map(_whole, (*shape, *stride, offset))):
        raise ValueError("shape, stride and offset must be whole numbers from 0")
    if math.prod(shape) >= 1 << 63:  # by a stride of 0 that takes no storage
        raise ValueError("more elements than torch can count")
    return TensorRecord(storage, dtype, tuple(shape), tuple(stride), offset)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(function: Any, _type: Any, args: Any, _state: Any) -> Any:
    """Return the plain tensor in one of a subclass of Tensor, or with attributes."""
    is_tensor = isinstance(function, Global) and function.name.startswith("_rebuild")
    if not is_tensor or function not in _REBUILD or not isinstance(args, tuple):
        raise ValueError("not a known tensor")
    return _REBUILD[function](*args)


def _size(lengths: Any = ()) -> tuple[Any, ...]:
    if not isinstance(lengths, list | tuple):
        raise ValueError("no lengths")
    return tuple(lengths)


def _dict(items: Any = ()) -> dict[Any, Any]:
    return {key: value for key, value in items if isinstance(key, str | int)}


def _empty(*_: Any) -> dict[Any, Any]:
    return {}


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


_REBUILD: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _dict,
    ("collections", "Counter"): _empty,
    ("collections", "defaultdict"): _empty,
    ("builtins", "dict"): _dict,
}
