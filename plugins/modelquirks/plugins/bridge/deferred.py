"""Regular expressions that are compiled when they are first used.

transformers makes the conversion tables of all its models at once, 1,100 rules with an expression
each, of which one model uses a few. Compiling all took more than half of planning a small model.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from threading import RLock
from typing import Any

__all__ = ["Deferred", "compiled_later"]

_ONE_AT_A_TIME = RLock()


class Deferred:
    """What ``re.compile(text, flags)`` returns, made when something is asked of it."""

    __slots__ = ("_flags", "_made", "_text")

    def __init__(self, text: str, flags: int = 0) -> None:
        """Take what would be compiled; what is wrong with it is raised when it is used."""
        self._text, self._flags = text, flags
        self._made: re.Pattern[str] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the compiled expression."""
        if self._made is None:
            self._made = re.compile(self._text, self._flags)
        return getattr(self._made, name)

    def __copy__(self) -> Deferred:
        """Return itself, as expressions do."""
        return self

    def __deepcopy__(self, known: dict[int, Any]) -> Deferred:
        """Return itself, as expressions do."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Have it stored as an expression."""
        return re.compile, (self._text, self._flags)


class _Re:
    """The module ``re`` with :class:`Deferred` in place of ``compile``."""

    compile = Deferred

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)


@contextmanager
def compiled_later(module: Any) -> Generator[None]:
    """Have what *module* compiles meanwhile, by ``re.compile``, compiled when it is used.

    Threads that use *module* at the same time get the same, which serves them as well.
    """
    if getattr(module, "re", None) is not re:
        yield  # it does so in another way
        return
    with _ONE_AT_A_TIME:
        module.re = _Re()
        try:
            yield
        finally:
            module.re = re
