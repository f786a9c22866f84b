"""Options of the command line that say where tensors may go, and what for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from modelquirks.planner.cli.command import CallError
from modelquirks.planner.cli.parsing import checked, read_json_file
from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.placement.cost import OBJECTIVES
from modelquirks.planner.placement.machine import read_machine, shipped_machines
from modelquirks.planner.placement.memory import Device, parse_max_memory
from modelquirks.planner.placement.solve import POLICIES
from modelquirks.planner.placement.wishes import parse_pin
from modelquirks.planner.placement.workload import Workload

__all__ = ["add_dtype", "add_placing", "checked", "memory_option", "placing_options"]


def add_placing(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declare the options; return their group."""
    group = parser.add_argument_group("where tensors go")
    group.add_argument(
        "--device-map",
        metavar="POLICY|FILE",
        type=checked(_device_map),
        default="auto",
        help=f"{', '.join(POLICIES)}, or a JSON file with an object of module: device",
    )
    group.add_argument(
        "--max-memory",
        metavar="DEVICE=SIZE,...",
        type=checked(parse_max_memory),
        help="for example 0=24GiB,cpu=64GiB,disk; what is not listed is not used. Without it, "
        "what this machine has free, and the disk",
    )
    group.add_argument(
        "--machine",
        metavar="NAME|FILE",
        type=checked(read_machine),
        help=f"plan for another machine: {', '.join(shipped_machines())}, or a JSON file with "
        "capacities and bandwidths",
    )
    group.add_argument(
        "--pin",
        metavar="MODULE=DEVICE",
        type=checked(parse_pin),
        action="append",
        default=[],
        help="this module must be there; 'model.layers.{0..9}=0' is ten of them (repeatable)",
    )
    group.add_argument(
        "--reserve",
        metavar="DEVICE=SIZE,...",
        type=checked(_reserve),
        help="keep so much free on a device, for example 0=2GiB",
    )
    _add_workload(group)
    add_dtype(group, "of floating-point weights; 'auto': as stored")
    return group


def add_dtype(group: argparse.ArgumentParser | argparse._ArgumentGroup, text: str) -> None:
    """Declare ``--dtype``, with *text* as its help, and ``--dequantize``."""
    group.add_argument("--dtype", type=checked(_dtype), help=text)
    group.add_argument(
        "--dequantize",
        action="store_true",
        help="make plain weights of packed ones, where the model's modules want those",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--context",
        metavar="TOKENS",
        type=checked(_count),
        default=0,
        help="keep room for a cache of so many tokens a sequence, and for running them",
    )
    group.add_argument(
        "--batch", metavar="N", type=checked(_count), default=1, help="so many sequences at once"
    )
    group.add_argument(
        "--kv-dtype",
        metavar="DTYPE",
        type=checked(from_torch),
        help="of the cache, if not the model's",
    )
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="latency",
        help="what 'auto' makes least of: time of a token, time of a token over all sequences "
        "(leaves room for more of them), or time to the first token",
    )
    group.add_argument(
        "--expert-frequencies",
        metavar="FILE",
        type=checked(_frequencies),
        help='measured routing, as JSON: {"3": [0.02, …]} is layer 3, the share of tokens that '
        "goes to each expert",
    )


def placing_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options as ``Dispatcher.plan`` takes them; CallError where they do not agree."""
    try:
        workload = Workload(args.context, args.batch, args.kv_dtype, args.objective)
    except ValueError as error:
        raise CallError(str(error)) from error
    return {
        "device_map": args.device_map,
        "max_memory": memory_option(args.max_memory),
        "machine": args.machine,
        "workload": workload,
        "reserve": args.reserve,
        "pins": [pin for each in args.pin for pin in each],
        "expert_frequencies": args.expert_frequencies,
    }


def memory_option(
    given: Mapping[Device, int | None] | None,
) -> Mapping[Device, int | None] | None:
    """Return the memory to plan with: in Python the disk takes the rest, here it must be named."""
    return None if given is None else {"disk": 0, **given}


def _device_map(text: str) -> str | Mapping[str, Any]:
    if text in POLICIES:
        return text
    found = read_json_file(text, f"none of {', '.join(POLICIES)}, nor ")
    if not isinstance(found, dict) or not all(isinstance(d, str | int) for d in found.values()):
        raise CallError(f"{text!r} must be an object of module: device, as {{'': 'cpu'}}")
    return found


def _frequencies(text: str) -> Mapping[str, list[float]]:
    found = read_json_file(text, "not ")
    if isinstance(found, dict) and all(_is_shares(layer, row) for layer, row in found.items()):
        return found
    raise CallError(
        f"{text!r} must be an object of layer: list of numbers from 0 to 1, one for each expert, "
        'as {"3": [0.02, 0.4]}'
    )


def _is_shares(layer: str, row: object) -> bool:
    return (
        layer.isascii()
        and layer.isdecimal()
        and isinstance(row, list)
        and len(row) > 0
        and all(isinstance(p, int | float) and 0 <= p <= 1 for p in row)
    )


def _reserve(text: str) -> Mapping[Device, int]:
    """Return what must stay free; sizes as in --max-memory."""
    found = parse_max_memory(text)
    if None in found.values():
        raise CallError(f"{text!r}: 'disk' needs a size here")
    return {device: size for device, size in found.items() if size is not None}


def _count(text: str) -> int:
    """Return a whole number; 8k is 8192."""
    number, unit = (text[:-1], 1024) if text[-1:] in "kK" and text else (text, 1)
    if not number.isdecimal():
        raise CallError(f"{text!r} is no whole number, such as 8192 or 8k")
    return int(number) * unit


def _dtype(text: str) -> str:
    return text if text == "auto" else from_torch(text)
