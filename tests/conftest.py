"""What the tests of all parts share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "data" / "golden"
UPDATE = bool(os.environ.get("MODELQUIRKS_UPDATE_GOLDEN"))
"""Read now: the tests run without any variable of ours."""


@pytest.fixture
def golden() -> Callable[[str, str], bool]:
    """Give the function that compares with a golden file, which is the text as it should be."""

    def agrees(name: str, text: str) -> bool:
        path = GOLDEN / name
        if UPDATE:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return path.read_text(encoding="utf-8") == text

    return agrees
