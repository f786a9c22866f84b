"""DeepSpeed checkpoints: what we load, what ``zero_to_fp32.py`` gives, what the engine loads.

    python benchmarks/deepspeed_loads.py [--checkpoints DIR] [--only NAME …] [--changes]

For each checkpoint in DIR (those of the tests) that was saved on two ranks: planned and loaded by
us; put together by ``get_fp32_state_dict_from_zero_checkpoint``; loaded by
``engine.load_checkpoint`` in a training of the same kind, on two ranks and on one. "right" means
that every weight equals, bit for bit, that of the training that saved it. With ``--changes`` the
engine loads into trainings of other kinds instead, of which ``--expect`` warns; with ``--damaged``
checkpoints with one thing wrong are loaded. ``--json FILE`` keeps the results. Needs DeepSpeed
0.19.8 (``DS_BUILD_OPS=0 pip install deepspeed``); about 20 s a checkpoint on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

DATA = Path(__file__).parents[1] / "tests" / "data" / "deepspeed"
_MARK = "RESULT "
_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True)
class Job:
    """One load by the engine."""

    root: str
    kind: str
    config: dict[str, Any]
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    told: str = ""


def maker() -> Any:
    """Return the script that made the checkpoints: it has the models."""
    sys.dont_write_bytecode = True  # the folder of the checkpoints is data
    spec = spec_from_file_location("deepspeed_checkpoints", DATA / "make_checkpoints.py")
    if spec is None or spec.loader is None:
        raise ImportError("make_checkpoints.py of the tests is not there")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def verdict(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> str:
    """Compare weights with those that were trained."""
    both = {name: (found[name].to(value), value) for name, value in truth.items() if name in found}
    unlike = [name for name, (got, value) in both.items() if not torch.equal(got, value)]
    wrong = [n for n in unlike if not torch.equal(both[n][0].bfloat16(), both[n][1].bfloat16())]
    lacking = [name for name in truth if name not in found]
    faults = [
        f"{len(names)} of {len(truth)} {what}: {', '.join(names[:3])}"
        for what, names in (("wrong", wrong), ("lacking", lacking))
        if names
    ]
    return "; ".join(faults) or ("right, as rounded to bf16" if unlike else "right")


def said(error: BaseException) -> str:
    """Return an exception in one line."""
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text[:160]}" if text else f"{type(error).__name__} without text"
    )


def ours(root: Path, truth: Mapping[str, torch.Tensor]) -> str:
    """Plan and load into a model of just these tensors."""
    from modelquirks.planner import Dispatcher

    model = nn.Module()
    for name, tensor in truth.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, torch.zeros_like(tensor))
    try:
        pointers = (root / "latest", root / "latest_universal")
        latest = [pointer.read_text().strip() for pointer in pointers if pointer.is_file()]
        tag = latest[0] if latest else None  # said, as other weights may lie beside the states
        plan = Dispatcher().plan(root, model=model, device_map=None, tag=tag)
        plan.execute(model)
    except Exception as error:
        return said(error)
    return verdict(model.state_dict(), truth)


def theirs(root: Path, truth: Mapping[str, torch.Tensor]) -> str:
    """Put together what ``zero_to_fp32.py`` gives."""
    module = import_module("deepspeed.utils.zero_to_fp32")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = module.get_fp32_state_dict_from_zero_checkpoint(str(root))
    except Exception as error:
        return said(error)
    return verdict({name: tensor.float() for name, tensor in found.items()}, truth)


def child(jobs: list[Job]) -> None:
    """Load in this process, one of a group; end where the others do not come to an end."""
    import_module("deepspeed").init_distributed(dist_backend="gloo")
    made = maker()
    store = dist.distributed_c10d._get_default_store()
    for number, job in enumerate(jobs):
        try:
            run = made.start(job.kind, job.config)
            path, _ = run.engine.load_checkpoint(job.root, **job.options)
            text = verdict(run.weights(), load_file(Path(job.root) / "truth.safetensors"))
            if path is None:
                text = f"no error, nothing loaded ({text})"
        except Exception as error:
            text = said(error)
        _report(number, text)
        store.set(f"job {number} {dist.get_rank()}", "done")
        try:
            store.wait([f"job {number} {rank}" for rank in range(job.ranks)], _PATIENCE)
        except Exception:
            os._exit(1)
    os._exit(0)


def _report(number: int, text: str) -> None:
    line = json.dumps({"job": number, "rank": dist.get_rank(), "text": text})
    sys.stdout.write(f"\n{_MARK}{line}\n")
    sys.stdout.flush()


def loaded(jobs: Iterable[Job]) -> list[str]:
    """Return what each load came to. A process does one kind: AutoTP changes all after it."""
    wanted = [*jobs]
    found: dict[int, str] = {}
    for key in dict.fromkeys(_process_of(job) for job in wanted):
        numbers = [number for number, job in enumerate(wanted) if _process_of(job) == key]
        found |= zip(numbers, _loaded_alike([wanted[number] for number in numbers]), strict=True)
    return [found[number] for number in range(len(wanted))]


def _process_of(job: Job) -> tuple[int, str]:
    return job.ranks, job.kind.partition("-")[0]


def _loaded_alike(jobs: list[Job]) -> Iterator[str]:
    made = maker()
    total, ranks = len(jobs), jobs[0].ranks
    while jobs:
        words = json.dumps([asdict(job) for job in jobs])
        _, output = made.launch(
            __file__, "--child", words, ranks=ranks, timeout=240 + 30 * len(jobs)
        )
        results: dict[int, dict[int, str]] = {}
        for line in output.splitlines():
            if line.startswith(_MARK):
                one = json.loads(line.removeprefix(_MARK))
                results.setdefault(one["job"], {})[one["rank"]] = one["text"]
        done = max(results, default=-1) + 1
        for number in range(done):
            yield _joined(results[number], jobs[number].ranks)
        if not done:
            done = 1
            yield f"ended without a word: {output.strip().splitlines()[-1:]}"
        jobs = jobs[done:]
        print(f"{total - len(jobs)} of {total} on {ranks} ranks", file=sys.stderr, flush=True)


def _joined(texts: Mapping[int, str], ranks: int) -> str:
    """Return what all ranks say, or each."""
    every = {rank: texts.get(rank, "hangs") for rank in range(ranks)}
    if len({*every.values()}) == 1:
        return every[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in every.items())


def config_for(kind: str, config: Mapping[str, Any], ranks: int) -> tuple[str, dict[str, Any]]:
    """Return the training of the same kind on so many ranks."""
    if ranks > 1:
        return kind, dict(config)
    zero = {k: v for k, v in config.get("zero_optimization", {}).items() if "hpz" not in k}
    rest = {k: v for k, v in config.items() if k not in ("zero_optimization", "tensor_parallel")}
    return kind.replace("pipeline-2", "pipeline-1"), {**rest, "zero_optimization": zero}


def same(root: Path, ranks: int) -> Job:
    """Return the job that loads a checkpoint into a training like the one that saved it."""
    made = maker()
    source = made.UNIVERSAL.get(root.name, root.name)
    case = made.CASES[source]
    kind, config = config_for(case.kind, case.config, ranks)
    if source != root.name:
        config |= {"checkpoint": {"load_universal": True}}
    return Job(str(root), kind, config, ranks)


_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"load_optimizer_states": False},
    {"load_module_only": True},
)
_CHANGES = (
    *(("zero2_fp32", "zero2_fp32", 1), ("zero3_fp32", "zero3_fp32", 1)),
    *(("zero0_fp32", "zero0_fp32", 1), ("autotp2_zero1", "autotp2_zero1", 1)),
    *(("autotp2_zero3", "autotp2_zero3", 1), ("moe_ep2_zero2", "moe_ep2_zero2", 1)),
    *(("moe_ep2_zero0", "moe_ep2_zero0", 1), ("pipeline_pp2_zero1", "pipeline_pp1_dp2_zero1", 1)),
    *(
        ("universal_from_zero2", "zero2_fp32", 1),
        ("universal_from_zero2", "universal zero2_fp32", 1),
    ),
    *(("zero3_fp32", "zero3_fp32", 2), ("zero2_fp32", "universal zero2_fp32", 2)),
    *(("zero1_fp32", "zero2_fp32", 2), ("zero2_fp32", "zero3_fp32", 2)),
    *(("zero3_fp32", "zero2_fp32", 2), ("zero2_fp32", "zero0_fp32", 2)),
    *(("zero3_fp32", "zero0_fp32", 2), ("zero0_fp32", "zero2_fp32", 2)),
    *(("zero0_fp32", "zero3_fp32", 2), ("zero2_fp32", "zero2_bf16", 2)),
    *(("zero2_bf16", "zero2_fp32", 2), ("zero3_fp32", "zero3_bf16", 2)),
    *(("zero3_bf16", "zero3_fp32", 2), ("zero0_fp32", "zero1_bf16", 2)),
    *(("zero1_bf16", "zero2_bf16", 2), ("zero2_bf16", "zero1_bf16", 2)),
    *(("pipeline_pp2_zero1", "pipeline_pp1_dp2_zero1", 2), ("autotp2_zero1", "tp1", 2)),
    *(("universal_from_zero2", "universal zero3_fp32", 2),),
    *(("universal_from_zero3", "universal zero2_fp32", 2),),
    *(("universal_from_zero2", "universal zero2_bf16", 2),),
    *(("zero2_param_align", "zero2_fp32", 2), ("zero2_fp32", "zero2_param_align", 2)),
)
"""Checkpoint, the training that loads it, and on how many ranks."""


def changes(folder: Path) -> Iterator[Job]:
    """Yield loads into trainings of another kind, by each of the ways that DeepSpeed has."""
    cases = maker().CASES
    for name, to, ranks in _CHANGES:
        case = cases["autotp2_zero1"] if to == "tp1" else cases[to.removeprefix("universal ")]
        kind, config = config_for(case.kind, case.config, ranks)
        if to == "tp1":
            del config["tensor_parallel"]
        if to.startswith("universal "):
            config |= {"checkpoint": {"load_universal": True}}
        for options in _WAYS if (folder / name).is_dir() else ():
            more = "".join(f", {key}={value}" for key, value in options.items())
            told = f"{name} → {to} on {ranks}{more}"
            yield Job(str(folder / name), kind, config, ranks, options, told)


def damaged(folder: Path, out: Path) -> Iterator[tuple[str, Path]]:
    """Yield copies of checkpoints of ZeRO 2 and 3, each with one thing wrong."""
    for case in ("zero2_fp32", "zero3_fp32"):
        for name, damage in _DAMAGES.items():
            root = Path(shutil.copytree(folder / case, out / f"{case}-{name}"))
            damage(root / (root / "latest").read_text().strip())
            yield f"{case}, {name}", root


def _optims(folder: Path) -> tuple[Path, Path]:
    first, second = sorted(folder.glob("*_optim_states.pt"))
    return first, second


def _swap(folder: Path) -> None:
    one, two = _optims(folder)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for path in folder.glob("*_model_states.pt"):
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)


def _reorder(state: dict[str, Any]) -> None:
    group = state["param_shapes"][1]
    group["lin1.bias"] = group.pop("lin1.bias")


def _resize(state: dict[str, Any]) -> None:
    state["param_shapes"][0]["lin2.weight"] = torch.Size((2, 5))


_DAMAGES: dict[str, Callable[[Path], object]] = {
    "an optimizer's file copied over another": lambda f: shutil.copy(*_optims(f)),
    "optimizer's files swapped": _swap,
    "order of parameters changed": lambda f: _edit(f, _reorder),
    "a parameter smaller": lambda f: _edit(f, _resize),
    "a group fewer": lambda f: _edit(f, lambda state: state["param_shapes"].pop()),
    "an optimizer's file too many": lambda f: shutil.copy(
        _optims(f)[1], f / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    ),
    "files with and without bf16_": lambda f: [
        shutil.copy(path, f / f"bf16_{path.name}") for path in _optims(f)
    ],
    "renamed folder": lambda f: [
        f.rename(f.with_name("global_step500")),
        (f.parent / "latest").write_text("global_step500"),
    ],
    "brackets in the tag": lambda f: [
        f.rename(f.with_name("best [1]")),
        (f.parent / "latest").write_text("best [1]"),
    ],
    "no latest": lambda f: (f.parent / "latest").unlink(),
    "latest of nothing": lambda f: (f.parent / "latest").write_text("gone"),
    "an optimizer's file cut off": lambda f: os.truncate(
        _optims(f)[1], _optims(f)[1].stat().st_size - 300
    ),
    "last model file missing": lambda f: sorted(f.glob("*_model_states.pt"))[-1].unlink(),
    "an optimizer's file missing": lambda f: _optims(f)[1].unlink(),
}


def main() -> None:
    """Print a table, as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, default=DATA)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--changes", action="store_true")
    parser.add_argument("--damaged", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        child([Job(**one) for one in json.loads(args.child)])
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    rows = _damaged(args) if args.damaged else _changed(args) if args.changes else _compared(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    for row in rows:
        print("|", " | ".join(row), "|", flush=True)


def _changed(args: argparse.Namespace) -> list[list[str]]:
    rows = [["checkpoint → job", "engine.load_checkpoint"], ["---", "---"]]
    wanted = [job for job in changes(args.checkpoints) if not args.only or job.told in args.only]
    return rows + [[job.told, text] for job, text in zip(wanted, loaded(wanted), strict=True)]


def _damaged(args: argparse.Namespace) -> list[list[str]]:
    rows = [["damage", "ours", "zero_to_fp32.py", "engine on 2 ranks"], ["---"] * 4]
    cases = maker().CASES
    with tempfile.TemporaryDirectory() as out:
        variants = [*damaged(args.checkpoints, Path(out))]
        named = [(str(root), cases[root.name.partition("-")[0]]) for _, root in variants]
        jobs = [Job(root, case.kind, case.config) for root, case in named]
        for (told, root), text in zip(variants, loaded(jobs), strict=True):
            truth = load_file(root / "truth.safetensors")
            rows.append([told, ours(root, truth), theirs(root, truth), text])
    return rows


def _compared(args: argparse.Namespace) -> list[list[str]]:
    roots = sorted(p.parent for p in args.checkpoints.glob("*/truth.safetensors"))
    made = maker()
    roots = [
        root
        for root in roots
        if made.CASES[made.UNIVERSAL.get(root.name, root.name)].ranks == 2
        and (not args.only or root.name in args.only)
    ]
    engine = [loaded(same(root, ranks) for root in roots) for ranks in (2, 1)]
    rows = [
        ["checkpoint", "ours", "zero_to_fp32.py", "engine on 2 ranks", "engine on 1"],
        ["---"] * 5,
    ]
    for root, two, one in zip(roots, *engine, strict=True):
        truth = load_file(root / "truth.safetensors")
        rows.append([root.name, ours(root, truth), theirs(root, truth), two, one])
    return rows


if __name__ == "__main__":
    main()
