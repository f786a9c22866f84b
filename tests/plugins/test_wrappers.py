"""Names that training wrappers leave behind, as the wrappers themselves write them."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from modelquirks.plugins import wrappers
from modelquirks.quirks import Pattern
from modelquirks.quirks.resolve import Resolution

Resolved = Callable[..., Resolution]
Called = Callable[..., dict[str, str]]
Manifest = Callable[[str], tuple[list[str], dict[str, Any]]]


def plain() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": nn.ModuleList([block])})


NAMES = tuple(plain().state_dict())


def compiled(model: nn.Module) -> nn.Module:
    # The backend that compiles nothing: what is of interest is the module around the model.
    return cast(nn.Module, torch.compile(model, backend="eager"))


def compiled_block() -> nn.Module:
    block = compiled(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    return nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": nn.ModuleList([block])})


def fabric(model: nn.Module) -> nn.Module:
    """Hold *model* as Lightning's Fabric and its strategies do."""
    return nn.ModuleDict({"_forward_module": model})


WRAPPED: Mapping[str, Callable[[], nn.Module]] = {
    "DataParallel": lambda: nn.DataParallel(plain()),
    "AveragedModel": lambda: AveragedModel(plain()),
    "torch.compile": lambda: compiled(plain()),
    "torch.compile of one block": compiled_block,
    "compile of DataParallel": lambda: compiled(nn.DataParallel(plain())),
    "DataParallel of compile": lambda: nn.DataParallel(compiled(plain())),
    "DataParallel twice": lambda: nn.DataParallel(nn.DataParallel(plain())),
    "Fabric of compile": lambda: fabric(compiled(plain())),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_what_a_wrapper_saves_is_called_as_in_the_model(
    wrapped: Callable[[], nn.Module], called: Called
) -> None:
    stored = set(wrapped().state_dict()) - {"n_averaged"}
    assert stored != set(NAMES)
    for known in ((), NAMES):
        assert sorted(called(stored, known=known).values()) == sorted(NAMES)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        (
            "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module."
            "mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
        ),
        ("module._orig_mod.model.norm.weight", "model.norm.weight"),
        ("_orig_mod._fsdp_wrapped_module.lm_head.weight", "lm_head.weight"),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        (
            "module.base_model.model.model.layers.3.self_attn.q_proj.base_layer.weight",
            "model.layers.3.self_attn.q_proj.weight",
        ),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("model.layers.0.q_proj.base_layer.weight.absmax", "model.layers.0.q_proj.weight.absmax"),
    ],
)
def test_nested_wrappers_are_undone_together(stored: str, name: str, called: Called) -> None:
    assert called([stored]) == {stored: name}
    assert called([stored], known=[name]) == {stored: name}


@pytest.mark.parametrize(
    "name",
    ["module.weight", "encoder.module.weight", "_orig_mod.weight", "model.base_layer.weight"],
)
def test_a_name_that_the_model_has_is_never_taken_away(name: str, called: Called) -> None:
    assert called([name], known=[name]) == {name: name}


def test_only_a_leading_module_is_a_wrapper(called: Called, resolved: Resolved) -> None:
    names = ["encoder.module.weight", "my_module.weight", "modules.0.weight"]
    assert called(names) == {name: name for name in names}
    assert not resolved(names).applied


def test_lightning_is_told_by_the_container_never_by_the_name(called: Called) -> None:
    """``model.`` is the base prefix of most transformers models too."""
    stored = ["model.model.norm.weight", "model.lm_head.weight"]
    known = ["model.norm.weight", "lm_head.weight"]
    assert list(called(stored, known=known, container="lightning").values()) == known
    assert list(called(stored, known=known).values()) == stored
    compiled = ["model._orig_mod.model.norm.weight"]
    assert called(compiled, known=known, container="lightning") == {compiled[0]: known[0]}


def test_adapters_stay_unexpected_and_replaced_originals_do_not(resolved: Resolved) -> None:
    """A base model without its adapter computes something else: that must not be passed over."""
    stored = [
        "base_model.model.lm_head.original_module.weight",
        "base_model.model.lm_head.modules_to_save.default.weight",
        "base_model.model.layers.0.q_proj.lora_A.default.weight",
    ]
    extra = [e.names for record in resolved(stored).records() for e in record.extra]
    names = [name for piece in resolved(stored).renamed for name, _ in piece.items()]
    told = [name for name in names if any(Pattern(text).match(name) for text in extra)]
    assert told == ["lm_head.original_module.weight"]


def test_an_unmerged_adapter_inside_a_real_checkpoint(called: Called, manifest: Manifest) -> None:
    names, config = manifest("llava-next-video-7b-nf4-lora")
    logical = called(names, config).values()
    assert not [name for name in logical if ".base_layer." in name]
    assert "language_model.model.layers.31.mlp.down_proj.weight" in logical
    assert len([name for name in logical if ".lora_" in name]) == 592


def test_no_wrapper_is_seen_in_checkpoints_without_one(
    resolved: Resolved, manifest: Manifest
) -> None:
    for slug in ("gpt-oss-20b", "mistral-7b-v0.1", "wizardlm-2-8x22b", "qwen3-14b-mlx-4bit"):
        names, config = manifest(slug)
        roles = {record.role for record in resolved(names, config).records()}
        assert "wrapper" not in roles, slug


def test_every_record_says_why_and_where_that_is_proven() -> None:
    for record in wrappers.RECORDS:
        assert record.why and record.url.startswith("https://"), record.name
