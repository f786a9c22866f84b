"""Packed weights: which companions make up one logical weight, by format.

One record per format. A format is told by the *set* of names in the checkpoint, never by one
suffix (``scales`` alone is GPTQ, AWQ, MLX, HIGGS or AQLM), so that it is recognised without a
config.json too; where names do not tell, ``quant_method`` does, and the record that knows it
overrides the one that only guesses. At most one of these records applies to a checkpoint that
was written by one tool.

Nothing here makes a plain weight: a format whose scheme no plugin implements is recognised and
counted, and refused where a plain weight is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.record import Expected, Match, ModelQuirks, Pack

__all__ = ["RECORDS", "modelquirks_records"]

_TRANSFORMERS = "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers"
_COMPRESSED_TENSORS = "https://github.com/vllm-project/compressed-tensors"
_KV_SCALES = tuple(
    Expected(f"**.{name}", "scale of a quantised KV cache, not of a weight")
    for name in ("k_scale", "v_scale", "q_scale", "prob_scale")
)


def _parts(names: str, base: str = "**") -> tuple[tuple[str, str], ...]:
    """Return (role, pattern) for each of *names*; the role is the name without its dots."""
    return tuple((name.replace(".", "_"), f"{base}.{name}") for name in names.split())


def _linear(scheme: str, parts: str, optional: str = "") -> Pack:
    """Return the pack of a ``Linear`` whose companions are siblings of its ``weight``."""
    return Pack(scheme, "**.weight", _parts(parts), _parts(optional))


def _experts(scheme: str, suffix: str, role: str) -> tuple[Pack, ...]:
    """Return the packs of stacked experts, parameters without ``.weight`` of their own."""
    names = ("**.experts.gate_up_proj", "**.experts.down_proj")
    return tuple(
        Pack(scheme, name, (("weight", name), (role, f"{name}_{suffix}"))) for name in names
    )


def _record(
    name: str,
    match: Match,
    *packs: Pack,
    why: str,
    url: str,
    overrides: Iterable[str] = (),
    extra: tuple[Expected, ...] = (),
) -> ModelQuirks:
    return ModelQuirks(
        name=f"packed.{name}",
        role="quantization",
        match=match,
        packs=packs,
        extra=extra,
        overrides=frozenset(f"packed.{other}" for other in overrides),
        why=why,
        url=url,
    )


_GPTQ = (
    _record(
        "gptq",
        Match(all_of=("**.qweight", "**.g_idx")),
        _linear("gptq", "qweight scales", "qzeros g_idx"),
        why="GPTQ: qweight, scales and qzeros of one Linear, with g_idx where columns are sorted",
        url="https://github.com/ModelCloud/GPTQModel",
    ),
    _record(
        "gptq_unsorted",
        Match(quant_methods=("gptq",), all_of=("**.qweight",), none_of=("**.g_idx",)),
        _linear("gptq", "qweight scales", "qzeros"),
        overrides=("awq",),
        why="GPTQ without g_idx has the names of AWQ; config.json says which it is",
        url="https://github.com/ModelCloud/GPTQModel",
    ),
    _record(
        "awq",
        Match(all_of=("**.qweight", "**.qzeros"), none_of=("**.g_idx",)),
        _linear("awq", "qweight qzeros scales"),
        why="AWQ: qweight, qzeros and scales without g_idx, packed along the output dimension",
        url="https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py",
    ),
    _record(
        "auto_round",
        Match(
            quant_methods=("auto-round", "auto_round", "intel/auto-round"), all_of=("**.qweight",)
        ),
        _linear("auto_round", "qweight scales", "qzeros g_idx"),
        overrides=("gptq", "awq"),
        why="AutoRound packs like GPTQ or like AWQ; its packing_format in config.json says which",
        url="https://github.com/intel/auto-round",
    ),
    _record(
        "fp_quant",
        Match(quant_methods=("fp_quant",), any_of=("**.qweight",)),
        _linear(
            "fp_quant",
            "qweight scales",
            "weight_global_scale act_global_scale forward_hadamard_matrix backward_hadamard_matrix",
        ),
        why="FP-Quant: 4-bit floats in qweight with a scale per 16 or 32 values",
        url=f"{_TRANSFORMERS}/integrations/fp_quant.py",
    ),
)

_BITSANDBYTES = (
    *(
        _record(
            f"bitsandbytes_{kind}",
            Match(any_of=(f"**.weight.quant_state.bitsandbytes__{kind}",)),
            Pack(
                f"bnb_{kind}",
                "**.weight",
                (
                    *_parts("weight"),
                    *_parts("absmax quant_map", "**.weight"),
                    ("quant_state", f"**.weight.quant_state.bitsandbytes__{kind}"),
                ),
                _parts("nested_absmax nested_quant_map", "**.weight"),
            ),
            why=(
                "bitsandbytes: two 4-bit values a byte in one column; the shape of the weight is "
                "inside the JSON of quant_state"
            ),
            url=f"{_TRANSFORMERS}/quantizers/quantizer_bnb_4bit.py",
        )
        for kind in ("nf4", "fp4")
    ),
    _record(
        "bitsandbytes_8bit",
        Match(any_of=("**.SCB",)),
        _linear("bnb_int8", "weight SCB", "weight_format"),
        why="bitsandbytes LLM.int8(): weight in int8, SCB the absolute maximum of each row",
        url=f"{_TRANSFORMERS}/quantizers/quantizer_bnb_8bit.py",
    ),
)

_COMPRESSED = (
    _record(
        "compressed_tensors",
        Match(all_of=("**.weight_packed", "**.weight_shape")),
        _linear(
            "ct_pack_quantized",
            "weight_packed weight_scale weight_shape",
            "weight_zero_point weight_g_idx input_scale input_zero_point output_scale",
        ),
        extra=_KV_SCALES,
        why=(
            "compressed-tensors, pack-quantized: integers of 2 to 8 bits in int32 words; "
            "weight_shape holds the shape as values"
        ),
        url=_COMPRESSED_TENSORS,
    ),
    _record(
        "compressed_tensors_nvfp4",
        Match(all_of=("**.weight_packed", "**.weight_global_scale")),
        _linear("ct_nvfp4", "weight_packed weight_scale weight_global_scale", "input_global_scale"),
        extra=_KV_SCALES,
        why=(
            "compressed-tensors, nvfp4-pack-quantized: two 4-bit floats a byte, an F8 scale per "
            "16 values and one scale of all"
        ),
        url=_COMPRESSED_TENSORS,
    ),
    _record(
        "compressed_tensors_mxfp4",
        Match(
            all_of=("**.weight_packed", "**.weight_scale"),
            none_of=("**.weight_shape", "**.weight_global_scale"),
        ),
        _linear("ct_mxfp4", "weight_packed weight_scale"),
        extra=_KV_SCALES,
        why=(
            "compressed-tensors, mxfp4-pack-quantized: two 4-bit floats a byte and an E8M0 scale "
            "per 32 values"
        ),
        url=_COMPRESSED_TENSORS,
    ),
)

_FP8 = (
    _record(
        "fp8_block",
        Match(any_of=("**.weight_scale_inv", "**.experts.gate_up_proj_scale_inv")),
        _linear("fp8_block", "weight weight_scale_inv", "activation_scale input_scale"),
        *_experts("fp8_block", "scale_inv", "weight_scale_inv"),
        extra=_KV_SCALES,
        why=(
            "fine-grained FP8 of DeepSeek, Qwen and MiniMax: weight_scale_inv multiplies blocks "
            "of 128 by 128 values"
        ),
        url="https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md",
    ),
    _record(
        "mistral_fp8",
        Match(any_of=("**.qscale_weight",)),
        Pack(
            "fp8_block",
            "**.weight",
            (*_parts("weight"), ("weight_scale_inv", "**.qscale_weight")),
            (("activation_scale", "**.qscale_act"),),
        ),
        why="Mistral's own FP8 checkpoints call the scale of a weight qscale_weight",
        url=f"{_TRANSFORMERS}/quantizers/quantizer_finegrained_fp8.py",
    ),
    _record(
        "modelopt",
        Match(any_of=("**.weight_scale_2",)),
        # Optional: the same checkpoint may keep some layers in plain FP8.
        _linear("modelopt", "weight weight_scale", "weight_scale_2 input_scale"),
        extra=_KV_SCALES,
        why=(
            "NVFP4 of NVIDIA ModelOpt: two 4-bit floats a byte in weight, an F8 scale per 16 "
            "values and weight_scale_2 over all; without the latter it is FP8"
        ),
        url="https://github.com/huggingface/transformers/issues/46772",
    ),
)

_SCALED = (
    _record(
        "scaled",
        Match(
            any_of=("**.weight_scale", "**.experts.gate_up_proj_scale"),
            none_of=(
                "**.weight_packed",
                "**.weight_scale_2",
                "**.weight_scale_inv",
                "**.centroids.weight",
            ),
        ),
        _linear(
            "scaled",
            "weight weight_scale",
            "weight_zero_point input_scale input_zero_point output_scale",
        ),
        *_experts("scaled", "scale", "weight_scale"),
        extra=_KV_SCALES,
        why=(
            "F8 or int8 values times weight_scale, one for all, per row or per group: FBGEMM, "
            "compressed-tensors (float- and int-quantized) and ModelOpt FP8"
        ),
        url=f"{_TRANSFORMERS}/quantizers/quantizer_fbgemm_fp8.py",
    ),
    _record(
        "quark",
        Match(quant_methods=("quark",), any_of=("**.weight_scale",)),
        _linear(
            "quark",
            "weight weight_scale",
            "weight_zero_point input_scale input_zero_point output_scale output_zero_point "
            "bias_scale bias_zero_point",
        ),
        overrides=("scaled",),
        extra=_KV_SCALES,
        why="AMD Quark: what weight holds is told by its export in config.json",
        url=f"{_TRANSFORMERS}/quantizers/quantizer_quark.py",
    ),
    _record(
        "bitnet",
        Match(quant_methods=("bitnet",), any_of=("**.weight_scale",)),
        _linear("bitnet", "weight weight_scale"),
        overrides=("scaled",),
        why="BitNet: four ternary values a byte, packed along the output dimension, one scale",
        url=f"{_TRANSFORMERS}/integrations/bitnet.py",
    ),
    _record(
        "gemma",
        Match(quant_methods=("gemma",), any_of=("**.weight_scale",)),
        _linear("gemma", "weight weight_scale", "input_activation_scale output_activation_scale"),
        overrides=("scaled",),
        why="quantisation-aware Gemma: 2, 4 or 8 bits a value, as many in a byte, one scale a row",
        url=f"{_TRANSFORMERS}/integrations/gemma_quant.py",
    ),
    _record(
        "chatglm",
        Match(model_types=("chatglm",), any_of=("**.weight_scale",)),
        _linear("chatglm", "weight weight_scale"),
        overrides=("scaled",),
        why="ChatGLM quantised by its own code: 4 (two a byte) or 8 bits a value, one scale a row",
        url="https://github.com/zai-org/ChatGLM-6B",
    ),
    _record(
        "eetq",
        Match(any_of=("**.weight_scales",)),
        _linear("eetq", "weight weight_scales"),
        why="EETQ: weight in int8, transposed, with a scale per output",
        url=f"{_TRANSFORMERS}/integrations/eetq.py",
    ),
)

_GROUPED = (
    _record(
        "mlx",
        Match(all_of=("**.weight", "**.scales", "**.biases"), none_of=("**.qweight",)),
        # The mx modes of MLX have no biases; one checkpoint may use both.
        _linear("mlx", "weight scales", "biases"),
        why=(
            "MLX: weight in uint32 words under its usual name, scales and biases per group; "
            "'biases' are the zero points, 'bias' is the bias"
        ),
        url="https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html",
    ),
    _record(
        "metal",
        Match(all_of=("**.weight", "**.scales", "**.qbiases")),
        _linear("metal", "weight scales qbiases"),
        why="the Metal format of transformers: as MLX, with qbiases for the zero points",
        url=f"{_TRANSFORMERS}/integrations/metal_quantization.py",
    ),
    _record(
        "higgs",
        Match(all_of=("**.weight", "**.scales", "**.tables", "**.tables2")),
        _linear("higgs", "weight scales tables tables2"),
        why="HIGGS: codes in weight, with scales and lookup tables",
        url=f"{_TRANSFORMERS}/integrations/higgs.py",
    ),
)

_CODEBOOKS = (
    _record(
        "aqlm",
        Match(all_of=("**.codes", "**.codebooks")),
        _linear("aqlm", "codes codebooks scales"),
        why="AQLM: sums of codebook entries, with a scale per output",
        url="https://github.com/Vahe1994/AQLM",
    ),
    _record(
        "vptq",
        Match(all_of=("**.indices", "**.centroids.weight")),
        _linear(
            "vptq",
            "indices centroids.weight",
            "res_indices res_centroids.weight outlier_indices outlier_centroids.weight perm "
            "weight_scale weight_bias",
        ),
        why="VPTQ: indices into centroids; shapes are in config.json",
        url="https://github.com/microsoft/VPTQ",
    ),
    _record(
        "spqr",
        Match(all_of=("**.dense_weights", "**.row_offsets", "**.col_vals")),
        _linear("spqr", "dense_weights row_offsets col_vals", "in_perm"),
        why="SpQR: dense groups and sparse outliers; shapes are in config.json",
        url="https://github.com/Vahe1994/SpQR",
    ),
)

_LIBRARIES = (
    _record(
        "hqq",
        Match(all_of=("**.W_q", "**.scale", "**.zero")),
        _linear(
            "hqq",
            "W_q scale zero",
            "nbits group_size shape axis packing unpack_view_dtype view_as_float quant_scale "
            "quant_zero compute_dtype offload_meta encoded_state_dict stores_quant_config "
            "channel_wise optimize round_zero",
        ),
        why="HQQ: W_q with scale and zero; bits, group size and shape are tensors beside it",
        url="https://github.com/mobiusml/hqq/blob/master/hqq/core/quantize.py",
    ),
    _record(
        "sinq",
        Match(all_of=("**.W_q", "**.meta")),
        _linear("sinq", "W_q meta"),
        why="SINQ: W_q with everything else in meta",
        url=f"{_TRANSFORMERS}/integrations/sinq.py",
    ),
    _record(
        "quanto",
        Match(any_of=("**.weight._data",)),
        Pack(
            "quanto",
            "**.weight",
            (("data", "**.weight._data"), ("scale", "**.weight._scale")),
            (("shift", "**.weight._shift"), *_parts("input_scale output_scale")),
        ),
        why="optimum-quanto: the inner tensors of its weights",
        url="https://github.com/huggingface/optimum-quanto",
    ),
    _record(
        "torchao",
        Match(any_of=("**._weight_qdata",)),
        Pack(
            "torchao",
            "**.weight",
            (("qdata", "**._weight_qdata"),),
            tuple(
                (role, f"**._weight_{role}")
                for role in (
                    "scale",
                    "zero_point",
                    "scale_and_zero",
                    "per_tensor_scale",
                    "act_pre_scale",
                )
            ),
        ),
        why="torchao: the inner tensors of its weights; what they are is in the file's metadata",
        url=f"{_TRANSFORMERS}/quantizers/quantizer_torchao.py",
    ),
)

RECORDS = (
    *_GPTQ,
    *_BITSANDBYTES,
    *_COMPRESSED,
    *_FP8,
    *_SCALED,
    *_GROUPED,
    *_CODEBOOKS,
    *_LIBRARIES,
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return one record per packed format."""
    return RECORDS
