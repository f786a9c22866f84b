"""``modelquirks plugins``: what a new package holds, and what list, show and check say of it.

Only the plugins made here are seen, so that the golden files do not change with those that ship.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from modelquirks.planner.checkpoint.listing import Listing
from modelquirks.planner.cli.command import main
from modelquirks.planner.cli.plugin_new import files_of
from modelquirks.quirks import registry
from modelquirks.quirks.discovery import Candidate, discover

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
UPDATE_GOLDEN = bool(os.environ.get("MODELQUIRKS_UPDATE_GOLDEN"))

STORED = Listing(
    {
        "body.0.weight": "F32 [4, 4]",
        "body.1.weight": "F32 [4, 4]",
        "head.weight": "F32 [8, 4]",
    },
    {"model_type": "acme"},
)


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


def install(folder: Path, name: str, version: str, source: str) -> None:
    """Put a plugin of one module into *folder*, as pip would."""
    module = f"modelquirks_{name}"
    (folder / f"{module}.py").write_text(source)
    meta = folder / f"{module}-{version}.dist-info"
    meta.mkdir()
    named = f"Name: modelquirks-{name}\nVersion: {version}\n"
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}")
    (meta / "entry_points.txt").write_text(f"[modelquirks]\n{name} = {module}\n")


def only_ours() -> tuple[list[Candidate], list[str]]:
    found, problems = discover()
    return [c for c in found if c.origin.distribution != "modelquirks"], problems


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Give a function that runs the command, in a folder with the plugin ``acme`` installed."""
    site = tmp_path / "site"
    site.mkdir()
    source = files_of("acme")["src/modelquirks_acme/__init__.py"]
    install(site, "acme", "0.1.0", source)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "discover", only_ours)
    for name in ("MODELQUIRKS_DISABLE_PLUGINS", "MODELQUIRKS_STRICT", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    for module in [name for name in sys.modules if name.startswith("modelquirks_")]:
        monkeypatch.delitem(sys.modules, module)

    def run(*words: str) -> Done:
        code = main(["plugins", *words])
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Give a checkpoint of which only the index and the config are there."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weight_map = dict.fromkeys(STORED.tensors, "model.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(STORED.config))
    return folder


def agrees(name: str, text: str) -> bool:
    path = GOLDEN / name
    if UPDATE_GOLDEN:
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8") == text


OTHER = """
from modelquirks.quirks import Match, ModelQuirks, hookimpl

@hookimpl
def modelquirks_records():
    return [
        ModelQuirks(
            name="other",
            role="architecture",
            match=Match(model_types=("acme", "other")),
            {more}
            why="the other one's",
        )
    ]
"""


def other(tmp_path: Path, more: str = "") -> None:
    install(tmp_path / "site", "other", "2.0", OTHER.replace("{more}", more))


# list and show


def test_the_list_reads_well(call: Call) -> None:
    done = call("list")
    assert (done.code, done.err) == (0, "")
    assert agrees("plugins_list.txt", done.out)


def test_a_plugin_reads_well_with_all_that_its_records_say(call: Call) -> None:
    done = call("show", "acme")
    assert (done.code, done.err) == (0, "")
    assert agrees("plugins_show.txt", done.out)


@pytest.mark.parametrize("name", ["acme", "modelquirks-acme"])
def test_json_has_the_record_as_data_and_its_origin(call: Call, name: str) -> None:
    (record,) = json.loads(call("show", name, "--json").out)["records"]
    assert record["match"] == {"model_types": ["acme"]}
    assert record["aliases"][0] == {"stored": "body.{i}.**", "model": "layers.{i}.**"}
    origin = (record["plugin"], record["distribution"], record["version"])
    assert origin == ("acme", "modelquirks-acme", "0.1.0")


def test_a_name_that_nobody_has_is_refused_with_the_nearest(call: Call) -> None:
    done = call("show", "acne")
    assert done.code == 2
    assert "no plugin, distribution or record 'acne'; the nearest names are 'acme'" in done.err


def test_a_plugin_that_failed_is_shown_with_its_error(call: Call, tmp_path: Path) -> None:
    install(tmp_path / "site", "torn", "1.0", "raise RuntimeError('torn apart')")
    done = call("show", "torn")
    assert done.code == 1
    assert "modelquirks_torn, failed" in done.out and "torn apart" in done.out


# check without a checkpoint


def test_sound_plugins_have_nothing_said_of_them(call: Call) -> None:
    done = call("check")
    assert (done.code, done.err) == (0, "")
    assert done.out == "1 record from 1 plugin of 1 distribution looked at: nothing to say.\n"


def test_two_records_that_claim_the_same_are_named_with_the_way_out(
    call: Call, tmp_path: Path
) -> None:
    other(tmp_path)
    done = call("check")
    assert done.code == 1
    assert agrees("plugins_check_rivals.txt", done.out)


def test_a_takeover_is_told_and_no_fault(call: Call, tmp_path: Path) -> None:
    other(tmp_path, 'overrides=frozenset({"acme"}),')
    done = call("check", "--json")
    (finding,) = json.loads(done.out)["findings"]
    assert (done.code, finding["code"], finding["severity"]) == (0, "record-override", "info")
    assert finding["message"] == (
        "'other' from other (modelquirks-other 2.0) takes the place of 'acme' from acme "
        "(modelquirks-acme 0.1.0) where both match"
    )


def test_an_override_of_nothing_is_told(call: Call, tmp_path: Path) -> None:
    other(tmp_path, 'overrides=frozenset({"acne", "acme"}),')
    done = call("check")
    assert done.code == 1
    assert "'other' from other (modelquirks-other 2.0) overrides 'acne'" in " ".join(
        done.out.split()
    )


def test_a_record_that_is_not_sound_is_a_fault_by_name(call: Call, tmp_path: Path) -> None:
    install(
        tmp_path / "site",
        "loops",
        "1.0",
        OTHER.replace("{more}", "extra=(Expected('**.angles', ''),),")
        .replace("import Match", "import Expected, Match")
        .replace('("acme", "other")', '("loops",)'),
    )
    done = call("check", "--json")
    (finding,) = json.loads(done.out)["findings"]
    assert (done.code, finding["code"]) == (1, "record-fault")
    assert "'**.angles' is expected without a why" in finding["message"]


# check with a checkpoint


def test_what_applies_is_told_with_the_rules_that_find_work(call: Call, checkpoint: Path) -> None:
    done = call("check", checkpoint.name)
    assert (done.code, done.err) == (0, "")
    assert agrees("plugins_check_applies.txt", done.out)


def test_why_not_names_what_was_found_and_what_was_expected(call: Call, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "acme_two"}))
    done = call("check", checkpoint.name)
    assert (done.code, done.err) == (0, "")
    assert agrees("plugins_check_why_not.txt", done.out)


def test_a_record_that_was_asked_for_and_does_not_apply_is_exit_code_one(
    call: Call, checkpoint: Path
) -> None:
    assert call("check", checkpoint.name, "--record", "acme").code == 0
    (checkpoint / "config.json").write_text("{}")
    done = call("check", checkpoint.name, "--record", "acme")
    assert done.code == 1
    assert "there is no model_type, expected 'acme'" in done.out
    assert call("check", checkpoint.name, "--record", "acne").code == 2


def test_records_in_conflict_over_a_checkpoint_are_exit_code_one(
    call: Call, checkpoint: Path, tmp_path: Path
) -> None:
    other(tmp_path)
    done = call("check", checkpoint.name)
    assert done.code == 1
    assert "it is in conflict with another record" in done.out
    assert "Conflict: 2 architecture quirks match equally well: 'acme' from acme" in done.out


def test_json_has_a_verdict_and_the_rules_of_each_record(call: Call, checkpoint: Path) -> None:
    (record,) = json.loads(call("check", checkpoint.name, "--json").out)["records"]
    assert (record["name"], record["applies"]) == ("acme", True)
    assert record["why"] == ["model_type 'acme'"]
    told = [(rule["kind"], rule["n_tensors"]) for rule in record["rules"]]
    assert told == [("alias", 2), ("alias", 0)]


# new


def made(call: Call, tmp_path: Path, *words: str) -> Path:
    done = call("new", "mine", "--into", str(tmp_path / "here"), *words)
    assert (done.code, done.err) == (0, "")
    return tmp_path / "here" / "modelquirks-mine"


def failed_tests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return which tests of a package fail and how, as pytest would run them."""
    monkeypatch.syspath_prepend(str(folder / "src"))
    monkeypatch.delitem(sys.modules, "modelquirks_mine", raising=False)
    tests = runpy.run_path(str(folder / "tests" / "test_mine.py"))
    failed: dict[str, str] = {}
    for name in (name for name in tests if name.startswith("test_")):
        try:
            tests[name]()
        except (AssertionError, KeyError) as error:
            failed[name] = str(error)
    return failed


def test_a_new_package_of_a_checkpoint_holds_its_listing_and_passes_its_tests(
    call: Call, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(call, tmp_path, "--from", str(checkpoint))
    listing = Listing.read(folder / "tests" / "listing.json")
    assert listing.tensors.keys() == STORED.tensors.keys()
    assert listing.config == {"model_type": "acme"}
    assert 'Match(model_types=("acme",))' in source_of(folder)
    assert failed_tests(folder, monkeypatch) == {}


def test_a_checkpoint_without_a_config_is_matched_by_its_largest_family(
    call: Call, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "config.json").unlink()
    folder = made(call, tmp_path, "--from", str(checkpoint))
    assert 'Match(any_of=("body.{i}.weight",))' in source_of(folder)
    assert failed_tests(folder, monkeypatch) == {}


def test_the_tests_of_a_new_package_fail_when_its_rule_is_taken_out(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(call, tmp_path)
    path = folder / "src" / "modelquirks_mine" / "__init__.py"
    path.write_text(source_of(folder).replace('Alias("body.{i}.**", "layers.{i}.**"),', ""))
    failed = failed_tests(folder, monkeypatch)
    assert list(failed) == ["test_a_stored_name_becomes_that_of_the_model"]


def source_of(folder: Path) -> str:
    return (folder / "src" / "modelquirks_mine" / "__init__.py").read_text()


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_new_package_passes_its_own_lint(
    call: Call, tmp_path: Path, checkpoint: Path, with_checkpoint: bool
) -> None:
    ruff = shutil.which("ruff", path=os.pathsep.join([str(Path(sys.executable).parent)]))
    if ruff is None:
        pytest.skip("ruff is not installed")
    folder = made(call, tmp_path, *(("--from", str(checkpoint)) if with_checkpoint else ()))
    for words in (("check",), ("format", "--check")):
        done = subprocess.run(
            [ruff, *words, "--no-cache", "."],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["new", "9lives"], "'9lives' must be lower-case words"),
        (["new", "Acme"], "'Acme' must be lower-case words"),
        (["new", "acme"], "the name 'acme' is taken by 'acme (modelquirks-acme 0.1.0)'"),
        (["new", "mine", "--from", "nowhere"], "nowhere"),
    ],
)
def test_a_package_that_cannot_be_made_is_refused(call: Call, words: list[str], said: str) -> None:
    done = call(*words)
    assert done.code == 2
    assert said in done.err
    assert not Path("modelquirks-mine").exists()


def test_nothing_that_is_there_is_overwritten(call: Call, tmp_path: Path) -> None:
    folder = made(call, tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = call("new", "mine", "--into", str(folder.parent))
    assert done.code == 2 and "is there already" in done.err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
