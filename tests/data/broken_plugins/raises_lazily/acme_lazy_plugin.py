"""A plugin whose hook raises when its result is read, not when it is called."""

from collections.abc import Iterator

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.record import Match, ModelQuirks


@hookimpl
def modelquirks_records() -> Iterator[ModelQuirks]:
    yield ModelQuirks(name="acme_lazy", role="wrapper", match=Match(any_of=("acme.**",)))
    raise LookupError("the second record is not at home")
