"""Attention of draft blocks over their context and themselves, and its plain twin.

Per query the visible keys are one stretch of the row's context and the first so many slots of its own block. Context and block keys are two
tensors, and so are their gradients: nothing is joined, and no key is looked at that no query of its tile can see.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from dflash_train.types import DraftBlocks

LOG2E = 1.4426950408889634
BACK_QUERIES, BACK_KEYS = 64, 128  # tiles of the keys' gradients, in whose units `spans` counts
SETTINGS = {
    "forward": dict(rows=128, KEYS=128, num_warps=8, num_stages=2, TMA=False),
    "queries": dict(rows=128, KEYS=64, num_warps=8, num_stages=2, TMA=False),
    "keys": dict(num_warps=8, num_stages=2, TMA=False),
}


class Spans(NamedTuple):
    """What each query sees, int32. first_BQ <= context < last_BQ; seen_BQ slots of its own block of `size` slots (0: none).
    tiles (B, key tiles, 4): the query tiles that each key tile meets: low <= tile < high, of which left <= tile < right see all of it."""

    first_BQ: torch.Tensor
    last_BQ: torch.Tensor
    seen_BQ: torch.Tensor
    tiles: torch.Tensor
    size: int


def block_spans(
    blocks: DraftBlocks, document_ids_BT: torch.Tensor, block_size: int, window: int | None, is_causal: bool
) -> Spans:
    """What the rule of `drafter.mask` lets each query see: a document is one stretch of its row, so that is a stretch of the context and the first
    so many slots of the query's own block."""
    B, T = document_ids_BT.shape
    at = torch.arange(T, device=document_ids_BT.device)
    slots = torch.arange(block_size, device=at.device)
    begins_BT = F.pad(document_ids_BT[:, 1:] != document_ids_BT[:, :-1], (1, 0)) * at
    queries_BNS = blocks.anchors_BN[:, :, None] + slots
    first_BNS = begins_BT.cummax(1).values.gather(1, blocks.anchors_BN)[:, :, None].expand_as(queries_BNS)
    if window is not None:
        first_BNS = torch.maximum(first_BNS, queries_BNS - window + 1)
    last_BNS = torch.where(blocks.valid_BN, blocks.anchors_BN, 0)[:, :, None].expand_as(queries_BNS)
    seen_BNS = blocks.slots_BN[:, :, None].expand_as(queries_BNS)
    if is_causal:
        seen_BNS = torch.minimum(seen_BNS, slots + 1)
    first_BQ, last_BQ, seen_BQ = (x.reshape(B, -1).int() for x in (first_BNS, last_BNS, seen_BNS))
    return spans(first_BQ, last_BQ, seen_BQ, T, block_size)


def spans(first_BQ: torch.Tensor, last_BQ: torch.Tensor, seen_BQ: torch.Tensor, T: int, size: int) -> Spans:
    """Spans over T context tokens, found without the host; int32 in. Fast where queries that see the same keys stand together."""
    B, Q = first_BQ.shape
    # a query beyond the end sees nothing
    padded = (F.pad(x, (0, -Q % BACK_QUERIES)).view(B, 1, -1, BACK_QUERIES) for x in (first_BQ, last_BQ))
    first, last = padded
    begin = torch.arange(0, T, BACK_KEYS, device=first.device)[:, None, None]
    some = ((first < last) & (first < begin + BACK_KEYS) & (last > begin)).any(-1)
    whole = ((first <= begin) & (last >= begin + BACK_KEYS)).all(-1)
    n = some.shape[-1]
    at = torch.arange(n, device=first.device)

    def lowest(tiles):
        return torch.where(tiles, at, n).amin(-1)

    def past(tiles):
        return torch.where(tiles, at + 1, 0).amax(-1)

    high = past(some)
    low = lowest(some).minimum(high)  # zero, and zero tiles, where no query sees the key tile
    middle = ((lowest(whole) + past(whole)) // 2)[..., None]  # the unbroken run around it needs no mask
    left = past(~whole & (at < middle)).clamp(low, high)
    right = lowest(~whole & (at >= middle)).clamp(left, high)
    return Spans(first_BQ, last_BQ, seen_BQ, torch.stack([low, left, right, high], -1).int().contiguous(), size)


def block_attention(
    q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, kb: torch.Tensor, vb: torch.Tensor, sees: Spans
) -> torch.Tensor:
    """q (B, Q, Hq, D); context kc, vc (B, T, Hkv, D); the blocks' own kb, vb (B, Q, Hkv, D). Returns (B, Q, Hq, D), zero for a query that sees
    nothing. Differentiable in all five. Scores are q . k / sqrt(D), softmax in fp32."""
    return _forward(q, kc, vc, kb, vb, *sees)[0]


def block_attention_reference(q, kc, vc, kb, vb, sees: Spans) -> torch.Tensor:
    """The same with all pairs of scores in memory, in fp32."""
    B, Q, Hq, D = q.shape
    T = kc.shape[1]
    k, v = (torch.cat(x, 1).float().repeat_interleave(Hq // kc.shape[2], 2) for x in ((kc, kb), (vc, vb)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float() * D**-0.5, k)
    at = torch.arange(T + Q, device=q.device)
    own = at[T:] - T
    context = (at[:T] >= sees.first_BQ[..., None]) & (at[:T] < sees.last_BQ[..., None])
    block = (own[:, None] // sees.size == own // sees.size) & (own % sees.size < sees.seen_BQ[..., None])
    visible = torch.cat([context, block], -1)[:, None]
    # what no query sees gets zero, not a number that is none
    weights = scores.masked_fill(~visible, torch.finfo(torch.float32).min).softmax(-1) * visible
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype)


def _power(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]


def _even(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Rows that the kernels can read: their numbers side by side."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _shape(q: torch.Tensor, kc: torch.Tensor) -> dict:
    group, D = q.shape[2] // kc.shape[2], q.shape[-1]
    precision = "ieee" if q.dtype is torch.float32 else "tf32"
    return dict(KV=kc.shape[2], GROUP=group, D=D, WIDE=max(16, _power(D)), PRECISION=precision)


def _rows(rows: int, size: int, group: int) -> dict:
    """Whole blocks of `size` queries, times the heads of a group."""
    width = _power(group)
    return dict(ROWS=max(rows // width, _power(size), 16), WIDTH=width, S=size)


def _rows_grid(q: torch.Tensor, kc: torch.Tensor, size: int, rows: dict) -> tuple[int, int]:
    return q.shape[0] * kc.shape[2], -(-q.shape[1] // (rows["ROWS"] // size * size))


def _table(x: torch.Tensor, rows: int, wide: int):
    """x (B, L, heads, D) as a table of B L rows for the copy engine, in pieces of `rows` rows of one head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    B, L, H, D = x.shape
    assert x.stride(2) == D and (B == 1 or x.stride(0) == L * x.stride(1))
    return TensorDescriptor(x, [B * L, H * D], [x.stride(1), 1], [rows, wide])


def _settings(kind: str, dtype: torch.dtype) -> dict:
    plain = dict(num_stages=1, TMA=False) if dtype is torch.float32 else {}
    return SETTINGS[kind] | plain


@torch.library.custom_op("dflash_train::block_attention", mutates_args=())
def _forward(
    q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, kb: torch.Tensor, vb: torch.Tensor,
    first: torch.Tensor, last: torch.Tensor, seen: torch.Tensor, tiles: torch.Tensor, size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from dflash_train.kernels import attention_triton  # triton comes with torch on CUDA only

    q, kc, vc, kb, vb = _even(q, kc, vc, kb, vb)
    B, Q, Hq, D = q.shape
    T = kc.shape[1]
    out, lse = q.new_empty(q.shape), q.new_empty((B, Q, Hq), dtype=torch.float32)
    shape, settings = _shape(q, kc), _settings("forward", q.dtype)
    rows = _rows(settings.pop("rows"), size, shape["GROUP"])
    strides = _strides(q, kc, vc, kb, vb)
    context = [_table(x, settings["KEYS"], D) for x in (kc, vc)] if settings["TMA"] else [kc, vc]
    attention_triton.forward[_rows_grid(q, kc, size, rows)](
        q, *context, kb, vb, first, last, seen, out, lse, *strides, D**-0.5 * LOG2E, T, Q, **shape, **rows, **settings
    )
    return out, lse


@_forward.register_fake
def _(q, kc, vc, kb, vb, first, last, seen, tiles, size):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dflash_train::block_attention_backward", mutates_args=())
def _backward(
    d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, kb: torch.Tensor, vb: torch.Tensor,
    first: torch.Tensor, last: torch.Tensor, seen: torch.Tensor, tiles: torch.Tensor, size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from dflash_train.kernels import attention_triton

    q, kc, vc, kb, vb = _even(q, kc, vc, kb, vb)
    d_out = d_out.contiguous()
    B, Q, Hq, D = q.shape
    T, Hkv = kc.shape[1:3]
    gradients = [x.new_empty(x.shape) for x in (q, kc, vc, kb, vb)]
    d_q, d_kc, d_vc, d_kb, d_vb = gradients
    delta = torch.empty_like(lse)
    shape, settings = _shape(q, kc), _settings("queries", q.dtype)
    rows = _rows(settings.pop("rows"), size, shape["GROUP"])
    strides = _strides(q, kc, vc, kb, vb)
    context = [_table(x, settings["KEYS"], D) for x in (kc, vc)] if settings["TMA"] else [kc, vc]
    numbers = D**-0.5 * LOG2E, D**-0.5, T, Q
    attention_triton.backward_queries[_rows_grid(q, kc, size, rows)](
        q, *context, kb, vb, first, last, seen, out, lse, d_out, d_q, d_kb, d_vb, delta, *strides, *numbers,
        **shape, **rows, **settings,
    )  # fmt: skip
    settings = _settings("keys", q.dtype) | dict(QUERIES=BACK_QUERIES, KEYS=BACK_KEYS)
    rows_of = [_table(x, BACK_QUERIES, D) for x in (q, d_out)] if settings["TMA"] else [q, d_out]
    attention_triton.backward_keys[(B * Hkv, -(-T // BACK_KEYS))](
        rows_of[0], kc, vc, first, last, tiles, lse, rows_of[1], delta, d_kc, d_vc, *strides[:9], *numbers,
        **shape, **settings,
    )  # fmt: skip
    return d_q, d_kc, d_vc, d_kb, d_vb


@_backward.register_fake
def _(d_out, out, lse, q, kc, vc, kb, vb, first, last, seen, tiles, size):
    return tuple(x.new_empty(x.shape) for x in (q, kc, vc, kb, vb))


def _keep(ctx, inputs, output):
    *tensors, ctx.size = inputs
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx, d_out, _):
    return *torch.ops.dflash_train.block_attention_backward(d_out, *ctx.saved_tensors, ctx.size), *[None] * 5


_forward.register_autograd(_differentiate, setup_context=_keep)
