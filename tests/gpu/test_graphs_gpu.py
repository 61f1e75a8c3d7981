"""What waits for the device is found before it is recorded, and a recording replays what was recorded."""

from __future__ import annotations

import pytest
import torch

from dflash_train.kernels.graphs import Graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_a_body_that_waits_is_not_recorded_and_leaves_the_allocator_whole():
    graphs, x = Graphs(torch.device("cuda", 0)), torch.ones(4, device="cuda")
    assert "synchroniz" in graphs.rehearse(lambda: x.add_(float(x.sum())))
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.empty_cache()
    x.fill_(1.0)
    assert graphs.rehearse(lambda: x.mul_(2)) is None
    assert x.tolist() == [8.0] * 4
    replay = graphs.record(lambda: x.mul_(2))
    replay(), replay()
    assert x.tolist() == [32.0] * 4
    torch.cuda.empty_cache()
