"""What a step works on, ready before it is asked for: a thread assembles and pins the next step's rows, and on CUDA the target reads the
next micro-batch on a stream of its own while the drafter learns from this one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dflash_train import ranks
from dflash_train.clock import Clock
from dflash_train.data.stream import RowStream
from dflash_train.target.base import Target
from dflash_train.types import PackedBatch, TargetFeatures
from dflash_train.walk import move


class Feed:
    """This rank's micro-batches with the target's features, step after step.

    Steps are asked for in any order; those that follow each other are prepared ahead, up to (not including) `end`.
    """

    def __init__(
        self, stream: RowStream, target: Target, device: torch.device, clock: Clock, *, end: int, read_ahead: bool
    ):
        self.stream, self.target, self.device, self.clock, self.end = stream, target, device, clock, end
        self._thread = ThreadPoolExecutor(1, "rows")
        self._rows: dict[int, Future[list[PackedBatch]]] = {}
        self._side = torch.cuda.Stream(device) if read_ahead and device.type == "cuda" else None
        self._read: tuple[tuple[int, int], PackedBatch, TargetFeatures] | None = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *error: object) -> None:
        """Drop what was prepared and not asked for."""
        self._thread.shutdown(cancel_futures=True)
        self._rows, self._read = {}, None

    def batches(self, step: int) -> list[PackedBatch]:
        """The step's micro-batches, on the host."""
        for wanted in range(step, min(step + 2, max(self.end, step + 1))):
            if wanted not in self._rows:
                self._rows[wanted] = self._thread.submit(self._assemble, wanted)
        self._rows = {s: rows for s, rows in self._rows.items() if s >= step}
        return self._rows[step].result()

    def _assemble(self, step: int) -> list[PackedBatch]:
        batches = list(self.stream.micro_batches(step, ranks.rank(), ranks.world_size()))
        if self.device.type == "cuda":
            for batch in batches:
                for record in (batch, batch.blocks):
                    for name, value in vars(record).items():
                        if isinstance(value, torch.Tensor):
                            setattr(record, name, value.pin_memory())
        return batches

    def step(self, step: int) -> Iterator[tuple[PackedBatch, TargetFeatures]]:
        """The step's micro-batches on the device with their features."""
        count = len(self.batches(step))
        for i in range(count):
            batch, features = self._take(step, i)
            following = (step, i + 1) if i + 1 < count else (step + 1, 0)
            if self._side is not None and following[0] < self.end:
                self._start(*following)
            yield batch, features

    def _start(self, step: int, i: int) -> None:
        """Give the side stream a micro-batch to read: behind all that this stream was given so far, beside what it is given from now on."""
        batch = self.batches(step)[i]
        batch = move(batch, self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side), self.clock("target"):
            features = self.target.read(batch)
        self._read = (step, i), batch, features

    def _take(self, step: int, i: int) -> tuple[PackedBatch, TargetFeatures]:
        if self._read is None or self._read[0] != (step, i):
            self._read = None
            batch = move(self.batches(step)[i], self.device)
            with self.clock("target"):
                return batch, self.target.read(batch)
        _, batch, features = self._read
        self._read = None
        here = torch.cuda.current_stream(self.device)
        here.wait_stream(self._side)
        features.features_BTF.record_stream(here)
        return batch, features
