"""AutoRound: weights packed as GPTQ or as AWQ does; ``packing_format`` in config.json says which.

``auto_round`` and ``auto_round:gptqmodel`` are GPTQ with zeros as they are,
``auto_round:auto_gptq`` has zeros stored less one, ``auto_round:auto_awq`` is AWQ (gemm).
Source: AutoRound 0.16, ``inference/backend.py`` (``GPTQ_FORMAT``, ``GPTQ_FORMAT_NO_ZP``,
``AWQ_FORMAT``) and ``convert_model.py`` (``extra_config``: what differs, by module or pattern).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from modelquirks.plugins.awq import Awq, awq_settings
from modelquirks.plugins.declared import declared, module_of, number, required, text
from modelquirks.plugins.gptq import Gptq, gptq_settings
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks, Pack

__all__ = ["RECORDS", "AutoRound", "modelquirks_records", "modelquirks_schemes"]

_AS_THEY_ARE = ("", "auto_round", "auto_round:gptqmodel")
_LESS_ONE = ("auto_round:auto_gptq", "auto_gptq", "gptq")
_AWQ = ("auto_round:auto_awq", "auto_awq", "awq")


class AutoRound(Scheme):
    """Reads what :class:`Gptq` or :class:`Awq` reads."""

    name: str = "auto_round"
    roles: tuple[str, ...] = ("qweight", "scales")

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return awq (or else gptq) and the settings of that scheme.

        RecipeError if config.json does not tell the bits, or names another layout.
        """
        said = declared(config, "quantization_config")
        own = {**said, **_extra(said, module_of(weight))}
        where = "quantization_config of config.json"
        bits = required(number(own, "bits"), "bits", weight, where)
        layout = text(said, "packing_format")
        if layout in _AWQ:
            return {**awq_settings(own, weight), "awq": True}
        if layout in (*_AS_THEY_ARE, *_LESS_ONE):
            made = gptq_settings(own, weight, bits, v1=layout in _LESS_ONE)
            return {**made, "awq": False}
        raise RecipeError(
            f"{weight!r} has the packing_format {layout!r} by config.json, which is not made "
            "plain here: export it with AutoRound as 'auto_round', 'auto_gptq' or 'auto_awq'"
        )

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return ``[out, in]`` in the dtype of the scales; RecipeError if parts do not fit."""
        return _scheme(settings).infer(parts, settings)

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the words and groups that *region* touches."""
        return _scheme(settings).regions(region, parts, settings)

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype*, rounded once."""
        return _scheme(settings).evaluate(parts, region, dtype, settings)


def _scheme(settings: Settings) -> Scheme:
    return Awq() if settings["awq"] else Gptq()


def _extra(said: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """Return what ``extra_config`` says of *module*: by its name, else by the first pattern."""
    extra: Mapping[str, Mapping[str, Any] | None] = said.get("extra_config") or {}
    if module in extra:
        return extra[module] or {}
    for pattern, own in extra.items():
        if own and _is_pattern(pattern) and re.search(pattern, module):
            return own
    return {}


def _is_pattern(text: str) -> bool:
    """Tell a regular expression from the name of a module, which has dots at most."""
    try:
        re.compile(text)
    except re.error:
        return False
    return not re.fullmatch(r"[\w.-]*", text)


RECORDS = (
    ModelQuirks(
        name="packed.auto_round",
        role="quantization",
        match=Match(
            quant_methods=("auto-round", "auto_round", "intel/auto-round"), all_of=("**.qweight",)
        ),
        packs=(
            Pack(
                "auto_round",
                "**.weight",
                (("qweight", "**.qweight"), ("scales", "**.scales")),
                (("qzeros", "**.qzeros"), ("g_idx", "**.g_idx")),
            ),
        ),
        overrides=frozenset({"packed.gptq", "packed.awq"}),
        why="AutoRound packs like GPTQ or like AWQ; its packing_format in config.json says which",
        url="https://github.com/intel/auto-round",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the record of AutoRound."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the scheme of AutoRound."""
    return (AutoRound(),)
