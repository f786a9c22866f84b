import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from modelquirks.planner.checkpoint.manifest import StoredTensor

Located = Callable[[Path], dict[str, StoredTensor]]


@pytest.fixture
def located() -> Located:
    """Give the function that finds every tensor in the safetensors files of a folder."""

    def find(folder: Path) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            data = path.read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            for name, entry in json.loads(data[8 : 8 + length]).items():
                if name != "__metadata__":
                    begin, end = (8 + length + offset for offset in entry["data_offsets"])
                    place = (tuple(entry["shape"]), begin, end)
                    found[name] = StoredTensor(name, path.name, entry["dtype"], *place)
        return found

    return find
