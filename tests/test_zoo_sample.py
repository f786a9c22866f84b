"""Forty classes of every kind out of the zoo of ``benchmarks/zoo.py``, in every placement."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SAMPLE: dict[str, str] = json.loads((BENCHMARKS / "zoo_sample.json").read_text())["classes"]


@pytest.fixture(scope="module")
def zoo() -> Iterator[Any]:
    """Yield the module that takes a class along a road."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        importlib.import_module("zoo_worker").quiet()
        yield importlib.import_module("zoo_roads")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_sample_is_forty_classes_that_transformers_has() -> None:
    transformers = importlib.import_module("transformers")
    assert len(SAMPLE) == 40
    assert SAMPLE.keys() <= set(dir(transformers))  # asking for each would import them all


@pytest.mark.filterwarnings("ignore")  # of transformers, while it builds old models
@pytest.mark.parametrize("name", SAMPLE)
def test_what_transformers_loads_right_is_right_in_every_placement(
    zoo: Any, name: str, tmp_path: Path
) -> None:
    models = importlib.import_module("zoo_models")
    models.made(name, tmp_path / name)
    checkpoint, truth = tmp_path / name / "checkpoint", models.load_truth(tmp_path / name)
    oracle = zoo.travel("transformers", zoo.Case(name, checkpoint, truth))
    assert oracle.verdict == "right", oracle
    unsure, repeats = oracle.more["unsure"], oracle.more["judge_forward"]
    case = zoo.Case(name, checkpoint, truth, unsure, judge_forward=repeats)
    verdicts = {road: zoo.travel(road, case) for road in zoo.OURS}
    wrong = {
        road: f"{result.verdict}: {result.reason}"
        for road, result in verdicts.items()
        if result.verdict != "right"
    }
    assert not wrong
