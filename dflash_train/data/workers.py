"""A function over many items in several processes, results in order.

Each process is a fresh interpreter that speaks pickles over its pipes. It does not import the parent's main module (so a script needs
no `if __name__` guard), does not fork (so CUDA and threads are safe), and ends when its parent does, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import IO, Any


def spread(function: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[Any]:
    """function(item) of each item, in order, computed by so many processes; in this one where `workers` is 1.

    function and items must be picklable. At most two items per process are under way, so memory stays bounded. Raises ValueError
    when a process dies, RuntimeError with the traceback when the function fails.
    """
    if workers == 1:
        yield from map(function, items)
        return
    pool = _Pool(function, workers)
    try:
        yield from pool.run(iter(items))
    finally:
        pool.close()


class _Pool:
    def __init__(self, function: Callable[[Any], Any], workers: int) -> None:
        self.function, self.workers = pickle.dumps(function), workers
        self.mine, self.processes = threading.local(), []
        self.threads = ThreadPoolExecutor(workers)

    def run(self, items: Iterator[Any]) -> Iterator[Any]:
        pending: deque[Future] = deque(self.threads.submit(self._ask, item) for item in islice(items, 2 * self.workers))
        while pending:
            result = pending.popleft().result()
            pending.extend(self.threads.submit(self._ask, item) for item in islice(items, 1))
            yield result

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self.threads.shutdown(cancel_futures=True)
        for process in self.processes:
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # what was still to be written
                process.stdin.close()
            process.stdout.close()

    def _ask(self, item: Any) -> Any:
        """The result of this thread's process, which is started on the first call."""
        if not hasattr(self.mine, "process"):
            self.mine.process, self.mine.begun = self._start(), False
            self.processes.append(self.mine.process)
        process = self.mine.process
        try:
            if not self.mine.begun:
                _send(process.stdin, self.function)
                self.mine.begun = True
            _send(process.stdin, pickle.dumps(item))
            good, result = _receive(process.stdout)
        except (EOFError, OSError) as error:
            raise ValueError(
                f"data.workers = {self.workers}: a tokenising process ended with code {process.wait()}; "
                "fewer workers need less memory, data.workers=1 none of their own"
            ) from error
        if not good:
            raise RuntimeError(f"in a tokenising process:\n{result}")
        return result

    def _start(self) -> subprocess.Popen:
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        return subprocess.Popen(
            [sys.executable, "-m", "dflash_train.data.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    size = stream.read(8)
    data = stream.read(int.from_bytes(size, "little"))
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        raise EOFError
    return pickle.loads(data)


def serve() -> None:
    """What a process does: read the function, then answer each item with (True, result) or (False, traceback)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    try:
        function = _receive(sys.stdin.buffer)
        while True:
            item = _receive(sys.stdin.buffer)
            try:
                answer = (True, function(item))
            except Exception:
                answer = (False, traceback.format_exc())
            _send(answers, pickle.dumps(answer))
    except (EOFError, BrokenPipeError):
        pass


if __name__ == "__main__":
    serve()
