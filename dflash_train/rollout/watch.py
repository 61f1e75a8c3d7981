"""What to watch once it serves: Prometheus rules and a Grafana dashboard, with thresholds from what was measured.

Two things go wrong without anyone noticing, because answers stay right: acceptance falls (another target build, other traffic, a drafter that was
trained anew), and speculation is off though it was asked for. vLLM, our server (under vLLM's names) and llama.cpp count
drafts, SGLang gives the mean accepted length as a gauge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from dflash_train.advise import LEAST

DROP = 0.85  # of the measured acceptance; the traffic of a day varies less, a wrong drafter or target far more
WINDOW, LASTS = "10m", "15m"
LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
ROUNDS = 500  # in a window; with fewer, chance moves the mean too much for a warning
# Counters begin with the name of the engine; /metrics of vLLM 0.32.0, llama.cpp b11549 and SGLang 0.5.23.
ENGINES = {"vllm": "Vllm", "llamacpp": "LlamaCpp", "sglang": "Sglang"}
COUNTING = ("vllm", "llamacpp")
GENERATED = {
    "vllm": "vllm:generation_tokens_total",
    "llamacpp": "llamacpp:tokens_predicted_total",
    "sglang": "sglang:generation_tokens_total",
}
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
LENGTH = "sglang:spec_accept_length"


def counter(engine: str, what: str) -> str:
    """what: drafts, draft_tokens or accepted_tokens."""
    return f"{engine}:spec_decode_num_{what}_total"


METRICS = (
    *(counter(engine, what) for engine in COUNTING for what in ("drafts", "draft_tokens", "accepted_tokens")),
    ACCEPTED_AT,
    *GENERATED.values(),
    LENGTH,
)


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """measured: tau, the bonus token included; drop: below it acceptance has fallen; worthless: below it speculation gains less than LEAST, None
    where no speed-up was measured or it was below that already."""

    measured: float
    drop: float
    worthless: float | None


def thresholds(tau: float, low: float | None, speedup: float | None, share: float = DROP) -> Thresholds:
    """From the measured tau, the lower end of its interval and the measured speed-up; the speed-up is proportional to tau."""
    if not tau >= 1:
        raise ValueError(f"tau = {tau}: tokens per round are 1 or more; measure with a server that drafts")
    drop = max(1.0, min(share * tau, tau if low is None else low))
    worthless = None if speedup is None or speedup <= LEAST else tau * LEAST / speedup
    return Thresholds(measured=tau, drop=round(drop, 2), worthless=None if worthless is None else round(worthless, 2))


def _rate(metric: str, matcher: str) -> str:
    return f"sum by (model_name) (rate({metric}{matcher}[{WINDOW}]))"


def accept_length(engine: str, matcher: str = "") -> str:
    """PromQL of the tokens per round, the bonus token included."""
    if engine == "sglang":
        return f"avg by (model_name) (avg_over_time({LENGTH}{matcher}[{WINDOW}]))"
    return f"(1 + {_rate(counter(engine, 'accepted_tokens'), matcher)} / {_rate(counter(engine, 'drafts'), matcher)})"


def _busy(engine: str, matcher: str) -> str:
    if engine == "sglang":
        return f"sum by (model_name) (increase({GENERATED[engine]}{matcher}[{WINDOW}])) > {ROUNDS}"
    return f"sum by (model_name) (increase({counter(engine, 'drafts')}{matcher}[{WINDOW}])) > {ROUNDS}"


def _off(engine: str, matcher: str) -> str:
    answering = f"{_rate(GENERATED[engine], matcher)} > 0"
    drafting = (
        f"avg by (model_name) (avg_over_time({LENGTH}{matcher}[{WINDOW}])) > 1"
        if engine == "sglang"
        else f"{_rate(counter(engine, 'drafts'), matcher)} > 0"
    )
    return f"{answering} unless {drafting}"


def rules(name: str, limits: Thresholds, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A Prometheus rule file as a value, for each of ENGINES; those of engines that do not run stay silent. labels: of the series to watch, such as {"job": "qwen"}."""
    matcher = "{" + ", ".join(f'{k}="{_quoted(v)}"' for k, v in sorted((labels or {}).items())) + "}" if labels else ""
    found = []
    for engine, title in ENGINES.items():
        length, busy = accept_length(engine, matcher), _busy(engine, matcher)
        found.append(
            _rule(
                f"DraftAcceptanceDropped{title}",
                f"{length} < {limits.drop} and on (model_name) {busy}",
                "warning",
                f"accepted length of {_literal(name)} fell",
                f'{{{{ $value | printf "%.2f" }}}} tokens per round, {limits.measured:.2f} were measured at the rollout. Answers stay right, only slower. '
                "docs/troubleshooting.md: acceptance is lower than it was",
            )
        )
        if limits.worthless is not None and limits.worthless < limits.drop:
            found.append(
                _rule(
                    f"SpeculationNotWorthwhile{title}",
                    f"{length} < {limits.worthless} and on (model_name) {busy}",
                    "critical",
                    f"speculation of {_literal(name)} gains less than {LEAST:g}x",
                    f'{{{{ $value | printf "%.2f" }}}} tokens per round; below {limits.worthless:.2f} plain decoding is as good. Switch it off until the cause is found',
                )
            )
        found.append(
            _rule(
                f"SpeculationOff{title}",
                _off(engine, matcher),
                "warning",
                f"{_literal(name)} answers without drafting",
                "Tokens are generated and none is drafted. docs/troubleshooting.md: the server answers and is no faster",
            )
        )
    return {"groups": [{"name": f"speculation-{name}", "rules": found}]}


def read_labels(given: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE texts. Raises ValueError for what Prometheus would not read."""
    labels: dict[str, str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not LABEL.fullmatch(name) or not value:
            raise ValueError(
                f"--label {text}: must be NAME=VALUE, as in job=qwen; a name has letters of ASCII, digits and _"
            )
        if labels.setdefault(name, value) != value:
            raise ValueError(f"--label {text}: {name} is {labels[name]} already; give one value")
    return labels


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _literal(text: str) -> str:
    """Text for an annotation, in which Prometheus would carry out what stands in double braces."""
    return text.replace("{{", '{{"{{"}}')


def _rule(alert: str, expr: str, severity: str, summary: str, description: str) -> dict[str, Any]:
    return {
        "alert": alert,
        "expr": expr,
        "for": LASTS,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }


def rules_yaml(name: str, limits: Thresholds, labels: Mapping[str, str] | None = None) -> str:
    return yaml.safe_dump(rules(name, limits, labels), sort_keys=False, width=1000, allow_unicode=True)


def dashboard(name: str, limits: Thresholds, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A Grafana dashboard: accepted length of both engines with the thresholds, acceptance by position, drafted and generated tokens."""
    matcher = "{" + ", ".join(f'{k}="{_quoted(v)}"' for k, v in sorted((labels or {}).items())) + "}" if labels else ""
    by_position = f"sum by (model_name, position) (rate({ACCEPTED_AT}{matcher}[{WINDOW}])) / on (model_name) group_left {_rate(counter('vllm', 'drafts'), matcher)}"
    marks = [{"color": "red", "value": None}]
    if limits.worthless is not None and limits.worthless < limits.drop:
        marks.append({"color": "orange", "value": limits.worthless})
    marks.append({"color": "green", "value": limits.drop})
    panels = [
        _panel(
            "Accepted length (tokens per round)",
            [(accept_length(e, matcher), f"{{{{model_name}}}} ({e})") for e in ENGINES],
            marks,
        ),
        _panel("Share of rounds accepted through a position", [(by_position, "position {{position}}")]),
        _panel(
            "Tokens per second",
            [(_rate(metric, matcher), f"{{{{model_name}}}} generated ({e})") for e, metric in GENERATED.items()],
        ),
        _panel(
            "Drafted and accepted tokens per second",
            [
                (_rate(counter(engine, f"{what}_tokens"), matcher), f"{what} ({engine})")
                for engine in COUNTING
                for what in ("draft", "accepted")
            ],
        ),
    ]
    for i, panel in enumerate(panels):
        panel |= {"id": i + 1, "gridPos": {"x": 12 * (i % 2), "y": 9 * (i // 2), "w": 12, "h": 9}}
    return {
        "title": f"Speculation of {name}",
        "tags": ["dflash", "speculative-decoding"],
        "schemaVersion": 39,
        "time": {"from": "now-24h", "to": "now"},
        "refresh": "1m",
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


def _panel(title: str, queries: list[tuple[str, str]], marks: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    defaults: dict[str, Any] = {"min": 0, "custom": {"lineWidth": 1, "fillOpacity": 0}}
    if marks:
        defaults |= {"thresholds": {"mode": "absolute", "steps": marks}}
        defaults["custom"]["thresholdsStyle"] = {"mode": "line"}
    targets = [
        {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": source}
        for i, (expr, legend) in enumerate(queries)
    ]
    return {
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
