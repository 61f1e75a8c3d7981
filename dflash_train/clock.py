"""Where the time of a step goes. On CUDA by events, so that nothing waits until the times are asked for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """with clock("target"): ... around what the current stream is given; `report` tells how long each name took."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self._marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = self._now()
        yield
        self._marks[name].append((began, self._now()))

    def report(self) -> dict[str, list[float]]:
        """Milliseconds of every use of a name since the last report. Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
            took = lambda began, ended: began.elapsed_time(ended)
        else:
            took = lambda began, ended: 1000 * (ended - began)
        times = {name: [took(*pair) for pair in pairs] for name, pairs in self._marks.items()}
        self._marks.clear()
        return times
