"""A plugin that works: one record, one scheme."""

from collections.abc import Iterable, Mapping
from typing import Any

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Scheme, TensorType
from modelquirks.quirks.record import Alias, Match, ModelQuirks

Region = tuple[tuple[int, int], ...]


class _Halves(Scheme):
    name = "acme_halves"
    roles: tuple[str, ...] = ("left", "right")

    def infer(self, parts: Mapping[str, TensorType], settings: Any) -> TensorType:
        return parts["left"]

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Any
    ) -> Mapping[str, Region]:
        return dict.fromkeys(parts, region)

    def evaluate(self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Any) -> Any:
        return parts["left"] + parts["right"]


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    match = Match(model_types=("acme_good",))
    aliases = (Alias("body.{i}.**", "layers.{i}.**"),)
    return [ModelQuirks(name="acme_good", role="architecture", match=match, aliases=aliases)]


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    return [_Halves()]
