"""The thread that decodes: requests in from any thread, tokens out as they come."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dflash_train.generation.base import Decoded, Request
from dflash_train.generation.slots import Slots
from dflash_train.server.metrics import Metrics, drafted_tokens
from dflash_train.server.protocol import ApiError

Event = list[int] | Decoded | ApiError  # tokens that came; the end; why there will be no end
RETRY_SECONDS = 1
# Tokens of one answer are told together where they come faster: nobody reads that fast, and text, JSON and bytes of every token by itself cost
# server and client more than a small target's step.
TELL_SECONDS = 0.02


@dataclass
class _Job:
    request: Request
    deliver: Callable[[Event], None]
    arrived: float = field(default_factory=time.monotonic)
    last: float | None = None  # when tokens were told last
    held: list[int] = field(default_factory=list)  # tokens that are not told yet
    cancelled: str | None = None  # why


class Scheduler:
    """Runs `slots` in a thread of its own. At most `max_waiting` requests wait for a slot; on_failure: called in that thread when decoding
    raised, after every request was told."""

    def __init__(self, slots: Slots, metrics: Metrics, *, max_waiting: int, on_failure: Callable[[], None]):
        self.slots, self.metrics, self.max_waiting, self.on_failure = slots, metrics, max_waiting, on_failure
        self.error: BaseException | None = None
        self._jobs: dict[int, _Job] = {}
        self._orders: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._next = 0
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        metrics.running.set_function(self._running)
        metrics.waiting.set_function(lambda: max(0, len(self._jobs) - self._running()))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is still decoded then is dropped."""
        self._orders.put(("end", 0))
        self._thread.join()

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> int:
        """Returns the request's key; `deliver` is called in the decoding thread. Raises ApiError where no more can wait, or after a failure."""
        with self._lock:
            if self.error is not None:
                raise self._failure()
            if len(self._jobs) >= self.slots.slots + self.max_waiting:
                raise ApiError(
                    429,
                    f"{len(self._jobs)} requests are decoded or wait already, and at most {self.max_waiting} may wait (--max-waiting); try again later",
                    code="queue_full",
                )
            key, self._next = self._next, self._next + 1
            self._jobs[key] = _Job(request, deliver)
        self._orders.put(("submit", key))
        return key

    def cancel(self, key: int, reason: Literal["abort", "stop"] = "abort") -> None:
        """Free the request's slot soon. What was decoded by then is still counted and delivered."""
        self._orders.put((reason, key))

    @property
    def idle(self) -> bool:
        """Whether no request is decoded or waits."""
        return not self._jobs

    def _running(self) -> int:
        return sum(occupant is not None for occupant in self.slots.occupants)

    def _failure(self) -> ApiError:
        return ApiError(500, f"decoding failed ({type(self.error).__name__}); the server ends", code="decoding_failed")

    # --- in the thread ---

    def _run(self) -> None:
        holding: dict[int, _Job] = {}
        try:
            while self._obey():
                finished = self.slots.advance() if self.slots.in_flight else []
                now = time.monotonic()
                for key, tokens in self.slots.take_news():
                    holding[key] = self._jobs[key]
                    holding[key].held += tokens
                due = [key for key, job in holding.items() if job.last is None or now - job.last >= TELL_SECONDS]
                for key in {*due, *(key for key, _ in finished if key in holding)}:
                    self._tell(holding.pop(key), now)
                for key, decoded in finished:
                    self._end(key, decoded, now)
        except BaseException as error:  # whatever it is, nobody may wait for it for ever
            traceback.print_exc()
            with self._lock:
                self.error = error
                jobs, self._jobs = list(self._jobs.values()), {}
            for job in jobs:
                job.deliver(self._failure())
            self.on_failure()

    def _obey(self) -> bool:
        """Take the orders that are there, or wait for one where nothing is decoded. False: end."""
        while not (self.slots.in_flight and self._orders.empty()):
            what, key = self._orders.get()
            if what == "end":
                return False
            job = self._jobs.get(key)
            if job is None:
                continue  # it ended before it was cancelled
            if what == "submit":
                self.metrics.prompt.inc(len(job.request.prompt_ids))
                self.slots.submit(key, job.request)
            elif job.cancelled is None:
                job.cancelled = what
                if self.slots.cancel(key):
                    self._end(key, Decoded([], "length"), time.monotonic())
        return True

    def _tell(self, job: _Job, now: float) -> None:
        tokens, job.held = job.held, []
        self.metrics.generated.inc(len(tokens))
        if job.last is None:
            self.metrics.first.observe(now - job.arrived)
        else:
            self.metrics.between.observe(now - job.last)
        job.last = now
        job.deliver(tokens)

    def _end(self, key: int, decoded: Decoded, now: float) -> None:
        with self._lock:
            job = self._jobs.pop(key)
        self.metrics.add_rounds(decoded, drafted_tokens(decoded, self.metrics.draft_length, job.request.max_new_tokens))
        self.metrics.ended[job.cancelled or decoded.finish_reason].inc()
        self.metrics.whole.observe(now - job.arrived)
        job.deliver(decoded)
