"""Attention of draft blocks over their context and themselves: a plain twin, and kernels for Hopper.

Per query the visible keys are one stretch of the row's context and the first so many slots of its own block. Context and block keys are two
tensors, and so are their gradients: nothing is joined, and no key is looked at that no query of its tile can see.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

QUERIES, KEYS = 64, 128  # a tile of `Spans.tiles`


class Spans(NamedTuple):
    """What each query sees, int32. first_BQ <= context < last_BQ; seen_BQ slots of its own block of `size` slots (0: none).
    tiles (B, key tiles, 4): the query tiles that each key tile meets: low <= tile < high, of which left <= tile < right see all of it."""

    first_BQ: torch.Tensor
    last_BQ: torch.Tensor
    seen_BQ: torch.Tensor
    tiles: torch.Tensor
    size: int


def spans(first_BQ: torch.Tensor, last_BQ: torch.Tensor, seen_BQ: torch.Tensor, T: int, size: int) -> Spans:
    """Spans over T context tokens, found without the host; int32 in. Fast where queries that see the same keys stand together."""
    B, Q = first_BQ.shape
    # a query beyond the end sees nothing
    first, last = (F.pad(x, (0, -Q % QUERIES)).view(B, 1, -1, QUERIES) for x in (first_BQ, last_BQ))
    begin = torch.arange(0, T, KEYS, device=first.device)[:, None, None]
    some = ((first < last) & (first < begin + KEYS) & (last > begin)).any(-1)
    whole = ((first <= begin) & (last >= begin + KEYS)).all(-1)
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
    return Spans(first_BQ, last_BQ, seen_BQ, torch.stack([low, left, right, high], -1).int(), size)


def is_hopper(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU of compute capability 9.0."""
    return (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device.index) == (9, 0)
    )


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why `block_attention` cannot be had; None where it can."""
    if not is_hopper(device):
        return "its kernels are for Hopper (compute capability 9.0)"
    return why_not_on_hopper(dtype, head_dim, block_size)


def why_not_on_hopper(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """The same, whatever the device."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels compute in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in (64, 128):
        return f"its kernels know heads of 64 and 128 numbers, not of {head_dim}"
    if block_size > 64:
        return f"its kernels know blocks of up to 64 slots, not of {block_size}"
    try:
        import dflash_train.kernels.attention_gluon  # noqa: F401
    except ImportError as error:
        return f"it needs Gluon, which comes with Triton 3.6 ({error})"
    return None


def block_attention(
    q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, kb: torch.Tensor, vb: torch.Tensor, sees: Spans
) -> torch.Tensor:
    """q (B, Q, Hq, D); context kc, vc (B, T, Hkv, D); the blocks' own kb, vb (B, Q, Hkv, D). Returns (B, Q, Hq, D), zero for a query that sees
    nothing. Differentiable in all five. Scores are q . k / sqrt(D), softmax in fp32. Raises ValueError for what the kernels cannot do."""
    return _forward(q, kc, vc, kb, vb, *sees)[0]


def block_attention_reference(q, kc, vc, kb, vb, sees: Spans) -> torch.Tensor:
    """The same with all pairs of scores in memory, in fp32."""
    T, Q = kc.shape[1], q.shape[1]
    k, v = (torch.cat(x, 1).float().repeat_interleave(q.shape[2] // kc.shape[2], 2) for x in ((kc, kb), (vc, vb)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float() * q.shape[-1] ** -0.5, k)
    at, own = torch.arange(T, device=q.device), torch.arange(Q, device=q.device)
    context = (at >= sees.first_BQ[..., None]) & (at < sees.last_BQ[..., None])
    block = (own[:, None] // sees.size == own // sees.size) & (own % sees.size < sees.seen_BQ[..., None])
    visible = torch.cat([context, block], -1)[:, None]
    # what no query sees gets zero, not a number that is none
    weights = scores.masked_fill(~visible, torch.finfo(torch.float32).min).softmax(-1) * visible
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype)


def _along(Q: int) -> int:
    """Room for Q numbers of 32 bits in a table whose rows the copy engine can find: they begin at multiples of 16 bytes."""
    return -(-Q // 4) * 4


@torch.library.custom_op("dflash_train::block_attention", mutates_args=())
def _forward(
    q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, kb: torch.Tensor, vb: torch.Tensor,
    first: torch.Tensor, last: torch.Tensor, seen: torch.Tensor, tiles: torch.Tensor, size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if refused := why_not_on_hopper(q.dtype, q.shape[-1], size):
        raise ValueError(f"block_attention: {refused}; use engine.attention=flex")
    from dflash_train.kernels import attention_gluon  # triton comes with torch on CUDA only

    out, lse = q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], _along(q.shape[1])), dtype=torch.float32)
    attention_gluon.forward(q, kc, vc, kb, vb, first, last, seen, size, out, lse)
    return out, lse


@_forward.register_fake
def _(q, kc, vc, kb, vb, first, last, seen, tiles, size):
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], _along(q.shape[1])), dtype=torch.float32)


@torch.library.custom_op("dflash_train::block_attention_backward", mutates_args=())
def _backward(
    d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    q: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, kb: torch.Tensor, vb: torch.Tensor,
    first: torch.Tensor, last: torch.Tensor, seen: torch.Tensor, tiles: torch.Tensor, size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from dflash_train.kernels import attention_gluon

    return attention_gluon.backward(d_out, out, lse, q, kc, vc, kb, vb, first, last, seen, tiles, size)


@_backward.register_fake
def _(d_out, out, lse, q, kc, vc, kb, vb, first, last, seen, tiles, size):
    return tuple(x.new_empty(x.shape) for x in (q, kc, vc, kb, vb))


def _keep(ctx, inputs, output):
    *tensors, ctx.size = inputs
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx, d_out, _):
    return *torch.ops.dflash_train.block_attention_backward(d_out, *ctx.saved_tensors, ctx.size), *[None] * 5


_forward.register_autograd(_differentiate, setup_context=_keep)
