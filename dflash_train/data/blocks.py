"""Which blocks are drafted: legal anchors, their order, their share of a row, and the labels and weights of their slots.

Legal anchors are the supervised positions whose successor is supervised too; so the first answer token is the first anchor
(the target's own prefill produces it, it is never drafted). A block is supervised up to its first unsupervised slot.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from dflash_train.types import DraftBlocks


def legal_anchors(supervised: np.ndarray) -> np.ndarray:
    """Positions a with supervised[a] and supervised[a + 1], ascending."""
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def anchor_order(supervised: np.ndarray, seed: int, epoch: int, sample_id: str, repetition: int = 0) -> np.ndarray:
    """A permutation of the legal anchors: a pure function of (seed, epoch, sample, repetition within the epoch)."""
    again = f"\0{repetition}" if repetition else ""
    key = hashlib.sha256(f"{seed}/{epoch}/{sample_id}{again}".encode()).digest()[:16]
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return random.permutation(legal_anchors(supervised))


def share(counts: list[int], budget: int) -> list[int]:
    """Split `budget` blocks over documents in proportion to their legal anchors, none getting more than it has."""
    total = sum(counts)
    if total <= budget:
        return list(counts)
    exact = [budget * c / total for c in counts]
    given = [int(x) for x in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: (given[i] - exact[i], i))
    for i in by_remainder[: budget - sum(given)]:
        given[i] += 1
    return given


def build_blocks(
    token_ids_BT: np.ndarray,
    document_ids_BT: np.ndarray,
    supervised_BT: np.ndarray,
    anchors: list[np.ndarray],
    *,
    num_blocks: int,
    decay_S: np.ndarray,
    slots: list[np.ndarray] | None = None,
) -> DraftBlocks:
    """DraftBlocks (on the CPU) for the given anchors of each row.

    anchors: per row at most num_blocks indices; decay_S: (K,) weights with decay_S[0] = 0; slots: per row the number of slots that
    exist in each block (default K). Unused blocks have anchor 0 and weight 0.
    """
    B, T = token_ids_BT.shape
    S = len(decay_S)
    anchors_BN = np.zeros((B, num_blocks), np.int64)
    valid_BN = np.zeros((B, num_blocks), bool)
    slots_BN = np.full((B, num_blocks), S, np.int64)
    for b, row in enumerate(anchors):
        assert len(row) <= num_blocks
        anchors_BN[b, : len(row)] = row
        valid_BN[b, : len(row)] = True
        if slots is not None:
            slots_BN[b, : len(row)] = slots[b]
    index_BNS = anchors_BN[:, :, None] + np.arange(S)
    inside = (index_BNS < T) & valid_BN[:, :, None] & (np.arange(S) < slots_BN[:, :, None])
    safe = np.minimum(index_BNS, T - 1)
    rows = np.arange(B)[:, None, None]
    same = document_ids_BT[rows, safe] == document_ids_BT[rows, anchors_BN[:, :, None]]
    good = inside & same & supervised_BT[rows, safe]
    good[:, :, 0] = valid_BN
    supervised_BNS = np.logical_and.accumulate(good, -1)
    supervised_BNS[:, :, 0] = False
    labels_BNS = np.where(inside, token_ids_BT[rows, safe], 0)
    weights_BNS = np.where(supervised_BNS, decay_S, 0.0).astype(np.float32)
    return DraftBlocks(
        anchors_BN=torch.from_numpy(anchors_BN),
        valid_BN=torch.from_numpy(valid_BN),
        slots_BN=torch.from_numpy(slots_BN),
        labels_BNS=torch.from_numpy(labels_BNS.astype(np.int64)),
        weights_BNS=torch.from_numpy(weights_BNS),
        supervised_BNS=torch.from_numpy(supervised_BNS),
        scored_M=torch.from_numpy(np.flatnonzero(supervised_BNS)),
    )
