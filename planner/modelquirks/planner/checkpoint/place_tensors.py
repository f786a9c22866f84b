"""From tensors as views of storages to byte ranges in a file."""

from __future__ import annotations

from collections.abc import Mapping

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.checkpoint.torch_pickle import TensorRecord
from modelquirks.planner.dtypes import BITS
from modelquirks.planner.finding import Finding

__all__ = ["dense_stride", "place_tensors"]


def dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor stored row after row, in elements.

    >>> dense_stride((2, 3, 4))
    (12, 4, 1)
    """
    steps, step = [], 1
    for length in reversed(shape):
        steps.append(step)
        step *= length
    return tuple(reversed(steps))


def place_tensors(
    shard: str, tensors: Mapping[str, TensorRecord], *, begins: Mapping[str, int]
) -> tuple[dict[str, StoredTensor], tuple[Finding, ...]]:
    """Return where the tensors lie in the file *shard*, and those that reach beyond their storage.

    *begins* has the offset in the file of each storage, by key; a tensor whose storage is not in it
    has no place.
    """
    placed: dict[str, StoredTensor] = {}
    beyond: list[str] = []
    for name, tensor in tensors.items():
        bits = BITS[tensor.dtype]
        last = ((tensor.offset + tensor.span) * bits + 7) // 8
        begin = begins.get(tensor.storage.key)
        if last > tensor.storage.nbytes and tensor.span:
            beyond.append(f"{name!r} (ends at byte {last:,} of {tensor.storage.nbytes:,})")
            begin = None
        stride = None if _is_dense(tensor) else tensor.stride
        if begin is None:
            placed[name] = StoredTensor(name, shard, tensor.dtype, tensor.shape, stride=stride)
            continue
        first = begin + tensor.offset * bits // 8 if tensor.span else begin
        end = begin + last if tensor.span else begin
        placed[name] = StoredTensor(name, shard, tensor.dtype, tensor.shape, first, end, stride)
    if not beyond:
        return placed, ()
    more = f" … and {len(beyond) - 10} more" if len(beyond) > 10 else ""
    text = f"{shard!r}: tensors that reach beyond their storage: {', '.join(beyond[:10])}{more}."
    return placed, (Finding("tensor-beyond-storage", "error", text),)


def _is_dense(tensor: TensorRecord) -> bool:
    if 0 in tensor.shape:
        return True
    pairs = zip(tensor.shape, tensor.stride, dense_stride(tensor.shape), strict=True)
    return all(length == 1 or step == dense for length, step, dense in pairs)
