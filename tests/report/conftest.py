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
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
        """What the page wrote to its console, and requests that were blocked or failed."""
        self.requested: list[str] = []
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

    def open(self, path: Path, *, fragment: str = "") -> None:
        """Show a file, from the start."""
        self.call("Page.navigate", url="about:blank")
        self.said.clear()
        self.requested.clear()
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
        return json.loads(message)

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
                self.requested.append(params["request"]["url"])
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
