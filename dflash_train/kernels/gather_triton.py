"""The Triton side of `kernels.gather`. x (M, H), table (V, H), index int64 and weight float32 (M, C), all contiguous; sums in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_rows(x, table, index, out, C, H, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """out[m, c] = x[m] . table[index[m, c]]; one program per m."""
    m = tl.program_id(0).to(tl.int64)
    c, w = tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    row = tl.load(index + m * C + c, mask=c < C, other=0)
    total = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for start in range(0, H, WIDTH):
        at = start + w
        there = (at < H)[None, :] & (c < C)[:, None]
        picked = tl.load(table + row[:, None] * H + at[None, :], mask=there, other=0.0).to(tl.float32)
        total += picked * tl.load(x + m * H + at, mask=at < H, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m * C + c, tl.sum(total, 1), mask=c < C)


@triton.jit
def sum_rows(table, index, weight, out, H, C: tl.constexpr, WIDTH: tl.constexpr):
    """out[m] = sum over c of weight[m, c] table[index[m, c]]; one program per m and WIDTH columns."""
    m = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for c in tl.static_range(C):  # unrolled, so that all rows are on their way together
        row = tl.load(index + m * C + c)
        picked = tl.load(table + row * H + at, mask=at < H, other=0.0).to(tl.float32)
        total += picked * tl.load(weight + m * C + c)
    tl.store(out + m * H + at, total.to(out.dtype.element_ty), mask=at < H)


@triton.jit
def add_rows(ordered, order, weight, x, out, E, C, H, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out[v] = sum of weight[e] x[e // C] over the entries e of v. `ordered`: the E indices, ascending; `order`: their entries e.
    One program per place in that order and WIDTH columns; it works where a new v begins."""
    p = tl.program_id(0)
    v = tl.load(ordered + p)
    before = tl.load(ordered + p - 1, mask=p > 0, other=-1)
    if v != before:
        at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        total = tl.zeros([WIDTH], tl.float32)
        begin = p
        going = v == v
        while going:
            q = begin + tl.arange(0, ROWS)
            mine = (q < E) & (tl.load(ordered + q, mask=q < E, other=-1) == v)
            e = tl.load(order + q, mask=mine, other=0)
            by = tl.load(weight + e, mask=mine, other=0.0)
            there = mine[:, None] & (at < H)[None, :]
            rows = tl.load(x + (e // C)[:, None] * H + at[None, :], mask=there, other=0.0).to(tl.float32)
            total += tl.sum(rows * by[:, None], 0)
            begin += ROWS
            going = tl.sum(mine.to(tl.int32)) == ROWS
        tl.store(out + v * H + at, total.to(out.dtype.element_ty), mask=at < H)
