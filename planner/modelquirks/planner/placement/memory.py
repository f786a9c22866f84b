"""Devices and sizes: how memory is named by people, by accelerate and by us.

A device is an int (the accelerator of that number, ``cuda:1`` is 1) or a name: ``cpu``, ``disk``,
``mps``, ``xpu:0``. A size is a number of bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

__all__ = [
    "Device",
    "canonical_order",
    "normalize_max_memory",
    "parse_device",
    "parse_max_memory",
    "parse_size",
    "show_bytes",
    "show_devices",
    "this_machine",
]

Device = str | int

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"([+-]?[\d._]+(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf(?:inity)?))\s*(.*)", re.I)
_UNIT = re.compile(r"(?:([KMGT])(I?))?B|", re.I)
_DEVICE = re.compile(
    r"(?P<plain>cpu|disk|mps)(?::0)?|(?:cuda:)?(?P<number>\d+)|(?P<first>cuda)"
    r"|(?P<other>(?:xpu|npu|hpu|mlu|musa|sdaa|neuron):\d+)"
)
_DEVICES = "an accelerator's number (0, 'cuda:0'), 'cpu', 'disk', 'mps' or one like 'xpu:0'"
_LAST = ("cpu", "disk")


def parse_size(size: object) -> int:
    """Return the bytes that *size* stands for, as accelerate's ``convert_file_size_to_int`` does.

    GiB, MiB… are powers of 1024, GB, MB… powers of 1000; a number alone is bytes. Unlike
    accelerate this takes TB, TiB and digits in a string, and refuses a lower-case ``b``:
    accelerate reads ``24Gb`` as 3 GB and ``24Gib`` as 24 GiB. ValueError says what to write.

    >>> parse_size("24GiB"), parse_size("1.5GB"), parse_size("500")
    (25769803776, 1500000000, 500)
    """
    if isinstance(size, bool) or not isinstance(size, str | int | float):
        raise ValueError(f"size {size!r} is not a number of bytes, nor a text like '24GiB'")
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    number, unit_text = found.groups() if found else (str(size).strip(), "")
    unit = _UNIT.fullmatch(unit_text)
    if unit is None or (isinstance(size, str) and found is None):
        raise ValueError(
            f"size {size!r} is not a number with a unit: write '24GiB' (also KiB, MiB, TiB), "
            "'24GB' (also KB, MB, TB) or a number of bytes"
        )
    if unit_text.endswith("b"):
        raise ValueError(_unclear(str(size), number, unit_text))
    prefix, binary = unit.groups(default="")
    factor = (1024 if binary else 1000) ** _POWERS[prefix.upper()]
    return _whole(size, number, factor)


def _whole(size: str | int | float, number: str, factor: int) -> int:
    """Return *number* × *factor* rounded down, exactly if *number* has digits only."""
    try:
        n_bytes = int(number) * factor
    except ValueError:
        try:
            amount = float(number) * factor
        except ValueError:
            raise ValueError(f"size {size!r}: {number!r} is not a number") from None
        if not math.isfinite(amount):
            raise ValueError(f"size {size!r} is not finite; leave 'disk' without a size") from None
        n_bytes = math.floor(amount)
    if n_bytes < 0:
        raise ValueError(f"size {size!r} is negative")
    return n_bytes


def _unclear(size: str, number: str, unit: str) -> str:
    prefix = unit[:-1].upper().removesuffix("I")
    clear = prefix + ("iB" if len(unit) == 3 else "B")
    return (
        f"size {size!r} does not say whether bits or bytes are meant: "
        f"write '{number}{clear}' for bytes, or an eighth of it for bits"
    )


def show_bytes(n_bytes: int | None) -> str:
    """Return a number of bytes as people read it.

    >>> show_bytes(13761264768), show_bytes(512), show_bytes(None)
    ('12.8 GiB', '512 B', 'unlimited')
    """
    if n_bytes is None:
        return "unlimited"
    amount = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.1f} {unit}" if unit != "B" else f"{n_bytes} B"
        amount /= 1024
    return f"{amount:.1f} TiB"


def parse_device(device: object) -> Device:
    """Return the device that *device* stands for: a number, a text, or a ``torch.device``.

    ``cuda`` alone is accelerator 0. ValueError lists what is allowed.

    >>> parse_device("cuda:1"), parse_device("2"), parse_device("cpu"), parse_device("xpu:0")
    (1, 2, 'cpu', 'xpu:0')
    """
    # str() of a torch.device is its text; None, True and 1.0 are not devices by accident
    known = device is not None and not isinstance(device, bool | float)
    found = _DEVICE.fullmatch(str(device).strip().lower()) if known else None
    if found is None:
        raise ValueError(f"device {device!r} is not known: give {_DEVICES}")
    if found["first"]:
        return 0
    return int(found["number"]) if found["number"] else found["plain"] or found["other"]


def canonical_order(devices: Iterable[Device]) -> list[Device]:
    """Return *devices* in the order in which they are filled.

    >>> canonical_order(["disk", 2, "cpu", "mps", 0])
    [0, 2, 'mps', 'cpu', 'disk']
    """
    return sorted(
        devices,
        key=lambda d: (
            (0, d, "") if isinstance(d, int) else (2 + _LAST.index(d) if d in _LAST else 1, 0, d)
        ),
    )


def show_devices(devices: Iterable[Device]) -> str:
    """Return *devices* as people read them, each once, in canonical order.

    >>> show_devices(["cpu", 1, 0, 1])
    "0, 1, 'cpu'"
    """
    return ", ".join(map(repr, canonical_order(set(devices))))


def parse_max_memory(text: str) -> dict[Device, int | None]:
    """Return the memory that the command line gives; None stands for an unlimited disk.

    All faults are in one ValueError.

    >>> parse_max_memory("disk,cpu=1KiB,0=2KB")
    {0: 2000, 'cpu': 1024, 'disk': None}
    """
    parts = [part.partition("=") for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError("no device in --max-memory: write for example '0=24GiB,cpu=64GiB,disk'")
    return _collected(
        [
            (device.strip(), _checked_size if equals else _bare, size.strip())
            for device, equals, size in parts
        ]
    )


def normalize_max_memory(max_memory: Mapping[Any, object]) -> dict[Device, int | None]:
    """Return *max_memory* with devices and sizes as we write them, in canonical order.

    Only the disk may be unlimited (None). *max_memory* is not changed; all faults are in one
    ValueError.

    >>> normalize_max_memory({"cpu": "1KiB", "cuda:0": 5})
    {0: 5, 'cpu': 1024}
    """
    return _collected(
        [
            (device, _bare if size is None else _checked_size, size)
            for device, size in max_memory.items()
        ]
    )


_Read = Callable[[Device, object], int | None]


def _collected(parts: Iterable[tuple[object, _Read, object]]) -> dict[Device, int | None]:
    faults: list[str] = []
    memory: dict[Device, int | None] = {}
    for written, read, size in parts:
        try:
            device = parse_device(written)
            if device in memory:
                raise ValueError(f"device {device!r} is given twice")
            memory[device] = read(device, size)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("max_memory: " + "; ".join(faults))
    return {device: memory[device] for device in canonical_order(memory)}


def _checked_size(device: Device, size: object) -> int:
    try:
        return parse_size(size)
    except ValueError as error:
        raise ValueError(f"device {device!r}: {error}") from None


def _bare(device: Device, size: object) -> None:
    if device != "disk":
        raise ValueError(f"device {device!r} has no size; only 'disk' may be without one")


def this_machine(*, ask_torch: bool = True) -> dict[Device, int | None]:
    """Return what is free on this machine, in bytes: its accelerators and the cpu, no disk.

    This is accelerate's ``get_max_memory``, and of a single GPU 90 %, as in its
    ``get_balanced_memory``. With unified memory (mps, integrated CUDA) there is no ``cpu`` beside
    the accelerator. Without *ask_torch* neither torch nor accelerate is imported: the cpu alone.
    """
    if not ask_torch:
        psutil: Any = import_module("psutil")  # without type stubs
        return {"cpu": int(psutil.virtual_memory().available)}
    from accelerate.utils import get_max_memory

    found = get_max_memory()
    free: dict[Device, int | None] = {parse_device(d): int(n) for d, n in found.items()}
    numbered = [device for device in free if isinstance(device, int)]
    if len(numbered) == 1:
        free[numbered[0]] = int(found[numbered[0]] * 0.9)
    return {device: free[device] for device in canonical_order(free)}
