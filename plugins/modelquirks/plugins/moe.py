"""Experts stored one by one, for modules that hold them stacked.

transformers 5 keeps the experts of a layer in two parameters without ``.weight``: ``gate_up_proj``
``[E, 2I, H]``, all gates before all ups, and ``down_proj`` ``[E, H, I]``. Checkpoints hold a matrix
per expert, in the naming of Mixtral (``w1``, ``w3``, ``w2``) or of Qwen and DeepSeek
(``gate_proj``, ``up_proj``, ``down_proj``). A module that has an expert per submodule finds its own
names, or takes its experts out of a stacked checkpoint; a gap in the numbering of the experts, and
a stack of which some would be lost, are errors.

The rules go by names, not by model types: dozens of families share each naming, and a conversion
makes only what the model asks for. Families with another layout have a more specific record
(``gpt_oss``, ``moe.llama4``).
"""

from __future__ import annotations

from collections.abc import Iterable

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Chunk, Concat, Node, Select, Source, Stack, Transpose
from modelquirks.quirks.record import Alias, Convert, Match, ModelQuirks, Tie

__all__ = ["RECORDS", "modelquirks_records"]

_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers"
_CONVERSIONS = f"{_TRANSFORMERS}/conversion_mapping.py"
_TIES = (Tie(("model.embed_tokens.weight", "lm_head.weight")),)


def _stacked(
    gate: str, up: str, down: str, *, experts: str = "**.experts", transposed: bool = False
) -> tuple[Convert, ...]:
    """Return conversions of the three matrices of each expert to two stacked parameters."""

    def stack(matrix: Node) -> Stack:
        return Stack(Transpose(matrix) if transposed else matrix, "expert")

    def of(name: str) -> Source:
        return Source(f"{experts}.{{expert}}.{name}.weight")

    return (
        Convert(f"{experts}.gate_up_proj", stack(Concat((of(gate), of(up)), 0))),
        Convert(f"{experts}.down_proj", stack(of(down))),
    )


_GATE_UP = Select(Source("**.mlp.experts.gate_up_proj"), "{expert}")
_SINGLE: tuple[Node, ...] = (
    Chunk(_GATE_UP, 0, 2, 0),
    Chunk(_GATE_UP, 0, 2, 1),
    Select(Source("**.mlp.experts.down_proj"), "{expert}"),
)
"""Gate, up and down of one expert."""

_MIXTRAL = ModelQuirks(
    name="moe.mixtral",
    role="architecture",
    match=Match(all_of=("**.experts.{expert}.w1.*", "**.experts.{expert}.w3.*")),
    aliases=(Alias("**.block_sparse_moe.**", "**.mlp.**"),),
    conversions=(
        *_stacked("w1", "w3", "w2"),
        Convert("**.mlp.router.weight", Source("**.mlp.gate.weight")),  # Phi-3.5-MoE
    ),
    ties=_TIES,
    why=(
        "Mixtral, MiniMax, Phi-3.5-MoE and LFM2-MoE store experts as w1 (gate), w3 (up) and w2 "
        "(down), most of them under block_sparse_moe"
    ),
    url=_CONVERSIONS,
)

_QWEN = ModelQuirks(
    name="moe.qwen",
    role="architecture",
    match=Match(
        all_of=("**.experts.{expert}.gate_proj.*", "**.experts.{expert}.up_proj.*"),
        none_of=("**.experts.{expert}.w1.*",),
    ),
    conversions=(
        *_stacked("gate_proj", "up_proj", "down_proj"),
        Convert(  # ERNIE 4.5
            "**.mlp.gate.moe_statics.e_score_correction_bias",
            Source("**.mlp.moe_statics.e_score_correction_bias"),
        ),
    ),
    ties=_TIES,
    why=(
        "Qwen, DeepSeek, GLM, OLMoE, Jamba, ERNIE and many others store experts as gate_proj, "
        "up_proj and down_proj"
    ),
    url=_CONVERSIONS,
)

_STACKED = ModelQuirks(
    name="moe.stacked",
    role="architecture",
    match=Match(
        all_of=("**.mlp.experts.gate_up_proj", "**.mlp.experts.down_proj"),
        none_of=("**.mlp.experts.gate_up_proj_bias",),
    ),
    conversions=tuple(
        Convert(f"**.{experts}.{{expert}}.{name}.weight", node)
        for experts, names in (
            ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
            ("block_sparse_moe.experts", ("w1", "w3", "w2")),
        )
        for name, node in zip(names, _SINGLE, strict=True)
    ),
    ties=_TIES,
    why="a module with a submodule per expert takes them one by one out of the stacked parameters",
    url=_CONVERSIONS,
)

_GRANITE = ModelQuirks(
    name="moe.granite",
    role="architecture",
    match=Match(any_of=("**.block_sparse_moe.input_linear.weight",)),
    aliases=tuple(
        Alias(f"**.block_sparse_moe.{stored}.weight", f"**.block_sparse_moe.{model}")
        for stored, model in (
            ("input_linear", "experts.gate_up_proj"),
            ("output_linear", "experts.down_proj"),
            ("router.layer", "router.weight"),
        )
    ),
    ties=_TIES,
    why="Granite MoE stores stacked experts under the names of its former modules",
    url=_CONVERSIONS,
)

_LLAMA4 = ModelQuirks(
    name="moe.llama4",
    role="architecture",
    match=Match(
        model_types=("llama4", "llama4_text"),
        any_of=("**.feed_forward.experts.{expert}.gate_proj.*",),
    ),
    conversions=_stacked(
        "gate_proj", "up_proj", "down_proj", experts="**.feed_forward.experts", transposed=True
    ),
    ties=_TIES,
    no_split=("Llama4TextDecoderLayer",),
    why=(
        "Llama 4 multiplies from the other side: its stacked experts are [E, H, 2I] and [E, I, H], "
        "the transpose of the matrices that llm-compressor writes one by one"
    ),
    url=f"{_TRANSFORMERS}/quantizers/base.py",
)

_QWEN3_VL = ModelQuirks(
    name="moe.qwen3_vl",
    role="architecture",
    match=Match(
        architectures=("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeModel"),
        model_types=("qwen3_vl_moe",),
        any_of=("**.mlp.experts.gate_up_proj",),
    ),
    conversions=tuple(
        Convert(name, Transpose(Source(name), 1, 2), either=True)
        for name in ("**.mlp.experts.gate_up_proj", "**.mlp.experts.down_proj")
    ),
    ties=_TIES,
    why=(
        "Qwen3-VL-MoE was released with stacked experts of [E, H, 2I] and [E, I, H], the transpose "
        "of what transformers 5 computes with and saves, under the same names"
    ),
    url=_CONVERSIONS,
)

RECORDS = (_MIXTRAL, _QWEN, _STACKED, _GRANITE, _LLAMA4, _QWEN3_VL)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of experts stored one by one."""
    return RECORDS
