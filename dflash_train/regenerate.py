"""Replace every answer of a prompt set by what the frozen target says, so that the drafter learns the text it
will draft.

The output is append-only JSONL; a row is written as soon as its conversation is finished. A restart continues it: ids that are
present are skipped, a half-written last line is cut off, and a file that another generator began is refused. Where the backend knows
token ids, a row with one answer carries the exact `prompt_ids` and `response_ids`, and a row with several carries them per turn
in `turn_ids`, each turn having seen the new answers before it; elsewhere a row is its `messages`.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import IO, Any

from tqdm import tqdm

from dflash_train import stop
from dflash_train.config.schema import Api, Recipe
from dflash_train.config.schema import Backend as BackendName
from dflash_train.data.template import NotEncodable
from dflash_train.generation.base import Answer, Backend
from dflash_train.generation.conversation import Work, accept, advance, next_request, size
from dflash_train.generation.job import Job, open_job
from dflash_train.generation.output import (
    Counts,
    cut_half_line,
    failed_path,
    line_of,
    lock,
    read_done,
    totals,
    write_manifest,
)
from dflash_train.generation.tool_calls import RESULT_ROLES, as_message, call_as_text, tool_names

FIRST_FAILURES = 8  # requests that must fail before a run without any success is given up, if fewer are in flight
FIRST_UNPARSED = 8  # the same for tool calls that a server returns as plain text
TOOL_PARSER = (
    "start the server with its tool parser (vLLM: --enable-auto-tool-choice --tool-call-parser NAME; SGLang: --tool-call-parser NAME; "
    "llama.cpp: --jinja), or set regenerate.api=completions"
)


def regenerate(recipe: Recipe, backend: Backend | None = None) -> dict[str, Any]:
    """Run `recipe.regenerate` to its end and return the manifest, which is also written to `<output>.manifest.json`.

    `backend` answers; by default the one that the recipe names. It is closed at the end, whatever happens. Conversations that
    fail go to `<output>.failed.jsonl` with a reason and are tried again by the next run. After a request to stop (see `stop`) or any
    error, finished rows are in the output and the manifest says `complete: false`.
    Raises ValueError for prompts that cannot be read, too many unusable ones, an output that another generator began, and a backend of
    which the first answers all fail for one reason.
    """
    run = Run(time.monotonic())
    with stop.listening(), contextlib.ExitStack() as held:
        if backend is not None:
            held.callback(backend.close)
        job = open_job(recipe)
        held.enter_context(lock(job.output))
        done = read_done(job.output, job.description, job.conversations)
        pending = [conversation for conversation in job.conversations if conversation.id not in done]
        there = len(job.conversations) - len(pending)
        print(f"prompts: {job.kept.table()}\n{there} of them are already in {job.output}", file=sys.stderr, flush=True)
        if pending and backend is None:
            backend = open_backend(job)
            held.callback(backend.close)
        failed_path(job.output).unlink(missing_ok=True)
        waiting = deque(job.begin(conversation) for conversation in pending)
        if recipe.regenerate.backend is BackendName.transformers:
            waiting = deque(sorted(waiting, key=size))  # its batches are padded
        try:
            if waiting:
                assert backend is not None
                # What a killed run leaves.
                write_manifest(job.output, {"output": job.output.name, "complete": False, "generator": job.description})
                with job.output.open("ab") as rows, run.progress(len(waiting), recipe.track.progress):
                    run.answer_all(job, waiting, backend, rows)
            run.complete = True
        finally:
            if backend is not None:
                run.stats = backend.stats()
            cut_half_line(job.output)
            if not run.complete:
                print(
                    f"stopped after {run.new.rows} new rows; the same command continues {job.output}", file=sys.stderr
                )
            manifest = run.manifest(job)
            try:
                write_manifest(job.output, manifest)
            except OSError as error:
                if run.complete:
                    raise
                # The manifest of the beginning says `complete: false` too; what stopped the run is what counts.
                print(f"{job.output}: no new manifest ({error.strerror})", file=sys.stderr)
    return manifest


def open_backend(job: Job) -> Backend:
    """What `regenerate.backend` names, ready to answer. Its libraries are imported only now."""
    recipe = job.recipe
    if recipe.regenerate.backend is BackendName.openai:
        from dflash_train.generation.openai import OpenAIBackend

        return OpenAIBackend(recipe, job.tokenizer)
    if recipe.regenerate.backend is BackendName.vllm:
        from dflash_train.generation.vllm import VllmBackend

        return VllmBackend(recipe, job.target, job.tokenizer)
    from dflash_train.generation.embedded import Embedded

    return Embedded(recipe, job.target, job.tokenizer)


class Run:
    """One call of `regenerate`: the loop, and what it counts on the way."""

    def __init__(self, started: float):
        self.started = started
        self.complete = False
        self.new = Counts()
        self.failed = 0
        self.notes: Counter[str] = Counter()
        self.stats: dict[str, Any] = {}
        self.bar: tqdm | None = None
        self.answered = 0  # requests with an answer
        self.unanswered = 0
        self.reasons: dict[str, str] = {}  # kind -> the first reason of that kind
        self.parsed_calls = self.unparsed_calls = 0

    def answer_all(self, job: Job, waiting: deque[Work], backend: Backend, rows: IO[bytes]) -> None:
        """Keep up to `backend.capacity` requests in flight until every conversation has its row or a reason why not.

        A conversation that goes on comes before one that has not begun. `waiting` is used up, so that finished ones leave the memory.
        """
        config = job.recipe.regenerate
        in_flight: dict[int, Work] = {}
        key = 0
        while waiting or in_flight:
            while waiting and len(in_flight) < backend.capacity:
                work = waiting.popleft()
                if not advance(work, job.tokenizer, config.max_length, self.notes):
                    self.finish(job, work, rows)
                    continue
                backend.submit(key, next_request(work, config))
                in_flight[key] = work
                key += 1
            for answered, answer in backend.collect() if in_flight else ():
                work = in_flight.pop(answered)
                self.take(job, work, answer)
                if work.rest:
                    waiting.appendleft(work)
                else:
                    self.finish(job, work, rows)
                self.check_first(backend.capacity)

    def take(self, job: Job, work: Work, answer: Answer) -> None:
        """One answer into its conversation; where that fails, the conversation has an error and no rest."""
        work.tries = answer.tries
        if answer.error is not None:
            work.error, work.status, work.rest = answer.error, answer.status, []
            self.unanswered += 1
            self.reasons.setdefault(_kind(answer.error), answer.error)
            return
        self.answered += 1
        called = self.call_without_parser(job, work, answer)
        if called is not None:
            work.error = f"tool_call_in_text: the server returned a call of {called} as plain text; {TOOL_PARSER}"
            work.rest = []
            return
        try:
            accept(work, answer, job.tokenizer, self.notes)
        except NotEncodable as error:
            work.error, work.rest = f"not_encodable: the answer of {work.conversation.id}: {error}", []

    def call_without_parser(self, job: Job, work: Work, answer: Answer) -> str | None:
        """The function that an answer calls in its text although the server should have told calls apart; the recorded results would
        otherwise be lost without a word.
        """
        config, conversation = job.recipe.regenerate, work.conversation
        recorded = any(message["role"] in RESULT_ROLES for message in conversation.messages)
        parses = config.backend is BackendName.openai and config.api is Api.chat
        if not (parses and conversation.tools and recorded):
            return None
        message = as_message(answer.message)
        called = call_as_text(message, tool_names(conversation))
        self.parsed_calls += "tool_calls" in message
        self.unparsed_calls += called is not None
        return called

    def check_first(self, capacity: int) -> None:
        """Give up where nothing has worked yet and nothing says that it will."""
        if not self.answered and self.unanswered >= max(capacity, FIRST_FAILURES) and len(self.reasons) == 1:
            raise ValueError(
                f"the first {self.unanswered} requests all failed: {next(iter(self.reasons.values()))}; mend the backend (regenerate.backend and what "
                "belongs to it), then run the same command again"
            )
        if self.unparsed_calls >= FIRST_UNPARSED and not self.parsed_calls:
            raise ValueError(
                f"the server returned tool calls as plain text in {self.unparsed_calls} answers and told none apart; {TOOL_PARSER}"
            )

    def finish(self, job: Job, work: Work, rows: IO[bytes]) -> None:
        """Write the row, or why there is none, at once."""
        if work.error is None:
            row = job.row(work)
            rows.write(line_of(row))
            rows.flush()
            self.new.add(row)
        else:
            if not self.failed:
                print(f"first failure: {work.error}", file=sys.stderr, flush=True)
            self.failed += 1
            failure = {"id": work.conversation.id, "reason": work.error, "tries": work.tries}
            if work.status is not None:
                failure["status"] = work.status
            with failed_path(job.output).open("a", encoding="utf-8") as failures:
                failures.write(json.dumps(failure) + "\n")
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"{self.tokens_per_second:.0f} tokens/s, {self.new.truncated_share:.1%} truncated, {self.failed} failed",
                refresh=False,
            )
            self.bar.update()

    @contextlib.contextmanager
    def progress(self, total: int, shown: bool) -> Iterator[None]:
        """Rows, their rate and the time left, while the body runs."""
        with tqdm(total=total, desc="regenerating", unit="row", disable=not shown) as self.bar:
            yield

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def tokens_per_second(self) -> float:
        return self.new.tokens / self.seconds

    def manifest(self, job: Job) -> dict[str, Any]:
        """Counts of the whole output and of this run. complete: the run came to its end (`failed` conversations have no row)."""
        shard = job.recipe.regenerate.shard
        return {
            **totals(job.output),
            "complete": self.complete,
            "failed": self.failed,
            "prompts": job.kept.kept,
            "dropped_prompts": dict(job.kept.dropped),
            **({} if shard is None else {"shard": shard, "shard_prompts": len(job.conversations)}),
            "notes": dict(self.notes),
            "new_rows": self.new.rows,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "backend": self.stats,
            "generator": job.description,
        }


def _kind(reason: str) -> str:
    """A reason without the words that differ between two requests: addresses, numbers, ids."""
    return re.sub(r"\S*\d\S*|https?://\S+", "#", reason)
