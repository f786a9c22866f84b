"""What tests of quirks need: no torch, no weights, nothing installed but the plugin's own package.

    import modelquirks_acme
    from modelquirks.plugins.testing import Listing, canonical_names, check_plugin

    LISTING = Listing({"body.0.weight": "F32 [4, 4]"}, config={"model_type": "acme"})

    def test_the_names_of_the_checkpoint_become_those_of_the_model() -> None:
        check_plugin(modelquirks_acme)
        names = canonical_names(modelquirks_acme, LISTING)
        assert names == {"body.0.weight": "layers.0.weight"}

Each function registers only the plugin that it is given, nothing that is installed, and raises what
is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from modelquirks.planner.checkpoint.listing import Listing, ListingError
from modelquirks.planner.mapping.offers import find_offers
from modelquirks.quirks.invariants import invariant_faults
from modelquirks.quirks.record import ModelQuirks
from modelquirks.quirks.registry import Registry
from modelquirks.quirks.resolve import Facts, Resolution, resolve

if TYPE_CHECKING:
    from modelquirks.planner.plan import Plan

__all__ = [
    "Listing",
    "ListingError",
    "applied",
    "canonical_names",
    "check_plugin",
    "check_record",
    "plan_of",
    "registry_of",
]


def registry_of(*plugins: object) -> Registry:
    """Return a registry of *plugins* alone: modules, or objects with hooks.

    Raises :class:`~modelquirks.quirks.registry.PluginError` with all faults of one that cannot be
    used.
    """
    registry = Registry()
    for number, plugin in enumerate(plugins):
        name = plugin.__name__ if isinstance(plugin, ModuleType) else f"plugin_{number}"
        registry.register(plugin, name=name)
    return registry


def check_record(record: ModelQuirks, examples: Iterable[str] = ()) -> None:
    """Raise AssertionError with everything that is wrong with *record*.

    See :func:`modelquirks.quirks.invariants.invariant_faults`: aliases come to rest and none is
    hidden by another, ties share no name, rules do not contradict each other, each says why. Each
    of the *examples*, stored names, must fit one of its rules.
    """
    if faults := invariant_faults(record, examples):
        raise AssertionError(f"record {record.name!r}:\n- " + "\n- ".join(faults))


def check_plugin(*plugins: object) -> None:
    """Raise what is wrong with *plugins*, their hooks and each of their records."""
    registry = registry_of(*plugins)
    faults = [*registry.problems]
    for one in registry.records:
        faults += [f"record {one.record.name!r}: {text}" for text in invariant_faults(one.record)]
    if faults:
        raise AssertionError("\n- ".join(("the plugin is not sound:", *faults)))


def applied(
    plugin: object, listing: Listing, *, beside: Iterable[object] = ()
) -> Mapping[str, str]:
    """Return the records of *plugin* that apply to the checkpoint of *listing*, each with why.

    *beside* are other plugins that take part, such as ``modelquirks.plugins.wrappers``. Raises
    AssertionError if records are in conflict.
    """
    resolution = _resolved(registry_of(plugin, *beside), listing)
    return {one.record.name: one.why for one in resolution.applied}


def canonical_names(
    plugin: object, listing: Listing, *, beside: Iterable[object] = ()
) -> Mapping[str, str]:
    """Return for each stored name what *plugin* makes of it: the name that the model has.

    Of a part of a packed weight that is the name of the weight. Of a tensor that a conversion reads
    it is the name after the aliases; :func:`plan_of` says what it makes. *beside* and errors are
    those of :func:`applied`.
    """
    registry = registry_of(plugin, *beside)
    resolution = _resolved(registry, listing)
    offers = find_offers(resolution, listing.config, (), registry.schemes)
    names = dict(offers.called)
    weights = {
        part: weight
        for packed in offers.packed
        for piece in packed.parts
        for part, weight in zip(piece.names, packed.weight.names, strict=True)
    }
    return {stored: weights.get(name, name) for stored, name in names.items()}


def plan_of(
    plugin: object,
    listing: Listing,
    model: Mapping[str, str],
    *,
    beside: Iterable[object] = (),
    **options: Any,
) -> Plan:
    """Return the plan for loading the checkpoint of *listing* into a *model*, with *plugin* alone.

    *model* has the model's tensors, as the listing has those stored: ``{"head.weight": "F32 [8,
    4]"}``. *options* are those of ``Dispatcher.plan``. ``plan.ok``, ``plan.problems`` and
    ``plan.audit`` say what came of it; it cannot be executed.
    """
    from modelquirks.planner.dispatcher import Dispatcher
    from modelquirks.planner.model.skeleton import ModelTensor, Skeleton

    stored = Listing(model).manifest().tensors.values()
    tensors = {
        t.name: ModelTensor(t.name, t.dtype or "F32", t.shape or (), on_meta=True) for t in stored
    }
    modules = {"": "Model"} | {
        name.rsplit(".", depth)[0]: "Module"
        for name in tensors
        for depth in range(name.count("."), 0, -1)
    }
    skeleton = Skeleton("the test", tensors, modules)
    options.setdefault("device_map", {"": "cpu"})
    return Dispatcher(registry_of(plugin, *beside)).plan(
        listing.manifest(), model=skeleton, **options
    )


def _resolved(registry: Registry, listing: Listing) -> Resolution:
    manifest = listing.manifest()
    facts = Facts(manifest.config, tuple(manifest.families.values()), manifest.container)
    resolution = resolve(registry.records, facts)
    if resolution.conflicts:
        raise AssertionError("\n- ".join(("records are in conflict:", *resolution.conflicts)))
    return resolution
