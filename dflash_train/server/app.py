"""The HTTP side: routes, keys, streams, and clients that leave."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dflash_train import __version__
from dflash_train.data.chat import prompt_ids
from dflash_train.data.template import TEMPLATE_ERRORS, NotEncodable, encode
from dflash_train.generation.base import Decoded, Request
from dflash_train.generation.verify import Sampling
from dflash_train.server.metrics import drafted_tokens
from dflash_train.server.protocol import ApiError, Ask, Reply, parse
from dflash_train.server.scheduler import RETRY_SECONDS, Event, Scheduler
from dflash_train.server.text import TextStream

# Of a body: no text of `max_length` tokens is longer, escapes included. What is refused by its length costs nobody any time.
BODY_BYTES, BYTES_PER_TOKEN = 2**20, 64
LONG_BODY = 2**16  # read apart from the event loop, so that other answers go on
BODY_SECONDS = 60.0  # in which a body must have come


@dataclass(kw_only=True)
class Service:
    """What answers requests. max_length: tokens of prompt and answer together; sampling: where a request says nothing; key: what clients
    must send, None for nothing."""

    scheduler: Scheduler
    tokenizer: Any
    name: str
    vocab_size: int
    max_length: int
    sampling: Sampling
    seed: int
    key: str | None = None
    numbers: itertools.count = field(default_factory=itertools.count)

    def request_of(self, ask: Ask, *, chat: bool) -> Request:
        """What decoding is asked for. Raises ApiError."""
        if ask.model not in (None, self.name):
            raise ApiError(
                404, f"model = {ask.model}: this server has {self.name} alone", param="model", code="model_not_found"
            )
        param = "messages" if chat else "prompt"
        ids = self._prompt_ids(ask, chat)
        beyond = next((token for token in ids if token >= self.vocab_size), None)
        if beyond is not None:  # a tokeniser may have more tokens than the target
            raise ApiError(400, f"{param}: {beyond} is no token; the vocabulary has {self.vocab_size}", param=param)
        room = self.max_length - len(ids)
        if not ids or room < 1:
            raise ApiError(
                400,
                f"{param}: {len(ids)} tokens; a prompt has at least 1 and at most {self.max_length - 1} here (--max-length {self.max_length})",
                param=param,
                code="context_length_exceeded" if ids else None,
            )
        if (ask.max_tokens or 0) > room:
            raise ApiError(
                400,
                f"max_tokens = {ask.max_tokens}: the prompt has {len(ids)} tokens, which leaves {room} of {self.max_length}; ask for fewer, or start "
                "the server with a larger --max-length",
                param="max_tokens",
                code="context_length_exceeded",
            )
        given = Sampling(ask.temperature, ask.top_p, ask.top_k)
        chosen = (default if value is None else value for value, default in zip(given, self.sampling, strict=True))
        temperature, top_p, top_k = chosen
        return Request(
            messages=ask.messages,
            prompt_ids=ids,
            max_new_tokens=ask.max_tokens or room,
            seed=self.seed * 1_000_003 + next(self.numbers) if ask.seed is None else ask.seed,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            ignore_eos=ask.ignore_eos,
        )

    def _prompt_ids(self, ask: Ask, chat: bool) -> list[int]:
        try:
            if chat:
                return prompt_ids(ask.messages, self.tokenizer, tools=None, kwargs=ask.chat_template_kwargs)
            if isinstance(ask.prompt, str):
                return encode(ask.prompt, self.tokenizer, add_special_tokens=True)["input_ids"]
            return ask.prompt
        except NotEncodable as error:
            param = "messages" if chat else "prompt"
            raise ApiError(400, f"{param}: {error}", param=param) from None
        except (*TEMPLATE_ERRORS, ValueError) as error:
            if not chat:
                raise
            raise ApiError(
                400, f"messages: the chat template refuses them: {error}", param="messages", code="template_error"
            ) from None

    async def answer(self, ask: Ask, reply: Reply, request: Request) -> AsyncIterator[tuple[str, list[int]]]:
        """(text, tokens) as they come into `reply`; the first, empty, once the request is accepted. Frees the slot where nobody listens any more."""
        loop, events, begun = asyncio.get_running_loop(), asyncio.Queue(), time.monotonic()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        stream = TextStream(self.tokenizer, ask.stop)
        key = self.scheduler.submit(request, deliver)
        try:
            yield "", []
            while reply.decoded is None:
                event = await events.get()
                if isinstance(event, ApiError):
                    raise event
                if isinstance(event, Decoded):
                    reply.decoded, text, tokens = event, stream.finish(), []
                else:
                    text, tokens = "", []
                    for token in itertools.takewhile(lambda _: not stream.stopped, event):
                        text += stream.add(token)
                        tokens.append(token)
                    if stream.stopped:
                        self.scheduler.cancel(key, "stop")  # what comes now is behind the stop text
                reply.text += text
                reply.token_ids += tokens
                if text or tokens:
                    yield text, tokens
        finally:
            if reply.decoded is None:
                self.scheduler.cancel(key)
        reply.finish_reason = "stop" if stream.stopped else reply.decoded.finish_reason
        reply.drafted = drafted_tokens(reply.decoded, self.scheduler.metrics.draft_length, request.max_new_tokens)
        reply.seconds = time.monotonic() - begun


def build_app(service: Service) -> Starlette:
    """The ASGI application."""

    async def complete(http: HttpRequest) -> Response:
        chat = http.url.path.endswith("/chat/completions")
        _check_key(http, service.key)
        raw = await _body(http, BODY_BYTES + BYTES_PER_TOKEN * service.max_length)

        def read() -> tuple[Ask, Request]:
            ask = parse(raw, chat=chat)
            return ask, service.request_of(ask, chat=chat)

        ask, request = read() if len(raw) <= LONG_BODY else await asyncio.to_thread(read)
        reply = Reply(chat=chat, model=service.name, prompt_ids=request.prompt_ids)
        parts = service.answer(ask, reply, request)
        await anext(parts)  # accepted, or an error with its status
        if ask.stream:
            return StreamingResponse(_events(parts, ask, reply), media_type="text/event-stream")
        return await _unless_gone(http, _whole(parts, ask, reply))

    async def models(http: HttpRequest) -> Response:
        _check_key(http, service.key)
        model = {"id": service.name, "object": "model", "created": started, "owned_by": "dflash-train"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": service.max_length}]})

    async def health(http: HttpRequest) -> Response:
        return Response(status_code=200 if service.scheduler.error is None else 503)

    async def version(http: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})  # where vLLM says it

    async def metrics(http: HttpRequest) -> Response:
        counts = service.scheduler.metrics
        return Response(counts.text(), headers={"Content-Type": counts.content_type})

    started = int(time.time())
    return Starlette(
        routes=[
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/version", version),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _fault,
        },
    )


async def _events(parts: AsyncIterator[tuple[str, list[int]]], ask: Ask, reply: Reply) -> AsyncIterator[str]:
    """An answer as server-sent events."""
    try:
        first = reply.begin(ask)
        if first is not None:
            yield _event(first)
        async for text, tokens in parts:
            yield _event(reply.chunk(text, tokens, ask))
        yield _event(reply.chunk("", [], ask))
        if ask.include_usage:
            yield _event(reply.usage_chunk())
    except ApiError as error:  # the status is sent already
        yield _event(error.body())
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


async def _whole(parts: AsyncIterator[tuple[str, list[int]]], ask: Ask, reply: Reply) -> Response:
    async for _ in parts:
        pass
    return JSONResponse(reply.whole(ask))


async def _unless_gone(http: HttpRequest, answer: Any) -> Response:
    """The answer, or nothing as soon as the client hangs up."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else Response(status_code=499)
    finally:
        for task in tasks:
            task.cancel()


async def _body(http: HttpRequest, most: int) -> bytes:
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                raw += part
                if len(raw) > most:
                    raise ApiError(413, f"the body is longer than {most} bytes; send a shorter prompt")
    except TimeoutError:
        raise ApiError(408, f"the body had not come after {BODY_SECONDS:g} seconds; send it at once") from None
    return bytes(raw)


def _check_key(http: HttpRequest, key: str | None) -> None:
    if key is None:
        return
    given = http.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {key}".encode()):
        raise ApiError(401, "no key, or a wrong one; send it as Authorization: Bearer KEY", code="invalid_api_key")


async def _api_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == 429 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "/v1/chat/completions, /v1/completions (POST), /v1/models, /health, /version, /metrics (GET)"
    text = f"{http.method} {http.url.path}: {error.detail}; this server has {known}"
    return JSONResponse(ApiError(error.status_code, text).body(), status_code=error.status_code, headers=error.headers)


async def _gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _fault(http: HttpRequest, error: Exception) -> Response:
    text = f"a fault of this server ({type(error).__name__}); its log says more"
    return JSONResponse(ApiError(500, text).body(), status_code=500)
