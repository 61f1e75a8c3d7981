"""One streamed request, timed: what is sent, how the stream is read, what is known afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from dflash_train.benchmark.counters import Acceptance, of_response, whole_number
from dflash_train.config.values import parse_json
from dflash_train.generation.openai import named, pause_before, retry_after

# What an engine, as its list of models names it, is asked for so that its answers tell of acceptance. SGLang refuses return_meta_info in streams.
ASKED = {"sglang": "return_spec_tokens_details", "dflash-train": "return_meta_info"}
BUSY = {429, 503}  # all others are the server's faults, or ours, and count as such
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")  # of a delta


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What every request asks for. temperature 0 is greedy; top_p 1 and top_k 0 leave sampling alone. reasoning: "off", "on", a level that the
    target's template knows, or None for the server's default. The defaults are those of dflash 0.1.0."""

    max_new_tokens: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    reasoning: str | None = None


PRESETS = {
    # The protocol of the published tables; Muse-Glimmer's with top_k 64.
    "published": Sampling(max_new_tokens=4096, temperature=1.0, top_p=0.95, top_k=20, reasoning="xhigh")
}


@dataclass(kw_only=True)
class Record:
    """One request: of which prompt, which of its turns, in which part of the cell (from one change of arms to the next). Times in seconds: started (since the part began), ttft (until the first text), latency (until the stream ended, tries
    included), gaps (between pieces of text). tokens: output tokens as the server counts them; tokens_from: "usage" or "tokenizer". answer: a
    hash of the text, reasoning included. error: why it failed, and the rest as far as it came."""

    prompt: str
    turn: int
    part: int
    started: float
    ttft: float | None = None
    last: float | None = None
    latency: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    tokens_from: str = "usage"
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    acceptance: Acceptance | None = None
    engine_accept_len: float | None = None
    tries: int = 1
    error: str | None = None
    answer: str = ""


class ServerGone(ConnectionError):
    """A server that refuses connections: the rest of the run makes no sense."""


@dataclass(kw_only=True)
class Target:
    """Where requests go. count: tokens of a text, for servers that give no usage; None makes such an answer a failure."""

    client: httpx.AsyncClient
    url: str  # ends in /v1
    model: str
    engine: str = ""
    extra_body: dict[str, Any] = field(default_factory=dict)
    count: Callable[[str], int] | None = None
    answered: set[str] = field(default_factory=set)  # names of models that answers came from


def reasoning_kwargs(reasoning: str | None) -> dict[str, Any]:
    """Arguments of the chat template; under the names that the published targets' templates have (Qwen3: enable_thinking; Qwen3.8:
    reasoning_effort; Muse: reasoning_strength), as dflash 0.1.0 sends them. A template ignores those it does not read."""
    if reasoning is None:
        return {}
    if reasoning in ("on", "off"):
        return {"enable_thinking": reasoning == "on"}
    return {"enable_thinking": True, "reasoning_effort": reasoning, "reasoning_strength": reasoning}


def body(target: Target, messages: list[dict[str, Any]], sampling: Sampling, seed: int) -> dict[str, Any]:
    """Of POST /chat/completions. seed is sent where something is drawn."""
    sent: dict[str, Any] = {
        "model": target.model,
        "messages": messages,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.top_k > 0:
        sent["top_k"] = sampling.top_k
    if sampling.temperature > 0:
        sent["seed"] = seed & 0x7FFFFFFF  # llama.cpp holds 32 bits of it
    if kwargs := reasoning_kwargs(sampling.reasoning):
        sent["chat_template_kwargs"] = kwargs
    if flag := ASKED.get(target.engine):
        sent[flag] = True
    return sent | target.extra_body


class Events:
    """The `data` of server-sent events, from bytes however they are cut: lines end in LF, CR or CRLF, comments and other fields are skipped,
    several data lines are one event."""

    def __init__(self) -> None:
        self.rest = b""
        self.data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        self.rest += chunk
        # A CR at the end may be half of a CRLF.
        held = b"\r" if self.rest.endswith(b"\r") else b""
        lines = self.rest.removesuffix(held).splitlines(keepends=True)
        cut = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        self.rest = cut + held
        yield from self._lines(lines)

    def end(self) -> Iterator[str]:
        """What an end without a last blank line leaves."""
        yield from self._lines([self.rest, b"\n", b"\n"])

    def _lines(self, lines: list[bytes]) -> Iterator[str]:
        for line in lines:
            text = line.rstrip(b"\r\n").decode("utf-8", "replace")
            if text:
                name, _, value = text.partition(":")
                if name == "data":
                    self.data.append(value.removeprefix(" "))
            elif self.data:
                yield "\n".join(self.data)
                self.data = []


async def ask(
    target: Target,
    messages: list[dict[str, Any]],
    sampling: Sampling,
    *,
    record: Record,
    seed: int,
    timeout_s: float,
    retries: int,
) -> str:
    """Send one request, fill in `record` and return the answer without reasoning. A server that is busy before it says anything (429, 503 and such) or closes an idle connection is asked
    again, and the time counts; nothing is asked again once text has come. Raises ServerGone where connections are refused."""
    sent = body(target, messages, sampling, seed)
    began = time.perf_counter()
    while True:
        try:
            async with asyncio.timeout(max(timeout_s - (time.perf_counter() - began), 0)):
                said = await _once(target, sent, record, began, last_try=record.tries > retries)
                if isinstance(said, str):
                    return said
                await asyncio.sleep(said)
        except TimeoutError:
            record.error = f"timeout: not done in {timeout_s:g} seconds"
            return ""
        except httpx.ConnectError as error:
            record.error = f"connection refused: {named(error)}"
            raise ServerGone(record.error) from None
        except httpx.HTTPError as error:
            record.error = f"connection lost: {named(error)}"
            return ""
        record.tries += 1


async def _once(target: Target, sent: dict[str, Any], record: Record, began: float, *, last_try: bool) -> float | str:
    """One try: the answer, empty where it failed; or seconds to wait before the next one."""
    request = target.client.build_request("POST", f"{target.url}/chat/completions", json=sent)
    try:
        response = await target.client.send(request, stream=True)
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
        # Mostly an idle connection that the server closed just then; from one that is dead the next try is refused.
        if last_try:
            raise
        return 0.0
    try:
        kind = response.headers.get("content-type", "")
        if response.status_code != 200 or "text/event-stream" not in kind:
            said = " ".join((await response.aread()).decode("utf-8", "replace").split())[:300] or "(no text)"
            if response.status_code in BUSY and not last_try:
                asked = retry_after(response)
                return pause_before(record.tries) if asked is None else asked
            what = f"HTTP {response.status_code}" if response.status_code != 200 else f"no stream ({kind or 'no type'})"
            record.error = f"{what}: {said}"
            return ""
        events, reader, times = Events(), _Reader(), []
        async for chunk in response.aiter_bytes():
            now = time.perf_counter() - began
            if any([reader.take(event) for event in events.feed(chunk)]):
                times.append(now)
        if any([reader.take(event) for event in events.end()]):
            times.append(time.perf_counter() - began)
    finally:
        await response.aclose()
    record.latency = time.perf_counter() - began
    if times:
        record.ttft, record.last = times[0], times[-1]
        record.gaps = [b - a for a, b in zip(times, times[1:])]
    reader.finish(record, target.count)
    target.answered |= reader.models
    return whole_characters("".join(reader.content))


def whole_characters(text: str) -> str:
    """Text whose halves of surrogate pairs came apart (in JSON they may) put together again; a half that is alone becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Reader:
    """Takes the events of one answer. `take` says whether text came with one."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.content: list[str] = []
        self.usage: dict[str, Any] = {}
        self.models: set[str] = set()
        self.extras: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False

    def take(self, event: str) -> bool:
        if event.strip() == "[DONE]":
            self.done = True
            return False
        try:
            data = parse_json(event)
        except ValueError:
            self.error = f"not JSON in the stream: {event[:200]}"
            return False
        try:
            return self._take(data)
        except (AttributeError, TypeError, ValueError) as error:
            self.error = f"no chunk of a chat completion ({error!r}): {event[:200]}"
            return False

    def _take(self, data: Any) -> bool:
        if not isinstance(data, dict) or data.get("error"):
            said = data.get("error") if isinstance(data, dict) else data
            self.error = f"the server says: {str(said)[:300]}"
            return False
        if isinstance(data.get("model"), str) and data["model"]:
            self.models.add(data["model"])
        if isinstance(data.get("usage"), dict):
            self.usage = data["usage"]
        if any(name in data for name in ("metrics", "sglext", "meta_info", "timings")):
            self.extras.append(data)
        came = False
        for choice in data.get("choices") or []:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            texts = [delta[name] for name in TEXT_FIELDS if isinstance(delta.get(name), str) and delta[name]]
            # vLLM sends reasoning under two names at once.
            self.text += texts[:1]
            if isinstance(delta.get("content"), str):
                self.content.append(delta["content"])
            came = came or bool(texts) or bool(delta.get("tool_calls"))
        return came

    def finish(self, record: Record, count: Callable[[str], int] | None) -> None:
        text = whole_characters("".join(self.text))
        record.finish_reason, record.answer = self.finish_reason, hashlib.sha256(text.encode()).hexdigest()[:16]
        tokens, record.prompt_tokens = (
            whole_number(self.usage.get(f"{what}_tokens")) for what in ("completion", "prompt")
        )
        if self.error or not (self.done or self.finish_reason):
            record.error = self.error or "the stream ended before the answer did"
        if tokens is not None:
            record.tokens = tokens
        elif count is not None:
            record.tokens, record.tokens_from = count(text), "tokenizer"
        elif not record.error:
            record.error = (
                f"{'wrong' if self.usage else 'no'} usage in the stream (stream_options.include_usage was sent): tokens cannot be counted; give --tokenizer to count "
                "them from the text"
            )
        try:
            told = of_response(self.extras, self.usage, record.tokens)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            record.error = record.error or f"what it says of acceptance cannot be read ({error!r})"
            return
        if told is not None:
            record.acceptance, record.engine_accept_len = told
