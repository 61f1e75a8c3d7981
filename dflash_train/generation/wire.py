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
from dataclasses import dataclass, field
from typing import Any

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
    try:
        choice = data["choices"][0]
        message = dict(choice["message"]) if chat else {"content": choice["text"]}
        reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError(f"not a completion: {json.dumps(data, ensure_ascii=False)[:200]}") from None
    reason = {"function_call": "tool_calls", "eos": "stop"}.get(reason, reason)
    if reason not in ("stop", "tool_calls", "length"):
        raise ValueError(f"finish_reason {reason}: the server gave up on this request")
    usage = data.get("usage") or {}
    token_ids = _token_ids(data, choice)
    if token_ids is not None and reason != "length" and isinstance(stop := choice.get("matched_stop"), int):
        token_ids = token_ids if token_ids[-1:] == [stop] else [*token_ids, stop]  # SGLang may trim it
    counted = usage.get("prompt_tokens") or 0
    prompt_ids = _prompt_ids(data, choice, tokenizer if chat else None)
    mismatch = counted not in (0, len(request.prompt_ids)) if prompt_ids is None else prompt_ids != request.prompt_ids
    if prompt_ids is None and not chat and not mismatch:
        prompt_ids = request.prompt_ids
    content = message.get("content") or ""
    if not chat and token_ids is not None:
        content = tokenizer.decode(token_ids, skip_special_tokens=True)
    kept: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        kept["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = calls
    return Reply(
        answer=Answer(
            message=kept,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            completion_tokens=usage.get("completion_tokens"),
            finish_reason=reason,
        ),
        prompt_tokens=counted,
        mismatch=mismatch,
        plain_text=_plain_text(kept, request) if chat else [],
    )


def _token_ids(data: dict[str, Any], choice: dict[str, Any]) -> list[int] | None:
    """What the target wrote; None where the server does not say (an empty list is its way of not saying)."""
    return (
        choice.get("token_ids") or choice.get("response_token_ids") or data.get("__verbose", {}).get("tokens") or None
    )


def _prompt_ids(data: dict[str, Any], choice: dict[str, Any], tokenizer: Any) -> list[int] | None:
    """What the target read; None where the server does not say. tokenizer: for a server that gives text, None to leave that alone."""
    ids = data.get("prompt_token_ids") or choice.get("prompt_token_ids")
    verbose = data.get("__verbose", {})
    if not ids and tokenizer is not None and verbose.get("prompt"):
        # As many tokens as llama.cpp counted are the same tokens.
        ids = tokenizer.encode(verbose["prompt"], add_special_tokens=False)
        ids = ids if len(ids) == verbose.get("tokens_evaluated") else None
    return ids or None


def _plain_text(message: dict[str, Any], request: Request) -> list[str]:
    found = []
    if request.tools and "tool_calls" not in message and TOOL_MARKS.search(message["content"]):
        found.append("tool_calls")
    if "reasoning_content" not in message and REASONING_MARKS.search(message["content"]):
        found.append("reasoning")
    return found
