"""A plugin whose record has several faults."""

from modelquirks.quirks.record import Alias, Match, ModelQuirks

RECORD = ModelQuirks(
    name="Acme",
    role="architecture",
    match=Match(),
    aliases=(Alias("body.{i}", "layers.{j}"),),
)
