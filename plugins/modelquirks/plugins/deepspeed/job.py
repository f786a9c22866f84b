"""``Job``: how a training is going to be run, from ``--expect`` or from DeepSpeed's config.

Source of the keys: ``runtime/constants.py``, ``runtime/zero/config.py`` and
``runtime/tensor_parallel/config.py`` of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from modelquirks.plugins.deepspeed.saved import mapping

__all__ = ["DTYPES", "Job", "alignment_of", "job_of"]

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "f32", "float"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "f16", "half"), "fp16"),
}
_STAGES = ("0", "1", "2", "3")
_NUMBERS = ("dp", "tp", "pp", "ep")
_CONFIG = ("zero_optimization", "bf16", "bfloat16", "fp16", "tensor_parallel", "checkpoint")


class Job(NamedTuple):
    """What is known of it; None: not said."""

    stage: str | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    dtype: str | None = None
    universal: bool | None = None
    """Whether it is told to load a universal checkpoint."""
    alignment: Any = None
    """``parameter_alignment``: False, True or a number of bytes."""


def job_of(expect: Mapping[str, Any]) -> tuple[Job, tuple[str, ...]]:
    """Return the job that *expect* describes, and what in it means nothing.

    Either ``zero_stage``, ``dp``, ``tp``, ``pp``, ``ep`` and ``dtype``, or DeepSpeed's config, of
    which ``"auto"`` says nothing.

    >>> job_of({"zero_stage": "3", "dp": "8"})[0][:2]
    ('3', 8)
    >>> job_of({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})[0].dtype
    'bf16'
    """
    if any(key in expect for key in _CONFIG) or "train_micro_batch_size_per_gpu" in expect:
        return _of_config(expect), ()
    faults = tuple(_faults(expect))
    dp, tp, pp, ep = (_number(expect.get(key)) for key in _NUMBERS)
    stage = str(expect.get("zero_stage"))
    known = stage if stage in _STAGES else None
    return Job(known, dp, tp, pp, ep, DTYPES.get(str(expect.get("dtype")).lower())), faults


def _faults(expect: Mapping[str, Any]) -> Iterator[str]:
    for key, value in expect.items():
        if key == "zero_stage":
            fits, wanted = str(value) in _STAGES, "0, 1, 2 or 3"
        elif key == "dtype":
            fits, wanted = str(value).lower() in DTYPES, "fp32, bf16 or fp16"
        elif key in _NUMBERS:
            fits, wanted = _number(value) is not None, "a whole number from 1"
        else:
            fits, wanted = False, f"one of zero_stage, {', '.join(_NUMBERS)}, dtype"
        if not fits:
            yield f"'{key}={value}': expected {wanted}"


def _of_config(config: Mapping[str, Any]) -> Job:
    zero, slices = mapping(config.get("zero_optimization")), mapping(config.get("tensor_parallel"))
    tp = slices.get("autotp_size") or mapping(slices.get("tp")).get("tp_size")
    stage = str(zero.get("stage", 0))
    universal = mapping(config.get("checkpoint")).get("load_universal", False)
    return Job(
        stage=stage if stage in _STAGES else None,
        dp=_ranks(config),
        tp=_number(tp),
        dtype=_dtype(config),
        universal=universal if isinstance(universal, bool) else None,
        alignment=alignment_of(config),
    )


def alignment_of(config: Mapping[str, Any]) -> Any:
    """Return ``parameter_alignment`` of a config; None if it is not known yet."""
    value = mapping(config.get("zero_optimization")).get("parameter_alignment", False)
    return None if value == "auto" else value


def _dtype(config: Mapping[str, Any]) -> str | None:
    halves = {"bf16": config.get("bf16", config.get("bfloat16")), "fp16": config.get("fp16")}
    said = {name: mapping(part).get("enabled", False) for name, part in halves.items()}
    chosen = next((name for name, enabled in said.items() if enabled is True), None)
    return chosen or ("fp32" if not any(said.values()) else None)


def _ranks(config: Mapping[str, Any]) -> int | None:
    """Return the data-parallel ranks by the batch sizes, which DeepSpeed checks against them."""
    whole = _number(config.get("train_batch_size"))
    micro = _number(config.get("train_micro_batch_size_per_gpu"))
    steps = _number(config.get("gradient_accumulation_steps", 1))
    if whole is None or micro is None or steps is None or whole % (micro * steps):
        return None
    return whole // (micro * steps)


def _number(value: Any) -> int | None:
    """Return a whole number from 1, as such or as a text."""
    text = str(value)
    is_whole = not isinstance(value, bool) and text.isdecimal() and len(text) < 10
    return int(text) if is_whole and int(text) else None
