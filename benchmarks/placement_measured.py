"""Placements measured: tokens a second of accelerate's placement and ours, over cpu and disk.

    python benchmarks/placement_measured.py [--quick] [--warm] [--rounds N] [--tokens N]

Three models, saved and loaded for real: a Mixtral and a Llama of transformers, shrunk, and a plain
one with a module for each expert. The cpu may hold a part of each, the rest is read from the
checkpoint at every step. Both placements are executed by the same code, in turn, one round of
tokens each, and must give the same answer.

The rates that the prediction takes are this machine's, measured in the same rounds with the same
model: that of memory where it is all there, that of the disk where its last matrix is on disk, or
all but the embedding, so that the work of hooks is in it; and, for the Mixtral, whose experts are
stored one by one and stacked whenever they are moved, that of computing them.

Between two tokens the pages of the checkpoint are dropped, so that the disk is one, as for a model
that is larger than memory; with --warm they are kept, and "disk" is the page cache and the work on
the way. Exit status 1: a placement that was predicted to be faster was slower, by more
than rounds differ.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from modelquirks.planner import Dispatcher
from modelquirks.planner.model.build import empty_weights
from modelquirks.planner.placement.machine import DeviceSpec, Machine
from modelquirks.planner.plan import Plan

WORDS, LAYERS, EXPERTS, TAKEN = 40_000, 8, 16, 2


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.w2(nn.functional.silu(self.w1(x)))
        return made


class Block(nn.Module):
    """A mixer, a gate and experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(width, 2 * width) for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        for number in self.gate(x).flatten().topk(TAKEN).indices.tolist():
            x = x + self.experts[number](x)
        made: torch.Tensor = x / x.norm()
        return made


class Plain(nn.Module):
    """Words in, words out, one token at a time; with a module for each expert."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS // 4, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(LAYERS // 2)])
        self.lm_head = nn.Linear(width, WORDS // 4, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.lm_head(x)
        return made


class Subject(NamedTuple):
    """A model to measure."""

    name: str
    make: Callable[[], nn.Module]
    share: float
    """The part of its bytes that the cpu may hold."""
    no_split: tuple[str, ...] = ()


def _library(kind: str, **more: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "hidden_size": 768,
        "vocab_size": WORDS,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    make: Any = AutoModelForCausalLM.from_config
    model: nn.Module = make(AutoConfig.for_model(kind, **{**sizes, **more}), dtype=torch.float32)
    return model.eval()


def _mixtral() -> nn.Module:
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": TAKEN}
    return _library("mixtral", intermediate_size=384, **experts)


def _llama() -> nn.Module:
    return _library("llama", intermediate_size=3072)


SUBJECTS = (
    Subject("Mixtral", _mixtral, 0.7, ("MixtralDecoderLayer",)),
    Subject("Llama", _llama, 0.7, ("LlamaDecoderLayer",)),
    Subject("plain MoE", Plain, 0.6),
)


def saved(subject: Subject, folder: Path) -> int:
    """Write the model with random weights; return its bytes."""
    torch.manual_seed(0)
    model = subject.make()
    if isinstance(model, Plain):
        save_file(model.state_dict(), folder / "model.safetensors")
        config = {"num_experts": EXPERTS, "num_experts_per_tok": TAKEN}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        save: Any = model.save_pretrained
        save(folder)
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def planned(
    subject: Subject, folder: Path, device_map: Any, cpu: int, machine: Machine
) -> tuple[Plan, nn.Module]:
    """Return a plan, and the model on meta that it is for."""
    with empty_weights():
        model = subject.make()
    memory: dict[Any, Any] = {"cpu": cpu, "disk": None}
    plan = Dispatcher().plan(
        folder, model=model, device_map=device_map, max_memory=memory, machine=machine
    )
    if not plan.ok:
        raise SystemExit(f"{subject.name}: {plan.problems}")
    return plan, model


class Loaded:
    """A model that runs by one device map."""

    def __init__(
        self, subject: Subject, folder: Path, device_map: Any, cpu: int, machine: Machine
    ) -> None:
        """Plan, and load."""
        self._from = subject, folder
        self.plan, self.model = planned(subject, folder, device_map, cpu, machine)
        self.plan.execute(self.model)
        # They are views of the mapped file, and would be dropped with its pages.
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.clone()
        self.took: list[float] = []
        """Seconds of a token, by round."""

    def predicted(self, machine: Machine) -> float:
        """Return the seconds of a step on *machine*."""
        plan, _ = planned(*self._from, dict(self.plan.device_map), _ANY, machine)
        prediction = plan.placement.prediction
        if prediction is None:
            raise SystemExit("nothing is predicted for an incomplete map")
        return prediction.seconds

    def run(self, tokens: int, between: Callable[[], None]) -> None:
        """Note what a token takes, the mean of some; the same ones each time."""
        torch.manual_seed(1)
        took = 0.0
        for word in torch.randint(0, WORDS // 4, (tokens, 1, 1)):
            between()
            started = time.perf_counter()
            self.logits(word)
            took += time.perf_counter() - started
        self.took.append(took / tokens)

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of some words."""
        made: Any = self.model(ids)
        logits: torch.Tensor = made if isinstance(made, torch.Tensor) else made.logits
        return logits


_ANY = 1 << 50
"""More bytes than there are."""


def forget(folder: Path) -> None:
    """Drop the pages of all files of *folder* from this process and from the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/maps") as maps:
        for line in maps:
            where, _, _, _, _, *path = line.split(maxsplit=5)
            if path and path[0].startswith(str(folder)):
                start, end = (int(number, 16) for number in where.split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), 4)  # DONTNEED
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def theirs(subject: Subject, cpu: int) -> Mapping[str, Any]:
    """Return accelerate's map."""
    from accelerate import infer_auto_device_map

    with empty_weights():
        model = subject.make()
    whole = list(subject.no_split)
    return dict(infer_auto_device_map(model, {"cpu": cpu}, no_split_module_classes=whole))


def described(memory: float, disk: float, make: float) -> Machine:
    """Return a machine with those rates, in bytes a second."""
    devices: dict[Any, DeviceSpec] = {
        d: DeviceSpec(_ANY, r, None, "run") for d, r in (("cpu", memory), ("disk", disk))
    }
    return Machine("measured", devices, make_rate=make)


_NO_TIME = 1e300
_READ, _MOVED, _MADE = (
    described(*(1.0 if n == which else _NO_TIME for n in range(3))) for which in range(3)
)
"""Machines on which only one thing takes time: a second a byte."""


class Gauges:
    """One model in three ways, from which the rates of the machine follow.

    All in memory; on the disk what is last, a matrix that the file holds as it is; and all on the
    disk but the embedding.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        """Load them."""

        def loaded(device_map: Mapping[str, str]) -> Loaded:
            return Loaded(subject, folder, dict(device_map), _ANY, _READ)

        self.near = loaded({"": "cpu"})
        model = self.near.model
        first = next(n for n, m in model.named_modules() if isinstance(m, nn.Embedding))
        away = {first: "cpu", **dict(_others(model, first))}
        self.last = loaded({**away, **dict.fromkeys(away, "cpu"), list(away)[-1]: "disk"})
        self.away = loaded(away)
        self.bytes = {
            each: (each.predicted(_MOVED), each.predicted(_MADE))
            for each in (self.near, self.last, self.away)
        }
        self.n_read = self.near.predicted(_READ)

    def machine(self, of: Callable[[list[float]], float] = statistics.median) -> Machine:
        """Return the machine with the rates that the rounds so far have shown."""
        near, last, away = (of(each.took) for each in (self.near, self.last, self.away))
        moved, made = self.bytes[self.away]
        if made > 1:
            disk = self.bytes[self.last][0] / max(last - near, 1e-9)
            return described(self.n_read / near, disk, made / max(away - near - moved / disk, 1e-9))
        return described(self.n_read / near, moved / max(away - near, 1e-9), _NO_TIME)


def _others(model: nn.Module, apart: str) -> Iterator[tuple[str, str]]:
    """Yield every module beside *apart* that has no part of it, for the disk."""
    for name, module in model.named_children():
        if name == apart:
            continue
        if apart.startswith(f"{name}."):
            for rest, device in _others(module, apart.removeprefix(f"{name}.")):
                yield f"{name}.{rest}", device
        elif any(True for _ in module.state_dict()) or list(module.buffers()):
            yield name, "disk"


class Outcome(NamedTuple):
    """Two placements of one model."""

    told: float
    """How many times as fast ours was predicted to be."""
    seen: tuple[float, ...]
    """How many times as fast it was, by round."""

    @property
    def median(self) -> float:
        """What was seen."""
        return statistics.median(self.seen)

    @property
    def spread(self) -> float:
        """How far rounds are from one another, without the outermost where there are many."""
        inner = sorted(self.seen)[1:-1] if len(self.seen) > 4 else self.seen
        return max(inner) - min(inner)

    @property
    def wrong(self) -> bool:
        """Whether the order is another than predicted, by more than the spread."""
        return (self.told - 1) * (self.median - 1) < 0 and abs(self.median - 1) > self.spread


def compared(subject: Subject, folder: Path, rounds: int, tokens: int, *, warm: bool) -> Outcome:
    """Measure both placements in turn, and print what came out."""
    cpu = int(saved(subject, folder) * subject.share)
    between: Callable[[], None] = (lambda: None) if warm else (lambda: forget(folder))
    gauges = Gauges(subject, folder)
    known = (gauges.near, gauges.last, gauges.away)
    for each in known * 3:
        each.run(2, between)
    rough = gauges.machine(min)
    both = {
        "accelerate": Loaded(subject, folder, theirs(subject, cpu), cpu, rough),
        "ours": Loaded(subject, folder, "auto", cpu, rough),
    }
    one, other = (loaded.logits(torch.tensor([[7]])) for loaded in both.values())
    if not torch.equal(one, other):
        raise SystemExit(f"{subject.name}: the placements give different logits")
    for each in known:
        each.took.clear()
    for number in range(rounds):
        for each in (*known, *list(both.values())[:: 1 if number % 2 else -1]):
            each.run(tokens, between)
    return told(subject, cpu, gauges.machine(), both)


def told(subject: Subject, cpu: int, machine: Machine, both: Mapping[str, Loaded]) -> Outcome:
    """Print and return what came out."""
    rates = ", ".join(f"{d} {s.read_rate / 1e9:.2f} GB/s" for d, s in machine.devices.items())
    made = f", computing {machine.make_rate / 1e9:.2f}" if machine.make_rate < _NO_TIME else ""
    print(f"{subject.name}: cpu may hold {cpu / 1e6:,.0f} MB; {rates}{made}")
    predicted = {name: loaded.predicted(machine) for name, loaded in both.items()}
    for name, loaded in both.items():
        used = loaded.plan.placement.memory["cpu"].used_bytes
        print(
            f"  {name:11} {used / 1e6:6,.0f} MB in memory, predicted {1 / predicted[name]:7.2f} "
            f"tokens/s, measured {1 / statistics.median(loaded.took):7.2f}"
        )
    took = [loaded.took for loaded in both.values()]
    ratios = tuple(theirs / ours for theirs, ours in zip(*took, strict=True))
    found = Outcome(predicted["accelerate"] / predicted["ours"], ratios)
    print(
        f"  ours is {found.median:.2f} times as fast (rounds {min(ratios):.2f} to "
        f"{max(ratios):.2f}), predicted {found.told:.2f}",
        flush=True,
    )
    return found


def main() -> None:
    """Measure each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds")
    parser.add_argument("--warm", action="store_true", help="keep the page cache")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=0)
    args = parser.parse_args()
    rounds, tokens = (
        args.rounds or (3 if args.quick else 9),
        args.tokens or (2 if args.quick else 4),
    )
    torch.set_num_threads(1)
    wrong = []
    for subject in SUBJECTS:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            outcome = compared(subject, folder, rounds, tokens, warm=args.warm)
        if outcome.wrong:
            wrong.append(subject.name)
    if wrong:
        print(f"the order is not the predicted one for {', '.join(wrong)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
