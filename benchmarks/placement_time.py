"""How long a device map takes: ours beside accelerate's, for a model of 90,677 parameters.

    python benchmarks/placement_time.py [--rounds N] [--rows kept,half,loose]

The model is made here on the meta device: 117 layers of attention and 256 experts with three
``Linear`` each, 121,100 modules. accelerate takes ``compute_module_sizes``,
``get_balanced_memory`` and ``infer_auto_device_map``; ours is ``infer_auto_device_map``, from the
``nn.Module`` to the map: walking the modules, ties, sizes, placing.

Each is timed once in fresh processes, in turn, from the model on: CPU seconds, with the garbage
collector as Python sets it. Printed are medians, the median of the ratios of each round, and the
peak memory that came on top of the model. Rows: ``kept`` keeps layers whole and has eight
accelerators with room for all of it; ``half`` has four, so that half of it goes to the cpu;
``loose`` is ``kept`` with layers that may be split. Exits 1 if ours takes more than a tenth in the
first two rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

N_LAYERS, N_EXPERTS, HIDDEN, INNER, VOCABULARY = 117, 256, 64, 32, 1_000
N_PARAMETERS, N_MODULES = 90_677, 121_100
N_DEVICES = 8
WANTED = 10
"""Times less CPU time than accelerate."""
ROWS = {"kept": True, "half": True, "loose": False}
"""Row → whether ``WANTED`` holds for it."""


def model() -> Any:
    """Return the model, on meta."""
    import torch
    from torch import nn

    def linear(n_in: int, n_out: int) -> nn.Module:
        return nn.Linear(n_in, n_out, bias=False)

    def parts(**named: nn.Module) -> nn.ModuleDict:
        return nn.ModuleDict(named)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            each = ("q", "k", "v", "o")
            self.self_attn = parts(**{f"{name}_proj": linear(HIDDEN, HIDDEN) for name in each})
            self.mlp = parts(gate=linear(HIDDEN, N_EXPERTS), experts=nn.ModuleList(self.experts()))
            self.input_layernorm = nn.LayerNorm(HIDDEN, bias=False)
            self.post_attention_layernorm = nn.LayerNorm(HIDDEN, bias=False)

        @staticmethod
        def experts() -> Iterator[nn.Module]:
            for _ in range(N_EXPERTS):
                up, gate, down = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
                yield parts(gate_proj=linear(*gate), up_proj=linear(*up), down_proj=linear(*down))

    with torch.device("meta"):
        made = parts(
            embed_tokens=nn.Embedding(VOCABULARY, HIDDEN),
            layers=nn.ModuleList(Layer() for _ in range(N_LAYERS)),
            norm=nn.LayerNorm(HIDDEN, bias=False),
            lm_head=linear(HIDDEN, VOCABULARY),
        )
        made["lm_head"].weight = made["embed_tokens"].weight
    assert sum(1 for _ in made.parameters()) == N_PARAMETERS
    assert sum(1 for _ in made.modules()) == N_MODULES
    return made


def capacities(made: Any, row: str) -> dict[Any, int]:
    """Return bytes by device: eight accelerators with a third to spare, or only half of them."""
    total = sum(parameter.nbytes for parameter in made.parameters())
    n_devices = N_DEVICES // 2 if row == "half" else N_DEVICES
    return {**dict.fromkeys(range(n_devices), int(total / N_DEVICES * 1.3)), "cpu": 2 * total}


def theirs(made: Any, memory: dict[Any, Any], whole: list[str]) -> dict[str, Any]:
    """Return accelerate's map."""
    from accelerate.utils import (
        compute_module_sizes,
        get_balanced_memory,
        infer_auto_device_map,
    )

    compute_module_sizes(made)
    balanced = get_balanced_memory(made, memory, no_split_module_classes=whole)
    return infer_auto_device_map(made, balanced, no_split_module_classes=whole)  # type: ignore[no-any-return]


def ours(made: Any, memory: dict[Any, Any], whole: list[str]) -> dict[str, Any]:
    """Return our map."""
    from modelquirks.planner import infer_auto_device_map

    return infer_auto_device_map(made, memory, no_split_module_classes=whole)


SIDES: dict[str, Callable[..., dict[str, Any]]] = {"accelerate": theirs, "ours": ours}


def peak_mb() -> float:
    """Return the most memory that this process has had, in MB (1,000,000 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def child(side: str, row: str) -> None:
    """Make one map; print what it took as JSON."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # that there is no such device here
    made = model()
    memory = capacities(made, row)
    whole = [] if row == "loose" else ["Layer"]
    SIDES[side](tiny(), {"cpu": 1 << 30}, [])  # imports are not what is measured
    before, started = peak_mb(), time.process_time()
    found = SIDES[side](made, memory, whole)
    took = time.process_time() - started
    print(
        json.dumps(
            {
                "cpu": took,
                "peak": peak_mb() - before,
                "keys": len(found),
                "devices": len({str(device) for device in found.values()}),
            }
        )
    )


def tiny() -> Any:
    """Return a model that takes no time."""
    from torch import nn

    return nn.Sequential(nn.Linear(2, 2))


def measured(side: str, row: str) -> dict[str, float]:
    """Make one map in a fresh process."""
    command = [sys.executable, __file__, "--child", side, "--rows", row]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


def compare(row: str, rounds: int) -> float:
    """Print one row side by side; return the ratio."""
    found = [[measured(side, row) for side in SIDES] for _ in range(rounds)]
    ratio = statistics.median(their["cpu"] / our["cpu"] for their, our in found)
    print(row)
    for number, side in enumerate(SIDES):
        each = [pair[number] for pair in found]
        middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
        print(
            f"  {side:10} {middle['cpu']:6.2f} s CPU   {middle['peak']:5.0f} MB   "
            f"{middle['keys']:4.0f} keys, {middle['devices']:.0f} devices"
        )
    print(f"  {'ratio':10} {ratio:6.1f}", flush=True)
    return ratio


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each, in turn")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        child(args.child, args.rows)
        return 0
    print(f"{N_PARAMETERS:,} parameters in {N_MODULES:,} modules on meta, median of {args.rounds}")
    ratios = {row: compare(row, args.rounds) for row in args.rows.split(",")}
    return int(any(ratio < WANTED for row, ratio in ratios.items() if ROWS[row]))


if __name__ == "__main__":
    sys.exit(main())
