"""Ties: which names of the model share one tensor, and which stored copy serves them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from modelquirks.planner.finding import Finding
from modelquirks.planner.mapping.templates import fitting
from modelquirks.planner.model.skeleton import Skeleton
from modelquirks.planner.names import module_word
from modelquirks.quirks.family import show
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.record import Tie
from modelquirks.quirks.resolve import Resolution

__all__ = ["USER", "TieGroup", "flag", "tie_groups", "tie_note"]

USER = "user"
"""Who says so, if it is no record."""

_HEADS = frozenset({"embed_out", "lm_head", "output", "output_layer", "unembedding"})
"""Modules that turn hidden states into token scores, by the last segment of their name."""
_EMBEDDINGS = frozenset(
    {"embed_in", "embed_tokens", "embedding", "shared", "tok_embeddings", "word_embeddings", "wte"}
)


@dataclass(frozen=True, slots=True)
class TieGroup:
    """Names of the model that stand for one tensor, the preferred owner first."""

    names: tuple[str, ...]
    quirk: str = ""
    """Record that says so, or :data:`USER`; empty if the model itself does."""
    only_fills: bool = False
    """The model keeps separate tensors: a stored copy serves those names that have none."""


def tie_groups(
    skeleton: Skeleton,
    resolution: Resolution,
    config: Mapping[str, object],
    extra: Sequence[tuple[str, ...]] = (),
) -> list[TieGroup]:
    """Return the groups that the user, the model and the applied records declare."""
    groups = [TieGroup(names, USER) for names in extra]
    groups += [TieGroup(names) for names in skeleton.ties]
    for record in resolution.records():
        for tie in record.ties:
            for names in _instances(tie, skeleton):
                if tie.when is None or flag(config, tie.when) is True:
                    groups.append(TieGroup(names, record.name, only_fills=True))
    return groups


def flag(config: Mapping[str, object], name: str) -> bool | None:
    """Return a boolean of config.json, or of its text part if the whole is silent.

    >>> flag({"text_config": {"tie_word_embeddings": True}}, "tie_word_embeddings")
    True
    """
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(value := part.get(name), bool):
            return value
    return None


def _instances(tie: Tie, skeleton: Skeleton) -> Iterator[tuple[str, ...]]:
    """Yield the groups of names of the model that fit the patterns of *tie*."""
    first, *others = (Pattern(name) for name in tie.names)
    fits = {*fitting(first, skeleton.families)}
    for name in filter(fits.__contains__, skeleton.wanted if fits else ()):
        binding = first.match(name)
        assert binding is not None
        partners = [other.fill(binding) for other in others]
        present = [partner for partner in partners if partner in skeleton.wanted]
        if present:
            yield (name, *present)


def tie_note(config: Mapping[str, object], templates: Collection[str]) -> Finding | None:
    """Say whether the output head is tied to the embedding, as far as names and config tell.

    For a checkpoint without a model; None if it has no token embedding. *templates* are the
    logical names by family.
    """
    heads = sorted((t for t in templates if _module(t) in _HEADS), key=lambda t: "weight" not in t)
    if not any(_module(t) in _EMBEDDINGS for t in templates):
        return None
    tied = flag(config, "tie_word_embeddings")
    said = {True: "config.json ties it", False: "config.json says untied", None: "config.json is "
            "silent"}[tied]  # fmt: skip
    if heads:
        stored = f"the output head is stored as {show(heads[0])!r} and {said}"
        if tied:
            text = f"{stored}: two copies, which may differ and are compared on loading"
            return Finding("tied-and-stored", "info", text)
        return Finding("head-untied" if tied is False else "head-stored", "info", stored)
    if tied is False:
        text = "no output head is stored, and config.json says that it is not tied to the embedding"
        return Finding("head-absent", "info", text)
    text = f"no output head is stored ({said}): the embedding serves, if the model has a head"
    return Finding("head-tied", "info", text)


def _module(template: str) -> str:
    """Return the module of an unindexed tensor, or nothing."""
    return "" if "{" in template else module_word(template)
