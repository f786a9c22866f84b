"""``modelquirks diff``: what it claims is so, what it cannot know it does not claim."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelquirks.planner.checkpoint.open import open_manifest
from modelquirks.planner.cli.command import main
from modelquirks.planner.diff.compare import KINDS, Difference, compare
from modelquirks.planner.diff.page import page
from modelquirks.planner.diff.sides import Item, Side, of_checkpoint, of_plan
from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.plan import Plan
from modelquirks.quirks.registry import Registry

Tensors = Mapping[str, tuple[str, Sequence[int]]]

LAYERS: Tensors = {
    "embed.weight": ("F32", [10, 4]),
    **{f"layers.{i}.up.weight": ("F32", [8, 4]) for i in range(4)},
    **{f"layers.{i}.down.weight": ("F32", [4, 8]) for i in range(4)},
    "head.weight": ("F32", [10, 4]),
}

MODULE = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 10, bias=False)
"""

Make = Callable[[str, Tensors], Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Give a function that writes a checkpoint in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def write(name: str, tensors: Tensors) -> Path:
        header: dict[str, Any] = {}
        at = 0
        for tensor, (dtype, shape) in tensors.items():
            size = math.prod(shape) * {"F32": 4, "BF16": 2}[dtype]
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        folder = Path(name)
        folder.mkdir()
        data = struct.pack("<Q", len(text)) + text + bytes(at)
        (folder / "model.safetensors").write_bytes(data)
        return folder

    return write


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load()


def difference(a: Path, b: Path, registry: Registry) -> Difference:
    return compare(*(of_checkpoint(open_manifest(path), registry) for path in (a, b)))


def found(result: Difference) -> list[tuple[tuple[str, ...], str, str, int]]:
    return [(g.kinds, g.before, g.after, g.n_tensors) for g in result.groups]


def test_a_checkpoint_and_its_copy_do_not_differ(make: Make, registry: Registry) -> None:
    result = difference(make("a", LAYERS), make("b", LAYERS), registry)
    assert result.is_same
    assert (result.n_same, result.groups, result.facts) == (10, (), ())


def test_other_shapes_and_dtypes_are_told_by_family(make: Make, registry: Registry) -> None:
    other = {
        **LAYERS,
        "embed.weight": ("F32", [11, 4]),
        **{f"layers.{i}.up.weight": ("BF16", [8, 4]) for i in range(1, 4)},
        "head.weight": ("BF16", [11, 4]),
    }
    result = difference(make("a", LAYERS), make("b", other), registry)
    assert found(result) == [
        (("reshaped",), "embed.weight", "embed.weight", 1),
        (("retyped",), "layers.*.up.weight", "layers.*.up.weight", 3),
        (("reshaped", "retyped"), "head.weight", "head.weight", 1),
    ]
    assert result.groups[1].indices == ("1-3",)
    assert result.n_same == 5


def test_a_rename_is_claimed_where_a_record_says_so(make: Make, registry: Registry) -> None:
    wrapped = {f"module.{name}": type_ for name, type_ in LAYERS.items()}
    result = difference(make("a", LAYERS), make("b", wrapped), registry)
    assert [kinds for kinds, *_ in found(result)] == [("renamed",)] * 4
    assert {group.certain_by for group in result.groups} == {"wrapper.module"}
    assert result.counts() == {"renamed": 10}


def test_what_only_looks_alike_is_a_candidate_and_no_rename(make: Make, registry: Registry) -> None:
    other = {name.replace("down", "proj_down"): type_ for name, type_ in LAYERS.items()}
    result = difference(make("a", LAYERS), make("b", other), registry)
    removed, added = result.groups
    assert (removed.kinds, removed.before, removed.after) == (
        ("removed",), "layers.*.down.weight", "",
    )  # fmt: skip
    assert removed.candidates == ("layers.*.proj_down.weight",)
    assert (added.kinds, added.after) == (("added",), "layers.*.proj_down.weight")
    assert added.candidates == ("layers.*.down.weight",)


@pytest.mark.parametrize("change", ["shape", "dtype", "indices"])
def test_a_candidate_has_the_same_indices_shapes_and_dtypes(
    make: Make, registry: Registry, change: str
) -> None:
    other = {name.replace("down", "proj_down"): type_ for name, type_ in LAYERS.items()}
    match change:
        case "shape":
            other["layers.3.proj_down.weight"] = ("F32", [8, 4])
        case "dtype":
            other["layers.3.proj_down.weight"] = ("BF16", [4, 8])
        case _:
            other["layers.9.proj_down.weight"] = other.pop("layers.3.proj_down.weight")
    result = difference(make("a", LAYERS), make("b", other), registry)
    assert [group.candidates for group in result.groups] == [(), ()]


def test_two_tensors_for_one_are_no_rename(make: Make, registry: Registry) -> None:
    wrapped = {f"module.{name}": type_ for name, type_ in LAYERS.items()}
    twice = {**wrapped, "embed.weight": ("F32", [10, 4])}
    result = difference(make("a", LAYERS), make("b", twice), registry)
    assert ("added",) in [group.kinds for group in result.groups if "embed" in group.after]
    assert "renamed" not in [k for g in result.groups if "embed" in g.after for k in g.kinds]


def test_a_tensor_of_another_shape_is_no_rename(make: Make, registry: Registry) -> None:
    wrapped = {f"module.{name}": type_ for name, type_ in LAYERS.items()}
    wrapped["module.embed.weight"] = ("F32", [11, 4])
    result = difference(make("a", LAYERS), make("b", wrapped), registry)
    assert [g.kinds for g in result.groups if "embed" in g.before + g.after] == [
        ("removed",),
        ("added",),
    ]


def test_from_names_alone_nothing_is_said_of_shapes(make: Make, registry: Registry) -> None:
    folder = make("a", LAYERS)
    index = Path("names.safetensors.index.json")
    weights = dict.fromkeys(LAYERS, "x.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    result = difference(folder, index, registry)
    assert result.is_same
    assert result.n_unknown == 10
    assert any("only names were compared" in note for note in result.notes)


BUSY = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
"""That the machine has other things to do is no fault."""

NAMES = ["a", "b", "l.0.w", "l.1.w", "l.2.w", "m.0.w", "module.a", "module.l.0.w"]
ITEMS = [
    Item(shape, dtype, device)
    for shape in (None, (1,), (2, 3))
    for dtype in (None, "F32", "BF16")
    for device in (None, "0", "cpu")
]


def side(seed: int) -> Side:
    """Return a side with some of the names, each of some type."""
    chosen = random.Random(seed)
    names = [name for name in NAMES if chosen.random() < 0.6]
    return Side("x", "checkpoint", "", {name: chosen.choice(ITEMS) for name in names})


SIDES = st.integers(0, 2**32).map(side)


@BUSY
@given(SIDES, SIDES)
def test_every_tensor_of_both_sides_is_told_once(a: Side, b: Side) -> None:
    result = compare(a, b)
    alone: dict[str, int] = {}
    for group in result.groups:
        assert list(group.kinds) == sorted(group.kinds, key=KINDS.index)
        alone[group.kinds[0]] = alone.get(group.kinds[0], 0) + group.n_tensors
    removed, added = alone.pop("removed", 0), alone.pop("added", 0)
    both = result.n_same + sum(alone.values())
    assert both + removed == len(a.items)
    assert both + added == len(b.items)


@BUSY
@given(SIDES)
def test_nothing_differs_from_itself(side: Side) -> None:
    assert compare(side, side).is_same


@BUSY
@given(SIDES, SIDES)
def test_the_other_way_round_it_is_the_same_difference(a: Side, b: Side) -> None:
    forth, back = compare(a, b), compare(b, a)
    swapped = {"removed": "added", "added": "removed"}
    told = {(tuple(swapped.get(k, k) for k in g.kinds), g.n_tensors, g.after, g.before,
             tuple((c.kind, c.after, c.before) for c in g.changes))
            for g in forth.groups}  # fmt: skip
    assert told == {(g.kinds, g.n_tensors, g.before, g.after,
                     tuple((c.kind, c.before, c.after) for c in g.changes))
                    for g in back.groups}  # fmt: skip


def planned(folder: Path, **options: Any) -> Plan:
    space: dict[str, Any] = {}
    exec(MODULE, space)
    import torch

    with torch.device("meta"):
        model = space["Net"]()
    return Dispatcher().plan(folder, model=model, **options)


def test_two_plans_differ_where_tensors_go_and_what_they_are_made_of(make: Make) -> None:
    wrapped = {f"module.{name}": type_ for name, type_ in LAYERS.items()}
    a = planned(make("a", LAYERS), max_memory={"cpu": "1MiB"})
    b = planned(make("b", wrapped), max_memory={"cpu": 600, "disk": "1MiB"})
    result = compare(of_plan(a), of_plan(b))
    assert result.counts().keys() == {"moved", "remade"}
    assert result.counts()["remade"] == 10
    moved = {change for g in result.groups for change in g.changes if change.kind == "moved"}
    assert moved == {("moved", "cpu", "disk")}
    assert ("quirks", "none", "wrapper.module") in result.facts


def test_a_tensor_that_is_missing_now_is_told(make: Make) -> None:
    fewer = {name: type_ for name, type_ in LAYERS.items() if "layers.2" not in name}
    a, b = (planned(make(n, t), max_memory={"cpu": "1MiB"}) for n, t in
            (("a", LAYERS), ("b", fewer)))  # fmt: skip
    result = compare(of_plan(a), of_plan(b))
    assert result.counts() == {"reclassified": 2}
    assert {group.changes for group in result.groups} == {(("reclassified", "matched", "missing"),)}


def test_a_plan_does_not_differ_from_itself_once_it_is_saved(make: Make) -> None:
    plan = planned(make("a", LAYERS), max_memory={"cpu": "1MiB"})
    plan.save("plan.json")
    assert compare(of_plan(plan), of_plan(Plan.load("plan.json"))).is_same


def test_plans_without_a_model_are_compared_by_the_modules_that_they_place(make: Make) -> None:
    folder = make("a", LAYERS)
    plans = [Dispatcher().plan(folder, max_memory=m) for m in
             ({"cpu": "1MiB"}, {"cpu": 600, "disk": "1MiB"})]  # fmt: skip
    result = compare(*map(of_plan, plans))
    assert not result.is_same
    assert compare(of_plan(plans[0]), of_plan(replace(plans[0]))).is_same


# The command


@pytest.mark.parametrize("width", [80, 50])
def test_the_difference_reads_well(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], bool], width: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    other = {f"module.{name.replace('down', 'proj_down')}": t for name, t in LAYERS.items()}
    other["module.layers.2.up.weight"] = ("BF16", [8, 4])
    make("a", LAYERS)
    make("b", other)
    assert main(["diff", "a", "b"]) == 1
    out = capsys.readouterr().out
    assert golden(f"diff_{width}.txt", out)
    assert max(map(len, out.splitlines())) <= width


def test_exit_codes_are_those_of_diff(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make("a", LAYERS)
    make("b", {"x": ("F32", [1])})
    Path("plan.json").write_text('{"schema": 1}')
    Path("empty").mkdir()
    assert main(["diff", "a", "a"]) == 0
    assert main(["diff", "a", "b"]) == 1
    for words in (["a", "nowhere"], ["a", "empty"], ["a", "plan.json"], ["plan.json", "plan.json"]):
        assert main(["diff", *words]) == 2
    said = capsys.readouterr().err
    assert "'plan.json' is a plan and 'a' is a checkpoint" in said


def test_json_has_the_keys_that_programs_rely_on(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    make("a", LAYERS)
    make("b", {**LAYERS, "x": ("F32", [1])})
    assert main(["diff", "a", "b", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    told = report["diff"]
    assert (told["same"], told["counts"], told["n_same"]) == (False, {"added": 1}, 10)
    (group,) = told["groups"]
    assert (group["kinds"], group["after"], group["n_tensors"]) == (["added"], "x", 1)


def test_the_page_shows_each_difference_and_hostile_names_as_text(
    make: Make, registry: Registry
) -> None:
    make("a", LAYERS)
    make("b", {**LAYERS, "</script><script>x": ("F32", [1])})
    text = page(difference(Path("a"), Path("b"), registry))
    assert text.count("<script>") == 1
    assert "&lt;/script&gt;&lt;script&gt;x" in text
    assert main(["diff", "a", "b", "--html", "diff.html"]) == 1
    assert Path("diff.html").read_text(encoding="utf-8") == text
