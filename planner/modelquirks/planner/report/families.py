"""Rows of a report: tensors by family, with the indices that occur as ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

from modelquirks.planner.report.content import FamilyRow
from modelquirks.planner.wording import ranges, show_shape
from modelquirks.quirks.family import Family, group, show

__all__ = ["TensorFacts", "family_rows", "few_ranges", "index_ranges", "part_of"]

TensorFacts = tuple[int | None, str | None, tuple[int, ...] | None]
"""Bytes, dtype and shape of a tensor, as far as they are known."""

_FEW = 4
"""So many dtypes or shapes of one family are named."""
_MANY_RANGES = 12


def few_ranges(numbers: Iterable[int]) -> str:
    """Return *numbers* as ranges; past twelve the rest is counted.

    >>> few_ranges(range(0, 30, 2))
    '0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 … and 3 more ranges'
    """
    shown = ranges(numbers).split(", ")
    more = len(shown) - _MANY_RANGES
    return ", ".join(shown[:_MANY_RANGES]) + (f" … and {more} more ranges" if more > 0 else "")


def index_ranges(family: Family) -> tuple[tuple[str, ...], bool]:
    """Return the indices of a family for each slot, and whether all combinations occur.

    >>> index_ranges(group(["a.0.b.1", "a.1.b.1"])["a.{0}.b.{1}"])
    (('0-1', '1'), True)
    """
    columns = [set(column) for column in zip(*family.members, strict=True)]
    return tuple(map(few_ranges, columns)), prod(map(len, columns)) == len(set(family.members))


def part_of(template: str) -> str:
    """Return the part of the model that a family belongs to: the word behind the first index.

    Without an index it is the module's own name. For people, and for colours: no rule goes by it.

    >>> part_of("model.layers.*.self_attn.q_proj.weight"), part_of("model.embed_tokens.weight")
    ('self_attn', 'embed_tokens')
    >>> part_of("layers.*.weight"), part_of("scale")
    ('layers', 'scale')
    """
    before, star, behind = template.partition(".*.")
    words = [word for word in behind.split(".") if word != "*"] if star else []
    if len(words) > 1:
        return words[0]
    named = [word for word in before.split(".") if word != "*"]
    return named[-1] if star else (named[-2:] or [template])[0]


def family_rows(
    names: Iterable[str],
    facts: Callable[[str], TensorFacts],
    why: Callable[[Sequence[str]], tuple[str, ...]] = lambda _: (),
) -> list[FamilyRow]:
    """Return the families of *names*, those with most bytes first, then those with most tensors."""
    rows = (
        _row(family, [facts(name) for name in family.names], why)
        for family in group(names).values()
    )
    return sorted(rows, key=lambda row: (-(row.n_bytes or 0), -row.n_tensors))


def _row(
    family: Family,
    facts: Sequence[TensorFacts],
    why: Callable[[Sequence[str]], tuple[str, ...]],
) -> FamilyRow:
    sizes = [n_bytes for n_bytes, _, _ in facts if n_bytes is not None]
    template = show(family.template)
    indices, is_whole = index_ranges(family)
    return FamilyRow(
        template=template,
        indices=indices,
        is_whole=is_whole,
        n_tensors=len(family),
        n_bytes=sum(sizes) if len(sizes) == len(facts) else None,
        dtypes=_few(dtype or "?" for _, dtype, _ in facts),
        shapes=_few(show_shape(shape) for _, _, shape in facts),
        part=part_of(template),
        why=why(family.names),
    )


def _few(values: Iterable[str]) -> tuple[str, ...]:
    listed = [*dict.fromkeys(values)]
    if len(listed) <= _FEW:
        return tuple(listed)
    return (*listed[: _FEW - 1], f"… and {len(listed) - _FEW + 1} more")
