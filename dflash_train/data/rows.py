"""Rows of data files as bytes and text, for commands that pass most of them on unchanged: stream in, write atomically out.

Nothing here keeps rows in memory. What a row's *prompt* and *answer* are is decided here and nowhere else.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard

from dflash_train.data.files import rows
from dflash_train.data.layouts import BadRow, find_messages
from dflash_train.data.read import parse_line

# Scripts without spaces count by character, everything else by word: 13-grams then mean much the same in all of them.
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
WORDS = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")


@dataclass(kw_only=True, slots=True)
class Row:
    """One line of a data file, read but not changed.

    `line` is the line as it was, without its end. `turns` are the user texts in order (or the prompt's ids as text),
    `context` the system and tool texts with the tool schemas, `answer` all that assistants said. `answered` is whether the
    assistant's last turn says anything, None where the conversation does not end with one.
    """

    place: str
    line: bytes
    fields: dict[str, Any]
    turns: list[str]
    context: str
    answer: str
    answered: bool | None

    @property
    def id(self) -> str:
        return str(self.fields.get("id", ""))

    @property
    def domain(self) -> str:
        return str(self.fields.get("domain") or "default")

    @property
    def prompt(self) -> str:
        return "\n".join(self.turns)


def read_lines(paths: Iterable[str | Path]) -> Iterator[tuple[str, bytes | str]]:
    """(place, line) of each row of files, folders and Hub data sets, in the order given; for one that cannot be read (place, reason)."""
    for path in paths:
        for place, line in rows(path):
            yield place, line.strip(b"\r\n") if isinstance(line, bytes) else line


def parse_row(place: str, line: bytes | str) -> Row:
    """What `read_lines` gave as a `Row`. Raises BadRow with the reason under which reading for training would count it."""
    if isinstance(line, str):
        raise BadRow(line)
    notes: Counter[str] = Counter()
    try:
        fields = parse_line(line, notes)
        messages, _ = find_messages(fields, notes)
    except RecursionError:
        raise BadRow("nested_too_deeply") from None
    turns = [m["content"] for m in messages if m["role"] == "user"]
    other = [m["content"] for m in messages if m["role"] not in ("user", "assistant")]
    spoken = [m for m in messages if m["role"] == "assistant"]
    answer = "\n".join(part for m in spoken for part in _said(m))
    answered = bool(_said(spoken[-1])) if messages and messages[-1]["role"] == "assistant" else None
    if not messages:
        turns, answer = _from_ids(fields)
        answered = bool(answer) if "response_ids" in fields else None
    if not any(turn.strip() for turn in turns):
        turns = [text for text in other if text.strip()][-1:]
    if not any(turn.strip() for turn in turns):
        raise BadRow("no_prompt")
    tools = fields.get("tools")
    context = "\n".join(other) + (json.dumps(tools, sort_keys=True, ensure_ascii=False) if tools else "")
    return Row(place=place, line=line, fields=fields, turns=turns, context=context, answer=answer, answered=answered)


def _said(message: dict[str, Any]) -> list[str]:
    """What an assistant turn consists of: its reasoning, its text and its tool calls."""
    parts = [message.get("reasoning_content"), message["content"]]
    if message.get("tool_calls"):
        parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return [part for part in parts if isinstance(part, str) and part]


def _from_ids(fields: dict[str, Any]) -> tuple[list[str], str]:
    """Prompt and answer of a row that carries token ids only: the ids as words, good enough to compare rows by."""
    prompt, answer = fields.get("prompt_ids"), fields.get("response_ids")
    if not isinstance(prompt, list):
        raise BadRow("no_messages")
    words = " ".join(map(str, prompt))
    return [words], " ".join(map(str, answer)) if isinstance(answer, list) else ""


def normalise(text: str) -> str:
    """The text by which two prompts are the same: NFKC, lower case, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_hash(text: str) -> int:
    """A 64-bit hash that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def prompt_digest(turns: list[str], context: str) -> bytes:
    """16 bytes by which two prompts are exact duplicates: all (normalised) user turns, system and tool texts, and tools."""
    text = "\x1f".join([*turns, "", normalise(context)])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class WordHashes(dict):
    """word -> 64-bit hash, computed once; forgets everything when it has grown to a million words."""

    def __missing__(self, word: str) -> int:
        if len(self) >= 1 << 20:
            self.clear()
        value = self[word] = text_hash(word)
        return value


_HASHES = WordHashes()


def words_of(text: str) -> list[str]:
    """The words of a normalised text; of Chinese, Japanese and Korean the characters."""
    return WORDS.findall(text)


def ngrams(words: list[str], size: int) -> np.ndarray:
    """uint64 hash of every run of `size` words, in order; of a shorter text one hash of the whole; of none, none."""
    if not words:
        return np.empty(0, np.uint64)
    hashes = np.fromiter(map(_HASHES.__getitem__, words), np.uint64, len(words))
    size = min(size, len(words))
    grams = np.zeros(len(words) - size + 1, np.uint64)
    for offset in range(size):  # a polynomial in an odd base, modulo 2^64
        grams = grams * np.uint64(0x9E3779B97F4A7C15) + hashes[offset : offset + len(grams)]
    return grams ^ (grams >> np.uint64(32))


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary stream that becomes `path` when the block ends well; compressed when the name ends in .gz or .zst.

    Until then everything is in `<path>.part`, so `path` is what it was or complete, whatever kills the process. Raises
    ValueError when another process is writing the same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("ab") as raw:
        try:
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"output {path} is being written by another process; wait for it or choose another"
            ) from None
        if not part.exists() or not os.path.samestat(os.fstat(raw.fileno()), part.stat()):
            # Its writer finished between our opening and our locking: what we hold is the finished file.
            raise ValueError(f"output {path} was written by another process just now; run again to replace it")
        raw.truncate(0)
        try:
            with _compressed(raw, path) as stream:
                yield stream
            raw.flush()
            os.fsync(raw.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _compressed(raw: IO[bytes], path: Path) -> AbstractContextManager[IO[bytes]]:
    if path.suffix == ".gz":  # no name and no time in the header: the same rows are the same bytes
        return gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
    if path.suffix == ".zst":
        return io.BufferedWriter(zstandard.ZstdCompressor(level=6).stream_writer(raw, closefd=False), 1 << 20)
    return nullcontext(raw)


def write_json(path: Path, value: Any) -> None:
    """A JSON file, written atomically."""
    with atomic_file(path) as stream:
        stream.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def check_output(output: Path, inputs: Iterable[str | Path]) -> None:
    """Raise ValueError when an output is one of the inputs or has a name that would not be read back as lines."""
    if not output.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        raise ValueError(f"output {output}: the name must end in .jsonl, .jsonl.gz or .jsonl.zst; rename it")
    for path in inputs:
        if Path(path).exists() and output.resolve() == Path(path).resolve():
            raise ValueError(f"output {output} is also an input; inputs are never overwritten, choose another name")
