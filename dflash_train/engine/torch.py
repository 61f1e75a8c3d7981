"""One process, or torch DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dflash_train import ranks
from dflash_train.config.schema import EngineConfig, EngineKind
from dflash_train.types import LossReport, PackedBatch, Saved, TargetFeatures


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
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gather(self, *, moments: bool = True) -> Saved | None:
        if not ranks.is_rank0():
            return None
        weights = {name: _copy(p) for name, p in self.step.drafter.named_parameters()}
        adam: dict[str, torch.Tensor] = {}
        for name, p in self.step.drafter.named_parameters() if moments else ():
            adam |= {f"{kind}.{name}": _copy(value) for kind, value in self.optimizer.state.get(p, {}).items()}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Saved(weights=weights, moments=adam)

    def restore(self, saved: Saved) -> None:
        self.step.drafter.load_state_dict(saved.weights)
        self.optimizer.state.clear()
        for name, p in self.step.drafter.named_parameters():
            kinds = ("step", "exp_avg", "exp_avg_sq")
            found = {kind: saved.moments[key] for kind in kinds if (key := f"{kind}.{name}") in saved.moments}
            if found:
                self.optimizer.state[p] = {kind: value.to(p.device, copy=True) for kind, value in found.items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 on the host; from a GPU through pinned memory, not waited for."""
    tensor = tensor.detach().float()
    if tensor.device.type != "cuda":
        return tensor.clone().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
