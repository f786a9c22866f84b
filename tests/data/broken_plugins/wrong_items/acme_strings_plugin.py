"""A plugin whose hook gives strings."""

from modelquirks.quirks.hookspecs import hookimpl


@hookimpl
def modelquirks_records() -> list[str]:
    return ["acme", "halves"]
