"""One process, or torch DistributedDataParallel: every rank has all weights and updates all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from dflash_train import ranks
from dflash_train.config.schema import EngineConfig, OptimizerConfig, ReducePrecision
from dflash_train.engine.base import Engine, fresh_moments
from dflash_train.engine.guard import Guard
from dflash_train.optim import build_optimizer
from dflash_train.types import LossReport, PackedBatch, TargetFeatures


def _in_bf16(group, bucket):  # torch takes annotations by value, not as the strings that they are here
    """torch's own hook, by another name: by its own it is refused where no GPU is, though gloo sums bf16 too."""
    return bf16_compress_hook(group, bucket)


class TorchEngine(Engine):
    """fp32 master weights; the step computes in its own format by autocast."""

    sharded = False

    def __init__(self, step: nn.Module, engine: EngineConfig, config: OptimizerConfig, guard: Guard):
        super().__init__(step, guard)
        self.optimizer = build_optimizer(step.drafter.named_parameters(), config)
        self.module = step
        if ranks.world_size() > 1:
            device = next(step.parameters()).device
            ids = [device.index] if device.type == "cuda" else None
            self.module = DistributedDataParallel(step, device_ids=ids, gradient_as_bucket_view=True)
            if engine.reduce_precision is ReducePrecision.bfloat16:
                self.module.register_comm_hook(None, _in_bf16)

    def forward(self, batch: PackedBatch, features: TargetFeatures, total_weight: torch.Tensor) -> LossReport:
        return self.module(batch, features, total_weight)

    def accumulate(self, last: bool) -> AbstractContextManager:
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for _, p in self.parameters() if p.grad is not None]

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def full(self, name: str, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        return parameter if kind == "weight" else self.optimizer.state[parameter][kind]

    def take(self, name: str, parameter: nn.Parameter, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        parameter.copy_(weight)
        if moments:
            state = self.optimizer.state[parameter] = fresh_moments(parameter)
            for kind, value in moments.items():
                state[kind].copy_(value)
