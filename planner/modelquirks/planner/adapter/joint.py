"""``Joint``: an adapter and its base in one plan, the one merged into the other or beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from modelquirks.planner.adapter.adapter import Adapter
from modelquirks.planner.adapter.base import Base, Shape
from modelquirks.planner.adapter.beside import beside
from modelquirks.planner.adapter.binding import Bounds, bind
from modelquirks.planner.adapter.changes import read_name
from modelquirks.planner.adapter.checks import about, checked, mergeable
from modelquirks.planner.adapter.merging import merged, word_for
from modelquirks.planner.adapter.wrapping import Wrapped, has_adapter, wrapped_names
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.offers import Offers
from modelquirks.planner.mapping.ties import TieGroup
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.quirks.family import group, show
from modelquirks.quirks.record import Alias

__all__ = ["AdapterFacts", "Changed", "Joint"]


class Changed(NamedTuple):
    """Weights of one family that an adapter changes alike."""

    family: str
    weights: int
    change: str


class AdapterFacts(NamedTuple):
    """The adapter that a plan is made with."""

    path: str
    method: str
    """``LoRA``, ``DoRA``, ``IA3``…"""
    base: str
    """The base that it says it is for; empty if it says nothing."""
    revision: str
    merged: bool
    tensors: int
    changes: tuple[Changed, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        return {**self._asdict(), "changes": [change._asdict() for change in self.changes]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> AdapterFacts | None:
        """Return what :meth:`to_json` wrote; None for None."""
        if data is None:
            return None
        changes = tuple(Changed(**change) for change in data["changes"])
        return cls(**{name: value for name, value in data.items() if name != "changes"})._replace(
            changes=changes
        )


@dataclass(frozen=True)
class Joint:
    """How an adapter is planned together with a base."""

    adapter: Adapter
    base: Manifest
    skeleton: Skeleton | None
    merge: bool
    aliases: Sequence[Alias] = ()
    _bounds: list[Bounds] = field(default_factory=list)

    @cached_property
    def manifest(self) -> Manifest:
        """Both as one checkpoint."""
        return beside(self.base, self.adapter.manifest)

    @cached_property
    def wrapped(self) -> Wrapped | None:
        """The names of the PEFT model that takes the adapter beside its base; None: it is none."""
        if self.merge or self.skeleton is None or not has_adapter(self.skeleton.wanted):
            return None
        kind = self.adapter.config.kind
        return wrapped_names(self.skeleton.wanted, self.adapter.manifest.tensors, kind)

    def inner(self, model: Any) -> Any:
        """Return the model whose library has rules for the base."""
        unwrapped = getattr(model, "get_base_model", None)
        return unwrapped() if self.wrapped is not None and callable(unwrapped) else model

    @property
    def wanted(self) -> Mapping[str, Any]:
        """What a base has to provide, by the base's names."""
        if self.skeleton is None:
            return {}
        if self.wrapped is None:
            return self.skeleton.wanted
        return {base: self.skeleton.wanted[name] for base, name in self.wrapped.base.items()}

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the model that are the adapter's own."""
        return frozenset() if self.wrapped is None else frozenset(self.wrapped.own.values())

    def offers(self, offers: Offers) -> Offers:
        """Return what base and adapter offer together, under the names of the model."""
        self._bounds[:] = [bind(self.adapter, self._base_of(offers))]
        if self.wrapped is not None and self.skeleton is not None:
            return self.wrapped.offers(offers, self.skeleton.wanted)
        if not self.merge or [*mergeable(self.adapter)]:
            return offers
        return merged(offers, self._bounds[0])

    def ties(self, groups: Sequence[TieGroup]) -> list[TieGroup]:
        """Return *groups* without those of which the adapter retrained some names only.

        A group that the model itself has stays: :meth:`findings` tells of it.
        """
        return [tie for tie in groups if not (tie.only_fills and self._torn(tie))]

    def findings(self, ties: Sequence[TieGroup], offers: Offers) -> Iterator[Finding]:
        """Yield everything that is odd about the two together."""
        yield from about(self.adapter, self.base.path.name or str(self.base.path))
        if any(finding.code == "adapter" for finding in self.base.findings):
            text = (
                f"adapter against base: {str(self.base.path)!r}, given as the checkpoint, is an "
                "adapter itself; give the base model there, and one adapter with --adapter"
            )
            yield Finding("adapter-as-base", "error", text)
        if self.merge:
            yield from mergeable(self.adapter)
        yield from self._about_model()
        yield from checked(self.adapter, self._base_of(offers, own=True), self._found)
        yield from self._about_ties(ties)

    @property
    def facts(self) -> AdapterFacts:
        """What the report tells."""
        config = self.adapter.config
        words: dict[str, str] = {}
        for name, bounds in self._found.by_name().items():
            words[name] = "; ".join(map(word_for, bounds)) if self.merge else config.kind
        alike: dict[tuple[str, str], int] = {}
        for template, family in group(words).items():
            for name in family.names:
                key = (show(template), words[name])
                alike[key] = alike.get(key, 0) + 1
        return AdapterFacts(
            path=str(self.adapter.path),
            method=self.adapter.name,
            base=config.base,
            revision=config.revision,
            merged=self.merge,
            tensors=len(self.adapter.manifest.tensors),
            changes=tuple(Changed(family, n, word) for (family, word), n in alike.items()),
        )

    @property
    def _retrained(self) -> frozenset[str]:
        """The weights of which the adapter has a copy of its own; others are loaded into one."""
        wholes = (one for one in self._found.bound if one.scheme == "whole")
        is_copy = self.adapter.config.is_retrained
        return frozenset(one.name for one in wholes if is_copy(one.name))

    @property
    def _found(self) -> Bounds:
        return self._bounds[0] if self._bounds else Bounds()

    def _base_of(self, offers: Offers, *, own: bool = False) -> Base:
        """Return the base as adapters see it; *own*: in names only, its shapes are known before."""
        called = {} if own and self.wrapped is not None else offers.called
        if self.skeleton is not None:
            return Base(self._shapes, called, self.aliases, self.skeleton.turned)
        stored = {name: self.base.tensors[stored].shape for stored, name in called.items()}
        others = [n for p in (*(p.weight for p in offers.packed), *offers.made) for n in p.names]
        return Base({**dict.fromkeys(others), **stored}, called, self.aliases)

    @cached_property
    def _shapes(self) -> Mapping[str, Shape]:
        """The shapes of the base's tensors in the model, and of what the adapter has whole."""
        found: dict[str, Shape] = {name: tensor.shape for name, tensor in self.wanted.items()}
        if self.wrapped is not None and self.skeleton is not None:
            for stored, name in self.wrapped.own.items():
                read = read_name(stored)
                if read.kind == "whole":
                    found[f"{read.module}.{read.role}"] = self.skeleton.wanted[name].shape
        return found

    def _about_model(self) -> Iterator[Finding]:
        """Yield what is said of a model that has no place for the adapter, or several."""
        if self.skeleton is None:
            return
        has = has_adapter(self.skeleton.wanted)
        if self.merge and has:
            text = (
                "the model has places for an adapter of its own, so nothing is to be merged: leave "
                "out --merge, or give the plain base model"
            )
            yield Finding("adapter-model", "error", text)
        elif not self.merge and not has:
            text = (
                "the model has no place for an adapter: merge it with --merge (in Python: "
                "merge_adapter=True), or give a PEFT model (get_peft_model)"
            )
            yield Finding("adapter-model", "error", text)
        if self.wrapped is None:
            return
        if len(self.wrapped.adapters) > 1:
            text = (
                f"the model has several adapters, {shown(sorted(self.wrapped.adapters))}, and one "
                "is to be loaded: build it with that one only"
            )
            yield Finding("adapter-several", "error", text)
        idle = [name for name in self.adapter.manifest.tensors if name not in self.wrapped.own]
        if idle:
            text = f"the PEFT model has no place for these tensors of the adapter: {shown(idle)}"
            yield Finding("adapter-unused", "error", text)

    def _about_ties(self, ties: Sequence[TieGroup]) -> Iterator[Finding]:
        """Yield the weights that were retrained by themselves and that the model ties to others."""
        for tie in ties:
            if tie.only_fills or not (left := self._torn(tie)):
                continue
            alone = [name for name in tie.names if name not in left]
            text = (
                f"{shown(alone)} was retrained by itself, and the model has it as one tensor with "
                f"{shown(left)}, which PEFT leaves as in the base. Build the model with "
                f"tie_word_embeddings=False and give --alias '{alone[0]}={left[0]}', or have the "
                "adapter saved with ensure_weight_tying"
            )
            yield Finding("adapter-tie", "error", text)

    def _torn(self, tie: TieGroup) -> list[str]:
        """Return the names of *tie* that stay the base's while others are retrained."""
        if not self.merge or self._retrained.isdisjoint(tie.names):
            return []
        whole = {one.name for one in self._found.bound if one.scheme == "whole"}
        return [name for name in tie.names if name not in whole]
