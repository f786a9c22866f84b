"""Diffusion transformers of their makers, into the names and shapes that diffusers' classes have.

diffusers is not needed: what its classes hold is in tests/data/diffusers. The layouts are made by
undoing its conversion scripts.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
Arrives = Callable[..., None]
Randomized = Callable[[nn.Module], nn.Module]

DATA = Path(__file__).parents[1] / "data" / "diffusers"


def shapes_of(kind: str) -> dict[str, list[int]]:
    rows = json.loads((DATA / f"{kind}.json").read_text())
    return {
        name.format(block): shape
        for name, shape, blocks in rows
        for block in range(*(blocks or (0, 1)))
    }


def module_of(shapes: Mapping[str, list[int]]) -> nn.Module:
    """Return a module whose state dict has these names and shapes."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return root


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Undo swap_scale_shift, which undoes itself."""
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


def original(tensors: Tensors, names: Mapping[str, str], fused: Mapping[str, str]) -> Tensors:
    """Return *tensors* with modules renamed, and the fused ones joined.

    *fused*: modules of diffusers, in the order in which they are one below the other, and the
    original module that they are part of.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, new in names.items():
            changed, count = re.subn(f"^{pattern}\\.", f"{new}.", name)
            if count:
                found[changed] = tensor
                break
    parts: dict[str, list[torch.Tensor]] = {}
    for pattern, new in fused.items():
        for name, tensor in tensors.items():
            changed, count = re.subn(f"^{pattern}\\.", f"{new}.", name)
            if count:
                parts.setdefault(changed, []).append(tensor)
    return {**found, **{name: torch.cat(several) for name, several in parts.items()}}


DOUBLE, SINGLE = r"transformer_blocks\.(\d+)", r"single_transformer_blocks\.(\d+)"
FLUX = {
    r"time_text_embed\.timestep_embedder\.linear_1": "time_in.in_layer",
    r"time_text_embed\.timestep_embedder\.linear_2": "time_in.out_layer",
    r"time_text_embed\.text_embedder\.linear_1": "vector_in.in_layer",
    r"time_text_embed\.text_embedder\.linear_2": "vector_in.out_layer",
    r"time_text_embed\.guidance_embedder\.linear_1": "guidance_in.in_layer",
    r"time_text_embed\.guidance_embedder\.linear_2": "guidance_in.out_layer",
    "context_embedder": "txt_in",
    "x_embedder": "img_in",
    "proj_out": "final_layer.linear",
    r"norm_out\.linear": "final_layer.adaLN_modulation.1",
    rf"{DOUBLE}\.norm1\.linear": r"double_blocks.\1.img_mod.lin",
    rf"{DOUBLE}\.norm1_context\.linear": r"double_blocks.\1.txt_mod.lin",
    rf"{DOUBLE}\.ff\.net\.0\.proj": r"double_blocks.\1.img_mlp.0",
    rf"{DOUBLE}\.ff\.net\.2": r"double_blocks.\1.img_mlp.2",
    rf"{DOUBLE}\.ff_context\.net\.0\.proj": r"double_blocks.\1.txt_mlp.0",
    rf"{DOUBLE}\.ff_context\.net\.2": r"double_blocks.\1.txt_mlp.2",
    rf"{DOUBLE}\.attn\.to_out\.0": r"double_blocks.\1.img_attn.proj",
    rf"{DOUBLE}\.attn\.to_add_out": r"double_blocks.\1.txt_attn.proj",
    rf"{DOUBLE}\.attn\.norm_q": r"double_blocks.\1.img_attn.norm.query_norm",
    rf"{DOUBLE}\.attn\.norm_k": r"double_blocks.\1.img_attn.norm.key_norm",
    rf"{DOUBLE}\.attn\.norm_added_q": r"double_blocks.\1.txt_attn.norm.query_norm",
    rf"{DOUBLE}\.attn\.norm_added_k": r"double_blocks.\1.txt_attn.norm.key_norm",
    rf"{SINGLE}\.norm\.linear": r"single_blocks.\1.modulation.lin",
    rf"{SINGLE}\.proj_out": r"single_blocks.\1.linear2",
    rf"{SINGLE}\.attn\.norm_q": r"single_blocks.\1.norm.query_norm",
    rf"{SINGLE}\.attn\.norm_k": r"single_blocks.\1.norm.key_norm",
}
FLUX_FUSED = {
    **{rf"{DOUBLE}\.attn\.to_{x}": r"double_blocks.\1.img_attn.qkv" for x in "qkv"},
    **{rf"{DOUBLE}\.attn\.add_{x}_proj": r"double_blocks.\1.txt_attn.qkv" for x in "qkv"},
    **{rf"{SINGLE}\.attn\.to_{x}": r"single_blocks.\1.linear1" for x in "qkv"},
    rf"{SINGLE}\.proj_mlp": r"single_blocks.\1.linear1",
}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_flux(prefix: str, arrives: Arrives, randomized: Randomized) -> None:
    def make() -> nn.Module:
        return module_of(shapes_of("flux"))

    model = randomized(make())
    found = original(dict(model.state_dict()), FLUX, FLUX_FUSED)
    stored = {
        prefix + (re.sub(r"_norm\.weight$", "_norm.scale", name)): (
            swapped(tensor) if "adaLN" in name else tensor
        )
        for name, tensor in found.items()
    }
    assert len(stored) == len(found) == len(model.state_dict()) - 2 * (2 * 4 + 2 * 3)
    arrives(stored, {}, model, make)


SD3 = {
    r"pos_embed\.proj": "x_embedder.proj",
    r"time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
    r"time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
    r"time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
    r"time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "proj_out": "final_layer.linear",
    r"norm_out\.linear": "final_layer.adaLN_modulation.1",
    rf"{DOUBLE}\.norm1\.linear": r"joint_blocks.\1.x_block.adaLN_modulation.1",
    rf"{DOUBLE}\.norm1_context\.linear": r"joint_blocks.\1.context_block.adaLN_modulation.1",
    rf"{DOUBLE}\.(attn2?)\.to_out\.0": r"joint_blocks.\1.x_block.\2.proj",
    rf"{DOUBLE}\.(attn2?)\.norm_([qk])": r"joint_blocks.\1.x_block.\2.ln_\3",
    rf"{DOUBLE}\.attn\.to_add_out": r"joint_blocks.\1.context_block.attn.proj",
    rf"{DOUBLE}\.attn\.norm_added_([qk])": r"joint_blocks.\1.context_block.attn.ln_\2",
    rf"{DOUBLE}\.ff\.net\.0\.proj": r"joint_blocks.\1.x_block.mlp.fc1",
    rf"{DOUBLE}\.ff\.net\.2": r"joint_blocks.\1.x_block.mlp.fc2",
    rf"{DOUBLE}\.ff_context\.net\.0\.proj": r"joint_blocks.\1.context_block.mlp.fc1",
    rf"{DOUBLE}\.ff_context\.net\.2": r"joint_blocks.\1.context_block.mlp.fc2",
}
SD3_FUSED = {
    **{rf"{DOUBLE}\.(attn2?)\.to_{x}": r"joint_blocks.\1.x_block.\2.qkv" for x in "qkv"},
    **{rf"{DOUBLE}\.attn\.add_{x}_proj": r"joint_blocks.\1.context_block.attn.qkv" for x in "qkv"},
}


@pytest.mark.parametrize("layers", [24, 38])
def test_stable_diffusion_3(layers: int, arrives: Arrives, randomized: Randomized) -> None:
    def make() -> nn.Module:
        return module_of(shapes_of(f"sd3_{layers}"))

    model = randomized(make())
    found = original(dict(model.state_dict()), SD3, SD3_FUSED)
    found["pos_embed"] = model.state_dict()["pos_embed.pos_embed"]
    turned = ("final_layer.adaLN", f"joint_blocks.{layers - 1}.context_block.adaLN")
    stored = {
        f"model.diffusion_model.{name}": swapped(tensor) if name.startswith(turned) else tensor
        for name, tensor in found.items()
    }
    arrives(stored, {}, model, make)


MOCHI = {
    r"patch_embed\.proj": "x_embedder.proj",
    r"time_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
    r"time_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
    r"time_embed\.pooler": "t5_y_embedder",
    r"time_embed\.caption_proj": "t5_yproj",
    "proj_out": "final_layer.linear",
    r"norm_out\.linear": "final_layer.mod",
    rf"{DOUBLE}\.norm1\.linear": r"blocks.\1.mod_x",
    rf"{DOUBLE}\.norm1_context\.linear(_1)?": r"blocks.\1.mod_y",
    rf"{DOUBLE}\.attn1\.norm_([qk])": r"blocks.\1.attn.\2_norm_x",
    rf"{DOUBLE}\.attn1\.norm_added_([qk])": r"blocks.\1.attn.\2_norm_y",
    rf"{DOUBLE}\.attn1\.to_out\.0": r"blocks.\1.attn.proj_x",
    rf"{DOUBLE}\.attn1\.to_add_out": r"blocks.\1.attn.proj_y",
    rf"{DOUBLE}\.ff\.net\.0\.proj": r"blocks.\1.mlp_x.w1",
    rf"{DOUBLE}\.ff\.net\.2": r"blocks.\1.mlp_x.w2",
    rf"{DOUBLE}\.ff_context\.net\.0\.proj": r"blocks.\1.mlp_y.w1",
    rf"{DOUBLE}\.ff_context\.net\.2": r"blocks.\1.mlp_y.w2",
}
MOCHI_FUSED = {
    **{rf"{DOUBLE}\.attn1\.to_{x}": r"blocks.\1.attn.qkv_x" for x in "qkv"},
    **{rf"{DOUBLE}\.attn1\.add_{x}_proj": r"blocks.\1.attn.qkv_y" for x in "qkv"},
}


def test_mochi(arrives: Arrives, randomized: Randomized) -> None:
    def make() -> nn.Module:
        return module_of(shapes_of("mochi"))

    model = randomized(make())
    found = original(dict(model.state_dict()), MOCHI, MOCHI_FUSED)
    found["pos_frequencies"] = model.state_dict()["pos_frequencies"]
    stored = {
        name: swapped(tensor) if name.startswith("final_layer.mod") else tensor
        for name, tensor in found.items()
    }
    arrives(stored, {}, model, make)
