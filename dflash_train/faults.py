"""What a run says and keeps of faults: steps that were skipped, memory that was not enough."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_train import disk, ranks
from dflash_train.config.load import CheckFailed
from dflash_train.config.schema import EngineKind, Recipe
from dflash_train.data.stream import RowStream
from dflash_train.engine.guard import Skip
from dflash_train.track import read_rows

SKIPPED = "skipped.jsonl"
GRACE = 3.0  # seconds in which the main thread may find out by itself that a rank is lost


def skipped_rows(skip: Skip, stream: RowStream, world_size: int) -> dict[str, Any]:
    """A skipped step with the documents it may be due to: of the micro-batches whose loss was not finite; of the whole step where every loss was.

    step: as in metrics.jsonl; cause: loss or gradient; ranks: whose loss it was; rows: ids of the documents of each row.
    """
    places = skip.losses or [
        (rank, i) for rank in range(world_size) for i in range(stream.micro_batches_per_rank(world_size))
    ]
    rows = [row for rank, i in places for row in stream.shares(skip.step - 1, rank, world_size)[1][i] if row]
    return {
        "step": skip.step,
        "cause": "loss" if skip.losses else "gradient",
        "ranks": sorted({rank for rank, _ in skip.losses}),
        "rows": [stream.documents(row) for row in rows],
    }


def skipped_line(record: dict[str, Any]) -> str:
    ids = [name for row in record["rows"] for name in row]
    shown = ", ".join(ids[:6]) + (f" and {len(ids) - 6} more" if len(ids) > 6 else "")
    on = f"loss of rank {', '.join(map(str, record['ranks']))}" if record["ranks"] else "gradient"
    return f"step {record['step']} skipped by all ranks: {on} not finite; documents {shown}"


def note_skips(folder: Path, skips: list[Skip], stream: RowStream) -> None:
    """Say which steps were skipped, and append them to folder/skipped.jsonl."""
    if not skips:
        return
    records = [skipped_rows(skip, stream, ranks.world_size()) for skip in skips]
    try:
        disk.append(folder / SKIPPED, "".join(json.dumps(record) + "\n" for record in records).encode())
    except OSError as error:
        print(f"{folder / SKIPPED} cannot be written ({error.strerror}); training goes on", file=sys.stderr, flush=True)
    for record in records:
        tqdm.write(skipped_line(record), file=sys.stderr)


def forget_skips(folder: Path, step: int) -> None:
    """Drop what is noted of steps after `step`, which will be done again."""
    path = folder / SKIPPED
    if path.exists():
        rows = [row for row in read_rows(path)[0] if row["step"] <= step]
        disk.replace(path, (f"{json.dumps(row)}\n".encode() for row in rows))


def stopped_message(most: int, step: int) -> str:
    return (
        f"step {step}: the {most} steps up to it (train.max_skipped_steps) were skipped, since a loss or the gradient was not finite; a "
        f"checkpoint of what was good before them is saved. {SKIPPED} names the documents: remove them if they are always the same, else lower "
        "optimizer.lr; train.resume=true goes on behind these steps"
    )


@contextmanager
def one_voice() -> Iterator[None]:
    """Around a command that many ranks run: what all of them would say is said by rank 0 alone, and a rank that is lost is missed once.

    Raises SystemExit instead of an error that is already reported, with the exit code that the error would have had. Where the main thread
    waits for a GPU that waits for the lost rank, another thread says it and ends the process.
    """
    ranks.watch(_end_without)
    try:
        yield
    except (ValueError, CheckFailed, OSError) as error:
        ranks.leave_note("error", str(error))
        if _said_by_another(str(error)):
            raise SystemExit(1 if isinstance(error, CheckFailed) else 2) from None
        raise
    except RuntimeError as error:
        if not ranks.is_lost(error):
            ranks.leave_note("error", str(error))
            raise
        # torchrun ends the ranks that are left as soon as it sees that one is gone; there is something to say first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ranks.give_up()
        if _known():
            raise SystemExit(1) from None
        raise CheckFailed(_lost_message(str(error).splitlines()[0])) from None
    finally:
        ranks.watch(None)


def _known() -> bool:
    """Whether somebody says why a rank is lost: that rank, whose own error explains it better, or one that missed it before this one."""
    others = (r for r in range(ranks.world_size()) if r != ranks.rank())
    return any(ranks.read_note("error", r, seconds=0.5) for r in others) or not ranks.first("lost")


def _lost_message(why: str) -> str:
    return (
        f"rank {ranks.rank()} lost contact with another rank ({why}): it was killed, ran out of host memory or did not "
        "answer within engine.timeout_minutes; what it said itself stands above. All ranks end; train.resume=true continues from the last "
        "checkpoint, and torchrun --max-restarts=N does so without being asked"
    )


def _end_without(why: str) -> None:
    """A rank is lost; end this one if its main thread does not."""
    time.sleep(GRACE)
    if _known():
        time.sleep(GRACE)  # it may be this rank that is about to say it
    else:
        print(f"failed: {_lost_message(why)}", file=sys.stderr, flush=True)
    os._exit(1)  # nothing that is left can be waited for


def _said_by_another(text: str) -> bool:
    if not ranks.met():  # so far the ranks of a machine have all read the same files
        return ranks.local_rank() > 0
    return ranks.rank() > 0 and ranks.read_note("error", 0, seconds=5.0) == text


NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "alloc_failed", "out of memory")


@contextmanager
def memory_explained(recipe: Recipe) -> Iterator[None]:
    """Turns running out of memory into a ValueError that names the knobs, the most effective first."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and not any(sign in text.lower() for sign in NO_MEMORY):
            raise
        first = text.splitlines()[0].split(". ")[0] if text else type(error).__name__
        raise ValueError(
            f"rank {ranks.rank()} ran out of memory while it trained ({first}). Lower, in this order: {', '.join(knobs(recipe))}"
        ) from error


def knobs(recipe: Recipe) -> list[str]:
    """What decides how much memory a step takes, with the present values."""
    train, engine = recipe.train, recipe.engine
    found = []
    if train.micro_batch_size > 1:
        found.append(f"train.micro_batch_size (now {train.micro_batch_size}; the numbers stay the same)")
    found += [
        f"train.num_anchors (now {train.num_anchors})",
        f"data.max_length (now {recipe.data.max_length})",
        f"objective.chunk_rows (now {recipe.objective.chunk_rows}; the numbers stay the same)",
    ]
    if engine.cuda_graphs and torch.cuda.is_available():
        found.append("engine.cuda_graphs (now true; the numbers stay the same)")
    if not engine.kind.shards and ranks.world_size() > 1:
        found.append(f"or shard the drafter over the ranks with engine.kind={EngineKind.fsdp2.value}")
    elif engine.kind.is_deepspeed and not engine.offload:
        found.append("or keep AdamW's state on the host with engine.offload=true")
    return found
