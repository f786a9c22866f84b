"""The registry: discovery through real metadata, isolation, conflicts, building models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from modelquirks.quirks.hookspecs import RecordsPlugin, hookimpl
from modelquirks.quirks.record import Match, ModelQuirks, Role
from modelquirks.quirks.registry import (
    ModelBuildError,
    Origin,
    PluginError,
    PluginInfo,
    Registry,
)

DATA = Path(__file__).parents[1] / "data" / "broken_plugins"

BROKEN = [
    ("raises_on_import", "acme_importer (acme-importer 0.3)", "acme needs the moon in the seventh"),
    ("exits_on_import", "acme_exiter (acme-exiter 0.4)", "SystemExit: acme is out of date"),
    ("no_such_module", "acme_nothing (acme-nothing 0.5)", "No module named 'acme_nothing_plugin'"),
    ("bad_record", "acme_faulty (acme-faulty 2.0)", "the match is empty"),
    ("misspelt_hook", "acme_speller (acme-speller 0.6)", "is 'modelquirks_records' meant?"),
    ("raises_lazily", "acme_lazy (acme-lazy 0.7)", "the second record is not at home"),
    ("wrong_items", "acme_strings (acme-strings 0.8)", "'halves' where a ModelQuirks belongs"),
]

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests apart from what the person who runs them has set."""
    monkeypatch.delenv("MODELQUIRKS_DISABLE_PLUGINS", raising=False)
    monkeypatch.delenv("MODELQUIRKS_STRICT", raising=False)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put folders of plugins on sys.path, the first one first."""

    def on_path(*folders: str | Path) -> None:
        for folder in reversed(folders):
            monkeypatch.syspath_prepend(str(DATA / folder))

    return on_path


def record(name: str, role: Role = "architecture") -> ModelQuirks:
    return ModelQuirks(name=name, role=role, match=Match(model_types=("acme",)))


class Records:
    """A plugin object that gives records."""

    def __init__(self, *records: ModelQuirks) -> None:
        self.records = records

    @hookimpl
    def modelquirks_records(self) -> Iterable[ModelQuirks]:
        return self.records


class Builds:
    """A plugin object that builds a model, or whatever it is given instead."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    @hookimpl
    def modelquirks_model(self, config: Mapping[str, Any], folder: Path) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeModule:
    """As much of an nn.Module as the registry looks for."""

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        return iter(())


def info(registry: Registry, name: str) -> PluginInfo:
    return next(info for info in registry.plugins if info.name == name)


def write_distribution(folder: Path, name: str, version: str, entry_points: str) -> None:
    meta = folder / f"{name}-{version}.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (meta / "entry_points.txt").write_text(entry_points)


# Discovery


def test_an_installed_plugin_is_loaded_with_its_origin(install: Install) -> None:
    install("good")
    registry = Registry.load()

    assert info(registry, "acme_good") == PluginInfo(
        name="acme_good",
        module="acme_good_plugin",
        distribution="acme-good",
        version="1.2",
        status="loaded",
        records=("acme_good",),
        schemes=("acme_halves",),
        hooks=("modelquirks_records", "modelquirks_schemes"),
    )
    (registered,) = [r for r in registry.records if r.record.name == "acme_good"]
    assert str(registered.origin) == "acme_good (acme-good 1.2)"
    assert registry.schemes["acme_halves"].roles == ("left", "right")
    assert not [problem for problem in registry.problems if "acme" in problem]


@pytest.mark.parametrize(("folder", "origin", "why"), BROKEN, ids=[case[0] for case in BROKEN])
def test_a_broken_plugin_is_named_and_the_rest_works(
    install: Install, folder: str, origin: str, why: str
) -> None:
    install("good")
    before = Registry.load()
    install(folder)
    registry = Registry.load()

    (failed,) = [i for i in registry.plugins if i not in before.plugins]
    assert failed.status == "failed"
    assert str(failed.origin) == origin
    assert why in failed.error
    assert "\n" not in failed.error
    assert f"plugin {origin} is not used: {failed.error}" in registry.problems
    assert (failed.records, failed.schemes, failed.hooks) == ((), (), ())
    assert registry.records == before.records
    assert registry.schemes.keys() == before.schemes.keys()


def test_all_broken_plugins_at_once_leave_the_good_one(install: Install) -> None:
    install(*(case[0] for case in BROKEN), "good")
    registry = Registry.load()
    failed = {str(i.origin) for i in registry.plugins if i.status == "failed"}
    assert failed >= {case[1] for case in BROKEN}
    assert info(registry, "acme_good").status == "loaded"


def test_a_record_with_faults_shows_all_of_them(install: Install) -> None:
    install("bad_record")
    error = info(Registry.load(), "acme_faulty").error
    assert "lower case" in error
    assert "the match is empty" in error
    assert "{j} of 'layers.{j}' is not bound" in error


@pytest.mark.parametrize(
    ("folder", "cause"),
    [("raises_on_import", RuntimeError), ("raises_lazily", LookupError)],
)
def test_strict_raises_with_the_cause(
    install: Install, monkeypatch: pytest.MonkeyPatch, folder: str, cause: type[Exception]
) -> None:
    install(folder)
    monkeypatch.setenv("MODELQUIRKS_STRICT", "1")
    with pytest.raises(PluginError, match=r"^plugin acme_.* raised ") as raised:
        Registry.load()
    assert isinstance(raised.value.__cause__, cause)


def test_of_two_installations_the_first_on_the_path_counts(
    install: Install, tmp_path: Path
) -> None:
    stale = tmp_path / "stale"
    write_distribution(stale, "Acme_Good", "0.1", "[modelquirks]\nacme_old = acme_old_plugin\n")
    install("good", stale)
    registry = Registry.load()
    assert info(registry, "acme_good").status == "loaded"
    assert "acme_old" not in {i.name for i in registry.plugins}


def test_a_stale_installation_does_not_bring_back_what_the_first_one_dropped(
    install: Install, tmp_path: Path
) -> None:
    current = tmp_path / "current"
    write_distribution(current, "acme_good", "3.0", "[console_scripts]\nacme = acme:main\n")
    install(current, "good")
    assert "acme_good" not in {i.name for i in Registry.load().plugins}


def test_metadata_that_cannot_be_read_is_a_problem_and_no_more(
    install: Install, tmp_path: Path
) -> None:
    write_distribution(tmp_path, "acme_torn", "1.0", "[modelquirks]\nno equals sign here\n")
    install(tmp_path, "good")
    registry = Registry.load()
    assert info(registry, "acme_good").status == "loaded"
    (problem,) = [p for p in registry.problems if "acme_torn" in p]
    assert "entry points" in problem
    assert "install it again" in problem


def test_a_plugin_of_a_half_deleted_distribution_is_still_named(
    install: Install, tmp_path: Path
) -> None:
    meta = tmp_path / "acme_ghost-1.0.dist-info"
    meta.mkdir()
    (meta / "entry_points.txt").write_text("[modelquirks]\nacme_ghost = acme_ghost_plugin\n")
    install(tmp_path)
    assert info(Registry.load(), "acme_ghost").status == "failed"


# Switching off


@pytest.mark.parametrize("name", ["acme_importer", "acme-importer", "Acme_Importer", "*"])
def test_a_plugin_is_switched_off_by_its_name_its_distribution_or_a_star(
    install: Install, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install("raises_on_import")
    monkeypatch.setenv("MODELQUIRKS_DISABLE_PLUGINS", f" {name} ,")
    by_variable = Registry.load()
    monkeypatch.delenv("MODELQUIRKS_DISABLE_PLUGINS")
    for registry in (by_variable, Registry.load(disable=[name])):
        found = info(registry, "acme_importer")
        assert (found.status, found.error) == ("disabled", "")
        assert not [problem for problem in registry.problems if "acme" in problem.lower()]


def test_a_disabled_plugin_is_not_even_imported(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "acme_good_plugin", raising=False)
    install("good")
    registry = Registry.load(disable=["*"])
    assert {i.status for i in registry.plugins} == {"disabled"}
    assert "acme_good_plugin" not in sys.modules
    assert registry.records == ()


def test_a_name_to_switch_off_that_nobody_has_is_a_problem(install: Install) -> None:
    install("good")
    registry = Registry.load(disable=["acme_god"])
    (problem,) = [p for p in registry.problems if "acme_god'" in p]
    assert "no installed plugin" in problem
    assert "'acme_good'" in problem


# Conflicts


def test_two_third_parties_that_claim_a_record_both_lose_it_and_keep_the_rest(
    install: Install,
) -> None:
    install("twins")
    registry = Registry.load()
    names = {r.record.name for r in registry.records}
    assert {"acme_left", "acme_right"} <= names
    assert "acme_twin" not in names
    (problem,) = [p for p in registry.problems if "acme_twin" in p]
    assert "acme_left (acme-left 1.0) and by acme_right (acme-right 2.0)" in problem
    left = info(registry, "acme_left")
    assert (left.status, left.records) == ("loaded", ("acme_left",))


def test_a_record_of_modelquirks_stays_when_somebody_else_claims_its_name() -> None:
    registry = Registry()
    registry.register(Records(record("x")), name="theirs", distribution="acme", version="2")
    registry.register(Records(record("x")), name="ours", distribution="modelquirks", version="1")
    assert [str(r.origin) for r in registry.records] == ["ours (modelquirks 1)"]
    (problem,) = registry.problems
    assert "ours (modelquirks 1) and by theirs (acme 2): that of modelquirks is used" in problem
    assert info(registry, "theirs").records == ()


def test_the_order_of_arrival_never_matters() -> None:
    plugins = {
        "a": ("one", [record("x"), record("a.own", "quantization")]),
        "b": ("two", [record("x"), record("b.own", "wrapper")]),
        "c": ("modelquirks", [record("y")]),
        "d": ("three", [record("y"), record("d.own")]),
    }
    outcomes: set[tuple[Any, ...]] = set()
    for order in permutations(plugins):
        registry = Registry()
        for name in order:
            distribution, records = plugins[name]
            registry.register(Records(*records), name=name, distribution=distribution, version="1")
        records_and_origins = [(r.record.name, str(r.origin)) for r in registry.records]
        outcomes.add((*records_and_origins, *registry.problems, *registry.plugins))
    ((*records_found, _, _, _, _, _, _),) = outcomes
    assert records_found == [
        ("b.own", "b (two 1)"),
        ("d.own", "d (three 1)"),
        ("y", "c (modelquirks 1)"),
        ("a.own", "a (one 1)"),
    ]


def test_a_scheme_claimed_twice_is_used_by_nobody(install: Install) -> None:
    install("good")
    module: Any = import_module("acme_good_plugin")

    class Again:
        @hookimpl
        def modelquirks_schemes(self) -> Any:
            return module.modelquirks_schemes()

    registry = Registry()
    registry.register(module, name="first", distribution="one", version="1")
    assert "acme_halves" in registry.schemes
    registry.register(Again(), name="second", distribution="two", version="2")
    assert "acme_halves" not in registry.schemes
    (problem,) = registry.problems
    assert "scheme 'acme_halves' is given by first (one 1) and by second (two 2)" in problem


def test_two_distributions_with_one_plugin_name_are_both_refused(
    install: Install, tmp_path: Path
) -> None:
    write_distribution(tmp_path, "acme_copy", "9", "[modelquirks]\nacme_good = acme_copy_plugin\n")
    install("good", tmp_path)
    registry = Registry.load()
    assert {(i.distribution, i.status) for i in registry.plugins if i.name == "acme_good"} == {
        ("acme-good", "failed"),
        ("acme_copy", "failed"),
    }
    assert any("acme_copy 9" in p and "acme-good 1.2" in p for p in registry.problems)

    way_out = Registry.load(disable=["acme-copy"])
    assert "acme_good" in {r.record.name for r in way_out.records}


# Registering by hand


def test_any_object_with_hooks_is_a_plugin_for_type_checkers_too() -> None:
    plugin: RecordsPlugin = Records(record("x"))
    registry = Registry()
    registry.register(plugin, name="mine")
    assert [str(r.origin) for r in registry.records] == ["mine"]


def test_records_come_by_role_then_by_name() -> None:
    registry = Registry()
    registry.register(
        Records(
            record("b", "quantization"),
            record("z", "wrapper"),
            record("c"),
            record("a", "quantization"),
            record("b2"),
        ),
        name="mine",
    )
    assert [r.record.name for r in registry.records] == ["z", "b2", "c", "a", "b"]


class Unmarked:
    def modelquirks_records(self) -> Iterable[ModelQuirks]:
        return []


class Wrapper:
    @hookimpl(wrapper=True)
    def modelquirks_records(self) -> Any:
        result = yield
        return result


class WrongArgument:
    @hookimpl
    def modelquirks_model(self, config: Any, device: Any) -> Any:
        return config, device


class TwoFaults:
    @hookimpl
    def modelquirks_recrods(self) -> Any:
        return []

    @hookimpl
    def modelquirks_schemes(self) -> Any:
        return [object()]


class ReturnsNothing:
    @hookimpl
    def modelquirks_records(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("plugin", "texts"),
    [
        (Unmarked(), ["'modelquirks_records' is not marked with @hookimpl"]),
        (Wrapper(), ["'modelquirks_records' is a wrapper"]),
        (WrongArgument(), ["device"]),
        (
            TwoFaults(),
            [
                "there is no hook 'modelquirks_recrods'; is 'modelquirks_records' meant?",
                "an object of type 'object' without name, roles, peeks, settings, infer, peek, "
                "regions, evaluate",
            ],
        ),
        (ReturnsNothing(), ["'modelquirks_records' returned None, expected an iterable"]),
        (object(), ["it implements none of the hooks modelquirks_library, modelquirks_model"]),
        (None, ["expected a module or an object"]),
    ],
    ids=["unmarked", "wrapper", "argument", "two faults", "None result", "no hook", "None"],
)
def test_a_plugin_that_cannot_be_used_is_refused_with_every_fault(
    plugin: object, texts: list[str]
) -> None:
    registry = Registry()
    registry.register(Records(record("x")), name="other")
    before = (registry.plugins, registry.records, registry.problems)
    with pytest.raises(PluginError) as raised:
        registry.register(plugin, name="acme", distribution="acme-dist", version="3")
    for text in ("plugin acme (acme-dist 3): ", *texts):
        assert text in str(raised.value)
    assert (registry.plugins, registry.records, registry.problems) == before
    registry.register(Records(record("y")), name="acme")  # the name is free again


def test_a_hook_of_a_later_version_may_be_marked_optional() -> None:
    class Modern(Records):
        @hookimpl(optionalhook=True)
        def modelquirks_teleport(self) -> None: ...

    registry = Registry()
    registry.register(Modern(record("x")), name="modern")
    assert info(registry, "modern").hooks == ("modelquirks_records", "modelquirks_teleport")


def test_looking_for_hooks_runs_no_property() -> None:
    class Lazy(Records):
        @property
        def modelquirks_expensive(self) -> None:
            raise AssertionError("looked at")

    registry = Registry()
    registry.register(Lazy(record("x")), name="lazy")
    assert len(registry.records) == 1


def test_a_name_or_an_object_is_registered_once() -> None:
    registry = Registry()
    plugin = Records(record("x"))
    registry.register(plugin, name="mine", distribution="d", version="1")
    with pytest.raises(PluginError, match=r"the name is taken by mine \(d 1\)"):
        registry.register(Records(record("y")), name="mine")
    with pytest.raises(PluginError, match="the same object as plugin 'mine'"):
        registry.register(plugin, name="yours")
    assert len(registry.records) == 1


def test_the_information_is_plain_data() -> None:
    registry = Registry()
    registry.register(Records(record("x")), name="mine", distribution="d", version="1")
    (only,) = registry.plugins
    assert json.loads(json.dumps(only.to_json())) == {
        "name": "mine",
        "module": "Records",
        "distribution": "d",
        "version": "1",
        "status": "loaded",
        "error": "",
        "records": ["x"],
        "schemes": [],
        "hooks": ["modelquirks_records"],
    }


# Models


def building(**outcomes: Any) -> Registry:
    registry = Registry()
    for name, outcome in outcomes.items():
        registry.register(Builds(outcome), name=name, distribution=f"{name}-dist", version="1")
    return registry


CONFIG = {"model_type": "acme"}


def test_nobody_builds_a_model_nobody_knows(tmp_path: Path) -> None:
    assert Registry().model(CONFIG, tmp_path) is None
    assert building(a=None, b=None).model(CONFIG, tmp_path) is None


def test_the_model_comes_with_the_plugin_that_built_it(tmp_path: Path) -> None:
    model = FakeModule()
    assert building(a=None, b=model).model(CONFIG, tmp_path) == (model, Origin("b", "b-dist", "1"))


def test_a_hook_may_take_only_the_arguments_it_needs(tmp_path: Path) -> None:
    class Small:
        @hookimpl
        def modelquirks_model(self, folder: Path, config: Any = None) -> Any:
            model = FakeModule()
            vars(model).update(seen=(folder, config))
            return model

    registry = Registry()
    registry.register(Small(), name="small")
    built = registry.model(CONFIG, tmp_path)
    assert built is not None
    assert built[0].seen == (tmp_path, CONFIG)


def test_when_nobody_builds_it_everybody_who_failed_is_quoted(tmp_path: Path) -> None:
    registry = building(a=ValueError("no heads"), b=None, c="a string")
    with pytest.raises(ModelBuildError) as raised:
        registry.model(CONFIG, tmp_path)
    text = str(raised.value)
    assert text.startswith("no plugin can build a model for model_type 'acme': ")
    assert "plugin a (a-dist 1): 'modelquirks_model' raised ValueError: no heads" in text
    assert "plugin c (c-dist 1): 'modelquirks_model' returned 'a string', expected an nn.Mo" in text


def test_a_failure_beside_a_success_is_a_problem_and_no_more(tmp_path: Path) -> None:
    model = FakeModule()
    registry = building(a=ValueError("no heads"), b=model)
    for _ in range(2):
        built = registry.model(CONFIG, tmp_path)
        assert built is not None
        assert built[0] is model
    (problem,) = registry.problems
    assert problem == "plugin a (a-dist 1): 'modelquirks_model' raised ValueError: no heads"


def test_two_plugins_that_build_the_model_are_a_conflict(tmp_path: Path) -> None:
    registry = building(a=FakeModule(), b=FakeModule())
    with pytest.raises(ModelBuildError, match=r"is built by a \(a-dist 1\) and by b \(b-dist 1\)"):
        registry.model(CONFIG, tmp_path)


def test_strict_lets_the_first_failure_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODELQUIRKS_STRICT", "1")
    registry = building(a=ValueError("no heads"), b=FakeModule())
    with pytest.raises(PluginError, match="no heads"):
        registry.model(CONFIG, tmp_path)
