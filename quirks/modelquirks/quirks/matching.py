"""Matching: does a record apply to this config.json and these names, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from modelquirks.quirks.family import show
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.record import Match

__all__ = ["why", "why_matches"]


def why_matches(
    match: Match, config: Mapping[str, Any], names: Iterable[str], container: str = ""
) -> str | None:
    """Return why *match* holds, as a phrase, or None if it does not.

    >>> why_matches(Match(model_types=("gpt_oss",)), {"model_type": "gpt_oss"}, [])
    "model_type 'gpt_oss'"
    """
    listed = tuple(names)

    def first(pattern: Pattern) -> str | None:
        return next((name for name in listed if pattern.match(name) is not None), None)

    return why(match, config, first, container)


def why(
    match: Match,
    config: Mapping[str, Any],
    first: Callable[[Pattern], str | None],
    container: str,
) -> str | None:
    """As :func:`why_matches`; *first* gives the first name that fits a pattern."""
    reasons: list[str] = []
    if match.is_empty:
        return None
    for wanted, found, what in (
        (match.architectures, _architectures(config), "architecture"),
        (match.model_types, _model_types(config), "model_type"),
        (match.quant_methods, _quant_methods(config), "quant_method"),
        (match.containers, {container}, "container"),
    ):
        if wanted:
            if not (hits := sorted(set(wanted) & found)):
                return None
            reasons.append(f"{what} {hits[0]!r}")
    for texts in ((match.any_of,) if match.any_of else ()) + tuple((t,) for t in match.all_of):
        if (hit := next((h for t in texts if (h := first(Pattern(t)))), None)) is None:
            return None
        reasons.append(f"names like {show(hit)!r}")
    if any(first(Pattern(text)) is not None for text in match.none_of):
        return None
    return ", ".join(reasons)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the config and its sub-configs (``text_config``, ``vision_config``…)."""
    yield config
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            yield value


def _strings(value: object) -> set[str]:
    values: Iterable[object] = value if isinstance(value, (list, tuple)) else (value,)
    return {v for v in values if isinstance(v, str)}


def _architectures(config: Mapping[str, Any]) -> set[str]:
    return _strings(config.get("architectures"))


def _model_types(config: Mapping[str, Any]) -> set[str]:
    return {name for part in _parts(config) for name in _strings(part.get("model_type"))}


def _quant_methods(config: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for part in _parts(config):
        for key in ("quantization_config", "quantization", "compression_config"):
            declared = part.get(key)
            if isinstance(declared, dict):
                found |= _strings(declared.get("quant_method"))
    return found
