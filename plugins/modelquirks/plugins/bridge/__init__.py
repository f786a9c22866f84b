"""The bridge to transformers: its own conversion tables, for all of its models, as our rules.

Nothing of transformers is copied here: its renamings are run on names, its conversions on tensors
without data, and what they do is written down as aliases and recipes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Scheme

__all__ = ["modelquirks_library", "modelquirks_schemes"]


@hookimpl
def modelquirks_library(model: Any, names: Collection[str]) -> Any:
    """Return the rules that transformers has for *model*; None if no model of it is inside."""
    if sys.modules.get("transformers") is None:  # whoever has a model of it has imported it
        return None
    from modelquirks.plugins.bridge.internals import has_pretrained, lacking, version

    if not has_pretrained(model):
        return None
    if lacks := lacking():
        raise RuntimeError(
            f"transformers {version()} has no {', '.join(lacks)}: its conversion tables cannot be "
            "read, and only the rules of the other plugins are used"
        )
    from modelquirks.plugins.bridge.parts import rules_for

    return rules_for(model, names)


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the scheme that runs what cannot be written down."""
    from modelquirks.plugins.bridge.opaque import Converter

    return (Converter(),)
