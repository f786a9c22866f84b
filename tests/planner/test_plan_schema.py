"""The schema of plan files: every plan that is written keeps it, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan, PlanError
from modelquirks.planner.adapter.joint import AdapterFacts, Changed
from modelquirks.planner.checkpoint.index import leaves_folder
from modelquirks.planner.checkpoint.manifest import Shard
from modelquirks.planner.checkpoint.openoptions import OpenOptions
from modelquirks.planner.checkpoint.origin import HubOrigin
from modelquirks.planner.cli.command import main
from modelquirks.planner.dtypes import BITS
from modelquirks.planner.finding import Finding
from modelquirks.planner.mapping.audit import Audit, Entry, ModelClass, StoredClass, Suggestion
from modelquirks.planner.mapping.recipes import FamilyRecipe
from modelquirks.planner.placement.machine import Machine, assumed
from modelquirks.planner.placement.moduletree import ModuleTree
from modelquirks.planner.placement.placement import DeviceMemory, Inputs, Placement, Prediction
from modelquirks.planner.placement.wishes import Wishes
from modelquirks.planner.placement.workload import Reserve, Workload
from modelquirks.planner.plan import SCHEMA, ModelFacts, Options, QuirkNote
from modelquirks.planner.schema.planschema import plan_schema
from modelquirks.quirks import recipe as r
from modelquirks.quirks.recipe import Node, Part, Source, TensorType

DATA = Path(__file__).parents[1] / "data"
TEXT: dict[str, Any] = json.loads(plan_schema())
VALIDATOR = Draft202012Validator(TEXT)


def faults(data: Any) -> list[str]:
    return [f"{error.json_path}: {error.message:.200}" for error in VALIDATOR.iter_errors(data)]


def saved(plan: Plan, folder: Path) -> Any:
    """Return what is in the file of *plan*, which comes back as the same file."""
    plan.save(folder / "plan.json")
    text = (folder / "plan.json").read_text(encoding="utf-8")
    again = Plan.load(folder / "plan.json")
    again.save(folder / "again.json")
    assert (folder / "again.json").read_text(encoding="utf-8") == text
    return json.loads(text)


def test_the_schema_is_one_and_has_the_number_of_the_format() -> None:
    Draft202012Validator.check_schema(TEXT)
    assert TEXT["properties"]["schema"] == {
        "description": TEXT["properties"]["schema"]["description"],
        "const": SCHEMA,
    }


def test_every_object_says_which_keys_it_has() -> None:
    def objects(schema: Any) -> Iterator[Mapping[str, Any]]:
        if isinstance(schema, dict):
            if schema.get("type") == "object":
                yield schema
            for value in schema.values():
                yield from objects(value)
        elif isinstance(schema, list):
            for value in schema:
                yield from objects(value)

    found = list(objects(TEXT))
    assert len(found) > 40
    for schema in found:
        allowed = schema["additionalProperties"]
        assert allowed is False or isinstance(allowed, dict)
        assert (allowed is False) == ("properties" in schema)


def test_what_is_written_in_code_too_is_the_same_there() -> None:
    steps = {one["properties"]["op"]["const"] for one in TEXT["$defs"]["node"]["oneOf"]}
    ops = {kind.__name__.lower() for kind in get_args(Node)}
    assert steps == ops - {"split", "view"}  # which only rules hold
    classes = {*get_args(ModelClass), *get_args(StoredClass)}
    assert set(TEXT["$defs"]["class"]["enum"]) == classes
    assert set(TEXT["$defs"]["dtype"]["enum"]) == set(BITS)


def test_the_command_prints_it_and_needs_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--schema"])
    assert not caught.value.code
    assert json.loads(capsys.readouterr().out) == TEXT


# Real plans


def model_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model that has just these tensors."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, torch.zeros_like(tensor))
    return model


TRAINING = sorted(
    path.parent.relative_to(DATA).as_posix()
    for kind in ("deepspeed", "dcp", "fsdp")
    for path in (DATA / kind).glob("*/*")
    if path.is_file() and path.parent.name != "universal_from_round_robin"
)
FILES = [line.split("\t")[0] for line in (DATA / "files" / "VERDICTS.tsv").read_text().splitlines()]
CHECKPOINTS = [
    *dict.fromkeys(TRAINING),
    *(f"manifests/{path.name}" for path in sorted((DATA / "manifests").iterdir()) if path.is_dir()),
    *(f"files/{name}" for name in FILES if "/" in name and (DATA / "files" / name).exists()),
    *(path.relative_to(DATA).as_posix() for path in sorted(DATA.glob("*/*.safetensors"))),
]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_plan_of_a_real_checkpoint_keeps_it(checkpoint: str, tmp_path: Path) -> None:
    plan = Dispatcher().plan(DATA / checkpoint, max_memory={0: "1GiB", "cpu": "64GiB"})
    assert faults(saved(plan, tmp_path)) == []


@pytest.mark.parametrize("case", ["zero2_bf16", "zero3_subgroups", "moe_ep2_zero2"])
def test_so_does_that_of_a_training_checkpoint_and_its_model(case: str, tmp_path: Path) -> None:
    folder = DATA / "deepspeed" / case
    model = model_of(load_file(folder / "truth.safetensors"))
    plan = Dispatcher().plan(folder, model=model, max_memory={"cpu": 5000, "disk": "1GiB"})
    assert faults(saved(plan, tmp_path)) == []


@pytest.mark.parametrize("slug", ["gpt-oss-20b", "olmocr-7b", "smollm-135m-ft"])
def test_so_does_that_of_a_class_of_transformers(slug: str, tmp_path: Path) -> None:
    dispatcher = Dispatcher()
    model = dispatcher.model(DATA / "manifests" / slug)
    plan = dispatcher.plan(
        DATA / "manifests" / slug,
        model=model,
        machine="2x24gb",
        workload=Workload(context=4096, batch=2),
        dequantize=True,
    )
    assert faults(saved(plan, tmp_path)) == []


@pytest.mark.parametrize("method", ["lora", "dora", "modules_to_save"])
def test_so_does_that_of_a_base_and_its_adapter(method: str, tmp_path: Path) -> None:
    names = {f"model.layers.0.self_attn.{n}_proj.weight": torch.zeros(16, 16) for n in "qkvo"}
    tables = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), torch.zeros(32, 16))
    state = {name: tensor.clone() for name, tensor in {**tables, **names}.items()}
    save_file(state, tmp_path / "model.safetensors")
    plan = Dispatcher().plan(
        tmp_path / "model.safetensors",
        model=model_of(state),
        adapter=DATA / "peft" / method,
        merge_adapter=True,
    )
    assert plan.adapter is not None
    assert faults(saved(plan, tmp_path)) == []


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    plan = Dispatcher().plan(tmp_path / "model.safetensors", model=model, max_memory={"cpu": "1GB"})
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from objects(item)


def test_a_key_more_or_less_anywhere_breaks_it(plan_file: Path) -> None:
    data = json.loads(plan_file.read_text())
    assert faults(data) == []
    free = {"device_map", "memory", "reasons", "classes", "devices", "aliases", "sizes", "padding"}
    mappings = [
        value
        for one in objects(data)
        for key, value in one.items()
        if key in (free | {"kept_free"}) and isinstance(value, dict)
    ]
    n_broken = 0
    for one in list(objects(data)):
        if any(one is mapping for mapping in mappings):
            continue
        one["surprise"] = 1
        assert faults(data), one
        del one["surprise"]
        for key in [key for key in one if key not in ("padding", "buffers")]:
            value = one.pop(key)
            assert faults(data), (key, one)
            one[key] = value
            n_broken += 1
    assert n_broken > 150
    assert faults(data) == []


# Old plans, newer ones, and such as were never written


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "is of schema 0, this version reads plans of schema 1: make the plan anew"),
        (2, "is of schema 2, .*: update modelquirks, or make the plan anew"),
        ("1", "is of schema '1'"),
        (True, "is of schema True"),
        (None, "is of schema None"),
    ],
)
def test_a_plan_of_another_version_is_refused_with_the_way_out(
    plan_file: Path, number: Any, said: str
) -> None:
    data = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**data, "schema": number}))
    with pytest.raises(PlanError, match=said):
        Plan.load(plan_file)


def test_a_plan_from_before_there_were_choices_and_adapters_is_read(plan_file: Path) -> None:
    data = json.loads(plan_file.read_text())
    del data["execution"]["opening"], data["execution"]["adapter"]
    plan_file.write_text(json.dumps(data))
    assert Plan.load(plan_file).opening == OpenOptions()


def test_whatever_key_a_plan_lacks_is_named(plan_file: Path) -> None:
    data = json.loads(plan_file.read_text())
    later = {"opening", "adapter", "hub"}
    for part in (data, data["execution"]):
        for key in [key for key in part if key not in ("schema", "execution", *later)]:
            value = part.pop(key)
            plan_file.write_text(json.dumps(data))
            with pytest.raises(PlanError, match=f"lacks '{key}'"):
                Plan.load(plan_file)
            part[key] = value


@pytest.mark.parametrize("where", ["the plan", "'execution'"])
def test_a_key_that_nobody_knows_is_refused_and_not_ignored(plan_file: Path, where: str) -> None:
    data = json.loads(plan_file.read_text())
    (data if where == "the plan" else data["execution"])["split"] = True
    plan_file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=f"{where} has keys .* does not know: 'split'"):
        Plan.load(plan_file)


# Any plan

WORD = st.text(max_size=6)
NAME = st.text(min_size=1, max_size=6)
FILE = NAME.filter(lambda name: not leaves_folder(name))
COUNT = st.integers(0, 2**63)
SIZES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
WORDS = st.lists(WORD, max_size=2).map(tuple)
GROUPS = st.lists(st.lists(NAME, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple)
DEVICE = st.integers(0, 3) | st.sampled_from(["cpu", "disk", "mps", "xpu:1"])
DTYPE = st.sampled_from(sorted(BITS))
TIME = st.floats(0, 1e9)
FINDING = st.builds(Finding, WORD, st.sampled_from(["error", "warning", "info"]), WORD)
FINDINGS = st.lists(FINDING, max_size=2).map(tuple)
DIM = st.integers(0, 3)
SHA = st.text("0123456789abcdef", min_size=64, max_size=64)
OPENING = st.builds(OpenOptions, st.sampled_from(["master", "training", None]), st.none() | NAME)
RESERVE = st.builds(Reserve, WORD, WORD, COUNT, WORD)


def literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


TEMPLATE = st.builds("{}{}".format, NAME.map(literal), st.sampled_from(["", "{S0}"]))
SETTINGS = st.dictionaries(
    NAME,
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORD,
    max_size=2,
).map(lambda found: tuple(sorted(found.items())))


def deeper(node: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(node, min_size=1, max_size=2).map(tuple)
    parts = st.lists(st.builds(Part, WORD, node), max_size=2).map(tuple)
    return st.one_of(
        st.builds(r.Cast, node, DTYPE),
        st.builds(r.Concat, several, DIM),
        st.builds(r.Interleave, several, DIM),
        st.builds(r.Stack, node, st.just("e"), st.none() | DIM),
        st.builds(r.Join, node, st.just("e"), DIM, st.none() | DIM),
        st.builds(r.Select, node, TEMPLATE, DIM),
        st.builds(r.Chunk, node, DIM, DIM, DIM),
        st.builds(r.Slice, node, DIM, DIM, DIM),
        st.builds(r.Transpose, node, DIM, DIM),
        st.builds(r.Permute, node, SIZES),
        st.builds(r.Reshape, node, SIZES),
        st.builds(r.Dequantize, WORD, parts, SETTINGS),
        st.builds(r.Merge, WORD, parts, SETTINGS),
        st.builds(r.Opaque, WORD, several, DTYPE, SIZES, SETTINGS),
    )


NODE: st.SearchStrategy[Node] = st.recursive(st.builds(Source, TEMPLATE), deeper, max_leaves=4)
RECIPE = st.builds(
    FamilyRecipe,
    target=TEMPLATE,
    node=NODE,
    variables=st.just(("S0",)),
    members=st.lists(st.tuples(COUNT), max_size=2).map(tuple),
    type=st.builds(TensorType, st.none() | DTYPE, st.none() | SIZES),
    rule=WORD,
    quirks=WORDS,
)


def entries(kinds: Any) -> st.SearchStrategy[tuple[Entry, ...]]:
    kind = st.sampled_from(get_args(kinds))
    one = st.builds(Entry, kind, WORD, WORDS, WORD, WORD, WORD, WORDS)
    return st.lists(one, max_size=2).map(tuple)


AUDIT = st.builds(
    Audit,
    model=entries(ModelClass),
    stored=entries(StoredClass),
    ties=GROUPS,
    unequal_ties=GROUPS,
    suggestions=st.lists(st.builds(Suggestion, WORD, WORD, DIM), max_size=1).map(tuple),
    findings=FINDINGS,
)
MACHINE = st.builds(
    Machine,
    name=WORD,
    devices=st.just({"cpu": assumed("cpu", 5), 0: assumed(0), "disk": assumed("disk")}),
    crossing_seconds=TIME,
    make_rate=TIME.filter(bool),
)
WISHES = st.builds(
    Wishes,
    machine=st.none() | MACHINE,
    workload=st.builds(Workload, context=COUNT, batch=st.integers(1, 9)),
    kept_free=st.dictionaries(st.sampled_from([0, "cpu"]), COUNT, max_size=2),
    running=st.none() | RESERVE,
    cached=WORD,
    pins=st.lists(st.tuples(NAME, st.sampled_from([0, "cpu", "disk"])), max_size=2).map(tuple),
)


@st.composite
def trees(draw: st.DrawFn) -> ModuleTree:
    sizes = draw(st.dictionaries(NAME, COUNT, min_size=1, max_size=3))
    some = st.sets(st.sampled_from(sorted(sizes)))
    return ModuleTree(
        sizes=sizes,
        modules=("", *draw(WORDS)),
        units=frozenset(draw(WORDS)),
        buffers=frozenset(draw(some)),
        together=tuple(tuple(sorted(group)) for group in [draw(some)] if group),
        read={name: draw(TIME) for name in sorted(draw(some))},
        padding={name: draw(COUNT) for name in sorted(draw(some))},
    )


INPUTS = st.builds(
    Inputs,
    tree=trees(),
    policy=st.sampled_from(["auto", "balanced"]),
    memory=st.dictionaries(st.sampled_from([0, 1, "cpu", "disk"]), st.none() | COUNT),
    wishes=WISHES,
    offload_buffers=st.booleans(),
)
PLACEMENT = st.builds(
    Placement,
    device_map=st.dictionaries(WORD, DEVICE, max_size=3),
    devices=st.just({}),
    memory=st.dictionaries(DEVICE, st.builds(DeviceMemory, st.none() | COUNT, COUNT), max_size=3),
    main_device=st.none() | DEVICE,
    solver=WORD,
    reasons=st.dictionaries(WORD, WORD, max_size=2),
    findings=FINDINGS,
    reserves=st.lists(RESERVE, max_size=2).map(tuple),
    prediction=st.none()
    | st.builds(
        Prediction,
        TIME,
        st.none() | TIME,
        st.sampled_from(["latency", "throughput", "startup"]),
        st.integers(1, 9),
        WORD,
    ),
    inputs=st.none() | INPUTS,
)
HUB = st.builds(
    HubOrigin,
    st.sampled_from(["gpt2", "org/name"]),
    st.sampled_from(["main", "v1.0", "refs/pr/1"]),
    SHA.map(lambda text: text[:40]),
    st.sampled_from(["", "a", "a/b"]),
)
CHECKPOINT = st.fixed_dictionaries(
    {
        "path": WORD,
        "format": WORD,
        "tensors": COUNT,
        "families": COUNT,
        "shards": COUNT,
        "total_bytes": st.none() | COUNT,
        "chosen": OPENING.map(OpenOptions.to_json),
        "findings": FINDINGS.map(lambda found: [one.to_json() for one in found]),
    },
    optional={"hub": HUB.map(HubOrigin.to_json)},
)
PLANS = st.builds(
    Plan,
    root=st.just(Path("/")),
    path=st.just(Path("/")),
    checkpoint=CHECKPOINT,
    shards=st.lists(
        st.builds(Shard, FILE, st.none() | COUNT, st.none() | COUNT, st.none() | SHA), max_size=2
    ).map(tuple),
    layout=SHA,
    model=st.none() | st.builds(ModelFacts, WORD, COUNT),
    quirks=st.lists(st.builds(QuirkNote, WORD, WORD, WORD, WORD, WORD), max_size=1).map(tuple),
    audit=AUDIT,
    placement=PLACEMENT,
    recipes=st.lists(RECIPE, max_size=2).map(tuple),
    aliases=st.dictionaries(WORD, WORD, max_size=2),
    compare=GROUPS,
    findings=FINDINGS,
    options=st.builds(Options, st.booleans(), st.booleans(), st.booleans()),
    opening=OPENING,
    adapter=st.none()
    | st.builds(
        AdapterFacts,
        path=st.just("/adapter"),
        method=WORD,
        base=WORD,
        revision=WORD,
        merged=st.booleans(),
        tensors=COUNT,
        changes=st.lists(st.builds(Changed, WORD, COUNT, WORD), max_size=1).map(tuple),
    ),
    origin=st.none() | HUB,
)


@settings(max_examples=25, deadline=None)
@given(plan=PLANS)
def test_any_plan_keeps_it_and_comes_back_as_it_was(
    plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert faults(saved(plan, folder)) == []
    again = Plan.load(folder / "plan.json")
    assert again == plan
    assert again.placement.inputs == plan.placement.inputs
