"""The command ``modelquirks``: which sub-commands there are, and how one is run.

Only the module of the sub-command that was asked for is imported, so ``--help`` costs what
argparse costs, and looking into a checkpoint never imports torch.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

__all__ = ["CallError", "Exit", "main"]

DEBUG = "MODELQUIRKS_DEBUG"


class Exit(IntEnum):
    """Exit codes. They are part of the interface."""

    USABLE = 0
    """The checkpoint can be read, the plan can be used, what was asked is done, nothing differs."""
    UNUSABLE = 1
    """It was read and understood, and it must not be used as it is; or the two differ."""
    BAD_CALL = 2
    """The call is wrong or the input cannot be read."""


class CallError(ValueError):
    """The call cannot be carried out as it is; the message says what to do."""


class Command(Protocol):
    """What the module of a sub-command has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        ...

    def run(self, args: argparse.Namespace) -> Exit:
        """Do it."""
        ...


class _Entry(NamedTuple):
    module: str
    help: str


_COMMANDS = {
    "inspect": _Entry("inspect", "say what a checkpoint holds, from headers alone"),
    "plan": _Entry("plan", "plan where every tensor goes, then load exactly that"),
    "explain": _Entry("explain", "say why something is where it is, and what would change it"),
    "diff": _Entry("diff", "say what differs between two checkpoints, or two plans"),
    "execute": _Entry("execute", "load what a plan made earlier says"),
    "digest": _Entry("digest", "say what every tensor is by its SHA-256, or check that it is so"),
    "export": _Entry("export", "write a checkpoint anew, as sharded safetensors"),
    "infer": _Entry("infer", "propose the rules that map a checkpoint's names to a model's"),
    "plugins": _Entry("plugins", "say which plugins there are and what they give"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; *argv* is without the program's name."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser(words).parse_args(words)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich ends with 1, if it meets that
            return 128 + 13
        raise
    except KeyboardInterrupt:
        return 128 + 2
    except Exception as error:
        return _failed(error)


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="modelquirks",
        description="Know every tensor of a checkpoint before loading it, plan where each goes, "
        "load exactly that.",
        epilog="Exit codes: 0 usable, 1 not usable as it is (diff: they differ), 2 bad call or "
        "unreadable input.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), "")
    for name, entry in _COMMANDS.items():
        command = commands.add_parser(
            name, help=entry.help, description=_sentence(entry.help), allow_abbrev=False
        )
        if name == chosen:
            module = cast(Command, import_module(f"modelquirks.planner.cli.{entry.module}"))
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _failed(error: Exception) -> Exit:
    """Say on standard error what went wrong; with ``MODELQUIRKS_DEBUG`` set, also where."""
    from modelquirks.planner.cli.terminal import note

    if os.environ.get(DEBUG):
        import traceback

        traceback.print_exception(error)
    if trouble := _output_trouble(error):
        note("error", f"standard output cannot be written: {trouble}")
    elif isinstance(error, MemoryError):
        note(
            "error",
            "there was not enough memory. Give --load-memory (of export: --memory) less, or close "
            "what else takes it",
        )
    elif isinstance(error, OSError) and error.filename is not None:
        note("error", f"{error.filename!r}: {error.strerror}")
    elif type(error).__module__.startswith("modelquirks."):
        note("error", str(error))
    else:  # not one of ours: somebody else's, or a fault of this program
        note("error", f"{type(error).__name__}: {error}")
        note("hint", f"set {DEBUG}=1 to see where")
    return Exit.BAD_CALL


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _output_trouble(error: Exception) -> str:
    """Return why nothing more can be written to standard output, if so, and let the rest go.

    What writes to files names them.
    """
    failed = None
    if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
        failed = error
    try:
        sys.stdout.flush()
    except OSError as again:
        failed = again
    except ValueError:  # it is closed
        return ""
    if failed is None:
        return ""
    with suppress(OSError):  # or the interpreter tries again at its end, with words of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return failed.strerror or str(failed)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


class _Version(argparse.Action):
    """``--version``, which looks the version up only when asked."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **rest)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"modelquirks {version('modelquirks')}")
        parser.exit()
