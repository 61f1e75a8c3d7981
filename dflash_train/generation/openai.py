"""OpenAI-compatible servers (vLLM, SGLang, llama.cpp, TensorRT-LLM, transformers serve) that run the target."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm import tqdm

from dflash_train.config.schema import Api, Recipe
from dflash_train.config.values import without_login
from dflash_train.generation.base import Answer, Request
from dflash_train.generation.wire import Reply, chat_body, completion_body, parse_reply, removable

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before the second try and before any later one, without jitter
CONNECT_SECONDS = 10.0
LANE = 16  # connections per pool
RETRIED = {
    408,
    425,
    429,
    500,
    502,
    503,
    504,
    507,
    529,
}  # what another try may mend; all other 4xx say that the request is wrong


@dataclass(kw_only=True, eq=False)
class _Server:
    """One base URL. in_flight: requests it is working on. down_until: no request before that time (of time.monotonic)."""

    url: str
    shown: str  # without user and password
    engine: str = ""
    in_flight: int = 0
    sent: int = 0
    answered: int = 0
    refused: int = 0  # connections, in a row
    down_until: float = 0.0
    dropped: set[str] = field(default_factory=set)  # fields it does not know


class _Failed(Exception):
    """One try that failed. reason: for the counts; status: of HTTP, where there was one; final: no further try."""

    def __init__(self, reason: str, text: str, *, status: int | None = None, final: bool = False):
        super().__init__(text)
        self.reason, self.status, self.final = reason, status, final


class OpenAIBackend:
    """Sends each request to the least busy server and tries again what failed for want of a server.

    One thread runs an event loop with one HTTP client; `submit` and `collect` talk to it through queues. Raises ValueError when a
    server does not answer, serves something else, or refuses the key.
    """

    def __init__(self, recipe: Recipe, tokenizer: Any):
        config = recipe.regenerate
        if not config.base_urls:
            raise ValueError(
                "regenerate.base_urls is empty: the openai backend needs the URLs of running servers, such as "
                "[http://localhost:8000/v1]; start one with: python scripts/serve_target.py -c RECIPE --engine vllm"
            )
        if len(set(config.base_urls)) < len(config.base_urls):
            shown = [without_login(url) for url in config.base_urls]
            raise ValueError(f"regenerate.base_urls = {shown} names a server twice; name each once")
        self.config, self.tokenizer = config, tokenizer
        self.chat = config.api is Api.chat
        self.servers = [_Server(url=url.rstrip("/"), shown=without_login(url.rstrip("/"))) for url in config.base_urls]
        self.capacity = config.concurrency * len(self.servers)
        self.key = os.environ.get(config.api_key_env, "").strip()
        if not (self.key.isascii() and self.key.isprintable()):  # httpx would print it in its complaint
            raise ValueError(
                f"the environment variable {config.api_key_env} (regenerate.api_key_env) holds what no HTTP header can carry, such as a line "
                "break or a letter beyond ASCII; set it to the key alone"
            )
        self.counts: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.seconds = 0.0
        self.noted: set[str] = set()
        self.finished: queue.SimpleQueue[tuple[int, Answer] | BaseException] = queue.SimpleQueue()
        self.tasks: set[asyncio.Task] = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="openai-backend", daemon=True)
        self.thread.start()
        try:
            self._wait(self._open())
        except BaseException:
            self.close()
            raise

    # --- the caller's side ---

    def submit(self, key: int, request: Request) -> None:
        self.loop.call_soon_threadsafe(self._start, key, request)

    def collect(self) -> list[tuple[int, Answer]]:
        items = [self.finished.get()]
        while not self.finished.empty():
            items.append(self.finished.get())
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return items

    def stats(self) -> dict[str, Any]:
        """Counts since the start. mean_latency_seconds is of answered requests, pauses between their tries included."""
        answered = self.counts["answered"]
        return {
            "requests": self.counts["requests"],
            "failed": self.counts["failed"],
            "retries": dict(self.retries),
            "mean_latency_seconds": round(self.seconds / answered, 3) if answered else None,
            "servers": {s.shown: {"engine": s.engine, "sent": s.sent, "answered": s.answered} for s in self.servers},
            "dropped_fields": sorted(set().union(*(s.dropped for s in self.servers))),
            "prompt_mismatches": self.counts["prompt_mismatches"],
            "unparsed_tool_calls": self.counts["tool_calls"],
            "unparsed_reasoning": self.counts["reasoning"],
            "prompt_tokens": self.counts["prompt_tokens"],
            "completion_tokens": self.counts["completion_tokens"],
        }

    def close(self) -> None:
        """Abandon what is in flight; at most a second."""
        if self.loop.is_closed():
            return
        try:
            self._wait(self._shut(), timeout=0.7)
        except TimeoutError:
            pass  # a connection that will not close ends with the process
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=0.3)
        if not self.thread.is_alive():
            self.loop.close()

    def _wait(self, work: Coroutine, timeout: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    # --- the loop's side: everything below runs in the one thread ---

    def _start(self, key: int, request: Request) -> None:
        task = self.loop.create_task(self._run(key, request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, key: int, request: Request) -> None:
        try:
            self.finished.put((key, await self._answer(request)))
        except Exception as error:  # a mistake of ours: the caller must not wait for ever
            self.finished.put(error)

    async def _open(self) -> None:
        """The client, and the check that every server serves the same model."""
        self.released = asyncio.Event()
        self.client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            transport=Lanes(-(-self.capacity // LANE)),
        )
        served = await asyncio.gather(*(self._models(server) for server in self.servers))
        self.model = _agreed([s.shown for s in self.servers], served, self.config.model)
        for server, models in zip(self.servers, served, strict=True):
            card = next(m for m in models if m["id"] == self.model)
            server.engine = str(card.get("owned_by") or "")
            meta = card.get("meta")
            longest = card.get("max_model_len") or (
                meta.get("n_ctx") if isinstance(meta, dict) else None
            )  # vLLM and SGLang; llama.cpp
            if type(longest) is int and longest < self.config.max_length:
                raise ValueError(
                    f"{server.shown} holds {longest} tokens, regenerate.max_length = {self.config.max_length}: lower it, or start the server "
                    f"with more (scripts/serve_target.py does; vLLM: --max-model-len {self.config.max_length})"
                )

    async def _shut(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "client"):
            await self.client.aclose()

    async def _models(self, server: _Server) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                response = await self.client.get(f"{server.url}/models")
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(
                f"regenerate.base_urls: {server.shown} does not answer ({named(error)}). Start a server with: "
                "python scripts/serve_target.py -c RECIPE --engine vllm, wait until it is ready, or correct the URL (it ends in /v1)"
            ) from None
        if response.status_code in (401, 403):
            have = "is not set" if not self.key else "holds a key that it does not accept"
            raise ValueError(
                f"{server.shown} wants another key (HTTP {response.status_code}): the environment variable {self.config.api_key_env} {have}"
            )
        try:
            response.raise_for_status()
            return [{**model, "id": str(model["id"])} for model in _json_of(response)["data"]]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
            raise ValueError(
                f"{server.shown}/models gave HTTP {response.status_code}: {self._clean(response.text)}. Wait until the server is ready, "
                "or correct the URL (it ends in /v1)"
            ) from None

    async def _answer(self, request: Request) -> Answer:
        """The answer, after as many tries as it takes and config.max_retries allows."""
        started, tries, last = time.monotonic(), 0, None
        self.counts["requests"] += 1
        while True:
            server = await self._acquire(last)
            tries, last = tries + 1, server
            try:
                reply = await self._try(server, request)
            except _Failed as failed:
                if failed.final or tries > self.config.max_retries:
                    self.counts["failed"] += 1
                    return Answer(error=f"{failed} (from {server.shown})", status=failed.status, tries=tries)
                self.retries[failed.reason] += 1
            else:
                break
            finally:
                server.in_flight -= 1
                self.released.set()
            elsewhere = any(s is not server and s.down_until <= time.monotonic() for s in self.servers)
            await asyncio.sleep(pause_before(tries, quick=elsewhere))
        self.counts["answered"] += 1
        self.seconds += time.monotonic() - started
        self._count(reply, server)
        reply.answer.tries = tries
        return reply.answer

    async def _acquire(self, last: _Server | None) -> _Server:
        """The least busy server that is up and has room, another one than the last if there is; waits for one."""
        while True:
            now = time.monotonic()
            up = [s for s in self.servers if s.down_until <= now]
            # One that refused connections gets a single request until it answers.
            free = [s for s in up if s.in_flight < (1 if s.refused else self.config.concurrency)]
            if free:
                server = min(free, key=lambda s: (s is last, s.in_flight, s.sent))
                server.in_flight, server.sent = server.in_flight + 1, server.sent + 1
                return server
            if up:
                self.released.clear()
                await self.released.wait()
            else:
                await asyncio.sleep(min(s.down_until for s in self.servers) - now)

    async def _try(self, server: _Server, request: Request) -> Reply:
        """One POST. Raises _Failed."""
        path = "/chat/completions" if self.chat else "/completions"
        body = (chat_body if self.chat else completion_body)(request, self.model, server.engine)
        while True:
            left_out = removable(body, " ".join(server.dropped)) if server.dropped else set()
            sent = {name: value for name, value in body.items() if name not in left_out}
            try:
                async with asyncio.timeout(self.config.timeout_seconds):
                    response = await self.client.post(server.url + path, json=sent)
            except TimeoutError:
                raise _Failed("timeout", f"no answer in {self.config.timeout_seconds:g} seconds") from None
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                server.refused += 1
                server.down_until = time.monotonic() + pause_before(server.refused)
                raise _Failed("connection", f"connection failed: {named(error)}") from None
            except httpx.HTTPError as error:
                raise _Failed("connection", f"connection lost: {named(error)}") from None
            server.refused = 0
            if response.status_code in (400, 422) and (unknown := removable(sent, response.text)):
                if not unknown <= server.dropped:
                    server.dropped |= unknown
                    self._note(f"{server.shown} does not know {', '.join(sorted(unknown))}; asking without")
                continue
            return self._read(server, response, request)

    def _read(self, server: _Server, response: httpx.Response, request: Request) -> Reply:
        status = response.status_code
        if status in RETRIED:
            pause = retry_after(response)
            if pause is not None:
                server.down_until = max(server.down_until, time.monotonic() + pause)
            raise _Failed(str(status), f"HTTP {status}: {self._clean(response.text)}", status=status)
        if status != 200:
            raise _Failed(str(status), f"HTTP {status}: {self._clean(response.text)}", status=status, final=True)
        try:
            reply = parse_reply(_json_of(response), request, self.tokenizer, chat=self.chat)
        except ValueError as error:
            raise _Failed("bad_answer", self._clean(str(error)), status=200) from None
        server.answered += 1
        return reply

    def _count(self, reply: Reply, server: _Server) -> None:
        self.counts["prompt_tokens"] += reply.prompt_tokens
        self.counts["completion_tokens"] += reply.answer.completion_tokens or 0
        if reply.mismatch:
            self.counts["prompt_mismatches"] += 1
            self._note(
                f"{server.shown} renders prompts otherwise than the recipe's chat template; its ids are kept where it gives them. "
                "Serve the template that you train with (data.chat_template, chat_template_kwargs), or set regenerate.api=completions",
                "prompt_mismatches",
            )
        for what in reply.plain_text:
            self.counts[what] += 1
            flag = "--tool-call-parser" if what == "tool_calls" else "--reasoning-parser"
            self._note(
                f"{server.shown} leaves {what.replace('_', ' ')} in the text: start it with the {flag} of the target "
                "(scripts/serve_target.py prints the line)",
                what,
            )

    def _note(self, text: str, what: str = "") -> None:
        """Once on stderr for each `what`."""
        if (what or text) not in self.noted:
            self.noted.add(what or text)
            tqdm.write(f"note: {text}", file=sys.stderr)  # above the progress bar, not in it

    def _clean(self, text: str) -> str:
        """A server's words for a log: one line, not endless, without the key that it may echo."""
        if self.key:
            text = text.replace(self.key, "***")
        return " ".join(text.split())[:300] or "(no text)"


class Lanes(httpx.AsyncBaseTransport):
    """Requests spread over small connection pools in turn: a pool looks at all its connections at every request and again for each idle
    one, which with hundreds of them takes 25 ms of a request. No limit of its own: `concurrency` is the limit. Proxies of the environment are not used."""

    def __init__(self, count: int):
        context = httpx.create_ssl_context()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.lanes = [httpx.AsyncHTTPTransport(verify=context, limits=limits) for _ in range(count)]
        self.turn = itertools.cycle(self.lanes)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self.turn).handle_async_request(request)

    async def aclose(self) -> None:
        for lane in self.lanes:
            await lane.aclose()


def _agreed(names: list[str], served: list[list[dict[str, Any]]], wanted: str | None) -> str:
    """The model that all servers serve. Raises ValueError with what is served."""
    listing = "; ".join(f"{n}: {', '.join(m['id'] for m in models) or 'nothing'}" for n, models in zip(names, served))
    common = set.intersection(*({m["id"] for m in models} for models in served))
    if wanted is not None:
        if wanted not in common:
            raise ValueError(f"regenerate.model = {wanted} is not served everywhere; served are: {listing}")
        return wanted
    if len(common) == 1 and all(len(models) == 1 for models in served):
        return common.pop()
    raise ValueError(
        f"the servers of regenerate.base_urls do not serve one and the same model ({listing}): all must serve the recipe's target; "
        "where one serves several, name it in regenerate.model"
    )


def pause_before(tries: int, *, quick: bool = False) -> float:
    """Seconds before the next try: doubling, with jitter, so that many requests do not come back at once. quick: another server is asked."""
    longest = min(FIRST_PAUSE * 2 ** (tries - 1), LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0) * (0.1 if quick and tries == 1 else 1.0)


def retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait; a date or nonsense counts as not said."""
    try:
        return min(max(float(response.headers["retry-after"]), 0.0), LONGEST_PAUSE)
    except (KeyError, ValueError):
        return None


def named(error: Exception) -> str:
    return str(error) or type(error).__name__


def _json_of(response: httpx.Response) -> Any:
    """Raises ValueError with the beginning of what is no JSON."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        raise ValueError(f"not JSON: {response.text[:200]}") from None
