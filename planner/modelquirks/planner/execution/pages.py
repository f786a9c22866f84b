"""Pages of memory: fresh ones prepared for writing, those of mapped files read in and let go again.

All of it is advice to the Linux kernel, and does nothing elsewhere. The first touch of fresh memory
decides the rate of a load with a cast: see docs/loading.md for the measurements.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import cache
from typing import Any

import torch

__all__ = ["fresh", "let_go", "prepare", "read_in"]

_DONTNEED, _POPULATE_READ, _POPULATE_WRITE = 4, 22, 23
"""Of asm-generic/mman-common.h; alpha and parisc, which have others, are left alone below."""


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a new CPU tensor without values, in large pages where the system gives them.

    Never an inference tensor, whatever mode the caller is in: other threads fill it, and it may
    have to learn.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device="cpu")


def prepare(tensor: torch.Tensor) -> None:
    """Have the memory of a contiguous *tensor* that is about to be written there, in one request.

    Written to page by page, each one of 4 KiB is a fault of its own. Kernels before 5.14 do not
    know the request; there, and where memory is short, it is as if it had not been made.
    """
    _advise(tensor, _POPULATE_WRITE)


def read_in(tensor: torch.Tensor) -> None:
    """Have the bytes of a mapped file below *tensor*, which is in one piece, read into memory.

    In one large request, where touching them would fault every few pages. Raises OSError where
    the file ends before the tensor does, or cannot be read: touching that kills the process.
    Kernels before 5.14 do not know the request; there the bytes are read when touched.
    """
    fault = _advise(tensor, _POPULATE_READ)
    if fault in (errno.EFAULT, errno.EIO, getattr(errno, "EHWPOISON", errno.EFAULT)):
        raise OSError(fault, os.strerror(fault))


def let_go(tensor: torch.Tensor) -> None:
    """Give back the pages of a private mapping of a file that lie within *tensor*.

    They stay in the page cache, and are mapped again if touched; what the process has written to
    them is lost. Pages that it shares with what lies beside it are kept.
    """
    _advise(tensor, _DONTNEED, inner=True)


def _advise(tensor: torch.Tensor, advice: int, *, inner: bool = False) -> int:
    """Return the error number; 0 if the advice was taken or there is nobody to give it to."""
    madvise = _madvise()
    if madvise is None or not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    start = tensor.data_ptr()
    stop = start + (last + 1) * tensor.element_size()
    page = mmap.PAGESIZE
    first = (-(-start // page) if inner else start // page) * page
    length = (stop // page if inner else -(-stop // page)) * page - first
    if length <= 0 or not madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice):
        return 0
    return ctypes.get_errno()


@cache
def _madvise() -> Any:
    if sys.platform != "linux" or os.uname().machine.startswith(("alpha", "parisc")):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
