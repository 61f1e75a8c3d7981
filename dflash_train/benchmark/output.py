"""A report as tables and as a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dflash_train import disk
from dflash_train.config.values import parse_json, printable

COLUMNS = (
    "workload",
    "n",
    "arm",
    "ok",
    "tok/s",
    "per req",
    "TTFT ms",
    "p99",
    "ITL ms",
    "p99",
    "e2e s",
    "p99",
    "accept",
    "speed-up",
    "verdict",
)
LEGEND = (
    "n: requests in flight; ok: requests that did not fail; tok/s: output tokens of all, per req: mean over requests; TTFT, e2e: p50, then p99;\n"
    "ITL: time per output token after the first, mean, then p99 over requests; accept: 1 + accepted drafts per pass of the target, pooled;\n"
    "speed-up against {baseline}, with its 95 % interval by resampling prompts"
)


def table(report: dict[str, Any]) -> str:
    """For a terminal: a line for each arm of each cell, and what must be said of them."""
    rows = [COLUMNS, *_rows(report)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    left = {0, 2, len(COLUMNS) - 2, len(COLUMNS) - 1}
    lines = [
        "  ".join(
            text.ljust(w) if i in left else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", LEGEND.format(baseline=report["baseline"]), *_notes(report)])


def markdown(report: dict[str, Any]) -> str:
    """The same as a Markdown table, with arms and settings."""
    escaped = [[text.replace("|", "\\|") for text in row] for row in _rows(report)]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in escaped]
    arms = [
        f"- {name}: {arm['model']}, {arm['engine'] or 'unknown engine'} {arm['engine_version'] or ''}".rstrip()
        for name, arm in report["arms"].items()
    ]
    sampling = ", ".join(
        f"{name} {value}" for name, value in report["settings"]["sampling"].items() if value is not None
    )
    settings = f"{report['settings']['num_prompts']} prompts a cell, seed {report['settings']['seed']}, {sampling}"
    legend = LEGEND.format(baseline=report["baseline"]).replace("\n", " ")
    return printable(
        "\n".join([*lines, "", *arms, f"- {settings}", *(f"- {note}" for note in _notes(report)), "", legend, ""])
    )


def write(report: dict[str, Any], path: Path) -> None:
    """As JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, ensure_ascii=False, separators=(",", ":"))
    disk.replace(
        path, [text.encode("utf-8", "backslashreplace"), b"\n"]
    )  # half a surrogate pair stays the escape that it was


def read(path: Path) -> dict[str, Any]:
    """A report that `write` wrote. Raises ValueError."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: no report of this benchmark")
    return found


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for cell in report["cells"]:
        for name, arm in cell["arms"].items():
            speed = cell["speed_up"].get(name)
            rows.append(
                (
                    printable(cell["workload"]),
                    str(cell["concurrency"]),
                    printable(name),
                    f"{arm['requests'] - arm['failed']}/{arm['requests']}",
                    _number(arm["tok_s"], 1),
                    _of(arm["per_request_tok_s"], "mean", 1),
                    *(_of(arm["ttft_s"], p, 0, 1000) for p in ("p50", "p99")),
                    *(_of(arm["itl_s"], p, 2, 1000) for p in ("mean", "p99")),
                    *(_of(arm["latency_s"], p, 2) for p in ("p50", "p99")),
                    _accept(arm),
                    *(("", "baseline") if name == report["baseline"] else _speed(speed)),
                )
            )
    return rows


def _accept(arm: dict[str, Any]) -> str:
    if arm["acceptance"] is not None and arm["acceptance"]["accept_len"] is not None:
        return f"{arm['acceptance']['accept_len']:.3f}" + ("d" if arm["acceptance"]["derived"] else "")
    if arm["accept_len_gauge"] is not None:
        return f"~{arm['accept_len_gauge']['value']:.2f}"
    return "-"


def _speed(speed: dict[str, Any] | None) -> tuple[str, str]:
    if speed is None:
        return "", "no baseline"
    if speed["value"] is None:
        return "-", speed["verdict"]
    interval = "" if speed["interval"] is None else " [{:.2f}, {:.2f}]".format(*speed["interval"])
    return f"{speed['value']:.2f}{interval}", speed["verdict"]


def _notes(report: dict[str, Any]) -> list[str]:
    """What the numbers do not say themselves."""
    arms = [(cell, name, arm) for cell in report["cells"] for name, arm in cell["arms"].items()]
    notes = []
    if any(arm["acceptance"] and arm["acceptance"]["derived"] for _, _, arm in arms):
        notes.append(
            "d: the engine gives either accepted drafts or passes; the other follows from the number of tokens (docs/benchmark.md)"
        )
    if any(arm["acceptance"] is None and arm["accept_len_gauge"] for _, _, arm in arms):
        notes.append("~: the engine's own average over a stretch that it does not tell, not of this cell alone")
    for name, arm in report["arms"].items():
        if arm["speculates"] is None and all(a["acceptance"] is None for _, n, a in arms if n == name):
            notes.append(
                f"{printable(name)}: acceptance is not reported, neither in answers nor as counters (docs/benchmark.md says how to switch them on)"
            )
    for cell, name, arm in arms:
        where = f"{printable(cell['workload'])} at {cell['concurrency']}, {printable(name)}"
        for error, count in sorted(arm["errors"].items(), key=lambda item: -item[1])[:3]:
            notes.append(f"{where}: {count} failed: {printable(error)}")
        if arm["retries"]:
            notes.append(
                f"{where}: {arm['retries']} requests were sent again (busy server, or a connection that it had closed); the time counts"
            )
        if "tokenizer" in arm["tokens_from"]:
            notes.append(f"{where}: tokens counted from the text, for want of usage")
        notes += [f"{where}: {note}" for note in arm["notes"]]
    repeated = {c["workload"]: f"{c['different_prompts']} different prompts for {c['prompts']}" for c in report["cells"]
                if c["different_prompts"] < c["prompts"]}  # fmt: skip
    if repeated:
        which = "; ".join(f"{printable(name)}: {text}" for name, text in repeated.items())
        notes.append(f"prompts were asked again ({which}): a server with a prefix cache knows them by then")
    once = sorted({cell["concurrency"] for cell in report["cells"] if cell["parts"] == 1 and len(cell["arms"]) > 1})
    if once:
        notes.append(
            f"at {', '.join(map(str, once))} in flight the arms ran one after another, so drift of the machine may be part of the speed-up: "
            "more --num-prompts lets them take turns"
        )
    if len(report.get("joined", ())) > 1:
        notes.append(
            "the arms come from several files: drift of the machine from one to the next may be part of the speed-up"
        )
    if report["error"]:
        notes.append(f"ENDED EARLY: {printable(report['error'])}")
    return notes


def _of(figures: dict[str, float] | None, which: str, digits: int, times: float = 1.0) -> str:
    return "-" if figures is None else _number(figures[which] * times, digits)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
