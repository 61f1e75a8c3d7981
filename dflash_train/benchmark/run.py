"""The measurement: arms, cells (a workload at a number of requests in flight), turns of the arms, and the closed loop."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx
from tqdm import tqdm

from dflash_train import __version__
from dflash_train.benchmark import counters
from dflash_train.benchmark.figures import FORMAT, compare_arms, of_arm
from dflash_train.benchmark.stream import Record, Sampling, ServerGone, Target, ask
from dflash_train.benchmark.workloads import Prompt, digest, select
from dflash_train.config.values import check_range, is_address, parse_json, printable, server_root, without_login
from dflash_train.generation.openai import CONNECT_SECONDS, LANE, Lanes, named

WARM_UP_TOKENS = 64
MOST_PROMPTS, MOST_SECONDS = 10**6, 7 * 86400.0  # all prompts and what is kept of each request are in memory
BUSY = 0.7  # share of one core; above, events wait to be read
KEY_ENV = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One server. url: with or without /v1 at its end; model: None takes the only one that it serves; extra_body: fields added to every
    request."""

    name: str
    url: str
    model: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_address(self.url):
            raise ValueError(
                f"--arm {self.name}: {without_login(self.url)} is no address; give one such as http://localhost:8000"
            )

    @property
    def root(self) -> str:
        return server_root(self.url)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is made. concurrency: requests in flight, a cell for each; num_prompts: of each cell; parts: that a cell is cut into, the
    arms taking turns part by part, in reversed order each time; warm_up: requests before a cell, None as many as are in flight; seed: of the
    prompts' order, the samples and the intervals; first_turn_only: leave out the later turns of conversations, as dflash 0.1.0 does with
    servers; timeout_s: of one request; retries: of one that finds the server busy."""

    sampling: Sampling = field(default_factory=Sampling)
    concurrency: tuple[int, ...] = (1,)
    num_prompts: int = 128
    parts: int = 4
    warm_up: int | None = None
    seed: int = 42
    first_turn_only: bool = False
    timeout_s: float = 3600.0
    retries: int = 3

    def __post_init__(self) -> None:
        bad = [n for n in self.concurrency if n < 1]
        if bad or not self.concurrency or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(
                f"--concurrency {' '.join(map(str, self.concurrency))}: give different numbers from 1 on, such as 1 8 32 64"
            )
        check_range("--num-prompts", self.num_prompts, 1, MOST_PROMPTS)
        if self.num_prompts < max(self.concurrency):
            raise ValueError(
                f"--num-prompts {self.num_prompts}: there cannot be {max(self.concurrency)} requests in flight; give at least that many, "
                "better four times as many"
            )
        check_range("--parts", self.parts, 1, MOST_PROMPTS)
        check_range("--retries", self.retries, 0, 1000)
        check_range("--warmup", self.warm_up or 0, 0, MOST_PROMPTS)
        check_range("--seed", self.seed, 0, 2**63 - 1)
        if not 0 < self.timeout_s <= MOST_SECONDS:
            raise ValueError(f"--timeout-s {self.timeout_s:g}: must be above 0 and at most {MOST_SECONDS:g}, a week")
        s = self.sampling
        check_range("--max-new-tokens", s.max_new_tokens, 1, 2**31 - 1)
        check_range("--top-k", s.top_k, 0, 2**31 - 1)
        if not 0 <= s.temperature < math.inf or not 0 < s.top_p <= 1:
            raise ValueError(
                f"--temperature {s.temperature} --top-p {s.top_p}: temperature is at least 0, top_p above 0 and at most 1"
            )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "concurrency": list(self.concurrency)}


@dataclass(kw_only=True)
class _Open:
    """An arm that answers. info: what the report says of it; speculates there is None where it has no counters."""

    arm: Arm
    target: Target
    info: dict[str, Any]


@dataclass(kw_only=True)
class _Side:
    """What one arm did in one cell."""

    records: list[Record] = field(default_factory=list)
    wall: float = 0.0
    counted: list[counters.Acceptance] = field(default_factory=list)
    counting: bool = True  # every part could be counted
    notes: list[str] = field(default_factory=list)


def parse_arm(text: str) -> Arm:
    """`NAME=URL[,model=MODEL][,body={json}]`; body goes last, for it may hold commas. Raises ValueError."""
    name, _, rest = text.partition("=")
    rest, _, extra = rest.partition(",body=")
    url, *options = rest.split(",")
    found = dict(option.partition("=")[::2] for option in options)
    unknown = sorted(set(found) - {"model"})
    if not name.strip() or not url or unknown:
        what = f"unknown option {unknown[0]!r}" if unknown else "no name or no address"
        raise ValueError(
            f"--arm {without_login(text)}: {what}; give NAME=URL[,model=MODEL][,body={{...}}], such as plain=http://localhost:8000"
        )
    try:
        body = parse_json(extra) if extra else {}
    except ValueError as error:
        raise ValueError(f"--arm {name}: body is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise ValueError(f"--arm {name}: body must be a JSON object of fields for every request")
    return Arm(name=name.strip(), url=url, model=found.get("model"), extra_body=body)


def measure(
    arms: Sequence[Arm],
    workloads: dict[str, list[Prompt]],
    settings: Settings,
    *,
    baseline: str | None = None,
    count: Callable[[str], int] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Run every cell and return the report, a value of JSON (docs/benchmark.md).

    workloads: {name: prompts}, as `workloads.load` gives them. baseline: name of the arm that speed-ups are taken against, None the first.
    count: tokens of a text, for servers without usage. A server that goes away and Ctrl-C end the run: the report then holds what was
    measured until then, and says so in `error`.

    Raises ValueError where an arm does not answer, or serves another model than asked for.
    """
    names = [arm.name for arm in arms]
    if not arms or len(set(names)) < len(names):
        raise ValueError(f"--arm: {', '.join(names) or 'none'}; give at least one, each with a name of its own")
    baseline = baseline or names[0]
    if baseline not in names:
        raise ValueError(f"--baseline {baseline}: no such arm; there are {', '.join(names)}")
    report: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "settings": settings.as_dict(),
        "baseline": baseline,
        "arms": {},
        "cells": [],
        "error": None,
    }
    try:
        asyncio.run(_measure(report, list(arms), workloads, settings, count, progress))
    except ServerGone as gone:
        report["error"] = str(gone)
    except KeyboardInterrupt:
        report["error"] = "interrupted"
    return report


async def _measure(
    report: dict[str, Any],
    arms: list[Arm],
    workloads: dict[str, list[Prompt]],
    settings: Settings,
    count: Callable[[str], int] | None,
    progress: bool,
) -> None:
    key = os.environ.get(KEY_ENV, "").strip()
    client = httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        transport=Lanes(-(-max(settings.concurrency) // LANE)),
    )
    total = len(workloads) * len(settings.concurrency) * settings.num_prompts * len(arms)
    async with client:
        opened = [await _open(client, arm, count) for arm in arms]
        report["arms"] = {one.arm.name: one.info for one in opened}
        with tqdm(total=total, unit="prompt", disable=not progress, file=sys.stderr, smoothing=0.1) as bar:
            for (name, prompts), concurrency in itertools.product(workloads.items(), settings.concurrency):
                await _cell(report, client, opened, name, prompts, concurrency, settings, bar)


async def _open(client: httpx.AsyncClient, arm: Arm, count: Callable[[str], int] | None) -> _Open:
    shown = without_login(arm.root)
    try:
        response = await client.get(f"{arm.root}/v1/models", timeout=CONNECT_SECONDS)
    except httpx.HTTPError as error:
        raise ValueError(
            f"--arm {arm.name}: {shown} does not answer ({named(error)}); start the server, or correct the address"
        ) from None
    if response.status_code in (401, 403):
        raise ValueError(f"--arm {arm.name}: {shown} wants a key (HTTP {response.status_code}); set {KEY_ENV}")
    try:
        response.raise_for_status()
        served = {str(model["id"]): model for model in response.json()["data"]}
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"--arm {arm.name}: {shown}/v1/models gave HTTP {response.status_code} and no list of models; wait until the server is ready, or "
            "correct the address"
        ) from None
    model = arm.model or (next(iter(served)) if len(served) == 1 else None)
    if model not in served:
        asked = f"does not serve {arm.model}" if arm.model else "serves not one model"
        raise ValueError(
            f"--arm {arm.name}: {shown} {asked}; it serves {', '.join(served) or 'none'}: give --model, or --arm NAME=URL,model=MODEL"
        )
    engine = str(served[model].get("owned_by") or "")
    now = await _counts(client, arm)
    info = {
        "url": shown,
        "model": model,
        "engine": engine,
        "engine_version": await _version(client, arm.root),
        "counters": None if now is None else now.place,
        "speculates": None if now is None else counters.speculative(now),
    }
    target = Target(
        client=client, url=f"{arm.root}/v1", model=model, engine=engine, extra_body=arm.extra_body, count=count
    )
    return _Open(arm=arm, target=target, info=info)


async def _version(client: httpx.AsyncClient, root: str) -> str | None:
    """As vLLM and TensorRT-LLM (/version), SGLang (/server_info) and llama.cpp (/props) tell it."""
    for place, name in (("/version", "version"), ("/server_info", "version"), ("/props", "build_info")):
        try:
            response = await client.get(root + place, timeout=CONNECT_SECONDS)
            if response.status_code == 200 and isinstance(found := response.json().get(name), str):
                return found
        except (httpx.HTTPError, ValueError, AttributeError):
            continue
    return None


async def _counts(client: httpx.AsyncClient, arm: Arm) -> counters.Counts | None:
    try:
        return await counters.settled(client, arm.root)
    except httpx.HTTPError:
        return None


async def _cell(
    report: dict[str, Any],
    client: httpx.AsyncClient,
    arms: list[_Open],
    name: str,
    prompts: list[Prompt],
    concurrency: int,
    settings: Settings,
    bar: tqdm,
) -> None:
    """Warm up every arm, let them take turns, and add the cell to the report, whatever becomes of it."""
    warm_up = concurrency if settings.warm_up is None else settings.warm_up
    chosen = select(prompts, settings.num_prompts + warm_up, settings.seed)
    measured, warming = list(enumerate(chosen[: settings.num_prompts])), list(enumerate(chosen[settings.num_prompts :]))
    # A part must keep `concurrency` requests in flight for most of its time.
    number = max(1, min(settings.parts, settings.num_prompts // (2 * concurrency)))
    parts = [measured[len(measured) * i // number : len(measured) * (i + 1) // number] for i in range(number)]
    sides = {one.arm.name: _Side() for one in arms}
    try:
        for one in arms:
            bar.set_description(f"{name} at {concurrency}, {one.arm.name}, warm-up")
            await _loop(one, warming, -1, concurrency, _shortened(settings), [])
        for part, jobs in enumerate(parts):
            for one in arms if part % 2 == 0 else arms[::-1]:
                bar.set_description(f"{name} at {concurrency}, {one.arm.name}")
                await _part(client, one, jobs, part, concurrency, settings, sides[one.arm.name], bar)
    except ServerGone as gone:
        raise ServerGone(f"{name} at {concurrency} in flight: {gone}; what was measured until then is kept") from None
    finally:
        cell: dict[str, Any] = {
            "workload": name,
            "concurrency": concurrency,
            "prompts": settings.num_prompts,
            "different_prompts": len({prompt.id for _, prompt in measured}),
            "prompts_sha256": digest([prompt for _, prompt in measured]),
            "parts": number,
            "arms": {name: _figures(side) for name, side in sides.items()},
        }
        for one in arms:
            arm = cell["arms"][one.arm.name]
            if arm["acceptance"] is None and one.info["speculates"] is not False and arm["requests"] > arm["failed"]:
                arm["accept_len_gauge"] = await _gauge(client, one.arm)
        compare_arms(cell, report["baseline"], seed=settings.seed)
        report["cells"].append(cell)


def _figures(side: _Side) -> dict[str, Any]:
    counted = counters.pooled(side.counted) if side.counting else None
    return {
        **of_arm(side.records, side.wall, counted),
        "accept_len_gauge": None,
        "notes": list(dict.fromkeys(side.notes)),
        "records": [asdict(record) for record in side.records],
    }


async def _gauge(client: httpx.AsyncClient, arm: Arm) -> dict[str, Any] | None:
    try:
        found = await counters.gauge(client, arm.root)
    except httpx.HTTPError:
        return None
    return None if found is None else {"value": found[0], "source": found[1]}


def _shortened(settings: Settings) -> Settings:
    tokens = min(WARM_UP_TOKENS, settings.sampling.max_new_tokens)
    return replace(settings, sampling=replace(settings.sampling, max_new_tokens=tokens), first_turn_only=True)


async def _part(
    client: httpx.AsyncClient,
    one: _Open,
    jobs: list[tuple[int, Prompt]],
    part: int,
    concurrency: int,
    settings: Settings,
    side: _Side,
    bar: tqdm,
) -> None:
    """One arm in one part: its counters, the requests, its counters again."""
    before = await _counts(client, one.arm)
    records: list[Record] = []
    began, busy = time.perf_counter(), time.process_time()
    try:
        await _loop(one, jobs, part, concurrency, settings, records, bar)
    finally:
        wall, busy = time.perf_counter() - began, time.process_time() - busy
        side.wall += wall
        if busy > BUSY * wall:
            side.notes.append(
                f"this client was busy {busy / wall:.0%} of the time: the figures may be its own, not the server's"
            )
        for record in records:
            if record.latency is None and record.error is None:
                record.error = "stopped before it was done"
        side.records += records
    if others := sorted(one.target.answered - {one.target.model}):
        side.notes.append(
            f"its answers are of {printable(', '.join(others[:3]))}, {printable(one.target.model)} was asked for"
        )
    after = await _counts(client, one.arm)
    if before is None or after is None:
        side.counting = False
        return
    good = [r for r in records if r.error is None]
    tokens = sum(r.tokens for r in good)
    try:
        written = counters.generated(before, after)
        found = counters.between(before, after, tokens=tokens, answers=len(good))
    except ValueError as error:
        side.notes.append(str(error))
        written = found = None
    # Requests that failed were drafted for too, but nobody knows what they yielded.
    side.counting = side.counting and (found is None or not found.derived or len(good) == len(records))
    if found is not None:
        side.counted.append(found)
    if written is not None and abs(written - tokens) > 0.01 * tokens and len(good) == len(records):
        side.notes.append(f"the engine wrote {written} tokens in a part, {tokens} came here: was it serving others?")


async def _loop(
    one: _Open,
    jobs: list[tuple[int, Prompt]],
    part: int,
    concurrency: int,
    settings: Settings,
    records: list[Record],
    bar: tqdm | None = None,
) -> None:
    """Hold all conversations, `concurrency` at any time: who is done begins the next. Records are added as requests begin. Raises ServerGone."""
    waiting, began = iter(jobs), time.perf_counter()

    async def worker() -> None:
        for index, prompt in waiting:
            messages = list(prompt.messages)
            for turn, following in enumerate([*([] if settings.first_turn_only else prompt.then), None]):
                record = Record(prompt=prompt.id, turn=turn, part=part, started=time.perf_counter() - began)
                records.append(record)
                answer = await ask(
                    one.target,
                    messages,
                    settings.sampling,
                    record=record,
                    seed=_seed(settings.seed, index, turn),
                    timeout_s=settings.timeout_s,
                    retries=settings.retries,
                )
                if record.error is not None:
                    break
                if following is not None:
                    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
            if bar is not None:
                bar.update()

    tasks = [asyncio.create_task(worker()) for _ in range(min(concurrency, len(jobs)))]
    try:
        await asyncio.gather(*tasks)
    except ServerGone as gone:
        raise ServerGone(f"arm {one.arm.name} ({one.info['url']}) is gone: {gone}") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _seed(seed: int, index: int, turn: int) -> int:
    """Of one request: the same for every arm, another for each prompt, though it be asked again."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}/{turn}".encode()).digest()[:4], "big")
