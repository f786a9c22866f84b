"""``export``: a checkpoint opened, planned, checked, written to a folder, and read back."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelquirks.planner.checkpoint.fingerprint import changed
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.execution.evaluate import EvaluationError
from modelquirks.planner.execution.executionreport import Clock, peak_memory
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.loadoptions import LoadOptions
from modelquirks.planner.execution.nomemory import with_memory
from modelquirks.planner.execution.openfile import is_another
from modelquirks.planner.execution.passing import PassingReader
from modelquirks.planner.execution.preflight import needs
from modelquirks.planner.execution.progress import Progress
from modelquirks.planner.execution.reader import Region
from modelquirks.planner.export.contents import Contents, contents_of
from modelquirks.planner.export.exportreport import ExportError, ExportReport
from modelquirks.planner.export.layout import INDEX, OutFile, index_of, lay_out
from modelquirks.planner.export.outfolder import (
    check_out,
    clear_stale,
    existing_parent,
    filling,
    unfinished,
)
from modelquirks.planner.export.readback import READING_BACK, faults
from modelquirks.planner.export.sidefiles import SideFile, about_left_out, side_files
from modelquirks.planner.export.writing import WRITING, Written, write_file
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.placement.memory import parse_size, show_bytes
from modelquirks.planner.wholefile import write_whole

if TYPE_CHECKING:
    import torch

    from modelquirks.quirks.registry import Registry

__all__ = ["export"]

_MEMORY = 64 << 20
"""Bytes that making tensors may take, if nothing else is said."""


def export(
    checkpoint: str | Path | Manifest,
    out: str | Path,
    *,
    registry: Registry | None = None,
    model: torch.nn.Module | None = None,
    options: OpenOptions = AS_USUAL,
    dtype: torch.dtype | str | None = None,
    dequantize: bool = False,
    shard_size: int | str = "5GB",
    memory: int | str = _MEMORY,
    overwrite: bool = False,
    progress: Progress | None = None,
    **naming: Any,
) -> ExportReport:
    """Write *checkpoint* to the new folder *out* as safetensors files of at most *shard_size*.

    Without *model* every tensor under the name that it is stored with; with one every tensor that
    the model wants, under its names there, by the recipes of a plan: *dequantize* and the arguments
    *aliases*, *ties*, *quirks*, *no_quirks*, *allow_missing*, *min_coverage*, *adapter* and
    *merge_adapter* are those of ``Dispatcher.plan``. *dtype* None or ``auto`` leaves what is
    stored. *options* choose among the states and weights of a training checkpoint. Tensors that
    are tied are stored once.

    Each tensor is made in pieces, straight to its place in its file, within *memory* beside the
    interpreter. The folder has its name when all is written, safe on the disk and read back, or not
    at all; an empty one may be there, and one that an earlier export made is replaced with
    *overwrite*.

    Raises :class:`ExportError` with every reason if it cannot be done, CheckpointError if there is
    no checkpoint, ValueError for options that mean nothing.
    """
    clock, out = Clock(), Path(out).absolute()
    shard_bytes, loading = _size(shard_size), LoadOptions.of(load_memory=memory, progress=progress)
    dispatcher = Dispatcher(registry)
    manifest = dispatcher.manifest(checkpoint, options)
    with _told(out):
        cleared = clear_stale(out)
        check_out(out, root=manifest.root, overwrite=overwrite)
    contents = contents_of(
        dispatcher, manifest, model=model, dtype=dtype, dequantize=dequantize, naming=naming
    )
    job = _Job.of(contents, out, shard_bytes=shard_bytes, loading=loading)
    text = f"there was not enough memory to write {str(out)!r}, and nothing was left there: "
    with _told(out), with_memory(ExportError, f"{text}give less with --memory (memory=)"):
        job.check_space()
        clock.lap("plan")
        with filling(out) as folder:
            written = job.write(folder)
            clock.lap("write")
            job.check_unchanged()
            job.read_back(folder, written)
            clock.lap("read back")
    return replace(job.report(clock), notes=(*cleared, *contents.notes, *job.about_files()))


@dataclass
class _Job:
    """One export: what each step hands to the next."""

    contents: Contents
    out: Path
    files: tuple[OutFile, ...]
    beside: Sequence[SideFile]
    left_out: Mapping[str, str]
    """Files that are not copied: why, by name."""
    loading: LoadOptions
    reader: PassingReader
    work_bytes: int = 0

    @classmethod
    def of(cls, contents: Contents, out: Path, *, shard_bytes: int, loading: LoadOptions) -> _Job:
        """Lay the files out, and read those that go beside them."""
        manifest = contents.manifest
        stem = _stem(manifest)
        as_is = not contents.is_changed and manifest.format == "safetensors"
        metadata = {"format": "pt", **(manifest.metadata if as_is else {}), **contents.ties}
        files = lay_out(contents.items, shard_bytes=shard_bytes, stem=stem, metadata=metadata)
        sizes: Counter[str] = Counter()
        for item in contents.items:
            sizes[item.dtype] += item.nbytes
        beside, left_out = side_files(
            manifest.root, dtypes=sizes, plain=contents.is_plain, changed=contents.is_changed
        )
        if len(files) > 1:
            beside.append(SideFile(f"{stem}{INDEX}", index_of(files, contents.ties)))
        reader = PassingReader(manifest.root, manifest.readable, known=contents.known)
        return cls(contents, out, files, beside, left_out, loading, reader)

    def check_space(self) -> None:
        """Raise if the disk has no room for all of it."""
        needed = sum(file.size_bytes for file in self.files)
        needed += sum(len(file.content) for file in self.beside)
        free = shutil.disk_usage(existing_parent(self.out)).free
        if needed > free:
            raise ExportError(
                f"the export takes {needed:,} bytes ({show_bytes(needed)}), and where "
                f"{str(self.out)!r} would be {free:,} ({show_bytes(free)}) are free: nothing was "
                "written. Name a folder elsewhere, or make room"
            )

    def write(self, folder: Path) -> dict[str, list[Written]]:
        """Write every file to *folder*; return what was written, by file."""
        n_bytes = self.contents.n_bytes
        self.loading.progress.begin({WRITING: n_bytes, READING_BACK: n_bytes})
        items = {item.name: item for item in self.contents.items}
        written: dict[str, list[Written]] = {}
        for file in self.files:
            written[file.name], work_bytes = write_file(
                folder / file.name,
                file,
                items,
                make=self._make,
                release=self.reader.release,
                tensors=self.contents.manifest.readable,
                options=self.loading,
            )
            self.work_bytes = max(self.work_bytes, work_bytes)
        for side in self.beside:
            write_whole(folder / side.name, [side.content])
        return written

    def check_unchanged(self) -> None:
        """Raise if a file that was read is no longer what it was when its header was read."""
        manifest = self.contents.manifest
        used = {
            manifest.readable[name].shard for item in self.contents.items for name in needs(item)
        }
        shards = [shard for shard in manifest.shards if shard.name in used]
        told = [f.message for f in changed(manifest.root, shards, same_place=True)]
        told += [
            f"{name!r} was replaced."
            for name in sorted(used)
            if is_another(manifest.root / name, self.contents.known.get(name))
        ]
        if told:
            listed = "\n- ".join(told[:10])
            raise ExportError(
                f"{str(manifest.path)!r} was changed while it was exported, so nothing was left at "
                f"{str(self.out)!r}; export it again when nobody writes there:\n- {listed}"
            )

    def read_back(self, folder: Path, written: dict[str, list[Written]]) -> None:
        """Raise if a file is not as it was written."""
        found: list[str] = []
        for file in self.files:
            found += faults(folder / file.name, file, written[file.name], options=self.loading)
        found += [
            f"{side.name!r} is read back as other bytes"
            for side in self.beside
            if (folder / side.name).read_bytes() != side.content
        ]
        if found:
            listed = "\n- ".join(found[:10])
            raise ExportError(
                f"what was written for {str(self.out)!r} is not what is read back, and was removed:"
                f"\n- {listed}"
            )

    def report(self, clock: Clock) -> ExportReport:
        """Return what was done."""
        return ExportReport(
            out=self.out,
            n_tensors=len(self.contents.items),
            n_bytes=self.contents.n_bytes,
            files={file.name: file.size_bytes for file in self.files},
            ties=self.contents.ties,
            copied=tuple(side.name for side in self.beside if not side.name.endswith(INDEX)),
            seconds_by_step=clock.laps,
            bytes_read=self.reader.bytes_read,
            work_bytes=self.work_bytes,
            peak_bytes=peak_memory(),
            checkpoint=self.contents.manifest.to_json(),
        )

    def about_files(self) -> list[Finding]:
        """Say what was changed in the files beside the weights, and which were left out."""
        return [
            *(
                Finding("config-adapted", "info", f"{s.name!r} follows the weights: {s.changes}")
                for s in self.beside
                if s.changes
            ),
            *about_left_out(self.left_out),
        ]

    def _make(self, item: LoadItem, region: Region) -> torch.Tensor:
        try:
            return item.make(
                read=self.reader.read,
                types=self.reader.type_of,
                schemes=self.contents.schemes,
                region=region,
            )
        except EvaluationError as error:
            raise ExportError(f"{item}: {error}") from error


def _stem(manifest: Manifest) -> str:
    """Return what the weight files are called: as the library that reads them wants it."""
    if any(finding.code == "adapter" for finding in manifest.findings):
        return "adapter_model"
    return "diffusion_pytorch_model" if "_class_name" in manifest.config else "model"


def _size(given: int | str) -> int:
    n_bytes = parse_size(given)
    if n_bytes < 1:
        raise ValueError(f"shard size {given!r} is too little: give for example '5GB'")
    return n_bytes


@contextmanager
def _told(out: Path) -> Generator[None]:
    """Turn what the operating system says into an error that says what to do."""
    if not hasattr(os, "pwrite"):
        raise ExportError("exports need os.pwrite, which this system does not have")
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = " Make room, or name a folder elsewhere" if full else ""
        left = shown(map(str, unfinished(out)))
        rest = f"Left is {left}: the next export removes it" if left else "Nothing was left there"
        raise ExportError(
            f"{str(out)!r} could not be written: {error.strerror or error}. {rest}.{hint}"
        ) from error
