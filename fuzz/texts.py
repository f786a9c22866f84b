"""Texts of the command line, and the JSON files that it takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from guard import Nonsense, scratch

from modelquirks.planner.checkpoint.listing import Listing
from modelquirks.planner.cli import opening, placing
from modelquirks.planner.cli.parsing import checked
from modelquirks.planner.cli.saved import is_plan
from modelquirks.planner.dispatcher import _alias, _tie
from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.hub.address import address_of
from modelquirks.planner.placement.machine import read_machine
from modelquirks.planner.placement.memory import parse_device, parse_max_memory, parse_size
from modelquirks.planner.placement.wishes import parse_pin
from modelquirks.quirks.pattern import Pattern

__all__ = ["options", "texts"]

_NAMES = (
    "model.layers.{0}.mlp.experts.{1}.gate_proj.weight",
    "a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.b",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab",
)


def _pattern(text: str) -> None:
    alias = _alias(text)
    for name in _NAMES:
        Pattern(alias.stored).match(name)


def _memory(text: str) -> None:
    for size in parse_max_memory(text).values():
        if size is not None and size < 0:
            raise Nonsense(f"a size of {size}")


def _expected(text: str) -> None:
    from modelquirks.plugins.deepspeed.job import job_of

    job_of(opening._expected(text))


_PARSERS: Sequence[Callable[[str], Any]] = (
    _memory,
    parse_pin,
    parse_size,
    parse_device,
    _pattern,
    lambda text: _tie(text, ()),
    placing._count,
    placing._reserve,
    placing._dtype,
    from_torch,
    address_of,
    _expected,
    lambda text: Pattern(text).match(_NAMES[0]),
)


def texts(data: bytes) -> str:
    """An option of the command line: which, the first byte says."""
    parse = _PARSERS[(data[0] if data else 0) % len(_PARSERS)]
    text = data[1:].decode("utf-8", "surrogateescape").replace("\0", "")
    return type(_called(parse, text)).__name__


def _called(parse: Callable[[str], Any], text: str) -> Any:
    """Call as argparse does, so that an error of another class than it knows is seen."""
    try:
        return checked(parse)(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{text!r:.80}: {error}") from error


def _listing(path: str) -> None:
    found = Listing.read(path).manifest()
    Listing.of(found).to_text()


_READERS: Sequence[Callable[[str], Any]] = (
    placing._device_map,
    placing._frequencies,
    read_machine,
    _expected,
    _listing,
    lambda path: is_plan(scratch() / "options.json"),
)


def options(data: bytes) -> str:
    """A JSON file that an option names: which, the first byte says."""
    path = scratch() / "options.json"
    path.write_bytes(data[1:])
    read = _READERS[(data[0] if data else 0) % len(_READERS)]
    return type(_called(read, str(path))).__name__
