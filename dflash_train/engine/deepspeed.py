"""DeepSpeed ZeRO-1 and ZeRO-2: every rank has all weights, and a share of the fp32 masters and moments (of the gradients too in ZeRO-2).

With engine.offload that share lies in host memory and AdamW runs there. The optimizer is torch's in any case, so that nothing is compiled, and
clipping and the judgement of a step are ours: DeepSpeed exchanges, partitions and offloads. The only file that imports it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn

from dflash_train import ranks
from dflash_train.config.schema import EngineConfig, OptimizerConfig, ReducePrecision
from dflash_train.engine.base import MOMENTS, Engine, fresh_moments
from dflash_train.engine.guard import Guard
from dflash_train.optim import build_optimizer
from dflash_train.types import LossReport, PackedBatch, TargetFeatures


class DeepSpeedEngine(Engine):
    """The library's engine in fp32: compute formats are the step's own autocast, as with the other engines."""

    sharded = True

    def __init__(self, step: nn.Module, stage: int, engine: EngineConfig, config: OptimizerConfig, guard: Guard):
        try:
            import deepspeed
        except ImportError as error:
            raise ValueError(
                f"engine.kind = {engine.kind.value}: needs the deepspeed library ({error}); pip install 'dflash-train[deepspeed]', "
                "or use engine.kind=fsdp2"
            ) from None
        super().__init__(step, guard)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        os.environ.setdefault("LOCAL_RANK", "0")  # the library asks for it even where there is one process
        # On CPUs the library would compile collectives of its own and use them in gloo's stead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        offload = {"device": "cpu", "pin_memory": torch.cuda.is_available()} if engine.offload else {"device": "none"}
        self.optimizer = build_optimizer(step.drafter.named_parameters(), config)
        self.deepspeed, *_ = deepspeed.initialize(
            model=step,
            optimizer=self.optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,  # only a number that must fit the others: rows are ours
                "gradient_accumulation_steps": guard.micro_batches,
                "steps_per_print": 2**60,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": 0.0,
                "communication_data_type": "bf16" if engine.reduce_precision is ReducePrecision.bfloat16 else "fp32",
                "zero_optimization": {"stage": stage, "offload_optimizer": offload}
                # With offload the library insists on its own norm; that agrees with the guard about what is not finite.
                | ({} if engine.offload else {"compute_grad_norm": False}),
            },
        )
        self.zero: Any = self.deepspeed.optimizer

    def forward(self, batch: PackedBatch, features: TargetFeatures, total_weight: torch.Tensor) -> LossReport:
        self.deepspeed.set_gradient_accumulation_boundary(len(self._losses) == self.guard.micro_batches - 1)
        return self.deepspeed(batch, features, total_weight)

    def propagate(self, loss: torch.Tensor) -> None:
        self.deepspeed.backward(loss, scale_wrt_gas=False)

    def gradients(self) -> list[torch.Tensor]:
        if self.zero.cpu_offload:
            self.zero._wait_for_offload_copies()
            flat = [part.grad for part in self.zero.single_partition_of_fp32_groups]
        else:
            flat = [g for group in self.zero.averaged_gradients.values() for g in group or () if g is not None]
        # On a CPU torch's fp32 norm of one long tensor is too small, by 9e-5 of 4 million numbers.
        return [piece for g in flat for piece in (g.flatten().split(2**16) if g.device.type == "cpu" else [g])]

    def apply(self) -> None:
        self.deepspeed.step()

    def full(self, name: str, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if kind == "step":
            return next(iter(self.optimizer.state.values()))["step"]
        whole = torch.zeros_like(parameter).flatten()
        for flat, there, here in self._fragments(parameter):
            whole[there] = (flat if kind == "weight" else self.optimizer.state[flat][kind])[here].to(whole.device)
        return ranks.sum_over_ranks(whole).view_as(parameter)

    def take(self, name: str, parameter: nn.Parameter, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        parameter.copy_(weight)
        for flat, there, here in self._fragments(parameter):
            flat[here] = weight.flatten()[there].to(flat.device)
            if moments:
                state = self.optimizer.state.setdefault(flat, {}) or self.optimizer.state[flat]
                if not state:
                    state.update(fresh_moments(flat))
                state["step"].copy_(moments["step"])
                for kind in MOMENTS:
                    state[kind][here] = moments[kind].flatten()[there].to(flat.device)

    def _fragments(self, parameter: nn.Parameter) -> list[tuple[torch.Tensor, slice, slice]]:
        """(this rank's flat masters, where a parameter's elements begin in it, ...): at most one, none where other ranks have all of it."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return []
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
        return [(flat, slice(there.start, there.start + there.numel), slice(here.start, here.start + here.numel))]
