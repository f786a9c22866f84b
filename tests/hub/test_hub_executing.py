"""Plans of repositories: what executing them downloads, and the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import init_empty_weights
from huggingface_hub import constants
from safetensors.torch import load
from torch import nn

from modelquirks.planner import Dispatcher, Plan, PlanError, open_manifest
from modelquirks.planner.cli import main
from modelquirks.planner.hub.words import HubError

if TYPE_CHECKING:
    from hub_server import HubServer

Put = Callable[..., None]
Weights = Callable[..., bytes]
NAME = "org/name"
INDEX = "model.safetensors.index.json"
FACTORY = """
from torch import nn

def make():
    model = nn.Module()
    model.a, model.b = nn.Linear(8, 8), nn.Linear(8, 8)
    return model
"""


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.a(x))
        return result


@pytest.fixture
def files(put: Put, weights: Weights) -> dict[str, bytes]:
    """Put a layer a file, and a file that the model has no use for."""
    shapes = {"weight": (8, 8), "bias": (8,)}
    found: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    for number, layer in enumerate(("a", "b", "unwanted")):
        tensors = {f"{layer}.{name}": shape for name, shape in shapes.items()}
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        found[shard] = weights(number, **tensors)
        weight_map |= dict.fromkeys(tensors, shard)
    found[INDEX] = json.dumps({"metadata": {"total_size": 864}, "weight_map": weight_map}).encode()
    put({**found, "config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"PK"})
    return found


def empty() -> Model:
    with init_empty_weights():
        return Model()


def is_loaded(model: Model, files: dict[str, bytes]) -> bool:
    stored = {k: v for raw in files.values() if raw[:1] != b"{" for k, v in load(raw).items()}
    return all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())


def downloaded(hub: HubServer) -> set[str]:
    """Return the files of which the whole was sent."""
    return {
        one.path.rpartition("/")[2]
        for one in hub.seen
        if "/resolve/" in one.path and one.method == "GET" and not one.range
    }


def test_executing_downloads_the_files_that_the_plan_reads(
    hub: HubServer, files: dict[str, bytes]
) -> None:
    model = empty()
    plan = Dispatcher().plan(NAME, model=model, device_map={"": "cpu"})
    assert plan.ok, plan.refusal()
    assert downloaded(hub) == {INDEX, "config.json"}
    plan.execute(model)
    assert is_loaded(model, files)
    first, second, third = sorted(name for name in files if name != INDEX)
    assert downloaded(hub) == {INDEX, "config.json", first, second}
    assert not (plan.root / third).exists()
    hub.forget()
    plan.execute(again := empty())
    assert is_loaded(again, files)
    assert hub.seen == [], "all of it is here, and a commit does not change"


def test_weights_on_disk_stay_in_the_cache_of_the_hub(
    hub: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = empty()
    plan = Dispatcher().plan(
        NAME, model=model, device_map={"a": "cpu", "b": "disk"}, max_memory={"cpu": "1GiB"}
    )
    loaded = plan.execute(model)
    straight = Model()
    stored = {k: v for raw in files.values() if raw[:1] != b"{" for k, v in load(raw).items()}
    straight.load_state_dict({k: stored[k] for k in straight.state_dict()})
    x = torch.rand(3, 8)
    assert torch.equal(loaded(x), straight(x))


def test_a_saved_plan_names_the_commit_and_no_token(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repos[NAME].gated = True
    plan = Dispatcher().plan(NAME, model=empty(), device_map={"": "cpu"}, token=hub.token)
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert hub.token not in text
    assert json.loads(text)["checkpoint"]["hub"] == {
        "repository": NAME,
        "revision": "main",
        "commit": hub.repos[NAME].refs["main"],
        "path": "",
    }
    hub.repos[NAME].commit({"model.safetensors": b""})  # what happens later does not matter
    with pytest.raises(HubError, match="is gated"):
        Plan.load(tmp_path / "plan.json").execute(empty())
    plan.execute(model := empty())
    assert is_loaded(model, files)
    Plan.load(tmp_path / "plan.json").execute(again := empty())
    assert is_loaded(again, files)


def test_a_plan_of_another_machine_is_executed_with_the_cache_of_this_one(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Dispatcher().plan(NAME, model=empty(), device_map={"": "cpu"}).save(tmp_path / "plan.json")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other" / "hub"))
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "other" / "assets"))
    Plan.load(tmp_path / "plan.json").execute(model := empty())
    assert is_loaded(model, files)


def test_a_plan_can_be_executed_on_files_that_were_fetched_otherwise(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    Dispatcher().plan(NAME, model=empty(), device_map={"": "cpu"}).save(tmp_path / "plan.json")
    (tmp_path / "here").mkdir()
    for name, raw in files.items():
        (tmp_path / "here" / name).write_bytes(raw)
    hub.forget()
    plan = Plan.load(tmp_path / "plan.json", checkpoint=tmp_path / "here")
    plan.execute(model := empty())
    assert is_loaded(model, files)
    assert hub.seen == []


def test_offline_the_files_that_lack_are_named(
    hub: HubServer, files: dict[str, bytes], offline: Callable[[], None]
) -> None:
    plan = Dispatcher().plan(NAME, model=empty(), device_map={"": "cpu"})
    offline()
    with pytest.raises(HubError) as caught:
        plan.execute(empty())
    commit = hub.repos[NAME].refs["main"]
    assert str(caught.value) == (
        f"2 files of 'org/name@{commit[:8]}' are not here, and huggingface_hub is in offline mode "
        "(HF_HUB_OFFLINE): 'model-00001-of-00003.safetensors', 'model-00002-of-00003.safetensors'. "
        f"Run it without, or fetch them where there is a network: hf download {NAME} --revision "
        f"{commit}"
    )


def test_a_file_in_the_cache_that_is_not_that_of_the_commit_is_refused(
    hub: HubServer, files: dict[str, bytes], weights: Weights
) -> None:
    plan = Dispatcher().plan(NAME, model=empty(), device_map={"": "cpu"})
    plan.execute(empty())
    shard = plan.root / "model-00001-of-00003.safetensors"
    blob = shard.resolve()
    blob.write_bytes(weights(7, **{"a.weight": (8, 9), "a.bias": (8,)}))
    with pytest.raises(PlanError, match=r"'model-00001-of-00003.safetensors' had \d+ bytes when"):
        plan.execute(empty())


def test_blobs_that_repositories_share_are_in_the_cache_too(
    hub: HubServer, files: dict[str, bytes]
) -> None:
    """huggingface_hub 2.4 links blobs/<etag> to <cache>/blobs/<2 digits>/<hash of Xet>."""
    plan = Dispatcher().plan(NAME, model=empty(), device_map={"": "cpu"})
    plan.execute(empty())
    blob = (plan.root / "model-00001-of-00003.safetensors").resolve()
    shared = Path(constants.HF_HUB_CACHE) / "blobs" / "0a" / ("0a" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    plan.execute(model := empty())
    assert is_loaded(model, files)
    codes = {finding.code for finding in open_manifest(plan.root).findings}
    assert codes == {"shard-missing"}


def environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "hf"
    return {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_ASSETS_CACHE": str(home / "assets"),
        "NO_COLOR": "1",
    }


def test_the_commands_take_a_repository(
    hub: HubServer,
    files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.repos[NAME].private = True
    assert main(["inspect", NAME]) == 2
    assert f"no repository 'org/name' on {hub.url} that you may" in capsys.readouterr().err
    assert main(["inspect", NAME, "--json", "--token", hub.token]) == 0
    report = json.loads(capsys.readouterr().out)["checkpoint"]
    commit = hub.repos[NAME].refs["main"]
    assert (report["path"], report["tensors"]) == (f"{NAME}@{commit[:8]}", 6)
    (tmp_path / "made_for_the_hub.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    model = ("--model", "made_for_the_hub:make")
    where = ("--device-map", "sequential", "--max-memory", "cpu=1GiB", "--revision", "main")
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", hub.token)
        assert main(["plan", NAME, *model, *where, "--dry-run", "-o", "plan.json"]) == 0
    assert capsys.readouterr().out.startswith(f"{NAME}@{commit[:8]}\n")
    assert downloaded(hub) == {INDEX, "config.json"}
    assert main(["execute", "plan.json", *model, "--token", hub.token]) == 0
    assert "Verified" in capsys.readouterr().out
    assert main(["explain", NAME, "a", "--token", hub.token]) == 0
    assert main(["inspect", "plan.json", "--revision", "v1"]) == 2
    assert "'plan.json' is here, so revision means nothing" in capsys.readouterr().err


def test_a_repository_has_the_digest_of_its_files(
    files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["digest", NAME, "-o", "digest.json"]) == 0
    (tmp_path / "copy").mkdir()
    for name, raw in files.items():
        (tmp_path / "copy" / name).write_bytes(raw)
    assert main(["digest", "copy", "--check", "digest.json"]) == 0
    assert "All 6 tensors are as digest.json says" in capsys.readouterr().out


def test_two_repositories_can_be_compared_and_plugins_asked_about_one(
    hub: HubServer,
    put: Put,
    files: dict[str, bytes],
    weights: Weights,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put({"model.safetensors": weights(9, **{"a.weight": (8, 8)})}, name="org/other")
    assert main(["diff", NAME, "hf://org/other@main"]) == 1
    told = capsys.readouterr().out
    assert f"{NAME}@" in told
    assert "org/other@" in told
    assert main(["plugins", "check", NAME]) == 0


def test_a_model_of_transformers_is_built_from_the_config_and_loaded(
    hub: HubServer,
    put: Put,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96}
    heads: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(
        tmp_path / "saved", max_shard_size="40KB"
    )
    put({path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()})
    assert main(["plan", NAME, "--max-memory", "cpu=1GiB"]) == 0
    told = capsys.readouterr().out
    assert "Verified" in told
    assert "transformers LlamaForCausalLM" in told


def test_a_dry_run_of_a_repository_imports_no_torch_and_a_folder_no_hub(
    hub: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    for name, raw in files.items():
        (tmp_path / "here" / name).write_bytes(raw)
    code = (
        "import sys\n"
        "from modelquirks.planner.cli import main\n"
        "for words in (['plan', 'here', '--dry-run'], ['plan', 'org/name', '--dry-run']):\n"
        "    assert main(words) == 0\n"
        "    print(*sorted({'torch', 'huggingface_hub'} & {*sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment(hub, tmp_path),
    )
    assert done.stderr.splitlines() == ["", "huggingface_hub"]
