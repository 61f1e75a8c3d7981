"""Drafting as served: a key/value cache of the context that grows with the verified tokens, one block per call."""

from __future__ import annotations

import torch

from dflash_train.drafter.mask import BlockMask, SlotMask
from dflash_train.drafter.model import Drafter


class DraftSession:
    """One sequence. `extend` with the features of newly verified tokens, then `propose` from the anchor that follows them."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.length = 0

    def extend(self, features_1LF: torch.Tensor) -> None:
        """Append the context rows of the next L verified tokens (the anchor's own state does not exist yet)."""
        L = features_1LF.shape[1]
        positions = torch.arange(self.length, self.length + L, device=features_1LF.device)[None]
        new = self.drafter.context_kv(features_1LF, positions)
        old = self.cache or [(k[:, :, :0], v[:, :, :0]) for k, v in new]
        self.cache = [(torch.cat([ok, k], 2), torch.cat([ov, v], 2)) for (ok, ov), (k, v) in zip(old, new, strict=True)]
        self.length += L

    def hidden(self, embeddings_1SH: torch.Tensor) -> torch.Tensor:
        """Hidden states (1, S, H) of the block [anchor, mask, ...] at positions length .. length + S - 1."""
        spec, S, device = self.drafter.spec, embeddings_1SH.shape[1], embeddings_1SH.device
        slots = torch.arange(S, device=device)
        in_block = torch.ones(S, S, dtype=torch.bool, device=device)
        if spec.is_causal:
            in_block = slots <= slots[:, None]
        distance = self.length + slots[:, None] - torch.arange(self.length, device=device)
        masks = {}
        for w in {spec.window(n) for n in range(spec.num_hidden_layers)}:
            visible = torch.ones_like(distance, dtype=torch.bool) if w is None else distance < w
            masks[w] = BlockMask(context_BQT=visible[None], block_BNSS=in_block[None, None])
        return self.drafter.draft(self.cache, embeddings_1SH, (self.length + slots)[None], masks, S)


class DraftSlots:
    """Many sequences: every layer's context keys and values in one static cache of slots x stride places."""

    def __init__(self, drafter: Drafter, slots: int, stride: int, dtype: torch.dtype, device: torch.device):
        spec = drafter.spec
        shape = (slots * stride, spec.num_key_value_heads, spec.head_dim)
        self.drafter, self.stride = drafter, stride
        self.cache = [
            tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            for _ in range(spec.num_hidden_layers)
        ]

    def extend(self, features_1LF: torch.Tensor, positions_1L: torch.Tensor, places_L: torch.Tensor) -> None:
        """Write the context rows of verified tokens to their places."""
        for cache, new in zip(self.cache, self.drafter.context_kv(features_1LF, positions_1L), strict=True):
            for kept, rows in zip(cache, new, strict=True):
                kept.index_copy_(0, places_L, rows[0].transpose(0, 1).to(kept.dtype))

    def hidden(
        self, embeddings_1QH: torch.Tensor, begins_N: torch.Tensor, length_N: torch.Tensor, slots_N: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (1, N * S, H) of N blocks [anchor, mask, ...] of S slots, each behind `length_N` rows of context that begin at place
        `begins_N`. Only the first `slots_N` slots of a block exist for the others."""
        N = len(begins_N)
        S, spec, device = embeddings_1QH.shape[1] // N, self.drafter.spec, begins_N.device
        slots = torch.arange(S, device=device)
        positions = length_N[:, None] + slots
        # Each block is two sequences: the slots that exist, and the rest, which nothing looks at.
        edges = torch.stack([torch.zeros_like(slots_N), slots_N], 1) + S * torch.arange(N, device=device)[:, None]
        twice = lambda x: x.repeat_interleave(2)  # noqa: E731
        masks = {
            window: SlotMask(
                places_Q=(begins_N[:, None] + positions).flatten(),
                starts_q=torch.cat([edges.flatten(), edges.new_full((1,), N * S)]).int(),
                starts_k=torch.cat([twice(begins_N), begins_N[-1:]]).int(),
                used=twice(length_N + slots_N).int(),
                max_q=S,
                max_k=self.stride,
                window=window,
                is_causal=spec.is_causal,
            )
            for window in {spec.window(n) for n in range(spec.num_hidden_layers)}
        }
        return self.drafter.draft(self.cache, embeddings_1QH, positions.view(1, -1), masks, S)
