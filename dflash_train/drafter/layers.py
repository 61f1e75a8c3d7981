"""The draft layers: RMSNorm, RoPE, block attention over context and own block, in-block convolution, gated MLP.

Parameter names are those of the published drafters, so that a state dict is an export.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from dflash_train.drafter.mask import BlockMask, SlotMask
from dflash_train.drafter.spec import DrafterSpec
from dflash_train.kernels.attention import Spans, block_attention
from dflash_train.kernels.varlen import varlen

Rotation = tuple[torch.Tensor, torch.Tensor]


class ContextRows(NamedTuple):
    """The context before a layer has made keys and values (B, Hkv, T, D) of it: rows (B, T, H) and their rotation. In training each layer does
    that in its own forward, so that nothing of it is used outside; decoding keeps the keys and values."""

    rows_BTH: torch.Tensor
    by: Rotation


Context = ContextRows | tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


def rotation(positions: torch.Tensor, head_dim: int, theta: float) -> Rotation:
    """cos and sin, each (*positions.shape, head_dim), in fp32: bf16 frequencies are radians off at position 4,000."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / theta ** (half / head_dim)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x_BHQD: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Apply RoPE (half-split layout, as HF Qwen3) to heads; `by` is (B, Q, D) each."""
    cos, sin = by[0].unsqueeze(1), by[1].unsqueeze(1)
    a, b = x_BHQD.float().chunk(2, -1)
    return (x_BHQD.float() * cos + torch.cat([-b, a], -1) * sin).to(x_BHQD.dtype)


def dense_attention(q, context_kv, block_kv, mask: BlockMask) -> torch.Tensor:
    """Exact attention of NS queries over T context keys and the S keys of their own block.

    q (B, Hq, Q, D); context k, v (B, Hkv, T, D); block k, v (B, Hkv, Q, D). Returns (B, Hq, Q, D). The scores of a block's
    own keys are computed block by block, so that nothing of size Q x Q exists; softmax in fp32.
    """
    (kc, vc), (kb, vb) = context_kv, block_kv
    B, Hq, Q, D = q.shape
    Hkv, S = kc.shape[1], mask.block_BNSS.shape[-1]
    T, N, G = kc.shape[2], Q // S, Hq // Hkv
    q = q.reshape(B, Hkv, G, Q, D) * D**-0.5
    to_context = q.reshape(B, Hkv, G * Q, D) @ kc.transpose(-1, -2)
    blocks = (B, Hkv, 1, N, S, D)
    to_block = q.reshape(B, Hkv, G, N, S, D) @ kb.reshape(blocks).transpose(-1, -2)
    scores = torch.cat([to_context.view(B, Hkv, G, Q, T), to_block.view(B, Hkv, G, Q, S)], -1)
    visible = torch.cat([mask.context_BQT, mask.block_BNSS.reshape(B, Q, S)], -1)[:, None, None]
    weights = scores.float().masked_fill(~visible, float("-inf")).softmax(-1).to(q.dtype)
    over_context, over_block = weights.split([T, S], -1)
    out = (over_context.reshape(B, Hkv, G * Q, T) @ vc).view(B, Hkv, G, Q, D)
    out = out + (over_block.reshape(B, Hkv, G, N, S, S) @ vb.reshape(blocks)).view(B, Hkv, G, Q, D)
    return out.reshape(B, Hq, Q, D)


@functools.cache
def compiled(function: Callable) -> Callable:
    """The function through torch.compile, in static shapes."""
    # Under DDP graphs would be cut at the borders of its buckets, of which a layer fills several; layers are graphs of their own already.
    torch._dynamo.config.optimize_ddp = False
    return torch.compile(function, dynamic=False)


def flex_attention(q, context_kv, block_kv, mask) -> torch.Tensor:
    """The same by a compiled block-sparse kernel (CUDA)."""
    from torch.nn.attention.flex_attention import flex_attention as flex

    run = flex if torch.compiler.is_compiling() else compiled(flex)
    k = torch.cat([context_kv[0], block_kv[0]], 2)
    v = torch.cat([context_kv[1], block_kv[1]], 2)
    return run(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def span_attention(q, context_kv, block_kv, mask: Spans) -> torch.Tensor:
    """The same by kernels of our own (Hopper)."""
    return block_attention(*(x.transpose(1, 2) for x in (q, *context_kv, *block_kv)), mask).transpose(1, 2)


def slot_attention(q, context_kv, block_kv, mask: SlotMask) -> torch.Tensor:
    """The same over a cache of slots. q (1, Hq, Q, D); context k, v (places, Hkv, D), into which the block's own are written."""
    for cache, own in zip(context_kv, block_kv, strict=True):
        cache.index_copy_(0, mask.places_Q, own[0].transpose(0, 1).to(cache.dtype))
    k, v = context_kv
    out = varlen(
        q[0].transpose(0, 1).to(k.dtype),
        k,
        v,
        mask.starts_q,
        mask.starts_k,
        mask.max_q,
        mask.max_k,
        used=mask.used,
        window=mask.window,
        causal=mask.is_causal,
    )
    return out.transpose(0, 1)[None].to(q.dtype)


def attention_for(mask):
    """The kernel that a mask is made for."""
    if isinstance(mask, SlotMask):
        return slot_attention
    if isinstance(mask, Spans):
        return span_attention
    return dense_attention if isinstance(mask, BlockMask) else flex_attention


class _Project(torch.autograd.Function):
    """x @ joined.T in x's dtype, where `joined` are fp32 weights below each other. Their gradients leave the matrix product in fp32: not
    rounded on the way, and not copied."""

    @staticmethod
    def forward(ctx, x, *weights):
        joined = torch.cat([weight.to(x.dtype) for weight in weights])
        ctx.save_for_backward(x, joined)
        ctx.rows = [len(weight) for weight in weights]
        return F.linear(x, joined)

    @staticmethod
    def backward(ctx, d):
        x, joined = ctx.saved_tensors
        flat_d, flat_x = d.flatten(0, -2), x.flatten(0, -2)
        wide = {"out_dtype": torch.float32} if d.is_cuda and d.dtype is torch.bfloat16 else {}
        gradient = torch.mm(flat_d.T, flat_x, **wide).float()
        return d @ joined, *gradient.split(ctx.rows)


def project(x: torch.Tensor, *linears: nn.Linear) -> Sequence[torch.Tensor]:
    """x through several projections, which where the layer is compiled for training are one matrix product."""
    if not (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return [linear(x) for linear in linears]
    out = _Project.apply(x, *[linear.weight for linear in linears])
    return out.split([linear.out_features for linear in linears], -1)


class BlockAttention(nn.Module):
    """Queries from the block; keys and values from the target's features and from the block itself."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        self.head_dim = spec.head_dim
        h, q, kv = spec.hidden_size, spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = nn.Linear(h, q, bias=False)
        self.k_proj = nn.Linear(h, kv, bias=False)
        self.v_proj = nn.Linear(h, kv, bias=False)
        self.o_proj = nn.Linear(q, h, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)

    def keys_values(self, x_BLH: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, (B, Hkv, L, D) each, of context features."""
        k, v = project(x_BLH, self.k_proj, self.v_proj)
        return self._rotated(k, self.k_norm, by), self._heads(v).transpose(1, 2)

    def _rotated(self, x: torch.Tensor, norm: RMSNorm, by: Rotation) -> torch.Tensor:
        return rotate(norm(self._heads(x)).transpose(1, 2), by)

    def forward(self, x_BQH: torch.Tensor, context: Context, by: Rotation, mask) -> torch.Tensor:
        context_kv = self.keys_values(*context) if isinstance(context, ContextRows) else context
        q, k, v = project(x_BQH, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = self._rotated(q, self.q_norm, by), self._rotated(k, self.k_norm, by), self._heads(v).transpose(1, 2)
        out = attention_for(mask)(q, context_kv, (k, v), mask)
        return project(out.transpose(1, 2).reshape(*x_BQH.shape[:2], -1), self.o_proj)[0]


class BlockConv(nn.Module):
    """A dynamic causal convolution within each block, before and after a sublayer.

    y[t] = sum over taps o of (base[side, o, channel] + dynamic[t, side, o, group]) * v[t - o], rows before slot 0 being zero.
    Both sides' dynamic taps are computed from the sublayer's (normalised) input.
    """

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        self.taps, self.group, self.block_size = spec.conv_kernel_size, spec.conv_group_size, spec.block_size
        groups = spec.hidden_size // spec.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, spec.hidden_size))
        self.kernel_projection = nn.Linear(spec.hidden_size, 2 * self.taps * groups, bias=False)

    def dynamic(self, x_BQH: torch.Tensor, slots: int) -> torch.Tensor:
        """Taps (B, N, S, 2, taps, groups) from the sublayer's input."""
        B, Q, _ = x_BQH.shape
        return project(x_BQH, self.kernel_projection)[0].view(B, Q // slots, slots, 2, self.taps, -1)

    def forward(self, v_BQH: torch.Tensor, dynamic: torch.Tensor, side: int) -> torch.Tensor:
        B, N, S = dynamic.shape[:3]
        v = v_BQH.view(B, N, S, -1, self.group)
        out = torch.zeros_like(v)
        for o in range(self.taps):
            kernel = self.base_kernel[side, o].view(-1, self.group).to(v.dtype) + dynamic[:, :, o:, side, o, :, None]
            # The product is moved, not v: backward needs no moved copy of v then.
            out = out + F.pad(kernel * v[:, :, : S - o], (0, 0, 0, 0, o, 0))
        return out.view_as(v_BQH)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return project(F.silu(gate) * up, self.down_proj)[0]


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP, each between the two sides of a convolution (or plain where the spec has none)."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        self.self_attn = BlockAttention(spec)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention_conv = BlockConv(spec) if spec.conv_kernel_size else None
        self.mlp_conv = BlockConv(spec) if spec.conv_kernel_size else None

    def forward(
        self, x_BQH: torch.Tensor, context: Context, by: Rotation, mask, slots: int, *, fuse: bool = False
    ) -> torch.Tensor:
        """x (B, Q, H) plus what the layer adds. fuse: through torch.compile, here and not around the call, so that what an engine does before and
        after a layer (FSDP2 gathers its weights) stays outside of the graph."""
        through = compiled(DraftLayer.added) if fuse else DraftLayer.added
        return through(self, x_BQH, context, by, mask, slots)

    def added(self, x_BQH: torch.Tensor, context: Context, by: Rotation, mask, slots: int) -> torch.Tensor:
        """The forward itself."""
        h = self.input_layernorm(x_BQH)
        if self.attention_conv is None:
            h = self.self_attn(h, context, by, mask)
        else:
            taps = self.attention_conv.dynamic(h, slots)
            h = self.self_attn(self.attention_conv(h, taps, 0), context, by, mask)
            h = self.attention_conv(h, taps, 1)
        x_BQH = x_BQH + h
        h = self.post_attention_layernorm(x_BQH)
        if self.mlp_conv is None:
            return x_BQH + self.mlp(h)
        taps = self.mlp_conv.dynamic(h, slots)
        return x_BQH + self.mlp_conv(self.mlp(self.mlp_conv(h, taps, 0)), taps, 1)
