"""Replace every answer of a prompt set by what the frozen target says, so that the drafter learns the text it
will draft.

The output is append-only JSONL. A restart continues it: ids that are present are skipped, a half-written last
line is cut off, and a file that another generator began is refused. A row with one answer carries the exact
`prompt_ids` and `response_ids`; a row with several carries them per turn in `turn_ids`, each turn having seen
the new answers before it.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import jinja2
import torch
from tqdm import tqdm

from dflash_train.assets import resolve
from dflash_train.config.schema import Recipe, RegenerateConfig
from dflash_train.data.chat import load_tokenizer, prompt_ids, template_hash
from dflash_train.data.read import read_conversations
from dflash_train.target.cache import make_cache
from dflash_train.target.hf import load_model
from dflash_train.types import Conversation

# Written anew for each row; whatever an input row says about them belongs to the answers that are replaced.
REPLACED = {"turn_ids", "generator", "finish_reason"}


@dataclass(kw_only=True)
class Request:
    """One answer to generate: at most `max_new_tokens` after `prompt_ids`, sampled with `seed`."""

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int


@dataclass(kw_only=True)
class Answer:
    """Generated ids including the stop token; finish_reason is "stop" or "length". `error` is set instead
    where it failed.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    error: str | None = None


Generate = Callable[[list[Request]], list[Answer]]


def regenerate(recipe: Recipe, generate: Generate | None = None) -> dict[str, Any]:
    """Run `recipe.regenerate` to its end and return the manifest, which is also written to
    `<output>.manifest.json`.

    `generate` answers a batch of requests; by default the target itself, run here by transformers.
    Conversations that fail go to `<output>.failed.jsonl` with a reason and are tried again by the next run.
    Raises ValueError for prompts that cannot be read, too many unusable ones, or an output that another
    generator began.
    """
    config, started = recipe.regenerate, time.monotonic()
    target = resolve(recipe.target.path, "target")
    tokenizer = load_tokenizer(
        target, recipe.target.revision, recipe.target.trust_remote_code, recipe.data.chat_template
    )
    generator = describe_generator(recipe, tokenizer)
    conversations, kept = read_conversations(
        [resolve(config.prompts, "prompts")], limit=config.limit, need_answer=False
    )
    for conversation in [c for c in conversations if not c.messages]:
        kept.reject("no_messages", conversation.source)  # bare token ids: nothing to render again
        conversations.remove(conversation)
    kept.check(recipe.data.max_dropped)
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = _lock(output)
    done = _repair_and_read(output, generator)
    pending = [conversation for conversation in conversations if conversation.id not in done]
    print(
        f"prompts: {kept.table()}\n{len(conversations) - len(pending)} of them are already in {output}",
        file=sys.stderr,
        flush=True,
    )

    notes: Counter[str] = Counter()
    failed_path, failed, written, tokens = Path(f"{output}.failed.jsonl"), 0, 0, 0
    failed_path.unlink(missing_ok=True)
    if pending and generate is None:
        generate = embedded_generate(recipe, target, tokenizer)
    with (
        output.open("a", encoding="utf-8") as rows,
        tqdm(total=len(pending), desc="regenerating", unit="row", disable=not recipe.track.progress) as bar,
    ):
        for batch in _batches(pending, tokenizer, config):
            assert generate is not None
            for row, error in _answer_batch(batch, tokenizer, config, generate, generator, notes):
                if error is None:
                    rows.write(json.dumps(row, ensure_ascii=False) + "\n")
                    written, tokens = written + 1, tokens + _count_tokens(row)
                else:
                    failed += 1
                    with failed_path.open("a", encoding="utf-8") as failures:
                        failures.write(json.dumps({"id": row["id"], "reason": error}) + "\n")
            rows.flush()
            bar.update(len(batch))
            bar.set_postfix_str(f"{tokens / (time.monotonic() - started):.0f} tokens/s, {failed} failed")
    seconds = time.monotonic() - started
    manifest = {
        **_totals(output),
        "failed": failed,
        "prompts": kept.kept,
        "dropped_prompts": dict(kept.dropped),
        "notes": dict(notes),
        "new_rows": written,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "generator": generator,
        "max_new_tokens": config.max_new_tokens,
        "max_length": config.max_length,
    }
    Path(f"{output}.manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    lock.close()
    return manifest


def describe_generator(recipe: Recipe, tokenizer: Any) -> dict[str, Any]:
    """What defines the distribution of the answers; stored with every row and compared on a restart."""
    config = recipe.regenerate
    kwargs = dict(config.chat_template_kwargs)
    return {
        "model": recipe.target.path,
        "revision": recipe.target.revision,
        "template_hash": template_hash(tokenizer, kwargs),
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "seed": config.seed,
        "precision": recipe.target.precision.value,
        "chat_template_kwargs": kwargs,
    }


# --- one batch of conversations ---


@dataclass
class _Work:
    """A conversation on its way: what is settled so far, and what it still has to go through."""

    conversation: Conversation
    kwargs: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    rest: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    prompt: list[int] = field(default_factory=list)


def _prepare(conversation: Conversation, kwargs: dict[str, Any]) -> _Work:
    messages = conversation.messages
    if messages[-1]["role"] != "assistant":
        messages = [*messages, {"role": "assistant", "content": ""}]
    # An answer that nobody asked for (a greeting before the first question) is part of the prompt.
    first = next(i for i, message in enumerate(messages) if message["role"] in ("user", "tool"))
    return _Work(conversation, {**kwargs, **conversation.chat_template_kwargs}, messages[:first], messages[first:])


def _batches(pending: list[Conversation], tokenizer: Any, config: RegenerateConfig) -> Iterator[list[_Work]]:
    """Conversations with as many turns and about as much text, longest first: what does not fit shows at
    once.
    """
    works = [_prepare(conversation, dict(config.chat_template_kwargs)) for conversation in pending]

    def size(work: _Work) -> tuple[int, int, str]:
        turns = sum(message["role"] == "assistant" for message in work.rest)
        return -turns, -sum(len(m["content"]) for m in work.messages + work.rest), work.conversation.id

    works.sort(key=size)
    for i in range(0, len(works), config.batch_size):
        yield works[i : i + config.batch_size]


def _answer_batch(
    works: list[_Work],
    tokenizer: Any,
    config: RegenerateConfig,
    generate: Generate,
    generator: dict[str, Any],
    notes: Counter[str],
) -> list[tuple[dict[str, Any], str | None]]:
    """(row, None) or ({"id"}, reason) for each conversation, in order."""
    active = works
    while active := [work for work in active if _advance(work, tokenizer, config, notes)]:
        requests = [
            Request(
                prompt_ids=work.prompt,
                max_new_tokens=min(config.max_new_tokens, config.max_length - len(work.prompt)),
                seed=_seed(config.seed, work.conversation.id, len(work.turns)),
            )
            for work in active
        ]
        for work, answer in zip(active, generate(requests), strict=True):
            if answer.error is not None:
                work.error, work.rest = answer.error, []
                continue
            text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            work.messages.append({"role": "assistant", "content": text})
            work.turns.append(
                {"prompt_ids": work.prompt, "response_ids": answer.token_ids, "finish_reason": answer.finish_reason}
            )
            old = work.rest.pop(0)
            if work.rest and answer.finish_reason == "length":
                # The target would never see a cut answer closed by a turn end.
                notes["ended_at_cut_answer"] += 1
                work.rest = []
            elif work.rest and work.rest[0]["role"] in ("tool", "function", "ipython") and not _calls(old, text):
                # The recorded tool result answers a call that the target did not make.
                notes["ended_at_missing_tool_call"] += 1
                work.rest = []
    return [
        ({"id": work.conversation.id}, work.error) if work.error else (_row(work, generator), None) for work in works
    ]


def _advance(work: _Work, tokenizer: Any, config: RegenerateConfig, notes: Counter[str]) -> bool:
    """Go on to the next answer to generate and set its prompt; False if there is none."""
    while work.rest and work.rest[0]["role"] != "assistant":
        work.messages.append(work.rest.pop(0))
    if not work.rest:
        return False
    try:
        work.prompt = prompt_ids(work.messages, tokenizer, tools=work.conversation.tools, kwargs=work.kwargs)
    except (jinja2.TemplateError, TypeError) as error:
        work.error = f"template_error: {error}"
        return False
    if len(work.prompt) < config.max_length:
        return True
    if work.turns:
        notes["ended_at_max_length"] += 1
        while work.messages[-1]["role"] != "assistant":
            work.messages.pop()
    else:
        work.error = f"prompt_too_long: {len(work.prompt)} tokens, regenerate.max_length {config.max_length}"
    return False


def _calls(old: dict[str, Any], text: str) -> bool:
    """Whether the new answer names every function that the old one called."""
    calls = [call.get("function", call) for call in old.get("tool_calls", [])]
    return bool(calls) and all(call["name"] in text for call in calls)


def _seed(seed: int, row_id: str, turn: int) -> int:
    """Depends on nothing but its arguments, so a row's answer does not depend on the batch it is in."""
    digest = hashlib.blake2b(json.dumps([seed, row_id, turn]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _row(work: _Work, generator: dict[str, Any]) -> dict[str, Any]:
    conversation = work.conversation
    row: dict[str, Any] = {key: value for key, value in conversation.metadata.items() if key not in REPLACED}
    row |= {"id": conversation.id, "domain": conversation.domain, "messages": work.messages}
    if conversation.tools is not None:
        row["tools"] = conversation.tools
    row["chat_template_kwargs"] = work.kwargs
    if len(work.turns) == 1:
        row["prompt_ids"], row["response_ids"] = work.turns[0]["prompt_ids"], work.turns[0]["response_ids"]
    else:
        row["turn_ids"] = work.turns
    return {**row, "finish_reason": work.turns[-1]["finish_reason"], "generator": generator}


# --- the output file ---


def _lock(output: Path) -> IO[bytes]:
    """The output, open and held by this process until it is closed or the process ends. Raises ValueError if another holds it:
    two would write each row twice."""
    stream = output.open("ab")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise ValueError(
            f"regenerate.output = {output}: another process is writing it; wait for it or name another file"
        ) from None
    return stream


def _repair_and_read(output: Path, generator: dict[str, Any]) -> set[str]:
    """Cut off a half-written last line and return the ids that are present."""
    if not output.exists():
        return set()
    done: set[str] = set()
    end = 0
    with output.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                row = json.loads(line)
                row_id, row_generator = row["id"], row["generator"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{output}:{number} was not written by regeneration; name another regenerate.output"
                ) from None
            if row_generator != generator:
                raise ValueError(
                    f"{output}:{number} comes from another generator\n  file:   {json.dumps(row_generator)}\n"
                    f"  recipe: {json.dumps(generator)}\nmove the file away or name another regenerate.output"
                )
            done.add(row_id)
    if end < output.stat().st_size:
        print(f"{output}: cut off a half-written last line", file=sys.stderr)
        with output.open("r+b") as stream:
            stream.truncate(end)
    return done


def _count_tokens(row: dict[str, Any]) -> int:
    return sum(len(turn["response_ids"]) for turn in row["turn_ids"]) if "turn_ids" in row else len(row["response_ids"])


def _totals(output: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    rows = tokens = truncated = 0
    with output.open("rb") as stream:
        for line in stream:
            digest.update(line)
            row = json.loads(line)
            rows, tokens = rows + 1, tokens + _count_tokens(row)
            truncated += row["finish_reason"] == "length"
    share = round(truncated / rows, 4) if rows else 0.0
    return {
        "output": output.name,
        "rows": rows,
        "tokens": tokens,
        "truncated": truncated,
        "truncated_share": share,
        "sha256": digest.hexdigest(),
    }
