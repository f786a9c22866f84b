"""Parts of remote files: right bytes, each fetched once, and kept."""

from __future__ import annotations

import io
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelquirks.planner.checkpoint.index import leaves_folder
from modelquirks.planner.hub.address import Address, address_of
from modelquirks.planner.hub.client import Piece
from modelquirks.planner.hub.remotefile import RemoteFile
from modelquirks.planner.hub.spans import Spans


class File:
    """A file of which no byte may be fetched twice."""

    def __init__(self, size: int) -> None:
        self.content = random.Random(size).randbytes(size)
        self.fetched = bytearray(size)

    def fetch(self, begin: int, end: int) -> Piece:
        assert begin < end
        piece = self.content[begin:end]
        assert not any(self.fetched[begin:end]), "fetched twice"
        self.fetched[begin:end] = b"\1" * len(piece)
        return Piece(piece, len(self.content))


places = st.integers(0, 300_000)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("at"), places, st.integers(0, 20_000)),
        st.tuples(st.just("begin"), st.integers(1, 100_000), st.just(0)),
        st.tuples(st.just("tail"), st.integers(1, 3_000), st.just(0)),
        st.tuples(st.just("expect"), st.lists(places, max_size=4), st.integers(1, 400)),
    ),
    max_size=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(size=st.integers(1, 280_000), done=steps)
def test_whatever_is_read_in_whatever_order_is_right_and_fetched_once(
    size: int, done: list[tuple[str, int | list[int], int]]
) -> None:
    file = File(size)
    remote = RemoteFile(file.fetch, Spans())
    for what, where, length in done:
        if isinstance(where, list):
            remote.expect([(begin, begin + length) for begin in where])
        elif what == "begin":
            assert remote.begin(where) == size
        elif what == "tail":
            with remote.open() as opened:
                opened.seek(-min(where, size), os.SEEK_END)
                assert opened.read() == file.content[-where:]
        else:
            assert remote.at(where, length) == file.content[where : where + length]
    if not remote.spans:
        return
    kept = Spans.parse(b"".join(remote.spans.dump()))
    again = RemoteFile(lambda begin, end: pytest.fail("fetched again"), kept)
    for what, where, length in done:
        if what == "at" and isinstance(where, int):
            assert again.at(where, length) == file.content[where : where + length]


@given(
    content=st.binary(min_size=1, max_size=2_000),
    moves=st.lists(st.tuples(st.sampled_from("rls"), st.integers(0, 2_500)), max_size=12),
)
def test_an_open_remote_file_is_read_as_a_file_in_memory(
    content: bytes, moves: list[tuple[str, int]]
) -> None:
    mine = RemoteFile(lambda begin, end: Piece(content[begin:end], len(content)), Spans()).open()
    theirs = io.BytesIO(content)
    for what, number in moves:
        if what == "s":
            assert mine.seek(number) == theirs.seek(number)
        elif what == "r":
            assert mine.read(number) == theirs.read(number)
        else:
            assert mine.readline(number) == theirs.readline(number)
        assert mine.tell() == theirs.tell()


@given(st.text(alphabet="ab/.-@:\\ ~#%é", max_size=12))
def test_no_text_becomes_an_address_that_leads_elsewhere(text: str) -> None:
    for written in (text, f"hf://a/b/{text}"):
        try:
            address = address_of(written)
        except ValueError:
            continue
        if address is not None:
            assert address.repository.count("/") == 1
            assert ".." not in address.path.split("/")
            assert not address.path or not leaves_folder(address.path)


def test_addresses() -> None:
    assert address_of("hf://gpt2") == Address("gpt2")
    assert address_of("hf://gpt2@v1") == Address("gpt2", "v1")
    assert address_of("hf://a/b@refs%2Fpr%2F3/c/d") == Address("a/b", "refs/pr/3", "c/d")
    assert address_of("hf://a/b@refs/pr/3/c/d") == Address("a/b", "refs/pr/3", "c/d")
    assert address_of("hf://a/b/") == Address("a/b")
