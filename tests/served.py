"""An OpenAI-compatible server that pretends to decode: it knows how long everything takes, how many tokens come at once, and counts like an
engine. For tests of what measures servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Script = list[int]  # tokens of each piece


@dataclass
class Pretender:
    """pieces: tokens that each pass yields, the first one from the prompt; pause: seconds before each piece. The answer to a prompt is a
    function of it and of `pieces`.

    engine: whose names are used, "" for a server that tells nothing. Faults: usage False leaves it out; cut_bytes sends the stream in pieces of
    so many bytes; newline: of the stream; busy: so many first requests get 429; hang_up: so many first ones get a closed connection; fail: every so many-th request gets a 400; die_after: so many
    answers, then nobody listens; broken: streams end in the middle.
    """

    pieces: Script = field(default_factory=lambda: [1, 3, 2, 4])
    pause: float = 0.001
    first: float = 0.002
    engine: str = "vllm"
    per_request: bool = False
    block: int = 5  # drafts per pass
    usage: bool = True
    newline: str = "\n"
    cut_bytes: int = 0
    comments: bool = False
    busy: int = 0
    hang_up: int = 0
    fail: int = 0
    die_after: int = 0
    broken: bool = False
    metrics: bool = True
    model: str = "target"
    answers_as: str = ""  # the model that its answers name, where it is another

    posts: list[dict[str, Any]] = field(default_factory=list)
    now: int = 0
    most: int = 0
    answered: int = 0
    refused: int = 0
    rounds: int = 0
    accepted: int = 0
    generated: int = 0
    per_pos: list[int] = field(default_factory=lambda: [0] * 5)
    url: str = ""

    def text(self, i: int, count: int) -> str:
        return "".join(f"wört{i}.{k} " for k in range(count))

    # --- what it counts ---

    def counted(self) -> tuple[int, int, list[int], int]:
        """rounds, accepted, accepted per position and tokens of one answer."""
        gains = [n - 1 for n in self.pieces[1:]]
        return len(gains), sum(gains), [sum(g > p for g in gains) for p in range(self.block)], sum(self.pieces)

    def prometheus(self) -> str:
        label = '{engine="0",model_name="target"}'
        if self.engine in ("vllm", "llamacpp"):
            name = f"{self.engine}:spec_decode_num_"
            written = "vllm:generation_tokens_total" if self.engine == "vllm" else "llamacpp:tokens_predicted_total"
            return "\n".join(
                [
                    f"# HELP {name}drafts_total Number of spec decoding drafts.",
                    f"# TYPE {name}drafts_total counter",
                    f"{name}drafts_total{label} {float(self.rounds)}",
                    f"{name}drafts_created{label} 1.7e+09",
                    f"{name}draft_tokens_total{label} {float(self.rounds * self.block)}",
                    f"{name}accepted_tokens_total{label} {float(self.accepted)}",
                    *(
                        f'{name}accepted_tokens_per_pos_total{{engine="0",model_name="target",position="{p}"}} {n}'
                        for p, n in enumerate(self.per_pos)
                    ),
                    f"{written}{label} {self.generated}",
                    "",
                ]
            )
        if self.engine == "sglang":
            return (
                f"sglang:spec_verify_calls_total{label} {self.rounds}\nsglang:generation_tokens_total{label} {self.generated}\n"
                f"sglang:spec_accept_length{label} 2.75\n"
            )
        return f"http_requests_total {self.answered}\n"

    def extras(self, *, stream: bool) -> dict[str, Any]:
        rounds, accepted, per_pos, tokens = self.counted()
        if self.engine == "vllm" and self.per_request:
            gains = [n - 1 for n in self.pieces[1:]]
            found = {"mean_acceptance_length": 1 + accepted / rounds, "draft_acceptance_rate": accepted / rounds / self.block,
                     "acceptance_histogram": [gains.count(j) for j in range(self.block + 1)], "num_spec_steps": rounds,
                     "num_accepted_draft_tokens": accepted, "num_draft_tokens": rounds * self.block, "num_spec_tokens": self.block}  # fmt: skip
            return {"metrics": {"speculative_decoding": found}}
        if self.engine == "sglang" and self.per_request:
            found = {"spec_accept_length": tokens / rounds, "spec_num_correct_drafts": accepted, "spec_verify_ct": rounds,
                     "spec_num_proposed_drafts": rounds * self.block, "spec_correct_drafts_histogram": []}  # fmt: skip
            return {"sglext": {"spec_tokens_details": found}} if stream else {"meta_info": found}
        if self.engine == "llamacpp":
            return {"timings": {"predicted_n": tokens, "draft_n": rounds * self.block, "draft_n_accepted": accepted}}
        return {}

    # --- what it serves ---

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.split(b" ", 2)
                length = [
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ]
                data = await reader.readexactly(length[0]) if length else b""
                await (self.get if method == b"GET" else self.post)(path.decode(), data, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client is done
        finally:
            writer.transport.abort()

    async def send(
        self, writer: asyncio.StreamWriter, status: int, text: str, kind: str = "application/json", more: str = ""
    ) -> None:
        data = text.encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode() + data
        )
        await writer.drain()

    async def get(self, path: str, data: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            await self.send(writer, 200, json.dumps({"data": [{"id": self.model, "owned_by": self.engine}]}))
        elif path == "/version" and self.engine == "vllm":
            await self.send(writer, 200, '{"version": "0.32.0"}')
        elif path == "/metrics" and self.metrics and self.engine:
            await self.send(writer, 200, self.prometheus(), "text/plain; version=0.0.4")
        elif path == "/server_info" and self.engine == "sglang":
            await self.send(writer, 200, '{"version": "0.5.23", "internal_states": [{"avg_spec_accept_length": 2.5}]}')
        else:
            await self.send(writer, 404, '{"detail": "Not Found"}')

    async def post(self, path: str, data: bytes, writer: asyncio.StreamWriter) -> None:
        body = json.loads(data)
        self.posts.append(body)
        if self.refused < self.hang_up:
            self.refused += 1
            raise ConnectionResetError
        if self.refused < self.busy:
            self.refused += 1
            await self.send(writer, 429, "busy", "text/plain", "Retry-After: 0.01\r\n")
            return
        if self.fail and len(self.posts) % self.fail == 0:
            await self.send(writer, 400, '{"error": {"message": "out of luck"}}')
            return
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.answer(body, writer)
        finally:
            self.now -= 1
        self.answered += 1

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        rounds, accepted, per_pos, tokens = self.counted()
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        if not body.get("stream"):
            await asyncio.sleep(self.first + self.pause * (len(self.pieces) - 1))
            whole = "".join(self.text(i, n) for i, n in enumerate(self.pieces))
            choice = {"index": 0, "message": {"role": "assistant", "content": whole}, "finish_reason": "stop"}
            await self.send(writer, 200, json.dumps({"choices": [choice], "usage": usage, **self.extras(stream=False)}))
        else:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            await self.event(
                writer,
                {
                    "model": self.answers_as or self.model,
                    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
                    "usage": None,
                },
            )
            for i, count in enumerate(self.pieces):
                await asyncio.sleep(self.first if i == 0 else self.pause)
                await self.event(writer, {"choices": [{"index": 0, "delta": {"content": self.text(i, count)}}]})
                if self.broken and i == 1:
                    writer.close()
                    return
            await self.event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            if self.usage and body.get("stream_options", {}).get("include_usage"):
                await self.event(writer, {"choices": [], "usage": usage, **self.extras(stream=True)})
            await self.event(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        self.rounds, self.accepted = self.rounds + rounds, self.accepted + accepted
        self.generated += tokens
        self.per_pos = [a + b for a, b in zip(self.per_pos, per_pos)]

    async def event(self, writer: asyncio.StreamWriter, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        comment = f": a comment{self.newline}{self.newline}event: message{self.newline}" if self.comments else ""
        data = f"{comment}data: {text}{self.newline}{self.newline}".encode()
        size = self.cut_bytes or len(data)
        for at in range(0, len(data), size):
            part = data[at : at + size]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
            if self.cut_bytes:
                await asyncio.sleep(0)


@contextlib.contextmanager
def pretending(pretender: Pretender) -> Iterator[Pretender]:
    """The server in a thread of its own; its url ends in the port."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(pretender.handle, "127.0.0.1", 0, backlog=1024)
        pretender.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        while not (pretender.die_after and pretender.answered >= pretender.die_after) and not stop.is_set():
            await asyncio.sleep(0.002)
        server.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0.01)  # the sockets close

    stop = threading.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield pretender
    finally:
        stop.set()
        thread.join(10)
        loop.close()
