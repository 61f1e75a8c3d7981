"""The Triton side of `kernels.head`: one program per row of logits.

The vocabulary is dealt to LANES lanes, column c to lane c mod LANES. One pass keeps each lane's best logit and its sum of exponentials. The K best
columns lie in the K lanes with the best bests (a column in any other lane has K better ones before it), so only those are looked at again.
A second pass writes the gradient over the logits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(row, at, V, multiplier, softcap, CAPPED: tl.constexpr):
    """Transformed logits in fp32; -inf outside of the row. tanh by the sigmoid, which every backend has."""
    x = tl.load(row + at, mask=at < V, other=0.0).to(tl.float32) * multiplier
    if CAPPED:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return tl.where(at < V, x, float("-inf"))


@triton.jit
def score_row(
    logits,
    labels,
    nll,
    candidates,
    V,
    stride,
    multiplier,
    softcap,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    K: tl.constexpr,
    MEMBERS: tl.constexpr,
    LANES: tl.constexpr,
):
    """logits (R, V) with row stride `stride`; labels int64 (R,); nll float32 (R,); candidates int64 (R, K)."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * stride
    lane = tl.arange(0, LANES)
    label = tl.load(labels + r).to(tl.int32)
    gold = read(row, label, V, multiplier, softcap, CAPPED)

    best = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, V, 4 * LANES):
        a = read(row, start + lane, V, multiplier, softcap, CAPPED)
        b = read(row, start + LANES + lane, V, multiplier, softcap, CAPPED)
        c = read(row, start + 2 * LANES + lane, V, multiplier, softcap, CAPPED)
        d = read(row, start + 3 * LANES + lane, V, multiplier, softcap, CAPPED)
        top = tl.maximum(best, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
        base = tl.where(top == float("-inf"), 0.0, top)  # a lane without a column yet
        total = total * tl.exp(best - base) + tl.exp(a - base) + tl.exp(b - base) + tl.exp(c - base) + tl.exp(d - base)
        best = top
    most = tl.max(best)
    log_z = most + tl.log(tl.sum(total * tl.exp(best - most)))
    tl.store(nll + r, log_z - gold)

    k = tl.arange(0, K)
    lanes = tl.zeros([K], tl.int32)
    for i in range(K):
        first = tl.min(tl.where(best == tl.max(best), lane, LANES - 1))
        lanes = tl.where(k == i, first, lanes)
        best = tl.where(lane == first, float("-inf"), best)
    columns = lanes[:, None] + LANES * tl.arange(0, MEMBERS)[None, :]
    values = read(row, columns, V, multiplier, softcap, CAPPED)
    found = tl.zeros([K], tl.int32)
    for i in range(K):
        top = tl.max(tl.max(values, 1), 0)
        # V - 1 is reached only where every logit left is NaN: the loss says so, and no index runs out of bounds.
        column = tl.min(tl.min(tl.where(values == top, columns, V - 1), 1), 0)
        found = tl.where(k == i, column, found)
        values = tl.where(columns == column, float("-inf"), values)
    tl.store(candidates + r.to(tl.int64) * K + k, found.to(tl.int64))

    if GRADIENT:
        for start in range(0, V, LANES):
            at = start + lane
            x = read(row, at, V, multiplier, softcap, CAPPED)
            d = tl.exp(x - log_z) - tl.where(at == label, 1.0, 0.0)
            if CAPPED:
                d *= 1.0 - (x / softcap) * (x / softcap)
            tl.store(row + at, (d * multiplier).to(logits.dtype.element_ty), mask=at < V)
