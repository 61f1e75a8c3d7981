"""Sampling from filtered logits: a plain reference, and one kernel that reads the logits without sorting them."""

from __future__ import annotations

import torch


def sample(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor,
    top_k_B: torch.Tensor,
) -> torch.Tensor:
    """`sample_reference`, by the kernel where the logits are on CUDA. int64 (B,)."""
    if logits_BV.is_cuda:
        return sample_kernel(logits_BV, uniform_B, temperature_B, top_p_B, top_k_B)
    return sample_reference(logits_BV, uniform_B, temperature_B, top_p_B, top_k_B)


def sample_reference(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor,
    top_k_B: torch.Tensor,
) -> torch.Tensor:
    """Token of each row by inverse transform of its filtered distribution; uniform_B in [0, 1). Greedy where the temperature is 0.

    top_k first, then top_p over what is left, as engines do. top_p keeps the smallest set that reaches the mass, and every token that is as
    likely as its last one. The kept tokens are lined up by id, so a draw does not depend on how the set was found.
    """
    greedy_B = temperature_B == 0
    scores_BV = logits_BV.float() / torch.where(greedy_B, 1.0, temperature_B)[:, None]
    ordered_BV = scores_BV.sort(dim=-1, descending=True).values
    vocab = logits_BV.shape[-1]
    k_B = torch.where((top_k_B <= 0) | (top_k_B > vocab), vocab, top_k_B)
    kth_B1 = ordered_BV.gather(-1, (k_B - 1)[:, None])
    probs_BV = torch.where(ordered_BV >= kth_B1, ordered_BV, float("-inf")).softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    last_B1 = ((before_BV < top_p_B[:, None]) & (probs_BV > 0)).sum(-1, keepdim=True) - 1
    least_B1 = ordered_BV.gather(-1, last_B1.clamp_min(0))
    weights_BV = torch.where(scores_BV >= least_B1, (scores_BV - ordered_BV[:, :1]).exp(), 0.0)
    sums_BV = weights_BV.cumsum(-1)
    choice_B1 = (sums_BV <= uniform_B[:, None] * sums_BV[:, -1:]).sum(-1, keepdim=True)
    # Rounding may put a draw next to 1 past the last token that has any mass.
    last_kept_B1 = vocab - 1 - (weights_BV > 0).flip(-1).int().argmax(-1, keepdim=True)
    choice_B1 = torch.minimum(choice_B1, last_kept_B1)
    return torch.where(greedy_B, logits_BV.argmax(-1), choice_B1[:, 0])


def sample_kernel(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    temperature_B: torch.Tensor,
    top_p_B: torch.Tensor,
    top_k_B: torch.Tensor,
) -> torch.Tensor:
    """As `sample_reference`; no host sync, so it can be captured in a graph. Sums differ in the last bits, which may move a draw that lies
    within rounding of a boundary to the neighbouring token."""
    from dflash_train.kernels.sample_triton import sample_row  # triton comes with torch on CUDA only

    B, V = logits_BV.shape
    out_B = torch.empty(B, dtype=torch.long, device=logits_BV.device)
    bits = 16 if logits_BV.dtype == torch.bfloat16 else 32
    sample_row[(B,)](
        logits_BV,
        uniform_B,
        temperature_B,
        top_p_B,
        top_k_B,
        out_B,
        V,
        logits_BV.stride(0),
        BITS=bits,
        BLOCK=4096,
        num_warps=8,
    )
    return out_B
