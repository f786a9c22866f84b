"""Llama, Mistral and Mixtral as their makers give them away: ``consolidated.*`` and params.json.

The names are those of Meta's own module (``layers.0.attention.wq.weight``). It turns neighbouring
rows of q and k against each other, transformers the two halves of a head, so that the rows of wq
and wk lie in another order; for a module with Meta's names nothing is to be done. Larger Llamas are
cut for tensor parallelism, a file a rank: the parts of each tensor are stored as ``NAME/RANK`` (see
:mod:`modelquirks.planner.checkpoint.ranks`), and are rows, columns or, of norms, copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import (
    Concat,
    Join,
    Node,
    Permute,
    Source,
    Stack,
    Transpose,
    View,
)
from modelquirks.quirks.record import Alias, Convert, Expected, Match, ModelQuirks, Tie

__all__ = ["RECORDS", "half_split", "modelquirks_records"]

_MODELS = "https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models"
_LAYER, _HF_LAYER = "layers.{layer}", "model.layers.{layer}"
_QUERY, _KEY = f"{_LAYER}.attention.wq.weight", f"{_LAYER}.attention.wk.weight"
_EMBEDDING, _HF_EMBEDDING = "tok_embeddings.weight", "model.embed_tokens.weight"
_TIES = (
    Tie((_HF_EMBEDDING, "lm_head.weight")),
    Tie((_EMBEDDING, "output.weight")),
)
_NO_SPLIT = ("LlamaDecoderLayer", "MistralDecoderLayer", "MixtralDecoderLayer", "TransformerBlock")

_HEADS = {_QUERY: "num_attention_heads", _KEY: "num_key_value_heads"}
"""Rows in another order than transformers has them, and the number of heads that they are."""
_NORMS = {
    f"{_LAYER}.attention_norm.weight": f"{_HF_LAYER}.input_layernorm.weight",
    f"{_LAYER}.ffn_norm.weight": f"{_HF_LAYER}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
}
_ATTENTION = {
    _QUERY: f"{_HF_LAYER}.self_attn.q_proj.weight",
    _KEY: f"{_HF_LAYER}.self_attn.k_proj.weight",
    f"{_LAYER}.attention.wv.weight": f"{_HF_LAYER}.self_attn.v_proj.weight",
    f"{_LAYER}.attention.wo.weight": f"{_HF_LAYER}.self_attn.o_proj.weight",
}
_MLP = {
    f"{_LAYER}.feed_forward.w1.weight": f"{_HF_LAYER}.mlp.gate_proj.weight",
    f"{_LAYER}.feed_forward.w2.weight": f"{_HF_LAYER}.mlp.down_proj.weight",
    f"{_LAYER}.feed_forward.w3.weight": f"{_HF_LAYER}.mlp.up_proj.weight",
}
_ENDS = {_EMBEDDING: _HF_EMBEDDING, "output.weight": "lm_head.weight"}
_COLUMNS = (f"{_LAYER}.attention.wo.weight", f"{_LAYER}.feed_forward.w2.weight")
"""Of these a rank has columns, of all other matrices rows."""
_FREQUENCIES = "rope.freqs"
_FREQUENCIES_WHY = "the frequencies of the rotary embedding follow from the config"


def half_split(rows: Node, heads: str, *, bias: bool = False) -> Node:
    """Return *rows* (or a *bias*) with the even rows of each head before its odd ones."""
    rest = () if bias else ("hidden_size",)
    pairs = View(rows, (heads, -1, 2, *rest))
    return View(Permute(pairs, (0, 2, 1, 3)[: 3 + len(rest)]), (-1, *rest))


def _aliases(*tables: dict[str, str]) -> tuple[Alias, ...]:
    renames = ((old, new) for table in tables for old, new in table.items())
    return tuple(Alias(old, new) for old, new in renames if old not in _HEADS)


def _turned(source: Callable[[str], Node]) -> tuple[Convert, ...]:
    """Return the conversions of q and k to the order of transformers."""
    return tuple(
        Convert(_ATTENTION[name], half_split(source(name), heads)) for name, heads in _HEADS.items()
    )


_LLAMA = ModelQuirks(
    name="meta.llama",
    role="architecture",
    match=Match(all_of=(_QUERY, f"{_LAYER}.feed_forward.w1.weight", _EMBEDDING)),
    aliases=_aliases(_NORMS, _ATTENTION, _MLP, _ENDS),
    conversions=_turned(Source),
    ties=_TIES,
    extra=(Expected(_FREQUENCIES, _FREQUENCIES_WHY),),
    no_split=_NO_SPLIT,
    why=(
        "consolidated.00.pth of Llama and consolidated.safetensors of Mistral have the names of "
        "Meta's module, and the rows of q and k in the order of its rotary embedding"
    ),
    url=f"{_MODELS}/mistral/convert_mistral_weights_to_hf.py",
)


def _joined(name: str) -> Join:
    return Join(Source(f"{name}/{{rank}}"), "rank", 1 if name in _COLUMNS else 0)


def _from_ranks() -> Iterator[Convert]:
    """Yield how each tensor is put together, under Meta's name and that of transformers."""
    for name, other in {**_ATTENTION, **_MLP, "output.weight": "lm_head.weight"}.items():
        yield Convert(name, _joined(name))
        if name not in _HEADS:
            yield Convert(other, _joined(name))
    yield from _turned(_joined)
    for name, other in _NORMS.items():
        for target in (name, other):
            yield Convert(target, Source(f"{name}/0"))
    yield Convert(_FREQUENCIES, Source(f"{_FREQUENCIES}/0"))
    part = Source(f"{_EMBEDDING}/{{rank}}")
    for target in (_EMBEDDING, _HF_EMBEDDING):
        # A rank has rows since Llama 3 and columns before: the shape of the model's decides.
        yield Convert(target, Join(part, "rank", 0), either=True)
        yield Convert(target, Join(part, "rank", 1))


_RANKS = ModelQuirks(
    name="meta.llama_ranks",
    role="architecture",
    match=Match(
        all_of=(
            f"{_QUERY}/{{rank}}",
            f"{_LAYER}.feed_forward.w1.weight/{{rank}}",
            f"{_EMBEDDING}/{{rank}}",
        )
    ),
    conversions=tuple(_from_ranks()),
    ties=_TIES,
    extra=(
        *(Expected(f"{name}/{{rank}}", "every rank has a copy of the norms") for name in _NORMS),
        Expected(f"{_FREQUENCIES}/{{rank}}", _FREQUENCIES_WHY),
    ),
    no_split=_NO_SPLIT,
    why=(
        "Llama in several consolidated.NN.pth is cut for tensor parallelism: rows of most "
        "matrices, columns of wo and w2, and of the embedding columns (Llama 1 and 2) or rows "
        "(Llama 3); norms are copies"
    ),
    url=f"{_MODELS}/llama/convert_llama_weights_to_hf.py",
)

_MOE = f"{_HF_LAYER}.mlp"
_ROUTED = f"{_LAYER}.feed_forward.experts.{{expert}}"
_FLAT = f"{_LAYER}.block_sparse_moe"


def _by_expert(name: str) -> View:
    return View(Source(f"{_FLAT}.{name}"), ("num_local_experts", -1, "hidden_size"))


_EXPERTS = ModelQuirks(
    name="meta.mixtral",
    role="architecture",
    match=Match(all_of=(_QUERY, _EMBEDDING, f"{_ROUTED}.w1.weight")),
    aliases=(
        *_aliases(_NORMS, _ATTENTION, _ENDS),
        Alias(f"{_LAYER}.feed_forward.gate.weight", f"{_MOE}.gate.weight"),
    ),
    conversions=(
        *_turned(Source),
        Convert(
            f"{_MOE}.experts.gate_up_proj",
            Stack(
                Concat((Source(f"{_ROUTED}.w1.weight"), Source(f"{_ROUTED}.w3.weight"))), "expert"
            ),
        ),
        Convert(f"{_MOE}.experts.down_proj", Stack(Source(f"{_ROUTED}.w2.weight"), "expert")),
    ),
    ties=_TIES,
    no_split=_NO_SPLIT,
    overrides=frozenset({"moe.mixtral"}),
    why="Mixtral as Mistral's own inference code has it: experts one by one below feed_forward",
    url=(
        "https://github.com/mistralai/mistral-inference/blob/main/src/mistral_inference/"
        "transformer_layers.py"
    ),
)

_FLAT_EXPERTS = ModelQuirks(
    name="meta.mixtral_flat",
    role="architecture",
    match=Match(all_of=(_QUERY, _EMBEDDING, f"{_FLAT}.w1", f"{_FLAT}.w2", f"{_FLAT}.w3")),
    aliases=(
        *_aliases(_NORMS, _ATTENTION, _ENDS),
        Alias(f"{_FLAT}.gate.weight", f"{_MOE}.gate.weight"),
    ),
    conversions=(
        *_turned(Source),
        Convert(
            f"{_MOE}.experts.gate_up_proj", Concat((_by_expert("w1"), _by_expert("w3")), dim=1)
        ),
        Convert(f"{_MOE}.experts.down_proj", Transpose(_by_expert("w2"), 1, 2)),
    ),
    ties=_TIES,
    no_split=_NO_SPLIT,
    why=(
        "Mixtral 8x7B as first given away: the experts of a layer one below the other in three "
        "matrices, w2 transposed"
    ),
    url=f"{_MODELS}/mixtral/convert_mixtral_weights_to_hf.py",
)

RECORDS = (_LLAMA, _RANKS, _EXPERTS, _FLAT_EXPERTS)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of the layouts of Meta and Mistral."""
    return RECORDS
