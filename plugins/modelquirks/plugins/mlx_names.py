"""What mlx-lm changes, beside packing, when it saves a model that it took over from transformers.

Most names stay. Experts are stacked apart as ``switch_mlp.{gate,up,down}_proj``; of latent
attention ``kv_b_proj`` is parted by head into ``embed_q`` (transposed) and ``unembed_out``; and
one-dimensional convolutions have their channels last. The records undo this before those of the
architecture see the names, as for any wrapper. The codes of MLX are another plugin's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import Concat, Select, Source, Transpose, View
from modelquirks.quirks.record import Alias, Convert, Match, ModelQuirks

__all__ = ["RECORDS", "modelquirks_records"]

_MLX_LM = "https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models"
_SINGLE = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe": ("w1", "w3", "w2"),
    "feed_forward": ("w1", "w3", "w2"),
}
"""Gate, up and down in a model with a module per expert, by the parent of the experts."""


def _experts() -> Iterator[Convert]:
    for parent, names in _SINGLE.items():
        gate, up, down = (
            Source(f"**.{parent}.switch_mlp.{proj}_proj.weight") for proj in ("gate", "up", "down")
        )
        for target in dict.fromkeys((parent, "mlp")):
            yield Convert(f"**.{target}.experts.gate_up_proj", Concat((gate, up), 1))
            yield Convert(f"**.{target}.experts.down_proj", down)
        for name, matrix in zip(names, (gate, up, down), strict=True):
            one = Select(matrix, "{expert}")
            yield Convert(f"**.{parent}.experts.{{expert}}.{name}.weight", one)


_EXPERTS = ModelQuirks(
    name="mlx.experts",
    role="wrapper",
    match=Match(any_of=tuple(f"**.{parent}.switch_mlp.gate_proj.*" for parent in _SINGLE)),
    aliases=(Alias("**.block_sparse_moe.gate.*", "**.mlp.gate.*"),),
    conversions=tuple(_experts()),
    why="mlx-lm stacks the experts of a layer, gate and up apart, as switch_mlp",
    url=f"{_MLX_LM}/qwen3_moe.py",
)

_KV_B = Concat(
    (
        Transpose(Source("**.self_attn.embed_q.weight"), 1, 2),
        Source("**.self_attn.unembed_out.weight"),
    ),
    dim=1,
)
_LATENT = ModelQuirks(
    name="mlx.latent_attention",
    role="wrapper",
    match=Match(all_of=("**.self_attn.embed_q.*", "**.self_attn.unembed_out.*")),
    conversions=(Convert("**.self_attn.kv_b_proj.weight", View(_KV_B, (-1, "kv_lora_rank"))),),
    why=(
        "mlx-lm parts kv_b_proj of latent attention (DeepSeek, Mistral 4) by head into the matrix "
        "for the keys, transposed, and that for the values"
    ),
    url=f"{_MLX_LM}/deepseek_v3.py",
)

_CONVOLUTION = "**.conv1d.weight"
_CONV = ModelQuirks(
    name="mlx.conv1d",
    role="wrapper",
    # Nothing in a name tells that channels are last; the companions of MLX's packing do.
    match=Match(all_of=(_CONVOLUTION, "**.scales", "**.biases"), none_of=("**.qweight",)),
    conversions=(Convert(_CONVOLUTION, Transpose(Source(_CONVOLUTION), 1, 2), either=True),),
    why="MLX has the channels of a convolution last: [out, width, in] for torch's [out, in, width]",
    url=f"{_MLX_LM}/qwen3_next.py",
)

RECORDS = (_EXPERTS, _LATENT, _CONV)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of what mlx-lm renames and reshapes."""
    return RECORDS
