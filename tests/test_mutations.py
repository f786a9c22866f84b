"""Damaged checkpoints: none loads wrong values in silence, and the judge would notice."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, as they make models


@pytest.fixture(scope="module")
def cases() -> Iterator[Any]:
    """Yield the module that damages checkpoints."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("mutations_cases")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def judge(cases: Any) -> Any:
    """Give the module that judges what came of them."""
    return importlib.import_module("mutations_judge")


def told(case: Any, verdict: Any) -> str:
    return f"{case.told()}: {verdict}"


def test_every_kind_of_damage_is_refused_reported_harmless_or_declared(
    cases: Any, judge: Any, tmp_path: Path
) -> None:
    found = enumerate(cases.each_kind(seed=1))
    verdicts = [(case, cases.run(case, tmp_path / str(number))) for number, case in found]
    assert [told(*pair) for pair in verdicts if pair[1].outcome in judge.BAD] == []
    assert {verdict.outcome for _, verdict in verdicts} == set(judge.OUTCOMES) - set(judge.BAD)
    digests = importlib.import_module("mutations_digest")
    told_by_digest = [
        digests.caught(case.subject, tmp_path / str(number))
        for number, (case, verdict) in enumerate(verdicts)
        if verdict.outcome == "unseen"
        and any(text.startswith("values:") for text in verdict.differing)
        and digests.is_of_weights(case.subject, case.copy)
    ]
    assert len(told_by_digest) > 10
    assert all(told_by_digest)


def test_damage_drawn_by_lot_is_never_loaded_in_silence(
    cases: Any, judge: Any, tmp_path: Path
) -> None:
    for number in range(60):
        if (case := cases.drawn(2, number)) is not None:
            verdict = cases.run(case, tmp_path / str(number))
            assert verdict.outcome not in judge.BAD, told(case, verdict)


def test_a_case_depends_on_seed_and_number_alone(cases: Any) -> None:
    for number in range(5):
        one, other = cases.drawn(3, number), cases.drawn(3, number)
        assert one is None or (one.told(), one.copy.files) == (other.told(), other.copy.files)


# ---- the judge is shown what must not be, and says so


def of(cases: Any, kind: str, subject: str = "llama") -> Any:
    return next(c for seed in range(9) if (c := cases.made([kind], subject, seed)) is not None)


def by_accelerate(subject: Any, folder: Path, model: nn.Module, device: str) -> Any:
    """Load as accelerate does by itself: what it does not find keeps what it had."""
    from accelerate import load_checkpoint_in_model

    model.to_empty(device="cpu")
    load_checkpoint_in_model(model, str(folder))
    return importlib.import_module("mutations_judge").Loaded(model, ())


def test_what_accelerate_loads_of_a_renamed_tensor_is_called_silent(
    cases: Any, tmp_path: Path
) -> None:
    case = of(cases, "tensor-renamed")
    assert cases.run(case, tmp_path / "ours").outcome == "refused"
    assert cases.run(case, tmp_path / "theirs", load=by_accelerate).outcome == "SILENT"


def test_one_wrong_value_that_nobody_mentions_is_called_silent(
    cases: Any, judge: Any, tmp_path: Path
) -> None:
    def planted(*args: Any) -> Any:
        loaded = judge.ours(*args)
        with torch.no_grad():
            next(loaded.model.parameters()).view(-1)[0] += 1
        return judge.Loaded(loaded.model, ())

    case = of(cases, "extra-tensor")
    assert cases.run(case, tmp_path / "right").outcome == "harmless"
    assert cases.run(case, tmp_path / "wrong", load=planted).outcome == "SILENT"


def test_a_torn_tie_that_nobody_mentions_is_called_silent(
    cases: Any, judge: Any, tmp_path: Path
) -> None:
    def planted(*args: Any) -> Any:
        loaded = judge.ours(*args)
        head = loaded.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
        return judge.Loaded(loaded.model, ())

    case = of(cases, "extra-tensor", "llama-tied")
    assert cases.run(case, tmp_path, load=planted).outcome == "SILENT"


def test_a_remark_about_something_else_is_no_report(cases: Any, judge: Any, tmp_path: Path) -> None:
    def planted(*args: Any) -> Any:
        loaded = judge.ours(*args)
        with torch.no_grad():
            next(loaded.model.parameters()).view(-1)[0] += 1
        return judge.Loaded(loaded.model, ("note: something may be odd",))

    assert cases.run(of(cases, "extra-tensor"), tmp_path, load=planted).outcome == "SILENT"


def test_a_refusal_without_a_name_and_a_foreign_error_are_failures(
    cases: Any, judge: Any, tmp_path: Path
) -> None:
    def refuses(*_: Any) -> Any:
        raise judge.Refusal("it does not fit")

    def crashes(*_: Any) -> Any:
        raise KeyError("model.norm.weight")

    case = of(cases, "tensor-dropped")
    assert cases.run(case, tmp_path / "one", load=refuses).outcome == "UNNAMED"
    assert cases.run(case, tmp_path / "two", load=crashes).outcome == "CRASH"


def test_a_second_damage_that_is_not_to_be_seen_excuses_none_that_is(
    cases: Any, judge: Any, tmp_path: Path
) -> None:
    case = next(c for n in range(99) if (c := cases.made(["zeroed", "tensor-dropped"], "llama", n)))

    def blind(*args: Any) -> Any:
        subject, folder, model, device = args
        cases.write_files(folder, subject.files)  # as if it were right
        loaded = judge.ours(subject, folder, model, device)
        with torch.no_grad():
            next(loaded.model.parameters()).view(-1)[0] += 1
        return judge.Loaded(loaded.model, ())

    assert cases.run(case, tmp_path, load=blind).outcome == "SILENT"


def test_the_digest_says_nothing_about_the_right_checkpoint(cases: Any, tmp_path: Path) -> None:
    digests = importlib.import_module("mutations_digest")
    case = of(cases, "extra-tensor")
    cases.write_files(tmp_path, case.subject.files)
    assert not digests.caught(case.subject, tmp_path)
