"""Position-decayed block cross-entropy and the selector's cross-entropy, over the supervised slots only.

M counts the supervised slots of a micro-batch. Logits are never all in memory: `linear_cross_entropy` walks over chunks of
slots and keeps, per slot, the loss, its gradient with respect to the hidden state, and the best candidates.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from dflash_train.kernels.gather import gather_dot
from dflash_train.kernels.head import score_rows, transform_logits
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


LOGIT_BYTES = 320 * 2**20  # of logits that exist at the same time, whatever the vocabulary


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunked head: cross-entropy, its gradient and the top candidates without a full logits tensor."""

    @staticmethod
    def forward(ctx, hidden_MH, weight_VH, labels_M, top_k, multiplier, softcap, chunk):
        M, V = len(hidden_MH), len(weight_VH)
        chunk = min(chunk, max(128, LOGIT_BYTES // (V * hidden_MH.element_size()) // 128 * 128))
        nll = hidden_MH.new_empty(M, dtype=torch.float32)
        candidates = labels_M.new_empty(M, top_k)
        needed = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden_MH) if needed else None
        for i in range(0, M, chunk):
            rows = slice(i, min(i + chunk, M))
            logits = hidden_MH[rows] @ weight_VH.T
            nll[rows], candidates[rows], d = score_rows(
                logits, labels_M[rows], top_k, multiplier, softcap, gradient=needed
            )
            if needed:
                torch.mm(d, weight_VH, out=gradient[rows])
            del logits, d  # before the next chunk's are made
        ctx.save_for_backward(gradient if needed else nll)
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
    if hidden_MH.is_cuda:  # no copy of the rows; rounded as the head's logits are
        unary = gather_dot(hidden_MH, weight_VH, candidates_MC).to(hidden_MH.dtype)
    else:
        unary = (weight_VH[candidates_MC].to(hidden_MH.dtype) @ hidden_MH[:, :, None])[..., 0]
    return transform_logits(unary.float(), multiplier, softcap)


def selector_cross_entropy(scores_MC, candidates_MC, labels_M) -> tuple[torch.Tensor, torch.Tensor]:
    """(nll_M, covered_M): cross-entropy over the candidates; a slot whose token is not among them has loss 0 and no gradient."""
    hit_MC = candidates_MC == labels_M[:, None]
    covered = hit_MC.any(-1)
    nll = F.cross_entropy(scores_MC.float(), hit_MC.int().argmax(-1), reduction="none")
    return torch.where(covered, nll, 0.0), covered


def leading_hits(correct_BNS: torch.Tensor, supervised_BNS: torch.Tensor) -> torch.Tensor:
    """Accepted drafts (B, N): leading correct slots 1..K-1 of each block, ending at the first unsupervised slot. Any leading dimensions."""
    return (correct_BNS & supervised_BNS)[..., 1:].long().cumprod(-1).sum(-1)
