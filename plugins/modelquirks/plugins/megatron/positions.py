"""Whether each file is in the folder of the rank that wrote it.

Which rank wrote a file only the arguments of the run say: ``rank``, the global one, which
``parse_args`` sets before they are saved (``megatron/training/arguments.py`` of Megatron-LM,
d98e8a6). Tensor-parallel ranks are the innermost of the grid (``RankGenerator`` of megatron-core,
order ``tp-cp-ep-dp-pp`` or ``tp-cp-ep-pp-dp``), so that the global rank modulo their number is the
tensor-parallel rank, and later stages have higher ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from modelquirks.planner.checkpoint.fingerprint import copies_among
from modelquirks.planner.finding import Finding, shown
from modelquirks.plugins.megatron.files import STATE
from modelquirks.plugins.megatron.rank import Grid, Position, Rank

__all__ = ["about_copies", "about_positions", "folder_name"]


def folder_name(position: Position, grid: Grid) -> str:
    """Return the name of the folder of a rank, as ``get_checkpoint_name`` gives it.

    >>> folder_name(Position(1, 0, 3), Grid(2, 1, 4)), folder_name(Position(1, 2, 0), Grid(2, 4, 1))
    ('mp_rank_01_003', 'mp_rank_01_002')
    """
    name = f"mp_rank_{position.tensor:02d}"
    if grid.pipeline > 1:
        name += f"_{position.pipeline:03d}"
    return name + (f"_{position.expert:03d}" if grid.expert > 1 else "")


def about_copies(ranks: Iterable[Rank]) -> Iterator[Finding]:
    """Yield an error for files that are one and the same: ranks differ in what they hold."""
    for names in copies_among(rank.content.shard for rank in ranks if any(rank.chunks)):
        text = f"{shown(names)} are one and the same file: ranks differ in what they hold."
        yield Finding("rank-copied", "error", text)


def about_positions(ranks: Mapping[Position, Rank], grid: Grid) -> Iterator[Finding]:
    """Yield an error for the files that were written by other ranks than their folders say."""
    said = {at: number for at, rank in ranks.items() if (number := _global(rank)) is not None}
    wrong = [at for at, number in said.items() if number % grid.tensor != at.tensor]
    for at, number in said.items():
        before = at._replace(pipeline=at.pipeline - 1)
        if said.get(before, -1) >= number:
            wrong += [before, at]
    if wrong:
        listed = [
            f"{ranks[at].folder.name + '/' + STATE!r} says rank {said[at]}"
            for at in sorted({*wrong})[:10]
        ]
        text = (
            f"files are in folders of other ranks: {'; '.join(listed)}. Put each back where it "
            "was: the slices would be joined in a wrong order."
        )
        yield Finding("rank-swapped", "error", text)


def _global(rank: Rank) -> int | None:
    value = rank.args.get("rank")
    return value if type(value) is int and value >= 0 else None
