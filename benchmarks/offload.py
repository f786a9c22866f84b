"""Forward passes with every block on disk: accelerate, ours, and the same model in memory.

    python benchmarks/offload.py [--rounds N] [--rows small,many,large,llama,ahead,cold] [--out DIR]

Rows (``OMP_NUM_THREADS`` decides how many threads compute):

- ``small``: 1,000 linear layers of 64×64 in one safetensors file. ``many``: the same, and 15,000
  further tensors in the file. accelerate executes its own way, from an ``offload_index`` into the
  file as transformers makes it.
- ``large``: 16 layers of 4096×4096. ``llama``: a Llama of 2 GB. All in float32, one row of input.
- ``ahead``: 8 layers of 4096×4096 stored in float16 and cast to float32 at each pass; what is
  made in the background, against the same with ``ahead_bytes=0``. Between its layers the model
  waits 40 ms, as it would for a device that is not the CPU.
- ``cold``: the same layers stored in float32, with a page cache that holds nothing of the file
  (``posix_fadvise``), with and without reading ahead.

The models of a row run in turn, round by round; each round's result is compared bit by bit with
the one in memory. Printed are the fastest passes, their ratio, and the bytes of weights that a
pass asked for. ``offload.json`` has all times, ``offload.svg`` the picture. Exits 1 if a wanted
ratio is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import dispatch_model
from bars import Bar, bars
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher

SLOW = 2.0
"""Seconds of a pass, beyond which two rounds are enough."""

WAIT = 0.04
"""Seconds that a layer of row ``ahead`` waits."""

Model = Any
Build = Callable[[], nn.Module]


class Row(NamedTuple):
    """What one row measures."""

    build: Build
    inputs: Callable[[], torch.Tensor]
    contenders: Mapping[str, Callable[[Build, Path], Model]]
    further: int = 0
    """Tensors in the file that the model does not have."""
    stored: torch.dtype = torch.float32
    is_cold: bool = False
    wanted: tuple[str, float] | None = None
    """Against whom, and how many times its rate."""


def stack(count: int, size: int) -> nn.Module:
    """Return *count* linear layers."""
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))


class Waiting(nn.Module):
    """A layer, and then a wait in which another device would compute."""

    def __init__(self, size: int) -> None:
        """Have one layer of that size."""
        super().__init__()
        self.layer = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute it, and wait."""
        x = self.layer(x)
        time.sleep(WAIT)
        return x


def llama() -> nn.Module:
    """Return a Llama with 2 GB of weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    return LlamaForCausalLM(config)


def by_accelerate(build: Build, folder: Path) -> Model:
    """Return the model on disk, dispatched by accelerate alone."""
    with torch.device("meta"):
        model = build()
    _computed(model)
    file = str(folder / "model.safetensors")
    index: Any = {
        name: {"safetensors_file": file, "weight_name": name, "dtype": "float32"}
        for name in model.state_dict()
    }
    main: Any = "cpu"
    dispatch_model(model, {"": "disk"}, main_device=main, offload_index=index)
    return model


def by_us(build: Build, folder: Path, device: str = "disk", **options: Any) -> Model:
    """Return the model as we dispatch it."""
    with torch.device("meta"):
        model = build()
    _computed(model)
    plan = Dispatcher().plan(folder, model=model, device_map={"": device}, dtype="float32")
    plan.load_into(model, **options)
    return model


def without_ahead(build: Build, folder: Path) -> Model:
    """Return the model on disk, with nothing done ahead."""
    return by_us(build, folder, ahead_bytes=0)


def in_memory(build: Build, folder: Path) -> Model:
    """Return the model in memory, without hooks."""
    with torch.device("meta"):
        model = build()
    state: dict[str, torch.Tensor] = {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in model.state_dict():
            state[name] = file.get_tensor(name).float()
    model.load_state_dict(state, assign=True)
    _computed(model)
    return model


def _computed(model: Model) -> None:
    """Fill the buffers that no file holds."""
    for module in model.modules():
        if hasattr(module, "compute_default_rope_parameters"):
            values, _ = module.compute_default_rope_parameters(module.config)
            module.inv_freq = module.original_inv_freq = values


ALL = {"accelerate": by_accelerate, "ours": by_us, "in memory": in_memory}
ABLATION = {"nothing ahead": without_ahead, "ours": by_us}


def vector(size: int) -> Callable[[], torch.Tensor]:
    """Return what makes one row of input."""
    return lambda: torch.linspace(-1, 1, size)[None]


ROWS = {
    "small": Row(lambda: stack(1000, 64), vector(64), ALL, wanted=("accelerate", 15)),
    "many": Row(
        lambda: stack(1000, 64), vector(64), ALL, further=15_000, wanted=("accelerate", 100)
    ),
    "large": Row(lambda: stack(16, 4096), vector(4096), ALL, wanted=("in memory", 0.8)),
    "llama": Row(llama, lambda: torch.arange(8)[None], ALL, wanted=("in memory", 0.8)),
    "ahead": Row(
        lambda: nn.Sequential(*(Waiting(4096) for _ in range(8))),
        vector(4096),
        {**ABLATION, "in memory": in_memory},
        stored=torch.float16,
        wanted=("nothing ahead", 1.05),
    ),
    "cold": Row(
        lambda: nn.Sequential(*(Waiting(4096) for _ in range(8))),
        vector(4096),
        ABLATION,
        is_cold=True,
        wanted=("nothing ahead", 1.05),
    ),
}


def write(row: Row, folder: Path) -> None:
    """Write the checkpoint of a row."""
    torch.manual_seed(0)
    state = {name: t.to(row.stored) for name, t in row.build().state_dict().items()}
    state |= {f"further.{i}": torch.zeros(1) for i in range(row.further)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    os.sync()


def weights_of(model: Model) -> Any:
    """Return our weights map behind the hooks of a model; None if it has none."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    return next((w for hook in hooks if (w := getattr(hook, "weights", None)) is not None), None)


def drop_pages(folder: Path, model: Model) -> None:
    """Have the page cache forget the file; pages that are mapped must go from the mapping first."""
    for file in weights_of(model)._reader._files.values():
        file.mapping.madvise(mmap.MADV_DONTNEED)
    descriptor = os.open(folder / "model.safetensors", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class Result(NamedTuple):
    """What one contender needed."""

    seconds: list[float]
    cpu_seconds: list[float]
    """Of the thread that computes."""
    asked_bytes: int | None
    """Of weights, in one pass; None if that is not counted."""

    @property
    def best(self) -> float:
        """The fastest pass."""
        return min(self.seconds)


def timed(model: Model, x: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Return seconds, CPU seconds and result of a pass."""
    wall, cpu = time.perf_counter(), time.thread_time()
    with torch.no_grad():
        result = model(x)
    taken = time.perf_counter() - wall, time.thread_time() - cpu
    return *taken, getattr(result, "logits", result)


def measure(row: Row, folder: Path, rounds: int) -> dict[str, Result]:
    """Run a row: all contenders in turn, as often as *rounds* says, after two passes each."""
    models = {name: make(row.build, folder) for name, make in row.contenders.items()}
    x = row.inputs()
    first = {name: timed(model, x) for name, model in models.items()}
    slow = {name for name, (seconds, _, _) in first.items() if seconds > SLOW}
    results = {name: Result([], [], None) for name in models}
    for name, model in models.items():
        weights = weights_of(model)
        if weights is not None:
            timed(model, x)  # the second pass knows the order
            before = weights.bytes_read
            timed(model, x)
            results[name] = Result([], [], weights.bytes_read - before)
    for i in range(rounds):
        for name, model in models.items():
            if name in slow and i > 1:
                continue
            if row.is_cold:
                for other in models.values():
                    drop_pages(folder, other)
            seconds, cpu, result = timed(model, x)
            results[name].seconds.append(seconds)
            results[name].cpu_seconds.append(cpu)
            if not all(torch.equal(result, other) for _, _, other in first.values()):
                raise SystemExit(f"{name}: the results differ")
    del models
    gc.collect()
    return results


def missed(row: Row, results: Mapping[str, Result]) -> bool:
    """Tell whether ours is slower than it should be."""
    if row.wanted is None:
        return False
    other, times = row.wanted
    return results[other].best / results["ours"].best < times


def show(console: Console, found: Mapping[str, Mapping[str, Result]]) -> None:
    """Print the figures."""
    table = Table(
        "row", "who", "ms a pass", "CPU ms", "ours is faster by", "MB asked for", "wanted"
    )
    for name, results in found.items():
        row, ours = ROWS[name], results["ours"]
        for who, result in results.items():
            ratio = "" if who == "ours" else f"{result.best / ours.best:.2f} x"
            asked = "" if result.asked_bytes is None else f"{result.asked_bytes / 1e6:.1f}"
            wanted = ""
            if row.wanted is not None and row.wanted[0] == who:
                colour = "red" if missed(row, results) else "green"
                wanted = f"[{colour}]≥ {row.wanted[1]} x"
            cpu = f"{min(result.cpu_seconds) * 1e3:.1f}"
            table.add_row(name, who, f"{result.best * 1e3:.1f}", cpu, ratio, asked, wanted)
        table.add_section()
    console.print(table)


def picture(found: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the fastest passes as bars, on a logarithmic scale, as SVG."""
    return bars(
        {
            name: [Bar(who, result.best) for who, result in results.items()]
            for name, results in found.items()
        },
        logarithmic=True,
    )


def run(names: Sequence[str], rounds: int, scratch: Path) -> dict[str, dict[str, Result]]:
    """Measure the rows of those names."""
    found: dict[str, dict[str, Result]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            write(ROWS[name], Path(folder))
            found[name] = measure(ROWS[name], Path(folder), rounds)
    return found


def main() -> int:
    """Run it."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--out", type=Path, default=Path(), help="folder of offload.json and .svg")
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoints (2 GB)")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    names = arguments.rows.split(",")
    found = run(names, arguments.rounds, arguments.scratch)
    show(Console(), found)
    as_json = {
        name: {who: {**r._asdict(), "best": r.best} for who, r in results.items()}
        for name, results in found.items()
    }
    facts = {"threads": torch.get_num_threads(), "cpus": os.cpu_count(), "torch": torch.__version__}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "offload.json").write_text(json.dumps({**facts, "rows": as_json}, indent=1))
    (arguments.out / "offload.svg").write_text(picture(found), encoding="utf-8")
    return int(any(missed(ROWS[name], results) for name, results in found.items()))


if __name__ == "__main__":
    sys.exit(main())
