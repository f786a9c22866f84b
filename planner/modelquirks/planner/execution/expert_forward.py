"""``index_experts``: have the experts of transformers' models computed by what only indexes them.

transformers 5.24 has several implementations of experts (``integrations/moe.py``): ``eager``, the
``forward`` in each model's own file, takes the matrices of one expert after the other;
``batched_mm`` those of all chosen ones, one for each token and expert; ``grouped_mm``, the default,
and the others compute with the whole stacked parameter. Their public way to choose is
``set_experts_implementation`` of the model, which is all that is used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from modelquirks.planner.finding import Finding, shown

__all__ = ["index_experts"]

_INDEXING = frozenset({"eager", "batched_mm"})
"""Implementations that take single experts of the stacked parameter."""

_Implementations = Mapping[str, str | None]
"""As ``get_experts_implementation`` gives them: ``""`` for the model, and by part of its config."""


def index_experts(model: nn.Module, names: Iterable[str]) -> tuple[Finding, ...]:
    """Switch what computes with the experts *names* to ``eager``; return notes that say so.

    Models without such a choice are left alone, as are those that index already.
    """
    names = list(names)
    return tuple(
        note
        for path, owner in _owners(model)
        if any(name.startswith(path) for name in names)
        for note in _switch(owner)
    )


def _owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost modules that have a choice, with the prefix of their names."""
    above: list[str] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if any(prefix.startswith(known) for known in above):
            continue
        if all(callable(getattr(module, f"{do}_experts_implementation", None)) for do in _CHOICE):
            above.append(prefix)
            yield prefix, module


_CHOICE = ("get", "set")


def _switch(owner: Any) -> Iterator[Finding]:
    before: _Implementations = owner.get_experts_implementation()
    wanted = {part: kind if kind in _INDEXING else "eager" for part, kind in before.items()}
    if wanted == before:
        return
    was = shown(dict.fromkeys(str(kind) for kind in before.values() if kind not in _INDEXING))
    undo = f"model.set_experts_implementation({dict(before)!r})"
    try:
        owner.set_experts_implementation(wanted)
        after: _Implementations = owner.get_experts_implementation()
    except (RuntimeError, ValueError, ImportError) as error:
        yield Finding(
            "experts-whole",
            "warning",
            f"the experts are offloaded and computed by {was}, which needs all of them for every "
            f"token, and cannot be computed by 'eager': {error}",
        )
        return
    if after == before:
        yield Finding(
            "experts-whole",
            "warning",
            f"the experts are offloaded and computed by {was}, which needs all of them for every "
            "token; the model does not let them be computed by 'eager'",
        )
        return
    yield Finding(
        "experts-eager",
        "info",
        f"the experts are offloaded, so they are computed by 'eager', which brings those that are "
        f"routed to, instead of by {was}, which needs all of them; results may differ in the last "
        f"bits. {undo} takes it back; expert_offload=False leaves all as it was",
    )
