"""A plan for transformers: its device map goes to ``from_pretrained`` as it is.

The plan says before anything is loaded that every tensor is there, and what goes where. Ends with 1
unless transformers takes that map as it is and computes what the saved model computes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from modelquirks.planner import Dispatcher

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": 128,
}


def main() -> int:
    """Plan, load by transformers, compare."""
    tokens = torch.arange(8).reshape(1, 8)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name, "checkpoint")
        trained = MixtralForCausalLM(MixtralConfig(**TINY)).eval()
        trained.save_pretrained(folder)  # experts one by one, as Mixtral's files have them

        dispatcher = Dispatcher()
        plan = dispatcher.plan(
            folder,
            model=dispatcher.model(folder),  # the class that config.json names, without weights
            max_memory={"cpu": "700KB", "disk": None},
            dtype="auto",
        )
        if not plan.ok:
            print(plan.refusal())
            return 1
        model = MixtralForCausalLM.from_pretrained(
            folder,
            device_map=plan.device_map,
            dtype="auto",  # as in the plan: it counted the bytes of the dtype that it was given
            offload_folder=Path(name, "offload"),  # transformers writes experts that it stacks
        ).eval()
        taken = model.hf_device_map == plan.device_map
        equal = torch.equal(model(tokens).logits, trained(tokens).logits)
    print(f"{dict(plan.device_map)}\ntaken as it is: {taken}, the same logits: {equal}")
    return 0 if taken and equal and "disk" in plan.device_map.values() else 1


if __name__ == "__main__":
    raise SystemExit(main())
