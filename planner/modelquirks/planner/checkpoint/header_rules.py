"""The rules that a safetensors header must keep, entry by entry, and who breaks them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from modelquirks.planner.dtypes import BITS, MAX_DIMS
from modelquirks.planner.finding import Finding, Severity, brief

__all__ = ["DTYPES", "Faults", "Row", "check_entry", "check_layout"]

DTYPES = {name: bits for name, bits in BITS.items() if name != "C128"}
"""Bits by dtype, of those that the format knows."""

Row = tuple[str | None, tuple[int, ...] | None, int | None, int | None]
"""Dtype, shape, begin and end of an entry; None where it cannot be believed."""

_LIMIT = 1 << 64  # the library counts in unsigned 64-bit integers
_LISTED = 10
_SENTENCES: dict[str, tuple[Severity, str]] = {
    "data-hole": ("error", "bytes in the data belong to no tensor, before"),
    "data-overlap": ("error", "ranges overlap (each byte may belong to one tensor only)"),
    "data-trailing": ("error", "bytes follow the last tensor; the header does not cover the file"),
    "data-truncated": ("error", "the file is cut off; these tensors end beyond it"),
    "dtype-unknown": ("error", "dtypes that the format does not know"),
    "duplicate-name": ("error", "keys that occur more than once in the header"),
    "entry-extra": ("warning", "entries with fields that the format does not know, ignored"),
    "entry-invalid": ("error", "entries that are not as the format wants them"),
    "metadata-invalid": ("error", "metadata that is no string"),
    "offsets-invalid": ("error", "ranges that are not two whole numbers in order"),
    "shape-invalid": (
        "error",
        f"shapes that are not lists of at most {MAX_DIMS} whole numbers from 0",
    ),
    "size-mismatch": ("error", "ranges that do not fit dtype and shape"),
    "sub-byte": ("error", "tensors that do not end at a byte"),
}


class Faults:
    """Collects what is wrong in one file: one finding for each kind, with the names in it."""

    def __init__(self, shard: str) -> None:
        """Start without faults; *shard* is the name of the file in messages."""
        self._shard = shard
        self._found: dict[str, list[str]] = {}

    def add(self, code: str, name: str, detail: str) -> None:
        """Remember that the entry *name* (or, if it is ``""``, the file) breaks a rule."""
        text = " ".join([repr(name)] * bool(name) + [f"({detail})"] * bool(detail))
        self._found.setdefault(code, []).append(text or repr(name))

    def findings(self) -> tuple[Finding, ...]:
        """Return a finding for each rule that was broken."""
        return tuple(self._finding(code, names) for code, names in self._found.items())

    def _finding(self, code: str, names: list[str]) -> Finding:
        severity, sentence = _SENTENCES[code]
        listed = ", ".join(names[:_LISTED])
        more = f" … and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return Finding(code, severity, f"{self._shard!r}: {sentence}: {listed}{more}.")


def check_entry(name: str, entry: Any, faults: Faults) -> Row:
    """Return what can be believed of an entry, and add what is wrong with it to *faults*."""
    if not isinstance(entry, dict):
        faults.add("entry-invalid", name, f"a JSON {type(entry).__name__}, not an object")
        return None, None, None, None
    wanted = ("dtype", "shape", "data_offsets")
    if absent := [key for key in wanted if key not in entry]:
        faults.add("entry-invalid", name, f"without {' and '.join(absent)}")
    for key in entry.keys() - {*wanted}:
        code = "entry-extra" if _plain(entry[key]) else "entry-invalid"
        faults.add(code, name, f"field {key!r}")
    dtype = _dtype(name, entry["dtype"], faults) if "dtype" in entry else None
    shape = _shape(name, entry["shape"], faults) if "shape" in entry else None
    begin, end = None, None
    if "data_offsets" in entry:
        begin, end = _range(name, entry["data_offsets"], faults)
    if dtype is not None and shape is not None and begin is not None and end is not None:
        _check_size(name, dtype, shape, end - begin, faults)
    return dtype, shape, begin, end


def check_layout(spans: Iterable[tuple[int, int, str]], data_bytes: int, faults: Faults) -> None:
    """Check that the ranges (begin, end, name) cover the data from 0 without gap or overlap."""
    covered = 0
    for begin, end, name in sorted(spans):
        if begin > covered:
            faults.add("data-hole", name, f"{begin - covered:,} bytes from {covered:,}")
        elif begin < covered:
            faults.add("data-overlap", name, f"begins at {begin:,}, before {covered:,}")
        if end > data_bytes:
            faults.add("data-truncated", name, f"needs {end:,} bytes of data, of {data_bytes:,}")
        covered = max(covered, end)
    if covered < data_bytes:
        faults.add("data-trailing", "", f"{data_bytes - covered:,} bytes of {data_bytes:,}")


def _plain(value: Any) -> bool:
    """Tell whether the library would skip the value of an unknown field without complaint."""
    if isinstance(value, int):
        return -_LIMIT // 2 <= value < _LIMIT
    return value is None or isinstance(value, str)


def _dtype(name: str, dtype: Any, faults: Faults) -> str | None:
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    faults.add("dtype-unknown", name, brief(dtype))
    return None


def _shape(name: str, shape: Any, faults: Faults) -> tuple[int, ...] | None:
    if not isinstance(shape, list) or not all(_whole(length) for length in shape):
        faults.add("shape-invalid", name, brief(shape))
        return None
    if len(shape) > MAX_DIMS:
        faults.add("shape-invalid", name, f"{len(shape)} dimensions")
        return None
    return tuple(shape)


def _range(name: str, span: Any, faults: Faults) -> tuple[int, int] | tuple[None, None]:
    if isinstance(span, list) and len(span) == 2 and all(map(_whole, span)) and span[0] <= span[1]:
        return span[0], span[1]
    faults.add("offsets-invalid", name, brief(span))
    return None, None


def _check_size(name: str, dtype: str, shape: tuple[int, ...], has: int, faults: Faults) -> None:
    bits = 1
    for length in (*shape, DTYPES[dtype]):  # in this order: a 0 comes too late after an overflow
        bits *= length
        if bits >= _LIMIT:
            faults.add("size-mismatch", name, f"{dtype} {brief(list(shape))} has too many elements")
            return
    if bits % 8:
        faults.add("sub-byte", name, f"{dtype} {brief(list(shape))} takes {bits} bits")
    elif bits // 8 != has:
        text = f"{dtype} {brief(list(shape))} takes {bits // 8:,} bytes, its range has {has:,}"
        faults.add("size-mismatch", name, text)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LIMIT  # a bool is no length
