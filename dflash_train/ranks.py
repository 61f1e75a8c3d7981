"""The only torch.distributed calls outside engine/: who am I, sum, barriers, broadcast, and who is gone."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=7)

_store: dist.Store | None = None  # where ranks leave notes for each other, outside any collective
_kept: dist.Store | None = None  # where they leave them for those that torchrun starts after them
_host_group: dist.ProcessGroup | None = None  # for what the host decides: a GPU's queue need not be waited for
_watch: _Watch | None = None
_on_loss: Callable[[str], None] | None = None
_lost = False  # a rank is: nothing may wait for the group any more


def device(name: str | None = None) -> torch.device:
    """A device by its name; none: CUDA where it is, else the CPU. "cuda" is this process's GPU with its number, so that devices compare equal."""
    found = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found


def start(timeout_minutes: float, *, group: bool = False) -> torch.device:
    """Join the process group that torchrun describes and return this rank's device. A single process has none, unless `group` asks for one."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if (several or group) and not dist.is_initialized():
        global _store, _kept, _host_group
        timeout = timedelta(minutes=timeout_minutes)
        store, rank, world_size = dist.HashStore(), 0, 1
        if several:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            _kept = store if _agent_keeps_it() else None
            # torchrun keeps its store when it starts the ranks again: what those before them wrote there, addresses too, must not be read.
            store = dist.PrefixStore(f"attempt-{restarts()}", store)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
        _store = dist.PrefixStore("notes", store)
        _host_group = dist.new_group(backend="gloo", timeout=PATIENCE)  # ranks evaluate for unequal times
        if several and _on_loss is not None:
            global _watch
            _watch = _Watch(_on_loss)
    return device


def stop() -> None:
    """Leave the process group. Where an error ends this rank, others may never come to theirs, and taking the group down may wait for them:
    not for long, then."""
    global _watch
    if not dist.is_initialized() or _lost:
        return
    if _watch is not None and not isinstance(sys.exception(), Exception):
        _watch.goodbye()
    _watch = None
    ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
    ending.start()
    ending.join(timeout=10.0)


@contextmanager
def leaving() -> Iterator[None]:
    """Around a command that a process is there for. A thread that still waits for another rank's goodbye, as where an error ends them all, would be told
    of that rank's end while the interpreter takes itself down, which aborts the process: it ends without that, with the same code."""
    try:
        yield
    except SystemExit as end:
        if any(thread.name == _Watch.NAME for thread in threading.enumerate()):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def watch(on_loss: Callable[[str], None] | None) -> None:
    """From the next `start` on, have this called in a thread of its own, with torch's word for it, when another rank is gone without a goodbye.

    A main thread that waits for a GPU hears of nothing: the GPU waits for the lost rank, and no signal is handled in between.
    """
    global _on_loss
    _on_loss = on_loss


class _Watch:
    """Every rank waits for the goodbye of the one behind it, in a group of its own; those are a ring, so a loss reaches all of them."""

    NAME = "ranks"

    def __init__(self, on_loss: Callable[[str], None]):
        self.group, self.on_loss, self.leaving = dist.new_group(backend="gloo", timeout=PATIENCE), on_loss, False
        self.thread = threading.Thread(target=self._wait, name=self.NAME, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        try:
            dist.recv(torch.empty(1), src=(rank() + 1) % world_size(), group=self.group)
        except Exception as error:
            if not self.leaving:
                self.on_loss(str(error).splitlines()[0])

    def goodbye(self) -> None:
        self.leaving = True
        with suppress(RuntimeError):
            dist.send(torch.empty(1), dst=(rank() - 1) % world_size(), group=self.group)
        self.thread.join(timeout=5.0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def met() -> bool:
    """Whether this process has joined the others."""
    return dist.is_initialized()


def is_rank0() -> bool:
    return rank() == 0


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """In-place sum over all ranks; the tensor itself when there is one rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def restarts() -> int:
    """How often torchrun has started this job again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def begin(what: str) -> None:
    """Note that this job has begun something, for `goes_on` of the ranks that torchrun may start after these."""
    if (store := _kept_store()) is not None:
        store.set(f"begun/{what}", "")


def goes_on(what: str) -> bool:
    """Whether torchrun has started this job again after it had begun this: a start that was refused has begun nothing. Where torchrun keeps no store
    that could tell, every job that is started again goes on."""
    if not restarts():
        return False
    store = _kept_store()
    return store is None or store.check([f"begun/{what}"])


def _agent_keeps_it() -> bool:
    """Whether the store is that of torchrun, which lives as long as the job, and not rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _kept_store() -> dist.Store | None:
    global _kept
    if _kept is None and _agent_keeps_it() and os.environ.get("WORLD_SIZE") == "1":  # one process has joined nobody
        _kept = next(dist.rendezvous("env://", timeout=timedelta(minutes=1)))[0]
    return _kept


def any_rank(flag: bool) -> bool:
    """Whether the flag is up on any rank; the same answer on all of them. On the host alone."""
    if not dist.is_initialized():
        return flag
    raised = torch.tensor([int(flag)])
    dist.all_reduce(raised, dist.ReduceOp.MAX, group=_host_group)
    return bool(raised)


def from_all_ranks(value: Any) -> list[Any]:
    """Every rank's value, by rank. On the host alone."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_host_group)
    return values


def meet() -> None:
    """A barrier on the host alone, for work that ranks do alone and that may take hours: unlike the device's collectives it does not time out after
    engine.timeout_minutes, hears requests to stop, and fails as soon as another rank has ended."""
    if not dist.is_initialized():
        return
    waiting = dist.barrier(group=_host_group, async_op=True)
    while not waiting.is_completed():
        time.sleep(0.05)  # a signal is handled between two of these, and not while a collective blocks
    waiting.wait()


def leave_note(name: str, text: str) -> None:
    """For whoever reads it, as long as torchrun lives; nothing without a process group."""
    if _store is not None:
        with suppress(RuntimeError):  # the store may have died with its host
            _store.set(f"note/{name}/{rank()}", text.encode())


def read_note(name: str, of_rank: int, *, seconds: float) -> str | None:
    """A rank's note, waiting for it; None if there is none in that time."""
    if _store is None:
        return None
    key = f"note/{name}/{of_rank}"
    with suppress(RuntimeError):
        _store.wait([key], timedelta(seconds=seconds))
        return _store.get(key).decode()
    return None


def first(name: str) -> bool:
    """Whether no rank has asked this before, under the name."""
    if _store is None:
        return True
    try:
        return _store.add(f"first/{name}", 1) == 1
    except RuntimeError:
        return True


LOST = ("gloo", "connection closed by peer", "connection reset by peer", "broken pipe", "nccl")


def is_lost(error: BaseException) -> bool:
    """Whether an error means that another rank is gone or does not answer."""
    if not dist.is_initialized():
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in LOST)
    )


def give_up() -> None:
    """A rank is lost: from here on nothing is asked of the group, and its end is not waited for."""
    global _lost
    _lost = True


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank. On the host alone."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_host_group)
    return box[0]
