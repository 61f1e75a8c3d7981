"""Time a training step at real dimensions with random weights: python scripts/bench_step.py --preset qwen3-4b [engine.compile=true ...]

The target is built on the device from a config alone. Everything else is what training runs: the recipe's objects through build.step_over,
RowStream, the engine and train.train_step: target pass and capture, anchors, masks, drafter, losses, metrics, backward, clipping and AdamW over
fp32 masters. Several measurements are separated by --then. Prints one JSON line; --json writes it to a file, --profile the table of kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_train import flops, ranks
from dflash_train.build import Outline, step_over
from dflash_train.checkpoint import TrainState
from dflash_train.clock import Clock
from dflash_train.config.load import load_recipe, run_command
from dflash_train.config.schema import Recipe
from dflash_train.config.values import require_packages
from dflash_train.data.stream import RowStream, StreamConfig
from dflash_train.drafter.spec import resolve_spec
from dflash_train.engine.build import build_engine
from dflash_train.feed import Feed
from dflash_train.metrics import MetricWindow
from dflash_train.objective.loss import decay, default_gamma
from dflash_train.start import Counts, Run
from dflash_train.target.elsewhere import place_of_its_own
from dflash_train.target.hf import HFTarget, resolve_dtype
from dflash_train.target.info import read_target_info
from dflash_train.train import train_step
from dflash_train.types import TargetInfo, TokenizedExample

# hidden, layers, query heads, key/value heads, head dim, MLP, vocabulary, tied
PRESETS = {
    "tiny": (128, 8, 4, 2, 32, 384, 4096, True),
    "smollm2-135m": (576, 30, 9, 3, 64, 1536, 49152, True),
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "qwen3-4b": (2560, 36, 32, 8, 128, 9728, 151936, True),
    "qwen3-8b": (4096, 36, 32, 8, 128, 12288, 151936, False),
    "qwen3.8-27b": (5120, 64, 32, 8, 128, 17408, 248320, False),
}


def random_target(
    preset: str, recipe: Recipe, device: torch.device, layers: int | None, vocab: int | None
) -> tuple[Any, TargetInfo]:
    """A Qwen3 with random weights, in the target's precision, made where it will live."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    hidden, all_layers, heads, kv_heads, head_dim, mlp, own_vocab, tied = PRESETS[preset]
    vocab = vocab or own_vocab
    config = Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers or all_layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, intermediate_size=mlp, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=40960,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        info = read_target_info(folder)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=resolve_dtype(recipe.target.precision, device), attn_implementation="sdpa"
        )
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return model.eval().requires_grad_(False), info


def documents(args: argparse.Namespace, vocab: int, rows: int) -> list[TokenizedExample]:
    """Random tokens: one document per row, of which the last three quarters are supervised, or documents as long as --lengths says."""
    random = np.random.default_rng(0)
    if args.lengths:
        pairs = [json.loads(line) for line in Path(args.lengths).read_text().splitlines()]
        pairs = [(min(total, args.row_length), supervised) for total, supervised in pairs if supervised >= 2]
    else:
        pairs = [(args.row_length, args.row_length * 3 // 4)] * rows
    made = []
    for i, (total, supervised) in enumerate(pairs):
        ids = random.integers(0, vocab - 300, total).astype(np.int32)
        mask = np.arange(total) >= total - supervised
        made.append(TokenizedExample(id=f"d{i}", domain="x", token_ids=ids, supervised=mask))
    return made


def build(args: argparse.Namespace, recipe: Recipe, device: torch.device) -> Run:
    place = place_of_its_own(recipe.target.device, device, ranks.world_size())
    model, info = random_target(args.preset, recipe, place, args.target_layers, args.vocab)
    spec = resolve_spec(recipe.drafter, info)
    gamma = recipe.objective.loss_decay_gamma or default_gamma(spec.block_size)
    o = Outline(recipe=recipe, target_path="random", info=info, tokenizer=None, spec=spec, gamma=gamma)
    target = HFTarget.over(model, recipe.target, info, spec.target_layer_ids)
    module = step_over(o, target, device)
    total = args.warmup + args.steps + 4
    train = recipe.train
    stream = RowStream(
        documents(args, info.vocab_size, train.global_batch_size * total),
        StreamConfig(
            row_length=args.row_length,
            num_anchors=train.num_anchors,
            decay_S=np.array(decay(spec.block_size, gamma)),
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            seed=0,
            pack=recipe.data.pack,
        ),
    )
    engine = build_engine(
        module,
        recipe.engine,
        recipe.optimizer,
        micro_batches=stream.micro_batches_per_rank(ranks.world_size()),
        most_in_a_row=train.max_skipped_steps,
    )
    module.train()
    clock = Clock(device)
    return Run(
        recipe=recipe, folder=Path("."), outline=o, stream=stream, heldout=[], prompts=[], module=module, engine=engine, device=device,
        total_steps=total, state=TrainState(step=0, identity={}), tracker=None, writer=None, window=MetricWindow(), counts=Counts(), clock=clock,
        feed=Feed(stream, module.target, device, clock, end=total, read_ahead=recipe.engine.read_ahead),
    )  # fmt: skip


def static_bytes(run: Run) -> int:
    """Target, drafter, gradients and AdamW's two moments."""
    size = lambda module: sum(p.numel() * p.element_size() for p in {*module.parameters(), *module.buffers()})
    return size(run.module.target.model) + 4 * size(run.module.drafter)


def held_by_graphs(gpu: int) -> int:
    """Bytes that the pools of CUDA graphs keep between replays, which torch counts as free and nothing else can have."""
    pools = [s for s in torch.cuda.memory_snapshot() if s["device"] == gpu and s["segment_pool_id"] != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in pools)


def recompilations() -> int:
    return sum(torch._dynamo.utils.counters["recompiles"].values()) if hasattr(torch, "_dynamo") else 0


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compile_seconds() -> float:
    times = torch._dynamo.utils.compilation_time_metrics
    return round(sum(sum(v) for k, v in times.items() if k.startswith("_compile.compile_inner")), 1)


def host_syncs(run: Run, step: int) -> int:
    """Warnings of torch's own detector in one step."""
    import warnings

    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_step(run, step)
    torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "synchroniz" in str(w.message)]
    for w in found:
        print(f"host sync: {w.filename}:{w.lineno}", file=sys.stderr)
    return len(found)


Kernel = tuple[float, float, str]  # began, ended (microseconds), name


def kernels_of(run: Run, step: int) -> list[Kernel]:
    """What the device ran in one step, by the time it began."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        train_step(run, step)
        torch.cuda.synchronize()
    return sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in found.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )


def exchange(kernels: list[Kernel]) -> tuple[float, float]:
    """(milliseconds in which NCCL's kernels ran, milliseconds of these in which no other kernel did)."""
    marks = sorted(
        (at, change, "nccl" in name.lower()) for t0, t1, name in kernels for at, change in ((t0, 1), (t1, -1))
    )
    running, spent, bare, last = [0, 0], 0.0, 0.0, 0.0
    for at, change, nccl in marks:
        if running[True]:
            spent += at - last
            bare += 0.0 if running[False] else at - last
        running[nccl] += change
        last = at
    return spent / 1000, bare / 1000


def profile(kernels: list[Kernel], path: Path) -> None:
    """Kernels of one step by time, and how long none ran."""
    by_name: dict[str, list[float]] = {}
    for began, ended, name in kernels:
        by_name.setdefault(name, []).append((ended - began) / 1000)
    busy, until = 0.0, 0.0
    for began, ended, _ in kernels:
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    span = (kernels[-1][1] - kernels[0][0]) / 1000
    lines = [
        f"{len(kernels)} kernels, {span:.1f} ms from the first to the last, of it idle {span - busy / 1000:.1f} ms"
    ]
    for name, times in sorted(by_name.items(), key=lambda pair: -sum(pair[1])):
        lines.append(f"{sum(times):9.3f} ms {len(times):5d} x  {name[:180]}")
    path.write_text("\n".join(lines))
    print("\n".join(line[:140] for line in lines[:45]), flush=True)


def measure(args: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    device = ranks.start(recipe.engine.timeout_minutes)
    cuda = device.type == "cuda"
    gpus = {device, place_of_its_own(recipe.target.device, device, ranks.world_size())} if cuda else set()
    gpus = sorted(gpu.index for gpu in gpus)
    wait = torch.cuda.synchronize if cuda else lambda: None
    if cuda:
        torch.cuda.set_stream(torch.cuda.Stream(priority=-1) if args.prefer_drafter else torch.cuda.default_stream())
    known = graphs(), compile_seconds()
    began = time.perf_counter()
    run = build(args, recipe, device)
    wait()
    built = time.perf_counter()
    train_step(run, 0)
    wait()
    first = time.perf_counter()
    for step in range(1, args.warmup):
        train_step(run, step)
    wait()
    run.clock.report()
    run.counts.restart()
    before = recompilations(), graphs()
    if cuda:
        for i in gpus:
            torch.cuda.reset_peak_memory_stats(i)
    whole, walls = Clock(device), time.perf_counter()
    for step in range(args.warmup, args.warmup + args.steps):
        with whole("step"):
            train_step(run, step)
    wait()
    walls = (time.perf_counter() - walls) / args.steps
    parts = run.clock.report()
    times = whole.report()["step"]
    per_step = lambda name: round(sum(parts[name]) / args.steps, 2)
    blocks, needed = run.counts.values[1] / args.steps, run.counts.values[-1] / args.steps
    most = flops.peak(torch.cuda.get_device_name()) if cuda else None
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    metrics = run.window.report()
    last = args.warmup + args.steps
    given = time.perf_counter()
    train_step(run, last)
    host = time.perf_counter() - given  # that the device was given a step's work
    wait()
    result = {
        "label": args.label,
        "preset": args.preset,
        "overrides": args.overrides,
        "row_length": args.row_length,
        "ranks": ranks.world_size(),
        "rows": recipe.train.global_batch_size,
        "blocks": round(blocks, 1),  # of one rank, as all figures
        "ms": round(statistics.median(times), 2),
        "ms_wall": round(1000 * walls, 2),
        "ms_host": round(1000 * host, 2),
        **{name: per_step(name) for name in sorted(parts)},
        "blocks_per_s": round(blocks / walls, 1),
        "tflop": round(needed / 1e12, 2),
        "mfu": most and round(needed / walls / most, 3),
        "static_gib": round(static_bytes(run) / 2**30, 2),
        "peak_gib": round(peak / 2**30, 2),
        "above_static_gib": round((peak - static_bytes(run)) / 2**30, 2),
        "build_s": round(built - began, 1),
        "first_step_s": round(first - built, 1),
        "graphs_gib": round(sum(held_by_graphs(i) for i in gpus) / 2**30, 2),  # of all GPUs, and not in any peak
        "peak_gib_by_gpu": [round(torch.cuda.max_memory_allocated(i) / 2**30, 2) for i in gpus],
        "compile_s": round(compile_seconds() - known[1], 1),
        "graphs": graphs() - known[0],
        "recompilations_after_warmup": recompilations() - before[0] + graphs() - before[1],
        "target_m": round(sum(p.numel() for p in run.module.target.model.parameters()) / 1e6, 1),
        "drafter_m": round(sum(p.numel() for p in run.module.drafter.parameters()) / 1e6, 1),
        "base_loss": round(metrics.get("base_loss", float("nan")), 4),
    }
    if cuda:
        result["host_syncs"] = host_syncs(run, last + 1)
        if args.profile:
            kernels = kernels_of(run, last + 2)
            result["nccl_ms"], result["nccl_alone_ms"] = (round(x, 2) for x in exchange(kernels))
            if ranks.is_rank0():
                profile(kernels, Path(args.profile))
    return result


def main(argv: list[str]) -> int:
    """Several measurements in one process, separated by --then."""
    while "--then" in argv:
        at = argv.index("--then")
        one(argv[:at])
        argv = argv[at + 1 :]
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    one(argv)
    return 0


def one(argv: list[str]) -> None:
    """One measurement, printed by rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--row-length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1, help="packed rows per step")
    parser.add_argument("--micro", type=int, default=1, help="packed rows per micro-batch")
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--target-layers", type=int, help="instead of the preset's")
    parser.add_argument("--vocab", type=int, help="instead of the preset's")
    parser.add_argument("--together", type=int, default=HFTarget.TOGETHER, help="target layers compiled as one")
    parser.add_argument(
        "--prefer-drafter", action="store_true", help="its kernels before the target's, where both wait"
    )
    parser.add_argument("--lengths", help="JSONL of [tokens, supervised tokens], one document each")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--label", default="")
    parser.add_argument("--json", help="file to append the JSON line to")
    parser.add_argument(
        "--profile",
        help="file for the table of kernels of one step; also how long NCCL's run, and how long alone. Slows what follows in the same process",
    )
    parser.add_argument(
        "--rival", action="store_true", help="then time NeMo's step, its drafter compiled and not, and print both"
    )
    parser.add_argument("overrides", nargs="*", help="key=value of a recipe")
    args = parser.parse_intermixed_args(argv)
    if args.rival:  # before ours is timed
        from bench_nemo_step import INSTALL, NEEDED

        require_packages("--rival", NEEDED, INSTALL)
    HFTarget.TOGETHER = args.together
    mask = (args.vocab or PRESETS[args.preset][6]) - 1
    recipe = load_recipe(
        "demo",
        [
            f"train.global_batch_size={args.rows}", f"train.micro_batch_size={args.micro}", f"train.num_anchors={args.anchors}",
            f"drafter.block_size={args.block_size}", f"drafter.num_hidden_layers={args.draft_layers}", f"drafter.mask_token_id={mask}",
            "drafter.target_layer_ids=null", "drafter.selector_rank=256", "drafter.selector_top_k=16", "drafter.conv_kernel_size=2",
            "drafter.conv_group_size=16", "drafter.sliding_window=null", f"data.max_length={args.row_length}", "target.precision=auto", "engine.threads=null", *args.overrides,
        ],
    )  # fmt: skip
    result = measure(args, recipe)
    if not ranks.is_rank0():
        return
    print("JSON " + json.dumps(result), flush=True)
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps(result) + "\n")
    if args.rival:
        shape = [
            "--preset",
            args.preset,
            "--row-length",
            args.row_length,
            "--rows",
            args.rows,
            "--anchors",
            args.anchors,
        ]
        shape += ["--block-size", args.block_size, "--draft-layers", args.draft_layers, "--lengths", args.lengths]
        shape = [str(word) for word in shape if word is not None][: None if args.lengths else -1]
        print(compared(result, [nemo(shape, args), nemo([*shape, "--compile"], args)]), flush=True)


def nemo(shape: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """What bench_nemo_step.py measures, in a process of its own."""
    counts = ["--warmup", str(args.warmup), "--steps", str(args.steps), *(["--json", args.json] if args.json else [])]
    command = [sys.executable, str(Path(__file__).with_name("bench_nemo_step.py")), *shape, *counts]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line.removeprefix("JSON ") for line in done.stdout.splitlines() if line.startswith("JSON ")]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def compared(ours: dict[str, Any], theirs: list[dict[str, Any]]) -> str:
    names = ("ms", "target", "draft", "backward", "optimizer", "blocks_per_s", "above_static_gib")
    rows = [["", *names, "time of ours"]]
    for result in (ours, *theirs):
        share = f"{ours['ms'] / result['ms']:.2f}"
        rows.append([result["label"] or "dflash_train", *(str(result[name]) for name in names), share])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    run_command(main)
