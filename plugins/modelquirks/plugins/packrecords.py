"""Records of packed formats: the forms that most of them share."""

from __future__ import annotations

from collections.abc import Iterable

from modelquirks.quirks.record import Expected, Match, ModelQuirks, Pack, Refusal

__all__ = ["COMPRESSED_TENSORS", "KV_SCALES", "TRANSFORMERS", "linear", "pack_record", "roles"]

TRANSFORMERS = "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers"
COMPRESSED_TENSORS = "https://github.com/vllm-project/compressed-tensors"
KV_SCALES = tuple(
    Expected(f"**.{name}", "scale of a quantised KV cache, not of a weight")
    for name in ("k_scale", "v_scale", "q_scale", "prob_scale")
)


_REFUSED = "the modules of {} work on a GPU only, and its quantiser in transformers refuses this"


def roles(names: str, base: str = "**") -> tuple[tuple[str, str], ...]:
    """Return (role, pattern) for each of *names*; the role is the name without its dots.

    >>> roles("weight weight.absmax")
    (('weight', '**.weight'), ('weight_absmax', '**.weight.absmax'))
    """
    return tuple((name.replace(".", "_"), f"{base}.{name}") for name in names.split())


def linear(scheme: str, parts: str, optional: str = "") -> Pack:
    """Return the pack of a ``Linear`` whose companions are siblings of its ``weight``."""
    return Pack(scheme, "**.weight", roles(parts), roles(optional))


def pack_record(
    name: str,
    match: Match,
    *packs: Pack,
    why: str,
    url: str,
    overrides: Iterable[str] = (),
    extra: tuple[Expected, ...] = (),
    not_on: Iterable[str] = (),
) -> ModelQuirks:
    """Return the record ``packed.NAME``; *overrides* are names of such records too.

    *not_on* are devices that transformers' quantiser refuses for its own modules
    (``quantizers/quantizer_*.py``, ``validate_environment``, 5.24).
    """
    return ModelQuirks(
        name=f"packed.{name}",
        role="quantization",
        match=match,
        packs=packs,
        extra=extra,
        overrides=frozenset(f"packed.{other}" for other in overrides),
        refuses=tuple(Refusal(device, _REFUSED.format(name)) for device in not_on),
        why=why,
        url=url,
    )
