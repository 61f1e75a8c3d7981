"""Rows as people write them: what is clearly meant is read, what is not is counted under its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_train.data.read import read_conversations

USER, ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def read(tmp_path: Path, *rows: Any, **options: Any):
    """rows: objects, or lines as they are."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return read_conversations([path], **options)


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ACCEPTED = {
    "roles in capitals": ([{"role": "USER", "content": "x"}, {"role": "Assistant ", "content": "y"}], [USER, ANSWER]),
    "role model": ([USER, {"role": "model", "content": "y"}], [USER, ANSWER]),
    "Gemini's parts": ([{"role": "user", "parts": [{"text": "x"}]}, {"role": "model", "parts": [{"text": "y"}]}], [USER, ANSWER]),
    "from and value in messages": ([{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], [USER, ANSWER]),
    "text parts": ([USER, says([{"type": "text", "text": "y"}, {"type": "output_text", "text": "z"}])], [USER, says("yz")]),
    "strings as parts": ([USER, says(["y", "z"])], [USER, says("yz")]),
    "one part without its list": ([USER, says({"type": "text", "text": "y"})], [USER, ANSWER]),
    "thinking parts": (
        [USER, says([{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "y"}])],
        [USER, {"reasoning_content": "t", **ANSWER}],
    ),
    "tool_use and tool_result parts": (
        [USER, says([{"type": "text", "text": "y"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]),
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
                                      {"type": "text", "text": "x"}]}, ANSWER],
        [USER, says("y", tool_calls=[{**CALL, "id": "1"}]), {"role": "tool", "content": "r", "tool_call_id": "1"}, USER, ANSWER],
    ),
    "tool_result alone": (
        [USER, says([{"type": "tool_use", "name": "f", "input": {"a": 1}}]),
         {"role": "user", "content": [{"type": "tool_result", "content": "r"}]}, ANSWER],
        [USER, says("", tool_calls=[CALL]), {"role": "tool", "content": "r"}, ANSWER],
    ),
    "tool calls as a JSON string": ([USER, says(None, tool_calls=json.dumps([CALL]))], [USER, says("", tool_calls=[CALL])]),
    "OpenAI's old function_call": (
        [USER, says(None, function_call={"name": "f", "arguments": '{"a": 1}'}), {"role": "function", "name": "f", "content": "r"}, ANSWER],
        [USER, says("", tool_calls=[CALL]), {"role": "tool", "name": "f", "content": "r"}, ANSWER],
    ),
    "ShareGPT's function_call": (
        [{"from": "human", "value": "x"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
         {"from": "observation", "value": "r"}, {"from": "gpt", "value": "y"}],
        [USER, says("", tool_calls=[CALL["function"]]), {"role": "tool", "content": "r"}, ANSWER],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ACCEPTED)
def test_messages_in_other_dialects_become_what_templates_read(tmp_path: Path, kind: str) -> None:
    messages, expected = ACCEPTED[kind]
    (as_list, as_text), kept = read(tmp_path, {"messages": messages}, {"messages": json.dumps(messages)})
    assert as_list.messages == as_text.messages == expected, kept.table()


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversation": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": json.dumps([{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}])}, [USER, ANSWER]),
        ({"instruction": "x", "input": "", "output": "y"}, [USER, ANSWER]),
        ({"instruction": "x", "input": "z", "output": "y", "system": "s"}, [SYSTEM, {**USER, "content": "x\n\nz"}, ANSWER]),
        ({"prompt": "x", "completion": "y"}, [USER, ANSWER]),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"question": "x", "answer": "y"}, [USER, ANSWER]),
        ({"system": "s", "messages": [USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"system": "other", "messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ([USER, ANSWER], [USER, ANSWER]),
        ([{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], [USER, ANSWER]),
    ],
)  # fmt: skip
def test_rows_in_other_layouts_are_conversations(tmp_path: Path, row: Any, messages: list[Any]) -> None:
    [conversation], kept = read(tmp_path, row)
    assert conversation.messages == messages, kept.table()


def test_a_field_that_is_no_part_of_the_conversation_stays_metadata(tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER], "answer": "42", "output": 7, "note": [1]}
    [conversation], _ = read(tmp_path, row)
    assert conversation.metadata == {"answer": "42", "output": 7, "note": [1]}


REFUSED = {
    "content is a number": ({"messages": [USER, says(5)]}, "non_text_content"),
    "content is true": ({"messages": [USER, says(True)]}, "non_text_content"),
    "lists in lists": ({"messages": [USER, says([[{"type": "text", "text": "y"}]])]}, "non_text_content"),
    "part without text": ({"messages": [USER, says([{"type": "text"}])]}, "non_text_content"),
    "image part": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}, ANSWER]}, "non_text_content"),
    "image in a tool result": (
        {"messages": [USER, {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}, ANSWER]}, "non_text_content"),
    "image beside the text": ({"image": "p.png", "conversations": [{"from": "human", "value": "<image> x"}, {"from": "gpt", "value": "y"}]}, "non_text_content"),
    "text after a call": (
        {"messages": [USER, says([{"type": "tool_use", "name": "f"}, {"type": "text", "text": "y"}])]}, "text_after_tool_call"),
    "unknown role": ({"messages": [USER, {"role": "robot", "content": "y"}]}, "bad_role"),
    "role is a number": ({"messages": [USER, {"role": 1, "content": "y"}]}, "bad_role"),
    "message is null": ({"messages": [None, USER, ANSWER]}, "bad_role"),
    "empty answer": ({"messages": [USER, says("")]}, "empty_answer"),
    "answer of white space": ({"messages": [USER, says(" \n\t")]}, "empty_answer"),
    "Alpaca without an answer": ({"instruction": "x", "input": "", "output": ""}, "empty_answer"),
    "calls that are no JSON": ({"messages": [USER, says("y", tool_calls="f(1)")]}, "bad_tool_call"),
    "a call that is a number": ({"messages": [USER, says("y", tool_calls=[3])]}, "bad_tool_call"),
    "text without turns": ({"text": "<|im_start|>user\nx<|im_end|>"}, "text_without_turns"),
    "nothing that is a conversation": ({"foo": 1}, "no_messages"),
    "messages are a word": ({"messages": "x"}, "no_messages"),
    "finish reason is a list": ({"messages": [USER, ANSWER], "finish_reason": ["stop"]}, "bad_finish_reason"),
    "arguments of the template are a word": ({"messages": [USER, ANSWER], "chat_template_kwargs": "x"}, "bad_chat_template_kwargs"),
    "NUL bytes": (b'{"id": 1, "mess\x00\x00\x00\x00', "nul_bytes"),
    "not UTF-8": (b'{"messages": "\xe9t\xe9"}', "invalid_json"),
    "half a surrogate pair": (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "lone_surrogate"),
    "a key twice": (b'{"messages": [{"role": "user", "content": "x", "content": "z"}]}', "duplicate_key"),
    "an integer without end": (b'{"id": ' + b"9" * 5000 + b"}", "invalid_json"),
    "brackets without end": (b'{"a": ' + b"[" * 100_000, "invalid_json"),
    "a number": (b"17", "not_an_object"),
    "single quotes": (b"{'messages': []}", "invalid_json"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_is_counted_under_its_reason_and_spoils_no_other_row(tmp_path: Path, kind: str) -> None:
    row, reason = REFUSED[kind]
    conversations, kept = read(tmp_path, {"messages": [USER, ANSWER]}, row, {"messages": [USER, says("z")]})
    assert len(conversations) == 2
    expected = {"invalid_json", "nested_too_deeply"} if kind == "brackets without end" else {reason}
    assert set(kept.dropped) <= expected and kept.total == 3
    assert kept.examples[next(iter(kept.dropped))] == [f"{tmp_path}/rows.jsonl:2"]


def test_an_empty_answer_among_others_is_no_reason(tmp_path: Path) -> None:
    [conversation], _ = read(tmp_path, {"messages": [USER, says(""), USER, ANSWER]})
    assert len(conversation.messages) == 4


def test_nan_is_read_as_nothing_and_said(tmp_path: Path) -> None:
    line = b'{"id": NaN, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "finish_reason": NaN}'
    [conversation], kept = read(tmp_path, line)
    assert conversation.finish_reason is None and len(conversation.id) == 24
    assert kept.notes == {"nan_read_as_null": 2}


def test_roles_that_were_renamed_are_said(tmp_path: Path) -> None:
    _, kept = read(tmp_path, {"messages": [{"role": "User", "content": "x"}, ANSWER]})
    assert kept.notes == {"role_renamed": 1}


def test_a_zero_character_and_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    [conversation], kept = read(
        tmp_path,
        b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}, {"role": "assistant", "content": "\\u0000y"}]}',
    )
    assert [m["content"] for m in conversation.messages] == ["😀", "\0y"] and not kept.dropped


def test_tools_and_template_arguments_may_be_json_strings(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "f"}}
    rows = [
        {
            "messages": [USER, ANSWER],
            "tools": json.dumps([schema]),
            "chat_template_kwargs": '{"enable_thinking": false}',
        },
        {"messages": [USER, ANSWER], "tools": [json.dumps(schema)]},
        {"messages": [USER, ANSWER], "functions": [{"name": "f"}]},
    ]
    conversations, _ = read(tmp_path, *rows)
    assert [c.tools for c in conversations] == [[schema]] * 3
    assert conversations[0].chat_template_kwargs == {"enable_thinking": False}


def test_an_empty_id_is_none(tmp_path: Path) -> None:
    conversations, _ = read(tmp_path, {"id": "", "messages": [USER, ANSWER]}, {"id": "", "messages": [USER, says("z")]})
    assert len({c.id for c in conversations}) == 2 and all(len(c.id) == 24 for c in conversations)
