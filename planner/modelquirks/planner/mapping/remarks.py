"""Remarks: what can be said of a checkpoint beyond the account of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.finding import Finding, Severity
from modelquirks.planner.mapping.offers import Offers
from modelquirks.planner.mapping.packs import Broken
from modelquirks.planner.mapping.ties import tie_note
from modelquirks.quirks.resolve import Resolution

__all__ = ["dtype_unknown", "packing_unseen", "without_model"]

_MAX_BROKEN = 20
"""Findings about incomplete weights, when there is no audit to list them in."""


def without_model(config: Mapping[str, Any], offers: Offers) -> Iterator[Finding]:
    """Yield what can be said of a checkpoint that no model was given for."""
    yield Finding(
        "no-model",
        "info",
        "no model was given: placement is by stored names and bytes. "
        "`--model transformers` compares with the class that config.json names, "
        "`--model pkg.module:factory` with your own",
    )
    if (note := tie_note(config, [piece.name for piece in offers.direct])) is not None:
        yield note
    broken = [b for b in offers.broken.values() if b.name not in offers.best]
    # Whether anything needs what only config.json keeps from being made, the model would tell.
    yield from _broken("incomplete", "error", [b for b in broken if not b.whole])
    yield from _broken("rule-unusable", "warning", [b for b in broken if b.whole])


def _broken(code: str, severity: Severity, broken: Sequence[Broken]) -> Iterator[Finding]:
    for one in broken[:_MAX_BROKEN]:
        yield Finding(code, severity, f"{one.name!r}: {one.reason}")
    if len(broken) > _MAX_BROKEN:
        yield Finding(code, severity, f"{len(broken) - _MAX_BROKEN} more like it")


def dtype_unknown(manifest: Manifest, asked: object) -> Iterator[Finding]:
    """Yield a finding if nothing says in which dtype the weights are."""
    named = manifest.config.get("dtype") or manifest.config.get("torch_dtype")
    if asked is None and not named and manifest.config and not manifest.has_headers:
        yield Finding(
            "dtype-unknown",
            "info",
            "config.json names no dtype and the headers are not here: bytes are those of the "
            "model as it was built. The weights may be smaller; --dtype says what they will be",
        )


def packing_unseen(config: Mapping[str, Any], resolution: Resolution) -> Iterator[Finding]:
    """Yield a finding if config.json declares a packing that no stored name shows."""
    declared = [
        f"{key} {config[key]!r}"
        for key in ("quantization_config", "quantization", "quantization_bit")
        if config.get(key)
    ]
    if declared and not any(r.role == "quantization" for r in resolution.records()):
        yield Finding(
            "quantization-unseen",
            "warning",
            f"config.json declares {declared[0][:120]}, but no name in the checkpoint belongs to "
            "a packing that is known: the weights may be plain, or of a format without a quirk",
        )
