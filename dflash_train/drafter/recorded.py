"""A pass over tensors of one size, and its gradient, as CUDA graphs: a small drafter's kernels take the host longer to launch than a GPU to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from dflash_train.drafter.model import Drafter
from dflash_train.drafter.spec import DrafterSpec, num_parameters
from dflash_train.kernels.graphs import Graphs
from dflash_train.types import DraftBlocks, PackedBatch, TargetFeatures

RECORDED_WEIGHTS = 100e6  # of drafters from there on an H200 takes longer than the host, and what graphs keep of a pass between steps is large
ALIGNED = 64  # elements: where the gradient of each parameter begins, so that kernels read it in wide words


class RecordedDraft:
    """hidden(drafter, batch, features) -> (B, Q, H), recorded for batches of the size of the first. graphs: as in `Recorded`."""

    # What is read of a batch and of its blocks, all of sizes that a recipe fixes.
    BATCH = ("document_ids_BT", "position_ids_BT")
    BLOCKS = ("anchors_BN", "valid_BN", "slots_BN", "labels_BNS")

    def __init__(
        self,
        drafter: Drafter,
        hidden: Callable[[Drafter, PackedBatch, TargetFeatures], torch.Tensor],
        graphs: Graphs | None = None,
    ):
        self.drafter, self.hidden, self.graphs = drafter, hidden, graphs
        self.parameters = [parameter for name, parameter in drafter.named_parameters() if _recorded(name)]
        self.why_not: str | None = None
        self._recorded: Recorded | None = None

    def __call__(self, batch: PackedBatch, features: TargetFeatures) -> torch.Tensor | None:
        """What `hidden` returns, to be read before the next call; None for a batch of another size, and where nothing can be recorded."""
        if self.why_not:
            return None
        if self._recorded is None:
            self._recorded = self._over_weights()
        tensors = [features.features_BTF, *(getattr(batch, name) for name in self.BATCH)]
        tensors += [getattr(batch.blocks, name) for name in self.BLOCKS]
        hidden_BQH = self._recorded(tensors, self.parameters)
        if self._recorded.why_not:
            self.why_not, self._recorded = self._recorded.why_not, None
            print(f"note: the drafter is run without CUDA graphs: {self.why_not}", flush=True)
        return hidden_BQH

    def _over_weights(self) -> Recorded:
        """Over parameters that share the drafter's memory. Whatever else a batch holds is not there: a recording would keep reading the first one's."""
        with torch.device("meta"):
            twin = Drafter(self.drafter.spec)
        twin.load_state_dict(self.drafter.state_dict(), assign=True)
        hidden = self.hidden  # and not self: graphs are to go when this does

        def run(features_BTF: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
            given = dict(zip((*RecordedDraft.BATCH, *RecordedDraft.BLOCKS), tensors, strict=True))
            batch = _only(PackedBatch, given | {"blocks": _only(DraftBlocks, given)})
            return hidden(twin, batch, TargetFeatures(features_BTF))

        leaves = [parameter for name, parameter in twin.named_parameters() if _recorded(name)]
        return Recorded(run, leaves, self.graphs or Graphs(leaves[0].device))


def _only(kind: type, given: dict[str, Any]) -> Any:
    """A dataclass that has of its fields those that are given, and None for the others."""
    return kind(**{field.name: given.get(field.name) for field in fields(kind)})


def recorded_weights(spec: DrafterSpec) -> int:
    """How many of a drafter's parameters its hidden states depend on."""
    return num_parameters(spec, _recorded)


def _recorded(name: str) -> bool:
    """Whether hidden states depend on a parameter."""
    return not name.startswith("candidate_selector.")


class Recorded:
    """function(*inputs) -> a tensor, and the gradients of `leaves`, recorded at the first call and replayed at every later one with inputs of the
    same sizes. One backward follows each forward, before the next.

    leaves: what the function is differentiated by, in fp32. They are no parameters that an engine knows, but share the memory of those: what waits
    for a parameter's gradient, and on which stream, stays outside of the graphs.
    """

    def __init__(self, function: Callable[..., torch.Tensor], leaves: Sequence[nn.Parameter], graphs: Graphs):
        self.function, self.leaves, self.graphs = function, list(leaves), graphs
        self.why_not: str | None = None
        self._inputs: list[torch.Tensor] = []
        self._turn = 0

    def __call__(self, inputs: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
        """The function's value, to be read before the next call; its gradient goes to `parameters`, in the order of the leaves. None for inputs of
        other sizes than the first, and where nothing can be recorded."""
        if not self._inputs and self.why_not is None:
            self._begin(inputs)
        if self.why_not is not None or any(a.shape != b.shape for a, b in zip(self._inputs, inputs, strict=True)):
            return None
        return _Replay.apply(self, len(inputs), *inputs, *parameters)

    def _begin(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = [x.clone() for x in inputs]
        sizes = [-(-leaf.numel() // ALIGNED) * ALIGNED for leaf in self.leaves]
        self._flat = torch.zeros(sum(sizes), device=self.leaves[0].device)
        self._sizes = sizes
        self._gradients = self._parts(self._flat)
        self.why_not = self.graphs.rehearse(self._rehearse)
        if self.why_not is None:
            self._forward = self.graphs.record(self._run)
            self._d_out = torch.empty_like(self._out)
            self._backward = self.graphs.record(self._differentiate)

    def _rehearse(self) -> None:
        self._run()
        self._d_out = torch.zeros_like(self._out)
        self._differentiate()
        # Nodes of autograd keep the stream that they were made on: those of the recording must not meet these.
        del self._out

    def _run(self) -> None:
        # Else a layer that was not compiled takes the 16-bit copies of its weights that autocast kept of a rehearsal: those of the first step.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            self._out = self.function(*self._inputs)

    def _differentiate(self) -> None:
        torch._foreach_copy_(self._gradients, torch.autograd.grad(self._out, self.leaves, self._d_out))

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(flat.split(self._sizes), self.leaves, strict=True)
        return [part[: leaf.numel()].view_as(leaf) for part, leaf in parts]

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
        """(value, number of this call)"""
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._forward()
        self._turn += 1
        return self._out.detach(), self._turn

    def backward(self, turn: int, d_out: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of the leaves, in memory of their own."""
        if turn != self._turn:
            raise RuntimeError("backward of a recorded pass that another forward has overwritten")
        self._d_out.copy_(d_out)
        self._backward()
        return self._parts(self._flat.clone())


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recorded: Recorded, count: int, *tensors: torch.Tensor) -> torch.Tensor:
        out, turn = recorded.forward(tensors[:count])
        ctx.recorded, ctx.turn, ctx.nones = recorded, turn, [None] * (2 + count)
        return out

    @staticmethod
    def backward(ctx, d_out):
        return *ctx.nones, *ctx.recorded.backward(ctx.turn, d_out)
