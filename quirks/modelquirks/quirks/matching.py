"""Matching: does a record apply to this config.json and these names, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from modelquirks.quirks.family import show
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.record import Match

__all__ = ["Condition", "conditions", "why", "why_matches"]


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
    if match.is_empty:
        return None
    reasons: list[str] = []
    for condition in conditions(match, config, first, container):
        if not condition.holds:
            return None
        if condition.about != "denial":
            reasons.append(condition.text)
    return ", ".join(reasons)


class Condition(NamedTuple):
    """One thing that a match asks for, and what was found."""

    holds: bool
    text: str
    """A phrase: what fits if it holds, and if it does not what was found and what was expected."""
    about: Literal["config", "names", "denial"] = "names"
    """``denial``: it asks for names not to be there."""


def conditions(
    match: Match,
    config: Mapping[str, Any],
    first: Callable[[Pattern], str | None],
    container: str,
) -> Iterator[Condition]:
    """Yield everything that *match* asks for, in its order; all must hold for it to apply.

    >>> match = Match(model_types=("acme",), any_of=("body.**",))
    >>> [c.text for c in conditions(match, {"model_type": "llama"}, lambda pattern: None, "")]
    ["model_type is 'llama', expected 'acme'", "no name fits 'body.**'"]
    """
    for wanted, found, what in (
        (match.architectures, _architectures(config), "architecture"),
        (match.model_types, _model_types(config), "model_type"),
        (match.quant_methods, _quant_methods(config), "quant_method"),
        (match.containers, {container} - {""}, "container"),
    ):
        if not wanted:
            continue
        if hits := sorted(set(wanted) & found):
            yield Condition(True, f"{what} {hits[0]!r}", "config")
        else:
            was = f"{what} is {_either(sorted(found))}" if found else f"there is no {what}"
            yield Condition(False, f"{was}, expected {_either(wanted)}", "config")
    for texts in ((match.any_of,) if match.any_of else ()) + tuple((t,) for t in match.all_of):
        hit = next((h for t in texts if (h := first(Pattern(t))) is not None), None)
        if hit is None:
            yield Condition(False, f"no name fits {_either(texts)}")
        else:
            yield Condition(True, f"names like {show(hit)!r}")
    for text in match.none_of:
        if (hit := first(Pattern(text))) is None:
            yield Condition(True, f"no name fits {text!r}", "denial")
        else:
            told = f"names like {show(hit)!r} fit {text!r}, and must not"
            yield Condition(False, told, "denial")


def _either(values: Sequence[str]) -> str:
    more = f" or one of {len(values) - 3} more" if len(values) > 3 else ""
    return " or ".join(map(repr, values[:3])) + more


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
