"""Sharing: one tensor for all names of a tie, whichever copy is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.mapping.judge import Judged, Verdict
from modelquirks.planner.mapping.ties import USER, TieGroup
from modelquirks.planner.model.skeleton import Skeleton

__all__ = ["Sharing", "share"]


@dataclass(frozen=True)
class Sharing:
    """Which names share a tensor."""

    aliases: Mapping[str, str]
    """Name → the name whose tensor it shares, which is no alias itself."""
    verdicts: Mapping[str, Verdict]
    """The class of each alias."""
    compare: tuple[tuple[str, ...], ...]
    """Groups of which several copies are stored."""
    findings: tuple[Finding, ...]

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names that share one tensor, its owner first."""
        groups: dict[str, list[str]] = {}
        for alias, owner in self.aliases.items():
            groups.setdefault(owner, [owner]).append(alias)
        return tuple(tuple(names) for names in groups.values())


def share(
    ties: Iterable[TieGroup],
    skeleton: Skeleton,
    judged: Mapping[str, Judged],
    manifest: Manifest,
) -> Sharing:
    """Return who shares whose tensor, given what the checkpoint offers for each name."""
    sharing = _Sharing(skeleton, judged, manifest)
    for tie in ties:
        sharing.enter(tie)
    return Sharing(
        aliases={alias: sharing.root(alias) for alias in sharing.aliases},
        verdicts=sharing.verdicts,
        compare=tuple(sharing.compare),
        findings=tuple(sharing.findings),
    )


@dataclass
class _Sharing:
    """What is known after the ties that were entered."""

    skeleton: Skeleton
    judged: Mapping[str, Judged]
    manifest: Manifest
    aliases: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    compare: list[tuple[str, ...]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def enter(self, tie: TieGroup) -> None:
        """Let one stored copy serve all names of *tie* that have none."""
        names = [name for name in tie.names if name in self.skeleton.wanted]
        owners = list(dict.fromkeys(self.root(name) for name in names if self._arrives(name)))
        if len(names) < 2 or not owners:
            return
        if tie.quirk == USER and (other := self._other_shape(names)) is not None:
            self._shapes_differ(other, names[0])
            return
        if len(owners) > 1 and not tie.only_fills:
            self._several(owners)
        for name in names:
            if name not in self.judged and not self._arrives(name):
                self._fill(name, self.root(owners[0]), tie.quirk)

    def root(self, name: str) -> str:
        """Return the name whose tensor *name* has."""
        while name in self.aliases:
            name = self.aliases[name]
        return name

    def _arrives(self, name: str) -> bool:
        if name in self.aliases:
            return True
        return name in self.judged and self.judged[name].fit.node is not None

    def _fill(self, name: str, owner: str, quirk: str) -> None:
        if self._other_shape([owner, name]) is None:
            self.aliases[name] = owner
            self.verdicts[name] = Verdict("tied", f"shares the tensor of {owner!r}", "", quirk)
            return
        self._shapes_differ(name, owner)

    def _other_shape(self, names: Sequence[str]) -> str | None:
        """Return a name whose tensor has not the shape of the first."""
        wanted = self.skeleton.wanted
        return next((n for n in names if wanted[n].shape != wanted[names[0]].shape), None)

    def _shapes_differ(self, name: str, owner: str) -> None:
        wanted, given = self.skeleton.wanted[name].shape, self.skeleton.wanted[owner].shape
        text = (
            f"{name!r} {list(wanted)} cannot be tied to {owner!r} {list(given)}: "
            "their shapes differ"
        )
        self.findings.append(Finding("tie-shapes-differ", "error", text))

    def _several(self, owners: Sequence[str]) -> None:
        """Deal with a tie of which more than one copy is stored."""
        places = {self._place(name) for name in owners}
        if len(places) == 1 and None not in places:  # views of one storage
            first, *others = owners
            for name in others:
                self.aliases[name] = first
                self.verdicts[name] = Verdict("tied", f"stored as the tensor of {first!r}")
            return
        self.compare.append(tuple(owners))
        text = (
            f"{shown(owners)} are tied in the model and each stored: equal copies are "
            "tied again on loading, different ones are both kept"
        )
        self.findings.append(Finding("tie-stored-twice", "info", text))

    def _place(self, name: str) -> object:
        """Return where the bytes of *name* lie; None if it is made, or nobody knows."""
        judged = self.judged[name]
        tensor = self.manifest.tensors[judged.reads[0]]
        if judged.verdict.kind == "made" or tensor.begin is None:
            return None
        return tensor.shard, tensor.begin, tensor.end, tensor.shape, tensor.stride
