"""The Triton side of `kernels.attention`: flash attention whose visible keys are, per query, one stretch of the context and a part of its own block.

A program's rows are queries times the query heads that share a key head (`GROUP`), so that keys are loaded once for all of them and the
queries of one program are few: most of what it visits is visible to all its rows and needs no mask. Whole blocks belong to one program, which
therefore sees all pairs of their own keys. Scores are kept in units of log 2. No atomics: a run is the same twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(x, row, offset, stride, there, D: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr):
    """Rows (R,) of x as a tile (R, WIDE). there: (R,), not looked at where EVEN."""
    d = tl.arange(0, WIDE)
    at = x + offset + row[:, None] * stride + d[None, :]
    if EVEN and D == WIDE:
        tile = tl.load(at)
    elif D == WIDE:
        tile = tl.load(at, mask=there[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    return tile


@triton.jit
def _keys(x, b, h, start, L, s_b, s_l, s_h, D: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
          EVEN: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Rows start ... start + SIZE of head h of x (B, L, heads, D)."""
    if TMA:
        tile = x.load([b * L + start, h * D])
    else:
        row = start + tl.arange(0, SIZE)
        tile = _load(x, row, b.to(tl.int64) * s_b + h * s_h, s_l, row < L, D, WIDE, EVEN)
    return tile


@triton.jit
def _queries(tile, S: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, Q):
    """Per row of a tile: its query's place in the tile, the query, the head in the group, whether it exists. Rows without a query of their own
    repeat a neighbour's."""
    PER: tl.constexpr = ROWS // S * S
    r = tl.arange(0, ROWS * WIDTH)
    place = tl.minimum(r // WIDTH, PER - 1)
    query = tile * PER + place
    real = (r // WIDTH < PER) & (r % WIDTH < GROUP) & (query < Q)
    return place, tl.minimum(query, Q - 1), tl.minimum(r % WIDTH, GROUP - 1), real


@triton.jit
def _tiles(begin, end, SIZE: tl.constexpr, T):
    """Which key tiles the rows need: first, end of the left ones with a mask, end of those that need none, end."""
    low = tl.min(tl.where(begin < end, begin, T), 0) // SIZE
    high = tl.cdiv(tl.max(end, 0), SIZE)
    left, right = tl.cdiv(tl.max(begin, 0), SIZE), tl.min(end, 0) // SIZE
    if left >= right:
        left = tl.maximum(low, high)
        right = left
    return low, left, right, tl.maximum(high, right)


@triton.jit
def _absorb(q, k, v, visible, top, total, out, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Softmax and values of one more tile of keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new[:, None])
    kept = tl.exp2(top - new)
    total = total * kept + tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v, out * kept[:, None], input_precision=PRECISION)
    return new, total, out


@triton.jit
def _slopes(q, k, v, d_out, visible, lse, delta, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """(p, ds): weights and the gradient of the scores. Rows are those of q and d_out, columns those of k and v."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p = tl.exp2(s * scale - lse[:, None])
    if MASKED:
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(d_out, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit
def forward(
    q, kc, vc, kb, vb, first, last, seen, out, lse,
    q_b, q_l, q_h, kc_b, kc_l, kc_h, vc_b, vc_l, vc_h, kb_b, kb_l, kb_h, vb_b, vb_l, vb_h,
    scale, T, Q,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out (B, Q, heads, D) and lse (B, Q, heads); a program makes ROWS queries of all heads in a group. Later queries see more: they begin."""
    bh, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h = bh // KV, bh % KV
    place, query, g, real = _queries(tile, S, ROWS, GROUP, WIDTH, Q)
    head, d = h * GROUP + g, tl.arange(0, WIDE)
    begin, end = tl.load(first + b * Q + query), tl.load(last + b * Q + query)
    tile_q = _load(q, query * q_l + head * q_h, b.to(tl.int64) * q_b, 1, real, D, WIDE, D == WIDE)

    own = tl.arange(0, ROWS)
    at = tile * (ROWS // S * S)
    sees = (own[None, :] // S == place[:, None] // S) & (own[None, :] % S < tl.load(seen + b * Q + query)[:, None])
    own_k = _keys(kb, b, h, at, Q, kb_b, kb_l, kb_h, D, WIDE, ROWS, False, False)
    own_v = _keys(vb, b, h, at, Q, vb_b, vb_l, vb_h, D, WIDE, ROWS, False, False)
    top = tl.full([ROWS * WIDTH], -1e30, tl.float32)
    total = tl.zeros([ROWS * WIDTH], tl.float32)
    acc = tl.zeros([ROWS * WIDTH, WIDE], tl.float32)
    top, total, acc = _absorb(tile_q, own_k, own_v, sees, top, total, acc, scale, True, PRECISION)

    low, left, right, high = _tiles(begin, end, KEYS, T)
    for t in tl.range(left, right):
        k = _keys(kc, b, h, t * KEYS, T, kc_b, kc_l, kc_h, D, WIDE, KEYS, True, TMA)
        v = _keys(vc, b, h, t * KEYS, T, vc_b, vc_l, vc_h, D, WIDE, KEYS, True, TMA)
        top, total, acc = _absorb(tile_q, k, v, sees, top, total, acc, scale, False, PRECISION)
    for i in tl.range(0, left - low + high - right):
        t = tl.where(i < left - low, low + i, right + i - (left - low))
        k = _keys(kc, b, h, t * KEYS, T, kc_b, kc_l, kc_h, D, WIDE, KEYS, False, TMA)
        v = _keys(vc, b, h, t * KEYS, T, vc_b, vc_l, vc_h, D, WIDE, KEYS, False, TMA)
        key = t * KEYS + tl.arange(0, KEYS)
        visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        top, total, acc = _absorb(tile_q, k, v, visible, top, total, acc, scale, True, PRECISION)

    some = total > 0  # a row that sees nothing gives zero
    total = tl.where(some, total, 1.0)
    acc = acc / total[:, None]
    row = (b.to(tl.int64) * Q + query) * (KV * GROUP) + head
    tl.store(out + row[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])
    tl.store(lse + row, tl.where(some, top + tl.log2(total), 0.0), mask=real)


@triton.jit
def backward_queries(
    q, kc, vc, kb, vb, first, last, seen, out, lse, d_out, d_q, d_kb, d_vb, delta,
    q_b, q_l, q_h, kc_b, kc_l, kc_h, vc_b, vc_l, vc_h, kb_b, kb_l, kb_h, vb_b, vb_l, vb_h,
    scale, size, T, Q,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """d_q, the blocks' d_kb and d_vb, and delta = out . d_out for `backward_keys`; out, d_out, d_q (B, Q, heads, D) contiguous."""
    bh, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h = bh // KV, bh % KV
    place, query, g, real = _queries(tile, S, ROWS, GROUP, WIDTH, Q)
    head, d = h * GROUP + g, tl.arange(0, WIDE)
    begin, end = tl.load(first + b * Q + query), tl.load(last + b * Q + query)
    tile_q = _load(q, query * q_l + head * q_h, b.to(tl.int64) * q_b, 1, real, D, WIDE, D == WIDE)
    row = (b.to(tl.int64) * Q + query) * (KV * GROUP) + head
    tile_o = _load(out, row, 0, D, real, D, WIDE, D == WIDE)
    tile_d = _load(d_out, row, 0, D, real, D, WIDE, D == WIDE)
    row_delta = tl.sum(tile_o.to(tl.float32) * tile_d.to(tl.float32), 1)
    tl.store(delta + row, row_delta, mask=real)
    row_lse = tl.load(lse + row)

    own = tl.arange(0, ROWS)
    at = tile * (ROWS // S * S)
    sees = (
        (own[None, :] // S == place[:, None] // S)
        & (own[None, :] % S < tl.load(seen + b * Q + query)[:, None])
        & real[:, None]
    )
    own_k = _keys(kb, b, h, at, Q, kb_b, kb_l, kb_h, D, WIDE, ROWS, False, False)
    own_v = _keys(vb, b, h, at, Q, vb_b, vb_l, vb_h, D, WIDE, ROWS, False, False)
    own_p, own_ds = _slopes(tile_q, own_k, own_v, tile_d, sees, row_lse, row_delta, scale, True, PRECISION)
    own_p, own_ds = own_p.to(tile_q.dtype), own_ds.to(tile_q.dtype)
    to_v = tl.dot(tl.trans(own_p), tile_d, input_precision=PRECISION)
    to_k = tl.dot(tl.trans(own_ds), tile_q, input_precision=PRECISION) * size
    own_row = ((b.to(tl.int64) * Q + at + own) * KV + h)[:, None] * D + d[None, :]
    there = (own < ROWS // S * S)[:, None] & (at + own < Q)[:, None] & (d < D)[None, :]
    tl.store(d_kb + own_row, to_k.to(d_kb.dtype.element_ty), mask=there)
    tl.store(d_vb + own_row, to_v.to(d_vb.dtype.element_ty), mask=there)
    acc = tl.dot(own_ds, own_k, input_precision=PRECISION)

    low, left, right, high = _tiles(begin, end, KEYS, T)
    for t in tl.range(left, right):
        k = _keys(kc, b, h, t * KEYS, T, kc_b, kc_l, kc_h, D, WIDE, KEYS, True, TMA)
        v = _keys(vc, b, h, t * KEYS, T, vc_b, vc_l, vc_h, D, WIDE, KEYS, True, TMA)
        p, ds = _slopes(tile_q, k, v, tile_d, sees, row_lse, row_delta, scale, False, PRECISION)
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    for i in tl.range(0, left - low + high - right):
        t = tl.where(i < left - low, low + i, right + i - (left - low))
        k = _keys(kc, b, h, t * KEYS, T, kc_b, kc_l, kc_h, D, WIDE, KEYS, False, TMA)
        v = _keys(vc, b, h, t * KEYS, T, vc_b, vc_l, vc_h, D, WIDE, KEYS, False, TMA)
        key = t * KEYS + tl.arange(0, KEYS)
        visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        p, ds = _slopes(tile_q, k, v, tile_d, visible, row_lse, row_delta, scale, True, PRECISION)
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    tl.store(
        d_q + row[:, None] * D + d[None, :], (acc * size).to(d_q.dtype.element_ty),
        mask=real[:, None] & (d < D)[None, :],
    )  # fmt: skip


@triton.jit
def _gather(
    q, d_out, lse, delta, first, last, k, v, d_k, d_v, key, b, h, i, n, base, jump, hop, q_b, q_l, q_h, scale, Q,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """What step i adds to the gradients of a tile of keys: head i // n of the group, query tile base + i % n (from `jump` on, `hop` later)."""
    head = h * GROUP + i // n
    t = base + i % n
    t = tl.where(t < jump, t, t + hop)
    query = t * QUERIES + tl.arange(0, QUERIES)
    there = query < Q
    safe = tl.minimum(query, Q - 1) if MASKED else query
    tile_q = _keys(q, b, head, t * QUERIES, Q, q_b, q_l, q_h, D, WIDE, QUERIES, not MASKED, TMA)
    heads: tl.constexpr = KV * GROUP
    tile_d = _keys(d_out, b, head, t * QUERIES, Q, Q * heads * D, heads * D, D, D, WIDE, QUERIES, not MASKED, TMA)
    row = (b.to(tl.int64) * Q + safe) * heads + head
    row_lse, row_delta = tl.load(lse + row), tl.load(delta + row)
    s = tl.dot(k, tl.trans(tile_q), input_precision=PRECISION)
    p = tl.exp2(s * scale - row_lse[None, :])
    if MASKED:
        begin, end = tl.load(first + b * Q + safe), tl.load(last + b * Q + safe)
        visible = (key[:, None] >= begin[None, :]) & (key[:, None] < end[None, :]) & there[None, :]
        p = tl.where(visible, p, 0.0)
    d_v = tl.dot(p.to(tile_d.dtype), tile_d, d_v, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(tile_d), input_precision=PRECISION)
    ds = p * (dp - row_delta[None, :])
    d_k = tl.dot(ds.to(tile_q.dtype), tile_q, d_k, input_precision=PRECISION)
    return d_k, d_v


@triton.jit
def backward_keys(
    q, kc, vc, first, last, tiles, lse, d_out, delta, d_kc, d_vc,
    q_b, q_l, q_h, kc_b, kc_l, kc_h, vc_b, vc_l, vc_h,
    scale, size, T, Q,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """d_kc and d_vc (B, T, KV, D), contiguous; a program makes KEYS keys of one head. tiles (B, key tiles, 4): see `kernels.attention.spans`."""
    bh, tile = tl.program_id(0), tl.program_id(1)
    b, h = bh // KV, bh % KV
    key, d = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDE)
    k = _keys(kc, b, h, tile * KEYS, T, kc_b, kc_l, kc_h, D, WIDE, KEYS, False, False)
    v = _keys(vc, b, h, tile * KEYS, T, vc_b, vc_l, vc_h, D, WIDE, KEYS, False, False)
    span = tiles + (b * tl.num_programs(1) + tile) * 4
    low, left, right, high = tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    d_k, d_v = tl.zeros([KEYS, WIDE], tl.float32), tl.zeros([KEYS, WIDE], tl.float32)
    n = right - left
    for i in tl.range(0, n * GROUP):
        d_k, d_v = _gather(
            q, d_out, lse, delta, first, last, k, v, d_k, d_v, key, b, h, i, n, left, right, 0, q_b, q_l, q_h, scale, Q,
            KV, GROUP, D, WIDE, QUERIES, False, PRECISION, TMA,
        )  # fmt: skip
    m = left - low + high - right
    for i in tl.range(0, m * GROUP):
        d_k, d_v = _gather(
            q, d_out, lse, delta, first, last, k, v, d_k, d_v, key, b, h, i, m, low, left, n, q_b, q_l, q_h, scale, Q,
            KV, GROUP, D, WIDE, QUERIES, True, PRECISION, TMA,
        )  # fmt: skip
    at = ((b.to(tl.int64) * T + key) * KV + h)[:, None] * D + d[None, :]
    there = (key < T)[:, None] & (d < D)[None, :]
    tl.store(d_kc + at, (d_k * size).to(d_kc.dtype.element_ty), mask=there)
    tl.store(d_vc + at, d_v.to(d_vc.dtype.element_ty), mask=there)
