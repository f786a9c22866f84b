"""A server on this machine that speaks what huggingface_hub asks of a hub, and counts bytes.

Files may be larger than the disk: of a ``Blob`` only the start is given, the rest is zeros. Faults
are ordered by the path of a request, each for one request.

The protocol is that which huggingface_hub 2.4 asks for (``hf_api.py``, ``file_download.py``).
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Blob", "HubServer", "Repo", "Seen", "serving"]

_CHUNK = 1 << 16
_ENDLESS = 1 << 28
"""Bytes after which even an endless body ends."""
_STALL_S = 3.0


@dataclass(frozen=True)
class Blob:
    """A file: its first bytes, and zeros up to its size."""

    head: bytes
    size: int = -1
    lfs: bool = False
    """Whether it lies on another host, to which the hub redirects."""

    @property
    def n_bytes(self) -> int:
        return len(self.head) if self.size < 0 else self.size

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.head + str(self.n_bytes).encode()).hexdigest()

    def part(self, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from *begin* to before *end*."""
        while begin < end:
            stop = min(end, begin + _CHUNK)
            known = self.head[begin:stop]
            yield known + bytes(stop - begin - len(known))
            begin = stop


@dataclass
class Repo:
    """A repository: what each commit holds, and what branches and tags are."""

    commits: dict[str, dict[str, Blob]]
    refs: dict[str, str]
    gated: bool = False
    private: bool = False
    renamed: str = ""

    @classmethod
    def of(cls, files: Mapping[str, bytes | Blob], **options: Any) -> Repo:
        """Return one with a single commit, which is ``main``."""
        blobs = {k: v if isinstance(v, Blob) else Blob(v) for k, v in files.items()}
        text = "".join(f"{name}{blob.etag}" for name, blob in blobs.items())
        commit = hashlib.sha1(text.encode()).hexdigest()
        return cls({commit: blobs}, {"main": commit}, **options)

    def commit(self, files: Mapping[str, bytes | Blob], branch: str = "main") -> str:
        """Add a commit; return it."""
        other = Repo.of(files)
        self.commits |= other.commits
        self.refs[branch] = other.refs["main"]
        return self.refs[branch]


@dataclass
class Seen:
    """A request and what was sent for it."""

    method: str
    path: str
    token: str | None
    range: str | None
    host: str
    status: int = 0
    body_bytes: int = 0
    """Counted before they are sent, so that who has them all finds them counted."""


@dataclass
class HubServer:
    """What is served, and what was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    token: str = "hf_good"
    faults: dict[str, list[str]] = field(default_factory=dict)
    """By a part of the path, in order: a status; ``whole``, as if there were no ranges; ``shift``,
    a range that was not asked for; ``cut:N``, the connection closed after N bytes, ``reset:N``,
    reset after them, ``stall:N``, left open for some seconds; ``short:N``, an answer of N bytes
    that says it has them all; ``etag``, another state of the file; ``endless``, a body that does
    not end; ``html``, a page where JSON belongs; ``""``, none."""
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    files_url: str = ""
    """The other host, where the LFS files are."""

    @property
    def body_bytes(self) -> int:
        """All bytes of bodies so far."""
        return sum(one.body_bytes for one in self.seen)

    def forget(self) -> None:
        """Begin to count anew."""
        self.seen.clear()

    def fault(self, path: str) -> str:
        """Return the next fault that is ordered for a path, or ""."""
        for part, ordered in self.faults.items():
            if part in path and ordered:
                return ordered.pop(0)
        return ""


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {k.replace("_", "-"): v for k, v in headers.items()}
        if code:
            self.headers["X-Error-Code"] = code
        self.headers["X-Error-Message"] = message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.seen = Seen(
            self.command,
            self.path,
            self.headers.get("authorization"),
            self.headers.get("range"),
            self.headers.get("host", ""),
        )
        self.hub.seen.append(self.seen)
        try:
            self._route()
        except _Refused as refused:
            body = json.dumps({"error": str(refused)}).encode()
            self._send(refused.status, body, refused.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self) -> None:
        url = urlsplit(self.path)
        self.fault = self.hub.fault(url.path)
        if self.fault.startswith(("reset:0", "stall:0")):
            return self._break_off(self.fault.partition(":")[0])
        if self.fault.isdigit():
            more = {"Retry_After": "0"} if self.fault in ("429", "503") else {}
            raise _Refused(int(self.fault), "", "ordered by the test", **more)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "blobs":
            self._blob(parts[1])
        elif parts[:2] == ["api", "models"]:
            self._api(parts[2:], parse_qs(url.query))
        elif "resolve" in parts:
            at = parts.index("resolve")
            self._resolve("/".join(parts[:at]), parts[at + 1], "/".join(parts[at + 2 :]))
        else:
            raise _Refused(404, "", "no such page")

    def _repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        may = self.headers.get("authorization") == f"Bearer {self.hub.token}"
        if repo is None or (repo.private and not may):
            if self.headers.get("authorization") is None:
                raise _Refused(401, "RepoNotFound", "Repository not found")
            raise _Refused(404, "RepoNotFound", "Repository not found")
        if repo.renamed:
            path = self.path.replace(name, repo.renamed, 1)
            raise _Refused(307, "", "moved", Location=path)
        return repo

    def _commit(self, repo: Repo, revision: str) -> str:
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def _api(self, parts: list[str], query: Mapping[str, list[str]]) -> None:
        name, rest = "/".join(parts[:2]), parts[2:]
        repo = self._repo(name)
        if rest[:1] == ["refs"]:
            refs = [{"name": n, "ref": n, "targetCommit": c} for n, c in repo.refs.items()]
            return self._json({"branches": refs, "tags": [], "converts": []})
        commit = self._commit(repo, rest[1] if len(rest) > 1 else "main")
        files = repo.commits[commit]
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": n, "size": b.n_bytes, "oid": b.etag[:40]}
                for n, b in files.items()
            ]
            return self._json(tree)
        found = {"_id": commit[:24], "id": name, "sha": commit}
        siblings = [{"rfilename": file} for file in files]
        return self._json({**found, "siblings": siblings})

    def _endless(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        while self.seen.body_bytes < _ENDLESS:
            self.wfile.write(bytes(_CHUNK))
            self.seen.body_bytes += _CHUNK

    def _json(self, value: object) -> None:
        if self.fault == "html":
            page = b"<!doctype html><title>Log in</title><script>alert(1)</script>"
            return self._send(200, page, {"Content-Type": "text/html"})
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._repo(name)
        commit = self._commit(repo, revision)
        if repo.gated and self.headers.get("authorization") != f"Bearer {self.hub.token}":
            raise _Refused(
                401 if self.headers.get("authorization") is None else 403,
                "GatedRepo",
                f"Access to model {name} is restricted",
            )
        blob = repo.commits[commit].get(file)
        if blob is None:
            raise _Refused(404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if blob.lfs:
            headers |= {
                "X-Linked-Size": str(blob.n_bytes),
                "X-Linked-ETag": f'"{blob.etag}"',
                "Location": f"{self.hub.files_url}/blobs/{blob.etag}?signed=1",
            }
            self._send(302, b"", headers)
        else:
            self._file(blob, headers)

    def _blob(self, etag: str) -> None:
        if self.headers.get("authorization"):  # as the real ones do with a signed address
            raise _Refused(400, "", "two ways of authorization")
        for repo in self.hub.repos.values():
            for files in repo.commits.values():
                for blob in files.values():
                    if blob.etag == etag:
                        return self._file(blob, {"ETag": f'"{etag}"'})
        raise _Refused(404, "", "no such blob")

    def _file(self, blob: Blob, headers: dict[str, str]) -> None:
        begin, end, status = 0, blob.n_bytes, 200
        asked = self.headers.get("range")
        if asked and self.fault != "whole":
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else end, end)
            status = 206
            if begin >= blob.n_bytes:
                raise _Refused(416, "", "", Content_Range=f"bytes */{blob.n_bytes}")
            shift = 7 if self.fault == "shift" else 0
            told = f"bytes {begin + shift}-{end - 1 + shift}/{blob.n_bytes}"
            headers["Content-Range"] = told
        if self.fault == "etag":
            headers["ETag"] = '"another"'
        if self.fault == "endless":
            return self._endless(status, headers)
        if self.fault.startswith("short:"):
            end = begin + int(self.fault.partition(":")[2])
        self._begin(status, headers, end - begin)
        if self.command == "HEAD":
            return
        word, _, n_bytes = self.fault.partition(":")
        limit = int(n_bytes) if word in ("cut", "reset", "stall") else -1
        for chunk in blob.part(begin, end):
            part = chunk if limit < 0 else chunk[: max(0, limit - self.seen.body_bytes)]
            self.seen.body_bytes += len(part)
            self.wfile.write(part)
            if len(part) < len(chunk):
                self._break_off(word)
                return

    def _break_off(self, how: str) -> None:
        self.wfile.flush()
        self.close_connection = True
        if how == "stall":
            time.sleep(_STALL_S)
        elif how == "reset":  # unsent bytes are thrown away, the other side is told of a reset
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._begin(status, headers, len(body))
        if self.command != "HEAD":
            self.seen.body_bytes += len(body)
            self.wfile.write(body)

    def _begin(self, status: int, headers: Mapping[str, str], length: int) -> None:
        self.seen.status = status
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@contextmanager
def serving(hub: HubServer) -> Generator[HubServer, None, None]:
    """Serve *hub* on two ports of this machine: the hub, and the host of its large files."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    servers = [_Server(("127.0.0.1", 0), handler) for _ in range(2)]
    threads = [threading.Thread(target=s.serve_forever, args=(0.01,)) for s in servers]
    hub.url, hub.files_url = (f"http://127.0.0.1:{s.server_address[1]}" for s in servers)
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
