"""Whatever bytes a file, a server or the command line gives: findings or a clear error, at once.

The inputs that once showed a fault are in ``fuzz/corpus``, beside the seeds, and run here; so do
some changes of them that hypothesis draws. The long runs are ``fuzz/run.py`` (docs/fuzzing.md).
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
FUZZ = ROOT / "fuzz"
CORPUS = FUZZ / "corpus"
if not CORPUS.is_dir():  # a source distribution has none
    pytest.skip("fuzz/ is not here", allow_module_level=True)
TARGETS = sorted(path.name for path in CORPUS.iterdir())
SEEDS_RUN = 8
"""So many seeds of a target run as they are; all that showed a fault do."""

few = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Any]:
    """Give the modules of the fuzzer, which are no part of the package."""
    sys.path.insert(0, str(FUZZ))
    try:
        yield {name: import_module(name) for name in ("guard", "mutate", "targets")}
    finally:
        sys.path.remove(str(FUZZ))


def problem_of(fuzz: Any, target: str, data: bytes) -> str:
    """Return what is wrong with how *data* was treated, or ""."""
    run, _, allowed = fuzz["targets"].TARGETS[target]
    _, problem = fuzz["guard"].attempt(run, data, allowed)
    return "" if problem is None else f"{problem.kind}: {problem.where}\n{problem.text}"


def corpus(target: str) -> list[Path]:
    return sorted((CORPUS / target).iterdir())


def test_every_target_has_a_corpus_and_the_other_way_round(fuzz: Any) -> None:
    assert sorted(fuzz["targets"].TARGETS) == TARGETS
    assert all(any(path.name.startswith("seed-") for path in corpus(name)) for name in TARGETS)


def test_the_guard_sees_what_it_is_there_for(fuzz: Any, tmp_path: Path) -> None:
    """A check of the checks: a crash, a nameless error, nonsense, memory, and a write outside."""
    guard = fuzz["guard"]

    def kind(run: Callable[[bytes], str], allowed: tuple[type[BaseException], ...] = ()) -> str:
        _, problem = guard.attempt(run, b"", allowed)
        return "" if problem is None else str(problem.kind)

    def fails(_: bytes) -> str:
        raise LookupError("nothing in quotes")

    assert kind(lambda _: "fine") == ""
    assert kind(fails) == "crash"
    assert kind(fails, (LookupError,)) == "nonsense"
    assert kind(lambda _: str(len(b"x" * (300 << 20)))) == "memory"
    assert kind(lambda _: str((tmp_path / "out").write_bytes(b"1"))) == "reach"


@pytest.mark.parametrize("target", TARGETS)
def test_what_once_showed_a_fault_shows_none_any_more(fuzz: Any, target: str) -> None:
    paths = corpus(target)
    seeds = [path for path in paths if path.name.startswith("seed-")]
    for path in (*seeds[:SEEDS_RUN], *(path for path in paths if path not in seeds)):
        assert problem_of(fuzz, target, path.read_bytes()) == "", path.name


@pytest.mark.parametrize("target", TARGETS)
@few
@given(number=st.integers(0, 10**6), change=st.integers(0, 2**32))
def test_changed_files_give_findings_or_clear_errors(
    fuzz: Any, target: str, number: int, change: int
) -> None:
    contents = [path.read_bytes() for path in corpus(target) if path.stat().st_size < 8_000]
    form = fuzz["targets"].TARGETS[target].form
    data = fuzz["mutate"].mutated(contents[number % len(contents)], form, Random(change), contents)
    assert problem_of(fuzz, target, data) == ""


words = st.sampled_from(("a", "state_dict", "model", "weight", "dtype", "shape", "data_offsets"))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), words
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(words | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
texts_of_json = values.map(json.dumps).map(lambda text: text.encode("utf-8", "surrogatepass"))
choices = st.integers(0, 255).map(lambda number: bytes([number]))


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


MADE: dict[str, st.SearchStrategy[bytes]] = {
    "safetensors": texts_of_json.map(framed),
    "pickle": values.map(pickle.dumps),
    "torch_file": st.binary(max_size=600)
    | st.lists(values, max_size=6).map(
        lambda several: b"".join(map(pickle.dumps, (0x1950A86A20F9469CFC6C, 1001, *several)))
    ),
    "gguf": st.binary(max_size=300).map(lambda rest: b"GGUF\3\0\0\0" + rest),
    "spans": st.tuples(texts_of_json, st.binary(max_size=9)).map(b"\n".join),
    "hub": st.lists(st.binary(max_size=60), max_size=4).map(b"\n%%\n".join),
    "names": st.lists(st.text("abc_-.0123456789", max_size=40), max_size=6).map(
        lambda lines: "\n".join(lines).encode()
    ),
    "texts": st.tuples(choices, st.text(max_size=40).map(str.encode)).map(b"".join),
    **dict.fromkeys(("index", "plan", "adapter"), texts_of_json),
    **dict.fromkeys(
        ("config", "offload", "options"), st.tuples(choices, texts_of_json).map(b"".join)
    ),
    **dict.fromkeys(
        ("deepspeed", "dcp", "megatron", "fsdp"),
        st.tuples(choices, values.map(pickle.dumps)).map(b"".join),
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@few
@given(data=st.data())
def test_made_up_content_gives_findings_or_clear_errors(
    fuzz: Any, target: str, data: st.DataObject
) -> None:
    assert problem_of(fuzz, target, data.draw(MADE[target])) == ""
