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
    """Token of each row by inverse transform of its filtered distribution (see `filter_reference`); uniform_B in [0, 1). Greedy where the
    temperature is 0. The kept tokens are lined up by id, so a draw does not depend on how the set was found.
    """
    least_B, top_B, _ = filter_reference(logits_BV, temperature_B, top_p_B, top_k_B)
    weights_BV = kept_weights(logits_BV, least_B, top_B, temperature_B)
    return torch.where(temperature_B == 0, logits_BV.argmax(-1), draw(weights_BV, uniform_B))


def draw(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Index of each row with probability proportional to its weight, by inverse transform in the order of the indices."""
    sums_BV = weights_BV.cumsum(-1)
    choice_B = (sums_BV <= uniform_B[:, None] * sums_BV[:, -1:]).sum(-1)
    # Rounding may put a draw next to 1 past the last index that has any weight.
    last_B = weights_BV.shape[-1] - 1 - (weights_BV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(choice_B, last_B)


def kept_weights(
    logits_BV: torch.Tensor, least_B: torch.Tensor, top_B: torch.Tensor, temperature_B: torch.Tensor
) -> torch.Tensor:
    """exp((logit - top) / T) of the kept tokens, 0 of the others. Shapes may be (B, anything)."""
    logits = logits_BV.float()
    divisor_B = torch.where(temperature_B == 0, 1.0, temperature_B)
    return torch.where(logits >= least_B[:, None], ((logits - top_B[:, None]) / divisor_B[:, None]).exp(), 0.0)


def filter_rows(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`filter_reference`, by the kernel where the logits are on CUDA."""
    if logits_BV.is_cuda:
        return filter_kernel(logits_BV, temperature_B, top_p_B, top_k_B)
    return filter_reference(logits_BV, temperature_B, top_p_B, top_k_B)


def filter_reference(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(least_B, top_B, total_B) of each row: the smallest logit that is kept, the largest, and the sum of exp((logit - top) / T) over what
    is kept. A temperature of 0 counts as 1.

    top_k first, then top_p over what is left, as engines do. top_p keeps the smallest set that reaches the mass, and every token that is as
    likely as its last one.
    """
    ordered_BV = logits_BV.float().sort(dim=-1, descending=True).values
    vocab = logits_BV.shape[-1]
    k_B = torch.where((top_k_B <= 0) | (top_k_B > vocab), vocab, top_k_B)
    kth_B1 = ordered_BV.gather(-1, (k_B - 1)[:, None])
    top_B = ordered_BV[:, 0]
    weights_BV = kept_weights(ordered_BV, kth_B1[:, 0], top_B, temperature_B)
    before_BV = weights_BV.cumsum(-1) - weights_BV
    goal_B1 = (top_p_B * weights_BV.sum(-1))[:, None]
    kept_BV = ((before_BV < goal_B1) | (top_p_B >= 1)[:, None]) & (weights_BV > 0)
    last_B1 = kept_BV.sum(-1, keepdim=True) - 1
    least_B = ordered_BV.gather(-1, last_B1.clamp_min(0))[:, 0]
    return least_B, top_B, kept_weights(ordered_BV, least_B, top_B, temperature_B).sum(-1)


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


def filter_kernel(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `filter_reference`, without sorting and without a host sync."""
    from dflash_train.kernels.sample_triton import filter_row

    B, V = logits_BV.shape
    least_B, top_B, total_B = (torch.empty(B, dtype=torch.float32, device=logits_BV.device) for _ in range(3))
    bits = 16 if logits_BV.dtype == torch.bfloat16 else 32
    filter_row[(B,)](
        logits_BV,
        temperature_B,
        top_p_B,
        top_k_B,
        least_B,
        top_B,
        total_B,
        V,
        logits_BV.stride(0),
        BITS=bits,
        BLOCK=4096,
        num_warps=8,
    )
    return least_B, top_B, total_B
