"""Measure what several GPUs of one machine give: python scripts/bench_ranks.py PART ... --out DIR [--ranks 2] [key=value ...]

    alone       ms per step on one GPU: the baseline of all that follows
    ddp         the same rows per rank under DDP (weak scaling), for a few ways to bucket gradients, and how much of the exchange shows
    fsdp2 zero2 the first shape under these engines: ms and memory
    engines     ddp, fsdp2 and zero2 in one job, which starts once
    split       target and drafter on a GPU each, in one process
    parity      a recipe's training on one and on all ranks, in fp32 and bf16, and continued 2 -> 1 -> 2: the same rows, the same losses
    kill        SIGKILL for the last rank while it trains: how soon the job ends, and what it says
    regenerate_alone, regenerate   rows per second of a recipe's regeneration in one process, and in one per GPU
    train       a recipe's training for --seconds on all ranks
    evaluate    what that trained: held-out acceptance, teacher-forced and decoded

Every part is processes of its own with a time limit (--limit PART=SECONDS); one that fails is said, and the others go on. Results are
appended to DIR/results.jsonl; --table prints what is there as markdown. key=value overrides the recipe (-c) of parity, kill, regenerate and train.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "alone",
    "ddp",
    "fsdp2",
    "zero2",
    "engines",
    "split",
    "parity",
    "kill",
    "regenerate_alone",
    "regenerate",
    "train",
    "evaluate",
)
LIMITS = dict.fromkeys(PARTS, 120) | {"alone": 300, "ddp": 360, "engines": 480, "parity": 150, "train": 300}
# What DDP is built with besides what the engine gives it, and what changes in the recipe.
VARIANTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ddp": ({}, []),
    "ddp, buckets of 100 MiB": ({"bucket_cap_mb": 100}, []),
    "ddp, gradients in bf16": ({}, ["engine.reduce_precision=bfloat16"]),
}
SHARED = "rows a step"  # of a shape whose rows the ranks share
STEPS, EVERY = 12, 4  # of the runs that are compared: their steps, and the steps between checkpoints
# Relative, of the first step's loss and of any step's. One process takes a step's rows in the micro-batches that the ranks take them in, so that in either format
# only sums over them are made in another order, in fp32 and more; but what a second GPU's process compiled for itself need not round alike, and AdamW makes whole
# steps even of gradients that are nothing but rounding.
EXACT, ROUNDED = (1e-6, 1e-4), (5e-6, 2e-2)
# Else the compiler of each process, and for each GPU, chooses the tiles of its reductions and the padding of its products by timing them, and rounds as it chose.
# torch's deterministic mode (TORCHINDUCTOR_DETERMINISTIC) forbids that too, but is over after the first graph.
NOTHING_TIMED = {
    "TORCHINDUCTOR_FORCE_FILTER_REDUCTION_CONFIGS": "1", "TORCHINDUCTOR_DYNAMIC_SCALE_RBLOCK": "0", "TORCHINDUCTOR_SHAPE_PADDING": "0",
}  # fmt: skip
FP32 = (
    "engine.precision=float32", "target.precision=float32", "engine.attention=dense", "engine.compile=false", "train.num_anchors=128",
)  # fmt: skip


@dataclass(kw_only=True)
class Job:
    """A command that runs by itself, in a process group of its own."""

    name: str
    process: subprocess.Popen
    log: Path
    began: float

    def end(self) -> None:
        """Also what torchrun started, each in a session of its own. An id that is free again may be another's."""
        if self.process.poll() is not None:
            return
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that they did."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents.setdefault(parent_of(path), []).append(int(path.name))
    found, waiting = [], [pid]
    while waiting:
        waiting += parents.get(one := waiting.pop(), [])
        found.append(one)
    return found[1:]


def parent_of(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


@dataclass(kw_only=True)
class Bench:
    """What a part is given. out: folder of results and logs; gpus: what a single process may take, in order; limit: seconds of the part; env: of its processes."""

    out: Path
    ranks: int
    gpus: list[int]
    recipe: str
    overrides: list[str]
    shapes: dict[str, list[str]]
    steps: dict[str, list[str]]
    seconds: float
    part: str = ""
    deadline: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    def keep(self, **result: Any) -> None:
        """Append one result of this part."""
        line = json.dumps({"part": self.part, **result})
        print(line, flush=True)
        with self.results.open("a") as file:
            file.write(line + "\n")

    def known(self, part: str) -> list[dict[str, Any]]:
        return [r for r in read_lines(self.results) if r["part"] == part]

    def start(self, name: str, command: list[str], *, ranks: int = 1, gpu: int | None = None) -> Job:
        """Python with these arguments, under torchrun where there are several ranks. gpu: the only one that a single process sees."""
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        log = self.out / f"{self.part}.{name}.log"
        process = subprocess.Popen(
            [*launch, *command],
            env=os.environ | self.env | seen | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        job = Job(name=name, process=process, log=log, began=time.monotonic())
        self.jobs.append(job)
        return job

    def wait(self, *jobs: Job) -> list[float]:
        """Seconds that each took. Raises RuntimeError for a job that failed or is not done when the part's time is up."""
        took: dict[str, float] = {}
        while len(took) < len(jobs):
            for job in jobs:
                code = job.process.poll()
                if code is not None and job.name not in took:
                    took[job.name] = time.monotonic() - job.began
                    if code:
                        raise RuntimeError(f"{job.name} ended with {code}: {tail(job.log)}")
            if time.monotonic() > self.deadline:
                raise RuntimeError(f"out of time; {jobs[0].log.name} ends: {tail(jobs[0].log)}")
            time.sleep(0.05)
        return [took[job.name] for job in jobs]

    def train(self, name: str, *overrides: str, ranks: int = 1, gpu: int | None = None) -> Job:
        """The recipe's training in DIR/name."""
        command = [
            "-m",
            "dflash_train.train",
            "-c",
            self.recipe,
            *self.overrides,
            f"output_dir={self.out / name}",
            *overrides,
        ]
        return self.start(name, command, ranks=ranks, gpu=gpu)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What a JSONL file holds so far, without a line that is still being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def tail(log: Path, most: int = 700) -> str:
    """The last error in a log, or its end."""
    text = log.read_text(errors="replace")
    errors = [line for line in text.splitlines() if re.search(r"(Error|error|failed)\b.*:", line)]
    return (" | ".join(errors[:3]) or text)[-most:]


# --- a training step ---------------------------------------------------------------------------------------------


def timed(bench: Bench, ranks: int, measurements: list[dict[str, Any]], *, gpu: int | None = None) -> None:
    """Have one job take measurements of bench_step.py after each other, and keep what it found."""
    into = bench.out / f"{bench.part}.steps.jsonl"
    into.unlink(missing_ok=True)
    for m in measurements:
        m["argv"] += ["--json", str(into)]
    job = bench.start("steps", [str(Path(__file__)), "--measure", json.dumps(measurements)], ranks=ranks, gpu=gpu)
    try:
        bench.wait(job)
    finally:
        for found in read_lines(into):
            bench.keep(**found)


def measure(measurements: list[dict[str, Any]]) -> None:
    """What a job of `timed` does on each of its ranks: argv of bench_step.py, ddp: further arguments of DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dflash_train.engine.torch as engine
    from dflash_train import ranks

    path = Path(__file__).with_name("bench_step.py")
    spec = importlib.util.spec_from_file_location("bench_step", path)
    bench_step = sys.modules["bench_step"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench_step)

    def built_with(more: dict[str, Any]) -> type:
        class Tuned(DistributedDataParallel):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **kwargs | more)

        return Tuned

    failed = False
    for m in measurements:
        engine.DistributedDataParallel = built_with(m.get("ddp", {}))
        try:
            bench_step.one(m["argv"])
        except Exception:
            # What all ranks meet, such as a library that is not there, is no reason to measure nothing else.
            failed = True
            traceback.print_exc()
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    ranks.stop()
    if failed:
        raise SystemExit(1)


def argv(bench: Bench, shape: str, label: str, *overrides: str, ranks: int = 1) -> list[str]:
    """Of bench_step.py: a shape with so many times the rows, or with its rows shared."""
    words = [*bench.shapes[shape], *bench.steps[shape]]
    if not shape.endswith(SHARED):
        at = words.index("--rows") + 1
        words[at] = str(int(words[at]) * ranks)
    return [*words, "--label", f"{shape}: {label}", *overrides]


def alone(bench: Bench) -> None:
    each = [{"argv": argv(bench, shape, "alone")} for shape in bench.shapes]
    timed(bench, 1, [*each, *profiled(bench, "alone, profiled", 1)], gpu=bench.gpus[0])


def by_ddp(bench: Bench) -> list[dict[str, Any]]:
    first, *others = bench.shapes
    engine = ["engine.kind=ddp"]
    several = [
        {"argv": argv(bench, first, label, *engine, *words, ranks=bench.ranks), "ddp": more}
        for label, (more, words) in VARIANTS.items()
    ]
    return several + [{"argv": argv(bench, shape, "ddp", *engine, ranks=bench.ranks)} for shape in others]


def profiled(bench: Bench, label: str, ranks: int) -> list[dict[str, Any]]:
    """The kernels of a step, in DIR/LABEL.txt, and how much of the exchange shows. The last of a job: a profiler slows everything that follows it."""
    few = ["--warmup", "3", "--steps", "3", "--profile"]
    named = [(shape, str(bench.out / f"{shape}, {label}.txt")) for shape in bench.shapes if not shape.endswith(SHARED)]
    return [{"argv": argv(bench, shape, label, *few, file, ranks=ranks)} for shape, file in named]


def by_shards(bench: Bench, kind: str) -> list[dict[str, Any]]:
    first = next(iter(bench.shapes))
    return [{"argv": argv(bench, first, kind, f"engine.kind={kind}", ranks=bench.ranks)}]


def engines(bench: Bench) -> None:
    sharded = [*by_shards(bench, "fsdp2"), *by_shards(bench, "deepspeed_zero2")]
    timed(bench, bench.ranks, [*by_ddp(bench), *sharded, *profiled(bench, "ddp, profiled", bench.ranks)])


def split(bench: Bench) -> None:
    first = next(iter(bench.shapes))
    place = "cuda:1" if gpus() > 1 else "cpu"
    timed(bench, 1, [{"argv": argv(bench, first, "target on the other GPU", f"target.device={place}")}])


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


# --- whole runs --------------------------------------------------------------------------------------------------


def parity(bench: Bench) -> None:
    n, one, other = bench.ranks, bench.gpus[0], bench.gpus[-1]
    few = [
        f"train.max_steps={STEPS}", f"train.checkpoint_every_steps={EVERY}", f"train.keep_checkpoints={STEPS}", "train.log_every_steps=1",
        f"train.global_batch_size={2 * n}", "train.micro_batch_size=2", "data.heldout=[]", "data.limit=400", "evaluate.client=off",
        "track.progress=false", "engine.timeout_minutes=5",
    ]  # fmt: skip
    bf16, resumed = [*few, "engine.precision=bfloat16"], "train.resume=true"
    # On a CPU a process that is alone, and so has all threads, cuts its sums otherwise.
    bench.env = NOTHING_TIMED | {"OMP_NUM_THREADS": "1"}

    def told(format: str, a: str, b: str, what: str, bounds: tuple[float, float] | None) -> None:
        compared = compare(bench.out / f"{format}.{a}", bench.out / f"{format}.{b}")
        first, most = bounds or (math.inf, math.inf)
        ok = compared["same_rows"] and compared["first_loss"] <= first and compared["losses"] <= most
        bench.keep(what=what, format=format, steps=STEPS, **compared, tolerance=bounds and most, ok=ok)

    # Compiled before it counts, by one process; another GPU's compiles for itself, since code names its GPU.
    bench.wait(bench.train("bf16.compiled", *bf16, "train.max_steps=1", gpu=one))
    # A single process beside ranks is slow, which does not matter here; two jobs of ranks would wait for each other's kernels.
    bench.wait(
        bench.train("bf16.ranks", *bf16, ranks=n),
        bench.train("bf16.one", *bf16, gpu=one),
        bench.train("bf16.whole", *bf16, f"train.micro_batch_size={2 * n}", gpu=other),
    )
    told("bf16", "one", "ranks", f"{n} ranks against one", ROUNDED)
    told("bf16", "one", "whole", "one in a single micro-batch against one", None)
    shortened(bench.out / "bf16.ranks", bench.out / "bf16.then_one", EVERY)
    bench.wait(
        bench.train("fp32.ranks", *few, *FP32, ranks=n),
        bench.train("fp32.one", *few, *FP32, gpu=one),
        bench.train("bf16.then_one", *bf16, resumed, gpu=other),
    )
    told("fp32", "one", "ranks", f"{n} ranks against one", EXACT)
    shortened(bench.out / "bf16.then_one", bench.out / "bf16.then_ranks", 2 * EVERY)
    bench.wait(bench.train("bf16.then_ranks", *bf16, resumed, ranks=n))
    told("bf16", "ranks", "then_ranks", f"{n} -> 1 -> {n} ranks against {n} undisturbed", EXACT)


def shortened(run: Path, copy: Path, step: int) -> None:
    """A run as a stop after `step` would have left it."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("export"))
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Relative differences of two runs: of the first step's loss, of any loss of any step, of the gradient norms and of the last weights; and whether
    all steps had the same rows and anchors (which supervised tokens are covered is counted exactly)."""
    from safetensors.torch import load_file

    curves = [
        {row["step"]: row for row in read_lines(run / "metrics.jsonl") if "train/loss" in row} for run in (one, other)
    ]
    if set(curves[0]) != set(curves[1]):
        raise RuntimeError(
            f"{one.name} and {other.name} have logged other steps: {sorted(curves[0])}, {sorted(curves[1])}"
        )
    worst: dict[str, float] = {}
    for name in ("train/base_loss", "train/selector_loss", "train/grad_norm"):
        pairs = [(curves[0][step][name], curves[1][step][name]) for step in sorted(curves[0])]
        worst[name] = max(relative(a, b) for a, b in pairs)
        if name == "train/base_loss":
            first = relative(*pairs[0])
    a, b = (load_file(run / "checkpoints" / f"step-{max(curves[0]):08d}" / "model.safetensors") for run in (one, other))
    apart = sum(float((a[k].double() - b[k].double()).square().sum()) for k in a) ** 0.5
    norm = sum(float(w.double().square().sum()) for w in a.values()) ** 0.5
    return {
        "same_rows": all(curves[0][s]["data/coverage"] == curves[1][s]["data/coverage"] for s in curves[0]),
        "first_loss": first,
        "losses": max(worst["train/base_loss"], worst["train/selector_loss"]),
        "grad_norms": worst["train/grad_norm"],
        "weights": apart / norm,
    }


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def kill(bench: Bench) -> None:
    """The time-out is set far beyond the part's limit, so that what ends the job is not that."""
    few = [
        "train.max_steps=1000000",
        "data.heldout=[]",
        "data.limit=400",
        "track.progress=false",
        "engine.timeout_minutes=60",
    ]
    few += ["train.checkpoint_every_steps=1000000", "train.log_every_steps=10"]
    job = bench.train("run", *few, ranks=bench.ranks)
    metrics = bench.out / "run" / "metrics.jsonl"
    while len(read_lines(metrics)) < 3:
        if job.process.poll() is not None or time.monotonic() > bench.deadline:
            raise RuntimeError(f"no three log lines: {tail(job.log)}")
        time.sleep(0.05)
    os.kill(process_of_rank(job.process.pid, bench.ranks - 1), signal.SIGKILL)
    began = time.monotonic()
    while job.process.poll() is None:
        if time.monotonic() > bench.deadline:
            raise RuntimeError(
                f"still running {time.monotonic() - began:.0f} s after its rank was killed: {tail(job.log)}"
            )
        time.sleep(0.02)
    said = job.log.read_text(errors="replace")
    messages = re.findall(r"^failed: (rank \d+ lost contact.*)$", said, re.MULTILINE)
    bench.keep(
        seconds=round(time.monotonic() - began, 2), exit_code=job.process.returncode, messages=len(messages), message=(messages or [""])[0][:120]
    )  # fmt: skip


def process_of_rank(launcher: int, rank: int) -> int:
    """The process that torchrun started for a rank."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if parent_of(path) == launcher and f"RANK={rank}" in (path / "environ").read_text().split("\0"):
                return int(path.name)
    raise RuntimeError(f"process {launcher} has no rank {rank}")


def answered(bench: Bench, processes: int) -> None:
    """Rows per second of the command, from its start to its end, and tokens per second without its start."""
    jobs = []
    for i in range(processes):
        shard = ["--shard", f"{i}/{processes}"] if processes > 1 else []
        output = f"regenerate.output={bench.out / f'{bench.part}.jsonl'}"
        command = [str(ROOT / "data_prep" / "regenerate.py"), "-c", bench.recipe, *shard, *bench.overrides, output]
        jobs.append(bench.start(f"shard{i}", command, gpu=bench.gpus[i % len(bench.gpus)]))
    seconds = max(bench.wait(*jobs))
    stem = bench.out / bench.part
    names = [f"{stem}.{i}-of-{processes}.jsonl" for i in range(processes)] if processes > 1 else [f"{stem}.jsonl"]
    manifests = [json.loads(Path(f"{name}.manifest.json").read_text()) for name in names]
    rows, tokens, within = (
        sum(m["rows"] for m in manifests),
        sum(m["tokens"] for m in manifests),
        max(m["seconds"] for m in manifests),
    )
    bench.keep(
        processes=processes, rows=rows, tokens=tokens, seconds=round(within, 2), command_seconds=round(seconds, 2),
        rows_per_s=round(rows / within, 1), tokens_per_s=round(tokens / within),
    )  # fmt: skip


def train(bench: Bench) -> None:
    """As many steps as fit into --seconds at the speed that `ddp` found for the short documents, else at 30 ms a step."""
    label = f"{list(bench.shapes)[-1]}: ddp"
    found = [r["ms_wall"] for r in read_lines(bench.results) if r.get("label") == label]
    ms = found[-1] if found else 30.0
    given = any(text.startswith("train.max_steps=") for text in bench.overrides)
    steps = [] if given else [f"train.max_steps={max(1, int(1000 * bench.seconds / ms))}"]
    run = bench.out / "trained"
    alone = bench.gpus[0] if bench.ranks == 1 else None
    job = bench.train("trained", "track.progress=false", "evaluate.client=off", *steps, ranks=bench.ranks, gpu=alone)
    first = last = None  # (time, step) of log lines, as they appear
    while job.process.poll() is None and time.monotonic() < bench.deadline:
        logged = [row for row in read_lines(run / "metrics.jsonl") if "train/loss" in row]
        if logged and (last is None or logged[-1]["step"] > last[1]):
            last = (time.monotonic(), logged[-1]["step"])
            first = first or last
        time.sleep(0.1)
    (seconds,) = bench.wait(job)
    if last is None:
        raise RuntimeError(f"no step was logged while it ran: {tail(job.log)}")
    rows = read_lines(run / "metrics.jsonl")
    pauses = sum(row.get("perf/eval_seconds", 0.0) for row in rows if row["step"] < last[1])
    per_step = (last[0] - first[0] - pauses) / max(1, last[1] - first[1])
    bench.keep(
        steps=last[1], command_seconds=round(seconds, 1), training_seconds=round(per_step * last[1], 1), ms=round(1000 * per_step, 2),
        blocks_per_s=round(max(row.get("perf/blocks_per_second", 0.0) for row in rows)),
        heldout=[(row["step"], round(row["heldout/walk_tau"], 3)) for row in rows if "heldout/walk_tau" in row],
    )  # fmt: skip


def evaluate(bench: Bench) -> None:
    """Of the export, as it would be served. A verdict of the command (exit code 1) is a result."""
    run = bench.out / "trained"
    (run / "evaluation.json").unlink(missing_ok=True)
    command = ["-m", "dflash_train.evaluate", str(run / "export"), *bench.overrides]
    job, verdict = bench.start("run", command, gpu=bench.gpus[0]), "passed"
    try:
        bench.wait(job)
    except RuntimeError as error:
        if not (run / "evaluation.json").exists():
            raise
        verdict = str(error)
    written = json.loads((run / "evaluation.json").read_text())
    bench.keep(evaluation=figures(written), verdict=verdict, command_seconds=round(time.monotonic() - job.began, 1))


def figures(evaluation: dict[str, Any]) -> dict[str, dict[str, float]]:
    """tau by decoding, walk tau and acceptance at uniform anchors (without the selector too), each by domain."""
    forced, decoded = evaluation["teacher_forced"], evaluation["decoded"]
    tables = {"tau": decoded["tau"] | {"all": decoded["tau_all"]}}
    tables |= {name: forced[name] for name in ("walk_tau", "base_walk_tau", "accept_len", "base_accept_len")}
    return {name: {domain: round(one["value"], 3) for domain, one in table.items()} for name, table in tables.items()}


RUN: dict[str, Callable[[Bench], None]] = {
    "alone": alone,
    "ddp": lambda bench: timed(bench, bench.ranks, [*by_ddp(bench), *profiled(bench, "ddp, profiled", bench.ranks)]),
    "fsdp2": lambda bench: timed(bench, bench.ranks, by_shards(bench, "fsdp2")),
    "zero2": lambda bench: timed(bench, bench.ranks, by_shards(bench, "deepspeed_zero2")),
    "engines": engines,
    "split": split,
    "parity": parity,
    "kill": kill,
    "regenerate_alone": lambda bench: answered(bench, 1),
    "regenerate": lambda bench: answered(bench, bench.ranks),
    "train": train,
    "evaluate": evaluate,
}


# --- tables ------------------------------------------------------------------------------------------------------


def markdown(results: list[dict[str, Any]]) -> str:
    """Everything that was measured; the last result of a part counts where it was measured again."""
    by_part: dict[str, list[dict[str, Any]]] = {part: [r for r in results if r["part"] == part] for part in PARTS}
    steps = {r["label"]: r for r in results if "label" in r}
    baseline = {shape_of(r): r["blocks_per_s"] for r in by_part["alone"] if r.get("label", "").endswith(": alone")}
    lines = []
    if steps:
        head = (
            "step",
            "GPUs",
            "ms",
            "ms by the clock",
            "blocks/s per GPU",
            "of one GPU's",
            "NCCL ms",
            "of it alone",
            "peak GiB",
            "above static",
            "host syncs",
        )
        lines += table(head, [step_row(r, baseline.get(shape_of(r))) for r in steps.values()])
    if by_part["parity"]:
        head = ("runs", "format", "first loss", "losses", "gradient norms", "weights", "tolerance", "same rows", "")
        lines += table(head, [parity_row(r) for r in by_part["parity"] if "what" in r])
    for part in ("kill", "regenerate_alone", "regenerate", "train", "evaluate"):
        for r in by_part[part]:
            lines += [f"{part}: " + json.dumps({k: v for k, v in r.items() if k != "part"}), ""]
    failed = [f"{r['part']}: FAILED: {r['failed']}" for r in results if "failed" in r]
    return "\n".join([*lines, *failed])


def shape_of(result: dict[str, Any]) -> str:
    return result["label"].partition(":")[0]


def step_row(r: dict[str, Any], alone: float | None) -> list[Any]:
    gpus = max(r["ranks"], len(r["peak_gib_by_gpu"]))
    per_gpu = r["ranks"] * r["blocks_per_s"] / gpus
    share = f"{per_gpu / alone:.1%}" if alone else "-"
    peak = " + ".join(map(str, r["peak_gib_by_gpu"])) or "-"
    named = [r.get(name, "-") for name in ("nccl_ms", "nccl_alone_ms")]
    last = [peak, r["above_static_gib"], r.get("host_syncs", "-")]
    return [r["label"], gpus, r["ms"], r["ms_wall"], round(per_gpu, 1), share, *named, *last]


def parity_row(r: dict[str, Any]) -> list[Any]:
    numbers = [f"{r[name]:.1e}" for name in ("first_loss", "losses", "grad_norms", "weights")]
    return [
        r["what"],
        r["format"],
        *numbers,
        "-" if r["tolerance"] is None else f"{r['tolerance']:.1e}",
        "yes" if r["same_rows"] else "NO",
        "ok" if r["ok"] else "NOT within",
    ]


def table(head: tuple[str, ...], rows: list[list[Any]]) -> list[str]:
    cells = [list(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return [*("| " + " | ".join(row) + " |" for row in cells), ""]


# --- the command -------------------------------------------------------------------------------------------------


def lengths_of(rows: Path, into: Path, most: int = 20_000) -> Path:
    """[tokens, supervised tokens] of each row of a file with prompt_ids and response_ids, as bench_step.py takes them."""
    opened = gzip.open(rows, "rt") if rows.suffix == ".gz" else rows.open()
    with opened as file:
        read = (json.loads(line) for line, _ in zip(file, range(most), strict=False))
        pairs = [[len(row["prompt_ids"]) + len(row["response_ids"]), len(row["response_ids"])] for row in read]
    into.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return into


def shapes_of(tiny: bool, rows: Path | None, out: Path) -> dict[str, list[str]]:
    """Of bench_step.py: at real dimensions, with long rows, one for each rank and a recipe's eight for all; and as a small target has it, many short documents."""
    names = ("--preset", "--row-length", "--rows", "--micro", "--anchors")
    big = ("qwen3-4b", "4096", "1", "1", "512")
    small = ("smollm2-135m", "2048", "4", "4", "1024")
    if tiny:
        big, small = ("tiny", "64", "1", "1", "4"), ("tiny", "128", "2", "2", "8")
    whole = big[:2] + ("8",) + big[3:]
    short = [word for pair in zip(names, small, strict=True) for word in pair]
    short.append("objective.chunk_rows=4096")  # as its recipe has it
    if rows is not None:
        short += ["--lengths", str(lengths_of(rows, out / "lengths.jsonl"))]
    name = "tiny" if tiny else "Qwen3-4B"
    return {
        name: [word for pair in zip(names, big, strict=True) for word in pair],
        f"{name}, 8 {SHARED}": [word for pair in zip(names, whole, strict=True) for word in pair],
        "short documents": short,
    }


@contextlib.contextmanager
def in_time(bench: Bench, part: str, seconds: float) -> Iterator[None]:
    """A part: what goes wrong in it is a result too, and none of its processes outlives it."""
    began = time.monotonic()
    bench.part, bench.deadline, bench.jobs, bench.env = part, began + seconds, [], {}
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        bench.keep(failed=str(error)[:1000])
    finally:
        for job in bench.jobs:
            job.end()
        print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="PART or key=value")
    parser.add_argument("--out", type=Path, default=Path("outputs/ranks"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", default="0,1", help="what single processes may take, in order")
    parser.add_argument("-c", dest="recipe", default="smollm2_135m.yaml")
    parser.add_argument("--rows", type=Path, help="file whose rows give the lengths of the short documents")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training, for train")
    parser.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS")
    parser.add_argument(
        "--warmup", type=int, default=12, help="steps before those that are timed: DDP measures itself in the first ten"
    )
    parser.add_argument("--steps", type=int, default=24, help="timed steps")
    parser.add_argument("--shape", help="only this one, by its name in the table")
    parser.add_argument("--tiny", action="store_true", help="dimensions that a CPU can time, to try the script")
    parser.add_argument("--table", action="store_true", help="print what the results are by now")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(words)
    if args.measure:
        measure(json.loads(args.measure))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    parts = [word for word in args.words if "=" not in word]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    shapes = {
        name: words for name, words in shapes_of(args.tiny, args.rows, args.out).items() if args.shape in (None, name)
    }
    bench = Bench(
        out=args.out.resolve(),
        ranks=args.ranks,
        gpus=[int(gpu) for gpu in args.gpus.split(",")],
        recipe=args.recipe,
        overrides=[word for word in args.words if "=" in word],
        shapes=shapes,
        steps={shape: ["--warmup", str(args.warmup), "--steps", str(args.steps)] for shape in shapes},
        seconds=args.seconds,
    )
    limits = LIMITS | {name: float(value) for name, _, value in (text.partition("=") for text in args.limit)}
    for part in parts:
        with in_time(bench, part, limits[part]):
            RUN[part](bench)
    if args.table:
        print(markdown(read_lines(bench.results)))
    return 1 if any("failed" in r or r.get("ok") is False for part in parts for r in bench.known(part)) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
