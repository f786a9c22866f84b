"""The command line: one module a sub-command, imported when it is chosen."""

from modelquirks.planner.cli.command import Exit, main

__all__ = ["Exit", "main"]
