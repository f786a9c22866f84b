"""Wrapping: which name of a PEFT model is which of its base, and which of the adapter.

A PEFT model has its base as ``base_model.model`` (prompt learning: as ``base_model``), puts an
adapted layer into ``base_layer``, and beside a module that is retrained keeps the first one as
``original_module``. Models of transformers that an adapter was put into (``add_adapter``) have the
same without the prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from modelquirks.planner.adapter.beside import marked
from modelquirks.planner.adapter.changes import Read, is_adapters, read_name
from modelquirks.planner.adapter.config import PROMPTS
from modelquirks.planner.mapping.logical import Logical
from modelquirks.planner.mapping.offers import Offers
from modelquirks.planner.mapping.packs import Broken, Packed
from modelquirks.quirks.family import group, template_of
from modelquirks.quirks.recipe import Source

__all__ = ["Wrapped", "has_adapter", "wrapped_names"]

_PROMPT = "prompt_embeddings"


@dataclass
class Wrapped:
    """The names of a PEFT model, by what they are."""

    base: dict[str, str] = field(default_factory=dict)
    """Name in the base model → name in the PEFT model."""
    own: dict[str, str] = field(default_factory=dict)
    """Name in the adapter's file → name in the PEFT model."""
    adapters: set[str] = field(default_factory=set)
    """The names of its adapters."""

    def offers(self, offers: Offers, wanted: Collection[str]) -> Offers:
        """Return *offers* for a base, made for its names, under those of the PEFT model."""
        replaced = {
            stored: "the adapter has a weight of its own in its place"
            for stored, name in offers.called.items()
            if name not in self.base and name in self._served
        }
        return replace(
            offers,
            wanted=wanted,
            direct=(*self._pieces(offers.direct), *self._of_adapter()),
            packed=tuple(q for pack in offers.packed for q in self._packed(pack)),
            made=tuple(self._pieces(offers.made)),
            unreadable=frozenset(self.base.get(name, name) for name in offers.unreadable),
            broken={b.name: b for b in map(self._broken, offers.broken.values())},
            replaced=replaced,
        )

    @property
    def _served(self) -> Collection[str]:
        """Names of the base that the adapter's own tensors serve."""
        reads = map(read_name, self.own)
        return {f"{read.module}.{read.role}" for read in reads if read.kind == "whole"}

    def _packed(self, pack: Packed) -> Iterator[Packed]:
        for weight in self._all(pack.weight):
            members = [replace(part, members=weight.members) for part in pack.parts]
            yield replace(pack, weight=weight, parts=tuple(self._pieces(members)))

    def _broken(self, broken: Broken) -> Broken:
        return broken._replace(name=self.base.get(broken.name, broken.name))

    def _pieces(self, pieces: Sequence[Logical]) -> Iterator[Logical]:
        for piece in pieces:
            yield from self._all(piece)

    def _all(self, piece: Logical) -> Iterator[Logical]:
        """Yield the members of *piece* under their names in the PEFT model, by template."""
        alike: dict[str, list[tuple[int, ...]]] = {}
        for name, member in piece.items():
            new = self.base.get(name, name)
            template = piece.name if new == name else _inserted(piece.name, name, new)
            alike.setdefault(template, []).append(member)
        for template, members in alike.items():
            yield replace(piece, name=template, members=tuple(members))

    def _of_adapter(self) -> Iterator[Logical]:
        """Yield the adapter's tensors under their names in the PEFT model."""
        for family in group(self.own).values():
            alike: dict[str, list[tuple[int, ...]]] = {}
            for name, member in zip(family.names, family.members, strict=True):
                alike.setdefault(template_of(self.own[name]), []).append(member)
            for template, members in alike.items():
                node = Source(marked(family.template))
                yield Logical(template, node, tuple(members), "the adapter's")


def has_adapter(names: Collection[str]) -> bool:
    """Tell whether *names*, of a model, are those of one that has places for an adapter."""
    return any(
        ".modules_to_save." in name or name.startswith("prompt_encoder.") or is_adapters(name)
        for name in names
    )


def wrapped_names(wanted: Collection[str], stored: Collection[str], kind: str) -> Wrapped:
    """Return what each name that a PEFT model wants is; *stored* are the adapter's own."""
    found = Wrapped()
    by_key = {_key(read_name(name)): name for name in stored}
    for name in wanted:
        if kind in PROMPTS:
            _of_prompt(name, found)
            continue
        read = read_name(name)
        if read.adapter or ".modules_to_save." in name:
            found.adapters.add(read.adapter or name.partition(".modules_to_save.")[2].split(".")[0])
        if (own := by_key.get(_key(read))) is not None:
            found.own[own] = name
        elif read.kind in ("whole", "former") and ".modules_to_save." not in name:
            found.base[f"{read.module}.{read.role}" if read.module else read.role] = name
    return found


def _of_prompt(name: str, found: Wrapped) -> None:
    """Enter a name of a model with virtual tokens."""
    if name.startswith("prompt_encoder."):
        found.adapters.add(name.split(".")[1])
        found.own[_PROMPT] = name
    elif name.startswith("base_model."):
        found.base[name.removeprefix("base_model.")] = name


def _key(read: Read) -> tuple[str, str, str, int]:
    """Return what a name in the file and the one in the model have in common."""
    depth = 0 if read.kind == "whole" else read.depth
    return read.module, read.kind, read.role.split(".")[0], depth


def _inserted(template: str, old: str, new: str) -> str:
    """Return *template*, of which *old* is a name, with the segments that *new* has beside.

    >>> _inserted("h.{0}.q.weight", "h.3.q.weight", "m.h.3.q.base_layer.weight")
    'm.h.{0}.q.base_layer.weight'
    """
    texts = iter(zip(template.split("."), old.split("."), strict=True))
    made: list[str] = []
    text, segment = next(texts)
    for one in new.split("."):
        if one == segment:
            made.append(text)
            text, segment = next(texts, ("", ""))
        else:
            made.append(one.replace("{", "{{").replace("}", "}}"))
    return ".".join(made)
