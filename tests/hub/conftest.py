"""A hub on this machine, and huggingface_hub told to ask it and to keep its things in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

if TYPE_CHECKING:
    from hub_server import Blob, HubServer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def hub_server() -> Any:
    """Give the module of the server, which benchmarks use too."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module("hub_server")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def hub(hub_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve an empty hub; huggingface_hub reads its settings when it is imported, so set them."""
    with hub_server.serving(hub_server.HubServer()) as served:
        home = tmp_path / "hf"
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_ASSETS_CACHE": str(home / "assets"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("modelquirks.planner.hub.client._PAUSES", (0.0,) * 4)
        yield served


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give the function that puts huggingface_hub into offline mode."""
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def put(hub: HubServer, hub_server: Any) -> Callable[..., None]:
    """Give the function that makes a repository."""

    def put_files(
        files: Mapping[str, bytes | Blob], name: str = "org/name", **options: Any
    ) -> None:
        hub.repos[name] = hub_server.Repo.of(files, **options)

    return put_files


@pytest.fixture
def weights() -> Callable[..., bytes]:
    """Give the function that makes a safetensors file of random tensors by their shapes."""

    def make(seed: int = 0, /, **shapes: tuple[int, ...]) -> bytes:
        generator = torch.Generator().manual_seed(seed)
        return save({k: torch.rand(shape, generator=generator) for k, shape in shapes.items()})

    return make
