"""Generated tokens per second of the embedded backend on a CUDA GPU, and the share of time in which the GPU was idle.

    python scripts/bench_regenerate.py -c recipe.yaml [key=value ...]

Runs the prompts of `regenerate.prompts` with the recipe's settings through the backend alone (no file is written), the first half of a period
of profiling apart. Idle time is what no kernel covers, as torch.profiler saw it in the middle of the run.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from dflash_train.assets import resolve
from dflash_train.config.load import parse_command, require, run_command
from dflash_train.data.chat import load_tokenizer, prompt_ids
from dflash_train.data.read import read_conversations
from dflash_train.generation.base import Request
from dflash_train.generation.embedded import Embedded


def main(argv: list[str]) -> int:
    recipe = parse_command(argv, prog="scripts/bench_regenerate.py", description=__doc__ or "")
    require(recipe, "target.path", "regenerate.prompts")
    config = recipe.regenerate
    target = resolve(recipe.target.path, "target")
    tokenizer = load_tokenizer(target, recipe.target.revision, recipe.target.trust_remote_code)
    conversations, _ = read_conversations([resolve(config.prompts, "prompts")], limit=config.limit, need_answer=False)
    requests = []
    for number, conversation in enumerate(conversations):
        ids = conversation.prompt_ids
        if ids is None:
            last = max(i for i, message in enumerate(conversation.messages) if message["role"] == "user")
            ids = prompt_ids(conversation.messages[: last + 1], tokenizer, tools=None, kwargs={})
        if len(ids) + config.max_new_tokens <= config.max_length:
            requests.append(
                Request(
                    messages=[],
                    prompt_ids=ids,
                    max_new_tokens=config.max_new_tokens,
                    seed=number,
                    temperature=config.temperature,
                    top_p=config.top_p,
                    top_k=config.top_k,
                )
            )
    started = time.monotonic()
    backend = Embedded(recipe, target, tokenizer)
    loaded = time.monotonic()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "requests": len(requests),
        "load_seconds": round(loaded - started, 1),
    }
    report |= run(backend, requests)
    report |= backend.stats()
    if torch.cuda.is_available():
        report["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    backend.close()
    print(json.dumps(report, indent=2))
    return 0


def run(backend: Embedded, requests: list[Request]) -> dict[str, Any]:
    """Answer all requests, `backend.capacity` in flight; a profile is taken once a third of them is done."""
    started = time.monotonic()
    waiting = list(enumerate(requests))[::-1]
    in_flight = done = tokens = truncated = 0
    first: float | None = None
    idle: dict[str, Any] = {}
    while waiting or in_flight:
        while waiting and in_flight < backend.capacity:
            backend.submit(*waiting.pop())
            in_flight += 1
        if torch.cuda.is_available() and not idle and 3 * done > len(requests):
            idle, answers = profiled(backend)
        else:
            answers = backend.collect()
        first = first or time.monotonic()
        in_flight, done = in_flight - len(answers), done + len(answers)
        tokens += sum(len(answer.token_ids or []) for _, answer in answers)
        truncated += sum(answer.finish_reason == "length" for _, answer in answers)
    seconds = time.monotonic() - started
    return {
        "tokens": tokens,
        "truncated_share": round(truncated / max(1, done), 4),
        "seconds": round(seconds, 2),
        "first_answer_seconds": round((first or started) - started, 2),
        "tokens_per_second": round(tokens / seconds),
        **idle,
    }


def profiled(backend: Embedded, calls: int = 6) -> tuple[dict[str, Any], list[Any]]:
    """Several `collect`s under torch.profiler: the share of the time that no kernel or copy covers, and where the rest goes."""
    answers = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.synchronize()
        for _ in range(calls):
            answers += backend.collect()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0]
    by_name: dict[str, float] = {}
    for e in events:
        by_name[e.name[:60]] = by_name.get(e.name[:60], 0.0) + e.time_range.end - e.time_range.start
    top = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return {
        "profiled_ms": round(whole / 1e3, 1),
        "profiled_idle_share": round(1 - busy / whole, 4),
        "profiled_kernels_share": {name: round(time_us / whole, 4) for name, time_us in top},
    }, answers


if __name__ == "__main__":
    run_command(main)
