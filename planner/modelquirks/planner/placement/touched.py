"""Touched bytes: what one step reads of a tensor, and what it moves of an offloaded one.

Most tensors are read whole for every token. Two kinds are not: experts, of which each token takes
k of N, and the table of an embedding, of which it takes a row. Moving is another matter: accelerate
1.15 (``AlignDevicesHook.pre_forward``) moves all tensors of a module when the module runs, so a
table and experts stacked in one tensor are moved whole, and only experts with a module each are
moved when they are routed to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelquirks.planner.names import parent
from modelquirks.planner.placement.decoder import first_of
from modelquirks.planner.placement.moduletree import ModuleTree

__all__ = ["Experts", "experts_of", "touched"]

_N = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
    "n_experts", "moe_num_primary_experts",
)  # fmt: skip
_K = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk",
    "top_k_experts", "moe_k", "num_selected_experts", "experts_per_tok", "top_k",
)  # fmt: skip
"""Names of these two numbers in the configs of transformers 5.24."""

_EXPERTS = re.compile(r"(?:^|\.)(?:experts|local_experts|expert)\.(?:(\d+)\.)?")
_STACKED = re.compile(r"(?:input_linear|output_linear)\.weight$")
"""GraniteMoe and JetMoe stack their experts in a module of another name."""
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

    ValueError if *frequencies* are not those of so many experts.

    >>> experts_of({"text_config": {"num_local_experts": 8, "num_experts_per_tok": 2}})
    Experts(n=8, k=2, frequencies=None)
    """
    for part in _parts(config):
        n, k = first_of(part, _N), first_of(part, _K)
        if n is not None and k is not None and 0 < k <= n:
            other = {layer: len(row) for layer, row in (frequencies or {}).items() if len(row) != n}
            if other:
                raise ValueError(
                    f"expert frequencies: the model has {n} experts a layer, but there are "
                    + ", ".join(f"{count} for layer {layer!r}" for layer, count in other.items())
                )
            return Experts(n, k, frequencies)
    return None


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield *config* and the configs in it, outer ones first."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


def touched(
    tree: ModuleTree,
    families: Iterable[tuple[Sequence[str], tuple[int, ...] | None]],
    shape_of: Callable[[str], tuple[int, ...]],
    classes: Mapping[str, str],
    experts: Experts | None,
    *,
    batch: int,
) -> ModuleTree:
    """Return *tree* with what a step of *batch* sequences reads and moves of each tensor.

    *families* are names that differ in numbers only, with the shape that all of them have (None:
    they differ, ``shape_of`` tells), *classes* those of the model's modules, as far as known.
    """
    shares: dict[str, float] = {}
    apart: set[str] = set()
    for names, shape in families:
        even = shape is not None and (experts is None or experts.frequencies is None)
        first = _read(names[0], shape or shape_of(names[0]), classes, experts, batch)
        if even and first >= 1:
            continue
        for name in names:
            share = first if even else _read(name, shape_of(name), classes, experts, batch)
            if share < 1:
                shares[name] = share
        if (found := _EXPERTS.search(names[0])) is not None and found[1] is not None:
            apart.update(names)
    sizes = tree.sizes
    read = {name: sizes[name] * share for name, share in shares.items() if name in sizes}
    streamed = {name: read[name] for name in apart & read.keys()} if apart else {}
    for owner, names in _tied(tree).items():
        read[owner] = sizes[owner] * min(1.0, sum(shares.get(name, 1.0) for name in names))
        if len({parent(name) for name in names}) > 1:
            streamed[owner] = float(sizes[owner] * len(names))
    return replace(tree, read=read, streamed=streamed)


def _tied(tree: ModuleTree) -> Mapping[str, list[str]]:
    """Return every name of each tensor that has several, by owner."""
    names: dict[str, list[str]] = {}
    for alias, owner in tree.aliases.items():
        names.setdefault(owner, [owner]).append(alias)
    return names


def _read(
    name: str,
    shape: Sequence[int],
    classes: Mapping[str, str],
    experts: Experts | None,
    batch: int,
) -> float:
    """Return the part of a tensor that one step reads where it runs."""
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
