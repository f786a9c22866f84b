"""Dtypes that are not what the rest of the checkpoint or the model lets one expect.

A header may say BF16 of values that are F16, and a tensor may have been stored anew in another
dtype than its siblings. Both load without an error, with wrong values. Of that headers show no
more than that a dtype is odd, so it is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from modelquirks.planner.checkpoint.manifest import MARK, Manifest
from modelquirks.planner.dtypes import BITS, is_float
from modelquirks.planner.finding import Finding
from modelquirks.planner.mapping.wholes import Account
from modelquirks.quirks.family import Family

__all__ = ["dtype_changes"]

_HALVES = frozenset({"F16", "BF16"})
_LISTED = 10


class _Read(NamedTuple):
    """Stored tensors that are read for a model tensor of another dtype."""

    stored: str
    planned: str
    names: Iterable[str]


def dtype_changes(account: Account, manifest: Manifest, *, asked: str | None) -> Iterator[Finding]:
    """Yield the families that are stored in several dtypes, and the casts that nobody *asked* for.

    Packed codes are no concern of this, nor what an adapter adds.
    """
    yield from _uneven(account, manifest)
    casts: dict[tuple[str, str], set[str]] = {}
    for stored, planned, names in () if asked is not None else _reads(account, manifest):
        casts.setdefault((stored, planned), set()).update(names)
    for (stored, planned), those in sorted(casts.items()):
        first = islice(filter(those.__contains__, manifest.tensors), _LISTED)
        yield _cast(stored, planned, len(those), [*first])


def _cast(stored: str, planned: str, count: int, names: Sequence[str]) -> Finding:
    text = f"{_listed(map(repr, names), count)}: stored as {stored}, cast to {planned} as the model"
    if frozenset((stored, planned)) == _HALVES:
        text += (
            " has it. Neither holds all values of the other. If config.json or the model has the "
            "wrong dtype, change that; if the header has, the values are wrong"
        )
        return Finding("dtype-cast", "warning", text)
    return Finding("dtype-cast", "info", f"{text} has it")


def _reads(account: Account, manifest: Manifest) -> Iterator[_Read]:
    """Yield what is read in one float of 16 bits or more and wanted in another."""
    for whole in account.wholes:
        for part in whole.reads:
            planned, packed = whole.fit.type.dtype, whole.fit.scheme is not None
            if (told := _both(part.type.dtype, planned, packed=packed)) is not None:
                yield _Read(*told, part.names)
    for found in account.judged.values():
        for name in found.reads if found.fit.node is not None else ():
            stored, planned = manifest.dtype_of(name), found.fit.type.dtype
            told = _both(stored, planned, packed=found.fit.scheme is not None)
            if told is not None and not name.startswith(MARK):
                yield _Read(*told, [name])


def _both(stored: str | None, planned: str | None, *, packed: bool) -> tuple[str, str] | None:
    """Return both dtypes if a cast says anything: scales of packed weights may well be F32."""
    if stored is None or planned is None or stored == planned:
        return None
    if not (_is_plain(stored) and _is_plain(planned)) or (packed and stored not in _HALVES):
        return None
    return stored, planned


def _is_plain(dtype: str | None) -> bool:
    return dtype is not None and is_float(dtype) and BITS[dtype] >= 16


def _uneven(account: Account, manifest: Manifest) -> Iterator[Finding]:
    """Yield the tensors of another dtype than most of their family, as far as they are used.

    Where the most frequent one shares that with another, nobody knows which is odd: all are named.
    """
    odd: list[str] = []
    halved: list[str] = []
    for template, types in manifest.uneven_types.items():
        family, dtypes = manifest.families[template], [dtype for dtype, _ in types]
        if _is_of_one_kind(family, dtypes):
            usual = _usual(dtypes)
            listed = halved if usual is None else odd
            pairs = zip(family.names, dtypes, strict=True)
            listed += [name for name, dtype in pairs if usual is None or dtype != usual]
    used = account.used.names if odd or halved else set[str]()
    for names, what in (
        (odd, "of another dtype than most of their kind"),
        (halved, "in several dtypes, none of which is that of most"),
    ):
        if those := [name for name in names if name in used]:
            each = (f"{name!r} ({manifest.dtype_of(name)})" for name in those[:_LISTED])
            text = (
                f"{_listed(each, len(those))}: {what}. If they were not trained so, their values "
                "were cut, or the header is wrong"
            )
            yield Finding("dtype-uneven", "warning", text)


def _is_of_one_kind(family: Family, dtypes: Sequence[str | None]) -> bool:
    """Tell whether the members should have one dtype, and do not.

    Of weights some may be packed and the rest not; scales are all numbers, or all exponents.
    """
    eight = all((dtype or "").startswith("F8_E") for dtype in dtypes)
    scales = "scale" in family.template.rpartition(".")[2]
    return len({*dtypes}) > 1 and (eight or scales or all(map(_is_plain, dtypes)))


def _usual(dtypes: Sequence[str | None]) -> str | None:
    """Return the dtype of most; None: there is another that is as frequent."""
    (usual, count), (_, second) = Counter(dtypes).most_common(2)
    return None if count == second else usual


def _listed(names: Iterable[str], count: int) -> str:
    text = ", ".join(names)
    return f"{text} … and {count - _LISTED} more" if count > _LISTED else text
