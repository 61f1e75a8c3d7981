"""Bodies of the OpenAI API as plain values: what a client may ask, checked, and what it gets. No network, no model.

Nothing is ignored silently: an unknown field, or a value that this server does not implement, is an error that names it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dflash_train.generation.base import Decoded


class ApiError(Exception):
    """An error in OpenAI's form. param: the field at fault; code: a word for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(kw_only=True)
class Ask:
    """One request. None: not said, so the server's default holds. top_k 0 is all."""

    model: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | list[int] = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    return_token_ids: bool = False
    return_meta_info: bool = False


class Rule(NamedTuple):
    """What a field must be, as a test and in words."""

    holds: Callable[[Any], bool]
    text: str


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def _stops(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    whole = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    return whole and sum(map(len, texts)) <= STOP_CHARACTERS


# Every token is searched for all of them in the thread that answers everybody: 18,000 of 55 characters held all other clients up for 14 s.
STOP_CHARACTERS = 4096
# Logits divided by less leave the range of float32, and there is one token then anyway; vLLM draws the same line.
GREEDY_BELOW = 1e-5
FLAG = Rule(lambda v: isinstance(v, bool), "must be true or false")
COUNT = Rule(lambda v: _whole(v) and v >= 1, "must be a whole number of at least 1")
RULES = {
    "model": Rule(lambda v: isinstance(v, str), "must be a name that /v1/models lists"),
    "max_tokens": COUNT,
    "temperature": Rule(
        lambda v: _number(v) and 0 <= v < 1e6, "must be a number of at least 0 and below 1e6; 0 is greedy"
    ),
    "top_p": Rule(lambda v: _number(v) and 0 < v <= 1, "must be a number above 0 and at most 1"),
    "top_k": Rule(lambda v: _whole(v) and -1 <= v < 2**31, "must be a whole number below 2**31; 0 or -1 is all tokens"),
    "seed": Rule(lambda v: _whole(v) and abs(v) < 2**63, "must be a whole number of 64 bits"),
    "stop": Rule(
        _stops,
        f"must be a text or a list of texts, none of them empty, of together at most {STOP_CHARACTERS} characters",
    ),
    "ignore_eos": FLAG,
    "stream": FLAG,
    "return_token_ids": FLAG,
    "return_meta_info": FLAG,
}
CHAT_RULES = {
    "max_completion_tokens": COUNT,
    "chat_template_kwargs": Rule(lambda v: isinstance(v, dict), "must be an object: what the chat template is given"),
    "reasoning_effort": Rule(lambda v: isinstance(v, str), "must be a text, which the chat template is given"),
}
# Known options that this server does not have, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,),
    "min_tokens": (0,), "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,), "prompt_logprobs": (0,), "echo": (False,),
    "suffix": ("",), "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False), "stop_token_ids": ([],), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "add_generation_prompt": (True,), "continue_final_message": (False,), "store": (False,),
}  # fmt: skip
UNREAD = {"user", "metadata"}  # about the client alone
NO_KWARGS = {"messages", "conversation", "tools", "tokenize", "add_generation_prompt", "chat_template", "continue_final_message"}  # fmt: skip


def parse(raw: bytes, *, chat: bool) -> Ask:
    """The request in a body. Raises ApiError."""
    try:
        body = json.loads(raw.decode())
        if (
            b"\\ud" in raw.lower()
        ):  # half a surrogate pair is no character: no tokeniser reads it, no answer could quote it
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body has half of a surrogate pair (such as \\ud83d alone); send whole characters"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a {type(body).__name__}; it must be a JSON object")
    rules = RULES | CHAT_RULES if chat else RULES
    own = {"messages"} if chat else {"prompt"}
    ask = Ask()
    for name, value in body.items():
        if value is None or name in own | UNREAD | {"stream_options"}:
            continue
        if name in rules:
            if not rules[name].holds(value):
                raise ApiError(400, f"{name} = {_shown(value)}: {rules[name].text}", param=name)
        elif name in NEUTRAL:
            if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                allowed = " or ".join(_shown(neutral) for neutral in NEUTRAL[name])
                raise ApiError(
                    400,
                    f"{name} = {_shown(value)}: this server can only do {allowed}; leave {name} out",
                    param=name,
                    code="unsupported_value",
                )
        else:
            raise ApiError(
                400, f"{name}: this server has no such field; leave it out", param=name, code="unknown_field"
            )
    given = {name: value for name, value in body.items() if value is not None}
    for name in RULES:
        if name in given:
            setattr(ask, name, given[name])
    _read_lengths(ask, given)
    if isinstance(ask.stop, str):
        ask.stop = [ask.stop]
    if ask.top_k is not None:
        ask.top_k = max(ask.top_k, 0)
    if ask.temperature is not None and ask.temperature < GREEDY_BELOW:
        ask.temperature = 0.0
    _read_stream_options(ask, given)
    if chat:
        ask.messages = _messages(given.get("messages"))
        kwargs = dict(given.get("chat_template_kwargs", {}))
        if "reasoning_effort" in given:
            kwargs.setdefault("reasoning_effort", given["reasoning_effort"])
        taken = sorted(NO_KWARGS & set(kwargs))
        if taken:
            raise ApiError(
                400,
                f"chat_template_kwargs: {taken[0]} is set by the server; leave it out",
                param="chat_template_kwargs",
            )
        ask.chat_template_kwargs = kwargs
    else:
        ask.prompt = _prompt(given.get("prompt"))
        if ask.max_tokens is None:
            ask.max_tokens = 16  # the API's
    return ask


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _read_lengths(ask: Ask, given: dict[str, Any]) -> None:
    new = given.get("max_completion_tokens")
    if new is not None:
        if ask.max_tokens not in (None, new):
            raise ApiError(
                400,
                f"max_tokens = {ask.max_tokens} beside max_completion_tokens = {new}: they are one thing; give one of them",
                param="max_completion_tokens",
            )
        ask.max_tokens = new


def _read_stream_options(ask: Ask, given: dict[str, Any]) -> None:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise ApiError(400, f"stream_options = {_shown(options)}: must be an object", param="stream_options")
    if options and not ask.stream:
        raise ApiError(400, "stream_options: only for stream = true; leave it out", param="stream_options")
    other = sorted(name for name, value in options.items() if name != "include_usage" and value)
    if other:
        raise ApiError(400, f"stream_options.{other[0]}: this server has include_usage alone", param="stream_options")
    include = options.get("include_usage") or False
    if not isinstance(include, bool):
        raise ApiError(400, f"stream_options.include_usage = {_shown(include)}: {FLAG.text}", param="stream_options")
    ask.include_usage = include


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"messages = {_shown(given)}: must be a list of at least one message", param="messages")
    messages = []
    for i, message in enumerate(given):
        at = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"{at} = {_shown(message)}: must be an object with a role", param="messages")
        if message.get("tool_calls"):
            raise ApiError(400, f"{at}: this server has no tools; leave tool_calls out", param="messages")
        messages.append({**message, "content": _content(message.get("content"), at)})
    return messages


def _content(given: Any, at: str) -> str:
    """Text, or the API's list of parts as long as they are texts."""
    if isinstance(given, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in given]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
    if not isinstance(given, str):
        raise ApiError(
            400, f"{at}.content = {_shown(given)}: must be a text, or a list of text parts", param="messages"
        )
    return given


def _prompt(given: Any) -> str | list[int]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]  # a batch of one
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(_whole(token) and token >= 0 for token in given):
        return given
    raise ApiError(
        400, f"prompt = {_shown(given)}: must be one text, or one list of token ids, and not empty", param="prompt"
    )


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # read just so, and this is called from deeper
        return f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."


# --- answers ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Reply:
    """An answer under way or done. token_ids: up to a stop text; decoded: all that was decoded for it, once it is done."""

    chat: bool
    model: str
    prompt_ids: list[int]
    id: str = ""
    created: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    decoded: Decoded | None = None
    drafted: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())

    def usage(self) -> dict[str, Any]:
        prompt, completion = len(self.prompt_ids), len(self.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if self.decoded is not None:
            accepted = sum(self.decoded.accepted)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self.drafted - accepted,
            }
        return usage

    def meta_info(self) -> dict[str, Any]:
        """SGLang's names, which z-lab's client reads. spec_accept_length: tokens per verification, drafts and the target's own."""
        assert self.decoded is not None
        rounds = self.decoded.rounds
        meta = {
            "id": self.id,
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": len(self.token_ids),
            "finish_reason": {"type": self.finish_reason},
            "e2e_latency": self.seconds,
        }
        if rounds:
            meta |= {"spec_verify_ct": len(rounds), "spec_accept_length": sum(rounds) / len(rounds)}
        return meta

    def whole(self, ask: Ask) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": self.text}
        else:
            choice["text"] = self.text
        body = self._head("chat.completion" if self.chat else "text_completion", [choice]) | {"usage": self.usage()}
        if ask.return_token_ids:  # where vLLM puts them
            choice["token_ids"] = self.token_ids
            (body if self.chat else choice)["prompt_token_ids"] = self.prompt_ids
        if ask.return_meta_info:
            body["meta_info"] = self.meta_info()
        return body

    def begin(self, ask: Ask) -> dict[str, Any] | None:
        """The first chunk of a stream."""
        if not self.chat and not ask.return_token_ids:
            return None
        chunk = self.chunk("", [], ask)
        if self.chat:
            chunk["choices"][0]["delta"]["role"] = "assistant"
        if ask.return_token_ids:
            (chunk if self.chat else chunk["choices"][0])["prompt_token_ids"] = self.prompt_ids
        return chunk

    def chunk(self, text: str, token_ids: list[int], ask: Ask) -> dict[str, Any]:
        """A part of a stream: text that came, or the end of it once finish_reason is set."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
        if self.chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        if ask.return_token_ids:
            choice["token_ids"] = token_ids
        body = self._head("chat.completion.chunk" if self.chat else "text_completion", [choice])
        if ask.return_meta_info and self.finish_reason:
            body["meta_info"] = self.meta_info()
        return body

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for usage."""
        return self._head("chat.completion.chunk" if self.chat else "text_completion", []) | {"usage": self.usage()}

    def _head(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
