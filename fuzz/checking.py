"""What must hold of everything that was accepted, whatever the bytes were.

Declared sizes are within the files, recipes have the types that are told, and what is told can be
shown and written.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterable, Sequence

from guard import Nonsense

from modelquirks.planner.checkpoint.manifest import Manifest, StoredTensor
from modelquirks.planner.cli.report import show_manifest
from modelquirks.planner.cli.terminal import Terminal
from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.finding import Finding
from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.recipe import TensorType

__all__ = ["behaviour", "check_findings", "check_manifest", "check_places", "sampled"]

_MAX_FINDINGS = 100
_MAX_DIMS = 64


def behaviour(findings: Iterable[Finding], n_tensors: int) -> str:
    """Return what is the same for inputs that are treated in the same way."""
    codes = sorted({f"{finding.code}" for finding in findings})
    return f"{min(n_tensors, 3)} {' '.join(codes)}"


def sampled(data: bytes, one_in: int) -> bool:
    """Tell for one input of so many; always the same ones."""
    return zlib.crc32(data) % one_in == 0


def check_findings(findings: Sequence[Finding], data: bytes) -> None:
    """Findings are few, and as long as the names in them ask for."""
    if len(findings) > _MAX_FINDINGS:
        codes = {finding.code for finding in findings}
        raise Nonsense(f"{len(findings):,} findings {sorted(codes)[:5]}")
    total = sum(len(finding.message) for finding in findings)
    if total > 100_000 + 40 * len(data):
        raise Nonsense(f"findings of {total:,} characters for {len(data):,} bytes")


def check_places(places: Iterable[StoredTensor], sizes: dict[str, int | None]) -> None:
    """Every byte range lies within its file and has the length that dtype and shape take."""
    for tensor in places:
        shape = tensor.shape or ()
        if len(shape) > _MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
            raise Nonsense(f"a shape that is none: {str(shape)[:60]}")
        if tensor.begin is None or tensor.end is None:
            continue
        size = sizes.get(tensor.shard)
        if size is None or not 0 <= tensor.begin <= tensor.end <= size:
            raise Nonsense("a tensor beyond its file")
        dense = tensor.stride is None and tensor.dtype is not None and tensor.shape is not None
        if dense and tensor.end - tensor.begin != nbytes(tensor.dtype or "", shape):
            raise Nonsense("a tensor of another size than dtype and shape take")


def check_manifest(manifest: Manifest, data: bytes, *, show_one_in: int = 8) -> str:
    """Check all that a manifest says; return how it came out."""
    check_findings(manifest.findings, data)
    faulty = any(finding.severity == "error" for finding in manifest.findings)
    if not faulty and not manifest.tensors:
        raise Nonsense("no tensor, and no error either")
    if not faulty:
        check_places(manifest.readable.values(), {s.name: s.size_bytes for s in manifest.shards})
        _check_assembled(manifest)
    json.dumps(manifest.to_json())
    if sampled(data, show_one_in):
        out = io.StringIO()
        show_manifest(Terminal(out, {}), manifest, everything=False)
    return behaviour(manifest.findings, len(manifest.tensors))


def _check_assembled(manifest: Manifest) -> None:
    def type_of(name: str) -> TensorType:
        place = manifest.places[name]
        return TensorType(place.dtype, place.shape)

    for name, node in manifest.assembled.items():
        told = manifest.tensors[name]
        made = infer(node, type_of, {})
        if (made.dtype, made.shape) != (told.dtype, told.shape):
            raise Nonsense("a recipe makes another type than the manifest tells")
