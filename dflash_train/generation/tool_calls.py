"""Tool calls in answers. Tools are not run here: a recorded result goes where the new answer calls the same function."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dflash_train.config.values import parse_json
from dflash_train.types import Conversation

Message = dict[str, Any]
RESULT_ROLES = ("tool", "function", "ipython")


@dataclass(kw_only=True)
class Call:
    """A call of a function. arguments and id are None where the call is only known as text, or has none."""

    name: str
    arguments: Any = None
    id: str | None = None


def tool_names(conversation: Conversation) -> set[str]:
    """Names of the functions that a conversation offers or calls."""
    listed = [tool for tool in conversation.tools or [] if isinstance(tool, dict)]
    called = [call for message in conversation.messages for call in message.get("tool_calls", [])]
    functions = [item.get("function", item) for item in listed + called]
    return {str(f["name"]) for f in functions if isinstance(f, dict) and "name" in f}


def calls_of(message: Message, names: set[str]) -> list[Call]:
    """The calls of an answer in order: its `tool_calls`, else those to one of `names` in its text."""
    if message.get("tool_calls"):
        found = []
        for call in message["tool_calls"]:
            function = call.get("function", call)
            found.append(Call(name=str(function.get("name")), arguments=function.get("arguments"), id=call.get("id")))
        return found
    return [Call(name=name) for name in _named_in(message["content"], names, bare=True)]


def call_as_text(message: Message, names: set[str]) -> str | None:
    """The name of the first function that an answer plainly calls in its text, though it has no `tool_calls`."""
    if message.get("tool_calls"):
        return None
    return next(iter(_named_in(message["content"], names, bare=False)), None)


def _named_in(text: str, names: set[str], *, bare: bool) -> list[str]:
    """Names called in a text, in order, in any of the ways in which models write calls; `bare`: also as `name(`.

    Text up to the end of a reasoning block does not count.
    """
    if not names:
        return []
    name = "(" + "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)) + ")"
    ways = [
        rf'"name"\s*:\s*"{name}"',  # Hermes, Qwen, Llama
        rf"<function={name}>",  # Qwen3-Coder
        rf"<tool_call>\s*{name}\b",  # GLM
        rf"functions\.{name}\b",  # gpt-oss, Kimi
        rf"\[TOOL_CALLS\]\s*{name}\b",  # Mistral
        rf"tool▁sep｜>\s*{name}\b",  # DeepSeek
        rf"\bcall:{name}\b",  # Gemma
    ]
    if bare:
        ways.append(rf"(?<![\w.]){name}\s*\(")
    answer = text.rpartition("</think>")[2]
    return [next(filter(None, match.groups())) for match in re.finditer("|".join(ways), answer)]


def splice(old: list[Call], results: list[Message], new: list[Call]) -> list[Message] | None:
    """The recorded results in the order of the new calls, with their ids; None where the new answer does not call the same functions.

    Functions are compared by name, as a multiset. Among several calls of one function, those with the recorded arguments get the recorded
    result of these.
    """
    if len(results) != len(old) or Counter(call.name for call in old) != Counter(call.name for call in new):
        return None
    ordered = _in_order_of_calls(old, results)
    left = list(range(len(old)))
    chosen: dict[int, int] = {}
    for exact in (True, False):
        for number, call in enumerate(new):
            fits = [i for i in left if old[i].name == call.name and (not exact or old[i].arguments == call.arguments)]
            if number not in chosen and fits:
                chosen[number] = fits[0]
                left.remove(fits[0])
    return [_answering(ordered[chosen[number]], call) for number, call in enumerate(new)]


def other_arguments(old: list[Call], new: list[Call]) -> bool:
    """Whether a new call has arguments that no recorded call of its function has, as far as both are known."""
    for call in new:
        asked = [o.arguments for o in old if o.name == call.name and o.arguments is not None]
        if asked and call.arguments is not None and call.arguments not in asked:
            return True
    return False


def _in_order_of_calls(calls: list[Call], results: list[Message]) -> list[Message]:
    by_id = {result.get("tool_call_id"): result for result in results}
    if len(by_id) == len(results) and None not in by_id and set(by_id) == {call.id for call in calls}:
        return [by_id[call.id] for call in calls]
    return results


def _answering(result: Message, call: Call) -> Message:
    return result if call.id is None else {**result, "tool_call_id": call.id}


def as_message(message: Message) -> Message:
    """An answer as templates and rows want it: no empty fields, text content, arguments as objects."""
    clean = {key: value for key, value in message.items() if value not in (None, [], "")}
    clean |= {"role": "assistant", "content": message.get("content") or ""}
    if "tool_calls" in clean:
        clean["tool_calls"] = [_with_object_arguments(call) for call in clean["tool_calls"]]
    return clean


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object_arguments(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            decoded = parse_json(arguments) if arguments.strip() else {}
        except ValueError:
            decoded = arguments
        arguments = decoded if isinstance(decoded, dict | list) else arguments
    return {**call, "arguments": {} if arguments is None else arguments}
