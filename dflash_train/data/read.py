"""JSON rows -> conversations. Rows are parsed one by one, so no row's fields depend on another's."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_train.config.values import RESERVED
from dflash_train.data.files import rows
from dflash_train.data.layouts import BadRow, decoded, find_messages
from dflash_train.types import Conversation

NAMED_FIELDS = {
    "id", "messages", "tools", "chat_template_kwargs", "domain", "finish_reason", "prompt_ids", "response_ids",
    "conversations", "prompt", "response",
}  # fmt: skip


@dataclass(kw_only=True)
class Kept:
    """What became of the rows of a data set.

    kept: usable rows; dropped: reason -> rows; examples: reason -> the first three "file:line"; notes: things
    that were done to kept rows (cut, reasoning not rendered), counted and never silent; origin: what is to be said of who wrote them.
    """

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    origin: list[str] = field(default_factory=list)

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

    def add(self, other: Kept) -> None:
        """Count what `other` counted, after this."""
        self.kept += other.kept
        self.dropped.update(other.dropped)
        self.notes.update(other.notes)
        for reason, places in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + places)[:3]

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
        if not share <= max_dropped:
            raise ValueError(
                f"share dropped {share:.3f} > max_dropped {max_dropped}; "
                f"mend the rows below or raise data.max_dropped\n"
                f"{self.table()}"
            )


def read_conversations(
    paths: Iterable[str | Path], *, limit: int | None = None, need_answer: bool = True
) -> tuple[list[Conversation], Kept]:
    """All conversations of `iter_conversations` with what became of the rows."""
    kept = Kept()
    found = [c for _, c in iter_conversations(paths, kept, limit=limit, need_answer=need_answer)]
    return found, kept


def iter_conversations(
    paths: Iterable[str | Path], kept: Kept, *, limit: int | None = None, need_answer: bool = True
) -> Iterator[tuple[int, Conversation]]:
    """(number of the path, conversation) of each usable row of files, folders and Hub data sets, in the order given.

    `files.rows` says what a path may be, `layouts` how a row may hold its conversation; or it holds `prompt_ids` and `response_ids`.
    Each row that cannot be used is counted in `kept` with a reason and its place. `limit` stops after that many usable rows.
    `need_answer=False` also accepts conversations without an assistant turn, which is what regeneration wants. A missing id becomes
    a hash of the content. A repeated id with the same content is dropped; with other content it gets a suffix (`#2`), so ids are
    unique. Raises ValueError for a file that cannot be opened.
    """
    # id -> the digest of its row, or of its rows where it was given twice.
    seen: dict[str, bytes | set[bytes]] = {}
    for number, path in enumerate(paths):
        for source, line in rows(path):
            if limit is not None and kept.kept >= limit:
                return
            notes: Counter[str] = Counter()
            try:
                conversation = _read_row(line, source, need_answer, notes, seen)
            except BadRow as error:
                kept.drop(str(error), source)
                continue
            kept.kept += 1
            kept.notes.update(notes)
            yield number, conversation


def _read_row(
    line: bytes | str, source: str, need_answer: bool, notes: Counter[str], seen: dict[str, bytes | set[bytes]]
) -> Conversation:
    if isinstance(line, str):
        raise BadRow(line)
    try:
        row = parse_line(line, notes)
        digest = _digest(row)
        conversation = _conversation(row, source, need_answer, notes)
    except RecursionError:
        raise BadRow("nested_too_deeply") from None
    if not isinstance(row.get("id"), str | int) or row["id"] == "":
        conversation.id = digest.hex()
    known = seen.get(conversation.id)
    if known is None:
        seen[conversation.id] = digest
        return conversation
    same_id = known if isinstance(known, set) else {known}
    if digest in same_id:
        raise BadRow("duplicate_id")
    same_id.add(digest)
    seen[conversation.id] = same_id
    number = len(same_id)
    while f"{conversation.id}#{number}" in seen:
        number += 1
    conversation.id = f"{conversation.id}#{number}"
    seen[conversation.id] = digest
    return conversation


def parse_line(line: bytes, notes: Counter[str]) -> dict[str, Any]:
    """The row of a line of JSON. Raises BadRow."""

    def missing(_: str) -> None:  # NaN and Infinity are not JSON; pandas writes NaN where nothing is
        notes["nan_read_as_null"] += 1

    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=missing)
        if b"\\ud" in line or b"\\uD" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRow("lone_surrogate") from None
    except ValueError:  # broken JSON, bytes that are not UTF-8, an integer of thousands of digits
        raise BadRow("invalid_json") from None
    if isinstance(row, list) and row and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in row):
        return {"messages": row}
    if not isinstance(row, dict):
        raise BadRow("not_an_object")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # which of the two values was meant cannot be known
        raise BadRow("duplicate_key")
    return found


def _digest(row: dict[str, Any]) -> bytes:
    content = {key: value for key, value in row.items() if key != "id"}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).digest()


# Written by regeneration. A table of rows fills what a row does not have with nulls, and holds what Parquet cannot as JSON strings.
RECORDED_FIELDS = ("prompt_ids", "response_ids", "turn_ids", "generator")


def _conversation(row: dict[str, Any], source: str, need_answer: bool, notes: Counter[str]) -> Conversation:
    recorded = {key: decoded(row[key]) for key in RECORDED_FIELDS if row.get(key) is not None}
    row = {key: value for key, value in row.items() if key not in RECORDED_FIELDS} | recorded
    conversation = Conversation(
        id=str(row.get("id", "")),
        source=source,
        domain=str(row.get("domain") or "default"),
        finish_reason=row.get("finish_reason"),
        chat_template_kwargs=decoded(row.get("chat_template_kwargs")) or {},
        tools=_tools(row),
    )
    if not isinstance(conversation.chat_template_kwargs, dict) or RESERVED & conversation.chat_template_kwargs.keys():
        raise BadRow("bad_chat_template_kwargs")
    if conversation.finish_reason is not None and not isinstance(conversation.finish_reason, str):
        raise BadRow("bad_finish_reason")
    has_ids = "prompt_ids" in row or "response_ids" in row
    if has_ids:
        conversation.prompt_ids, conversation.response_ids = (_ids(row, "prompt_ids"), _ids(row, "response_ids"))
        if not conversation.response_ids:
            raise BadRow("bad_ids")
    if "turn_ids" in row:
        _check_turns(row["turn_ids"])
    conversation.messages, used = find_messages(row, notes)
    conversation.metadata = {key: value for key, value in row.items() if key not in NAMED_FIELDS | used}
    if has_ids and not conversation.messages:
        return conversation  # used as it is; only regeneration, which rebuilds the conversation, cannot use such a row
    _check_roles(conversation, row, need_answer and not has_ids, not need_answer and not has_ids)
    return conversation


def _check_roles(conversation: Conversation, row: dict[str, Any], need_answer: bool, need_prompt: bool) -> None:
    if not conversation.messages:
        raise BadRow("text_without_turns" if isinstance(row.get("text"), str) else "no_messages")
    roles = {message["role"] for message in conversation.messages}
    if need_answer:
        answers = [m for m in conversation.messages if m["role"] == "assistant"]
        if not answers:
            raise BadRow("no_assistant_turn")
        if not any(m["content"].strip() or m.get("tool_calls") or m.get("reasoning_content") for m in answers):
            raise BadRow("empty_answer")
    if need_prompt and not roles & {"user", "tool"}:
        raise BadRow("no_prompt")


def _tools(row: dict[str, Any]) -> list[Any] | None:
    tools = decoded(row.get("tools")) or None
    if tools is None and isinstance(row.get("functions"), list):  # OpenAI's old name
        tools = [{"type": "function", "function": function} for function in row["functions"]] or None
    if tools is not None and not isinstance(tools, list):
        raise BadRow("bad_tools")
    found = tools and [decoded(tool) for tool in tools]
    if found and not all(isinstance(tool, dict) for tool in found):
        raise BadRow("bad_tools")
    return found


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
