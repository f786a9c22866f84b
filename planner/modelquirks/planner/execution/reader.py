"""``Reader``: tensors, or regions of them, from the files of a checkpoint.

Views of mapped files, or copies: ``openfile`` says why.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from modelquirks.planner.checkpoint.manifest import StoredTensor
from modelquirks.planner.dtypes import to_torch
from modelquirks.planner.execution.openfile import (
    READING,
    CopiedFile,
    Known,
    MappedFile,
    ReadError,
    elsewhere,
    long_enough,
)
from modelquirks.quirks.recipe import Region, TensorType

__all__ = ["ReadError", "Reader", "Region", "Span", "expect", "typed"]

_counting = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child must not inherit a lock that nobody will release
    os.register_at_fork(
        before=_counting.acquire,
        after_in_parent=_counting.release,
        after_in_child=_counting.release,
    )

_BLOCK_BYTES = 1 << 20
"""Read at a time into the page cache, if the first byte of it is not there."""


class Span(NamedTuple):
    """A place in a file."""

    path: str
    begin: int
    end: int


def expect(spans: Iterable[Span]) -> None:
    """Read what the page cache lacks of *spans* into it; what is there costs next to nothing.

    By reading into a buffer that is thrown away: ``MADV_WILLNEED`` and ``POSIX_FADV_WILLNEED``
    were slower on a virtual disk than the page faults that they were to save. Does nothing where
    one cannot ask for what is cached (only Linux can, by ``RWF_NOWAIT``).
    """
    nowait: int | None = getattr(os, "RWF_NOWAIT", None)
    if nowait is None or sys.platform != "linux":
        return
    block, page = bytearray(_BLOCK_BYTES), bytearray(1)
    for path, group in groupby(spans, key=lambda span: span.path):
        with suppress(OSError):  # a file that is gone is still mapped, and nothing is lost
            descriptor = os.open(path, READING)
            try:
                for _, begin, end in group:
                    for offset in range(begin, end, _BLOCK_BYTES):
                        if not _is_cached(descriptor, page, offset, nowait):
                            size = min(_BLOCK_BYTES, end - offset)
                            os.preadv(descriptor, [memoryview(block)[:size]], offset)
            finally:
                os.close(descriptor)


def _is_cached(descriptor: int, page: bytearray, offset: int, nowait: int) -> bool:
    try:
        os.preadv(descriptor, [page], offset, nowait)
    except BlockingIOError:
        return False
    return True


class Reader:
    """Reads tensors of one checkpoint.

    Safe to use from several threads and after a fork; a pickled or copied reader opens the files
    again when asked. Tensors that are views keep the mapping alive, so there is nothing to close.
    """

    def __init__(
        self,
        root: Path,
        tensors: Mapping[str, StoredTensor],
        *,
        known: Known | None = None,
        copies: bool = False,
    ) -> None:
        """Read from the files below *root* the tensors that *tensors* locates.

        *known* is what the files have to be, and takes note of those that it does not have; readers
        may share it. With *copies* nothing is mapped: whoever cuts off a file cannot kill us.
        """
        self._root = root
        self._tensors = tensors
        self._known: Known = {} if known is None else known
        # Where there is no preadv (Windows) a file that is mapped cannot be cut off either.
        self._copies = copies and hasattr(os, "preadv")
        self._files: dict[str, MappedFile | CopiedFile] = {}
        self._forms: dict[str, _Form] = {}
        self._bytes_read = 0

    def __getstate__(self) -> tuple[Path, dict[str, StoredTensor], Known, bool]:
        """Return what another process needs: where to look and for what, not what is mapped."""
        return self._root, dict(self._tensors), elsewhere(self._known), self._copies

    def __setstate__(self, state: tuple[Path, dict[str, StoredTensor], Known, bool]) -> None:
        """Start afresh; files are mapped when something is read."""
        root, tensors, known, copies = state
        self.__init__(root, tensors, known=known, copies=copies)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        """Return a reader of its own for the same files."""
        return Reader(self._root, self._tensors, known=elsewhere(self._known), copies=self._copies)

    @property
    def bytes_read(self) -> int:
        """Bytes of all tensors and regions asked for so far."""
        return self._bytes_read

    def type_of(self, name: str) -> TensorType:
        """Return dtype and shape of a stored tensor."""
        stored = self._stored(name)
        return TensorType(stored.dtype, stored.shape)

    def faults(self, names: Iterable[str]) -> list[str]:
        """Return what keeps those tensors from being read, a sentence each, reading nothing."""
        faults: list[str] = []
        for name in names:
            try:
                stored = self._stored(name)
                _form(stored)
                self._file(stored)
            except ReadError as error:
                faults.append(str(error))
        return faults

    def is_view(self, name: str) -> bool:
        """Tell whether :meth:`read` gives a view of the mapped file, and no copy."""
        form = self._form(name)
        return form.nbytes > 0 and self.is_mapped(name)

    def look(self, name: str) -> None:
        """Raise :class:`ReadError` as :meth:`read` would, for a view that was read before."""
        stored = self._stored(name)
        if self._file(stored).is_cut:
            raise ReadError(f"tensor {name!r}: {stored.shard!r} was truncated while it was in use")

    def span(self, name: str) -> Span:
        """Return where the tensor is."""
        stored = self._stored(name)
        return Span(str(self._root / stored.shard), stored.begin or 0, stored.end or 0)

    def count(self, nbytes: int) -> None:
        """Count bytes of views that were read before and are used again as having been read."""
        with _counting:
            self._bytes_read += nbytes

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Return a tensor, or that region of it, on the CPU.

        The result is a view of the mapped file, read when touched. It is a copy if the reader
        makes copies, if the file does not hold it aligned, and if it is no safetensors file: those
        are replaced as a whole when
        they are saved again, while ``torch.save`` truncates its file under the views of it. An
        F4 tensor has two values in each element of its last dimension, which is therefore half
        as long; a region counts values.

        Raises :class:`ReadError` when the file is missing, shorter than it should be, replaced
        before it was opened, or written to since. That is looked up each time: touching a mapping
        behind the end of its file kills the process, and new bytes would be wrong weights.
        """
        tensor, form = self._located(name, region)
        if self._copies or not form.must_copy or not tensor.numel():
            return tensor
        return typed(tensor, form)

    def is_mapped(self, name: str) -> bool:
        """Tell whether :meth:`read` gives a view of the file."""
        return not self._copies and not self._form(name).must_copy

    def _located(self, name: str, region: Region | None) -> tuple[torch.Tensor, _Form]:
        """Return the tensor as it lies in the mapped file, and what is to be done with that.

        An unaligned one has a last dimension for the bytes of each element. A copy is as wanted.
        """
        stored, form = self._stored(name), self._form(name)
        bounds: Region = ()
        size = form.nbytes
        if region is not None:
            bounds = _bounds(stored, region)
            size = form.dtype.itemsize * math.prod(stop - start for start, stop in bounds)
        if size == 0:
            shape = [stop - start for start, stop in bounds] if bounds else form.shape
            return torch.empty(shape, dtype=form.dtype, device="cpu"), form
        file = self._file(stored)
        if isinstance(file, CopiedFile):
            tensor = _copied(file, stored, form, bounds)
        else:
            tensor = _view(file, stored, form)
            for dim, (start, stop) in enumerate(bounds):
                tensor = tensor.narrow(dim, start, stop - start)
        self.count(size)
        return tensor, form

    def _form(self, name: str) -> _Form:
        form = self._forms.get(name)
        if form is None:
            form = self._forms[name] = _form(self._stored(name))
        return form

    def _stored(self, name: str) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise ReadError(f"tensor {name!r} is not in the checkpoint at {str(self._root)!r}")
        return stored

    def _file(self, stored: StoredTensor) -> MappedFile | CopiedFile:
        """Return the file, opened if need be, after a look at it."""
        file = self._files.get(stored.shard)
        if file is None:
            kind = CopiedFile if self._copies else MappedFile
            # Two threads may open one file; the second is then dropped again.
            opened = kind.open(self._root, stored, self._known)
            file = self._files.setdefault(stored.shard, opened)
        long_enough(stored, file.size)
        if file.is_rewritten:
            raise ReadError(
                f"tensor {stored.name!r}: {stored.shard!r} was written to while it was in use; "
                "save to another file, or load anew"
            )
        return file


class _Form(NamedTuple):
    """A stored tensor as torch sees it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    """Of its elements; a strided tensor may take less or more in the file."""
    aligned: bool
    must_copy: bool
    """Unaligned, several elements share memory, as ``expand`` makes them, or not safetensors."""


def _form(stored: StoredTensor) -> _Form:
    """Return the form, checked against the byte range."""
    if stored.dtype is None or stored.shape is None or stored.begin is None or stored.end is None:
        raise ReadError(
            f"tensor {stored.name!r}: dtype, shape and place in {stored.shard!r} are not known; "
            "only the index was there when the plan was made"
        )
    try:
        dtype = to_torch(stored.dtype)
    except ValueError as error:
        raise ReadError(f"tensor {stored.name!r} in {stored.shard!r}: {error}") from error
    shape = stored.shape
    if stored.dtype == "F4":
        if not shape or shape[-1] % 2 or stored.stride is not None:
            raise ReadError(f"tensor {stored.name!r}: F4 {list(shape)} does not fill whole bytes")
        shape = (*shape[:-1], shape[-1] // 2)
    strides = _dense(shape) if stored.stride is None else stored.stride
    nbytes = needed = dtype.itemsize * math.prod(shape)
    if stored.stride is not None and nbytes:
        last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        needed = (last + 1) * dtype.itemsize
    held = stored.end - stored.begin
    if needed > held or (stored.stride is None and needed != held):
        raise ReadError(
            f"tensor {stored.name!r}: {stored.dtype} {list(stored.shape)} takes {needed} bytes, "
            f"{stored.shard!r} has {held} for it"
        )
    aligned = stored.begin % dtype.itemsize == 0
    overlaps = any(n > 1 and step == 0 for n, step in zip(shape, strides, strict=True))
    safe = stored.shard.endswith(".safetensors")
    return _Form(dtype, shape, strides, nbytes, aligned, overlaps or not aligned or not safe)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _bounds(stored: StoredTensor, region: Region) -> Region:
    """Return *region* in elements; ReadError if it is not inside the tensor."""
    shape = stored.shape or ()
    if len(region) != len(shape) or any(
        not 0 <= start <= stop <= size for (start, stop), size in zip(region, shape, strict=True)
    ):
        raise ReadError(f"region {region} is not inside tensor {stored.name!r} {list(shape)}")
    if stored.dtype != "F4":
        return region
    start, stop = region[-1]
    if start % 2 or stop % 2:
        raise ReadError(f"region {region} of tensor {stored.name!r} cuts a byte of two F4 values")
    return (*region[:-1], (start // 2, stop // 2))


def _view(file: MappedFile, stored: StoredTensor, form: _Form) -> torch.Tensor:
    """Return the tensor as a view; unaligned, as bytes with a last dimension for the element."""
    begin, length = stored.begin or 0, stored.nbytes or 0
    width = form.dtype.itemsize
    if form.aligned:
        flat = file.values(begin, length // width, form.dtype)
        return flat.as_strided(form.shape, form.strides)
    flat = file.values(begin, length, torch.uint8)
    steps = (width * step for step in form.strides)
    return flat.as_strided((*form.shape, width), (*steps, 1))


def _copied(file: CopiedFile, stored: StoredTensor, form: _Form, bounds: Region) -> torch.Tensor:
    """Return the region as a copy, reading no more than the rows that it has a part of."""
    begin, end, width = stored.begin or 0, stored.end or 0, form.dtype.itemsize
    strided = form.strides != _dense(form.shape)
    shape, bounds = form.shape, bounds or tuple((0, size) for size in form.shape)
    rest, outer = bounds, 0
    if not strided:
        # Whole rows of the first dimension of which there is more than one.
        while len(rest) > 1 and rest[0][1] - rest[0][0] == 1:
            begin += rest[0][0] * form.strides[outer] * width
            rest, outer = rest[1:], outer + 1
        step = (form.strides[outer] if rest else 1) * width
        start, stop = rest[0] if rest else (0, 1)
        begin, end = begin + start * step, begin + stop * step
        rest = ((0, stop - start), *rest[1:]) if rest else ()
        shape = (stop - start, *shape[outer + 1 :]) if rest else ()
    try:
        content = file.bytes(begin, end)
    except OSError as error:
        raise ReadError(
            f"tensor {stored.name!r}: {stored.shard!r} cannot be read: {error}"
        ) from error
    if content.numel() < end - begin:
        raise ReadError(
            f"tensor {stored.name!r}: {stored.shard!r} cannot be read to the end: was it truncated?"
        )
    flat = content[: content.numel() // width * width].view(form.dtype)
    tensor = flat.as_strided(shape, form.strides) if strided else flat.reshape(shape)
    for dim, (first, last) in enumerate(rest):
        tensor = tensor.narrow(dim, first, last - first)
    tensor = tensor.reshape(tuple(last - first for first, last in bounds))
    return tensor.contiguous()


def typed(tensor: torch.Tensor, form: _Form) -> torch.Tensor:
    """Return a copy of what lies in the file, in its dtype."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor if form.aligned else tensor.view(form.dtype).squeeze(-1)
