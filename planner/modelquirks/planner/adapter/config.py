"""``AdapterConfig``: what adapter_config.json says, as far as weights depend on it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from modelquirks.planner.expressions import may_run_on
from modelquirks.planner.finding import brief

__all__ = ["PROMPTS", "AdapterConfig", "Strength", "config_of"]

PROMPTS = frozenset(
    {"PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "CARTRIDGE"}
)
"""Kinds that add virtual tokens and change no weight: nothing of them can be merged."""

_VARIANTS: tuple[tuple[str, str], ...] = (
    ("use_qalora", "QA-LoRA pools the inputs"),
    ("use_bdlora", "block-diagonal LoRA"),
    ("arrow_config", "Arrow routes each token to an adapter"),
    ("alora_invocation_tokens", "activated LoRA works from a token on only"),
    ("velora_config", "VeLoRA"),
    ("monteclora_config", "MonteCLoRA"),
    ("kasa_config", "KaSA"),
    ("layer_replication", "layers of the base model are used several times"),
)
"""Fields that, if set, make a LoRA something else than ``W + scaling * B @ A``."""

_LARGEST = 1 << 31
_LONGEST = 256
"""Characters of the name of a module."""
_TOKENS = ("trainable_token_indices", "token_indices")

_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin (``init_lora_weights``) that also change the weights of the base model."""


class Strength(NamedTuple):
    """Rank and alpha of one module, and the factor that follows from them."""

    rank: int
    alpha: float
    scaling: float


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What adapter_config.json says; of LoRA, how strong it is where.

    Source: peft 0.21.2, ``config.py`` and ``tuners/lora/config.py``.
    """

    kind: str = "LORA"
    """``peft_type`` in capitals: ``LORA``, ``IA3``, ``PREFIX_TUNING``…"""
    base: str = ""
    """``base_model_name_or_path``; empty if it is not told."""
    revision: str = ""
    task: str = ""
    rank: int = 8
    alpha: float = 8
    rslora: bool = False
    dora: bool = False
    transposed: bool = False
    """``fan_in_fan_out``: the weights are ``[in, out]``."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    targets: tuple[str, ...] | str = ()
    """Ends of module names, or one regular expression for all of a name."""
    layers: tuple[int, ...] = ()
    """``layers_to_transform``; empty: all."""
    layers_patterns: tuple[str, ...] = ()
    excluded: tuple[str, ...] | str = ()
    parameters: tuple[str, ...] = ()
    """``target_parameters``: parameters that are adapted themselves, stacked experts mostly."""
    retrained: tuple[str, ...] = ()
    """``modules_to_save``: modules of which the adapter has the whole weights."""
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """``trainable_token_indices`` by end of the module's name; "": the input embedding."""
    obstacles: tuple[str, ...] = ()
    """Why the adapter is no plain LoRA or DoRA and cannot be merged here."""

    def strength(self, key: str) -> Strength:
        """Return rank, alpha and scaling of the module (or parameter) *key*.

        A pattern counts as in ``get_pattern_key`` of peft: a regular expression for the end of the
        name, after a dot; the first that fits.
        """
        rank = self.ranks.get(_pattern(self.ranks, key), self.rank)
        alpha = self.alphas.get(_pattern(self.alphas, key), self.alpha)
        return Strength(rank, alpha, alpha / (math.sqrt(rank) if self.rslora else rank))

    def is_retrained(self, name: str) -> bool:
        """Tell whether the weight *name* is of a module that was trained whole, as a copy."""
        return any(f".{module}." in f".{name}" for module in self.retrained)

    def targeted(self, module: str) -> bool:
        """Tell whether *module* should have a LoRA (``check_target_module_exists`` of peft)."""
        if _named(self.excluded, module) or not _named(self.targets, module):
            return False
        if not self.layers or isinstance(self.targets, str) or module in self.targets:
            return True
        patterns = self.layers_patterns or (r"[^.]*",)
        found = (_matched(_layer_pattern(text), module) for text in patterns)
        numbers = [int(match[1]) for match in found if match]
        return bool(numbers) and numbers[0] in self.layers


def config_of(data: Mapping[str, Any]) -> AdapterConfig:
    """Return what the JSON object *data* says; ValueError names what has not the right form."""
    faults = list(_faults(data))
    if faults:
        raise ValueError("; ".join(faults))
    targets = data.get("target_modules")
    excluded = data.get("exclude_modules")
    layers = data.get("layers_to_transform")
    return AdapterConfig(
        kind=str(data.get("peft_type") or "LORA").upper(),
        base=str(data.get("base_model_name_or_path") or ""),
        revision=str(data.get("revision") or ""),
        task=str(data.get("task_type") or ""),
        rank=data.get("r", 8),
        alpha=data.get("lora_alpha", 8),
        rslora=bool(data.get("use_rslora")),
        dora=bool(data.get("use_dora")),
        transposed=bool(data.get("fan_in_fan_out")),
        ranks=data.get("rank_pattern") or {},
        alphas=data.get("alpha_pattern") or {},
        targets=targets if isinstance(targets, str) else tuple(targets or ()),
        layers=(layers,) if isinstance(layers, int) else tuple(layers or ()),
        layers_patterns=_texts(data.get("layers_pattern")),
        excluded=excluded if isinstance(excluded, str) else tuple(excluded or ()),
        parameters=tuple(data.get("target_parameters") or ()),
        retrained=tuple(data.get("modules_to_save") or ()),
        tokens=_tokens(data.get(_TOKENS[0]) or data.get(_TOKENS[1])),
        obstacles=tuple(_obstacles(data)),
    )


def _faults(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields that are not of the type that they must have."""
    types: tuple[tuple[str, type | tuple[type, ...]], ...] = (
        *(("peft_type", str), ("task_type", str)),
        *(("base_model_name_or_path", str), ("revision", str)),
        ("r", int),
        ("lora_alpha", (int, float)),
        ("rank_pattern", dict),
        ("alpha_pattern", dict),
        ("target_modules", (list, str)),
        ("exclude_modules", (list, str)),
        ("target_parameters", list),
        ("modules_to_save", list),
        ("layers_to_transform", (list, int)),
        ("layers_pattern", (list, str)),
        *((name, (list, dict)) for name in _TOKENS),
    )
    for name, kind in types:
        value = data.get(name)
        if value is not None and not isinstance(value, kind):
            yield f"{name!r} is {brief(value)}"
    ranks = {"r": data.get("r", 8), **_dict(data.get("rank_pattern"))}
    yield from (f"rank {brief(v)} of {brief(k)}" for k, v in ranks.items() if not _is_rank(v))
    alphas = {"lora_alpha": data.get("lora_alpha", 8), **_dict(data.get("alpha_pattern"))}
    yield from (f"alpha {brief(v)} of {brief(k)}" for k, v in alphas.items() if not _is_alpha(v))
    for name in ("target_modules", "exclude_modules", "target_parameters", "modules_to_save"):
        if odd := [v for v in _list(data.get(name)) if not isinstance(v, str)]:
            yield f"{brief(odd[0])} among {name!r}"
    yield from _odd_numbers(data)
    for text in filter(may_run_on, _patterns(data)):
        yield (
            f"the regular expression {brief(text, 100)} repeats what is repeated, which may take "
            "for ever; write it without"
        )


def _odd_numbers(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the layers and tokens that cannot be counted."""
    layers = data.get("layers_to_transform")
    for name, value in (("layers_to_transform", layers), *((n, data.get(n)) for n in _TOKENS)):
        lists = [*_dict(value).values()] if isinstance(value, dict) else [value]
        for listed in lists:
            numbers = listed if isinstance(listed, list) else [0 if listed is None else listed]
            if odd := [n for n in numbers if type(n) is not int or not 0 <= n < _LARGEST]:
                yield f"{brief(odd[0])} in {name!r}, a whole number from 0 was expected"


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < _LARGEST


def _is_alpha(value: object) -> bool:
    """Tell whether *value* is a number that can scale a weight: NaN would make all of them NaN."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -_LARGEST < value < _LARGEST  # not nan, not infinite


def _patterns(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the regular expressions, which are matched with every name of the model."""
    values = (data.get("target_modules"), data.get("exclude_modules"))
    yield from (value for value in values if isinstance(value, str))
    yield from map(_layer_pattern, _texts(data.get("layers_pattern")))
    yield from (key for name in ("rank_pattern", "alpha_pattern") for key in _dict(data.get(name)))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _obstacles(data: Mapping[str, Any]) -> Iterator[str]:
    for name, why in _VARIANTS:
        if data.get(name):
            yield f"{name!r} is set ({why})"
    begun = data.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_BASE):
        yield (
            f"'init_lora_weights' is {begun!r}: training began from base weights that peft changes "
            "first, by computing them anew when it loads the adapter; save it with "
            "path_initial_model_for_weight_conversion to have a plain LoRA"
        )


def _tokens(value: Any) -> Mapping[str, tuple[int, ...]]:
    if isinstance(value, dict):
        return {str(name): tuple(_list(indices)) for name, indices in value.items()}
    return {"": tuple(value)} if value else {}


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _pattern(patterns: Mapping[str, Any], key: str) -> str:
    for text in patterns:
        if _matches(rf"(.*\.)?({text})$", key):
            return text
    return key


def _named(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return _matches(rf"(?:{names})\Z", module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer_pattern(text: str) -> str:
    return rf".*\.{text}\.(\d+)\."


def _matches(pattern: str, text: str) -> bool:
    return _matched(pattern, text) is not None


def _matched(pattern: str, text: str) -> re.Match[str] | None:
    if len(text) > _LONGEST:  # no module of a model has such a name
        return None
    try:
        return re.match(pattern, text)
    except (re.error, RecursionError, OverflowError):  # peft would fail on it too
        return None
