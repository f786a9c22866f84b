"""What training wrappers leave in the names of a checkpoint.

A wrapper holds the model in an attribute, and the attribute's name ends up in every name of the
state dict. Nothing is undone that the model itself has: a name of the model is never renamed.
Wrappers nest, so the aliases are repeated until none matches.

Sharded training checkpoints (DeepSpeed ZeRO partitions, FSDP ``LOCAL_STATE_DICT``) are no matter
of names and are not treated here.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.record import Alias, Expected, Match, ModelQuirks

__all__ = ["RECORDS", "modelquirks_records"]


def _segment(text: str) -> Alias:
    """Return the alias that takes the segment *text* out, wherever it is."""
    return Alias(f"**.{text}.**", "**.**")


_MODULE = ModelQuirks(
    name="wrapper.module",
    role="wrapper",
    # torch.compile and Lightning may be outside of it, and are undone together with it.
    match=Match(any_of=("module.**", "_orig_mod.module.**", "_forward_module.module.**")),
    aliases=(Alias("module.**", "**"),),
    extra=(
        Expected(
            "n_averaged", "torch.optim.swa_utils.AveragedModel counts its updates; not a weight"
        ),
    ),
    why=(
        "DistributedDataParallel, DataParallel, a DeepSpeed engine and AveragedModel hold the "
        "model as 'module'"
    ),
    url=(
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.utils."
        "consume_prefix_in_state_dict_if_present.html"
    ),
)

_COMPILE = ModelQuirks(
    name="wrapper.torch_compile",
    role="wrapper",
    match=Match(any_of=("**._orig_mod.**",)),
    aliases=(_segment("_orig_mod"),),
    why="torch.compile holds what it compiled, the model or any module in it, as '_orig_mod'",
    url="https://github.com/pytorch/pytorch/issues/101107",
)

_FSDP = ModelQuirks(
    name="wrapper.fsdp",
    role="wrapper",
    match=Match(any_of=("**._fsdp_wrapped_module.**",)),
    aliases=(_segment("_fsdp_wrapped_module"),),
    why="FullyShardedDataParallel (FSDP1) wraps every unit as '_fsdp_wrapped_module'",
    url="https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_common_utils.py",
)

_CHECKPOINT = ModelQuirks(
    name="wrapper.activation_checkpoint",
    role="wrapper",
    match=Match(any_of=("**._checkpoint_wrapped_module.**",)),
    aliases=(_segment("_checkpoint_wrapped_module"),),
    why=(
        "activation checkpointing, as used with FSDP1 and FSDP2, wraps modules as "
        "'_checkpoint_wrapped_module'"
    ),
    url=(
        "https://github.com/pytorch/pytorch/blob/main/torch/distributed/algorithms/"
        "_checkpoint/checkpoint_wrapper.py"
    ),
)

_PEFT = ModelQuirks(
    name="wrapper.peft",
    role="wrapper",
    match=Match(
        any_of=("**.base_model.model.**", "**.base_layer.**", "**.modules_to_save.default.**")
    ),
    aliases=(
        Alias("base_model.model.**", "**"),
        _segment("base_layer"),
        _segment("modules_to_save.default"),
    ),
    extra=(Expected("**.original_module.**", "PEFT keeps it beside the trained copy that counts"),),
    why=(
        "PEFT holds the model as 'base_model.model', an adapted layer as 'base_layer' and a "
        "retrained one as 'modules_to_save.default'; lora_* tensors belong to the adapter and "
        "stay unexpected, because the model without them computes something else"
    ),
    url="https://github.com/huggingface/peft/blob/main/src/peft/utils/save_and_load.py",
)

_FORWARD_MODULE = ModelQuirks(
    name="wrapper.lightning_strategy",
    role="wrapper",
    match=Match(any_of=("_forward_module.**", "_orig_mod._forward_module.**")),
    aliases=(Alias("_forward_module.**", "**"),),
    why="Lightning's Fabric and its DeepSpeed and FSDP strategies hold the model as such",
    url="https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/fabric/wrappers.py",
)

_LIGHTNING = ModelQuirks(
    name="wrapper.lightning",
    role="wrapper",
    # By the container only: `model.` is also the base prefix of most transformers models.
    match=Match(containers=("lightning",)),
    aliases=(Alias("model.**", "**"), Alias("net.**", "**")),
    why="a LightningModule usually holds the model as 'model' or 'net'",
    url="https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html",
)

RECORDS = (_MODULE, _COMPILE, _FSDP, _CHECKPOINT, _PEFT, _FORWARD_MODULE, _LIGHTNING)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return one record per kind of wrapper."""
    return RECORDS
