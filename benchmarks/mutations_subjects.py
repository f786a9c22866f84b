"""The right checkpoints that are damaged: what is in their files, and what must come out of them.

Some are made here, by transformers, PEFT and gguf; the others are those of ``tests/data``, which
the libraries of their formats wrote. The truth of each never comes from modelquirks.
"""

from __future__ import annotations

import copy
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from mutations_files import Files, as_torch, folder_files, tensors_in, with_tensors
from torch import nn
from zoo_models import Truth, filled, slots, truth_of

__all__ = ["SUBJECTS", "Config", "Subject", "subject_named", "value_registry"]

DATA = Path(__file__).parents[1] / "tests" / "data"
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A right checkpoint, what it holds, and the model that it belongs to."""

    name: str
    files: Files
    truth: Truth
    build: Callable[[Config], nn.Module]
    """Makes the model without weights, from what config.json says."""
    config: Config = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``Dispatcher.plan``."""
    other: Files = field(default_factory=dict)
    """Another save of the same model: the same files, names and shapes, other values."""
    elsewhere: Files = field(default_factory=dict)
    """Another save of the same model, cut into other files."""
    path: str = ""
    """Where in the files the checkpoint is."""
    adapter: str = ""
    """Where in the files an adapter is, if there is one."""


def value_registry() -> Any:
    """Return the installed plugins, loaded once a process."""
    return _registry()


@cache
def _registry() -> Any:
    from modelquirks.quirks.registry import Registry

    return Registry.load()


@cache
def subject_named(name: str) -> Subject:
    """Return the subject of that name, made once a process."""
    return SUBJECTS[name](name)


# ---- made by transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _model(kind: str, settings: Config, seed: int, *, auto: str = "AutoModelForCausalLM") -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **settings})
    torch.manual_seed(seed)
    made: Any = getattr(transformers, auto)
    return filled(made.from_config(config).eval(), seed)


def _written(model: Any, max_shard_size: str) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return {k: v for k, v in folder_files(Path(folder)).items() if "generation" not in k}


def _build(config: Config) -> nn.Module:
    """Return the meta model that config.json describes, as ``--model transformers`` makes it."""
    return copy.deepcopy(_built(json.dumps(config)))


@lru_cache(maxsize=64)
def _built(config: str) -> nn.Module:
    built = value_registry().model(json.loads(config), Path())
    if built is None:
        raise ValueError("no plugin builds the model that config.json describes")
    model: nn.Module = built[0]
    return model


def _truth(model: nn.Module) -> Truth:
    computed = {name: held.tensor for name, held in slots(model) if not held.persistent}
    return truth_of(model, computed, None)


def _saved(
    name: str,
    kind: str,
    settings: Config,
    sizes: Sequence[str] = ("10MB", "12KB"),
    *,
    auto: str = "AutoModelForCausalLM",
    change: Callable[[Files], Files] = dict,
) -> Subject:
    """Return a model as ``save_pretrained`` writes it, cut at the first of *sizes*."""
    model, again = (_model(kind, settings, seed, auto=auto) for seed in (1, 2))
    files = change(_written(model, sizes[0]))
    return Subject(
        name,
        files,
        _truth(model),
        _build,
        config=json.loads(files["config.json"]),
        other=change(_written(again, sizes[0])),
        elsewhere=change(_written(again, sizes[1])),
    )


def llama(name: str) -> Subject:
    return _saved(name, "llama", {"tie_word_embeddings": False, "dtype": "bfloat16"})


def llama_tied(name: str) -> Subject:
    return _saved(name, "llama", {"tie_word_embeddings": True}, ("24KB", "40KB"))


def llama_torch(name: str) -> Subject:
    settings = {"tie_word_embeddings": False, "num_hidden_layers": 2}
    return _saved(name, "llama", settings, ("24KB", "40KB"), change=as_torch)


def mixtral(name: str) -> Subject:
    settings = {"num_local_experts": 4, "num_hidden_layers": 2, "tie_word_embeddings": False}
    return _saved(name, "mixtral", settings, ("48KB", "90KB"))


def qwen_moe(name: str) -> Subject:
    settings = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
    }
    return _saved(name, "qwen3_moe", settings, ("10MB", "30KB"))


def meta_llama(name: str) -> Subject:
    """Return a Llama as Meta releases it: a file of torch.save for each of two ranks."""
    settings = {"tie_word_embeddings": False, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}

    def ranks(model: Any) -> Files:
        original = dict(_as_meta(model))
        params = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5}
        files = {"params.json": json.dumps(params).encode()}
        for rank in range(2):
            stem = f"consolidated.{rank:02d}"
            files[f"{stem}.pth"] = with_tensors(f"{stem}.pth", {
                key: tensor if dim is None else tensor.chunk(2, dim)[rank].clone()
                for key, (tensor, dim) in original.items()
            })  # fmt: skip
        return files

    model, again = (_model("llama", settings, seed) for seed in (1, 2))
    config = model.config.to_dict()
    return Subject(
        name,
        ranks(model),
        _truth(model),
        lambda _: _build({**config, "architectures": ["LlamaForCausalLM"]}),
        other=ranks(again),
    )


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


def _as_meta(model: Any) -> Iterator[tuple[str, tuple[torch.Tensor, int | None]]]:
    """Yield tensors by Meta's names, and the dimension that is cut over ranks.

    The heads of q and k have neighbours in pairs, which ``convert_llama_weights_to_hf.py`` undoes.
    """
    for key, tensor in model.state_dict().items():
        name = key
        for old, new in META.items():
            name = name.replace(old, new)
        if "q_proj" in key or "k_proj" in key:
            heads = 4 if "q_proj" in key else 2
            rows, columns = tensor.shape
            tensor = tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2)
            tensor = tensor.reshape(rows, columns)
        cut = 1 if name.endswith(("wo.weight", "w2.weight")) or "tok_" in name else 0
        yield name, (tensor, None if tensor.dim() == 1 else cut)


def bert_old(name: str) -> Subject:
    """Return a BERT as TensorFlow named it (gamma, beta), in one file of torch.save, tied."""

    def older(files: Files) -> Files:
        found = as_torch(files)
        for file in (name for name in found if name.endswith(".bin")):
            held = tensors_in(file, found[file]).items()
            found[file] = with_tensors(file, {_older(name): tensor for name, tensor in held})
        return {name: _older(raw.decode()).encode() if name.endswith(".index.json") else raw
                for name, raw in found.items()}  # fmt: skip

    settings = {"num_hidden_layers": 2, "type_vocab_size": 2}
    return _saved(name, "bert", settings, auto="AutoModelForMaskedLM", change=older)


def _older(text: str) -> str:
    text = text.replace("LayerNorm.weight", "LayerNorm.gamma")
    return text.replace("LayerNorm.bias", "LayerNorm.beta")


# ---- packed


def gpt_oss(name: str) -> Subject:
    """Return a GPT-OSS as released, its experts in mxfp4; plain values are transformers' own."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    settings = {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "layer_types": ["sliding_attention", "full_attention"],
    }
    convert: Any = convert_moe_packed_tensors

    def packed(seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
        model = _model("gpt_oss", settings, seed)
        chance = torch.Generator().manual_seed(seed)
        held = dict(slots(model))
        stored: dict[str, torch.Tensor] = {n: h.tensor for n, h in held.items() if h.persistent}
        for wanted in [n for n in stored if n.endswith(("gate_up_proj", "down_proj"))]:
            tensor = stored.pop(wanted)
            shape = (tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=chance)
            scales = torch.randint(120, 130, shape, dtype=torch.uint8, generator=chance)
            stored[f"{wanted}_blocks"], stored[f"{wanted}_scales"] = blocks, scales
            held[wanted].tensor.data.copy_(convert(blocks, scales))
        return model, stored

    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return _packed(name, packed, quantized)


def fp8(name: str) -> Subject:
    """Return a Llama in FP8 with scales by block, as DeepSeek-V3 stores it."""
    settings = {"num_hidden_layers": 2, "tie_word_embeddings": False, "dtype": "bfloat16"}
    block = 16

    def packed(seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
        model = _model("llama", settings, seed)
        held = dict(slots(model))
        stored: dict[str, torch.Tensor] = {n: h.tensor for n, h in held.items() if h.persistent}
        for wanted in [n for n in stored if n.endswith("_proj.weight")]:
            weight = stored[wanted].detach().float()
            rows, columns = (-(-n // block) for n in weight.shape)
            scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) + 0.01
            grown = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            grown = grown[: weight.shape[0], : weight.shape[1]]
            codes = (weight / grown).to(torch.float8_e4m3fn)
            stored[wanted], stored[f"{wanted}_scale_inv"] = codes, scale
            held[wanted].tensor.data.copy_((codes.float() * grown).to(torch.bfloat16))
        return model, stored

    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    return _packed(name, packed, said)


def _packed(
    name: str,
    packed: Callable[[int], tuple[Any, dict[str, torch.Tensor]]],
    quantization_config: Config,
) -> Subject:
    (model, stored), (_, again) = packed(1), packed(2)
    config = {**model.config.to_dict(), "quantization_config": quantization_config}
    return Subject(
        name,
        _sharded(stored, config, 3),
        _truth(model),
        _build,
        config=config,
        options={"dequantize": True},
        other=_sharded(again, config, 3),
        elsewhere=_sharded(again, config, 2),
    )


def _sharded(stored: Mapping[str, torch.Tensor], config: Config, count: int) -> Files:
    """Return *stored* in so many files with an index, in the order of the model."""
    names = list(stored)
    files: Files = {"config.json": json.dumps(config).encode()}
    weight_map: dict[str, str] = {}
    for at in range(count):
        file = f"model-{at + 1:05}-of-{count:05}.safetensors"
        part = names[at * len(names) // count : (at + 1) * len(names) // count]
        files[file] = with_tensors(file, {n: stored[n].detach() for n in part})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in stored.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode()}


def _of_library(
    name: str, folder: str, stored: str, plain: str, config: Callable[[], Config]
) -> Subject:
    """Return packed weights that a library wrote, with the plain ones that it makes of them."""
    tensors, truth = (
        tensors_in(f"{n}.safetensors", (DATA / folder / f"{n}.safetensors").read_bytes())
        for n in (stored, plain)
    )
    said = config()

    def written(held: Mapping[str, torch.Tensor]) -> Files:
        file = with_tensors("model.safetensors", held)
        return {"config.json": json.dumps(said).encode(), "model.safetensors": file}

    return Subject(
        name,
        written(tensors),
        Truth(truth, {}, None),
        lambda _: _bare(truth),
        config=said,
        options={"dequantize": True},
        other=written({key: t.reshape(-1).roll(1).view(t.shape) for key, t in tensors.items()}),
    )


def gptq(name: str) -> Subject:
    path = DATA / "gptq" / "v1.json"
    return _of_library(name, "gptq", "v1", "v1_plain", lambda: json.loads(path.read_text()))


def awq(name: str) -> Subject:
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    config = {"quantization_config": {**said, "zero_point": True}}
    return _of_library(name, "awq", "gemm", "gemm_plain", lambda: config)


def bitsandbytes(name: str) -> Subject:
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return _of_library(
        name, "bitsandbytes", "formats", "formats_plain", lambda: {"quantization_config": said}
    )


# ---- of training, and other containers


def _bare(truth: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model on the meta device that has just these tensors."""
    model = nn.Module()
    for name, tensor in truth.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        empty = torch.empty_like(tensor, device="meta")
        if tensor.is_floating_point():
            owner.register_parameter(leaf, nn.Parameter(empty))
        else:
            owner.register_buffer(leaf, empty)
    return model


def _trained(folder: str, truth: str = "", *, only: str = "") -> Callable[[str], Subject]:
    """Return what makes a subject of a folder of ``tests/data``, of which *only* is one file."""

    def make(name: str) -> Subject:
        root = DATA / folder
        beside = root / "truth.safetensors" if not truth else DATA / truth
        files = {k: v for k, v in folder_files(root).items() if not k.startswith("truth")}
        files = {k: v for k, v in files.items() if not only or k == only}
        expected = tensors_in(beside.name, beside.read_bytes())
        return Subject(name, files, Truth(expected, {}, None), lambda _: _bare(expected), path=only)

    return make


def megatron(name: str) -> Subject:
    """Return a run over two tensor and two pipeline ranks, its arguments with ``rank`` in them.

    Megatron-LM's have it; those of ``tests/data`` were written by megatron-core alone.
    """
    found = _trained("megatron/tp2_pp2", "megatron/tp2_pp2_truth.safetensors")(name)
    files = dict(found.files)
    for file in (file for file in files if file.endswith(".pt")):
        saved = torch.load(io.BytesIO(files[file]), weights_only=False)
        tensor, stage = (int(n) for n in file.split("/")[-2].removeprefix("mp_rank_").split("_"))
        saved["args"].rank = 2 * stage + tensor
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        files[file] = buffer.getvalue()
    return replace(found, files=files)


def gguf(name: str) -> Subject:
    """Return a Qwen2 in GGUF, whose converter leaves every value where it is."""
    library: Any = __import__("gguf")
    model, again = (_model("qwen2", {"dtype": "float32"}, seed) for seed in (1, 2))
    number = {v: k for k, v in library.MODEL_ARCH_NAMES.items()}["qwen2"]
    names = library.get_tensor_name_map(number, SIZES["num_hidden_layers"])

    def written(one: Any) -> Files:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            writer = library.GGUFWriter(path, "qwen2")
            for key, tensor in one.state_dict().items():
                stem, _, end = key.rpartition(".")
                writer.add_tensor(f"{names.get_name(stem)}.{end}", tensor.numpy())
            for write in ("header", "kv_data", "tensors"):
                getattr(writer, f"write_{write}{'_to_file'}")()
            writer.close()
            config = json.dumps(one.config.to_dict()).encode()
            return {"model.gguf": path.read_bytes(), "config.json": config}

    return Subject(
        name,
        written(model),
        _truth(model),
        _build,
        config=model.config.to_dict(),
        other=written(again),
    )


def adapter(name: str) -> Subject:
    """Return a Llama and a LoRA of it that is merged on the way, as PEFT merges it."""
    import peft

    def made(seed: int) -> tuple[Files, Any]:
        settings = {"tie_word_embeddings": False, "num_hidden_layers": 2}
        model = _model("llama", settings, seed)
        files = {f"base/{k}": v for k, v in _written(model, "10MB").items()}
        config: Any = peft.LoraConfig(
            r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
        )
        wrapped: Any = peft.get_peft_model(model, config)
        chance = torch.Generator().manual_seed(seed)
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key:
                parameter.data.copy_(torch.randn(parameter.shape, generator=chance) * 0.1)
        with tempfile.TemporaryDirectory() as folder:
            wrapped.save_pretrained(folder)
            found = folder_files(Path(folder))
        files |= {f"adapter/{k}": v for k, v in found.items() if not k.endswith(".md")}
        return files, wrapped.merge_and_unload()

    (files, merged), (other, _) = made(1), made(2)
    return Subject(
        name,
        files,
        _truth(merged),
        _build,
        config=json.loads(files["base/config.json"]),
        options={"merge_adapter": True},
        other=other,
        path="base",
        adapter="adapter",
    )


SUBJECTS: Mapping[str, Callable[[str], Subject]] = {
    "llama": llama,
    "llama-tied": llama_tied,
    "llama-torch": llama_torch,
    "mixtral": mixtral,
    "qwen-moe": qwen_moe,
    "bert-old": bert_old,
    "meta-llama": meta_llama,
    "gpt-oss-mxfp4": gpt_oss,
    "llama-fp8": fp8,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "deepspeed-zero1": _trained("deepspeed/zero1_bf16"),
    "deepspeed-zero2": _trained("deepspeed/zero2_fp32"),
    "deepspeed-zero3": _trained("deepspeed/zero3_fp32"),
    "deepspeed-pipeline": _trained("deepspeed/pipeline_pp2_zero1"),
    "deepspeed-universal": _trained("deepspeed/universal_from_zero2"),
    "dcp": _trained("dcp/fsdp2", "dcp/truth.safetensors"),
    "fsdp-ranks": _trained("fsdp/sharded", "fsdp/truth.safetensors"),
    "megatron": megatron,
    "lightning": _trained("lightning", "lightning/truth.safetensors", only="task.ckpt"),
    "gguf": gguf,
    "adapter": adapter,
}
