"""The candidate selector: scores a slot's top candidates against the token before it."""

from __future__ import annotations

import torch
from torch import nn

from dflash_train.drafter.spec import DrafterSpec


class CandidateSelector(nn.Module):
    """S_t(a, b) = U_t(b) + <A(a) * P(h_t), B(b)>, with h_t after the final norm, U the (transformed) head logits.

    A = predecessor_codebook, B = successor_codebook (V, rank), P = hidden_projection.
    """

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        self.top_k = spec.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(spec.vocab_size, spec.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(spec.vocab_size, spec.selector_rank))
        self.hidden_projection = nn.Linear(spec.hidden_size, spec.selector_rank, bias=False)

    def forward(self, hidden_MH, unary_MC, candidates_MC, predecessors_M) -> torch.Tensor:
        """Scores (M, C) in fp32 of the candidates after the given predecessors."""
        query = self.predecessor_codebook[predecessors_M] * self.hidden_projection(hidden_MH)
        pair = (self.successor_codebook[candidates_MC] * query[:, None]).sum(-1)
        return unary_MC.float() + pair.float()

    def walk(self, hidden_BSH, unary_BSC, candidates_BSC, anchors_B) -> torch.Tensor:
        """Greedy path (B, S) through the candidates of S drafted slots, from the anchor on."""
        previous, path = anchors_B, []
        for s in range(hidden_BSH.shape[1]):
            scores = self(hidden_BSH[:, s], unary_BSC[:, s], candidates_BSC[:, s], previous)
            previous = candidates_BSC[:, s].gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            path.append(previous)
        return torch.stack(path, 1)
