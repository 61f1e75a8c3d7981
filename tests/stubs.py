"""A scripted OpenAI-compatible server in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]  # status, JSON value or text, headers


def chat(
    content: str | None = "hello",
    *,
    finish: str | None = "stop",
    usage: int = 0,
    top: dict | None = None,
    **message: Any,
) -> Reply:
    """A 200 of /chat/completions. `top` goes beside the choices, or into the first one under the key "choice"."""
    top = dict(top or {})
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": finish,
        **top.pop("choice", {}),
    }
    return 200, {"choices": [choice], "usage": {"prompt_tokens": usage, "completion_tokens": 3}, **top}


class StubServer:
    """Answers POSTs by `script(body, number)`, number counting from 1, after `delay` seconds. Use it as a context manager.

    posts: (path, headers, body) of each. most: the largest number that were in work at once.
    """

    def __init__(self, script: Callable[[dict, int], Reply] | None = None, *, models: Any = None, delay: float = 0.0):
        self.script = script or (lambda body, number: chat())
        self.models = models if models is not None else (200, {"data": [{"id": "target", "owned_by": "vllm"}]})
        self.delay = delay
        self.posts: list[tuple[str, dict, dict]] = []
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.dead = False
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
                data = (value if isinstance(value, str) else json.dumps(value)).encode()
                try:
                    self.send_response(status)
                    for name, text in {**(headers or {}), "Content-Length": str(len(data))}.items():
                        self.send_header(name, text)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client did not wait

            def do_GET(self) -> None:
                self.send(*(stub.models if self.path == "/v1/models" else (404, "no such page")))

            def do_POST(self) -> None:
                if stub.dead:
                    self.close_connection = True
                    return
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub.lock:
                    stub.posts.append((self.path, dict(self.headers), body))
                    number = len(stub.posts)
                    stub.now += 1
                    stub.most = max(stub.most, stub.now)
                if stub.delay:
                    stub.released.wait(stub.delay)
                reply = stub.script(body, number)
                with stub.lock:
                    stub.now -= 1
                self.send(*reply)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> StubServer:
        self.thread.start()
        return self

    def die(self) -> None:
        """From now on connections are refused, and those that are open break."""
        self.dead = True
        self.__exit__()

    def __exit__(self, *exc: Any) -> None:
        self.released.set()  # nobody waits for a slow answer
        self.server.shutdown()
        self.server.server_close()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
