"""DeepSpeed checkpoints: what we load, what ``zero_to_fp32.py`` gives, what the engine loads.

    python benchmarks/deepspeed_loads.py [--checkpoints DIR] [--only NAME …] [--changes]

For each checkpoint in DIR (those of the tests) that was saved on two ranks: planned and loaded by
us; put together by ``get_fp32_state_dict_from_zero_checkpoint``; loaded by
``engine.load_checkpoint`` in a training of the same kind, on two ranks and on one. "right" means
that every weight equals, bit for bit, that of the training that saved it. With ``--changes`` the
engine loads into trainings of other kinds instead, of which ``--expect`` warns. ``--json FILE``
keeps the results. Needs DeepSpeed 0.19.8 (``DS_BUILD_OPS=0 pip install deepspeed``); about 20 s a
checkpoint on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
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
    lacking = [name for name in truth if name not in found]
    wrong = [
        n for n, t in found.items() if n in truth and not torch.equal(t.to(truth[n]), truth[n])
    ]
    faults = [
        f"{len(names)} of {len(truth)} {what}: {', '.join(names[:3])}"
        for what, names in (("wrong", wrong), ("lacking", lacking))
        if names
    ]
    return "; ".join(faults) or "right"


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
        plan = Dispatcher().plan(root, model=model, device_map=None)
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
    """Load in this process, one of a group; end at the first error, which may have hung others."""
    import_module("deepspeed").init_distributed(dist_backend="gloo")
    made = maker()
    for number, job in enumerate(jobs):
        try:
            run = made.start(job.kind, job.config)
            path, _ = run.engine.load_checkpoint(job.root, **job.options)
            truth = load_file(Path(job.root) / "truth.safetensors")
            text = verdict(run.weights(), truth)
            if path is None:
                text = f"no error, nothing loaded ({text})"
        except Exception as error:
            _report(number, said(error))
            os._exit(1)
        _report(number, text)


def _report(number: int, text: str) -> None:
    line = json.dumps({"job": number, "rank": dist.get_rank(), "text": text})
    sys.stdout.write(f"\n{_MARK}{line}\n")
    sys.stdout.flush()


def loaded(jobs: list[Job]) -> Iterator[str]:
    """Yield what each load came to; all must be for one number of ranks."""
    made = maker()
    total, ranks = len(jobs), jobs[0].ranks if jobs else 0
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
    cases = maker().CASES
    source = root.name.removeprefix("universal_from_")
    kind, config = cases.get(source) or cases[f"{source}_fp32"]
    kind, config = config_for(kind, config, ranks)
    if source != root.name:
        config |= {"checkpoint": {"load_universal": True}}
    return Job(str(root), kind, config, ranks)


def changes(folder: Path) -> Iterator[Job]:
    """Yield loads into trainings of another kind."""
    cases = maker().CASES

    def job(name: str, to: str, ranks: int = 2, **options: Any) -> Job:
        case = cases[to]
        kind, config = config_for(case.kind, case.config, ranks)
        extra = "".join(f", {key}={value}" for key, value in options.items())
        told = f"{name} → {to} on {ranks}{extra}"
        return Job(str(folder / name), kind, config, ranks, options, told)

    weights, module = {"load_optimizer_states": False}, {"load_module_only": True}
    for ways in ({}, weights, module):
        yield job("zero2_fp32", "zero2_fp32", 1, **ways)
        yield job("zero3_fp32", "zero3_fp32", 1, **ways)
        yield job("zero0_fp32", "zero0_fp32", 1, **ways)
        yield job("autotp2_zero1", "autotp2_zero1", 1, **ways)
        yield job("pipeline_pp2_zero1", "pipeline_pp1_dp2_zero1", 1, **ways)
        yield job("moe_ep2_zero2", "moe_ep2_zero2", 1, **ways)
        yield job("moe_ep2_zero0", "moe_ep2_zero0", 1, **ways)
    for ways in ({}, weights, module):
        yield job("zero1_fp32", "zero2_fp32", **ways)
        yield job("zero2_fp32", "zero3_fp32", **ways)
        yield job("zero3_fp32", "zero2_fp32", **ways)
        yield job("zero2_fp32", "zero0_fp32", **ways)
        yield job("zero0_fp32", "zero2_fp32", **ways)
        yield job("zero0_fp32", "zero3_fp32", **ways)
        yield job("zero2_fp32", "zero2_bf16", **ways)
        yield job("zero2_bf16", "zero2_fp32", **ways)
        yield job("zero3_fp32", "zero3_bf16", **ways)
        yield job("zero1_bf16", "zero2_bf16", **ways)
        yield job("zero2_bf16", "zero1_bf16", **ways)
        yield job("pipeline_pp2_zero1", "pipeline_pp1_dp2_zero1", **ways)


def main() -> None:
    """Print a table, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, default=DATA)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--changes", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        child([Job(**one) for one in json.loads(args.child)])
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    rows = _changed(args) if args.changes else _compared(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    for row in rows:
        print("|", " | ".join(row), "|", flush=True)


def _changed(args: argparse.Namespace) -> list[list[str]]:
    rows = [["checkpoint → job", "engine.load_checkpoint"], ["---", "---"]]
    wanted = [job for job in changes(args.checkpoints) if not args.only or job.told in args.only]
    for ranks in (1, 2):
        jobs = [job for job in wanted if job.ranks == ranks]
        rows += [[job.told, text] for job, text in zip(jobs, loaded(jobs), strict=True)]
    return rows


def _compared(args: argparse.Namespace) -> list[list[str]]:
    roots = sorted(p.parent for p in args.checkpoints.glob("*/truth.safetensors"))
    roots = [root for root in roots if not args.only or root.name in args.only]
    engine = [[*loaded([same(root, ranks) for root in roots])] for ranks in (2, 1)]
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
