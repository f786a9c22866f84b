"""The jobs that faults befall: each plans, does something with files, and knows what is right."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modelquirks.planner import Dispatcher, Plan
from modelquirks.planner.cli import main
from modelquirks.quirks.registry import Registry

__all__ = ["DATA", "Job", "Net", "jobs", "registry", "write_checkpoint"]

DATA = Path(__file__).parents[1] / "tests" / "data"
VOCABULARY, HIDDEN, INNER, N_EXPERTS, N_LAYERS = 256, 64, 48, 3, 3
Stage = Callable[[str], None]
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.(part|old)")
_registry: list[Registry] = []


def registry() -> Registry:
    """Return the records of all plugins, read once."""
    if not _registry:
        _registry.append(Registry.load())
    return _registry[0]


class Experts(nn.Module):
    """Experts in two stacks, as transformers holds those of Qwen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(N_EXPERTS, 2 * INNER, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(N_EXPERTS, HIDDEN, INNER))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for number in range(N_EXPERTS):
            gate, up = (x @ self.gate_up_proj[number].T).chunk(2, dim=-1)
            parts.append((nn.functional.silu(gate) * up) @ self.down_proj[number].T)
        return torch.stack(parts).sum(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.lin = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.ModuleDict({"experts": Experts()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.mlp["experts"](self.lin(self.norm(x)))
        return x + made


class Net(nn.Module):
    """A small decoder with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCABULARY, HIDDEN),
                "layers": nn.ModuleList(Layer() for _ in range(N_LAYERS)),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.model["embed_tokens"](ids)
        layers: Any = self.model["layers"]
        for layer in layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


IDS = torch.arange(0, VOCABULARY, 37)[None]


def stored(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors as Qwen stores them, experts one by one; norms are BF16, the rest F32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Net().state_dict().items()}
    found: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        value = torch.rand(shape, generator=generator) - 0.5
        path, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for number, both in enumerate(value):
                found[f"{path}.{number}.gate_proj.weight"] = both[:INNER].clone()
                found[f"{path}.{number}.up_proj.weight"] = both[INNER:].clone()
        elif leaf == "down_proj":
            for number, one in enumerate(value):
                found[f"{path}.{number}.down_proj.weight"] = one.clone()
        elif name != "lm_head.weight":
            found[name] = value.bfloat16() if ".norm." in name else value
    return found


def truth(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return what the model must hold."""
    tensors, made = stored(seed), {}
    with torch.device("meta"):
        names = list(Net().state_dict())
    for name in names:
        path, _, leaf = name.rpartition(".")
        parts = [f"{path}.{number}" for number in range(N_EXPERTS)]
        if leaf == "gate_up_proj":
            both = (("gate_proj", "up_proj"), parts)
            value = torch.stack(
                [torch.cat([tensors[f"{p}.{kind}.weight"] for kind in both[0]]) for p in both[1]]
            )
        elif leaf == "down_proj":
            value = torch.stack([tensors[f"{part}.down_proj.weight"] for part in parts])
        else:
            value = tensors[name.replace("lm_head.", "model.embed_tokens.")]
        made[name] = value.to(dtype)
    return made


def write_checkpoint(folder: Path, seed: int) -> None:
    """Write the checkpoint in two shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = stored(seed)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, some in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(some, shard)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"torch_dtype": "float32"}')


def empty() -> nn.Module:
    """Return the model without data."""
    with torch.device("meta"):
        return Net().eval()


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names that are not equal in both."""
    names = {*one, *other}
    return sorted(
        n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n])
    )


class Job:
    """One job: the site that it needs, what it does, and what is right afterwards."""

    name = ""
    input = "checkpoint"
    """The folder that it reads and never changes."""
    options: Mapping[str, Any] = {}
    model: nn.Module | None = None
    messages: tuple[str, ...] = ()
    is_local = True
    """Whether the files that it reads are here from the start."""
    home = ""
    """Below the site, where it writes."""

    def make(self, root: Path, seed: int = 1) -> None:
        """Make the input of the job below *root*."""
        write_checkpoint(root / self.input, seed)

    def begin(self) -> None:
        """Have what is there before the job."""
        self.model = None

    def watched(self, root: Path) -> list[Path]:
        """Return the folders in which its calls can fail."""
        return [root]

    def end(self) -> None:
        """Let go of what the process that began it has beside the site."""

    def run(self, root: Path, stage: Stage) -> None:
        """Do it."""
        raise NotImplementedError

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        """Yield what is not right after a success."""
        yield from ()

    def clear(self, root: Path) -> None:
        """Remove what a success has made and another one would not replace."""

    def left(self, root: Path) -> Iterator[str]:
        """Yield the files below *root* that nobody should find after the job, done or failed."""
        for path in sorted(root.rglob("*")):
            if _UNFINISHED.fullmatch(path.name):
                yield str(path.relative_to(root))


class Load(Job):
    """Plan and load into a model."""

    device_map: Mapping[str, Any] = {"": "cpu"}
    planning: Mapping[str, Any] = {"dtype": "bfloat16"}
    is_computed = False

    def begin(self) -> None:
        self.model = empty()

    def run(self, root: Path, stage: Stage) -> None:
        model = self.model
        assert model is not None
        plan = Dispatcher(registry()).plan(
            root / self.input,
            model=model,
            device_map=dict(self.device_map) or None,
            **self.planning,
            **self.places(root),
        )
        stage("planned")
        report = plan.load_into(model, **self.loading(root))
        self.messages = tuple(note.message for note in report.notes)
        stage("loaded")
        self.compute(model)

    def places(self, root: Path) -> dict[str, Any]:
        return {}

    def loading(self, root: Path) -> dict[str, Any]:
        return dict(self.options)

    def compute(self, model: nn.Module) -> None:
        with torch.no_grad():
            self.logits = model(IDS)

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        model = self.model
        assert model is not None
        wanted = truth(seed)
        reference = Net().bfloat16().eval()
        reference.load_state_dict(wanted)
        with torch.no_grad():
            if not torch.equal(self.logits, reference(IDS)):
                yield "the model computes something else"
        state = {n: t for n, t in model.state_dict().items() if not t.is_meta}
        if odd := [n for n in state if not torch.equal(state[n], wanted[n])]:
            yield f"wrong values in {odd[:3]}"
        tied = {id(model.get_parameter(n)) for n in ("lm_head.weight", "model.embed_tokens.weight")}
        if len(tied) != 1:
            yield "tied weights are two"


class LoadReal(Load):
    """Into a model that has values, which it must keep if that fails."""

    name = "load over values"
    options: Mapping[str, Any] = {"copy": True, "verify": "full"}

    def begin(self) -> None:
        torch.manual_seed(5)
        self.model = Net().bfloat16().eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.rand(parameter.shape))


class LoadCpu(Load):
    name = "load"


class Offload(Load):
    name = "load with disk offload"
    device_map: Mapping[str, Any] = {
        "model.embed_tokens": "cpu",
        "lm_head": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
    }


class Materialize(Offload):
    name = "materialize"

    def loading(self, root: Path) -> dict[str, Any]:
        return {"offload_folder": root / self.home / "offload", "materialize": True}

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        yield from super().wrong(root, seed)
        yield from store_faults(root / self.home / "offload", (truth(1), truth(2)))


def store_faults(folder: Path, wanted: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[str]:
    """Yield what is wrong in the stores of an offload folder."""
    for store in folder.glob("modelquirks-*"):
        path = store / "manifest.json"
        if not path.exists():
            yield from (f"{f.name} is not recorded" for f in store.glob("weights-*"))
            continue
        recorded = {record["name"] for record in json.loads(path.read_text())["files"]}
        files = {file.name for file in store.glob("weights-*")}
        if files != recorded:
            yield f"files {sorted(files)}, recorded {sorted(recorded)}"
        for name in files & recorded:
            tensors = load_file(store / name)
            if not any(
                all(torch.equal(value, held[key]) for key, value in tensors.items())
                for held in wanted
            ):
                yield f"half used: {name} has not the values of one checkpoint"


class Stream(Job):
    """The tensors one after another, as servers take them."""

    name = "weights()"

    def run(self, root: Path, stage: Stage) -> None:
        plan = Dispatcher(registry()).plan(
            root / self.input, model=empty(), device_map=None, dtype="bfloat16"
        )
        stage("planned")
        self.got = {name: tensor.clone() for name, tensor in plan.weights(ties="each")}
        stage("loaded")

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        if odd := differing(self.got, truth(seed)):
            yield f"wrong values in {odd[:3]}"


class Export(Job):
    name = "export"
    overwrite = False

    def run(self, root: Path, stage: Stage) -> None:
        report = Dispatcher(registry()).export(
            root / self.input,
            self.out(root),
            dtype="bfloat16",
            shard_size="100KB",
            overwrite=self.overwrite,
        )
        self.messages = tuple(note.message for note in report.notes)

    def out(self, root: Path) -> Path:
        return root / self.home / ("out" if self.overwrite else "new/out")

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        wanted = {name: value.bfloat16() for name, value in stored(seed).items()}
        out = self.out(root)
        found = {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}
        if odd := differing(found, wanted):
            yield f"wrong in the export: {odd[:3]}"
        if not (out / "config.json").exists():
            yield "config.json is not in the export"

    def clear(self, root: Path) -> None:
        if not self.overwrite:
            shutil.rmtree(self.out(root).parent, ignore_errors=True)

    def left(self, root: Path) -> Iterator[str]:
        yield from super().left(root)
        out = self.out(root)
        if not out.exists():
            aside = [*out.parent.glob(f".{out.name}.*.old")]  # the next run gives it back
            if self.overwrite and not aside:
                yield "lost: what was there before"
            elif not self.overwrite and out.parent.exists():
                yield "new"
            return
        found = {n: t for path in out.glob("*.safetensors") for n, t in load_file(path).items()}
        for seed in (1, 2):
            wanted = {name: value.bfloat16() for name, value in stored(seed).items()}
            if not differing(found, wanted):
                return
        yield "lost: out, which is neither the old nor the new"


class Replace(Export):
    name = "export over another"
    overwrite = True

    def make(self, root: Path, seed: int = 1) -> None:
        super().make(root, seed)
        write_checkpoint(root / "before", 2)
        Dispatcher(registry()).export(root / "before", root / "out", dtype="bfloat16")
        shutil.rmtree(root / "before")


class Save(Job):
    """Save a plan over an older one."""

    name = "save a plan"

    def make(self, root: Path, seed: int = 1) -> None:
        super().make(root, seed)
        self.plan(root, "float32").save(root / "plan.json")

    def plan(self, root: Path, dtype: str) -> Plan:
        return Dispatcher(registry()).plan(
            root / self.input, model=empty(), device_map={"": "cpu"}, dtype=dtype
        )

    def run(self, root: Path, stage: Stage) -> None:
        plan = self.plan(root, "bfloat16")
        plan.save(root / self.home / "plan.json")
        stage("planned")
        self.loaded = empty()
        Plan.load(root / self.home / "plan.json").execute(self.loaded)

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        if odd := differing(dict(self.loaded.state_dict()), truth(seed)):
            yield f"the saved plan loads other values: {odd[:3]}"

    def left(self, root: Path) -> Iterator[str]:
        yield from super().left(root)
        if not (root / "plan.json").exists():
            yield "lost: plan.json"
            return
        try:
            Plan.load(root / "plan.json")
        except Exception as error:
            yield f"lost: plan.json ({error})"


class Adapter(Load):
    """A base with an adapter merged into it."""

    name = "adapter merged"
    device_map: Mapping[str, Any] = {}
    planning: Mapping[str, Any] = {"merge_adapter": True}

    def make(self, root: Path, seed: int = 1) -> None:
        folder = root / self.input
        shutil.copytree(DATA / "peft" / "lora", folder / "adapter")
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: torch.rand(tuple(t.shape), generator=generator)
            for name, t in adapted().state_dict().items()
        }
        (folder / "base").mkdir()
        save_file(weights, folder / "base" / "model.safetensors", {"format": "pt"})

    def begin(self) -> None:
        with torch.device("meta"):
            self.model = adapted()

    def run(self, root: Path, stage: Stage) -> None:
        assert self.model is not None
        plan = Dispatcher(registry()).plan(
            root / self.input / "base",
            model=self.model,
            device_map=None,
            merge_adapter=True,
            adapter=root / self.input / "adapter",
        )
        stage("planned")
        plan.load_into(self.model)
        stage("loaded")

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        assert self.model is not None
        generator = torch.Generator().manual_seed(seed)
        wanted = {
            name: torch.rand(tuple(t.shape), generator=generator)
            for name, t in adapted().state_dict().items()
        }
        lora = load_file(DATA / "peft" / "lora" / "adapter_model.safetensors")
        for name in wanted:
            a, b = (f"base_model.model.{name[:-7]}.lora_{part}.weight" for part in "AB")
            if a in lora:
                wanted[name] = wanted[name] + lora[b] @ lora[a] * 2.0
        if odd := differing(dict(self.model.state_dict()), wanted):
            yield f"wrong values in {odd[:3]}"


def adapted() -> nn.Module:
    """Return a model with the names and sizes that the adapter is for."""
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in projections})
    layers = nn.ModuleList([nn.ModuleDict({"self_attn": attention})])
    parts = {"embed_tokens": nn.Embedding(32, 16), "layers": layers}
    return nn.ModuleDict({"model": nn.ModuleDict(parts), "lm_head": nn.Linear(16, 32, bias=False)})


class DeepSpeed(Load):
    """What ZeRO 2 left on two ranks."""

    name = "DeepSpeed load"
    case = "zero2_bf16"

    def make(self, root: Path, seed: int = 1) -> None:
        shutil.copytree(DATA / "deepspeed" / self.case, root / self.input)

    def begin(self) -> None:
        self.model = model_of(load_file(DATA / "deepspeed" / self.case / "truth.safetensors"))

    def run(self, root: Path, stage: Stage) -> None:
        assert self.model is not None
        plan = Dispatcher(registry()).plan(root / self.input, model=self.model, device_map=None)
        stage("planned")
        plan.load_into(self.model)
        stage("loaded")

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        assert self.model is not None
        wanted = load_file(DATA / "deepspeed" / self.case / "truth.safetensors")
        if odd := differing(dict(self.model.state_dict()), wanted):
            yield f"wrong values in {odd[:3]}"


def model_of(wanted: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a model that has just these tensors, all zero."""
    model = nn.Module()
    for name, tensor in wanted.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if tensor.is_floating_point():
            owner.register_parameter(leaf, nn.Parameter(torch.zeros_like(tensor)))
        else:
            owner.register_buffer(leaf, torch.zeros_like(tensor))
    return model


class CommandFailed(Exception):
    """A command ended with another exit code than 0; carries what it said."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code


class Command(Export):
    """``modelquirks export`` as people call it."""

    name = "the command export"

    def run(self, root: Path, stage: Stage) -> None:
        words = ["export", str(root / self.input), str(self.out(root))]
        words += ["--dtype", "bfloat16", "--shard-size", "100KB"]
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(said):
            code = main(words)
        self.messages = (said.getvalue(),)
        if code == 130:
            raise KeyboardInterrupt
        if code:
            raise CommandFailed(code, said.getvalue())


class Inspect(Job):
    """``modelquirks inspect`` and a page of it, over an older one."""

    name = "the command inspect"
    stdout: Any = None
    """Where its result goes, if not nowhere."""

    def make(self, root: Path, seed: int = 1) -> None:
        super().make(root, seed)
        (root / "page.html").write_text("<!doctype html> an older page </html>")

    def run(self, root: Path, stage: Stage) -> None:
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(self.stdout or said):
            code = main(["inspect", str(root / self.input), "--html", str(root / "page.html")])
        if code == 130:
            raise KeyboardInterrupt
        if code:
            raise CommandFailed(code, said.getvalue())

    def wrong(self, root: Path, seed: int = 1) -> Iterator[str]:
        if "model.embed_tokens" not in (root / "page.html").read_text():
            yield "the page has no tensors"

    def left(self, root: Path) -> Iterator[str]:
        yield from super().left(root)
        if not (root / "page.html").read_text().rstrip().endswith("</html>"):
            yield "lost: page.html is half a page"


def jobs() -> dict[str, Job]:
    """Return all of them that need no network, by name."""
    kinds: tuple[type[Job], ...] = (
        *(LoadCpu, LoadReal, Offload, Materialize, Stream, Export, Replace, Save, Adapter),
        *(DeepSpeed, Command, Inspect),
    )
    os.environ.setdefault("COLUMNS", "200")
    return {kind.name: kind() for kind in kinds}
