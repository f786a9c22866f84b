"""Acme's exporter has its own names for the layers and the head, and keeps a table of angles."""

from collections.abc import Iterable

from modelquirks.quirks import Alias, Expected, Match, ModelQuirks, hookimpl

ACME = ModelQuirks(
    name="acme",
    role="architecture",
    match=Match(model_types=("acme",)),
    aliases=(
        Alias("acme_body.{i}.**", "layers.{i}.**"),
        Alias("acme_top.*", "head.*"),
    ),
    extra=(Expected("**.angles", "the module computes them from its size"),),
    why="Acme's exporter renames the layers and the head.",
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return what this package knows."""
    return [ACME]
