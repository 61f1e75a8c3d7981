"""What a chunk of logits is asked for: the loss, its gradient and the best tokens. A plain reference, and one kernel that reads the logits
twice and sorts nothing."""

from __future__ import annotations

import torch

LANES = 2048  # columns that the kernel looks at together; it remembers the best of each 2048th


def transform_logits(logits: torch.Tensor, multiplier: float, softcap: float | None) -> torch.Tensor:
    """Multiply first, then soft-cap, as every engine does."""
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def score_rows(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    top_k: int,
    multiplier: float,
    softcap: float | None,
    *,
    gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(nll fp32 (R,), candidates int64 (R, top_k), gradient (R, V) or None) of transformed logits; the gradient is that of the sum of nll with
    respect to `logits_RV`, in their dtype. The logits may be overwritten.

    Candidates are the top_k best tokens, best first; which of equal logits counts as better is left open, as in `torch.topk`.
    """
    do = score_rows_kernel if logits_RV.is_cuda else score_rows_reference
    return do(logits_RV, labels_R, top_k, multiplier, softcap, gradient=gradient)


def score_rows_reference(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    top_k: int,
    multiplier: float,
    softcap: float | None,
    *,
    gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`score_rows`, one operation after the other, in fp32."""
    logits = transform_logits(logits_RV.float(), multiplier, softcap)
    gold = labels_R[:, None]
    candidates = logits.topk(top_k, -1).indices
    log_z = logits.logsumexp(-1)
    nll = log_z - logits.gather(1, gold)[:, 0]
    if not gradient:
        return nll, candidates, None
    slope = multiplier if softcap is None else multiplier * (1 - (logits / softcap) ** 2)
    d = (logits - log_z[:, None]).exp_()
    d.scatter_add_(1, gold, torch.full_like(gold, -1, dtype=d.dtype))
    return nll, candidates, (d * slope).to(logits_RV.dtype)


def score_rows_kernel(
    logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    top_k: int,
    multiplier: float,
    softcap: float | None,
    *,
    gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`score_rows` by one program per row; the gradient replaces the logits. top_k must be a power of two."""
    from dflash_train.kernels.head_triton import score_row  # triton comes with torch on CUDA only

    R, V = logits_RV.shape
    nll = torch.empty(R, dtype=torch.float32, device=logits_RV.device)
    candidates = torch.empty(R, top_k, dtype=torch.long, device=logits_RV.device)
    score_row[(R,)](
        logits_RV,
        labels_R,
        nll,
        candidates,
        V,
        logits_RV.stride(0),
        multiplier,
        1.0 if softcap is None else softcap,
        CAPPED=softcap is not None,
        GRADIENT=gradient,
        K=top_k,
        MEMBERS=1 << (-(-V // LANES) - 1).bit_length(),
        LANES=LANES,
        num_warps=8,
    )
    return nll, candidates, logits_RV if gradient else None
