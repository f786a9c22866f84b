"""``Dispatcher``: the one way through, from a checkpoint and a model to a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelquirks.planner.adapter.adapter import Adapter, open_adapter
from modelquirks.planner.adapter.joint import Joint
from modelquirks.planner.checkpoint.fingerprint import layout_digest
from modelquirks.planner.checkpoint.manifest import MARK, Manifest
from modelquirks.planner.checkpoint.open import CheckpointError
from modelquirks.planner.checkpoint.openoptions import AS_USUAL, OpenOptions, Weights
from modelquirks.planner.collector import collector_paused
from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.finding import Finding, brief, shown
from modelquirks.planner.mapping.audit import Audit
from modelquirks.planner.mapping.derive import Derived, Waivers, derive
from modelquirks.planner.mapping.fit import DtypeRule
from modelquirks.planner.mapping.logical import Logical
from modelquirks.planner.mapping.nearest import closest
from modelquirks.planner.mapping.offers import Offers, find_offers
from modelquirks.planner.mapping.remarks import dtype_unknown, packing_unseen, without_model
from modelquirks.planner.mapping.requests import idle_aliases, idle_requests
from modelquirks.planner.mapping.ties import TieGroup, tie_groups
from modelquirks.planner.model.build import model_config
from modelquirks.planner.model.skeleton import ModelTensor, Skeleton
from modelquirks.planner.opening import NO_HUB, HubOptions, open_checkpoint
from modelquirks.planner.placement.machine import Machine
from modelquirks.planner.placement.refusals import refusals
from modelquirks.planner.placement.workload import Workload
from modelquirks.planner.placing import DeviceMap, Request, placement_of
from modelquirks.planner.plan import EMPTY_AUDIT, ModelFacts, Options, Plan, QuirkNote
from modelquirks.quirks.pattern import Pattern
from modelquirks.quirks.recipe import TensorType
from modelquirks.quirks.record import Alias, alias_faults
from modelquirks.quirks.registry import Origin, Registry
from modelquirks.quirks.resolve import Facts, Resolution, resolve

if TYPE_CHECKING:
    import torch

    from modelquirks.planner.export.exportreport import ExportReport
    from modelquirks.planner.infer.inference import Inference
    from modelquirks.quirks.library import LibraryRules

__all__ = ["Dispatcher", "OptionError"]

_MAX_DEPTH = 100
"""Modules within each other: the deepest of released models have about ten."""


class OptionError(ValueError):
    """An option that cannot mean anything; the message says why."""


class Dispatcher:
    """Makes plans with the quirks of a registry (by default: of all installed plugins)."""

    def __init__(self, registry: Registry | None = None) -> None:
        """Take *registry*; without one, the plugins are loaded at the first plan."""
        self._registry = registry

    @property
    def registry(self) -> Registry:
        """The registry in use."""
        if self._registry is None:
            self._registry = Registry.load()
        return self._registry

    @collector_paused()
    def plan(
        self,
        checkpoint: str | Path | Manifest,
        *,
        model: torch.nn.Module | Skeleton | None = None,
        device_map: DeviceMap = "auto",
        max_memory: Mapping[Any, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        aliases: Sequence[str | tuple[str, str] | Alias] = (),
        ties: Sequence[str | Sequence[str]] = (),
        quirks: Iterable[str] = (),
        no_quirks: Iterable[str] = (),
        allow_missing: Iterable[str] = (),
        min_coverage: float | None = None,
        dequantize: bool = False,
        no_split_module_classes: str | Iterable[str] | None = None,
        offload_buffers: bool = False,
        expert_offload: bool = True,
        machine: str | Machine | None = None,
        workload: Workload | None = None,
        reserve: Mapping[Any, Any] | None = None,
        pins: Sequence[str | tuple[str, Any]] = (),
        expert_frequencies: Mapping[str, Sequence[float]] | None = None,
        weights: Weights | None = None,
        tag: str | None = None,
        adapter: str | Path | Adapter | Sequence[str | Path] | None = None,
        merge_adapter: bool = False,
        revision: str | None = None,
        token: str | bool | None = None,
        subfolder: str = "",
    ) -> Plan:
        """Return the plan for loading *checkpoint* into *model*; headers are all that is read.

        *checkpoint* is a folder, a weight file or an index, or what ``open_manifest`` made of one;
        or a repository on the hub, ``org/name``, of which *revision* and *subfolder* may be named,
        and which *token* opens (docs/hub.md).
        Without *model* the plan shows what
        is stored and where it would fit, and cannot be executed. *device_map* is ``auto``,
        ``balanced``, ``balanced_low_0``, ``sequential``, a mapping, or None (no dispatch).
        *max_memory* is in accelerate's forms; without it this machine is asked. As there, the
        disk takes what fits nowhere else; ``"disk": 0`` forbids it. *machine* describes another
        one (a name that ships, a file, or a ``Machine``): its capacities where *max_memory* gives
        none, and its rates. *workload* says how long and how many the sequences will be, *reserve*
        how much is kept free on a device, *pins* (``"model.layers.{0..9}=0"``) what must be
        where, *expert_frequencies* by layer the share of tokens that goes to each expert, if it
        was measured. Stacked experts that are offloaded are brought one by one, and placed in that
        knowledge, unless *expert_offload* is False. *dtype* is a
        torch dtype or its name, ``auto`` (as stored), or None (as the model has it). *aliases*
        are ``"stored=model"`` patterns (``"adapter:stored=model"``: of the adapter
        alone), *ties* ``"a=b"`` names that share one tensor. Records
        named in *quirks* apply even if they do not match, those in *no_quirks* never. Model
        tensors that fit a pattern of *allow_missing* may be missing. Below *min_coverage* (0 to
        1) the plan is not usable, nor where packed weights would have to become plain ones without
        *dequantize*. Of a training checkpoint *weights* are its ``master`` copies in fp32 or those
        in the dtype of ``training``, *tag* which of its saved states is meant; the plan keeps the
        choice.

        *adapter* is the folder of a PEFT adapter to be planned together with its base, which is
        *checkpoint*: with *merge_adapter* its changes are part of the recipes of the weights, as
        PEFT's ``merge_and_unload`` would make them; without, *model* is a PEFT model, and its
        names for both are filled. One at a time.

        Raises :class:`~modelquirks.planner.checkpoint.open.CheckpointError` if there is nothing to
        read, ValueError for options that mean nothing. Everything else is in the plan.
        """
        hub = HubOptions(revision, token, subfolder)
        manifest = base = self.manifest(checkpoint, OpenOptions(weights, tag), hub)
        _refuse_deep(manifest)
        skeleton = _skeleton(model)
        of_adapter, of_base = _apart(aliases)
        renames = [_alias(alias) for alias in of_base]
        joint = self._joint(adapter, base, skeleton, of_adapter, merge=merge_adapter)
        library = self._library(model, skeleton, joint)
        config = _config(manifest, skeleton)
        resolution = resolve(
            self.registry.records,
            Facts(config, tuple(manifest.families.values()), manifest.container),
            known=_wanted(skeleton, joint),
            aliases=renames,
            force=quirks,
            exclude=no_quirks,
            library=None if library is None else library[0],
        )
        if skeleton is not None:
            skeleton.take_families(manifest)
        wanted = _wanted(skeleton, joint)
        offers = find_offers(resolution, config, wanted, self.registry.schemes, _types_of(manifest))
        if joint is not None:
            manifest, offers = joint.manifest, joint.offers(offers)
        allowed = tuple(str(Pattern(text)) for text in allow_missing)
        waivers = Waivers(missing=allowed, dequantize=dequantize)
        groups: Sequence[TieGroup] = ()
        derived: Derived | None = None
        if skeleton is not None:
            tied = [_tie(tie, skeleton.wanted) for tie in ties]
            groups = tie_groups(skeleton, resolution, config, tied)
            derived = derive(
                manifest,
                skeleton,
                offers,
                resolution,
                ties=groups if joint is None else joint.ties(groups),
                schemes=self.registry.schemes,
                dtype=DtypeRule.of(
                    _dtype(dtype), skeleton, _kept(resolution), _own_dtype(offers, joint)
                ),
                waivers=waivers,
            )
        no_split = {c for record in resolution.records() for c in record.no_split}
        request = Request.of(
            machine,
            workload,
            reserve,
            pins,
            device_map=device_map,
            max_memory=max_memory,
            frequencies=expert_frequencies,
            no_split=no_split | _classes(no_split_module_classes),
            offload_buffers=offload_buffers,
            expert_offload=expert_offload,
            experts_indexed=callable(getattr(model, "set_experts_implementation", None)),
        )
        placement = placement_of(
            base if skeleton is None else manifest, skeleton, derived, offers, config, request
        )
        audit = EMPTY_AUDIT if derived is None else derived.audit
        return Plan(
            root=manifest.root,
            path=manifest.path,
            checkpoint=base.to_json(),
            shards=manifest.shards,
            layout=layout_digest(manifest.readable),
            opening=manifest.options,
            model=None if skeleton is None else _model_facts(skeleton),
            quirks=(*_notes(resolution), *_library_note(resolution, library)),
            audit=audit,
            placement=placement,
            recipes=() if derived is None else derived.recipes,
            aliases={} if derived is None else derived.aliases,
            compare=() if derived is None else derived.compare,
            findings=(
                *self._findings(resolution, audit, min_coverage),
                *_about_adapter(joint, base, groups, offers, has_model=skeleton is not None),
                *idle_aliases(renames, resolution),
                *idle_requests(
                    skeleton,
                    ties=ties,
                    allow_missing=waivers.missing,
                    min_coverage=min_coverage,
                ),
                *packing_unseen(config, resolution),
                *refusals(_kept_packed(offers, wanted), resolution.records(), placement.devices),
                *(dtype_unknown(manifest, dtype) if skeleton is not None else ()),
                *(without_model(config, offers) if skeleton is None else ()),
            ),
            options=Options(
                offload_buffers=offload_buffers,
                dispatch=device_map is not None,
                expert_offload=expert_offload,
            ),
            adapter=None if joint is None else joint.facts,
            origin=manifest.origin,
            registry=self.registry,
        )

    def export(
        self,
        checkpoint: str | Path | Manifest,
        out: str | Path,
        *,
        weights: Weights | None = None,
        tag: str | None = None,
        **options: Any,
    ) -> ExportReport:
        """Write *checkpoint* to the folder *out* as sharded safetensors, and read it back.

        Under the names that are stored, or with ``model=`` as the model wants it. *weights* and
        *tag* are those of :meth:`plan`, the other arguments those of
        :func:`modelquirks.planner.export.perform.export`, which says what is raised.
        """
        from modelquirks.planner.export.perform import export

        chosen = OpenOptions(weights, tag)
        return export(checkpoint, out, registry=self.registry, options=chosen, **options)

    def model(self, checkpoint: str | Path | Manifest) -> torch.nn.Module | None:
        """Return the model that the config.json of *checkpoint* describes, without weights.

        None if no plugin builds it; no code that comes with the checkpoint is run.
        """
        manifest = self.manifest(checkpoint)
        built = self.registry.model(model_config(manifest), manifest.root)
        return None if built is None else built[0]

    def infer(
        self, checkpoint: str | Path | Manifest, model: torch.nn.Module | Skeleton | Manifest
    ) -> Inference:
        """Return rules that could map *checkpoint* to *model*, by names and shapes; apply none.

        *model* may be another checkpoint of the same model. No quirk takes part.
        """
        from modelquirks.planner.infer.inference import infer
        from modelquirks.planner.infer.sides import side_of, types_of

        manifest = self.manifest(checkpoint)
        wanted = model if isinstance(model, Manifest) else _described(model)
        side = side_of(wanted)
        return infer(types_of(manifest), side.tensors, side.ties)

    def manifest(
        self,
        checkpoint: str | Path | Manifest,
        options: OpenOptions = AS_USUAL,
        hub: HubOptions = NO_HUB,
    ) -> Manifest:
        """Return what *checkpoint* holds; one that is open already is given back.

        OptionError if something is to be chosen of one that is open.
        """
        if not isinstance(checkpoint, Manifest):
            return open_checkpoint(checkpoint, lambda: self.registry, options, hub=hub)
        if options or hub:
            told = " and ".join(filter(None, (options.told(), hub.told())))
            raise OptionError(
                f"{told}: the checkpoint is open already; give them to open_checkpoint"
            )
        return checkpoint

    def _joint(
        self,
        adapter: str | Path | Adapter | Sequence[str | Path] | None,
        base: Manifest,
        skeleton: Skeleton | None,
        aliases: Sequence[Alias],
        *,
        merge: bool,
    ) -> Joint | None:
        """Return *adapter* with its base; OptionError for what cannot be asked for."""
        if adapter is None:
            if merge or aliases:
                what = "to merge" if merge else f"for the alias {aliases[0].stored!r}"
                raise OptionError(f"there is no adapter {what}: give one, with --adapter")
            return None
        if not isinstance(adapter, str | Path | Adapter):
            if len(adapter) != 1:
                raise OptionError(
                    f"{len(adapter)} adapters: one at a time is planned with its base. Merge the "
                    "first with export, and the next into that; or let PEFT join them "
                    "(add_weighted_adapter)"
                )
            adapter = adapter[0]
        if not isinstance(adapter, Adapter):
            adapter = open_adapter(adapter, lambda: self.registry)
        return Joint(adapter, base, skeleton, merge, aliases)

    def _library(
        self,
        model: torch.nn.Module | Skeleton | None,
        skeleton: Skeleton | None,
        joint: Joint | None,
    ) -> tuple[LibraryRules, Origin] | None:
        """Return the rules of the library that *model* comes from, and which plugin gives them."""
        if skeleton is None or isinstance(model, Skeleton):
            return None
        if joint is not None:
            model = joint.inner(model)
        return self.registry.library(model, _wanted(skeleton, joint).keys())

    def _findings(
        self, resolution: Resolution, audit: Audit, min_coverage: float | None
    ) -> Iterable[Finding]:
        for problem in self.registry.problems:
            yield Finding("plugin-problem", "warning", problem)
        for problem in () if resolution.library is None else resolution.library.problems:
            yield Finding("library-problem", "warning", problem)
        for conflict in resolution.conflicts:
            yield Finding("quirk-conflict", "error", conflict)
        for problem in resolution.problems:
            yield Finding("unknown-quirk", "error", problem)
        if min_coverage is not None and audit.coverage < min_coverage:
            yield Finding(
                "coverage-low",
                "error",
                f"{audit.n_accounted} of {audit.n_model} model tensors are accounted for "
                f"({audit.coverage:.2%}), {min_coverage:.2%} were asked for",
            )


def _refuse_deep(manifest: Manifest) -> None:
    """Raise CheckpointError for names of modules in modules without end, which no model has."""
    if deep := [name for name in manifest.families if name.count(".") > _MAX_DEPTH]:
        raise CheckpointError(
            f"{manifest.shown!r} names {len(deep)} tensors that are in more than {_MAX_DEPTH} "
            f"modules, one within the other: {brief(deep[0], 100)}; no model has such names"
        )


def _skeleton(model: torch.nn.Module | Skeleton | None) -> Skeleton | None:
    return None if model is None else _described(model)


def _described(model: torch.nn.Module | Skeleton) -> Skeleton:
    if isinstance(model, Skeleton):
        return model
    from modelquirks.planner.model.from_module import skeleton_of

    return skeleton_of(model)


def _wanted(skeleton: Skeleton | None, joint: Joint | None) -> Mapping[str, ModelTensor]:
    """Return what the checkpoint has to provide: with an adapter, under the names of its base."""
    if joint is not None:
        return joint.wanted
    return {} if skeleton is None else skeleton.wanted


def _own_dtype(offers: Offers, joint: Joint | None) -> Collection[str]:
    """Return the names of which is not asked what is asked of weights."""
    if joint is None or not joint.own_names:
        return offers.companions
    return joint.own_names.union(offers.companions)


def _about_adapter(
    joint: Joint | None,
    base: Manifest,
    ties: Sequence[TieGroup],
    offers: Offers,
    *,
    has_model: bool,
) -> Iterator[Finding]:
    """Yield what is odd about the adapter; an error for one that is given in place of a base."""
    if joint is not None:
        yield from joint.findings(ties, offers)
        return
    for finding in base.findings if has_model else ():
        if finding.code == "adapter":
            text = f"adapter against base: {finding.message}"
            yield Finding("adapter-as-base", "error", text)


def _config(manifest: Manifest, skeleton: Skeleton | None) -> Mapping[str, Any]:
    """Return config.json; a checkpoint without one is taken to be of the model's kind."""
    if manifest.config or skeleton is None:
        return manifest.config
    return skeleton.config


def _alias(alias: str | tuple[str, str] | Alias) -> Alias:
    if isinstance(alias, Alias):
        return _sound(alias)
    stored, _, target = (
        alias.partition("=") if isinstance(alias, str) else (*alias[:1], "", alias[1])
    )
    if not stored or not target:
        raise OptionError(f"alias {alias!r} must be 'stored=model', for example 'module.**=**'")
    return _sound(Alias(stored, target))


def _sound(alias: Alias) -> Alias:
    """Return *alias*; ValueError if it would give several tensors one name, or is no pattern."""
    if faults := list(alias_faults(alias)):
        raise OptionError("; ".join(faults))
    return alias


def _apart(
    aliases: Iterable[str | tuple[str, str] | Alias],
) -> tuple[list[Alias], list[str | tuple[str, str] | Alias]]:
    """Return the aliases for names of an adapter, without what marks them, and the others."""
    own: list[Alias] = []
    others: list[str | tuple[str, str] | Alias] = []
    for alias in aliases:
        if isinstance(alias, str) and alias.startswith(MARK):
            own.append(_alias(alias.removeprefix(MARK)))
        else:
            others.append(alias)
    return own, others


def _tie(tie: str | Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    names = tuple(tie.split("=")) if isinstance(tie, str) else tuple(tie)
    if len(names) < 2 or not all(names):
        raise OptionError(f"tie {tie!r} must name two tensors: 'lm_head.weight=embed.weight'")
    if strangers := [name for name in names if name not in known]:
        near = [other for name in strangers for other in closest(name, known)]
        hint = f"; the nearest names are {shown(near)}" if near else ""
        raise OptionError(f"tie {tie!r}: the model has no tensor {shown(strangers)}{hint}")
    return names


def _dtype(dtype: torch.dtype | str | None) -> str | None:
    if dtype is None:
        return None
    return "auto" if dtype == "auto" else from_torch(dtype)


def _kept(resolution: Resolution) -> tuple[str, ...]:
    return tuple(text for record in resolution.records() for text in record.keep_dtype)


def _classes(names: str | Iterable[str] | None) -> frozenset[str]:
    if names is None:
        return frozenset()
    return frozenset([names] if isinstance(names, str) else names)


def _model_facts(skeleton: Skeleton) -> ModelFacts:
    return ModelFacts(skeleton.source, len(skeleton.wanted))


def _notes(resolution: Resolution) -> tuple[QuirkNote, ...]:
    return tuple(
        QuirkNote(
            a.record.name,
            a.registered.origin.plugin,
            a.registered.origin.distribution,
            a.registered.origin.version,
            a.why,
        )
        for a in resolution.applied
    )


def _library_note(
    resolution: Resolution, library: tuple[LibraryRules, Origin] | None
) -> Iterator[QuirkNote]:
    """Yield the note of the library's rules, if they are in use."""
    if library is not None and resolution.library is not None:
        rules, origin = library
        record = rules.record
        yield QuirkNote(record.name, origin.plugin, origin.distribution, origin.version, record.why)


def _kept_packed(offers: Offers, wanted: Collection[str]) -> Mapping[str, Iterable[str]]:
    """Return the parts of packed weights that the model takes as they are, by record.

    Few records ask for them, so they are looked up as they are taken.
    """
    kept: dict[str, list[Logical]] = {}
    for pack in offers.packed if wanted else ():
        kept.setdefault(pack.weight.quirks[-1], []).extend(pack.parts)
    return {
        record: filter(wanted.__contains__, chain.from_iterable(part.names for part in parts))
        for record, parts in kept.items()
    }


def _types_of(manifest: Manifest) -> Callable[[str], TensorType]:
    def type_of(stored: str) -> TensorType:
        tensor = manifest.tensors[stored]
        return TensorType(tensor.dtype, tensor.shape)

    return type_of
