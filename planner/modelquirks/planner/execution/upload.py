"""``Upload``: pieces of tensors on their way to one device that computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

__all__ = ["Upload"]


class Upload:
    """Copies pieces to one device, through a few buffers that are used again and again.

    For CUDA devices the buffers are pinned and the copies run on a stream of their own, so that
    the next piece is made while the last one travels; elsewhere a copy waits until it is done.
    Safe to use from several threads.
    """

    def __init__(self, device: torch.device, *, n_buffers: int, n_bytes: int) -> None:
        """Prepare for pieces of up to *n_bytes*; larger ones get memory that is given back."""
        self._n_bytes = n_bytes
        cuda: Any = torch.cuda
        self._stream: Any = cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:  # what is written to may just have been free memory
            self._stream.wait_stream(cuda.current_stream(device))
        self._buffers: SimpleQueue[_Buffer | None] = SimpleQueue()
        for _ in range(n_buffers):
            self._buffers.put(None)  # made when first needed

    def send(self, part: torch.Tensor, make: Callable[[torch.Tensor], object]) -> None:
        """Have *make* write a piece to a tensor on the CPU, and copy that to *part*."""
        if part.nbytes > self._n_bytes:
            whole = torch.empty(part.shape, dtype=part.dtype, device="cpu")
            make(whole)
            part.copy_(whole)
            return
        buffer = self._buffers.get()
        try:
            buffer = buffer or _Buffer(self._n_bytes, pinned=self._stream is not None)
            buffer.wait()
            staged = buffer.tensor(part.dtype, tuple(part.shape))
            make(staged)
            buffer.copy_to(part, staged, self._stream)
        finally:
            self._buffers.put(buffer)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        if self._stream is not None:
            self._stream.synchronize()


class _Buffer:
    """Memory on the CPU, and the copy out of it that may still be under way."""

    def __init__(self, n_bytes: int, *, pinned: bool) -> None:
        self._bytes = torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._event: Any = None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        n_bytes = math.prod(shape) * dtype.itemsize
        return self._bytes[:n_bytes].view(dtype).view(shape)

    def copy_to(self, part: torch.Tensor, staged: torch.Tensor, stream: Any) -> None:
        if stream is None:
            part.copy_(staged)
            return
        cuda: Any = torch.cuda
        with cuda.stream(stream):
            part.copy_(staged, non_blocking=True)
            self._event = cuda.Event()
            self._event.record(stream)
