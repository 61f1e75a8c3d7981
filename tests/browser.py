"""A page as a browser shows it: headless Chromium, driven over a pipe with its devtools protocol, without further packages."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
REQUIRED = "DFLASH_NEEDS_BROWSER"  # set where the tests that need one must not be skipped


def find() -> str | None:
    """The browser's path, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def needed() -> str:
    """The browser's path; without one the test is skipped, or fails where a browser was promised."""
    path = find()
    if path is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but there is no {NAMES[0]}; apt-get install chromium")
        pytest.skip("no Chromium: apt-get install chromium")
    return path


class Page:
    """One page. `complaints`: errors and warnings on its console, uncaught exceptions, and requests for anything but itself."""

    def __init__(self, writer: int, reader: int, timeout: float = 60.0) -> None:
        self.writer, self.reader, self.timeout = writer, reader, timeout
        self.buffer, self.number, self.session = b"", 0, None
        self.complaints: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile is noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self.number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + self.timeout
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser said nothing for {self.timeout:.0f} s"
            more = os.read(self.reader, 1 << 20)
            assert more, "the browser has gone"
            self.buffer += more
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {[a.get('value', a.get('description')) for a in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']['text']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent" and params["request"]["url"] != self.url:
            self.complaints.append(f"request: {params['request']['url']}")

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Show a file at a window's width and wait until it is loaded."""
        self.url, self.loaded = path.resolve().as_uri(), False
        self._resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=self.url)
        while not self.loaded:
            self._note(self._receive())

    def _resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def overflow(self) -> list[str]:
        """Elements that reach beyond the window's right edge, without those in a box that scrolls or hides by itself."""
        return self.evaluate("""(() => {
          const clipped = (e) => { for (let p = e.parentElement; p && p !== document.documentElement; p = p.parentElement)
            if (getComputedStyle(p).overflowX !== "visible") return true; return false; };
          const wide = [...document.querySelectorAll("body *")].filter((e) =>
            e.getBoundingClientRect().right > window.innerWidth + 0.5 && !clipped(e));
          const all = wide.map((e) => e.tagName + "." + (e.getAttribute("class") || "") + " " + e.textContent.slice(0, 40));
          return document.documentElement.scrollWidth > window.innerWidth ? ["the page itself", ...all] : all;
        })()""")

    def screenshot(self, path: Path) -> None:
        """The whole page, however long, as a PNG."""
        size = {name: self.evaluate(f"document.documentElement.{name}") for name in ("clientWidth", "scrollHeight")}
        self._resize(size["clientWidth"], size["scrollHeight"])
        made = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(made["data"]))


@contextlib.contextmanager
def page() -> Iterator[Page]:
    """A fresh browser with one page; skips the test where there is no browser."""
    command = needed()
    theirs_in, writer = os.pipe()
    reader, theirs_out = os.pipe()
    # The browser wants descriptors 3 and 4; ours may have these numbers, so move them out of the way first.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 50) for descriptor in (theirs_in, theirs_out)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}', command, "--headless", "--no-sandbox",
             "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
             f"--user-data-dir={profile}"],
            pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for descriptor in (theirs_in, theirs_out, *high):
            os.close(descriptor)
        try:
            yield Page(writer, reader)
        finally:
            process.kill()
            process.wait()
            os.close(writer)
            os.close(reader)
