"""Checkpoints of torch.distributed.checkpoint: real ones, damaged ones, and grids of all kinds."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from modelquirks.planner import CheckpointError, Dispatcher, Plan, open_manifest
from modelquirks.planner.checkpoint.manifest import Manifest, StoredTensor
from modelquirks.planner.execution.evaluate import evaluate
from modelquirks.planner.execution.reader import Reader
from modelquirks.planner.mapping.places import in_places
from modelquirks.planner.mapping.recipes import FamilyRecipe
from modelquirks.planner.plan import PlanError
from modelquirks.plugins import dcp, wrappers
from modelquirks.plugins.dcp.grid import Chunk, assembled
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.nodetypes import infer
from modelquirks.quirks.recipe import (
    Concat,
    Join,
    Node,
    RecipeError,
    Region,
    Source,
    Stack,
    TensorType,
    sources,
)
from modelquirks.quirks.record import Convert, Match, ModelQuirks
from modelquirks.quirks.registry import Registry

DATA = Path(__file__).parents[1] / "data" / "dcp"
TRUTH = load_file(DATA / "truth.safetensors")
GRID = load_file(DATA / "truth_grid.safetensors")
FSDP = DATA / "accelerate" / "pytorch_model_fsdp_0"


class Tiny(nn.Module):
    """The model that was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 1)
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(0))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Tiny()


def registry(*plugins: object) -> Registry:
    found = Registry()
    for number, plugin in enumerate((dcp, wrappers, *plugins)):
        found.register(plugin, name=f"plugin{number}")
    return found


def opened(path: Path) -> Manifest:
    return open_manifest(path, registry)


def planned(path: Path, model: nn.Module, **options: Any) -> Plan:
    options.setdefault("device_map", None)
    return Dispatcher(registry()).plan(path, model=model, **options)


def assert_loaded(model: nn.Module, prefix: str = "") -> None:
    state = model.state_dict()
    assert {*state} == {prefix + name for name in TRUTH}
    for name, expected in TRUTH.items():
        assert state[prefix + name].dtype == expected.dtype
        assert torch.equal(state[prefix + name], expected), name


def errors(path: Path) -> dict[str, str]:
    return {f.code: f.message for f in opened(path).findings if f.severity == "error"}


def copied(tmp_path: Path, source: Path = FSDP) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


@pytest.mark.parametrize(
    "path",
    [DATA / "fsdp2", DATA / "accelerate", FSDP, FSDP / ".metadata", FSDP / "__0_0.distcp"],
    ids=lambda path: path.name,
)
def test_what_two_ranks_saved_loads_on_one_bit_for_bit_reading_each_byte_once(path: Path) -> None:
    model = Tiny()
    plan = planned(path, model)
    assert plan.ok, plan.problems
    assert plan.checkpoint["format"] == "dcp"
    report = plan.load_into(model)
    assert_loaded(model)
    assert report.bytes_read == sum(tensor.nbytes for tensor in TRUTH.values())
    assert plan.checkpoint["total_bytes"] == report.bytes_read


def test_what_two_ranks_saved_loads_on_four_and_each_reads_only_its_part(tmp_path: Path) -> None:
    script = Path(__file__).with_name("dcp_ranks.py")
    words = [sys.executable, str(script), "4", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    read = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    copies = 3 * TRUTH["count"].nbytes  # the one tensor that every rank has
    assert sum(read) == sum(tensor.nbytes for tensor in TRUTH.values()) + copies


def test_shards_of_hugging_faces_writer_load_too() -> None:
    model = Tiny()
    plan = planned(DATA / "hugging_face", model, allow_missing=["count"])
    assert plan.ok, plan.problems
    model.count.fill_(7)
    plan.execute(model)
    assert_loaded(model)


def test_a_saved_plan_names_the_chunks_and_is_executed(tmp_path: Path) -> None:
    planned(FSDP, Tiny()).save(tmp_path / "plan.json")
    plan = replace(Plan.load(tmp_path / "plan.json"), registry=registry())
    leaves = [leaf.name for recipe in plan.recipes for leaf in sources(recipe.node)]
    assert "embed.weight[0:7, 0:6]" in leaves
    model = Tiny()
    plan.execute(model)
    assert_loaded(model)


def test_layers_that_are_cut_alike_share_one_recipe() -> None:
    recipes = planned(FSDP, Tiny()).recipes
    assert sorted(len(r.members) for r in recipes if r.target.startswith("layers.")) == [3, 3]


def test_renames_work_on_parameters_and_not_on_chunks() -> None:
    model = Outer()
    plan = planned(FSDP, model, aliases=["**=inner.**"])
    assert plan.ok, plan.problems
    plan.execute(model)
    assert_loaded(model, "inner.")


def test_the_audit_speaks_of_parameters() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(13, 6), "head": nn.Linear(6, 2)})
    audit = planned(FSDP, model).audit
    assert set(audit.mismatched) == {"head.weight", "head.bias"}
    assert {"layers.0.weight", "norm.bias", "count"} <= set(audit.unexpected)
    assert not any("[" in name for name in audit.names("used"))


def test_a_conversion_stacks_tensors_that_lie_in_chunks() -> None:
    record = ModelQuirks(
        name="test.stack",
        role="architecture",
        match=Match(any_of=("layers.{layer}.weight",)),
        conversions=(Convert("stacked", Stack(Source("layers.{layer}.weight"), "layer")),),
        why="a test",
        url="https://example.org",
    )

    class Records:
        @hookimpl
        def modelquirks_records(self) -> tuple[ModelQuirks]:
            return (record,)

    model = nn.ParameterDict({"stacked": nn.Parameter(torch.zeros(2, 7, 5))})
    model["head_weight"] = nn.Parameter(torch.zeros(4, 6))
    plan = Dispatcher(registry(Records())).plan(
        DATA / "grid", model=model, device_map=None, aliases=["head.weight=head_weight"]
    )
    assert plan.ok, plan.problems
    plan.execute(model)
    assert torch.equal(model["stacked"], torch.stack([GRID[f"layers.{n}.weight"] for n in (0, 1)]))
    assert torch.equal(model["head_weight"], GRID["head.weight"])


def test_a_region_reads_only_what_it_needs_of_the_chunks_that_it_meets() -> None:
    manifest = opened(DATA / "grid")
    node = manifest.assembled["layers.0.weight"]
    reader = Reader(manifest.root, manifest.readable)
    found = evaluate(
        node, {}, read=reader.read, types=reader.type_of, schemes={}, region=((1, 3), (0, 5))
    )
    assert torch.equal(found, GRID["layers.0.weight"][1:3])
    assert reader.bytes_read == 2 * 5 * 4


def test_offloaded_weights_are_made_of_their_chunks_in_the_forward_pass() -> None:
    model = Tiny()
    plan = planned(FSDP, model, device_map={"embed": "disk", "": "cpu"})
    assert plan.ok, plan.problems
    plan.execute(model)
    embedded: torch.Tensor = model.embed(torch.arange(13))
    assert torch.equal(embedded, TRUTH["embed.weight"])


def test_the_optimizer_is_reported_and_not_loaded() -> None:
    found = {f.code: f.message for f in opened(DATA / "fsdp2").findings}
    assert found["not-loaded"].startswith("'optim' holds 33 tensors, ")
    assert not any("exp_avg" in name for name in opened(DATA / "fsdp2").tensors)


def test_a_missing_file_is_named_with_the_chunks_that_it_holds(tmp_path: Path) -> None:
    folder = copied(tmp_path, DATA / "fsdp2")
    (folder / "__1_0.distcp").unlink()
    text = errors(folder)["shard-missing"]
    assert text.startswith("'__1_0.distcp' is not there; it holds ")
    assert "'embed.weight[7:13, 0:6]'" in text
    plan = planned(folder, Tiny())
    assert not plan.ok and text in plan.problems
    with pytest.raises(PlanError, match=r"__1_0\.distcp"):
        plan.execute(Tiny())
    optimizer = next(f.message for f in opened(folder).findings if f.code == "not-loaded")
    assert "a file is missing: 'optim." in optimizer


def test_a_truncated_file_is_named_with_the_chunks_that_are_lost(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    content = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(content[:-100])
    text = errors(folder)["shard-truncated"]
    assert "Lost are 1 chunks" in text
    assert not planned(folder, Tiny()).ok
    (folder / "__0_0.distcp").write_bytes(b"")
    assert "Lost are 12 chunks" in errors(folder)["shard-truncated"]


def test_a_file_of_another_save_is_noticed(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    shutil.copy(DATA / "grid" / "__0_0.distcp", folder / "__0_0.distcp")
    assert {*errors(folder)} & {"shard-truncated", "zip-truncated", "chunk-differs"}


def test_overwritten_bytes_in_a_chunks_directory_are_noticed(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[:2000] = bytes(2000)
    (folder / "__0_0.distcp").write_bytes(content)
    assert "from byte 0 of '__0_0.distcp'" in errors(folder)["zip-truncated"]


def test_files_without_metadata_are_recognised(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / ".metadata").unlink()
    assert "the save was interrupted" in errors(folder)["metadata-missing"]


@pytest.mark.parametrize("kept", [1, 40, 400, 3000])
def test_cut_off_metadata_are_an_error_with_a_name(tmp_path: Path, kept: int) -> None:
    folder = copied(tmp_path)
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[:kept])
    assert "'.metadata'" in errors(folder)["metadata-invalid"]


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("ran"),)  # type: ignore[return-value]


def test_nothing_in_the_metadata_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tmp_path)
    monkeypatch.chdir(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    assert "metadata-invalid" in errors(folder)
    assert not (tmp_path / "ran").exists()


def test_a_hole_between_ranks_is_named(tmp_path: Path) -> None:
    folder = copied(tmp_path, DATA / "hugging_face")
    first, second = sorted(folder.glob("shard-*"))
    first.unlink()
    found = errors(folder)
    assert "rank 0" in found["shard-missing"]
    assert "'embed.weight': no chunk covers [0:7, 0:6]" in found["chunk-missing"]
    shutil.copy(DATA / "hugging_face" / first.name, first)
    second.unlink()  # nothing in the files says so: the model does
    plan = planned(folder, Tiny(), allow_missing=["count"])
    assert "embed.weight" in plan.audit.mismatched


def test_a_file_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    plan = planned(folder, Tiny())
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content.replace(b"__1_0", b"__0_0"))
    with pytest.raises(PlanError, match=r"'\.metadata' has another header"):
        plan.execute(Tiny())


def test_without_the_plugin_the_folder_is_named_for_what_it_is() -> None:
    with pytest.raises(CheckpointError, match="torch distributed checkpoint, and no plugin"):
        open_manifest(FSDP, Registry)


def test_a_plugin_that_fails_is_named_and_the_others_go_on() -> None:
    class Broken:
        @hookimpl
        def modelquirks_open(self, path: Path, names: Sequence[str]) -> None:
            raise KeyError("oh")

    class Odd:
        @hookimpl
        def modelquirks_open(self, path: Path, names: Sequence[str]) -> str:
            return "mine"

    both = registry(Broken(), Odd())
    found = open_manifest(FSDP, lambda: both)
    assert {*found.tensors} == {*TRUTH}
    text = " ".join(f.message for f in found.findings if f.code == "plugin-problem")
    assert "raised KeyError: 'oh'" in text
    assert "returned 'mine' without places, tensors" in text


@st.composite
def grids(draw: st.DrawFn) -> tuple[torch.Tensor, list[Chunk]]:
    """Draw a tensor cut again and again, each part along any dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    done: list[tuple[tuple[int, int], ...]] = []
    todo = [tuple((0, size) for size in shape)]
    while todo:
        region = todo.pop()
        wide = [dim for dim, (start, stop) in enumerate(region) if stop - start > 1]
        if not wide or len(done) + len(todo) > 8 or not draw(st.booleans()):
            done.append(region)
            continue
        dim = draw(st.sampled_from(wide))
        start, stop = region[dim]
        at = draw(st.integers(start + 1, stop - 1))
        for part in ((start, at), (at, stop)):
            todo.append((*region[:dim], part, *region[dim + 1 :]))
    chunks = [
        Chunk(f"c{number}", region) for number, region in enumerate(draw(st.permutations(done)))
    ]
    size = 1
    for length in shape:
        size *= length
    return torch.arange(size).reshape(shape), chunks


def joined(node: Any, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(node, Source):
        return parts[node.name]
    return torch.cat([joined(part, parts) for part in node.of], node.dim)


@given(grids())
def test_any_grid_of_chunks_gives_the_tensor_that_was_cut(
    drawn: tuple[torch.Tensor, list[Chunk]],
) -> None:
    whole, chunks = drawn
    parts = {c.place: whole[tuple(slice(*bounds) for bounds in c.region)] for c in chunks}
    node = assembled(chunks, tuple(whole.shape))
    assert torch.equal(joined(node, parts), whole)
    types = {name: TensorType("I64", tuple(part.shape)) for name, part in parts.items()}
    assert infer(node, types.__getitem__, {}).shape == tuple(whole.shape)


@given(grids(), st.data())
def test_a_grid_with_a_hole_or_a_chunk_twice_is_none(
    drawn: tuple[torch.Tensor, list[Chunk]], data: st.DataObject
) -> None:
    whole, chunks = drawn
    lost = data.draw(st.sampled_from(chunks))
    with pytest.raises(RecipeError):
        assembled([chunk for chunk in chunks if chunk is not lost], tuple(whole.shape))
    with pytest.raises(RecipeError):
        assembled([*chunks, lost], tuple(whole.shape))


@pytest.mark.parametrize("kind", [Stack, Join])
@pytest.mark.parametrize("cuts", [(2, 2, 2), (1, 2, 3), (2, 0, 2)], ids=str)
def test_stacks_of_tensors_that_are_cut_differently_are_written_out(
    kind: type[Stack | Join], cuts: tuple[int, ...]
) -> None:
    whole = {f"l.0.e.{n}.w": torch.randn(4, 3) for n in range(len(cuts))}
    parts: dict[str, torch.Tensor] = {}
    assembly: dict[str, Node] = {}
    for (name, tensor), cut in zip(whole.items(), cuts, strict=True):
        pieces = [(0, cut), (cut, 4)] if cut else [(0, 4)]
        chunks = [Chunk(f"{name}[{a}:{b}]" if cut else name, ((a, b), (0, 3))) for a, b in pieces]
        parts |= {c.place: tensor[slice(*c.region[0])] for c in chunks}
        if cut:
            assembly[name] = assembled(chunks, (4, 3))
    manifest = Manifest(
        root=Path(),
        path=Path(),
        format="test",
        tensors={n: StoredTensor(n, "f", "F32", (4, 3)) for n in whole},
        shards=(),
        config={},
        assembled=assembly,
        places={n: StoredTensor(n, "f", "F32", tuple(p.shape)) for n, p in parts.items()},
    )
    node = kind(Source("l.{S0}.e.{expert}.w"), "expert", count=len(cuts))
    type_ = TensorType("F32", None)
    recipe = FamilyRecipe("l.{S0}.all", node, ("S0",), ((0,),), type_)
    (found,) = in_places([recipe], manifest)
    assert isinstance(found.node, kind if len({*cuts}) == 1 else Concat)

    def read(name: str, region: Region | None = None) -> torch.Tensor:
        bounds = region or ()
        return parts[name][tuple(slice(*pair) for pair in bounds)]

    made = evaluate(
        FamilyRecipe.from_json(found.to_json()).node,
        {"S0": 0},
        read=read,
        types=lambda name: TensorType("F32", tuple(parts[name].shape)),
        schemes={},
    )
    join: Any = torch.stack if kind is Stack else torch.cat
    assert torch.equal(made, join([*whole.values()]))


def test_the_first_of_several_models_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    for number in (0, 1, 10):
        shutil.copytree(FSDP, tmp_path / f"pytorch_model_fsdp_{number}")
    found = {f.code: f.message for f in opened(tmp_path).findings}
    assert found["several-models"].startswith("'pytorch_model_fsdp_0' was read")
    assert "'pytorch_model_fsdp_1', 'pytorch_model_fsdp_10'" in found["several-models"]


def test_weights_under_the_usual_names_come_first_and_the_chunks_are_named(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    shutil.copy(DATA / "truth.safetensors", folder / "model.safetensors")
    manifest = opened(folder)
    assert manifest.format == "safetensors"
    assert "__0_0.distcp" in next(f.message for f in manifest.findings if f.code == "other-copies")


def test_what_fsdp1_saved_flat_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = copied(tmp_path, DATA / "grid")
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content.replace(b"head.weight", b"_flat_param"))
    assert "SHARDED_STATE_DICT" in errors(folder)["flat-parameters"]
