"""AdamW's parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from dflash_train.config.schema import OptimizerConfig
from dflash_train.kernels.adamw import update


def lr_at(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Rate of the 0-based step: linear warm-up to lr, then cosine to min_lr_ratio * lr at the last step."""
    warmup = max(1, int(config.warmup_ratio * total_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    through = (step - warmup) / max(1, total_steps - 1 - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, through)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


class AdamW(torch.optim.AdamW):
    """torch's fused one, state for state, with its `grad_scale` (a tensor that gradients are divided by) and `found_inf` (a tensor: 1 where nothing is to
    change, else 0). On CUDA by `kernels.adamw`; the parameters of a group have been stepped equally often."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if not all(p.is_cuda and p.dtype is torch.float32 for group in self.param_groups for p in group["params"]):
            super().step(closure)
            return
        assert closure is None
        for group in self.param_groups:
            self._update([p for p in group["params"] if p.grad is not None], group)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        if not parameters:
            return
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in parameters]
        one = torch.ones((), dtype=torch.float64, device=parameters[0].device)
        divisor, skipped = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        skipped = 0 * one if skipped is None else skipped
        # One addend per step: a single tensor for all of them would be read by the host.
        torch._foreach_add_([state["step"] for state in states], [(1 - skipped).float()] * len(states))
        (beta1, beta2), lr, t = group["betas"], group["lr"], states[0]["step"].double()
        numbers = {
            "rate": (lr / (1 - beta1**t)).float(),
            "root": (1 - beta2**t).sqrt().float(),
            "divisor": (one if divisor is None else divisor).float(),
            "decay": (one - lr * group["weight_decay"]).float(),
            "skipped": skipped.float(),
        }
        for p, state in zip(parameters, states, strict=True):
            update(
                p, p.grad, state["exp_avg"], state["exp_avg_sq"], beta1=beta1, beta2=beta2, eps=group["eps"], **numbers
            )


def build_optimizer(parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig) -> AdamW:
    """Of named parameters, or of their shards: matrices with weight decay; norms, convolution taps and codebooks without."""
    decayed, plain = [], []
    for name, p in parameters:
        free = p.ndim != 2 or "codebook" in name
        (plain if free else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
