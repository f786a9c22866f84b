"""What the tests of original layouts share: a plan with all quirks that ship, and loading by it."""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelquirks.planner import Dispatcher, Plan
from modelquirks.planner.model.build import empty_weights
from modelquirks.quirks import Registry

Tensors = dict[str, torch.Tensor]
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HERE = ROOT / "tests" / "data" / "manifests"
COLLECTION = ROOT.parent / "shared" / "data" / "manifests"


@pytest.fixture(scope="session", params=[False, True], ids=["alone", "bridge"])
def dispatcher(request: pytest.FixtureRequest) -> Dispatcher:
    """Give a dispatcher with all quirks that ship, without the bridge, and with it."""
    registry = Registry()
    for name, module in PROJECT["entry-points"]["modelquirks"].items():
        if request.param or name not in ("bridge", "transformers"):
            registry.register(import_module(module), name=name)
    return Dispatcher(registry)


@pytest.fixture
def randomized() -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Give the function that makes every value of a model random, so that none passes by luck."""

    def fill(model: torch.nn.Module) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return model.eval()

    return fill


def save(folder: Path, stored: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """Write a checkpoint as it would lie beside its remote code."""
    folder.mkdir(exist_ok=True)
    # Tensors of one storage (chunks) cannot be saved otherwise.
    whole = {name: tensor.clone().contiguous() for name, tensor in stored.items()}
    save_file(whole, folder / "m.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def load(dispatcher: Dispatcher) -> Callable[..., torch.nn.Module]:
    """Give the function that loads a folder into an empty model and returns that."""

    def loaded(
        folder: Path, make: Callable[[], torch.nn.Module], *, unexpected: Iterable[str] = ()
    ) -> torch.nn.Module:
        with empty_weights():
            model = make().eval()
        plan = dispatcher.plan(folder, model=model, max_memory={"cpu": "1GiB"})
        assert plan.ok, plan.problems
        assert plan.audit.coverage == 1.0
        assert sorted(plan.audit.unexpected) == sorted(unexpected)
        return plan.execute(model)

    return loaded


@pytest.fixture
def arrives(load: Callable[..., torch.nn.Module], tmp_path: Path) -> Callable[..., None]:
    """Give the function that says: *stored* loads into a model equal to *model*, bit for bit."""

    def check(
        stored: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        model: torch.nn.Module,
        make: Callable[[], torch.nn.Module],
        *,
        unexpected: Iterable[str] = (),
    ) -> None:
        found = load(save(tmp_path / "m", stored, config), make, unexpected=unexpected)
        wanted, arrived = model.state_dict(), found.state_dict()
        assert wanted.keys() == arrived.keys()
        assert not [name for name in wanted if not torch.equal(wanted[name], arrived[name])]

    return check


@pytest.fixture
def planned(dispatcher: Dispatcher) -> Callable[..., Plan]:
    """Give the function that plans a real manifest (names alone) for what *make* makes."""

    def plan(
        slug: str, make: Callable[[dict[str, Any]], torch.nn.Module], *, aliases: Iterable[str] = ()
    ) -> Plan:
        found = [base / slug for base in (HERE, COLLECTION) if (base / slug).is_dir()]
        if not found:
            pytest.skip("this manifest is not in tests/data, and the collection is not here")
        config = json.loads((found[0] / "config.json").read_text(encoding="utf-8"))
        with torch.device("meta"):
            model = make(config)
        return dispatcher.plan(found[0], model=model, device_map=None, aliases=tuple(aliases))

    return plan
