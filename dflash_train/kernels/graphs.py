"""CUDA graphs: what waits for the device is found before it is recorded, since torch's allocator does not survive a recording that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

Body = Callable[[], None]


class Graphs:
    """Records bodies on a stream of its own, into memory of their own. Graphs are replayed in the order in which they were recorded, or none of them
    while what another one left is still wanted: they share that memory."""

    def __init__(self, device: torch.device):
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def rehearse(self, body: Body) -> str | None:
        """Run a body where it will be recorded, so that what is compiled and planned at a first call is so then; why it cannot be recorded, by torch's own
        detector, or None."""
        here = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            body()
            body()
            found = waits(body)
        here.wait_stream(self.stream)
        return found

    def record(self, body: Body) -> Body:
        """What runs a body that was rehearsed again, on the same memory. Raises ValueError where that cannot be after all; the process is no good
        for much then."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may pin memory meanwhile, and NCCL's looks after its work.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                body()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = error.__context__ or error  # the error of leaving the recording hides the one that ended it
            raise ValueError(
                f"a CUDA graph could not be recorded: {_line(first)}; engine.cuda_graphs=false trains without"
            ) from error
        return graph.replay


def waits(body: Body) -> str | None:
    """What of a body's work waits for the device, as torch says it; None where nothing does."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that it does not find everything
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        body()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return _line(error)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
