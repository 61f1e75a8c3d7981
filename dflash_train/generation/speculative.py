"""Batched speculative decoding in slots: a step drafts a block for every slot, verifies all of them in one forward of the target, and keeps
what agrees. Everything is decided on the device, in static shapes, so that a step is captured as a CUDA graph.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from dflash_train.drafter.decode import DraftSlots
from dflash_train.generation.base import Decoded, Request
from dflash_train.generation.slots import Slots
from dflash_train.generation.verify import Draft, Sampling, draws_per_round, verify
from dflash_train.kernels.head import transform_logits
from dflash_train.method import DraftStep


def propose(
    step: DraftStep,
    hidden_NSH: torch.Tensor,
    anchors_N: torch.Tensor,
    sampling: Sampling,
    uniform_NS: torch.Tensor | None,
) -> Draft:
    """Draft of N blocks from the hidden states of their slots 1 .. S-1: a path through each slot's best candidates."""
    spec, selector = step.drafter.spec, step.drafter.candidate_selector
    with step.autocast():
        raw = hidden_NSH @ step.target.head_VH.to(hidden_NSH.dtype).T
        unary, candidates = raw.float().topk(spec.selector_top_k if selector else 1, -1)
        unary = transform_logits(unary, spec.output_multiplier, spec.final_logit_softcapping)
        if selector is None:
            return Draft(candidates[..., 0], candidates, torch.ones_like(unary))
        uniform = None if sampling.greedy else uniform_NS
        path, probs = selector.walk(hidden_NSH, unary, candidates, anchors_N, uniform, sampling.temperature)
        return Draft(path, candidates, probs)


def served_copy(drafter: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The drafter with its matrices in the compute format, so that autocast has nothing left to convert at every step."""
    served = copy.deepcopy(drafter)
    for module in served.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return served.requires_grad_(False)


class SpeculativeSlots(Slots):
    """Slots whose step is a round of drafting and verifying; `block_size` may be below the trained one. `more`: as of Slots."""

    greedy_apart = True  # filtering the logits of a whole block takes long

    def __init__(
        self,
        step: DraftStep,
        stop_ids: set[int],
        *,
        slots: int,
        length: int,
        max_new: int,
        block_size: int | None = None,
        **more: Any,
    ):
        self.block_size = step.drafter.spec.block_size if block_size is None else block_size
        self.ahead = self.most_per_step = self.block_size
        self.draws = draws_per_round(self.block_size)
        target = step.target
        super().__init__(target.model, stop_ids, slots=slots, length=length, max_new=max_new, **more)
        self.step_module = copy.copy(step)
        self.step_module._modules = {"drafter": served_copy(step.drafter, step.dtype)}
        self.target = target
        count = slots + 1
        # Flash attention wants 16 bits; elsewhere the cache is as precise as the drafter.
        self.drafts = DraftSlots(self.step_module.drafter, count, self.stride, step.dtype, self.device)
        self.gains, self.accepted = (
            torch.zeros(count, max_new + 1, dtype=torch.int32, device=self.device) for _ in range(2)
        )
        self.cycles = torch.zeros(count, dtype=torch.long, device=self.device)
        self.mask_id = step.drafter.spec.mask_token_id

    def _clear(self, slot_N: torch.Tensor) -> None:
        self.cycles[slot_N] = 0

    def _results(self) -> tuple[torch.Tensor, ...]:
        return self.out, self.count, self.gains, self.accepted, self.cycles

    def _decoded(self, request: Request, ids: list[int], count: int, *rounds: Any) -> Decoded:
        gains, accepted, cycles = rounds
        return (
            super()
            ._decoded(request, ids, count)
            ._replace(rounds=tuple(gains[:cycles]), accepted=tuple(accepted[:cycles]))
        )

    def _read(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        places_T: torch.Tensor,
        last_R: torch.Tensor,
        starts: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        self.target.clear()
        logits = super()._read(ids_T, positions_T, places_T, last_R, starts, longest)
        with self.step_module.autocast():
            features = self.target.collect().to(self.step_module.dtype)
            self.drafts.extend(features, positions_T[None], places_T)
        return logits

    def _step(self, slot_N: torch.Tensor, sampled: bool) -> None:
        N, S = len(slot_N), self.block_size
        length_N, count_N, cycle_N = self.length[slot_N], self.count[slot_N], self.cycles[slot_N]
        begins_N, anchor_N, done_N = slot_N * self.stride, self.token[slot_N], self.done[slot_N]
        # A block never reaches past the token budget.
        slots_N = (self.limit[slot_N] - count_N + 1).clamp(1, S)
        uniform_NU, sampling = None, Sampling()
        if sampled:
            sampling = Sampling(self.temperature[slot_N], self.top_p[slot_N], self.top_k[slot_N])
            first = (1 + cycle_N * self.draws).clamp(max=self.uniform.shape[1] - self.draws)
            uniform_NU = self.uniform[slot_N[:, None], first[:, None] + torch.arange(self.draws, device=self.device)]
        draft = self._draft(anchor_N, begins_N, length_N, slots_N, sampling, uniform_NU)

        positions_NS = length_N[:, None] + torch.arange(S, device=self.device)
        self.cache.places = (begins_N[:, None] + positions_NS).flatten()
        self.target.clear()
        logits_NSV = self.model(
            input_ids=torch.cat([anchor_N[:, None], draft.token_ids_NS], 1).view(1, N * S),
            position_ids=positions_NS.view(1, N * S),
            attention_mask=self.no_mask,
            past_key_values=self.cache,
            use_cache=True,
            cu_seq_lens_q=torch.arange(0, N * S + 1, S, dtype=torch.int32, device=self.device),
            cu_seq_lens_k=torch.cat([begins_N, begins_N[-1:]]).int(),
            max_length_q=S,
            max_length_k=self.stride,
            seqused_k=(length_N + S).int(),
        ).logits.view(N, S, -1)
        with self.step_module.autocast():
            features = self.target.collect().to(self.step_module.dtype)
            # The rows of refused tokens are overwritten by the next round before anything sees them.
            self.drafts.extend(features, positions_NS.view(1, N * S), self.cache.places)

        tokens_NS, accepted_N = verify(logits_NSV, draft, slots_N, sampling, uniform_NU)
        gained_N = torch.minimum(accepted_N + 1, self.limit[slot_N] - count_N)
        stops_NS = (tokens_NS[:, :, None] == self.stop).any(-1) & ~self.endless[slot_N][:, None]
        first_stop_N = torch.where(stops_NS.any(1), stops_NS.int().argmax(1), S)
        gained_N = torch.minimum(gained_N, first_stop_N + 1)
        gained_N = torch.where(done_N, 0, gained_N)
        self._keep(slot_N, tokens_NS, gained_N, accepted_N, count_N, cycle_N)
        self.length[slot_N] = length_N + gained_N
        self.done[slot_N] = done_N | (first_stop_N < gained_N) | (count_N + gained_N >= self.limit[slot_N])

    @torch.inference_mode()
    def cost(self, sampled: bool = False, repeats: int = 20) -> dict[str, float]:
        """Milliseconds of a cycle of all slots, and of the drafting in it, as replayed from graphs; empty where there are none."""
        if not self.use_graphs:
            return {}
        whole, _ = self._graph(self.slots, sampled)
        slot_N = torch.full((self.slots,), self.scratch, dtype=torch.long, device=self.device)
        arguments = (
            self.token[slot_N],
            slot_N * self.stride,
            self.length[slot_N],
            self.length[slot_N] * 0 + self.block_size,
        )
        uniform_NU, sampling = None, Sampling()
        if sampled:
            uniform_NU = torch.rand(self.slots, self.draws, device=self.device)
            sampling = Sampling(self.temperature[slot_N], self.top_p[slot_N], self.top_k[slot_N])
        drafting, _ = self._recorded(lambda: self._draft(*arguments, sampling, uniform_NU))
        milliseconds = []
        for graph in (whole, drafting):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            milliseconds.append(begin.elapsed_time(end) / repeats)
        return {"cycle_ms": milliseconds[0], "draft_ms": milliseconds[1]}

    def _draft(
        self,
        anchor_N: torch.Tensor,
        begins_N: torch.Tensor,
        length_N: torch.Tensor,
        slots_N: torch.Tensor,
        sampling: Sampling,
        uniform_NU: torch.Tensor | None,
    ) -> Draft:
        N, S, step = len(anchor_N), self.block_size, self.step_module
        ids_NS = torch.full((N, S), self.mask_id, dtype=torch.long, device=self.device)
        ids_NS[:, 0] = anchor_N
        with step.autocast():
            hidden = self.drafts.hidden(step.embed(ids_NS).view(1, N * S, -1), begins_N, length_N, slots_N)
        uniform_NS = None if uniform_NU is None else uniform_NU[:, : S - 1]
        return propose(step, hidden.view(N, S, -1)[:, 1:], anchor_N, sampling, uniform_NS)

    def _keep(
        self,
        slot_N: torch.Tensor,
        tokens_NS: torch.Tensor,
        gained_N: torch.Tensor,
        accepted_N: torch.Tensor,
        count_N: torch.Tensor,
        cycle_N: torch.Tensor,
    ) -> None:
        """Append the gained tokens of each slot and what the round gained; the last column takes what is not kept."""
        at = torch.arange(self.block_size, device=self.device)
        columns_NS = torch.where(at < gained_N[:, None], count_N[:, None] + at, self.max_new)
        self.out[slot_N[:, None], columns_NS] = tokens_NS.int()
        gains_N = torch.where(gained_N > 0, cycle_N, self.max_new)
        self.gains[slot_N, gains_N] = gained_N.int()
        self.accepted[slot_N, gains_N] = torch.minimum(accepted_N, gained_N).int()
        newest_N = tokens_NS.gather(1, (gained_N - 1).clamp_min(0)[:, None])[:, 0]
        self.token[slot_N] = torch.where(gained_N > 0, newest_N, self.token[slot_N])
        self.count[slot_N] = count_N + gained_N
        self.cycles[slot_N] = cycle_N + (gained_N > 0)
