"""Llama in Meta's files, Mistral and Mixtral in Mistral's, into transformers and into their own."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from modelquirks.planner import Dispatcher, open_manifest
from modelquirks.planner.model.build import empty_weights

Tensors = dict[str, torch.Tensor]
Load = Callable[..., nn.Module]
Randomized = Callable[[nn.Module], nn.Module]

SIZE_NUMBERS = 2, 32, 4, 2, 8, 48, 64
LAYERS, DIM, HEADS, KV_HEADS, HEAD, FFN, WORDS = SIZE_NUMBERS
PARAMS = {"dim": DIM, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
}
META = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "model.": "",
}
COLUMNS = ("attention.wo", "feed_forward.w2")


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig.from_dict(SIZES))


def pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo permute() of convert_llama_weights_to_hf.py: halves of a head become neighbours."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def original(model: nn.Module) -> Tensors:
    """Return the tensors of a model of transformers as Meta's own module has them."""
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            tensor = pairs(tensor, HEADS if "q_proj" in name else KV_HEADS)
        for old, new in META.items():
            name = name.replace(old, new)
        found[name] = tensor
    return found


def rank(tensors: Tensors, number: int, of: int, embedding_dim: int) -> Tensors:
    """Return the part of a rank, as fairscale's layers hold it."""
    part: Tensors = {"rope.freqs": torch.ones(HEAD // 2)}
    for name, tensor in tensors.items():
        columns = any(column in name for column in COLUMNS)
        dim = embedding_dim if "tok_embeddings" in name else int(columns)
        whole = tensor.dim() == 1
        part[name] = tensor if whole else tensor.chunk(of, dim)[number].clone()
    return part


def save_ranks(folder: Path, tensors: Tensors, of: int, *, embedding_dim: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(of):
        part = rank(tensors, number, of, embedding_dim)
        torch.save(part, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps({**PARAMS, "vocab_size": -1}))
    return folder


@pytest.mark.parametrize(("of", "embedding_dim"), [(1, 1), (2, 1), (2, 0)])
def test_llama_of_any_number_of_ranks_gives_the_logits_of_transformers(
    of: int, embedding_dim: int, tmp_path: Path, load: Load, randomized: Randomized
) -> None:
    model = randomized(llama())
    folder = save_ranks(tmp_path / "m", original(model), of, embedding_dim=embedding_dim)
    found = load(folder, llama)
    words = torch.arange(12).view(2, 6)
    assert torch.equal(found(words).logits, model(words).logits)
    wanted, arrived = model.state_dict(), found.state_dict()
    assert not [name for name in wanted if not torch.equal(wanted[name], arrived[name])]


def test_parts_of_ranks_are_put_together_from_the_files_when_they_stay_on_disk(
    tmp_path: Path, dispatcher: Dispatcher, randomized: Randomized
) -> None:
    model = randomized(llama())
    folder = save_ranks(tmp_path / "m", original(model), 2)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with empty_weights():
        found: nn.Module = llama()
    found.eval()
    plan = dispatcher.plan(folder, model=found, device_map={"": "cpu", "model.layers": "disk"})
    plan.execute(found)
    words = torch.arange(12).view(2, 6)
    assert torch.equal(found(words).logits, model(words).logits)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, DIM, bias=False)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, FFN, bias=False)
        self.w2 = nn.Linear(FFN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, FFN, bias=False)


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)


class Transformer(nn.Module):
    """A user's own module with the names of Meta's."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, WORDS, bias=False)


@pytest.mark.parametrize(("of", "embedding_dim"), [(1, 1), (2, 1), (2, 0), (4, 1)])
def test_llama_goes_into_a_module_with_metas_names_as_it_is(
    of: int, embedding_dim: int, tmp_path: Path, load: Load, randomized: Randomized
) -> None:
    model = randomized(Transformer())
    folder = save_ranks(tmp_path, model.state_dict(), of, embedding_dim=embedding_dim)
    arrived = load(folder, Transformer).state_dict()
    wanted = model.state_dict()
    assert not [name for name in wanted if not torch.equal(wanted[name], arrived[name])]


def test_no_transformers_is_needed_for_a_module_of_ones_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(t.shape) for name, t in Transformer().state_dict().items()}
    save_ranks(tmp_path, tensors, 2)
    torch.save(tensors, tmp_path / "whole.bin")
    sizes = f"LAYERS, DIM, HEADS, KV_HEADS, HEAD, FFN, WORDS = {SIZE_NUMBERS}"
    classes = map(inspect.getsource, (Attention, FeedForward, TransformerBlock, Transformer))
    (tmp_path / "own.py").write_text("\n".join(["from torch import nn", sizes, *classes]))
    code = f"""
import sys
sys.modules["transformers"] = None  # any import of it fails
import torch
from own import Transformer
from modelquirks.plugins import meta_llama
from modelquirks.planner import Dispatcher
from modelquirks.quirks import Registry
registry = Registry()
registry.register(meta_llama, name="meta_llama")
with torch.device("meta"):
    model = Transformer()
folder = {str(tmp_path)!r}
Dispatcher(registry).plan(folder, model=model, max_memory={{"cpu": "1GiB"}}).execute(model)
wanted, found = torch.load(folder + "/whole.bin"), model.state_dict()
print(len(wanted), all(torch.equal(wanted[name], found[name]) for name in wanted))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(len(tensors)), "True"]


def test_parts_are_named_by_rank_and_folder_and_file_are_told_apart(
    tmp_path: Path, dispatcher: Dispatcher
) -> None:
    folder = save_ranks(tmp_path, Transformer().state_dict(), 2)
    manifest = open_manifest(folder)
    assert [f.code for f in manifest.findings] == ["params-read", "ranks"]
    assert manifest.tensors["layers.1.attention.wo.weight/1"].shape == (DIM, DIM // 2)
    assert manifest.tensors["norm.weight/0"].shard == "consolidated.00.pth"
    assert "layers.{0}.attention.wo.weight/{1}" in manifest.families
    one = open_manifest(folder / "consolidated.01.pth")
    assert "layers.1.attention.wo.weight" in one.tensors
    assert [f.code for f in one.findings] == ["one-of-several", "params-read"]


def faults(folder: Path) -> dict[str, str]:
    return {f.code: f.message for f in open_manifest(folder).findings if f.severity == "error"}


def test_ranks_that_do_not_belong_together_are_errors_with_names(tmp_path: Path) -> None:
    tensors = Transformer().state_dict()
    gone = save_ranks(tmp_path / "gone", tensors, 4)
    (gone / "consolidated.01.pth").unlink()
    assert "rank 1 are not in the folder" in faults(gone)["rank-missing"]

    lacking = save_ranks(tmp_path / "lacking", tensors, 2)
    part = rank(tensors, 1, 2, 1)
    del part["layers.1.attention.wq.weight"]
    part["norm.weight"] = part["norm.weight"][:-1].clone()
    part["output.weight"] = part["output.weight"].half()
    torch.save(part, lacking / "consolidated.01.pth")
    found = faults(lacking)
    assert "'layers.1.attention.wq.weight/1'" in found["rank-lacks-tensor"]
    assert "2 tensors differ" in found["ranks-differ"]
    assert (
        f"'norm.weight' is F32 [{DIM}] in rank 0, F32 [{DIM - 1}] in rank 1"
        in (found["ranks-differ"])
    )
    assert "F16" in found["ranks-differ"]


def test_plan_with_a_rank_missing_is_refused_by_name(
    tmp_path: Path, dispatcher: Dispatcher
) -> None:
    folder = save_ranks(tmp_path, Transformer().state_dict(), 2)
    (folder / "consolidated.00.pth").rename(folder / "consolidated.02.pth")
    plan = dispatcher.plan(folder, model=Transformer(), max_memory={"cpu": "1GiB"})
    assert not plan.ok
    assert any("layers.0.attention.wq.weight/0" in problem for problem in plan.problems)


def test_numbered_files_without_a_common_name_are_no_ranks(tmp_path: Path) -> None:
    tensors = list(Transformer().state_dict().items())
    for number in range(2):
        torch.save(dict(tensors[number::2]), tmp_path / f"consolidated.{number:02}.pth")
    manifest = open_manifest(tmp_path)
    assert set(manifest.tensors) == dict(tensors).keys()
    assert [f.code for f in manifest.findings] == ["no-index"]


def test_heads_are_taken_from_the_model_where_no_file_tells_them(
    tmp_path: Path, load: Load, randomized: Randomized
) -> None:
    model = randomized(llama())
    folder = save_ranks(tmp_path / "m", original(model), 2)
    (folder / "params.json").unlink()
    arrived = load(folder, llama).state_dict()
    assert all(torch.equal(t, arrived[name]) for name, t in model.state_dict().items())


def test_mistral_in_one_file_with_wide_heads(
    tmp_path: Path, load: Load, randomized: Randomized
) -> None:
    """As Mistral NeMo: more rows than the model is wide. Its params.json has head_dim."""

    def make() -> MistralForCausalLM:
        return MistralForCausalLM(MistralConfig.from_dict({**SIZES, "head_dim": 2 * HEAD}))

    model = randomized(make())
    save_file(original(model), tmp_path / "consolidated.safetensors")
    params = {**PARAMS, "head_dim": 2 * HEAD, "hidden_dim": FFN, "vocab_size": WORDS}
    (tmp_path / "params.json").write_text(json.dumps(params))
    found = load(tmp_path, make)
    words = torch.arange(12).view(2, 6)
    assert torch.equal(found(words).logits, model(words).logits)


EXPERTS = 3


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig.from_dict({**SIZES, "num_local_experts": EXPERTS}))


def without_experts(model: nn.Module, gate: str) -> Tensors:
    tensors = original(model)
    return {
        name.replace("mlp.gate.weight", gate): tensor
        for name, tensor in tensors.items()
        if ".experts." not in name
    }


def experts_of(model: nn.Module, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    base = f"model.layers.{layer}.mlp.experts"
    gate_up, down = (model.state_dict()[f"{base}.{n}"] for n in ("gate_up_proj", "down_proj"))
    gate, up = gate_up.chunk(2, 1)
    return gate, up, down


def test_mixtral_with_experts_one_by_one(
    tmp_path: Path, load: Load, randomized: Randomized
) -> None:
    model = randomized(mixtral())
    stored = without_experts(model, "feed_forward.gate.weight")
    for layer in range(LAYERS):
        gate, up, down = experts_of(model, layer)
        for expert in range(EXPERTS):
            base = f"layers.{layer}.feed_forward.experts.{expert}"
            stored[f"{base}.w1.weight"] = gate[expert].clone()
            stored[f"{base}.w2.weight"] = down[expert].clone()
            stored[f"{base}.w3.weight"] = up[expert].clone()
    save_file(stored, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    arrived = load(tmp_path, mixtral).state_dict()
    assert all(torch.equal(t, arrived[name]) for name, t in model.state_dict().items())


def test_mixtral_with_experts_one_below_the_other(
    tmp_path: Path, load: Load, randomized: Randomized
) -> None:
    """Undoing convert_mixtral_weights_to_hf.py, which cuts rows and transposes w2."""
    model = randomized(mixtral())
    stored = without_experts(model, "block_sparse_moe.gate.weight")
    for layer in range(LAYERS):
        gate, up, down = experts_of(model, layer)
        base = f"layers.{layer}.block_sparse_moe"
        stored[f"{base}.w1"] = torch.cat(list(gate))
        stored[f"{base}.w3"] = torch.cat(list(up))
        stored[f"{base}.w2"] = torch.cat([matrix.T for matrix in down])
    for number in range(2):  # two of the eight files, with different tensors
        part = dict(list(stored.items())[number::2])
        torch.save(part, tmp_path / f"consolidated.{number:02}.pt")
    (tmp_path / "params.json").write_text(
        json.dumps({**PARAMS, "moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2}})
    )
    arrived = load(tmp_path, mixtral).state_dict()
    assert all(torch.equal(t, arrived[name]) for name, t in model.state_dict().items())


def test_files_of_ranks_that_were_exchanged_are_told_by_the_names_they_were_written_under(
    tmp_path: Path, randomized: Randomized
) -> None:
    folder = save_ranks(tmp_path / "m", original(randomized(llama())), 2)
    assert "rank-swapped" not in {f.code for f in open_manifest(folder).findings}
    one, other = (folder / f"consolidated.{n:02}.pth" for n in (0, 1))
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)
    (told,) = [f.message for f in open_manifest(folder).findings if f.code == "rank-swapped"]
    assert "'consolidated.00.pth' was written as 'consolidated.01'" in told


def test_ranks_that_were_written_under_other_names_altogether_are_fine(
    tmp_path: Path, randomized: Randomized
) -> None:
    folder = save_ranks(tmp_path / "m", original(randomized(llama())), 2)
    for path in folder.glob("*.pth"):
        torch.save(torch.load(path), folder / "model.pth")
        (folder / "model.pth").rename(path)
    assert "rank-swapped" not in {f.code for f in open_manifest(folder).findings}
