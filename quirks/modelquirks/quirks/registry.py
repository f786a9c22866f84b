"""The registry: every record, scheme and model builder that plugins give, and who gives it.

Plugins are found through the entry-point group ``modelquirks``, those that ship with modelquirks
like anybody else's. Each is imported, checked and asked by itself. A plugin is taken whole or
not at all: one that fails is named with its distribution and version in :attr:`Registry.plugins`
and :attr:`Registry.problems`, and the others go on. The order of plugins never means anything:
two that claim one name are a conflict, not a race.

Environment variables, read by :meth:`Registry.load`:

``MODELQUIRKS_DISABLE_PLUGINS``
    Plugins not to import: names of plugins or distributions with commas between them, or ``*``.
``MODELQUIRKS_STRICT``
    ``1``: the first plugin that fails raises :class:`PluginError`, with what it raised as cause.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import isroutine
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import pluggy

from modelquirks.quirks import hookspecs
from modelquirks.quirks.discovery import (
    Candidate,
    Origin,
    PluginError,
    canonical,
    discover,
    said,
)
from modelquirks.quirks.hookspecs import GROUP
from modelquirks.quirks.intake import Given, examine, library_of, model_of, opened_of
from modelquirks.quirks.recipe import Scheme
from modelquirks.quirks.record import ROLES, ModelQuirks

if TYPE_CHECKING:
    from modelquirks.quirks.library import LibraryRules

__all__ = ["ModelBuildError", "Origin", "PluginError", "PluginInfo", "Registered", "Registry"]

_DISABLE = "MODELQUIRKS_DISABLE_PLUGINS"
_STRICT = "MODELQUIRKS_STRICT"
_OURS = "modelquirks"  # the distribution whose names nobody else can take

_T = TypeVar("_T")


class ModelBuildError(RuntimeError):
    """No plugin, or more than one, built a model. The message lists what each of them said."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A record and where it comes from."""

    record: ModelQuirks
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """What became of one plugin."""

    name: str
    module: str
    distribution: str
    version: str
    status: Literal["loaded", "failed", "disabled"]
    error: str = ""
    """Why it failed, in one sentence; empty if it did not."""
    records: tuple[str, ...] = ()
    """Names of its records that are in force: those that no other plugin claims."""
    schemes: tuple[str, ...] = ()
    """Names of its packing schemes that are in force."""
    hooks: tuple[str, ...] = ()
    """Names of the hooks it implements."""

    @property
    def origin(self) -> Origin:
        """The plugin as the origin of what it gives."""
        return Origin(self.name, self.distribution, self.version)

    def to_json(self) -> dict[str, Any]:
        """Return the information as plain data."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


class _Manager(pluggy.PluginManager):
    """Looks at what could be a hook only: a module has ten times as many names."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Return the options of the hook of that name, None if it is none."""
        if isinstance(plugin, ModuleType):
            found = vars(plugin).get(name)
            if not isroutine(found) or not hasattr(found, f"{GROUP}_impl"):
                return None
        return super().parse_hookimpl_opts(plugin, name)


class Registry:
    """What the plugins give. ``Registry()`` is empty; :meth:`load` asks the installed ones."""

    def __init__(self) -> None:
        """Start without any plugin."""
        self._manager = _Manager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._strict = os.environ.get(_STRICT, "") not in ("", "0")
        self._given: dict[str, Given] = {}
        self._unused: list[PluginInfo] = []
        self._noticed: dict[str, None] = {}  # sentences, each once, in order
        self._settle()

    @classmethod
    def load(cls, disable: Iterable[str] = ()) -> Registry:
        """Return a registry of the installed plugins, but for those that *disable* names.

        A name is that of a plugin or of a distribution; ``*`` stands for all. The names in
        ``MODELQUIRKS_DISABLE_PLUGINS`` are added to them. Raises nothing for a broken plugin,
        unless ``MODELQUIRKS_STRICT`` is set.
        """
        registry = cls()
        names = {*disable, *os.environ.get(_DISABLE, "").split(",")}
        names = {name.strip() for name in names} - {""}
        found, problems = discover()
        registry._notice(problems)
        registry._notice(_unknown(names, found))
        wanted: list[_Claim[Candidate]] = []
        for candidate in found:
            if _is_named(candidate.origin, names):
                registry._unused.append(_info(candidate, "disabled"))
            else:
                wanted.append(_Claim(candidate.origin.plugin, candidate, candidate.origin))
        kept, refused = _unique("plugin", wanted)
        for claim, why in refused:
            registry._fail(claim.thing, PluginError(claim.origin, why))
        # Ours first: a module of ours under somebody else's entry point is theirs to lose.
        for claim in sorted(kept, key=lambda claim: claim.origin.distribution != _OURS):
            registry._load_one(claim.thing)
        registry._settle()
        return registry

    def register(
        self, plugin: object, *, name: str, distribution: str = "", version: str = ""
    ) -> None:
        """Take *plugin*, a module or any object with hooks, as if it had been installed.

        Raises :class:`PluginError` if it cannot be used; the registry is then as before.
        """
        origin = Origin(name, distribution, version)
        if name in self._given:
            raise PluginError(origin, f"the name is taken by {self._given[name].origin}")
        self._take(plugin, origin, getattr(plugin, "__name__", type(plugin).__qualname__))
        self._settle()

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin that was found or registered, by name."""
        infos = (*map(self._loaded_info, self._given.values()), *self._unused)
        return tuple(sorted(infos, key=lambda info: (info.name, info.distribution)))

    @property
    def records(self) -> tuple[Registered, ...]:
        """Every record in force, by role in the order of ``ROLES``, then by name."""
        return self._records

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """Every packing scheme in force, by name."""
        return self._schemes

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should know, a sentence each: failures, conflicts, names without use."""
        failed = [info for info in self.plugins if info.status == "failed"]
        sentences = [f"plugin {info.origin} is not used: {info.error}" for info in failed]
        return tuple(dict.fromkeys((*sentences, *self._conflicts, *self._noticed)))

    def model(self, config: Mapping[str, Any], folder: Path) -> tuple[Any, Origin] | None:
        """Return the meta model for *config* and who built it; None if it is nobody's.

        Every plugin is asked, one by one. Raises :class:`ModelBuildError` if two of them build
        a model, and if none does and one failed. A failure beside a success becomes one of
        the :attr:`problems`.
        """
        built: list[tuple[Any, Origin]] = []
        failures: list[PluginError] = []
        impls = self._manager.hook.modelquirks_model.get_hookimpls()
        for impl in sorted(impls, key=lambda impl: impl.plugin_name):
            origin = self._given[impl.plugin_name].origin
            try:
                model = model_of(impl, origin, {"config": config, "folder": folder})
            except PluginError as error:
                if self._strict:
                    raise
                failures.append(error)
            else:
                if model is not None:
                    built.append((model, origin))
        if len(built) == 1:
            self._notice(map(str, failures))
            return built[0]
        if built or failures:
            origins = [origin for _, origin in built]
            raise _build_error(config, origins, failures) from next(iter(failures), None)
        return None

    def library(self, model: Any, names: Collection[str]) -> tuple[LibraryRules, Origin] | None:
        """Return the rules that the library of *model* has, and which plugin gives them.

        None if no plugin knows it. What fails becomes one of the :attr:`problems`, and so do two
        plugins that both have rules: then that of modelquirks counts, or the first by name.
        """
        found: list[tuple[LibraryRules, Origin]] = []
        impls = self._manager.hook.modelquirks_library.get_hookimpls()
        for impl in sorted(impls, key=lambda impl: impl.plugin_name):
            origin = self._given[impl.plugin_name].origin
            try:
                rules = library_of(impl, origin, {"model": model, "names": names})
            except PluginError as error:
                if self._strict:
                    raise
                self._notice([str(error)])
            else:
                if rules is not None:
                    found.append((rules, origin))
        found.sort(key=_theirs)
        if len(found) > 1:
            self._notice([_first_counts(found, "have rules for one model")])
        return found[0] if found else None

    def opened(self, path: Path, names: Sequence[str], options: Any) -> tuple[Any, tuple[str, ...]]:
        """Return what a plugin finds in the checkpoint *path*, and what went wrong on the way.

        The former is None if no plugin knows the format; *names* is what is in the folder,
        *options* what somebody wants of it, as the hook has them. The latter are sentences: plugins
        that failed, and that two have claimed it: then that of modelquirks counts, or the first by
        name.
        """
        found: list[tuple[Any, Origin]] = []
        problems: list[str] = []
        values = {"path": path, "names": names, "options": options}
        impls = self._manager.hook.modelquirks_open.get_hookimpls()
        for impl in sorted(impls, key=lambda impl: impl.plugin_name):
            origin = self._given[impl.plugin_name].origin
            try:
                opened = opened_of(impl, origin, values)
            except PluginError as error:
                if self._strict:
                    raise
                problems.append(str(error))
            else:
                if opened is not None:
                    found.append((opened, origin))
        found.sort(key=_theirs)
        if len(found) > 1:
            problems.append(_first_counts(found, "both know the format"))
        return (found[0][0] if found else None), tuple(problems)

    def _notice(self, sentences: Iterable[str]) -> None:
        self._noticed.update(dict.fromkeys(sentences))

    def _load_one(self, candidate: Candidate) -> None:
        try:
            try:
                plugin = candidate.load()
            except (Exception, SystemExit) as error:
                text = f"importing {candidate.module!r} raised {said(error)}"
                raise PluginError(candidate.origin, text) from error
            self._take(plugin, candidate.origin, candidate.module)
        except PluginError as error:
            self._fail(candidate, error)

    def _fail(self, candidate: Candidate, error: PluginError) -> None:
        if self._strict:
            raise error
        self._unused.append(_info(candidate, "failed", error.error))

    def _take(self, plugin: object, origin: Origin, module: str) -> None:
        """Register *plugin* and ask it for what it gives; on a fault nothing has changed."""
        if plugin is None:
            raise PluginError(origin, f"{module!r} is None, expected a module or an object")
        if twin := self._manager.get_name(plugin):
            raise PluginError(origin, f"{module!r} is the same object as plugin {twin!r}")
        try:
            self._manager.register(plugin, name=origin.plugin)
        except pluggy.PluginValidationError as error:
            raise PluginError(origin, " ".join(str(error).split())) from error
        impls = {
            caller.name: impl
            for caller in self._manager.get_hookcallers(plugin) or ()
            for impl in caller.get_hookimpls()
            if impl.plugin is plugin
        }
        try:
            given = examine(plugin, impls, origin=origin, module=module)
        except BaseException:
            self._manager.unregister(plugin)
            raise
        self._given[origin.plugin] = given

    def _settle(self) -> None:
        """Decide which records and schemes are in force, whatever the order of arrival."""
        all_given = self._given.values()
        records, refused_records = _unique(
            "record",
            [_Claim(r.name, r, given.origin) for given in all_given for r in given.records],
        )
        schemes, refused_schemes = _unique(
            "scheme",
            [_Claim(s.name, s, given.origin) for given in all_given for s in given.schemes],
        )
        records.sort(key=lambda claim: (ROLES.index(claim.thing.role), claim.name))
        self._records = tuple(Registered(claim.thing, claim.origin) for claim in records)
        self._schemes = MappingProxyType({claim.name: claim.thing for claim in schemes})
        self._scheme_origins = {claim.name: claim.origin for claim in schemes}
        self._conflicts = [why for _, why in (*refused_records, *refused_schemes)]

    def _loaded_info(self, given: Given) -> PluginInfo:
        origin = given.origin
        return PluginInfo(
            name=origin.plugin,
            module=given.module,
            distribution=origin.distribution,
            version=origin.version,
            status="loaded",
            records=tuple(r.record.name for r in self._records if r.origin == origin),
            schemes=tuple(n for n, o in sorted(self._scheme_origins.items()) if o == origin),
            hooks=given.hooks,
        )


def _theirs(found: tuple[Any, Origin]) -> bool:
    """Tell whether something is not of modelquirks itself: that comes first."""
    return found[1].distribution != _OURS


def _first_counts(found: Sequence[tuple[Any, Origin]], what: str) -> str:
    """Return the sentence for several that give one thing: that of modelquirks, or of the first."""
    others = " and ".join(str(origin) for _, origin in found[1:])
    return f"{found[0][1]} and {others} {what}: the first counts"


class _Claim(NamedTuple, Generic[_T]):
    """A thing under a name that nobody else may use."""

    name: str
    thing: _T
    origin: Origin


def _unique(
    noun: str, claims: Sequence[_Claim[_T]]
) -> tuple[list[_Claim[_T]], list[tuple[_Claim[_T], str]]]:
    """Return the claims that stand, by name, and those refused, each with the reason.

    A name claimed twice goes to modelquirks itself if that is one of the two, else to nobody.
    """
    by_name: dict[str, list[_Claim[_T]]] = {}
    for claim in claims:
        by_name.setdefault(claim.name, []).append(claim)
    kept: list[_Claim[_T]] = []
    refused: list[tuple[_Claim[_T], str]] = []
    for name, rivals in sorted(by_name.items()):
        ours = [claim for claim in rivals if claim.origin.distribution == _OURS]
        winners = rivals if len(rivals) == 1 else ours if len(ours) == 1 else []
        kept += winners
        why = _conflict(noun, name, sorted(str(claim.origin) for claim in rivals), bool(winners))
        refused += [(claim, why) for claim in rivals if claim not in winners]
    return kept, refused


def _conflict(noun: str, name: str, origins: list[str], ours_stays: bool) -> str:
    outcome = f"that of {_OURS} is used" if ours_stays else "none of them is used"
    return (
        f"{noun} {name!r} is given by {' and by '.join(origins)}: {outcome}; "
        f"rename one, or switch a plugin off by its distribution with {_DISABLE}"
    )


def _is_named(origin: Origin, names: set[str]) -> bool:
    packages = {canonical(name) for name in names}
    named = origin.plugin in names or canonical(origin.distribution) in packages
    return "*" in names or named


def _unknown(names: set[str], found: Sequence[Candidate]) -> list[str]:
    known = ", ".join(sorted({repr(candidate.origin.plugin) for candidate in found})) or "none"
    return [
        f"{name!r} is to be switched off, but no installed plugin or distribution with plugins "
        f"has that name; plugins are {known}"
        for name in sorted(names - {"*"})
        if not any(_is_named(candidate.origin, {name}) for candidate in found)
    ]


def _info(
    candidate: Candidate, status: Literal["failed", "disabled"], error: str = ""
) -> PluginInfo:
    return PluginInfo(
        name=candidate.origin.plugin,
        module=candidate.module,
        distribution=candidate.origin.distribution,
        version=candidate.origin.version,
        status=status,
        error=error,
    )


def _build_error(
    config: Mapping[str, Any], built: Sequence[Origin], failures: Sequence[PluginError]
) -> ModelBuildError:
    subject = f"model_type {config.get('model_type')!r}"
    if not built:
        said_all = "; ".join(str(error) for error in failures)
        return ModelBuildError(f"no plugin can build a model for {subject}: {said_all}")
    builders = " and by ".join(map(str, built))
    text = f"the model for {subject} is built by {builders}; switch one off with {_DISABLE}"
    return ModelBuildError("; ".join([text, *map(str, failures)]))
