"""Loaders for the comparison, and the verdict on what each makes of a checkpoint.

``right``: the model answers as the one that was saved, bit for bit. ``refused``: an error before
there is a model. ``fails later``: an error when the model that was returned is asked something.
``wrong``: it answers something else. To ``refused`` and ``fails later`` belongs whether the message
names what is odd, to ``wrong`` whether anything named it, or said anything, meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparison_cases import PROMPT, Case
from listening import listening

__all__ = ["LOADERS", "Outcome", "judged"]


class Outcome(NamedTuple):
    """What a loader made of a checkpoint."""

    verdict: str
    said: str = ""
    """``named``, ``something``, or nothing."""
    message: str = ""

    @property
    def cell(self) -> str:
        """For the table."""
        match self.verdict, self.said:
            case "right", _:
                return "right"
            case "wrong", "":
                return "**wrong, silent**"
            case "wrong", said:
                return "wrong, named" if said == "named" else "wrong, a warning"
            case verdict, "named":
                return f"{verdict}, named"
            case verdict, _:
                return verdict


def _accelerate(case: Case, folder: Path, offload: str, *, built: bool) -> Any:
    """Load as the documentation of accelerate says; *built*: into a model with weights."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    if built:
        model = factory.from_config(config)
    else:
        with init_empty_weights():
            model = factory.from_config(config)
        model.tie_weights()
    return load_checkpoint_and_dispatch(
        model, str(folder), device_map=dict(case.devices), offload_folder=offload
    )


def _transformers(case: Case, folder: Path, offload: str) -> Any:
    from transformers import AutoModelForCausalLM

    options: Any = {"device_map": dict(case.devices), "offload_folder": offload}
    factory: Any = AutoModelForCausalLM
    return factory.from_pretrained(folder, **(options if "disk" in case.devices.values() else {}))


def _modelquirks(case: Case, folder: Path, _: str) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from modelquirks.planner import Dispatcher

    factory: Any = AutoModelForCausalLM
    with init_empty_weights():
        model = factory.from_config(AutoConfig.from_pretrained(folder))
    plan = Dispatcher().plan(folder, model=model, device_map=dict(case.devices), dequantize=True)
    return plan.execute(model)


LOADERS: Mapping[str, Callable[[Case, Path, str], Any]] = {
    "accelerate": lambda case, folder, offload: _accelerate(case, folder, offload, built=False),
    "accelerate, model built": lambda case, folder, offload: _accelerate(
        case, folder, offload, built=True
    ),
    "transformers": _transformers,
    "modelquirks": _modelquirks,
}


def judged(case: Case, loader: str, root: Path) -> Outcome:
    """Return what *loader* makes of *case*, in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(case, loader, root, there))
    child.start()
    there.close()
    try:
        return Outcome(*here.recv())
    except EOFError:
        return Outcome("crashed")
    finally:
        child.join()


def _child(case: Case, loader: str, root: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars
    with tempfile.TemporaryDirectory() as offload:
        pipe.send(tuple(_outcome(case, loader, root, offload)))


def _outcome(case: Case, loader: str, root: Path, offload: str) -> Outcome:
    right = torch.load(root / "answers.pt")[case.like]
    with listening(most=20_000) as heard:
        try:
            model = LOADERS[loader](case, root / case.name, offload)
        except Exception as error:
            return _told("refused", [f"{type(error).__name__}: {error}", *heard], case)
        try:
            with torch.no_grad():
                answer = model.eval()(PROMPT).logits
        except Exception as error:
            return _told("fails later", [f"{type(error).__name__}: {error}", *heard], case)
    if answer.shape == right.shape and torch.equal(answer.to(right.dtype), right):
        return Outcome("right")
    return _told("wrong", heard, case)


def _told(verdict: str, messages: list[str], case: Case) -> Outcome:
    text = "\n".join(messages)
    named = any(word in text for word in case.words)
    return Outcome(verdict, "named" if named else "something" if text else "", text[:2000])
