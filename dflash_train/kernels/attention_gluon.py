"""The Gluon side of `kernels.attention`, for Hopper: one warp loads, two warp groups multiply and never wait for each other.

In `_attend` and `_attend_back` a warp group's 64 rows are whole blocks of queries times up to WIDTH query heads of one key head, so that keys
are loaded once for all of them and the queries of a program are few: most of what it visits is visible to all its rows and needs no mask. It
sees all pairs of its blocks' own keys. In `_keys_back` the rows are 64 keys. Steps that need no mask come first, then the others. Scores are
kept in units of log 2. No atomics: a run is the same twice.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dflash_train.kernels.attention import KEYS as SPAN_KEYS
from dflash_train.kernels.attention import QUERIES as SPAN_QUERIES

LOG2E = 1.4426950408889634
CONTEXT_KEYS, STAGES = 64, 3  # of a step; steps in flight: the best of those that were tried on an H200


@gluon.constexpr_function
def _product(n):
    """The layout of a warp group's product of 64 rows and n columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.constexpr_function
def _per(WIDTH, S):
    """Queries of a warp group: whole blocks."""
    return 64 // WIDTH // S * S


@gluon.jit
def _rows(unit, h, turn, Q, GROUP: gl.constexpr, WIDTH: gl.constexpr, S: gl.constexpr, LAYOUT: gl.constexpr):
    """Per row of warp group `unit`: its query's place there, the query, the head, whether it exists. Rows without a query of their own repeat a
    neighbour's."""
    r = gl.arange(0, 64, LAYOUT)
    place = gl.minimum(r // WIDTH, _per(WIDTH, S) - 1)
    query, head = unit * _per(WIDTH, S) + place, turn * WIDTH + r % WIDTH
    real = (r // WIDTH < _per(WIDTH, S)) & (head < GROUP) & (query < Q)
    return place, gl.minimum(query, Q - 1), h * GROUP + gl.minimum(head, GROUP - 1), real


@gluon.jit
def _key_tiles(b, tile, first, last, T, Q, WIDTH: gl.constexpr, S: gl.constexpr, KEYS: gl.constexpr):
    """The key tiles that both warp groups of a program need: low <= tile < high, of which left <= tile < right need no mask."""
    r = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    query = gl.minimum(tile * 2 * _per(WIDTH, S) + gl.minimum(r, 2 * _per(WIDTH, S) - 1), Q - 1)
    begin, end = gl.load(first + b * Q + query), gl.load(last + b * Q + query)
    low = gl.min(gl.where(begin < end, begin, T), 0) // KEYS
    high = (gl.max(end, 0) + KEYS - 1) // KEYS
    left, right = (gl.max(begin, 0) + KEYS - 1) // KEYS, gl.min(end, 0) // KEYS
    nowhere = gl.maximum(low, high)
    some = left < right
    return low, gl.where(some, left, nowhere), gl.where(some, right, nowhere), nowhere


@gluon.jit
def _ring(STAGES: gl.constexpr):
    """Barriers of a ring of stages: filled by the loader, emptied by both warp groups."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return full, empty


@gluon.jit
def _masked_tile(j, low, left, n):
    """The tile of step j of those with a mask, which lie on both sides of the n without."""
    return gl.where(low + j < left, low + j, low + j + n)


@gluon.jit
def _load_keys(kc, vc, ring, b, h, tiles, T, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):
    k_s, v_s, full, empty = ring
    low, left, right, high = tiles
    n = right - left
    for i in range(high - low):
        t = gl.where(i < n, left + i, _masked_tile(i - n, low, left, n))
        at = i % STAGES
        mbarrier.wait(empty.index(at), ((i // STAGES) & 1) ^ 1)
        bar = full.index(at)
        mbarrier.expect(bar, 4 * KEYS * D)
        tma.async_copy_global_to_shared(kc, [b * T + t * KEYS, h * D], bar, k_s.index(at))
        tma.async_copy_global_to_shared(vc, [b * T + t * KEYS, h * D], bar, v_s.index(at))


@gluon.jit
def _load_own(kb, vb, ready, b, h, tile, Q, D: gl.constexpr, WIDTH: gl.constexpr, S: gl.constexpr):
    """Both warp groups' own keys and values."""
    OWN: gl.constexpr = 64 // WIDTH
    k_s = gl.allocate_shared_memory(kb.dtype, [2, OWN, D], kb.layout)
    v_s = gl.allocate_shared_memory(vb.dtype, [2, OWN, D], vb.layout)
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, 8 * OWN * D)
    for part in gl.static_range(2):
        at = b * Q + (tile * 2 + part) * _per(WIDTH, S)
        tma.async_copy_global_to_shared(kb, [at, h * D], ready, k_s.index(part))
        tma.async_copy_global_to_shared(vb, [at, h * D], ready, v_s.index(part))
    return k_s, v_s


@gluon.jit
def _visible(i, tiles, begin, end, KEYS: gl.constexpr):
    """For step i behind those that need no mask."""
    low, left, right, high = tiles
    t = _masked_tile(i - (right - left), low, left, right - left)
    key = t * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, _product(KEYS)))
    return (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])


@gluon.jit
def _own(place, seen, S: gl.constexpr, OWN: gl.constexpr):
    own = gl.arange(0, OWN, gl.SliceLayout(0, _product(OWN)))
    return (own[None, :] // S == place[:, None] // S) & (own[None, :] % S < seen[:, None])


@gluon.jit
def _absorb(
    begin_i, end_i, q_s, ring, tiles, begin, end, top, total, acc, scale,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Softmax and values of steps begin_i ... end_i."""
    k_s, v_s, full, empty = ring
    operand: gl.constexpr = gl.DotOperandLayout(0, _product(D), 2)
    zero = gl.zeros([64, KEYS], gl.float32, _product(KEYS))
    for i in range(begin_i, end_i):
        at = i % STAGES
        mbarrier.wait(full.index(at), (i // STAGES) & 1)
        s = warpgroup_mma(q_s, k_s.index(at).permute((1, 0)), zero, use_acc=False)
        if MASKED:
            s = gl.where(_visible(i, tiles, begin, end, KEYS), s, float("-inf"))
        new = gl.maximum(top, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - new[:, None])
        kept = gl.exp2(top - new)
        top, total = new, total * kept + gl.sum(p, 1)
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, _product(D)))[:, None]
        acc = warpgroup_mma(gl.convert_layout(p.to(k_s.dtype), operand), v_s.index(at), acc)
        mbarrier.arrive(empty.index(at), count=1)
    return top, total, acc


@gluon.jit
def _attend_rows(
    part: gl.constexpr, q, q_s, ring, own_ring, first, last, seen, out, lse, b, h, turn, tile, tiles, Q, q_row, scale,
    KV: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, S: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    OWN: gl.constexpr = 64 // WIDTH
    apart: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    kb_s, vb_s, ready = own_ring
    unit = tile * 2 + part
    place, query, head, real = _rows(unit, h, turn, Q, GROUP, WIDTH, S, gl.SliceLayout(1, apart))
    d = gl.arange(0, D, gl.SliceLayout(0, apart))
    rows = gl.load(q + ((b.to(gl.int64) * Q + query) * q_row + head * D)[:, None] + d[None, :])
    q_s.index(part).store(rows)
    fence_async_shared()
    place, query, head, real = _rows(unit, h, turn, Q, GROUP, WIDTH, S, gl.SliceLayout(1, _product(OWN)))
    sees = _own(place, gl.load(seen + b * Q + query), S, OWN)
    mbarrier.wait(ready, 0)
    zero = gl.zeros([64, OWN], gl.float32, _product(OWN))
    s = warpgroup_mma(q_s.index(part), kb_s.index(part).permute((1, 0)), zero, use_acc=False)
    s = gl.where(sees, s, float("-inf"))
    top = gl.maximum(gl.max(s, 1) * scale, -1e30)
    p = gl.exp2(s * scale - top[:, None])
    total = gl.convert_layout(gl.sum(p, 1), gl.SliceLayout(1, _product(KEYS)))
    top = gl.convert_layout(top, gl.SliceLayout(1, _product(KEYS)))
    p = gl.convert_layout(p.to(kb_s.dtype), gl.DotOperandLayout(0, _product(D), 2))
    acc = warpgroup_mma(p, vb_s.index(part), gl.zeros([64, D], gl.float32, _product(D)), use_acc=False)
    place, query, head, real = _rows(unit, h, turn, Q, GROUP, WIDTH, S, gl.SliceLayout(1, _product(KEYS)))
    begin, end = gl.load(first + b * Q + query), gl.load(last + b * Q + query)
    low, left, right, high = tiles
    top, total, acc = _absorb(0, right - left, q_s.index(part), ring, tiles, begin, end, top, total, acc, scale,
                              D, KEYS, STAGES, False)  # fmt: skip
    top, total, acc = _absorb(right - left, high - low, q_s.index(part), ring, tiles, begin, end, top, total, acc, scale,
                              D, KEYS, STAGES, True)  # fmt: skip
    some = total > 0  # a row that sees nothing gives zero
    total = gl.where(some, total, 1.0)
    at = (b * (KV * GROUP) + head) * (gl.cdiv(Q, 4) * 4) + query
    gl.store(lse + at, gl.where(some, top + gl.log2(total), 0.0), mask=real)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, _product(D)))[:, None]
    place, query, head, real = _rows(unit, h, turn, Q, GROUP, WIDTH, S, gl.SliceLayout(1, _product(D)))
    d = gl.arange(0, D, gl.SliceLayout(0, _product(D)))
    row = (b.to(gl.int64) * Q + query) * (KV * GROUP) + head
    gl.store(out + row[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit
def _attend(
    q, kc, vc, kb, vb, first, last, seen, out, lse, q_row, scale, T, Q,
    KV: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, SPLIT: gl.constexpr, S: gl.constexpr, D: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out (B, Q, heads, D) and lse (B, heads, Q), its rows of a length that is a multiple of 4. kc, vc, kb, vb: tables of (rows, heads D). Later
    queries see more: they begin."""
    u, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    b, h, turn = u // (KV * SPLIT), u // SPLIT % KV, u % SPLIT
    q_s = gl.allocate_shared_memory(kc.dtype, [2, 64, D], kc.layout)
    k_s = gl.allocate_shared_memory(kc.dtype, [STAGES, KEYS, D], kc.layout)
    v_s = gl.allocate_shared_memory(vc.dtype, [STAGES, KEYS, D], vc.layout)
    full, empty = _ring(STAGES)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kb_s, vb_s = _load_own(kb, vb, ready, b, h, tile, Q, D, WIDTH, S)
    ring, own_ring = (k_s, v_s, full, empty), (kb_s, vb_s, ready)
    tiles = _key_tiles(b, tile, first, last, T, Q, WIDTH, S, KEYS)
    gl.warp_specialize(
        [
            (_attend_rows, (gl.constexpr(0), q, q_s, ring, own_ring, first, last, seen, out, lse, b, h, turn, tile, tiles, Q, q_row,
                            scale, KV, GROUP, WIDTH, S, D, KEYS, STAGES)),
            (_attend_rows, (gl.constexpr(1), q, q_s, ring, own_ring, first, last, seen, out, lse, b, h, turn, tile, tiles, Q, q_row,
                            scale, KV, GROUP, WIDTH, S, D, KEYS, STAGES)),
            (_load_keys, (kc, vc, ring, b, h, tiles, T, D, KEYS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _slopes(
    begin_i, end_i, q_s, d_s, ring, tiles, begin, end, row_lse, row_delta, acc, scale,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """What steps begin_i ... end_i add to the gradient of the queries."""
    k_s, v_s, full, empty = ring
    operand: gl.constexpr = gl.DotOperandLayout(0, _product(D), 2)
    zero = gl.zeros([64, KEYS], gl.float32, _product(KEYS))
    for i in range(begin_i, end_i):
        at = i % STAGES
        mbarrier.wait(full.index(at), (i // STAGES) & 1)
        s = warpgroup_mma(q_s, k_s.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(d_s, v_s.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * scale - row_lse[:, None])
        if MASKED:
            p = gl.where(_visible(i, tiles, begin, end, KEYS), p, 0.0)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = p * (dp - row_delta[:, None])
        acc = warpgroup_mma(gl.convert_layout(ds.to(k_s.dtype), operand), k_s.index(at), acc)
        mbarrier.arrive(empty.index(at), count=1)
    return acc


@gluon.jit
def _attend_back_rows(
    part: gl.constexpr, q, d_out, out, q_s, d_s, p_s, ds_s, ring, own_ring, first, last, seen, lse, d_q, d_kb, d_vb, delta,
    b, h, turn, tile, tiles, Q, q_row, scale, size,
    KV: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, SPLIT: gl.constexpr, S: gl.constexpr, D: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    OWN: gl.constexpr = 64 // WIDTH
    apart: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    kb_s, vb_s, ready = own_ring
    half: gl.constexpr = kb_s.dtype
    unit = tile * 2 + part
    place, query, head, real = _rows(unit, h, turn, Q, GROUP, WIDTH, S, gl.SliceLayout(1, apart))
    d = gl.arange(0, D, gl.SliceLayout(0, apart))
    row = b.to(gl.int64) * Q + query
    at = (row * (KV * GROUP) + head)[:, None] * D + d[None, :]
    rows_d = gl.load(d_out + at)
    d_s.index(part).store(rows_d)
    rows_q = gl.load(q + (row * q_row + head * D)[:, None] + d[None, :])
    q_s.index(part).store(rows_q)
    rows_o = gl.load(out + at)
    row_delta = gl.sum(rows_o.to(gl.float32) * rows_d.to(gl.float32), 1)
    gl.store(delta + (b * (KV * GROUP) + head) * (gl.cdiv(Q, 4) * 4) + query, row_delta, mask=real)
    fence_async_shared()

    place, query, head, real = _rows(unit, h, turn, Q, GROUP, WIDTH, S, gl.SliceLayout(1, _product(OWN)))
    sees = _own(place, gl.load(seen + b * Q + query), S, OWN) & real[:, None]
    row_lse = gl.load(lse + (b * (KV * GROUP) + head) * (gl.cdiv(Q, 4) * 4) + query)
    mbarrier.wait(ready, 0)
    zero = gl.zeros([64, OWN], gl.float32, _product(OWN))
    s = warpgroup_mma(q_s.index(part), kb_s.index(part).permute((1, 0)), zero, use_acc=False)
    p = gl.where(sees, gl.exp2(s * scale - row_lse[:, None]), 0.0)
    dp = warpgroup_mma(d_s.index(part), vb_s.index(part).permute((1, 0)), zero, use_acc=False)
    ds = p * (dp - gl.convert_layout(row_delta, gl.SliceLayout(1, _product(OWN)))[:, None])
    p_s.index(part).store(p.to(half))
    ds_s.index(part).store(ds.to(half))
    fence_async_shared()
    flat = gl.zeros([D, OWN], gl.float32, _product(OWN))
    to_v = warpgroup_mma(d_s.index(part).permute((1, 0)), p_s.index(part), flat, use_acc=False)
    to_k = warpgroup_mma(q_s.index(part).permute((1, 0)), ds_s.index(part), flat, use_acc=False)
    own = gl.arange(0, OWN, gl.SliceLayout(0, _product(OWN)))
    d_own = gl.arange(0, D, gl.SliceLayout(1, _product(OWN)))
    slot = unit * _per(WIDTH, S) + own
    at = (((b.to(gl.int64) * Q + slot) * KV + h) * SPLIT + turn)[None, :] * D + d_own[:, None]
    there = ((own < _per(WIDTH, S)) & (slot < Q))[None, :]
    gl.store(d_vb + at, to_v.to(d_vb.dtype.element_ty), mask=there)
    gl.store(d_kb + at, (to_k * size).to(d_kb.dtype.element_ty), mask=there)
    ds = gl.convert_layout(ds.to(half), gl.DotOperandLayout(0, _product(D), 2))
    acc = warpgroup_mma(ds, kb_s.index(part), gl.zeros([64, D], gl.float32, _product(D)), use_acc=False)

    place, query, head, real = _rows(unit, h, turn, Q, GROUP, WIDTH, S, gl.SliceLayout(1, _product(KEYS)))
    begin, end = gl.load(first + b * Q + query), gl.load(last + b * Q + query)
    row_lse = gl.convert_layout(row_lse, gl.SliceLayout(1, _product(KEYS)))
    row_delta = gl.convert_layout(row_delta, gl.SliceLayout(1, _product(KEYS)))
    low, left, right, high = tiles
    acc = _slopes(0, right - left, q_s.index(part), d_s.index(part), ring, tiles, begin, end, row_lse, row_delta, acc, scale,
                  D, KEYS, STAGES, False)  # fmt: skip
    acc = _slopes(right - left, high - low, q_s.index(part), d_s.index(part), ring, tiles, begin, end, row_lse, row_delta, acc,
                  scale, D, KEYS, STAGES, True)  # fmt: skip
    place, query, head, real = _rows(unit, h, turn, Q, GROUP, WIDTH, S, gl.SliceLayout(1, _product(D)))
    d = gl.arange(0, D, gl.SliceLayout(0, _product(D)))
    row = (b.to(gl.int64) * Q + query) * (KV * GROUP) + head
    gl.store(d_q + row[:, None] * D + d[None, :], (acc * size).to(d_q.dtype.element_ty), mask=real[:, None])


@gluon.jit
def _attend_back(
    q, kc, vc, kb, vb, first, last, seen, out, lse, d_out, d_q, d_kb, d_vb, delta, q_row, scale, size, T, Q,
    KV: gl.constexpr, GROUP: gl.constexpr, WIDTH: gl.constexpr, SPLIT: gl.constexpr, S: gl.constexpr, D: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """d_q, the blocks' d_kb and d_vb (B, Q, key heads, SPLIT, D), and delta = out . d_out as lse is laid out."""
    u, tile = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    b, h, turn = u // (KV * SPLIT), u // SPLIT % KV, u % SPLIT
    q_s = gl.allocate_shared_memory(kc.dtype, [2, 64, D], kc.layout)
    d_s = gl.allocate_shared_memory(kc.dtype, [2, 64, D], kc.layout)
    k_s = gl.allocate_shared_memory(kc.dtype, [STAGES, KEYS, D], kc.layout)
    v_s = gl.allocate_shared_memory(vc.dtype, [STAGES, KEYS, D], vc.layout)
    small: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64 // WIDTH], kc.dtype)
    p_s = gl.allocate_shared_memory(kc.dtype, [2, 64, 64 // WIDTH], small)
    ds_s = gl.allocate_shared_memory(kc.dtype, [2, 64, 64 // WIDTH], small)
    full, empty = _ring(STAGES)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kb_s, vb_s = _load_own(kb, vb, ready, b, h, tile, Q, D, WIDTH, S)
    ring, own_ring = (k_s, v_s, full, empty), (kb_s, vb_s, ready)
    tiles = _key_tiles(b, tile, first, last, T, Q, WIDTH, S, KEYS)
    gl.warp_specialize(
        [
            (_attend_back_rows, (gl.constexpr(0), q, d_out, out, q_s, d_s, p_s, ds_s, ring, own_ring, first, last, seen, lse, d_q,
                                 d_kb, d_vb, delta, b, h, turn, tile, tiles, Q, q_row, scale, size, KV, GROUP, WIDTH, SPLIT, S, D,
                                 KEYS, STAGES)),
            (_attend_back_rows, (gl.constexpr(1), q, d_out, out, q_s, d_s, p_s, ds_s, ring, own_ring, first, last, seen, lse, d_q,
                                 d_kb, d_vb, delta, b, h, turn, tile, tiles, Q, q_row, scale, size, KV, GROUP, WIDTH, SPLIT, S, D,
                                 KEYS, STAGES)),
            (_load_keys, (kc, vc, ring, b, h, tiles, T, D, KEYS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _query_tile(i, n, tiles, GROUP: gl.constexpr):
    """Head in the group and query tile of step i; the n tiles without a mask come first, for each head."""
    low, left, right, high = tiles
    m = gl.maximum(high - low - n, 1)
    j = i - n * GROUP
    plain = j < 0
    tile = gl.where(plain, left + i % gl.maximum(n, 1), _masked_tile(j % m, low, left, n))
    return gl.where(plain, i // gl.maximum(n, 1), j // m), tile


@gluon.jit
def _load_queries(
    q, d_out, lse, delta, ring, b, h, tiles, Q,
    KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_s, d_s, lse_s, delta_s, full, empty = ring
    low, left, right, high = tiles
    for i in range((high - low) * GROUP):
        g, t = _query_tile(i, right - left, tiles, GROUP)
        head = h * GROUP + g
        at = i % STAGES
        mbarrier.wait(empty.index(at), ((i // STAGES) & 1) ^ 1)
        bar = full.index(at)
        mbarrier.expect(bar, 4 * QUERIES * D + 8 * QUERIES)
        tma.async_copy_global_to_shared(q, [b * Q + t * QUERIES, head * D], bar, q_s.index(at))
        tma.async_copy_global_to_shared(d_out, [b * Q + t * QUERIES, head * D], bar, d_s.index(at))
        tma.async_copy_global_to_shared(lse, [b * (KV * GROUP) + head, t * QUERIES], bar, lse_s.index(at))
        tma.async_copy_global_to_shared(delta, [b * (KV * GROUP) + head, t * QUERIES], bar, delta_s.index(at))


@gluon.jit
def _gather(
    begin_i, end_i, d_k, d_v, k_s, v_s, ring, first, last, key, b, tiles, Q, scale,
    GROUP: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """What steps begin_i ... end_i add to the gradients of keys and values."""
    q_s, d_s, lse_s, delta_s, full, empty = ring
    columns: gl.constexpr = gl.SliceLayout(0, _product(QUERIES))
    operand: gl.constexpr = gl.DotOperandLayout(0, _product(D), 2)
    low, left, right, high = tiles
    zero = gl.zeros([64, QUERIES], gl.float32, _product(QUERIES))
    for i in range(begin_i, end_i):
        at = i % STAGES
        mbarrier.wait(full.index(at), (i // STAGES) & 1)
        tile_q, tile_d = q_s.index(at), d_s.index(at)
        s = warpgroup_mma(k_s, tile_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_s, tile_d.permute((1, 0)), zero, use_acc=False, is_async=True)
        row_lse = lse_s.index(at).reshape([QUERIES]).load(columns)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * scale - row_lse[None, :])
        if MASKED:
            _, t = _query_tile(i, right - left, tiles, GROUP)
            query = t * QUERIES + gl.arange(0, QUERIES, columns)
            safe = b * Q + gl.minimum(query, Q - 1)
            begin, end = gl.load(first + safe), gl.where(query < Q, gl.load(last + safe), 0)
            p = gl.where((key[:, None] >= begin[None, :]) & (key[:, None] < end[None, :]), p, 0.0)
        d_v = warpgroup_mma(gl.convert_layout(p.to(k_s.dtype), operand), tile_d, d_v, is_async=True)
        row_delta = delta_s.index(at).reshape([QUERIES]).load(columns)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = p * (dp - row_delta[None, :])
        d_k = warpgroup_mma(gl.convert_layout(ds.to(k_s.dtype), operand), tile_q, d_k, is_async=True)
        # waited for here: the compiler takes accumulators in flight from one step to the next for a lack of registers
        d_k, d_v = warpgroup_mma_wait(0, deps=(d_k, d_v))
        mbarrier.arrive(empty.index(at), count=1)
    return d_k, d_v


@gluon.jit
def _keys_back_rows(
    part: gl.constexpr, k_s, v_s, ready, ring, first, last, d_kc, d_vc, b, h, tile, tiles, T, Q, scale, size,
    KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    start = tile * 128 + part * 64
    key = start + gl.arange(0, 64, gl.SliceLayout(1, _product(QUERIES)))
    d_k = gl.zeros([64, D], gl.float32, _product(D))
    d_v = gl.zeros([64, D], gl.float32, _product(D))
    mbarrier.wait(ready, 0)
    low, left, right, high = tiles
    d_k, d_v = _gather(0, (right - left) * GROUP, d_k, d_v, k_s.index(part), v_s.index(part), ring, first, last, key, b, tiles, Q,
                       scale, GROUP, D, QUERIES, STAGES, False)  # fmt: skip
    d_k, d_v = _gather((right - left) * GROUP, (high - low) * GROUP, d_k, d_v, k_s.index(part), v_s.index(part), ring, first, last,
                       key, b, tiles, Q, scale, GROUP, D, QUERIES, STAGES, True)  # fmt: skip
    row = start + gl.arange(0, 64, gl.SliceLayout(1, _product(D)))
    d = gl.arange(0, D, gl.SliceLayout(0, _product(D)))
    at = ((b.to(gl.int64) * T + row) * KV + h)[:, None] * D + d[None, :]
    gl.store(d_kc + at, (d_k * size).to(d_kc.dtype.element_ty), mask=(row < T)[:, None])
    gl.store(d_vc + at, d_v.to(d_vc.dtype.element_ty), mask=(row < T)[:, None])


@gluon.jit
def _keys_back(
    q, kc, vc, d_out, lse, delta, first, last, spans, d_kc, d_vc, scale, size, T, Q,
    KV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """d_kc and d_vc (B, T, key heads, D), 128 keys a program. q, kc, vc, d_out: tables of (rows, heads D); lse, delta: of (heads, Q)."""
    u, tile = gl.program_id(0), gl.program_id(1)
    b, h = u // KV, u % KV
    span = spans + (b * gl.num_programs(1) + tile) * 4
    tiles = gl.load(span), gl.load(span + 1), gl.load(span + 2), gl.load(span + 3)
    k_s = gl.allocate_shared_memory(kc.dtype, [2, 64, D], kc.layout)
    v_s = gl.allocate_shared_memory(vc.dtype, [2, 64, D], vc.layout)
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, QUERIES, D], q.layout)
    d_s = gl.allocate_shared_memory(d_out.dtype, [STAGES, QUERIES, D], d_out.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], delta.layout)
    full, empty = _ring(STAGES)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, 4 * 128 * D)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(kc, [b * T + tile * 128 + part * 64, h * D], ready, k_s.index(part))
        tma.async_copy_global_to_shared(vc, [b * T + tile * 128 + part * 64, h * D], ready, v_s.index(part))
    ring = (q_s, d_s, lse_s, delta_s, full, empty)
    gl.warp_specialize(
        [
            (_keys_back_rows, (gl.constexpr(0), k_s, v_s, ready, ring, first, last, d_kc, d_vc, b, h, tile, tiles, T, Q, scale, size,
                               KV, GROUP, D, QUERIES, STAGES)),
            (_keys_back_rows, (gl.constexpr(1), k_s, v_s, ready, ring, first, last, d_kc, d_vc, b, h, tile, tiles, T, Q, scale, size,
                               KV, GROUP, D, QUERIES, STAGES)),
            (_load_queries, (q, d_out, lse, delta, ring, b, h, tiles, Q, KV, GROUP, D, QUERIES, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def _plain(x: torch.Tensor) -> torch.Tensor:
    """x (B, L, heads, D) itself where it is a table of B L rows that the copy engine can read, else a copy."""
    B, L, _, D = x.shape
    rows = x.stride(3) == 1 and x.stride(2) == D and (B == 1 or x.stride(0) == L * x.stride(1))
    return x if rows and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a piece in shared memory. Made once: a step asks for dozens, and the host is what a small target waits for."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], getattr(gl, str(dtype).removeprefix("torch.")))


def _table(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x (B, L, heads, D) for the copy engine, in pieces of `rows` rows of one head."""
    B, L, H, D = x.shape
    return TensorDescriptor(x, [B * L, H * D], [x.stride(1), 1], [rows, D], _layout(rows, D, x.dtype))


def _numbers(x: torch.Tensor, Q: int) -> TensorDescriptor:
    """x (B, heads, at least Q) in fp32 for the copy engine, in pieces of one head; beyond Q it reads zeros."""
    layout = _layout(1, SPAN_QUERIES, x.dtype)
    return TensorDescriptor(x, [x.shape[0] * x.shape[1], Q], [x.shape[2], 1], [1, SPAN_QUERIES], layout)


def _power(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (n.bit_length() - 1)


def _shape(q: torch.Tensor, kc: torch.Tensor, size: int) -> dict[str, int]:
    KV = kc.shape[2]
    group = q.shape[2] // KV
    width = min(4, _power(2 * group - 1), _power(64 // size))
    return dict(KV=KV, GROUP=group, WIDTH=width, SPLIT=-(-group // width), S=size, D=q.shape[-1])


def _grid(q: torch.Tensor, shape: dict[str, int]) -> tuple[int, int]:
    """Programs by batch row, key head and turn, and by stretches of the queries of two warp groups."""
    width, size = shape["WIDTH"], shape["S"]
    stretch = 2 * (64 // width // size * size)
    return q.shape[0] * shape["KV"] * shape["SPLIT"], -(-q.shape[1] // stretch)


def forward(q, kc, vc, kb, vb, first, last, seen, size: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fills `out` and `lse`; shapes as in `kernels.attention`."""
    q, kc, vc, kb, vb = map(_plain, (q, kc, vc, kb, vb))
    (_, Q, _, D), T = q.shape, kc.shape[1]
    shape = _shape(q, kc, size)
    context = [_table(x, CONTEXT_KEYS) for x in (kc, vc)] + [_table(x, 64 // shape["WIDTH"]) for x in (kb, vb)]
    _attend[_grid(q, shape)](
        q, *context, first, last, seen, out, lse, q.stride(1), D**-0.5 * LOG2E, T, Q,
        **shape, KEYS=CONTEXT_KEYS, STAGES=STAGES, num_warps=4,
    )  # fmt: skip


def backward(d_out, out, lse, q, kc, vc, kb, vb, first, last, seen, spans, size: int) -> tuple[torch.Tensor, ...]:
    """The gradients of q, kc, vc, kb and vb."""
    q, kc, vc, kb, vb = map(_plain, (q, kc, vc, kb, vb))
    d_out = d_out.contiguous()
    (B, Q, _, D), T = q.shape, kc.shape[1]
    shape = _shape(q, kc, size)
    KV, split = shape["KV"], shape["SPLIT"]
    d_q, d_kc, d_vc = (x.new_empty(x.shape) for x in (q, kc, vc))
    own = torch.float32 if split > 1 else q.dtype  # of several programs: parts of a sum
    d_kb, d_vb = (q.new_empty(B, Q, KV, split, D, dtype=own) for _ in range(2))
    delta = torch.empty_like(lse)
    numbers = D**-0.5 * LOG2E, D**-0.5, T, Q
    # the blocks' own keys and their gradients' operands leave no room for a third stage where they are many
    stages = 2 if shape["WIDTH"] == 1 else STAGES
    context = [_table(x, CONTEXT_KEYS) for x in (kc, vc)] + [_table(x, 64 // shape["WIDTH"]) for x in (kb, vb)]
    _attend_back[_grid(q, shape)](
        q, *context, first, last, seen, out, lse, d_out, d_q, d_kb, d_vb, delta, q.stride(1), *numbers,
        **shape, KEYS=CONTEXT_KEYS, STAGES=stages, num_warps=4,
    )  # fmt: skip
    _keys_back[(B * KV, -(-T // SPAN_KEYS))](
        _table(q, SPAN_QUERIES), _table(kc, 64), _table(vc, 64), _table(d_out, SPAN_QUERIES), _numbers(lse, Q), _numbers(delta, Q),
        first, last, spans, d_kc, d_vc, *numbers,
        KV=KV, GROUP=shape["GROUP"], D=D, QUERIES=SPAN_QUERIES, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return d_q, d_kc, d_vc, *(x.sum(3).to(q.dtype) if split > 1 else x[:, :, :, 0] for x in (d_kb, d_vb))
