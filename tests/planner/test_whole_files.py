"""Files that are there whole or not at all, whatever happens to those who write them."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from modelquirks.planner import wholefile
from modelquirks.planner.export.exportreport import ExportError
from modelquirks.planner.export.outfolder import filling
from modelquirks.planner.hub.spans import Spans
from modelquirks.planner.wholefile import clear_partials, exclusive
from modelquirks.planner.writing import write_whole

DEAD = ".plan.json.0123456789abcdef.part"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(errno.EIO, "bad")])
def test_an_interrupted_writer_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    target = tmp_path / "plan.json"
    write_whole(target, "old")

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr("modelquirks.planner.wholefile.os.fsync", fails)
    with pytest.raises(type(error)):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_what_a_dead_process_left_is_removed_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DEAD).write_text("half")
    (tmp_path / f".other{DEAD}").write_text("of another file")
    with caplog.at_level(logging.INFO):
        write_whole(tmp_path / "plan.json", "new")
    assert sorted(os.listdir(tmp_path)) == [f".other{DEAD}", "plan.json"]
    assert DEAD in caplog.text


def test_what_a_living_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    begun, go_on = threading.Event(), threading.Event()

    def chunks() -> Any:
        yield b"one, "
        begun.set()
        go_on.wait(30)
        yield b"two"

    other = threading.Thread(target=wholefile.write_whole, args=(target, chunks()))
    other.start()
    assert begun.wait(30)
    assert clear_partials(target) == []
    write_whole(target, "three")
    assert target.read_text() == "three"
    go_on.set()
    other.join()
    assert target.read_text() == "one, two", "each file is of one writer"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_lock_that_was_got_and_not_given_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the process would wait for itself the next time."""

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wholefile, "_is_there", interrupted)
        with pytest.raises(KeyboardInterrupt), exclusive(tmp_path / "store"):
            pass
    with exclusive(tmp_path / "store") as alone:
        assert alone


def test_parents_that_were_made_for_nothing_go_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def full(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.suffix == ".part":
            raise OSError(errno.ENOSPC, "full", str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="full"), filling(tmp_path / "a" / "b" / "out"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_folder_that_can_neither_be_replaced_nor_given_back_is_told_by_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    rename, calls = os.rename, 0

    def once(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.EIO, "bad disk")
        rename(*args)

    monkeypatch.setattr("modelquirks.planner.export.outfolder.os.rename", once)
    with pytest.raises(ExportError, match=r"what was there is at '.*\.old'"), filling(out) as new:
        (new / "config.json").write_text("{ }")
    (old,) = tmp_path.iterdir()
    assert (old / "config.json").read_text() == "{}"


def test_kept_parts_of_a_file_with_other_bytes_are_refused() -> None:
    """As a machine that went down may leave them."""
    spans = Spans(100)
    spans.add(0, b"header")
    raw = b"".join(spans.dump())
    assert Spans.parse(raw).at(0) == b"header"
    with pytest.raises(ValueError, match="other bytes"):
        Spans.parse(raw.replace(b"header", bytes(6)))
