"""Doubts: what shapes cannot tell of a claim, and claims that are less sure than they look."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from modelquirks.planner.infer.claim import Claim, source_of
from modelquirks.planner.infer.kin import SLOT, Kin, Path
from modelquirks.planner.infer.pool import Left, Pool, fits
from modelquirks.planner.infer.words import numberless, plain
from modelquirks.quirks.recipe import Chunk, Concat, Interleave, Slice, Transpose, nodes

__all__ = ["doubt", "turned"]

_ROTARY = "with its rows in the other order of rotary positions, which shapes do not tell"
_IN_TURN = "with the parts row by row in turn (interleaved), which shapes do not tell"
_TURNED = "transposed, as the other matrices beside it are"
_SHIFTED = "its neighbour in number: both sides count from different numbers on"


def turned(pool: Pool) -> None:
    """Claim what has one name, and is stored with its two dimensions exchanged."""
    models = {kin.path: kin for kin in pool.model if kin.over is None}
    for left in list(pool.stored):
        kin = models.get(left.path)
        if kin is None or left.kin.over is not None or fits(left.kin, kin):
            continue
        if fits(_exchanged(left.kin), kin):
            node = Transpose(source_of(left.kin), 0, 1)
            claim = Claim(kin, node, "likely", "same name, transposed", (), (left.kin,))
            pool.enter(claim, [left], kin)


def _exchanged(kin: Kin) -> Kin:
    types = {
        index: of._replace(shape=of.shape[::-1])
        for index, of in kin.types.items()
        if of.shape is not None and len(of.shape) == 2
    }
    return replace(kin, types=types)


def doubt(pool: Pool) -> None:
    """Say of each claim what else it could be, and call it less sure where that is as good."""
    places = {_place(c.model.path) for c in pool.claims if isinstance(c.recipe, Transpose)}
    missing = [kin for kin in pool.rival_models() if kin.over is None]
    spare = [left for left in pool.rival_stored() if left.kin.over is None]
    pool.claims = [_doubted(claim, places, missing, spare) for claim in pool.claims]


def _doubted(claim: Claim, places: Iterable[Path], missing: list[Kin], spare: list[Left]) -> Claim:
    if _place(claim.model.path) in places and _is_square(claim.model):
        if not isinstance(claim.recipe, Transpose):
            return replace(claim, tier="open", others=(*claim.others, _TURNED))
    if claim.tier == "certain":
        shifted = _is_shifted(claim, missing, spare)
        return replace(claim, tier="likely", others=(_SHIFTED,)) if shifted else claim
    return replace(claim, others=(*claim.others, *_unseen(claim)))


def _unseen(claim: Claim) -> Iterator[str]:
    words = set(plain(claim.model.path))
    if words & {"q", "k", "qk", "qkv"}:
        yield _ROTARY
    if any(isinstance(node, Concat | Chunk | Slice | Interleave) for node in nodes(claim.recipe)):
        yield _IN_TURN


def _place(path: Path) -> Path:
    """Return the part of a name up to its first index: the list of layers it is in."""
    return path[: path.index(SLOT)] if SLOT in path else ()


def _is_square(kin: Kin) -> bool:
    shapes = {of.shape for of in kin.types.values()}
    return all(s is not None and len(s) == 2 and s[0] == s[1] for s in shapes)


def _is_shifted(claim: Claim, missing: list[Kin], spare: list[Left]) -> bool:
    """Tell whether one that differs in a number only is left over on each side."""
    mine = numberless(claim.model.path)
    if "#" not in "".join(mine):
        return False
    return any(numberless(kin.path) == mine and fits(claim.model, kin) for kin in missing) and any(
        numberless(left.kin.path) == mine and fits(left.kin, claim.model) for left in spare
    )
