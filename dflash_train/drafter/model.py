"""The drafter: target features and masked blocks in, one hidden state per slot out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from dflash_train.drafter.layers import Context, ContextRows, DraftLayer, RMSNorm, compiled, project, rotation
from dflash_train.drafter.selector import CandidateSelector
from dflash_train.drafter.spec import DrafterSpec
from dflash_train.types import DraftBlocks


class Drafter(nn.Module):
    """DFlash v1 or 2, as its spec says. Holds no embedding and no head: both belong to the frozen target."""

    def __init__(self, spec: DrafterSpec):
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.target_layer_ids) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.candidate_selector = CandidateSelector(spec) if spec.selector_rank else None

    def context(self, features_BTF: torch.Tensor) -> torch.Tensor:
        """Captured features -> the context rows (B, T, H) that every layer's keys and values are made of."""
        return self.hidden_norm(project(features_BTF, self.fc)[0])

    def context_kv(
        self, features_BTF: torch.Tensor, positions_BT: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values (B, Hkv, T, D) of the context, per layer."""
        rows = self.context(features_BTF)
        by = rotation(positions_BT, self.spec.head_dim, self.spec.rope_theta)
        return [layer.self_attn.keys_values(rows, by) for layer in self.layers]

    def draft(self, contexts: Sequence[Context], embeddings_BQH, positions_BQ, masks: dict, slots: int) -> torch.Tensor:
        """Hidden states (B, Q, H) after the final norm. contexts: per layer; masks: window -> mask of the layers with that window."""
        by = rotation(positions_BQ, self.spec.head_dim, self.spec.rope_theta)
        h = embeddings_BQH
        for n, layer in enumerate(self.layers):
            h = layer(h, contexts[n], by, masks[self.spec.window(n)], slots)
        return self.norm(h)

    def masks(self, blocks: DraftBlocks, document_ids_BT: torch.Tensor, build: Callable) -> dict:
        """One mask per distinct window of the layers, made by a function of `drafter.mask`."""
        windows = {self.spec.window(n) for n in range(self.spec.num_hidden_layers)}
        return {w: build(blocks, document_ids_BT, self.spec.block_size, w, self.spec.is_causal) for w in windows}

    def forward(
        self, features_BTF, positions_BT, embeddings_BQH, positions_BQ, masks: dict, *, fuse: bool = False
    ) -> torch.Tensor:
        """Training forward over N blocks of block_size slots per row; Q = N * block_size. fuse: through torch.compile, one graph for all
        layers (and one for the first, which has nothing to pass a gradient to), made anew for other shapes."""
        through = compiled if fuse else lambda function: function
        by_context, by = (
            rotation(positions, self.spec.head_dim, self.spec.rope_theta) for positions in (positions_BT, positions_BQ)
        )
        context = ContextRows(through(Drafter.context)(self, features_BTF), by_context)
        h = embeddings_BQH
        for n, layer in enumerate(self.layers):
            h = layer(h, context, by, masks[self.spec.window(n)], self.spec.block_size, fuse=fuse)
        return through(RMSNorm.forward)(self.norm, h)


def block_token_ids(blocks: DraftBlocks, mask_token_id: int) -> torch.Tensor:
    """What the drafter reads (B, N*S): the anchor's token in slot 0, the mask token elsewhere and in unused blocks."""
    ids = torch.full_like(blocks.labels_BNS, mask_token_id)
    ids[:, :, 0] = torch.where(blocks.valid_BN, blocks.labels_BNS[:, :, 0], mask_token_id)
    return ids.flatten(1)


def block_positions(blocks: DraftBlocks, positions_BT: torch.Tensor, block_size: int) -> torch.Tensor:
    """RoPE positions (B, N*S): the anchor's position in its document plus the slot."""
    slots = torch.arange(block_size, device=positions_BT.device)
    return (positions_BT.gather(1, blocks.anchors_BN)[:, :, None] + slots).flatten(1)


@torch.no_grad()
def initialise(drafter: Drafter, seed: int) -> None:
    """Seeded, independent of device and of module order: each tensor draws from (seed, its name).

    Matrices ~ N(0, 0.02); norms one; the convolution the identity (tap 0 = 1, the rest and the dynamic part 0); the successor
    codebook zero, so that step 0 is plain DFlash.
    """
    drawn = []
    for name, p in drafter.named_parameters():
        if name.endswith("norm.weight"):
            p.fill_(1.0)
        elif name.endswith("base_kernel"):
            p.zero_()
            p[:, 0] = 1.0
        elif name.endswith(("kernel_projection.weight", "successor_codebook")):
            p.zero_()
        else:
            drawn.append((name, p))

    inference = torch.is_inference_mode_enabled()

    def draw(named: tuple[str, nn.Parameter]) -> None:
        name, p = named
        generator = torch.Generator().manual_seed(_stable_seed(seed, name))
        with torch.inference_mode(inference), torch.no_grad():  # which every thread has to say for itself
            p.copy_(torch.randn(p.shape, generator=generator) * 0.02)

    with ThreadPoolExecutor() as threads:
        list(threads.map(draw, drawn))


def _stable_seed(seed: int, name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
