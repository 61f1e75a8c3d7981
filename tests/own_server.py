"""Our server as a process, and a client that streams from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from stubs import free_port

COMMAND = [sys.executable, "-m", "dflash_train.serve"]
TOKENS = 40


class Server:
    """url; process; log: what it has said so far."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path):
        self.process, self.url, self.path = process, url, log

    @property
    def log(self) -> str:
        return self.path.read_text()

    def metrics(self) -> dict[str, float]:
        """Counts by name; those with a label of their own by it too."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            name, labels, value = (
                re.fullmatch(r"(?:vllm:)?(\w+)(\{.*?\})? (\S+)", line).groups() if line[0] != "#" else (None,) * 3
            )
            if name:
                own = re.search(r'(?:position|finished_reason)="(\w+)"', labels or "")
                found[name + (f"/{own[1]}" if own else "")] = float(value)
        return found


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    port, log = free_port(), folder / "server.log"
    with log.open("w") as stream:
        process = subprocess.Popen([*COMMAND, *arguments, "--port", str(port)], stdout=stream, stderr=subprocess.STDOUT)
    server, deadline = Server(process, f"http://127.0.0.1:{port}", log), time.monotonic() + 120
    try:
        while "serving " not in server.log:
            assert process.poll() is None and time.monotonic() < deadline, server.log[-2000:]
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()


def stream(url: str, prompt: list[int]) -> tuple[str, dict]:
    """(text, usage) of a streamed completion."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    text, usage = "", {}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream_options": {"include_usage": True}}, timeout=120
    ) as got:
        assert got.status_code == 200
        for line in got.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                text += "".join(choice["text"] for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    return text, usage
