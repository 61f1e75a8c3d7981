"""A target on a GPU of its own feeds the drafter what one beside it would."""

from __future__ import annotations

import pytest
import torch
import toys

from dflash_train.clock import Clock
from dflash_train.config.schema import ObjectiveConfig
from dflash_train.drafter.model import Drafter
from dflash_train.feed import Feed
from dflash_train.method import DraftStep
from dflash_train.target.elsewhere import Elsewhere
from dflash_train.target.hf import HFTarget

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize("read_ahead", [False, True])
def test_it_trains_what_one_gpu_trains(read_ahead):
    """In fp32, eight steps: that no step works on what another one is still being read into."""
    spec = toys.toy_spec(head_dim=32)
    rows = [toys.document(128, slice(2 + i, None), name=f"d{i}", seed=i) for i in range(5)]
    found = []
    for place in (HERE, THERE):
        target = HFTarget(toys.toy_model().to(place), toys.toy_info(), spec.target_layer_ids)
        placed = target if place == HERE else Elsewhere(target, HERE)
        drafter = toys.randomise(Drafter(spec), scale=0.05).to(HERE)
        step = DraftStep(drafter, placed, ObjectiveConfig(), dtype=torch.float32)
        stream = toys.stream_of(rows, num_anchors=16)
        engine = toys.toy_engine(step, stream.micro_batches_per_rank(1))
        losses = []
        with Feed(stream, placed, HERE, Clock(HERE), end=8, read_ahead=read_ahead) as feed:
            for n in range(8):
                weight = torch.tensor(sum(b.weight for b in feed.batches(n)), device=HERE)
                for batch, features in feed.step(n):
                    report = engine.forward(batch, features, weight)
                    engine.backward(report.loss)
                    losses.append(report.loss.detach())
                engine.update(1e-3)
        found.append(torch.stack(losses).cpu())
    assert torch.allclose(*found, rtol=1e-6, atol=0.0)
