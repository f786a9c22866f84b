"""Configs that name code or repositories: nothing runs, and nothing asks the network unasked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelquirks.planner.adapter.adapter import open_adapter
from modelquirks.planner.adapter.places import AdapterPlacesError, with_places
from modelquirks.plugins.transformers import plain_config

CANARY = "open('{}', 'w').close()\n"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 16, "tie_word_embeddings": True,
}  # fmt: skip
CODE = {
    "auto_map": {
        "AutoConfig": "canary.Config",
        "AutoModelForCausalLM": "evil/repository--canary.Model",
    },
    "trust_remote_code": True,
    "custom_pipelines": {"x": {"impl": "canary.Pipeline"}},
    "attn_implementation": "evil/kernel",
    "_attn_implementation": "evil/kernel",
    "_attn_implementation_internal": "evil/kernel",
    "experts_implementation": "evil/kernel",
    "use_kernels": True,
    "kernel_config": {"kernel_mapping": {"RMSNorm": "evil/kernel:RMSNorm"}},
    "quantization_config": {"quant_method": "canary", "modules_to_import": ["canary"]},
    "_name_or_path": "evil/repository",
    "tokenizer_class": "canary.Tokenizer",
}
"""All that a config can say to have code or a repository looked for."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a tiny Llama whose config names code that lies in its folder and on the hub."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("canary.py", "modeling_canary.py", "configuration_canary.py", "setup.py"):
        (folder / name).write_text(CANARY.format(tmp_path / "ran"))
    (folder / "config.json").write_text(json.dumps({**LLAMA, **CODE}))
    layer = {
        "self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 8), "self_attn.v_proj": (8, 8),
        "self_attn.o_proj": (8, 8), "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8),
        "mlp.down_proj": (8, 16), "input_layernorm": (8,), "post_attention_layernorm": (8,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"layers.0.{k}": shape for k, shape in layer.items()}
    shapes |= {"embed_tokens": (16, 8), "norm": (8,)}
    weights = {f"model.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def test_no_command_runs_what_a_config_names_or_asks_the_network(
    checkpoint: Path, tmp_path: Path, watched: Any
) -> None:
    """Every command on a local folder, from within it, with a hub that would be there."""
    folder, plan = str(checkpoint), str(tmp_path / "plan.json")
    jobs = [
        ["plugins", "list"],
        ["plugins", "check", folder],
        ["inspect", folder],
        ["plan", folder, "--dry-run"],
        ["diff", folder, folder],
        ["infer", folder, "--model", folder],
        ["plan", folder, "--dry-run", "--model", "transformers", "-o", plan],
        ["explain", plan, "model.layers.0"],
        ["execute", plan],
        ["export", folder, str(tmp_path / "out")],
    ]

    answers = watched(*jobs)

    assert not (tmp_path / "ran").exists()
    for job, answer in zip(jobs, answers, strict=True):
        assert answer.of("network") == [], job
        assert answer.strange(checkpoint) == [], job
        read = [path for path in answer.of("read") if path.startswith(folder)]
        assert not [path for path in read if path.endswith(".py")], job
        assert answer.code == 0, (job, answer.err)


def test_what_names_code_does_not_reach_the_library() -> None:
    nested = {**CODE, "text_config": {**CODE, "hidden_size": 8}, "parts": [{**CODE}]}
    kept = json.dumps(plain_config(nested))
    assert "evil/kernel" not in kept
    assert "AutoModel" not in kept
    assert '"hidden_size": 8' in kept


# -------------------------------------------------------------------------------------- adapters


def adapter_of(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    weights = {
        "base_model.model.proj.lora_A.weight": torch.zeros(8, 4),
        "base_model.model.proj.lora_B.weight": torch.zeros(4, 8),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    usual = {"peft_type": "LORA", "r": 8, "target_modules": ["proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**usual, **config}))
    return folder


def base() -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_module("proj", torch.nn.Linear(4, 4, bias=False))
    return model


def test_an_adapter_cannot_have_a_module_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT imports the module that ``megatron_core`` names; lower versions whatever it is."""
    (tmp_path / "canary_core.py").write_text(CANARY.format(tmp_path / "ran"))
    monkeypatch.syspath_prepend(str(tmp_path))
    path = adapter_of(
        tmp_path / "adapter",
        megatron_config={"a": 1},
        megatron_core="canary_core",
        auto_mapping={"parent_library": "canary_core", "base_model_class": "X"},
    )

    placed = with_places(base(), open_adapter(path))

    assert "lora" in "".join(name for name, _ in placed.named_parameters())
    assert "canary_core" not in sys.modules
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("XLORA", {"adapters": {"0": "evil/repository"}, "hidden_size": 4}),
        ("SHADOW", {"shadow_model": "evil/repository"}),
        ("CARTRIDGE", {}),
    ],
)
def test_an_adapter_that_names_other_repositories_is_refused(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    path = adapter_of(tmp_path / "adapter", peft_type=kind, **more)
    with pytest.raises(AdapterPlacesError, match="build the PEFT model yourself"):
        with_places(base(), open_adapter(path))
