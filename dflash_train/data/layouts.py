"""The ways in which people write a conversation -> messages as chat templates want them.

Known: `messages`, `conversations` or `conversation` (role and content, or ShareGPT's from and value; also as a JSON string), a bare list
of messages, prompt and response or completion, question and answer, Alpaca's instruction, input and output. Inside a message: parts of
text, Anthropic's thinking, tool_use and tool_result parts, Gemini's `parts`, OpenAI's old `function_call`. Whatever is not text is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
}
LISTS = ("messages", "conversations", "conversation")
PAIRS = [("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("instruction", "output")]
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
# What a message says in another way than chat templates read it.
CONSUMED = {"from", "value", "parts", "function_call"}

Message = dict[str, Any]


class BadRow(Exception):
    """A row that cannot be used; the text is the reason it is counted under."""


def find_messages(row: dict[str, Any], notes: Counter[str]) -> tuple[list[Message], set[str]]:
    """(messages, the row's fields that they came from); no messages where the row has none. Raises BadRow."""
    if any(row.get(name) for name in MEDIA):
        raise BadRow("non_text_content")
    raw, used = _raw(row)
    messages = [part for message in raw for part in _split(message, notes)]
    if any(isinstance(m, dict) and isinstance(m.get("function_call"), dict) for m in raw):
        for message in messages:  # the answers to such calls are what templates call tool messages
            message["role"] = "tool" if message["role"] == "function" else message["role"]
    system = row.get("system")
    if messages and isinstance(system, str) and system.strip() and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
        used.add("system")
    return messages, used


def _raw(row: dict[str, Any]) -> tuple[list[Any], set[str]]:
    for name in LISTS:
        value = decoded(row.get(name))
        if isinstance(value, list):
            return value, {name}
    for asked, answered in PAIRS:
        question, answer = row.get(asked), row.get(answered)
        if isinstance(question, list) and isinstance(answer, list):
            return question + answer, {asked, answered}
        # A prompt alone is what regeneration wants; whatever else an answer is, it is not text.
        if isinstance(question, str) and (
            isinstance(answer, str) or asked == "prompt" and row.get("completion") is None
        ):
            used = {asked, answered}
            if asked == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
                question, used = f"{question}\n\n{row['input']}", used | {"input"}
            turns = [{"role": "user", "content": question}]
            return turns + ([{"role": "assistant", "content": answer}] if isinstance(answer, str) else []), used
    return [], set()


def _split(message: Any, notes: Counter[str]) -> list[Message]:
    """One message as one, or as several where it carries tool results. Raises BadRow."""
    if not isinstance(message, dict):
        raise BadRow("bad_role")
    role = _role(message, notes)
    clean = {key: value for key, value in message.items() if value is not None and key not in CONSUMED}
    content = next((message[key] for key in ("content", "value", "parts") if message.get(key) is not None), None)
    results: list[Message] = []
    if role == "function_call":  # ShareGPT's: the call is the text
        role, clean["tool_calls"], content = "assistant", [decoded(content)], None
    if isinstance(message.get("function_call"), dict):
        clean["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
    if isinstance(content, dict):
        content = [content]
    if isinstance(content, list):
        content = _parts(content, clean, results)
    if content is not None and not isinstance(content, str):
        raise BadRow("non_text_content")
    clean |= {"role": role, "content": content or ""}
    calls = decoded(clean.pop("tool_calls", None))
    if calls:
        if not isinstance(calls, list):
            raise BadRow("bad_tool_call")
        clean["tool_calls"] = [_tool_call(call) for call in calls]
    if results and not clean["content"] and role == "user":
        return results
    return [*results, clean]


def _role(message: Message, notes: Counter[str]) -> str:
    given = message.get("role") if message.get("role") is not None else message.get("from")
    if not isinstance(given, str):
        raise BadRow("bad_role")
    name = given.strip().lower()
    role = OTHER_NAMES.get(name, name)
    if role == "function_call" and "from" in message:
        return role
    if role not in ROLES:
        raise BadRow("bad_role")
    if role != given and "role" in message:
        notes["role_renamed"] += 1
    return role


def _parts(parts: list[Any], clean: Message, results: list[Message]) -> str:
    """The text of a list of parts; reasoning and tool calls go into `clean`, tool results into `results`."""
    texts, thoughts, calls = [], [], []
    for part in parts:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        if not isinstance(part, dict):
            raise BadRow("non_text_content")
        kind = part.get("type") or "text"
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            if calls and part["text"].strip():
                raise BadRow("text_after_tool_call")
            texts.append(part["text"])
        elif kind in ("thinking", "reasoning") and isinstance(part.get("thinking", part.get("text")), str):
            thoughts.append(part.get("thinking", part.get("text")))
        elif kind == "tool_use" and isinstance(part.get("name"), str):
            function = {"name": part["name"], "arguments": part.get("input")}
            calls.append({"type": "function", "function": function} | ({"id": part["id"]} if "id" in part else {}))
        elif kind == "tool_result":
            inner = part.get("content")
            text = _parts(inner, {}, []) if isinstance(inner, list) else inner or ""
            if not isinstance(text, str):
                raise BadRow("non_text_content")
            called = {"tool_call_id": part["tool_use_id"]} if "tool_use_id" in part else {}
            results.append({"role": "tool", "content": text, **called})
        else:
            raise BadRow("non_text_content")
    if thoughts:
        clean.setdefault("reasoning_content", "".join(thoughts))
    if calls:
        clean["tool_calls"] = calls
    return "".join(texts)


def _tool_call(call: Any) -> dict[str, Any]:
    """Templates dump the arguments as JSON themselves; a string is decoded, not to be encoded twice.
    Null or an empty string is a call without arguments, as for the engines.
    """
    call = decoded(call)
    if not isinstance(call, dict):
        raise BadRow("bad_tool_call")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    if "arguments" not in call:
        return call
    arguments = call["arguments"]
    empty = arguments is None or (isinstance(arguments, str) and not arguments.strip())
    return {**call, "arguments": {} if empty else decoded(arguments)}


def decoded(value: Any) -> Any:
    """The object that a JSON string stands for; anything else, and text that is not an object or list, as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict | list) else value
