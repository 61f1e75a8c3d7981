"""What a verified block gains: the agreeing prefix and one token of the target's own, without a change of the target's distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_train.kernels.sample import draw, filter_rows, kept_weights


class Sampling(NamedTuple):
    """How the target is sampled: numbers, or tensors (N,) with one per sequence. temperature 0 is greedy; top_k 0 is all."""

    temperature: float | torch.Tensor = 0.0
    top_p: float | torch.Tensor = 1.0
    top_k: int | torch.Tensor = 0

    @property
    def greedy(self) -> bool:
        """Whether every sequence is known to be greedy without a look at the device."""
        return not isinstance(self.temperature, torch.Tensor) and self.temperature == 0

    def each(self, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """temperature_N, top_p_N (float32) and top_k_N (int64) of `count` sequences."""
        kinds = (torch.float32, torch.float32, torch.long)
        return tuple(
            value if isinstance(value, torch.Tensor) else torch.full((count,), value, dtype=kind, device=device)
            for value, kind in zip(self, kinds, strict=True)
        )


class Draft(NamedTuple):
    """Drafted slots 1 .. S-1 of N blocks: token_ids_NS; candidates_NSC with the probabilities probs_NSC that each was drawn from."""

    token_ids_NS: torch.Tensor
    candidates_NSC: torch.Tensor
    probs_NSC: torch.Tensor


def draws_per_round(block_size: int) -> int:
    """Uniform draws that one round takes at a temperature: one per drafted token, one per acceptance, one for the last token."""
    return 2 * (block_size - 1) + 1


def verify(
    logits_NSV: torch.Tensor, draft: Draft, slots_N: torch.Tensor, sampling: Sampling, uniform_NU: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens_NS, accepted_N) of N verified blocks; tokens_NS[:, : accepted + 1] are gained.

    logits_NSV: the target's, after the anchor and after each drafted token. slots_N: slots of a block that exist, anchor included; nothing
    behind them is accepted. Greedy: what agrees with the target's argmax. At a temperature, speculative sampling (Leviathan et al., 2023,
    arXiv 2211.17192): a drafted token x is kept with probability min(1, p(x) / q(x)), else the token is drawn from max(0, p - q); the token
    after a wholly accepted block from p. uniform_NU: 2 (S - 1) + 1 draws in [0, 1), the first S - 1 of which the draft used.
    """
    N, S, V = logits_NSV.shape
    drafted = torch.arange(1, S, device=slots_N.device) < slots_N[:, None]
    if sampling.greedy:
        truth_NS = logits_NSV.argmax(-1)
        agrees = (draft.token_ids_NS == truth_NS[:, :-1]) & drafted
        return truth_NS, agrees.long().cumprod(1).sum(1)
    assert uniform_NU is not None
    rows = logits_NSV.reshape(N * S, V)
    each = sampling.each(N, rows.device)
    temperature_N = each[0]
    kept = filter_rows(rows, *(value_N.repeat_interleave(S) for value_N in each))
    least, top, total = (x.view(N, S) for x in kept)
    p_NSC = _probability(
        logits_NSV[:, :-1].gather(2, draft.candidates_NSC), least[:, :-1], top[:, :-1], total[:, :-1], temperature_N
    )
    if isinstance(sampling.temperature, torch.Tensor):  # some may be greedy: all of p is at the best token
        best_NS1 = logits_NSV[:, :-1].argmax(-1, keepdim=True)
        certain_NSC = (draft.candidates_NSC == best_NS1).to(p_NSC.dtype)
        p_NSC = torch.where((temperature_N == 0)[:, None, None], certain_NSC, p_NSC)
    is_drafted = draft.candidates_NSC == draft.token_ids_NS[:, :, None]
    p, q = ((x * is_drafted).sum(-1) for x in (p_NSC, draft.probs_NSC))
    agrees = (uniform_NU[:, S - 1 : 2 * (S - 1)] * q < p) & drafted
    accepted_N = agrees.long().cumprod(1).sum(1)
    # The one token that is drawn from the target: its distribution, less what the draft already covered where it was refused.
    at = accepted_N[:, None]
    pick = lambda x: x.gather(1, at)[:, 0]  # noqa: E731
    last_NV = logits_NSV.gather(1, at[:, :, None].expand(N, 1, V))[:, 0]
    weights_NV = kept_weights(last_NV, pick(least), pick(top), temperature_N) / pick(total)[:, None]
    refused_N = accepted_N < slots_N - 1
    inside = accepted_N.clamp(max=S - 2)[:, None, None].expand(N, 1, draft.probs_NSC.shape[2])
    taken_NC = draft.probs_NSC.gather(1, inside)[:, 0] * refused_N[:, None]
    rest_NV = weights_NV.scatter_add(1, draft.candidates_NSC.gather(1, inside)[:, 0], -taken_NC.float()).clamp_min(0)
    # Nothing left is rounding: a refused token means that p < q there, so p > q elsewhere.
    weights_NV = torch.where((rest_NV > 0).any(-1, keepdim=True), rest_NV, weights_NV)
    last_N = torch.where(temperature_N == 0, last_NV.argmax(-1), draw(weights_NV, uniform_NU[:, -1]))
    tokens_NS = torch.cat([draft.token_ids_NS, draft.token_ids_NS[:, -1:]], 1).scatter(1, at, last_N[:, None])
    return tokens_NS, accepted_N


def _probability(
    logits_NSC: torch.Tensor,
    least_NS: torch.Tensor,
    top_NS: torch.Tensor,
    total_NS: torch.Tensor,
    temperature_N: torch.Tensor,
) -> torch.Tensor:
    """Filtered probabilities (N, S, C) of tokens with these logits."""
    logits = logits_NSC.float()
    divisor_N = torch.where(temperature_N == 0, 1.0, temperature_N)
    weights = ((logits - top_NS[:, :, None]) / divisor_N[:, None, None]).exp()
    return torch.where(logits >= least_NS[:, :, None], weights / total_NS[:, :, None], 0.0)
