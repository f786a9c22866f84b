"""A plugin with a misspelt hook."""

from collections.abc import Iterable

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.record import ModelQuirks


@hookimpl
def modelquirks_record() -> Iterable[ModelQuirks]:
    return []
