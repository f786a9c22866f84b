"""Oddities: what is noticed about tensors that will be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.judge import Judged
from modelquirks.planner.names import parent
from modelquirks.quirks.family import template_of
from modelquirks.quirks.recipe import Node

__all__ = ["oddities"]


def oddities(
    judged: Mapping[str, Judged],
    manifest: Manifest,
    unexpected: Iterable[str],
    *,
    dequantize: bool,
) -> Iterator[Finding]:
    """Yield what people should know about the tensors that arrive.

    *unexpected* are the stored tensors that nothing reads. *dequantize*: packed weights may
    become plain ones.
    """
    arriving = [found for found in judged.values() if found.fit.node is not None]
    yield from _partly_used(arriving)
    yield from _dequantized(arriving, manifest, allowed=dequantize)
    left = list(unexpected)
    yield from _unscaled(arriving, manifest, left)
    yield from _adapter(left)


def _adapter(unexpected: Sequence[str]) -> Iterator[Finding]:
    """Yield a warning if an adapter lies beside the weights that it belongs to."""
    names = [name for name in unexpected if ".lora_A." in name or ".lora_B." in name]
    if names:
        text = (
            f"{len(names)} tensors of a LoRA adapter are not loaded, so the model computes without "
            f"it: {shown(names, 3)}. Merge it into the weights first, or load it with PEFT"
        )
        yield Finding("adapter-left-out", "warning", text)


def _partly_used(arriving: Sequence[Judged]) -> Iterator[Finding]:
    """Yield the stored tensors cut in parts of which the model does not take every one."""
    taken: dict[tuple[str, Node, int, int], list[tuple[int, int]]] = {}
    for found in arriving:
        for stored, of, dim, start, stop, size in found.fit.taken:
            if size is not None:
                taken.setdefault((stored, of, dim, size), []).append((start, stop))
    for (stored, _, dim, size), parts in taken.items():
        if lost := _gaps(parts, size):
            listed = [str(a) if a == b - 1 else f"{a} to {b - 1}" for a, b in lost[:10]]
            more = f" … and {len(lost) - 10} more" if len(lost) > 10 else ""
            text = (
                f"{stored!r} holds {size}, the model takes {size - sum(b - a for a, b in lost)}: "
                f"number {', '.join(listed)}{more} of dimension {dim} would be lost"
            )
            yield Finding("stack-partly-used", "error", text)


def _gaps(parts: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return what of *size* elements is in none of *parts*, as (start, stop)."""
    gaps: list[tuple[int, int]] = []
    end = 0
    for start, stop in (*sorted(parts), (size, size)):
        if start > end:
            gaps.append((end, start))
        end = max(end, stop)
    return gaps


def _dequantized(
    arriving: Sequence[Judged], manifest: Manifest, *, allowed: bool
) -> Iterator[Finding]:
    """Yield what it costs to make packed weights plain, by scheme; an error unless *allowed*."""
    packed: dict[str, list[Judged]] = {}
    for found in arriving:
        if found.fit.scheme is not None:
            packed.setdefault(found.fit.scheme, []).append(found)
    for scheme, weights in packed.items():
        reads = dict.fromkeys(stored for found in weights for stored in found.reads)
        sizes = [*map(manifest.sizes.__getitem__, reads)]
        known = [size for size in sizes if size is not None]
        stored_bytes = "a number of bytes that the index does not tell"
        if len(known) == len(sizes):
            stored_bytes = f"{sum(known):,} bytes"
        types = [found.fit.type for found in weights]
        plain = sum(nbytes(t.dtype, t.shape) for t in types if t.dtype and t.shape is not None)
        sizes_told = f"{stored_bytes} stored, {plain:,} bytes once loaded"
        if allowed:
            text = (
                f"{len(weights)} packed weights ({scheme}) become plain weights, because the "
                f"model's modules want those: {sizes_told}"
            )
            yield Finding("dequantized", "info", text)
            continue
        names = shown([found.offer.name for found in weights], 3)
        text = (
            f"{len(weights)} of the model's weights are stored packed ({scheme}) and wanted plain: "
            f"{names}; {sizes_told}. Ask for that with --dequantize (in Python: dequantize=True), "
            "or give a model that keeps them packed"
        )
        yield Finding("packed-into-plain", "error", text)


def _unscaled(
    arriving: Sequence[Judged], manifest: Manifest, unexpected: Iterable[str]
) -> Iterator[Finding]:
    """Yield, by family, the narrow values taken or made as they are, with or without a scale."""
    scales = _scales(unexpected)
    unread: dict[str, list[tuple[str, list[str]]]] = {}
    bare: dict[tuple[str, str], list[str]] = {}
    for found in arriving:
        if found.fit.scheme is not None or not (scales or found.fit.warning):
            continue
        for stored in found.reads:
            narrow = _is_narrow(manifest.tensors[stored].dtype)
            if narrow and (beside := scales.get(parent(stored))):
                unread.setdefault(template_of(stored), []).append((stored, beside))
            elif found.fit.warning:
                bare.setdefault((template_of(stored), found.fit.warning), []).append(stored)
    for family in unread.values():
        names = [stored for stored, _ in family]
        beside = [scale for _, scales_beside in family for scale in scales_beside]
        dtypes = "/".join(sorted({str(manifest.tensors[n].dtype) for n in names}))
        text = (
            f"{shown(names)}: scaled {dtypes} values, "
            f"but nothing reads {shown(beside)} beside: the weight would be wrong"
        )
        yield Finding("scale-unread", "error", text)
    for (_, warning), names in bare.items():
        yield Finding("cast-without-scale", "warning", f"{shown(names)}: {warning}")


def _scales(unexpected: Iterable[str]) -> dict[str, list[str]]:
    """Return the tensors that look like scales, by module."""
    found: dict[str, list[str]] = {}
    for stored in unexpected:
        if "scale" in stored.rpartition(".")[2] or stored.endswith(("SCB", "absmax")):
            found.setdefault(parent(stored), []).append(stored)
    return found


def _is_narrow(dtype: str | None) -> bool:
    return (dtype or "").startswith(("F8", "F4", "I8"))
