"""Dtypes that are not what the rest of the checkpoint or the model lets one expect.

A header may say BF16 of values that are F16, and a tensor may have been stored anew in another
dtype than its siblings. Both load without an error. The values tell; a header that differs does,
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from modelquirks.planner.checkpoint.manifest import MARK, Manifest
from modelquirks.planner.dtypes import BITS, is_float
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.wholes import Account
from modelquirks.quirks.family import Family

__all__ = ["dtype_changes"]

_HALVES = frozenset({"F16", "BF16"})
_CAST = {
    True: "neither holds all values of the other: they are rounded, and beyond 65,504 become "
    "infinite in F16. If config.json or the model says the wrong dtype, change that",
    False: "values are cast on loading",
}


def dtype_changes(
    account: Account, manifest: Manifest, *, asked: str | None
) -> Iterator[Finding]:
    """Yield the families that are stored in several dtypes, and the casts that nobody *asked* for.

    Packed codes are no concern of this, nor what an adapter adds.
    """
    yield from _uneven(manifest, account.used.names if manifest.uneven_types else ())
    if asked is not None:
        return
    casts: dict[tuple[str, str], list[str]] = {}
    for stored, planned, names in _loaded(account, manifest):
        if stored is not None and stored != planned and _is_plain(stored) and _is_plain(planned):
            casts.setdefault((stored, planned), []).extend(names)
    for (stored, planned), names in casts.items():
        both = {stored, planned} == _HALVES
        text = (
            f"{len(names)} tensors are stored as {stored}, and the model has {planned} there: "
            f"{shown(names)}; {_CAST[both]}"
        )
        yield Finding("dtype-cast", "warning" if both else "info", text)


def _loaded(
    account: Account, manifest: Manifest
) -> Iterator[tuple[str | None, str | None, Sequence[str]]]:
    """Yield the dtype of what is read, that of what is made of it, and the stored names."""
    for whole in account.wholes:
        for part in whole.reads:
            if part.type.dtype != whole.fit.type.dtype:
                if _counts(part.type.dtype, packed=whole.fit.scheme is not None):
                    yield part.type.dtype, whole.fit.type.dtype, [*part.names]
    for found in account.judged.values():
        for name in found.reads if found.fit.node is not None else ():
            dtype = manifest.tensors[name].dtype
            if name.startswith(MARK) or dtype == found.fit.type.dtype:
                continue
            if _counts(dtype, packed=found.fit.scheme is not None):
                yield dtype, found.fit.type.dtype, [name]


def _counts(stored: str | None, *, packed: bool) -> bool:
    """Tell whether a cast says anything: scales of packed weights may well be F32."""
    return not packed or stored in _HALVES


def _is_plain(dtype: str | None) -> bool:
    return dtype is not None and is_float(dtype) and BITS[dtype] >= 16


def _uneven(manifest: Manifest, used: Collection[str]) -> Iterator[Finding]:
    """Yield the tensors of another dtype than most of their family, as far as they are used."""
    odd: list[str] = []
    for template, types in manifest.uneven_types.items():
        odd += _minority(manifest.families[template], types)
    odd = [name for name in odd if name in used]
    if odd:
        listed = [f"{name!r} ({manifest.tensors[name].dtype})" for name in odd[:10]]
        more = f" … and {len(odd) - 10} more" if len(odd) > 10 else ""
        text = (
            f"{len(odd)} tensors have another dtype than most of their kind: {', '.join(listed)}"
            f"{more}. If they were not trained so, their values were cut, or the header is wrong"
        )
        yield Finding("dtype-uneven", "warning", text)


def _minority(family: Family, types: Sequence[tuple[str | None, object]]) -> list[str]:
    dtypes = [dtype for dtype, _ in types]
    if len({*dtypes}) < 2 or not all(map(_is_plain, dtypes)):
        return []
    (usual, _), *_ = Counter(dtypes).most_common(1)
    return [name for name, dtype in zip(family.names, dtypes, strict=True) if dtype != usual]

