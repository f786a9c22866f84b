"""Oddities: what is noticed about tensors that will be loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from modelquirks.planner.checkpoint.manifest import MARK, Manifest
from modelquirks.planner.dtypes import nbytes
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.judge import Judged
from modelquirks.planner.mapping.reads import Part, Used
from modelquirks.planner.mapping.wholes import Account
from modelquirks.planner.names import parent
from modelquirks.quirks.family import template_of
from modelquirks.quirks.recipe import Node, TensorType

__all__ = ["oddities"]


def oddities(
    account: Account,
    manifest: Manifest,
    unexpected: Iterable[str],
    *,
    dequantize: bool,
) -> Iterator[Finding]:
    """Yield what people should know about the tensors that arrive.

    *unexpected* are the stored tensors that nothing reads. *dequantize*: packed weights may
    become plain ones.
    """
    arriving = [found for found in account.judged.values() if found.fit.node is not None]
    yield from _partly_used(arriving)
    yield from _dequantized(account, manifest, allowed=dequantize)
    left = list(unexpected)
    if _reads_narrow(account) and _scales(left):
        arriving = [found for found in account.each.values() if found.fit.node is not None]
    yield from _unscaled(arriving, manifest, left)
    yield from _adapter(left, manifest)


def _adapter(unexpected: Sequence[str], manifest: Manifest) -> Iterator[Finding]:
    """Yield a warning if an adapter lies among the weights that it belongs to."""
    names = [n for n in unexpected if _is_lora(n) and not n.startswith(MARK)]
    if not names:
        return
    told = f"{len(names)} tensors of a LoRA adapter are not loaded"
    if any(".base_layer." in name for name in manifest.tensors):
        text = (
            f"this is a full model that was saved with its adapter inside ('base_layer' beside "
            f"'lora_A'): {told}, so the model computes without it: {shown(names, 3)}. Load it into "
            "a PEFT model, or save it again after merge_and_unload()"
        )
    else:
        text = (
            f"{told}: {shown(names, 3)}. They lie among weights that no adapter wraps: left over "
            "from a merge, or never merged, in which case the model computes without them. Headers "
            "do not tell which; an adapter in a folder of its own is planned with --adapter"
        )
    yield Finding("adapter-left-out", "warning", text)


def _is_lora(name: str) -> bool:
    return any(f".{part}." in f"{name}." for part in ("lora_A", "lora_B", "lora_magnitude_vector"))


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


@dataclass
class _Packed:
    """The weights of one scheme that become plain ones."""

    names: list[Sequence[str]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    plain_bytes: int = 0

    def add(self, names: Sequence[str], made: TensorType) -> None:
        """Enter weights of one type."""
        self.names.append(names)
        if made.dtype and made.shape is not None:
            self.plain_bytes += len(names) * nbytes(made.dtype, made.shape)


def _packed(account: Account) -> Mapping[str, _Packed]:
    """Return the packed weights that arrive, by scheme, in the order of the model."""
    found: dict[str, _Packed] = {}
    firsts: dict[str, str] = {}
    for whole in account.wholes:
        if (scheme := whole.fit.scheme) is not None:
            weights = found.setdefault(scheme, _Packed())
            weights.add(whole.family.names, whole.fit.type)
            weights.parts += whole.reads
            firsts[whole.family.names[0]] = scheme
    for name, one in account.judged.items():
        if (scheme := one.fit.scheme) is not None and one.fit.node is not None:
            weights = found.setdefault(scheme, _Packed())
            weights.add([name], one.fit.type)
            weights.reads += one.reads
            firsts[name] = scheme
    schemes = dict.fromkeys(firsts[name] for name in account.in_order(firsts))
    return {scheme: found[scheme] for scheme in schemes}


def _dequantized(account: Account, manifest: Manifest, *, allowed: bool) -> Iterator[Finding]:
    """Yield what it costs to make packed weights plain, by scheme; an error unless *allowed*."""
    for scheme, weights in _packed(account).items():
        count = sum(map(len, weights.names))
        stored_bytes = "a number of bytes that the index does not tell"
        if (n_bytes := Used(weights.parts, weights.reads).n_bytes(manifest)) is not None:
            stored_bytes = f"{n_bytes:,} bytes"
        sizes_told = f"{stored_bytes} stored, {weights.plain_bytes:,} bytes once loaded"
        if allowed:
            text = (
                f"{count} packed weights ({scheme}) become plain weights, because the "
                f"model's modules want those: {sizes_told}"
            )
            yield Finding("dequantized", "info", text)
            continue
        names = shown(account.in_order({*chain.from_iterable(weights.names)}), 3)
        text = (
            f"{count} of the model's weights are stored packed ({scheme}) and wanted plain: "
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


def _reads_narrow(account: Account) -> bool:
    """Tell whether a whole family is taken as it is from values that may need a scale."""
    plain = (whole for whole in account.wholes if whole.fit.scheme is None)
    return any(_is_narrow(part.type.dtype) for whole in plain for part in whole.reads)


def _is_narrow(dtype: str | None) -> bool:
    return (dtype or "").startswith(("F8", "F4", "I8"))
