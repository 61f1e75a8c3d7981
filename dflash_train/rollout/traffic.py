"""The benchmark at the concurrency that is served, and the verdict for each class of traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dflash_train.advise import LEAST
from dflash_train.benchmark import figures
from dflash_train.rollout.pair import Outcome

ON, OFF, UNSURE = "on", "off", "unsure"
PLAIN, FAST = "plain", "speculative"
ONE_AT_A_TIME = "llama.cpp"  # its speculation does not scale with requests in flight (llama.cpp issue 27117)


def verdict(value: float | None, interval: Sequence[float] | None, least: float) -> str:
    """on: the whole interval gains `least`; off: the speed-up itself does not, or none was measured; unsure: it does, the interval reaches
    below. Without an interval (fewer than two prompts) nothing is on."""
    if value is None or value < least:
        return OFF
    return ON if interval is not None and interval[0] >= least else UNSURE


def judge_cells(report: dict[str, Any], least: float = LEAST) -> list[dict[str, Any]]:
    """One row per workload and concurrency of a benchmark report with the arms PLAIN and FAST."""
    rows = []
    for cell in report["cells"]:
        gain, fast = cell["speed_up"].get(FAST) or {}, cell["arms"][FAST]
        counted = fast["acceptance"] or {}
        gauge = fast.get("accept_len_gauge") or {}
        value, interval = gain.get("value"), gain.get("interval")
        said = verdict(value, interval, least)
        if said == ON and gain.get("verdict") in ("too few prompts", "parts disagree"):
            said = UNSURE
        rows.append(
            {
                "workload": cell["workload"],
                "concurrency": cell["concurrency"],
                "speed_up": value,
                "interval": list(interval) if interval else None,
                "pairs": gain.get("pairs", 0),
                "tau": counted.get("accept_len") or gauge.get("value"),
                "rounds": counted.get("rounds"),
                "per_position": counted.get("per_position_rate"),
                "tok_s": {name: cell["arms"][name]["tok_s"] for name in (PLAIN, FAST)},
                "verdict": said,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The verdicts as text."""
    width = max(len("traffic"), *(len(row["workload"]) for row in rows)) + 2
    lines = [
        f"{'traffic':<{width}}{'concurrency':>11}{'speed-up':>10}{'95 % interval':>16}{'tau':>7}{'tok/s':>9}  speculation"
    ]
    said = {ON: "on", OFF: "LEAVE OFF", UNSURE: "unsure, so leave off: measure more prompts"}
    for row in rows:
        interval = "-" if row["interval"] is None else "[{:.2f}-{:.2f}]".format(*row["interval"])
        gain = "-" if row["speed_up"] is None else f"{row['speed_up']:.2f}x"
        tau = "-" if row["tau"] is None else f"{row['tau']:.2f}"
        speed = row["tok_s"][FAST]
        lines.append(
            f"{row['workload']:<{width}}{row['concurrency']:>11}{gain:>10}{interval:>16}{tau:>7}{'-' if speed is None else f'{speed:.0f}':>9}  {said[row['verdict']]}"
        )
    return "\n".join(lines)


def traffic_step(report: dict[str, Any], engine: str, least: float) -> Outcome:
    """Passes if speculation is to be on for some class at some concurrency; the rows say where."""
    failed = figures.failures(report, 0.0)
    rows = judge_cells(report, least)
    on = [row for row in rows if row["verdict"] == ON]
    notes = list(failed)
    if engine == ONE_AT_A_TIME and any(row["concurrency"] > 1 for row in rows):
        notes.append(
            "llama.cpp: speculation does not scale with requests in flight; take its figures at concurrency 1, for a single user"
        )
    if report["error"]:
        return Outcome(
            ok=False, summary=f"the benchmark ended early: {report['error']}", facts={"rows": rows}, notes=notes
        )
    if failed:
        return Outcome(ok=False, summary=f"requests failed: {failed[0]}", facts={"rows": rows}, notes=notes)
    where, unsure = (_places(row for row in rows if row["verdict"] == said) for said in (ON, UNSURE))
    off = len(rows) - len(on)
    if on:
        summary = f"on for {where}"
    elif unsure:
        summary = f"no class was shown to gain {least:g}x; measure more prompts (--num-prompts) of {unsure}"
    else:
        summary = f"no class gains {least:g}x at any concurrency that was measured: leave speculation off"
    return Outcome(
        ok=bool(on),
        summary=summary + (f"; off for {off} of {len(rows)}" if on and off else ""),
        facts={"rows": rows},
        notes=notes,
    )


def _places(rows: Iterable[dict[str, Any]]) -> str:
    return ", ".join(sorted({f"{row['workload']} at {row['concurrency']}" for row in rows}))


def measured_tau(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """(tau pooled over rounds, the lowest of a class, the lowest speed-up) of the rows where speculation is on, else of all."""
    chosen = [r for r in rows if r["verdict"] == ON] or list(rows)
    known = [r for r in chosen if r["tau"]]
    if not known:
        return None, None, None
    weights = [r["rounds"] or 1 for r in known]
    pooled = sum(w * r["tau"] for w, r in zip(weights, known, strict=True)) / sum(weights)
    gains = [r["speed_up"] for r in known if r["speed_up"]]
    return pooled, min(r["tau"] for r in known), min(gains) if gains else None
