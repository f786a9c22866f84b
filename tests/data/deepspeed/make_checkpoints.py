"""Make the checkpoints of this folder anew, each with the weights of the live training beside it.

    python tests/data/deepspeed/make_checkpoints.py OUT [CASE …]

Needs DeepSpeed 0.19.8 (``DS_BUILD_OPS=0 pip install deepspeed``), transformers for AutoTP, and a
compiler for ``zero2_cpuadam``. Each case is trained for a few steps by two or more processes on the
CPU (gloo); the fp32 masters are asked for through ``safe_get_full_fp32_param`` before anything is
saved, so that the truth does not depend on ``zero_to_fp32.py``. Without a case all are made, about
20 s each. Of each parameter of a universal checkpoint only ``fp32.pt`` is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

__all__ = ["CASES", "UNIVERSAL", "Run", "launch", "start", "write"]

Weights = dict[str, torch.Tensor]


class Case(NamedTuple):
    """What is trained, and DeepSpeed's config."""

    kind: str
    config: dict[str, Any]
    ranks: int = 2


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


_BF16 = {"bf16": {"enabled": True}}
_OWN = {"zero_force_ds_cpu_optimizer": False}
_CPU = {"device": "cpu"}

CASES: dict[str, Case] = {
    "zero0_fp32": Case("tiny", _zero(0)),
    "zero1_fp32": Case("tiny", _zero(1)),
    "zero2_fp32": Case("tiny", _zero(2)),
    "zero3_fp32": Case("tiny", _zero(3, stage3_param_persistence_threshold=0)),
    "zero3_subgroups": Case(
        "tiny", _zero(3, sub_group_size=30, stage3_param_persistence_threshold=10)
    ),
    "zero1_bf16": Case("tiny", _zero(1) | _BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2_bf16": Case("tiny", _zero(2) | _BF16),
    "zero3_bf16": Case("tiny", _zero(3, stage3_gather_16bit_weights_on_model_save=True) | _BF16),
    "zero2_round_robin": Case("tiny", _zero(2, round_robin_gradients=True)),
    "zero2_param_align": Case("tiny", _zero(2, parameter_alignment=True)),
    "zero1_elastic": Case("tiny", _zero(1, elastic_checkpoint=True)),
    "zero2_offload_cpu": Case("tiny", _zero(2, offload_optimizer=_CPU) | _OWN),
    "zero3_offload_cpu": Case("tiny", _zero(3, offload_optimizer=_CPU, offload_param=_CPU) | _OWN),
    "zero3_hpz": Case(
        "tiny", _zero(3, zero_hpz_partition_size=2, stage3_param_persistence_threshold=0)
    ),
    "zero3_init": Case("tiny-init", _zero(3, stage3_param_persistence_threshold=0)),
    "zero2_no_frozen": Case("tiny-trained", _zero(2)),
    "zero2_exclude_frozen": Case("tiny", _zero(2)),
    "zero2_legacy_pickle": Case(
        "tiny", _zero(2) | {"checkpoint": {"checkpoint_serialization": False}}
    ),
    "zero3_two_tags": Case("tiny", _zero(3, stage3_param_persistence_threshold=0)),
    "zero2_cpuadam": Case(
        "tiny-adam",
        _zero(2, offload_optimizer=_CPU) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    ),
    "pipeline_pp2_zero1": Case("pipeline-2", _zero(1)),
    "pipeline_pp1_dp2_zero1": Case("pipeline-1", _zero(1)),
    "pipeline_pp2_bf16_zero0": Case("pipeline-2", _BF16),
    "autotp2_zero1": Case("autotp", _zero(1) | {"tensor_parallel": {"autotp_size": 2}}),
    "autotp2_zero3": Case(
        "autotp",
        _zero(3, stage3_param_persistence_threshold=0) | {"tensor_parallel": {"autotp_size": 2}},
    ),
    "moe_ep2_zero2": Case("moe", _zero(2) | {"zero_allow_untested_optimizer": True}),
    "moe_ep2_zero0": Case("moe", {}),
    "zero2_three_ranks": Case("tiny", _zero(2), 3),
    "zero3_three_ranks": Case("tiny", _zero(3, stage3_param_persistence_threshold=0), 3),
    "autotp2_zero3_four_ranks": Case(
        "autotp",
        _zero(3, stage3_param_persistence_threshold=0) | {"tensor_parallel": {"autotp_size": 2}},
        4,
    ),
}
UNIVERSAL = {
    "universal_from_zero1": "zero1_fp32",
    "universal_from_zero2": "zero2_fp32",
    "universal_from_zero3": "zero3_fp32",
    "universal_from_zero1_bf16": "zero1_bf16",
    "universal_from_pipeline_pp2": "pipeline_pp2_zero1",
    "universal_from_autotp2_zero1": "autotp2_zero1",
    "universal_from_autotp2_zero3": "autotp2_zero3",
    "universal_from_round_robin": "zero2_round_robin",
}
"""Converted by ``ds_to_universal`` from others, which must be there."""
_BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 1000,
}
_EXPERTS = "moe.deepspeed_moe.experts.deepspeed_experts."


class Run(NamedTuple):
    """A training that was started. Everything here is done by all ranks together."""

    engine: Any
    step: Callable[[], None]
    weights: Callable[[], Weights]
    """The fp32 masters as they are now, then what is not trained, and the buffers."""


class Tiny(nn.Module):
    """A tied embedding, odd sizes so that padding is needed, a frozen layer, three buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 6)
        self.lin1 = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 5)
        self.lin2 = nn.Linear(5, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 2.5]))
        self.register_buffer("count", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("tmp", torch.zeros(2), persistent=False)
        self.frozen.requires_grad_(False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.relu(self.lin1(self.emb(x))))
        h = self.lin2(self.frozen(h) * self.scale.sum().to(h.dtype))
        return _loss(self.head(h), y)


def _loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().view(-1, 13), y.view(-1))


def start(kind: str, config: Mapping[str, Any]) -> Run:
    """Start the training of *kind* in this process, one of a group."""
    deepspeed = import_module("deepspeed")
    full = json.loads(json.dumps({**_BASE, **config}))
    torch.manual_seed(0)
    makers = {"tiny": _tiny, "pipeline": _pipeline, "autotp": _autotp, "moe": _moe}
    return makers[kind.partition("-")[0]](deepspeed, kind.partition("-")[2], full)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    seed = torch.Generator().manual_seed(100 + dist.get_rank())
    x, y = (torch.randint(0, 13, (2, 4), generator=seed) for _ in range(2))
    return x, y


def _started(deepspeed: Any, model: Any, optimizer: Any, config: Any, parameters: Any) -> Any:
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=parameters
    )[0]


def _by_loss(engine: Any, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        engine.backward(loss())
        engine.step()

    return step


def _tiny(deepspeed: Any, variant: str, config: dict[str, Any]) -> Run:
    if variant == "init":
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Tiny()
    else:
        model = Tiny()
    if variant == "trained":
        model.requires_grad_(True)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = None if variant == "adam" else torch.optim.AdamW(groups, lr=1e-2)
    engine = _started(deepspeed, model, optimizer, config, trained)
    x, y = _batch()
    zero = config.get("zero_optimization", {})
    # With round_robin_gradients DeepSpeed gives the wrong master (0.19.8): the live weight is fp32.
    live = bool(zero.get("round_robin_gradients")) or not zero.get("stage")
    exact = not config.get("bf16")
    return Run(
        engine,
        _by_loss(engine, lambda: engine(x, y)),
        lambda: _masters(deepspeed, engine.module, live=live, exact=exact),
    )


def _masters(deepspeed: Any, model: nn.Module, *, live: bool, exact: bool) -> Weights:
    """Return the masters; with *exact* they must be what the module computes with."""
    get = import_module("deepspeed.utils").safe_get_full_fp32_param
    found: Weights = {}
    known: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first = known.setdefault(getattr(p, "ds_id", id(p)), name)
        if first != name:
            found[name] = found[first].clone()
            continue
        master = get(p) if p.requires_grad and not live else None
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            now = p.detach().float().cpu().clone()
        if master is not None and exact and not torch.equal(master.view(-1), now.view(-1)):
            raise AssertionError(f"{name}: the master is not what the module has")
        found[name] = now if master is None else master.detach().float().cpu().clone()
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in model.get_submodule(owner)._non_persistent_buffers_set:
            found[name] = (buffer.float() if buffer.is_floating_point() else buffer).clone()
    return found


def _pipeline(deepspeed: Any, stages: str, config: dict[str, Any]) -> Run:
    pipe = import_module("deepspeed.pipe")

    class Emb(nn.Embedding):  # TiedLayerSpec ties the attribute "weight"
        def __init__(self) -> None:
            super().__init__(13, 6)

    def head(module: Emb, h: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(h, module.weight)

    linear = [pipe.LayerSpec(nn.Linear, 6, 6) for _ in range(3)]
    layers = [
        pipe.TiedLayerSpec("embed", Emb),
        pipe.LayerSpec(nn.Linear, 6, 7),
        torch.relu,
        pipe.LayerSpec(nn.Linear, 7, 6),
        *linear,
        pipe.TiedLayerSpec("embed", Emb, forward_fn=head),
    ]
    model = pipe.PipelineModule(
        layers=layers, num_stages=int(stages), loss_fn=_loss, partition_method="uniform"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = _started(deepspeed, model, optimizer, config, [*model.parameters()])
    batches = iter(lambda: _batch(), None)

    def weights() -> Weights:
        get = import_module("deepspeed.utils").safe_get_full_fp32_param
        of_stage = {
            name: (p if (full := get(p)) is None else full).detach().float().clone()
            for name, p in engine.module.named_parameters()
        }
        return _first(_gathered(of_stage))

    return Run(engine, lambda: engine.train_batch(data_iter=batches), weights)


def _autotp(deepspeed: Any, _: str, config: dict[str, Any]) -> Run:
    transformers = import_module("transformers")
    made = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(made)
    size = config.get("tensor_parallel", {}).get("autotp_size", 1)
    if size > 1:
        model = deepspeed.tp_model_init(model, tp_size=size, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = _started(deepspeed, model, optimizer, config, [*model.parameters()])
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(5))

    def weights() -> Weights:
        layers = import_module("deepspeed.module_inject.layers")
        found: Weights = {}
        for name, p in engine.module.named_parameters():
            with (
                deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")),
                layers.GatherReplacedLayerParams([p], engine.module, enabled=size > 1),
            ):
                found[name] = p.detach().float().cpu().clone().contiguous()
        return found

    return Run(engine, _by_loss(engine, lambda: engine(input_ids=ids, labels=ids).loss), weights)


def _moe(deepspeed: Any, _: str, config: dict[str, Any]) -> Run:
    moe = import_module("deepspeed.moe.layer")
    utils = import_module("deepspeed.moe.utils")
    size = dist.get_world_size()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(13, 6)
            expert = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
            self.moe = moe.MoE(
                hidden_size=6, expert=expert, num_experts=4, ep_size=size, k=1, min_capacity=8
            )
            self.head = nn.Linear(6, 13)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h, _, _ = self.moe(self.emb(x))
            return _loss(self.head(h), y)

    model = Net()
    whole = {"params": [*model.parameters()], "name": "all"}
    groups = utils.split_params_into_different_moe_groups_for_optimizer(whole)
    engine = _started(deepspeed, model, torch.optim.AdamW(groups, lr=1e-2), config, groups)
    x, y = _batch()

    def weights() -> Weights:
        own = {n: p.detach().float().clone() for n, p in engine.module.named_parameters()}
        ranks = [
            {_global(name, rank, 4 // size): value for name, value in held.items()}
            for rank, held in enumerate(_gathered(own))
        ]
        return _first(ranks)

    return Run(engine, _by_loss(engine, lambda: engine(x, y)), weights)


def _global(name: str, rank: int, local: int) -> str:
    """Return the name of a parameter with the number of its expert among those of all ranks."""
    if not name.startswith(_EXPERTS):
        return name
    number, _, rest = name.removeprefix(_EXPERTS).partition(".")
    return f"{_EXPERTS}{rank * local + int(number)}.{rest}"


def _gathered(own: Weights) -> list[Weights]:
    ranks: list[Weights] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    return ranks


def _first(ranks: Iterable[Weights]) -> Weights:
    found: Weights = {}
    for held in ranks:
        for name, value in held.items():
            found.setdefault(name, value)
    return found


def write(name: str, root: Path) -> None:
    """Train a case in this process, one of two, and save it with its truth."""
    kind, config, _ = CASES[name]
    run = start(kind, config)
    options = {"exclude_frozen_parameters": True} if name == "zero2_exclude_frozen" else {}
    for tag in ("A", "B") if name == "zero3_two_tags" else (None,):
        for _ in range(3 if kind.startswith("tiny") else 2):
            run.step()
        truth = run.weights()
        run.engine.save_checkpoint(str(root), tag=tag, **options)
        if dist.get_rank() == 0:
            other = "_A" if tag == "A" else ""
            save_file(
                {n: t.contiguous() for n, t in truth.items()}, root / f"truth{other}.safetensors"
            )
    if dist.get_rank() == 0:
        told = {
            "case": name,
            "config": {**_BASE, **config},
            "versions": {
                "torch": torch.__version__,
                "deepspeed": import_module("deepspeed").__version__,
                "world_size": dist.get_world_size(),
            },
            "optimizer_class": type(run.engine.optimizer).__name__,
        }
        (root / "truth.json").write_text(json.dumps(told, indent=1))
    dist.barrier()


def launch(script: str, *words: str, ranks: int = 2, timeout: float = 600) -> tuple[int, str]:
    """Run *script* in processes that find each other; return the exit code and all they said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [*command, f"--nproc_per_node={ranks}", script, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGTERM)
        output, _ = started.communicate()
        return 124, output
    return started.returncode, output


def _convert(source: Path, root: Path) -> None:
    tag = (source / "latest").read_text().strip()
    words = ["--input_folder", str(source / tag), "--output_folder", str(root / f"{tag}_universal")]
    words += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    if "zero3" not in source.name:
        words.append("--inject_missing_state")
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words], check=True
    )
    for path in _unneeded(root):
        path.unlink()
    for path in source.glob("truth*"):
        shutil.copy(path, root)


def _unneeded(root: Path) -> Iterator[Path]:
    for path in root.glob("*/zero/*/*.pt"):
        if path.name != "fp32.pt":
            yield path


def main(out: Path, names: list[str]) -> None:
    """Make the cases in processes of their own."""
    for name in names or (*CASES, *UNIVERSAL):
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
        if name in UNIVERSAL:
            _convert(out / UNIVERSAL[name], out / name)
            continue
        code, output = launch(
            str(Path(__file__)), "--child", name, str(out / name), ranks=CASES[name].ranks
        )
        for left in (out / name).glob("zero_to_*.py"):
            left.unlink()
        print(name, "made" if code == 0 else f"failed:\n{output}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        import_module("deepspeed").init_distributed(dist_backend="gloo")
        write(sys.argv[2], Path(sys.argv[3]))
        dist.destroy_process_group()
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
