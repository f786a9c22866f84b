"""One of two plugins that claim the record ``acme_twin``."""

from collections.abc import Iterable

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.record import Match, ModelQuirks

MATCH = Match(model_types=("acme_twin",))


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    for name in ("acme_twin", "acme_right"):
        yield ModelQuirks(name=name, role="architecture", match=MATCH)
