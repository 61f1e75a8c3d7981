"""Attention over sequences laid side by side without padding: flash attention on CUDA in 16 bits, a plain loop elsewhere."""

from __future__ import annotations

import torch


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    used: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """q (Tq, Hq, D), k and v (Tk, Hkv, D); returns (Tq, Hq, D).

    starts_q int32 (sequences + 1,): where each sequence's queries begin, and the end. starts_k: the same for its keys; with `used` int32
    (sequences,) only so many keys from there belong to it, and the beginnings may be in any order. A sequence's last query stands at its
    last key. A query sees the keys of its sequence that are less than `window` before it, and none after it if `causal`. max_q, max_k: upper
    bounds of the lengths, known on the host.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not q.is_cuda:
        return varlen_reference(q, k, v, starts_q, starts_k, used, scale, window, causal)
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        starts_q,
        starts_k,
        max_q,
        max_k,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0 if causal else max_k,
        seqused_k=used,
    )[0]


def varlen_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    used: torch.Tensor | None,
    scale: float,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """The same, one sequence after the other, in fp32."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    begins_q, begins_k = starts_q.tolist(), starts_k.tolist()
    lengths_k = used.tolist() if used is not None else [b - a for a, b in zip(begins_k[:-1], begins_k[1:])]
    for i, length in enumerate(lengths_k):
        rows = slice(begins_q[i], begins_q[i + 1])
        columns = slice(begins_k[i], begins_k[i] + length)
        L = begins_q[i + 1] - begins_q[i]
        if L == 0:
            continue
        kk, vv = (x[columns].repeat_interleave(group, 1).float() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float() * scale, kk)
        distance = (torch.arange(L)[:, None] + length - L - torch.arange(length)).to(q.device)
        hidden = (distance >= (window or length + L)) | ((distance < 0) & causal)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num()
        out[rows] = torch.einsum("hqk,khd->qhd", weights, vv).to(q.dtype)
    return out
