"""What a dry run of a repository moves, beside ``huggingface_hub.get_safetensors_metadata``.

    python benchmarks/hub.py [--files N] [--tensors N ...]

A server on this machine has a sharded model of 5 GB a file, of which only the headers exist. Both
read all of them, ours with a plan as its result. Bytes are those of the bodies that the server
sent; requests are all that it saw, redirects included. Seconds are of this machine, without any
distance; the server shares its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from hub_server import Blob, HubServer, Repo, serving

NAME = "org/name"
INDEX = "model.safetensors.index.json"


def header(tensors: Mapping[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """Return the start of a safetensors file as the library writes it, and the file's size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in tensors.items():
        end = begin + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + begin


def model(n_files: int, n_tensors: int) -> dict[str, Blob]:
    """Return the files of a model with experts of its own in each file."""
    found = {"config.json": Blob(json.dumps({"model_type": "mixtral"}).encode())}
    weight_map: dict[str, str] = {}
    for number in range(n_files):
        at = f"model.layers.{number}"
        wide, narrow = 4096, max(8, 8 * (5 * 10**9 // (n_tensors * 2 * 4096 * 8)))
        tensors: dict[str, tuple[int, ...]] = {f"{at}.input_layernorm.weight": (wide,)}
        for expert in range(-(-(n_tensors - 1) // 3)):
            for which in ("w1", "w2", "w3"):
                shape = (wide, narrow) if which == "w2" else (narrow, wide)
                tensors[f"{at}.block_sparse_moe.experts.{expert}.{which}.weight"] = shape
        shard = f"model-{number + 1:05}-of-{n_files:05}.safetensors"
        head, size = header(tensors)
        found[shard] = Blob(head, size, lfs=True)
        weight_map |= dict.fromkeys(tensors, shard)
    index = {"metadata": {"total_size": sum(b.n_bytes for b in found.values())}}
    found[INDEX] = Blob(json.dumps({**index, "weight_map": weight_map}, indent=2).encode())
    return found


def ours() -> None:
    """Plan without a model, as ``modelquirks plan --dry-run`` does."""
    from modelquirks.planner import Dispatcher

    plan = Dispatcher().plan(NAME, max_memory={"cpu": "99TiB"})
    if not plan.ok:
        raise SystemExit(plan.refusal())


def theirs() -> None:
    """Read the same headers, and nothing else."""
    from huggingface_hub import get_safetensors_metadata

    get_safetensors_metadata(NAME)


def measure(hub: HubServer, what: str, call: Callable[[], None], *, needed: int) -> None:
    """Print what one call moves."""
    hub.forget()
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    moved, requests = hub.body_bytes, len(hub.seen)
    ratio = f"{moved / needed:5.2f}"
    print(f"  {what:<32}{moved:>12,} bytes  {ratio} x  {requests:>4} requests  {seconds:5.2f} s")


def compare(hub: HubServer, n_files: int, n_tensors: int) -> None:
    """Print both for one model, each with nothing cached, and ours once more."""
    from huggingface_hub import constants

    files = model(n_files, n_tensors)
    hub.repos = {NAME: Repo.of(files)}
    heads = sum(len(blob.head) for name, blob in files.items() if name.endswith(".safetensors"))
    rest = files[INDEX].n_bytes + files["config.json"].n_bytes
    print(
        f"{n_files} files of {heads // n_files:,} bytes of header each, "
        f"{sum(blob.n_bytes for blob in files.values()):,} bytes in all: "
        f"{heads:,} of headers, {rest:,} of index and config"
    )
    for what, call in (("get_safetensors_metadata", theirs), ("modelquirks", ours)):
        with tempfile.TemporaryDirectory() as home:
            constants.HF_HUB_CACHE = f"{home}/hub"
            constants.HF_ASSETS_CACHE = f"{home}/assets"
            measure(hub, what, call, needed=heads + rest)
            if call is ours:
                measure(hub, "modelquirks again", call, needed=heads + rest)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=60)
    parser.add_argument("--tensors", type=int, nargs="*", default=[30, 300, 1500])
    args = parser.parse_args()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with serving(HubServer()) as hub, tempfile.TemporaryDirectory() as home:
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": home}
        hub.repos = {NAME: Repo.of(model(1, 4))}
        ours()  # imports, and what huggingface_hub asks for once
        for n_tensors in args.tensors:
            compare(hub, args.files, n_tensors)


if __name__ == "__main__":
    main()
