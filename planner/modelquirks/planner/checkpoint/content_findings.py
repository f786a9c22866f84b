"""What is odd about the content of weight files, once their headers are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from modelquirks.planner.checkpoint.header import Header
from modelquirks.planner.checkpoint.lazy_tensors import LazyTensors
from modelquirks.planner.checkpoint.manifest import StoredTensor, shared_groups
from modelquirks.planner.finding import Finding, shown

__all__ = ["about_content", "about_size", "merged"]

_ALIKE = 3
"""So many files with the same fault are named in findings of their own."""


def merged(headers: Sequence[Header]) -> Iterator[Finding]:
    """Yield the findings of the headers: one for all if many files have the same fault."""
    by_code: dict[str, list[tuple[str, Finding]]] = {}
    for header in headers:
        for finding in header.findings:
            by_code.setdefault(finding.code, []).append((header.shard.name, finding))
    for alike in by_code.values():
        if len(alike) <= _ALIKE:
            yield from (finding for _, finding in alike)
            continue
        (_, first), *rest = alike
        others = list(dict.fromkeys(shard for shard, _ in rest))
        text = f"{first.message} The like holds for {len(others)} more files: {shown(others)}."
        yield first._replace(message=text)


def about_content(
    tensors: Mapping[str, StoredTensor], headers: Sequence[Header]
) -> Iterator[Finding]:
    """Yield what is odd about tensors whose headers were read."""
    if not tensors and all(header.readable for header in headers):
        files = shown([header.shard.name for header in headers], 3)
        yield Finding("no-tensors", "error", f"no tensor is in {files}.")
    yield from _about_empty(tensors)
    pieces = [header.shard.name for header in headers if "DCP_SHARDING_INFO" in header.metadata]
    if pieces:
        text = (
            f"pieces of tensors, not whole ones, are in {shown(pieces)} (DCP_SHARDING_INFO in the "
            "metadata): the shapes are those of the pieces. Consolidate the checkpoint first, "
            "with torch.distributed.checkpoint."
        )
        yield Finding("dcp-pieces", "error", text)
    if any(header.format == "torch" for header in headers):
        yield from _about_shared(tensors)


def about_size(
    tensors: Mapping[str, StoredTensor], headers: Sequence[Header], declared: int | None
) -> Iterator[Finding]:
    """Yield a finding if the index declares other bytes than the headers of all tensors take."""
    if declared is None:
        return
    taken = _taken(tensors)
    if taken is None or declared in taken:
        return
    once, _ = taken
    files = sum(header.shard.size_bytes or 0 for header in headers)
    close = abs(declared - once) * 100 <= once
    why = " That is the size of the files, headers included." if declared == files else ""
    text = (
        f"the index declares {declared:,} bytes, and its tensors take {once:,} by their headers; "
        f"the headers are believed.{why}"
    )
    yield Finding("total-size-mismatch", "info" if close or why else "warning", text)


def _taken(tensors: Mapping[str, StoredTensor]) -> tuple[int, int] | None:
    """Return the bytes of all tensors, those in one place once, and each; None: not all known."""
    if isinstance(tensors, LazyTensors):
        once = sum(tensors.n_bytes)
        return (once, once) if tensors else None
    ranges = [(tensor.shard, tensor.begin, tensor.end) for tensor in tensors.values()]
    sizes = [end - begin for _, begin, end in ranges if begin is not None and end is not None]
    if not sizes or len(sizes) < len(ranges):
        return None
    once = sum(e - b for _, b, e in {*ranges} if b is not None and e is not None)
    return once, sum(sizes)


def _shapes(tensors: Mapping[str, StoredTensor]) -> Iterable[tuple[int, ...] | None]:
    if isinstance(tensors, LazyTensors):
        return tensors.shapes
    return {tensor.shape for tensor in tensors.values()}


def _about_empty(tensors: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    if not any(shape and 0 in shape for shape in _shapes(tensors)):
        return
    empty = [name for name, tensor in tensors.items() if tensor.shape and 0 in tensor.shape]
    every = len(empty) == len(tensors)
    text = (
        f"{'all' if every else len(empty)} of {len(tensors)} tensors have no elements: "
        f"{shown(empty, 5)}. DeepSpeed ZeRO-3 leaves such placeholders where the weights "
        "are in the files of the ranks."
    )
    yield Finding("tensor-empty", "error" if every else "warning", text)


def _about_shared(tensors: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    groups = shared_groups(tensors.values())
    if groups:
        listed = " / ".join(shown(group, 4) for group in groups[:5])
        more = f" … and {len(groups) - 5} more groups" if len(groups) > 5 else ""
        text = f"stored once under several names, which are tied by that: {listed}{more}."
        yield Finding("shared-storage", "info", text)
