"""How ranks share the work: one contract, the same numbers behind it.

Of one optimizer step:

    for every micro-batch:  with engine.accumulate(last): report = engine.forward(...); engine.backward(report.loss)
    taken = engine.update(lr)

Gradients are averaged over ranks by every library, so a loss, which is divided by the step's global denominator already, is multiplied by
their number. Clipping, the decision whether to take a step and AdamW are the same code for all: an engine only says which tensors of the
weights a rank updates, and what has to happen around that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dflash_train import ranks
from dflash_train.engine.guard import Guard
from dflash_train.types import LossReport, PackedBatch, Saved, TargetFeatures

MOMENTS = ("exp_avg", "exp_avg_sq")


class Engine(ABC):
    """Wraps the DraftStep; owns gradients, clipping and the optimizer.

    step: the module that was given, whatever has become of its weights; only `whole` may look at them. optimizer: AdamW over what this rank
    updates, in fp32. sharded: whether that is a share of the weights, or all of them. Every method but `release` is called by all ranks alike.
    """

    optimizer: torch.optim.AdamW
    sharded: bool

    def __init__(self, step: nn.Module, guard: Guard):
        self.step, self.guard = step, guard
        self._losses: list[torch.Tensor] = []

    # --- what an engine says ---

    @abstractmethod
    def forward(self, batch: PackedBatch, features: TargetFeatures, total_weight: torch.Tensor) -> LossReport: ...

    def accumulate(self, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch, so that gradients can be exchanged in the last one only."""
        return nullcontext()

    def propagate(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss to what `gradients` will give, averaged over ranks."""
        loss.backward()

    @abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """The step's gradients of what this rank updates."""
        ...

    @abstractmethod
    def apply(self) -> None:
        """Step the optimizer, spread the new weights, drop the gradients."""
        ...

    @abstractmethod
    def full(self, name: str, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """A parameter, whole and on any device: its `weight`, or the moment that `kind` names. May be a collective."""
        ...

    @abstractmethod
    def take(self, name: str, parameter: nn.Parameter, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        """Set a parameter from whole tensors; moments may be empty, else `exp_avg`, `exp_avg_sq` and `step`."""
        ...

    # --- what is the same for all ---

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's share of the global loss."""
        self._losses.append(loss.detach())
        self.propagate(loss * ranks.world_size())

    def update(self, lr: float) -> torch.Tensor:
        """Clip, step, zero. Returns whether the step was taken, a boolean on the device: where the loss of any rank or the gradient is not
        finite, no rank changes weights, moments or the optimizer's count."""
        square = torch.nn.utils.get_total_norm(self.gradients()).double().square()
        losses, self._losses = self._losses, []
        # Each rank has the whole gradient, or its share of it. A rank whose gradient is not finite spoils the sum for all of them.
        taken, divisor = self.guard.judge(square if self.sharded else square / ranks.world_size(), losses)
        where = self.optimizer.param_groups[0]["params"][0].device
        self.optimizer.found_inf, self.optimizer.grad_scale = (~taken).float().to(where), divisor.to(where)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.apply()
        return taken

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The drafter's parameters under the names of its state dict."""
        return self.step.drafter.named_parameters()

    @torch.no_grad()
    def gather(self, *, moments: bool = True) -> Saved | None:
        """The whole drafter and, if asked for, its AdamW state on rank 0, in copies that later updates do not change; None elsewhere."""
        saved = Saved(weights={}, moments={})

        def keep(into: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
            if ranks.is_rank0():
                into[name] = _to_host(tensor)

        for name, parameter in self.parameters():
            keep(saved.weights, name, self.full(name, parameter, "weight"))
            for kind in (*MOMENTS, "step") if moments and self.optimizer.state else ():
                keep(saved.moments, f"{kind}.{name}", self.full(name, parameter, kind))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return saved if ranks.is_rank0() else None

    @torch.no_grad()
    def restore(self, saved: Saved) -> None:
        """Continue from a state that any engine gathered; every rank gives the whole of it."""
        self.optimizer.state.clear()
        for name, parameter in self.parameters():
            kinds = (*MOMENTS, "step") if saved.moments else ()
            self.take(name, parameter, saved.weights[name], {kind: saved.moments[f"{kind}.{name}"] for kind in kinds})

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The step with all its weights on this rank, for evaluation: inside, ranks may do different things."""
        yield self.step

    def release(self) -> Any:
        """Training is over: forget gradients and moments. Returns the step with a whole drafter whose weights may be overwritten (their
        present values are not to be relied on). No collective."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        return self.step


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in fp32; from a GPU through pinned memory, not waited for."""
    tensor = tensor.detach().float()
    if tensor.device.type != "cuda":
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def fresh_moments(like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state that fused AdamW begins with."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=like.device),
        **{kind: torch.zeros_like(like) for kind in MOMENTS},
    }
