"""Plans executed against a digest: nothing is loaded that it does not vouch for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan, PlanError, load_checkpoint_and_dispatch
from modelquirks.planner.adapter.adapter import open_adapter
from modelquirks.planner.adapter.beside import beside
from modelquirks.planner.checkpoint.manifest import Manifest
from modelquirks.planner.digest.digest import Digest, DigestError
from modelquirks.planner.digest.hashing import hash_tensors
from modelquirks.planner.digest.planned import used_tensors
from modelquirks.planner.execution.loaditem import ExecutionError
from modelquirks.quirks.recipe import sources

DATA = Path(__file__).parents[1] / "data"


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def digest_of(checkpoint: Path | Manifest) -> Digest:
    hashed = hash_tensors(Dispatcher().manifest(checkpoint))
    assert not hashed.unreadable
    return Digest(hashed.tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a checkpoint that has one tensor more than the model."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    state = {**make_model().state_dict(), "unused": torch.zeros(4)}
    save_file(state, folder / "model.safetensors")
    digest_of(folder).save(tmp_path / "digest.json")
    return folder


def damage(folder: Path, **tensors: torch.Tensor) -> None:
    """Put other values into the file, whose size, header and time stay what they were."""
    path = folder / "model.safetensors"
    before = path.stat()
    state = {**load_file(path), **{n.replace("_", "."): t for n, t in tensors.items()}}
    save_file(state, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def plan_of(folder: Path, devices: Mapping[str, Any] | None = None) -> Plan:
    return Dispatcher().plan(folder, model=make_model(), device_map=devices or {"": "cpu"})


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_what_the_digest_vouches_for_is_loaded_and_that_is_said(folder: Path, where: str) -> None:
    plan = plan_of(folder, {"0": "cpu", "1": where})
    digest = folder.with_name("digest.json")
    report = plan.load_into(make_model(), verify="full", digest=digest)
    (note,) = [note for note in report.notes if note.code == "digest"]
    assert "the 4 stored tensors that the plan reads" in note.message


@pytest.mark.parametrize("verify", ["samples", "full"])
def test_values_changed_behind_the_same_header_are_refused_before_the_model_is_touched(
    folder: Path, verify: str
) -> None:
    plan = plan_of(folder)
    damage(folder, **{"0_weight": torch.zeros(8, 4)})
    model = make_model()
    before = dict(model.named_parameters())
    with pytest.raises(PlanError, match=r"1 tensor of the 4 .*\n- '0\.weight': other bytes"):
        plan.execute(model, verify=verify, digest=folder.with_name("digest.json"))
    assert all(before[name] is tensor for name, tensor in model.named_parameters())
    plan.execute(model)  # the plan alone cannot know
    assert not model.get_parameter("0.weight").any()


def test_a_tensor_that_the_plan_does_not_read_may_be_anything(folder: Path) -> None:
    plan = plan_of(folder)
    damage(folder, unused=torch.ones(4))
    plan.execute(make_model(), digest=folder.with_name("digest.json"))


def test_a_tensor_that_the_digest_does_not_know_is_refused(folder: Path) -> None:
    known = digest_of(folder).tensors
    digest = Digest({name: known[name] for name in known if name != "1.bias"})
    with pytest.raises(PlanError, match=r"'1\.bias': not in the digest"):
        plan_of(folder).execute(make_model(), digest=digest)


def test_a_digest_that_cannot_be_read_is_told_as_such(folder: Path) -> None:
    with pytest.raises(DigestError, match=r"'nowhere\.json'"):
        plan_of(folder).execute(make_model(), digest="nowhere.json")


class _Meddler:
    """Does something when the load, which comes after the look at the digest, begins."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self._meddle = meddle

    def begin(self, totals: Mapping[str, int]) -> None:
        if "verification" in totals:
            self._meddle()

    def add(self, where: str, n_bytes: int) -> None:
        pass


def replace_file(path: Path) -> None:
    shutil.copy(path, path.with_name("new"))
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize("meddle", [os.utime, replace_file])
def test_a_file_exchanged_between_the_look_and_the_end_undoes_the_load(
    folder: Path, meddle: Callable[[Path], None]
) -> None:
    model = make_model()
    before = dict(model.named_parameters())
    meddler = _Meddler(lambda: meddle(folder / "model.safetensors"))
    with pytest.raises(ExecutionError, match=r"written to or replaced|replaced or written"):
        plan_of(folder).execute(
            model, verify="full", digest=folder.with_name("digest.json"), progress=meddler
        )
    assert all(before[name] is tensor for name, tensor in model.named_parameters())


def test_the_drop_in_takes_a_digest(folder: Path) -> None:
    load_checkpoint_and_dispatch(make_model(), folder, digest=folder.with_name("digest.json"))
    damage(folder, **{"1_bias": torch.ones(2)})
    with pytest.raises(PlanError, match=r"'1\.bias': other bytes"):
        load_checkpoint_and_dispatch(make_model(), folder, digest=folder.with_name("digest.json"))


def test_ranks_that_load_together_are_told_how_to_check(folder: Path) -> None:
    with pytest.raises(ValueError, match="digest CHECKPOINT --check"):
        plan_of(folder).execute(make_model(), together=True, digest=folder.with_name("digest.json"))


# Tensors that lie in parts, and adapters


def model_of(truth: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model that has just these tensors, all zero."""
    model = nn.Module()
    for name, tensor in truth.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if tensor.is_floating_point():
            owner.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor)))
        else:
            owner.register_buffer(leaf, torch.zeros_like(tensor))
    return model


def test_a_part_of_a_tensor_that_changed_is_told_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "dcp" / "fsdp2", tmp_path / "in"))
    truth = load_file(DATA / "dcp" / "truth.safetensors")
    plan = Dispatcher().plan(folder, model=model_of(truth), device_map=None)
    assert plan.ok, plan.problems
    digest = digest_of(folder)
    plan.execute(model_of(truth), digest=digest)
    manifest = Dispatcher().manifest(folder)
    assert manifest.assembled
    assert set(used_tensors(plan.recipes, manifest)) == {*truth} & {*manifest.tensors}
    name = next(n for n in truth if n in manifest.assembled and truth[n].numel() > 4)
    part = [leaf.name for leaf in sources(manifest.assembled[name])][-1]
    place = manifest.places[part]
    path = folder / place.shard
    before, data = path.stat(), bytearray(path.read_bytes())
    data[(place.end or 0) - 1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(PlanError) as caught:
        plan.execute(model_of(truth), digest=digest)
    assert f"- {name!r}: other bytes" in str(caught.value)


def test_a_saved_plan_with_an_adapter_needs_a_digest_of_both(tmp_path: Path) -> None:
    config = json.loads((DATA / "peft" / "lora" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    names = {f"model.layers.0.self_attn.{n}_proj.weight": (16, 16) for n in "qkvo"}
    truth = {
        name: torch.rand(shape)
        for name, shape in {
            "model.embed_tokens.weight": (32, 16),
            **names,
            "lm_head.weight": (32, 16),
        }.items()
    }
    (tmp_path / "base").mkdir()
    save_file(truth, tmp_path / "base" / "model.safetensors")
    adapter = Path(shutil.copytree(DATA / "peft" / "lora", tmp_path / "adapter"))
    plan = Dispatcher().plan(
        tmp_path / "base",
        model=model_of(truth),
        device_map=None,
        adapter=adapter,
        merge_adapter=True,
    )
    assert plan.ok, plan.problems
    base = Dispatcher().manifest(tmp_path / "base")
    with pytest.raises(PlanError, match=r"'adapter:base_model.*: not in the digest"):
        plan.execute(model_of(truth), digest=digest_of(base))
    plan.execute(model_of(truth), digest=digest_of(beside(base, open_adapter(adapter).manifest)))
