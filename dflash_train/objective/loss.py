"""Position-decayed block cross-entropy and the selector's cross-entropy, over the supervised slots only.

M counts the supervised slots of a micro-batch. Logits are never all in memory: `linear_cross_entropy` walks over chunks of
slots and keeps, per slot, the loss, its gradient with respect to the hidden state, and the best candidates.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from dflash_train.types import HeadOutput

_KNOTS = [(8, 4.0), (10, 5.0), (16, 7.0)]


def default_gamma(block_size: int) -> float:
    """4, 5, 7 for K = 8, 10, 16 (DFlash paper), linear between; below 8 half of K, above 16 on the last slope."""
    if block_size <= 8:
        return block_size / 2
    for (k0, g0), (k1, g1) in zip(_KNOTS, _KNOTS[1:], strict=False):
        if block_size <= k1 or k1 == 16:
            return g0 + (g1 - g0) * (block_size - k0) / (k1 - k0)
    raise AssertionError(block_size)


def decay(block_size: int, gamma: float) -> list[float]:
    """w_0 = 0 and w_k = exp(-(k-1)/gamma) for k = 1..K-1."""
    return [0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]


def transform_logits(logits: torch.Tensor, multiplier: float, softcap: float | None) -> torch.Tensor:
    """Multiply first, then soft-cap, as every engine does."""
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunked head: cross-entropy, its gradient and the top candidates without a full logits tensor."""

    @staticmethod
    def forward(ctx, hidden_MH, weight_VH, labels_M, top_k, multiplier, softcap, chunk):
        M = hidden_MH.shape[0]
        nll = hidden_MH.new_empty(M, dtype=torch.float32)
        candidates = labels_M.new_empty(M, top_k)
        gradient = torch.empty_like(hidden_MH) if ctx.needs_input_grad[0] else None
        for i in range(0, M, chunk):
            rows = slice(i, min(i + chunk, M))
            logits = transform_logits((hidden_MH[rows] @ weight_VH.T).float(), multiplier, softcap)
            gold = labels_M[rows, None]
            candidates[rows] = logits.topk(top_k, -1).indices
            log_z = logits.logsumexp(-1)
            nll[rows] = log_z - logits.gather(1, gold)[:, 0]
            if gradient is not None:
                slope = multiplier if softcap is None else multiplier * (1 - (logits / softcap) ** 2)
                d = (logits - log_z[:, None]).exp_()
                d.scatter_add_(1, gold, torch.full_like(gold, -1, dtype=d.dtype))
                gradient[rows] = (d * slope).to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(gradient if gradient is not None else nll)
        ctx.mark_non_differentiable(candidates)
        return nll, candidates

    @staticmethod
    def backward(ctx, d_nll, _):
        (gradient,) = ctx.saved_tensors
        return (gradient * d_nll[:, None]).to(gradient.dtype), None, None, None, None, None, None


def linear_cross_entropy(
    hidden_MH,
    weight_VH,
    labels_M,
    *,
    top_k: int,
    multiplier: float = 1.0,
    softcap: float | None = None,
    chunk: int = 1024,
) -> HeadOutput:
    """Cross-entropy of transform(hidden @ weight.T) against labels, with gradient to `hidden` only (the head is frozen)."""
    weight = weight_VH.to(hidden_MH.dtype)
    nll, candidates = _LinearCrossEntropy.apply(hidden_MH, weight, labels_M, top_k, multiplier, softcap, chunk)
    return HeadOutput(nll, candidates[:, 0], candidates)


def candidate_logits(
    hidden_MH, weight_VH, candidates_MC, *, multiplier: float = 1.0, softcap: float | None = None
) -> torch.Tensor:
    """Unary scores U_t(b) (M, C) of the candidates, differentiable in `hidden`: recomputed as gathered dot products."""
    rows = weight_VH[candidates_MC].to(hidden_MH.dtype)
    return transform_logits((rows @ hidden_MH[:, :, None])[..., 0].float(), multiplier, softcap)


def selector_cross_entropy(scores_MC, candidates_MC, labels_M) -> tuple[torch.Tensor, torch.Tensor]:
    """(nll_M, covered_M): cross-entropy over the candidates; a slot whose token is not among them has loss 0 and no gradient."""
    hit_MC = candidates_MC == labels_M[:, None]
    covered = hit_MC.any(-1)
    nll = F.cross_entropy(scores_MC.float(), hit_MC.int().argmax(-1), reduction="none")
    return torch.where(covered, nll, 0.0), covered


def leading_hits(correct_BNS: torch.Tensor, supervised_BNS: torch.Tensor) -> torch.Tensor:
    """Accepted drafts (B, N): leading correct slots 1..K-1 of each block, ending at the first unsupervised slot."""
    return (correct_BNS & supervised_BNS)[:, :, 1:].long().cumprod(-1).sum(-1)
