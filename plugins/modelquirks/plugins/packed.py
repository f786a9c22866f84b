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

from modelquirks.plugins.packrecords import TRANSFORMERS as _TRANSFORMERS
from modelquirks.plugins.packrecords import linear as _linear
from modelquirks.plugins.packrecords import pack_record as _record
from modelquirks.plugins.packrecords import roles as _parts
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.record import Match, ModelQuirks, Pack

__all__ = ["RECORDS", "modelquirks_records"]

_FP_QUANT = (
    _record(
        "fp_quant",
        Match(quant_methods=("fp_quant",), any_of=("**.qweight",)),
        _linear(
            "fp_quant",
            "qweight scales",
            "weight_global_scale act_global_scale forward_hadamard_matrix backward_hadamard_matrix",
        ),
        not_on=("disk",),
        why="FP-Quant: 4-bit floats in qweight with a scale per 16 or 32 values",
        url=f"{_TRANSFORMERS}/integrations/fp_quant.py",
    ),
)

_SCALED = (
    _record(
        "bitnet",
        Match(quant_methods=("bitnet",), any_of=("**.weight_scale",)),
        _linear("bitnet", "weight weight_scale"),
        overrides=("scaled",),
        not_on=("disk",),
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
)

_HIGGS = (
    _record(
        "higgs",
        Match(all_of=("**.weight", "**.scales", "**.tables", "**.tables2")),
        _linear("higgs", "weight scales tables tables2"),
        not_on=("cpu", "disk"),
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
        not_on=("cpu", "disk"),
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
        not_on=("disk",),
        why="optimum-quanto: the inner tensors of its weights",
        url="https://github.com/huggingface/optimum-quanto",
    ),
)

RECORDS = (
    *_FP_QUANT,
    *_SCALED,
    *_HIGGS,
    *_CODEBOOKS,
    *_LIBRARIES,
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return one record per packed format."""
    return RECORDS
