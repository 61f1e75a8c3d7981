"""Which block to draft, or none, at each concurrency: `python -m dflash_train.advise EVALUATION (--measure EXPORT | --costs FILE | --times N:PLAIN:VERIFY:DRAFT ...)`.

The model is four lines. Drafting d tokens gains tau(d) = 1 + a_1 + ... + a_d tokens per round, a_k the share of rounds accepted through slot k.
A round of n requests takes draft(n, d + 1) + verify(n, d + 1) + overhead(n) milliseconds, plain decoding plain(n) = verify(n, 1) per token. So
speed-up = tau(d) plain(n) / round(n, d), and n tau(d) tokens come per round. Everything else here says where its numbers are from.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from dflash_train import disk
from dflash_train.benchmark import counters
from dflash_train.build import open_source
from dflash_train.config.load import run_command
from dflash_train.config.values import check_range, fits, server_root, whole_numbers
from dflash_train.folder import read_json
from dflash_train.generation.base import Request
from dflash_train.generation.slots import Slots, why_no_slots
from dflash_train.generation.speculative import SpeculativeSlots
from dflash_train.generation.verify import Sampling
from dflash_train.method import DraftStep

LEAST = 1.1  # below, speculation is left off: the how-to's rule, and about what a benchmark can tell apart
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 12
MOST = 1024  # slots of a block, or layers of a drafter: what no engine runs is a slip of the keyboard, and costs its square in time here


# --- acceptance -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What was measured of a drafter.

    slots: a_1 .. a_{K-1}, share of the rounds accepted through slot k. shorter: tau that was measured with a shorter block, by block size. assumed: what
    had to be assumed to get `slots`, None where they were measured. cycle_ms: of one request, where the source says it.
    """

    slots: tuple[float, ...]
    source: str
    shorter: Mapping[int, float] = field(default_factory=dict)
    assumed: str | None = None
    cycle_ms: float | None = None

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError(f"{self.source}: no drafted slot; give figures of a drafter that was decoded with")
        if len(self.slots) >= MOST:
            raise ValueError(f"{self.source}: {len(self.slots)} drafted slots; a block has {MOST} slots at most")
        wrong = [a for a in self.slots if not 0 <= a <= 1]
        if wrong:
            raise ValueError(f"{self.source}: a slot accepted in {wrong[0]:g} of the rounds: must be in [0, 1]")
        if any(later > earlier + 1e-3 for earlier, later in zip(self.slots, self.slots[1:], strict=False)):
            raise ValueError(
                f"{self.source}: acceptance rises along the block ({', '.join(f'{a:.3f}' for a in self.slots)}); give shares of all rounds "
                "(marginal), not of the rounds that reached the slot (conditional)"
            )
        odd = {size: tau for size, tau in self.shorter.items() if not 1 <= tau <= size}
        if odd:
            size, tau = next(iter(odd.items()))
            raise ValueError(f"{self.source}: {tau:g} tokens per round with a block of {size}: must be in [1, {size}]")

    @property
    def block_size(self) -> int:
        return len(self.slots) + 1

    def tau(self, drafted: int) -> float:
        """Tokens per round with `drafted` tokens drafted; the bonus token is one of them."""
        if not 0 <= drafted <= len(self.slots):
            raise ValueError(f"{drafted} drafted tokens: this drafter drafts 0 to {len(self.slots)}")
        return self.shorter.get(drafted + 1, 1 + sum(self.slots[:drafted]))


def geometric(tau: float, drafted: int, source: str) -> Acceptance:
    """Where only the mean accepted length is known: every slot accepted alike often if reached, a_k = p^k with 1 + p + ... + p^d = tau."""
    if not 1 <= tau <= drafted + 1:
        raise ValueError(
            f"{source}: mean accepted length {tau:g}: with {drafted} drafted tokens it is in [1, {drafted + 1}]"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**k for k in range(drafted + 1)) < tau else (low, p)
    return Acceptance(
        slots=tuple(low**k for k in range(1, drafted + 1)),
        source=source,
        assumed=f"only the mean {tau:.2f} is known: each slot accepted alike often once reached",
    )


def of_metrics(text: str, source: str, drafted: int | None) -> Acceptance:
    """Acceptance from a server's /metrics: vLLM's counters per position (ours have the same names), or SGLang's mean.

    drafted: K - 1, needed where only a mean is known. Raises ValueError where the server did not draft.
    """
    counts = counters.parse(text)
    spec = {match[2]: value for name, value in counts.values.items() if (match := counters.SPEC.match(name))}
    drafts, tau = spec.get("drafts", 0.0), counts.values.get(counters.GAUGE, 0.0)
    if drafts and (positions := counts.positions()):
        return Acceptance(slots=tuple(count / drafts for count in positions), source=source)
    if drafts:
        tau = 1 + spec.get("accepted_tokens", 0.0) / drafts
    if not tau:
        raise ValueError(
            f"{source}: its metrics count no draft; the server drafts nothing, or has answered nothing yet"
        )
    if drafted is None:
        raise ValueError(f"{source}: gives the mean accepted length alone; say how long the block is with --block-size")
    return geometric(tau, drafted, source)


def of_evaluation(report: dict[str, Any], source: str) -> Acceptance:
    """Acceptance from evaluation.json (`python -m dflash_train.evaluate`)."""
    decoded = report["decoded"]
    try:
        marginal = [row["marginal"] for row in sorted(decoded["slots"], key=lambda row: row["slot"])]
        while marginal and marginal[-1] is None:  # never offered
            marginal.pop()
        slots = tuple(map(float, marginal))
        shorter = {int(k): float(cell["value"]) for k, cell in decoded.get("block_sizes", {}).items() if cell["value"]}
        cycle = (decoded.get("cost") or {}).get("cycle_ms") if decoded.get("decoded_together", 1) == 1 else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{source}: not as evaluation writes it ({error!r}); measure again with python -m dflash_train.evaluate"
        ) from None
    return Acceptance(slots=slots, source=source, shorter=shorter, cycle_ms=cycle)


def read_acceptance(source: str, block_size: int | None = None) -> Acceptance:
    """From evaluation.json, a saved or served /metrics, or JSON with {"slots": [a_1, ...]}. Raises ValueError for anything else."""
    drafted = None if block_size is None else block_size - 1
    if source.startswith(("http://", "https://")):
        try:
            address = source if source.endswith("/metrics") else f"{server_root(source)}/metrics"
            answer = httpx.get(address, timeout=10)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise ValueError(f"{source}: its metrics cannot be had ({error}); start the server with them") from None
        return of_metrics(answer.text, source, drafted)
    path = Path(source)
    if path.is_dir():  # a run
        path /= "evaluation.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give evaluation.json, a saved /metrics, or the address of a server")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: is no text ({error}); give evaluation.json or a saved /metrics") from None
    if not text.lstrip().startswith("{"):
        return of_metrics(text, source, drafted)
    report = read_json(path)
    if "decoded" in report:
        return of_evaluation(report, source)
    if "cells" in report:
        return of_benchmark(report, source)
    if isinstance(report.get("slots"), list) and all(isinstance(a, int | float) for a in report["slots"]):
        return Acceptance(slots=tuple(map(float, report["slots"])), source=source)
    raise ValueError(
        f'{source}: neither an evaluation nor a benchmark nor {{"slots": [...]}}; give evaluation.json or a saved /metrics'
    )


# --- costs ------------------------------------------------------------------------------------------------------

Points = dict[int, float]


@dataclass(kw_only=True)
class Costs:
    """Milliseconds on one device, by concurrency, then by tokens per request.

    target_ms[n][1] is a step of plain decoding, target_ms[n][r] verifies r tokens (the anchor is one); draft_ms[n][r] drafts a block of r slots;
    overhead_ms[n] is what a round costs besides. layers: of the drafter that was timed.
    """

    device: str
    how: str
    block_size: int
    layers: int
    target_ms: dict[int, Points]
    draft_ms: dict[int, Points]
    overhead_ms: Points = field(default_factory=lambda: {1: 0.0})
    context: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def read(cls, path: str) -> Costs:
        """What `--write-costs` wrote. Raises ValueError."""
        if not Path(path).is_file():
            raise ValueError(f"--costs {path}: no such file; --measure EXPORT --write-costs {path} writes one")
        found = read_json(Path(path))

        def points(value: dict[str, Any]) -> Points:
            return {int(n): float(ms) for n, ms in value.items()}

        try:
            for name in ("target_ms", "draft_ms"):
                found[name] = {int(n): points(by_rows) for n, by_rows in found[name].items()}
            found["overhead_ms"] = points(found.get("overhead_ms") or {"1": 0.0})
            costs = cls(**found)
            if not all(fits(getattr(costs, name), int) for name in ("block_size", "layers")):
                raise TypeError(f"block_size {costs.block_size!r}, layers {costs.layers!r}")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"--costs {path}: not as --write-costs writes it ({error!r}); measure again") from None
        return costs.checked(path)

    @classmethod
    def of_times(cls, times: Sequence[str], block_size: int, layers: int) -> Costs:
        """From CONCURRENCY:PLAIN:VERIFY:DRAFT, milliseconds of a plain step, of verifying and of drafting the whole block."""
        target: dict[int, Points] = {}
        draft: dict[int, Points] = {}
        for text in times:
            parts = text.split(":")
            try:
                n, (plain, verify, drafting) = int(parts[0]), map(float, parts[1:])
            except ValueError:
                raise ValueError(
                    f"--times {text}: must be CONCURRENCY:PLAIN:VERIFY:DRAFT in milliseconds, as in 8:9.1:11.5:2.0"
                ) from None
            if n in target:
                raise ValueError(f"--times {text}: the times at {n} are given already; give one of them")
            target[n], draft[n] = {1: plain, block_size: verify}, {block_size: drafting}
        costs = cls(
            device="not said", how="--times", block_size=block_size, layers=layers, target_ms=target, draft_ms=draft
        )
        return costs.checked("--times")

    def checked(self, source: str) -> Costs:
        flat = [
            ms for table in (self.target_ms, self.draft_ms) for by_rows in table.values() for ms in by_rows.values()
        ]
        blocks = [*self.target_ms.values(), *self.draft_ms.values()]
        whole = all(max(by_rows, default=0) > 1 for by_rows in blocks) and all(
            1 in rows for rows in self.target_ms.values()
        )
        if (
            not flat
            or not whole
            or not all(0 < ms < math.inf for ms in [*flat, *(1 + abs(ms) for ms in self.overhead_ms.values())])
        ):
            raise ValueError(
                f"{source}: needs milliseconds above 0, of plain decoding (one token) and of a block, for each concurrency"
            )
        if self.target_ms.keys() != self.draft_ms.keys() or min(self.target_ms) < 1 or self.block_size < 2:
            raise ValueError(
                f"{source}: target and drafter must be timed at the same concurrencies, from 1 on, with a block of 2 or more"
            )
        if not 1 <= self.layers <= MOST or self.block_size > MOST:
            raise ValueError(
                f"{source}: {self.layers} draft layers (--layers) and a block of {self.block_size}: a drafter has 1 to {MOST} layers, and {MOST} slots at most"
            )
        return self

    def plain(self, n: int) -> float:
        return _at({m: by_rows[1] for m, by_rows in self.target_ms.items()}, n)

    def verify(self, n: int, rows: int) -> float:
        return _at({m: _at(by_rows, rows) for m, by_rows in self.target_ms.items()}, n)

    def draft(self, n: int, rows: int) -> float:
        return _at({m: _at(by_rows, rows) for m, by_rows in self.draft_ms.items()}, n)

    def overhead(self, n: int) -> float:
        return max(0.0, _at(self.overhead_ms, n))


def _at(points: Mapping[int, float], x: int) -> float:
    """Linear between measured points; the nearest value below them, the last slope (never a falling one) beyond them; one point: constant."""
    known = sorted(points)
    if x in points or len(known) == 1 or x < known[0]:
        return points[x if x in points else known[0]]
    if x > known[-1]:
        a, b = known[-2:]
        return points[b] + max(0.0, points[b] - points[a]) / (b - a) * (x - b)
    a, b = next((a, b) for a, b in zip(known, known[1:], strict=False) if a < x < b)
    return points[a] + (points[b] - points[a]) * (x - a) / (b - a)


def measure(step: DraftStep, concurrency: Sequence[int], rows: Sequence[int], context: int) -> Costs:
    """Time a pair on the device where it is, as `python -m dflash_train.serve` runs it: n requests in slots, the host's work in the time. The
    quickest of REPEATS steps behind `context` tokens counts: what else runs here is no part of the cost.

    Raises ValueError for a target that does not run in slots.
    """
    device, spec = step.target.device, step.drafter.spec
    why_not = why_no_slots(step.target.model)
    if why_not is not None:
        raise ValueError(
            f"--measure: {step.target.info.path} does not run in slots here: {why_not}; give your engine's times with --times"
        )
    step.eval()
    target_ms: dict[int, Points] = {}
    draft_ms: dict[int, Points] = {}
    most = spec.block_size * (REPEATS + 4)  # a step takes K tokens of a request at most; a few steps are not counted

    def shape(n: int) -> dict[str, Any]:
        return {"slots": n, "length": context + most, "max_new": most, **LIVE}

    def plain(n: int) -> float:
        return _quickest(Slots(step.target.model, set(), **shape(n)), n, context)

    plain(concurrency[0])  # not counted: the first thing that a process times is slow
    for n in concurrency:
        target_ms[n], draft_ms[n] = {1: plain(n)}, {}
        for count in sorted(set(rows) - {1}):
            slots = SpeculativeSlots(step, set(), **shape(n), block_size=count)
            whole = _quickest(slots, n, context)
            draft_ms[n][count] = min(_drafting(slots, n), 0.95 * whole)
            target_ms[n][count] = whole - draft_ms[n][count]
        # Before and behind the others: a machine that slows down meanwhile is no speedup.
        target_ms[n][1] = min(target_ms[n][1], plain(n))
    return Costs(
        device=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, threads: {torch.get_num_threads()}",
        how="timed here as dflash_train.serve runs them, the host's work included",
        block_size=spec.block_size,
        layers=spec.num_hidden_layers,
        target_ms=target_ms,
        draft_ms=draft_ms,
        context=context,
    ).checked("--measure")


LIVE = {"period": 1, "smallest": 1, "streaming": True}  # as the server has them


def _quickest(slots: Slots, n: int, context: int) -> float:
    """Milliseconds of a step of n requests."""
    vocabulary = slots.model.get_input_embeddings().num_embeddings
    for key in range(n):
        ids = [(7 * key + 13 * i) % vocabulary for i in range(context)]
        slots.submit(key, Request(messages=[], prompt_ids=ids, max_new_tokens=slots.max_new, seed=key))
    slots.advance()  # the prompts, and a first step; the one graph that is needed is captured here
    slots.advance()
    return _milliseconds(slots.advance, slots.device)


@torch.inference_mode()
def _drafting(slots: SpeculativeSlots, n: int) -> float:
    if slots.use_graphs:
        return slots.cost()["draft_ms"]
    slot_N = torch.arange(n, device=slots.device)
    length_N = slots.length[slot_N]
    arguments = (
        slots.token[slot_N],
        slot_N * slots.stride,
        length_N,
        torch.full_like(length_N, slots.block_size),
        Sampling(),
        None,
    )
    return _milliseconds(lambda: slots._draft(*arguments), slots.device)


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    taken = []
    for _ in range(REPEATS):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        taken.append(1e3 * (time.perf_counter() - started))
    return min(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the advice -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A number of drafted tokens at a concurrency. drafted 0: plain decoding. basis: letters of BASIS."""

    concurrency: int
    drafted: int
    tau: float
    round_ms: float
    tokens_per_second: float
    speedup: float
    basis: str


BASIS = {
    "m": "timed at this concurrency and block",
    "i": "time interpolated between timed ones",
    "x": "time extrapolated beyond the timed ones: little to rely on",
    "s": "acceptance of a shorter block taken from the whole block's slots; a block without causality may differ, evaluate.block_sizes=[...] measures it",
    "g": "acceptance per slot from a mean alone: each slot accepted alike often once reached",
}


def predict(acceptance: Acceptance, costs: Costs, n: int, drafted: int) -> Choice:
    """What the model says of drafting `drafted` tokens for n requests at a time."""
    if drafted >= costs.block_size:
        raise ValueError(
            f"{drafted} drafted tokens: the drafter's block of {costs.block_size} drafts {costs.block_size - 1} at most"
        )
    tau, plain = acceptance.tau(drafted), costs.plain(n)
    rows = drafted + 1
    round_ms = plain if drafted == 0 else costs.draft(n, rows) + costs.verify(n, rows) + costs.overhead(n)
    timed_rows = costs.target_ms.get(n, {})
    if n > max(costs.target_ms) or n < min(costs.target_ms):
        basis = "x"
    else:
        basis = "m" if rows in timed_rows and (rows == 1 or rows in costs.draft_ms[n]) else "i"
    if 0 < drafted < len(acceptance.slots) and rows not in acceptance.shorter:
        basis += "s"
    if acceptance.assumed and drafted:
        basis += "g"
    return Choice(
        concurrency=n,
        drafted=drafted,
        tau=tau,
        round_ms=round_ms,
        tokens_per_second=1e3 * n * tau / round_ms,
        speedup=tau * plain / round_ms,
        basis=basis,
    )


def advise(acceptance: Acceptance, costs: Costs, n: int, least: float = LEAST) -> tuple[Choice, Choice]:
    """(what to do, the best that speculation can do): the first has drafted = 0 where the second gains less than `least`."""
    most = min(len(acceptance.slots), costs.block_size - 1)
    best = max((predict(acceptance, costs, n, d) for d in range(1, most + 1)), key=lambda c: (c.speedup, -c.drafted))
    return (best if best.speedup >= least else predict(acceptance, costs, n, 0)), best


def break_even(costs: Costs, n: int, drafted: int, layers: int, speedup: float) -> float:
    """The tau that a drafter of so many layers needs for `speedup`, its drafting taken to cost as much per layer as that of the timed one."""
    rows = drafted + 1
    round_ms = costs.draft(n, rows) * layers / costs.layers + costs.verify(n, rows) + costs.overhead(n)
    return speedup * round_ms / costs.plain(n)


def deeper(costs: Costs, layers: int) -> Costs:
    """The costs of a drafter with another number of layers, in proportion."""
    scaled = {n: {r: ms * layers / costs.layers for r, ms in by_rows.items()} for n, by_rows in costs.draft_ms.items()}
    return Costs(
        **(
            costs.as_dict()
            | {"draft_ms": scaled, "layers": layers, "how": f"{costs.how}; draft time x {layers}/{costs.layers}"}
        )
    )


def table(acceptance: Acceptance, costs: Costs, concurrency: Sequence[int], least: float) -> str:
    """The advice as text, with what each number rests on."""
    lines = [
        f"acceptance: {acceptance.source} (block {acceptance.block_size}, tau {acceptance.tau(len(acceptance.slots)):.2f} over all slots)",
        f"costs: {costs.device}; {costs.how}; drafter of {costs.layers} layers"
        + (f", behind {costs.context} tokens" if costs.context else "")
        + (f"; {costs.overhead(1):.2f} ms of a round besides" if costs.overhead(1) else ""),
        "",
        f"{'concurrency':>11}{'plain tok/s':>13}{'draft':>7}{'block':>7}{'tau':>7}{'ms/round':>10}{'tok/s':>10}{'speed-up':>10}  {'basis':<7}advice",
    ]
    letters: set[str] = set()
    for n in concurrency:
        chosen, best = advise(acceptance, costs, n, least)
        letters |= set(best.basis)
        said = f"draft {best.drafted}" if chosen.drafted else f"no speculation (below {least:g}x)"
        lines.append(
            f"{n:>11}{1e3 * n / costs.plain(n):>13.1f}{best.drafted:>7}{best.drafted + 1:>7}{best.tau:>7.2f}{best.round_ms:>10.2f}"
            f"{best.tokens_per_second:>10.1f}{best.speedup:>9.2f}x  {best.basis:<7}{said}"
        )
    lines += ["", *(f"{letter}: {text}" for letter, text in BASIS.items() if letter in letters)]
    return "\n".join(lines)


def depth_table(
    acceptance: Acceptance, costs: Costs, concurrency: Sequence[int], others: Mapping[int, Acceptance]
) -> str:
    """What another number of draft layers would have to reach, and what the drafters in `others` (layers -> acceptance) do reach."""
    lines = [
        f"draft layers: a training choice. tau needed to be as fast as this drafter ({costs.layers} layers), if drafting costs alike per layer:"
    ]
    lines.append(f"{'layers':>8}" + "".join(f"{f'n = {n}':>10}" for n in concurrency))
    for layers in sorted({1, 2, costs.layers, 2 * costs.layers, *others}):
        cells = []
        for n in concurrency:
            best = advise(acceptance, costs, n)[1]
            cells.append(f"{break_even(costs, n, best.drafted, layers, best.speedup):>10.2f}")
        lines.append(f"{layers:>8}{''.join(cells)}" + ("  <- this one" if layers == costs.layers else ""))
    for layers, other in sorted(others.items()):
        found = [advise(other, deeper(costs, layers), n)[1] for n in concurrency]
        lines.append(
            f"{other.source}, {layers} layers: "
            + ", ".join(f"n = {c.concurrency} {c.speedup:.2f}x (draft {c.drafted})" for c in found)
        )
    return "\n".join(lines)


# --- predicted against measured ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A cell of a benchmark: the speed-up that the model says from the acceptance counted there, and the one measured there. measured: of decoding alone (time
    per token after the first), which is what the model is about; whole: with waiting and prompts, as the benchmark reports it."""

    workload: str
    concurrency: int
    predicted: Choice
    measured: float
    whole: float
    tokens_per_second: float

    @property
    def error(self) -> float:
        """predicted / measured - 1"""
        return self.predicted.speedup / self.measured - 1


def of_benchmark(report: dict[str, Any], source: str) -> Acceptance:
    """Acceptance pooled over all cells and arms of a benchmark that counted it by position."""
    rounds, accepted = 0, list[int]()
    for _, found in _counted(report, source):
        rounds += found["rounds"]
        accepted += [0] * (len(found["per_position"]) - len(accepted))
        for at, count in enumerate(found["per_position"]):
            accepted[at] += count
    return Acceptance(slots=tuple(count / rounds for count in accepted), source=source)


def _counted(report: dict[str, Any], source: str) -> list[tuple[tuple[dict[str, Any], str], dict[str, Any]]]:
    """((cell, name of the arm), its acceptance) of all that have it by position. Raises ValueError where none has."""
    try:
        found = [
            ((cell, name), arm["acceptance"])
            for cell in report["cells"]
            for name, arm in cell["arms"].items()
            if arm["acceptance"] and arm["acceptance"]["rounds"] and arm["acceptance"]["per_position"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: not as the benchmark writes it ({error!r}); measure again") from None
    if not found:
        raise ValueError(
            f"{source}: no server told acceptance by position; SGLang and llama.cpp tell a mean, give evaluation.json instead"
        )
    return found


def against(report: dict[str, Any], costs: Costs, source: str) -> list[Comparison]:
    """What the model says of every cell of a benchmark with a speed-up, beside what was measured. The whole block is taken to be drafted."""
    rows = []
    for (cell, name), found in _counted(report, source):
        gain = (cell.get("speed_up") or {}).get(name) or {}
        if not gain.get("value"):
            continue
        slots = tuple(count / found["rounds"] for count in found["per_position"])
        choice = predict(Acceptance(slots=slots, source=source), costs, cell["concurrency"], len(slots))
        arms = cell["arms"]
        per_token = [(arms[one].get("itl_s") or {}).get("mean") for one in (report["baseline"], name)]
        rows.append(
            Comparison(
                workload=cell["workload"],
                concurrency=cell["concurrency"],
                predicted=choice,
                measured=per_token[0] / per_token[1] if all(per_token) else gain["value"],
                whole=gain["value"],
                tokens_per_second=arms[name]["tok_s"],
            )
        )
    if not rows:
        raise ValueError(f"{source}: has no speed-up; measure a plain arm beside the speculative one")
    return rows


def compare_text(rows: Sequence[Comparison]) -> str:
    """Predicted against measured, line by line, and how far off it was."""
    lines = [
        "predicted against measured decoding (time per token after the first), from the benchmark's own acceptance; whole: with waiting and prompts",
        f"{'traffic':<16}{'concurrency':>11}{'predicted':>11}{'measured':>10}{'error':>8}{'whole':>8}{'predicted tok/s':>17}{'measured tok/s':>16}",
    ]
    lines += [
        f"{row.workload:<16}{row.concurrency:>11}{row.predicted.speedup:>10.2f}x{row.measured:>9.2f}x{row.error:>+8.0%}{row.whole:>7.2f}x"
        f"{row.predicted.tokens_per_second:>17.1f}{row.tokens_per_second:>16.1f}"
        for row in rows
    ]
    errors = sorted(abs(row.error) for row in rows)
    return "\n".join(
        [*lines, f"error of the speed-up: median {statistics.median(errors):.0%}, largest {errors[-1]:.0%}"]
    )


# --- the command ------------------------------------------------------------------------------------------------


def _others(listed: Sequence[str]) -> dict[int, Acceptance]:
    found = {}
    for text in listed:
        layers, _, source = text.partition("=")
        if not layers.isdecimal() or not 1 <= int(layers) <= MOST or not source:
            raise ValueError(
                f"--other {text}: must be LAYERS=EVALUATION with 1 to {MOST} layers, as in 5=outputs/deep/evaluation.json"
            )
        found[int(layers)] = read_acceptance(source)
    return found


def _same_drafter(acceptance: Acceptance, block_size: int, of: str) -> None:
    if acceptance.block_size > block_size:
        raise ValueError(
            f"{acceptance.source}: has {len(acceptance.slots)} slots, {of} says {block_size - 1}: figures of another drafter"
        )


def arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m dflash_train.advise", description=__doc__.split("\n\n")[0])
    made.add_argument(
        "acceptance",
        help='evaluation.json or the run that has it, a saved /metrics, the address of a server, or JSON with {"slots": [a_1, ...]}',
    )
    cost = made.add_mutually_exclusive_group(required=True)
    cost.add_argument("--measure", metavar="RUN_OR_EXPORT", help="time this pair here, on the first GPU or the CPU")
    cost.add_argument("--costs", metavar="FILE", help="times that --write-costs wrote")
    cost.add_argument("--times", metavar="N:PLAIN:VERIFY:DRAFT", action="append", help="milliseconds at concurrency N of a plain step, of verifying and of drafting the whole block; repeat it")  # fmt: skip
    made.add_argument(
        "-c", "--config", metavar="RECIPE", help="recipe of the pair to measure, where its folder has none"
    )
    made.add_argument(
        "--concurrency",
        nargs="+",
        metavar="N",
        default=[*map(str, CONCURRENCY)],
        help=f"requests in flight to advise for (default: {' '.join(map(str, CONCURRENCY))})",
    )
    made.add_argument("--block-size", type=int, help="K, where the acceptance or --times do not say it")
    made.add_argument(
        "--layers",
        type=int,
        default=1,
        help="draft layers of the drafter that --times are of; only their ratio matters (default: 1)",
    )
    made.add_argument(
        "--context", type=int, default=256, help="tokens of context behind which --measure times (default: 256)"
    )
    made.add_argument(
        "--least", type=float, default=LEAST, help="speed-up below which speculation is left off (default: %(default)s)"
    )
    made.add_argument(
        "--other",
        metavar="LAYERS=EVALUATION",
        action="append",
        default=[],
        help="acceptance of a drafter with another number of layers",
    )
    made.add_argument(
        "--against",
        metavar="BENCHMARK",
        help="JSON of scripts/benchmark.py with a plain arm: what the model says of each of its cells, beside what was measured",
    )
    made.add_argument("--write-costs", metavar="FILE", help="keep what was measured")
    made.add_argument("--json", metavar="FILE", help="write the table as JSON too")
    return made


def main(argv: list[str]) -> int:
    args = arguments().parse_args(argv)
    concurrency = whole_numbers(args.concurrency)
    if args.block_size is not None:
        check_range("--block-size", args.block_size, 2, MOST)  # the anchor and one drafted token
    check_range("--layers", args.layers, 1, MOST)
    if not 0 < args.least < math.inf:
        raise ValueError(f"--least {args.least}: must be a speed-up above 0")
    acceptance = read_acceptance(args.acceptance, args.block_size)
    if args.measure:
        run = open_source(args.measure, args.config, [])
        K, positions = run.step.drafter.spec.block_size, run.step.target.info.max_position_embeddings
        _same_drafter(acceptance, K, args.measure)
        if not 1 <= args.context < positions:
            raise ValueError(
                f"--context {args.context}: must be in [1, {positions - 1}]; the target has {positions} positions"
            )
        costs = measure(run.step, concurrency, range(2, K + 1), args.context)
    elif args.costs:
        costs = Costs.read(args.costs)
    else:
        costs = Costs.of_times(args.times, args.block_size or acceptance.block_size, args.layers)
    _same_drafter(acceptance, costs.block_size, args.costs or "--block-size")
    if args.write_costs:
        disk.replace(Path(args.write_costs), [json.dumps(costs.as_dict(), indent=1).encode()])
    print(table(acceptance, costs, concurrency, args.least))
    shown = [n for n in (1, 8, 32) if n in concurrency] or concurrency[:3]
    print("\n" + depth_table(acceptance, costs, shown, _others(args.other)))
    if args.against:
        print("\n" + compare_text(against(read_json(Path(args.against)), costs, args.against)))
    if args.json:
        most = min(len(acceptance.slots), costs.block_size - 1)
        report = [
            {"advised": advise(acceptance, costs, n, args.least)[0].drafted, "choices": [vars(predict(acceptance, costs, n, d)) for d in range(most + 1)]}
            for n in concurrency
        ]  # fmt: skip
        disk.replace(Path(args.json), [json.dumps(report, indent=1).encode()])
    return 0


if __name__ == "__main__":
    run_command(main)
