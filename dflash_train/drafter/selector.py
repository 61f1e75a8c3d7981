"""The candidate selector: scores a slot's top candidates against the token before it."""

from __future__ import annotations

import torch
from torch import nn

from dflash_train.drafter.spec import DrafterSpec
from dflash_train.kernels.gather import gather_dot, take_rows


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
        if hidden_MH.is_cuda:
            query = take_rows(self.predecessor_codebook, predecessors_M) * self.hidden_projection(hidden_MH)
            return unary_MC.float() + gather_dot(query, self.successor_codebook, candidates_MC)
        query = self.predecessor_codebook[predecessors_M] * self.hidden_projection(hidden_MH)
        pair = (self.successor_codebook[candidates_MC] * query[:, None]).sum(-1)
        return unary_MC.float() + pair.float()

    def walk(
        self,
        hidden_BSH: torch.Tensor,
        unary_BSC: torch.Tensor,
        candidates_BSC: torch.Tensor,
        anchors_B: torch.Tensor,
        uniform_BS: torch.Tensor | None = None,
        temperature: float | torch.Tensor = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Path (B, S) through the candidates of S drafted slots, from the anchor on, and the probabilities (B, S, C) it was drawn from.

        Greedy without `uniform_BS` (draws in [0, 1)); else slot by slot from softmax(scores / temperature). As a tensor (B,) the temperature
        is each row's own, and 0 is greedy.
        """
        previous, path, probs = anchors_B, [], []
        for s in range(hidden_BSH.shape[1]):
            scores = self(hidden_BSH[:, s], unary_BSC[:, s], candidates_BSC[:, s], previous)
            choice, prob = choose(scores, None if uniform_BS is None else uniform_BS[:, s], temperature)
            previous = candidates_BSC[:, s].gather(1, choice[:, None])[:, 0]
            path.append(previous)
            probs.append(prob)
        return torch.stack(path, 1), torch.stack(probs, 1)


def choose(
    scores_BC: torch.Tensor, uniform_B: torch.Tensor | None, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(index of the chosen candidate (B,), probabilities (B, C) it was drawn from; one-hot where it is the best one)."""
    if uniform_B is None:
        return _best(scores_BC)
    if isinstance(temperature, torch.Tensor):
        greedy_B = temperature == 0
        drawn = choose(scores_BC / torch.where(greedy_B, 1.0, temperature)[:, None], uniform_B, 1.0)
        best = _best(scores_BC)
        return torch.where(greedy_B, best[0], drawn[0]), torch.where(greedy_B[:, None], best[1], drawn[1])
    probs = (scores_BC / temperature).softmax(-1)
    sums = probs.cumsum(-1)
    choice = (sums <= uniform_B[:, None] * sums[:, -1:]).sum(-1).clamp(max=scores_BC.shape[-1] - 1)
    return choice, probs


def _best(scores_BC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    choice_B = scores_BC.argmax(-1)
    return choice_B, torch.nn.functional.one_hot(choice_B, scores_BC.shape[-1]).to(scores_BC.dtype)
