"""Figures of a cell from its records, the speed-up of two arms with its interval, and files joined. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from dflash_train.acceptance import DRAWS, LEVEL, bootstrap
from dflash_train.benchmark.counters import Acceptance, pooled
from dflash_train.benchmark.stream import Record

FORMAT = "dflash_train.benchmark/1"
PERCENTILES = (50, 90, 99)
FEW = 6  # prompts; of fewer, no swap of arms is as rare as 5 %
EVERY = 12  # prompts of which all swaps are looked at


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """{mean, p50, p90, p99}, percentiles interpolated linearly; None of nothing."""
    if not values:
        return None
    found = np.percentile(np.asarray(values, np.float64), PERCENTILES)
    return {"mean": float(np.mean(values)), **{f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}}


def of_arm(records: Sequence[Record], wall: float, counted: Acceptance | None) -> dict[str, Any]:
    """Figures of one arm in one cell.

    wall: seconds in which its requests were under way, pauses between its turns left out. counted: what the engine's counters say. Failed
    requests count in `failed` alone.

    tok_s: output tokens / wall. per_request_tok_s: tokens / latency of each request. busy_tok_s: tokens / sum of latencies, what `speed_up`
    compares. itl: of each request, (time of the last text - time of the first) / (tokens - 1); its mean is the ratio of the sums. gap: time
    between two pieces of text, which may carry several tokens each. ttft, latency: of each request.
    """
    good = [r for r in records if r.error is None]
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    tokens, busy = sum(r.tokens for r in good), sum(r.latency or 0.0 for r in good)
    timed = [r for r in good if r.tokens > 1 and r.ttft is not None and r.last is not None and r.last > r.ttft]
    itl = spread([(r.last - r.ttft) / (r.tokens - 1) for r in timed])  # type: ignore[operator]
    if itl is not None:
        itl["mean"] = sum(r.last - r.ttft for r in timed) / sum(r.tokens - 1 for r in timed)  # type: ignore[operator,misc]
    acceptance = _chosen(good, counted)
    own = [r.engine_accept_len for r in good if r.engine_accept_len is not None]
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": errors,
        "retries": sum(r.tries - 1 for r in records),
        "wall_s": wall,
        "output_tokens": tokens,
        "tokens_from": sorted({r.tokens_from for r in good}),
        "tok_s": tokens / wall if wall > 0 else None,
        "busy_tok_s": tokens / busy if busy > 0 else None,
        "per_request_tok_s": spread([r.tokens / r.latency for r in good if r.latency]),
        "ttft_s": spread([r.ttft for r in good if r.ttft is not None]),
        "itl_s": itl,
        "gap_s": spread([gap for r in good for gap in r.gaps]),
        "latency_s": spread([r.latency for r in good if r.latency is not None]),
        "cut_off": sum(r.finish_reason == "length" for r in good),
        "acceptance": None if acceptance is None else acceptance.as_dict(),
        # The mean over requests of what the engine gave for each: what `dflash benchmark` prints.
        "engine_accept_len_mean": sum(own) / len(own) if own else None,
    }


def _chosen(good: Sequence[Record], counted: Acceptance | None) -> Acceptance | None:
    """What the answers told if all did, for nobody else's requests are in it; but the counters where those tell more of the same rounds, or
    the answers left something to be derived."""
    # An answer of one token needs no round and tells nothing.
    told = pooled(r.acceptance for r in good if r.acceptance is not None)
    if told is None or any(r.acceptance is None for r in good if r.tokens > 1):
        return counted
    if counted is None or counted.derived:
        return told
    same = (counted.rounds, counted.accepted) == (told.rounds, told.accepted)
    return counted if told.derived or same and told.per_position is None else told


def speed_up(base: Sequence[Record], arm: Sequence[Record], *, seed: int) -> dict[str, Any]:
    """How much faster `arm` writes than `base`, on the prompts that both answered whole.

    value: (tokens / sum of latencies) of arm / the same of base; with n requests always in flight that is the ratio of total throughputs, the
    last requests of a part left out, when fewer are under way. interval: 95 %, percentiles over resamples of the prompts, both arms of a prompt
    together, taken farther out where prompts are few (`_level`); None below two. A prompt that was asked several times, or has several turns, is one. by_part: the ratio in each part of the cell.
    same_answers: prompts that both answered with the same text.

    verdict: "faster" or "slower" where the interval excludes 1, swapping arms hardly ever gives as much (`_chance`), and every part agrees;
    "parts disagree" where they do not, so that something else than the arms changed meanwhile, which resampling prompts cannot see; "no
    difference shown" where the interval holds 1 or chance gives as much; "too few prompts" below FEW.
    """
    failed = {r.prompt for r in [*base, *arm] if r.error is not None}
    base = [r for r in base if r.prompt not in failed]
    arm = [r for r in arm if r.prompt not in failed]
    a, b = _by(base, lambda r: r.prompt), _by(arm, lambda r: r.prompt)
    both = sorted(a.keys() & b.keys())
    sums = np.array([[*a[id], *b[id]] for id in both], np.float64).reshape(-1, 4)
    ratio = lambda s: (s[:, 2] / s[:, 3]) / (s[:, 0] / s[:, 1])
    found: dict[str, Any] = {
        "value": None,
        "interval": None,
        "by_part": [],
        "pairs": len(both),
        "same_answers": sum(_answers(base, id) == _answers(arm, id) for id in both),
        "verdict": "no prompt was answered by both",
    }
    if not both:
        return found
    if not (sums.sum(0) > 0).all():
        return found | {"verdict": "nothing was written"}
    found["value"] = float(ratio(sums.sum(0, keepdims=True))[0])
    parts_a, parts_b = _by(base, lambda r: r.part), _by(arm, lambda r: r.part)
    parts = np.array([[*parts_a[i], *parts_b[i]] for i in sorted(parts_a.keys() & parts_b.keys())], np.float64)
    found["by_part"] = ratio(parts.reshape(-1, 4)).tolist()
    found["interval"] = bootstrap(sums, ratio, seed, DRAWS, _level(len(both)))
    if len(both) < FEW:
        return found | {"verdict": "too few prompts"}
    low, high = found["interval"]
    if low <= 1 <= high or _chance(sums, ratio, seed) > 1 - LEVEL:
        return found | {"verdict": "no difference shown"}
    faster = low > 1
    agree = all((value > 1) == faster for value in found["by_part"])
    return found | {"verdict": ("faster" if faster else "slower") if agree else "parts disagree"}


def _level(count: int) -> float:
    """The level whose percentile interval of `count` resampled prompts is as wide as Student's interval of LEVEL (Hesterberg, 2015,
    arXiv 1411.5279, section 5: the expanded percentile interval). Plain percentiles of 5 prompts called equal arms faster or slower in 17 %
    of simulated cells, of 16 in 10 %."""
    normal = NormalDist()
    z, v = normal.inv_cdf((1 + LEVEL) / 2), count - 1
    # Student's quantile by its expansion in 1 / v (Abramowitz and Stegun, 26.7.5): within 0.3 % from v = 4 on.
    t = (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
    return 2 * normal.cdf(t * math.sqrt(count / v)) - 1


def _chance(sums_P4: np.ndarray, ratio: Callable[[np.ndarray], np.ndarray], seed: int) -> float:
    """How often swapping the arms of prompts at random gives a ratio as far from 1 as theirs: of equal arms below 5 % in 5 % of cells at most,
    however few prompts there are and whatever their times look like. All swaps of few prompts, DRAWS of many."""
    count, change = len(sums_P4), sums_P4[:, 2:] - sums_P4[:, :2]
    every = count <= EVERY
    swapped = (
        np.arange(2**count)[:, None] >> np.arange(count) & 1
        if every
        else np.random.default_rng(seed).integers(2, size=(DRAWS, count))
    )
    moved = swapped @ change
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = np.abs(np.log(ratio(sums_P4.sum(0) + np.hstack([moved, -moved]))))
    as_far = int((drawn >= abs(math.log(ratio(sums_P4.sum(0, keepdims=True))[0])) - 1e-9).sum())
    return as_far / len(drawn) if every else (1 + as_far) / (1 + len(drawn))


def _by(records: Sequence[Record], key: Callable[[Record], Any]) -> dict[Any, tuple[float, float]]:
    """{key: (tokens, seconds)}."""
    found: dict[Any, tuple[float, float]] = {}
    for r in records:
        tokens, seconds = found.get(key(r), (0.0, 0.0))
        found[key(r)] = (tokens + r.tokens, seconds + (r.latency or 0.0))
    return found


def _answers(records: Sequence[Record], id: str) -> set[tuple[int, str]]:
    return {(r.turn, r.answer) for r in records if r.prompt == id}


def compare_arms(cell: dict[str, Any], baseline: str, *, seed: int) -> None:
    """Fill in `speed_up` of every arm of a cell but the baseline."""
    records = {name: [record_of(r) for r in arm["records"]] for name, arm in cell["arms"].items()}
    cell["speed_up"] = {
        name: speed_up(records[baseline], own, seed=seed)
        for name, own in records.items()
        if name != baseline and baseline in records
    }


def record_of(saved: dict[str, Any]) -> Record:
    """A record as a report holds it."""
    told = saved["acceptance"]
    return Record(**{**saved, "acceptance": None if told is None else Acceptance(**told)})


def joined(reports: Sequence[dict[str, Any]], baseline: str | None = None) -> dict[str, Any]:
    """One report from several, each of other arms on the same prompts with the same settings. baseline: None takes the first report's.

    Raises ValueError where prompts or settings differ, or an arm is there twice.
    """
    first = reports[0]
    for report in reports:
        if report.get("format") != FORMAT:
            raise ValueError(
                f"--compare: not a report of this benchmark (format {report.get('format')!r}, not {FORMAT!r})"
            )
        if report["settings"] != first["settings"]:
            both = first["settings"] | report["settings"]
            odd = sorted(k for k in both if first["settings"].get(k) != report["settings"].get(k))
            raise ValueError(f"--compare: the settings differ in {', '.join(odd)}: measure both with the same")
    names = [name for report in reports for name in report["arms"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"--compare: arm {', '.join(twice)} is in two files; name arms differently with --arm NAME=URL"
        )
    baseline = baseline or first["baseline"]
    if baseline not in names:
        raise ValueError(f"--baseline {baseline}: no such arm; there are {', '.join(names)}")
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    for report in reports:
        for cell in report["cells"]:
            key = (cell["workload"], cell["concurrency"])
            whole = cells.setdefault(key, {**cell, "arms": {}})
            if whole["prompts_sha256"] != cell["prompts_sha256"]:
                raise ValueError(
                    f"--compare: {key[0]} at {key[1]} was measured with other prompts: the two say nothing of each other"
                )
            whole["arms"] |= cell["arms"]
    for cell in cells.values():
        compare_arms(cell, baseline, seed=first["settings"]["seed"])
    return {
        **first,
        "baseline": baseline,
        "joined": [report["date"] for report in reports],
        "arms": {name: arm for report in reports for name, arm in report["arms"].items()},
        "cells": list(cells.values()),
        "error": next((report["error"] for report in reports if report["error"]), None),
    }


def failures(report: dict[str, Any], allowed: float) -> list[str]:
    """A line for each arm of a cell in which more than this share of the requests failed."""
    lines = []
    for cell in report["cells"]:
        for name, arm in cell["arms"].items():
            if arm["failed"] > allowed * arm["requests"]:
                worst = max(arm["errors"], key=arm["errors"].get)
                lines.append(
                    f"{cell['workload']} at {cell['concurrency']}, {name}: {arm['failed']} of {arm['requests']} requests failed; "
                    f"most often: {worst}"
                )
    return lines
