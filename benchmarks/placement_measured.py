"""Placements measured: tokens a second of accelerate's placement and ours, over cpu and disk.

    python benchmarks/placement_measured.py [--tokens N] [--rounds N]

Two models of this machine's size, saved and loaded for real: one with experts in a module each, of
which a token takes two, and a dense one. The cpu may hold a part of each; the rest is read from the
checkpoint at every step. Both placements are executed by the same code, in turn, and their answers
are compared. Beside the measured rates stand the predicted ones: their order must agree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.model.build import empty_weights
from modelquirks.planner.plan import Plan

WIDTH, INNER, LAYERS, EXPERTS, TAKEN, WORDS = 512, 1024, 8, 16, 2, 4000


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, inner, bias=False)
        self.w2 = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.w2(nn.functional.silu(self.w1(x)))
        return made


class Block(nn.Module):
    """A mixer, and experts or one wide MLP."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, max(experts, 1), bias=False)
        each = INNER if experts else INNER * EXPERTS // 4
        self.experts = nn.ModuleList([Expert(each) for _ in range(max(experts, 1))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        scores = self.gate(x)[0]
        chosen = scores.topk(min(TAKEN, len(self.experts))).indices.tolist()
        for number in chosen:
            x = x + self.experts[number](x)
        made: torch.Tensor = x / x.norm()
        return made


class Model(nn.Module):
    """Words in, words out; one token at a time."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(experts) for _ in range(LAYERS)])
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.lm_head(x)
        return made


class Measured(NamedTuple):
    """One placement."""

    predicted_s: float
    tokens_per_s: float
    last: torch.Tensor


def saved(experts: int, folder: Path) -> int:
    """Write a model with random weights; return its bytes."""
    torch.manual_seed(0)
    state = Model(experts).state_dict()
    save_file(state, folder / "model.safetensors")
    config = f'{{"num_experts": {experts}, "num_experts_per_tok": {TAKEN}}}' if experts else "{}"
    (folder / "config.json").write_text(config)
    return sum(tensor.nbytes for tensor in state.values())


def theirs(experts: int, cpu: int) -> Mapping[str, Any]:
    """Return accelerate's map."""
    from accelerate import infer_auto_device_map

    with empty_weights():
        model = Model(experts)
    return dict(infer_auto_device_map(model, {"cpu": cpu}))


def planned(experts: int, folder: Path, cpu: int, device_map: Any) -> tuple[Plan, nn.Module]:
    """Return a plan and the model that it is for."""
    with empty_weights():
        model = Model(experts)
    memory = {"cpu": cpu, "disk": None}
    return Dispatcher().plan(folder, model=model, device_map=device_map, max_memory=memory), model


def run(plan: Plan, model: nn.Module, tokens: int) -> Measured:
    """Load, warm up, and measure."""
    plan.execute(model)
    torch.manual_seed(1)
    ids = torch.randint(0, WORDS, (tokens, 1))
    last = torch.empty(0)
    with torch.no_grad():
        model(ids[0])
        started = time.perf_counter()
        for row in ids:
            last = model(row)
        took = time.perf_counter() - started
    prediction = plan.placement.prediction
    assert prediction is not None
    return Measured(prediction.seconds, tokens / took, last)


def main() -> None:
    """Measure each model with both placements in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'model':10} {'placement':11} {'predicted ms':>12} {'measured tokens/s':>18}")
    wrong = False
    for name, experts in (("experts", EXPERTS), ("dense", 0)):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            cpu = int(saved(experts, folder) * 0.6)
            found: dict[str, list[Measured]] = {"accelerate": [], "ours": []}
            for _ in range(args.rounds):
                for whose, device_map in (("accelerate", theirs(experts, cpu)), ("ours", "auto")):
                    plan, model = planned(experts, folder, cpu, device_map)
                    found[whose].append(run(plan, model, args.tokens))
        rates = {w: statistics.median(m.tokens_per_s for m in ms) for w, ms in found.items()}
        for whose, runs in found.items():
            predicted = runs[0].predicted_s * 1e3
            print(f"{name:10} {whose:11} {predicted:12.3f} {rates[whose]:18.1f}", flush=True)
        assert torch.equal(found["accelerate"][0].last, found["ours"][0].last)
        told = found["accelerate"][0].predicted_s / found["ours"][0].predicted_s
        seen = rates["ours"] / rates["accelerate"]
        print(f"{name:10} ours is {seen:.2f} times as fast, predicted {told:.2f}")
        wrong |= told > 1.1 and seen < 1
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
