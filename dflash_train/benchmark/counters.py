"""What engines say of acceptance: in a response, or as counters that are read before and after. Pure but for `read`.

| engine | of a request | of all since the start |
|---|---|---|
| vLLM | metrics.speculative_decoding, with --per-request-spec-decode-metrics summary | vllm:spec_decode_num_... |
| SGLang | sglext.spec_tokens_details, asked for by return_spec_tokens_details | sglang:spec_verify_calls_total, with --enable-metrics |
| llama.cpp | timings.draft_n and .draft_n_accepted | llamacpp:spec_decode_num_..., with --metrics |
| TensorRT-LLM | | trtllm_spec_decode_num_... at /prometheus/metrics, with return_perf_metrics |
| dflash_train.serve | meta_info.spec_verify_ct and usage.completion_tokens_details, asked for by return_meta_info | vllm:spec_decode_num_... |

Read in the sources of vLLM 0.32.0, SGLang 0.5.23 and llama.cpp b11549; TensorRT-LLM's from its documents.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import httpx

PLACES = ("/metrics", "/prometheus/metrics")
SETTLE_SECONDS, SETTLE_TRIES = 0.1, 20
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?\s*$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
POSITION = re.compile(r"[0-9]{1,6}")
SPEC = re.compile(r"^(.+[:_])spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)$")
# Tokens that an engine wrote for anybody, to see whether somebody else was served meanwhile.
GENERATED = ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted")
EXACT = 2**53  # counts from here on are nonsense, and beyond what a float can hold the figures could not be computed
WENT_BACK = "its counters went back, so it was started anew meanwhile"
GAUGE = "sglang:spec_accept_length"


@dataclass(kw_only=True)
class Acceptance:
    """Counts of verifications. rounds: passes of the target that verified a draft; accepted: drafted tokens that stayed; drafted: those
    proposed, None where not told; per_position: how often the draft at each position, 0-based, was accepted, None likewise.

    Raises ValueError for counts that cannot be. source: where the counts were found. derived: one of rounds and accepted was not told but follows from the tokens: each round yields its
    accepted drafts and one token of the target's own, and the first token of an answer needs no round.
    """

    rounds: int
    accepted: int
    drafted: int | None = None
    per_position: list[int] | None = None
    source: str
    derived: bool = False

    def __post_init__(self) -> None:
        counts = [self.rounds, self.accepted, self.drafted or 0, *(self.per_position or [])]
        if not all(0 <= count < EXACT for count in counts):
            raise ValueError(f"counts of {self.source} are negative, or beyond all bounds")
        if self.drafted is not None and self.drafted < self.accepted:
            raise ValueError(f"{self.source}: {self.accepted} drafted tokens accepted of {self.drafted}")

    @property
    def accept_len(self) -> float | None:
        """1 + accepted / rounds: the bonus token is included, and it is pooled."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    def as_dict(self) -> dict[str, Any]:
        rates = None if self.per_position is None or not self.rounds else [n / self.rounds for n in self.per_position]
        rate = self.accepted / self.drafted if self.drafted else None
        return {**asdict(self), "accept_len": self.accept_len, "accept_rate": rate, "per_position_rate": rates}


def pooled(parts: Iterable[Acceptance]) -> Acceptance | None:
    """The sum, None of nothing; drafted and per_position only if every part has them."""
    parts = list(parts)
    if not parts:
        return None
    drafted = None if any(p.drafted is None for p in parts) else sum(p.drafted or 0 for p in parts)
    per_position = None
    if all(p.per_position is not None for p in parts):
        longest = max(len(p.per_position or []) for p in parts)
        per_position = [
            sum((p.per_position or [])[i] for p in parts if i < len(p.per_position or [])) for i in range(longest)
        ]
    return Acceptance(
        rounds=sum(p.rounds for p in parts),
        accepted=sum(p.accepted for p in parts),
        drafted=drafted,
        per_position=per_position,
        source=parts[0].source,
        derived=any(p.derived for p in parts),
    )


# --- in a response ------------------------------------------------------------------------------------------------


def of_response(
    events: list[dict[str, Any]], usage: dict[str, Any], tokens: int
) -> tuple[Acceptance, float | None] | None:
    """What the objects of one response say, the last one first, with the accept length as the engine itself puts it (None where it does
    not); None where they say nothing. tokens: of the answer."""
    details = usage.get("completion_tokens_details")
    kept, lost = (count_in(details, f"{what}_prediction_tokens") for what in ("accepted", "rejected"))
    for event in reversed(events):
        found = _inside(event, "metrics", "speculative_decoding")
        if found:
            told = Acceptance(
                rounds=int(found["num_spec_steps"]),
                accepted=int(found["num_accepted_draft_tokens"]),
                drafted=int(found["num_draft_tokens"]),
                per_position=_at_least(found.get("acceptance_histogram")),
                source="metrics.speculative_decoding of the responses",
            )
            return told, _number(found.get("mean_acceptance_length"))
        found = _inside(event, "sglext", "spec_tokens_details") or _inside(event, "meta_info")
        if rounds := count_in(found, "spec_verify_ct"):
            accepted, drafted = count_in(found, "spec_num_correct_drafts"), count_in(found, "spec_num_proposed_drafts")
            if accepted is None and kept is not None:
                accepted, drafted = kept, None if lost is None else kept + lost
            told = Acceptance(
                rounds=rounds,
                accepted=max(tokens - 1 - rounds, 0) if accepted is None else accepted,
                drafted=drafted,
                per_position=_at_least(found.get("spec_correct_drafts_histogram")),
                source="spec_verify_ct of the responses",
                derived=accepted is None,
            )
            return told, _number(found.get("spec_accept_length"))
        found = _inside(event, "timings")
        if drafted := count_in(found, "draft_n"):
            accepted = count_in(found, "draft_n_accepted") or 0
            return _from_tokens(tokens, accepted, drafted, "timings of the responses"), None
    if kept is not None and kept + (lost or 0):
        return _from_tokens(tokens, kept, None if lost is None else kept + lost, "usage of the responses"), None
    return None


def _from_tokens(tokens: int, accepted: int, drafted: int | None, source: str) -> Acceptance:
    rounds = max(tokens - 1 - accepted, 0)
    return Acceptance(rounds=rounds, accepted=accepted, drafted=drafted, source=source, derived=True)


def _inside(event: Any, *names: str) -> dict[str, Any]:
    """The object at a path of names, empty where there is none; of a list (one for each choice) the first."""
    for name in names:
        event = event.get(name) if isinstance(event, dict) else None
        event = event[0] if isinstance(event, list) and event else event
    return event if isinstance(event, dict) else {}


def whole_number(value: Any) -> int | None:
    """A count as a server gives it, None for what is none."""
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < EXACT
    return value if fits else None


def count_in(found: Any, name: str) -> int | None:
    """The count of that name in an object of a response, None where there is none."""
    return whole_number(found.get(name)) if isinstance(found, dict) else None


def _at_least(histogram: Any) -> list[int] | None:
    """Rounds by number of accepted drafts (from 0) -> how often the draft at each position was accepted."""
    if not isinstance(histogram, list) or not histogram:
        return None
    return list(accumulate(map(int, reversed(histogram[1:]))))[::-1]


def _number(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < EXACT
    return float(value) if fits else None


# --- counters -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Counts:
    """Counters of a server at one moment, summed over its engines. values: name without _total -> value; per_position: position -> value."""

    values: dict[str, float]
    per_position: dict[int, float]
    place: str = ""

    def positions(self) -> list[float] | None:
        """`per_position` from the first position on; None where there are none, or one is missing between."""
        count = len(self.per_position)
        return (
            [self.per_position[i] for i in range(count)]
            if count and self.per_position.keys() == set(range(count))
            else None
        )


def parse(text: str, place: str = "") -> Counts:
    """Counts in the text that a server gives Prometheus. Lines that are none are left out."""
    values: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for line in text.splitlines():
        found = None if line.startswith("#") else SAMPLE.match(line)
        if found is None:
            continue
        name = found[1].removesuffix("_total")
        try:
            value = float(found[3])
        except ValueError:
            continue
        if not abs(value) < EXACT:
            continue  # NaN is an average of nothing yet
        spec = SPEC.match(name)
        if spec and spec[2] == "accepted_tokens_per_pos":
            labels = dict(LABEL.findall(found[2] or ""))
            if POSITION.fullmatch(labels.get("position", "")):
                position = int(labels["position"])
                per_position[position] = per_position.get(position, 0.0) + value
        elif spec or name in GENERATED or name.startswith("sglang:"):
            values[name] = values.get(name, 0.0) + value
    return Counts(values=values, per_position=per_position, place=place)


def speculative(counts: Counts) -> bool:
    """Whether these counters tell of speculation."""
    return "sglang:spec_verify_calls" in counts.values or any(SPEC.match(name) for name in counts.values)


def generated(before: Counts, after: Counts) -> int | None:
    """Tokens that the engine says it wrote between the two, None where it does not say. Raises ValueError as `between` does."""
    for name in GENERATED:
        if name in after.values:
            written = round(after.values[name] - before.values.get(name, 0.0))
            if written < 0:
                raise ValueError(WENT_BACK)
            return written
    return None


def between(before: Counts, after: Counts, *, tokens: int, answers: int) -> Acceptance | None:
    """What was counted between two readings; None where the engine does not speculate or nothing was drafted. tokens, answers: what was
    received meanwhile. Raises ValueError where a counter went back: the server was started anew."""
    if not speculative(after):
        return None
    moved = {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}
    by_spec = {found[2]: round(moved[name]) for name in moved if (found := SPEC.match(name))}
    if any(value < 0 for value in by_spec.values()) or moved.get("sglang:spec_verify_calls", 0.0) < 0:
        raise ValueError(WENT_BACK)
    source = f"counters at {after.place}"
    if "accepted_tokens" in by_spec:
        derived = "drafts" not in by_spec
        accepted = by_spec["accepted_tokens"]
        rounds = max(tokens - answers - accepted, 0) if derived else by_spec["drafts"]
        positions = [
            round(all_of_it - before.per_position.get(i, 0.0)) for i, all_of_it in enumerate(after.positions() or [])
        ]
        if any(count < 0 for count in positions):
            raise ValueError(WENT_BACK)
        told = Acceptance(
            rounds=rounds,
            accepted=accepted,
            drafted=by_spec.get("draft_tokens"),
            per_position=positions or None,
            source=source,
            derived=derived,
        )
        return told if (told.drafted if derived else told.rounds) else None
    rounds = round(moved["sglang:spec_verify_calls"])
    if not rounds:
        return None
    return Acceptance(rounds=rounds, accepted=max(tokens - answers - rounds, 0), source=source, derived=True)


async def read(client: httpx.AsyncClient, root: str) -> Counts | None:
    """Counters of a server, None where it has none. root: its address without /v1. Raises httpx.HTTPError where it does not answer."""
    for place in PLACES:
        response = await client.get(root + place, timeout=10.0, follow_redirects=True)
        if response.status_code == 200 and "json" not in response.headers.get("content-type", ""):
            counts = parse(response.text, place)
            if counts.values:
                return counts
    return None


async def gauge(client: httpx.AsyncClient, root: str) -> tuple[float, str] | None:
    """(accept length, where it stands) as SGLang itself averages it, over a stretch that it does not tell; None where no such is found."""
    counts = await read(client, root)
    if counts is not None and counts.values.get(GAUGE):
        return counts.values[GAUGE], f"{GAUGE} at {counts.place}"
    for place in ("/server_info", "/get_server_info"):
        response = await client.get(root + place, timeout=10.0)
        if response.status_code != 200:
            continue
        try:
            states = response.json()["internal_states"]
            values = [value for state in states if (value := _number(state.get("avg_spec_accept_length")))]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if values:
            return sum(values) / len(values), f"avg_spec_accept_length at {place}"
    return None


async def settled(client: httpx.AsyncClient, root: str) -> Counts | None:
    """`read` until two readings agree, 2 seconds at most: engines count a step somewhat later than they answer."""
    last = await read(client, root)
    for _ in range(SETTLE_TRIES if last is not None else 0):
        await asyncio.sleep(SETTLE_SECONDS)
        now = await read(client, root)
        if now == last:
            break
        last = now
    return last
