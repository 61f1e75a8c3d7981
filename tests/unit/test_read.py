"""Reading JSONL: rows stand alone, each unusable one is counted with its reason and place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dflash_train.data.read import read_conversations

USER, ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rows_with_different_fields_do_not_change_each_other(tmp_path: Path) -> None:
    schema = {"properties": {"n": {"type": "integer", "default": 3}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    path = write(
        tmp_path / "mixed.jsonl",
        [
            {"id": "a", "messages": [USER, ANSWER], "tools": []},
            {"id": "b", "messages": [USER, ANSWER], "tools": tools, "note": 7},
            {"id": "c", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, ANSWER]},
            {"id": "d", "messages": [{"role": "user", "content": [{"type": "image", "image": "p.png"}]}, ANSWER]},
        ],
    )
    conversations, kept = read_conversations([path])
    a, b, c = conversations
    assert (a.id, a.tools, b.tools, b.metadata) == ("a", None, tools, {"note": 7})
    assert c.messages[0]["content"] == "x"
    assert (kept.kept, kept.dropped, kept.examples) == (
        3, {"non_text_content": 1}, {"non_text_content": [f"{path}:4"]},
    )  # fmt: skip


def test_broken_lines_are_counted_with_their_line_and_blank_lines_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "broken.jsonl", [{"messages": [USER, ANSWER]}, '{"messages": [', "", {"messages": []}])
    conversations, kept = read_conversations([path])
    assert len(conversations) == 1
    assert kept.examples == {"invalid_json": [f"{path}:2"], "no_messages": [f"{path}:4"]}
    assert f"{path}:2" in kept.table()
    kept.check(0.7)
    with pytest.raises(ValueError, match="share dropped 0.667 > max_dropped 0.5"):
        kept.check(0.5)


def test_no_usable_row_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    path = write(tmp_path / "empty.jsonl", ["[1]", {"messages": [USER]}, {"messages": [{"role": "robot"}]}])
    conversations, kept = read_conversations([path])
    assert conversations == []
    with pytest.raises(ValueError, match=r"(?s)0 usable rows of 3.*no_assistant_turn.*bad_role"):
        kept.check(1.0)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl does not exist"):
        read_conversations([tmp_path / "nowhere.jsonl"])


def test_compressed_files_read_like_plain_ones(tmp_path: Path) -> None:
    text = b"".join(json.dumps({"id": i, "messages": [USER, ANSWER]}).encode() + b"\n" for i in range(3))
    plain, gz, zst = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz", tmp_path / "a.jsonl.zst"
    plain.write_bytes(text)
    gz.write_bytes(gzip.compress(text))
    zst.write_bytes(zstandard.compress(text[:40]) + zstandard.compress(text[40:]))
    read = [[c.id for c in read_conversations([path])[0]] for path in (plain, gz, zst)]
    assert read[0] == ["0", "1", "2"] and read[0] == read[1] == read[2]
    gz.write_bytes(gzip.compress(text)[:-12])
    with pytest.raises(ValueError, match="not a complete gzip file"):
        read_conversations([gz])


@pytest.mark.parametrize("arguments", [None, "", "  "])
def test_a_tool_call_without_arguments_has_an_empty_object(tmp_path: Path, arguments: str | None) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    rows = [{"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}]
    [conversation], _ = read_conversations([write(tmp_path / "x.jsonl", rows)])
    assert conversation.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_null_content_and_json_string_arguments_are_normalised(tmp_path: Path) -> None:
    def call(arguments: Any) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "content": None, "name": None, "tool_calls": [{"function": function}]}

    path = write(tmp_path / "t.jsonl", [{"messages": [USER, call('{"port": "Brest"}'), call("not json")]}])
    _, first, second = read_conversations([path])[0][0].messages
    assert first["content"] == "" and "name" not in first
    assert first["tool_calls"][0]["function"]["arguments"] == {"port": "Brest"}
    assert second["tool_calls"][0]["function"]["arguments"] == "not json"


def test_ids_are_stable_and_unique(tmp_path: Path) -> None:
    other = {"role": "assistant", "content": "z"}
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER]},
        {"id": "a", "messages": [USER, ANSWER]},
        {"id": "a", "messages": [USER, other]},
        {"id": "a", "messages": [USER, ANSWER]},
    ]
    conversations, kept = read_conversations([write(tmp_path / "i.jsonl", rows)])
    again, _ = read_conversations([write(tmp_path / "renamed.jsonl", rows)])
    assert [c.id for c in conversations] == [c.id for c in again]
    assert [c.id for c in conversations][1:] == ["a", "a#2"]
    assert kept.dropped == {"duplicate_id": 2}


def test_token_ids_are_validated_and_kept(tmp_path: Path) -> None:
    rows = [
        {"prompt_ids": [1, 2], "response_ids": [3]},
        {"prompt_ids": [1, -2], "response_ids": [3]},
        {"prompt_ids": [1], "response_ids": []},
        {"prompt_ids": [1], "response_ids": [True]},
        {"prompt_ids": [1]},
    ]
    conversations, kept = read_conversations([write(tmp_path / "ids.jsonl", rows)])
    assert (conversations[0].prompt_ids, conversations[0].response_ids) == ([1, 2], [3])
    assert kept.dropped == {"bad_ids": 4}


def test_what_regeneration_recorded_survives_a_table(tmp_path: Path) -> None:
    """Tables fill absent fields with nulls, and Parquet holds no empty objects, so that they are written as text."""
    generator = {"model": "m", "chat_template_kwargs": {}}
    turns = [{"prompt_ids": [1], "response_ids": [2]}, {"prompt_ids": [1, 2, 3], "response_ids": [4]}]
    once = {"prompt_ids": [1], "response_ids": [2], "generator": generator, "messages": [USER, ANSWER]}
    twice = {"turn_ids": turns, "generator": generator, "messages": [USER, ANSWER, USER, ANSWER]}
    nulls = {"prompt_ids": None, "response_ids": None, "turn_ids": None, "generator": None, "tools": None}
    texts = {"generator": json.dumps(generator), "chat_template_kwargs": "{}"}
    plain, _ = read_conversations([write(tmp_path / "a.jsonl", [once, twice])])
    table = [nulls | {"id": c.id} | row | texts for c, row in zip(plain, [once, twice], strict=True)]
    filled, kept = read_conversations([write(tmp_path / "b.jsonl", table)])
    assert not kept.dropped
    for a, b in zip(plain, filled, strict=True):
        assert (a.prompt_ids, a.response_ids, a.metadata) == (b.prompt_ids, b.response_ids, b.metadata)
        assert a.metadata["generator"] == generator


def test_other_layouts_and_prompts_without_answers(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "domain": "math"},
        {"prompt": "x", "response": "y"},
        {"prompt": "x"},
    ]
    path = write(tmp_path / "l.jsonl", rows)
    conversations, kept = read_conversations([path])
    assert [c.messages for c in conversations] == [[USER, ANSWER]] * 2
    assert [c.domain for c in conversations] == ["math", "default"]
    assert kept.dropped == {"no_assistant_turn": 1}
    assert len(read_conversations([path], need_answer=False)[0]) == 3
    assert len(read_conversations([path], limit=1)[0]) == 1


def test_parquet_rows_are_read_like_lines_and_get_no_null_keys(tmp_path):
    from datasets import Dataset

    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
        {"id": "b", "messages": [{"role": "user", "content": "z", "name": "n"}, {"role": "assistant", "content": "w"}]},
    ]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "d.parquet"))
    conversations, kept = read_conversations([tmp_path / "d.parquet"])
    assert [c.messages for c in conversations] == [r["messages"] for r in rows]
    assert kept.kept == 2 and conversations[1].source.endswith("d.parquet:2")


def test_a_hub_data_set_that_cannot_be_had_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="nobody/nothing.* cannot be (looked for|loaded)"):
        read_conversations(["nobody/nothing:train"])
