"""Who sees whom: the drafter's attention mask, as booleans (exact, any device), for flex attention (CUDA) and for kernels of our own (Hopper).

The rule, for a query in slot s of a block with its anchor at index a (contract of every engine for is_causal false):
context k is visible if it is in the anchor's document, k < a, and, in a sliding layer, (a + s) - k < W;
slot j of the same block is visible if it exists, and, in a causal variant, j <= s. Nothing else is visible. W >= S, so the window never cuts the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dflash_train.kernels.attention import Spans, spans
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


def _edges(
    blocks: DraftBlocks, document_ids_BT: torch.Tensor, block_size: int, window: int | None, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per query (B, Q), int32: the first context token that it sees, the first behind them, and how many slots of its own block. A document is
    one stretch of its row, so that a query sees an interval of the context."""
    B, T = document_ids_BT.shape
    at = torch.arange(T, device=document_ids_BT.device)
    slots = torch.arange(block_size, device=at.device)
    begins_BT = F.pad(document_ids_BT[:, 1:] != document_ids_BT[:, :-1], (1, 0)) * at
    queries_BNS = blocks.anchors_BN[:, :, None] + slots
    first_BNS = begins_BT.cummax(1).values.gather(1, blocks.anchors_BN)[:, :, None].expand_as(queries_BNS)
    if window is not None:
        first_BNS = torch.maximum(first_BNS, queries_BNS - window + 1)
    last_BNS = torch.where(blocks.valid_BN, blocks.anchors_BN, 0)[:, :, None].expand_as(queries_BNS)
    seen_BNS = blocks.slots_BN[:, :, None].expand_as(queries_BNS)
    if is_causal:
        seen_BNS = torch.minimum(seen_BNS, slots + 1)
    first_BQ, last_BQ, seen_BQ = (x.reshape(B, -1).int() for x in (first_BNS, last_BNS, seen_BNS))
    return first_BQ, last_BQ, seen_BQ


def span_mask(
    blocks: DraftBlocks, document_ids_BT: torch.Tensor, block_size: int, window: int | None, is_causal: bool
) -> Spans:
    """The same mask for `kernels.attention`. Nothing is read by the host."""
    edges = _edges(blocks, document_ids_BT, block_size, window, is_causal)
    return spans(*edges, document_ids_BT.shape[1], block_size)


TILE = 128  # queries and keys that the block-sparse kernel skips, or leaves unmasked, together


def flex_mask(blocks: DraftBlocks, document_ids_BT: torch.Tensor, block_size: int, window: int | None, is_causal: bool):
    """The same mask as a flex-attention BlockMask over keys [context T | blocks Q], whose tiles are found by arithmetic.

    That says which tiles a query needs and which of them need no mask, without looking at single pairs. Nothing is read by the host.
    """
    from torch.nn.attention.flex_attention import BlockMask as TiledMask

    T = document_ids_BT.shape[1]
    first_BQ, last_BQ, seen_BQ = _edges(blocks, document_ids_BT, block_size, window, is_causal)
    Q = first_BQ.shape[1]
    at = torch.arange(Q, device=first_BQ.device, dtype=torch.int32)
    own_first_BQ = (T + at // block_size * block_size).expand_as(seen_BQ)
    own_last_BQ = own_first_BQ + seen_BQ

    def visible(b, h, q, k):  # scalars: batch row, head, query and key index
        context = (k >= first_BQ[b, q]) & (k < last_BQ[b, q])
        return context | (k >= own_first_BQ[b, q]) & (k < own_last_BQ[b, q])

    some, whole = (a | b for a, b in zip(_tiles(first_BQ, last_BQ, T + Q), _tiles(own_first_BQ, own_last_BQ, T + Q)))
    return TiledMask.from_kv_blocks(
        *_ordered(some & ~whole), *_ordered(whole), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(Q, T + Q)
    )


def _tiles(first_BQ: torch.Tensor, last_BQ: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(some, all) of the pairs in each tile are visible: booleans (B, query tiles, key tiles); query q sees keys first <= k < last."""
    B, Q = first_BQ.shape
    padded = (
        F.pad(x, (0, -Q % TILE)).view(B, -1, TILE, 1) for x in (first_BQ, last_BQ)
    )  # a query beyond the end sees nothing
    first, last = padded
    begin = torch.arange(0, keys, TILE, device=first.device)
    some = (first < last) & (first < begin + TILE) & (last > begin)
    return some.any(2), ((first <= begin) & (last >= begin + TILE)).all(2)


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key tiles each query tile needs, and which, ascending: as BlockMask wants them, with a dimension for heads."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1).int()[:, None], order.int()[:, None]
