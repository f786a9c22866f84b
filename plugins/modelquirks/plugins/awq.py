"""AWQ: ``qweight``, ``qzeros`` and ``scales`` of one Linear, in two layouts.

* gemm: ``qweight`` I32 ``[in, out/8]``, ``qzeros`` I32 ``[groups, out/8]``, ``scales``
  ``[groups, out]``: packed along the *outputs*, 4 bits a value, the eight of a word in the order
  0, 2, 4, 6, 1, 3, 5, 7 (GPTQModel also writes 2 to 8 bits, then in plain order).
* gemv: ``qweight`` I32 ``[out, in/8]``, ``qzeros`` and ``scales`` ``[out, groups]``, packed and
  padded: along the *inputs*, in plain order.

The plain weight is ``[out, in]``: ``(code - zero) * scale``. Headers tell all of gemm, which is
what a checkpoint without config.json is taken for; that it is gemv, and then the group size, is in
config.json alone. Sources: AutoAWQ 0.2.9, ``utils/packing_utils.py`` (``dequantize_gemm``), whose
float16 results are reproduced to the bit, ``modules/linear/gemm.py`` and ``gemv.py``; GPTQModel
7.7, ``quantization/awq/utils/packing_utils.py`` (``pack_awq``). Modules left out
(``modules_to_not_convert``) are stored as plain ``weight`` and never looked for here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from modelquirks.plugins.affine import columns, grouped
from modelquirks.plugins.bitstream import WORD, block, unpack, words_for
from modelquirks.plugins.declared import declared, number, text
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks, Pack

if TYPE_CHECKING:
    import torch

__all__ = ["RECORDS", "Awq", "modelquirks_records", "modelquirks_schemes"]

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output the code at each place of a word belongs to (gemm, 4 bits)."""
_GEMM = ("", "gemm", "exllama", "marlin", "ipex", "gptq")
"""Versions whose files have this layout: all but the first two repack while loading."""
_GEMV = "gemv"
_FLOATS = ("F16", "BF16", "F32")


class Awq(Scheme):
    """Reads ``qweight``, ``qzeros`` and ``scales`` in the gemm or the gemv layout."""

    name: str = "awq"
    roles: tuple[str, ...] = ("qweight", "qzeros", "scales")

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return bits, gemv (or else gemm) and group_size, 0 if config.json does not tell it.

        RecipeError for a layout that is neither.
        """
        said = declared(config, "quantization_config")
        version = text(said, "version", "format", "checkpoint_format")
        if version not in (*_GEMM, _GEMV):
            raise RecipeError(
                f"{weight!r} is stored in AWQ's layout {version!r} by config.json, interleaved "
                "for one kernel: only 'gemm' and 'gemv' are made plain, so take the checkpoint in "
                "one of these"
            )
        return awq_settings(said, weight, gemv=version == _GEMV)

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return ``[out, in]`` in the dtype of the scales; RecipeError if parts do not fit."""
        layout = _layout(parts, settings)
        return TensorType(parts["scales"].dtype, (layout.n_out, layout.n_in))

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the words and groups that *region* touches; whole groups, to tell their size."""
        layout, bits = _layout(parts, settings), int(settings["bits"])
        outputs, (start, stop) = region
        size = layout.size
        groups = (start // size, -(-stop // size))
        inputs = (groups[0] * size, groups[1] * size)
        if settings["gemv"]:
            words = words_for(*inputs, bits, layout.n_words)
            zeros = words_for(*groups, bits, layout.n_zeros)
            return {
                "qweight": (outputs, words),
                "qzeros": (outputs, zeros),
                "scales": (outputs, groups),
            }
        words = words_for(*outputs, bits, layout.n_words)
        return {"qweight": (inputs, words), "qzeros": (groups, words), "scales": (groups, outputs)}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype*, rounded once."""
        made = _gemv if settings["gemv"] else _gemm
        return made(parts, region, dtype, settings)


def awq_settings(said: Mapping[str, Any], weight: str, *, gemv: bool = False) -> Settings:
    """Return the settings of a weight in one of these layouts; RecipeError if it has none."""
    bits, size = number(said, "bits", "w_bit") or 4, number(said, "group_size", "q_group_size")
    if not 2 <= bits <= 8 or (gemv and bits != 4):
        raise RecipeError(f"{weight!r} has {bits} bits by config.json: AWQ has 2 to 8, as gemv 4")
    if gemv and not size:
        raise RecipeError(
            f"quantization_config of config.json does not say how many inputs of {weight!r} share "
            "a scale, which its padded shapes do not tell: add 'group_size' there"
        )
    return {"bits": bits, "group_size": size or 0, "gemv": gemv}


class _Layout(NamedTuple):
    n_in: int
    n_out: int
    n_words: int
    """Words of qweight along the packed dimension."""
    n_zeros: int
    """Words of qzeros along theirs."""
    size: int
    """Inputs of a group."""


def _layout(parts: Mapping[str, TensorType], settings: Settings) -> _Layout:
    shapes = {role: kind.shape or () for role, kind in parts.items()}
    faults = [f"{role} must be I32" for role in ("qweight", "qzeros") if parts[role].dtype != "I32"]
    if parts["scales"].dtype not in _FLOATS:
        faults.append("scales must be F16, BF16 or F32")
    if any(len(shape) != 2 for shape in shapes.values()):
        raise _unfit(parts, [*faults, "all must have two dimensions"])
    made = _gemv_layout if settings["gemv"] else _gemm_layout
    layout, more = made(shapes, settings)
    if faults or more:
        raise _unfit(parts, [*faults, *more])
    return layout


_Shapes = Mapping[str, tuple[int, ...]]


def _gemm_layout(shapes: _Shapes, settings: Settings) -> tuple[_Layout, list[str]]:
    bits, told = int(settings["bits"]), int(settings["group_size"])
    (n_in, n_words), (n_groups, n_out) = shapes["qweight"], shapes["scales"]
    size = n_in // max(1, n_groups)
    faults: list[str] = []
    if n_words != -(-n_out * bits // WORD):
        faults.append(f"{n_out} outputs of {bits} bits must be {-(-n_out * bits // WORD)} words")
    if shapes["qzeros"] != (n_groups, n_words):
        faults.append(f"qzeros must be {[n_groups, n_words]}")
    if size < 1 or size * n_groups != n_in or told not in (0, -1, size):
        faults.append(f"{n_in} inputs are not {n_groups} groups" + (f" of {told}" if told else ""))
    return _Layout(n_in, n_out, n_words, n_words, size), faults


def _gemv_layout(shapes: _Shapes, settings: Settings) -> tuple[_Layout, list[str]]:
    bits, size = int(settings["bits"]), int(settings["group_size"])
    (n_out, n_words), n_zeros = shapes["qweight"], shapes["qzeros"][1]
    n_in = n_words * WORD // bits
    size = n_in if size == -1 else size
    n_groups = -(-n_in // size)
    faults: list[str] = []
    if n_in % size or size % (WORD // bits):
        faults.append(f"{n_in} inputs are not groups of {size}, whole words each")
    if shapes["qzeros"][0] != n_out or shapes["scales"] != (n_out, n_zeros * WORD // bits):
        faults.append(f"qzeros must be [{n_out}, n], scales [{n_out}, {WORD // bits}n]")
    if n_groups > shapes["scales"][1]:
        faults.append(f"{n_in} inputs in groups of {size} are more than there are scales")
    return _Layout(n_in, n_out, n_words, n_zeros, size), faults


def _unfit(parts: Mapping[str, TensorType], faults: Iterable[str]) -> RecipeError:
    found = ", ".join(f"{role} {kind}" for role, kind in parts.items())
    return RecipeError(
        f"not an AWQ weight as config.json says: {found}; {'; '.join(faults)} (GPTQ without g_idx "
        "has the same names: then config.json must say quant_method 'gptq')"
    )


def _gemm(
    parts: Mapping[str, torch.Tensor], region: Region, dtype: torch.dtype, settings: Settings
) -> torch.Tensor:
    import torch

    bits, (first, last), (start, stop) = int(settings["bits"]), *region
    qweight, scales = parts["qweight"], parts["scales"]
    size = qweight.shape[0] // scales.shape[0]
    per_block = block(bits).codes
    outputs = slice(first % per_block, first % per_block + last - first)
    order = _ORDER if bits == 4 else None
    ahead = start % size
    group = torch.arange(ahead, ahead + stop - start, device=scales.device) // size

    def codes(a: int, b: int) -> torch.Tensor:
        return unpack(qweight[ahead + a : ahead + b], bits, 1, order)[:, outputs]

    zeros = unpack(parts["qzeros"], bits, 1, order)[:, outputs]
    return columns(codes, group, scales, zeros, dtype, 1)


def _gemv(
    parts: Mapping[str, torch.Tensor], region: Region, dtype: torch.dtype, settings: Settings
) -> torch.Tensor:
    bits, (start, stop) = int(settings["bits"]), region[1]
    qweight, scales = parts["qweight"], parts["scales"]
    n_groups = scales.shape[1]
    size = qweight.shape[1] * WORD // bits // n_groups
    before = start // size % block(bits).codes
    zeros = unpack(parts["qzeros"], bits, 1)[:, before : before + n_groups]

    def codes(a: int, b: int) -> torch.Tensor:
        return unpack(qweight[a:b], bits, 1)

    made = grouped(codes, scales, dtype, zeros=zeros, size=size)
    return made[:, start % size : start % size + stop - start]


def _linear(scheme: str, required: str, optional: str = "") -> Pack:
    def named(names: str) -> tuple[tuple[str, str], ...]:
        return tuple((name, f"**.{name}") for name in names.split())

    return Pack(scheme, "**.weight", named(required), named(optional))


RECORDS = (
    ModelQuirks(
        name="packed.awq",
        role="quantization",
        match=Match(all_of=("**.qweight", "**.qzeros"), none_of=("**.g_idx",)),
        packs=(_linear("awq", "qweight qzeros scales"),),
        why="AWQ: qweight, qzeros and scales without g_idx, packed along the output dimension",
        url="https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the record of AWQ."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the scheme of AWQ."""
    return (Awq(),)
