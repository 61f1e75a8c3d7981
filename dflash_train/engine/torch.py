"""One process, or torch DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dflash_train import ranks
from dflash_train.config.schema import EngineConfig, EngineKind
from dflash_train.types import LossReport, PackedBatch, TargetFeatures


class TorchEngine:
    """fp32 master weights; compute in the step's format by autocast. DDP averages over ranks, so the loss is multiplied by their number."""

    def __init__(
        self, step: nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, *, max_grad_norm: float
    ):
        if config.kind is EngineKind.single and ranks.world_size() > 1:
            raise ValueError(f"engine.kind = single under {ranks.world_size()} processes: use auto or ddp")
        self.step, self.optimizer, self.max_grad_norm = step, optimizer, max_grad_norm
        self.device = next(step.parameters()).device
        self.parameters = [p for p in step.parameters() if p.requires_grad]
        if ranks.world_size() > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.module: nn.Module = DistributedDataParallel(step, device_ids=ids, gradient_as_bucket_view=True)
        else:
            self.module = step

    def forward(self, batch: PackedBatch, features: TargetFeatures, total_weight: torch.Tensor) -> LossReport:
        with self.step.autocast():
            return self.module(batch, features, total_weight)

    def backward(self, loss: torch.Tensor) -> None:
        (loss * ranks.world_size()).backward()

    def accumulate(self, last: bool) -> AbstractContextManager:
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    def update(self, lr: float) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        # As clip_grad_norm_, but the optimizer's kernel divides: one pass less over the gradients.
        self.optimizer.grad_scale = ((norm + 1e-6) / (self.max_grad_norm or float("inf"))).clamp_min(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm
