"""``Claim``: what is proposed for one family of the model, how sure it is, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from modelquirks.planner.infer.kin import SLOT, Index, Kin, Path
from modelquirks.quirks.recipe import Node, Select, Source, Stack, mapped

if TYPE_CHECKING:
    from modelquirks.planner.infer.pool import Left

__all__ = ["STACKED", "Claim", "Tier", "least", "pattern_of", "source_of"]

Tier = Literal["certain", "likely", "open"]
"""``certain``: nothing else can be meant, as far as names and shapes go. ``likely``: the best
reading, and another is possible. ``open``: two readings are as good."""

_TIERS: tuple[Tier, ...] = ("certain", "likely", "open")

STACKED = "e"
"""The variable that is stacked over, or selected from a stack."""


@dataclass(frozen=True)
class Claim:
    """How the members of a family of the model are made."""

    model: Kin
    recipe: Node
    """Over patterns of stored names: ``{i0}``, ``{i1}``… are the indices of ``model``."""
    tier: Tier
    why: str
    others: tuple[str, ...] = ()
    """Other readings, for people; the first ones are the nearest."""
    sources: tuple[Kin, ...] = ()
    left: Left | None = None
    """What was renamed, if that is all."""
    kin: Kin | None = None
    """The family of the model that it was taken for; ``model`` has those members that both have."""

    @property
    def target(self) -> str:
        """The pattern of the model's names."""
        return pattern_of(self.model)

    def items(self) -> Iterator[tuple[str, Node]]:
        """Yield each name of the model with its recipe over names of the checkpoint."""
        for index in self.model.types:
            if self.model.over is None:
                yield self.model.name(index), _filled(self.recipe, index)
                continue
            for element in range(self.model.count):
                chosen = mapped(
                    self.recipe,
                    lambda n, e=element: replace(n, index=str(e)) if isinstance(n, Select) else n,
                )
                yield self.model.name(index, str(element)), _filled(chosen, index)


def least(*tiers: Tier) -> Tier:
    """Return the least sure of some tiers."""
    return max(tiers, key=_TIERS.index)


def pattern_of(kin: Kin) -> str:
    """Return the pattern of the names of *kin*.

    >>> from modelquirks.quirks.recipe import TensorType
    >>> pattern_of(Kin(("h", "*", "w"), {(0,): TensorType(None, None)}))
    'h.{i0}.w'
    """
    return _pattern(kin.full, kin.over)


def _pattern(path: Path, over: int | None) -> str:
    texts: list[str] = []
    n = 0
    for at, segment in enumerate(path):
        if at == over:
            texts.append(f"{{{STACKED}}}")
        elif segment == SLOT:
            texts.append(f"{{i{n}}}")
            n += 1
        else:
            texts.append(segment)
    return ".".join(texts)


def source_of(kin: Kin) -> Node:
    """Return the recipe for *kin* as it is, stacked if it is so."""
    leaf = Source(pattern_of(kin))
    return leaf if kin.over is None else Stack(leaf, STACKED, None)


def _filled(node: Node, index: Index) -> Node:
    def fill(of: Node) -> Node:
        if not isinstance(of, Source):
            return of
        name = of.name
        for at, value in enumerate(index):
            name = name.replace(f"{{i{at}}}", str(value))
        return Source(name)

    return mapped(node, fill)
