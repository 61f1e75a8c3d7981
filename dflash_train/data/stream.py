"""Packed rows in a reproducible order: step s of a run is a pure function of (documents, seed, s).

Nothing depends on the number of ranks or micro-batches: a step is `global_batch_size` rows, and ranks take consecutive
shares of them. A short last step is filled with empty rows of weight zero, so that all ranks do equally many forwards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dflash_train.data.blocks import anchor_order, build_blocks, legal_anchors, share
from dflash_train.data.packing import pack
from dflash_train.types import PackedBatch, TokenizedExample


@dataclass(kw_only=True)
class StreamConfig:
    """row_length T; num_anchors N; decay_S: (K,) slot weights, decay_S[0] = 0."""

    row_length: int
    num_anchors: int
    decay_S: np.ndarray
    global_batch_size: int
    micro_batch_size: int
    seed: int
    pack: bool = True


class RowStream:
    """The training rows of every step and rank."""

    def __init__(self, examples: list[TokenizedExample], config: StreamConfig):
        """Raises ValueError when there is nothing to train on."""
        if not examples:
            raise ValueError("no training rows: every row was dropped (see the table of reasons)")
        self.examples, self.config = examples, config
        lengths = [len(e.token_ids) for e in examples]
        assert max(lengths) <= config.row_length, "examples are cut to data.max_length before they are packed"
        self.lengths = np.array(lengths)
        self._epoch, self._rows = 0, self._pack_epoch(0)
        self.rows_per_epoch = len(self._rows)
        self.steps_per_epoch = math.ceil(self.rows_per_epoch / config.global_batch_size)
        self.tokens_per_epoch = int(self.lengths.sum())

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the documents' ids, tokens and masks, in order."""
        digest = hashlib.sha256()
        for e in self.examples:
            for part in (e.id.encode(), e.token_ids.astype(np.int32).tobytes(), e.supervised.tobytes()):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:16]

    def _pack_epoch(self, epoch: int) -> list[list[int]]:
        random = np.random.Generator(np.random.Philox(key=[self.config.seed, epoch]))
        order = random.permutation(len(self.examples))
        if self.config.pack:
            rows = [[int(order[i]) for i in row] for row in pack(self.lengths[order], self.config.row_length)]
        else:
            rows = [[int(i)] for i in order]
        random.shuffle(rows)
        return rows

    def rows_of_step(self, step: int) -> tuple[int, list[list[int]]]:
        """(epoch, rows): document indices of the step's rows; fewer than global_batch_size in an epoch's last step."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._pack_epoch(epoch)
        g = self.config.global_batch_size
        return epoch, self._rows[at * g : (at + 1) * g]

    def micro_batches(self, step: int, rank: int, world_size: int) -> Iterator[PackedBatch]:
        """This rank's micro-batches of a step: equally many on every rank, whatever the data."""
        c = self.config
        epoch, rows = self.rows_of_step(step)
        per_rank = math.ceil(c.global_batch_size / world_size)
        mine = rows[rank * per_rank : (rank + 1) * per_rank]
        for i in range(math.ceil(per_rank / c.micro_batch_size)):
            size = min(c.micro_batch_size, per_rank - i * c.micro_batch_size)
            chosen = mine[i * c.micro_batch_size : i * c.micro_batch_size + size]
            yield self.batch(chosen + [[]] * (size - len(chosen)), epoch)

    def batch(self, rows: list[list[int]], epoch: int) -> PackedBatch:
        """Assemble rows of document indices, with this epoch's anchors."""
        c = self.config
        anchors = []
        for row in rows:
            documents = [self.examples[i] for i in row]
            given = share([len(legal_anchors(d.supervised)) for d in documents], c.num_anchors)
            starts = np.cumsum([0] + [len(d.token_ids) for d in documents])
            chosen = [
                anchor_order(d.supervised, c.seed, epoch, d.id)[:n] + s
                for d, n, s in zip(documents, given, starts, strict=False)
            ]
            anchors.append(np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64))
        return assemble(
            [[self.examples[i] for i in row] for row in rows],
            c.row_length,
            anchors,
            num_blocks=c.num_anchors,
            decay_S=c.decay_S,
        )


def assemble(
    rows: list[list[TokenizedExample]],
    row_length: int,
    anchors: list[np.ndarray],
    *,
    num_blocks: int,
    decay_S: np.ndarray,
    slots: list[np.ndarray] | None = None,
) -> PackedBatch:
    """Whole documents side by side in rows of row_length, with blocks at the given anchors (indices into the row)."""
    B = len(rows)
    ids = np.zeros((B, row_length), np.int64)
    positions = np.zeros((B, row_length), np.int64)
    documents = np.full((B, row_length), -1, np.int64)
    supervised = np.zeros((B, row_length), bool)
    for b, row in enumerate(rows):
        at = 0
        for n, example in enumerate(row):
            here = slice(at, at + len(example.token_ids))
            ids[b, here] = example.token_ids
            positions[b, here] = np.arange(len(example.token_ids))
            documents[b, here] = n
            supervised[b, here] = example.supervised
            at = here.stop
    starts = np.flatnonzero(np.diff(documents, axis=1, prepend=-2).ravel() != 0)
    starts = np.append(starts, documents.size).astype(np.int32)
    blocks = build_blocks(ids, documents, supervised, anchors, num_blocks=num_blocks, decay_S=decay_S, slots=slots)
    index_BNS = blocks.anchors_BN.numpy()[:, :, None] + np.arange(len(decay_S))
    reached = np.zeros_like(supervised)
    b, n, k = np.nonzero(blocks.supervised_BNS.numpy())
    reached[b, index_BNS[b, n, k]] = True
    follows = supervised[:, 1:] & supervised[:, :-1] & (documents[:, 1:] == documents[:, :-1])
    return PackedBatch(
        token_ids_BT=torch.from_numpy(ids),
        position_ids_BT=torch.from_numpy(positions),
        document_ids_BT=torch.from_numpy(documents),
        supervised_BT=torch.from_numpy(supervised),
        starts_D=torch.from_numpy(starts),
        longest=int(np.diff(starts).max()),
        blocks=blocks,
        sample_ids=[[e.id for e in row] for row in rows],
        weight=float(blocks.weights_BNS.double().sum()),
        tokens=int((documents >= 0).sum()),
        drafted=int(blocks.valid_BN.sum()),
        covered=int(reached.sum()),
        coverable=int(follows.sum()),
    )
