"""PEFT: what an adapter changes in a weight, computed as ``merge_and_unload`` of peft 0.21 does.

Shapes: ``a`` is ``[r, in]``, ``b`` is ``[out, r]``, ``magnitude`` (DoRA) has one value for each
output. peft keeps an adapter's tensors in float32 whatever the file has (float64 for a float64
weight), computes with them so, and adds to the weight, which then is rounded once to its dtype;
where it casts first what it adds (embeddings, parameters), so do we: that is ``rounded``.

Sources: peft 0.21.2, ``tuners/lora/layer.py`` (``get_delta_weight`` and ``merge`` of ``Linear``,
``Embedding``, ``_ConvNd`` and ``ParamWrapper``), ``tuners/lora/variants.py``
(``DoraLinearVariant.merge_unsafe``), ``tuners/trainable_tokens/layer.py`` (``merge``).

A region of the product needs the rows of ``b`` and the columns of ``a`` that it touches, taken in
blocks of 64: the same values then come out whatever the region is, as no kernel for a single row
is ever used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from modelquirks.quirks.hookspecs import hookimpl
from modelquirks.quirks.recipe import RecipeError, Region, Scheme, Settings, TensorType

if TYPE_CHECKING:
    import torch

__all__ = ["Lora", "LoraBias", "LoraExperts", "TrainedRows", "modelquirks_schemes"]

_BLOCK = 64
_FLOATS = ("F32", "BF16", "F16", "F64")

Bounds = tuple[int, int]


class Lora(Scheme):
    """``weight + scaling * b @ a`` of a linear layer, an embedding or a convolution.

    With ``magnitude`` (DoRA) the rows of that are then brought to these lengths. *transposed*: the
    weight is ``[in, out]``, as in GPT-2's ``Conv1D`` and in embeddings.
    """

    name: str = "lora"
    roles: tuple[str, ...] = ("weight", "a", "b")

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return the type of the weight; RecipeError if *parts* do not fit it."""
        weight, a, b = (_shape(parts, role) for role in self.roles)
        if len(a) < 2 or len(a) != len(b):
            raise RecipeError(f"'a' {list(a)} and 'b' {list(b)} are no pair of matrices")
        if a[0] != b[1]:
            raise RecipeError(f"ranks disagree: 'a' is {list(a)}, 'b' is {list(b)}")
        made = (b[0], *a[1:])
        if settings.get("transposed"):
            made = made[::-1]
        if made != weight:
            raise RecipeError(f"the adapter is for {list(made)}, the weight is {list(weight)}")
        if "magnitude" in parts and math.prod(size := _shape(parts, "magnitude")) != b[0]:
            raise RecipeError(f"the magnitudes are {list(size)}, of {b[0]} outputs")
        return parts["weight"]

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return whole blocks of the rows and columns of *region*; for DoRA, whole outputs."""
        a, b = _shape(parts, "a"), _shape(parts, "b")
        outputs, inputs = _blocks(region, a, b, settings, dora="magnitude" in parts)
        others = tuple((0, size) for size in a[2:])
        found: dict[str, Region] = {
            "a": ((0, a[0]), inputs, *others),
            "b": (outputs, (0, a[0]), *((0, size) for size in b[2:])),
            "weight": region,
        }
        if "magnitude" in parts:
            sizes = _shape(parts, "magnitude")  # [1, out, 1, 1] of a convolution
            found["magnitude"] = tuple(outputs if size == b[0] else (0, size) for size in sizes)
            whole = (inputs, outputs) if settings.get("transposed") else (outputs, inputs)
            found["weight"] = (*whole, *others)
        return found

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* of the merged weight."""
        a, b, weight = parts["a"], parts["b"], parts["weight"]
        turned, dora = bool(settings.get("transposed")), "magnitude" in parts
        product = _matrix(b, dtype) @ _matrix(a, dtype)
        delta = (product.T if turned else product) * float(settings["scaling"])
        if a.ndim > 2:
            delta = delta.reshape(b.shape[0], *a.shape[1:])
        firsts = [*map(_first, region[:2]), *[0] * (len(region) - 2)]
        if not dora:
            added = delta[_within(region, firsts)]
            return _added(weight, added.to(dtype) if settings.get("rounded") else added, dtype)
        firsts[0 if turned else 1] = 0
        made = _rescaled(weight, delta, _computing(parts["magnitude"], dtype), turned=turned)
        return made[_within(region, firsts)].to(dtype)


class LoraExperts(Scheme):
    """LoRA of a parameter ``[experts, …]``: ``weight[e] + scaling * b[e] @ a[e]``.

    ``a`` is ``[experts * r, in]``, expert after expert; ``b`` is ``[out, r * experts]``, with the
    experts innermost. *transposed*: each expert's weight is ``[in, out]``.
    """

    name: str = "lora_experts"
    roles: tuple[str, ...] = ("weight", "a", "b")

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return the type of the weight; RecipeError if *parts* do not fit it."""
        weight, a, b = (_shape(parts, role) for role in self.roles)
        if len(weight) != 3 or len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % weight[0]:
            raise RecipeError(
                f"'a' {list(a)} and 'b' {list(b)} are no LoRA of the experts {list(weight)}"
            )
        made = (a[1], b[0]) if settings.get("transposed") else (b[0], a[1])
        if made != weight[1:]:
            raise RecipeError(f"the adapter is for {list(made)}, an expert is {list(weight[1:])}")
        return parts["weight"]

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the rows of ``a`` of these experts, and the rows of ``b`` in blocks."""
        weight, a, b = (_shape(parts, role) for role in self.roles)
        (start, stop), *inner = region
        rank = a[0] // weight[0]
        outputs, inputs = reversed(inner) if settings.get("transposed") else inner
        return {
            "weight": region,
            "a": ((rank * start, rank * stop), _block(inputs, a[1])),
            "b": (_block(outputs, b[0]), (0, b[1])),
        }

    def layout(self, parts: Mapping[str, TensorType], settings: Settings) -> Settings:
        """Return how many experts there are."""
        return {"experts": _shape(parts, "weight")[0]}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* of the merged weight."""
        import torch

        (start, stop), *_ = region
        turned = bool(settings.get("transposed"))
        a, b = _computing(parts["a"], dtype), _computing(parts["b"], dtype)
        a = a.reshape(stop - start, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, int(settings["experts"]))[:, :, start:stop]
        form = "o r e, e r i -> e i o" if turned else "o r e, e r i -> e o i"
        delta = torch.einsum(form, b, a) * float(settings["scaling"])
        added = delta[_within(region, (start, *map(_first, region[1:])))]
        return _added(parts["weight"], added.to(dtype), dtype)


class LoraBias(Scheme):
    """``weight + scaling * b``, with the bias of a ``lora_B`` (``lora_bias=True``)."""

    name: str = "lora_bias"
    roles: tuple[str, ...] = ("weight", "b")

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return the type of the bias; RecipeError if the adapter's has another shape."""
        weight, b = _shape(parts, "weight"), _shape(parts, "b")
        if weight != b:
            raise RecipeError(f"the adapter's bias is {list(b)}, that of the layer {list(weight)}")
        return parts["weight"]

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return the same region of both."""
        return {"weight": region, "b": region}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* of the merged bias."""
        added = _computing(parts["b"], dtype) * float(settings["scaling"])
        return _added(parts["weight"], added, dtype)


class TrainedRows(Scheme):
    """``weight`` with some rows replaced: *indices* are their numbers, with commas between."""

    name: str = "trained_rows"
    roles: tuple[str, ...] = ("weight", "rows")

    def infer(self, parts: Mapping[str, TensorType], settings: Settings) -> TensorType:
        """Return the type of the weight; RecipeError if the rows do not fit it."""
        weight, rows = _shape(parts, "weight"), _shape(parts, "rows")
        indices = _indices(settings)
        if rows != (len(indices), *weight[1:]):
            raise RecipeError(f"{len(indices)} rows for {list(weight)} are stored as {list(rows)}")
        if outside := [index for index in indices if not 0 <= index < weight[0]]:
            raise RecipeError(f"row {outside[0]} is outside of the weight, {list(weight)}")
        return parts["weight"]

    def regions(
        self, region: Region, parts: Mapping[str, TensorType], settings: Settings
    ) -> Mapping[str, Region]:
        """Return *region* of the weight, and of all the rows the columns that it has."""
        return {"weight": region, "rows": ((0, len(_indices(settings))), *region[1:])}

    def evaluate(
        self, parts: Mapping[str, Any], region: Region, dtype: Any, settings: Settings
    ) -> Any:
        """Return *region* of the weight with the rows in it."""
        (start, stop), *_ = region
        made = parts["weight"].to(dtype, copy=True)
        for number, index in enumerate(_indices(settings)):
            if start <= index < stop:
                made[index - start] = parts["rows"][number].to(dtype)
        return made


def _shape(parts: Mapping[str, TensorType], role: str) -> tuple[int, ...]:
    """Return the shape of a part, all of which must be floats: integers are no change of weights.

    peft would cast them, as it does everything (``Linear.get_delta_weight``).
    """
    dtype, shape = parts[role]
    if dtype is not None and dtype not in _FLOATS:
        raise RecipeError(f"{role!r} is {dtype}, and must be {', '.join(_FLOATS[:-1])} or F64")
    if shape is None:
        raise RecipeError(f"the shape of {role!r} is not known")
    return shape


def _indices(settings: Settings) -> list[int]:
    return [int(text) for text in str(settings["indices"]).split(",")]


def _block(bounds: Bounds, size: int) -> Bounds:
    """Return the whole blocks that *bounds* touch, of *size* elements."""
    start, stop = bounds
    return start // _BLOCK * _BLOCK, min(size, -(-stop // _BLOCK) * _BLOCK)


def _blocks(
    region: Region,
    a: tuple[int, ...],
    b: tuple[int, ...],
    settings: Settings,
    *,
    dora: bool,
) -> tuple[Bounds, Bounds]:
    """Return the outputs and the inputs that *region* touches, in blocks; of DoRA all inputs."""
    outputs, inputs = region[:2][::-1] if settings.get("transposed") else region[:2]
    return _block(outputs, b[0]), (0, a[1]) if dora else _block(inputs, a[1])


def _within(region: Region, firsts: Iterable[int]) -> tuple[slice, ...]:
    """Return where *region* is in what begins at *firsts*."""
    pairs = zip(region, firsts, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), first in pairs)


def _first(bounds: Bounds) -> int:
    """Return where the first block that *bounds* touch begins."""
    return bounds[0] // _BLOCK * _BLOCK


def _matrix(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Return *tensor* as two dimensions, for computing with weights of *dtype*."""
    return _computing(tensor, dtype).reshape(tensor.shape[0], -1)


def _computing(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Return *tensor* in the dtype that peft computes with."""
    import torch

    return tensor.to(torch.float64 if dtype == torch.float64 else torch.float32)


def _added(weight: torch.Tensor, delta: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Return the sum, computed in the wider dtype of both, rounded once to *dtype*."""
    return (weight.to(dtype) + delta).to(dtype)


def _rescaled(
    weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor, *, turned: bool
) -> torch.Tensor:
    """Return the sum with each output brought to the length that *magnitude* says."""
    import torch

    summed = weight + delta
    outputs = summed.T if turned else summed
    if outputs.ndim > 2:
        outputs = outputs.flatten(1)
    factor = magnitude.reshape(-1) / torch.linalg.norm(outputs, dim=1)
    made: torch.Tensor = (
        factor.view(-1, *[1] * (summed.ndim - 1)).transpose(0, int(turned)) * summed
    )
    return made


@hookimpl
def modelquirks_schemes() -> Iterable[Scheme]:
    """Return how each kind of change is made."""
    return (Lora(), LoraExperts(), LoraBias(), TrainedRows())
