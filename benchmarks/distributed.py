"""Loading by several ranks: bytes read against each rank's share, time, and whether it is right.

    python benchmarks/distributed.py [--gb 1] [--ranks 2 4] [--json FILE] [--plot FILE]

Makes a dense Llama, a Mixtral whose experts are stored one by one, and a GPT-OSS packed in mxfp4,
each of about --gb GB in bfloat16, in a temporary folder, and has gloo processes of this machine
load them: by fully_shard, by the tensor parallel plan of transformers, by both, and by its expert
parallel plan. Beside ours stand, in the same processes: ``from_pretrained`` of transformers with
the same ``distributed_config``; for the dense model also ``set_model_state_dict`` with the whole
state dict on each rank, and with ``broadcast_from_rank0``. Our bytes are counted at the read calls,
and a rank's share is what its parts take in the files. A part that is in the file as it is in
memory stays a view of it, so the time to touch all that was loaded is added to everybody's.
Parameters are gathered and compared bit for bit with one process's on rank 0. Logits are compared
with those of one process, whose sums are in another order than those of tensor and expert parallel
layers, and with those of the other contenders. Needs transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bars import Bar, bars
from safetensors.torch import load_file, save_file
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from modelquirks.planner import Dispatcher, Plan, open_manifest
from modelquirks.planner.mapping.recipes import stored_names
from modelquirks.planner.model.build import empty_weights

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

library: Any = import_module("transformers")
parallel: Any = import_module("transformers.distributed")

GB = 1 << 30
PLAN: dict[str, Any] = {"device_map": None, "dequantize": True, "dtype": "bfloat16"}
Row = dict[str, Any]

WAYS: Mapping[str, tuple[str, Callable[[int], dict[str, int]]]] = {
    "dense, fully_shard": ("dense", lambda n: {"fsdp_size": n}),
    "dense, tensor parallel": ("dense", lambda n: {"tp_size": n}),
    "dense, both": ("dense", lambda n: {"fsdp_size": n // 2, "tp_size": 2}),
    "experts one by one, expert parallel": ("moe", lambda n: {"tp_size": n, "ep_size": n}),
    "mxfp4 made plain, expert parallel": ("mxfp4", lambda n: {"tp_size": n, "ep_size": n}),
}
"""What is loaded how: the checkpoint, and transformers' settings for a number of ranks."""


def make(folder: Path, gb: float) -> None:
    """Write the three checkpoints."""
    tiny_gpt_oss = import_module("tiny_gpt_oss")

    def layers(each: int, other: int = 0) -> int:
        return max(2, round((gb * GB / 2 - other) / each))

    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    words = 32000
    common: dict[str, Any] = {"num_attention_heads": 16, "dtype": "bfloat16"}
    dense = {"hidden_size": 2048, "intermediate_size": 5632, "num_key_value_heads": 16}
    n_layers = layers(4 * 2048**2 + 3 * 2048 * 5632, 2 * words * 2048)
    library.LlamaForCausalLM(
        library.LlamaConfig(num_hidden_layers=n_layers, vocab_size=words, **dense, **common)
    ).save_pretrained(folder / "dense")
    moe = {"hidden_size": 1024, "intermediate_size": 1792, "num_key_value_heads": 16}
    library.MixtralForCausalLM(
        library.MixtralConfig(
            num_hidden_layers=layers(16 * 3 * 1024 * 1792),
            num_local_experts=16,
            vocab_size=4000,
            **moe,
            **common,
        )
    ).save_pretrained(folder / "moe")
    torch.set_default_dtype(torch.float32)
    n_layers = layers(16 * 3 * 1024**2)
    config = tiny_gpt_oss.CONFIG | {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_local_experts": 16,
        "num_hidden_layers": n_layers,
        "layer_types": ["full_attention"] * n_layers,
    }
    (folder / "mxfp4").mkdir()
    tensors = dict(tiny_gpt_oss.tensors(config))
    save_file(tensors, folder / "mxfp4" / "model.safetensors", metadata={"format": "pt"})
    (folder / "mxfp4" / "config.json").write_text(json.dumps(config))


def empty(folder: Path, settings: Mapping[str, int]) -> nn.Module:
    """Return the model without weights, divided as transformers divides it."""
    config = library.AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)
    kind = getattr(library, config.architectures[0])
    sizes = parallel.DistributedConfig(**settings)
    distributed, _, mesh = kind.prepare_distribute_model(sizes)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with empty_weights():
            model: Any = kind(config)
    finally:
        torch.set_default_dtype(torch.float32)
    made: nn.Module = kind.maybe_distribute_model(model, distributed, mesh)
    return made.eval()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def share(model: nn.Module, recipes: Mapping[str, float]) -> float:
    """Return the bytes that this rank's parts take in the files."""
    return sum(
        recipes[name] * local(tensor).numel()
        for name, tensor in model.state_dict().items()
        if name in recipes
    )


def stored_bytes(folder: Path, model: nn.Module, plan: Plan) -> dict[str, float]:
    """Return for each tensor of the model how many stored bytes one element takes."""
    tensors = open_manifest(folder).tensors
    sizes = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    return {
        name: sum(tensors[s].nbytes or 0 for s in stored_names(recipe.node, env)) / sizes[name]
        for recipe in plan.recipes
        for name, env in recipe.items()
    }


@cache
def dispatcher() -> Dispatcher:
    """Return one that has loaded the plugins, as transformers is imported by then."""
    made = Dispatcher()
    made.registry.records  # noqa: B018  (loads them)
    return made


def ours(folder: Path, settings: Mapping[str, int], row: Row) -> nn.Module:
    model = empty(folder, settings)
    plugins = dispatcher()
    dist.barrier()
    started = time.perf_counter()
    plan = plugins.plan(folder, model=model, **PLAN)
    row["plan_s"] = time.perf_counter() - started
    report = plan.load_into(model)
    row["seconds"] = time.perf_counter() - started
    row["bytes_read"] = report.bytes_read
    row["share"] = share(model, stored_bytes(folder, model, plan))
    row["notes"] = [note.message for note in report.notes]
    return model


def theirs(folder: Path, settings: Mapping[str, int], row: Row) -> nn.Module:
    dist.barrier()
    started = time.perf_counter()
    sizes = parallel.DistributedConfig(**settings)
    model: nn.Module = library.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, distributed_config=sizes
    )
    row["seconds"] = time.perf_counter() - started
    return model


def whole_state(
    folder: Path, settings: Mapping[str, int], row: Row, *, broadcast: bool
) -> nn.Module:
    model = empty(folder, settings)
    dist.barrier()
    started = time.perf_counter()
    state: dict[str, Any] = {}
    if not broadcast or dist.get_rank() == 0:
        for path in folder.glob("*.safetensors"):
            state |= load_file(path)
    row["bytes_read"] = sum(tensor.nbytes for tensor in state.values())
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
    set_model_state_dict(model, state, options=options)
    for name, tensor in model.named_buffers():
        tensor.copy_(buffers[name])
    row["seconds"] = time.perf_counter() - started
    return model


def contenders(case: str) -> Iterator[tuple[str, Callable[..., nn.Module]]]:
    yield "modelquirks", ours
    yield "transformers", theirs
    if case == "dense, fully_shard":
        yield "state dict on each rank", lambda *a: whole_state(*a, broadcast=False)
        yield "broadcast from rank 0", lambda *a: whole_state(*a, broadcast=True)


def touch(model: nn.Module) -> float:
    """Read every byte of this rank's parts once; return the seconds that takes."""
    started = time.perf_counter()
    for parameter in model.parameters():
        if (own := local(parameter)).numel():
            own.contiguous().view(-1).view(torch.int16).max()
    return time.perf_counter() - started


def logits_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        logits: Any = model(ids).logits
    whole: torch.Tensor = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return whole


def compared(model: nn.Module, said: torch.Tensor, reference: nn.Module | None) -> Row:
    """Return which parameters differ from the reference (on rank 0), and by how much logits do."""
    wrong: list[str] = []
    expected = {} if reference is None else dict(reference.state_dict())
    for name, tensor in model.state_dict().items():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if reference is not None and not torch.equal(found, expected[name]):
            wrong.append(name)
    if reference is None:
        return {}
    theirs = logits_of(reference)
    off = ((said - theirs).abs().max() / theirs.abs().max()).item()
    return {"differing": wrong, "logits_equal": torch.equal(said, theirs), "logits_off": off}


def one_process(folder: Path) -> nn.Module:
    """Return the whole model, loaded by this process alone."""
    model: Any = dispatcher().model(folder)
    plan = dispatcher().plan(folder, model=model, **PLAN)
    made: nn.Module = plan.execute(model)
    return made.eval()


def rank_main(rank: int, size: int, folder: Path) -> None:
    """Load everything in every way, as one rank."""
    warnings.simplefilter("ignore")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    torch.set_num_threads(1)
    store = FileStore(str(folder / f"store{size}"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10)
    )
    one_process(folder / "dense")  # so that nobody's first load is measured
    rows: list[Row] = []
    first = torch.empty(0)
    for case, (name, settings_for) in WAYS.items():
        if case.endswith("both") and size < 4:
            continue
        for contender, load in contenders(case):
            row: Row = {"case": case, "contender": contender, "rank": rank, "ranks": size}
            model = load(folder / name, settings_for(size), row)
            row["touch_s"] = touch(model)
            dist.barrier()
            said = logits_of(model)
            if contender == "modelquirks":
                first = said
                reference = None if rank else one_process(folder / name)
                row |= compared(model, said, reference)
                del reference
            else:
                row["logits_as_ours"] = torch.equal(said, first)
            rows.append(row)
            del model
            gc.collect()
            dist.barrier()
    (folder / f"rows{size}.{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, folder: Path) -> list[Row]:
    """Have *size* ranks do it; return what each of them measured."""
    words = [sys.executable, __file__, "--folder", str(folder), "--ranks", str(size), "--rank"]
    ranks = [subprocess.Popen([*words, str(rank)]) for rank in range(size)]
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit(f"{size} ranks: one of them failed")
    paths = (folder / f"rows{size}.{rank}.json" for rank in range(size))
    return [row for path in paths for row in json.loads(path.read_text())]


def loads(rows: list[Row]) -> Mapping[tuple[int, str, str], list[Row]]:
    """Return what each rank measured, by number of ranks, way and contender."""
    found: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["ranks"], row["case"], row["contender"]), []).append(row)
    return found


def slowest(those: list[Row]) -> float:
    """Return the seconds until the last rank was ready."""
    return max(float(row["seconds"]) + float(row["touch_s"]) for row in those)


def plot(rows: list[Row]) -> str:
    """Return bars of the times as SVG."""
    groups: dict[str, list[Bar]] = {}
    for (ranks, case, contender), those in loads(rows).items():
        read = sum(row.get("bytes_read", 0) for row in those) / GB
        note = f"{read:.2f} GiB read by all" if read else ""
        groups.setdefault(f"{ranks} ranks, {case}", []).append(Bar(contender, slowest(those), note))
    return bars(groups)


def show(rows: list[Row]) -> None:
    """Print a line for each way, rank count and contender."""
    for (ranks, case, contender), those in loads(rows).items():
        seconds = slowest(those)
        read = "/".join(f"{row['bytes_read'] / GB:.3f}" for row in those if "bytes_read" in row)
        text = f"{ranks} ranks  {case:36}{contender:24}{seconds:7.2f} s"
        if "share" in those[0]:
            worst = max(row["bytes_read"] / row["share"] for row in those)
            first = those[0]
            logits = "equal" if first["logits_equal"] else f"within {first['logits_off']:.1e}"
            right = "all equal" if not first["differing"] else f"{len(first['differing'])} WRONG"
            text += (
                f"  read {read} GiB, {worst:.4f} of the share; parameters {right}, logits {logits}"
            )
        else:
            text += f"  read {read} GiB" if read else ""
            same = all(row["logits_as_ours"] for row in those)
            text += f"  logits {'equal to' if same else 'NOT'} ours"
        print(text, flush=True)


def main() -> int:
    """Make the checkpoints, run, print; 1 if something was loaded wrong or too much was read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="the times as a picture (SVG)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.rank, args.ranks[0], args.folder)
        return 0
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), args.gb)
        rows = [row for size in args.ranks for row in run(size, Path(name))]
    show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.plot is not None:
        args.plot.write_text(plot(rows), encoding="utf-8")
    mine = [row for row in rows if row["contender"] == "modelquirks"]
    wrong = any(row.get("differing") or row["bytes_read"] > 1.05 * row["share"] for row in mine)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
