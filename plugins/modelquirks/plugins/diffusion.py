"""Diffusion transformers under the names of their makers, to those of diffusers.

FLUX of Black Forest Labs, Stable Diffusion 3 and 3.5, Mochi; as single files for ComfyUI they have
``model.diffusion_model`` before every name. q, k and v are one matrix there, and the last
modulation has shift before scale, which diffusers has the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Chunk, Concat, Source
from modelquirks.quirks.record import Alias, Convert, Match, ModelQuirks

__all__ = ["RECORDS", "modelquirks_records"]

_SCRIPTS = "https://github.com/huggingface/diffusers/blob/main/scripts"
_BLOCK = "transformer_blocks.{layer}"
_KINDS = ("weight", "bias")
_SAMPLE, _CONTEXT = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def _aliases(names: Mapping[str, str]) -> tuple[Alias, ...]:
    """Return an alias of modules for each pair."""
    return tuple(Alias(f"{old}.*", f"{new}.*") for old, new in names.items())


def _thirds(fused: str, targets: Iterable[str], parent: str) -> Iterator[Convert]:
    """Yield q, k and v out of a module that has one below the other."""
    for part, target in enumerate(targets):
        for kind in _KINDS:
            node = Chunk(Source(f"{fused}.{kind}"), 0, 3, part)
            yield Convert(f"{parent}.{target}.{kind}", node)


def _scale_first(stored: str, target: str) -> Iterator[Convert]:
    for kind in _KINDS:
        halves = tuple(Chunk(Source(f"{stored}.{kind}"), 0, 2, part) for part in (1, 0))
        yield Convert(f"{target}.{kind}", Concat(halves, 0))


_SINGLE_FILE = ModelQuirks(
    name="diffusion.single_file",
    role="wrapper",
    match=Match(any_of=("model.diffusion_model.**",)),
    aliases=(Alias("model.diffusion_model.**", "**"),),
    why="single files for ComfyUI and other interfaces hold the model as 'model.diffusion_model'",
    url=f"{_SCRIPTS}/convert_sd3_to_diffusers.py",
)

_TIME, _TEXT = "time_text_embed.timestep_embedder", "time_text_embed.text_embedder"
_GUIDANCE = "time_text_embed.guidance_embedder"
_DOUBLE, _SINGLE = "double_blocks.{layer}", "single_blocks.{layer}"
_HF_SINGLE = "single_transformer_blocks.{layer}"
_FLUX_NAMES = {
    "time_in.in_layer": f"{_TIME}.linear_1",
    "time_in.out_layer": f"{_TIME}.linear_2",
    "vector_in.in_layer": f"{_TEXT}.linear_1",
    "vector_in.out_layer": f"{_TEXT}.linear_2",
    "guidance_in.in_layer": f"{_GUIDANCE}.linear_1",
    "guidance_in.out_layer": f"{_GUIDANCE}.linear_2",
    "txt_in": "context_embedder",
    "img_in": "x_embedder",
    "final_layer.linear": "proj_out",
    f"{_DOUBLE}.img_mod.lin": f"{_BLOCK}.norm1.linear",
    f"{_DOUBLE}.txt_mod.lin": f"{_BLOCK}.norm1_context.linear",
    f"{_DOUBLE}.img_mlp.0": f"{_BLOCK}.ff.net.0.proj",
    f"{_DOUBLE}.img_mlp.2": f"{_BLOCK}.ff.net.2",
    f"{_DOUBLE}.txt_mlp.0": f"{_BLOCK}.ff_context.net.0.proj",
    f"{_DOUBLE}.txt_mlp.2": f"{_BLOCK}.ff_context.net.2",
    f"{_DOUBLE}.img_attn.proj": f"{_BLOCK}.attn.to_out.0",
    f"{_DOUBLE}.txt_attn.proj": f"{_BLOCK}.attn.to_add_out",
    f"{_SINGLE}.modulation.lin": f"{_HF_SINGLE}.norm.linear",
    f"{_SINGLE}.linear2": f"{_HF_SINGLE}.proj_out",
}
_FLUX_NORMS = {
    f"{_DOUBLE}.img_attn.norm.query_norm": f"{_BLOCK}.attn.norm_q",
    f"{_DOUBLE}.img_attn.norm.key_norm": f"{_BLOCK}.attn.norm_k",
    f"{_DOUBLE}.txt_attn.norm.query_norm": f"{_BLOCK}.attn.norm_added_q",
    f"{_DOUBLE}.txt_attn.norm.key_norm": f"{_BLOCK}.attn.norm_added_k",
    f"{_SINGLE}.norm.query_norm": f"{_HF_SINGLE}.attn.norm_q",
    f"{_SINGLE}.norm.key_norm": f"{_HF_SINGLE}.attn.norm_k",
}


def _flux_single() -> Iterator[Convert]:
    """Yield what linear1 of a single block holds: q, k, v, and four times as much for the MLP."""
    for kind in _KINDS:
        sevenths = [Chunk(Source(f"{_SINGLE}.linear1.{kind}"), 0, 7, part) for part in range(7)]
        for node, target in zip(sevenths, _SAMPLE, strict=False):
            yield Convert(f"{_HF_SINGLE}.attn.{target}.{kind}", node)
        yield Convert(f"{_HF_SINGLE}.proj_mlp.{kind}", Concat(tuple(sevenths[3:]), 0))


_FLUX = ModelQuirks(
    name="diffusion.flux",
    role="architecture",
    match=Match(all_of=(f"{_DOUBLE}.img_attn.qkv.weight", f"{_SINGLE}.linear1.weight")),
    aliases=(
        *_aliases(_FLUX_NAMES),
        *(Alias(f"{old}.scale", f"{new}.weight") for old, new in _FLUX_NORMS.items()),
    ),
    conversions=(
        *_thirds(f"{_DOUBLE}.img_attn.qkv", _SAMPLE, f"{_BLOCK}.attn"),
        *_thirds(f"{_DOUBLE}.txt_attn.qkv", _CONTEXT, f"{_BLOCK}.attn"),
        *_flux_single(),
        *_scale_first("final_layer.adaLN_modulation.1", "norm_out.linear"),
    ),
    no_split=("FluxTransformerBlock", "FluxSingleTransformerBlock", "DoubleStreamBlock"),
    why="FLUX.1 as Black Forest Labs has it, for FluxTransformer2DModel of diffusers",
    url=f"{_SCRIPTS}/convert_flux_to_diffusers.py",
)

_JOINT = "joint_blocks.{layer}"
_SD3_NAMES = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": f"{_TIME}.linear_1",
    "t_embedder.mlp.2": f"{_TIME}.linear_2",
    "y_embedder.mlp.0": f"{_TEXT}.linear_1",
    "y_embedder.mlp.2": f"{_TEXT}.linear_2",
    "final_layer.linear": "proj_out",
    f"{_JOINT}.x_block.adaLN_modulation.1": f"{_BLOCK}.norm1.linear",
    f"{_JOINT}.context_block.adaLN_modulation.1": f"{_BLOCK}.norm1_context.linear",
    f"{_JOINT}.x_block.attn.proj": f"{_BLOCK}.attn.to_out.0",
    f"{_JOINT}.x_block.attn.ln_q": f"{_BLOCK}.attn.norm_q",
    f"{_JOINT}.x_block.attn.ln_k": f"{_BLOCK}.attn.norm_k",
    f"{_JOINT}.x_block.attn2.proj": f"{_BLOCK}.attn2.to_out.0",
    f"{_JOINT}.x_block.attn2.ln_q": f"{_BLOCK}.attn2.norm_q",
    f"{_JOINT}.x_block.attn2.ln_k": f"{_BLOCK}.attn2.norm_k",
    f"{_JOINT}.context_block.attn.proj": f"{_BLOCK}.attn.to_add_out",
    f"{_JOINT}.context_block.attn.ln_q": f"{_BLOCK}.attn.norm_added_q",
    f"{_JOINT}.context_block.attn.ln_k": f"{_BLOCK}.attn.norm_added_k",
    f"{_JOINT}.x_block.mlp.fc1": f"{_BLOCK}.ff.net.0.proj",
    f"{_JOINT}.x_block.mlp.fc2": f"{_BLOCK}.ff.net.2",
    f"{_JOINT}.context_block.mlp.fc1": f"{_BLOCK}.ff_context.net.0.proj",
    f"{_JOINT}.context_block.mlp.fc2": f"{_BLOCK}.ff_context.net.2",
}


def _sd3(n_layers: int) -> ModelQuirks:
    """Return the record of Stable Diffusion 3 with so many layers: the last is another kind."""
    last, target = f"joint_blocks.{n_layers - 1}", f"transformer_blocks.{n_layers - 1}"
    apart = f"{target}.norm1_context.shift_first"  # no name of a model: it must not be taken so
    return ModelQuirks(
        name=f"diffusion.sd3_{n_layers}",
        role="architecture",
        match=Match(
            all_of=(f"{_JOINT}.context_block.attn.qkv.weight", f"{last}.x_block.attn.qkv.weight"),
            none_of=(f"joint_blocks.{n_layers}.x_block.attn.qkv.weight",),
        ),
        aliases=(
            Alias(f"{last}.context_block.adaLN_modulation.1.*", f"{apart}.*"),
            Alias("pos_embed", "pos_embed.pos_embed"),
            *_aliases(_SD3_NAMES),
        ),
        conversions=(
            *_scale_first(apart, f"{target}.norm1_context.linear"),
            *_thirds(f"{_JOINT}.x_block.attn.qkv", _SAMPLE, f"{_BLOCK}.attn"),
            *_thirds(f"{_JOINT}.x_block.attn2.qkv", _SAMPLE, f"{_BLOCK}.attn2"),
            *_thirds(f"{_JOINT}.context_block.attn.qkv", _CONTEXT, f"{_BLOCK}.attn"),
            *_scale_first("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ),
        no_split=("JointTransformerBlock", "JointBlock"),
        why=(
            f"Stable Diffusion 3 of {n_layers} layers as Stability AI has it, for "
            "SD3Transformer2DModel of diffusers"
        ),
        url=f"{_SCRIPTS}/convert_sd3_to_diffusers.py",
    )


_MOCHI_BLOCK = "blocks.{layer}"
_MOCHI_NAMES = {
    # The context of the last layer is normed and goes no further.
    "blocks.47.mod_y": "transformer_blocks.47.norm1_context.linear_1",
    "x_embedder.proj": "patch_embed.proj",
    "t_embedder.mlp.0": "time_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_embed.timestep_embedder.linear_2",
    "t5_y_embedder.to_kv": "time_embed.pooler.to_kv",
    "t5_y_embedder.to_q": "time_embed.pooler.to_q",
    "t5_y_embedder.to_out": "time_embed.pooler.to_out",
    "t5_yproj": "time_embed.caption_proj",
    "final_layer.linear": "proj_out",
    f"{_MOCHI_BLOCK}.mod_x": f"{_BLOCK}.norm1.linear",
    f"{_MOCHI_BLOCK}.mod_y": f"{_BLOCK}.norm1_context.linear",
    f"{_MOCHI_BLOCK}.attn.q_norm_x": f"{_BLOCK}.attn1.norm_q",
    f"{_MOCHI_BLOCK}.attn.k_norm_x": f"{_BLOCK}.attn1.norm_k",
    f"{_MOCHI_BLOCK}.attn.q_norm_y": f"{_BLOCK}.attn1.norm_added_q",
    f"{_MOCHI_BLOCK}.attn.k_norm_y": f"{_BLOCK}.attn1.norm_added_k",
    f"{_MOCHI_BLOCK}.attn.proj_x": f"{_BLOCK}.attn1.to_out.0",
    f"{_MOCHI_BLOCK}.attn.proj_y": f"{_BLOCK}.attn1.to_add_out",
    f"{_MOCHI_BLOCK}.mlp_x.w1": f"{_BLOCK}.ff.net.0.proj",
    f"{_MOCHI_BLOCK}.mlp_x.w2": f"{_BLOCK}.ff.net.2",
    f"{_MOCHI_BLOCK}.mlp_y.w1": f"{_BLOCK}.ff_context.net.0.proj",
    f"{_MOCHI_BLOCK}.mlp_y.w2": f"{_BLOCK}.ff_context.net.2",
}
_MOCHI = ModelQuirks(
    name="diffusion.mochi",
    role="architecture",
    match=Match(
        all_of=(f"{_MOCHI_BLOCK}.attn.qkv_x.weight", "blocks.47.mod_y.weight"),
        none_of=("blocks.48.mod_y.weight",),
    ),
    aliases=_aliases(_MOCHI_NAMES),
    conversions=(
        *_thirds(f"{_MOCHI_BLOCK}.attn.qkv_x", _SAMPLE, f"{_BLOCK}.attn1"),
        *_thirds(f"{_MOCHI_BLOCK}.attn.qkv_y", _CONTEXT, f"{_BLOCK}.attn1"),
        *_scale_first("final_layer.mod", "norm_out.linear"),
    ),
    no_split=("MochiTransformerBlock", "AsymmetricJointBlock"),
    why="Mochi 1 as Genmo has it, for MochiTransformer3DModel of diffusers",
    url=f"{_SCRIPTS}/convert_mochi_to_diffusers.py",
)

RECORDS = (
    _SINGLE_FILE,
    _FLUX,
    _sd3(24),  # medium
    _sd3(38),  # 3.5 large
    _MOCHI,
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of diffusion transformers."""
    return RECORDS
