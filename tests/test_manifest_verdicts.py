"""All real manifests: what each must come out as, and why (tests/data/manifests/VERDICTS.tsv).

A dozen of the manifests are in tests/data. The others are tried where the collection that they
come from lies beside the checkout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from modelquirks.planner import Dispatcher, Plan, open_manifest
from modelquirks.planner.cli.command import main
from modelquirks.planner.model.from_module import skeleton_of
from modelquirks.quirks.registry import ModelBuildError

HERE = Path(__file__).parent / "data" / "manifests"
COLLECTION = Path(__file__).parents[2] / "shared" / "data" / "manifests"
REASONS = ("unreadable", "incomplete upload", "wrong config")
"""Why tensors of the class that config.json names may have no source: none of them ours to mend."""

MIXED_CONFIG = ("qwen3.5-18b-reap-a3b", "qwen3.5-25b-reap-a3b-v2")
"""Their config.json is that of the text model, under the name of the class for images."""


class Verdict(NamedTuple):
    slug: str
    tensors: int
    findings: str
    head: str
    """What names and config tell of the tie of the output head; a finding of the plan."""
    tie: str
    """With the class of config.json: shared, twice (stored), lost (nothing arrives), none."""
    packing: str
    coverage: str
    why: str


def table() -> list[Verdict]:
    lines = (HERE / "VERDICTS.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return [Verdict(row[0], int(row[1]), *row[2:]) for row in rows]


def folder_of(slug: str) -> Path:
    for base in (HERE, COLLECTION):
        if (base / slug).is_dir():
            return base / slug
    pytest.skip("this manifest is not in tests/data, and the collection is not here")


@pytest.fixture(scope="module")
def dispatcher() -> Dispatcher:
    return Dispatcher()


def head_of(plan: Plan) -> str:
    codes = [f.code for f in plan.findings if f.code.startswith(("head-", "tied-"))]
    return ",".join(codes) or "-"


def packing_of(plan: Plan) -> str:
    found = [q.name for q in plan.quirks if q.name.startswith("packed.") or "mxfp4" in q.name]
    unseen = any(f.code == "quantization-unseen" for f in plan.findings)
    return ",".join(found) or ("declared" if unseen else "-")


def test_table_has_every_manifest_of_the_collection() -> None:
    """Seventy are known; a new one must not go unjudged."""
    slugs = {verdict.slug for verdict in table()}
    assert len(slugs) == 70
    if COLLECTION.is_dir():
        assert slugs == {folder.name for folder in COLLECTION.iterdir() if folder.is_dir()}


@pytest.mark.parametrize("verdict", table(), ids=lambda v: v.slug)
def test_names_and_config_tell_what_the_table_says(
    verdict: Verdict, dispatcher: Dispatcher
) -> None:
    folder = folder_of(verdict.slug)
    manifest = open_manifest(folder)
    expected = {"headers-absent", "adapter-beside"}  # no file is there, by design
    codes = sorted({f.code for f in manifest.findings} - expected)
    plan = dispatcher.plan(folder, max_memory={"cpu": "64GiB"})
    assert (len(manifest.tensors), ",".join(codes) or "-") == (verdict.tensors, verdict.findings)
    assert (head_of(plan), packing_of(plan)) == (verdict.head, verdict.packing), verdict.why


@pytest.mark.parametrize("verdict", table(), ids=lambda v: v.slug)
def test_command_line_reports_without_traceback(
    verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(folder_of(verdict.slug))
    unreadable = verdict.tensors == 0
    code = main(["inspect", folder, "--json"])
    assert code == (2 if unreadable else 1 if "unsupported" in verdict.findings else 0)
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"]["tensors"] == verdict.tensors
    code = main(["plan", folder, "--dry-run", "--json", "--max-memory", "cpu=64GiB,disk"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0) and report["schema"] == 1


@pytest.mark.parametrize("verdict", [v for v in table() if v.coverage != "-"], ids=lambda v: v.slug)
def test_coverage_against_the_class_that_config_json_names(
    verdict: Verdict, dispatcher: Dispatcher
) -> None:
    folder = folder_of(verdict.slug)
    model = dispatcher.model(folder)
    assert model is not None
    plan = dispatcher.plan(folder, model=model, device_map=None)
    assert f"{plan.audit.coverage:.4f}" == verdict.coverage, verdict.why
    declared = bool(skeleton_of(model).ties)
    tie = "twice" if plan.audit.unequal_ties else "shared" if plan.audit.ties else "none"
    assert ("lost" if tie == "none" and declared else tie) == verdict.tie, verdict.why
    names = set(open_manifest(folder).tensors)
    stored = [name for entry in plan.audit.stored for name in entry.names]
    assert len(stored) == len(names) and set(stored) == names
    wanted = [name for entry in plan.audit.model for name in entry.names]
    assert len(wanted) == len(set(wanted)) == len(skeleton_of(model).wanted)


def test_every_tensor_of_a_class_is_accounted_for_or_the_table_tells_why_not() -> None:
    for verdict in table():
        _, _, reason = verdict.why.partition("; coverage: ")
        if verdict.coverage not in ("-", "1.0000"):
            assert reason.startswith(tuple(f"{text}: " for text in REASONS)), verdict.slug
        else:
            assert not reason.startswith(REASONS), verdict.slug


@pytest.mark.parametrize(
    "verdict",
    [v for v in table() if v.coverage == "-" and v.slug not in MIXED_CONFIG],
    ids=lambda v: v.slug,
)
def test_no_class_that_could_be_built_is_left_out_of_the_table(
    verdict: Verdict, dispatcher: Dispatcher
) -> None:
    assert dispatcher.model(folder_of(verdict.slug)) is None


def test_mlx_names_under_an_old_prefix_are_all_used(dispatcher: Dispatcher) -> None:
    """What is left is not stored: MLX kept the language model alone."""
    folder = folder_of("mistral4-small-mlx-4bit")
    plan = dispatcher.plan(folder, model=dispatcher.model(folder), device_map=None, dequantize=True)
    assert plan.audit.by_class() == {"matched": 181, "made": 362, "missing": 222, "used": 1483}
    left = {name.split(".")[1] for name in plan.audit.missing}
    assert left == {"vision_tower", "multi_modal_projector"}


@pytest.mark.parametrize("slug", MIXED_CONFIG)
def test_config_of_another_class_is_said_plainly(slug: str, dispatcher: Dispatcher) -> None:
    """A text config under the name of the vision class: nobody can build that."""
    with pytest.raises(ModelBuildError, match="Qwen3_5MoeForConditionalGeneration"):
        dispatcher.model(folder_of(slug))
