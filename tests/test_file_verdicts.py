"""All real small weight files: what each must come out as (tests/data/files/VERDICTS.tsv).

Most are in tests/data; the others are tried where their collection lies beside the checkout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from modelquirks.planner import open_manifest
from modelquirks.planner.cli import main

HERE = Path(__file__).parent / "data" / "files"
COLLECTION = Path(__file__).parents[2] / "shared" / "data" / "files"


class Verdict(NamedTuple):
    path: str
    format: str
    tensors: str
    container: str
    findings: str
    state: str
    why: str


def table() -> list[Verdict]:
    lines = (HERE / "VERDICTS.tsv").read_text(encoding="utf-8").splitlines()
    return [Verdict(*line.split("\t")) for line in lines if not line.startswith("#")]


def located(path: str) -> Path:
    """Return the file. A folder counts only where the collection has it whole."""
    whole = [COLLECTION] if "/" not in path else [HERE, COLLECTION]
    for base in whole:
        if (base / path).exists():
            return base / path
    pytest.skip("not in tests/data, and the collection is not here")


def test_table_has_every_folder_of_the_collection() -> None:
    folders = {verdict.path.split("/")[0] for verdict in table()}
    assert len(folders) == 12
    if COLLECTION.is_dir():
        assert folders == {folder.name for folder in COLLECTION.iterdir()}


@pytest.mark.parametrize("verdict", table(), ids=lambda v: v.path)
def test_file_comes_out_as_the_table_says(
    verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    path = located(verdict.path)
    manifest = open_manifest(path)
    codes = ",".join(sorted({finding.code for finding in manifest.findings})) or "-"
    bad = any(finding.severity == "error" for finding in manifest.findings)
    found = (manifest.format, str(len(manifest.tensors)), manifest.container or "-", codes)
    assert (*found, "error" if bad else "ok") == verdict[1:6], verdict.why
    assert main(["inspect", str(path), "--json"]) == (2 if verdict.tensors == "0" else int(bad))
    assert json.loads(capsys.readouterr().out)["checkpoint"]["tensors"] == int(verdict.tensors)
    main(["plan", str(path), "--dry-run", "--json", "--max-memory", "cpu=1GiB,disk"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is not bad
