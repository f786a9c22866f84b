"""``with_compiled``: the environment of a process that has its modules compiled.

An installed package does. Machines that write no ``.pyc`` files would have each process compile
what it imports, which is none of what is measured.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache

__all__ = ["with_compiled"]


def with_compiled() -> dict[str, str]:
    """Return the environment; the first process that has it compiles for all later ones."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return environment | {"PYTHONPYCACHEPREFIX": _folder().name}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is gone at the end."""
    return tempfile.TemporaryDirectory()
