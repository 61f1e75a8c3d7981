"""The Triton side of `kernels.sample`: one program per row, thresholds found bit by bit on the order of the logits, no sorting.

A row is read some twenty times (forty with top_k), all but the first time from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_key(x):
    """int32 that orders as the float32 `x` does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def mass_from(row, V, least, top, inverse, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over the tokens whose key is at least `least`: of exp((x - top) / T), or of 1 with COUNTS."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        kept = (order_key(x) >= least) & (at < V)
        if COUNTS:
            total += tl.where(kept, 1.0, 0.0)
        else:
            total += tl.where(kept, tl.exp((x - top) * inverse), 0.0)
    return tl.sum(total)


@triton.jit
def threshold(row, V, floor, need, top, inverse, COUNTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key from which upwards the tokens sum to at least `need`; not below `floor`. Found from the highest bit downwards."""
    key = floor * 0 - 2147483647 - 1
    if mass_from(row, V, tl.maximum(floor, 0), top, inverse, COUNTS, BLOCK) >= need:
        key = floor * 0  # the sign bit
    for i in range(1, BITS):
        candidate = key + (1 << (31 - i))
        if mass_from(row, V, tl.maximum(candidate, floor), top, inverse, COUNTS, BLOCK) >= need:
            key = candidate
    return tl.maximum(key, floor)


@triton.jit
def best_of(row, V, BLOCK: tl.constexpr):
    """(largest logit, its first index)."""
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    firsts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        firsts = tl.where(x > tops, at, firsts)
        tops = tl.maximum(tops, x)
    top = tl.max(tops)
    return top, tl.min(tl.where(tops == top, firsts, V))


@triton.jit
def kept_from(row, V, top, inverse, k, p, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """(least key that top_k and then top_p keep, sum of exp((x - top) / T) over what is kept)."""
    lowest = k * 0 - 2147483647 - 1
    least = lowest
    if (k > 0) & (k < V):
        least = threshold(row, V, lowest, k.to(tl.float32), top, inverse, True, BITS, BLOCK)
    total = mass_from(row, V, least, top, inverse, False, BLOCK)
    if p < 1.0:
        least = threshold(row, V, least, p * total, top, inverse, False, BITS, BLOCK)
        total = mass_from(row, V, least, top, inverse, False, BLOCK)
    return least, total


@triton.jit
def filter_row(
    logits, temperature, top_p, top_k, leasts, tops, totals, V, stride, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """logits (B, V) with row stride `stride`; BITS: 16 for bfloat16, whose lower bits are zero, else 32; outputs float32 (B,)."""
    b = tl.program_id(0)
    row = logits + b.to(tl.int64) * stride
    top, best = best_of(row, V, BLOCK)
    T = tl.load(temperature + b)
    inverse = tl.where(T == 0.0, 1.0, 1.0 / T)
    k = tl.load(top_k + b).to(tl.int32)
    least, total = kept_from(row, V, top, inverse, k, tl.load(top_p + b), BITS, BLOCK)
    # The key's float: the order was a reflection of the negative half, which is its own inverse.
    smallest = (least ^ ((least >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(leasts + b, tl.where(least == -2147483647 - 1, float("-inf"), smallest))
    tl.store(tops + b, top)
    tl.store(totals + b, total)


@triton.jit
def sample_row(logits, uniform, temperature, top_p, top_k, out, V, stride, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """As `filter_row`, and the token that `uniform` draws: out int64 (B,)."""
    b = tl.program_id(0)
    row = logits + b.to(tl.int64) * stride
    top, best = best_of(row, V, BLOCK)
    T = tl.load(temperature + b)
    if T == 0.0:
        tl.store(out + b, best.to(tl.int64))
    else:
        inverse = 1.0 / T
        k = tl.load(top_k + b).to(tl.int32)
        least, total = kept_from(row, V, top, inverse, k, tl.load(top_p + b), BITS, BLOCK)
        goal = tl.load(uniform + b) * total
        before = 0.0
        chosen = best * 0 + V
        last = best
        for start in range(0, V, BLOCK):
            if chosen == V:
                at = start + tl.arange(0, BLOCK)
                x = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
                kept = (order_key(x) >= least) & (at < V)
                weight = tl.where(kept, tl.exp((x - top) * inverse), 0.0)
                sums = before + tl.cumsum(weight, 0)
                chosen = tl.min(tl.where((sums > goal) & (weight > 0.0), at, V))
                last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0)))
                before += tl.sum(weight)
        # Rounding may put a draw next to 1 past the last token that has any mass.
        tl.store(out + b, tl.where(chosen == V, last, chosen).to(tl.int64))
