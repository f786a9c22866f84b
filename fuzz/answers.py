"""The hub as a script of answers: what huggingface_hub's session gets, without any network.

An input is a list of answers, each a status, headers and a body, set apart by a line ``%%``; when
they are used up, right answers come. So a fault may be in any of the first requests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from checking import check_manifest
from guard import scratch
from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from modelquirks.planner.hub import client
from modelquirks.planner.opening import open_checkpoint

__all__ = ["HUB_SEEDS", "hub"]

_COMMIT = "0a1b2c3d4e5f6071829304a5b6c7d8e9f0a1b2c3"
_LISTING = {
    "id": "org/name",
    "_id": "1",
    "sha": _COMMIT,
    "siblings": [{"rfilename": "config.json"}, {"rfilename": "model.safetensors"}],
}
_HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
_WEIGHTS = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8)
_CONFIG = b'{"model_type":"llama"}'


def _answer(status: int, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"{status}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\n".join(lines).encode("latin-1") + body


def _listing(**changes: Any) -> bytes:
    body = json.dumps({**_LISTING, **changes}).encode()
    return _answer(200, {"content-type": "application/json"}, body)


def _file(content: bytes = _WEIGHTS, **changes: str) -> bytes:
    n_bytes = len(content)
    headers = {
        "content-range": f"bytes 0-{n_bytes - 1}/{n_bytes}",
        "content-length": f"{n_bytes}",
        "etag": '"0123456789abcdef"',
        "x-repo-commit": _COMMIT,
        "accept-ranges": "bytes",
    }
    headers |= {name.replace("_", "-"): value for name, value in changes.items()}
    return _answer(206 if headers["content-range"] else 200, headers, content)


HUB_SEEDS = (
    b"\n%%\n".join((_listing(), _file(_CONFIG), _file())),
    b"\n%%\n".join((_listing(), _file(_CONFIG, content_range=""), _file(content_range=""))),
    _listing(siblings=[{"rfilename": "model.safetensors"}]) + b"\n%%\n" + _file(),
    b"\n%%\n".join((_answer(429, {"retry-after": "0"}, b"slow down"), _listing())),
    b"\n%%\n".join((_answer(404, {"x-error-code": "RepoNotFound"}, b"{}"), _listing())),
    b"\n%%\n".join((_answer(307, {"location": "/org/name2"}, b""), _listing())),
    _answer(416, {"content-range": "bytes */72"}, b""),
)


class _Script:
    """The answers that are left."""

    def __init__(self, data: bytes) -> None:
        self._left = data.split(b"\n%%\n")[:8] if data else []

    def __call__(self, library: Any, request: Any) -> Any:
        if self._left:
            return _read(library, self._left.pop(0))
        return self._right(library, request)

    def _right(self, library: Any, request: Any) -> Any:
        path = request.url.path
        if "/api/models/" in path:
            return _read(library, _listing())
        return _read(library, _file(_CONFIG if path.endswith(".json") else _WEIGHTS))


def _read(library: Any, text: bytes) -> Any:
    head, _, body = text.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    status = int(first) if first.isdigit() and len(first) == 3 and first[:1] in b"12345" else 200
    headers: list[tuple[bytes, bytes]] = []
    for line in lines:
        name, _, value = line.partition(b": ")
        headers.append((name.strip() or b"x", value.replace(b"\r", b"")))
    return library.Response(status, headers=headers, stream=library.ByteStream(body))


@contextmanager
def _connected(data: bytes) -> Generator[None]:
    """Have huggingface_hub's session give the answers in *data*, and keep its things here."""
    library = import_module(type(get_session()).__module__.partition(".")[0])
    script = _Script(data)
    transport = library.MockTransport(partial(script, library))
    home = scratch() / "hub"
    template = "http://hub.invalid/{repo_id}/resolve/{revision}/{filename}"
    settings = {
        "ENDPOINT": "http://hub.invalid",
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_ASSETS_CACHE": str(home / "assets"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }
    before = {name: getattr(constants, name) for name in settings}
    pauses = client._PAUSES
    set_client_factory(
        lambda: library.Client(transport=transport, follow_redirects=True, trust_env=False)
    )
    try:
        for name, value in settings.items():
            setattr(constants, name, value)
        client._PAUSES = (0.0, 0.0, 0.0, 0.0)
        yield
    finally:
        client._PAUSES = pauses
        for name, value in before.items():
            setattr(constants, name, value)
        set_client_factory(default_client_factory)


def hub(data: bytes) -> str:
    """Open a repository of which the hub says what *data* has."""
    shutil.rmtree(scratch() / "hub", ignore_errors=True)
    with _connected(data):
        return check_manifest(open_checkpoint("hf://org/name"), data)
