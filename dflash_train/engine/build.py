"""engine.kind -> the engine. The libraries are imported when they are used."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from dflash_train import ranks
from dflash_train.config.schema import EngineConfig, EngineKind, OptimizerConfig, ReducePrecision
from dflash_train.engine.base import Engine
from dflash_train.engine.guard import Guard

ZERO_STAGE = {EngineKind.deepspeed_zero1: 1, EngineKind.deepspeed_zero2: 2}


def build_engine(
    step: nn.Module, engine: EngineConfig, optimizer: OptimizerConfig, *, micro_batches: int, most_in_a_row: int
) -> Engine:
    """The engine around a DraftStep on its device. micro_batches: per rank and step; most_in_a_row: skipped steps, after which none is taken."""
    if ranks.world_size() == 1:
        engine = replace(engine, reduce_precision=ReducePrecision.float32)  # nothing travels, so nothing is rounded
    device: torch.device = next(step.parameters()).device
    guard = Guard(micro_batches, max_grad_norm=optimizer.max_grad_norm, most_in_a_row=most_in_a_row, device=device)
    if engine.kind is EngineKind.single and ranks.world_size() > 1:
        raise ValueError(f"engine.kind = single under {ranks.world_size()} processes: use auto or ddp")
    if engine.kind is EngineKind.fsdp2:
        from dflash_train.engine.fsdp2 import FSDP2Engine

        return FSDP2Engine(step, engine, optimizer, guard)
    if engine.kind in ZERO_STAGE:
        from dflash_train.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(step, ZERO_STAGE[engine.kind], engine, optimizer, guard)
    from dflash_train.engine.torch import TorchEngine

    return TorchEngine(step, engine, optimizer, guard)
