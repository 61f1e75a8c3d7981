"""A RunView as one HTML page that needs nothing else: no network, no second file, everything from the run escaped."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dflash_train import disk
from dflash_train.assets import html_page, public_name
from dflash_train.dashboard.alerts import alerts, part
from dflash_train.dashboard.charts import Series, bar_chart, interval_bar, line_chart, number, percent
from dflash_train.dashboard.run import CERTIFICATE, CONFIG, DECODED, EVALUATION, METRICS, UNEXPECTED, RunView, read_run
from dflash_train.metrics import slot_metric

PAGE = "report.html"  # its name in a run's folder
SAMPLES, SAMPLES_PER_DOMAIN, DRAWN_PIECES, RAW = 24, 4, 600, 20_000
LENGTH = "Tokens per target pass, the target's own (bonus) token included"
FEW = 5  # prompts; an interval of fewer is too narrow to be trusted
ALL = "all domains"
VERDICTS = {"identical": "identical to plain decoding", "near_tie": "near tie", "different": "NOT what plain decoding says"}  # fmt: skip


def write_report(folder: Path, output: Path | None = None, *, refresh: float | None = None) -> Path:
    """Make the page of a run's folder and return its path: report.html there, or `output`. A reader never sees half of it."""
    output = output or folder / PAGE
    page = run_page(read_run(folder), now=time.time(), refresh=refresh)
    output.parent.mkdir(parents=True, exist_ok=True)
    disk.sweep(output.parent, f".{output.name}.", ".partial")
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    partial.write_bytes(page.encode("utf-8", "replace"))
    partial.replace(output)
    return output


def run_page(view: RunView, *, now: float, refresh: float | None = None) -> str:
    """The page. now: seconds since 1970, stated on it; refresh: seconds after which it loads itself again, None: never."""
    name = view.folder.resolve().name
    drawn = [
        _drawn(draw, view, file)
        for draw, file in (
            (_tiles, EVALUATION), (_curves, METRICS), (_slots, EVALUATION), (_evaluation, EVALUATION), (_samples, DECODED), (_data, CERTIFICATE)
        )
    ]  # fmt: skip
    parts = [
        f'<h1 class="wrap">{escape(name)}</h1>',
        f'<p class="muted wrap">{_drawn(_about, view, CONFIG)}</p>',
        f'<p class="muted wrap">{_drawn(lambda v: _status(v, now), view, CONFIG)}</p>',
        *(
            f'<div class="{"alert" if a.bad else "note"}" role="{"alert" if a.bad else "note"}"><b>{escape(a.title)}.</b> {escape(a.text)}</div>'
            for a in alerts(view)
        ),
        *drawn,
    ]
    body = "".join(part for part in parts if part)
    again = "" if refresh is None else f' data-refresh="{refresh:g}"'
    return html_page(
        name, f"<main>\n{body}</main>", styles=("page.css", "report.css"), script="report.js", attributes=again
    )


def _drawn(draw: Callable[[RunView], str], view: RunView, file: str) -> str:
    """One part of the page; nothing, and a warning, where the file that it is made of holds something else."""
    try:
        return draw(view)
    except UNEXPECTED as error:
        view.not_as_written(file, error)
        return ""


# --- the head ---


def _about(view: RunView) -> str:
    target, drafter = view.setting("target.path"), view.config.get("drafter")
    texts = ["a drafter" + (f" for {public_name(target)}" if target else "")]
    if isinstance(drafter, dict):
        texts.append(f"block size {drafter['block_size']}, {drafter['num_hidden_layers']} layers")
        if not drafter["selector_rank"]:
            texts.append("no selector")
    if view.parameters:
        texts.append(f"{number(view.parameters)} parameters")
    return escape(" · ".join(texts))


def _status(view: RunView, now: float) -> str:
    asof = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if view.written is None or not view.curves:
        return f"No metrics yet, as of {asof}."
    total = view.total_steps
    steps = f"step {view.step:,}" + (f" of {total:,}" if total else "")
    if view.finished:
        return f"Finished: {steps}. Read at {asof}."
    return f"Under way or stopped: {steps}, {_ago(now - view.written)} when this was read at {asof}."


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for bound, unit, word in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h"), (float("inf"), 86400, "days")):
        if seconds < bound:
            return f"last line {seconds / unit:.0f} {word} old"
    raise AssertionError(seconds)


def _tiles(view: RunView) -> str:
    def shown(name: str) -> str | None:
        value = view.last(name)
        return None if value is None else f"{value:.2f}"

    measured, speed = view.measured or {}, view.last("perf/tokens_per_second")
    tau = (measured.get("tau_all") or {}).get("value")
    speedup = part(measured, "speedup", "cost.speedup")
    lossless = part(measured, "lossless", "losslessness.lossless")
    tiles = [
        ("base_accept_len, training", shown("train/base_accept_len")),
        ("accept_len, training", shown("train/accept_len")),
        ("walk tau, held out", shown("heldout/walk_tau")),
        ("tau, decoded", None if tau is None else f"{tau:.2f}"),
        ("speed against plain decoding", None if speedup is None else f"{speedup:.2f}x"),
        ("lossless", None if lossless is None else "yes" if lossless else "NO"),
        ("loss", shown("train/loss")),
        ("tokens per second", None if speed is None else number(speed)),
    ]
    cells = (
        f'<div class="tile"><b class="{"bad" if value == "NO" else "good"}">{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles
        if value is not None
    )
    return f'<section class="tiles">{"".join(cells)}</section>\n'


# --- curves ---


def _curves(view: RunView) -> str:
    drawn: set[str] = set()

    def of(*names: str, labels: Sequence[str] | None = None) -> list[Series]:
        drawn.update(names)
        return [
            Series(label=label, points=view.curves.get(name, []))
            for name, label in zip(names, labels or [n.split("/")[-1] for n in names], strict=True)
        ]

    def domains(name: str) -> list[Series]:
        names = sorted(n for n in view.curves if n.startswith(f"{name}/"))
        return of(*names, labels=[n.removeprefix(f"{name}/") for n in names])

    drawn.update(n for n in view.curves if re.search(r"/slot_\d+$", n))
    times = sorted(n for n in view.curves if re.fullmatch(r"perf/.*(seconds|time|share|_ms).*", n))
    groups = [
        (
            "Acceptance",
            [
                line_chart(
                    "Accept length, training",
                    of("train/base_accept_len", "train/accept_len"),
                    note=f"{LENGTH}, at uniformly drawn anchors. base: without the selector.",
                ),
                line_chart(
                    "Walk tau, held out",
                    of("heldout/base_walk_tau", "heldout/walk_tau"),
                    note=f"{LENGTH}, over the rounds that decoding would take.",
                ),
                line_chart("Walk tau by domain, held out", domains("heldout/walk_tau")),
                line_chart("Accept length, held out", of("heldout/base_accept_len", "heldout/accept_len")),
            ],
        ),
        (
            "Learning",
            [
                line_chart("Loss", of("train/loss", "train/base_loss", "train/selector_loss")),
                line_chart(
                    "Accuracy over all slots",
                    of("train/base_accuracy", "train/accuracy", "train/candidate_recall"),
                    form=percent,
                ),
                line_chart("Learning rate", of("train/lr"), zero=True),
                line_chart("Gradient norm before clipping", of("train/grad_norm"), zero=True),
            ],
        ),
        (
            "Speed",
            [
                line_chart("Tokens per second", of("perf/tokens_per_second"), zero=True),
                line_chart("Blocks per second", of("perf/blocks_per_second"), zero=True),
                line_chart("Memory, GiB at most", of("perf/memory_gib"), zero=True),
                line_chart("Where the time goes", of(*times), zero=True),
                line_chart("Share of the GPU's arithmetic", of("perf/mfu"), form=percent, zero=True),
            ],
        ),
    ]
    drawn.add("train/epoch")
    rest = [
        line_chart(f"{title} by domain, held out", domains(f"heldout/{name}"))
        for name, title in (
            ("base_walk_tau", "Base walk tau"), ("accept_len", "Accept length"), ("base_accept_len", "Base accept length")
        )
    ]  # fmt: skip
    rest += [line_chart(name, of(name)) for name in sorted(set(view.curves) - drawn)]
    rest = [chart for chart in rest if chart]
    text = "".join(
        f'<section><h2>{title}</h2>\n<div class="columns">{"".join(charts)}</div></section>\n'
        for title, charts in groups
        if any(charts)
    )
    if rest:
        text += f'<details class="more"><summary>{len(rest)} more curves</summary><div class="columns">{"".join(rest)}</div></details>\n'
    return text


def _slots(view: RunView) -> str:
    names = [n for n in view.curves if re.fullmatch(r"train/(base_)?accuracy/slot_\d+", n)]
    slots = sorted({int(name[-2:]) for name in names})
    charts = []
    if slots:
        values = {
            label: [view.last(f"train/{slot_metric(kind, slot)}") for slot in slots]
            for label, kind in (("base", "base_accuracy"), ("selector", "accuracy"))
        }
        charts.append(
            bar_chart(
                "Accuracy by slot, newest window of training",
                [str(slot) for slot in slots],
                values,
                note="Share of the blocks that reach the slot in which it is right (marginal, not conditional). The selector is given the true token before.",
            )
        )
    rows = part(view.measured or {}, "per_slot", "slots")
    if isinstance(rows, list) and rows:
        charts.append(
            bar_chart(
                "Acceptance by slot, decoded",
                [str(row["slot"]) for row in rows],
                {kind: [row[kind] for row in rows] for kind in ("marginal", "conditional")},
                note="marginal: accepted through this slot, of the rounds that offered it; conditional: of those accepted through the slot before.",
            )
        )
    return f'<section><h2>By slot</h2>\n<div class="columns">{"".join(charts)}</div></section>\n' if charts else ""


# --- evaluation ---


def _evaluation(view: RunView) -> str:
    if view.evaluation is None:
        return ""
    steps = view.evaluation.get("trained_steps")
    source = escape(
        " · ".join(filter(None, [str(view.evaluation.get("source", "")), f"{steps} steps" if steps else ""]))
    )
    text = f'<h2>Evaluation</h2>\n<p class="muted wrap">{source}</p>\n'
    if view.measured is not None:
        text += _verdicts(view.measured) + _taus(view.measured)
    forced = view.evaluation.get("teacher_forced")
    if isinstance(forced, dict):
        text += "<h3>Teacher-forced, held out</h3>\n" + _forced(forced)
    raw = json.dumps(view.evaluation, indent=1, ensure_ascii=False)
    cut = raw if len(raw) <= RAW else raw[:RAW] + f"\n... {len(raw) - RAW:,} more characters"
    return f'<section>{text}<details class="more"><summary>All that was measured</summary><pre>{escape(cut)}</pre></details></section>\n'


def _verdicts(measured: dict[str, Any]) -> str:
    lines = []
    lossless = part(measured, "lossless", "losslessness.lossless")
    if lossless is not None:
        counts = [
            f"{part(measured, name, f'losslessness.{name}')} {word}"
            for name, word in (("identical", "identical"), ("near_ties", "near ties"), ("different", "different"))
        ]
        unchecked = part(measured, "losslessness.unchecked")
        counts += [f"{unchecked} not compared"] if unchecked else []
        lines.append(("lossless" if lossless else "NOT LOSSLESS", f"against plain decoding: {', '.join(counts)}"))
    agrees = part(measured, "walk_agrees", "walk.agrees")
    walk = (measured.get("walk_tau") or {}).get("value") if isinstance(measured.get("walk_tau"), dict) else None
    if agrees is not None:
        predicted = "" if walk is None else f"; the walk's tau is {walk:.2f}"
        lines.append(("walk", f"decoding took its rounds on {agrees:.0%} of the prompts{predicted}"))
    repetition = part(measured, "repetition", "repetition.share")
    if repetition is not None:
        looping = part(measured, "repetition.looping")
        without = part(measured, "repetition.tau_without_looping.value")
        more = f"; {looping} answers loop, tau without them is {_two(without)}" if looping else ""
        lines.append(("repetition", f"{repetition:.1%} of the tokens lie in a repeated 8-gram{more}"))
    speedup = part(measured, "speedup", "cost.speedup")
    if speedup is not None:
        plain, fast = (
            part(measured, f"{kind}_seconds", f"cost.{kind}_seconds", f"seconds.{kind}")
            for kind in ("plain", "speculative")
        )
        seconds = "" if plain is None or fast is None else f" ({plain:.1f} s against {fast:.1f} s)"
        lines.append(("cost", f"{speedup:.2f}x plain decoding{seconds}, here; a served target is another matter"))
    listed = "".join(
        f'<dt class="{"bad" if k.isupper() else ""}">{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in lines
    )
    return f"<dl>{listed}</dl>\n" if lines else ""


def _taus(measured: dict[str, Any]) -> str:
    """tau per domain, tag and context length, as far as each was measured."""
    walk = dict(measured.get("walk_tau_by_domain") or {})
    cells = [*(measured.get("tau") or {}).items()]
    if measured.get("tau_all"):
        cells.append((ALL, measured["tau_all"]))
        walk |= {ALL: measured["walk_tau"]} if walk else {}
    text = _tau_table("domain", cells, walk)
    for tag, table in (measured.get("tau_by_tag") or {}).items():
        text += _tau_table(tag, list(table.items()), {})
    return text + _tau_table("context tokens", list((measured.get("tau_by_context") or {}).items()), {})


def _tau_table(word: str, cells: list[tuple[str, dict[str, Any]]], walk: dict[str, Any]) -> str:
    if not cells:
        return ""
    most = max([2.0, *(bound for _, cell in cells for bound in cell.get("interval") or [cell["value"] or 1.0])])
    some = lambda key: any(cell.get(key) is not None for _, cell in cells)
    head = [word, "tau", *(["95 % interval"] if some("interval") else []), "rounds", "tokens"]
    head += (["prompts"] if some("prompts") else []) + (["walk"] if walk else [])
    rows = []
    for name, cell in cells:
        row = [escape(str(name)), _two(cell["value"])]
        if some("interval"):
            low, high = cell["interval"] or (None, None)
            picture = "" if low is None else interval_bar(cell["value"], low, high, most)
            row.append("-" if low is None else f"{picture} {low:.2f} to {high:.2f}")
        row += [f"{cell['rounds']:,}", f"{cell['tokens']:,}"]
        if some("prompts"):
            row.append(f"{cell['prompts']:,}" + ("*" if cell["prompts"] < FEW else ""))
        if walk:
            row.append(_two((walk.get(name) or {}).get("value")))
        rows.append(row)
    few = any(cell.get("prompts", FEW) < FEW for _, cell in cells)
    note = f'<p class="muted">* fewer than {FEW} prompts: the interval is too narrow.</p>\n' if few else ""
    return _table(head, rows) + note


def _forced(forced: dict[str, Any]) -> str:
    by_domain = lambda table: isinstance(table, dict) and all(isinstance(tau, dict) for tau in table.values())  # noqa: E731
    names = [name for name, table in forced.items() if by_domain(table)]
    domains = list(dict.fromkeys(domain for name in names for domain in forced[name]))
    rows = [
        [escape(domain), *(_two((forced[name].get(domain) or {}).get("value")) for name in names)] for domain in domains
    ]
    return _table(["domain", *names], rows)


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The head is text, cells are HTML already; all but the first are numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        made = (f'<{tag} class="{"n" if i else "w"}">{cell}</{tag}>' for i, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", cells) for cells in rows)
    return f'<div class="scroll"><table><thead>{line("th", [escape(word) for word in head])}</thead><tbody>{body}</tbody></table></div>\n'


# --- samples ---


def _samples(view: RunView) -> str:
    chosen, taken = [], {}
    # Answers that are not what they should be first, then some of each domain.
    for row in sorted(view.decoded, key=lambda row: row.get("verdict") != "different"):
        domain = str(row.get("domain"))
        if taken.get(domain, 0) < SAMPLES_PER_DOMAIN and len(chosen) < SAMPLES:
            taken[domain] = taken.get(domain, 0) + 1
            chosen.append(row)
    if not chosen:
        return ""
    legend = (
        '<ul class="legend"><li><span class="p first">first</span> from the prompt\'s own pass</li>'
        '<li><span class="p r0">draft</span><span class="p r0 bonus">bonus</span> one round: accepted drafts, then the target\'s own token</li>'
        '<li><span class="p r1">next</span><span class="p r1 bonus">round</span></li></ul>'
    )
    drawn = "".join(_sample(row, first=i == 0) for i, row in enumerate(chosen))
    left = len(view.decoded) - len(chosen)
    more = f'<p class="muted">{left} more prompts are in decoded.jsonl.</p>' if left else ""
    return f"<section><h2>Samples</h2>\n{legend}\n{drawn}{more}</section>\n"


def _sample(row: dict[str, Any], *, first: bool) -> str:
    pieces, rounds = row["pieces"], row["rounds"]
    tags = [f"{key} {value}" for key, value in (row.get("tags") or {}).items()]
    tau = sum(rounds) / len(rounds) if rounds else None
    facts = [str(row.get("domain", "")), *tags, f"tau {_two(tau)}", f"{len(rounds)} rounds", f"{len(pieces)} tokens"]
    if row.get("verdict") is not None:
        facts.append(VERDICTS.get(row["verdict"], str(row["verdict"])))
    bad = ' class="bad"' if row.get("verdict") == "different" else ""
    prompt = f'<p class="prompt">{escape(row["prompt"])}</p>' if isinstance(row.get("prompt"), str) else ""
    more = (
        f'<p class="muted">{len(pieces) - DRAWN_PIECES:,} more tokens are not drawn.</p>'
        if len(pieces) > DRAWN_PIECES
        else ""
    )
    return (
        f'<details class="sample"{" open" if first else ""}><summary><b>{escape(str(row["id"]))}</b> '
        f"<span{bad or ' class=muted'}>{escape(' · '.join(filter(None, facts)))}</span></summary>\n"
        f'{prompt}<div class="text">{_pieces(pieces[:DRAWN_PIECES], rounds, row.get("accepted"))}</div>{more}</details>\n'
    )


def _pieces(pieces: list[str], rounds: list[int], accepted: list[int] | None) -> str:
    """Tokens coloured by round. The last one of a round is the target's own; of a round that ended the answer it may be a draft, which only
    `accepted` tells."""
    kinds = [("first", "first token: from the prompt's own pass")]
    for i, gained in enumerate(rounds):
        drafts = gained - 1 if accepted is None else accepted[i]
        for k in range(1, gained + 1):
            what = f"accepted draft {k} of {drafts}" if k <= drafts else "the target's own token"
            kinds.append((f"r{i % 4}{'' if k <= drafts else ' bonus'}", f"round {i + 1} of {len(rounds)}: {what}"))
    kinds += [("first", "in no round")] * (len(pieces) - len(kinds))
    return "".join(
        f'<span class="p {kind}" title="{escape(title)}">{_visible(piece)}</span>'
        for piece, (kind, title) in zip(pieces, kinds, strict=False)
    )


def _visible(piece: str) -> str:
    return escape(piece).replace("\n", '<i class="nl"></i>\n') or "∅"


# --- data ---


def _data(view: RunView) -> str:
    certificate = view.certificate
    if certificate is None:
        return ""
    items = [
        ("certificate", f"<code>{escape(certificate['digest'])}</code>"),
        ("rows", f"{certificate['kept']:,} of {certificate['rows']:,}"),
        ("documents", f"{certificate['documents']:,}"),
        ("tokens", f"{certificate['tokens']:,}, {certificate['ratio']:.1%} supervised"),
        ("files", escape(", ".join(record["name"] for record in certificate["files"]))),
        ("held out", escape(", ".join(public_name(str(p)) for p in view.setting("data.heldout") or []) or "none")),
    ]
    provenance = view.config.get("provenance")
    if isinstance(provenance, dict):
        names = ("dflash_train", "torch", "transformers", "git_commit", "world_size")
        items.append(("made with", escape(", ".join(f"{n} {provenance[n]}" for n in names if provenance.get(n)))))
        if provenance.get("resumed"):
            items.append(("resumed", f"{len(provenance['resumed'])} times"))
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in items)
    return f"<section><h2>Data</h2>\n<dl>{listed}</dl></section>\n"
