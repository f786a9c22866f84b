"""What the tests of the plugins share: real manifests, and a way from stored to model tensors."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from modelquirks.planner.dtypes import from_torch
from modelquirks.planner.execution.evaluate import evaluate
from modelquirks.planner.mapping.offers import Offers, find_offers
from modelquirks.plugins import (
    auto_round,
    awq,
    bitsandbytes,
    compressed_tensors,
    eetq,
    fp8,
    gpt_oss,
    gptq,
    mlx,
    moe,
    nvfp4,
    packed,
    quark,
    torchao,
    wrappers,
)
from modelquirks.quirks import ModelQuirks, Origin, Registered, TensorType, group
from modelquirks.quirks.recipe import Dequantize, Part, Scheme, Source
from modelquirks.quirks.resolve import Facts, Resolution, resolve

DATA = Path(__file__).parents[1] / "data" / "manifests"
PLUGINS = (
    wrappers,
    gpt_oss,
    moe,
    packed,
    auto_round,
    awq,
    bitsandbytes,
    gptq,
    mlx,
    compressed_tensors,
    eetq,
    fp8,
    nvfp4,
    quark,
    torchao,
)
RECORDS = tuple(record for plugin in PLUGINS for record in plugin.RECORDS)
SCHEMES = {
    scheme.name: scheme
    for plugin in PLUGINS
    if (schemes := getattr(plugin, "modelquirks_schemes", None))
    for scheme in schemes()
}

Config = Mapping[str, Any]


def resolution_of(
    names: Iterable[str],
    config: Config | None = None,
    *,
    known: Collection[str] = (),
    container: str = "",
    records: Iterable[ModelQuirks] = RECORDS,
) -> Resolution:
    registered = [Registered(record, Origin("ours")) for record in records]
    facts = Facts(config or {}, tuple(group(names).values()), container)
    return resolve(registered, facts, known=known)


@pytest.fixture
def shipped() -> tuple[ModelQuirks, ...]:
    """Give every record that ships."""
    return RECORDS


@pytest.fixture
def resolved() -> Callable[..., Resolution]:
    """Give the function that resolves names against every record that ships."""
    return resolution_of


@pytest.fixture
def called() -> Callable[..., dict[str, str]]:
    """Give the function that says what each stored name is called after all aliases."""

    def names(stored: Iterable[str], config: Config | None = None, **facts: Any) -> dict[str, str]:
        pieces = resolution_of(stored, config, **facts).renamed
        return {
            piece.family.template.format(*member): name
            for piece in pieces
            for name, member in piece.items()
        }

    return names


@pytest.fixture
def offers() -> Callable[..., Offers]:
    """Give the function that says what names and config offer to a model that wants *known*."""

    def find(
        names: Iterable[str], config: Config | None = None, *, known: Collection[str] = ()
    ) -> Offers:
        found = resolution_of(names, config, known=known)
        assert not found.conflicts
        return find_offers(found, config or {}, known, SCHEMES)

    return find


@pytest.fixture
def loaded() -> Callable[..., dict[str, torch.Tensor]]:
    """Give the function that makes the *wanted* tensors from stored ones, as a plan would."""

    def make(
        stored: Mapping[str, torch.Tensor],
        wanted: Collection[str],
        config: Config | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> dict[str, torch.Tensor]:
        found = resolution_of(stored, config, known=wanted)
        assert not found.conflicts
        best = find_offers(found, config or {}, wanted, SCHEMES).best

        def types(name: str) -> TensorType:
            return TensorType(from_torch(stored[name].dtype), tuple(stored[name].shape))

        def read(name: str, region: Any) -> torch.Tensor:
            slices = () if region is None else tuple(slice(*bounds) for bounds in region)
            return stored[name][slices]

        made: dict[str, torch.Tensor] = {}
        for name in wanted:
            if name not in best:
                continue
            node = best[name].logical.bound.node
            made[name] = evaluate(
                node, best[name].env, read=read, types=types, schemes=SCHEMES, dtype=dtype
            )
        return made

    return make


@pytest.fixture
def unpacked() -> Callable[..., torch.Tensor]:
    """Give the function that makes a plain weight, or a region of it, of companions by role."""

    def make(
        scheme: Scheme,
        parts: Mapping[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
        region: Any = None,
        settings: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        named = tuple(Part(role, Source(role)) for role in parts)
        node = Dequantize(scheme.name, named, tuple(sorted((settings or {}).items())))

        def read(name: str, part: Any) -> torch.Tensor:
            return parts[name][tuple(slice(*bounds) for bounds in part or ())]

        return evaluate(
            node,
            {},
            read=read,
            types=lambda name: TensorType(from_torch(parts[name].dtype), tuple(parts[name].shape)),
            schemes={scheme.name: scheme},
            region=region,
            dtype=dtype,
        )

    return make


@pytest.fixture
def manifest() -> Callable[[str], tuple[list[str], dict[str, Any]]]:
    """Give the function that reads names and config of a real checkpoint."""

    def read(slug: str) -> tuple[list[str], dict[str, Any]]:
        folder = DATA / slug
        index = json.loads((folder / "index.json").read_text())
        config = json.loads((folder / "config.json").read_text())
        return list(index["weight_map"]), config

    return read


@pytest.fixture
def model_of() -> Callable[[Mapping[str, torch.Tensor]], torch.nn.Module]:
    """Return what makes a model that has just the given tensors, all zero."""

    def make(truth: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        model = torch.nn.Module()
        for name, tensor in truth.items():
            *path, leaf = name.split(".")
            owner = model
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_buffer(leaf, torch.zeros_like(tensor))
        return model

    return make
