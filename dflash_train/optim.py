"""AdamW's parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dflash_train.config.schema import OptimizerConfig


def lr_at(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Rate of the 0-based step: linear warm-up to lr, then cosine to min_lr_ratio * lr at the last step."""
    warmup = max(1, int(config.warmup_ratio * total_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    through = (step - warmup) / max(1, total_steps - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, through)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def build_optimizer(parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig) -> torch.optim.AdamW:
    """Of named parameters, or of their shards: matrices with weight decay; norms, convolution taps and codebooks without."""
    decayed, plain = [], []
    for name, p in parameters:
        free = p.ndim != 2 or "codebook" in name
        (plain if free else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
