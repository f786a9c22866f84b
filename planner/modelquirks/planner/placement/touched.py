"""Touched bytes: what one step reads of a tensor, and what it moves of an offloaded one.

Most tensors are read whole for every token. Two kinds are not: experts, of which each token takes
k of N, and the table of an embedding, of which it takes a row. Moving is another matter: accelerate
1.15 (``AlignDevicesHook.pre_forward``) moves all tensors of a module when the module runs, so a
table is moved whole. Experts with a module each are moved when they are routed to; experts stacked
in one tensor are so as well where they are offloaded one by one (docs/expert-offload.md), and else
moved whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelquirks.planner.names import parent
from modelquirks.planner.placement.decoder import EXPERTS, EXPERTS_TAKEN, first_of
from modelquirks.planner.placement.moduletree import ModuleTree

__all__ = [
    "Experts",
    "experts_of",
    "in_stacked_experts",
    "moves_by_share",
    "read_share",
    "share_at_once",
    "stored_share",
    "takes_all_experts",
    "touched",
]

_EXPERTS = re.compile(r"(?:^|\.)(?:experts|local_experts|expert)\.(?:(\d+)\.)?")
_STACKED = re.compile(r"(?:input_linear|output_linear)\.weight$")
"""GraniteMoe and JetMoe stack their experts in a module of another name."""
_ALL_EXPERTS = ("llama4_text",)
"""Every token goes through every expert, weighted with 0 (``Llama4TextMoe.forward``)."""
_LAYER = re.compile(r"\.(\d+)\.")
_TABLE = re.compile(
    r"(?:^|\.)(?:embed_tokens\w*|wte|wpe|word_embeddings|tok_embeddings|embed_in|token_embd"
    r"|embeddings|shared)\.weight$"
)


@dataclass(frozen=True)
class Experts:
    """How tokens are routed."""

    n: int
    """Experts of a layer."""
    k: int
    """Experts that a token takes."""
    frequencies: Mapping[str, Sequence[float]] | None = None
    """Layer index → the share of tokens that each expert is routed to, if it was measured."""

    def share(self, layer: str | None, expert: str | None, batch: int) -> float:
        """Return the part of the experts' bytes, or of one expert's, that a step of *batch* reads.

        Uniform routing reads ``1 - (1 - k/N)^batch`` of the experts.
        """
        each = self._each(layer)
        if each is None:
            return 1.0 - (1.0 - self.k / self.n) ** batch
        chosen = [each[int(expert)]] if expert is not None and int(expert) < len(each) else each
        return sum(1.0 - (1.0 - p) ** batch for p in chosen) / len(chosen)

    def _each(self, layer: str | None) -> Sequence[float] | None:
        found = None if self.frequencies is None or layer is None else self.frequencies.get(layer)
        return found or None


def experts_of(
    config: Mapping[str, Any], frequencies: Mapping[str, Sequence[float]] | None = None
) -> Experts | None:
    """Return how the model of *config* routes; None if it has no experts, or does not say.

    ValueError if there are *frequencies* and no experts, or not so many.

    >>> experts_of({"text_config": {"num_local_experts": 8, "num_experts_per_tok": 2}})
    Experts(n=8, k=2, frequencies=None)
    """
    for part in _parts(config):
        n, k = first_of(part, EXPERTS), first_of(part, EXPERTS_TAKEN)
        if n is not None and k is not None and 0 < k <= n:
            other = {layer: len(row) for layer, row in (frequencies or {}).items() if len(row) != n}
            if other:
                raise ValueError(
                    f"expert frequencies: the model has {n} experts a layer, but there are "
                    + ", ".join(f"{count} for layer {layer!r}" for layer, count in other.items())
                )
            return Experts(n, k, frequencies)
    if frequencies:
        raise ValueError(
            "expert frequencies: the config tells of no experts (of num_experts, "
            "num_experts_per_tok and their other names); leave the frequencies out"
        )
    return None


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield *config* and the configs in it, outer ones first."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


def takes_all_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether the model of *config* computes every token with every expert."""
    return any(part.get("model_type") in _ALL_EXPERTS for part in _parts(config))


def in_stacked_experts(name: str) -> bool:
    """Tell whether the tensor is of a module that holds all experts, by the module's name.

    >>> in_stacked_experts("layers.0.mlp.experts.gate_up_proj")
    True
    >>> in_stacked_experts("layers.0.mlp.experts.7.gate_proj.weight")
    False
    """
    found = _EXPERTS.search(name)
    return found is not None and found[1] is None


def touched(
    tree: ModuleTree,
    families: Iterable[tuple[Sequence[str], tuple[int, ...] | None]],
    shape_of: Callable[[str], tuple[int, ...]],
    classes: Mapping[str, str],
    experts: Experts | None,
    *,
    batch: int,
    by_expert: bool = False,
    indexed: bool = False,
) -> ModuleTree:
    """Return *tree* with what a step of *batch* sequences reads and moves of each tensor.

    With *by_expert* stacked experts are moved one by one, and if the model is known to take each
    by its index (*indexed*), there are never more than two of them where it runs.

    *families* are names that differ in numbers only, with the shape that all of them have (None:
    they differ, ``shape_of`` tells), *classes* those of the model's modules, as far as known.
    """
    shares: dict[str, float] = {}
    at_once: dict[str, float] = {}
    apart: set[str] = set()

    def share_of(name: str, shape: Sequence[int]) -> float:
        return read_share(name, shape, classes, experts, batch=batch)

    for names, shape in families:
        if experts is not None and by_expert and indexed and in_stacked_experts(names[0]):
            for name in names:
                if (part := share_at_once(name, shape or shape_of(name), experts)) < 1:
                    at_once[name] = part
        even = shape is not None and (experts is None or experts.frequencies is None)
        first = share_of(names[0], shape or shape_of(names[0]))
        if even and first >= 1:
            continue
        for name in names:
            share = first if even else share_of(name, shape_of(name))
            if share < 1:
                shares[name] = share
        if moves_by_share(names[0], by_expert=by_expert):
            apart.update(names)
    sizes = tree.sizes
    read = {name: sizes[name] * share for name, share in shares.items() if name in sizes}
    streamed = {name: read[name] for name in apart & read.keys()} if apart else {}
    for owner, names in _tied(tree).items():
        read[owner] = sizes[owner] * min(1.0, sum(shares.get(name, 1.0) for name in names))
        if len({parent(name) for name in names}) > 1:
            streamed[owner] = float(sizes[owner] * len(names))
    at_once = {name: sizes[name] * part for name, part in at_once.items() if name in sizes}
    made = {name: float(min(n, streamed.get(name, n))) for name, n in tree.made.items()}
    return replace(tree, read=read, streamed=streamed, at_once=at_once, made=made)


def stored_share(experts: Experts, *, batch: int) -> Callable[[str, str], float]:
    """Return the part of a stored tensor, by its name and block, that a step of *batch* reads.

    Names are templates; all but those of experts are read whole. For a checkpoint without a model,
    of which nobody knows which modules move what, so that only reading is told.

    >>> stored_share(Experts(8, 2), batch=1)("layers.{0}.experts.{1}.w1", "layers.3")
    0.25
    """

    def share(name: str, block: str) -> float:
        if _EXPERTS.search(name) is None:
            return 1.0
        layers = _LAYER.findall(f".{block}.")
        return experts.share(layers[-1] if layers else None, None, batch)

    return share


def _tied(tree: ModuleTree) -> Mapping[str, list[str]]:
    """Return every name of each tensor that has several, by owner."""
    names: dict[str, list[str]] = {}
    for alias, owner in tree.aliases.items():
        names.setdefault(owner, [owner]).append(alias)
    return names


def share_at_once(name: str, shape: Sequence[int], experts: Experts | None) -> float:
    """Return the part of stacked experts that is where they run at a time, taken one by one.

    While one is fetched, the one before may still be there. All of what is no such tensor.
    """
    stacked = experts is not None and len(shape) > 1 and shape[0] == experts.n
    if not stacked or experts is None or not in_stacked_experts(name):
        return 1.0
    return min(1.0, 2 / experts.n)


def moves_by_share(name: str, *, by_expert: bool) -> bool:
    """Tell whether of a tensor that is offloaded no more is moved than what is read.

    With *by_expert* stacked experts are moved one by one.
    """
    return _EXPERTS.search(name) is not None and (by_expert or not in_stacked_experts(name))


def read_share(
    name: str,
    shape: Sequence[int],
    classes: Mapping[str, str],
    experts: Experts | None,
    *,
    batch: int,
) -> float:
    """Return the part of a tensor that one step reads where it runs.

    Tensors of one shape whose names differ in numbers only have one share, unless experts have
    frequencies.
    """
    if _is_table(name, classes) and shape and shape[0] > 0:
        return min(1.0, batch / shape[0])
    if experts is None:
        return 1.0
    found = _EXPERTS.search(name)
    stacked = len(shape) == 3 and shape[0] == experts.n and _STACKED.search(name)
    if found is None and not stacked:
        return 1.0
    layers = _LAYER.findall(name[: found.start() + 1] if found is not None else name)
    return experts.share(layers[-1] if layers else None, found[1] if found else None, batch)


def _is_table(name: str, classes: Mapping[str, str]) -> bool:
    kind = classes.get(parent(name))
    if kind is None or not classes:
        return _TABLE.search(name) is not None
    return name.endswith(".weight") and kind.endswith("Embedding")
