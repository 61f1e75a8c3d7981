"""Files as they are found in the world: read as what they are, or refused by name with the remedy."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from datasets import Dataset, DatasetDict

from dflash_train.data import files
from dflash_train.data.read import read_conversations

USER, ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
ROWS = [{"id": f"r{i}", "messages": [USER, {"role": "assistant", "content": f"answer {i}"}]} for i in range(5)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def ids(*paths: Any) -> list[str]:
    return [c.id for c in read_conversations(paths)[0]]


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def zipped(path: Path) -> bytes:
    with zipfile.ZipFile(path / "a.zip", "w") as archive:
        archive.writestr("rows.jsonl", TEXT)
    return (path / "a.zip").read_bytes()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.jsonl", b"\xef\xbb\xbf" + TEXT),
        ("rows.jsonl", TEXT.replace(b"\n", b"\r\n")),
        ("rows.jsonl", TEXT.rstrip(b"\n")),
        ("rows.jsonl", b"\n \n" + TEXT.replace(b"\n", b"\n\n\t\n")),
        ("rows.jsonl", gzip.compress(TEXT)),
        ("rows.jsonl", zstandard.compress(TEXT)),
        ("rows.jsonl.gz", TEXT),
        ("rows.gz", gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:])),
        ("rows.jsonl.zst", zstandard.compress(TEXT[:100]) + zstandard.compress(TEXT[100:])),
        ("rows.json", json.dumps(ROWS).encode()),
        ("rows.json", json.dumps(ROWS, indent=2).encode()),
        ("rows.jsonl", b"\xef\xbb\xbf  " + json.dumps(ROWS, indent=1).encode() + b"\n\n"),
        ("rows.json.gz", gzip.compress(json.dumps(ROWS).encode())),
    ],
    ids=["BOM", "CRLF", "no newline at the end", "blank lines", "gzip by content", "zstd by content", "plain in .gz",
         "two gzip members", "two zstd frames", "array", "indented array", "array with BOM", "compressed array"],
)  # fmt: skip
def test_whatever_the_wrapping_the_rows_are_the_same(tmp_path: Path, name: str, data: bytes) -> None:
    assert ids(put(tmp_path / name, data)) == ["r0", "r1", "r2", "r3", "r4"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl.gz", gzip.compress(TEXT)[:-12], "not a complete gzip file"),
        ("a.jsonl.gz", gzip.compress(TEXT)[:40] + b"\xff" * 20 + gzip.compress(TEXT)[60:], "not a complete gzip file"),
        ("a.jsonl.zst", zstandard.compress(TEXT)[:-5], "not a complete zstd file"),
        ("a.jsonl", "zip", "is a zip archive; unpack it"),
        ("a.jsonl", b"BZh91AY&SY", "bzip2"),
        ("a.jsonl", b"\xfd7zXZ\x00", "xz"),
        ("a.jsonl", TEXT.decode().encode("utf-16"), "UTF-16 or UTF-32; write it as UTF-8"),
        ("a.jsonl", TEXT.decode().encode("utf-16-le"), "UTF-16 or UTF-32; write it as UTF-8"),
        ("a.jsonl", TEXT.decode().encode("utf-16-be"), "UTF-16 or UTF-32; write it as UTF-8"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n", "git lfs pull"),
        ("a.jsonl", b"<!DOCTYPE html><html><head></head></html>", "is a web page"),
        ("a.jsonl", b"ARROW1\x00\x00", "Arrow file; name the folder"),
        ("a.csv", b"prompt,response\nx,y\n", "csv files are not read; convert it"),
        ("a.parquet", TEXT, "not a whole Parquet file"),
        ("a.json", json.dumps(ROWS).encode()[:-20], r"JSON array is broken at \[4\]"),
        ("a.json", b'[{"id": 1}\n{"id": 2}]', r"broken at \[0\] \(neither , nor \] follows\)"),
        ("a.json", json.dumps(ROWS).encode() + b"[{}]", "more follows its JSON array"),
        ("a.json", b'[{"id": "\xff"}]', "not UTF-8"),
    ],
)
def test_a_file_of_another_kind_or_half_a_file_is_named_with_the_remedy(
    tmp_path: Path, name: str, data: bytes | str, message: str
) -> None:
    path = put(tmp_path / name, zipped(tmp_path) if data == "zip" else data)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        read_conversations([path])


def test_an_array_longer_than_what_is_read_at_once_gives_every_row(tmp_path: Path) -> None:
    big = [
        {"id": f"r{i}", "messages": [USER, {"role": "assistant", "content": f"{i} " + "wörd " * 700}]}
        for i in range(999)
    ]
    path = put(tmp_path / "big.json", json.dumps(big, ensure_ascii=False).encode())
    conversations, _ = read_conversations([path])
    assert [c.id for c in conversations] == [row["id"] for row in big]
    assert conversations[-1].source == f"{path}[998]"
    assert conversations[500].messages[1]["content"] == big[500]["messages"][1]["content"]


def test_a_line_that_no_conversation_can_be_is_counted_without_being_held(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 2**20)
    huge = json.dumps({"id": "huge", "messages": [USER, {"role": "assistant", "content": "y" * 3_500_000}]}).encode()
    path = put(tmp_path / "a.jsonl", TEXT + huge + b"\n" + TEXT.replace(b'"id": "r', b'"id": "s'))
    conversations, kept = read_conversations([path])
    assert len(conversations) == 10 and kept.examples == {"line_over_1_MiB": [f"{path}:6"]}
    assert conversations[5].source == f"{path}:7"


def test_a_folder_is_its_data_files_by_name_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path / "b" / "2.jsonl", TEXT.splitlines()[1])
    put(tmp_path / "a.jsonl.gz", gzip.compress(TEXT.splitlines()[2]))
    Dataset.from_list([ROWS[0]]).to_parquet(str(tmp_path / "b" / "1.parquet"))
    for name in (
        "README.md",
        ".hidden.jsonl",
        "_SUCCESS",
        "a.jsonl.failed.jsonl",
        "a.jsonl.manifest.json",
        "b/2.jsonl.report.json",
        "split.json",
        "certificate.json",
        "_temporary/x.jsonl",
        "b/.x.jsonl.swp",
    ):
        put(tmp_path / name, b"not data")
    assert ids(tmp_path) == ["r2", "r0", "r1"]
    with pytest.raises(ValueError, match="has no file that ends in .jsonl.*it holds a.txt"):
        read_conversations([put(tmp_path / "other" / "a.txt", TEXT).parent])


def test_a_folder_written_by_datasets_is_read_and_its_split_can_be_named(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(train=Dataset.from_list(ROWS[:2]), test=Dataset.from_list(ROWS[2:3])).save_to_disk(tmp_path / "two")
    assert ids(tmp_path / "one") == [row["id"] for row in ROWS]
    assert ids(tmp_path / "two") == ["r0", "r1"]
    assert ids(f"{tmp_path / 'two'}:test") == ["r2"]
    with pytest.raises(ValueError, match="has no split dev; name one of train, test"):
        ids(f"{tmp_path / 'two'}:dev")
    with pytest.raises(ValueError, match="it has no splits; leave out :test"):
        ids(f"{tmp_path / 'one'}:test")


def test_a_parquet_file_cut_off_is_named(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    put(tmp_path / "a.parquet", (tmp_path / "a.parquet").read_bytes()[:-30])
    with pytest.raises(ValueError, match="not a whole Parquet file"):
        ids(tmp_path / "a.parquet")


def test_parquet_columns_fill_structs_with_nulls_and_rows_do_not_keep_them(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    rows = [
        {
            "id": "a",
            "messages": [USER, call, {"role": "tool", "content": "1", "tool_call_id": "t"}, ANSWER],
            "tools": None,
        },
        {"id": "b", "messages": [USER, ANSWER], "tools": [{"type": "function", "function": {"name": "f"}}]},
    ]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    a, b = read_conversations([tmp_path / "a.parquet"])[0]
    assert a.tools is None and a.messages[0] == USER and a.messages[1]["content"] == ""
    assert a.messages[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert b.messages == [USER, ANSWER] and b.tools == [{"type": "function", "function": {"name": "f"}}]


def test_content_decides_the_hash_and_the_place_does_not(tmp_path: Path) -> None:
    def digest(path: Path) -> str:
        return files.content_hash(files.locate(path))

    one = put(tmp_path / "a.jsonl", TEXT)
    assert digest(one) == digest(put(tmp_path / "there" / "b.jsonl", TEXT))
    assert digest(one) != digest(put(tmp_path / "c.jsonl", TEXT + b"\n"))
    folder = put(tmp_path / "f" / "1.jsonl", TEXT).parent
    before = digest(folder)
    put(folder / "notes.md", b"x")
    assert digest(folder) == before
    put(folder / "2.jsonl", b"")
    assert digest(folder) != before
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "d")
    Dataset.from_list(ROWS[1:]).save_to_disk(tmp_path / "e")
    assert digest(tmp_path / "d") != digest(tmp_path / "e")
