"""What reads a safetensors checkpoint into CPU memory how fast: ours beside what the field offers.

    python benchmarks/readers.py --folder DIR [--rounds N] [--dtypes bfloat16,float32] [--cold]

DIR holds a checkpoint of a model that transformers can build (``benchmarks/load.py --folder DIR``
leaves some). Every reader ends with the same: all tensors in memory of this process, in the wanted
dtype, none of it mapped. Each runs in a process of its own, in turn, with the files in the page
cache or, with ``--cold``, dropped from it; printed are the best of the rounds, in GB of the file a
second, and the peak above the result. fastsafetensors and runai-model-streamer are tried if they
are installed. ``ours`` is making alone, by the report of the load, and ``ours whole`` the plan and
the verification too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compiled import with_compiled
from load import drop, memory, on_meta
from rich.console import Console
from rich.table import Table

Pairs = Iterator[tuple[str, Any]]


def paths(folder: Path) -> list[Path]:
    """Return the files of the checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def mapped(folder: Path) -> Pairs:
    """``safe_open``: views of the mapped file."""
    from safetensors import safe_open

    for path in paths(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def load_file(folder: Path) -> Pairs:
    """``safetensors.torch.load_file``: all of a file at once."""
    from safetensors.torch import load_file as load

    for path in paths(folder):
        yield from load(path).items()


def places(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data begin, and the entries of the header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return 8 + length, {n: entry for n, entry in header.items() if n != "__metadata__"}


def cut(flat: Any, entries: dict[str, Any]) -> Pairs:
    """Yield the tensors in *flat*, the data of a file as bytes."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        yield name, flat[begin:end].view(dtypes[entry["dtype"]]).view(entry["shape"])


def from_file(folder: Path) -> Pairs:
    """``torch.UntypedStorage.from_file``: torch's own mapping of a file."""
    import torch

    for path in paths(folder):
        start, entries = places(path)
        storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
        yield from cut(flat[start:], entries)


def preadv(folder: Path) -> Pairs:
    """``os.preadv`` of a whole file into fresh memory."""
    import torch

    for path in paths(folder):
        start, entries = places(path)
        flat = torch.empty(path.stat().st_size - start, dtype=torch.uint8)
        array: Any = flat.numpy()
        buffer, at = memoryview(array), 0
        with path.open("rb", buffering=0) as file:
            while at < len(buffer):
                at += os.preadv(file.fileno(), [buffer[at : at + (1 << 26)]], start + at)
        yield from cut(flat, entries)


def fastsafetensors(folder: Path) -> Pairs:
    """fastsafetensors, without GPUDirect, to the CPU."""
    import torch

    library = importlib.import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: [str(path) for path in paths(folder)]})
    buffers = loader.copy_files_to_device()
    for name in loader.get_keys():
        yield name, buffers.get_tensor(name)


def runai(folder: Path) -> Pairs:
    """The Run:ai model streamer, with its defaults."""
    with importlib.import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in paths(folder)])
        yield from streamer.get_tensors()


READERS: dict[str, Callable[[Path], Pairs]] = {
    "mapped": mapped,
    "load_file": load_file,
    "from_file": from_file,
    "preadv": preadv,
    "fastsafetensors": fastsafetensors,
    "runai": runai,
}
NEEDS = {"fastsafetensors": "fastsafetensors", "runai": "runai_model_streamer"}
OWN = {"fastsafetensors", "preadv", "runai"}
"""Those whose tensors are in memory of their own, so that nothing is to be copied if it fits."""


def child(who: str, folder: Path, dtype: str) -> None:
    """Read once, and print what it took."""
    import torch
    from transformers import AutoConfig

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    wanted = getattr(torch, dtype)
    is_ours = who.startswith("ours")
    model = on_meta(AutoConfig.from_pretrained(folder), wanted) if is_ours else None
    if is_ours:
        importlib.import_module("modelquirks.planner.execution.perform")
    before, started = memory("VmHWM"), time.perf_counter()
    if model is not None:
        from modelquirks.planner import Dispatcher

        plan = Dispatcher().plan(folder, model=model, device_map={"": "cpu"}, dtype=wanted)
        report = plan.load_into(model, copy=True)
        seconds = time.perf_counter() - started
        if who == "ours":
            seconds = report.seconds_by_step["make"]
        kept: dict[str, Any] = dict(model.state_dict())
    else:
        kept = {}
        for name, tensor in READERS[who](folder):
            same = (
                who in OWN and tensor.dtype == wanted and who != "runai"
            )  # it uses its memory anew
            fresh = tensor if same else torch.empty(tensor.shape, dtype=wanted).copy_(tensor)
            kept[name] = fresh
        seconds = time.perf_counter() - started
    above = memory("VmHWM") - before - sum(t.nbytes for t in kept.values())
    print(json.dumps({"seconds": seconds, "above": above, "sum": checksum(kept)}))


def checksum(kept: dict[str, Any]) -> int:
    """Return a number of the first bytes of every tensor: all readers must agree."""
    import torch

    total = 0
    for name in sorted(kept):
        first = kept[name].detach().reshape(-1)[:4096].contiguous().view(torch.uint8)
        total = zlib.crc32(first.numpy().tobytes(), total)
    return total


def measured(who: str, folder: Path, dtype: str, *, cold: bool) -> dict[str, Any]:
    """Read once in a process of its own."""
    for path in paths(folder):
        if cold:
            drop(path)
        else:
            path.read_bytes()
    words = [sys.executable, __file__, "--child", who, "--folder", str(folder), "--dtypes", dtype]
    done = subprocess.run(words, capture_output=True, text=True, env=with_compiled(), check=False)
    if done.returncode:
        sys.exit(f"{who} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Read the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder, args.dtypes)
        return
    size = sum(path.stat().st_size for path in paths(args.folder)) / 1e9
    away = [who for who, module in NEEDS.items() if importlib.util.find_spec(module) is None]
    table = Table("reader", title=f"{args.folder.name}, {size:.2f} GB, {args.rounds} rounds")
    names = [*(name for name in READERS if name not in away), "ours", "ours whole"]
    rows: dict[str, list[str]] = {name: [] for name in names}
    for dtype in args.dtypes.split(","):
        table.add_column(f"{dtype}, GB/s", justify="right")
        table.add_column("above the result, MB", justify="right")
        rounds = [
            {name: measured(name, args.folder, dtype, cold=args.cold) for name in names}
            for _ in range(args.rounds)
        ]
        sums = {name: rounds[0][name]["sum"] for name in names}
        assert len({*sums.values()}) == 1, f"the readers disagree: {sums}"
        for name in names:
            best = min((one[name] for one in rounds), key=lambda found: found["seconds"])
            rows[name] += [f"{size / best['seconds']:.2f}", f"{best['above'] / 1e6:,.0f}"]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    if away:
        console.print(f"not installed: {', '.join(away)}")


if __name__ == "__main__":
    main()
