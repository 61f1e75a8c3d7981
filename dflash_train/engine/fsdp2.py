"""torch FSDP2: weights, gradients and moments are sharded over ranks; a layer is whole only while it computes.

Each draft layer is a group, so is the selector with its codebooks, and what is left (the feature projection, two norms) is the root. Gathered
weights are fp32 and the step's autocast makes bf16 of them, exactly as without sharding: a MixedPrecisionPolicy with a param_dtype would gather half the bytes, but
it would also round norms, taps and codebooks, which the other engines keep, and a run could not change its engine without changing its numbers.
Gradients are reduced in every micro-batch, so that no rank ever holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_train import ranks
from dflash_train.config.schema import EngineConfig, OptimizerConfig
from dflash_train.engine.base import Engine, fresh_moments
from dflash_train.engine.guard import Guard
from dflash_train.optim import build_optimizer
from dflash_train.types import LossReport, PackedBatch, TargetFeatures


class FSDP2Engine(Engine):
    """AdamW works on plain tensors that share the memory of this rank's shards: fused, and with the same guard as everywhere."""

    sharded = True

    def __init__(self, step: nn.Module, engine: EngineConfig, config: OptimizerConfig, guard: Guard):
        super().__init__(step, guard)
        drafter, device = step.drafter, next(step.parameters()).device
        self.mesh = init_device_mesh(device.type, (ranks.world_size(),))
        travels = getattr(torch, engine.reduce_precision.value)
        parts = [*drafter.layers, *([drafter.candidate_selector] if drafter.candidate_selector is not None else [])]
        for module in (*parts, step):
            fully_shard(module, mesh=self.mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=travels))
        self.shards = {name: nn.Parameter(p.to_local()) for name, p in self.parameters()}
        self.optimizer = build_optimizer(self.shards.items(), config)

    def forward(self, batch: PackedBatch, features: TargetFeatures, total_weight: torch.Tensor) -> LossReport:
        return self.step(batch, features, total_weight)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.to_local() for _, p in self.parameters() if p.grad is not None]

    def apply(self) -> None:
        for name, p in self.parameters():
            shard = self.shards[name]
            assert shard.data_ptr() == p.to_local().data_ptr(), f"{name}: its shard has moved"
            shard.grad = None if p.grad is None else p.grad.to_local()
        self.optimizer.step()
        for name, p in self.parameters():
            p.grad = self.shards[name].grad = None

    def full(self, name: str, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if kind == "weight":
            return parameter.full_tensor()
        shard = self.optimizer.state[self.shards[name]][kind]
        if kind == "step":
            return shard
        like = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        return DTensor.from_local(shard, self.mesh, parameter.placements, **like).full_tensor()

    def take(self, name: str, parameter: nn.Parameter, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        shard = self.shards[name]
        shard.copy_(self._own(parameter, weight))
        if moments:
            state = self.optimizer.state[shard] = fresh_moments(shard)
            for kind, value in moments.items():
                state[kind].copy_(value if kind == "step" else self._own(parameter, value))

    def _own(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor that all ranks have."""
        on_device = whole.to(parameter.device)
        return distribute_tensor(on_device, self.mesh, parameter.placements, src_data_rank=None).to_local()

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """A second drafter, whole on every rank, for as long as the evaluation lasts: its hooks do not wait for other ranks."""
        replica = self.step.replica()
        with torch.no_grad():
            for (name, sharded), copy in zip(self.parameters(), replica.drafter.parameters(), strict=True):
                copy.copy_(self.full(name, sharded, "weight"))
        yield replica.train(self.step.training)

    def release(self) -> Any:
        super().release()
        return self.step.replica()
