"""A plugin that raises while it is imported."""

raise RuntimeError("acme needs the moon\nin the seventh house")
