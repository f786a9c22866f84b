"""How long ``modelquirks inspect`` takes beside a Python that only parses the index.

    python benchmarks/inspect_time.py [CHECKPOINT] [--runs N]

Whole processes, in turn, after one run of each that does not count. Without a checkpoint an
index of 35,743 tensors is made, as large as the largest real one that was at hand (a 4-bit
Gemma 4 26B-A4B with its experts stored one by one).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

N_LAYERS, N_EXPERTS, N_SHARDS = 30, 128, 162
PARSE = "import json, sys; json.load(open(sys.argv[1]))"


def names() -> Iterator[str]:
    """Yield 35,743 names in families like those of the real index."""
    yield "model.language_model.embed_tokens.weight"
    for layer in range(N_LAYERS):
        at = f"model.language_model.layers.{layer}"
        for part in range(39 if layer else 52):
            yield f"{at}.part_{part}.weight"
        for expert in range(N_EXPERTS):
            for which in ("gate_proj", "up_proj", "down_proj"):
                for companion in ("weight_packed", "weight_scale", "weight_shape"):
                    yield f"{at}.experts.{expert}.{which}.{companion}"


def index_in(folder: Path) -> Path:
    """Write the index; return the folder."""
    shards = [f"model-{n + 1:05}-of-{N_SHARDS:05}.safetensors" for n in range(N_SHARDS)]
    weight_map = {name: shards[i % N_SHARDS] for i, name in enumerate(names())}
    data = {"metadata": {"total_size": 17191252228}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(data, indent=2))
    return folder


def seconds(command: list[str]) -> float:
    """Run *command* once; return its wall time."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(checkpoint: Path, runs: int) -> None:
    """Print both medians and the median of the ratios, pair by pair."""
    index = next(iter([*checkpoint.glob("*.index.json"), *checkpoint.glob("index.json")]))
    parse = [sys.executable, "-c", PARSE, str(index)]
    inspect = [sys.executable, "-m", "modelquirks.planner", "inspect", str(checkpoint)]
    pairs = [(seconds(inspect), seconds(parse)) for _ in range(runs + 1)][1:]
    tensors = len(json.loads(index.read_text())["weight_map"])
    print(f"{tensors:,} tensors, {runs} runs of each, in turn, whole processes")
    print(f"  json.load of the index  {statistics.median(p for _, p in pairs):.3f} s")
    print(f"  modelquirks inspect     {statistics.median(i for i, _ in pairs):.3f} s")
    print(f"  ratio                   {statistics.median(i / p for i, p in pairs):.2f}")


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    if args.checkpoint is not None:
        measure(args.checkpoint, args.runs)
        return
    with tempfile.TemporaryDirectory() as name:
        measure(index_in(Path(name)), args.runs)


if __name__ == "__main__":
    main()
