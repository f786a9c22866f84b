"""Changes: what the tensors of an adapter are for, told by their names.

peft writes ``base_model.model.<module>.lora_A.weight``, without the adapter's own name (older files
have it: ``lora_A.default.weight``). What is under a plain name is a whole weight that takes the
place of the base's: modules that were retrained, biases, embeddings that were saved along.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["PREFIX", "Change", "ChangeKind", "Read", "changes_of", "is_adapters", "read_name"]

PREFIX = "base_model.model."
"""What peft puts before every name."""
_WRAPPERS = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.")

ChangeKind = Literal["linear", "embedding", "rows", "whole", "former", "other"]
"""``linear``: lora_A and lora_B of a layer or a parameter. ``embedding``: lora_embedding_A and B.
``rows``: some rows of a table. ``whole``: another weight. ``former``: what a retrained module was
before, as PEFT saves it where the vocabulary has grown. ``other``: of a kind that is no LoRA."""

_ROLES: Mapping[str, tuple[ChangeKind, str]] = {
    "lora_A": ("linear", "a"),
    "lora_B": ("linear", "b"),
    "lora_embedding_A": ("embedding", "a"),
    "lora_embedding_B": ("embedding", "b"),
    "lora_magnitude_vector": ("linear", "magnitude"),
    "trainable_tokens_delta": ("rows", "rows"),
}
_OTHERS = (
    *("ia3_", "lokr_", "hada_", "oft_", "boft_", "vera_", "lora_E", "ranknum", "hra_", "adaption_"),
    *("fourierft_", "vblora_", "randlora_", "c3a_", "miss_", "shira_", "waveft_", "road_"),
    *("delora_", "gralora_", "bone_", "ln_tuning_", "prompt_", "poly_", "xlora_"),
)
"""Beginnings of what other methods of peft call their parameters."""


class Read(NamedTuple):
    """One name of an adapter, taken apart."""

    module: str
    """Without prefix and without the layers that peft puts around others."""
    kind: ChangeKind
    role: str
    """``a``, ``b``, ``magnitude``, ``rows``; of whole weights the name in the module."""
    depth: int = 0
    """How many ``base_layer`` were around it: parameters of one module are nested."""
    adapter: str = ""
    """The adapter's own name, if the file has it."""
    prefixed: bool = True


@dataclass
class Change:
    """Everything that an adapter has for one weight."""

    module: str
    kind: ChangeKind
    parts: dict[str, str] = field(default_factory=dict)
    """Role → stored name."""
    depth: int = 0


def read_name(name: str) -> Read:
    """Return what the stored tensor *name* is.

    >>> read_name("base_model.model.h.0.q.lora_A.default.weight")[:3]
    ('h.0.q', 'linear', 'a')
    >>> read_name("base_model.model.lm_head.weight")[:3]
    ('lm_head', 'whole', 'weight')
    """
    bare, prefixed = _unprefixed(name)
    segments = bare.split(".")
    for at, segment in enumerate(segments):
        if segment in _ROLES:
            return _of_lora(segments[:at], segments[at:], prefixed=prefixed)
        if segment.startswith(_OTHERS):
            module, depth = _unwrapped(segments[:at])
            return Read(module, "other", segment, depth, prefixed=prefixed)
    module, depth = _unwrapped(_without_copies(segments[:-1]))
    kind: ChangeKind = "former" if "original_module" in segments else "whole"
    return Read(module, kind, segments[-1], depth, prefixed=prefixed)


def is_adapters(name: str) -> bool:
    """Tell whether *name* is one that only adapters have."""
    return read_name(name).kind not in ("whole", "former")


def changes_of(names: Collection[str]) -> list[Change]:
    """Return what the tensors *names* change, weight by weight, in the order of the file."""
    found: dict[tuple[object, ...], Change] = {}
    embeddings = {read.module for read in map(read_name, names) if read.kind == "embedding"}
    for name in names:
        read = read_name(name)
        kind = read.kind
        if kind == "linear" and read.role == "magnitude" and read.module in embeddings:
            kind = "embedding"
        key: tuple[object, ...] = (read.module, kind, read.depth, read.role)
        if kind in ("linear", "embedding"):
            key = key[:3]
        change = found.setdefault(key, Change(read.module, kind, depth=read.depth))
        change.parts[read.role] = name
    return list(found.values())


def _unprefixed(name: str) -> tuple[str, bool]:
    """Return *name* without what wrappers put before it, and whether peft's prefix was there."""
    prefixed = False
    while True:
        wrapper = next((w for w in (*_WRAPPERS, PREFIX) if name.startswith(w)), None)
        if wrapper is None:
            return name, prefixed
        prefixed = prefixed or wrapper == PREFIX
        name = name.removeprefix(wrapper)


def _of_lora(before: list[str], after: list[str], *, prefixed: bool) -> Read:
    kind, role = _ROLES[after[0]]
    rest = after[1:]
    leaf = rest.pop() if rest and rest[-1] in ("weight", "bias") else ""
    module, depth = _unwrapped(before)
    if leaf == "bias":
        role = f"{role}_bias"
    return Read(module, kind, role, depth, ".".join(rest), prefixed)


def _unwrapped(segments: list[str]) -> tuple[str, int]:
    around = ("base_layer", "token_adapter", "original_module")
    kept = [segment for segment in segments if segment not in around]
    return ".".join(kept), segments.count("base_layer")


def _without_copies(segments: list[str]) -> list[str]:
    """Return *segments* without ``modules_to_save`` and the adapter's name behind it."""
    return list(_kept(segments))


def _kept(segments: list[str]) -> Iterator[str]:
    skipping = False
    for segment in segments:
        if skipping:
            skipping = False
        elif segment == "modules_to_save":
            skipping = True
        else:
            yield segment
