"""``Plan``: everything that will be loaded, from where, to where, and why; frozen, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelquirks.planner.adapter.joint import AdapterFacts
from modelquirks.planner.checkpoint.json_text import JsonProblem, read_json
from modelquirks.planner.checkpoint.manifest import Shard
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions
from modelquirks.planner.checkpoint.origin import HubOrigin
from modelquirks.planner.finding import Finding, brief, shown
from modelquirks.planner.mapping.audit import Audit, Entry, Suggestion
from modelquirks.planner.mapping.recipes import FamilyRecipe
from modelquirks.planner.placement.memory import Device
from modelquirks.planner.placement.placement import DeviceMemory, Inputs, Placement, Prediction
from modelquirks.planner.placement.workload import Reserve
from modelquirks.planner.typed import misfits
from modelquirks.planner.writing import write_whole
from modelquirks.quirks.recipe import RecipeError

if TYPE_CHECKING:
    import torch

    from modelquirks.planner.execution.execute import ExecutionReport
    from modelquirks.planner.execution.stream import Ties, WeightStream
    from modelquirks.quirks.registry import Registry

__all__ = ["EMPTY_AUDIT", "SCHEMA", "ModelFacts", "Options", "Plan", "PlanError", "QuirkNote"]

SCHEMA = 1
"""Number of the JSON format. A reader refuses what it does not know."""

EMPTY_AUDIT = Audit((), ())
"""The audit of a plan that had no model to compare with."""


class PlanError(RuntimeError):
    """A plan that cannot be used; the message lists every reason."""


class ModelFacts(NamedTuple):
    """The model that a plan was made for."""

    source: str
    tensors: int


class QuirkNote(NamedTuple):
    """A record that was applied, where it comes from, and why it applies."""

    name: str
    plugin: str
    distribution: str
    version: str
    why: str


class Options(NamedTuple):
    """What was asked for, as far as execution needs it."""

    offload_buffers: bool = False
    dispatch: bool = True
    """False: no device map was asked for, tensors go where the model's own are."""
    expert_offload: bool = True
    """Whether stacked experts that are offloaded are brought one by one."""


@dataclass(frozen=True)
class Plan:
    """What :meth:`Dispatcher.plan` returns. ``ok`` says whether it can be used."""

    root: Path
    path: Path
    checkpoint: Mapping[str, Any]
    """The ``checkpoint`` object of the report."""
    shards: tuple[Shard, ...]
    """The files as they were when they were read: execution refuses others."""
    layout: str
    """Digest of which tensor is read from where in them."""
    model: ModelFacts | None
    quirks: tuple[QuirkNote, ...]
    audit: Audit
    """Empty if there was no model to compare with."""
    placement: Placement
    recipes: tuple[FamilyRecipe, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    compare: tuple[tuple[str, ...], ...] = ()
    findings: tuple[Finding, ...] = ()
    """What was found beyond the checkpoint, the audit and the placement."""
    options: Options = field(default_factory=Options)
    opening: OpenOptions = AS_USUAL
    """Which state and weights of the checkpoint: execution opens the same."""
    adapter: AdapterFacts | None = None
    """The adapter that is loaded with it, merged or beside."""
    origin: HubOrigin | None = None
    """The commit on the hub whose files are fetched when the plan is executed."""
    moved: bool = False
    """The files lie elsewhere now, so their times say nothing."""
    registry: Registry | None = field(default=None, compare=False, repr=False)
    """Where execution finds the packing schemes; None: all installed plugins."""

    @property
    def shown(self) -> str:
        """What to call the checkpoint to people: its path, or the repository."""
        return str(self.origin or self.path)

    @property
    def all_findings(self) -> tuple[Finding, ...]:
        """Every finding, of every step."""
        checkpoint = tuple(Finding(**data) for data in self.checkpoint["findings"])
        return (*checkpoint, *self.findings, *self.audit.findings, *self.placement.findings)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the plan cannot be used; empty if it can."""
        return tuple(self._problems())

    @property
    def ok(self) -> bool:
        """Whether the plan can be executed as it is."""
        return not self.problems

    def refusal(self, *more: str) -> str:
        """Return why the plan cannot be used, *more* reasons first, and what may mend it."""
        proposed = "Proposed, not applied (in Python: aliases and ties of Dispatcher.plan):"
        parts = (
            ("the plan cannot be used:", (*more, *self.problems)),
            ("Also noticed:", [f.message for f in self.all_findings if f.severity == "warning"]),
            (proposed, [suggestion.text for suggestion in self.audit.suggestions]),
        )
        return "\n".join(_listed(title, lines) for title, lines in parts if lines)

    @property
    def device_map(self) -> Mapping[str, Device]:
        """Module prefix → device, compact and disjoint."""
        return self.placement.device_map

    def _problems(self) -> Iterator[str]:
        for kind in ("missing", "mismatched", "duplicate"):
            entries = [e for e in (*self.audit.model, *self.audit.stored) if e.kind == kind]
            if entries:
                count = sum(len(entry.names) for entry in entries)
                names = shown([name for entry in entries for name in entry.names])
                reasons = dict.fromkeys(entry.reason for entry in entries)
                yield f"{count} {kind}: {names} ({'; '.join(list(reasons)[:3])})"
        for finding in self.all_findings:
            if finding.severity == "error":
                yield finding.message

    def to_json(self) -> dict[str, Any]:
        """Return the report: the object that ``plan --json`` prints. Its keys are stable."""
        audit = self.audit.to_json()
        if self.model is None:
            audit["coverage"] = None
        return {
            "schema": SCHEMA,
            "checkpoint": dict(self.checkpoint),
            "model": None if self.model is None else self.model._asdict(),
            "quirks": [quirk._asdict() for quirk in self.quirks],
            "audit": audit,
            "placement": self.placement.to_json(),
            "findings": [f.to_json() for f in self.all_findings],
            "ok": self.ok,
            **({} if self.adapter is None else {"adapter": self.adapter.to_json()}),
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON: the report, and under ``execution`` what execution needs."""
        data = self.to_json()
        data["execution"] = {
            "root": str(self.root.resolve()),
            "path": str(self.path.resolve()),
            "shards": [_shard_json(shard) for shard in self.shards],
            "layout": self.layout,
            **({} if self.origin is None else {"hub": self.origin.to_json()}),
            "recipes": [recipe.to_json() for recipe in self.recipes],
            "aliases": dict(self.aliases),
            "compare": [list(names) for names in self.compare],
            "devices": {str(k): v for k, v in self.placement.device_map.items()},
            "audit": {
                "model": [entry.to_json() for entry in self.audit.model],
                "stored": [entry.to_json() for entry in self.audit.stored],
                "findings": [f.to_json() for f in self.audit.findings],
            },
            "findings": [f.to_json() for f in self.findings],
            "placing": None if (inputs := self.placement.inputs) is None else inputs.to_json(),
            "placement_findings": [f.to_json() for f in self.placement.findings],
            "options": self.options._asdict(),
            "opening": self.opening.to_json(),
            "adapter": None if self.adapter is None else os.path.abspath(self.adapter.path),
        }
        write_whole(Path(path), json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, *, checkpoint: str | Path | None = None) -> Plan:
        """Read a plan that :meth:`save` wrote; PlanError if it is none or of another schema.

        *checkpoint* is the folder or file to execute it on, if it is not where it was.
        """
        data, _ = read_json(Path(path))
        if isinstance(data, JsonProblem):
            what = "" if data.code == "file-unreadable" else "cannot be read as a plan: it "
            raise PlanError(f"{str(path)!r} {what}{data.text}")
        if (fault := _no_plan(data)) is not None:
            raise PlanError(f"{str(path)!r} {fault}; save one with `modelquirks plan … -o FILE`")
        try:
            plan = _from_json(cls, data, checkpoint)
            faults = [
                text for name, kind in _KINDS for text in misfits(getattr(plan, name), kind, name)
            ]
            told = plan.checkpoint
            faults += [t for key, kind in _TOLD for t in misfits(told[key], kind, f"its {key!r}")]
            OpenOptions(**told.get("chosen", {}))
            if faults:
                raise TypeError("; ".join(faults[:10]))
            return plan
        except RecursionError as error:
            raise PlanError(f"{str(path)!r} is damaged: it is nested too deep") from error
        except _DAMAGE as error:
            raise PlanError(f"{str(path)!r} is damaged: {brief(error, 2000)}") from error

    def execute(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """Load the planned tensors into *model*, dispatch it, verify it, and return it.

        The model is as before if anything fails. What was noticed on the way is logged. Keyword
        arguments are those of :meth:`load_into`.
        """
        from modelquirks.planner.tell import tell

        tell(self.load_into(model, **options).notes)
        return model

    def load_into(self, model: torch.nn.Module, **options: Any) -> ExecutionReport:
        """As :meth:`execute`, and return what was loaded where, how fast, and how verified.

        *skip_keys*, *preload_module_classes* and *force_hooks* are passed to accelerate's
        ``dispatch_model``. With ``materialize=True`` weights that stay on disk and must be
        computed are computed once and written to *offload_folder*, where later calls find them
        as long as the checkpoint is as it was; without it nothing is written anywhere.
        *expert_offload* and *expert_cache* (bytes, or ``"4GiB"``) say whether stacked experts that
        are offloaded are brought one by one, and how much of them is kept on the device that
        computes; by default as planned, and a quarter of what is free there. *ahead_bytes* (1 GiB)
        bounds what is computed of offloaded weights in the background before a forward pass comes
        to it; 0 turns that off.

        What is kept in CPU memory as the file has it is a view of the mapped file; *copy* makes
        copies instead, for people who will overwrite the file in place. *load_memory* (256 MiB,
        or for example ``"1GiB"``) is what making the tensors may take beside their own memory.
        *verify* compares ``"samples"`` of each tensor with the files, or ``"full"``: every byte.
        *progress* hears of the bytes as they arrive
        (:class:`~modelquirks.planner.execution.progress.Progress`).

        A model that is sharded (``fully_shard``, ``parallelize_module``: it has DTensors) is loaded
        by all ranks together, each reading what it has of it. With ``together=True`` that also
        holds for a model of plain tensors, which may be a pipeline stage. *group* are the ranks, by
        default all; *timeout* is how many seconds one may be behind. See
        :func:`modelquirks.planner.distributed.perform.perform_together`.
        """
        from modelquirks.planner.execution.perform import perform

        return perform(self, model, **options)

    def weights(
        self,
        names: Iterable[str] | None = None,
        *,
        device: torch.device | str = "cpu",
        ties: Ties = "once",
        copy: bool = False,
        load_memory: int | str | None = None,
    ) -> WeightStream:
        """Return the planned tensors as ``(name, tensor)`` pairs, made as they are iterated over.

        For servers that fill their modules themselves: ``server.load_weights(plan.weights())``.
        Names, shapes and dtypes are those of the model that the plan was made for; it need not be
        there any more. The order is that of the files. *names* (names or patterns,
        ``"model.layers.{0}.**"``) chooses some. All go to *device*; the device map plays no role. A
        tied tensor comes once, under the name that owns it, or with ``ties="each"`` under each
        of its names, the same object every time.

        On the CPU, what a file holds as it is needed is a view of the mapped file, of which only
        what is used is read; *copy* makes copies. *load_memory* bounds what making the others
        takes beside them, as in :meth:`load_into`.

        Raises PlanError if the plan cannot be used or the files have changed, ValueError for names
        that it does not make.
        """
        from modelquirks.planner.execution.stream import WeightStream

        return WeightStream(
            self, names, device=device, ties=ties, copy=copy, load_memory=load_memory
        )


_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecipeError)
"""What making a plan of other data than :meth:`Plan.save` wrote raises."""

_KINDS: tuple[tuple[str, Any], ...] = (
    ("shards", tuple[Shard, ...]),
    ("layout", str),
    ("model", ModelFacts | None),
    ("quirks", tuple[QuirkNote, ...]),
    ("audit", Audit),
    ("placement", Placement),
    ("recipes", tuple[FamilyRecipe, ...]),
    ("aliases", Mapping[str, str]),
    ("compare", tuple[tuple[str, ...], ...]),
    ("all_findings", tuple[Finding, ...]),
    ("options", Options),
    ("opening", OpenOptions),
    ("adapter", AdapterFacts | None),
)
"""What execution goes by. A plan is a file that people edit."""

_TOLD: tuple[tuple[str, Any], ...] = (
    *((key, str) for key in ("path", "format")),
    *((key, int) for key in ("tensors", "families", "shards")),
    ("total_bytes", int | None),
)
"""What is told of the checkpoint."""


def _listed(title: str, lines: Sequence[str]) -> str:
    more = [f"… and {len(lines) - 10} more"] if len(lines) > 10 else []
    return "\n- ".join((title, *lines[:10], *more))


def _no_plan(data: object) -> str | None:
    """Return what *data*, the JSON of a file, is instead of a plan; None if it is one."""
    if not isinstance(data, dict) or "schema" not in data:
        return "is no plan: it has no 'schema'"
    if type(data["schema"]) is not int or data["schema"] != SCHEMA:
        return f"is of schema {brief(data['schema'])}, this version reads plans of schema {SCHEMA}"
    if "execution" not in data:
        return "is only a report, as --json prints it: it does not say how to load"
    return None


def _shard_json(shard: Shard) -> dict[str, Any]:
    return {
        "name": shard.name,
        "size_bytes": shard.size_bytes,
        "mtime_ns": shard.mtime_ns,
        "digest": shard.digest,
    }


def _entries(data: Sequence[Mapping[str, Any]]) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            kind=entry["kind"],
            template=entry["template"],
            names=tuple(entry["names"]),
            reason=entry["reason"],
            rule=entry["rule"],
            quirk=entry["quirk"],
            nearest=tuple(entry["nearest"]),
        )
        for entry in data
    )


def _findings(data: Sequence[Mapping[str, Any]]) -> tuple[Finding, ...]:
    return tuple(Finding(**finding) for finding in data)


def _from_json(cls: type[Plan], data: Mapping[str, Any], moved: str | Path | None) -> Plan:
    stored = data["execution"]
    audit = data["audit"]
    path = Path(stored["path"]) if moved is None else Path(moved)
    root = Path(stored["root"]) if moved is None else path if path.is_dir() else path.parent
    return cls(
        root=root,
        path=path,
        checkpoint=data["checkpoint"],
        shards=tuple(Shard(**shard) for shard in stored["shards"]),
        layout=stored["layout"],
        model=None if data["model"] is None else ModelFacts(**data["model"]),
        quirks=tuple(QuirkNote(**quirk) for quirk in data["quirks"]),
        audit=Audit(
            model=_entries(stored["audit"]["model"]),
            stored=_entries(stored["audit"]["stored"]),
            ties=tuple(tuple(names) for names in audit["ties"]),
            unequal_ties=tuple(tuple(names) for names in audit["unequal_ties"]),
            suggestions=tuple(Suggestion(**s) for s in audit["suggestions"]),
            findings=_findings(stored["audit"]["findings"]),
        ),
        placement=_placement(data["placement"], stored),
        recipes=tuple(FamilyRecipe.from_json(recipe) for recipe in stored["recipes"]),
        aliases=dict(stored["aliases"]),
        compare=tuple(tuple(names) for names in stored["compare"]),
        findings=_findings(stored["findings"]),
        options=Options(**stored["options"]),
        opening=OpenOptions(**stored.get("opening", {})),
        adapter=_adapter(data.get("adapter"), stored.get("adapter")),
        origin=HubOrigin.from_json(stored["hub"]) if "hub" in stored and moved is None else None,
        moved=moved is not None,
    )


def _adapter(data: Mapping[str, Any] | None, path: str | None) -> AdapterFacts | None:
    """Return the adapter of a plan file, by its absolute path."""
    facts = AdapterFacts.from_json(data)
    return facts if facts is None or path is None else facts._replace(path=path)


def _placement(data: Mapping[str, Any], stored: Mapping[str, Any]) -> Placement:
    keys: dict[str, Device] = {}
    for device in (*stored["devices"].values(), data["main_device"]):
        if device is not None:
            keys[str(device)] = device
    memory = {
        keys.get(name, int(name) if name.isdecimal() else name): DeviceMemory(**values)
        for name, values in data["memory"].items()
    }
    return Placement(
        device_map=dict(stored["devices"]),
        devices={},
        memory=memory,
        main_device=data["main_device"],
        solver=data["solver"],
        reasons=data["reasons"],
        findings=_findings(stored["placement_findings"]),
        reserves=tuple(Reserve(**reserve) for reserve in data["reserves"]),
        prediction=None if data["prediction"] is None else Prediction.from_json(data["prediction"]),
        inputs=None if stored["placing"] is None else Inputs.from_json(stored["placing"]),
    )
