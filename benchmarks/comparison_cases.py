"""Checkpoints for the comparison: whole ones of several kinds, and what happens to them in life.

All are tiny and random. Each comes with what the model that was saved answers, so that whoever
loads it can be judged: a loader is right if its model answers just that.
"""

from __future__ import annotations

import json
import runpy
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig

__all__ = ["CASES", "PROMPT", "Case", "make"]

EMBED, HEAD = ("embed_tokens",), ("lm_head",)
LAST = "00002-of-00002"
OLD = "model.safetensors"
INDEX = "model.safetensors.index.json"
PROMPT = torch.arange(1, 9).reshape(1, 8)
FULL = {"": "cpu"}
DISK = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu"} | dict.fromkeys(
    ("model.layers", "model.norm", "lm_head"), "disk"
)


class Case(NamedTuple):
    """One checkpoint, and what is to be expected of a loader."""

    name: str
    """Folder of the checkpoint."""
    title: str
    """For the table."""
    like: str
    """Folder of the checkpoint whose model gives the right answer."""
    best: str
    """``right``, ``refused``, or ``none`` where headers do not tell."""
    words: tuple[str, ...] = ()
    """Any of these in a message names what is odd."""
    devices: Mapping[str, str] = FULL


CASES = (
    Case("whole", "nothing is wrong", "whole", "right"),
    Case("wrapped", "`module.` before every name", "whole", "right", ("module.",)),
    Case("acme", "a naming of its own", "whole", "refused", ("decoder.", "embed_tokens")),
    Case("other-head", "one tensor has another name", "whole", "refused", HEAD),
    Case("tensor-missing", "one tensor is not stored", "whole", "refused", ("up_proj",)),
    Case("index-lies", "one tensor is in the index only", "whole", "refused", ("up_proj",)),
    Case("shard-missing", "a shard is missing", "whole", "refused", (LAST,)),
    Case("cut-off", "a shard is cut off", "whole", "refused", (LAST,)),
    Case("pointer", "a shard is a Git LFS pointer", "whole", "refused", (LAST,)),
    Case("old-file", "an older `model.safetensors` beside", "whole", "right", (OLD,)),
    Case("old-shard", "a shard of another training step", "whole", "none"),
    Case("other-vocabulary", "config.json of another vocabulary", "whole", "refused", EMBED),
    Case("tied", "a tie, stored once", "tied", "right", HEAD),
    Case("tied-twice", "a tie, stored twice with other values", "tied-twice", "right", HEAD),
    Case("experts", "experts one by one (Mixtral)", "experts", "right", ("experts",)),
    Case("expert-gap", "of these, one is not stored", "experts", "refused", ("experts",)),
    Case("mxfp4", "packed experts (GPT-OSS, mxfp4)", "mxfp4", "right", ("experts",)),
    Case("dcp", "torch.distributed.checkpoint", "whole", "right", ("dcp",)),
    Case("whole", "layers and head on disk", "whole", "right", ("disk",), DISK),
    Case("tied", "the same, and a tie with one end in memory", "tied", "refused", HEAD, DISK),
    Case("experts", "the same, experts one by one", "experts", "right", ("experts",), DISK),
)  # fmt: skip


def make(root: Path) -> None:
    """Make every checkpoint below *root*, and the right answers as ``answers.pt``."""
    _example("broken_checkpoints", "make_all")(root)
    whole = root / "whole"
    answers = {"whole": _answer(AutoModelForCausalLM.from_pretrained(whole))}
    _edited(whole, root / "tensor-missing", _without("model.layers.2.mlp.up_proj.weight"))
    _edited(whole, root / "index-lies", _without("model.layers.2.mlp.up_proj.weight"), index=False)
    _pointer(whole, root / "pointer")
    _old_file(whole, root / "old-file")
    _edited(whole, root / "old-shard", lambda t: {n: x + 0.01 for n, x in t.items()}, only=-1)
    answers["tied"], answers["tied-twice"] = _tied(root)
    answers["experts"] = _experts(root)
    _example("tiny_gpt_oss", "make")(root / "mxfp4")
    answers["mxfp4"] = _answer(AutoModelForCausalLM.from_pretrained(root / "mxfp4"))
    _dcp(whole, root / "dcp")
    torch.save(answers, root / "answers.pt")


def _example(name: str, function: str) -> Callable[[Path], object]:
    """Return a function of a script in examples/."""
    script = Path(__file__).parents[1] / "examples" / f"{name}.py"
    found: Callable[[Path], object] = runpy.run_path(str(script))[function]
    return found


def _answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(PROMPT).logits
    return logits


def _new(config: Any) -> Any:
    factory: Any = AutoModelForCausalLM
    return factory.from_config(config)


Tensors = dict[str, torch.Tensor]


def _without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def _edited(
    source: Path,
    target: Path,
    edit: Callable[[Tensors], Tensors],
    *,
    index: bool = True,
    only: int | None = None,
) -> None:
    """Copy a checkpoint with its files edited (one of them: *only*), and the index with them."""
    shutil.copytree(source, target)
    files = sorted(target.glob("*.safetensors"))
    for path in files if only is None else [files[only]]:
        tensors = edit({name: t.clone() for name, t in load_file(path).items()})
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    if index and (target / INDEX).exists():
        places = {name: path.name for path in files for name in load_file(path)}
        content = json.loads((target / INDEX).read_text()) | {"weight_map": places}
        (target / INDEX).write_text(json.dumps(content))


def _pointer(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    last = sorted(target.glob("*.safetensors"))[-1]
    head = "version https://git-lfs.github.com/spec/v1\noid sha256:"
    last.write_text(f"{head}{'0' * 64}\nsize {last.stat().st_size}\n")


def _old_file(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    tensors = {
        n: t + 0.01 for path in target.glob("*.safetensors") for n, t in load_file(path).items()
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _tied(root: Path) -> Iterator[torch.Tensor]:
    config = LlamaConfig.from_pretrained(root / "whole", tie_word_embeddings=True)
    torch.manual_seed(1)
    model = _new(config)
    model.save_pretrained(root / "tied")
    yield _answer(model)
    head = torch.randn(320, 64) * 0.02
    _edited(root / "tied", root / "tied-twice", lambda t: t | {"lm_head.weight": head})
    untied: Any = AutoModelForCausalLM.from_pretrained(root / "tied", tie_word_embeddings=False)
    untied.lm_head.weight = torch.nn.Parameter(head)
    yield _answer(untied)


def _experts(root: Path) -> torch.Tensor:
    config = MixtralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    torch.manual_seed(2)
    model = _new(config)
    model.save_pretrained(root / "experts")
    gone = [f"model.layers.1.block_sparse_moe.experts.2.w{n}.weight" for n in (1, 2, 3)]
    _edited(root / "experts", root / "expert-gap", _without(*gone))
    return _answer(model)


def _dcp(source: Path, target: Path) -> None:
    """Save as torch's distributed checkpoint, from one process."""
    from torch.distributed.checkpoint.state_dict_saver import save

    model: Any = AutoModelForCausalLM.from_pretrained(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is one process
        save(model.state_dict(), checkpoint_id=target, no_dist=True)
    AutoConfig.from_pretrained(source).save_pretrained(target)
