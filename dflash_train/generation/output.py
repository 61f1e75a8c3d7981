"""The file that regeneration appends to: held by one process, whole lines only, all of one generator."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from dflash_train.config.values import parse_json
from dflash_train.disk import replace
from dflash_train.types import Conversation


def manifest_path(output: Path) -> Path:
    return Path(f"{output}.manifest.json")


def failed_path(output: Path) -> Path:
    return Path(f"{output}.failed.jsonl")


def lock(output: Path) -> IO[bytes]:
    """The output, open and held by this process until it is closed or the process ends. Raises ValueError if another holds it:
    two would write each row twice."""
    output.parent.mkdir(parents=True, exist_ok=True)
    stream = output.open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ValueError(
            f"regenerate.output = {output}: another process is writing it; wait for it or name another file"
        ) from None
    return stream


def line_of(row: dict[str, Any]) -> bytes:
    """The row as a line of JSON."""
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold and UTF-8 cannot
        return (json.dumps(row) + "\n").encode()


def cut_half_line(output: Path) -> None:
    """Cut off a last line that was not written to its end."""
    size = end = output.stat().st_size
    with output.open("r+b") as stream:
        while end:
            start = max(0, end - 2**16)
            stream.seek(start)
            found = stream.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            print(f"{output}: cut off a half-written last line", file=sys.stderr)
            stream.truncate(end)


def rows_of(output: Path, description: dict[str, Any]) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """(offset, line, row) of each whole line. Raises ValueError for a line that regeneration did not write, or with another recipe."""
    offset = 0
    with output.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            if not _is_row(row):
                raise ValueError(f"{output}:{number} was not written by regeneration; name another regenerate.output")
            generator = row["generator"]
            if generator.get("recipe_hash") != description["recipe_hash"]:
                raise ValueError(_another_generator(f"{output}:{number}", generator, output, description))
            yield offset, line, row
            offset += len(line)


def _is_row(row: Any) -> bool:
    """Whether a value has what `finished_row` writes and is read here."""
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("id", "domain", "finish_reason")):
        return False
    generator, messages, turns = row.get("generator"), row.get("messages"), row.get("turn_ids", [])
    counted = [turn.get("response_ids") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    counted += [row["response_ids"]] if "response_ids" in row else []
    return (
        isinstance(generator, dict)
        and isinstance(generator.get("mixture", ""), str | list)
        and isinstance(messages, list)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
        and all(isinstance(ids, list) for ids in counted)
        and (bool(counted) or isinstance(row.get("response_tokens"), int))
    )


def answers_prompt(row: dict[str, Any], conversation: Conversation) -> bool:
    """Whether a row's system and user texts are those of the conversation, as far as the row goes."""
    asked, asks = (
        [m for m in messages if m["role"] in ("system", "user")]
        for messages in (row["messages"], conversation.messages)
    )
    return asked == asks[: len(asked)]


def read_done(output: Path, description: dict[str, Any], conversations: Iterable[Conversation] = ()) -> set[str]:
    """Cut off a half-written last line and return the ids that are present. Raises ValueError as `rows_of`, for an id that is there
    twice, and for rows that answer something else than the conversation with their id.
    """
    done: set[str] = set()
    prompts = {conversation.id: conversation for conversation in conversations}
    changed = []
    for _, _, row in rows_of(output, description):
        if row["id"] in done:
            raise ValueError(f"{output}: the id {row['id']!r} is there twice; delete one of the two rows")
        done.add(row["id"])
        if row["id"] in prompts and not answers_prompt(row, prompts[row["id"]]):
            changed.append(row["id"])
    if changed:
        raise ValueError(
            f"{output}: {len(changed)} rows answer other prompts than regenerate.prompts now has under their ids ({', '.join(changed[:3])}"
            f"{', ...' if len(changed) > 3 else ''}): the prompts were changed afterwards; take the change back, give changed prompts "
            "other ids, or name another regenerate.output"
        )
    cut_half_line(output)
    return done


def _another_generator(place: str, found: dict[str, Any], output: Path, description: dict[str, Any]) -> str:
    try:
        whole = parse_json(manifest_path(output).read_text(encoding="utf-8"))["generator"]
        whole = whole if isinstance(whole, dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        whole = {}
    if whole.get("recipe_hash") == found.get("recipe_hash"):
        found = whole  # with the whole mixture, where the row only has the setting that it drew
    differ = [
        key for key in {**found, **description} if found.get(key) != description.get(key) and key != "recipe_hash"
    ]
    return (
        f"{place} comes from another generator (differs in {', '.join(differ)})\n  file:   {json.dumps(found)}\n"
        f"  recipe: {json.dumps(description)}\nmove the file away or name another regenerate.output"
    )


def count_tokens(row: dict[str, Any]) -> int:
    """Generated tokens of a row."""
    if "turn_ids" in row:
        return sum(len(turn["response_ids"]) for turn in row["turn_ids"])
    return len(row["response_ids"]) if "response_ids" in row else row["response_tokens"]


def is_truncated(row: dict[str, Any]) -> bool:
    return row["finish_reason"] == "length"


class Counts:
    """Rows, generated tokens and rows whose last answer was cut."""

    def __init__(self) -> None:
        self.rows = self.tokens = self.truncated = 0

    def add(self, row: dict[str, Any]) -> None:
        self.rows += 1
        self.tokens += count_tokens(row)
        self.truncated += is_truncated(row)

    @property
    def truncated_share(self) -> float:
        return round(self.truncated / self.rows, 4) if self.rows else 0.0

    def as_dict(self) -> dict[str, Any]:
        counted = {"rows": self.rows, "tokens": self.tokens, "truncated": self.truncated}
        return {**counted, "truncated_share": self.truncated_share}


def totals(output: Path) -> dict[str, Any]:
    """Counts of the whole file, by domain and by setting of the mixture, with its hash."""
    digest, total = hashlib.sha256(), Counts()
    domains: dict[str, Counts] = {}
    mixture: dict[str, Counts] = {}
    with output.open("rb") as stream:
        for line in stream:
            digest.update(line)
            row = json.loads(line)
            total.add(row)
            domains.setdefault(row["domain"], Counts()).add(row)
            if "mixture" in row["generator"]:
                mixture.setdefault(row["generator"]["mixture"], Counts()).add(row)
    by = {"by_domain": {name: counts.as_dict() for name, counts in sorted(domains.items())}}
    if mixture:
        by["by_mixture"] = {name: counts.as_dict() for name, counts in sorted(mixture.items())}
    return {"output": output.name, **total.as_dict(), **by, "sha256": digest.hexdigest()}


def write_manifest(output: Path, manifest: dict[str, Any]) -> None:
    """Replace `<output>.manifest.json` in one step."""
    replace(manifest_path(output), [(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()])
