"""GPTQ: ``qweight``, ``scales``, ``qzeros`` and ``g_idx`` of one Linear.

* ``qweight`` I32 ``[in*bits/32, out]``, packed along the *inputs*; ``scales`` ``[groups, out]``;
  ``qzeros`` I32 ``[groups, out*bits/32]``, packed along the *outputs*, absent where all are the
  middle of the range; ``g_idx`` I32 ``[in]``, the group of each input, absent where inputs are in
  order. The plain weight is ``[out, in]``: ``(code - zero) * scale``.
* Bits, and whether zeros are stored less one (``checkpoint_format`` gptq, the default) or as they
  are (gptq_v2), are in config.json alone, and may differ by module (``dynamic``).

Sources: GPTQModel 7.7, ``nn_modules/qlinear/__init__.py`` (``dequantize_weight``) and
``utils/model.py`` (``convert_gptq_v1_to_v2_format_module``), whose float16 results are reproduced
to the bit. Modules left out are stored as plain ``weight`` and never looked for here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from modelquirks.plugins.affine import columns
from modelquirks.plugins.bitstream import WORD, block, unpack, words_for
from modelquirks.plugins.declared import declared, flag, module_of, number, required, text
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks, Pack

if TYPE_CHECKING:
    import torch

__all__ = ["RECORDS", "Gptq", "GptqMarlin", "modelquirks_records", "modelquirks_schemes"]

_BITS = (2, 3, 4, 8)
_LESS_ONE, _AS_THEY_ARE = ("gptq", ""), ("gptq_v2",)
"""Values of checkpoint_format by how zeros are stored; the first is what a missing one means."""
_FLOATS = ("F16", "BF16", "F32")


class Gptq(Scheme):
    """Reads ``qweight`` and ``scales``, with ``qzeros`` and ``g_idx`` where they are.

    All of ``scales`` and ``qzeros`` of the wanted outputs are read where there is a ``g_idx``:
    which groups are needed is known only after reading it.
    """

    name: str = "gptq"
    roles: tuple[str, ...] = ("qweight", "scales")

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return bits, group_size, desc_act, sym and v1 (zeros are stored less one).

        RecipeError if config.json does not tell the bits, or names a layout that is not this one.
        """
        said = declared(config, "quantization_config")
        own = _dynamic(said, weight)
        bits = required(number(own, "bits"), "bits", weight, "quantization_config of config.json")
        return gptq_settings(own, weight, bits, v1=_stored_less_one(said, weight))

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return ``[out, in]`` in the dtype of the scales; RecipeError if parts do not fit."""
        layout = _layout(parts, settings)
        return TensorType(parts["scales"].dtype, (layout.n_out, layout.n_in))

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the words and groups that *region* touches."""
        layout, bits = _layout(parts, settings), int(settings["bits"])
        outputs, inputs = region
        groups = (0, layout.n_groups)
        if "g_idx" not in parts:
            groups = (inputs[0] // layout.size, -(-inputs[1] // layout.size))
        needed: dict[str, Region] = {
            "qweight": (words_for(*inputs, bits, layout.n_words), outputs),
            "scales": (groups, outputs),
            "g_idx": (inputs,),
        }
        if zeros := parts.get("qzeros"):
            assert zeros.shape is not None
            needed["qzeros"] = (groups, words_for(*outputs, bits, zeros.shape[1]))
        return {role: needed[role] for role in parts}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype*, rounded once."""
        bits = int(settings["bits"])
        (first, last), (start, stop) = region
        step = block(bits).codes
        ahead = start % step  # codes before the region in its first block
        group = _groups_of(parts, ahead, start, stop, int(settings["group_size"]))

        def codes(a: int, b: int) -> torch.Tensor:
            words = parts["qweight"][slice(*words_for(a, b, bits, parts["qweight"].shape[0]))]
            return unpack(words, bits, 0)[: b - a]

        zeros = _zeros(parts, bits, first, last, v1=bool(settings["v1"]))
        return columns(codes, group, parts["scales"], zeros, dtype, step)[:, ahead:]


def gptq_settings(own: Mapping[str, Any], weight: str, bits: int, *, v1: bool) -> Settings:
    """Return the settings of a weight of *bits* in this layout; RecipeError if there is none."""
    if bits not in _BITS:
        raise RecipeError(
            f"{weight!r} has {bits} bits by config.json: GPTQ weights of "
            f"{', '.join(map(str, _BITS))} bits can be made plain (5 to 7 bits are stored in "
            "planes, gptq_p)"
        )
    return {
        "bits": bits,
        "group_size": number(own, "group_size", "q_group_size") or -1,
        "desc_act": bool(flag(own, "desc_act")),
        "sym": bool(flag(own, "sym")),
        "v1": v1,
    }


def _dynamic(said: Mapping[str, Any], weight: str) -> Mapping[str, Any]:
    """Return *said* with what ``dynamic`` says of the module, by the first pattern that matches.

    A pattern is a regular expression for the begin of the name, after ``+:`` (the values that
    differ) or ``-:`` (left plain). GPTQModel, ``dynamic_get``.
    """
    module, rules = module_of(weight), said.get("dynamic") or {}
    for pattern, override in rules.items():
        bare = re.sub(r"^[+-]:", "", pattern)
        try:
            fits = bare == module or re.match(bare, module) is not None
        except re.error as error:
            raise RecipeError(
                f"dynamic of config.json has {pattern!r}, no regular expression: {error}"
            ) from error
        if fits and pattern.startswith("-:"):
            raise RecipeError(
                f"{pattern!r} in dynamic of config.json leaves {module!r} plain, but it is stored "
                "packed: one of them is of another version"
            )
        if fits:
            return {**said, **(override or {})}
    return said


def _stored_less_one(said: Mapping[str, Any], weight: str) -> bool:
    """Tell whether zeros are stored less one; RecipeError for another layout."""
    layout = text(said, "checkpoint_format", "format")
    if said.get("is_marlin_format"):
        layout = "marlin"
    if layout in _LESS_ONE:
        return True
    if layout in _AS_THEY_ARE:
        return False
    raise RecipeError(
        f"{weight!r} is stored in the layout {layout!r} by config.json, which is made "
        "for one kernel and not made plain here: convert the checkpoint to checkpoint_format "
        "'gptq' or 'gptq_v2' with GPTQModel"
    )


class _Layout(NamedTuple):
    n_in: int
    n_out: int
    n_words: int
    n_groups: int
    size: int
    """Inputs of a group, where there is no g_idx."""


def _layout(parts: Mapping[str, TensorType], settings: Settings) -> _Layout:
    bits = int(settings["bits"])
    shapes = _shapes(parts)
    if faults := list(_form_faults(parts, shapes)):
        raise _unfit(parts, faults)
    (n_words, n_out), (n_groups, _) = shapes["qweight"], shapes["scales"]
    n_in = shapes["g_idx"][0] if "g_idx" in parts else n_words * WORD // bits
    size = int(settings["group_size"])
    size = n_in if size == -1 else size
    layout = _Layout(n_in, n_out, n_words, n_groups, size)
    if faults := list(_faults(shapes, layout, settings)):
        raise _unfit(parts, faults)
    return layout


def _shapes(parts: Mapping[str, TensorType]) -> dict[str, tuple[int, ...]]:
    return {role: kind.shape or () for role, kind in parts.items()}


def _form_faults(
    parts: Mapping[str, TensorType], shapes: Mapping[str, tuple[int, ...]]
) -> Iterable[str]:
    for role in ("qweight", "qzeros", "g_idx"):
        if role in parts and parts[role].dtype != "I32":
            yield f"{role} must be I32"
    if parts["scales"].dtype not in _FLOATS:
        yield "scales must be F16, BF16 or F32"
    for role, shape in shapes.items():
        if len(shape) != (1 if role == "g_idx" else 2):
            yield f"{role} must have {1 if role == 'g_idx' else 2} dimensions"


def _faults(
    shapes: Mapping[str, tuple[int, ...]], layout: _Layout, settings: Settings
) -> Iterable[str]:
    bits, (n_in, n_out, n_words, n_groups, size) = int(settings["bits"]), layout
    if n_words != -(-n_in * bits // WORD):
        yield f"{n_in} inputs of {bits} bits must be {-(-n_in * bits // WORD)} rows of qweight"
    if shapes["scales"][1] != n_out:
        yield f"scales must have {n_out} columns"
    if "qzeros" in shapes and shapes["qzeros"] != (n_groups, -(-n_out * bits // WORD)):
        yield f"qzeros must be {[n_groups, -(-n_out * bits // WORD)]}"
    if "qzeros" not in shapes and not settings["sym"]:
        yield "there are no qzeros, and config.json does not say sym: true"
    if "g_idx" not in shapes and (size < 1 or -(-n_in // max(1, size)) != n_groups):
        yield f"{n_in} inputs in groups of {size} must be {-(-n_in // max(1, size))} rows of scales"
    if "g_idx" not in shapes and settings["desc_act"] and n_groups > 1:
        yield "inputs are sorted (desc_act), and there is no g_idx that says how"


def _unfit(parts: Mapping[str, TensorType], faults: Iterable[str]) -> RecipeError:
    found = ", ".join(f"{role} {kind}" for role, kind in parts.items())
    return RecipeError(f"not a GPTQ weight as config.json says: {found}; {'; '.join(faults)}")


def _groups_of(
    parts: Mapping[str, torch.Tensor], ahead: int, start: int, stop: int, size: int
) -> torch.Tensor:
    """Return the row of the scales at hand for each input from *ahead* before *start*."""
    import torch

    scales = parts["scales"]
    if "g_idx" in parts:
        group = parts["g_idx"].long()
        return torch.cat((group[:1].expand(ahead), group))
    if size == -1:
        return torch.zeros(stop - start + ahead, dtype=torch.long, device=scales.device)
    inputs = torch.arange(start - ahead, stop, device=scales.device)
    return (inputs // size - start // size).clamp_(min=0)


def _zeros(
    parts: Mapping[str, torch.Tensor], bits: int, first: int, last: int, *, v1: bool
) -> torch.Tensor:
    """Return the zeros ``[groups, outputs]`` of the outputs *first* to *last*."""
    import torch

    if "qzeros" not in parts:
        return torch.full_like(parts["scales"], 1 << (bits - 1))
    words, codes_across = parts["qzeros"], WORD % bits != 0
    if v1 and not codes_across:
        # To whole words, as GPTQModel does: undoes the borrow of a zero that was stored as -1.
        words = words + sum(1 << shift for shift in range(0, WORD, bits))
    zeros = unpack(words, bits, 1)
    if v1 and codes_across:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    ahead = first % block(bits).codes
    return zeros[:, ahead : ahead + last - first]


class GptqMarlin(Scheme):
    """Weights repacked for the Marlin kernel (``B`` and ``s``): recognised, never made plain."""

    name: str = "gptq_marlin"
    roles: tuple[str, ...] = ("B", "s")

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Raise RecipeError: codes are permuted for one kernel of one kind of device."""
        raise RecipeError(
            f"{weight!r} is packed for the Marlin kernel, in an order that depends on the device "
            "it was made for: take the checkpoint in checkpoint_format 'gptq', or load it with "
            "GPTQModel"
        )

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return an unknown type: the order of the codes is not described anywhere."""
        return TensorType(None, None)

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Raise RecipeError: nothing can be made of the parts."""
        raise RecipeError("weights packed for the Marlin kernel are not made plain")

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Raise RecipeError: nothing can be made of the parts."""
        raise RecipeError("weights packed for the Marlin kernel are not made plain")


def _record(
    name: str, match: Match, *packs: Pack, why: str, overrides: tuple[str, ...] = ()
) -> ModelQuirks:
    return ModelQuirks(
        name=f"packed.{name}",
        role="quantization",
        match=match,
        packs=packs,
        overrides=frozenset(overrides),
        why=why,
        url="https://github.com/ModelCloud/GPTQModel",
    )


def _linear(parts: str, optional: str) -> Pack:
    def named(names: str) -> tuple[tuple[str, str], ...]:
        return tuple((name, f"**.{name}") for name in names.split())

    return Pack("gptq", "**.weight", named(parts), named(optional))


RECORDS = (
    _record(
        "gptq",
        Match(all_of=("**.qweight", "**.g_idx")),
        _linear("qweight scales", "qzeros g_idx"),
        why=(
            "GPTQ: qweight, scales and qzeros of one Linear, with g_idx where columns are sorted; "
            "how many bits a value has is in config.json alone"
        ),
    ),
    _record(
        "gptq_unsorted",
        Match(quant_methods=("gptq",), all_of=("**.qweight",), none_of=("**.g_idx",)),
        _linear("qweight scales", "qzeros"),
        overrides=("packed.awq",),
        why="GPTQ without g_idx has the names of AWQ; config.json says which it is",
    ),
    _record(
        "gptq_marlin",
        Match(quant_methods=("gptq", "marlin"), all_of=("**.B", "**.s")),
        Pack("gptq_marlin", "**.weight", (("B", "**.B"), ("s", "**.s"))),
        why="GPTQ repacked for the Marlin kernel: B and s, in an order of that kernel's own",
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of GPTQ."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the schemes of GPTQ."""
    return (Gptq(), GptqMarlin())
