"""DraftStep: the method on one page. Drafter + objective; the only module that an engine wraps.

Captured features and masked blocks go through the drafter; the frozen head scores the supervised slots; the loss is the
position-decayed cross-entropy of those scores plus the selector's cross-entropy over each slot's best candidates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dflash_train.config.schema import Denominator, ObjectiveConfig
from dflash_train.drafter.mask import dense_mask
from dflash_train.drafter.model import Drafter, block_positions, block_token_ids
from dflash_train.drafter.recorded import RecordedDraft
from dflash_train.metrics import slot_metric
from dflash_train.objective.loss import candidate_logits, leading_hits, linear_cross_entropy, selector_cross_entropy
from dflash_train.target.base import Target
from dflash_train.target.elsewhere import Elsewhere
from dflash_train.types import LossReport, PackedBatch, TargetFeatures


class DraftStep(nn.Module):
    """forward(batch, features, total_weight) -> LossReport.

    total_weight: the step's supervised decay weight over all ranks and micro-batches, known before the first forward.
    mask: which function of `drafter.mask` makes the masks, and by that which kernel computes the attention. fuse: compile the layers. record: run all of
    the drafter up to its hidden states as CUDA graphs in training.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        objective: ObjectiveConfig,
        *,
        dtype: torch.dtype,
        mask: Callable = dense_mask,
        fuse: bool = False,
        record: bool = False,
    ):
        super().__init__()
        self.drafter = drafter
        self.objective, self.dtype, self.mask, self.fuse = objective, dtype, mask, fuse
        self.recorded = RecordedDraft(drafter, self.hidden) if record else None
        object.__setattr__(self, "target", target)  # frozen: must enter neither DDP's buckets nor a checkpoint

    def autocast(self) -> torch.autocast:
        """The drafter's compute format over its fp32 weights. The target is never run inside: it has its own."""
        return torch.autocast(self.target.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's raw token embedding, scaled, in the drafter's compute dtype."""
        return (self.target.embed(token_ids) * self.drafter.spec.input_embedding_scale).to(self.dtype)

    def hidden(
        self, drafter: Drafter, batch: PackedBatch, features: TargetFeatures, *, exact: bool = False
    ) -> torch.Tensor:
        """Hidden states (B, N * S, H) of all slots. exact: by dense attention, layers not compiled."""
        blocks = batch.blocks
        return drafter(
            features.features_BTF.to(self.dtype),
            batch.position_ids_BT,
            self.embed(block_token_ids(blocks, drafter.spec.mask_token_id)),
            block_positions(blocks, batch.position_ids_BT, drafter.spec.block_size),
            drafter.masks(blocks, batch.document_ids_BT, dense_mask if exact else self.mask),
            fuse=self.fuse and not exact,
        )

    def score(self, batch: PackedBatch, features: TargetFeatures, *, exact: bool = False) -> dict[str, torch.Tensor]:
        """Per supervised slot (M, in the order of blocks.scored_M): both losses, both hits, coverage, the token's rank among the candidates (-1: none). `labels_M`, `weights_M` with them. exact: by dense attention, layers not compiled."""
        spec, blocks, hidden_BQH = self.drafter.spec, batch.blocks, None
        if self.recorded and torch.is_grad_enabled() and not exact:
            hidden_BQH = self.recorded(batch, features)
        if hidden_BQH is None:
            hidden_BQH = self.hidden(self.drafter, batch, features, exact=exact)
        scored = blocks.scored_M
        labels_M = blocks.labels_BNS.flatten()[scored]
        hidden_MH = hidden_BQH.flatten(0, 1).index_select(0, scored)
        head = {"multiplier": spec.output_multiplier, "softcap": spec.final_logit_softcapping}
        base = linear_cross_entropy(
            hidden_MH, self.target.head_VH, labels_M, top_k=spec.selector_top_k, chunk=self.objective.chunk_rows, **head
        )
        out = {
            "labels_M": labels_M,
            "weights_M": blocks.weights_BNS.flatten()[scored],
            "base_nll_M": base.nll_M,
            "base_hit_M": base.top1_M == labels_M,
        }
        selector = self.drafter.candidate_selector
        found_MC = base.candidates_MC == labels_M[:, None]
        out |= {"rank_M": torch.where(found_MC.any(-1), found_MC.int().argmax(-1), -1)}
        if selector is None:
            return out | {
                "hit_M": out["base_hit_M"],
                "selector_nll_M": torch.zeros_like(base.nll_M),
                "covered_M": found_MC.any(-1),
            }
        unary_MC = candidate_logits(hidden_MH, self.target.head_VH, base.candidates_MC, **head)
        predecessors_M = blocks.labels_BNS.flatten()[
            scored - 1
        ]  # slot 0 is the anchor, so a scored slot has one before it
        scores_MC = selector(hidden_MH, unary_MC, base.candidates_MC, predecessors_M)
        nll_M, covered_M = selector_cross_entropy(scores_MC, base.candidates_MC, labels_M)
        chosen_M = base.candidates_MC.gather(1, scores_MC.argmax(-1, keepdim=True))[:, 0]
        return out | {"hit_M": chosen_M == labels_M, "selector_nll_M": nll_M, "covered_M": covered_M}

    def replica(self) -> DraftStep:
        """The same step with a drafter of its own on the same device, whose weights are yet to be filled in."""
        with torch.device("meta"):
            drafter = Drafter(self.drafter.spec)
        drafter.to_empty(device=self.target.device)
        return DraftStep(drafter, self.target, self.objective, dtype=self.dtype, mask=self.mask, fuse=self.fuse)

    def together(self) -> DraftStep:
        """This step with the target on the drafter's device, as decoding wants it, and without what training alone needs."""
        self.recorded = None
        if isinstance(self.target, Elsewhere):
            object.__setattr__(self, "target", self.target.come())
        return self

    def forward(self, batch: PackedBatch, features: TargetFeatures, total_weight: torch.Tensor) -> LossReport:
        with self.autocast():  # here and not around an engine: DeepSpeed switches off what it finds
            return self._report(batch, features, total_weight)

    def _report(self, batch: PackedBatch, features: TargetFeatures, total_weight: torch.Tensor) -> LossReport:
        s = self.score(batch, features)
        w = s["weights_M"]
        base_sum, selector_sum = (w * s["base_nll_M"]).sum(), (w * s["selector_nll_M"]).sum()
        covered_weight = (w * s["covered_M"]).sum()
        by_coverage = self.objective.selector_denominator is Denominator.covered
        selector_weight = covered_weight.clamp_min(1e-6) if by_coverage else total_weight
        loss = base_sum / total_weight + self.objective.selector_loss_weight * selector_sum / selector_weight
        return LossReport(
            loss, self._sums(batch, s, base_sum, selector_sum, covered_weight if by_coverage else w.sum())
        )

    @torch.no_grad()
    def _sums(
        self, batch: PackedBatch, s: dict[str, torch.Tensor], base_sum, selector_sum, selector_weight
    ) -> dict[str, torch.Tensor]:
        """Sums and counts, made by a few operations on all of them: a step has dozens, each of a few bytes."""
        blocks = batch.blocks
        supervised_RS = blocks.supervised_BNS.flatten(0, 1)
        correct_2RS = torch.stack([scatter_slots(s[name], blocks) for name in ("hit_M", "base_hit_M")]).flatten(1, 2)
        accepted_2R = leading_hits(correct_2RS, supervised_RS)
        hits_2S = correct_2RS.sum(1)
        slots_S = supervised_RS.sum(0)
        covered, slots, blocks_drafted = s["covered_M"].sum(), slots_S.sum(), supervised_RS.any(-1).sum()
        weights = torch.stack([base_sum, s["weights_M"].sum(), selector_sum, selector_weight]).double()
        names, table = ["base_loss", "selector_loss", "candidate_recall"], [weights.view(2, 2)]
        table.append(torch.stack([covered, slots]).double()[None])
        for prefix, accepted_R, hits_S in zip(("", "base_"), accepted_2R, hits_2S, strict=True):
            slot_names = [slot_metric(f"{prefix}accuracy", k) for k in range(1, len(slots_S))]
            names += [f"{prefix}accept_len", f"{prefix}accuracy", *slot_names]
            totals = torch.cat([torch.stack([accepted_R.sum() + blocks_drafted, hits_S.sum()]), hits_S[1:]])
            counts = torch.cat([torch.stack([blocks_drafted, slots]), slots_S[1:]])
            table.append(torch.stack([totals, counts], 1).double())
        return dict(zip(names, torch.cat(table).unbind(), strict=True))


def scatter_slots(value_M: torch.Tensor, blocks) -> torch.Tensor:
    """Booleans of the scored slots back in their (B, N, S) places, false elsewhere."""
    out = torch.zeros(blocks.labels_BNS.numel(), dtype=torch.bool, device=value_M.device)
    out[blocks.scored_M] = value_M
    return out.view(blocks.labels_BNS.shape)
