# type: ignore  # of libraries that are not installed where this is checked
"""Writes the checkpoints of this folder: megatron-core 0.16.1, torch 2.13, gloo on the CPU.

Usage: make_checkpoints.py OUT. The files of ranks are those of Megatron-LM's ``torch`` format
(``generate_state_dict`` and ``get_checkpoint_name`` in megatron/training/checkpointing.py). Every
global tensor has values of its own, which Megatron's ``sharded_state_dict`` cuts; the truth is the
state dict of the same model on one rank.
"""

import argparse
import os
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DENSE = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 12,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "normalization": "RMSNorm",
    "activation_func": torch.nn.functional.silu,
}
PLAIN = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "ffn_hidden_size": 16,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
}
MOE = dict(
    **DENSE | {"num_layers": 2},
    num_moe_experts=4,
    moe_router_topk=2,
    moe_grouped_gemm=False,
    moe_token_dispatcher_type="allgather",
    moe_ffn_hidden_size=12,
)
CASES = {
    "tp2_pp2": (DENSE, {"tp": 2, "pp": 2, "ep": 1}, True),
    "plain": (PLAIN, {"tp": 1, "pp": 1, "ep": 1}, False),
    "moe_ep2": (MOE, {"tp": 1, "pp": 1, "ep": 2}, True),
}


def model_of(settings: dict, sizes: dict, untied: bool):
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **settings,
        use_cpu_initialization=True,
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=settings.get("num_moe_experts"),
        moe_grouped_gemm=False,
        normalization=settings["normalization"],
    )
    return GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type="rope" if untied else "learned_absolute",
        share_embeddings_and_output_weights=not untied,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
    )


def start(rank: int, world: int, port: int, sizes: dict) -> None:
    from megatron.core import parallel_state as ps

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
    )


def fill(model) -> None:
    """Give every parameter its part of a global tensor, by Megatron's own account of the cut."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found = []
    for value in model.sharded_state_dict().values():
        built = value.build() if isinstance(value, ShardedTensorFactory) else value
        parts = (
            built.values()
            if isinstance(built, dict)
            else built
            if isinstance(built, list)
            else [built]
        )
        found += [part for part in parts if isinstance(part, ShardedTensor)]
    for part in found:
        generator = torch.Generator().manual_seed(zlib.crc32(part.key.encode()))
        whole = torch.randn(part.global_shape, generator=generator)
        bounds = zip(part.global_offset[part.prepend_axis_num :], part.local_shape, strict=True)
        where = (
            *part.global_offset[: part.prepend_axis_num],
            *(slice(o, o + n) for o, n in bounds),
        )
        part.data.data.copy_(whole[where])


def save(rank: int, out: Path, name: str, world: int, port: int) -> None:
    from megatron.core import parallel_state as ps

    settings, sizes, untied = CASES[name]
    start(rank, world, port, sizes)
    torch.manual_seed(100 + rank)
    model = model_of(settings, sizes, untied)
    fill(model)
    tp, pp = ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank()
    ep = ps.get_expert_model_parallel_rank()
    below = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if sizes["pp"] > 1 else "")
    below += f"_{ep:03d}" if sizes["ep"] > 1 else ""
    args = argparse.Namespace(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        swiglu=settings.get("gated_linear_unit", False),
        num_layers=settings["num_layers"],
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=settings.get("num_query_groups", 4),
        num_experts=settings.get("num_moe_experts"),
        untie_embeddings_and_output_weights=untied,
        padded_vocab_size=32,
        params_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=None,
    )
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": model.state_dict_for_save_checkpoint(),
        "num_floating_point_operations_so_far": 0,
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": []},
        "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
    }
    if (sizes["ep"] == 1 and ps.get_data_parallel_rank() == 0) or sizes["ep"] > 1:
        path = out / name / "iter_0000010" / below / "model_optim_rng.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
    if rank == 0:
        (out / name / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()
    os._exit(0)  # taking gloo's many groups apart waits for ever


def truth(rank: int, out: Path, name: str, port: int) -> None:
    from safetensors.torch import save_file

    settings, _, untied = CASES[name]
    sizes = {"tp": 1, "pp": 1, "ep": 1}
    start(rank, 1, port, sizes)
    model = model_of(settings, sizes, untied)
    fill(model)
    tensors = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    save_file(tensors, out / f"{name}_truth.safetensors")
    os._exit(0)


def save_dist(rank: int, out: Path) -> None:
    """Save as torch_dist, which wants CUDA for two questions that a CPU can answer."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    sizes = {"tp": 1, "pp": 1, "ep": 1}
    start(rank, 1, 29680, sizes)
    model = model_of(DENSE, sizes, True)
    fill(model)
    folder = out / "torch_dist" / "iter_0000010"
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.sharded_state_dict(),
        "iteration": 10,
        "args": argparse.Namespace(num_layers=4),
    }
    one_writer = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(state, str(folder), one_writer)
    os._exit(0)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for number, (name, (_, sizes, _)) in enumerate(CASES.items()):
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        world = sizes["tp"] * sizes["pp"] * sizes["ep"]
        mp.spawn(save, (out, name, world, 29640 + number), nprocs=world)
        mp.spawn(truth, (out, name, 29660 + number), nprocs=1)
    mp.spawn(save_dist, (out,), nprocs=1)
