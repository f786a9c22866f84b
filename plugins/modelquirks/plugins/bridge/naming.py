"""Naming: stored names under the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from modelquirks.planner.mapping.logical import slots
from modelquirks.plugins.bridge.families import Outcome, by_family, digits_in
from modelquirks.plugins.bridge.internals import Rules, found, guards, renamed
from modelquirks.quirks.family import show
from modelquirks.quirks.library import Named
from modelquirks.quirks.resolve import Renamed, Step

__all__ = ["Naming", "Place"]

Place = Literal["as it is", "stripped", "added"]
"""How the prefix of the base model changes, for the name to be one of the model."""

Index = tuple[int, ...]


class _Decision(NamedTuple):
    """What becomes of some members: a new template, or None if the library does not know them."""

    template: str | None
    members: tuple[Index, ...]


@dataclass(frozen=True)
class Naming:
    """The naming rules of one model."""

    rules: Rules
    known: Collection[str]
    """Names of the model, as it knows them itself."""
    base_prefix: str
    """``base_model_prefix`` of its class: ``model`` for most, may be empty."""

    def placed(self, name: str) -> tuple[str, Place] | None:
        """Return the name in the model that *name* stands for, and what that took.

        As in ``rename_source_key`` of transformers: a head model takes the names of its base
        model, and the other way round.
        """
        if name in self.known:
            return name, "as it is"
        prefix = f"{self.base_prefix}."
        if not self.base_prefix:
            return None
        if name.startswith(prefix) and name[len(prefix) :] in self.known:
            return name[len(prefix) :], "stripped"
        return (prefix + name, "added") if prefix + name in self.known else None

    def named(self, pieces: Sequence[Renamed], weights: Mapping[str, str]) -> Named:
        """Return *pieces* by the names that transformers gives them, see ``LibraryRules``."""
        guards(self.rules, (name for piece in pieces for name, _ in piece.items()))
        taken: list[Renamed] = []
        left: list[Renamed] = []
        for piece in pieces:
            for name, part in self._parted(piece, piece.name):
                if name is not None:
                    taken.append(_stepped(part, name))
                elif (weight := weights.get(piece.name)) is None:
                    left.append(part)
                else:
                    for new, some in self._parted(part, weight):
                        own = new and companion(piece.name, weight, new)
                        (left if own is None else taken).append(_stepped(some, own or piece.name))
        return Named(tuple(taken), tuple(left))

    def _parted(self, piece: Renamed, name: str) -> Iterator[tuple[str | None, Renamed]]:
        """Yield the parts of *piece* with what becomes of *name*; None: it is not known."""
        for new, members in self._decided(name, piece.indices()):
            whole = len(members) == len(piece.indices())
            yield new, piece if whole else replace(piece, members=members)

    def _decided(self, template: str, members: Sequence[Index]) -> list[_Decision]:
        """Return the new names of a family, those that a converter takes as they are before it."""

        def apply(name: str) -> tuple[tuple[str, str], bool]:
            short = renamed(self.rules, name)
            target, converter = found(self.rules, short)
            return (short, target), converter is not None

        decisions: dict[tuple[str | None, Index], list[Index]] = {}
        for outcome in by_family(template, members, apply, self.literals):
            kept = slots(outcome.templates[0])
            lost = [slot for slot in slots(template) if slot not in kept]
            for member in outcome.members:
                new = self._decide(template, outcome, member)
                # Members that would bear one name are told apart: the account must see both.
                apart = tuple([member[slot] for slot in lost]) if new is not None else ()
                decisions.setdefault((new, apart), []).append(member)
        return [_Decision(name, tuple(listed)) for (name, _), listed in decisions.items()]

    @cached_property
    def literals(self) -> frozenset[str]:
        """Every number that a rule has written."""
        return digits_in(self.rules.texts)

    def _decide(self, template: str, outcome: Outcome[bool], member: Index) -> str | None:
        short, target = outcome.templates
        if (place := self.placed(target.format(*member))) is not None:
            # What a converter takes keeps its name: the target is the converter's business.
            return self._changed(short, "as it is" if outcome.tag else place[1])
        if (place := self.placed(template.format(*member))) is not None:
            return self._changed(template, place[1])
        return None

    def _changed(self, template: str, place: Place) -> str:
        prefix = f"{self.base_prefix}."
        match place:
            case "as it is":
                return template
            case "stripped":
                return template[len(prefix) :]
            case "added":
                return prefix + template


def companion(name: str, weight: str, new_weight: str) -> str:
    """Return the new name of a companion, from the old and the new name of its weight.

    >>> companion("h.{0}.proj.qweight", "h.{0}.proj.weight", "layers.{0}.proj.weight")
    'layers.{0}.proj.qweight'
    >>> companion("h.{0}.up_blocks", "h.{0}.up", "layers.{0}.up")
    'layers.{0}.up_blocks'
    """
    if name.startswith(weight):
        return new_weight + name[len(weight) :]
    module, _, leaf = weight.rpartition(".")
    new_module, _, new_leaf = new_weight.rpartition(".")
    if name.startswith(f"{module}.") and leaf == new_leaf:
        return f"{new_module}.{name[len(module) + 1 :]}"
    return name


def _stepped(piece: Renamed, name: str) -> Renamed:
    if name == piece.name:
        return piece
    step = Step("transformers", f"{show(piece.name)} → {show(name)}")
    return replace(piece, name=name, steps=(*piece.steps, step))
