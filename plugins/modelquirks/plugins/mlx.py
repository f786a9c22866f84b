"""MLX: ``weight`` in 32-bit words, with ``scales`` and, where affine, ``biases`` per group.

Along the last dimension, ``[..., out, in]``: Linear, Embedding and stacked ``switch_mlp`` experts
alike. ``weight`` U32 ``[..., out, in*bits/32]``, ``scales`` ``[..., out, in/group_size]``.

* affine (1 to 8 bits): ``code * scale + bias``; ``biases`` is no bias but the value of code 0.
* mxfp4, mxfp8: E2M1 or E4M3 values and an E8M0 scale byte per 32; no biases.
* nvfp4: E2M1 values and an E4M3 scale byte per 16; no biases.

Bits and group size are under ``quantization`` in config.json, by module where they differ; of
headers only their product can be told. ``false`` there leaves a module plain. The same affine
form is ``metal`` in transformers, with ``qbiases``. Sources: the documentation of ``mx.quantize``
(MLX 0.32) and ``integrations/metal_quantization.py`` of transformers 5.24
(``_affine_dequantize_tensor``, float32 and rounded once: reproduced to the bit). MLX itself
rounds bfloat16 and float16 after the product and again after the sum, so that it may be off by
one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from modelquirks.plugins.affine import grouped, must_be_float
from modelquirks.plugins.bitstream import WORD, unpack, words_for
from modelquirks.plugins.codes import E2M1
from modelquirks.plugins.declared import Declared, declared, module_of, number, required, text
from modelquirks.plugins.mxfp4 import Mxfp4
from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType
from modelquirks.quirks.record import Match, ModelQuirks, Pack

if TYPE_CHECKING:
    import torch

__all__ = ["RECORDS", "Metal", "Mlx", "modelquirks_records", "modelquirks_schemes"]

_FLOATS = ("F16", "BF16", "F32")


class _Mode(NamedTuple):
    bits: tuple[int, ...]
    sizes: tuple[int, ...]
    """Group sizes that there are; the first is what a missing one means. Likewise of bits."""
    scales: tuple[str, ...]
    """Dtypes of the scales."""


_MODES = {
    "affine": _Mode((4, 1, 2, 3, 5, 6, 8), (64, 32, 128), _FLOATS),
    "mxfp4": _Mode((4,), (32,), ("U8", "F8_E8M0")),
    "mxfp8": _Mode((8,), (32,), ("U8", "F8_E8M0")),
    "nvfp4": _Mode((4,), (16,), ("U8", "F8_E4M3")),
}


class Mlx(Scheme):
    """Reads ``weight`` and ``scales``, with ``biases`` where the mode is affine."""

    name: str = "mlx"
    roles: tuple[str, ...] = ("weight", "scales")
    offsets: str = "biases"
    """What the companion of code 0 is called."""
    keys: tuple[str, ...] = ("quantization", "quantization_config")

    def settings(self, config: Mapping[str, Any], weight: str) -> Settings:
        """Return mode, bits and group_size.

        RecipeError if config.json tells none of them, says that the module is plain, or names
        what does not exist.
        """
        said = declared(config, *self.keys)
        own = _of_module(said, module_of(weight))
        mode = text(own, "mode") or "affine"
        if mode not in _MODES:
            raise RecipeError(
                f"{weight!r} is quantised in the mode {mode!r} by config.json: made plain are "
                f"{', '.join(_MODES)}"
            )
        kinds, told = _MODES[mode], (number(own, "bits"), number(own, "group_size"))
        if mode == "affine":  # the other modes have one width
            where = f"{self.keys[0]!r} of config.json"
            bits = required(told[0], "bits", weight, where)
            size = required(told[1], "group_size", weight, where)
        else:
            bits, size = told[0] or kinds.bits[0], told[1] or kinds.sizes[0]
        if bits not in kinds.bits or size not in kinds.sizes:
            raise RecipeError(
                f"{weight!r} has {bits} bits in groups of {size} by config.json: mode {mode!r} "
                f"has {_listed(kinds.bits)} bits and groups of {_listed(kinds.sizes)}"
            )
        return {"mode": mode, "bits": bits, "group_size": size}

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return ``[..., out, in]``; RecipeError if the parts do not fit.

        The dtype is that of the scales, or BF16 where these are bytes.
        """
        kind, bits = _MODES[str(settings["mode"])], int(settings["bits"])
        size, weight, scales = int(settings["group_size"]), parts["weight"], parts["scales"]
        shape, groups = (tuple(kind.shape or (0,)) for kind in (weight, scales))
        faults = list(self._faults(parts, settings, kind))
        if len(shape) < 2 or shape[:-1] != groups[:-1]:
            faults.append("weight and scales must be alike but for the last dimension")
        elif shape[-1] * WORD != groups[-1] * size * bits:
            product = shape[-1] * WORD / max(1, groups[-1])
            faults.append(
                f"by the headers bits times group_size is {product:g}, by config.json {bits} "
                f"times {size}: name the module with its own under {self.keys[0]!r}"
            )
        if faults:
            found = ", ".join(f"{role} {kind}" for role, kind in parts.items())
            raise RecipeError(f"not an MLX weight: {found}; {'; '.join(faults)}")
        dtype = scales.dtype if scales.dtype in _FLOATS else "BF16"
        return TensorType(dtype, (*shape[:-1], groups[-1] * size))

    def _faults(
        self, parts: Mapping[str, TensorType], settings: Settings, kind: _Mode
    ) -> Iterable[str]:
        affine, offsets = settings["mode"] == "affine", parts.get(self.offsets)
        if parts["weight"].dtype not in ("U32", "I32"):
            yield "weight must be U32"
        if parts["scales"].dtype not in kind.scales:
            yield f"scales must be {_listed(kind.scales)}"
        if affine and offsets != parts["scales"]:
            yield f"{self.offsets} must be as scales: {parts['scales']}"
        if not affine and offsets is not None:
            yield f"mode {settings['mode']} has no {self.offsets}"

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return whole groups, which fill whole words: the last dimension aligned outwards."""
        size, bits = int(settings["group_size"]), int(settings["bits"])
        *outer, (start, stop) = region
        shape = parts["weight"].shape
        assert shape is not None
        first, last = start // size, -(-stop // size)
        words = words_for(first * size, last * size, bits, shape[-1])
        return {role: (*outer, words if role == "weight" else (first, last)) for role in parts}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* in *dtype*, from whole groups."""
        start, stop = region[-1]
        lead = start % int(settings["group_size"])
        scales: torch.Tensor = parts["scales"]
        plain = _plain(parts["weight"], scales, parts.get(self.offsets), dtype, settings)
        plain = plain.view(*scales.shape[:-1], -1)
        return plain[..., lead : lead + stop - start]


class Metal(Mlx):
    """Reads the ``metal`` format of transformers: affine, with ``qbiases``."""

    name: str = "metal"
    roles: tuple[str, ...] = ("weight", "scales", "qbiases")
    offsets: str = "qbiases"
    keys: tuple[str, ...] = ("quantization_config", "quantization")


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _of_module(said: Declared, module: str) -> Declared:
    """Return *said* with what it says of *module*, which MLX may call by another prefix."""
    keys = [key for key, value in said.items() if isinstance(value, dict | bool)]
    found = [said[key] for key in keys if key == module]
    found = found or [said[key] for key in keys if _same_place(key, module)]
    if not found:
        return said
    if any(own != found[0] for own in found):
        raise RecipeError(
            f"'quantization' of config.json has several modules that {module!r} may be, and they "
            f"differ: give {module!r} an entry of its own"
        )
    if found[0] is False:
        raise RecipeError(
            f"{module!r} is stored with scales, and 'quantization' of config.json says that it is "
            "plain: one of them is of another version"
        )
    return {**said, **cast(Declared, found[0])} if isinstance(found[0], dict) else said


def _same_place(key: str, module: str) -> bool:
    """Tell whether two names are the same from the first number on, or without one at the end.

    >>> _same_place("language_model.model.layers.3.mlp.up", "model.language_model.layers.3.mlp.up")
    True
    >>> _same_place("model.layers.3.mlp.up", "model.layers.13.mlp.up")
    False
    """
    one, other = _place(key), _place(module)
    return len(one) > 0 and one == other


def _place(name: str) -> tuple[str, ...]:
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return tuple(words[max(0, numbers[0] - 1) :] if numbers else words[-1:])


def _plain(
    weight: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    dtype: torch.dtype,
    settings: Settings,
) -> torch.Tensor:
    """Return the values of whole groups in *dtype*, ``[rows, in]``."""
    import torch

    must_be_float(dtype)
    mode, size, bits = (settings[key] for key in ("mode", "group_size", "bits"))
    words = weight.reshape(-1, weight.shape[-1])
    rows = scales.contiguous().reshape(-1, scales.shape[-1])
    if mode == "mxfp4":
        octets = words.contiguous().view(torch.uint8).view(*rows.shape, -1)
        region = tuple((0, n) for n in (rows.shape[0], rows.shape[1] * int(size)))
        made: torch.Tensor = Mxfp4().evaluate({"blocks": octets, "scales": rows}, region, dtype, {})
        return made

    def codes(start: int, stop: int) -> torch.Tensor:
        found = unpack(words[start:stop], int(bits), 1)
        return found if mode == "affine" else values[found.int()]

    if mode == "affine":
        assert offsets is not None
        more = offsets.reshape(rows.shape)
        return grouped(codes, rows, dtype, offsets=more, size=int(size))
    values = _values_of(str(mode), words.device)
    return grouped(codes, _byte_scales(rows, str(mode)), dtype, size=int(size))


def _values_of(mode: str, device: torch.device) -> torch.Tensor:
    """Return the value of each code: E4M3 of mxfp8, E2M1 of nvfp4."""
    import torch

    if mode == "mxfp8":
        octets = torch.arange(256, dtype=torch.uint8, device=device)
        return octets.view(torch.float8_e4m3fn).float()
    return torch.tensor(E2M1, device=device)


def _byte_scales(scales: torch.Tensor, mode: str) -> torch.Tensor:
    """Return scales that are bytes as float32: E4M3 of nvfp4, else powers of two."""
    import torch

    octets = scales.view(torch.uint8)
    if mode == "nvfp4":
        return octets.view(torch.float8_e4m3fn).float()
    return torch.ldexp(torch.ones_like(octets, dtype=torch.float32), octets.int() - 127)


def _pack(scheme: str, required_parts: str, optional: str = "") -> Pack:
    def named(names: str) -> tuple[tuple[str, str], ...]:
        return tuple((name, f"**.{name}") for name in names.split())

    return Pack(scheme, "**.weight", named(required_parts), named(optional))


_DOCUMENT = "https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html"
_LINEARS = ("q_proj", "qkv_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "wte")
RECORDS = (
    ModelQuirks(
        name="packed.mlx",
        role="quantization",
        match=Match(all_of=("**.weight", "**.scales", "**.biases"), none_of=("**.qweight",)),
        # The mx modes of MLX have no biases; one checkpoint may use both.
        packs=(_pack("mlx", "weight scales", "biases"),),
        why=(
            "MLX: weight in uint32 words under its usual name, scales and biases per group; "
            "'biases' are the zero points, 'bias' is the bias"
        ),
        url=_DOCUMENT,
    ),
    ModelQuirks(
        name="packed.mlx_floats",
        role="quantization",
        # Names tell little here: weight and scales of well-known modules, and nothing of others.
        match=Match(
            all_of=("**.weight", "**.scales"),
            any_of=tuple(f"**.{name}.scales" for name in _LINEARS),
            none_of=("**.biases", "**.qbiases", "**.qweight", "**.tables", "**.codes"),
        ),
        packs=(_pack("mlx", "weight scales"),),
        why="MLX in the modes mxfp4, mxfp8 and nvfp4: small floats in uint32 words, byte scales",
        url=_DOCUMENT,
    ),
    ModelQuirks(
        name="packed.metal",
        role="quantization",
        match=Match(all_of=("**.weight", "**.scales", "**.qbiases")),
        packs=(_pack("metal", "weight scales qbiases"),),
        why="the Metal format of transformers: as MLX, with qbiases for the zero points",
        url=(
            "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/"
            "integrations/metal_quantization.py"
        ),
    ),
)


@hookimpl
def modelquirks_records() -> Iterable[ModelQuirks]:
    """Return the records of MLX."""
    return RECORDS


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return the schemes of MLX."""
    return (Mlx(), Metal())
