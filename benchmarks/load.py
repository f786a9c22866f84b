"""How fast weights get into memory: ours, accelerate, transformers, and what torch allows.

    python benchmarks/load.py [--folder DIR] [--rounds N] [--cases widen,narrow,…] [--quick]
                              [--cold] [--json FILE] [--plot FILE]

Checkpoints of 2 GB and more are made in DIR (once; delete it afterwards): a Llama of 22 layers in
bfloat16 and one of 11 in float32, and a Mixtral whose experts are stored one by one. Each load is
a process of its own, in turn, with the files in the page cache or, with ``--cold``, dropped from it
(``posix_fadvise``). Printed and written are the best of the rounds, the rate in bytes of the file,
the peak of the process above what it had before, and for views the memory that became private.

Cases: ``widen`` bf16 → fp32, ``narrow`` fp32 → bf16, ``experts`` stacked and fused, ``same`` as the
file has it, ``disk`` nearly everything offloaded. The bound of the first three is torch alone, on
all cores: each tensor of the mapped file cast, or copied into the stack, in fresh memory that torch
allocates. Ours is a plan, its execution and its verification; ``ours full`` compares every byte.
Times count from a model on meta to one that is ready. Exits 1 if what is wanted does not hold.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bars import Bar, bars
from compiled import with_compiled

MB = 1e6
PEERS = ("accelerate", "transformers")
FULL = ("bound", "ours", "ours full")
CASES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "widen": ("llama-bf16", "float32", (*FULL, *PEERS)),
    "narrow": ("llama-fp32", "bfloat16", (*FULL, *PEERS)),
    "experts": ("mixtral", "bfloat16", (*FULL, "transformers")),
    "same": ("llama-bf16", "bfloat16", ("ours", "ours copy", *PEERS)),
    "disk": ("llama-bf16", "bfloat16", ("ours", "accelerate")),
}
"""Case → checkpoint, dtype in memory, who loads it."""
DISK: Any = {
    **dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), "cpu"),
    **dict.fromkeys(("model.layers", "model.norm", "lm_head"), "disk"),
}
"""accelerate 1.15 cannot load all of a safetensors checkpoint to the disk."""


# Checkpoints


def config(kind: str, *, quick: bool) -> Any:
    """Return the configuration of one of the models."""
    from transformers import LlamaConfig, MixtralConfig

    if kind == "mixtral":
        return MixtralConfig(
            hidden_size=256 if quick else 1024,
            intermediate_size=512 if quick else 3584,
            num_hidden_layers=2 if quick else 12,
            num_attention_heads=16,
            num_key_value_heads=4,
            num_local_experts=8,
        )
    layers = 2 if quick else 22 if kind == "llama-bf16" else 11
    return LlamaConfig(
        hidden_size=512 if quick else 2048,
        intermediate_size=1408 if quick else 5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )


def stored(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes as checkpoints have them: experts one by one."""
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        at, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj") or "experts" not in at:
            yield name, shape
            continue
        at = at.replace(".mlp.", ".block_sparse_moe.")
        for expert in range(shape[0]):
            if leaf == "down_proj":
                yield f"{at}.{expert}.w2.weight", shape[1:]
            else:
                yield f"{at}.{expert}.w1.weight", (shape[1] // 2, shape[2])
                yield f"{at}.{expert}.w3.weight", (shape[1] // 2, shape[2])


def write(kind: str, folder: Path, *, quick: bool) -> None:
    """Save a checkpoint of random numbers, in two files."""
    import torch
    from safetensors.torch import save_file

    dtype = torch.float32 if kind == "llama-fp32" else torch.bfloat16
    shapes = [
        (n.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight"), s)
        for n, s in stored(on_meta(config(kind, quick=quick), dtype))
    ]
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    folder.mkdir(parents=True)
    total = sum(torch.Size(s).numel() for _, s in shapes)
    places: dict[str, str] = {}
    part: dict[str, Any] = {}
    done = 0
    for number, (name, shape) in enumerate(shapes):
        n = torch.Size(shape).numel()
        part[name] = noise.roll(number).repeat(-(-n // len(noise)))[:n].reshape(shape)
        done += n
        if name == shapes[-1][0] or (done > total / 2 and len(set(places.values())) == 0):
            file = f"model-{len(set(places.values())) + 1:05d}-of-00002.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(part, file)
            part = {}
    index = {"metadata": {"total_size": total * dtype.itemsize}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = config(kind, quick=quick)
    settings.architectures = ["MixtralForCausalLM" if kind == "mixtral" else "LlamaForCausalLM"]
    settings.save_pretrained(folder)


def on_meta(settings: Any, dtype: Any) -> Any:
    """Return the model without weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    with init_empty_weights():
        return factory.from_config(settings, dtype=dtype).eval()


# One load, in a process of its own


def child(case: str, who: str, folder: Path) -> None:
    """Load once, and write what it took."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = getattr(torch, CASES[case][1])
    settings = AutoConfig.from_pretrained(folder)
    model = on_meta(settings, dtype)  # also where it is not needed: the same is imported then
    if who.startswith("ours"):
        importlib.import_module("modelquirks.planner.execution.perform")  # as accelerate is
    from accelerate import load_checkpoint_and_dispatch

    devices: Any = dict(DISK) if case == "disk" else {"": "cpu"}
    before, private = memory("VmHWM"), dirty()
    started, cpu = time.perf_counter(), time.process_time()
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder.parent) as offload:
        if who == "bound":
            kept: Any = bound(case, folder, dtype)
        elif who == "transformers":
            kept = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        elif who == "accelerate":
            kept = load_checkpoint_and_dispatch(
                model, folder, device_map=devices, dtype=dtype, offload_folder=offload
            )
        else:
            kept, facts = ours(model, folder, devices, dtype, who)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        written = sum(p.stat().st_size for p in Path(offload).iterdir())
    result = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": memory("VmHWM") - before,
        "private_bytes": dirty() - private,
        "written_bytes": written,
        **facts,
    }
    print(json.dumps(result))
    del kept


def ours(
    model: Any, folder: Path, devices: Any, dtype: Any, who: str
) -> tuple[Any, dict[str, Any]]:
    """Load by a plan; return the model and the times of the steps."""
    from modelquirks.planner import Dispatcher

    started = time.perf_counter()
    plan = Dispatcher().plan(folder, model=model, device_map=devices, dtype=dtype)
    planned = time.perf_counter() - started
    options: dict[str, Any] = {"copy": who == "ours copy"}
    options["verify"] = "full" if who == "ours full" else "samples"
    report = plan.load_into(model, **options)
    return model, {"steps": {"plan": planned, **report.seconds_by_step}}


def bound(case: str, folder: Path, dtype: Any) -> list[Any]:
    """Do what has to be done with torch alone."""
    import torch
    from safetensors import safe_open

    made: list[Any] = []
    stacks: dict[str, Any] = {}
    n_experts = json.loads((folder / "config.json").read_text()).get("num_local_experts", 0)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if case != "experts" or ".experts." not in name:
                    made.append(torch.empty(tensor.shape, dtype=dtype).copy_(tensor))
                    continue
                at, _, rest = name.partition(".experts.")
                number, which, _ = rest.split(".")
                key = f"{at}.{'down' if which == 'w2' else 'up'}"
                n, m = tensor.shape
                if key not in stacks:
                    rows = n if which == "w2" else 2 * n
                    stacks[key] = torch.empty(n_experts, rows, m, dtype=dtype)
                start = n if which == "w3" else 0
                stacks[key][int(number), start : start + n].copy_(tensor)
    return [*made, *stacks.values()]


def memory(field: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) << 10


def dirty() -> int:
    """Return the bytes that are this process's alone, and changed."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("Private_Dirty:")[1].split()[0]) << 10


# All of them


def measured(case: str, who: str, folder: Path, *, cold: bool) -> dict[str, Any]:
    """Run one load and return what it took."""
    for path in folder.glob("*.safetensors"):
        if cold:
            drop(path)
        else:
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass
    words = [sys.executable, __file__, "--child", case, who, str(folder)]
    env = with_compiled() | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"{case} by {who} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def drop(path: Path) -> None:
    """Have the file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest round, with the median of the times and the highest peak."""
    fastest = min(rounds, key=lambda r: r["seconds"])
    return {
        **fastest,
        "median_seconds": statistics.median(r["seconds"] for r in rounds),
        "peak_bytes": max(r["peak_bytes"] for r in rounds),
    }


def verdicts(
    case: str, by: Mapping[str, Mapping[str, Any]], made: int
) -> Iterator[tuple[str, bool]]:
    """Yield what is promised of a case, and whether it held."""
    ours = by["ours"]
    if case in ("widen", "narrow", "experts"):
        peer = "transformers" if case == "experts" else "accelerate"
        faster = by[peer]["seconds"] / ours["seconds"]
        yield f"{faster:.2f} times the rate of {peer} (1.5 wanted)", faster >= 1.5
        making = ours["steps"]["make"]
        share = by["bound"]["seconds"] / ours["seconds"]
        yield f"{share:.0%} of the bound (80 % wanted)", share >= 0.8
        alone = by["bound"]["seconds"] / making
        yield f"{alone:.0%} of the bound without plan and verification", True
        above = ours["peak_bytes"] - made
        yield f"peak is result + {above / MB:.0f} MB (300 wanted)", above <= 300 * MB
        full = by["ours full"]["steps"]["verify"]
        yield f"verification {ours['steps']['verify']:.2f} s, of every byte {full:.2f} s", True
    elif case == "same":
        ratio = ours["seconds"] / by["accelerate"]["seconds"]
        yield f"{ratio:.2f} times the time of accelerate (1.1 wanted)", ratio <= 1.1
        private, theirs = ours["private_bytes"], by["accelerate"]["private_bytes"]
        told = f"{private / MB:.0f} MB private ({theirs / MB:.0f} there)"
        yield told, private <= 50 * MB
    else:
        ratio = ours["seconds"] / by["accelerate"]["seconds"]
        yield f"{ratio:.1%} of the time of accelerate (10 % wanted)", ratio <= 0.1
        yield f"{ours['written_bytes']} bytes written", ours["written_bytes"] == 0


def result_bytes(folder: Path, case: str) -> int:
    """Return the bytes of all weights in memory."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = int(index["metadata"]["total_size"])
    return total * 2 if case == "widen" else total // 2 if case == "narrow" else total


def plot(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return bars of the times as SVG."""
    return bars(
        {
            case: [Bar(who, facts["seconds"]) for who, facts in result["by"].items()]
            for case, result in results.items()
        }
    )


def report(case: str, result: Mapping[str, Any]) -> None:
    """Print the table of one case."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{case}: {result['file_bytes'] / 1e9:.2f} GB", title_justify="left")
    for title in ("", "s", "median", "CPU s", "GB/s", "peak MB", "written MB"):
        table.add_column(title, justify="right" if title else "left")
    for who, facts in result["by"].items():
        table.add_row(
            who,
            f"{facts['seconds']:.2f}",
            f"{facts['median_seconds']:.2f}",
            f"{facts['cpu_seconds']:.2f}",
            f"{result['file_bytes'] / facts['seconds'] / 1e9:.2f}",
            f"{facts['peak_bytes'] / MB:.0f}",
            f"{facts['written_bytes'] / MB:.0f}",
        )
    console = Console()
    console.print(table)
    for text, held in result["verdicts"]:
        console.print(f"  {'ok ' if held else 'NOT'} {text}")


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "load-bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--quick", action="store_true", help="small models: does it run at all")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", nargs=3, metavar=("CASE", "WHO", "FOLDER"))
    args = parser.parse_args()
    if args.child:
        child(args.child[0], args.child[1], Path(args.child[2]))
        return 0
    results: dict[str, dict[str, Any]] = {}
    for case in args.cases.split(","):
        kind, _, loaders = CASES[case]
        folder = args.folder / (f"{kind}-quick" if args.quick else kind)
        if not folder.exists():
            write(kind, folder, quick=args.quick)
        rounds: dict[str, list[dict[str, Any]]] = {who: [] for who in loaders}
        for _ in range(args.rounds):
            for who in loaders:
                rounds[who].append(measured(case, who, folder, cold=args.cold))
        by = {who: best(done) for who, done in rounds.items()}
        n_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        held = list(verdicts(case, by, result_bytes(folder, case)))
        results[case] = {"file_bytes": n_bytes, "cold": args.cold, "by": by, "verdicts": held}
        report(case, results[case])
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))
    if args.plot:
        args.plot.write_text(plot(results))
    return 0 if args.quick or all(ok for r in results.values() for _, ok in r["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
