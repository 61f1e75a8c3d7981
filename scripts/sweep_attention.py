"""Tile sizes of the draft's attention, each timed alone: python scripts/sweep_attention.py [--only forward queries keys flex] [--workers 14]

Workers compile side by side; whoever has the lock has the GPU. Needs CUDA. One line per setting, the fastest last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

from dflash_train.drafter import mask as masks
from dflash_train.kernels import attention as ours
from dflash_train.types import DraftBlocks

T, N, S, HEADS, KV, D = 4096, 512, 8, 32, 8, 128  # Qwen3-4B and -8B


def settings() -> list[tuple[str, dict]]:
    found: list[tuple[str, dict]] = []
    for (rows, keys, warps), stages, tma in itertools.product(
        [(128, 128, 8), (128, 64, 8), (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 32, 4)], [2, 3], [False, True]
    ):
        found.append(("forward", dict(rows=rows, KEYS=keys, num_warps=warps, num_stages=stages, TMA=tma)))
    for (rows, keys, warps), stages, tma in itertools.product(
        [(128, 64, 8), (128, 128, 8), (128, 32, 8), (64, 64, 4), (64, 32, 4), (64, 128, 4)], [1, 2, 3], [False, True]
    ):
        found.append(("queries", dict(rows=rows, KEYS=keys, num_warps=warps, num_stages=stages, TMA=tma)))
    for (queries, keys, warps), stages, tma in itertools.product(
        [(64, 128, 8), (32, 128, 8), (128, 128, 8), (64, 64, 4), (32, 64, 4), (128, 64, 4), (128, 64, 8)],
        [1, 2, 3],
        [False, True],
    ):
        found.append(("keys", dict(queries=queries, keys=keys, num_warps=warps, num_stages=stages, TMA=tma)))
    ahead = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    for values in [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2),
    ]:  # fmt: skip
        for more in ({}, {"PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": True}, {"USE_TMA": True}):
            found.append(("flex forward", dict(zip(ahead, values, strict=True)) | more))
    back = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages")
    for values in [
        (64, 128, 128, 64, 8, 2), (64, 128, 128, 64, 8, 3), (64, 64, 64, 64, 4, 2), (32, 64, 64, 32, 4, 2), (32, 64, 64, 32, 4, 3),
        (32, 128, 128, 32, 8, 3), (32, 128, 128, 32, 8, 2), (32, 128, 128, 32, 4, 2), (64, 128, 128, 64, 8, 1), (128, 128, 128, 128, 8, 1),
    ]:  # fmt: skip
        found.append(("flex backward", dict(zip(back, values, strict=True))))
    found += [("flex forward", {}), ("flex backward", {})]
    return found


def blocks(device: str) -> tuple[DraftBlocks, torch.Tensor]:
    """Anchors in the last three quarters of one document."""
    torch.manual_seed(0)
    anchors = (torch.randperm(T * 3 // 4)[:N].sort().values[None] + T // 4 - 1).to(device)
    made = DraftBlocks(
        anchors_BN=anchors,
        valid_BN=torch.ones_like(anchors, dtype=torch.bool),
        slots_BN=torch.full_like(anchors, S),
        labels_BNS=torch.zeros(1, N, S, dtype=torch.long, device=device),
        weights_BNS=torch.zeros(1, N, S, device=device),
        supervised_BNS=torch.zeros(1, N, S, dtype=torch.bool, device=device),
        scored_M=torch.empty(0, dtype=torch.long, device=device),
    )
    return made, torch.zeros(1, T, dtype=torch.long, device=device)


def inputs() -> list[torch.Tensor]:
    shapes = ((N * S, HEADS), (T, KV), (T, KV), (N * S, KV), (N * S, KV))
    return [torch.randn(1, n, h, D, device="cuda", dtype=torch.bfloat16) for n, h in shapes]


def timed(function, sweep: torch.Tensor, repeat: int = 12) -> float:
    """Median milliseconds on the device, memory swept before each run."""
    times = []
    for _ in range(repeat):
        sweep.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def kernel(kind: str, choice: dict):
    """(the kernel's launch alone, with its inputs made)."""
    from dflash_train.kernels import attention_triton

    choice = dict(choice)
    if kind == "keys":
        ours.BACK_QUERIES, ours.BACK_KEYS = choice.pop("queries"), choice.pop("keys")
    ours.SETTINGS[kind] = choice
    name = {"forward": "forward", "queries": "backward_queries", "keys": "backward_keys"}[kind]
    real, calls = getattr(attention_triton, name), []

    class Caught:
        def __getitem__(self, grid):
            return lambda *a, **k: calls.append((grid, a, k))

    sees = ours.block_spans(*blocks("cuda"), S, None, False)
    q, kc, vc, kb, vb = inputs()
    out = torch.randn_like(q)
    lse = torch.randn(1, N * S, HEADS, device="cuda") + 12
    for other in ("forward", "backward_queries", "backward_keys"):
        setattr(attention_triton, other, Caught() if other == name else Skipped())
    if kind == "forward":
        torch.ops.dflash_train.block_attention(q, kc, vc, kb, vb, *sees)
    else:
        torch.ops.dflash_train.block_attention_backward(torch.randn_like(q), out, lse, q, kc, vc, kb, vb, *sees)
    setattr(attention_triton, name, real)
    grid, a, k = calls[0]
    real.warmup(*a, grid=grid, **k)
    return lambda: real[grid](*a, **k)


class Skipped:
    def __getitem__(self, grid):
        return lambda *a, **k: None


def flex(kind: str, choice: dict):
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    mask = masks.flex_mask(*blocks("cuda"), S, None, False)
    q, kc, vc, kb, vb = inputs()
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, torch.cat([kc, kb], 1), torch.cat([vc, vb], 1)))
    run = torch.compile(flex_attention, dynamic=False)
    options = {f"{'fwd' if 'forward' in kind else 'bwd'}_{name}": value for name, value in choice.items()}
    if "forward" in kind:
        call = lambda: run(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)  # noqa: E731
        call()
        return call
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = run(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
    d = torch.randn_like(out)
    call = lambda: torch.autograd.grad(out, (q, k, v), d, retain_graph=True)  # noqa: E731
    call()
    return call


def one(job: tuple[str, dict]) -> tuple[str, dict, float | str]:
    kind, choice = job
    try:
        call = (flex if "flex" in kind else kernel)(kind, choice)
        torch.cuda.synchronize()
        with LOCK:
            sweep = torch.empty(2**28, dtype=torch.int8, device="cuda")
            result: float | str = timed(call, sweep)
    except Exception as error:  # a setting that does not fit the device is a result too
        result = f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"
    return kind, choice, result


def main() -> None:
    global LOCK
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=["keys", "queries", "forward", "flex"])
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=95, help="stop then")
    args = parser.parse_args()
    begin = time.time()
    LOCK = multiprocessing.get_context("fork").Lock()
    jobs = [job for job in settings() if any(job[0].startswith(name) for name in args.only)]
    made, _ = blocks("cpu")
    pairs = float(made.anchors_BN.sum()) * S + N * S * S
    counted = {"forward": 4, "queries": 6, "keys": 8, "flex forward": 4, "flex backward": 10}
    results: dict[str, list] = {}
    pool = multiprocessing.get_context("fork").Pool(args.workers)
    stream = pool.imap_unordered(one, jobs)
    for _ in jobs:
        try:
            kind, choice, result = stream.next(timeout=max(0.1, args.seconds - (time.time() - begin)))
        except multiprocessing.TimeoutError:
            print("out of time", flush=True)
            break
        results.setdefault(kind, []).append((result, choice))
        print(json.dumps({"kind": kind, "ms": result, **choice}), flush=True)
    pool.terminate()
    for kind, found in results.items():
        print(f"\n{kind}")
        for ms, choice in sorted((f for f in found if isinstance(f[0], float)), key=lambda f: -f[0])[-10:]:
            print(f"  {ms:7.3f} ms  {counted[kind] * pairs * HEADS * D / ms / 1e9:5.0f} TFLOP/s  {choice}")
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
