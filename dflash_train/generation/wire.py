"""What goes over the wire to an OpenAI-compatible server and what comes back: bodies and answers as plain values, no network.

The engines differ in a few names. Which one answers is told by `owned_by` in its list of models:

| engine | asked for token ids by | they come back in |
|---|---|---|
| vLLM 0.33 | return_token_ids | chat: prompt_token_ids, choices[0].token_ids; completions: both in choices[0] |
| SGLang 0.5.23 | return_token_ids | chat: choices[0].prompt_token_ids, .response_token_ids; completions: as vLLM |
| llama.cpp b11434 | return_tokens, verbose | __verbose.tokens; the prompt only as text, in __verbose.prompt |
| TensorRT-LLM 1.4, others | nothing | nowhere |
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dflash_train.data.template import NotEncodable, encode
from dflash_train.generation.base import Answer, Request

# A field that a server may not know and that does not change what it is asked for: extra output, or a neutral value that only stands
# against a server's own defaults (vLLM and SGLang take theirs from the model's generation_config.json).
NEUTRAL = {"return_token_ids": True, "return_tokens": True, "verbose": True, "min_p": 0.0, "repetition_penalty": 1.0}
# How engines spell "sample among all tokens".
ALL_TOKENS = {"llamacpp": 0, "tensorrt_llm": 0}
# Text that a tool parser or a reasoning parser would have taken out of the content.
TOOL_MARKS = re.compile(r"<tool_call>|<function=|<\|tool_call|\[TOOL_CALLS\]|<\|python_tag\|>|<｜tool▁call|:tool_call>")
REASONING_MARKS = re.compile(r"</think>|\[/THINK\]|<channel\|>")


@dataclass(kw_only=True)
class Reply:
    """A parsed 200. answer: what regeneration gets. prompt_tokens: as the server counts them, 0 where it does not.

    mismatch: the server read another prompt than Request.prompt_ids (by ids, else by their number). plain_text: names of what the
    server left in the content for want of a parser: "tool_calls", "reasoning".
    """

    answer: Answer
    prompt_tokens: int = 0
    mismatch: bool = False
    plain_text: list[str] = field(default_factory=list)


def chat_body(request: Request, model: str, engine: str) -> dict[str, Any]:
    """Body of POST /chat/completions for a request to `engine` (its owned_by)."""
    body = {"model": model, "messages": [_message(m) for m in request.messages], **_sampling(request, engine)}
    if request.tools:
        body["tools"] = request.tools
    if request.chat_template_kwargs:
        body["chat_template_kwargs"] = request.chat_template_kwargs
    return body | request.extra_body


def completion_body(request: Request, model: str, engine: str) -> dict[str, Any]:
    """Body of POST /completions: our own rendering, as token ids."""
    return {"model": model, "prompt": request.prompt_ids, **_sampling(request, engine)} | request.extra_body


def _sampling(request: Request, engine: str) -> dict[str, Any]:
    ids: dict[str, Any] = {"return_token_ids": True}
    if engine == "llamacpp":
        ids = {"return_tokens": True, "verbose": True}
    elif engine == "tensorrt_llm":
        ids = {}
    return {
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or ALL_TOKENS.get(engine, -1),
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": request.seed & 0x7FFFFFFF,  # llama.cpp holds 32 bits of it
        "stream": False,
        **ids,
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API defines it: the arguments of a tool call are a JSON string there."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        inner = {"name": function["name"], "arguments": arguments}
        calls.append({"id": f"call_{len(calls)}", "type": "function", **call, "function": inner})
    return {**message, "tool_calls": calls}


def removable(body: dict[str, Any], text: str) -> set[str]:
    """Fields that a server's error text names and that can be left out without changing what is asked for."""

    def neutral(name: str) -> bool:
        if name in ("top_k", "seed"):
            return body["temperature"] == 0 or (name == "top_k" and body[name] <= 0)
        return name in NEUTRAL and body[name] == NEUTRAL[name]

    return {name for name in body if re.search(rf"\b{re.escape(name)}\b", text) and neutral(name)}


def parse_reply(data: Any, request: Request, tokenizer: Any, *, chat: bool) -> Reply:
    """The answer in a server's 200. Raises ValueError where it is not a completion, or ended in an error of the server's."""

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(f"not a completion ({what}): {json.dumps(data, ensure_ascii=False)[:200]}")

    need(isinstance(data, dict), "no object")
    choices = data.get("choices")
    need(isinstance(choices, list) and len(choices) > 0 and isinstance(choices[0], dict), "no choices")
    choice = choices[0]
    message = choice.get("message") if chat else {"content": choice.get("text")}
    need(isinstance(message, dict) and (chat or isinstance(message["content"], str)), "no answer")
    reason = choice.get("finish_reason")
    reason = {"function_call": "tool_calls", "eos": "stop"}.get(reason, reason) if isinstance(reason, str) else reason
    if reason not in ("stop", "tool_calls", "length"):
        raise ValueError(f"finish_reason {reason}: the server gave up on this request")
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    need(isinstance(content, str), "content is not text")
    need(isinstance(reasoning, str), "reasoning is not text")
    need(isinstance(calls, list) and all(map(_is_call, calls)), "tool_calls are no calls")
    usage = _mapping(data, "usage")
    token_ids = _token_ids(data, choice)
    need(_are_ids(token_ids), "token ids of the answer are no ids")
    stop = choice.get("matched_stop")
    if token_ids is not None and reason != "length" and type(stop) is int:
        token_ids = token_ids if token_ids[-1:] == [stop] else [*token_ids, stop]  # SGLang may trim it
    counted = _count(usage, "prompt_tokens") or 0
    prompt_ids = _prompt_ids(data, choice, tokenizer if chat else None)
    need(_are_ids(prompt_ids), "token ids of the prompt are no ids")
    mismatch = counted not in (0, len(request.prompt_ids)) if prompt_ids is None else prompt_ids != request.prompt_ids
    if prompt_ids is None and not chat and not mismatch:
        prompt_ids = request.prompt_ids
    if not chat and token_ids is not None:
        content = tokenizer.decode(token_ids, skip_special_tokens=True)
    kept: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        kept["reasoning_content"] = reasoning
    if calls:
        kept["tool_calls"] = calls
    need(_is_unicode(kept), "half of a surrogate pair in its text")
    return Reply(
        answer=Answer(
            message=kept,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            completion_tokens=_count(usage, "completion_tokens"),
            finish_reason=reason,
        ),
        prompt_tokens=counted,
        mismatch=mismatch,
        plain_text=_plain_text(kept, request) if chat else [],
    )


def _is_call(call: Any) -> bool:
    """Whether a value can be an OpenAI tool call: a function's name, and arguments as JSON text or as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), str | dict | None)


def _are_ids(ids: Any) -> bool:
    return ids is None or (isinstance(ids, list) and all(type(token) is int and 0 <= token < 2**31 for token in ids))


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _mapping(data: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of an answer that says more about it; one of another kind says nothing."""
    return value if isinstance(value := data.get(name), dict) else {}


def _count(usage: dict[str, Any], name: str) -> int | None:
    """A number of tokens; None where the server does not say."""
    return value if type(value := usage.get(name)) is int and value >= 0 else None


def _token_ids(data: dict[str, Any], choice: dict[str, Any]) -> Any:
    """What the target wrote; None where the server does not say (an empty list is its way of not saying)."""
    verbose = _mapping(data, "__verbose")
    return choice.get("token_ids") or choice.get("response_token_ids") or verbose.get("tokens") or None


def _prompt_ids(data: dict[str, Any], choice: dict[str, Any], tokenizer: Any) -> Any:
    """What the target read; None where the server does not say. tokenizer: for a server that gives text, None to leave that alone."""
    ids = data.get("prompt_token_ids") or choice.get("prompt_token_ids")
    verbose = _mapping(data, "__verbose")
    if not ids and tokenizer is not None and isinstance(prompt := verbose.get("prompt"), str) and _is_unicode(prompt):
        # As many tokens as llama.cpp counted are the same tokens.
        with suppress(NotEncodable):
            ids = encode(prompt, tokenizer)["input_ids"]
            ids = ids if len(ids) == verbose.get("tokens_evaluated") else None
    return ids or None


def _plain_text(message: dict[str, Any], request: Request) -> list[str]:
    found = []
    if request.tools and "tool_calls" not in message and TOOL_MARKS.search(message["content"]):
        found.append("tool_calls")
    if "reasoning_content" not in message and REASONING_MARKS.search(message["content"]):
        found.append("reasoning")
    return found
