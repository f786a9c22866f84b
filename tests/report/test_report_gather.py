"""What a report holds: every byte once, index ranges that say what is there, why it is there."""

from __future__ import annotations

import json
from math import isclose, prod
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.plan import Plan
from modelquirks.planner.report.content import Area
from modelquirks.planner.report.families import few_ranges, index_ranges
from modelquirks.planner.report.gather import of_manifest, of_plan
from modelquirks.planner.report.treemap import squarified
from modelquirks.quirks.family import group

BUSY = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
"""That the machine has other things to do is no fault."""


def listed(area: Area) -> int:
    return sum(row.n_bytes or 0 for row in area.families) + area.rest_bytes


def unfolded(text: str) -> set[int]:
    found: set[int] = set()
    for run in text.split(", "):
        first, _, last = run.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


@BUSY
@given(st.sets(st.integers(0, 30), min_size=1, max_size=12))
def test_ranges_say_exactly_which_numbers_there_are(numbers: set[int]) -> None:
    text = few_ranges(numbers)
    if "…" not in text:
        assert unfolded(text) == numbers


def test_many_ranges_are_counted() -> None:
    text = few_ranges(range(0, 100, 2))
    assert text.startswith("0, 2, 4")
    assert text.endswith("22 … and 38 more ranges")


@BUSY
@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9))
def test_a_family_is_whole_only_if_every_combination_is_there(pairs: set[tuple[int, int]]) -> None:
    (family,) = group(f"a.{i}.b.{j}" for i, j in pairs).values()
    texts, is_whole = index_ranges(family)
    assert is_whole == (prod(len(unfolded(text)) for text in texts) == len(pairs))


@BUSY
@given(
    st.lists(st.floats(1, 1e4), min_size=1, max_size=60),
    st.sampled_from([0.3, 0.9, 1.0, 3.0]),
)
def test_a_treemap_shows_sizes_and_leaves_nothing_out(sizes: list[float], aspect: float) -> None:
    sizes = sorted(sizes, reverse=True)
    rects = squarified(sizes, aspect=aspect)
    for size, rect in zip(sizes, rects, strict=True):
        shown = rect.width * rect.height / 10_000
        assert isclose(shown, size / sum(sizes), rel_tol=1e-6, abs_tol=1e-12)
        assert -1e-6 <= rect.left <= rect.left + rect.width <= 100 + 1e-6
        assert -1e-6 <= rect.top <= rect.top + rect.height <= 100 + 1e-6
    for number, a in enumerate(rects):
        for b in rects[:number]:
            across = min(a.left + a.width, b.left + b.width) - max(a.left, b.left)
            down = min(a.top + a.height, b.top + b.height) - max(a.top, b.top)
            assert min(across, down) < 1e-6


def test_the_families_of_a_device_take_what_the_plan_says_it_holds(faulty: Plan) -> None:
    report = of_plan(faulty)
    assert [area.name for area in report.areas] == ["0", "cpu", "disk"]
    for area, (device, memory) in zip(report.areas, faulty.placement.memory.items(), strict=True):
        assert (area.name, area.used_bytes) == (str(device), memory.used_bytes)
        assert listed(area) == memory.used_bytes
        assert area.rest_bytes == 0


def test_a_family_on_two_devices_has_its_own_indices_on_each(faulty: Plan) -> None:
    found: dict[str, set[int]] = {}
    for area in of_plan(faulty).areas:
        for row in area.families:
            if row.template == "layers.*.up.weight":
                found[area.name] = unfolded(row.indices[0])
                assert row.n_tensors == len(found[area.name])
                assert row.why and all(reason.strip() for reason in row.why)
    assert len(found) > 1
    assert sum(map(len, found.values())) == 12
    assert set().union(*found.values()) == set(range(12))


def test_the_audit_comes_with_its_rules_and_the_gravest_first(faulty: Plan) -> None:
    notes = of_plan(faulty).notes
    order = ["error", "warning", "info", "ok"]
    assert [n.severity for n in notes] == sorted([n.severity for n in notes], key=order.index)
    (missing,) = [note for note in notes if note.code == "missing"]
    assert (missing.text, missing.n_tensors) == ("layers.*.down.weight", 3)
    assert missing.indices == ("0, 5, 10",)
    assert {"mismatched", "unexpected", "matched"} <= {note.code for note in notes}


def test_a_saved_plan_shows_the_same_devices(faulty: Plan, tmp_path: Path) -> None:
    faulty.save(tmp_path / "plan.json")
    fresh, read = of_plan(faulty), of_plan(Plan.load(tmp_path / "plan.json"))
    assert [(a.name, a.used_bytes) for a in read.areas] == [
        (a.name, a.used_bytes) for a in fresh.areas
    ]
    assert read.places == fresh.places
    assert read.device_map == fresh.device_map
    assert json.loads(read.device_map) == dict(faulty.device_map)


def test_what_fits_nowhere_is_shown_as_not_placed(big: Path) -> None:
    plan = Dispatcher().plan(big, max_memory={"cpu": "1MiB", "disk": 0})
    assert not plan.ok
    report = of_plan(plan, open_manifest(big))
    assert [area.kind for area in report.areas] == ["device", "unplaced", "files"]
    assert report.areas[1].used_bytes == report.areas[2].used_bytes


def test_a_checkpoint_alone_is_its_families(big: Path) -> None:
    manifest = open_manifest(big)
    report = of_manifest(manifest)
    (area,) = report.areas
    assert sum(row.n_tensors for row in area.families) + area.n_left_out == 35_743
    assert listed(area) == manifest.total_bytes
    assert json.dumps(report.to_json())


@pytest.mark.parametrize("of", ["manifest", "plan"])
def test_without_headers_nothing_is_said_of_bytes(tmp_path: Path, of: str) -> None:
    index = {"metadata": {}, "weight_map": {f"a.{i}.w": "model.safetensors" for i in range(3)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest = open_manifest(tmp_path / "model.safetensors.index.json")
    report = of_manifest(manifest) if of == "manifest" else of_plan(
        Dispatcher().plan(manifest), manifest
    )  # fmt: skip
    (area,) = report.areas
    assert (area.used_bytes, area.rest_bytes) == (None, 0)
    (row,) = area.families
    assert (row.n_bytes, row.dtypes, row.shapes, row.n_tensors) == (None, ("?",), ("?",), 3)
