"""How ranks share the work, behind one interface."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from dflash_train.types import LossReport, PackedBatch, Saved, TargetFeatures


class Engine(Protocol):
    """Wraps the DraftStep; owns gradients, clipping and the optimizer step."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def forward(self, batch: PackedBatch, features: TargetFeatures, total_weight: torch.Tensor) -> LossReport: ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's share of the global loss."""
        ...

    def accumulate(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch: gradients are exchanged in the last one only."""
        ...

    def update(self, lr: float) -> torch.Tensor:
        """Clip, step, zero; returns the global gradient norm before clipping (on the device)."""
        ...

    def gather(self, *, moments: bool = True) -> Saved | None:
        """A collective. Rank 0 gets the whole state, copied to the host, where later updates cannot change it; the others None."""
        ...

    def restore(self, saved: Saved) -> None:
        """Continue from the whole state, which every rank brings."""
        ...
