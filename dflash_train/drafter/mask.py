"""Who sees whom: the drafter's attention mask, as booleans (exact, any device) and for flex attention (CUDA).

The rule, for a query in slot s of a block with its anchor at index a (contract of every engine for is_causal false):
context k is visible if it is in the anchor's document, k < a, and, in a sliding layer, (a + s) - k < W;
slot j of the same block is visible if it exists, and, in a causal variant, j <= s. Nothing else is visible. W >= S, so the window never cuts the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_train.types import DraftBlocks


@dataclass(kw_only=True)
class BlockMask:
    """context_BQT and block_BNSS (query slot, key slot) for one kind of layer; Q = N * S."""

    context_BQT: torch.Tensor
    block_BNSS: torch.Tensor


@dataclass(kw_only=True)
class SlotMask:
    """Blocks whose context lies in a cache of slots: `kernels.varlen`'s arguments, and the places (Q,) where the block's own keys are put,
    right behind their context. The same for every layer but for the window."""

    places_Q: torch.Tensor
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    used: torch.Tensor
    max_q: int
    max_k: int
    window: int | None
    is_causal: bool


def dense_mask(
    blocks: DraftBlocks, document_ids_BT: torch.Tensor, block_size: int, window: int | None, is_causal: bool
) -> BlockMask:
    """Boolean masks (true = visible) for `blocks` over their rows' context."""
    B, T = document_ids_BT.shape
    N = blocks.anchors_BN.shape[1]
    device = document_ids_BT.device
    slots = torch.arange(block_size, device=device)
    keys = torch.arange(T, device=device)
    anchors = blocks.anchors_BN
    same_BNT = document_ids_BT.gather(1, anchors)[:, :, None] == document_ids_BT[:, None, :]
    before_BNT = keys < anchors[:, :, None]
    context_BNST = (same_BNT & before_BNT & blocks.valid_BN[:, :, None])[:, :, None, :].expand(B, N, block_size, T)
    if window is not None:
        queries_BNS = anchors[:, :, None] + slots
        context_BNST = context_BNST & (queries_BNS[..., None] - keys < window)
    block_BNSS = (slots < blocks.slots_BN[:, :, None])[:, :, None, :].expand(B, N, block_size, block_size)
    if is_causal:
        block_BNSS = block_BNSS & (slots <= slots[:, None])
    return BlockMask(context_BQT=context_BNST.reshape(B, N * block_size, T), block_BNSS=block_BNSS)


def flex_mask(blocks: DraftBlocks, document_ids_BT: torch.Tensor, block_size: int, window: int | None, is_causal: bool):
    """The same mask as a flex-attention BlockMask over keys [context T | blocks Q]."""
    from torch.nn.attention.flex_attention import create_block_mask

    B, T = document_ids_BT.shape
    N = blocks.anchors_BN.shape[1]
    anchors, slots_BN, valid = blocks.anchors_BN, blocks.slots_BN, blocks.valid_BN
    anchor_documents = document_ids_BT.gather(1, anchors)

    def visible(b, h, q, k):  # scalars: batch row, head, query and key index
        n, s = q // block_size, q % block_size
        in_context = k < T
        t = torch.where(in_context, k, 0)
        context = in_context & valid[b, n] & (t < anchors[b, n]) & (document_ids_BT[b, t] == anchor_documents[b, n])
        if window is not None:
            context = context & (anchors[b, n] + s - t < window)
        j = torch.where(in_context, 0, k - T)
        block = (~in_context) & (j // block_size == n) & (j % block_size < slots_BN[b, n])
        if is_causal:
            block = block & (j % block_size <= s)
        return context | block

    return create_block_mask(
        visible, B, None, N * block_size, T + N * block_size, device=anchors.device, _compile=anchors.is_cuda
    )
