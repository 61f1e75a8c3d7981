"""Drafting as served: a key/value cache of the context that grows with the verified tokens, one block per call."""

from __future__ import annotations

import torch

from dflash_train.drafter.mask import BlockMask
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
