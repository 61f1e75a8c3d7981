"""Packed rows in a reproducible order: step s of a run is a pure function of (documents, seed, s).

Nothing depends on the number of ranks or micro-batches: a step is `global_batch_size` rows, and ranks take consecutive
shares of them. A short last step is filled with empty rows of weight zero, so that all ranks do equally many forwards.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_train.data.blocks import anchor_order, build_blocks, legal_anchors, share
from dflash_train.data.corpus import Corpus, fingerprint_of, lengths_of, weights_of
from dflash_train.data.packing import pack
from dflash_train.types import PackedBatch, TokenizedExample

ONE = 2**32
MOST_EMPTY_EPOCHS = 100  # on average, before one with a document


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


def rows_per_rank(global_batch_size: int, world_size: int) -> int:
    """Rows of each rank in a step, the empty ones included."""
    return math.ceil(global_batch_size / world_size)


class RowStream:
    """The training rows of every step and rank.

    A document of weight w is in an epoch w times; a fraction is decided by (seed, document) so that every epoch has others: of any 1/w
    epochs in a row a document is in one. Each time that a document is there has a number, document + repetition * documents.
    rows_per_epoch, steps_per_epoch and tokens_per_epoch are those of the first epoch, and of every other unless some weight is a fraction.
    """

    def __init__(self, examples: Sequence[TokenizedExample], config: StreamConfig):
        """Raises ValueError when there is nothing to train on."""
        if not len(examples):
            raise ValueError("no training rows: every row was dropped (see the table of reasons)")
        self.examples, self.config = examples, config
        self.lengths = lengths_of(examples)
        assert self.lengths.max() <= config.row_length, "examples are cut to data.max_length before they are packed"
        self._weights, self._phases = _fixed_point(weights_of(examples)), self._first_phases(weights_of(examples))
        if (
            self._weights.sum() < ONE // MOST_EMPTY_EPOCHS
        ):  # the next step would be searched for epoch by epoch, without end
            raise ValueError(
                f"the weights of data.train leave {self._weights.sum() / ONE:.2g} documents per epoch of the {len(examples)} that there are: "
                "hardly an epoch would have a row; raise the weights"
            )
        self.same_every_epoch = not np.any(self._weights % ONE)
        started = time.perf_counter()
        self._epoch, self._rows = 0, self._pack_epoch(0)
        self.packing_seconds = time.perf_counter() - started
        self.rows_per_epoch = len(self._rows)
        self.steps_per_epoch = math.ceil(self.rows_per_epoch / config.global_batch_size)
        self.tokens_per_epoch = int(self.lengths @ self.passes(0))
        self._first_steps = [0, self.steps_per_epoch]
        self._lock = threading.Lock()

    @property
    def padding(self) -> float:
        """Share of the first epoch's rows that holds no token."""
        return 1 - self.tokens_per_epoch / max(1, self.rows_per_epoch * self.config.row_length)

    def packing_line(self) -> str:
        """For a log."""
        return f"packing: {self.rows_per_epoch} rows of {self.config.row_length} tokens, {self.padding:.1%} padding, {self.packing_seconds:.2f} s"

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the documents' ids, tokens and masks, in order."""
        return fingerprint_of(self.examples)

    def _first_phases(self, weights: np.ndarray) -> np.ndarray:
        """int64 (documents,) in [0, ONE): where in the cycle of its fraction a document begins."""
        phases = np.zeros(len(weights), np.int64)
        for i in np.flatnonzero(weights % 1):
            name = self.examples.name(i) if isinstance(self.examples, Corpus) else self.examples[i].id
            digest = hashlib.sha256(f"{self.config.seed}/mixture/{name}".encode()).digest()
            phases[i] = int.from_bytes(digest[:4], "little")
        return phases

    def passes(self, epoch: int) -> np.ndarray:
        """int64 (documents,): how often each document is in an epoch."""
        at = self._phases + epoch * self._weights
        return (at + self._weights) // ONE - at // ONE

    def _entries(self, epoch: int) -> np.ndarray:
        """Numbers of what is in an epoch, the first repetition of all documents before the second of any."""
        passes = self.passes(epoch)
        return np.concatenate([np.flatnonzero(passes > r) + r * len(passes) for r in range(max(1, passes.max()))])

    def _pack_epoch(self, epoch: int) -> list[list[int]]:
        random = np.random.Generator(np.random.Philox(key=[self.config.seed, epoch]))
        order = random.permutation(self._entries(epoch))
        if self.config.pack:
            lengths = self.lengths[order % len(self.lengths)]
            rows = [[int(order[i]) for i in row] for row in pack(lengths, self.config.row_length)]
        else:
            rows = [[int(i)] for i in order]
        random.shuffle(rows)
        return rows

    def _first_step(self, epoch: int) -> int:
        """The step with which an epoch begins."""
        if self.same_every_epoch:
            return epoch * self.steps_per_epoch
        with self._lock:  # rows are assembled in a thread while the log asks for the epoch
            while len(self._first_steps) <= epoch:
                rows = len(self._pack_epoch(len(self._first_steps) - 1))
                self._first_steps.append(self._first_steps[-1] + math.ceil(rows / self.config.global_batch_size))
        return self._first_steps[epoch]

    def steps_of(self, num_epochs: float) -> int:
        """Steps of so many epochs, the last begun one whole."""
        if self.same_every_epoch:
            return math.ceil(num_epochs * self.steps_per_epoch)
        whole = int(num_epochs)
        first = self._first_step(whole)
        return (
            first + math.ceil((num_epochs - whole) * (self._first_step(whole + 1) - first))
            if num_epochs > whole
            else first
        )

    def epoch_at(self, step: int) -> float:
        """Epochs that are done after so many steps."""
        if self.same_every_epoch:
            return step / self.steps_per_epoch
        epoch, at, steps = self._place(step)
        return epoch + at / steps

    def _place(self, step: int) -> tuple[int, int, int]:
        """(epoch of a step, its number there, steps of that epoch)."""
        if self.same_every_epoch:
            return *divmod(step, self.steps_per_epoch), self.steps_per_epoch
        while self._first_step(len(self._first_steps) - 1) <= step:
            self._first_step(len(self._first_steps))
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch], self._first_steps[epoch + 1] - self._first_steps[epoch]

    def rows_of_step(self, step: int) -> tuple[int, list[list[int]]]:
        """(epoch, rows): numbers of what is in the step's rows; fewer than global_batch_size in an epoch's last step."""
        epoch, at, _ = self._place(step)
        with self._lock:  # rows are assembled in a thread while those of a skipped step are named
            if epoch != self._epoch:
                self._epoch, self._rows = epoch, self._pack_epoch(epoch)
            rows = self._rows
        g = self.config.global_batch_size
        return epoch, rows[at * g : (at + 1) * g]

    def micro_batches(self, step: int, rank: int, world_size: int) -> Iterator[PackedBatch]:
        """This rank's micro-batches of a step: equally many on every rank, whatever the data."""
        epoch, shares = self.shares(step, rank, world_size)
        for rows in shares:
            yield self.batch(rows, epoch)

    def shares(self, step: int, rank: int, world_size: int) -> tuple[int, list[list[list[int]]]]:
        """(epoch, rows of each of this rank's micro-batches): numbers of what is in them, none in a row that only fills up."""
        size = self.config.micro_batch_size
        epoch, rows = self.rows_of_step(step)
        per_rank = self.rows_per_rank(world_size)
        mine = rows[rank * per_rank : (rank + 1) * per_rank]
        mine = mine + [[]] * (per_rank - len(mine))
        return epoch, [mine[i : i + size] for i in range(0, per_rank, size)]

    def rows_per_rank(self, world_size: int) -> int:
        """Rows of each rank in a step, the empty ones included."""
        return rows_per_rank(self.config.global_batch_size, world_size)

    def micro_batches_per_rank(self, world_size: int) -> int:
        return math.ceil(self.rows_per_rank(world_size) / self.config.micro_batch_size)

    def documents(self, row: list[int]) -> list[str]:
        """Ids of a row's documents, given by number."""
        return [self.examples[i % len(self.examples)].id for i in row]

    def sharing_note(self, world_size: int) -> str | None:
        """What to say where ranks cannot share a step's rows evenly."""
        rows, per_rank = self.config.global_batch_size, self.rows_per_rank(world_size)
        idle = world_size - math.ceil(rows / per_rank)
        if per_rank * world_size == rows:
            return None
        spare = f", all of them for {idle} of the ranks" if idle else ""
        return (
            f"note: train.global_batch_size = {rows} over {world_size} ranks: each does {per_rank} rows per step, of which "
            f"{per_rank * world_size - rows} in all are empty{spare}. The numbers are right; a multiple of {world_size} would waste nothing"
        )

    def batch(self, rows: list[list[int]], epoch: int) -> PackedBatch:
        """Assemble rows, given by number, with this epoch's anchors."""
        c = self.config
        documents, anchors = [], []
        for row in rows:
            again, which = zip(*(divmod(i, len(self.examples)) for i in row), strict=True) if row else ((), ())
            documents.append([self.examples[i] for i in which])
            given = share([len(legal_anchors(d.supervised)) for d in documents[-1]], c.num_anchors)
            starts = np.cumsum([0] + [len(d.token_ids) for d in documents[-1]])
            chosen = [
                anchor_order(d.supervised, c.seed, epoch, d.id, repetition)[:n] + s
                for d, n, s, repetition in zip(documents[-1], given, starts, again, strict=False)
            ]
            anchors.append(np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64))
        return assemble(documents, c.row_length, anchors, num_blocks=c.num_anchors, decay_S=c.decay_S)


def _fixed_point(weights: np.ndarray) -> np.ndarray:
    """int64: weights as multiples of 1 / ONE, so that sums over epochs are exact."""
    return np.maximum(np.rint(weights * ONE), 1).astype(np.int64)


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
        pairs=int((positions + 1)[documents >= 0].sum()),
        context=int(np.take_along_axis(positions, blocks.anchors_BN.numpy(), 1)[blocks.valid_BN.numpy()].sum()),
    )
