"""Requests to stop: SIGTERM, Ctrl-C, and SIGUSR1, which schedulers send ahead of a preemption.

Where nothing would be lost, a signal ends the process at once, with exit code 128 + its number. Within `deferred` it is only remembered, for
a loop that asks `requested` between two steps; within `interruptible`, inside of that, it ends the work that can be done again. A second
signal ends the process without ceremony.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dflash_train import ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# torchrun passes on what its process group got already, and schedulers signal every process of a job: these are one request.
ONE_REQUEST = 2.0  # seconds


class Interrupted(BaseException):
    """Work that can be done again was cut short by a request to stop. No Exception: nobody may take it for a failure of that work."""


class _Requests:
    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.at = 0.0
        self.deferred = self.interruptible = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self.at > ONE_REQUEST:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        self.received, self.at = signal.Signals(signum), time.monotonic()
        if not self.deferred:
            raise _ending(self.received)
        if ranks.is_rank0():  # not print: this may come in the middle of one
            os.write(2, f"\n{self.received.name}: stopping after this step; again to end at once\n".encode())
        if self.interruptible:
            raise Interrupted


_requests = _Requests()


def _ending(received: signal.Signals | None) -> BaseException:
    if received is signal.SIGINT:
        return KeyboardInterrupt()
    return SystemExit(128 + (received or signal.SIGTERM))


@contextmanager
def listening() -> Iterator[None]:
    """Signals are requests while the body runs. Elsewhere than in the main thread Python cannot be told of signals, and they kill."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _requests
    outer, _requests = _requests, _Requests()
    before = {s: signal.signal(s, _requests.handle) for s in SIGNALS}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        _requests = outer


@contextmanager
def deferred() -> Iterator[None]:
    """Signals wait while the body runs; one that came ends the process behind it. Where the body itself fails they wait on, for it to be said."""
    _requests.deferred = True
    yield
    _requests.deferred = False
    if requested():
        leave()


@contextmanager
def interruptible() -> Iterator[None]:
    """Raises Interrupted in the body as soon as a stop is requested, and behind it on every rank if it was cut short on any: the body must
    be work of this rank alone. Outside of `deferred` this is a plain block."""
    requests, cut = _requests, False
    try:
        requests.interruptible = requests.deferred
        if requests.deferred and requests.received:
            raise Interrupted
        yield
    except Interrupted:
        cut = True
    finally:
        requests.interruptible = False
    if requests.deferred and ranks.any_rank(cut):
        raise Interrupted


def requested() -> bool:
    """Whether this process was asked to stop."""
    return _requests.received is not None


def leave() -> None:
    """End the process as the request to stop says: KeyboardInterrupt (exit code 130) for Ctrl-C, else SystemExit with 128 + the signal's
    number; 143 as for SIGTERM where only another rank was asked."""
    raise _ending(_requests.received)
