"""A real browser for tests of pages: Chromium, spoken to over a pipe.

The DevTools protocol (https://chromedevtools.github.io/devtools-protocol/) is JSON, one message up
to each NUL byte, read by the browser from descriptor 3 and written to 4 (--remote-debugging-pipe).
So a browser is all that is needed: no driver, no package, no port.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import math
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from modelquirks.planner.dispatcher import Dispatcher
from modelquirks.planner.plan import Plan

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PATIENCE_S = 60.0
_BECOME = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Becomes a command whose descriptors 3 and 4 are those given."""


def find_browser() -> str | None:
    """Return the browser that MODELQUIRKS_TEST_BROWSER names, else one on the path."""
    named = os.environ.get("MODELQUIRKS_TEST_BROWSER")
    return named or next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One headless browser with one page."""

    def __init__(self, command: str, profile: Path) -> None:
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        # Above 4, so that making one of those does not close the other.
        ours = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_end, write_end)]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _BECOME,
                *map(str, ours),
                command,
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                "--force-color-profile=srgb",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=ours,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (read_end, write_end, *ours):
            os.close(end)
        self._numbers = itertools.count(1)
        self._left = b""
        self._session: str | None = None
        self.said: list[str] = []
        """What the page wrote to its console, and what the browser complained of."""
        self._requests: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._hear(answer)

    @property
    def requested(self) -> list[str]:
        """The addresses that were asked for, without what the page's policy stopped."""
        return [*self._requests.values()]

    def open(self, path: Path, *, fragment: str = "") -> None:
        """Show a file, from the start."""
        self.call("Page.navigate", url="about:blank")
        self.said.clear()
        self._requests.clear()
        self.call("Page.navigate", url=path.as_uri() + fragment)
        deadline = time.monotonic() + _PATIENCE_S
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page did not load"

    def run(self, script: str) -> Any:
        """Return what an expression of JavaScript gives."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def look(self, *, width: int, height: int = 800, scheme: str = "light") -> None:
        """Make the window so wide, and light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element of *selector*, as a mouse does."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Write into a field, as a keyboard does."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press one key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                self.said.append(f"console: {params['args']}")
            case "Runtime.exceptionThrown":
                self.said.append(f"exception: {params['exceptionDetails']}")
            case "Log.entryAdded":
                self.said.append(f"log: {params['entry']['text']}")
            case "Network.requestWillBeSent":
                self._requests[params["requestId"]] = params["request"]["url"]
            case "Network.loadingFailed" if "blockedReason" in params:
                self._requests.pop(params["requestId"], None)
            case _:
                pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Give a browser, or skip with the reason."""
    command = find_browser()
    if command is None:
        pytest.skip(
            f"no browser: none of {', '.join(_NAMES)} is on the path (apt-get install chromium), "
            "and MODELQUIRKS_TEST_BROWSER names none"
        )
    opened = Browser(command, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """Write a file of zeros, of which only the header takes room on the disk."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * {"F32": 4, "BF16": 2, "I32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a checkpoint with 35,743 tensors in 57 families, as large as a real one."""
    tensors: dict[str, tuple[str, Sequence[int]]] = {}
    for layer in range(30):
        block = f"model.language_model.layers.{layer}"
        for part in ("gate_proj", "up_proj", "down_proj"):
            for expert in range(128):
                weight = f"{block}.experts.{expert}.{part}.weight"
                tensors[f"{weight}_packed"] = ("I32", [704, 352])
                tensors[f"{weight}_scale"] = ("BF16", [704, 88])
                tensors[f"{weight}_shape"] = ("I32", [2])
            tensors[f"{block}.mlp.{part}.weight"] = ("BF16", [2112, 2816])
        for part in ("q", "k", "o", "v")[: 4 if layer < 25 else 3]:
            weight = f"{block}.self_attn.{part}_proj.weight"
            tensors[f"{weight}_packed"] = ("I32", [2816, 352])
            tensors[f"{weight}_scale"] = ("BF16", [2816, 88])
            tensors[f"{weight}_shape"] = ("I32", [2])
        for norm in range(13):
            tensors[f"{block}.norm_{norm}.weight"] = ("BF16", [2816])
    for layer in range(27):
        for number in range(12):
            name = f"model.vision_tower.encoder.layers.{layer}.part_{number}.linear.weight"
            tensors[name] = ("BF16", [1152, 1152])
        tensors[f"model.vision_tower.encoder.layers.{layer}.scale"] = ("BF16", [1152])
    tensors["model.language_model.embed_tokens.weight"] = ("BF16", [262144, 2816])
    tensors["model.language_model.norm.weight"] = ("BF16", [2816])
    for number in range(35_743 - len(tensors)):
        tensors[f"model.vision_tower.extra_{number}"] = ("BF16", [1152])
    folder = tmp_path_factory.mktemp("big")
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


HOSTILE = (
    "</script><script>hacked=1</script>",
    "<img src=x onerror=hacked=1>.0.w",
    "\"'onmouseover='hacked=1' x=\".weight",
    "</style><style>body{display:none}",
    "layers.0.<!--.w",
    "layers.1.<!--.w",
    "&lt;b&gt;.weight",
    "\x1b[31m\u202etxt.\x07weight\u2028",
    "javascript:hacked=1",
    "a{0}.*.{{1}}.b",
)
"""Names that try to be markup, script, style or orders to a terminal."""


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a checkpoint with hostile names."""
    folder = tmp_path_factory.mktemp("<b>'\"&folder")
    write_safetensors(folder / "model.safetensors", {n: ("F32", [4, 4]) for n in HOSTILE})
    return folder


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Give a plan that cannot be used: tensors are missing, of another shape, and unexpected."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(64, 256, bias=False)
            self.down = nn.Linear(256, 64, bias=False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 64)
            self.layers = nn.ModuleList(Block() for _ in range(12))
            self.head = nn.Linear(64, 1000, bias=False)

    tensors: dict[str, tuple[str, Sequence[int]]] = {
        "embed.weight": ("F32", [1000, 64]),
        "head.weight": ("F32", [999, 64]),
        "surplus.weight": ("F32", [2, 2]),
    }
    for layer in range(12):
        tensors[f"layers.{layer}.up.weight"] = ("F32", [256, 64])
        if layer % 5:
            tensors[f"layers.{layer}.down.weight"] = ("F32", [64, 256])
    folder = tmp_path_factory.mktemp("faulty")
    write_safetensors(folder / "model.safetensors", tensors)
    with torch.device("meta"):
        model = Net()
    memory = {0: "700KiB", "cpu": "900KiB", "disk": "1GiB"}
    return Dispatcher().plan(folder, model=model, max_memory=memory)
