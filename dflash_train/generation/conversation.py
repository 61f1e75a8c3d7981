"""One conversation on its way through regeneration: every answer is asked for with the new answers before it in its prompt."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jinja2

from dflash_train.config.mixture import Setting
from dflash_train.config.schema import RegenerateConfig
from dflash_train.data.chat import prompt_ids
from dflash_train.data.template import NotEncodable, encode
from dflash_train.generation.base import Answer, Request
from dflash_train.generation.provenance import row_seed
from dflash_train.generation.tool_calls import (
    RESULT_ROLES,
    Message,
    as_message,
    calls_of,
    other_arguments,
    splice,
    tool_names,
)
from dflash_train.types import Conversation

# Written anew for each row; whatever an input row says about them belongs to the answers that are replaced.
REPLACED = {"turn_ids", "generator", "finish_reason", "finish_reasons", "response_tokens"}


@dataclass(kw_only=True)
class Turn:
    """One new answer. prompt_ids and response_ids are None where the backend does not know them; tokens: length of the answer."""

    prompt_ids: list[int] | None
    response_ids: list[int] | None
    finish_reason: str
    tokens: int


@dataclass(kw_only=True)
class Work:
    """messages: what is settled; rest: what the recorded conversation still has to go through, with the old answers; prompt: ids of the
    next request; error: why there will be no row.
    """

    conversation: Conversation
    setting: Setting
    kwargs: dict[str, Any]
    messages: list[Message]
    rest: list[Message]
    turns: list[Turn] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    error: str | None = None
    status: int | None = None
    tries: int = 0


def prepare(conversation: Conversation, setting: Setting) -> Work:
    """A conversation at its beginning. One that ends with a question gets an answer to it."""
    messages = conversation.messages
    if messages[-1]["role"] != "assistant":
        messages = [*messages, {"role": "assistant", "content": ""}]
    # An answer that nobody asked for (a greeting before the first question) is part of the prompt.
    first = next(i for i, message in enumerate(messages) if message["role"] in ("user", "tool"))
    kwargs = {**setting.chat_template_kwargs, **conversation.chat_template_kwargs}
    return Work(
        conversation=conversation, setting=setting, kwargs=kwargs, messages=messages[:first], rest=messages[first:]
    )


def size(work: Work) -> tuple[int, int, str]:
    """Sorts by number of answers, then by text, longest first: what does not fit shows at once, and neighbours fill a batch evenly."""
    turns = sum(message["role"] == "assistant" for message in work.rest)
    return -turns, -sum(len(m["content"]) for m in work.messages + work.rest), work.conversation.id


def advance(work: Work, tokenizer: Any, max_length: int, notes: Counter[str]) -> bool:
    """Go on to the next answer to ask for and set its prompt. False if there is none: the row is done, or has an error."""
    while work.rest and work.rest[0]["role"] != "assistant":
        work.messages.append(work.rest.pop(0))
    if not work.rest:
        return False
    try:
        work.prompt = prompt_ids(work.messages, tokenizer, tools=work.conversation.tools, kwargs=work.kwargs)
    except (jinja2.TemplateError, TypeError) as error:
        work.error = f"template_error: {error}"
        return False
    except NotEncodable as error:
        work.error = f"not_encodable: prompt {work.conversation.id} ({work.conversation.source}): {error}"
        return False
    if len(work.prompt) < max_length:
        return True
    if work.turns:
        notes["ended_at_max_length"] += 1
        work.rest = []
        while work.messages[-1]["role"] != "assistant":
            work.messages.pop()
    else:
        work.error = f"prompt_too_long: {len(work.prompt)} tokens, regenerate.max_length {max_length}"
    return False


def next_request(work: Work, config: RegenerateConfig) -> Request:
    """The request for the answer that `advance` went on to."""
    return Request(
        messages=list(work.messages),
        prompt_ids=work.prompt,
        max_new_tokens=min(config.max_new_tokens, config.max_length - len(work.prompt)),
        seed=row_seed(config.seed, work.conversation.id, len(work.turns)),
        temperature=work.setting.temperature,
        top_p=work.setting.top_p,
        top_k=work.setting.top_k,
        tools=work.conversation.tools,
        chat_template_kwargs=work.kwargs,
        extra_body=work.setting.extra_body,
    )


def accept(work: Work, answer: Answer, tokenizer: Any, notes: Counter[str]) -> None:
    """Take an answer in place of the recorded one. The conversation ends where going on would be off-policy; `work.rest` is then empty.
    Raises NotEncodable where the tokens of an answer must be counted here, and cannot."""
    message = as_message(answer.message)
    work.messages.append(message)
    work.turns.append(
        Turn(
            prompt_ids=answer.prompt_ids,
            response_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            tokens=_tokens(answer, message, tokenizer),
        )
    )
    if answer.prompt_ids is not None and answer.prompt_ids != work.prompt:
        notes["prompt_rendered_otherwise_by_the_server"] += 1
    old = work.rest.pop(0)
    if not work.rest:
        return
    if answer.finish_reason == "length":
        # The target would never see a cut answer closed by a turn end.
        notes["ended_at_cut_answer"] += 1
        work.rest = []
        return
    count = next((i for i, m in enumerate(work.rest) if m["role"] not in RESULT_ROLES), len(work.rest))
    if count:
        names = tool_names(work.conversation)
        spliced = splice(calls_of(old, names), work.rest[:count], calls_of(message, names))
        if spliced is None:
            # The recorded tool results answer calls that the target did not make.
            notes["ended_at_missing_tool_call"] += 1
            work.rest = []
        else:
            if other_arguments(calls_of(old, names), calls_of(message, names)):
                notes["tool_result_of_other_arguments"] += 1
            work.rest[:count] = spliced
    elif message.get("tool_calls"):
        # No result was recorded for what the target wants to know.
        notes["ended_at_unanswered_tool_call"] += 1
        work.rest = []


def _tokens(answer: Answer, message: Message, tokenizer: Any) -> int:
    if answer.token_ids is not None:
        return len(answer.token_ids)
    if answer.completion_tokens is not None:
        return answer.completion_tokens
    calls = [call.get("function", call) for call in message.get("tool_calls", [])]
    text = message.get("reasoning_content", "") + message["content"] + "".join(json.dumps(call) for call in calls)
    return len(encode(text, tokenizer)["input_ids"])


def finished_row(work: Work, generator: dict[str, Any]) -> dict[str, Any]:
    """The output row: exact ids where every turn has them, else `messages` with the number of generated tokens."""
    conversation, turns = work.conversation, work.turns
    row: dict[str, Any] = {key: value for key, value in conversation.metadata.items() if key not in REPLACED}
    row |= {"id": conversation.id, "domain": conversation.domain, "messages": work.messages}
    if conversation.tools is not None:
        row["tools"] = conversation.tools
    row["chat_template_kwargs"] = work.kwargs
    if not all(turn.prompt_ids and turn.response_ids for turn in turns):
        row["response_tokens"] = sum(turn.tokens for turn in turns)
    elif len(turns) == 1:
        row["prompt_ids"], row["response_ids"] = turns[0].prompt_ids, turns[0].response_ids
    else:
        row["turn_ids"] = [
            {"prompt_ids": turn.prompt_ids, "response_ids": turn.response_ids, "finish_reason": turn.finish_reason}
            for turn in turns
        ]
    if len(turns) > 1:
        row["finish_reasons"] = [turn.finish_reason for turn in turns]
    return {**row, "finish_reason": turns[-1].finish_reason, "generator": generator}
