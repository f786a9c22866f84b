"""What an error says, also one that says nothing: that there was no memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["NO_MEMORY", "is_no_memory", "said", "with_memory"]

NO_MEMORY = "there was not enough memory for it"


def is_no_memory(error: BaseException) -> bool:
    """Tell whether *error* says that there was no memory.

    Python's own, ``torch.OutOfMemoryError`` of devices, and the RuntimeError of torch's allocator
    for the CPU (2.13, ``c10/core/impl/alloc_cpu.cpp``: "not enough memory" on Windows, "can't
    allocate memory" elsewhere).
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text


def said(error: BaseException) -> str:
    """Return the words of *error*; for want of memory, ours."""
    return NO_MEMORY if is_no_memory(error) else str(error) or type(error).__name__


@contextmanager
def with_memory(kind: type[Exception], text: str) -> Generator[None]:
    """Raise a *kind* with *text* where there is no memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, kind) or not is_no_memory(error):
            raise
        raise kind(text) from error
