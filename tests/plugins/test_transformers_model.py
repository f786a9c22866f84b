"""Models built from config.json by what transformers has, and by nothing else."""

import copy
import json
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from modelquirks.planner import Dispatcher
from modelquirks.planner.cli import main
from modelquirks.plugins import transformers as plugin

Manifest = Callable[[str], tuple[list[str], dict[str, Any]]]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def built(config: dict[str, Any], folder: Path = Path()) -> Any:
    return plugin.modelquirks_model(config, folder)


def unwrapped(settings: Any) -> Any:
    """Return the same model as transformers itself builds it, with memory."""
    return AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]


def test_parameters_are_on_meta_and_computed_buffers_real() -> None:
    model = built(LLAMA)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    real = unwrapped(model.config)
    assert buffers.keys() == dict(real.named_buffers()).keys() != set()
    for name, buffer in real.named_buffers():
        assert torch.equal(buffers[name], buffer)


def test_names_dtypes_shapes_and_ties_are_those_of_the_class() -> None:
    model = built(LLAMA)
    real = unwrapped(model.config)
    assert [(n, p.shape, p.dtype) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in real.named_parameters()
    ]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert next(model.parameters()).dtype == torch.bfloat16
    assert not model.training


def test_an_untied_model_stays_untied() -> None:
    model = built({**LLAMA, "tie_word_embeddings": False})
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_the_config_that_is_given_is_not_changed() -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}
    before = copy.deepcopy(config)
    built(config)
    assert config == before


def test_the_named_class_is_built_not_the_one_for_text_generation() -> None:
    assert type(built({**LLAMA, "architectures": ["LlamaModel"]})).__name__ == "LlamaModel"


@pytest.mark.parametrize("architectures", [None, [], ["SomebodysForCausalLM"], "LlamaModel"])
def test_without_a_known_class_the_model_type_decides(architectures: Any) -> None:
    assert type(built({**LLAMA, "architectures": architectures})).__name__ == "LlamaForCausalLM"


def test_a_known_class_suffices_if_its_type_is_a_relative_that_transformers_lacks() -> None:
    """Kimi K2 is DeepSeek V3 under another model_type."""
    model = built({**LLAMA, "model_type": "llama_next"})
    assert model.config.num_hidden_layers == 2


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"_class_name": "FluxTransformer2DModel"},
        {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]},
        {"architectures": ["AutoTokenizer"]},
        {"architectures": ["logging"]},
    ],
)
def test_what_transformers_does_not_know_is_left_to_others(config: dict[str, Any]) -> None:
    assert built(config) is None


def test_without_transformers_it_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        assert name == "transformers"
        return None

    monkeypatch.setattr(plugin, "find_spec", find_spec)
    assert built(LLAMA) is None


def test_code_that_comes_with_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text(
        f"open({str(tmp_path / 'proof')!r}, 'w').close()\nclass Evil: ...\n"
    )
    remote = {"auto_map": {"AutoConfig": "modeling_evil.Evil", "AutoModel": "modeling_evil.Evil"}}
    assert built({**LLAMA, **remote, "_name_or_path": str(tmp_path)}, tmp_path) is not None
    assert built({"model_type": "evil", "architectures": ["Evil"], **remote}, tmp_path) is None
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("slug", ["gpt-oss-20b", "llava-next-video-7b-nf4-lora"])
def test_a_quantised_checkpoint_gives_a_plain_model(slug: str, manifest: Manifest) -> None:
    _, config = manifest(slug)
    assert "quantization_config" in config
    model = built(config)
    # transformers 5.0 builds each part in the dtype of its own config: there float16, for one.
    assert all(parameter.is_floating_point() for parameter in model.parameters())
    assert not getattr(model.config, "quantization_config", None)


def test_the_released_gpt_oss_has_the_modules_that_its_records_speak_of(manifest: Manifest) -> None:
    _, config = manifest("gpt-oss-20b")
    model = built(config)
    parameters = dict(model.named_parameters())
    assert len(parameters) == 411
    assert parameters["model.layers.23.mlp.experts.gate_up_proj"].shape == (32, 2880, 5760)
    assert type(model.model.layers[0]).__name__ == "GptOssDecoderLayer"


def test_numbers_that_json_does_not_have_are_read_as_transformers_writes_them() -> None:
    limit = [0.0, {"__float__": "Infinity"}]
    sizes = {"num_heads": 4, "head_dim": 4, "hidden_size": 8, "state_size": 4, "n_groups": 1}
    config = {"model_type": "mamba2", "num_hidden_layers": 1, "vocab_size": 16, **sizes}
    model = built({**config, "time_step_limit": limit})
    assert list(model.config.time_step_limit) == [0.0, float("inf")]


def test_sub_configs_are_made_plain_too() -> None:
    nested = {"text_config": {"hidden_size": 8, "quantization_config": {}, "auto_map": {}}}
    assert plugin.plain_config(nested) == {"text_config": {"hidden_size": 8}}


def test_experts_larger_than_memory_are_not_allocated() -> None:
    """128 TiB and more: no machine would give that, not even as a promise."""
    huge = {
        **LLAMA,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 1 << 16,
        "hidden_size": 1 << 14,
        "intermediate_size": 1 << 16,
        "num_attention_heads": 128,
        "num_hidden_layers": 1,
    }
    model = built(huge)
    shape = model.model.layers[0].mlp.experts.down_proj.shape
    assert shape == (1 << 16, 1 << 14, 1 << 16)
    assert not [name for name, buffer in model.named_buffers() if buffer.is_meta]


def test_a_config_for_another_kind_of_model_is_refused_with_both_names() -> None:
    config = {**LLAMA, "architectures": ["MixtralForCausalLM"]}
    with pytest.raises(RuntimeError, match=r"'MixtralForCausalLM'.*'llama'.*wants 'mixtral'"):
        built(config)


def test_a_config_that_cannot_be_built_says_so_in_one_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"transformers .* cannot build 'LlamaForCausalLM'"):
        built({**LLAMA, "num_hidden_layers": -1, "vocab_size": "many"})


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # transformers up to 5.20
def test_large_computed_buffers_are_real_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_LARGE", 64)  # so that the causal mask is large
    config = {"model_type": "gpt_bigcode", "n_embd": 8, "n_head": 2, "n_layer": 1}
    model = built({**config, "n_positions": 16, "vocab_size": 32})
    mask = model.transformer.bias
    assert torch.equal(mask, torch.ones(16, 16, dtype=torch.bool).tril())


def test_the_text_part_is_taken_where_the_class_is_for_text() -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8}
    config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3", "text_config": text}
    assert built(config).config.hidden_size == 32


def test_the_command_line_plans_by_the_rules_of_the_library_as_python_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of the days of TensorFlow: only transformers' own rules know them."""
    from transformers import BertConfig, BertModel

    settings = BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    model = BertModel(settings)
    model.save_pretrained(tmp_path)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): t
        for name, t in model.state_dict().items()
    }
    assert tensors.keys() != model.state_dict().keys()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    words = ["plan", str(tmp_path), "--model", "transformers", "--max-memory", "cpu=1GiB"]
    assert main([*words, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    plan = Dispatcher().plan(tmp_path, model=model, max_memory={"cpu": "1GiB"})
    assert told["audit"] == json.loads(json.dumps(plan.audit.to_json()))
    assert main(words) == 0
