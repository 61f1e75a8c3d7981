"""Join the shards of a regeneration, after proving that they are the whole of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dflash_train.config.schema import Recipe
from dflash_train.config.values import parse_json
from dflash_train.disk import replace
from dflash_train.generation.conversation import advance
from dflash_train.generation.job import Job, open_job, shard_path
from dflash_train.generation.output import (
    answers_prompt,
    failed_path,
    lock,
    manifest_path,
    rows_of,
    totals,
    write_manifest,
)
from dflash_train.generation.provenance import in_shard

NAMED = 3  # ids that an error names of each kind


class Place(NamedTuple):
    """Where a row is: the shard's number, and offset and length in its file, in bytes."""

    shard: int
    offset: int
    length: int


@dataclass
class Faults:
    """What keeps one shard from being whole, as row ids."""

    missing: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def text(self) -> str:
        kinds = (
            ("missing", self.missing),
            ("there twice", self.doubled),
            ("not of this shard's prompts", self.foreign),
            ("with another prompt than regenerate.prompts has", self.changed),
        )
        return "; ".join(
            f"{len(ids)} {kind}: {', '.join(ids[:NAMED])}{', ...' if len(ids) > NAMED else ''}"
            for kind, ids in kinds
            if ids
        )


def merge(recipe: Recipe) -> dict[str, Any]:
    """Write the joined output in the order of the prompts, with its manifest, which is returned; a kill leaves the old file or the new one.

    The shards must hold each usable prompt once and nothing else, all of the recipe's generator. Prompts that the recipe itself can have no
    answer to (too long, refused by the template: found out again here) are listed in `<output>.failed.jsonl` as one run would.
    Raises ValueError that counts by shard what is missing, doubled or foreign and names the first ids; nothing is written then.
    """
    if recipe.regenerate.shard is not None:
        raise ValueError(f"regenerate.shard = {recipe.regenerate.shard}: --merge joins all shards; leave it out")
    output = Path(recipe.regenerate.output)
    count = _shard_count(output)
    paths = [shard_path(output, (i, count)) for i in range(count)]
    job = open_job(recipe)
    with ExitStack() as held:
        for path in [*paths, output]:
            if path.exists():
                held.enter_context(lock(path))
        places, faults = _find_rows(job, paths)
        unanswerable = _unanswerable(job, places)
        for conversation in job.conversations:
            if conversation.id not in places and conversation.id not in unanswerable:
                shard = next(i for i in range(count) if in_shard(conversation.id, (i, count)))
                faults[shard].missing.append(conversation.id)
        _check(output, paths, faults, Counter(place.shard for place in places.values()))
        _write(output, lambda: _joined(job, paths, places))
    if unanswerable:
        lines = [{"id": row_id, "reason": reason, "tries": 0} for row_id, reason in unanswerable.items()]
        replace(failed_path(output), [(json.dumps(line) + "\n").encode() for line in lines])
    else:
        failed_path(output).unlink(missing_ok=True)
    manifest = {
        **totals(output),
        "complete": True,
        "failed": len(unanswerable),
        "prompts": job.kept.kept,
        "dropped_prompts": dict(job.kept.dropped),
        "shards": [_summary(path) for path in paths],
        "generator": job.description,
    }
    write_manifest(output, manifest)
    return manifest


def _shard_count(output: Path) -> int:
    """n of the shard files beside the output. Raises ValueError where there are none, or of several n."""
    pattern = re.compile(rf"{re.escape(output.stem)}\.(\d+)-of-(\d+){re.escape(output.suffix)}")
    found = [match for path in sorted(output.parent.glob("*")) if (match := pattern.fullmatch(path.name))]
    counts = sorted({int(match[2]) for match in found})
    if len(counts) != 1:
        wanted = shard_path(output, (0, 4)).name
        what = f"shards of {', '.join(map(str, counts))} parts are there" if counts else f"no shard such as {wanted}"
        remedy = "move those of all but one away" if counts else "write them first with --shard i/n"
        raise ValueError(f"regenerate.output = {output}: {what}; {remedy}")
    return counts[0]


def _find_rows(job: Job, paths: list[Path]) -> tuple[dict[str, Place], list[Faults]]:
    """Where each prompt's row is, and what the shards hold beside them."""
    wanted = {conversation.id: conversation for conversation in job.conversations}
    places: dict[str, Place] = {}
    faults = [Faults() for _ in paths]
    for i, path in enumerate(paths):
        for offset, line, row in rows_of(path, job.description) if path.exists() else ():
            if row["id"] not in wanted or not in_shard(row["id"], (i, len(paths))):
                faults[i].foreign.append(row["id"])
            elif row["id"] in places:
                faults[i].doubled.append(row["id"])
            else:
                if not answers_prompt(row, wanted[row["id"]]):
                    faults[i].changed.append(row["id"])
                places[row["id"]] = Place(i, offset, len(line))
    return places, faults


def _unanswerable(job: Job, places: dict[str, Place]) -> dict[str, str]:
    """id -> reason of the prompts without a row that no run of this recipe can answer."""
    found = {}
    for conversation in job.conversations:
        if conversation.id not in places:
            work = job.begin(conversation)
            if not advance(work, job.tokenizer, job.recipe.regenerate.max_length, Counter()):
                assert work.error is not None
                found[conversation.id] = work.error
    return found


def _check(output: Path, paths: list[Path], faults: list[Faults], rows: Counter[int]) -> None:
    lines = []
    for i, (path, fault) in enumerate(zip(paths, faults, strict=True)):
        if text := fault.text():
            state = f"{rows[i]} rows" if path.exists() else "does not exist"
            lines.append(f"  shard {i}/{len(paths)}, {path.name} ({state}): {text}")
    if lines:
        raise ValueError(
            f"regenerate.output = {output}: its shards are not the whole of it\n"
            + "\n".join(lines)
            + "\nrun --shard i/n again for those that lack rows (it continues them); remove rows that are doubled or foreign"
        )


def _joined(job: Job, paths: list[Path], places: dict[str, Place]) -> Iterator[bytes]:
    """The rows in the order of the prompts."""
    with ExitStack() as opened:
        files = [opened.enter_context(path.open("rb")) if path.exists() else None for path in paths]
        for conversation in job.conversations:
            if conversation.id in places:
                place = places[conversation.id]
                stream = files[place.shard]
                assert stream is not None
                stream.seek(place.offset)
                yield stream.read(place.length)


def _write(output: Path, joined: Callable[[], Iterator[bytes]]) -> None:
    """Put the joined rows in the output's place. Raises ValueError where another file is there."""
    if not output.exists() or output.stat().st_size == 0:
        replace(output, joined())
        return
    with output.open("rb") as stream:
        there, made = hashlib.file_digest(stream, "sha256"), hashlib.sha256()
    for part in joined():
        made.update(part)
    if there.digest() != made.digest():
        raise ValueError(f"regenerate.output = {output} is there with other rows; move it away, then merge again")


def _summary(path: Path) -> dict[str, Any]:
    """What a shard's own manifest says of its last run."""
    try:
        manifest = dict(parse_json(manifest_path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # it only tells of a run; the rows themselves were checked
        return {"output": path.name}
    return {
        key: manifest[key]
        for key in ("output", "rows", "new_rows", "seconds", "tokens_per_second", "backend")
        if key in manifest
    }
