"""What there is of the optimizer's state: which kinds, how much, whether all. None of it is loaded.

Source of the keys: ``state_dict`` of the optimizers of DeepSpeed 0.19.8 (``base_optimizer_state``,
of ZeRO 3 ``optimizer_state_dict``), ``ds_to_universal`` for the files of universal checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from modelquirks.planner.checkpoint.torch_pickle import TensorRecord
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.placement.memory import show_bytes
from modelquirks.plugins.deepspeed.files import Folder, list_states
from modelquirks.plugins.deepspeed.grid import Grid
from modelquirks.plugins.deepspeed.saved import SavedState, mapping, read_saved
from modelquirks.plugins.deepspeed.states import OptimState, inner_state

__all__ = ["optimizer_state"]

_MAX_DEPTH = 6  # of dictionaries and lists; a pickle may hold one that contains itself


class _Held(NamedTuple):
    """What one file has."""

    file: str
    kinds: tuple[str, ...]
    n_bytes: int
    fault: str = ""


def optimizer_state(grid: Grid, folder: Folder) -> Finding:
    """Say what is there, in one sentence with the code ``not-loaded``."""
    held = [*(_universal(folder.path) if folder.universal else _of_files(grid, folder.path))]
    lacking = [name for name in grid.missing if name.endswith("optim_states.pt")]
    kinds = dict.fromkeys(kind for one in held for kind in one.kinds)
    faults = [f"{name!r} is missing" for name in lacking]
    faults += [f"{one.file!r} {one.fault}" for one in held if one.fault]
    more = f" … and {len(faults) - 10} more" if len(faults) > 10 else ""
    told = f"{', '.join(faults[:10])}{more}"
    if not kinds:
        why = f" ({told})" if faults else ""
        text = f"no state of the optimizer is here{why}: a training cannot go on where it was."
        return Finding("not-loaded", "info", text)
    verdict = f"not complete: {told}" if faults else "complete"
    size = show_bytes(sum(one.n_bytes for one in held))
    where = "1 file" if len(held) == 1 else f"{len(held)} files"
    text = f"the optimizer's state ({shown(kinds, 4)}) has {size} in {where}, {verdict}."
    return Finding("not-loaded", "info", f"{text} It is not loaded.")


def _of_files(grid: Grid, folder: Path) -> Iterator[_Held]:
    for optim in grid.optims.values():
        yield _of_rank(optim)
    for model in grid.models.values():
        if grid.stage == "0" and (state := mapping(model.facts.get("optimizer"))):
            yield _held(model.saved, mapping(state).get("state", state))
    for name in list_states(folder):
        if name.kind == "expert-optim":
            saved = read_saved(folder, name)
            yield _held(saved, saved.value.get("optimizer"))


def _of_rank(optim: OptimState) -> _Held:
    """Return the state of one rank: each kind should be as long as the masters, or padded."""
    held = _held(optim.saved, inner_state(optim.saved))
    if held.fault:
        return held
    masters = sum(math.prod(flat.shape or ()) for flat in optim.flat if flat is not None)
    lengths: dict[str, int] = {}
    for kind, tensor in _moments(inner_state(optim.saved)):
        lengths[kind] = lengths.get(kind, 0) + math.prod(tensor.shape)
    short = [kind for kind, length in lengths.items() if length < masters]
    if masters and not lengths:
        return held._replace(fault="has none")
    if short:
        return held._replace(fault=f"has fewer elements in {shown(short)} than in its masters")
    return held


def _held(saved: SavedState, state: Any) -> _Held:
    name = saved.name.name
    if not saved.readable:
        return _Held(name, (), 0, "cannot be read")
    found = [*_tensors(state)]
    placed = saved.place({str(number): tensor for number, (_, tensor) in enumerate(found)})
    lost = [found[int(n)][0] for n, place in placed.tensors.items() if place.begin is None]
    n_bytes = sum(place.nbytes or 0 for place in placed.tensors.values())
    kinds = dict.fromkeys(kind for kind, tensor in found if tensor.shape)
    fault = f"lacks bytes of {shown(dict.fromkeys(lost))}" if lost else ""
    return _Held(name, tuple(kinds), n_bytes, fault)


def _moments(state: Any) -> Iterable[tuple[str, TensorRecord]]:
    return ((kind, tensor) for kind, tensor in _tensors(state) if tensor.shape)


def _tensors(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, TensorRecord]]:
    """Yield the tensors in a state with their own keys; those of no dimensions are counters."""
    if isinstance(value, TensorRecord):
        yield key, value
    elif depth < _MAX_DEPTH and isinstance(value, dict):
        for name, item in value.items():
            if name != "param_groups":
                yield from _tensors(item, str(name), depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, key, depth + 1)


def _universal(folder: Path) -> Iterator[_Held]:
    """Yield what lies beside the weights of each parameter, by the sizes of the files."""
    kinds: dict[str, list[int]] = {}
    for path in (folder / "zero").glob("*/*.pt"):
        if path.stem not in ("fp32", "step"):
            kinds.setdefault(path.stem, []).append(path.stat().st_size)
    if not (folder / "zero" / "optimizer_state.pt").is_file():
        yield _Held("zero/optimizer_state.pt", (), 0, "is missing")
    most = max(map(len, kinds.values()), default=0)
    for kind, sizes in sorted(kinds.items()):
        fault = f"is there for {len(sizes)} of {most} parameters" if len(sizes) < most else ""
        yield _Held(kind, (kind,), sum(sizes), fault)
