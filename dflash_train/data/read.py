"""JSONL files -> conversations. Rows are parsed one by one, so no row's fields depend on another's."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dflash_train.types import Conversation

ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
NAMED_FIELDS = {
    "id", "messages", "tools", "chat_template_kwargs", "domain", "finish_reason", "prompt_ids", "response_ids",
    "conversations", "prompt", "response",
}  # fmt: skip


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%-]+)?")
LINE_FILES = {".jsonl", ".json", ".gz", ".zst"}


class BadRow(Exception):
    """A row that cannot be used; the text is the reason it is counted under."""


@dataclass(kw_only=True)
class Kept:
    """What became of the rows of a data set.

    kept: usable rows; dropped: reason -> rows; examples: reason -> the first three "file:line"; notes: things
    that were done to kept rows (cut, reasoning not rendered), counted and never silent.
    """

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.kept + sum(self.dropped.values())

    def drop(self, reason: str, source: str) -> None:
        """Count a row that was never kept."""
        self.dropped[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < 3:
            places.append(source)

    def reject(self, reason: str, source: str) -> None:
        """Move a row that was counted as kept to the dropped ones (a later stage could not use it)."""
        self.kept -= 1
        self.drop(reason, source)

    def table(self) -> str:
        """Kept and dropped rows by reason, with the first places of each, as text."""
        lines = [f"kept {self.kept} of {self.total} rows"]
        for reason, count in self.dropped.most_common():
            lines.append(f"  dropped {count:>7}  {reason:<20} {', '.join(self.examples[reason])}")
        lines += [f"  note    {count:>7}  {note}" for note, count in self.notes.most_common()]
        return "\n".join(lines)

    def check(self, max_dropped: float) -> None:
        """Raise ValueError when no row is left or a larger share than `max_dropped` was dropped."""
        if self.kept <= 0:
            raise ValueError(f"0 usable rows of {self.total}\n{self.table()}")
        share = 1 - self.kept / self.total
        if share > max_dropped:
            raise ValueError(
                f"share dropped {share:.3f} > max_dropped {max_dropped}; "
                f"mend the rows below or raise data.max_dropped\n"
                f"{self.table()}"
            )


def read_conversations(
    paths: Iterable[str | Path], *, limit: int | None = None, need_answer: bool = True
) -> tuple[list[Conversation], Kept]:
    """Read JSONL files (plain, .gz or .zst), Parquet files and Hub data sets (`owner/name[:split]`) in the order given.

    A row holds `messages`, or `conversations` (ShareGPT), or `prompt` and `response` strings, or `prompt_ids`
    and `response_ids`. Blank lines are ignored; each row that cannot be used is counted in `Kept` with a
    reason and its place. `limit` stops after that many usable rows. `need_answer=False` also accepts
    conversations without an assistant turn, which is what regeneration wants. A missing id becomes a hash of
    the content. A repeated id with the same content is dropped; with other content it gets a suffix (`#2`),
    so ids are unique. Raises ValueError for a file that cannot be opened.
    """
    conversations: list[Conversation] = []
    kept = Kept()
    seen: dict[str, set[bytes]] = {}
    for path in paths:
        for source, line in _rows(path):
            if limit is not None and len(conversations) >= limit:
                return conversations, kept
            try:
                row = _parse(line)
                digest = _digest(row)
                conversation = _conversation(row, source, need_answer)
                if "id" not in row or not isinstance(row["id"], str | int):
                    conversation.id = digest.hex()
                if digest in seen.setdefault(conversation.id, set()):
                    raise BadRow("duplicate_id")
            except BadRow as error:
                kept.drop(str(error), source)
                continue
            same_id = seen[conversation.id]
            same_id.add(digest)
            if len(same_id) > 1:
                number = len(same_id)
                while f"{conversation.id}#{number}" in seen:
                    number += 1
                conversation.id = f"{conversation.id}#{number}"
                seen[conversation.id] = {digest}
            conversations.append(conversation)
            kept.kept += 1
    return conversations, kept


def _rows(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """(place, JSON) of each row: lines of a JSONL file; rows of a Parquet file or of a Hub data set `owner/name[:split]`."""
    text = str(path)
    if text.endswith(".parquet"):
        if not Path(path).is_file():
            raise ValueError(f"data file {path} does not exist; correct the path")
        yield from _from_datasets(text, "parquet", "train", data_files=text)
    elif HUB_ID.fullmatch(text) and not Path(path).exists() and Path(path).suffix not in LINE_FILES:
        name, _, split = text.partition(":")
        yield from _from_datasets(text, name, split or "train")
    else:
        yield from _lines(Path(path))


def _from_datasets(source: str, name: str, split: str, **options: Any) -> Iterator[tuple[str, bytes]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        rows = load_dataset(name, split=split, **options)
    except (DatasetsError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"data set {source} cannot be loaded: {reason}; give a JSONL or Parquet file, or owner/name:split"
        ) from error
    for number, row in enumerate(rows, start=1):
        # Columns fill what a row does not have with nulls: a message without tool calls must not get the key.
        yield f"{source}:{number}", json.dumps(_without_nulls(row), default=str).encode()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """("file:line", bytes) of each line that is not blank."""
    if not path.is_file():
        raise ValueError(
            f"data file {path} does not exist; correct the path, or write the file first (regeneration does)"
        )
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"data file {path} is not a complete gzip file ({error}); copy it again") from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        import zstandard

        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(reader)
    return path.open("rb")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise BadRow("invalid_json") from None
    if not isinstance(row, dict):
        raise BadRow("not_an_object")
    return row


def _digest(row: dict[str, Any]) -> bytes:
    content = {key: value for key, value in row.items() if key != "id"}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).digest()


def _conversation(row: dict[str, Any], source: str, need_answer: bool) -> Conversation:
    conversation = Conversation(
        id=str(row.get("id", "")),
        source=source,
        domain=str(row.get("domain") or "default"),
        finish_reason=row.get("finish_reason"),
        chat_template_kwargs=row.get("chat_template_kwargs") or {},
        tools=_decoded(row.get("tools")) or None,
        metadata={key: value for key, value in row.items() if key not in NAMED_FIELDS},
    )
    if not isinstance(conversation.chat_template_kwargs, dict):
        raise BadRow("bad_chat_template_kwargs")
    if conversation.tools is not None and not isinstance(conversation.tools, list):
        raise BadRow("bad_tools")
    has_ids = "prompt_ids" in row or "response_ids" in row
    if has_ids:
        conversation.prompt_ids, conversation.response_ids = (_ids(row, "prompt_ids"), _ids(row, "response_ids"))
        if not conversation.response_ids:
            raise BadRow("bad_ids")
    if "turn_ids" in row:
        _check_turns(row["turn_ids"])
    messages = _raw_messages(row)
    if not messages:
        if has_ids:  # used as they are; only regeneration, which rebuilds the conversation, cannot use such a row
            return conversation
        raise BadRow("no_messages")
    conversation.messages = [_message(message) for message in messages]
    roles = {message["role"] for message in conversation.messages}
    if need_answer and not has_ids and "assistant" not in roles:
        raise BadRow("no_assistant_turn")
    if not need_answer and not has_ids and not roles & {"user", "tool"}:
        raise BadRow("no_prompt")
    return conversation


def _raw_messages(row: dict[str, Any]) -> list[Any]:
    if isinstance(row.get("messages"), list):
        return row["messages"]
    if isinstance(row.get("conversations"), list):
        return [_from_sharegpt(message) for message in row["conversations"]]
    if isinstance(row.get("prompt"), str):
        answer = row.get("response")
        turns = [{"role": "user", "content": row["prompt"]}]
        return turns + ([{"role": "assistant", "content": answer}] if isinstance(answer, str) else [])
    return []


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict) or "from" not in message:
        return message
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    return {"role": SHAREGPT_ROLES.get(role, role), "content": message.get("value"), **rest}


def _message(message: Any) -> dict[str, Any]:
    """One message as templates want it: text content, decoded tool arguments, no null fields, other fields as
    they are.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadRow("bad_role")
    clean = {key: value for key, value in message.items() if value is not None}
    clean["content"] = _text(message.get("content"))
    if "tool_calls" in clean:
        clean["tool_calls"] = [_tool_call(call) for call in clean["tool_calls"] or []]
        if not clean["tool_calls"]:
            del clean["tool_calls"]
    return clean


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow("non_text_content")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow("non_text_content")
    return "".join(part["text"] for part in content)


def _tool_call(call: Any) -> dict[str, Any]:
    """Templates dump the arguments as JSON themselves; a string is decoded, not to be encoded twice.
    Null or an empty string is a call without arguments, as for the engines.
    """
    if not isinstance(call, dict):
        raise BadRow("bad_tool_call")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    if "arguments" not in call:
        return call
    arguments = call["arguments"]
    empty = arguments is None or (isinstance(arguments, str) and not arguments.strip())
    return {**call, "arguments": {} if empty else _decoded(arguments)}


def _decoded(value: Any) -> Any:
    """The object that a JSON string stands for; anything else, and text that is not an object or list, as it
    is.
    """
    if not isinstance(value, str):
        return value
    try:
        decoded = json.loads(value)
    except json.JSONDecodeError:
        return value
    return decoded if isinstance(decoded, dict | list) else value


def _ids(row: dict[str, Any], key: str) -> list[int]:
    ids = row.get(key)
    if not isinstance(ids, list) or any(type(token) is not int or token < 0 for token in ids):
        raise BadRow("bad_ids")
    return ids


def _check_turns(turns: Any) -> None:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("bad_ids")
    for turn in turns:
        _ids(turn, "prompt_ids")
        if not _ids(turn, "response_ids"):
            raise BadRow("bad_ids")
