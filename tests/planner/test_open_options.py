"""Choices among states and weights, where a checkpoint has no such choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.checkpoint.opened import Opened
from modelquirks.planner.checkpoint.openoptions import OpenOptions
from modelquirks.planner.cli.command import main
from modelquirks.planner.dispatcher import OptionError
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.registry import Registry


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Give a folder of plain weights."""
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file({"t": torch.ones(2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (OpenOptions(weights="master"), "weights 'master'"),
        (OpenOptions(tag="global_step3"), "tag 'global_step3'"),
        (OpenOptions("training", "x"), "weights 'training' and tag 'x'"),
    ],
)
@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_plain_weights_have_no_such_choice(
    plain: Path, options: OpenOptions, told: str, file: str
) -> None:
    manifest = open_manifest(plain / file, options=options)
    (finding,) = [f for f in manifest.findings if f.severity == "error"]
    assert finding.code == "no-choice"
    assert told in finding.message and "'safetensors'" in finding.message
    assert [*manifest.tensors] == ["t"]


def test_a_plan_with_a_choice_that_there_is_not_cannot_be_used(plain: Path) -> None:
    plan = Dispatcher().plan(plain, weights="training")
    assert not plan.ok and "no such choice" in plan.refusal()


def test_an_opened_checkpoint_cannot_be_chosen_from(plain: Path) -> None:
    manifest = open_manifest(plain)
    with pytest.raises(OptionError, match="is open already; give them to open_checkpoint"):
        Dispatcher().plan(manifest, tag="A")


def test_a_plugin_that_knows_no_choices_goes_on_working(tmp_path: Path) -> None:
    class Old:
        @hookimpl
        def modelquirks_open(self, path: Path, names: Sequence[str]) -> Opened:
            return Opened("old", {}, {}, ())

    class New:
        @hookimpl
        def modelquirks_open(
            self, path: Path, names: Sequence[str], options: OpenOptions
        ) -> Opened:
            return Opened("new", {}, {}, (), chosen=options)

    def by(plugin: object, options: OpenOptions) -> Manifest:
        found = Registry()
        found.register(plugin, name="a")
        return open_manifest(tmp_path, lambda: found, options)

    options = OpenOptions("master", "A")
    old, new = by(Old(), options), by(New(), options)
    assert [f.code for f in old.findings] == ["no-choice", "no-tensors"]
    assert [f.code for f in new.findings] == ["no-tensors"] and new.options == options


@pytest.mark.parametrize("wrong", [{"weights": "fp32"}, {"tag": ""}])
def test_a_choice_that_means_nothing_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"are not known|names no saved state"):
        OpenOptions(**wrong)  # type: ignore[arg-type]


def test_a_saved_plan_is_not_explained_for_another_choice(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    Dispatcher().plan(plain).save(path)
    assert main(["explain", str(path), "--tag", "A"]) == 2
    assert "without regard to tag 'A'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("zero_stage", "nor a file that can be read"),
        ("zero_stage=", "'zero_stage' has no value"),
        ("dp=2,dp=3", "says 'dp' twice"),
        ("broken.json", "is not JSON"),
        ("list.json", "holds no JSON object"),
    ],
)
def test_expectations_that_cannot_be_read_are_a_bad_call(
    text: str,
    told: str,
    plain: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(plain)
    (plain / "broken.json").write_text("{")
    (plain / "list.json").write_text("[1]")
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", str(plain), "--expect", text])
    assert told in capsys.readouterr().err


def test_expectations_of_plain_weights_are_not_passed_over(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(plain), "--expect", "dp=8,tp=2"]) == 1
    assert "expect 'dp,tp' asked for" in " ".join(capsys.readouterr().out.split())
