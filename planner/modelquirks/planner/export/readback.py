"""``faults``: is a file that was written what it was to be, by its header and by every byte?"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from modelquirks.planner.checkpoint.safetensors_header import read_header
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.pool import available_cpus, run
from modelquirks.planner.export.layout import OutFile
from modelquirks.planner.export.writing import Written
from modelquirks.planner.finding import shown

__all__ = ["READING_BACK", "faults"]

READING_BACK = "reading back"
"""What progress calls the bytes that are read back."""


def faults(
    path: Path, file: OutFile, written: Iterable[Written], *, options: LoadOptions
) -> list[str]:
    """Return what is wrong with the file at *path*, a sentence each.

    The header must be *file*'s, every range must give the digest that it had when it was *written*,
    and every byte of every tensor must be in one. Pages that the system keeps of the file are
    dropped before, where it lets one ask for that (``posix_fadvise``), so that the disk is read.
    """
    parts = sorted(written, key=lambda part: part.begin)
    return [*_in_header(path, file), *_gaps(file, parts), *_in_data(path, parts, options)]


def _in_header(path: Path, file: OutFile) -> Iterator[str]:
    header = read_header(path, shard=file.name)
    for finding in header.findings:
        yield finding.message
    if dict(header.entries) != dict(file.places):
        odd = [n for n, place in file.places.items() if header.entries.get(n) != place]
        odd += [n for n in header.entries if n not in file.places]
        yield f"the header of {file.name!r} does not say what was written of {shown(odd)}"


def _gaps(file: OutFile, parts: Iterable[Written]) -> Iterator[str]:
    lengths = dict.fromkeys(file.places, 0)
    for part in parts:
        lengths[part.name] += part.nbytes
    if odd := [name for name, place in file.places.items() if lengths[name] != place.nbytes]:
        yield f"of {shown(odd)} in {file.name!r} not every byte was written"


def _in_data(path: Path, parts: Iterable[Written], options: LoadOptions) -> list[str]:
    wrong: list[str] = []
    descriptor = os.open(path, os.O_RDONLY)

    def work(part: Written) -> None:
        if zlib.crc32(_read_at(descriptor, part)) != part.digest:
            wrong.append(part.name)
        options.progress.add(READING_BACK, part.nbytes)

    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        run(
            parts,
            work,
            n_threads=options.n_threads(available_cpus()),
            cost=lambda part: part.nbytes,
            limit=options.memory_bytes,
        )
    finally:
        os.close(descriptor)
    if not wrong:
        return []
    return [f"{shown(dict.fromkeys(wrong))} in {path.name!r} are read back as other bytes"]


def _read_at(descriptor: int, part: Written) -> bytes:
    """Return the bytes of the range; fewer if the file ends before."""
    found: list[bytes] = []
    begin, end = part.begin, part.begin + part.nbytes
    while begin < end and (chunk := os.pread(descriptor, end - begin, begin)):
        found.append(chunk)
        begin += len(chunk)
    return b"".join(found)
