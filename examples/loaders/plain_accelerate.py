"""A module of your own, loaded over CPU and disk by accelerate, from names with a foreign prefix.

Plans first, from headers alone; then loads by the plan, and a second time by the function that
stands in for accelerate's own. Ends with 1 unless both compute what the saved model computes, and
a checkpoint with a tensor less is refused by the name of that tensor.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher, PlanError, load_checkpoint_and_dispatch
from modelquirks.planner.model.build import empty_weights

MEMORY = {"cpu": "20KB", "disk": None}  # too little, so that some of it stays in the files


class Net(nn.Module):
    """What somebody trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def saved(model: nn.Module, folder: Path, *, without: str = "") -> Path:
    """Save *model* as DistributedDataParallel names it: ``module.`` in front of everything."""
    folder.mkdir()
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    state.pop(without, None)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def empty() -> Net:
    """Return a model that takes no memory yet."""
    with empty_weights():
        return Net().eval()


def main() -> int:
    """Load twice and compare."""
    trained = Net().eval()
    x = torch.randn(2, 64)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = saved(trained, Path(name, "checkpoint"))
        model = empty()
        plan = Dispatcher().plan(folder, model=model, max_memory=MEMORY)
        print(f"{len(plan.audit.model)} families accounted for, {dict(plan.device_map)}")
        by_plan = plan.execute(model)(x)
        model = load_checkpoint_and_dispatch(empty(), folder, device_map="auto", max_memory=MEMORY)
        equal = torch.equal(by_plan, trained(x)) and torch.equal(model(x), trained(x))

        torn = saved(trained, Path(name, "torn"), without="module.layers.1.bias")
        try:
            load_checkpoint_and_dispatch(empty(), torn, device_map="auto", max_memory=MEMORY)
            refused = False
        except PlanError as error:
            refused = "layers.1.bias" in str(error)
    print(f"the same answers: {equal}; without one tensor it is refused by name: {refused}")
    return 0 if equal and refused else 1


if __name__ == "__main__":
    raise SystemExit(main())
