"""One AdamW update of fp32 tensors: a plain reference, and a kernel that reads and writes each number once."""

from __future__ import annotations

import torch

BLOCK = 1024


def update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    rate: torch.Tensor,
    root: torch.Tensor,
    divisor: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    decay: torch.Tensor,
    skipped: torch.Tensor,
) -> None:
    """In place: parameter, mean and square. The numbers on the device, each of one element, fp32: rate, lr / (1 - beta1^t); root,
    sqrt(1 - beta2^t); divisor of the gradient, for clipping; decay, 1 - lr x weight decay, by which the parameter is multiplied; skipped, 1 where
    nothing is to change, else 0."""
    from dflash_train.kernels.adamw_triton import adamw  # triton comes with torch on CUDA only

    n = parameter.numel()
    if not n:  # the share of a rank that has none of it
        return
    tensors = (parameter, gradient.contiguous(), mean, square)
    assert all(x.is_contiguous() and x.dtype is torch.float32 for x in tensors)
    adamw[(-(-n // BLOCK),)](*tensors, rate, root, divisor, decay, skipped, n, beta1, beta2, eps, BLOCK=BLOCK)


def update_reference(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    rate: torch.Tensor,
    root: torch.Tensor,
    divisor: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    decay: torch.Tensor,
    skipped: torch.Tensor,
) -> None:
    """`update`, one operation after the other."""
    if skipped:
        return
    g = gradient / divisor
    mean.mul_(beta1).add_((1 - beta1) * g)
    square.mul_(beta2).add_((1 - beta2) * g * g)
    parameter.mul_(decay).sub_(rate * mean / (square.sqrt() / root + eps))
