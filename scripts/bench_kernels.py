"""Time the training step's kernels against their plain twins and the hardware: python scripts/bench_kernels.py [--preset qwen3-4b]

For each piece: time of the slow twin, time of the fast path, the time that its bytes or its FLOPs take at the device's speed (roofline), the
largest difference between both. Needs CUDA.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import flex_attention

from dflash_train.drafter.layers import compiled
from dflash_train.drafter.mask import flex_mask, span_mask
from dflash_train.kernels.attention import block_attention, block_attention_reference
from dflash_train.kernels.gather import gather_dot, gather_dot_reference, take_rows
from dflash_train.kernels.head import score_rows_kernel, score_rows_reference
from dflash_train.objective import loss
from dflash_train.optim import AdamW
from dflash_train.types import DraftBlocks

# hidden, query heads, key/value heads, head dim, vocabulary
PRESETS = {
    "qwen3-4b": (2560, 32, 8, 128, 151_936),
    "qwen3-8b": (4096, 32, 8, 128, 151_936),
    "qwen3.8-27b": (5120, 32, 8, 128, 248_320),
}
BYTES_PER_S, FLOPS = 4.8e12, 990e12  # H200: memory, dense bf16
DEVICE = torch.device("cuda")


def timed(function: Callable[[], object], repeat: int = 20) -> float:
    """Median milliseconds on the device, memory swept before each run."""
    sweep = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    function()
    times = []
    for _ in range(repeat):
        sweep.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def line(name: str, slow: float | None, fast: float, roof: float, error: float | None) -> None:
    before = "      -" if slow is None else f"{slow:7.3f}"
    wrong = "" if error is None else f"   difference {error:.1e}"
    print(f"{name:<52} slow {before}  fast {fast:7.3f}  roofline {roof:7.3f} ms{wrong}", flush=True)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12))


def rows_of_logits(rows: int, vocab: int) -> None:
    logits = torch.randn(rows, vocab, device=DEVICE).bfloat16() * 3
    labels = torch.randint(vocab, (rows,), device=DEVICE)
    size = logits.numel() * 2
    for gradient in (False, True):
        wanted = score_rows_reference(logits, labels, 16, 1.0, None, gradient=gradient)
        got = score_rows_kernel(logits.clone(), labels, 16, 1.0, None, gradient=gradient)
        error = relative(got[2], wanted[2]) if gradient else relative(got[0], wanted[0])
        slow = timed(lambda: score_rows_reference(logits, labels, 16, 1.0, None, gradient=gradient), 5)  # noqa: B023
        work = logits.clone()
        fast = timed(lambda: score_rows_kernel(work, labels, 16, 1.0, None, gradient=gradient))  # noqa: B023
        traffic = size * (2 if gradient else 1)  # the second reading may come from the cache
        name = f"loss, top 16{', gradient' if gradient else ''} of {rows} rows of logits"
        line(name, slow, fast, 1000 * traffic / BYTES_PER_S, error)
    topk = timed(lambda: logits.topk(16, -1), 5)
    print(f"  torch.topk alone: {topk:.3f} ms")


def whole_head(M: int, hidden: int, vocab: int) -> None:
    h = torch.randn(M, hidden, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, hidden, device=DEVICE) * 0.02).bfloat16()
    labels = torch.randint(vocab, (M,), device=DEVICE)
    roof = 1000 * 4 * M * vocab * hidden / FLOPS
    for chunk in (512, 1024, 1792, 3584):
        limit, loss.LOGIT_BYTES = loss.LOGIT_BYTES, 2**40
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fast = timed(lambda: loss.linear_cross_entropy(h, weight, labels, top_k=16, chunk=chunk), 5)  # noqa: B023
        loss.LOGIT_BYTES = limit
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 - 0.25
        line(f"head, chunks of {chunk}, {peak:.2f} GiB", None, fast, roof, None)


def products(M: int, hidden: int, vocab: int, rank: int) -> None:
    """Random candidates, and candidates of which the first is the same in every slot."""
    h = torch.randn(M, hidden, device=DEVICE).bfloat16().requires_grad_()
    head = (torch.randn(vocab, hidden, device=DEVICE) * 0.02).bfloat16()
    query = torch.randn(M, rank, device=DEVICE).requires_grad_()
    book = (torch.randn(vocab, rank, device=DEVICE) * 0.02).requires_grad_()
    d = torch.randn(M, 16, device=DEVICE)
    for kind in ("random", "frequent"):
        index = torch.randint(vocab, (M, 16), device=DEVICE)
        if kind == "frequent":
            index[:, 0] = 7
        for name, x, table, size in (("unary scores", h, head, hidden * 2), ("pair scores", query, book, rank * 4)):
            found = []
            for function in (gather_dot_reference, gather_dot):
                x.grad = table.grad = None

                def both(function=function, x=x, table=table, index=index):
                    return torch.autograd.grad(
                        (function(x, table, index) * d).sum(), [t for t in (x, table) if t.requires_grad]
                    )

                found.append((both(), timed(both, 5)))
            error = max(relative(a, b) for a, b in zip(found[1][0], found[0][0], strict=True))
            traffic = 2 * M * 16 * size + (3 * table.numel() * 4 if table.requires_grad else 0)
            line(f"{name}, both ways, {kind}", found[0][1], found[1][1], 1000 * traffic / BYTES_PER_S, error)
    index = torch.randint(vocab, (M,), device=DEVICE)
    index[::10] = 11
    by = torch.randn(M, rank, device=DEVICE)
    slow = timed(lambda: torch.autograd.grad((book[index] * by).sum(), book), 5)
    fast = timed(lambda: torch.autograd.grad((take_rows(book, index) * by).sum(), book), 5)
    line("predecessor rows, both ways", slow, fast, 1000 * book.numel() * 4 / BYTES_PER_S, None)


def optimizer(hidden: int, vocab: int) -> None:
    """Three layers' worth of matrices and a codebook."""
    shapes = [(hidden, 4 * hidden)] * 9 + [(vocab, 256)]
    parameters = [torch.randn(shape, device=DEVICE) * 0.02 for shape in shapes]
    for p in parameters:
        p.requires_grad_().grad = torch.randn_like(p)
    size = sum(p.numel() for p in parameters)
    times = []
    for kind in (torch.optim.AdamW, AdamW):
        optimizer = kind(parameters, lr=1e-4, fused=True)
        times.append(timed(optimizer.step, 10))
        del optimizer
    line(f"AdamW, {size / 1e6:.0f} M numbers", *times, 1000 * 28 * size / BYTES_PER_S, None)


def some_blocks(T: int, N: int, S: int) -> tuple[DraftBlocks, torch.Tensor]:
    anchors = torch.randperm(T * 3 // 4, device=DEVICE)[:N].sort().values[None] + T // 4 - 1
    blocks = DraftBlocks(
        anchors_BN=anchors,
        valid_BN=torch.ones_like(anchors, dtype=torch.bool),
        slots_BN=torch.full_like(anchors, S),
        labels_BNS=torch.zeros(1, N, S, dtype=torch.long, device=DEVICE),
        weights_BNS=torch.zeros(1, N, S, device=DEVICE),
        supervised_BNS=torch.zeros(1, N, S, dtype=torch.bool, device=DEVICE),
        scored_M=torch.empty(0, dtype=torch.long, device=DEVICE),
    )
    return blocks, torch.zeros(1, T, dtype=torch.long, device=DEVICE)


def attention(T: int, N: int, S: int, heads: int, kv_heads: int, dim: int) -> None:
    """The masks, then forward and backward of flex attention and of our own kernels, beside the rule in fp32."""
    blocks, documents = some_blocks(T, N, S)
    mask, sees = (make(blocks, documents, S, None, False) for make in (flex_mask, span_mask))
    for name, make in (("flex", flex_mask), ("own", span_mask), ("own, compiled", compiled(span_mask))):
        line(f"mask, {name}", None, timed(lambda: make(blocks, documents, S, None, False), 5), 0.0, None)  # noqa: B023
    Q = N * S
    shapes = ((Q, heads), (T, kv_heads), (T, kv_heads), (Q, kv_heads), (Q, kv_heads))
    inputs = [torch.randn(1, n, h, dim, device=DEVICE).bfloat16().requires_grad_() for n, h in shapes]
    d = torch.randn(1, Q, heads, dim, device=DEVICE).bfloat16()
    tflop = 4e-12 * (float(blocks.anchors_BN.sum()) * S + Q * S) * heads * dim
    wide = [x.detach().float().requires_grad_() for x in inputs]
    out = block_attention_reference(*wide, sees)
    exact = [out.detach(), *torch.autograd.grad(out, wide, d.float())]
    del out, wide

    @functools.partial(torch.compile, dynamic=False)
    def flex(q, kc, vc, kb, vb):
        q, k, v = (x.transpose(1, 2) for x in (q, torch.cat([kc, kb], 1), torch.cat([vc, vb], 1)))
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    variants = {"flex": lambda: flex(*inputs), "own": lambda: block_attention(*inputs, sees)}
    for name, call in variants.items():
        try:
            out = call()
            found = [out.detach(), *torch.autograd.grad(out, inputs, d, retain_graph=True)]
            torch.cuda.synchronize()
        except Exception as error:  # what this device cannot do is said, and the next one tried
            print(f"attention, {name}: {type(error).__name__}: {str(error)[-600:]}", flush=True)
            continue
        wrong = " ".join(f"{relative(a, b):.1e}" for a, b in zip(found, exact, strict=True))
        forward = timed(call)
        back = timed(lambda: torch.autograd.grad(out, inputs, d, retain_graph=True))  # noqa: B023
        both = timed(lambda: torch.autograd.grad(call(), inputs, d))  # noqa: B023
        print(
            f"attention, {name:<4} forward {forward:.3f} ms {tflop / forward * 1e3:4.0f} TFLOP/s, backward {back:.3f} ms "
            f"{2.5 * tflop / back * 1e3:4.0f} TFLOP/s, both {both:.3f} ms; out, dq, dkc, dvc, dkb, dvb off by {wrong}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="qwen3-4b")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=["rows", "head", "products", "adamw", "attention"])
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py needs CUDA")
    torch.manual_seed(0)
    hidden, heads, kv_heads, dim, vocab = PRESETS[args.preset]
    M = args.anchors * (args.block_size - 1)
    if "rows" in args.only:
        rows_of_logits(min(1024, M), vocab)
    if "head" in args.only:
        whole_head(M, hidden, vocab)
    if "products" in args.only:
        products(M, hidden, vocab, 256)
    if "adamw" in args.only:
        optimizer(hidden, vocab)
    if "attention" in args.only:
        attention(args.context, args.anchors, args.block_size, heads, kv_heads, dim)


if __name__ == "__main__":
    main()
