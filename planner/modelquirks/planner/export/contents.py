"""``contents_of``: what an export of a checkpoint holds, or why it cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelquirks.planner.adapter.adapter import open_adapter
from modelquirks.planner.adapter.beside import beside
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.dispatcher import Dispatcher, OptionError
from modelquirks.planner.dtypes import BITS, from_torch
from modelquirks.planner.execution.copies import equal, settle
from modelquirks.planner.execution.loaditem import LoadItem
from modelquirks.planner.execution.openfile import Known, known_of
from modelquirks.planner.execution.passing import PassingReader
from modelquirks.planner.execution.perform import items_of
from modelquirks.planner.execution.preflight import needs, type_faults
from modelquirks.planner.execution.reader import Reader, Region
from modelquirks.planner.export.exportreport import ExportError
from modelquirks.planner.export.storeditems import cast_rule, stored_items
from modelquirks.planner.finding import Finding, shown
from modelquirks.planner.model.from_module import skeleton_of
from modelquirks.planner.plan import Plan
from modelquirks.quirks.recipe import Dequantize, Scheme

if TYPE_CHECKING:
    import torch

__all__ = ["Contents", "contents_of"]

_NO_DTYPE = frozenset({"C128"})
"""What ``torch.save`` writes and safetensors has no dtype for."""


@dataclass(frozen=True)
class Contents:
    """The tensors of an export, none of them made yet."""

    manifest: Manifest
    items: tuple[LoadItem, ...]
    schemes: Mapping[str, Scheme]
    notes: tuple[Finding, ...]
    known: Known
    """What the files were when their headers were read."""
    is_changed: bool
    """Whether the weights are other than the configuration beside them says: cast, made for a
    model, put together from a training run."""

    @property
    def is_plain(self) -> bool:
        """Whether packed weights are made plain."""
        return any(isinstance(node, Dequantize) for item in self.items for node in item.nodes())

    @property
    def ties(self) -> Mapping[str, str]:
        """Names that are not stored, with the name under which their tensor is."""
        return {alias: item.name for item in self.items for alias in item.aliases}

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(item.nbytes for item in self.items)


def contents_of(
    dispatcher: Dispatcher,
    manifest: Manifest,
    *,
    model: torch.nn.Module | None,
    dtype: torch.dtype | str | None,
    dequantize: bool,
    naming: Mapping[str, Any],
) -> Contents:
    """Return the tensors of *manifest* as *model* wants them, or without one as they are stored.

    *naming* are the arguments of ``Dispatcher.plan`` that say what is the same, and what may be
    missing. Reads headers, and where several copies of one tensor are stored, those.

    Raises :class:`ExportError` with every reason, and with what could still be exported.
    """
    asked = None if dtype in (None, "auto") else from_torch(dtype or "")
    if model is None:
        _without_model(naming, dequantize=dequantize)
        plan = dispatcher.plan(manifest, device_map=None)
        items = [*stored_items(manifest, cast_rule(manifest, dispatcher.registry, asked))]
    else:
        plan = dispatcher.plan(
            manifest,
            model=model,
            device_map=None,
            dtype=asked or "auto",
            dequantize=dequantize,
            **naming,
        )
        items = [*items_of(plan, skeleton_of(model))] if plan.ok else []
        manifest = _with_adapter(manifest, plan)
    schemes = dispatcher.registry.schemes
    known = known_of(manifest.shards)
    _refuse(plan, manifest, items, schemes, known)
    items, notes = _settled(items, plan, manifest, schemes, known)
    return Contents(
        manifest=manifest,
        items=tuple(items),
        schemes=schemes,
        notes=(
            *(f for f in plan.all_findings if f.severity == "warning"),
            *_left_out(plan),
            *notes,
        ),
        known=known,
        is_changed=model is not None or asked is not None or bool(manifest.places),
    )


def _with_adapter(manifest: Manifest, plan: Plan) -> Manifest:
    """Return what the items of *plan* are read from: with an adapter, both."""
    if plan.adapter is None:
        return manifest
    return beside(manifest, open_adapter(plan.adapter.path).manifest)


def _without_model(naming: Mapping[str, Any], *, dequantize: bool) -> None:
    given = [name for name, value in naming.items() if value not in (None, (), [], False)]
    if dequantize:
        given.append("dequantize")
    if given:
        raise OptionError(
            f"{shown(given)} need a model to compare with: name one (--model), or leave that out "
            "to have the tensors as they are stored"
        )


def _refuse(
    plan: Plan,
    manifest: Manifest,
    items: Sequence[LoadItem],
    schemes: Mapping[str, Scheme],
    known: Known,
) -> None:
    """Raise with everything that is in the way."""
    reader = Reader(manifest.root, manifest.readable, known=known)
    lacking = {item.name: why for item in items if (why := [*_faults(item, reader, schemes)])}
    told = [plan.refusal()] if not plan.ok else []
    if plan.ok and lacking:
        reasons = [why for texts in lacking.values() for why in texts]
        more = f"\n… and {len(reasons) - 10} more" if len(reasons) > 10 else ""
        told = ["tensors cannot be made:\n- " + "\n- ".join(reasons[:10]) + more]
    if plan.ok and not items:
        told = ["there is no tensor in it"]
    if told:
        whole = [item.name for item in items if item.name not in lacking]
        text = "\n".join((*told, *_still(manifest, whole, len(items))))
        raise ExportError(f"{str(manifest.path)!r} cannot be exported as it is: {text}")


def _faults(item: LoadItem, reader: Reader, schemes: Mapping[str, Scheme]) -> Iterator[str]:
    if faults := reader.faults(needs(item)):
        yield from faults
    elif item.dtype in _NO_DTYPE or item.name == "__metadata__":
        what = f"the dtype {item.dtype}" if item.dtype in _NO_DTYPE else "such a name"
        yield f"{item}: a safetensors file has no place for {what}"
    elif item.dtype not in BITS:
        yield f"{item}: the dtype {item.dtype!r} is not known"
    else:
        yield from type_faults(item, reader, schemes)


def _still(manifest: Manifest, whole: Sequence[str], count: int) -> Iterator[str]:
    """Say what could be exported all the same."""
    yield from (f"What can be had: {f.message}" for f in manifest.findings if f.code == "can-load")
    if whole and len(whole) < count:
        yield (
            f"Whole in the files are {len(whole)} of {count} tensors: {shown(whole, 5)}. The path "
            "of a single weight file exports what that file holds."
        )


def _settled(
    items: Sequence[LoadItem],
    plan: Plan,
    manifest: Manifest,
    schemes: Mapping[str, Scheme],
    known: Known,
) -> tuple[list[LoadItem], list[Finding]]:
    """Tie copies that are equal, where the model has one tensor and several are stored."""
    if not plan.compare:
        return [*items], []
    reader = PassingReader(manifest.root, manifest.readable, known=known)

    def same(one: LoadItem, other: LoadItem) -> bool:
        def make(item: LoadItem, region: Region) -> torch.Tensor:
            if item is one:
                reader.release()  # the pair before has been compared
            return item.make(read=reader.read, types=reader.type_of, schemes=schemes, region=region)

        return equal(one, other, make)

    settled = settle(items, plan.compare, equal=same)
    reader.release()
    return settled


def _left_out(plan: Plan) -> Iterator[Finding]:
    """Name what the checkpoint has and the model does not want, and the other way round."""
    audit = plan.audit
    yield from _named("left-out", "warning", audit.unexpected, "the model has no place for")
    yield from _named("left-out", "info", audit.names("extra"), "not needed, and not written:")
    absent = (*audit.names("absent"), *audit.names("waived"))
    yield from _named("not-written", "info", absent, "not in the checkpoint, and not written:")


def _named(code: str, severity: Any, names: Iterable[str], text: str) -> Iterator[Finding]:
    if listed := [*names]:
        yield Finding(code, severity, f"{text} {shown(listed)}")
