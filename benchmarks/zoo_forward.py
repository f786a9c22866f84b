"""``forward_of``: one forward pass with simple inputs, where a model takes some."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["Forward", "answers", "forward_of", "near", "same"]


class Forward(NamedTuple):
    """Inputs of a forward pass, and every tensor that came out."""

    inputs: Mapping[str, torch.Tensor]
    outputs: Sequence[torch.Tensor]


def forward_of(model: nn.Module, seed: int) -> Forward | None:
    """Return a forward pass of *model* that gives the same twice; None if none is simple."""
    for inputs in _attempts(model, seed):
        try:
            first = answers(model, inputs)
            again = answers(model, inputs)
        except Exception:  # not simple enough for this model
            continue
        repeats = len(first) == len(again) and all(map(same, first, again))
        numbers = [t for t in first if t.is_floating_point()]
        if first and repeats and all(bool(torch.isfinite(t).all()) for t in numbers):
            return Forward(inputs, first)
    return None


@torch.no_grad()
def answers(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Run *model*; return every tensor of its output, caches left out."""
    torch.manual_seed(0)
    given = {name: value.clone() for name, value in inputs.items()}
    return [tensor.detach().clone() for tensor in _tensors(model(**given))]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors agree in dtype, shape and every bit: NaN, and the sign of zero."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors differ by no more than the order of sums explains."""
    if not other.is_floating_point() or one.dtype != other.dtype or one.shape != other.shape:
        return same(one, other)
    scale = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * scale)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if "past_key" not in str(name) and "cache" not in str(name):
                yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


def _attempts(model: nn.Module, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs to try, by the names that the forward pass takes; the likeliest first."""
    takes = inspect.signature(model.forward).parameters
    config: Any = model.config
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, 29, (2, 7), generator=generator)
    image = torch.rand(
        (1, _of(config, "num_channels", 3), *(_side(config),) * 2), generator=generator
    )
    sound = torch.rand((1, 3200), generator=generator)
    bins = _of(config, "num_mel_bins", 16)
    spectrum = torch.rand(
        (1, bins, 2 * _of(config, "max_source_positions", 32)), generator=generator
    )
    parts = {
        "input_ids": text,
        "pixel_values": image,
        "input_values": sound,
        "input_features": spectrum,
    }
    main = getattr(model, "main_input_name", "input_ids")
    decoder = {"decoder_input_ids": text} if "decoder_input_ids" in takes else {}
    if main in takes and main in parts:
        yield {main: parts[main]} | decoder
        yield {main: parts[main][:1]} | decoder
    if "input_ids" in takes:
        yield {"input_ids": text} | decoder
        yield {"input_ids": text} | {k: v for k, v in parts.items() if k in takes}
    if "input_features" in takes:
        yield {"input_features": spectrum.transpose(1, 2).contiguous()} | decoder
    if "input_values" in takes:
        yield {"input_values": sound[:, None]} | decoder
        yield {"input_values": spectrum.transpose(1, 2).contiguous()} | decoder
    if "hidden_states" in takes:
        yield {
            "hidden_states": torch.randn(
                (1, 4, _of(config, "hidden_size", 32)), generator=generator
            )
        }


def _of(config: Any, name: str, default: int) -> int:
    for part in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        found = getattr(part, name, None)
        if isinstance(found, int):
            return found
    return default


def _side(config: Any) -> int:
    for part in (config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))):
        found = getattr(part, "image_size", None)
        if isinstance(found, int):
            return found
        if isinstance(found, (list, tuple)) and found:
            return int(found[0])
    return 32
