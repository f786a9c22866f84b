"""``Client``: the requests to the hub, each through huggingface_hub's own session.

A range of a file is asked for, checked against what the answer says it is, and gone on with where
a connection broke off. An answer that is not the range is never read to its end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
from huggingface_hub.utils import (
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)

from modelquirks.planner.finding import brief
from modelquirks.planner.hub.failure import HubFailure

__all__ = ["COMMIT", "HTTP_ERROR", "Client", "Listed", "Piece", "Remote", "readable"]

T = TypeVar("T")

HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""The base of all errors of the HTTP library that huggingface_hub uses (httpx, or a successor)."""

COMMIT = re.compile(r"[0-9a-f]{40}")
_PASSING = (408, 429, 500, 502, 503, 504)
_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try."""
_LONGEST_PAUSE = 60.0
_WORTHWHILE_BYTES = 16 << 10
_SKIPPED_BYTES = 4 << 20
"""So much is read past where a server cannot give a range."""
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18})")
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)
"""What huggingface_hub raises where an answer is not of the form that it expects."""


class Listed(NamedTuple):
    """What the hub says about a revision."""

    repository: str
    """Its name, which may not be the one asked for."""
    commit: str
    names: tuple[str, ...]


class Piece(NamedTuple):
    """Some bytes of a file, and how many it has."""

    content: bytes
    size: int


@dataclass(eq=False)
class Remote:
    """A file on the hub, and where it was found to lie."""

    url: str
    direct: str = ""
    """Where the hub sent us for its bytes: another host, which gets no token."""


@dataclass(eq=False)
class Client:
    """One endpoint, and the token that goes to it alone."""

    token: str | bool | None = None
    endpoint: str = field(default_factory=lambda: constants.ENDPOINT)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request to the endpoint, with the token if there is one."""
        return dict(build_hf_headers(token=self.token, library_name="modelquirks"))

    @property
    def has_token(self) -> bool:
        """Whether a token is sent."""
        return "authorization" in self.headers

    def listing(self, repository: str, revision: str) -> Listed:
        """Return the files of a revision: one request, which gives names alone."""
        with readable("the list of files"):
            found = retried(
                lambda: HfApi(endpoint=self.endpoint).model_info(
                    repository,
                    revision=revision,
                    expand=["sha", "siblings"],
                    token=self.token,
                    timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                )
            )
            names = tuple(file.rfilename for file in found.siblings or ())
            if not isinstance(found.id, str):
                raise TypeError(f"its name is {brief(found.id)}")
            validate_repo_id(found.id)  # it becomes the name of a folder, as the commit does
        if not isinstance(found.sha, str) or not COMMIT.fullmatch(found.sha):
            raise HubFailure(
                f"the hub gives {brief(found.sha)} as a commit; 40 hexadecimal digits were meant"
            )
        if odd := [name for name in names if not isinstance(name, str)]:
            raise HubFailure(f"the hub lists {brief(odd[0])} as a file; a name was expected")
        return Listed(found.id, found.sha, names)

    def commit(self, repository: str, revision: str, name: str) -> str | None:
        """Return the commit that *revision* is now, asked by the headers of the file *name*."""
        url = hf_hub_url(repository, name, revision=revision, endpoint=self.endpoint)
        try:
            with readable(f"the headers of {name!r}"):
                found = retried(
                    lambda: get_hf_file_metadata(url, headers=self.headers, endpoint=self.endpoint)
                )
        except RemoteEntryNotFoundError as error:  # the file is gone, the answer still says it
            return error.response.headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
        return found.commit_hash

    def revisions(self, repository: str) -> tuple[str, ...]:
        """Return the branches and tags; none if the hub does not say."""
        try:
            refs = HfApi(endpoint=self.endpoint).list_repo_refs(repository, token=self.token)
        except (OSError, HTTP_ERROR, *_UNREADABLE):
            return ()
        return tuple(ref.name for ref in (*refs.branches, *refs.tags))

    def remote(self, repository: str, commit: str, name: str) -> Remote:
        """Return a file, without asking for it."""
        return Remote(hf_hub_url(repository, name, revision=commit, endpoint=self.endpoint))

    def read(self, remote: Remote, begin: int, end: int) -> Piece:
        """Return the bytes from *begin* to before *end*, fewer where the file ends.

        OSError or :data:`HTTP_ERROR` if the hub does not give them, :class:`HubFailure` if what
        it gives is something else.
        """
        got = _Got(begin, end)
        with readable(f"bytes of {remote.url!r}"):
            retried(lambda: self._go_on(remote, got), progress=lambda: len(got.content))
        return Piece(bytes(got.content), got.size)

    def _go_on(self, remote: Remote, got: _Got) -> None:
        """Ask for what is still lacking; one request, or two where a redirect has expired."""
        try:
            self._request(remote, got)
        except HfHubHTTPError as error:
            if not remote.direct or error.response.status_code in _PASSING:
                raise
            remote.direct = ""
            self._request(remote, got)

    def _request(self, remote: Remote, got: _Got) -> None:
        asked = {
            "range": f"bytes={got.position}-{got.end - 1}",
            "accept-encoding": "identity",  # a range of what is compressed is of no use
        }
        headers = asked if remote.direct else {**self.headers, **asked}
        with get_session().stream(
            "GET",
            remote.direct or remote.url,
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            follow_redirects=True,
        ) as response:
            if response.status_code == 416:
                got.end_at(_sizes(response.headers, remote.url)[2])
                return
            hf_raise_for_status(response)
            if response.history and not _same_host(str(response.url), remote.url):
                remote.direct = str(response.url)
            skip = got.expect(response.status_code, response.headers, remote.url)
            for chunk in response.iter_raw():
                part, skip = chunk[skip:], max(0, skip - len(chunk))
                if got.take(part):
                    return  # the rest, if any is sent, is not waited for
        if got.lacking:  # closed early, without an error
            raise _Cut(f"the connection ended {got.lacking:,} bytes early")


class _Cut(OSError):
    """An answer shorter than it said."""


@dataclass(eq=False)
class _Got:
    """A range that is being read."""

    begin: int
    end: int
    size: int = -1
    until: int = 0
    """Where the answer that is being read says it ends."""
    content: bytearray = field(default_factory=bytearray)

    @property
    def position(self) -> int:
        return self.begin + len(self.content)

    @property
    def lacking(self) -> int:
        return max(0, self.end - self.position)

    def end_at(self, size: int) -> None:
        """Take note of the size of the file; what was asked for ends with it."""
        if self.size not in (-1, size):
            text = f"the file had {self.size:,} bytes and has {size:,} a moment later"
            raise HubFailure(text)
        self.size = size
        self.end = min(self.end, size)

    def expect(self, status: int, headers: Mapping[str, str], url: str) -> int:
        """Check what an answer says it is; return how many of its bytes come before ours."""
        if status == 206:
            first, last, size = _sizes(headers, url)
            if first != self.position or not first <= last < size:
                raise HubFailure(
                    f"the answer for bytes {self.position:,} to {self.end - 1:,} of {url!r} is of "
                    f"bytes {first:,} to {last:,} of {size:,}; something between here and the hub "
                    "alters requests: leave it out, or download the files first"
                )
            self.end_at(size)
            self.until = last + 1
            return 0
        length = headers.get("content-length", "")
        if not _is_number(length) or headers.get("content-encoding", "identity") != "identity":
            raise HubFailure(
                f"the server of {url!r} answers without ranges and without a plain "
                "length; download the files first"
            )
        self.end_at(int(length))
        self.until = self.size
        if self.position > _SKIPPED_BYTES:
            raise HubFailure(
                f"the server of {url!r} gives no ranges of a file, and byte {self.position:,} is "
                f"too far from its start to read up to it ({int(length):,} bytes in all); download "
                "the files first, or use another HF_ENDPOINT"
            )
        return self.position

    def take(self, chunk: bytes) -> bool:
        """Add *chunk*, as far as it was asked for; tell whether nothing is lacking."""
        self.content += chunk[: max(0, min(self.lacking, self.until - self.position))]
        return not self.lacking


def retried(call: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """Return what *call* returns, trying again where the trouble may pass.

    A try that *progress* has grown in, by what a connection should give at least, does not count.
    """
    failed, before = 0, progress()
    while True:
        try:
            return call()
        except (_Cut, HTTP_ERROR) as error:
            failed = 0 if progress() - before >= _WORTHWHILE_BYTES else failed
            before = progress()
            pause = _pause(error, failed)
            if pause is None:
                raise
            failed += 1
            time.sleep(pause)


def _pause(error: Exception, failed: int) -> float | None:
    """Return the seconds to wait before the next try, None if there is to be none."""
    if failed >= len(_PAUSES):
        return None
    if not isinstance(error, HfHubHTTPError):
        return None if type(error).__name__ in _LASTING else _PAUSES[failed]
    if error.response.status_code not in _PASSING:
        return None
    told = error.response.headers.get("retry-after", "")
    if not _is_number(told):
        return _PAUSES[failed]
    return max(float(told), 0.0) if float(told) <= _LONGEST_PAUSE else None


_LASTING = ("ProxyError", "TooManyRedirects", "UnsupportedProtocol")
"""Errors that another try does not mend."""


def _sizes(headers: Mapping[str, str], url: str) -> tuple[int, int, int]:
    """Return first and last byte and the size of the file of an answer with a range."""
    told = headers.get("content-range", "")
    found = _RANGE.fullmatch(told)
    if found is None:
        raise HubFailure(
            f"the answer for a range of {url!r} has the Content-Range {brief(told)}; 'bytes "
            "first-last/size' was expected"
        )
    return int(found[1] or 0), int(found[2] or 0), int(found[3])


def _is_number(text: str) -> bool:
    """Tell whether a header has a number, of at most 18 digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


@contextmanager
def readable(what: str) -> Generator[None, None, None]:
    """Say so where the hub's answer is not what huggingface_hub can read."""
    try:
        yield
    except (OSError, HTTP_ERROR):  # of which some are ValueErrors too
        raise
    except _UNREADABLE as error:
        raise HubFailure(
            f"the hub's answer for {what} is not of the form that was expected "
            f"({type(error).__name__}: {brief(str(error), 100)}); something between here and the "
            "hub may alter answers (a login page?), or HF_ENDPOINT is no hub"
        ) from None


def _same_host(url: str, other: str) -> bool:
    return url.split("/")[:3] == other.split("/")[:3]
