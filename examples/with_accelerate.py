"""What accelerate alone makes of a checkpoint: compares every tensor with the files.

    python examples/with_accelerate.py FOLDER

Needs transformers. Try it on what ``examples/broken_checkpoints.py`` makes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import load_checkpoint_and_dispatch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM


def main(folder: Path) -> None:
    """Load the checkpoint into a new model, as accelerate's documentation says."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    load_checkpoint_and_dispatch(model, str(folder), device_map={"": "cpu"})
    files = [load_file(path).items() for path in folder.glob("*.safetensors")]
    stored = {name.removeprefix("module."): tensor for file in files for name, tensor in file}
    loaded = model.state_dict()
    equal = sum(torch.equal(tensor, loaded[name]) for name, tensor in stored.items())
    print(
        f"accelerate returned a model. Equal to the checkpoint: {equal} of {len(loaded)} tensors."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
