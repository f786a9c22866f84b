"""The rules of transformers for one model, as the planner asks for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from modelquirks.planner.mapping.logical import slots
from modelquirks.plugins.bridge.computed import computable, computed
from modelquirks.plugins.bridge.converting import Converting
from modelquirks.plugins.bridge.internals import TESTED, rules_of, version
from modelquirks.plugins.bridge.naming import Naming
from modelquirks.quirks.library import Named
from modelquirks.quirks.recipe import TensorType
from modelquirks.quirks.record import Convert, Match, ModelQuirks, Parallel
from modelquirks.quirks.resolve import Renamed

__all__ = ["NAME", "URL", "TransformersRules"]

NAME = "transformers"
URL = (
    "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/"
    "conversion_mapping.py"
)


@dataclass
class TransformersRules:
    """What transformers knows of the checkpoints of *model*."""

    model: Any
    known: Collection[str]
    _stored: dict[str, str] = field(default_factory=dict)
    """Template in the model → as it is stored: for what people read."""

    @cached_property
    def record(self) -> ModelQuirks:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        return ModelQuirks(
            name=NAME,
            role="architecture",
            match=Match(architectures=(type(self.model).__name__,)),
            parallel=tuple(_parallel(self.model)),
            why=f"transformers {version()} converts checkpoints of {type(self.model).__name__}",
            url=URL,
        )

    @cached_property
    def problems(self) -> list[str]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        found = version()
        if found == TESTED or found.startswith(f"{TESTED}."):
            return []
        return [
            f"transformers {found} is installed; its conversion tables are read by a bridge that "
            f"was tested with {TESTED}"
        ]

    def named(self, pieces: Sequence[Renamed], weights: Mapping[str, str]) -> Named:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        named = self._naming.named(pieces, weights)
        for piece in named.taken:
            if slots(piece.name) == [*range(piece.family.n_slots)]:
                self._stored[piece.name] = piece.family.template
        return named

    def conversions(self, offered: Mapping[str, TensorType]) -> Sequence[Convert]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        converting = Converting(self.model, self._naming, offered, self._stored)
        found = tuple(converting.conversions())
        self.problems.extend(converting.problems)
        return found

    def extra(self, names: Iterable[str]) -> Mapping[str, str]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        return _expected(names, _ignored_extra(self.model), "transformers ignores it")

    def absent(self, names: Iterable[str]) -> Mapping[str, str]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        why = "transformers computes it, or ties it, when it is missing"
        return _expected(names, self.model._keys_to_ignore_on_load_missing or (), why)

    def computed(self, names: Collection[str]) -> Mapping[str, Any]:
        """See :class:`~modelquirks.quirks.library.LibraryRules`."""
        wanted = frozenset(names)
        return computed(self.model, [n for n in computable(self.model) if n in wanted])

    @cached_property
    def _naming(self) -> Naming:
        prefix = str(self.model.base_model_prefix or "")
        return Naming(rules_of(self.model), self.known, prefix)


def _ignored_extra(model: Any) -> list[str]:
    """Return the patterns of ignored names, as ``_adjust_missing_and_unexpected_keys`` has them."""
    patterns: list[str] = list(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return patterns


def _expected(names: Iterable[str], patterns: Iterable[str], why: str) -> dict[str, str]:
    """Return the reason for each of *names* in which a pattern is found."""
    listed = sorted(patterns)
    if not listed:
        return {}
    compiled = [(re.compile(pattern), pattern) for pattern in listed]
    found = ((name, [text for regex, text in compiled if regex.search(name)]) for name in names)
    return {name: f"{why} ({texts[0]!r})" for name, texts in found if texts}


def _parallel(model: Any) -> Iterator[Parallel]:
    """Yield how the modules of *model* are cut for tensor parallelism."""
    plan = getattr(model, "_tp_plan", None) or {}
    for pattern, style in sorted(dict(plan).items()):
        yield Parallel(pattern, str(style))
